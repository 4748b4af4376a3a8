"""Which processes of a session live: its supervisor, and its training, which may outlive the supervisor."""

from __future__ import annotations

from pathlib import Path

from sqlalchemy import Engine

from kgorch.db import sessions
from kgorch.db.active_sessions import ActiveSession
from kgorch.launch import launcher
from kgorch.system import process_identity


def has_supervisor(session: ActiveSession) -> bool:
    """Whether its supervisor lives; on another machine of the fleet, by its lease."""
    if session.is_elsewhere:
        return session.is_leased
    return process_identity.is_alive(session.pid, session.ticks, session.boot)


def attempt_folder(engine: Engine, run_id: str) -> Path | None:
    """The folder of the run's newest attempt; None where its last session has launched none."""
    last = sessions.last(engine, run_id)
    attempt = sessions.last_attempt(engine, last.id) if last else None
    return Path(attempt.folder) if attempt else None


def is_training(engine: Engine, run_id: str) -> bool:
    """Whether the run's newest attempt still runs, supervised or not."""
    folder = attempt_folder(engine, run_id)
    return folder is not None and launcher.is_running(folder)
