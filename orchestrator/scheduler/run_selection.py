"""Which due row of the queue the daemon starts next, and the claim on it."""

from __future__ import annotations

from datetime import datetime, timedelta

from sqlalchemy import Engine

from kgorch.core import scheduling as core
from kgorch.core.scheduling import FreeDevices, QueuedRun
from kgorch.db import queue
from kgorch.db.queue import Claimant, Entry, QueueSnapshot
from kgorch.db.rows import ResumeInfo
from kgorch.scheduler.claimed_resume import BY_DAEMON
from kgorch.scheduler.local_devices import LocalDevices
from kgorch.scheduler.session_processes import has_supervisor, is_training

CANDIDATES = 64
"""Most due rows to choose from: a row with 64 before it in the order of the queue would not be the next one anyway."""


def claim_next(engine: Engine, devices: LocalDevices, claimant: Claimant, now: datetime) -> Entry | None:
    """Claim the row to start next. None where none is due and fits, or another process was quicker."""
    # The snapshot is read before the lists: what is claimed or opened in between makes the claim fail, instead of a GPU being
    # given away twice.
    newest_session = queue.newest_session_id(engine)
    claims = [entry.resume for entry in queue.claimed_entries(engine)]
    active = queue.active_sessions(engine)
    live = [session for session in active if has_supervisor(session)]
    orphans = [session for session in active if session not in live and is_training(engine, session.run_id)]
    # Training without a supervisor comes first, whatever has priority: it has its GPUs already and needs no room.
    due_orphans = (queue.due_entry(engine, session.run_id, now) for session in orphans)
    entry = next((entry for entry in due_orphans if entry), None)
    if entry is None:
        entry = _select(engine, devices.count_free([*live, *orphans], claims), now)
    if entry is None:
        return None
    snapshot = QueueSnapshot(len(claims), newest_session)
    return entry if queue.claim(engine, entry.resume.id, claimant, by=BY_DAEMON, snapshot=snapshot) else None


def _select(engine: Engine, free: FreeDevices, now: datetime) -> Entry | None:
    """The first row of the queue that fits."""
    fits_shared, fits_exclusive = (core.has_room(free, share=share) for share in (True, False))
    if not fits_shared and not fits_exclusive:
        return None  # without room there is no need to sort the due rows
    candidates = queue.due_entries(engine, now, limit=CANDIDATES, only_sharing=not fits_exclusive)
    due = {entry.resume.id: entry for entry in candidates if _is_back_off_over(entry.resume, now)}
    row_id = core.choose([_queued_run(entry.resume, now) for entry in due.values()], free)
    return None if row_id is None else due[row_id]


def _is_back_off_over(row: ResumeInfo, now: datetime) -> bool:
    """Whether enough time has passed for a run whose sessions end again and again without progress.

    A row with an error was put back with its pause in `due_at` already.
    """
    if row.failed_starts < 2 or row.last_error or row.due_at is None:
        return True
    return now >= row.due_at + timedelta(seconds=core.back_off_s(row.failed_starts - 1, 0.5))


def _queued_run(row: ResumeInfo, now: datetime) -> QueuedRun:
    waits_s = (now - row.due_at).total_seconds() if row.due_at else 0.0
    return QueuedRun(row.id, row.ranks, row.share, waits_s)
