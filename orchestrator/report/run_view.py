"""A run as it stands, in the fields that `status --json` and `start --json` promise (docs/json.md).

Instants are ISO 8601 in UTC, durations seconds. A figure that is not known is null, never 0.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from sqlalchemy import Engine

from db import checkpoints, queue, rungs, runs, samples, sessions
from db.records import AttemptInfo, CheckpointInfo, ResumeInfo, RungInfo, RunInfo, SessionInfo
from orchestrator.checkpoint import store
from orchestrator.core.codes import OVER, EventKind, Phase, Reason, RunState
from orchestrator.report import forecast, quota_view, save_advice
from orchestrator.snapshots import keeper_client
from orchestrator.system import process_identity
from orchestrator.system.clock import boottime_s
from orchestrator.system.file_lock import is_locked
from orchestrator.system.paths import home_of_folder

View = dict[str, Any]
RUNGS = 20
"""The newest that are shown."""


def of_run(engine: Engine, run: RunInfo, *, now: datetime | None = None) -> View:
    now = now or datetime.now(UTC)
    row = sessions.last(engine, run.id)
    stages = runs.stages(engine, run.id)
    newest = checkpoints.newest_verified(engine, run.id)
    resume = queue.open_resume(engine, run.id)
    reached = sessions.reached(engine, run.id)
    alive = row is not None and is_supervised(row)
    training = row is not None and not alive and row.phase not in OVER and _is_training(engine, row)
    return {
        "run": run.name,
        "run_number": run.number,
        "state": run.state,
        "phase": row.phase if row else Phase.QUEUED,
        "reason": row.reason if row else Reason.NONE,
        "why": run.why or (row.why if row else ""),
        "stage": row.stage if row else "",
        "stages": [
            {"name": item.name, "done": item.finished_at is not None, "step": reached.get(item.name)} for item in stages
        ],
        "epoch": row.epoch if row else 0,
        "epochs_total": (row.epochs_total or None) if row else None,
        "step": row.step if row else 0,
        "steps_total": (row.steps_total or None) if row else None,
        "step_s": (row.step_s or None) if row else None,
        "samples": row.samples if row else 0,
        "session": _session(row, alive, training, now) if row else None,
        "checkpoint": _checkpoint(newest),
        "best": _best(checkpoints.best(engine, run.id)),
        "on_disk": _on_disk(engine, run, row, newest) if row and not alive else None,
        "snapshot": _snapshot(run, now) if alive or training else None,
        "metrics": plain(row.metrics) if row else {},
        "telemetry": _telemetry(engine, row) if row else None,
        "exactness": _exactness(engine, row) if row else {},
        "memory": _memory(engine, run, row) if row else None,
        "forecast": forecast.of_run(engine, run, row, now, lives=alive or training) if row else None,
        "failure": _failure(engine, run),
        "quota": quota_view.of_run(engine, run, now),
        "notices": list(_notices(engine, run, row, newest)),
        "next": _next(run, row, resume, alive, training),
        "folder": run.folder,
    }


def history(engine: Engine, run: RunInfo, *, limit: int | None = None) -> list[View]:
    """One entry a session, oldest first; with a limit the newest ones."""
    rows = sessions.of_run(engine, run.id, limit=limit)
    ids = [row.id for row in rows]
    saved, taken = checkpoints.by_session(engine, ids), rungs.of_run(engine, run.id)
    tries = defaultdict(list)
    for attempt in sessions.attempts_of(engine, ids):
        tries[attempt.session_id].append(attempt)
    entries = []
    for row in rows:
        mine = tries[row.id]
        until = row.ended_at or row.beat_at or row.started_at
        entries.append(
            {
                "number": row.number,
                "place": row.place,
                "phase": row.phase,
                "reason": row.reason,
                "why": row.why,
                "started_at": stamp(row.started_at),
                "ended_at": stamp(row.ended_at),
                "lasted_s": max(0.0, (until - row.started_at).total_seconds()),  # the wall clock may have been put back
                "stages": _stages(mine),
                "attempts": [
                    {
                        "number": item.number,
                        "stage": item.stage,
                        "first_step": item.first_step,
                        "last_step": item.last_step,
                        "outcome": item.outcome,
                        "cause": item.cause,
                    }
                    for item in mine
                ],
                "rungs": [_rung(rung) | {"stage": rung.stage} for rung in taken if rung.session_id == row.id],
                "checkpoint": _checkpoint(saved.get(row.id)),
                "metrics": plain(row.metrics),
            }
        )
    return entries


def _stages(mine: list[AttemptInfo]) -> list[View]:
    """The stages of a session and how far each came in it."""
    names = dict.fromkeys(attempt.stage for attempt in mine)
    return [
        {
            "name": name,
            "first_step": min(item.first_step for item in mine if item.stage == name),
            "last_step": max(item.last_step for item in mine if item.stage == name),
        }
        for name in names
    ]


def is_supervised(row: SessionInfo) -> bool:
    return row.phase not in OVER and process_identity.is_alive(
        row.supervisor_pid, row.supervisor_started_ticks, row.boot_id
    )


def stamp(at: datetime | None) -> str | None:
    return at.isoformat(timespec="milliseconds").replace("+00:00", "Z") if at else None


def plain(metrics: Mapping[str, float]) -> dict[str, float | None]:
    """JSON has no NaN: a metric that is none is null."""
    return {name: value if math.isfinite(value) else None for name, value in metrics.items()}


def _session(row: SessionInfo, alive: bool, training: bool, now: datetime) -> View:
    over = row.phase in OVER
    left_s = None if row.wall_at is None or over else max(0.0, _left_s(row, row.wall_at, now))
    return {
        "number": row.number,
        "place": row.place,
        "started_at": stamp(row.started_at),
        "ended_at": stamp(row.ended_at),
        "wall_at": stamp(row.wall_at),
        "left_s": left_s,
        "lead_s": row.lead_s,
        "supervisor": {"pid": row.supervisor_pid, "alive": alive},
        "training_alive": alive or training,
        "heard_at": stamp(row.beat_at),
    }


def _left_s(row: SessionInfo, wall_at: datetime, now: datetime) -> float:
    """By the clock that nobody puts forward or back, where it is the session's still."""
    if row.boot_wall_s is not None and row.boot_id == process_identity.boot_id():
        return row.boot_wall_s - boottime_s()
    return (wall_at - now).total_seconds()


