"""Who goes next on a machine, and when to try again what could not begin.

A machine has GPUs, or none; then its processor counts as one device for each of the sessions that a person allows beside one
another. A run claims devices for itself; runs that say so share theirs with others that say so, too.

The order: the highest priority, then the run whose turn was longest ago, then the one that was due first. A run that needs
more than is free lets smaller ones go before it, but not for ever: after RESERVE_AFTER_S what becomes free is kept for it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from orchestrator.core.backoff import Backoff

RESERVE_AFTER_S = 600.0
"""How long smaller runs may go before a larger one: about what a short session lasts."""

SHARERS = 4
"""Sessions that share one device at most, where no person says how many run at once."""

TRIES = 8
"""Times in a row that a resume may fail to begin, or its session end before a step further, before its run has failed."""

BACKOFF = Backoff(first_s=30.0, longest_s=3600.0, jitter=0.2)
"""Between two attempts to begin a session."""


class Waiting(NamedTuple):
    """A run that is due. `ranks`: GPUs that it claims, None for all; `waits_s`: for how long it has been due."""

    id: int
    ranks: int | None
    share: bool
    waits_s: float


class Machine(NamedTuple):
    """What is free. `gpus`: in all, 0 for a machine without; `free`: nobody's; `shared`: of such as share.

    `at_once`: sessions that may run beside one another, None for as many as there are GPUs for; `running`: those that do and
    claim devices for themselves; `sharing`: those that share.
    """

    gpus: int
    free: int
    shared: int
    at_once: int | None
    running: int
    sharing: int


def choose(waiting: Iterable[Waiting], machine: Machine) -> int | None:
    """The next to begin, of those that wait in their order; None when none fits, or what is free is kept for one that does not."""
    for one in waiting:
        if fits(one, machine):
            return one.id
        if one.waits_s >= RESERVE_AFTER_S and not one.share:
            return None
    return None


def has_room(machine: Machine, *, share: bool) -> bool:
    """Whether any run that shares, or any that does not, might begin: else none of them needs to be looked at."""
    return fits(Waiting(0, min(1, machine.gpus), share, 0.0), machine)


def fits(one: Waiting, machine: Machine) -> bool:
    """One that wants more GPUs than there are is begun when all are free: it is then told what it lacks."""
    devices = max(machine.gpus, 1)
    if one.share and machine.sharing >= (machine.at_once or SHARERS * devices):
        return False
    if not one.share and machine.running >= (machine.at_once or devices):
        return False
    wanted = machine.gpus if one.ranks is None else min(one.ranks, machine.gpus)
    return machine.free + (machine.shared if one.share else 0) >= wanted


def back_off_s(tries: int, chance: float) -> float:
    """Seconds until the next attempt after `tries` failed ones, at least the first pause; `chance` as in Backoff.after."""
    return BACKOFF.after(max(tries, 1), chance)
