"""A pool that sessions of several machines spend from is never overspent, also where one of them is not heard of."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest

from kgorch.admission import queue_entry
from kgorch.core.codes import EventKind, Phase, Reason
from kgorch.core.limits.quota import Quota
from kgorch.core.limits.quota_windows import Never
from kgorch.db import charges, fleet, queue, runs, sessions
from kgorch.db.engine import open_fleet
from kgorch.db.location import Fleet
from kgorch.db.rows import PoolInfo
from kgorch.limits import quota_ledger, quota_pools
from kgorch.limits.quota_ledger import Ledger, Terms
from kgorch.plan import parse
from kgorch.platforms.generic import PROFILE
from kgorch.scheduler.fleet_membership import FleetMembership
from kgorch.supervisor.recorder import Journal, Recorder
from kgorch.system import process_identity
from kgorch.system.clock import SystemClock, boottime_s

PLAN = 'name = "a"\n[[stage]]\nname = "train"\nentry = "x.py"\n[quota]\nhours = 1\npool = "t4"\n'
LOST = {"kind": EventKind.SESSION_LOST, "phase": Phase.CUT_OFF, "facts": {}, "reason": Reason.LOST}
TERMS = Terms(Quota("t4", 1000.0, Never()), "never", 1.0, "cpu")


@pytest.fixture
def machines(postgres, tmp_path):
    url = postgres.new_database()
    engines = {name: open_fleet(Fleet(url, name), tmp_path / name) for name in "ab"}
    for name, engine in engines.items():
        runs.create(
            engine, id=f"id-{name}", name=name, number=1, folder=f"/nowhere/runs/{name}/1", workdir="/w", checkpoints="/c", plan="",
            overrides=[], plan_hash="h", stages=["train"],
        )  # fmt: skip
    yield engines
    for engine in engines.values():
        engine.dispose()


def spending(engine, *, used_s: float, silent_s: float = 0.0) -> tuple[Ledger, int]:
    """A session that has used so much, and was charged last so long ago."""
    now = fleet.server_now(engine) - timedelta(seconds=silent_s)
    row = sessions.open_session(engine, f"id-{runs.machine_of(engine)}", boot_id="another boot", pool="t4")
    ledger = Ledger(engine, TERMS, now - timedelta(seconds=used_s), boottime_s() - used_s - silent_s, row.id)
    charges.charge(engine, row.id, "t4", [(now - timedelta(seconds=used_s), used_s)], factor=1.0, accelerator="cpu")
    return ledger, row.id


def left_s(ledger: Ledger) -> float:
    ledger.look()
    wall = ledger.wall(boottime_s())
    return wall.at_s - boottime_s()


def test_sessions_of_two_machines_share_what_is_left(machines):
    first, _ = spending(machines["a"], used_s=100.0)
    assert left_s(first) == pytest.approx(900.0, abs=5.0)
    second, _ = spending(machines["b"], used_s=300.0)
    assert left_s(first) == pytest.approx(300.0, abs=5.0)
    assert left_s(second) == pytest.approx(300.0, abs=5.0)


def test_a_machine_that_cannot_be_heard_keeps_its_share_and_leaves_the_others_theirs(machines):
    """It trains up to the wall that it knew: that it was cut off is no reason to give its hours to another one."""
    _, silent = spending(machines["a"], used_s=100.0, silent_s=60.0)
    ours, _ = spending(machines["b"], used_s=300.0)
    share_s = (1000.0 - 100.0 - 300.0) / 2
    wall_at = fleet.server_now(machines["a"]) + timedelta(seconds=share_s - 60.0)
    sessions.update_session(machines["a"], silent, wall_at=wall_at)
    assert left_s(ours) == pytest.approx(share_s, abs=5.0)
    [other] = quota_pools.live_usage(machines["b"], "t4", fleet.server_now(machines["b"]), but=ours._session_id)
    assert other.rate == 0.0 and other.unwritten.cost_s == pytest.approx(share_s, abs=5.0)


def test_where_a_silent_machine_may_use_all_the_rest_no_other_session_begins(machines):
    _, silent = spending(machines["a"], used_s=100.0, silent_s=60.0)
    wall_at = fleet.server_now(machines["a"]) + timedelta(seconds=840.0)
    sessions.update_session(machines["a"], silent, wall_at=wall_at)
    ledger = Ledger(machines["b"], TERMS, fleet.server_now(machines["b"]), boottime_s())
    assert ledger.is_spent(10.0)


def test_instants_of_charges_are_the_servers_whatever_a_machines_clock_says(machines, monkeypatch):
    class Behind(datetime):
        @classmethod
        def now(cls, tz=None):
            return datetime.now(tz) - timedelta(minutes=9)

    monkeypatch.setattr(quota_ledger, "datetime", Behind)
    charged = Ledger.open(machines["a"], parse(PLAN, "plan.toml"), PROFILE).first_charges()
    row = sessions.open_session(machines["a"], "id-a", boot_id="b", pool="t4", charged=charged)
    started_at = charges.newest(machines["b"], row.id).started_at
    assert abs(started_at - datetime.now(UTC)) < timedelta(seconds=60)


def test_a_run_that_a_machine_with_a_clock_ahead_makes_due_is_due_at_once(machines, monkeypatch):
    class Ahead(datetime):
        @classmethod
        def now(cls, tz=None):
            return datetime.now(tz) + timedelta(minutes=9)

    monkeypatch.setattr(charges, "now", lambda: Ahead.now(UTC), raising=False)
    monkeypatch.setattr(queue_entry, "datetime", Ahead)
    runs.set_plan(machines["a"], "id-a", stages=["train"], plan=PLAN)
    charges.set_pool(machines["a"], "id-a", PoolInfo("t4", 1000.0, "never", 0.0, datetime.now(UTC)))
    run, tomorrow = runs.by_id(machines["a"], "id-a"), datetime.now(UTC) + timedelta(days=1)

    def is_due() -> bool:
        return queue.due_entry(machines["b"], "id-a", fleet.server_now(machines["b"])) is not None

    assert queue_entry.enqueue_known(machines["a"], run, due_at=Ahead.now(UTC)) is None and is_due()
    queue.put(machines["a"], "id-a", reason=Reason.QUOTA, due_at=tomorrow)
    assert quota_pools.correct(machines["a"], "t4", 5.0)["resumed"] == 1 and is_due()
    assert queue_entry.enqueue_known(machines["a"], run, due_at=tomorrow) is None and not is_due()


def test_a_supervisor_whose_session_was_taken_over_charges_it_to_its_end(machines):
    ledger, session = spending(machines["a"], used_s=100.0)
    sessions.record(machines["b"], "id-a", session, **LOST)
    journal = Journal(machines["a"], "id-a", session)
    ended = {"kind": EventKind.RUN_FINISHED, "phase": Phase.FINISHED, "facts": {}}
    journal.write(lambda: sessions.record(machines["a"], "id-a", session, **ended))
    an_hour_later = SimpleNamespace(now_s=lambda: boottime_s() + 3600.0)
    Recorder(SimpleNamespace(engine=machines["a"], clock=an_hour_later), journal, ledger).close(20.0)
    assert charges.newest(machines["b"], session).used_s == pytest.approx(3700.0, abs=5.0)


@pytest.mark.parametrize(
    ("by", "ahead_s", "ended_s"),
    [
        ("its daemon", 0.0, None),
        ("its next session", 0.0, None),
        ("its daemon", 3600.0, 60.0),
        ("its next session", -3600.0, 60.0),
        ("its daemon", 0.0, -3600.0),
    ],
    ids=["", "", "a clock that was ahead", "a clock that was behind", "a record that lies ahead"],
)
def test_what_a_session_used_after_it_was_taken_over_is_charged_by_its_machine(
    machines, tmp_path, by, ahead_s, ended_s
):
    """The machine could not reach the database until after the end of the training.

    Its clock was ahead by so much at the end, and was set since. Its shim has recorded the end `ended_s` ago by the time since
    the boot, too, or is of a version that did not.
    """
    _, session = spending(machines["a"], used_s=100.0, silent_s=300.0)
    sessions.update_session(machines["a"], session, boot_id=process_identity.boot_id())
    where = {"stage": "train", "ranks": 1, "first_step": 0, "folder_of": lambda _: str(tmp_path / "attempt")}
    attempt = sessions.open_attempt(machines["a"], session, **where)
    Path(attempt.folder).mkdir()
    ended = {"status": 0, "at": (datetime.now(UTC) + timedelta(seconds=ahead_s - 60)).isoformat()}
    if ended_s is not None:
        ended["at_s"] = boottime_s() - ended_s
    Path(attempt.folder, "exit.json").write_text(json.dumps(ended))
    sessions.record(machines["b"], "id-a", session, **LOST)
    for _ in range(2):
        if by == "its daemon":
            FleetMembership(SystemClock(), tmp_path / "a").tick(machines["a"])
        else:
            Ledger.open(machines["a"], parse(PLAN, "plan.toml"), PROFILE)
        assert charges.newest(machines["b"], session).used_s == pytest.approx(340.0, abs=5.0)
