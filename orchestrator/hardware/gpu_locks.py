"""Assignment of GPUs to runs: one lock file a GPU in `$KGORCH_HOME/devices`.

The session's supervisor holds the locks and passes the open files on to the processes that train for it. So a GPU is locked as
long as any process of the session lives, and free when none does, however it ended.

Runs with `session.share = true` lock their GPUs together (LOCK_SH); any other run has its GPUs for itself (LOCK_EX). Runs of
another state folder, and programs that do not use kgorch, are not known here. Without a driver nothing is locked.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import os
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

from kgorch.core import cuda_visible
from kgorch.errors import KgorchError
from kgorch.hardware import nvml
from kgorch.system.file_lock import is_file_at

VISIBLE, ORDER = cuda_visible.VARIABLE, "CUDA_DEVICE_ORDER"


NO_VARIABLES: Mapping[str, str] = MappingProxyType({})


class GpusUnavailable(KgorchError):
    """The GPUs that a session needs are locked by others."""

    error_code = "KG305"


class GpusUnlisted(GpusUnavailable):
    """The driver does not answer: nobody can tell which GPUs are free."""


class LockOwner(Protocol):
    """Who locks GPUs: a run, or the check of a plan that has no run yet."""

    @property
    def name(self) -> str: ...
    @property
    def id(self) -> str: ...


class LockableGpu(NamedTuple):
    """A GPU, or a MIG instance, as one lock covers it.

    Attributes:
        name: of the lock: the UUID where the driver reports it.
        visible: its entry in CUDA_VISIBLE_DEVICES.
    """

    name: str
    visible: str


class GpuLocks:
    """The locked GPUs of a session.

    Attributes:
        devices: in the order in which CUDA sees them.
        descriptors: of the lock files; child processes inherit them open, and so hold the same locks.
        variables: CUDA's variables of the environment by which a child process sees these GPUs alone.
    """

    def __init__(
        self,
        devices: Sequence[LockableGpu] = (),
        descriptors: Sequence[int] = (),
        home: Path | None = None,
        *,
        share: bool = False,
        variables: Mapping[str, str] = NO_VARIABLES,
    ) -> None:
        self.devices, self.descriptors, self.variables = tuple(devices), list(descriptors), variables
        self._home, self._lock = home, fcntl.LOCK_SH if share else fcntl.LOCK_EX
        self._waiting: list[threading.Thread] = []
        self._listing, self._is_listed = threading.Lock(), True

    @property
    def environ(self) -> Mapping[str, str]:
        """This process's environment with `variables`: for child processes, and for queries of these GPUs (devices.py).

        A value instead of a change of os.environ: that would outlive the session in this process, and whoever counted GPUs
        before the change and after it would get two answers.
        """
        return {**os.environ, **self.variables}

    def refresh(self) -> None:
        """Lock again where the lock files were deleted, unless another session was quicker; list GPUs that are not yet known."""
        with contextlib.suppress(OSError):
            self._await_listed()
        if self._home is None or any(thread.is_alive() for thread in self._waiting):
            return
        for index, device in enumerate(self.devices):
            if is_file_at(self.descriptors[index], _lock_path(self._home, device)):
                continue
            with contextlib.suppress(OSError):  # a disk that is full or read-only just now: the next call tries again
                descriptor = _open_lock(self._home, device)
                if not _try(descriptor, self._lock):
                    os.close(descriptor)
                    continue
                os.close(self.descriptors[index])
                self.descriptors[index] = descriptor

    def await_locks(self) -> None:
        """Wait for the locks on threads, in the kernel's queue: between two holders there is no gap for a third."""
        for descriptor in self.descriptors:
            thread = threading.Thread(target=_wait_for, args=(descriptor, self._lock), name="device", daemon=True)
            thread.start()
            self._waiting.append(thread)

    def await_listed(self, home: Path) -> None:
        """As `await_locks`, for the GPUs that are visible in `environ`.

        While the driver does not answer there are none: `refresh` and `check` query it again. Raises: OSError of a lock file.
        """
        self._home, self._is_listed = home, False
        with contextlib.suppress(nvml.DriverUnresponsive):
            self._await_listed()

    def _await_listed(self) -> None:
        """Raises: DriverUnresponsive, OSError."""
        with self._listing, contextlib.ExitStack() as opened:
            if self._is_listed or self._home is None:
                return
            devices, descriptors = _query_visible(self.environ), list[int]()
            for device in devices:
                descriptors.append(_open_lock(self._home, device))
                opened.callback(os.close, descriptors[-1])
            opened.pop_all()
            self.descriptors, self.devices, self._is_listed = descriptors, tuple(devices), True
            self.await_locks()

    def check(self, *, timeout_s: float = 5.0) -> None:
        """Check before a launch that the awaited locks are ours.

        Raises: GpusUnavailable when another was quicker, or the driver does not answer; OSError of a lock file.
        """
        try:
            self._await_listed()
        except nvml.DriverUnresponsive as error:
            raise _unlisted(error, "run nvidia-smi to see what is wrong") from None
        for thread in self._waiting:
            thread.join(timeout_s)
        if any(thread.is_alive() for thread in self._waiting):
            raise GpusUnavailable(
                "another session has locked the GPUs of this session", next_step="kgorch queue    (shows what runs)"
            )

    def release(self) -> None:
        """Close the lock files here; child processes that inherited them hold the locks on."""
        while self.descriptors:
            os.close(self.descriptors.pop())


