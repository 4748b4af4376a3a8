"""A quarter of a year by a hand-moved clock: five plans on a machine for two sessions at once, with weekly, monthly and
rolling quotas, machines that are taken back and reboots. Real are the database, the lifecycle, the ledger, the queue and the
daemon's look at it; played are the trainings (a step a second) and time.

    python benchmarks/quarter.py --seed 1        prints what each plan used of its windows, and when its run was finished

Checked all along: no window is overspent, by charges and by what was truly used; nothing waits that has a place and hours.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import os
import random
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

from sqlalchemy import Engine

import kgorch.db.queue
import kgorch.db.runs
import kgorch.db.sessions
from kgorch.core.codes import OVER, EventKind, Outcome, Phase, Reason, RunState
from kgorch.core.limits import quota_windows
from kgorch.core.limits.quota import Quota
from kgorch.core.limits.wall import Wall, has_moved, nearest
from kgorch.core.session import events
from kgorch.core.session import lifecycle as core
from kgorch.core.session.lifecycle_state import LifecycleState
from kgorch.db import charges, queue, runs, sessions
from kgorch.db.engine import open_database
from kgorch.limits import late_charges
from kgorch.limits.quota_ledger import Ledger, Terms
from kgorch.scheduler.daemon import Daemon
from kgorch.system import process_identity

BEGIN = datetime(2026, 8, 3, 6, tzinfo=UTC)
DAYS = 91
WALL_S, LEAST_SAVE_S, STARTUP_S, LOOK_S = 9 * 3600.0, 40.0, 120.0, 1800.0
AT_ONCE = 2
TAKEN_BACK_S, REBOOT_S, DOWN_S = 30 * 3600.0, 12 * 86400.0, 300.0
"""Mean times: of a session until its machine is taken from it, between two reboots; how long one takes."""


@dataclass(frozen=True)
class Played:
    """A plan: hours of training that it needs, and its pool. Two may spend the same hours."""

    name: str
    needs_h: float
    pool: str
    quota_h: float
    resets: str
    factor: float = 1.0
    reserve_h: float = 0.0
    priority: int = 0

    @property
    def terms(self) -> Terms:
        quota = Quota(self.pool, self.quota_h * 3600, quota_windows.parse(self.resets), self.reserve_h * 3600)
        return Terms(quota, self.resets, self.factor, "Tesla T4")


PLANS = (
    Played("cloud-removal", 60, "kaggle", 30, "Sat 00:00 UTC", factor=2.0),
    Played("camouflage", 75, "kaggle", 30, "Sat 00:00 UTC", priority=1),
    Played("vqa", 58, "lab", 20, "Mon 09:00 Europe/Berlin", reserve_h=2),
    Played("surface-detection", 100, "month", 45, "monthly 31 00:00 America/New_York"),
    Played("timeseries", 70, "rolling", 12, "rolling 7d"),
)


class Clock:
    """Both clocks at once; CLOCK_BOOTTIME began a day before."""

    def __init__(self) -> None:
        self.at = BEGIN

    def utc(self) -> datetime:
        return self.at

    def now_s(self) -> float:
        return (self.at - BEGIN).total_seconds() + 86400.0


@dataclass
class Ending:
    """Stands for the process of a session, to the daemon that started it."""

    pid: int = field(default_factory=os.getpid)
    returncode: int | None = None

    def poll(self) -> int | None:
        return self.returncode


@dataclass
class Usage:
    """What was truly used, beside what is charged."""

    pool: str
    from_at: datetime
    to_at: datetime
    factor: float
    was_killed: bool = False


class Woken(Daemon):
    """This world wakes it (World.look), not a scheduler."""

    def _set_alarm(self) -> None:
        pass


class World:
    def __init__(self, home: Path, seed: int, plans: tuple[Played, ...] = PLANS, days: int = DAYS) -> None:
        self.clock, self.chance, self.end = Clock(), random.Random(seed), BEGIN + timedelta(days=days)
        self.home, self.plans = home, {plan.name: plan for plan in plans}
        self.engine: Engine = open_database(home)
        self.events: list[tuple[datetime, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self.live: dict[str, Training] = {}
        self.saved_s = dict.fromkeys(self.plans, 0.0)
        self.finished: dict[str, datetime] = {}
        self.uses: list[Usage] = []
        self.sessions_of = dict.fromkeys(self.plans, 0)
        self.counts = {"sessions": 0, "taken back": 0, "reboots": 0, "ended by quota": 0, "ended by the wall": 0}
        self.idle_s: dict[str, float] = dict.fromkeys(self.plans, 0.0)
        self.is_up, self.is_changed, self.look_at = False, False, BEGIN

    def at(self, when: datetime, what: Callable[[], None]) -> None:
        heapq.heappush(self.events, (when, next(self._order), what))

    def after(self, seconds: float, what: Callable[[], None]) -> None:
        self.at(self.clock.at + timedelta(seconds=max(seconds, 0.001)), what)

    def run(self) -> None:
        with self._our_time():
            for plan in self.plans.values():
                folder = self.home / plan.name
                folder.mkdir()
                run = runs.create(
                    self.engine, id=plan.name, name=plan.name, number=1, folder=str(folder), workdir=str(folder),
                    checkpoints=str(folder), plan="", overrides=[], plan_hash="", stages=["train"],
                )  # fmt: skip
                queue.put(
                    self.engine,
                    run.id,
                    reason=Reason.QUEUED,
                    due_at=self.clock.at,
                    resource_request={"priority": plan.priority},
                )
            self.at(self.clock.at, self.boot)
            self.after(self.chance.expovariate(1 / REBOOT_S), self.reboot)
            while self.events and self.clock.at < self.end and len(self.finished) < len(self.plans):
                when, _, what = heapq.heappop(self.events)
                self.clock.at = max(self.clock.at, when)
                what()
                if self.is_up:
                    self.look()

    @contextmanager
    def _our_time(self) -> Iterator[None]:
        """Rows bear the instants of this world."""
        with ExitStack() as patched:
            for module in (kgorch.db.runs, kgorch.db.queue, kgorch.db.sessions):
                patched.enter_context(mock.patch.object(module, "now", self.clock.utc))
            yield

    def boot(self) -> None:
        self.is_up = self.is_changed = True
        self.daemon = Woken(self.engine, self.home, at_once=AT_ONCE, clock=self.clock, start=self.begin)

    def reboot(self) -> None:
        self.counts["reboots"] += 1
        for training in list(self.live.values()):
            training.die()
        self.is_up = False
        self.after(DOWN_S, self.boot)
        self.after(DOWN_S + self.chance.expovariate(1 / REBOOT_S), self.reboot)

    def look(self) -> None:
        """What the daemon does when it is woken, and again at the next due instant; then nothing may wait in vain."""
        if not self.is_changed and self.clock.at < self.look_at:
            return
        self.is_changed = False
        self.daemon.tick()
        while self.daemon._is_look_requested:  # a slice of its time was over, which it measures in ours
            self.daemon.tick()
        at = queue.next_due_at(self.engine, self.clock.at)
        self.look_at = min(at or self.end, self.clock.at + timedelta(seconds=LOOK_S))
        self.at(self.look_at, lambda: None)
        if len(self.live) < AT_ONCE:
            until = min(self.events[0][0], self.end)
            for name, plan in self.plans.items():
                if name not in self.live and name not in self.finished and self.has_hours(plan):
                    self.idle_s[name] += (until - self.clock.at).total_seconds()

    def others_look(self, plan: Played) -> None:
        """Supervisors look every two seconds; here those whose pool is spent at another pace from now on."""
        self.is_changed = True
        for other in self.live.values():
            if other.plan.pool == plan.pool and other.plan is not plan:
                self.after(1.0, other.turn)

    def has_hours(self, plan: Played) -> bool:
        found = Ledger(self.engine, plan.terms, self.clock.at, self.clock.now_s(), now_s=self.clock.now_s)
        last = sessions.last(self.engine, plan.name)
        due_at = found.resume_at(last.save_lead_s if last else 120.0, on_quota=True)
        return due_at is not None and due_at <= self.clock.at

    def begin(self, entry: queue.Entry, token: str) -> Any:
        """What `kgorch resume --claimed` does, up to the training."""
        plan, ending = self.plans[entry.run], Ending()
        last = sessions.last(self.engine, plan.name)
        if last and last.phase not in OVER:
            self.settle(plan, last)
        training = Training(self, plan, ending)
        if training.open():
            self.live[plan.name] = training
            self.others_look(plan)
        else:
            ending.returncode = 11
        return ending

    def settle(self, plan: Played, last: Any) -> None:
        late_charges.complete(self.engine, last, None, plan.terms.quota.window)
        ended = core.ended_alone(LifecycleState(phase=Phase(last.phase)), None, 0.0).session
        if attempt := sessions.last_attempt(self.engine, last.id):
            sessions.close_attempt(self.engine, **_end_of(attempt, Outcome.LOST, last.step))
        sessions.record(
            self.engine,
            plan.name,
            last.id,
            kind=EventKind.SESSION_LOST,
            phase=ended.phase,
            facts={},
            reason=ended.reason,
            why=ended.why,
        )


def _end_of(attempt: Any, outcome: str, step: int) -> dict[str, Any]:
    made_progress = step > attempt.first_step
    return {
        "attempt_id": attempt.id,
        "outcome": outcome,
        "cause": "",
        "last_step": step,
        "made_progress": made_progress,
    }


class Training:
    """A session: the core decides, this plays what it orders."""

    def __init__(self, world: World, plan: Played, ending: Ending) -> None:
        self.world, self.plan, self.ending = world, plan, ending
        self.clock, self.engine = world.clock, world.engine
        self.is_over, self.turns = False, 0
        self.training_since_s: float | None = None

    def open(self) -> bool:
        now_s = self.clock.now_s()
        self.ledger = Ledger(self.engine, self.plan.terms, self.clock.at, now_s, now_s=self.clock.now_s)
        self.fixed, self.began_at = Wall(now_s + WALL_S, Reason.TIME_LIMIT), self.clock.at
        self.ledger.look()
        self.wall = nearest([self.fixed, self.ledger.wall(now_s)])
        assert self.wall
        self.session = LifecycleState(
            wall_s=self.wall.at_s, wall_kind=self.wall.kind, margin_s=60.0, guess_s=60.0, step_s=1.0
        )
        if self.ledger.is_spent(self.session.save_lead_s):
            queue.put(
                self.engine,
                self.plan.name,
                reason=Reason.QUOTA,
                due_at=self.ledger.resume_at(self.session.save_lead_s, on_quota=True),
            )
            return False
        us = queue.Claimant(os.getpid(), process_identity.start_ticks(os.getpid()), process_identity.boot_id())
        self.row = sessions.open_session(
            self.engine, self.plan.name, boot_id=us.boot, supervisor_pid=us.pid, supervisor_started_ticks=us.ticks,
            pool=self.plan.pool, step=int(self.world.saved_s[self.plan.name]),
            first_step=int(self.world.saved_s[self.plan.name]), charged=self.ledger.first_charges(),
        )  # fmt: skip
        self.attempt = sessions.open_attempt(
            self.engine, self.row.id, stage="train", ranks=1, first_step=self.row.first_step, folder_of=str
        )
        self.ledger.begin(self.plan.name, self.row.id)
        queue.mark_started(self.engine, self.plan.name, us, by="daemon")
        self.world.counts["sessions"] += 1
        self.world.sessions_of[self.plan.name] += 1
        self.happened(events.SessionOpened())
        self.world.after(STARTUP_S, lambda: self.happened(events.Attached(1 << 30)) if not self.is_over else None)
        self.world.after(self.world.chance.expovariate(1 / TAKEN_BACK_S), self.taken_back)
        self.turn()
        return True

    def turn(self) -> None:
        """The supervisor's loop, as often as something is due."""
        if self.is_over:
            return
        self.turns += 1
        now_s, number = self.clock.now_s(), self.turns
        self.ledger.look()
        if (wall := nearest([self.fixed, self.ledger.wall(now_s)])) and has_moved(self.wall, wall):
            self.wall = wall
            self.happened(events.WallMoved(wall))
        if self.session.phase in (Phase.TRAINING, Phase.SAVING) and self.left_s() <= 0:
            self.happened(events.RunFinished())
        for event in core.due(self.session, now_s):
            self.happened(event)
        if not self.is_over:
            due_s = core.next_due_s(self.session, now_s)
            waits = [LOOK_S, self.left_s() + 1, *([] if due_s is None else [due_s - now_s])]
            self.world.after(max(min(waits), 0.5), lambda: self.turn() if number == self.turns else None)

    def trained_s(self) -> float:
        return 0.0 if self.training_since_s is None else self.clock.now_s() - self.training_since_s

    def left_s(self) -> float:
        return self.plan.needs_h * 3600 - self.world.saved_s[self.plan.name] - self.trained_s()

    def happened(self, event: events.Event) -> None:
        now_s = self.clock.now_s()
        move = core.advance(self.session, event, now_s)
        self.session, resume = move.session, move.record.resume
        if isinstance(event, events.Attached):
            self.training_since_s = now_s
        due_at = self.ledger.resume_at(self.session.save_lead_s, on_quota=resume.on_quota) if resume else None
        step = int(self.world.saved_s[self.plan.name] + self.trained_s())
        sessions.record(
            self.engine, self.plan.name, self.row.id, kind=event.kind, phase=self.session.phase,
            facts={}, resume={"reason": resume.reason, "why": resume.why, "due_at": due_at} if resume else None, step=step,
            heartbeat_at=self.clock.at, save_lead_s=self.session.save_lead_s,
            closes=_end_of(self.attempt, Outcome.TIME_LIMIT, step) if self.session.phase.is_over else None,
        )  # fmt: skip
        for effect in move.effects:
            if effect in (core.Effect.ASK_TO_SAVE, core.Effect.ASK_TO_STOP):
                takes_s = LEAST_SAVE_S * self.world.chance.uniform(1.0, 1.4)
                stops = effect is core.Effect.ASK_TO_STOP
                self.world.after(takes_s, self.saved(takes_s, self.trained_s(), stops=stops))
        if self.session.phase.is_over:
            self.end()

    def saved(self, took_s: float, trained_s: float, *, stops: bool) -> Callable[[], None]:
        def arrive() -> None:
            if self.is_over or self.training_since_s is None:
                return
            self.world.saved_s[self.plan.name] += trained_s
            self.training_since_s += trained_s
            self.happened(events.CheckpointVerified(0, took_s, 1.0, 1 << 30))
            if stops and not self.is_over:
                self.happened(events.AttemptSuspended())

        return arrive

    def taken_back(self) -> None:
        if not self.is_over:
            self.world.counts["taken back"] += 1
            self.die()

    def die(self) -> None:
        """SIGKILL of everything: nobody writes down an end, and its last charge is up to two seconds old."""
        last_beat = self.clock.at - timedelta(seconds=self.world.chance.uniform(0.0, 2.0))
        self.ledger.charge((last_beat - BEGIN).total_seconds() + 86400.0)
        step = int(self.world.saved_s[self.plan.name] + self.trained_s())
        sessions.record_heartbeat(self.engine, self.row.id, self.attempt.id, step=step)
        sessions.update_session(self.engine, self.row.id, heartbeat_at=last_beat, supervisor_started_ticks=-1)
        self.over(was_killed=True, code=-9)

    def end(self) -> None:
        self.ledger.charge(self.clock.now_s())
        if self.session.phase is Phase.FINISHED:
            self.world.finished[self.plan.name] = self.clock.at
            runs.set_state(self.engine, self.plan.name, RunState.FINISHED)
        else:
            self.world.counts["ended by quota" if self.session.ends_on_quota else "ended by the wall"] += 1
        self.over(code=0)

    def over(self, *, code: int, was_killed: bool = False) -> None:
        self.is_over = True
        self.ending.returncode = code
        del self.world.live[self.plan.name]
        self.world.others_look(self.plan)
        self.world.uses.append(Usage(self.plan.pool, self.began_at, self.clock.at, self.plan.factor, was_killed))


