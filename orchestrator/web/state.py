"""What all requests share: the database, and what was read from it lately."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from sqlalchemy import Engine

from kgorch.db import runs
from kgorch.db.rows import RunInfo
from kgorch.errors import NotFound
from kgorch.hardware import inventory
from kgorch.platforms.profile import Profile
from kgorch.report.curves import CurveCache
from kgorch.report.json_fields import View
from kgorch.report.overview import ListCache
from kgorch.scheduler.database_watch import DatabaseWatch

MACHINE_S = 30.0
"""Between two inventories of the machine: NVML takes a tenth of a second and more."""


MAX_KEPT = 500


class _Kept(NamedTuple):
    """A value that was built.

    Attributes:
        at_s, until_s: when it was built and when it expires; time.monotonic.
    """

    at_s: float
    until_s: float
    value: Any


class WebState:
    """The state of one `kgorch web`. Requests run in several threads."""

    def __init__(self, engine: Engine, home: Path, profile: Profile) -> None:
        self.home, self.profile = home, profile
        self.curves = CurveCache()
        self.entries = ListCache(self.curves)
        self._watch = DatabaseWatch(engine, home)
        self._watch.open()
        self._lock = threading.Lock()
        self._kept: dict[object, _Kept] = {}
        self._building: dict[object, threading.Lock] = {}

    @property
    def engine(self) -> Engine:
        """Of the file that is at the path now. Raises: FileNotFoundError, StateUnusable."""
        with self._lock:
            self._watch.reopen_if_replaced()
            return self._watch.engine

    def find(self, name: str, number: int) -> RunInfo:
        """Raises: NotFound."""
        run = runs.by_number(self.engine, name, number)
        if run is None:
            raise NotFound("there is no such run", next_step="kgorch status --all")
        return run

    def machine(self) -> View:
        """As `doctor --json` has it."""
        view: View = self.shared("machine", MACHINE_S, lambda: inventory.describe_host(self.home))
        return view

    def shared(
        self, key: object, max_age_s: float, build: Callable[[], Any], is_final: Callable[[Any], bool] = lambda _: True
    ) -> Any:
        """A value that is built at most once in that time, however many browsers ask for it.

        Args:
            is_final: False for a value that the next request builds anew.
        """
        with self._lock:
            building = self._building.setdefault(key, threading.Lock())
        with building:
            kept = self._kept.get(key)
            if kept is None or time.monotonic() > kept.until_s or not is_final(kept.value):
                now_s = time.monotonic()
                kept = _Kept(now_s, now_s + max_age_s, build())
                self._keep(key, kept)
            return kept.value

    def _keep(self, key: object, kept: _Kept) -> None:
        with self._lock:
            self._kept[key] = kept
            now_s = time.monotonic()
            # The curves of one view are megabytes. What is being rebuilt stays, or a second thread would build it, too.
            rebuilt = {old for old, building in self._building.items() if building.locked()}
            dropped = [old for old, one in self._kept.items() if one.until_s < now_s and old not in rebuilt]
            if len(self._kept) - len(dropped) > MAX_KEPT:
                dropped += sorted(self._kept, key=lambda one: self._kept[one].at_s)[: MAX_KEPT // 2]
            for old in dropped:
                self._kept.pop(old, None)
                self._building.pop(old, None)
