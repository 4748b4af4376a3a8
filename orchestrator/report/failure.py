"""What ended a run that failed, on ten lines: of the newest attempt, what failed first (core/outcome.py says what that is)."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

from sqlalchemy import Engine

from db import sessions
from db.records import AttemptInfo, RunInfo
from orchestrator.core import outcome
from orchestrator.runtime import launcher

LINES = 5
"""Of a traceback's end: two frames and the error."""


def of_run(engine: Engine, run: RunInfo) -> dict[str, Any] | None:
    """Of a run that has failed; None where its processes did nothing to it."""
    tries = reversed(sessions.attempts(engine, run.id, newest=50))
    streak = list(itertools.takewhile(lambda item: item.outcome in ("crashed", "hung"), tries))
    if not streak:
        return None
    newest = streak[0]
    rank, at, frames = _first(engine, run, newest)
    folder = Path(newest.folder)
    shown = "--stacks" if rank is None and frames else f"--rank {rank or 0} -n 0"
    return {
        "what": newest.cause,
        "rank": rank,
        "at": at,
        "step": newest.last_step,
        "times": len(streak),
        "traceback": frames,
        "log": str(folder / f"rank{rank or 0}.log"),
        "command": f"kgorch logs {run.name} {shown}",
    }


def _first(engine: Engine, run: RunInfo, attempt: AttemptInfo) -> tuple[int | None, str | None, list[str]]:
    """The rank that failed first, when, and the end of its traceback; of a hang, where the ranks stood."""
    failed = outcome.in_order(launcher.records(Path(attempt.folder), attempt.ranks))
    if failed:
        lines = [line for line in failed[0].traceback.splitlines() if line.strip(" ^~")]
        return failed[0].rank, failed[0].at or None, lines[-LINES:]
    ended_at = attempt.ended_at.isoformat() if attempt.ended_at else None
    stacks = sessions.newest_event(engine, run.id, ("stacks",), session_id=attempt.session_id)
    if stacks is None or stacks.facts.get("attempt") != Path(attempt.folder).name:
        return None, ended_at, []
    told = [(name, text) for name, text in stacks.facts.items() if name.startswith("rank")]
    return None, ended_at, [f"{name}: {text}" for name, text in told[:LINES]]