def resource_request(plan: Any) -> dict[str, Any]:
    """What a plan needs of a machine, as the queue stores it. `ranks`: None for one a visible GPU."""
    ranks = [stage.ranks for stage in plan.stage]
    most = None if "auto" in ranks else max(ranks)
    mirrored = plan.checkpoint.mirror is not None
    return {"priority": plan.session.priority, "ranks": most, "share": plan.session.share, "mirrored": mirrored}


def visible_gpus(environ: Mapping[str, str] = os.environ) -> list[LockableGpu]:
    """The GPUs that CUDA would see here, in its order; none without a driver, or while it does not answer."""
    with contextlib.suppress(nvml.DriverUnresponsive):
        return _query_visible(environ)
    return []


def _query_visible(environ: Mapping[str, str]) -> list[LockableGpu]:
    """Raises: DriverUnresponsive."""
    text = environ.get(VISIBLE)
    if cuda_visible.parse(text, None).is_hidden:
        return []

    def ask() -> list[LockableGpu]:
        with nvml.library() as lib:
            gpus = cuda_visible.parse(text, nvml.gpu_uuids(lib)).gpus
        answering = [gpu for gpu in gpus if gpu.uuid or gpu.is_mig]
        if answering and len(answering) < len(gpus):
            # a GPU that is lost, or forbidden here, is nobody's; and CUDA counts without it, so the others go by their UUIDs
            return [_lockable(dataclasses.replace(gpu, entry=gpu.uuid)) for gpu in answering]
        return [_lockable(gpu) for gpu in gpus]

    return nvml.query(ask) or []


def acquire(home: Path, run: LockOwner, request: Mapping[str, Any]) -> GpuLocks:
    """Lock the GPUs of a session that opens.

    Args:
        request: as `resource_request` returns it.
    Raises: GpusUnavailable, also while the driver does not answer, since then nobody can tell which GPUs are free; OSError.
    """
    try:
        universe = _query_visible(os.environ)
    except nvml.DriverUnresponsive as error:
        raise _unlisted(error, f"run nvidia-smi to see what is wrong; then kgorch resume {run.name}") from None
    # CPU runs have nothing to lock: how many run at once is the queue's limit
    if not universe or request["ranks"] == 0:
        return GpuLocks()
    count = len(universe) if request["ranks"] is None else min(request["ranks"], len(universe))
    share = request["share"]
    devices, descriptors = _lock(home, universe, count, share=share)
    locks = GpuLocks(devices, descriptors, home, share=share, variables=cuda_variables(devices, universe))
    if len(devices) < count:
        locks.release()
        raise _unavailable(home, run, universe, count)
    _write_owner(home, devices, run)
    return locks


def reacquire(home: Path, launched_with: str | None, *, share: bool) -> GpuLocks:
    """The GPUs of a living training that is adopted: locked as soon as it releases them, should it be launched again.

    Args:
        launched_with: the CUDA_VISIBLE_DEVICES that it was launched with; None if it was not set.
    Raises: OSError of a lock file.
    """
    # whatever counts the GPUs of the session must see those that the training has
    variables = NO_VARIABLES if launched_with is None else {VISIBLE: launched_with}
    locks = GpuLocks(share=share, variables=variables)
    locks.await_listed(home)
    return locks


def count_free_and_shared(home: Path, universe: Iterable[LockableGpu]) -> tuple[int, int]:
    """Numbers of GPUs that nobody has locked, and that runs share."""
    free = shared = 0
    for device in universe:
        match _mode(_lock_path(home, device)):
            case "free":
                free += 1
            case "shared":
                shared += 1
    return free, shared


