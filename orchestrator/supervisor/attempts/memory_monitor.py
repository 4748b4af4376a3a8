"""Orders the ranks down a rung before memory runs out, and up again when there is room (core/memory/memory_pressure.py)."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Mapping

from sqlalchemy.exc import SQLAlchemyError

from kgorch.core.codes import Phase
from kgorch.core.memory import memory_pressure
from kgorch.hardware import devices
from kgorch.launch import rungs
from kgorch.launch.attempts import LaunchedAttempt
from kgorch.protocol.messages import RankProgress
from kgorch.supervisor.live_session import LiveSession, RungOrdered

LOOK_S = 1.0
"""Seconds between two looks at least: core/memory/memory_pressure.py counts looks, and takes them for about a second apart."""

OWN_SETTINGS = ("microbatch", "activation_checkpointing", "empty_cache")
"""Settings that ranks can take back while they run."""


class MemoryMonitor:
    """Of one session. Its methods may be called from any thread."""

    def __init__(self, live: LiveSession) -> None:
        self._live = live
        self._guard = threading.Lock()
        self._attempt: LaunchedAttempt | None = None
        self._pressure = memory_pressure.PressureState(0.0)
        self._looked_s = 0.0
        self._gpus: list[int | None] = []
        self._nodes: list[int] = []
        self._where: dict[int, str] = {}
        self._can_climb, self._tries = False, 0
        self._ordered: set[str] = set()

    def begin(self, attempt: LaunchedAttempt) -> None:
        """An attempt has begun, or its ranks have gone over to other settings. Asks the database."""
        live, can_climb, tries = self._live, False, 0
        with contextlib.suppress(SQLAlchemyError):  # an outage: no rung is undone until the next one
            can_climb, tries = self._climbs(attempt)
        with self._guard:
            now_s = live.clock.now_s()
            if attempt is self._attempt:
                self._pressure = self._pressure.changed(now_s)
            else:
                self._attempt, self._pressure, self._where = attempt, memory_pressure.PressureState(now_s), {}
                self._nodes = [live.nodes.node_of(rank) for rank in range(attempt.row.ranks)]
                here = self._nodes.count(0)  # they come first; of other nodes' GPUs the index is not known
                self._gpus = devices.gpu_of_rank(here, live.environ) + [None] * (len(self._nodes) - here)
            self._ordered, self._can_climb, self._tries = set(), can_climb, tries

    def _climbs(self, attempt: LaunchedAttempt) -> tuple[bool, int]:
        """Whether there is a rung that ranks could undo, and how often that was in vain."""
        live, base = self._live, self._live.plan.memory.settings
        now = rungs.launch_settings(live.engine, live.run, live.plan, attempt.scope).now
        can_climb = any(getattr(now, name) != getattr(base, name) for name in OWN_SETTINGS)
        return can_climb, rungs.count_failed_climbs(live.engine, live.run, attempt.scope) if can_climb else 0

    def on_progress(self, place: RankProgress) -> None:
        with self._guard:
            self._where[place.rank] = place.where

    def look(self, sample: Mapping[str, float], post: Callable[[RungOrdered], None]) -> None:
        """At each telemetry sample, in the sampler's thread: post the order that memory asks for.

        The same order is not given again until something has changed: it may wait for a long step, or find nothing to change. No
        order is given during an evaluation: no rung would make less of the memory that it takes.
        """
        if self._live.state.phase not in (Phase.TRAINING, Phase.SAVING):
            return
        with self._guard:
            order = self._order_for(sample)
        if order:
            post(order)

    def _order_for(self, sample: Mapping[str, float]) -> RungOrdered | None:
        now_s, memory = self._live.clock.now_s(), self._live.plan.memory
        if (
            not self._attempt
            or not memory.ladder
            or now_s - self._looked_s < LOOK_S
            or "evaluation" in self._where.values()
        ):
            return None
        self._looked_s = now_s
        usage = memory_pressure.memory_use(sample, device=self._attempt.device, gpus=self._gpus, nodes=self._nodes)
        climb_after_s = memory.climb_after_s if self._can_climb else None
        self._pressure, order = memory_pressure.decide(
            self._pressure, usage, now_s, climb_after_s=climb_after_s, tries=self._tries
        )
        if not order or order in self._ordered:
            return None
        self._ordered |= {order}
        share = None if usage.used_share is None else round(usage.used_share, 3)
        return RungOrdered(order, {"order": order, "taken": share, "alloc_retries": usage.retries})
