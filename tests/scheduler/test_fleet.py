"""Daemons of several machines, one PostgreSQL, real trainings: runs move from a dead machine, and an outage loses nothing."""

from __future__ import annotations

import os
import random
import re
import signal
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from fleet_machines import LEASE_S, TestFleet
from harness import Kgorch, wait_until
from sqlalchemy.exc import SQLAlchemyError

from kgorch.db import charges, checkpoints, fleet, runs, sessions
from kgorch.db.engine import open_fleet
from kgorch.db.location import Fleet
from kgorch.limits.quota_ledger import LOOK_S

pytestmark = pytest.mark.slow


@pytest.fixture
def machines(postgres, tmp_path):
    folder = tmp_path / "work"
    folder.mkdir()
    made = TestFleet(postgres, postgres.new_database(), folder)
    yield made
    made.end()


@pytest.fixture
def engine(machines, tmp_path):
    made = open_fleet(Fleet(machines.url, "observer"), tmp_path / "observer")
    yield made
    made.dispose()


def wait_for_checkpoint_in_mirror(machines: TestFleet, name: str) -> Path:
    return wait_until(
        lambda: next(iter(sorted(machines.folder.glob(f"mirror/{name}-*/train/step-*/manifest.json"))), None),
        within_s=120,
        what=f"a checkpoint of {name} in the mirror",
    )


def test_a_dead_machines_run_is_finished_by_another_one_with_the_same_bits(machines, engine, tmp_path):
    first, second = (machines.machine(name, tmp_path) for name in ("a", "b"))
    plan = machines.plan("ink", epochs=12, sleep=0.4, every="2s")
    first("queue", "add", str(plan))
    first.start_daemon()
    wait_for_checkpoint_in_mirror(machines, "ink")
    first.die()
    second.start_daemon()
    wait_until(lambda: runs.newest(engine, "ink").state == "finished", within_s=180, what="the run is finished")
    run = runs.newest(engine, "ink")
    stays = sessions.of_run(engine, run.id)
    assert [(row.machine, row.phase) for row in stays] == [("a", "cut_off"), ("b", "finished")]
    assert run.machine == "b" and stays[1].first_step > 0, "it goes on from the mirror's checkpoint"
    (tmp_path / "alone").mkdir()
    alone = Kgorch(machines.folder, tmp_path / "alone")
    alone("start", str(plan), "--set", "stage.train.args.sleep=0.0")
    assert second.export("ink") == alone.export("ink")


def test_a_daemon_that_starts_before_its_database_waits_for_it_but_not_for_one_that_does_not_exist(machines, tmp_path):
    only = machines.machine("a", tmp_path)
    machines.server.stop()
    try:
        only.start_daemon()
        assert re.search("cannot be used; .+; the daemon tries again in 1 s$", only.daemon.stdout.readline().strip())
    finally:
        machines.server.start()
    wait_until(lambda: only("daemon", "status", code=None).returncode == 0, what="the daemon answers")
    missing = machines.url.replace("/test_", "/no_such_")
    other = Kgorch(machines.folder, tmp_path / "other", extra_env={"KGORCH_DATABASE": missing, "KGORCH_MACHINE": "b"})
    assert "createdb" in other("daemon", code=2).stderr


def test_an_outage_of_the_database_loses_no_step_no_checkpoint_and_no_session(machines, engine, tmp_path):
    only = machines.machine("a", tmp_path)
    plan = machines.plan("ink", epochs=14, sleep=0.15, every="2s")
    supervisor = only.background("start", str(plan))
    only.wait_for_step(3, within_s=120)
    machines.server.stop(signal.SIGQUIT)
    try:
        known = len(only.checkpoints())
        said = only("status", code=12).stderr
        assert "cannot be used" in said and "records wait" in said and "ink" in said, said
        wait_until(lambda: len(only.checkpoints()) > known, within_s=60, what="a checkpoint without the database")
        assert supervisor.poll() is None
    finally:
        machines.server.start()
    assert supervisor.wait(timeout=120) == 0, supervisor.communicate()
    engine.dispose()  # its connections are to the server that was stopped
    run = runs.newest(engine, "ink")
    assert run.state == "finished"
    [row] = sessions.of_run(engine, run.id)
    assert row.phase == "finished" and len(sessions.attempts(engine, run.id)) == 1
    assert {Path(one.path).name for one in checkpoints.of_run(engine, run.id, "verified")} == {
        path.name for path in only.checkpoints()
    }


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_an_outage_of_many_leases_ends_no_training_of_a_daemon_and_gives_its_run_to_nobody_else(
    machines, engine, tmp_path
):
    """An hour of the default lease of five minutes is twelve leases; here they are seconds long."""
    one, other = machines.machine("a", tmp_path), machines.machine("b", tmp_path)
    one("queue", "add", str(machines.plan("ink", epochs=1000, sleep=0.1, every="5s")))
    one.start_daemon()
    one.wait_for_step(3, within_s=120)
    other.start_daemon()
    wait_until(lambda: "b" in fleet.alive_machines(engine), within_s=60, what="the other daemon is up")
    machines.server.stop(signal.SIGQUIT)
    began_s = time.monotonic()
    try:
        known = set(one.checkpoints())
        wait_until(
            lambda: time.monotonic() - began_s > 12 * LEASE_S, within_s=13 * LEASE_S, what="twelve leases are over"
        )
        assert len(set(one.checkpoints()) - known) >= 2, "it trains and saves without the database"
        assert one.daemon.poll() is None and other.daemon.poll() is None
    finally:
        machines.server.start()
    saved = max(int(path.name.split("-")[1]) for path in one.checkpoints())
    engine.dispose()
    # what waited is written, and two leases later the run is still where it was
    wait_until(lambda: (row := only_session(engine)) and row.step >= saved, within_s=60, what="the records catch up")
    back_s = time.monotonic()
    wait_until(lambda: time.monotonic() - back_s > 2 * LEASE_S, within_s=3 * LEASE_S, what="two leases are over")
    row = only_session(engine)
    assert (row.machine, row.phase) in (("a", "training"), ("a", "saving"))
    run = runs.newest(engine, "ink")
    assert len(sessions.attempts(engine, run.id)) == 1 and not list(other.checkpoints())
    on_record = {Path(item.path).name for item in checkpoints.of_run(engine, run.id, "verified")}
    assert on_record & {path.name for path in one.checkpoints()}
    one("stop", "ink")
    assert only_session(engine).phase == "suspended"


