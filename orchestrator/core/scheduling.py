"""Which run of the queue starts next on a machine, and when a failed start is retried.

A machine has GPUs, or none; then its processor counts as one device for each of the sessions that the user allows at once. A run
claims devices for itself, unless its plan allows sharing with other runs that do.

The order: highest priority, then the run whose last session is longest ago, then the one that was due first. A run that needs more
than is free lets smaller ones pass, but not for ever: after RESERVE_AFTER_S the devices that become free are reserved for it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from kgorch.core.backoff import Backoff

RESERVE_AFTER_S = 600.0
"""Seconds that smaller runs may pass a larger one: about the length of a short session."""

SHARERS = 4
"""Most sessions that share a device, where the user has not set how many run at once."""

TRIES = 8
"""Resumes in a row that fail to start, or whose session ends without progress, before the run fails."""

BACKOFF = Backoff(first_s=30.0, longest_s=3600.0, jitter=0.2)
"""Pauses between two attempts to start a session. The jitter keeps runs that failed together from coming back together."""


class QueuedRun(NamedTuple):
    """A run that is due.

    Attributes:
        id: of its row in the queue.
        ranks: GPUs that it claims; None for all.
        share: it may share them.
        waits_s: for how long it has been due.
    """

    id: int
    ranks: int | None
    share: bool
    waits_s: float


class FreeDevices(NamedTuple):
    """The devices of a machine and who uses them.

    Attributes:
        gpus: in all; 0 for a machine without.
        free: GPUs that no session claims.
        shared: GPUs of sessions that share.
        at_once: sessions that may run at once; None for as many as there are GPUs.
        running: sessions that claim devices for themselves.
        sharing: sessions that share.
    """

    gpus: int
    free: int
    shared: int
    at_once: int | None
    running: int
    sharing: int


def choose(waiting: Iterable[QueuedRun], machine: FreeDevices) -> int | None:
    """The id of the run to start next; None when none fits, or the free devices are reserved for one that does not.

    Args:
        waiting: in the order of the queue.
    """
    return next(fitting(waiting, machine), None)


def fitting(waiting: Iterable[QueuedRun], machine: FreeDevices) -> Iterator[int]:
    """The ids of the runs of which one may start next, the first one first; the others where another machine took that."""
    for run in waiting:
        if fits(run, machine):
            yield run.id
        elif run.waits_s >= RESERVE_AFTER_S and not run.share:
            return


def has_room(machine: FreeDevices, *, share: bool) -> bool:
    """Whether any run that shares, or any that does not, could start: else the daemon need not read the queue."""
    return fits(QueuedRun(0, min(1, machine.gpus), share, 0.0), machine)


def fits(run: QueuedRun, machine: FreeDevices) -> bool:
    """Whether a run can start now.

    One that wants more GPUs than the machine has starts when all are free: the start then reports what is missing.
    """
    devices = max(machine.gpus, 1)
    if run.share and machine.sharing >= (machine.at_once or SHARERS * devices):
        return False
    if not run.share and machine.running >= (machine.at_once or devices):
        return False
    wanted = machine.gpus if run.ranks is None else min(run.ranks, machine.gpus)
    return machine.free + (machine.shared if run.share else 0) >= wanted


def back_off_s(tries: int, chance: float) -> float:
    """Seconds until the next attempt after `tries` failed ones, at least the first pause; `chance` as in Backoff.after."""
    return BACKOFF.after(max(tries, 1), chance)
