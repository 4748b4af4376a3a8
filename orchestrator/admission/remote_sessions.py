"""A run is trained here or at another place, and goes on from its newest state wherever that is."""

from __future__ import annotations

from collections.abc import Iterable

from sqlalchemy import Engine

from kgorch.core.codes import REMOTE_OPEN, RemoteState
from kgorch.core.remote.session_plan import is_source
from kgorch.db import checkpoints, remote, runs
from kgorch.db.rows import RemoteSessionInfo, RunInfo
from kgorch.errors import KgorchError

Position = tuple[int, int]
"""Position of the stage in the plan, step in it; (-1, -1) for none."""


def local_position(engine: Engine, run: RunInfo) -> Position:
    """Of the newest verified checkpoint in this state folder."""
    newest = checkpoints.newest_verified(engine, run.id)
    if newest is None:
        return -1, -1
    return next((row.position for row in runs.stages(engine, run.id) if row.name == newest.stage), -1), newest.step


def sources(rows: Iterable[RemoteSessionInfo]) -> list[RemoteSessionInfo]:
    """Those of the sessions at another place whose output holds a verified state."""

    def is_further(row: RemoteSessionInfo) -> bool:
        return (row.reached_position, row.reached_step) > (row.expected_position, row.expected_step)

    return [row for row in rows if is_source(row.state, row.status, is_further=is_further(row))]


def remote_best(engine: Engine, run: RunInfo) -> RemoteSessionInfo | None:
    """The session at another place with the furthest verified state."""
    good = sources(remote.of_run(engine, run.id))
    return max(good, key=lambda row: (row.reached_position, row.reached_step, row.number), default=None)


def refuse_to_supersede(engine: Engine, run: RunInfo) -> None:
    """Raises: KgorchError if sessions of a run, which another one is to replace, follow one another at another place."""
    row = remote.newest(engine, run.id)
    if row and row.state in REMOTE_OPEN and not row.is_last:
        raise KgorchError(
            f"session {row.number} of {run.name!r} is not over at {row.place}",
            next_step=f"kgorch stop {run.name}, then start again",
        )


def goes_on(engine: Engine, run: RunInfo) -> str:
    """For people: the session that perhaps goes on at another place when the run is replaced; empty where there is none."""
    row = remote.newest(engine, run.id)
    if row is None or row.state not in REMOTE_OPEN or row.state in (RemoteState.PLANNED, RemoteState.BUNDLING):
        return ""
    return (
        f"session {row.number} of {run.name!r} may go on at {row.place} until it ends by itself: {row.url or row.name};"
        " it is no longer followed, and its output stays there"
    )


def refuse_here(engine: Engine, run: RunInfo) -> None:
    """Raises: KgorchError if a session of the run may be alive at another place, or its newest state is there."""
    newest = remote.newest(engine, run.id)
    if newest is None:
        return
    if newest.state in REMOTE_OPEN:
        raise KgorchError(
            f"session {newest.number} of {run.name!r} is not over at {newest.place}: two sessions would part its history",
            next_step=f"kgorch status {run.name}; kgorch stop {run.name} has no further session follow there",
        )
    best, here = remote_best(engine, run), local_position(engine, run)
    if best and (best.reached_position, best.reached_step) > here:
        raise KgorchError(
            f"the newest state of {run.name!r} is at {best.place}: step {best.reached_step} of {best.stage}",
            f"here is {f'step {here[1]}' if here[1] >= 0 else 'none'}",
            next_step=f"kgorch remote fetch {run.name}, then start again",
        )
