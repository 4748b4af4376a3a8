"""The quota of a session: its usage is charged to a pool while it runs, and its wall follows from what is left of the pool.

A charge is a row for a session and window (and hour, of a rolling window). Every few seconds its duration is *set* to what it is by
now. So a SIGKILL of everything loses no more than those seconds, the next write makes up for one that failed, and a repeated one
changes nothing. The first charge is written with the session's row, in one transaction: no death leaves a session without one.

The duration of a session is read on CLOCK_BOOTTIME. Its instants are those of the wall clock when the session was opened, so
setting the wall clock later moves no wall and costs nothing, also where another supervisor adopts the session. In a fleet that is
the clock of the database's server.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import Engine
from sqlalchemy.exc import SQLAlchemyError

from kgorch.core.codes import Reason
from kgorch.core.limits import quota as core
from kgorch.core.limits import quota_windows
from kgorch.core.limits.quota import Quota, Usage
from kgorch.core.limits.wall import Wall
from kgorch.db import charges, fleet
from kgorch.db.charges import OwnCharges
from kgorch.db.rows import PoolInfo, SessionInfo
from kgorch.hardware import devices, nvml
from kgorch.limits import late_charges, quota_pools
from kgorch.limits.late_charges import Spans
from kgorch.limits.source import News
from kgorch.plan import Plan
from kgorch.platforms.profile import Profile
from kgorch.system import process_identity
from kgorch.system.clock import boottime_s

LOOK_S = 2.0
"""Seconds between two charges of a session, each with a new look at what is left."""

SLACK = timedelta(seconds=60)
"""How much the start of a container may differ between two of its sessions: its instant moves when the wall clock is set."""


@dataclass(frozen=True, slots=True)
class Terms:
    """What a session costs, and which pool pays.

    Attributes:
        resets: the quota's window as the plan writes it.
        factor: pool seconds that a second of the session costs.
        accelerator: model of its GPUs.
    """

    quota: Quota
    resets: str
    factor: float
    accelerator: str


def terms_of(plan: Plan, profile: Profile, gpus: tuple[str, int] | Mapping[str, str] = os.environ) -> Terms | None:
    """The terms by the plan, else by the platform; None where no quota is counted.

    Args:
        gpus: of the session: model and number, or the variables in which they are the visible ones of this machine.
    """
    section = plan.quota
    # a platform counts accelerator time: without a GPU a session costs nothing there, and its factor is for several GPUs
    count = _gpu_count(gpus)
    hours = section.hours or (profile.quota_hours if count else None)
    if hours is None:
        return None
    resets = section.resets or profile.quota_resets or "never"
    quota = Quota(section.pool or profile.name, hours * 3600.0, quota_windows.parse(resets), section.reserve or 0.0)
    model = gpus[0] if isinstance(gpus, tuple) else devices.model_name(gpus)
    return Terms(quota, resets, section.factor or (profile.factor if count > 1 else 1.0), model)


def _gpu_count(gpus: tuple[str, int] | Mapping[str, str]) -> int:
    if isinstance(gpus, tuple):
        return gpus[1]
    try:
        return devices.visible_gpu_count(gpus)
    except nvml.DriverUnresponsive:
        return 1  # there is a driver, so there are GPUs, and their time is counted


class Ledger:
    """Charges one session, and is a source of its walls (limits/source.py).

    Args:
        started_at: when the session began to cost, by the wall clock.
        at_s: the same instant, seconds of CLOCK_BOOTTIME.
        session_id: of the row to charge; None until there is one (`begin`).
        now_s: the clock.
    """

    def __init__(
        self,
        engine: Engine,
        terms: Terms,
        started_at: datetime,
        at_s: float,
        session_id: int | None = None,
        *,
        now_s: Callable[[], float] = boottime_s,
    ) -> None:
        self.news = News()
        self.terms = terms
        self._engine, self._started_at, self._at_s, self._session_id = engine, started_at, at_s, session_id
        self._now_s = now_s
        self._newest_start = started_at  # of the newest charge that is written
        self._wall: Wall | None = None
        self._guard = threading.Lock()  # a periodic duty charges while the session runs, the supervisor at its end

    @classmethod
    def open(
        cls, engine: Engine, plan: Plan, profile: Profile, environ: Mapping[str, str] = os.environ
    ) -> Ledger | None:
        """The ledger of a session that is about to be opened; None where no quota is counted.

        In a platform's container the session costs since the container was started, because the platform counts its set-up, too;
        but only since the end of an earlier session that was charged for that: the set-up is paid once.
        """
        terms = terms_of(plan, profile, environ)
        if terms is None:
            return None
        now_s, utc = boottime_s(), fleet.server_now(engine)
        # else charges that a clock running far ahead has written count in every window up to their date
        charges.repair_future_timestamps(engine, utc)
        late_charges.complete_taken(engine)
        began_s = process_identity.start_time_s(1) or now_s if profile.began == "container" else now_s
        started_at = utc - timedelta(seconds=max(0.0, now_s - began_s))
        before = charges.newest_of_boot(engine, terms.quota.pool, process_identity.boot_id(), started_at - SLACK)
        if before:
            started_at = min(utc, max(started_at, before.started_at + timedelta(seconds=before.used_s)))
        return cls(engine, terms, started_at, now_s - (utc - started_at).total_seconds())

    @classmethod
    def adopt(
        cls, engine: Engine, plan: Plan, profile: Profile, row: SessionInfo, environ: Mapping[str, str] = os.environ
    ) -> Ledger | None:
        """The ledger of a session that has lost its supervisor and goes on; None where no quota is counted.

        It continues the newest charge, and the plan as it is now holds from there on.
        """
        terms = terms_of(plan, profile, environ)
        if terms is None:
            return None
        now_s, utc = boottime_s(), fleet.server_now(engine)
        last = charges.newest(engine, row.id)
        started_at, used_s = (last.started_at, last.used_s) if last else (row.started_at, 0.0)
        uncharged_s = _uncharged_s(row, started_at + timedelta(seconds=used_s), utc, now_s)
        used_s += min(max(uncharged_s, 0.0), now_s)  # whatever the wall clock says, no longer than since the boot
        return cls(engine, terms, started_at, now_s - used_s, row.id)

    def first_charges(self) -> dict[str, Any]:
        """What the session has cost until now, as kgorch.db.sessions.open_session takes it."""
        return self._columns(self._spans(self._utc(self._now_s())) or [(self._started_at, 0.0)])

    def begin(self, run_id: str, session_id: int) -> None:
        """Charge from here on to this session, which has been opened with its first charges."""
        self._session_id = session_id
        self.record_pool(run_id)

    def record_pool(self, run_id: str) -> None:
        """Write the pool with these terms, and make it the run's."""
        quota = self.terms.quota
        pool = PoolInfo(quota.pool, quota.total_s, self.terms.resets, quota.reserve_s, fleet.server_now(self._engine))
        charges.set_pool(self._engine, run_id, pool)

    def wall(self, now_s: float) -> Wall | None:
        """Where the quota ends the session, by the newest look; None before the first."""
        return self._wall

    def look(self) -> None:
        """Charge the usage, and compute the wall anew: a periodic duty, every LOOK_S.

        It waits for the database. While that cannot be used, the wall stays where it was.
        """
        now_s = self._now_s()
        with contextlib.suppress(SQLAlchemyError):
            self.charge(now_s)
            self._wall = self._compute_wall(now_s)
        self.news.wall_moved()

    def charge(self, now_s: float) -> None:
        """Write the charges that began since the last call, and the newest one with its duration by now.

        Raises: SQLAlchemyError.
        """
        with self._guard:
            if self._session_id is None:
                return
            spans = [span for span in self._spans(self._utc(now_s)) if span[0] >= self._newest_start]
            spans = spans or [(self._started_at, 0.0)]
            charges.charge(self._engine, self._session_id, **self._columns(spans))
            self._newest_start = spans[-1][0]

    def is_spent(self, save_lead_s: float) -> bool:
        """Whether less is left than the last save takes. Args: save_lead_s: seconds of the session."""
        now_s = self._now_s()
        wall = self._compute_wall(now_s)
        return wall is not None and wall.at_s - now_s < save_lead_s

    def resume_at(self, save_lead_s: float, *, on_quota: bool = False) -> datetime | None:
        """When the next session may start; None when no hours will come back.

        Args:
            save_lead_s: seconds that its last save takes.
            on_quota: the last session ended on the quota. Then hours for some training must be there, not only for a save.
        """
        now_s, quota = self._now_s(), self.terms.quota
        needed_s = save_lead_s * self.terms.factor
        now, usage = self._utc(now_s), self._usage(now_s)
        if on_quota or core.left_s(quota, usage, now) < needed_s:
            at = core.available_at(quota, usage, now, needed_s=needed_s + quota.useful_s)
            if at is None or at > now:
                return at
        # Due at once. Whoever waits for it reads the wall clock, which may have been put back behind ours meanwhile.
        return min(now, fleet.server_now(self._engine))

    def stop(self) -> None:
        """Nothing works here by itself. The rest is charged by the supervisor's journal, which waits for the database."""

    def _compute_wall(self, now_s: float) -> Wall | None:
        now, usage = self._utc(now_s), self._usage(now_s)
        others = quota_pools.live_usage(self._engine, self.terms.quota.pool, now, but=self._session_id)
        rate = self.terms.factor + sum(item.rate for item in others)
        usage += [item.unwritten for item in others]
        lasts_s = core.lasts_s(self.terms.quota, usage, now, rate=rate)
        return None if lasts_s is None else Wall(now_s + lasts_s, Reason.QUOTA)

    def _usage(self, now_s: float) -> list[Usage]:
        """The charges of others and our own before this ledger, and our usage since then, charged or not."""
        now = self._utc(now_s)
        own = None if self._session_id is None else OwnCharges(self._session_id, self._started_at)
        ours = [Usage(start, span_s, span_s * self.terms.factor) for start, span_s in self._spans(now)]
        return quota_pools.uses(self._engine, self.terms.quota, now, but=own) + ours

    def _spans(self, until_at: datetime) -> Spans:
        return late_charges.spans_of(self.terms.quota.window, self._started_at, until_at)

    def _columns(self, spans: Spans) -> dict[str, Any]:
        terms = self.terms
        return {"pool": terms.quota.pool, "pieces": spans, "factor": terms.factor, "accelerator": terms.accelerator}

    def _utc(self, now_s: float) -> datetime:
        """The instant of `now_s` on a wall clock that nobody has set since this ledger was made."""
        return self._started_at + timedelta(seconds=now_s - self._at_s)


def _uncharged_s(row: SessionInfo, charged_until: datetime, utc: datetime, now_s: float) -> float:
    """Seconds from the end of a session's newest charge until now, without what the wall clock was set ahead by meanwhile."""
    if row.heartbeat_at is not None and row.heartbeat_at > charged_until + late_charges.SLACK:
        return (utc - row.heartbeat_at).total_seconds()  # set before the last heartbeat
    # the session's wall in both clocks tells where the wall clock was; a fleet's instants are the server's
    if row.wall_at is None or row.wall_boottime_s is None or row.machine or row.boot_id != process_identity.boot_id():
        return (utc - charged_until).total_seconds()
    return now_s - row.wall_boottime_s + (row.wall_at - charged_until).total_seconds()
