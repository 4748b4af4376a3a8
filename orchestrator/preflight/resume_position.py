"""Finds the checkpoint from which a start of a plan would resume, here or in a source, and verifies it. Nothing is copied."""

from __future__ import annotations

from collections.abc import Collection, Generator, Sequence
from pathlib import Path

from kgorch.admission import import_run
from kgorch.admission.requests import LocalState
from kgorch.admission.source_run import NO_PROGRESS, ProgressKey, SourceRun, progress_of
from kgorch.checkpoint.folder import readable_checkpoints
from kgorch.checkpoint.manifest import Manifest
from kgorch.checkpoint.verify import verify_checkpoint
from kgorch.core.codes import RunState
from kgorch.core.forecast.cost_estimate import ResumePosition
from kgorch.db import runs
from kgorch.db.rows import RunInfo
from kgorch.errors import CheckpointBroken, CheckpointUnreadable, KgorchError
from kgorch.launch.verdicts import FAIL, PASS, WARN, CheckLine
from kgorch.plan import Plan

Lines = Generator[CheckLine, None, Manifest | None]
"""Yields lines of `kgorch check`; returns the checkpoint to resume from, None for none."""


class _SearchNotes:
    """A watcher of a search that copies nothing (source_scan.Watcher)."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def note(self, text: str) -> None:
        self.texts.append(text)

    def copy_progress(self, done_bytes: int, total_bytes: int) -> None:
        pass

    def checkpoint_copied(self, manifest: Manifest, folder: Path) -> None:
        pass


def find(
    state: LocalState, plan: Plan, workdir: Path, overrides: Sequence[str]
) -> Generator[CheckLine, None, ResumePosition | None]:
    """Find the position by the same search as a start. Yields lines of `kgorch check`.

    Args:
        workdir: the plan's folder.
        overrides: of the command line; `plan` has them already.
    Returns: where a start would resume; None where it begins a run, does nothing, or is refused.
    """
    engine, notes = state.engine, _SearchNotes()
    run = runs.newest(engine, plan.name)
    if run and run.state == RunState.FINISHED:
        do = "kgorch start PLAN --fresh begins a new run"
        yield CheckLine("checkpoint", PASS, f"the run {run.name} is finished: a start does nothing", do)
        return None
    try:
        choice = import_run.find_in_sources(state, plan, workdir, None, notes)
        if choice.run:
            if run is None or run.id != choice.run.run_id:
                import_run.check_overrides(choice.run, [stage.name for stage in plan.stage], overrides)
            import_run.check_settings(choice.run, plan)
        elif run is None and plan.resume.required:
            import_run.describe_new_run(engine, plan, workdir, choice, is_required=True)
    except KgorchError as error:  # a start would be refused
        yield CheckLine("checkpoint", FAIL, "; ".join((error.what, *error.facts)), error.next_step or "")
        return None
    finally:
        for text in notes.texts:
            yield CheckLine("sources", WARN, text)
    finished_here = {stage.name for stage in runs.stages(engine, run.id) if stage.finished_at} if run else set()
    if choice.run:
        is_ours = run is not None and run.id == choice.run.run_id
        manifest = yield from _in_sources(
            choice.run, choice.stage_order, plan.name, choice.local_progress if is_ours else NO_PROGRESS
        )
        # of our own run the sources may hold nothing beyond what is here
        if manifest or not is_ours or choice.local_progress == NO_PROGRESS:
            finished_there = choice.run.rows.finished if choice.run.rows else ()
            return _position(manifest, choice.stage_order, {*finished_there, *(finished_here if is_ours else ())})
    if run:
        manifest = yield from _on_this_machine(run, plan)
        return _position(manifest, choice.stage_order, finished_here)
    where = f"{choice.contents.describe(plan.name)}; " if choice.contents else "none: "
    yield CheckLine("checkpoint", PASS, f"{where}a start begins a new run")
    return None


def _position(manifest: Manifest | None, order: Sequence[str], finished: Collection[str]) -> ResumePosition | None:
    """Args: order: of the stages. Those before the checkpoint's are done, whatever a database says."""
    if manifest is None:
        return ResumePosition(finished=frozenset(finished)) if finished else None
    before = order[: order.index(manifest.stage)] if manifest.stage in order else ()
    at = manifest.position
    return ResumePosition(manifest.stage, at.loop, at.epoch, at.batch, at.step, frozenset({*finished, *before}))


def _in_sources(source: SourceRun, stages: Sequence[str], name: str, beyond: ProgressKey) -> Lines:
    """The furthest checkpoint in the sources that is not broken, if it lies beyond a place."""
    for item in source.furthest_first(stages):
        if progress_of(stages, item.manifest) <= beyond:
            break
        if problem := _verify(item.folder):
            yield problem
            continue
        what = f"{item.manifest.stage}, step {item.manifest.step}, in {item.folder}, read back"
        yield CheckLine("checkpoint", PASS, f"{what}; a start copies it and goes on from it")
        return item.manifest
    if beyond != NO_PROGRESS:
        return None
    if source.checkpoints:
        what = f"none of those that the sources hold of {name!r} is whole"
        yield CheckLine("checkpoint", FAIL, what, "have its whole state in a source, or begin a new run with --fresh")
    else:
        what = f"{source.database} knows the run, and no checkpoint of it: its stage begins"
        yield CheckLine("checkpoint", PASS, what)
    return None


def _on_this_machine(run: RunInfo, plan: Plan) -> Lines:
    """The newest checkpoint of the run's last stage that has one which is not broken."""
    for stage in reversed(plan.stage):
        for folder, manifest in readable_checkpoints(Path(run.checkpoints) / stage.name):
            if problem := _verify(folder):
                yield problem
                continue
            yield CheckLine(
                "checkpoint", PASS, f"{stage.name}, step {manifest.step}, read back; a start goes on from it"
            )
            return manifest
    yield CheckLine("checkpoint", PASS, f"the run {run.name} has none yet: its stage begins")
    return None


def _verify(folder: Path) -> CheckLine | None:
    try:
        verify_checkpoint(folder)
    except (CheckpointBroken, CheckpointUnreadable) as error:
        return CheckLine("checkpoint", WARN, str(error.what), "the one before it is used; kgorch checkpoints list")
    return None
