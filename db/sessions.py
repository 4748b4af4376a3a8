"""Verbs on sessions, their attempts, and the journal. A phase and the event that led to it are one transaction."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from sqlalchemy import Engine, Select, Update, bindparam, delete, func, select, update
from sqlalchemy.orm import Session as Orm

from kgorch.core.codes import OVER, EventKind, Outcome, Phase
from kgorch.db import charges, event_facts, fleet, rungs
from kgorch.db.queue import queue_resume
from kgorch.db.rows import AttemptInfo, EventInfo, RungInfo, SessionInfo
from kgorch.db.runs import machine_of, now, stage_finished, to_info
from kgorch.db.tables import Attempt, EventRow, Run, SessionRow

# Built once, and of tables, not of classes: so that a heartbeat takes 0.2 ms and not 1.0.
_HEARTBEAT = update(SessionRow.__table__).where(SessionRow.__table__.c.id == bindparam("session"))  # type: ignore[arg-type]
_HEARTBEAT_OF_ATTEMPT = update(Attempt.__table__).where(Attempt.__table__.c.id == bindparam("attempt"))  # type: ignore[arg-type]

UNCOUNTED = (Outcome.LOST, Outcome.STOPPED, Outcome.OUT_OF_MEMORY)


class SessionTaken(Exception):
    """Another machine of the fleet has ended this session, because nothing was heard of it for a lease."""


def open_session(
    engine: Engine, run_id: str, *, charged: Mapping[str, Any] | None = None, **columns: Any
) -> SessionInfo:
    """Open the run's next session, charged from the start: all of it or nothing.

    Args:
        charged: what it has cost until now, as kgorch.db.charges.new_rows takes it; None where no quota is counted.
    """
    with Orm(engine) as orm, orm.begin():
        last = orm.scalar(select(func.max(SessionRow.number)).where(SessionRow.run_id == run_id)) or 0
        if machine := machine_of(engine):
            columns = {"machine": machine, "lease_expires_at": fleet.lease_end(orm, engine), **columns}
            orm.execute(update(Run).where(Run.id == run_id).values(machine=machine))
        row = SessionRow(run_id=run_id, number=last + 1, phase=Phase.QUEUED, started_at=now(), **columns)
        orm.add(row)
        orm.flush()
        if charged:
            orm.add_all(charges.new_rows(row.id, **charged))
        return to_info(SessionInfo, row)


def last(engine: Engine, run_id: str) -> SessionInfo | None:
    with Orm(engine) as orm:
        row = orm.scalars(
            select(SessionRow).where(SessionRow.run_id == run_id).order_by(SessionRow.number.desc()).limit(1)
        ).first()
        return to_info(SessionInfo, row) if row else None


def newest_of_runs(engine: Engine, run_ids: Sequence[str]) -> dict[str, SessionInfo]:
    """The newest session of each of these runs that has any."""
    newest = (
        select(SessionRow.run_id, func.max(SessionRow.number).label("number"))
        .where(SessionRow.run_id.in_(run_ids))
        .group_by(SessionRow.run_id)
        .subquery()
    )
    with Orm(engine) as orm:
        chosen = select(SessionRow).join(
            newest, (SessionRow.run_id == newest.c.run_id) & (SessionRow.number == newest.c.number)
        )
        return {row.run_id: to_info(SessionInfo, row) for row in orm.scalars(chosen)}


def of_run(engine: Engine, run_id: str, *, limit: int | None = None) -> list[SessionInfo]:
    """Oldest first; with a limit the newest ones."""
    with Orm(engine) as orm:
        chosen = select(SessionRow).where(SessionRow.run_id == run_id).order_by(SessionRow.number.desc()).limit(limit)
        return [to_info(SessionInfo, row) for row in reversed(orm.scalars(chosen).all())]


def record(
    engine: Engine,
    run_id: str,
    session_id: int,
    *,
    kind: EventKind,
    phase: Phase,
    facts: dict[str, Any],
    resume: Mapping[str, Any] | None = None,
    closes: Mapping[str, Any] | None = None,
    finishes: str | None = None,
    adjustment: Mapping[str, Any] | None = None,
    at: datetime | None = None,
    **columns: Any,
) -> None:
    """Write one move of a session's lifecycle: all of it or nothing.

    Args:
        kind, facts: of the journal's entry.
        at: of the journal's entry; None for now. A second call with the same one changes nothing.
        phase, columns: of the session's row.
        resume: the next session, as kgorch.db.queue.queue_resume takes it.
        closes: the attempt that ended with the event, as close_attempt takes it.
        finishes: the stage that is done.
        adjustment: what the next attempt does otherwise, as kgorch.db.rungs.add takes it.

    Raises: SessionTaken.
    """
    event = EventRow(run_id=run_id, session_id=session_id, at=at or now(), kind=kind, phase=phase, facts=facts)
    with Orm(engine) as orm, orm.begin():
        found = _lock_phase(orm, engine, session_id)
        if at and rungs.is_written(orm, event):
            return
        _refuse_taken(session_id, found)
        if closes:
            orm.execute(_closing(**closes))
        if finishes:
            orm.execute(stage_finished(run_id, finishes))
        if adjustment:
            orm.add_all(rungs.new_rows(run_id, session_id, **adjustment))
        if phase in OVER:
            columns["ended_at"] = now()
        orm.execute(update(SessionRow).where(SessionRow.id == session_id).values(phase=phase, **columns))
        orm.add(event)
        if resume is not None:
            queue_resume(orm, run_id, **resume)


def add_event(
    engine: Engine,
    run_id: str,
    kind: str,
    facts: dict[str, Any],
    session_id: int | None = None,
    *,
    at: datetime | None = None,
) -> None:
    """An event that moves no session. Args: at: as of `record`."""
    event = EventRow(run_id=run_id, session_id=session_id, at=at or now(), kind=kind, phase="", facts=facts)
    with Orm(engine) as orm, orm.begin():
        if not at or not rungs.is_written(orm, event):
            orm.add(event)


def has_ended_as(engine: Engine, session_id: int, phase: Phase) -> bool:
    """Whether a session's own end was written. In a fleet another machine may have ended it: then the run is no more ours."""
    if not machine_of(engine):
        return True
    with Orm(engine) as orm:
        return orm.scalar(select(SessionRow.phase).where(SessionRow.id == session_id)) == phase


