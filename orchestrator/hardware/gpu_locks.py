"""Which run has which GPU: a lock a device in `$KGORCH_HOME/devices`, held by the session's supervisor and, handed on open, by what
trains for it. So it is held as long as anything of the session lives, and free when nothing does, however it ended.

A run that shares takes the locks beside others that do; any other has its devices for itself. Runs of another state folder are
not known here, nor is anybody's who does not use kgorch. Where the driver shows no GPU nothing is claimed.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from orchestrator.core import cuda_visible
from orchestrator.errors import KgorchError
from orchestrator.hardware import nvml
from orchestrator.system.paths import lies_at

VISIBLE, ORDER = cuda_visible.VARIABLE, "CUDA_DEVICE_ORDER"


class DevicesHeld(KgorchError):
    """The GPUs that a session needs belong to others."""


class Holder(Protocol):
    """Who is to hold devices: a run, or a check of one that is not begun."""

    @property
    def name(self) -> str: ...
    @property
    def id(self) -> str: ...


class Device(NamedTuple):
    """`name`: of its lock, the UUID where the driver tells it; `visible`: what CUDA_VISIBLE_DEVICES calls it."""

    name: str
    visible: str


class Claim:
    """The locks of a session. Several processes hold the same ones: `descriptors` are handed on open."""

    def __init__(
        self,
        devices: Sequence[Device] = (),
        descriptors: Sequence[int] = (),
        home: Path | None = None,
        *,
        share: bool = False,
    ) -> None:
        self.devices, self.descriptors = tuple(devices), list(descriptors)
        self._home, self._lock = home, fcntl.LOCK_SH if share else fcntl.LOCK_EX
        self._awaited: list[threading.Thread] = []

    def hold(self) -> None:
        """Lock them again where somebody has deleted the files of the locks, unless another session was quicker."""
        if self._home is None or any(thread.is_alive() for thread in self._awaited):
            return
        for index, device in enumerate(self.devices):
            if lies_at(self.descriptors[index], _path(self._home, device)):
                continue
            with contextlib.suppress(OSError):  # a disk that is full or read-only just now: the next look tries again
                descriptor = _opened(self._home, device)
                if not _try(descriptor, self._lock):
                    os.close(descriptor)
                    continue
                os.close(self.descriptors[index])
                self.descriptors[index] = descriptor

    def await_locks(self) -> None:
        """Stand in line for them, in the kernel: between two who hold them there is no gap for a third."""
        for descriptor in self.descriptors:
            thread = threading.Thread(target=_wait_for, args=(descriptor, self._lock), name="device", daemon=True)
            thread.start()
            self._awaited.append(thread)

    def check(self, *, patience_s: float = 5.0) -> None:
        """Before a launch. Raises: DevicesHeld when another was quicker."""
        for thread in self._awaited:
            thread.join(patience_s)
        if any(thread.is_alive() for thread in self._awaited):
            raise DevicesHeld("the GPUs of this session belong to another one by now", next_step="kgorch queue")

    def release(self) -> None:
        while self.descriptors:
            os.close(self.descriptors.pop())


def wants(plan: Any) -> dict[str, Any]:
    """What a plan wants of a machine, as the queue keeps it. `ranks`: None for one a visible GPU."""
    ranks = [stage.ranks for stage in plan.stage]
    most = None if "auto" in ranks else max(ranks)
    return {"priority": plan.session.priority, "ranks": most, "share": plan.session.share}


def visible(environ: Mapping[str, str] = os.environ) -> list[Device]:
    """The GPUs that CUDA would see here, in its order; none without a driver, or while it is silent."""
    with contextlib.suppress(nvml.DriverSilent):
        return _seen(environ)
    return []


def _seen(environ: Mapping[str, str]) -> list[Device]:
    """Raises: DriverSilent."""
    text = environ.get(VISIBLE)
    if cuda_visible.parse(text, None).is_hidden:
        return []

    def ask() -> list[Device]:
        with nvml.opened() as lib:
            return [_device(gpu) for gpu in cuda_visible.parse(text, nvml.uuids_of(lib)).gpus]

    return nvml.asked(ask) or []


def take(home: Path, run: Holder, wanted: Mapping[str, Any]) -> Claim:
    """The devices of a session that opens; what it launches from now on sees those alone.

    Raises: DevicesHeld, also while the driver is silent: nobody can say then whose is what; OSError.
    """
    try:
        universe = _seen(os.environ)
    except nvml.DriverSilent as error:
        raise DevicesHeld(
            "which GPUs there are cannot be told just now",
            str(error),
            next_step=f"see what nvidia-smi says; then kgorch resume {run.name}",
        ) from None
    if not universe or wanted["ranks"] == 0:
        return Claim()
    count = len(universe) if wanted["ranks"] is None else min(wanted["ranks"], len(universe))
    claim = Claim(*_locked(home, universe, count, share=wanted["share"]), home, share=wanted["share"])
    if len(claim.devices) < count:
        claim.release()
        raise _held(home, run, universe, count)
    _say_whose(home, claim.devices, run)
    show_only(claim.devices, universe)
    return claim


def take_again(home: Path, told: str | None, *, share: bool) -> Claim:
    """Those of a living training that is taken over: ours as soon as it lets go of them, should it be launched again.

    Args:
        told: the CUDA_VISIBLE_DEVICES that it was launched with.
    """
    if told is not None:
        os.environ[VISIBLE] = told
    mine = visible()
    claim = Claim(mine, [_opened(home, device) for device in mine], home, share=share)
    claim.await_locks()
    return claim


def states(home: Path, universe: Iterable[Device]) -> tuple[int, int]:
    """How many devices are nobody's, and how many of such as share."""
    free = shared = 0
    for device in universe:
        match _mode(_path(home, device)):
            case "free":
                free += 1
            case "shared":
                shared += 1
    return free, shared


