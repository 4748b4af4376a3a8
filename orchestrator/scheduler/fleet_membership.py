"""What a daemon knows of the other machines of its fleet, and how long it has known it."""

from __future__ import annotations

import os
from pathlib import Path

from sqlalchemy import Engine

from kgorch.admission import fleet_member
from kgorch.core import fleet as core
from kgorch.db import fleet
from kgorch.db.queue import Entry
from kgorch.limits import late_charges
from kgorch.scheduler.run_selection import Reachable
from kgorch.system.clock import Clock


class FleetMembership:
    """Of one daemon; without a fleet all of it is empty and nothing is written."""

    def __init__(self, clock: Clock, home: Path) -> None:
        self._clock, self._home = clock, home
        self._connected_at_s: float | None = None
        self._registered_at_s: float | None = None
        self._tries: dict[str, float] = {}  # of runs of other machines: when this one tried to take them

    def tick(self, engine: Engine) -> Reachable:
        """To be called at each look at the queue. Raises: StateUnusable where another machine has this one's name."""
        if (settings := fleet.settings(engine)) is None:
            return Reachable()
        now_s = self._clock.now_s()
        if self._registered_at_s is None:
            fleet_member.register(engine, self._home, daemon_pid=os.getpid())
            self._registered_at_s = now_s
        elif now_s - self._registered_at_s >= min(settings.lease_s / 5, 10.0):
            fleet.touch(engine)
            self._registered_at_s = now_s
        if self._connected_at_s is None:
            late_charges.complete_taken(engine)
            self._connected_at_s = now_s
        self._tries = {run: at_s for run, at_s in self._tries.items() if now_s - at_s < core.RETRY_S}
        return Reachable(fleet.sharing_state(engine), fleet.alive_machines(engine), frozenset(self._tries))

    def disconnect(self) -> None:
        """The database could not be used: what it says of others counts again once this machine has read it for a lease."""
        self._connected_at_s = None

    def is_dead(self, engine: Engine, *, is_leased: bool) -> bool:
        """Whether a session or claim of another machine is over because nothing was heard of it."""
        settings = fleet.settings(engine)
        if settings is None or self._connected_at_s is None:
            return False
        connected_s = self._clock.now_s() - self._connected_at_s
        return core.is_dead(is_leased=is_leased, connected_s=connected_s, lease_s=settings.lease_s)

    def note_try(self, engine: Engine, entry: Entry) -> None:
        """A run of another machine is about to be started here. If its files cannot be reached, it is left alone for a while."""
        if fleet.is_elsewhere(engine, entry.machine):
            self._tries[entry.resume.run_id] = self._clock.now_s()
            Path(entry.folder).mkdir(parents=True, exist_ok=True)
