"""Charges of sessions that are over and whose supervisors could not write their last ones: they had died, or had no database."""

from __future__ import annotations

import contextlib
import json
from datetime import UTC, datetime, timedelta
from pathlib import Path

from sqlalchemy import Engine

from kgorch.core.limits import quota_windows
from kgorch.core.limits.quota_windows import Never, Window
from kgorch.db import charges, fleet, runs, sessions
from kgorch.db.rows import AttemptInfo, SessionInfo
from kgorch.limits import quota_pools
from kgorch.system import process_identity
from kgorch.system.clock import boottime_s

SLACK = timedelta(seconds=60)
"""How much later than the newest charge the newest heartbeat of a session may be. A supervisor that writes heartbeats charges as
well, so a larger difference is a wall clock that has jumped."""

Spans = list[tuple[datetime, float]]
"""Times of usage: when each started, and its seconds."""


def complete(engine: Engine, row: SessionInfo, attempt: AttemptInfo | None, window: Window | None) -> None:
    """Charge a session that is over up to the last sign of it.

    Args:
        attempt: its last one; None without.
        window: of the quota; None where no quota is counted any more.
    """
    last = charges.newest(engine, row.id)
    if last is None:
        return
    heartbeat_at, (ended_at, ended_s) = row.heartbeat_at, _ended_at(attempt)
    if heartbeat_at is not None:
        heartbeat_at = min(heartbeat_at, last.started_at + timedelta(seconds=last.used_s) + SLACK)
    if row.boot_id == process_identity.boot_id():
        if row.machine and 0 <= ended_s <= boottime_s():
            # charges of a fleet are by its server's clock, whatever this machine's clock said at the end
            ended_at = fleet.server_now(engine) - timedelta(seconds=boottime_s() - ended_s)
        elif row.machine and ended_at is not None:
            ended_at += fleet.server_now(engine) - datetime.now(UTC)
        if ended_at is not None:
            ended_at = min(ended_at, last.started_at + timedelta(seconds=boottime_s()))
    until_at = max(at for at in (heartbeat_at, ended_at, last.started_at) if at is not None)
    if (
        row.wall_at is not None and not row.machine
    ):  # nothing of the session ran after that, whatever the wall clock says by now
        until_at = min(until_at, row.wall_at)
    spans = spans_of(window or Never(), last.started_at, until_at)
    if sum(span_s for _, span_s in spans) > last.used_s:
        charges.charge(engine, row.id, last.pool, spans, factor=last.factor, accelerator=last.accelerator)


def complete_taken(engine: Engine) -> None:
    """Charge the sessions of this machine that another one of the fleet has ended, up to the end of their processes.

    The other one has charged them up to the last heartbeat. Here they went on, and their supervisors may have ended before the
    database could be used again.
    """
    if fleet.settings(engine) is None:
        return
    for row in charges.cut_off_sessions(engine, runs.machine_of(engine), process_identity.boot_id()):
        pool = charges.pool(engine, row.pool)
        attempt, window = sessions.last_attempt(engine, row.id), quota_pools.quota_of(pool).window if pool else None
        complete(engine, row._replace(heartbeat_at=None), attempt, window)


def spans_of(window: Window, started_at: datetime, until_at: datetime) -> Spans:
    """A time of usage, one span for each charge."""
    return [(start, (end - start).total_seconds()) for start, end in quota_windows.pieces(window, started_at, until_at)]


def _ended_at(attempt: AttemptInfo | None) -> tuple[datetime | None, float]:
    """When the processes of an attempt had ended, by its shim's record: by the wall clock, and in seconds since the boot.

    None, -1 where that is missing or not valid.
    """
    at, at_s, content = None, -1.0, None
    if attempt is not None:
        with contextlib.suppress(OSError, ValueError):
            content = json.loads(Path(attempt.folder, "exit.json").read_text())
    if isinstance(content, dict):
        with contextlib.suppress(KeyError, TypeError, ValueError):
            at = datetime.fromisoformat(content["at"])
        if type(content.get("at_s")) is float:
            at_s = content["at_s"]
    return at if at and at.tzinfo else None, at_s