def _checkpoint(found: CheckpointInfo | None) -> View | None:
    if found is None:
        return None
    return {
        "stage": found.stage,
        "step": found.step,
        "at": stamp(found.created_at),
        "verified": found.verified_at is not None,
        "final": found.final,
        "bytes": found.bytes,
        "path": found.path,
        "source": found.source or None,
    }


def _best(found: CheckpointInfo | None) -> View | None:
    if found is None:
        return None
    metric = found.best.rpartition(":")[0]
    return {
        "by": found.best,
        "value": plain(found.metrics).get(metric),
        "stage": found.stage,
        "step": found.step,
        "path": found.path,
    }


def _on_disk(engine: Engine, run: RunInfo, row: SessionInfo, newest: CheckpointInfo | None) -> View | None:
    """A checkpoint that ranks have saved and no supervisor has taken in: newer than the newest verified one. None without one."""
    if run.state == RunState.FINISHED or not row.stage:
        return None
    known = {Path(item.path).name for item in checkpoints.of_run(engine, run.id) if item.stage == row.stage}
    after = newest.step if newest and newest.stage == row.stage else -1
    found = store.newest_by_manifest(Path(run.checkpoints, row.stage), run.id, after=after, but=known)
    if found is None:
        return None
    folder, told, at = found
    return {"stage": told.stage, "step": told.step, "at": stamp(at), "bytes": told.total_bytes, "path": str(folder)}


def _snapshot(run: RunInfo, now: datetime) -> View | None:
    """What the keeper holds in memory, asked for just now."""
    held = keeper_client.newest(Path(run.folder), timeout_s=0.2)
    if held is None or held.run_id != run.id:
        return None
    at = now - timedelta(seconds=boottime_s() - held.at_s)
    return {"stage": held.stage, "step": held.step, "at": stamp(at)}


def _telemetry(engine: Engine, row: SessionInfo) -> View | None:
    found = samples.newest(engine, row.id)
    return {"at": stamp(found.at), "span_s": found.span_s, "values": dict(found.values)} if found else None


