"""Which due row of the queue the daemon starts next, and the claim on it."""

from __future__ import annotations

from datetime import datetime, timedelta
from itertools import islice
from typing import NamedTuple

from sqlalchemy import Engine

from kgorch.core import fleet as core_fleet
from kgorch.core import scheduling as core
from kgorch.core.scheduling import FreeDevices, QueuedRun
from kgorch.db import active_sessions, queue, queue_claims
from kgorch.db.queue import Claimant, Entry
from kgorch.db.queue_claims import QueueSnapshot
from kgorch.db.rows import ResumeInfo
from kgorch.scheduler.claimed_resume import BY_DAEMON
from kgorch.scheduler.local_devices import LocalDevices
from kgorch.scheduler.session_processes import has_supervisor, is_training

CANDIDATES = 64
"""Most due rows to choose from: a row with 64 before it in the order of the queue would not be the next one anyway."""


class Reachable(NamedTuple):
    """Of a fleet, the runs that this machine may take.

    Attributes:
        owners: machines whose runs have their files here: this one, and those with the same state folder.
        alive: machines that live.
        held: ids of runs whose files could not be reached lately.
    """

    owners: frozenset[str] = frozenset()
    alive: frozenset[str] = frozenset()
    held: frozenset[str] = frozenset()


ALL = Reachable()
"""Of a machine without a fleet: all runs are its own."""


def claim_next(
    engine: Engine, devices: LocalDevices, claimant: Claimant, now: datetime, reachable: Reachable = ALL
) -> Entry | None:
    """Claim the row to start next. None where none is due and fits, or another process was quicker."""
    # The snapshot is read before the lists: what is claimed or opened in between makes the claim fail, instead of a GPU being
    # given away twice.
    newest_session = queue_claims.newest_session_id(engine)
    claims = [entry.resume for entry in queue_claims.claimed_entries(engine, only_ours=True)]
    active = [session for session in active_sessions.all_of(engine) if not session.is_elsewhere]
    live = [session for session in active if has_supervisor(session)]
    orphans = [session for session in active if session not in live and is_training(engine, session.run_id)]
    # Training without a supervisor comes first, whatever has priority: it has its GPUs already and needs no room.
    due_orphans = (queue.due_entry(engine, session.run_id, now) for session in orphans)
    entry = next((entry for entry in due_orphans if entry), None)
    entries = [entry] if entry else _select(engine, devices.count_free([*live, *orphans], claims), now, reachable)
    if not entries:
        return None
    snapshot, ids = QueueSnapshot(len(claims), newest_session), [entry.resume.id for entry in entries]
    claimed_id = queue_claims.claim_first(engine, ids, claimant, by=BY_DAEMON, snapshot=snapshot)
    return next((entry for entry in entries if entry.resume.id == claimed_id), None)


def _select(engine: Engine, free: FreeDevices, now: datetime, reachable: Reachable) -> list[Entry]:
    """The rows of the queue that fit, the first one first. Without a fleet nobody else takes that one: it is the only one."""
    fits_shared, fits_exclusive = (core.has_room(free, share=share) for share in (True, False))
    if not fits_shared and not fits_exclusive:
        return []  # without room there is no need to sort the due rows
    candidates = queue.due_entries(
        engine, now, limit=CANDIDATES, only_sharing=not fits_exclusive, reachable=reachable.owners, but=reachable.held
    )
    due = {entry.resume.id: entry for entry in candidates if _may_start(entry, now, reachable)}
    ids = core.fitting([_queued_run(entry.resume, now) for entry in due.values()], free)
    return [due[row_id] for row_id in islice(ids, None if reachable.owners else 1)]


def _may_start(entry: Entry, now: datetime, reachable: Reachable) -> bool:
    waits_s = (now - entry.resume.due_at).total_seconds() if entry.resume.due_at else 0.0
    is_owner = not reachable.owners or entry.machine in reachable.owners or entry.resume.last_session_at is None
    is_left_to_owner = not core_fleet.may_try(
        is_owner=is_owner or not entry.machine, is_owner_alive=entry.machine in reachable.alive, waits_s=waits_s
    )
    return not is_left_to_owner and _is_back_off_over(entry.resume, now)


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
