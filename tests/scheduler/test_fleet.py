"""Daemons of several machines, one PostgreSQL, real trainings: runs move from a dead machine, and an outage loses nothing."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from fleet_machines import TestFleet
from harness import Kgorch, wait_until

from kgorch.db import checkpoints, runs, sessions
from kgorch.db.engine import open_fleet
from kgorch.db.location import Fleet

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


def session_of(engine, name: str):
    run = runs.newest(engine, name)
    return sessions.last(engine, run.id) if run else None


def wait_for_checkpoint_in_mirror(machines: TestFleet, name: str) -> Path:
    return wait_until(
        lambda: next(iter(sorted(machines.folder.glob(f"mirror/{name}-*/train/step-*/manifest.json"))), None),
        within_s=120,
        what=f"a checkpoint of {name} in the mirror",
    )


def test_a_dead_machines_run_is_finished_by_another_one_with_the_same_bits(machines, engine, tmp_path):
    first, second = (machines.machine(name, tmp_path) for name in ("a", "b"))
    plan = machines.plan("ink", epochs=12, sleep=0.1, every="2s")
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


def test_an_outage_of_the_database_loses_no_step_no_checkpoint_and_no_session(machines, engine, tmp_path):
    only = machines.machine("a", tmp_path)
    plan = machines.plan("ink", epochs=14, sleep=0.15, every="2s")
    supervisor = only.background("start", str(plan))
    only.wait_for_step(3, within_s=120)
    machines.server.stop(signal.SIGQUIT)
    try:
        known = len(only.checkpoints())
        said = only("status", code=2).stderr
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
