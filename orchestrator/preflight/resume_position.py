"""What a start of a plan would go on from: a checkpoint that lies here or in a source, read back. Nothing is copied or changed."""

from __future__ import annotations

from collections.abc import Collection, Generator, Sequence
from pathlib import Path

from sqlalchemy import Engine

from db import runs
from db.records import RunInfo
from orchestrator.admission import import_run
from orchestrator.admission.requests import LocalState
from orchestrator.admission.source_scan import NOWHERE, Found, Place, place_of
from orchestrator.checkpoint.folder import readable_checkpoints
from orchestrator.checkpoint.manifest import Manifest
from orchestrator.checkpoint.verify import verify_checkpoint
from orchestrator.core.codes import RunState
from orchestrator.core.cost_estimate import Reached
from orchestrator.errors import CheckpointBroken, CheckpointUnreadable, KgorchError
from orchestrator.launch.verdicts import FAIL, PASS, WARN, Line
from orchestrator.plan import Plan
from orchestrator.platforms.profile import Profile

Lines = Generator[Line, None, Manifest | None]
"""Lines of `kgorch check`; then the checkpoint to go on from, None for none."""


class _Notes:
    """A watcher of a search by which nothing is copied."""

    def __init__(self) -> None:
        self.told: list[str] = []

    def note(self, text: str) -> None:
        self.told.append(text)

    def copying(self, done_bytes: int, total_bytes: int) -> None:
        pass

    def found(self, described: Manifest, folder: Path) -> None:
        pass


def look(
    engine: Engine, home: Path, profile: Profile, plan: Plan, workdir: Path, overrides: Sequence[str]
) -> Generator[Line, None, Reached | None]:
    """By the search that a start makes. Yields the lines of `kgorch check`.

    Returns: where a start would go on; None where it begins a run, does nothing, or is refused.
    """
    known, notes = runs.newest(engine, plan.name), _Notes()
    if known and known.state == RunState.FINISHED:
        do = "kgorch start PLAN --fresh begins a new run"
        yield Line("checkpoint", PASS, f"the run {known.name} is finished: a start does nothing", do)
        return None
    try:
        looked = import_run.look_around(LocalState(engine, home, profile), plan, workdir, None, notes, remembers=False)
        if looked.found:
            if known is None or known.id != looked.found.run_id:
                import_run.check_overrides(looked.found, overrides)
            import_run.check_settings(looked.found, plan)
        elif known is None and plan.resume.required:
            import_run.announce(engine, plan, workdir, looked, required=True, watcher=notes)
    except KgorchError as error:  # a start would be refused
        yield Line("checkpoint", FAIL, "; ".join((error.what, *error.facts)), error.next_step or "")
        return None
    finally:
        for note in notes.told:
            yield Line("sources", WARN, note)
    here = {stage.name for stage in runs.stages(engine, known.id) if stage.finished_at} if known else set()
    if looked.found:
        is_ours = known is not None and known.id == looked.found.run_id
        described = yield from _found(looked.found, looked.order, plan.name, looked.furthest if is_ours else NOWHERE)
        if described or not is_ours or looked.furthest == NOWHERE:
            theirs = looked.found.rows.finished if looked.found.rows else ()
            return _reached(described, looked.order, {*theirs, *(here if is_ours else ())})
    if known:
        described = yield from _here(known, plan)
        return _reached(described, looked.order, here)
    where = f"{looked.search.in_words(plan.name)}; " if looked.search else "none: "
    yield Line("checkpoint", PASS, f"{where}a start begins a new run")
    return None


def _reached(described: Manifest | None, order: Sequence[str], finished: Collection[str]) -> Reached | None:
    """`order`: of the stages; those before the checkpoint's are done, whatever a database remembers."""
    if described is None:
        return Reached(finished=frozenset(finished)) if finished else None
    before = order[: order.index(described.stage)] if described.stage in order else ()
    at = described.position
    return Reached(described.stage, at.loop, at.epoch, at.batch, at.step, frozenset({*finished, *before}))


def _found(found: Found, stages: Sequence[str], name: str, beyond: Place) -> Lines:
    """Of what the sources hold beyond a place: the furthest that is whole."""
    for item in found.furthest_first(stages):
        if place_of(stages, item.manifest) <= beyond:
            break
        if broken := _broken(item.folder):
            yield broken
            continue
        said = f"{item.manifest.stage}, step {item.manifest.step}, in {item.folder}, read back"
        yield Line("checkpoint", PASS, f"{said}; a start copies it and goes on from it")
        return item.manifest
    if beyond != NOWHERE:
        return None
    if found.checkpoints:
        said = f"none of those that the sources hold of {name!r} is whole"
        yield Line("checkpoint", FAIL, said, "have its whole state in a source, or begin anew with --fresh")
    else:
        yield Line("checkpoint", PASS, f"{found.database} knows the run, and no checkpoint of it: its stage begins")
    return None


def _here(known: RunInfo, plan: Plan) -> Lines:
    for stage in reversed(plan.stage):
        for folder, described in readable_checkpoints(Path(known.checkpoints) / stage.name):
            if broken := _broken(folder):
                yield broken
                continue
            yield Line("checkpoint", PASS, f"{stage.name}, step {described.step}, read back; a start goes on from it")
            return described
    yield Line("checkpoint", PASS, f"the run {known.name} has none yet: its stage begins")
    return None


def _broken(folder: Path) -> Line | None:
    try:
        verify_checkpoint(folder)
    except (CheckpointBroken, CheckpointUnreadable) as error:
        return Line("checkpoint", WARN, str(error.what), "the one before it is used; kgorch checkpoints list")
    return None
