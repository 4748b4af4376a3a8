"""Which machine of a fleet takes a run: the one that has its files, or another one that can reach them.

A run's files are in the state folder of the machine that trained it last, its owner. Another machine reaches them where it shares
that folder or the folder of the checkpoints, or through the mirror of the plan. The owner comes first, because it copies nothing.
"""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple

OWNER_FIRST_S = 10.0
"""Seconds for which a due run is left to its owner, while that lives: longer than it takes to look at the queue."""

RETRY_S = 60.0
"""Seconds until a machine tries again to take a run whose files it could not reach."""


class StateSource(StrEnum):
    """Where a machine gets the files of a run from."""

    BEGINNING = "beginning"  # there are none: the run begins here
    HERE = "here"
    MIRROR = "mirror"
    OWNER = "owner"  # from nowhere: the run waits for its owner


class KnownState(NamedTuple):
    """What a machine knows of a run that another one has trained last.

    Attributes:
        newest: place of the newest verified checkpoint in the run's order (stage, step); None where there is none.
        here: of the newest one whose files are here.
        mirrored: of the newest one that is complete in the mirror.
        is_owner_alive: the owner has written to the database within a lease.
    """

    newest: tuple[int, int] | None
    here: tuple[int, int] | None
    mirrored: tuple[int, int] | None
    is_owner_alive: bool


def source_of(state: KnownState) -> StateSource:
    """Where to resume a run from. While its owner lives nothing is trained twice: then only the newest checkpoint will do."""
    if state.newest is None:
        return StateSource.BEGINNING
    if state.here is not None and state.here >= state.newest:
        return StateSource.HERE
    if state.mirrored is not None and (state.mirrored >= state.newest or not state.is_owner_alive):
        is_further_here = state.here is not None and state.here >= state.mirrored
        return StateSource.HERE if is_further_here else StateSource.MIRROR
    if state.here is not None and not state.is_owner_alive:
        return StateSource.HERE
    return StateSource.OWNER


def may_try(*, is_owner: bool, is_owner_alive: bool, waits_s: float) -> bool:
    """Whether a machine may try to take a run that has been due for `waits_s`. `is_owner`: its files are here for certain."""
    return is_owner or not is_owner_alive or waits_s >= OWNER_FIRST_S


def is_dead(*, is_leased: bool, connected_s: float, lease_s: float) -> bool:
    """Whether another machine's session or claim is over because nothing was heard of it.

    Args:
        connected_s: for how long this machine itself has read the database without a failure. After an outage all leases have
            expired at once; within one lease whoever lives has renewed its own.
    """
    return not is_leased and connected_s >= lease_s