def cuda_variables(
    devices: Sequence[LockableGpu], universe: Sequence[LockableGpu], environ: Mapping[str, str] = os.environ
) -> dict[str, str]:
    """Variables with which CUDA, and all that queries the driver, sees these GPUs alone.

    CUDA_DEVICE_ORDER becomes PCI_BUS_ID, also where the user has set FASTEST_FIRST and where no GPU is left out: these locks,
    the memory monitor and telemetry use NVML's order, by the PCI bus, and GPU 0 must be the same one for all of them. The
    user's own CUDA_VISIBLE_DEVICES is rewritten without blanks: not every reader of it accepts them before a UUID.
    """
    variables = {ORDER: "PCI_BUS_ID"}
    if len(devices) < len(universe) or VISIBLE in environ or not all(device.visible.isdigit() for device in devices):
        variables[VISIBLE] = ",".join(device.visible for device in devices)
    return variables


def _lock(
    home: Path, universe: Sequence[LockableGpu], count: int, *, share: bool
) -> tuple[list[LockableGpu], list[int]]:
    """Lock up to `count` GPUs, free ones before those that others share; in the order of `universe`."""
    descriptors: dict[LockableGpu, int] = {}
    # a run that shares takes GPUs that nobody uses first, and joins other sharers in a second pass
    for only_free in (True, False) if share else (False,):
        for device in universe:
            if (
                len(descriptors) == count
                or device in descriptors
                or (only_free and _mode(_lock_path(home, device)) != "free")
            ):
                continue
            descriptor = _open_lock(home, device)
            mode = fcntl.LOCK_SH if share else fcntl.LOCK_EX
            # a file that was deleted between open and flock would exclude nobody
            if _try(descriptor, mode) and is_file_at(descriptor, _lock_path(home, device)):
                descriptors[device] = descriptor
            else:
                os.close(descriptor)
    ours = [device for device in universe if device in descriptors]
    return ours, [descriptors[device] for device in ours]


def _try(descriptor: int, lock: int) -> bool:
    """Three attempts: a process that only tests the lock holds it for an instant."""
    for _ in range(3):
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(descriptor, lock | fcntl.LOCK_NB)
            return True
        time.sleep(0.01)
    return False


def _unlisted(error: nvml.DriverUnresponsive, next_step: str) -> GpusUnlisted:
    what = "the GPUs of this machine cannot be listed: the driver does not answer"
    return GpusUnlisted(what, str(error), next_step=next_step)


def _unavailable(home: Path, run: LockOwner, universe: Sequence[LockableGpu], count: int) -> GpusUnavailable:
    facts = []
    for device in universe:
        if (mode := _mode(_lock_path(home, device))) != "free":
            owner = _owner_of(_lock_path(home, device))
            shares = " (shared)" if mode == "shared" else ""
            facts.append(f"GPU {device.visible} is locked by {owner.get('run', 'another session')}{shares}")
    needs = f"{count} GPU{'s' if count > 1 else ''}"
    return GpusUnavailable(
        f"{run.name} needs {needs} of {len(universe)}, and {'they are' if count > 1 else 'it is'} not free",
        *facts,
        next_step=f"kgorch queue add {run.name}    (the daemon starts it when GPUs are free), or stop a run with kgorch stop",
    )


def _mode(path: Path) -> str:
    """free, shared or taken."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return "free"
    try:
        # in this order: LOCK_SH succeeds on a free lock, too
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


def _open_lock(home: Path, device: LockableGpu) -> int:
    folder = home / "devices"
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    return os.open(_lock_path(home, device), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)


def _lock_path(home: Path, device: LockableGpu) -> Path:
    return home / "devices" / f"{device.name}.lock"


def _write_owner(home: Path, devices: Iterable[LockableGpu], run: LockOwner) -> None:
    """Name the owner in the lock files, for messages; the lock itself shows whether the owner still lives."""
    for device in devices:
        with contextlib.suppress(OSError):  # a full disk costs a name in a message, not the session
            _lock_path(home, device).write_text(json.dumps({"run": run.name, "run_id": run.id}))


def _owner_of(path: Path) -> dict[str, Any]:
    try:
        owner = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return owner if isinstance(owner, dict) else {}


def _lockable(gpu: cuda_visible.VisibleGpu) -> LockableGpu:
    name = gpu.entry if gpu.is_mig else gpu.uuid or str(gpu.index)
    # the name of a MIG instance may contain slashes
    return LockableGpu("".join(letter if letter.isalnum() or letter in "-_." else "_" for letter in name), gpu.entry)