class Row(NamedTuple):
    """A pool in one of its windows, hours. `lost_h`: of kills, what nobody could write down."""

    pool: str
    start: datetime
    allowed_h: float
    charged_h: float
    used_h: float
    lost_h: float

    @property
    def is_overspent(self) -> bool:
        return max(self.charged_h, self.used_h - self.lost_h) > self.allowed_h + 1 / 3600


def audit(world: World) -> list[Row]:
    """Every window of every pool, of a rolling one each that ends with a session: what was charged, what was truly used."""
    rows = []
    for pool, plan in {plan.pool: plan for plan in world.plans.values()}.items():
        quota, mine = plan.terms.quota, [use for use in world.uses if use.pool == pool]
        charged = charges.list_since(world.engine, pool, BEGIN - timedelta(days=40))
        for start, end in _windows(quota, mine, world.clock.at):
            rows.append(
                Row(
                    pool,
                    start,
                    quota.usable_s / 3600,
                    sum(_within(at, span_s, start, end) * cost / span_s for at, span_s, cost, _ in charged if span_s)
                    / 3600,
                    sum(_overlap_s(use.from_at, use.to_at, start, end) * use.factor for use in mine) / 3600,
                    sum(2.0 * use.factor for use in mine if use.was_killed and start <= use.to_at <= end) / 3600,
                )
            )
    return rows