def _exactness(engine: Engine, row: SessionInfo) -> View:
    """What its ranks have told last, in this session."""
    told = sessions.newest_event(engine, row.run_id, (EventKind.EXACTNESS,), session_id=row.id)
    return dict(told.facts) if told else {}


def _memory(engine: Engine, run: RunInfo, row: SessionInfo) -> View | None:
    """The rungs of the memory ladder that the newest session's stage has taken; None when it has taken none."""
    taken = [rung for rung in rungs.of_run(engine, run.id) if rung.stage == row.stage]
    if not taken:
        return None
    now: Mapping[str, Any] = next(
        (rung.settings["settings"] for rung in reversed(taken) if "settings" in rung.settings), {}
    )
    return {
        "microbatch": now.get("microbatch"),
        "activation_checkpointing": bool(now.get("activation_checkpointing")),
        "rungs": [_rung(rung) for rung in taken[-RUNGS:]],
    }


def _rung(rung: RungInfo) -> View:
    return {"rung": rung.rung, "step": rung.step, "why": rung.why, "changes_result": rung.changes_result}


def _failure(engine: Engine, run: RunInfo) -> View | None:
    if run.state != RunState.FAILED:
        return None
    from orchestrator.report import failure  # what judges attempts need not be loaded for those that live

    return failure.of_run(engine, run)


def _notices(engine: Engine, run: RunInfo, row: SessionInfo | None, newest: CheckpointInfo | None) -> Iterator[str]:
    """What a person should know and can do something about, in words."""
    if row:
        yield from _saving_notices(engine, run, row)
        yield from _metrics_notice(engine, run, row)
        yield from _best_notice(engine, run, row)
        yield from _reading_notice(engine, run, row)
        yield from _data_notice(engine, run, row)
        yield from _telling_notice(engine, run, row)
    begun = sessions.newest_event(engine, run.id, (EventKind.WEIGHTS_LOADED, EventKind.WEIGHTS_PARTLY_LOADED))
    if begun and begun.kind == EventKind.WEIGHTS_PARTLY_LOADED:
        facts = dict(begun.facts)
        rest = "; ".join(f"{kind} {facts[kind]}" for kind in ("missing", "unexpected", "shapes") if kind in facts)
        yield f"began with {facts.get('loaded')} of {facts.get('into')} from {facts.get('file')}: {rest}"
    yield from _remedy_notices(engine, run)
    yield from _mirror_notice(engine, run, row, newest)


def _remedy_notices(engine: Engine, run: RunInfo) -> Iterator[str]:
    """What was done about losses and weights that were no numbers; all of it changes the result."""
    taken = [row for row in rungs.of_run(engine, run.id) if "settings" not in row.settings]
    if dropped := [row for row in taken if row.settings.get("skip")]:
        batches = f"{len(dropped)} batch{'es' if len(dropped) > 1 else ''}"
        yield f"left out {batches}, the last one at step {dropped[-1].step} ({dropped[-1].why})"
    for row in taken:
        if row.settings.keys() - {"skip", "call", "seen"}:
            yield f"{row.rung} from step {row.step} on ({row.why})"


def _saving_notices(engine: Engine, run: RunInfo, row: SessionInfo) -> Iterator[str]:
    """Of the newest session: that its last save failed, that memory allows no snapshots."""
    last = sessions.newest_event(
        engine, run.id, (EventKind.SAVE_FAILED, EventKind.CHECKPOINT_VERIFIED), session_id=row.id
    )
    if last and last.kind == EventKind.SAVE_FAILED:
        known = checkpoints.newest_verified(engine, run.id)
        todo = save_advice.advice(Path(run.checkpoints), known.bytes if known else 0)
        yield f"the last save failed: {last.facts.get('why')}" + (f"; {todo}" if todo else "")
    if off := sessions.newest_event(engine, run.id, (EventKind.SNAPSHOTS_OFF,), session_id=row.id):
        yield str(off.facts.get("what"))


def _metrics_notice(engine: Engine, run: RunInfo, row: SessionInfo) -> Iterator[str]:
    """Whether the script reports more than is kept."""
    if told := sessions.newest_event(engine, run.id, (EventKind.METRICS_DROPPED,), session_id=row.id):
        yield f"metrics are not all kept: {told.facts.get('why')}"