def only_session(engine):
    [row] = sessions.of_run(engine, runs.newest(engine, "ink").id)
    return row


def asked(engine, question):
    """The answer of the database; None while it cannot be used."""
    try:
        return question(engine)
    except SQLAlchemyError:
        engine.dispose()
        return None


def training(engine) -> list:
    """Sessions that train, of any machine."""
    return [one for one in asked(engine, fleet.live_sessions) or [] if one.phase == "training" and one.step > 0]


def do_harm(kind: str, machines: TestFleet, engine, chance: random.Random) -> None:
    """One fault, while something trains: a daemon, a whole machine, or the server; it is back a moment later."""
    names = wait_until(lambda: [one.machine for one in training(engine)], within_s=240, what="something trains")
    victim = machines.machines[chance.choice(names)]
    if kind == "server":
        machines.server.stop(chance.choice([signal.SIGINT, signal.SIGQUIT, signal.SIGKILL]))
        machines.server.start()
        return
    if kind == "daemon":
        victim.kill_daemon()
    else:
        victim.die()
    victim.start_daemon()


def all_states(engine) -> dict[str, str]:
    return {run.name: str(run.state) for run in asked(engine, runs.all_runs) or []}


def check_hours(engine) -> None:
    """What was charged is what the sessions took, and no two sessions of a run were charged for the same time."""
    total_s = 0.0
    for run in runs.all_runs(engine):
        until_at = None
        for row in sessions.of_run(engine, run.id):
            charge = charges.newest(engine, row.id)
            assert charge is not None, f"session {row.number} of {run.name} was not charged"
            end_at = charge.started_at + timedelta(seconds=charge.used_s)
            assert until_at is None or charge.started_at >= until_at - timedelta(seconds=3), "charged twice"
            # what follows the end in the database is charged, too: the last copies, the services' end
            assert row.ended_at is not None and end_at <= row.ended_at + timedelta(seconds=30), "charged beyond its end"
            if row.phase == "finished":
                took_s = (row.ended_at - row.started_at).total_seconds()
                assert took_s - 5.0 <= charge.used_s <= took_s + 30.0
            elif row.heartbeat_at:
                assert end_at >= row.heartbeat_at - timedelta(seconds=2 * LOOK_S), "a part was not charged"
            until_at, total_s = end_at, total_s + charge.used_s
    begin = datetime(2020, 1, 1, tzinfo=UTC)
    assert charges.used_s(engine, "shared", begin) == pytest.approx(total_s, abs=0.1)


@pytest.mark.parametrize(
    ("count", "harm"),
    [
        pytest.param(3, ("machine", "server", "daemon"), id="three-runs"),
        pytest.param(10, ("daemon", "machine", "server") * 4, id="ten-runs", marks=pytest.mark.soak),
    ],
)
@pytest.mark.timeout(1800)
def test_three_daemons_finish_all_runs_under_random_kills_with_exact_hours(machines, engine, tmp_path, count, harm):
    chance = random.Random(os.environ.get("KGORCH_FLEET_SEED", "7"))
    several = [machines.machine(name, tmp_path) for name in ("a", "b", "c")]
    plans = [
        machines.plan(f"run{number}", epochs=12, sleep=0.1, every="2s", quota_hours=20.0) for number in range(count)
    ]
    for number, plan in enumerate(plans):
        several[number % 3]("queue", "add", str(plan))
    for machine in several:
        machine.start_daemon()
    for kind in chance.sample(harm, len(harm)):
        if set(all_states(engine).values()) == {"finished"}:
            break
        do_harm(kind, machines, engine, chance)
    expected = {f"run{number}": "finished" for number in range(count)}
    wait_until(
        lambda: all_states(engine) == expected, within_s=180 * count, what=lambda: f"all finish: {all_states(engine)}"
    )
    for run in runs.all_runs(engine):
        assert sessions.last(engine, run.id).step == 72
    check_hours(engine)