def _lock_phase(orm: Orm, engine: Engine, session_id: int) -> Phase | None:
    """The phase of a session, which no other machine changes until the transaction ends; None where there is no fleet."""
    if not machine_of(engine):
        return None
    return orm.scalar(select(SessionRow.phase).where(SessionRow.id == session_id).with_for_update())


def _refuse_taken(session_id: int, phase: Phase | None) -> None:
    """In a fleet another machine ends a session of which it has heard nothing for a lease. Its supervisor may come back then, or a
    third machine may end the session, too.

    Args:
        phase: that the session has.
    Raises: SessionTaken.
    """
    if phase in OVER:
        raise SessionTaken(f"session {session_id} is {phase} by another machine's word")


def _now(orm: Orm, engine: Engine) -> datetime:
    return fleet.utc_now(orm) if machine_of(engine) else now()


def update_session(engine: Engine, session_id: int, **columns: Any) -> None:
    with Orm(engine) as orm, orm.begin():
        orm.execute(update(SessionRow).where(SessionRow.id == session_id).values(**columns))


def record_heartbeat(engine: Engine, session_id: int, attempt_id: int, **columns: Any) -> None:
    """The live figures, about once a second."""
    with Orm(engine) as orm, orm.begin():
        _refuse_taken(session_id, _lock_phase(orm, engine, session_id))
        orm.execute(_HEARTBEAT, {"session": session_id, "heartbeat_at": _now(orm, engine), **columns})
        orm.execute(_HEARTBEAT_OF_ATTEMPT, {"attempt": attempt_id, "last_step": columns["step"]})