def _best_notice(engine: Engine, run: RunInfo, row: SessionInfo) -> Iterator[str]:
    """Why a figure of the newest session made no checkpoint the best."""
    if told := sessions.newest_event(engine, run.id, (EventKind.BEST_NOT_SAVED,), session_id=row.id):
        yield (
            f"keep.best: step {told.facts.get('step')} was not saved: {told.facts.get('why')};"
            " report it between epochs, or on all ranks right after the optimizer's step"
        )


def _data_notice(engine: Engine, run: RunInfo, row: SessionInfo) -> Iterator[str]:
    """Which data are read from where, once there is something to tell."""
    kinds = (EventKind.DATA_CACHED, EventKind.DATA_CACHE_FAILED, EventKind.DATA_CACHE_STALE)
    if told := sessions.newest_event(engine, run.id, kinds, session_id=row.id):
        source, copy, why = (told.facts.get(name) for name in ("source", "copy", "why"))
        if told.kind == EventKind.DATA_CACHED:
            yield f"{source} has a whole copy in {copy}, used from an epoch's end on"
        else:
            yield f"{source} is read where it lies: {why}"


def _reading_notice(engine: Engine, run: RunInfo, row: SessionInfo) -> Iterator[str]:
    """How far a long computation before the first step is (worker/cached.py)."""
    told = sessions.newest_event(
        engine, run.id, (EventKind.READING, EventKind.ATTACHED, EventKind.LAUNCHED), session_id=row.id
    )
    if (
        told
        and told.kind == EventKind.READING
        and (total := told.facts.get("total")) != (done := told.facts.get("done"))
    ):
        left = f", {told.facts.get('left_s')} s left" if told.facts.get("left_s") else ""
        yield f"{told.facts.get('what')}: {done}{f' of {total}' if total else ''}{left}"


def _telling_notice(engine: Engine, run: RunInfo, row: SessionInfo) -> Iterator[str]:
    """Whom the newest session's notices do not reach."""
    told = sessions.newest_event(
        engine, run.id, (EventKind.NOTICES_FAILED, EventKind.NOTICES_ARRIVE), session_id=row.id
    )
    for target, why in told.facts.get("failing", {}).items() if told else ():
        yield f"notices do not reach {target}: {why}; kgorch notify test PLAN tries it"


def _mirror_notice(
    engine: Engine, run: RunInfo, row: SessionInfo | None, newest: CheckpointInfo | None
) -> Iterator[str]:
    """Whether the newest session's mirror fails, or does not hold the newest checkpoint."""
    kinds = (EventKind.MIRRORING, EventKind.MIRRORED, EventKind.MIRROR_FAILED)
    event = sessions.newest_event(engine, run.id, kinds, session_id=row.id) if row else None
    if event is None:
        return
    holds = event.facts.get("holds") or "nothing of this run yet, as far as is known"
    if event.kind == EventKind.MIRROR_FAILED:
        yield f"the mirror fails: {event.facts.get('why')}; it holds {holds}"
    elif newest and holds != f"{newest.stage} {newest.step}":
        yield f"the mirror is behind: it holds {holds}, the newest is {newest.stage} {newest.step}"


def _next(run: RunInfo, row: SessionInfo | None, resume: ResumeInfo | None, alive: bool, training: bool) -> View:
    command: str | None = f"kgorch resume {run.name}"
    at = None
    if run.state == RunState.FINISHED:
        what, command = "nothing", None
    elif run.state == RunState.FAILED:
        what = "mend"
    elif row is not None and row.phase not in OVER:
        what, command = ("train", None) if alive else ("adopt" if training else "resume", command)
    else:
        what, at = "resume", stamp(resume.due_at) if resume else None
    return {"what": what, "at": at, "command": command, "daemon_alive": _is_daemon_alive(run)}


def _is_daemon_alive(run: RunInfo) -> bool:
    """By its lock: it answers nobody while it is busy, and a question would wait for it."""
    try:
        return is_locked(home_of_folder(run.folder) / "daemon.lock")
    except (OSError, ValueError):
        return False


def _is_training(engine: Engine, row: SessionInfo) -> bool:
    attempt = sessions.last_attempt(engine, row.id)
    return attempt is not None and attempt.outcome is None and is_locked(Path(attempt.folder, "lock"))
