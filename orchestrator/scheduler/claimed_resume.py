"""What the daemon starts for a row of the queue that it has claimed: takes the claim over, opens the session, or puts the row back.

The claim passes from the daemon to this process by an UPDATE that names the daemon; where that finds nothing, somebody has taken
the claim for dead, and there is nothing to do here.
"""

from __future__ import annotations

import contextlib
import os
import random
import subprocess
import sys
import threading
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from sqlalchemy import Engine
from sqlalchemy.exc import SQLAlchemyError

from db import queue
from db.queue import Claimant
from db.records import ResumeInfo
from orchestrator.core.codes import NotStarted
from orchestrator.core.scheduling import TRIES, back_off_s
from orchestrator.errors import KgorchError
from orchestrator.hardware.gpu_locks import GpusUnavailable
from orchestrator.platforms.profile import Profile
from orchestrator.system import process_identity

if TYPE_CHECKING:
    from orchestrator.admission.open_session import Opened
    from orchestrator.admission.resolve_run import Nothing
    from orchestrator.admission.source_scan import Watcher

BY_DAEMON = "daemon"
RENEW_S = 60.0
HELD_AGAIN_S = 5.0
"""After which a run whose GPUs were taken by another at the last moment, or that is live, is looked at again."""


def us() -> Claimant:
    return Claimant(os.getpid(), process_identity.start_ticks(os.getpid()), process_identity.boot_id())


def token(resume_id: int, claimant: Claimant) -> str:
    """How a claim is told to the process that is started for it."""
    return f"{resume_id}:{claimant.pid}:{claimant.ticks}:{claimant.boot}"


def resume(
    engine: Engine, home: Path, profile: Profile, name: str, told: str, watcher: Watcher
) -> Opened | Nothing | None:
    """Go on with the run of a claimed row; None when the claim is no more, or has to wait.

    Raises: as session_start.resume, once the row is put back.
    """
    from orchestrator.admission import resolve_run, session_start  # the daemon needs none of it, for months
    from orchestrator.admission.requests import LocalState

    try:
        number, pid, ticks, boot = told.split(":")
        resume_id, before = int(number), Claimant(int(pid), int(ticks), boot)
    except ValueError:
        raise KgorchError(f"--claimed {told!r} is no claim of a daemon's") from None
    if not queue.hand_over(engine, resume_id, before, us(), by=BY_DAEMON):
        return None
    over = threading.Event()
    threading.Thread(target=_renew, args=(engine, resume_id, over), name="lease", daemon=True).start()
    try:
        opened = session_start.resume(LocalState(engine, home, profile), name, watcher=watcher, by_user=False)
    except GpusUnavailable as error:
        _wait_on(engine, resume_id, str(error.what))
        return None
    except Exception as error:
        _put_back(engine, resume_id, error)
        raise
    finally:
        over.set()
    if isinstance(opened, resolve_run.Nothing):
        if opened.why is NotStarted.FINISHED:
            queue.taken(engine, opened.run.id, by=BY_DAEMON, **us()._asdict())
        elif opened.why is NotStarted.LIVE:  # for the quota it waits in a row of its own
            _wait_on(engine, resume_id, "it is live under another supervisor")
    return opened


def put_back(engine: Engine, row: ResumeInfo, claimant: Claimant, error: str, *, at_once: bool = False) -> bool:
    """The row after a try in vain: due again after a while, or failed and people told. False where it is another's by now."""
    tries = row.tries + 1
    wait_s = 0.0 if at_once else back_off_s(tries, random.random())
    due_at = None if tries >= TRIES else datetime.now(UTC) + timedelta(seconds=wait_s)
    done = queue.put_back(engine, row.id, claimant, due_at=due_at, tries=tries, error=error)
    if done and due_at is None:
        _have_people_told(row.run_id)
    return done


def _have_people_told(run_id: str) -> None:
    """By a process of its own: the daemon reads no plans, and waits for nobody's webhook."""
    with contextlib.suppress(OSError):
        subprocess.Popen(
            [sys.executable, "-m", "orchestrator.cli", "notify", "given-up", run_id],
            start_new_session=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )


def _put_back(engine: Engine, resume_id: int, error: Exception) -> None:
    said = error.what if isinstance(error, KgorchError) else f"{type(error).__name__}: {error}"
    with contextlib.suppress(SQLAlchemyError):  # then the daemon sees that we have ended
        for entry in queue.claimed(engine):
            if entry.resume.id == resume_id:
                put_back(engine, entry.resume, us(), said)


def _wait_on(engine: Engine, resume_id: int, why: str) -> None:
    """No try in vain: there was no room."""
    due_at = datetime.now(UTC) + timedelta(seconds=HELD_AGAIN_S)
    with contextlib.suppress(SQLAlchemyError):
        for entry in queue.claimed(engine):
            if entry.resume.id == resume_id:
                queue.put_back(engine, resume_id, us(), due_at=due_at, tries=entry.resume.tries, error=why)


def _renew(engine: Engine, resume_id: int, over: threading.Event) -> None:
    """While the state of a run is fetched and verified, which may take long, the claim holds."""
    while not over.wait(RENEW_S):
        with contextlib.suppress(SQLAlchemyError):
            queue.renew(engine, resume_id, us())
