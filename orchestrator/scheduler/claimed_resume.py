"""The process that the daemon starts for a claimed row of the queue: it opens the session, or puts the row back.

The claim passes from the daemon to this process by an UPDATE that names the daemon as the claimant. Where that matches no row,
another daemon has released the claim meanwhile, and there is nothing to do here.
"""

from __future__ import annotations

import contextlib
import os
import random
import subprocess
import sys
import threading
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from sqlalchemy import Engine
from sqlalchemy.exc import SQLAlchemyError

from kgorch.core.codes import NotStarted
from kgorch.core.scheduling import TRIES, back_off_s
from kgorch.db import fleet, queue, queue_claims, runs
from kgorch.db.queue import Claimant
from kgorch.db.rows import ResumeInfo
from kgorch.errors import KgorchError
from kgorch.hardware.gpu_locks import GpusUnavailable, GpusUnlisted
from kgorch.platforms.profile import Profile
from kgorch.system import process_identity

if TYPE_CHECKING:
    from kgorch.admission.open_session import ReadySession
    from kgorch.admission.requests import ImportWatcher
    from kgorch.admission.resolve_run import NoSession

BY_DAEMON = "daemon"
"""`claimed_by` of the rows that a daemon has claimed."""

RENEW_S = 60.0
"""Seconds between two renewals of the lease, a fifth of queue_claims.LEASE."""

WAIT_S = 5.0
"""Seconds until the next attempt for a run whose GPUs another session locked at the last moment, or that is live."""


def own_identity(engine: Engine) -> Claimant:
    """This process as a claimant."""
    pid = os.getpid()
    return Claimant(pid, process_identity.start_ticks(pid), process_identity.boot_id(), runs.machine_of(engine))


def token(resume_id: int, claimant: Claimant) -> str:
    """The claim as text, for the command line of the process that is started for it."""
    return f"{resume_id}:{claimant.pid}:{claimant.ticks}:{claimant.boot}:{claimant.machine}"


def resume(
    engine: Engine, home: Path, profile: Profile, name: str, claim: str, watcher: ImportWatcher
) -> ReadySession | NoSession | None:
    """Open a session for the run of a claimed row; None where the claim was released, or the row has to wait.

    Args:
        claim: as `token` writes it.

    Raises: as session_start.resume, once the row is put back; KgorchError for a text that is no claim.
    """
    # imported here: the daemon, which imports this module, would keep in memory for months what only its children need
    from kgorch.admission import resolve_run, session_start
    from kgorch.admission.moved_state import StateElsewhere
    from kgorch.admission.requests import LocalState, ResumeRequest

    try:
        number, pid, ticks, boot, machine = claim.split(":")
        resume_id, before = int(number), Claimant(int(pid), int(ticks), boot, machine)
    except ValueError:
        raise KgorchError(f"--claimed {claim!r} is not a claim of a daemon") from None
    if not queue_claims.hand_over(engine, resume_id, before, own_identity(engine), by=BY_DAEMON):
        return None
    is_over = threading.Event()
    threading.Thread(target=_renew_lease, args=(engine, resume_id, is_over), name="lease", daemon=True).start()
    try:
        result = session_start.resume(
            LocalState(engine, home, profile), ResumeRequest(name, by_user=False), watcher=watcher
        )
    except GpusUnlisted as error:  # a driver that fails may need a user: after some tries one is notified
        _put_back_after_error(engine, resume_id, error)
        raise
    except (GpusUnavailable, StateElsewhere) as error:
        _put_back_to_wait(engine, resume_id, str(error.what))
        return None
    except Exception as error:
        _put_back_after_error(engine, resume_id, error)
        raise
    finally:
        is_over.set()
    if isinstance(result, resolve_run.NoSession):
        if result.why in (NotStarted.FINISHED, NotStarted.FAILED):
            queue.mark_started(engine, result.run.id, own_identity(engine), by=BY_DAEMON)
        elif result.why is NotStarted.LIVE:  # a run that waits for its quota has a new row (open_session)
            _put_back_to_wait(engine, resume_id, "it is live under another supervisor")
    return result


def put_back(engine: Engine, row: ResumeInfo, claimant: Claimant, error: str, *, immediate: bool = False) -> bool:
    """Give up a claim after a failed start: the row is due again after a pause, or it has failed, which users are notified of.

    Args:
        immediate: due again without a pause.

    Returns: False where the claimant no longer has the claim.
    """
    failed_starts = row.failed_starts + 1
    wait_s = 0.0 if immediate else back_off_s(failed_starts, random.random())
    due_at = None if failed_starts >= TRIES else fleet.server_now(engine) + timedelta(seconds=wait_s)
    is_ours = queue_claims.put_back(engine, row.id, claimant, due_at=due_at, failed_starts=failed_starts, error=error)
    if is_ours and due_at is None:
        notify_of_failure(row.run_id)
    return is_ours


def notify_of_failure(run_id: str) -> None:
    """Start the process that notifies users: the daemon reads no plans, and must not wait for a webhook."""
    with contextlib.suppress(OSError):
        subprocess.Popen(
            [sys.executable, "-m", "kgorch.cli", "notify", "given-up", run_id],
            start_new_session=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )


def _put_back_after_error(engine: Engine, resume_id: int, error: Exception) -> None:
    text = error.what if isinstance(error, KgorchError) else f"{type(error).__name__}: {error}"
    with contextlib.suppress(SQLAlchemyError):  # the daemon puts the row back when this process has ended
        for entry in queue_claims.claimed_entries(engine):
            if entry.resume.id == resume_id:
                put_back(engine, entry.resume, own_identity(engine), text)


def _put_back_to_wait(engine: Engine, resume_id: int, why: str) -> None:
    """Make the row due again soon. That counts as no failed start: the run had no fault, there was no room for it."""
    with contextlib.suppress(SQLAlchemyError):
        due_at = fleet.server_now(engine) + timedelta(seconds=WAIT_S)
        for entry in queue_claims.claimed_entries(engine):
            if entry.resume.id == resume_id:
                failed_starts = entry.resume.failed_starts
                queue_claims.put_back(
                    engine, resume_id, own_identity(engine), due_at=due_at, failed_starts=failed_starts, error=why
                )


def _renew_lease(engine: Engine, resume_id: int, is_over: threading.Event) -> None:
    """Keep the claim while the state of a run is fetched and verified, which may take longer than a lease."""
    while not is_over.wait(min(RENEW_S, fleet.lease_of(engine).total_seconds() / 5)):
        with contextlib.suppress(SQLAlchemyError):  # locked: the lease outlasts four more renewals
            queue_claims.renew(engine, resume_id, own_identity(engine))