def _windows(quota: Quota, uses: list[Usage], until: datetime) -> Iterator[tuple[datetime, datetime]]:
    if isinstance(quota.window, quota_windows.Rolling):
        for use in uses:
            yield quota.window.window_at(use.to_at)[0], use.to_at
        return
    at: datetime | None = BEGIN
    while at and at < until:
        start, at = quota.window.window_at(at)
        yield start, at or until


def _within(at: datetime, span_s: float, start: datetime, end: datetime) -> float:
    return _overlap_s(at, at + timedelta(seconds=span_s), start, end)


def _overlap_s(from_at: datetime, to_at: datetime, start: datetime, end: datetime) -> float:
    return max(0.0, (min(to_at, end) - max(from_at, start)).total_seconds())


def play(seed: int, folder: Path, days: int = DAYS) -> World:
    world = World(folder, seed, days=days)
    world.run()
    return world


def main() -> int:
    from rich.console import Console
    from rich.table import Table

    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--seed", type=int, default=1)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        world = play(asked.seed, Path(folder))
        rows = audit(world)
    console = Console()
    table = Table(title=f"used hours of each window, seed {asked.seed}")
    pools = sorted({row.pool for row in rows})
    for name in ("pool", "allowed", "windows", "most charged", "most used", "in order"):
        table.add_column(name, justify="left" if name in ("pool", "in order") else "right")
    for pool in pools:
        mine = [row for row in rows if row.pool == pool]
        most, used = max(row.charged_h for row in mine), max(row.used_h for row in mine)
        kept = "no" if any(row.is_overspent for row in mine) else "yes"
        table.add_row(pool, f"{mine[0].allowed_h:g}", str(len(mine)), f"{most:.3f}", f"{used:.3f}", kept)
    console.print(table)
    table = Table(title=", ".join(f"{count} {what}" for what, count in world.counts.items()))
    for name in ("plan", "needs h", "sessions", "waited in vain s", "finished"):
        table.add_column(name, justify="left" if name in ("plan", "finished") else "right")
    for name, plan in world.plans.items():
        end = world.finished.get(name)
        table.add_row(
            name,
            f"{plan.needs_h:g}",
            str(world.sessions_of[name]),
            f"{world.idle_s[name]:.0f}",
            end.strftime("%a %d %b %H:%M") if end else "no",
        )
    console.print(table)
    failed = (
        any(row.is_overspent for row in rows) or any(world.idle_s.values()) or len(world.finished) < len(world.plans)
    )
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