def events(engine: Engine, run_id: str, *, limit: int) -> list[EventInfo]:
    """The newest events of a run, oldest of them first."""
    with Orm(engine) as orm:
        rows = orm.scalars(
            select(EventRow).where(EventRow.run_id == run_id).order_by(EventRow.id.desc()).limit(limit)
        ).all()
        return [to_info(EventInfo, row) for row in reversed(rows)]


def events_after(engine: Engine, run_id: str, after_id: int, *, limit: int) -> list[EventInfo]:
    """The oldest events of a run that were written after the one with this id."""
    with Orm(engine) as orm:
        rows = orm.scalars(
            select(EventRow).where(EventRow.run_id == run_id, EventRow.id > after_id).order_by(EventRow.id).limit(limit)
        )
        return [to_info(EventInfo, row) for row in rows]


def newest_event(
    engine: Engine, run_id: str, kinds: tuple[EventKind, ...], *, session_id: int | None = None
) -> EventInfo | None:
    """The last event of one of these kinds, of the whole run or of one session; without its facts, if they are not of its kind.

    One look into the index a kind: among a year's events most are of other kinds.
    """
    of = EventRow.run_id == run_id if session_id is None else EventRow.session_id == session_id
    with Orm(engine) as orm:
        lasts = [select(func.max(EventRow.id)).where(of, EventRow.kind == kind).scalar_subquery() for kind in kinds]
        ids = [found for found in orm.execute(select(*lasts)).one() if found is not None]
        return _readable(to_info(EventInfo, orm.get_one(EventRow, max(ids)))) if ids else None


def events_of_kind(engine: Engine, run_id: str, kind: EventKind, *, limit: int) -> list[EventInfo]:
    """The newest events of one kind, oldest of them first; not those whose facts are not of that kind (db/event_facts.py)."""
    with Orm(engine) as orm:
        chosen = select(EventRow).where(EventRow.run_id == run_id, EventRow.kind == kind)
        rows = orm.scalars(chosen.order_by(EventRow.id.desc()).limit(limit)).all()
        return [to_info(EventInfo, row) for row in reversed(rows) if event_facts.is_valid(kind, row.facts)]


def count_events(engine: Engine, run_id: str, kind: EventKind) -> int:
    with Orm(engine) as orm:
        chosen = select(func.count()).select_from(EventRow).where(EventRow.run_id == run_id, EventRow.kind == kind)
        return orm.scalar(chosen) or 0


def first_event_times(engine: Engine, session_ids: Sequence[int], kind: EventKind) -> dict[int, datetime]:
    """When that happened in each of these sessions for the first time."""
    with Orm(engine) as orm:
        mine = EventRow.session_id.in_(session_ids), EventRow.kind == kind
        firsts = select(func.min(EventRow.id)).where(*mine).group_by(EventRow.session_id)
        rows = orm.execute(select(EventRow.session_id, EventRow.at).where(EventRow.id.in_(firsts)))
        return {session_id: at for session_id, at in rows if session_id is not None}


def facts_of_kind(engine: Engine, run_id: str, kind: EventKind) -> list[Mapping[str, Any]]:
    """The facts of all events of one kind, oldest first; not those that are not of that kind (db/event_facts.py)."""
    with Orm(engine) as orm:
        chosen = select(EventRow.facts).where(EventRow.run_id == run_id, EventRow.kind == kind).order_by(EventRow.id)
        return [facts for facts in orm.scalars(chosen) if event_facts.is_valid(kind, facts)]


def _readable(event: EventInfo) -> EventInfo:
    return event if event_facts.is_valid(event.kind, event.facts) else event._replace(facts={})