def show_only(devices: Sequence[Device], universe: Sequence[Device]) -> None:
    """Have CUDA, and all that asks the driver, see these alone: in this process and what it starts.

    CUDA_DEVICE_ORDER becomes PCI_BUS_ID, also where a person has set FASTEST_FIRST and where no GPU is left out: the locks here,
    the memory watch and telemetry count as NVML does, by the PCI bus, and GPU 0 must be the same one to all of them. A person's
    own CUDA_VISIBLE_DEVICES is written anew, without blanks: not every reader of it takes them before a UUID.
    """
    os.environ[ORDER] = "PCI_BUS_ID"
    if len(devices) < len(universe) or VISIBLE in os.environ:
        os.environ[VISIBLE] = ",".join(device.visible for device in devices)


def _locked(home: Path, universe: Sequence[Device], count: int, *, share: bool) -> tuple[list[Device], list[int]]:
    """As many as can be had, free ones before those that others share; in the universe's order."""
    chosen: dict[Device, int] = {}
    for only_free in (True, False) if share else (False,):
        for device in universe:
            if len(chosen) == count or device in chosen or (only_free and _mode(_path(home, device)) != "free"):
                continue
            descriptor = _opened(home, device)
            lock = fcntl.LOCK_SH if share else fcntl.LOCK_EX
            if _try(descriptor, lock) and lies_at(descriptor, _path(home, device)):
                chosen[device] = descriptor
            else:
                os.close(descriptor)
    ours = [device for device in universe if device in chosen]
    return ours, [chosen[device] for device in ours]


def _try(descriptor: int, lock: int) -> bool:
    """Three times: who only asks whether it is held holds it for an instant."""
    for _ in range(3):
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(descriptor, lock | fcntl.LOCK_NB)
            return True
        time.sleep(0.01)
    return False


def _held(home: Path, run: Holder, universe: Sequence[Device], count: int) -> DevicesHeld:
    facts = []
    for device in universe:
        if (mode := _mode(_path(home, device))) != "free":
            whose = _whose(_path(home, device))
            shares = ", which shares it" if mode == "shared" else ""
            facts.append(f"GPU {device.visible} is {whose.get('run', 'another session')}'s{shares}")
    needs = f"{count} GPU{'s' if count > 1 else ''}"
    return DevicesHeld(
        f"{run.name} needs {needs} of {len(universe)}, and {'they are' if count > 1 else 'it is'} not free",
        *facts,
        next_step=f"kgorch queue add {run.name} has the daemon begin it when there is room; or kgorch stop what runs",
    )


def _mode(path: Path) -> str:
    """free, shared or taken."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return "free"
    try:
        for lock, mode in ((fcntl.LOCK_EX, "free"), (fcntl.LOCK_SH, "shared")):
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(descriptor, lock | fcntl.LOCK_NB)
                return mode
        return "taken"
    finally:
        os.close(descriptor)


def _wait_for(descriptor: int, lock: int) -> None:
    with contextlib.suppress(OSError):  # closed meanwhile: the session is over
        fcntl.flock(descriptor, lock)


def _opened(home: Path, device: Device) -> int:
    folder = home / "devices"
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    return os.open(_path(home, device), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)


def _path(home: Path, device: Device) -> Path:
    return home / "devices" / f"{device.name}.lock"


def _say_whose(home: Path, devices: Iterable[Device], run: Holder) -> None:
    """For people, and for who takes the session over; the lock itself says whether it still holds."""
    for device in devices:
        with contextlib.suppress(OSError):
            _path(home, device).write_text(json.dumps({"run": run.name, "run_id": run.id}))


def _whose(path: Path) -> dict[str, Any]:
    try:
        told = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return told if isinstance(told, dict) else {}


def _device(gpu: cuda_visible.VisibleGpu) -> Device:
    name = gpu.entry if gpu.is_mig else gpu.uuid or str(gpu.index)
    return Device("".join(letter if letter.isalnum() or letter in "-_." else "_" for letter in name), gpu.entry)
