"""What the supervisor writes into the database: in order, by a thread of its own.

The loop hands an entry over and goes on. A database that is locked, or whose disk is full, delays the entries. It delays neither an
order to the ranks nor a kill before the wall. A reader that needs what an entry writes waits for the entry first (`flush`).
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import Engine
from sqlalchemy.exc import InterfaceError, InternalError, OperationalError, SQLAlchemyError, TimeoutError

from kgorch.core.codes import EventKind, Outcome
from kgorch.core.session.events import AttemptDiverged, JournalNote, WallMoved
from kgorch.core.session.lifecycle import NextSession, Transition
from kgorch.db import fleet, sessions
from kgorch.db.runs import now
from kgorch.launch import remedies
from kgorch.launch.attempts import LaunchedAttempt
from kgorch.launch.launcher import DiskUnwritable
from kgorch.limits.quota_ledger import Ledger
from kgorch.supervisor import ending_files
from kgorch.supervisor.live_session import LiveSession

Write = Callable[[], None]

DATABASE_OUTAGES = (OperationalError, InterfaceError, InternalError, TimeoutError)
"""Errors of a database that is locked or away, or whose disk is full: a later try may succeed."""

AGAIN_S = 0.5
"""Between two tries of an entry that the database did not take. It has waited for other writers before (db/engine.py)."""

SAY_S = 30.0
"""Between two lines on stderr about a database that cannot be written."""


def say(text: str) -> None:
    """On stderr, if that can be written: it may be a file on the very disk that is full."""
    with contextlib.suppress(OSError):
        print(text, file=sys.stderr, flush=True)


class Journal:
    """Of one session. Any thread may write; entries are written in the order in which they were handed over.

    Attributes:
        on_note: is given each note besides.
    """

    def __init__(self, engine: Engine, run_id: str, session_id: int) -> None:
        self._engine, self._run_id, self._session_id = engine, run_id, session_id
        self.on_note: Callable[[JournalNote], None] = lambda _: None
        self._waiting: deque[Write] = deque()
        self._newest: dict[str, Write] = {}
        self._changed = threading.Condition()
        self._is_closed, self._is_taken, self._said_s = False, False, -SAY_S
        self._thread = threading.Thread(target=self._run, name="journal", daemon=True)
        self._thread.start()

    def write(self, entry: Write) -> None:
        """An entry is a whole transaction."""
        with self._changed:
            if self._is_taken:
                return
            self._waiting.append(entry)
            self._changed.notify_all()

    def note(self, kind: str, facts: dict[str, Any]) -> None:
        """An event that moves nothing."""
        self.on_note(JournalNote(kind, facts))
        at = now()  # the same in each try
        self.write(lambda: sessions.add_event(self._engine, self._run_id, kind, facts, self._session_id, at=at))

    def refresh(self, name: str, entry: Write) -> None:
        """An entry that the next one of its name makes worthless: written when nothing else waits, let go if it cannot be."""
        with self._changed:
            self._newest[name] = entry
            self._changed.notify_all()

    def flush(self, timeout_s: float) -> bool:
        """Wait until all entries are written, at most so long. Whether they are."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._waiting, timeout_s)

    @property
    def is_taken(self) -> bool:
        """Whether another machine of the fleet has ended this session."""
        return self._is_taken

    def close(self, timeout_s: float) -> bool:
        """The same, and nothing is written any more."""
        is_written = self.flush(timeout_s)
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        return is_written

    def _run(self) -> None:
        while entry := self._next():
            entry()

    def _next(self) -> Write | None:
        with self._changed:
            self._changed.wait_for(lambda: self._is_closed or self._waiting or self._newest)
            if self._is_closed:
                return None
            if self._waiting:
                return self._write_first
            refreshed = self._newest.pop(next(iter(self._newest)))
            return lambda: self._refresh(refreshed)

    def _write_first(self) -> None:
        """It stays first while the database does not take it."""
        if self._attempted(self._waiting[0]):
            with self._changed:
                if self._waiting:
                    self._waiting.popleft()
                self._changed.notify_all()
        else:
            time.sleep(AGAIN_S)

    def _refresh(self, entry: Write) -> None:
        self._attempted(entry)

    def _attempted(self, entry: Write) -> bool:
        """Whether there is no sense in trying it again."""
        try:
            entry()
        except sessions.SessionTaken:
            self._drop_all()
        except (*DATABASE_OUTAGES, DiskUnwritable) as error:
            if time.monotonic() - self._said_s >= SAY_S:
                self._said_s = time.monotonic()
                cause = getattr(error, "orig", error)
                say(f"kgorch: the database cannot be written, {len(self._waiting)} entries wait: {cause}")
            return False
        except Exception as error:  # it would fail again and hold up what comes after it
            say(f"kgorch: an entry cannot be written down: {type(error).__name__}: {error}")
        return True

    def _drop_all(self) -> None:
        """Another machine trains the run now: what this session did since belongs to nobody. Its hours are charged all the same."""
        say("kgorch: another machine of the fleet has taken this run over; this session ends, and writes nothing more")
        with self._changed:
            self._is_taken = True
            self._waiting.clear()
            self._newest.clear()
            self._changed.notify_all()


