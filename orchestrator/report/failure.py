"""Why a run failed, in ten lines: the first failure of its newest attempt (core/session/attempt_outcome.py)."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sqlalchemy import Engine

from kgorch.core.codes import EventKind, Outcome, Phase, RankError
from kgorch.core.error_codes import PATTERN
from kgorch.core.session import attempt_outcome
from kgorch.core.session.attempt_outcome import RankRecord
from kgorch.db import sessions
from kgorch.db.rows import AttemptInfo, RunInfo
from kgorch.launch import launcher

MAX_LINES = 5
"""Of a traceback's end: two frames and the error."""

OTHER_FAILURE, HANG, NO_STEP = "KG401", "KG409", "KG410"
FAILURES = {
    RankError.LADDER_EXHAUSTED: "KG502",
    RankError.LOADER_KILLED: "KG502",
    RankError.DISK_FULL: "KG501",
    RankError.CHECKPOINT: "KG203",
}
"""Error codes (core/error_codes.py) of failures that are no error of kgorch's own."""

MAX_ATTEMPTS = 50
"""Newest attempts that are counted."""

FRAME = re.compile(r'^ *File "(?P<file>[^"]+)", line (?P<line>\d+)', re.MULTILINE)
LIBRARY_PATHS = (
    "/site-packages/",
    "/dist-packages/",
    "/lib/python",
    "/kgorch/worker/",
    "/orchestrator/worker/",  # in tracebacks of attempts from before the package was named kgorch
    "<frozen ",
)
"""Parts of paths of code that is not the user's own."""


def of_run(engine: Engine, run: RunInfo) -> dict[str, Any] | None:
    """The failure of a failed run; None if no attempt of it crashed or hung last, or if another cause ended it after that."""
    # The failures in a row at the end: earlier ones were overcome.
    attempts = reversed(sessions.attempts(engine, run.id, newest=MAX_ATTEMPTS))
    streak = list(itertools.takewhile(lambda item: item.outcome in (Outcome.CRASHED, Outcome.HUNG), attempts))
    if not streak:
        return None
    newest, last = streak[0], sessions.last(engine, run.id)
    if last and last.phase == Phase.FAILED and newest.cause not in last.why:
        return None  # a launch failed after it
    rank, at, place, frames, code = _first_failure(engine, run, newest)
    folder = Path(newest.folder)
    options = "--stacks" if rank is None and frames else f"--rank {rank or 0} -n 0"
    return {
        "what": newest.cause,
        "code": code,
        "rank": rank,
        "where": place,
        "at": at,
        "step": newest.last_step,
        "times": len(streak),
        "traceback": frames,
        "log": str(folder / f"rank{rank or 0}.log"),
        "command": f"kgorch logs {run.name} {options}",
    }


def next_step(view: Mapping[str, Any], *, first: str) -> str:
    """What to type after a failure.

    Args:
        view: of the run that has failed (report/run_view.py).
        first: what comes before the next command where the failure's code says nothing else.
    """
    failure, command = view["failure"], view["next"]["command"]
    if failure and failure["code"] == NO_STEP:
        longer = "slurm submit PLAN --time …" if view.get("slurm") else "start PLAN --set session.wall=…"
        what = "with a longer time limit; or give it less to do before its first step"
        return f"kgorch {longer}, {what}, then {command}"
    return f"{first} then {command}"


def of_attempt(attempt: AttemptInfo) -> tuple[str | None, list[str]]:
    """Location of the first failure, as `train.py:17`, and the end of its traceback; None and empty if no rank recorded one."""
    failures = attempt_outcome.failures_by_cause(launcher.records(Path(attempt.folder), attempt.ranks))
    return (location(failures[0].traceback), _end_of(failures[0].traceback)) if failures else (None, [])


def location(traceback: str) -> str | None:
    """File and line of the innermost frame of the user's own code; of any code if none is the user's; None without frames."""
    frames = [(match["file"], match["line"]) for match in FRAME.finditer(traceback)]
    own = [frame for frame in frames if not any(part in frame[0] for part in LIBRARY_PATHS)]
    return ":".join((own or frames)[-1]) if frames else None


def _end_of(traceback: str) -> list[str]:
    """Its last lines, without those of Python's own start of a program, which have no source."""
    lines = [line for line in traceback.splitlines() if line.strip(" ^~")]
    return [line for line in lines if not line.startswith(("Traceback (most recent", '  File "<frozen '))][-MAX_LINES:]


def _first_failure(
    engine: Engine, run: RunInfo, attempt: AttemptInfo
) -> tuple[int | None, str | None, str | None, list[str], str]:
    """Rank, time, location, traceback and error code of the first failure; of a hang the stacks of the ranks in place of a
    traceback."""
    failures = attempt_outcome.failures_by_cause(launcher.records(Path(attempt.folder), attempt.ranks))
    if failures:
        first = failures[0]
        return first.rank, first.at or None, location(first.traceback), _end_of(first.traceback), _code(first)
    ended_at = attempt.ended_at.isoformat() if attempt.ended_at else None
    if sessions.newest_event(engine, run.id, (EventKind.NO_STEP,), session_id=attempt.session_id):
        return None, ended_at, None, [], NO_STEP
    stacks = sessions.newest_event(engine, run.id, (EventKind.STACKS,), session_id=attempt.session_id)
    if stacks is None or stacks.facts.get("attempt") != Path(attempt.folder).name:
        return None, ended_at, None, [], OTHER_FAILURE
    by_rank = [f"{name}: {text}" for name, text in stacks.facts.items() if name.startswith("rank")]
    return None, ended_at, None, by_rank[:MAX_LINES], HANG


def _code(record: RankRecord) -> str:
    """The error code of what ended a rank. The record may be another version's, or the script's."""
    if PATTERN.fullmatch(record.error_code):
        return record.error_code
    return "KG502" if record.memory else FAILURES.get(record.code, OTHER_FAILURE)
