"""Each stage of a plan in small, one after another, in processes of its own: launched as a session would launch it, with a
keeper and a folder of its own beside the runs, so that what is measured is what a run would meet. Nothing of it stays.
"""

from __future__ import annotations

import contextlib
import json
import math
import shutil
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from orchestrator.core.memory import Settings
from orchestrator.core.outcome import RankRecord
from orchestrator.errors import ExitCode, KgorchError
from orchestrator.plan import Plan, Stage
from orchestrator.runtime import devices, launcher, snapshots
from orchestrator.wire import KEEPER_SOCKET, Launch, boottime_s

SECONDS = 20.0
"""For the trials of all stages together; the steps under way are done."""

TRIES_SMALLER = 3
"""Launches with a smaller microbatch, once one has been killed for want of memory."""

LADDER = ["microbatch/2", "activation_checkpointing"]


class ProbeFailed(KgorchError):
    """A stage of the plan does not get through a few steps."""

    code = ExitCode.FAILED


class Probed(NamedTuple):
    """`found`: what the ranks measured (worker/probe.py), {} of a stage that takes no steps. `startup_s`, `lasted_s`: of its
    launch."""

    stage: Stage
    ranks: int
    settings: Settings
    startup_s: float
    lasted_s: float
    found: dict[str, Any]


@contextlib.contextmanager
def folder_in(home: Path) -> Iterator[Path]:
    """A folder that is gone afterwards, on the disk where checkpoints would lie."""
    home.mkdir(parents=True, exist_ok=True)
    root = Path(tempfile.mkdtemp(prefix=".check-", dir=home))
    try:
        yield root
    finally:
        snapshots.end(root, timeout_s=5.0)
        shutil.rmtree(root, ignore_errors=True)


def probe(plan: Plan, stage: Stage, workdir: Path, root: Path, *, memory: int | None, patience_s: float) -> Probed:
    """A few steps of `stage`, whose predecessors have been probed in the same `root`.

    Args:
        memory: bytes that a rank may come to hold; None for as much as there is.
    Raises: ProbeFailed.
    """
    ranks, settings = devices.ranks_for(stage.ranks), plan.memory.settings
    for number in range(TRIES_SMALLER + 1):
        launch = _launch(plan, stage, workdir, root, ranks, settings, memory, number)
        began_s = boottime_s()
        _run(launch, patience_s)
        records = launcher.records(Path(launch.folder), ranks)
        if len(records) == ranks and all(record.outcome == "finished" for record in records):
            return _read(launch, stage, settings, began_s)
        smaller = max(1, (settings.microbatch or 64) // 4)
        if smaller == settings.microbatch or not _lacked_memory(launch, records):
            break
        settings = replace(settings, microbatch=smaller)
    raise ProbeFailed(
        f"stage {stage.name!r} does not get through its first steps",
        *_why(launch, records),
        next_step="mend what is said there; `kgorch start` would end the same way",
    )


def _launch(
    plan: Plan, stage: Stage, workdir: Path, root: Path, ranks: int, settings: Settings, memory: int | None, number: int
) -> Launch:
    return Launch(
        run=plan.name,
        run_id=root.name,
        stage=stage.name,
        attempt=f"0.{number}",
        folder=str(root / "attempts" / f"{stage.name}.{number}"),
        entry=stage.entry,
        args=stage.args,
        workdir=str(workdir),
        ranks=ranks,
        socket=str(root / "control.sock"),
        checkpoints=str(root / "checkpoints" / stage.name),
        output=str(root / "outputs"),
        plan_hash=plan.hash,
        seed=plan.seed,
        keeper=str(root / KEEPER_SOCKET),
        snapshot_s=plan.checkpoint.snapshot_s,
        memory_bytes=plan.checkpoint.memory,
        settings=settings.as_dict(),
        ladder=LADDER,
        deterministic=plan.deterministic,
        weights=stage.weights.model_dump() if stage.weights else None,
        quick=True,
        probe={"seconds": SECONDS / len(plan.stage), "memory": memory},
    )


def _run(launch: Launch, patience_s: float) -> None:
    """To its end, or for `patience_s`."""
    folder, until = Path(launch.folder), time.monotonic() + patience_s
    (Path(launch.checkpoints)).mkdir(parents=True, exist_ok=True)
    try:
        shim = launcher.start(launch)
        while shim.poll() is None and time.monotonic() < until:
            time.sleep(0.05)
    finally:  # Ctrl-C, too
        launcher.kill(folder)
        shim.wait()


def _read(launch: Launch, stage: Stage, settings: Settings, began_s: float) -> Probed:
    path = Path(launch.folder, "probe.json")
    found = json.loads(path.read_text()) if path.exists() else {}
    began = found.get("stepped_at_s") or found.get("attached_at_s") or math.nan
    lasted_s = boottime_s() - began_s
    return Probed(stage, launch.ranks, settings, lasted_s if math.isnan(began) else began - began_s, lasted_s, found)


def _lacked_memory(launch: Launch, records: list[RankRecord]) -> bool:
    folder = Path(launch.folder)
    return any(record.memory for record in records) or (
        launcher.kernel_kills(folder) > 0 and launcher.was_sigkilled(folder)
    )


def _why(launch: Launch, records: list[RankRecord]) -> list[str]:
    """The first error of a rank's own, and where the rest can be read while it is there."""
    folder = Path(launch.folder)
    own = [record for record in records if record.outcome == "failed" and not record.is_collateral]
    first = min(own, key=lambda record: record.at_s, default=None)
    if first is None:
        return [launcher.ending(folder), *_last_lines(folder / "torchrun.log"), *_last_lines(folder / "rank0.log")]
    said = (first.message or "no message").splitlines()
    return [f"rank {first.rank}: {first.error_type}: {said[0]}", *(line for line in said[1:12] if line.strip())]


def _last_lines(path: Path, count: int = 5) -> list[str]:
    with contextlib.suppress(OSError):
        return path.read_text(errors="replace").splitlines()[-count:]
    return []
