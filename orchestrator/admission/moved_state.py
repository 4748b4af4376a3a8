"""The files of a run that another machine of the fleet has trained last: found here, or fetched from the plan's mirror."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from kgorch.admission.requests import ImportWatcher, RunContext
from kgorch.core.codes import CheckpointState
from kgorch.core.fleet import KnownState, StateSource, source_of
from kgorch.db import checkpoints as rows
from kgorch.db import fleet
from kgorch.db.rows import CheckpointInfo, RunInfo
from kgorch.errors import KgorchError
from kgorch.services.mirror import MirrorReader
from kgorch.system.paths import make_run_folder


class StateElsewhere(KgorchError):
    """The run's files cannot be reached from this machine."""


def bring(context: RunContext, home: Path, watcher: ImportWatcher) -> None:
    """Make sure that the run's newest checkpoints are on this machine, where another one has trained it last.

    Checkpoints that stay behind on a dead machine are marked as dropped; their files are not touched.

    Raises: StateElsewhere, with the machine that has them; the errors of fsspec's library.
    """
    engine, run = context.engine, context.run
    if not fleet.is_elsewhere(engine, run.machine) or run.machine in fleet.sharing_state(engine):
        return
    if not Path(run.workdir).is_dir():
        raise _elsewhere(run, f"the plan's folder {run.workdir} is not on this machine: it starts the training there")
    verified = rows.of_run(engine, run.id, CheckpointState.VERIFIED)
    here = [row for row in verified if Path(row.path, "manifest.json").is_file()]
    mirror = _reader(context, verified)
    mirrored = [row for row in verified if mirror and mirror.holds(row)]
    stages = list(dict.fromkeys(row.stage for row in verified))  # in the run's order
    newest, newest_here, newest_mirrored = (
        max(((stages.index(row.stage), row.step) for row in found), default=None)
        for found in (verified, here, mirrored)
    )
    is_owner_alive = fleet.is_machine_alive(engine, run.machine)
    source = source_of(KnownState(newest, newest_here, newest_mirrored, is_owner_alive))
    if source is StateSource.OWNER:
        last = verified[-1]
        fact = f"its newest checkpoint, {last.stage} {last.step}, is neither on this machine nor in a mirror"
        raise _elsewhere(run, fact)
    make_run_folder(home, run.name, run.number, run.plan)  # its plan may have changed since it was here
    if source is StateSource.BEGINNING:
        return
    kept = {row.path for row in here}
    if source is StateSource.MIRROR and mirror:
        for row in _wanted(mirrored):
            watcher.note(f"{row.stage} {row.step} is fetched from the mirror: {run.name} was on {run.machine}")
            mirror.fetch(row, Path(run.checkpoints))
            kept.add(row.path)
    for row in verified:
        if row.path not in kept:
            rows.set_state(engine, row.path, CheckpointState.DROPPED, f"it stayed on the machine {run.machine}")


def _reader(context: RunContext, verified: Sequence[CheckpointInfo]) -> MirrorReader | None:
    section = context.plan.checkpoint
    if not section.mirror or not verified:
        return None
    return MirrorReader(context.run, section.mirror, section.mirror_options)


def _wanted(mirrored: Sequence[CheckpointInfo]) -> list[CheckpointInfo]:
    """The newest of each stage, and the best ones: what a resume and later stages read."""
    newest = {row.stage: row for row in mirrored}
    return [row for row in mirrored if row.best or newest[row.stage] is row]


def _elsewhere(run: RunInfo, fact: str) -> StateElsewhere:
    return StateElsewhere(
        f"the files of {run.name} are on the machine {run.machine}, and cannot be reached from here",
        fact,
        next_step=f"resume it on {run.machine}; or give the plan a checkpoint.mirror that every machine reaches",
    )
