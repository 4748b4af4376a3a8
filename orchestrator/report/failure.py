"""What ended a run that failed, on ten lines: of the newest attempt, what failed first (core/attempt_outcome.py)."""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from typing import Any

from sqlalchemy import Engine

from db import sessions
from db.records import AttemptInfo, RunInfo
from orchestrator.core import attempt_outcome
from orchestrator.core.codes import EventKind, Outcome
from orchestrator.launch import launcher

LINES = 5
"""Of a traceback's end: two frames and the error."""

FRAME = re.compile(r'^ *File "(?P<file>[^"]+)", line (?P<line>\d+)', re.MULTILINE)
ELSEWHERE = ("/site-packages/", "/dist-packages/", "/lib/python", "/orchestrator/worker/", "<frozen ")
"""What is in the path of code that is not the person's own."""


def of_run(engine: Engine, run: RunInfo) -> dict[str, Any] | None:
    """Of a run that has failed; None where its processes did nothing to it."""
    tries = reversed(sessions.attempts(engine, run.id, newest=50))
    streak = list(itertools.takewhile(lambda item: item.outcome in (Outcome.CRASHED, Outcome.HUNG), tries))
    if not streak:
        return None
    newest = streak[0]
    rank, at, place, frames = _first(engine, run, newest)
    folder = Path(newest.folder)
    shown = "--stacks" if rank is None and frames else f"--rank {rank or 0} -n 0"
    return {
        "what": newest.cause,
        "rank": rank,
        "where": place,
        "at": at,
        "step": newest.last_step,
        "times": len(streak),
        "traceback": frames,
        "log": str(folder / f"rank{rank or 0}.log"),
        "command": f"kgorch logs {run.name} {shown}",
    }


def of_attempt(attempt: AttemptInfo) -> tuple[str | None, list[str]]:
    """Where the rank that failed first stood, as `train.py:17`, and the end of its traceback; None and nothing where no rank wrote
    it down."""
    failed = attempt_outcome.in_order(launcher.records(Path(attempt.folder), attempt.ranks))
    return (where(failed[0].traceback), _end_of(failed[0].traceback)) if failed else (None, [])


def where(traceback: str) -> str | None:
    """File and line of the innermost frame of a person's own code; of any code where there is none of theirs."""
    frames = [(found["file"], found["line"]) for found in FRAME.finditer(traceback)]
    theirs = [frame for frame in frames if not any(part in frame[0] for part in ELSEWHERE)]
    return ":".join((theirs or frames)[-1]) if frames else None


def _end_of(traceback: str) -> list[str]:
    """Its last lines; those of Python's own start of a program, which have no source, tell nothing."""
    lines = [line for line in traceback.splitlines() if line.strip(" ^~")]
    return [line for line in lines if not line.startswith(("Traceback (most recent", '  File "<frozen '))][-LINES:]


def _first(engine: Engine, run: RunInfo, attempt: AttemptInfo) -> tuple[int | None, str | None, str | None, list[str]]:
    """The rank that failed first, when, where, and the end of its traceback; of a hang, where the ranks stood."""
    failed = attempt_outcome.in_order(launcher.records(Path(attempt.folder), attempt.ranks))
    if failed:
        told = failed[0].traceback
        return failed[0].rank, failed[0].at or None, where(told), _end_of(told)
    ended_at = attempt.ended_at.isoformat() if attempt.ended_at else None
    stacks = sessions.newest_event(engine, run.id, (EventKind.STACKS,), session_id=attempt.session_id)
    if stacks is None or stacks.facts.get("attempt") != Path(attempt.folder).name:
        return None, ended_at, None, []
    stood = [(name, text) for name, text in stacks.facts.items() if name.startswith("rank")]
    return None, ended_at, None, [f"{name}: {text}" for name, text in stood[:LINES]]
