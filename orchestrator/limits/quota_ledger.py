"""The quota of a session: what it uses is written down as it runs, and where its wall stands follows from what is left.

A charge is a row a session and window (and hour, of a rolling window), whose seconds are *set* to what they are by now, every few
seconds: a SIGKILL of everything loses no more than those, a write that fails is made up for by the next one, and one that is
made twice changes nothing. How long a session has lasted is read on CLOCK_BOOTTIME; its instants are those of the wall clock as it
stood when the session was opened or adopted, so a wall clock that is set meanwhile moves no wall.
"""

from __future__ import annotations

import json
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from sqlalchemy import Engine
from sqlalchemy.exc import SQLAlchemyError

from db import charges
from db.charges import Own
from db.records import AttemptInfo, PoolInfo, SessionInfo
from orchestrator.core import quota as core
from orchestrator.core import quota_windows
from orchestrator.core.codes import Reason
from orchestrator.core.quota import Quota, Use
from orchestrator.core.quota_windows import Never, Window
from orchestrator.core.wall import Wall
from orchestrator.hardware import devices, nvml
from orchestrator.limits import quota_pools
from orchestrator.plan import Plan
from orchestrator.platforms.profile import Profile
from orchestrator.system import process_identity
from orchestrator.system.clock import boottime_s

LOOK_S, RETRY_S = 2.0, 5.0
"""Between two looks at the ledger; after one that the database did not allow."""

SLACK = timedelta(seconds=60)
"""By which two sessions of a container may differ about when it was started: the wall clock is set a little meanwhile."""


@dataclass(frozen=True, slots=True)
class Terms:
    """What a session costs and whose hours those are. `factor`: pool seconds a second."""

    quota: Quota
    resets: str
    factor: float
    accelerator: str


def terms_of(plan: Plan, profile: Profile, on: tuple[str, int] | None = None) -> Terms | None:
    """By the plan, else by the platform; None where nothing is counted. `on`: another machine's GPU, and how many it has.

    The platform counts accelerators: without one a session costs nothing there, and its factor is for several.
    """
    said = plan.quota
    try:
        count = on[1] if on else devices.visible_gpu_count()
    except nvml.DriverUnresponsive:
        count = 1  # a driver there is; what it drives is counted
    hours = said.hours or (profile.quota_hours if count else None)
    if hours is None:
        return None
    resets = said.resets or profile.quota_resets or "never"
    quota = Quota(said.pool or profile.name, hours * 3600.0, quota_windows.parse(resets), said.reserve or 0.0)
    return Terms(
        quota, resets, said.factor or (profile.factor if count > 1 else 1.0), on[0] if on else devices.model_name()
    )


