"""Probes of a plan's stages: a few steps of each, one stage after another, launched as a session would launch it.

The launches have a keeper and a folder of their own beside the runs. What is measured is what a run would do, with its shim, its
keeper and its SDK (DECISIONS.md, "A check launches the stages as a session would"). Nothing stays on disk.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

from kgorch.core.codes import RankOutcome
from kgorch.core.memory.memory_ladder import Settings
from kgorch.core.session.attempt_outcome import RankRecord
from kgorch.errors import ExitCode, KgorchError, StateUnusable
from kgorch.hardware import devices
from kgorch.hardware.gpu_locks import GpuLocks
from kgorch.launch import launcher
from kgorch.plan import Plan, StageSection
from kgorch.preflight import foreign_probe
from kgorch.protocol.launch_spec import LaunchSpec
from kgorch.protocol.run_files import CACHE_FOLDER, KEEPER_SOCKET
from kgorch.snapshots import keeper_client
from kgorch.system.clock import boottime_s

SECONDS = 20.0
"""Seconds for the trials of all stages together; a step that has begun is finished."""

TRIES_SMALLER = 3
"""Further launches of a stage after one that the kernel has killed for want of memory."""

LADDER = ["microbatch/2", "activation_checkpointing"]


class ProbeFailed(KgorchError):
    """A stage of the plan does not get through a few steps."""

    code = ExitCode.FAILED


class StageProbe(NamedTuple):
    """What the probe of one stage has measured.

    Attributes:
        ranks: how many were started.
        device: the model of the GPUs that they saw, or "cpu" (devices.model_name).
        settings: the memory settings of the launch that got through: a smaller microbatch than the plan's, perhaps.
        startup_s: seconds from the launch to the first step, or to attach() where no step was taken.
        lasted_s: seconds that the launch took as a whole.
        measurements: of the ranks (worker/probe/probe.py); {} for a stage that never attached.
    """

    stage: StageSection
    ranks: int
    device: str
    settings: Settings
    startup_s: float
    lasted_s: float
    measurements: dict[str, Any]


@dataclass(frozen=True, slots=True)
class ProbeSite:
    """Where the stages of a plan are probed.

    Attributes:
        plan: whose stages they are.
        workdir: the plan's folder, in which entries are started.
        root: a folder of the probes alone (`probe_folder`). A stage finds the checkpoints of those probed before it there.
        gpus: that the ranks see.
    """

    plan: Plan
    workdir: Path
    root: Path
    gpus: GpuLocks = field(default_factory=GpuLocks)


@dataclass(frozen=True, slots=True)
class ProbeLimits:
    """What a probe may use, and what it assumes.

    Attributes:
        memory: bytes that a rank may come to hold; None for as much as there is.
        gpu: what is assumed of a GPU that is not here (core/forecast/machines.py): nothing is computed then.
            None for this machine's.
    """

    memory: int | None = None
    gpu: Mapping[str, float] | None = None


class _ProbeLaunch(NamedTuple):
    """One of the launches that the probe of a stage may take.

    Attributes:
        number: from 0.
        settings: of memory.
        killed: microbatch and activation checkpointing of the launches that were killed for want of memory.
    """

    number: int
    ranks: int
    settings: Settings
    killed: Sequence[tuple[int, bool]]


@contextlib.contextmanager
def probe_folder(home: Path) -> Iterator[Path]:
    """A folder for a ProbeSite, removed when the block ends. It is on the disk where checkpoints would be.

    Raises: StateUnusable.
    """
    with _signals_as_exit():
        try:
            home.mkdir(parents=True, exist_ok=True)
            root = Path(tempfile.mkdtemp(prefix=".check-", dir=home))
        except OSError as error:
            raise StateUnusable(
                f"{home} cannot be written", str(error), next_step="point KGORCH_HOME at a folder that can be written"
            ) from None
        try:
            yield root
        finally:
            keeper_client.end(root, timeout_s=5.0)
            shutil.rmtree(root, ignore_errors=True)


@contextlib.contextmanager
def _signals_as_exit() -> Iterator[None]:
    """Make SIGTERM and SIGHUP raise SystemExit: else the launches would live on, and the folder would stay."""

    def end(number: int, frame: FrameType | None) -> None:
        for other in before:
            signal.signal(other, signal.SIG_IGN)  # once is enough: removing the folder takes a moment
        raise SystemExit(128 + number)

    before: dict[int, Any] = {}
    if threading.current_thread() is threading.main_thread():
        before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
        before = {number: handler for number, handler in before.items() if handler == signal.SIG_DFL}  # not under nohup
    for number in before:
        signal.signal(number, end)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def probe(
    site: ProbeSite, stage: StageSection, limits: ProbeLimits = ProbeLimits(), *, patience_s: float
) -> StageProbe:
    """Take a few steps of `stage`. The stages before it must have been probed at the same site.

    Args:
        patience_s: seconds after which a launch is ended.
    Raises: ProbeFailed.
    """
    # of a foreign program there is one process to see, its agent
    ranks = 1 if stage.foreign else devices.rank_count(stage.ranks, site.gpus.environ)
    settings = site.plan.memory.settings
    killed: list[tuple[int, bool]] = []
    for number in range(TRIES_SMALLER + 1):
        began_s = boottime_s()
        try:
            launch = _launch_spec(site, stage, limits, _ProbeLaunch(number, ranks, settings, killed))
            processes = devices.rank_count(stage.ranks, site.gpus.environ)
            launch = replace(launch, **foreign_probe.launch_fields(stage, site.root, site.workdir, processes))
            is_over = _run(launch, site.gpus, patience_s)
        except OSError as error:
            raise ProbeFailed(f"stage {stage.name!r} cannot be launched", str(error)) from None
        if not is_over:
            raise ProbeFailed(
                f"stage {stage.name!r} did not complete its first steps within {patience_s / 60:.0f} minutes, and was ended",
                *_last_lines(Path(launch.folder, "rank0.log")),
                next_step="see whether it hangs; one that does not step through session.steps() is run as a whole",
            )
        records = launcher.records(Path(launch.folder), ranks)
        if len(records) == ranks and all(record.outcome is RankOutcome.FINISHED for record in records):
            return _read(launch, stage, settings, began_s, devices.model_name(site.gpus.environ))
        if not _lacked_memory(launch, records):
            break
        trial = _trial_under_way(launch)
        killed.append(trial or (settings.microbatch or 0, settings.activation_checkpointing))
        if trial is None:  # the plan's own setting, or the smaller one before
            smaller = max(1, (settings.microbatch or 64) // 4)
            if smaller == settings.microbatch:
                break
            settings = replace(settings, microbatch=smaller)
    raise ProbeFailed(
        f"stage {stage.name!r} does not get through its first steps",
        *_why(launch, records),
        next_step="correct the program; kgorch start would fail in the same way",
    )


def _launch_spec(site: ProbeSite, stage: StageSection, limits: ProbeLimits, launch: _ProbeLaunch) -> LaunchSpec:
    plan, root = site.plan, site.root
    return LaunchSpec(
        run=plan.name,
        run_id=root.name,
        stage=stage.name,
        # the keeper, which all stages share, tells launches apart by this name
        attempt=f"{[other.name for other in plan.stage].index(stage.name) + 1}.{launch.number}",
        folder=str(root / "attempts" / f"{stage.name}.{launch.number}"),
        entry=stage.entry,
        args=stage.args,
        argv=stage.argv,
        flags=stage.flags,
        launcher=stage.launcher,
        integration=stage.integration,
        workdir=str(site.workdir),
        ranks=launch.ranks,
        socket=str(root / "control.sock"),
        checkpoints=str(root / "checkpoints" / stage.name),
        output=str(root / "outputs"),
        cached=str(root / CACHE_FOLDER),
        plan_hash=plan.hash,
        seed=plan.seed,
        keeper=str(root / KEEPER_SOCKET),
        snapshot_s=plan.checkpoint.snapshot_s,
        memory_bytes=plan.checkpoint.memory,
        settings=launch.settings.as_dict(),
        ladder=LADDER,
        collective_timeout_s=plan.health.collective_timeout_s,
        deterministic=plan.deterministic,
        weights=stage.weights.model_dump() if stage.weights else None,
        quick=True,
        probe={
            "seconds": SECONDS / len(plan.stage),
            "memory": limits.memory,
            "killed": list(launch.killed),
            "gpu": limits.gpu,
        },
    )


def _run(launch: LaunchSpec, gpus: GpuLocks, patience_s: float) -> bool:
    """Start a launch and wait for its end. False when it was killed after `patience_s` seconds. Raises: OSError."""
    folder, until = Path(launch.folder), time.monotonic() + patience_s
    (Path(launch.checkpoints)).mkdir(parents=True, exist_ok=True)
    try:
        shim = launcher.start(launch, gpus)
        while shim.poll() is None:
            if time.monotonic() > until:
                return False
            time.sleep(0.05)
        return True
    finally:  # Ctrl-C, too
        launcher.kill(folder)


def _read(launch: LaunchSpec, stage: StageSection, settings: Settings, began_s: float, device: str) -> StageProbe:
    path = Path(launch.folder, "probe.json")
    measurements = json.loads(path.read_text()) if path.exists() else {}
    began = measurements.get("stepped_at_s") or measurements.get("attached_at_s") or began_s
    return StageProbe(stage, launch.ranks, device, settings, began - began_s, boottime_s() - began_s, measurements)


def _trial_under_way(launch: LaunchSpec) -> tuple[int, bool] | None:
    """Microbatch and activation checkpointing of the trial during which the launch ended; None for the plan's own steps."""
    try:
        microbatch, checkpointing = json.loads(Path(launch.folder, "probe.trying").read_text())
    except (OSError, ValueError):
        return None
    return int(microbatch), bool(checkpointing)


