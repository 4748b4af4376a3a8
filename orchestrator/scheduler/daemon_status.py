"""The daemon's answer to `status`, which `kgorch daemon status --json` prints."""

from __future__ import annotations

import os
from datetime import UTC, datetime

from sqlalchemy import Engine
from sqlalchemy.exc import SQLAlchemyError

from kgorch.db import active_sessions, queue
from kgorch.scheduler.daemon_api import Answer
from kgorch.scheduler.local_devices import LocalDevices
from kgorch.scheduler.session_processes import has_supervisor


def describe(engine: Engine, devices: LocalDevices, now: datetime, trouble: str) -> Answer:
    """The sessions and the queue of this daemon; `ok` is false while the database cannot be read.

    Args:
        trouble: why the database could not be used at the last look; empty otherwise.
    """
    try:
        due, waiting, next_due_at = queue.counts(engine, now)
        names = [
            session.run
            for session in active_sessions.all_of(engine)
            if has_supervisor(session) and not session.is_elsewhere
        ]
    except SQLAlchemyError as error:
        return {"ok": False, "error": str(getattr(error, "orig", error))}
    return {
        "ok": True,
        "pid": os.getpid(),
        "at_once": devices.max_sessions(),
        "gpus": [gpu.visible for gpu in devices.gpus()],
        "running": sorted(names),
        "due": due,
        "waiting": waiting,
        "next_due_at": next_due_at.astimezone(UTC).isoformat() if next_due_at else None,
        "trouble": trouble or None,
    }