def columns_of(move: Transition, attempt: LaunchedAttempt | None, step: int) -> dict[str, Any]:
    """A move as kgorch.db.sessions.record takes it, but for the session that it queues.

    Args:
        attempt: that ends with the move, having come to `step`; None where none ran.
    """
    record, session = move.record, move.session
    closes = None
    if attempt and record.outcome:
        closes = {
            "attempt_id": attempt.row.id,
            "outcome": record.outcome,
            "cause": record.cause,
            "last_step": step,
            # The plan bounds how often a remedy is taken, so one counts as progress.
            "made_progress": step > attempt.highest_step or record.outcome is Outcome.DIVERGED,
        }
    return {
        "kind": record.kind,
        "phase": session.phase,
        "facts": dict(record.facts),
        "closes": closes,
        "finishes": attempt.row.stage if attempt and record.finishes_stage else None,
        "reason": session.reason,
        "why": session.why,
    }


class Recorder:
    """Writes each move of the lifecycle in one transaction, behind the loop.

    Args:
        ledger: is charged to the end, and says when the next session may begin; None where no quota counts.
    """

    def __init__(self, live: LiveSession, journal: Journal, ledger: Ledger | None) -> None:
        self._live, self._journal, self._ledger = live, journal, ledger
        self._end: dict[str, Any] | None = None
        self._resume: NextSession | None = None

    def record(self, move: Transition) -> None:
        """The session's row is as it will be written when this returns, and the attempt that ended is none any more."""
        live, state, event = self._live, move.session, move.event
        attempt = live.attempt if move.record.outcome else None
        columns: dict[str, Any] = {
            "save_lead_s": state.save_lead_s,
            "wall_boottime_s": state.wall_s,
            "wall_kind": state.wall_kind,
            "wall_at": self._wall_at(),
        }
        step = attempt.progress_step(live.row.step, live.saved_step) if attempt else live.row.step
        entry = columns_of(move, attempt, step) | columns
        if isinstance(event, WallMoved):
            wall_at = columns["wall_at"]
            entry["facts"] = {"wall_at": wall_at and wall_at.isoformat(), "wall": state.wall_kind}
        if isinstance(event, AttemptDiverged) and attempt:
            entry["adjustment"] = remedies.columns(live.run, attempt.row, event)
        live.row = live.row._replace(phase=state.phase, reason=state.reason, why=state.why, **columns)
        if attempt:
            self._warn_of_nothing_saved(attempt, move.record.outcome)
            live.attempt = None
        resume = move.record.resume
        if state.phase.is_over:  # its last heartbeat may not have been written
            entry |= {"epoch": live.row.epoch, "step": live.row.step, "samples": live.row.samples}
            self._end, self._resume = entry, resume
        run_id, session_id, at = live.run.id, live.row.id, now()  # the same instant in each try
        self._journal.write(
            lambda: sessions.record(live.engine, run_id, session_id, **entry, at=at, resume=self._queued(resume))
        )

    def close(self, timeout_s: float) -> None:
        """Charge the rest, and wait for the journal. An end that the database does not take by then is left in a file beside it,
        for whoever settles the session and completes its charges."""
        now_s, ledger = self._live.clock.now_s(), self._ledger
        if ledger:
            # an outage may have kept charges from being written for as long as it lasts, and this is the last
            self._journal.write(lambda: ledger.charge(now_s))
        if not self._journal.close(timeout_s) and self._end:
            with contextlib.suppress(OSError):
                entry = self._end | {"resume": self._queued(self._resume)}
                ending_files.write(self._live.folder, self._live.row.number, entry)
        if ledger and self._journal.is_taken:
            with contextlib.suppress(SQLAlchemyError):  # away again: this machine's daemon does it (late_charges.py)
                ledger.charge(now_s)

    def _queued(self, resume: NextSession | None) -> dict[str, Any] | None:
        """Asks the database: not for the loop."""
        if resume is None:
            return None
        due_at: datetime | None = None
        if not resume.when_asked:
            due_at = self._live.clock.utc()
            if fleet.settings(self._live.engine):
                with contextlib.suppress(SQLAlchemyError):  # away: the ending file gets this machine's time
                    due_at = fleet.server_now(self._live.engine)
        if self._ledger and due_at:
            with contextlib.suppress(SQLAlchemyError):  # a session that comes too early looks again
                due_at = self._ledger.resume_at(self._live.state.save_lead_s, on_quota=resume.on_quota)
        return {"reason": resume.reason, "why": resume.why, "due_at": due_at}

    def _warn_of_nothing_saved(self, attempt: LaunchedAttempt, outcome: Outcome | None) -> None:
        if not self._live.is_attached and outcome is not Outcome.CRASHED:
            what = "no rank had called kgorch.attach() by then: nothing of it could be saved"
            self._journal.note(EventKind.NEVER_ATTACHED, {"stage": attempt.row.stage, "what": what})

    def _wall_at(self) -> datetime | None:
        clock, wall_s = self._live.clock, self._live.state.wall_s
        return None if wall_s is None else clock.utc() + timedelta(seconds=wall_s - clock.now_s())
