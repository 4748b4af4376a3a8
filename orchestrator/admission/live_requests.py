"""What a user asks of a run that trains: save, stop. `kgorch save`, `kgorch stop` and the page of `kgorch web` call this."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import NamedTuple

from sqlalchemy import Engine

from kgorch.core.codes import EventKind
from kgorch.db import checkpoints, runs, sessions
from kgorch.db.rows import CheckpointInfo, RunInfo
from kgorch.errors import KgorchError
from kgorch.launch import launcher
from kgorch.slurm import jobs
from kgorch.system.sockets import control_socket

RECENT_EVENTS = 20


class SaveRequest(NamedTuple):
    """A save that the supervisor has accepted.

    Attributes:
        at: when it was requested.
        before: path of the newest verified checkpoint at that time; empty without one.
    """

    at: datetime
    before: str


def request_save(engine: Engine, run: RunInfo) -> SaveRequest:
    """Ask the supervisor for a checkpoint; it answers before the save is done. Raises: KgorchError without a supervisor."""
    before, at = checkpoints.newest_verified(engine, run.id), runs.now()
    # a socket's file works on its own machine alone, and a job runs on another one
    if not jobs.ask_to_save(engine, run) and control_socket.ask(Path(run.folder) / "control.sock", "save") is None:
        raise KgorchError(f"{run.name} is not running under a supervisor", next_step=f"kgorch status {run.name}")
    return SaveRequest(at, before.path if before else "")


def saved_checkpoint(engine: Engine, run: RunInfo, request: SaveRequest) -> CheckpointInfo | None:
    """The checkpoint that was verified since the request; None while there is none. Raises: KgorchError if the save failed."""
    newest = checkpoints.newest_verified(engine, run.id)
    if newest and newest.path != request.before:
        return newest
    for event in sessions.events(engine, run.id, limit=RECENT_EVENTS):
        if event.kind == EventKind.SAVE_FAILED and event.at >= request.at:
            raise KgorchError(
                f"the save failed: {event.facts.get('why')}; training continues",
                next_step=f"free some disk space, then kgorch save {run.name}",
                error_code="KG306",
            )
    return None


def request_stop(engine: Engine, run: RunInfo) -> str | None:
    """Ask the supervisor to save and to end the session. Returns its answer; None if nothing of the run is running.

    Raises: KgorchError for a training without a supervisor.
    """
    answer = control_socket.ask(Path(run.folder) / "control.sock", "stop")
    if answer is not None:
        return answer.text
    last = sessions.last(engine, run.id)
    attempt = sessions.last_attempt(engine, last.id) if last else None
    if attempt and launcher.is_running(Path(attempt.folder)):
        raise KgorchError(
            f"{run.name} trains without a supervisor that could stop it",
            next_step=f"kgorch resume {run.name} adopts it; then Ctrl-C there, or kgorch stop, saves and stops",
        )
    return None
