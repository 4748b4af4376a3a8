"""What a user should know of a run and can do something about: the field `notices` of `kgorch status`, in words.

Each notice is read off the newest event of its kinds, most of them in the newest session, so it disappears with the trouble.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from sqlalchemy import Engine

from kgorch.core.codes import EventKind, Phase
from kgorch.db import checkpoints, rungs, sessions
from kgorch.db.rows import CheckpointInfo, RunInfo, SessionInfo
from kgorch.report import save_advice


def of_run(engine: Engine, run: RunInfo, row: SessionInfo | None, newest: CheckpointInfo | None) -> Iterator[str]:
    """Args: row: the newest session. newest: the newest verified checkpoint."""
    if row:
        yield from _nothing_saved(engine, run, row)
        yield from _failed_launch(engine, run, row)
        yield from _failed_saves(engine, run, row)
        yield from _dropped_metrics(engine, run, row)
        yield from _best_not_saved(engine, run, row)
        yield from _progress_before_first_step(engine, run, row)
        yield from _data_cache(engine, run, row)
        yield from _failed_notifications(engine, run, row)
        yield from _failing_trackers(engine, run, row)
    yield from _rest_of_script(engine, run)
    yield from _foreign_skipped(engine, run)
    yield from _partly_loaded_weights(engine, run)
    yield from _health_remedies(engine, run)
    if row:
        yield from _mirror(engine, run, row, newest)


def _nothing_saved(engine: Engine, run: RunInfo, row: SessionInfo) -> Iterator[str]:
    """Of a script that takes no part in the saves. A stage that trains nothing need not: of one that is done it is not said."""
    unsaved = (EventKind.NOT_ATTACHED, EventKind.NEVER_ATTACHED, EventKind.TRACKS_NOTHING)
    done = (EventKind.ATTACHED, EventKind.CHECKPOINT_VERIFIED, EventKind.STAGE_FINISHED, EventKind.RUN_FINISHED)
    last = sessions.newest_event(engine, run.id, (*unsaved, *done), session_id=row.id)
    if last and last.kind in unsaved and row.phase is not Phase.FINISHED:
        yield (
            f"{last.facts.get('stage')} is not saved: {last.facts.get('what')}; docs/your-training.md says what to add, and"
            " `kgorch adopt` writes a plan for a program as it is"
        )


def _partly_loaded_weights(engine: Engine, run: RunInfo) -> Iterator[str]:
    event = sessions.newest_event(engine, run.id, (EventKind.WEIGHTS_LOADED, EventKind.WEIGHTS_PARTLY_LOADED))
    if event and event.kind == EventKind.WEIGHTS_PARTLY_LOADED:
        facts = dict(event.facts)
        rest = "; ".join(f"{kind} {facts[kind]}" for kind in ("missing", "unexpected", "shapes") if kind in facts)
        yield f"loaded {facts.get('loaded')} of {facts.get('into')} weights from {facts.get('file')}: {rest}"


def _health_remedies(engine: Engine, run: RunInfo) -> Iterator[str]:
    """What was done about losses and weights that were not finite. All of it changes the result."""
    remedies = [row for row in rungs.of_run(engine, run.id) if "settings" not in row.settings]
    if skips := [row for row in remedies if row.settings.get("skip")]:
        batches = f"{len(skips)} batch{'es' if len(skips) > 1 else ''}"
        yield f"skipped {batches}, the last one at step {skips[-1].step} ({skips[-1].why})"
    for row in remedies:
        if row.settings.keys() - {"skip", "call", "seen"}:
            yield f"{row.rung} from step {row.step} on ({row.why})"


def _failed_launch(engine: Engine, run: RunInfo, row: SessionInfo) -> Iterator[str]:
    kinds = (EventKind.LAUNCH_FAILED, EventKind.LAUNCHED)
    last = sessions.newest_event(engine, run.id, kinds, session_id=row.id)
    if last and last.kind == EventKind.LAUNCH_FAILED and row.phase.is_launching:
        yield f"nothing trains, the launch is tried again: {last.facts.get('why')}"


def _failed_saves(engine: Engine, run: RunInfo, row: SessionInfo) -> Iterator[str]:
    kinds = (EventKind.SAVE_FAILED, EventKind.CHECKPOINT_VERIFIED)
    last = sessions.newest_event(engine, run.id, kinds, session_id=row.id)
    if last and last.kind == EventKind.SAVE_FAILED:
        newest = checkpoints.newest_verified(engine, run.id)
        advice = save_advice.advice(Path(run.checkpoints), newest.bytes if newest else 0)
        yield f"the last save failed: {last.facts.get('why')}" + (f"; {advice}" if advice else "")
    if event := sessions.newest_event(engine, run.id, (EventKind.SNAPSHOTS_OFF,), session_id=row.id):
        yield str(event.facts.get("what"))


def _rest_of_script(engine: Engine, run: RunInfo) -> Iterator[str]:
    """That what follows a training did not end in a whole session: also while the next one is at it."""
    ends = (EventKind.EXIT_OVERDUE, EventKind.STAGE_FINISHED, EventKind.STAGE_EXTENDED, EventKind.RUN_FINISHED)
    last = sessions.newest_event(engine, run.id, ends)
    if last and (cause := last.facts.get("cause")) and last.kind == EventKind.EXIT_OVERDUE:
        yield (
            f"{cause}; it begins anew in each session, unless it goes on by its own files: give it a longer time limit"
            " (session.wall), or make it a stage of its own"
        )


def _foreign_skipped(engine: Engine, run: RunInfo) -> Iterator[str]:
    """A checkpoint of a foreign program that was left out or moved, until a later one is good: each session may look for it."""
    last = sessions.newest_event(engine, run.id, (EventKind.FOREIGN_SKIPPED, EventKind.CHECKPOINT_VERIFIED))
    if last and last.kind == EventKind.FOREIGN_SKIPPED:
        yield f"{last.facts.get('checkpoint')} was not taken: {last.facts.get('why')}"


def _dropped_metrics(engine: Engine, run: RunInfo, row: SessionInfo) -> Iterator[str]:
    if event := sessions.newest_event(engine, run.id, (EventKind.METRICS_DROPPED,), session_id=row.id):
        yield f"metrics are not all kept: {event.facts.get('why')}"


def _best_not_saved(engine: Engine, run: RunInfo, row: SessionInfo) -> Iterator[str]:
    if event := sessions.newest_event(engine, run.id, (EventKind.BEST_NOT_SAVED,), session_id=row.id):
        yield f"keep.best: step {event.facts.get('step')} was not saved: {event.facts.get('why')}"


def _progress_before_first_step(engine: Engine, run: RunInfo, row: SessionInfo) -> Iterator[str]:
    """Of a long computation of `session.cached` (worker/data/value_cache.py), while it lasts."""
    kinds = (EventKind.READING, EventKind.ATTACHED, EventKind.LAUNCHED)
    event = sessions.newest_event(engine, run.id, kinds, session_id=row.id)
    if event is None or event.kind != EventKind.READING:
        return
    done, total = event.facts.get("done"), event.facts.get("total")
    if total != done:
        left = f", {event.facts.get('left_s')} s left" if event.facts.get("left_s") else ""
        yield f"{event.facts.get('what')}: {done}{f' of {total}' if total else ''}{left}"


def _data_cache(engine: Engine, run: RunInfo, row: SessionInfo) -> Iterator[str]:
    kinds = (EventKind.DATA_CACHED, EventKind.DATA_CACHE_FAILED, EventKind.DATA_CACHE_STALE)
    if event := sessions.newest_event(engine, run.id, kinds, session_id=row.id):
        source, copy, why = (event.facts.get(name) for name in ("source", "copy", "why"))
        if event.kind == EventKind.DATA_CACHED:
            yield f"{source} has a whole copy in {copy}, used from an epoch's end on"
        else:
            yield f"{source} is read without a local copy: {why}"


def _failed_notifications(engine: Engine, run: RunInfo, row: SessionInfo) -> Iterator[str]:
    kinds = (EventKind.NOTICES_FAILED, EventKind.NOTICES_ARRIVE)
    event = sessions.newest_event(engine, run.id, kinds, session_id=row.id)
    for target, why in event.facts.get("failing", {}).items() if event else ():
        yield f"notices do not reach {target}: {why}; kgorch notify test PLAN tries it"


def _failing_trackers(engine: Engine, run: RunInfo, row: SessionInfo) -> Iterator[str]:
    kinds = (EventKind.TRACKED, EventKind.TRACKING_FAILED)
    event = sessions.newest_event(engine, run.id, kinds, session_id=row.id)
    for tracker, why in event.facts.get("failing", {}).items() if event else ():
        yield f"{tracker} is not sent the metrics: {why}; what is missing is sent later, or by kgorch track {run.name}"


def _mirror(engine: Engine, run: RunInfo, row: SessionInfo, newest: CheckpointInfo | None) -> Iterator[str]:
    """That the mirror fails, or does not hold the newest checkpoint."""
    kinds = (EventKind.MIRRORING, EventKind.MIRRORED, EventKind.MIRROR_FAILED)
    event = sessions.newest_event(engine, run.id, kinds, session_id=row.id)
    if event is None:
        return
    content = event.facts.get("holds") or "nothing of this run yet, as far as is known"
    if event.kind == EventKind.MIRROR_FAILED:
        yield f"the mirror fails: {event.facts.get('why')}; it holds {content}"
    elif newest and content != f"{newest.stage} {newest.step}":
        yield f"the mirror is behind: it holds {content}, the newest is {newest.stage} {newest.step}"