def _lacked_memory(launch: LaunchSpec, records: list[RankRecord]) -> bool:
    folder = Path(launch.folder)
    return any(record.memory for record in records) or (
        launcher.kernel_kills(folder) > 0 and launcher.was_sigkilled(folder)
    )


def _why(launch: LaunchSpec, records: list[RankRecord]) -> list[str]:
    """The first error that a rank itself has raised; else how torchrun ended, and the last lines of the logs."""
    folder = Path(launch.folder)
    own = [record for record in records if record.outcome is RankOutcome.FAILED and not record.is_collateral]
    first = min(own, key=lambda record: record.at_s, default=None)
    if first is None:
        lacked = _lacked_memory(launch, records)
        killed = ["the kernel killed it for want of memory, with smaller microbatches, too"] if lacked else []
        return [
            *killed,
            launcher.describe_exit(folder),
            *_last_lines(folder / "torchrun.log"),
            *_last_lines(folder / "rank0.log"),
        ]
    message = (first.message or "no message").splitlines()
    return [f"rank {first.rank}: {first.error_type}: {message[0]}", *(line for line in message[1:12] if line.strip())]


def _last_lines(path: Path, count: int = 5) -> list[str]:
    with contextlib.suppress(OSError):
        return path.read_text(errors="replace").splitlines()[-count:]
    return []
