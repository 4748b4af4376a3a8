"""Takes a rung before memory runs out, and undoes one when there is room again: orders to the ranks (core/memory_pressure.py)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sqlalchemy import Engine

from db.records import RunInfo
from orchestrator.core import memory_pressure
from orchestrator.hardware import devices
from orchestrator.launch import rungs
from orchestrator.launch.attempts import Running
from orchestrator.plan import Plan
from orchestrator.protocol.messages import RankProgress

LOOK_S = 1.0


class MemoryWatch:
    """Of one session."""

    def __init__(self, engine: Engine, run: RunInfo, plan: Plan) -> None:
        self._engine, self._run, self._plan = engine, run, plan
        self._attempt: Running | None = None
        self._watch = memory_pressure.Watch(0.0)
        self._looked_s = 0.0
        self._gpus: list[int | None] = []
        self._where: dict[int, str] = {}
        self._can_climb, self._tries = False, 0
        self._ordered: set[str] = set()

    def changed(self, attempt: Running, now_s: float) -> None:
        """An attempt has begun, or its ranks have gone over to other settings. Raises: SQLAlchemyError."""
        if attempt is self._attempt:
            self._watch = self._watch.changed(now_s)
        else:
            self._attempt, self._watch, self._where = attempt, memory_pressure.Watch(now_s), {}
            self._gpus = devices.gpu_of_rank(attempt.row.ranks)
        self._ordered = set()
        now, base = rungs.standing(self._engine, self._run, self._plan, attempt.place).now, self._plan.memory.settings
        own = ("microbatch", "activation_checkpointing", "empty_cache")
        self._can_climb = any(getattr(now, name) != getattr(base, name) for name in own)
        self._tries = rungs.climbed_in_vain(self._engine, self._run, attempt.place) if self._can_climb else 0

    def heard(self, place: RankProgress) -> None:
        self._where[place.rank] = place.where

    def look(self, values: Mapping[str, float], now_s: float) -> tuple[str, dict[str, Any]]:
        """The order for the ranks, "down" or "up", and what led to it; "" for none.

        The same order is not given again until something has changed: it may wait for a long step, or find nothing to take. What
        an evaluation takes no rung would make less.
        """
        if not self._attempt or not self._plan.memory.ladder or now_s - self._looked_s < LOOK_S:
            return "", {}
        self._looked_s = now_s
        if "evaluation" in self._where.values():
            return "", {}
        seen = memory_pressure.taken(values, device=self._attempt.device, gpus=self._gpus)
        climb_after_s = self._plan.memory.climb_after_s if self._can_climb else None
        self._watch, order = memory_pressure.look(
            self._watch, seen, now_s, climb_after_s=climb_after_s, tries=self._tries
        )
        if order in self._ordered:
            return "", {}
        self._ordered |= {order} - {""}
        told = None if seen.taken is None else round(seen.taken, 3)
        return order, {"order": order, "taken": told, "alloc_retries": seen.retries}