def open_attempt(engine: Engine, session_id: int, *, folder_of: Any, **columns: Any) -> AttemptInfo:
    """`folder_of` makes the attempt's folder name from its number."""
    with Orm(engine) as orm, orm.begin():
        number = (orm.scalar(select(func.max(Attempt.number)).where(Attempt.session_id == session_id)) or 0) + 1
        row = Attempt(session_id=session_id, number=number, folder=folder_of(number), started_at=now(), **columns)
        row.last_step = row.first_step
        orm.add(row)
        orm.flush()
        return to_info(AttemptInfo, row)


def close_attempt(
    engine: Engine, attempt_id: int, *, outcome: Outcome, cause: str, last_step: int, made_progress: bool
) -> None:
    with Orm(engine) as orm, orm.begin():
        orm.execute(
            _closing(attempt_id, outcome=outcome, cause=cause, last_step=last_step, made_progress=made_progress)
        )


def _closing(attempt_id: int, **columns: Any) -> Update:
    return update(Attempt).where(Attempt.id == attempt_id).values(ended_at=now(), **columns)


def delete_open_attempts(engine: Engine, session_id: int) -> None:
    """Those that were written down and could not be started: of a session in which nothing runs."""
    with Orm(engine) as orm, orm.begin():
        orm.execute(delete(Attempt).where(Attempt.session_id == session_id, Attempt.ended_at.is_(None)))


def last_attempt(engine: Engine, session_id: int) -> AttemptInfo | None:
    with Orm(engine) as orm:
        row = orm.scalars(
            select(Attempt).where(Attempt.session_id == session_id).order_by(Attempt.number.desc()).limit(1)
        ).first()
        return to_info(AttemptInfo, row) if row else None


def previous_attempt(engine: Engine, run_id: str, attempt_id: int) -> AttemptInfo | None:
    """The run's attempt before that one."""
    with Orm(engine) as orm:
        chosen = select(Attempt).join(SessionRow, SessionRow.id == Attempt.session_id)
        chosen = chosen.where(SessionRow.run_id == run_id, Attempt.id < attempt_id).order_by(Attempt.id.desc()).limit(1)
        row = orm.scalars(chosen).first()
        return to_info(AttemptInfo, row) if row else None


def attempts(engine: Engine, run_id: str, *, newest: int | None = None) -> list[AttemptInfo]:
    """All attempts of a run, or of its newest sessions, oldest first."""
    with Orm(engine) as orm:
        chosen = select(Attempt).where(Attempt.session_id.in_(_newest(run_id, newest))).order_by(Attempt.id)
        return [to_info(AttemptInfo, row) for row in orm.scalars(chosen)]


def attempts_of_sessions(engine: Engine, session_ids: Sequence[int]) -> list[AttemptInfo]:
    """All attempts of these sessions, oldest first."""
    with Orm(engine) as orm:
        chosen = select(Attempt).where(Attempt.session_id.in_(session_ids)).order_by(Attempt.id)
        return [to_info(AttemptInfo, row) for row in orm.scalars(chosen)]


def outcome_counts(engine: Engine, run_id: str) -> dict[Outcome, int]:
    """How many attempts of the run have ended so."""
    with Orm(engine) as orm:
        chosen = (
            select(Attempt.outcome, func.count())
            .join(SessionRow, SessionRow.id == Attempt.session_id)
            .where(SessionRow.run_id == run_id, Attempt.outcome.is_not(None))
            .group_by(Attempt.outcome)
        )
        return {outcome: count for outcome, count in orm.execute(chosen) if outcome is not None}


def max_steps(engine: Engine, run_id: str) -> dict[str, int]:
    """The highest step of each stage that has been launched."""
    with Orm(engine) as orm:
        chosen = (
            select(Attempt.stage, func.max(Attempt.last_step))
            .join(SessionRow, SessionRow.id == Attempt.session_id)
            .where(SessionRow.run_id == run_id)
            .group_by(Attempt.stage)
        )
        return {row[0]: row[1] for row in orm.execute(chosen)}


