"""Each stage of a plan in small, one after another, in processes of its own: launched as a session would launch it, with a
keeper and a folder of its own beside the runs, so that what is measured is what a run would meet. Nothing of it stays.
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
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

from orchestrator.core.attempt_outcome import RankRecord
from orchestrator.core.codes import RankOutcome
from orchestrator.core.memory_ladder import Settings
from orchestrator.errors import ExitCode, KgorchError, StateUnusable
from orchestrator.hardware import devices
from orchestrator.launch import launcher
from orchestrator.plan import Plan, StageSection
from orchestrator.protocol.launch_spec import LaunchSpec
from orchestrator.protocol.run_files import CACHE_FOLDER, KEEPER_SOCKET
from orchestrator.snapshots import keeper_client
from orchestrator.system.clock import boottime_s

SECONDS = 20.0
"""For the trials of all stages together; the steps under way are done."""

TRIES_SMALLER = 3
"""Launches with a smaller microbatch, once one has been killed for want of memory."""

LADDER = ["microbatch/2", "activation_checkpointing"]


class ProbeFailed(KgorchError):
    """A stage of the plan does not get through a few steps."""

    code = ExitCode.FAILED


class Probed(NamedTuple):
    """`found`: what the ranks measured (worker/probe.py), {} of a stage that never attached. `startup_s`, `lasted_s`: of its
    launch."""

    stage: StageSection
    ranks: int
    settings: Settings
    startup_s: float
    lasted_s: float
    found: dict[str, Any]


@contextlib.contextmanager
def folder_in(home: Path) -> Iterator[Path]:
    """A folder that is gone afterwards, on the disk where checkpoints would lie."""
    with _ended_in_order():
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
def _ended_in_order() -> Iterator[None]:
    """SIGTERM and SIGHUP end this process as Ctrl-C does: what it has started would live on, and its folder stay."""

    def end(number: int, frame: FrameType | None) -> None:
        for other in before:
            signal.signal(other, signal.SIG_IGN)  # once is enough: ending in order takes a moment
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
    plan: Plan, stage: StageSection, workdir: Path, root: Path, *, memory: int | None, patience_s: float,
    gpu: Mapping[str, float] | None = None,
) -> Probed:  # fmt: skip
    """A few steps of `stage`, whose predecessors have been probed in the same `root`.

    Args:
        memory: bytes that a rank may come to hold; None for as much as there is.
        gpu: what is assumed of one that is not here (core/machines.py): nothing is computed then.
    Raises: ProbeFailed.
    """
    ranks, settings, killed = devices.rank_count(stage.ranks), plan.memory.settings, list[tuple[int, bool]]()
    for number in range(TRIES_SMALLER + 1):
        launch = _launch(plan, stage, workdir, root, ranks, settings, memory, killed, number, gpu)
        began_s = boottime_s()
        try:
            over = _run(launch, patience_s)
        except OSError as error:
            raise ProbeFailed(f"stage {stage.name!r} cannot be launched", str(error)) from None
        if not over:
            raise ProbeFailed(
                f"stage {stage.name!r} was not through its first steps after {patience_s / 60:.0f} minutes, and was ended",
                *_last_lines(Path(launch.folder, "rank0.log")),
                next_step="see whether it hangs; one that does not step through session.steps() is run as a whole",
            )
        records = launcher.records(Path(launch.folder), ranks)
        if len(records) == ranks and all(record.outcome is RankOutcome.FINISHED for record in records):
            return _read(launch, stage, settings, began_s)
        if not _lacked_memory(launch, records):
            break
        tried = _tried(launch)
        killed.append(tried or (settings.microbatch or 0, settings.activation_checkpointing))
        if tried is None:  # the plan's own setting, or the smaller one before
            smaller = max(1, (settings.microbatch or 64) // 4)
            if smaller == settings.microbatch:
                break
            settings = replace(settings, microbatch=smaller)
    raise ProbeFailed(
        f"stage {stage.name!r} does not get through its first steps",
        *_why(launch, records),
        next_step="mend what is said there; `kgorch start` would end the same way",
    )


def _launch(
    plan: Plan, stage: StageSection, workdir: Path, root: Path, ranks: int, settings: Settings, memory: int | None,
    killed: Sequence[tuple[int, bool]], number: int, gpu: Mapping[str, float] | None,
) -> LaunchSpec:  # fmt: skip
    return LaunchSpec(
        run=plan.name,
        run_id=root.name,
        stage=stage.name,
        # the keeper, which they share, tells launches apart by it
        attempt=f"{[other.name for other in plan.stage].index(stage.name) + 1}.{number}",
        folder=str(root / "attempts" / f"{stage.name}.{number}"),
        entry=stage.entry,
        args=stage.args,
        workdir=str(workdir),
        ranks=ranks,
        socket=str(root / "control.sock"),
        checkpoints=str(root / "checkpoints" / stage.name),
        output=str(root / "outputs"),
        cached=str(root / CACHE_FOLDER),
        plan_hash=plan.hash,
        seed=plan.seed,
        keeper=str(root / KEEPER_SOCKET),
        snapshot_s=plan.checkpoint.snapshot_s,
        memory_bytes=plan.checkpoint.memory,
        settings=settings.as_dict(),
        ladder=LADDER,
        collective_timeout_s=plan.health.collective_timeout_s,
        deterministic=plan.deterministic,
        weights=stage.weights.model_dump() if stage.weights else None,
        quick=True,
        probe={"seconds": SECONDS / len(plan.stage), "memory": memory, "killed": list(killed), "gpu": gpu},
    )


def _run(launch: LaunchSpec, patience_s: float) -> bool:
    """False when it was not over after `patience_s`, and was ended. Raises: OSError."""
    folder, until = Path(launch.folder), time.monotonic() + patience_s
    (Path(launch.checkpoints)).mkdir(parents=True, exist_ok=True)
    try:
        shim = launcher.start(launch)
        while shim.poll() is None:
            if time.monotonic() > until:
                return False
            time.sleep(0.05)
        return True
    finally:  # Ctrl-C, too
        launcher.kill(folder)


def _read(launch: LaunchSpec, stage: StageSection, settings: Settings, began_s: float) -> Probed:
    path = Path(launch.folder, "probe.json")
    found = json.loads(path.read_text()) if path.exists() else {}
    began = found.get("stepped_at_s") or found.get("attached_at_s") or began_s
    return Probed(stage, launch.ranks, settings, began - began_s, boottime_s() - began_s, found)


def _tried(launch: LaunchSpec) -> tuple[int, bool] | None:
    """Microbatch and activation checkpointing that were tried out besides the plan's when the probe ended."""
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
    """The first error of a rank's own, and where the rest can be read while it is there."""
    folder = Path(launch.folder)
    own = [record for record in records if record.outcome is RankOutcome.FAILED and not record.is_collateral]
    first = min(own, key=lambda record: record.at_s, default=None)
    if first is None:
        lacked = _lacked_memory(launch, records)
        killed = ["the kernel killed it for want of memory, with smaller microbatches, too"] if lacked else []
        return [
            *killed,
            launcher.ending(folder),
            *_last_lines(folder / "torchrun.log"),
            *_last_lines(folder / "rank0.log"),
        ]
    said = (first.message or "no message").splitlines()
    return [f"rank {first.rank}: {first.error_type}: {said[0]}", *(line for line in said[1:12] if line.strip())]


def _last_lines(path: Path, count: int = 5) -> list[str]:
    with contextlib.suppress(OSError):
        return path.read_text(errors="replace").splitlines()[-count:]
    return []