class Ledger:
    """Charges one session, and is a source of its walls (limits/wall_sources.py).

    Args:
        from_at, at_s: when the session began to cost, on both clocks.
        session_id: of the row to charge; None until there is one (`begin`).
    Attributes:
        look_beside: takes a look at the database to a thread that may wait for it; None while nobody is kept waiting.
    """

    def __init__(
        self,
        engine: Engine,
        terms: Terms,
        from_at: datetime,
        at_s: float,
        session_id: int | None = None,
        *,
        now_s: Callable[[], float] = boottime_s,
    ) -> None:
        self.notes: queue.SimpleQueue[tuple[str, dict[str, Any]]] = queue.SimpleQueue()
        self.terms = terms
        self._engine, self._from_at, self._at_s, self._session_id = engine, from_at, at_s, session_id
        self._now_s = now_s
        self._written = from_at  # the beginning of the newest piece that is written down
        self._wall: Wall | None = None
        self._next_s, self._has_looked = 0.0, False
        self._charges = threading.Lock()  # the loop charges at the end, a thread beside it before
        self.look_beside: Callable[[Callable[[], None]], None] | None = None

    @classmethod
    def opening(cls, engine: Engine, plan: Plan, profile: Profile) -> Ledger | None:
        """For a session that is about to be opened. In a platform's container it costs since that was started, or since
        another session that was charged for that: the set-up before us is paid once.
        """
        terms = terms_of(plan, profile)
        if terms is None:
            return None
        now_s, utc = boottime_s(), datetime.now(UTC)
        charges.mend_clock(engine, utc)
        began_s = process_identity.start_time_s(1) or now_s if profile.began == "container" else now_s
        from_at = utc - timedelta(seconds=max(0.0, now_s - began_s))
        before = charges.of_boot(engine, terms.quota.pool, process_identity.boot_id(), from_at - SLACK)
        if before:
            from_at = min(utc, max(from_at, before.from_at + timedelta(seconds=before.used_s)))
        return cls(engine, terms, from_at, now_s - (utc - from_at).total_seconds())

    @classmethod
    def adopting(cls, engine: Engine, plan: Plan, profile: Profile, row: SessionInfo) -> Ledger | None:
        """For a session that goes on: it has run since it was charged last. The plan holds from its newest charge on."""
        terms = terms_of(plan, profile)
        if terms is None:
            return None
        now_s, utc = boottime_s(), datetime.now(UTC)
        last = charges.newest(engine, row.id)
        from_at, used_s = (last.from_at, last.used_s) if last else (row.started_at, 0.0)
        silent_s = (utc - from_at).total_seconds() - used_s
        used_s += min(max(silent_s, 0.0), now_s)  # whatever the wall clock says, no longer than since the boot
        return cls(engine, terms, from_at, now_s - used_s, row.id)

    def begin(self, run_id: str, session_id: int) -> None:
        """There is a session to charge."""
        self._session_id = session_id
        self.tell_pool(run_id)
        self.charge(self._now_s())

    def tell_pool(self, run_id: str) -> None:
        quota = self.terms.quota
        told = PoolInfo(quota.pool, quota.total_s, self.terms.resets, quota.reserve_s, datetime.now(UTC))
        charges.tell_pool(self._engine, run_id, told)

    def wall(self, now_s: float) -> Wall | None:
        """Where the quota ends the session, looked up every LOOK_S; what it was, while the database cannot be used."""
        if now_s >= self._next_s:
            if self.look_beside and self._has_looked:
                self._next_s = now_s + LOOK_S
                self.look_beside(self._look)
            else:
                self._look()
        return self._wall

    def _look(self) -> None:
        now_s = self._now_s()
        try:
            self.charge(now_s)
            self._wall = self._looked_up(now_s)
            self._next_s, self._has_looked = now_s + LOOK_S, True
        except SQLAlchemyError:
            self._next_s = now_s + RETRY_S

    def charge(self, now_s: float) -> None:
        """Write down what is not: the pieces that began since, and the newest one, as long as it is by now."""
        with self._charges:
            self._charge(now_s)

    def _charge(self, now_s: float) -> None:
        if self._session_id is None:
            return
        pool, until_at = self.terms.quota.pool, self._utc(now_s)
        found = [(start, end) for start, end in self._pieces(until_at) if start >= self._written]
        told = [(start, (end - start).total_seconds()) for start, end in found] or [(self._from_at, 0.0)]
        charges.charge(
            self._engine, self._session_id, pool, told, factor=self.terms.factor, accelerator=self.terms.accelerator
        )
        self._written = told[-1][0]

    def is_spent(self, lead_s: float) -> bool:
        """Whether what is left is less than a last save takes."""
        now_s = self._now_s()
        wall = self._looked_up(now_s)
        return wall is not None and wall.at_s - now_s < lead_s

    def resume_at(self, lead_s: float, *, on_quota: bool = False) -> datetime | None:
        """When the next session may begin; None when no hours will come back. `on_quota`: the last one ended for want of them,
        so that some useful time must be there besides what a save takes.

        What may begin at once is due by the clock of the day, too: whoever waits for it reads that one, and ours goes on as it
        was when that is put back.
        """
        now_s, quota = self._now_s(), self.terms.quota
        needed_s = lead_s * self.terms.factor
        now, found = self._utc(now_s), self._uses(now_s)
        if on_quota or core.left_s(quota, found, now) < needed_s:
            at = core.available_at(quota, found, now, needed_s=needed_s + quota.useful_s)
            if at is None or at > now:
                return at
        return min(now, datetime.now(UTC))

    def stop(self) -> None:
        """The last of it; what the database does not take now is lost, two seconds at most."""
        try:
            self.charge(self._now_s())
        except SQLAlchemyError:
            return

    def _looked_up(self, now_s: float) -> Wall | None:
        now, found = self._utc(now_s), self._uses(now_s)
        others = quota_pools.living(self._engine, self.terms.quota.pool, now, but=self._session_id)
        rate = self.terms.factor + sum(item.rate for item in others)
        found += [item.unwritten for item in others]
        lasts_s = core.lasts_s(self.terms.quota, found, now, rate=rate)
        return None if lasts_s is None else Wall(now_s + lasts_s, Reason.QUOTA)

    def _uses(self, now_s: float) -> list[Use]:
        """What is written down of others and of our earlier pieces, and our own from here on, written down or not."""
        now, quota = self._utc(now_s), self.terms.quota
        own = None if self._session_id is None else Own(self._session_id, self._from_at)
        mine = [(start, (end - start).total_seconds()) for start, end in self._pieces(now)]
        ours = [Use(start, span_s, span_s * self.terms.factor) for start, span_s in mine]
        return quota_pools.uses(self._engine, quota, now, but=own) + ours

    def _pieces(self, until_at: datetime) -> list[tuple[datetime, datetime]]:
        return list(quota_windows.pieces(self.terms.quota.window, self._from_at, until_at))

    def _utc(self, now_s: float) -> datetime:
        return self._from_at + timedelta(seconds=now_s - self._at_s)


def complete(engine: Engine, row: SessionInfo, attempt: AttemptInfo | None, terms: Terms | None) -> None:
    """Charge a session that nobody supervised at its end, up to the last that is known of it."""
    last = charges.newest(engine, row.id)
    if last is None:
        return
    beat_at, ended_at = row.beat_at, _ended_at(attempt)
    if beat_at is not None:  # who beats is charged, too: what lies between is a wall clock that has jumped
        beat_at = min(beat_at, last.from_at + timedelta(seconds=last.used_s) + SLACK)
    if ended_at is not None and row.boot_id == process_identity.boot_id():
        ended_at = min(ended_at, last.from_at + timedelta(seconds=boottime_s()))
    until_at = max(at for at in (beat_at, ended_at, last.from_at) if at is not None)
    if row.wall_at is not None:  # past that nothing of it ran, whatever the wall clock says by now
        until_at = min(until_at, row.wall_at)
    window: Window = terms.quota.window if terms else Never()
    told = [
        (start, (end - start).total_seconds()) for start, end in quota_windows.pieces(window, last.from_at, until_at)
    ]
    if sum(span_s for _, span_s in told) > last.used_s:
        charges.charge(engine, row.id, last.pool, told, factor=last.factor, accelerator=last.accelerator)


def _ended_at(attempt: AttemptInfo | None) -> datetime | None:
    """When the processes of an attempt were gone, as its shim wrote down."""
    try:
        found = json.loads(Path(attempt.folder, "exit.json").read_text())["at"] if attempt else None
        at = None if found is None else datetime.fromisoformat(found)
    except (OSError, ValueError, TypeError, KeyError):
        return None
    return at if at and at.tzinfo else None