def max_step(engine: Engine, run_id: str, stage: str, *, before_attempt: int, since: datetime | None = None) -> int:
    """The highest step of a stage that an earlier attempt has come to; `since`: when the stage was begun anew."""
    with Orm(engine) as orm:
        chosen = select(func.max(Attempt.last_step)).join(SessionRow, SessionRow.id == Attempt.session_id)
        chosen = chosen.where(SessionRow.run_id == run_id, Attempt.stage == stage, Attempt.id < before_attempt)
        return orm.scalar(chosen.where(Attempt.started_at >= since) if since else chosen) or 0


def has_launch_since(engine: Engine, rung: RungInfo) -> bool:
    """Whether an attempt of the rung's stage was launched after it: by the order of attempts, for the clock may be put back."""
    number = str(rung.settings.get("attempt", "")).rpartition(".")[2]
    is_later = Attempt.started_at >= rung.at
    if rung.session_id is not None:
        is_later |= Attempt.session_id > rung.session_id
        if number.isdecimal() and len(number) < 10:
            is_later |= (Attempt.session_id == rung.session_id) & (Attempt.number > int(number))
    with Orm(engine) as orm:
        chosen = select(Attempt.id).join(SessionRow, SessionRow.id == Attempt.session_id)
        chosen = chosen.where(SessionRow.run_id == rung.run_id, Attempt.stage == rung.stage, is_later)
        return orm.scalar(chosen.limit(1)) is not None


def attempts_without_progress(engine: Engine, run_id: str) -> int:
    """Attempts in a row, up to the newest ended one, that crashed or met the wall and came no step further.

    Counting ends at a session that failed: who starts it again has done something about it. One that ran out of memory
    does not count: the ladder's length bounds those. Nor does one that was lost with all else. Each that came further ends
    the counting.
    """
    with Orm(engine) as orm:
        chosen = (
            select(Attempt.made_progress, Attempt.outcome, SessionRow.phase)
            .join(SessionRow, SessionRow.id == Attempt.session_id)
            .where(SessionRow.id.in_(_newest(run_id, 50)), Attempt.ended_at.is_not(None))
            .order_by(Attempt.id.desc())
            .limit(50)
        )
        count = 0
        for made_progress, outcome, phase in orm.execute(chosen):
            if made_progress or outcome == Outcome.FINISHED or phase == Phase.FAILED:
                break
            count += outcome not in UNCOUNTED
        return count


RECENT_SESSIONS = 200
"""What a run has lately been through: enough to tell how often it fails, and read at once after years, too."""


def duration_and_failures(engine: Engine, run_id: str) -> tuple[float, int]:
    """Seconds that the run's newest 200 ended sessions lasted, and attempts in them that crashed, hung or were lost
    (failures; walls are none)."""
    recent = _newest(run_id, RECENT_SESSIONS)
    with Orm(engine) as orm:
        ended = orm.execute(
            select(SessionRow.started_at, SessionRow.ended_at).where(
                SessionRow.id.in_(recent), SessionRow.ended_at.is_not(None)
            )
        )
        lasted_s = ((end - start).total_seconds() for start, end in ended if end is not None)
        seconds = sum(max(0.0, one_s) for one_s in lasted_s)  # the wall clock may have been put back meanwhile
        chosen = select(func.count(Attempt.id)).where(Attempt.session_id.in_(recent))
        return seconds, orm.scalar(
            chosen.where(Attempt.outcome.in_((Outcome.CRASHED, Outcome.HUNG, Outcome.LOST)))
        ) or 0


def _newest(run_id: str, count: int | None) -> Select[Any]:
    """The newest sessions' ids, for a query that must not look through all of them."""
    return select(SessionRow.id).where(SessionRow.run_id == run_id).order_by(SessionRow.number.desc()).limit(count)
