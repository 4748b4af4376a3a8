"""The quota under real trainings: sessions end with it, wait for it, and are charged whatever kills them."""

from __future__ import annotations

import json
import sqlite3
import time
from contextlib import closing
from datetime import UTC, datetime, timedelta

import pytest
from driver import build
from harness import wait_until, weekly_reset

from kgorch.db import charges, runs, sessions
from kgorch.db.engine import open_database
from kgorch.launch import launcher


def test_a_session_ends_with_the_quota_and_the_next_waits_for_its_reset(kgorch):
    reset = weekly_reset(3)
    extra = f'[quota]\nhours = 1\nresets = "{reset}"\npool = "mine"'
    plan = kgorch.plan(args={"epochs": 10_000, "sleep": 0.05}, extra=extra)
    session = kgorch.background("start", str(plan))
    kgorch.wait_for_step(5)
    kgorch("quota", "set", "--used", "3575s")  # 25 s are left: the wall comes nearer while it trains
    assert session.wait(timeout=90) == 11
    ended = kgorch.status()
    assert ended["phase"] == "suspended" and ended["why"] == "the quota"
    assert ended["checkpoint"]["verified"] and ended["checkpoint"]["step"] == ended["step"] > 0
    quota = ended["quota"]
    assert quota["pool"] == "mine" and 3575 < quota["used_s"] <= 3600
    due_at = datetime.fromisoformat(ended["next"]["at"])
    assert due_at == datetime.fromisoformat(quota["resets_at"])
    assert (due_at.hour, due_at.minute) == (0, 0) and due_at > datetime.now(UTC) + timedelta(days=1)

    kgorch("quota", "set", "--used", "1h")
    refused = kgorch("resume", code=11)
    assert "the quota is exhausted" in refused.stdout and due_at.strftime("%Y-%m-%d 00:00:00 UTC") in refused.stdout
    assert len(kgorch.history()) == 1 and kgorch.status()["next"]["at"] == ended["next"]["at"]
    told = json.loads(kgorch("start", str(plan), "--detach", "--json", code=11).stdout)
    assert told["session"]["number"] == 1

    [pool] = json.loads(kgorch("quota", "--json").stdout)
    assert pool["resets"] == reset and pool["sessions"] == [] and pool["needs"]["known"] == 1
    corrected = json.loads(kgorch("quota", "set", "--used", "0s", "--json").stdout)
    assert corrected["used_s"] == 0 and corrected["resumed"] == 1
    assert datetime.fromisoformat(kgorch.status()["next"]["at"]) <= datetime.now(UTC)
    kgorch.background("resume")
    wait_until(lambda: len(kgorch.history()) == 2)
    assert kgorch.status()["step"] >= ended["step"], "it goes on where it was"


def test_a_run_that_finds_no_hours_begins_none_and_waits(kgorch):
    spend = kgorch.plan(extra='[quota]\nhours = 0.05\npool = "mine"', name="other")
    kgorch("start", str(spend), "--set", "stage.train.args.epochs=1")
    kgorch("quota", "set", "--used", "180s")
    waits = kgorch(
        "start", str(kgorch.plan(extra=f'[quota]\nhours = 0.05\nresets = "{weekly_reset(2)}"\npool = "mine"')), code=11
    )
    assert "the quota is exhausted; the run continues at" in waits.stdout and "00:00:00 UTC" in waits.stdout
    status = kgorch.status("test")
    assert status["phase"] == "queued" and status["session"] is None and status["quota"]["left_s"] == 0
    assert status["next"]["at"] == status["quota"]["resets_at"]
    never = kgorch("start", str(kgorch.plan(extra='[quota]\nhours = 0.0005\npool = "mine"')), code=2)
    assert "over before a save would be" in never.stderr


def test_a_session_is_never_without_a_charge_though_the_database_fails_just_after_it_was_opened(kgorch):
    """Where the charge came after the session's row, a supervisor that died in between left hours that nobody counted."""
    plan = kgorch.plan(args={"epochs": 1}, extra='[quota]\nhours = 1\npool = "mine"')
    engine = open_database(kgorch.home)
    with closing(sqlite3.connect(kgorch.home / "kgorch.db", isolation_level=None)) as other:
        other.execute("CREATE TRIGGER fails BEFORE INSERT ON charges BEGIN INSERT INTO missing VALUES (1); END")
        failed = kgorch("start", str(plan), code=None)
        assert failed.returncode and "missing" in failed.stdout + failed.stderr
        other.execute("DROP TRIGGER fails")
    kgorch("start", str(plan))
    stays = sessions.of_run(engine, runs.newest(engine, "test").id)
    assert stays[-1].phase == "finished"
    assert not [row.number for row in stays if charges.newest(engine, row.id) is None], "sessions without a charge"
    engine.dispose()


@pytest.mark.slow
def test_a_session_whose_end_waits_for_the_database_is_charged_up_to_its_end(kgorch):
    plan = kgorch.plan(args={"epochs": 500, "sleep": 0.02}, extra="[quota]\nhours = 1")
    supervisor = kgorch.background("start", str(plan))
    kgorch.wait_for_step(5)
    attempt = kgorch.attempt()
    with closing(sqlite3.connect(kgorch.home / "kgorch.db", timeout=30, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        time.sleep(6)  # it trains, and no charge of it is taken
        kgorch.background("stop")
        wait_until(lambda: not launcher.is_running(attempt), within_s=60, what="the training is over")
        ended_at = datetime.now(UTC)
        time.sleep(10)  # longer than one try of a charge waits for the lock
        assert supervisor.poll() is None, "its end waits, too"
        other.execute("ROLLBACK")
    assert supervisor.wait(timeout=60) == 10
    engine = open_database(kgorch.home)
    last = charges.newest(engine, sessions.last(engine, runs.newest(engine, "test").id).id)
    assert last.used_s >= (ended_at - last.started_at).total_seconds() - 1.0
    engine.dispose()


@pytest.mark.slow
def test_no_charge_is_lost_to_a_killed_supervisor_or_a_kill_of_everything(kgorch):
    plan = kgorch.plan(args={"epochs": 10_000, "sleep": 0.05}, extra="[quota]\nhours = 1\nfactor = 2.0")
    supervisor = kgorch.background("start", str(plan))
    kgorch.wait_for_step(5)
    engine = open_database(kgorch.home)
    first = sessions.last(engine, runs.newest(engine, "test").id)
    supervisor.kill()
    supervisor.wait()
    alone = charges.newest(engine, first.id)
    wait_until(lambda: (datetime.now(UTC) - alone.started_at).total_seconds() > alone.used_s + 4)
    assert charges.newest(engine, first.id).used_s == alone.used_s, "nobody writes it down"
    [pool] = json.loads(kgorch("quota", "--json").stdout)
    assert pool["sessions"] == [{"run": "test", "number": 1, "factor": 2.0}]
    assert pool["used_s"] > 2 * (alone.used_s + 3.9), "what runs counts all the same"

    adopted = datetime.now(UTC)
    kgorch.background("start", str(plan))
    wait_until(lambda: charges.newest(engine, first.id).used_s > (adopted - alone.started_at).total_seconds())
    wait_until(lambda: (row := sessions.last(engine, first.run_id)).heartbeat_at and row.heartbeat_at > adopted)

    kgorch.kill_everything()
    last_beat = sessions.last(engine, first.run_id).heartbeat_at
    kgorch.background("resume")
    wait_until(lambda: sessions.last(engine, first.run_id).number == 2)
    settled = charges.newest(engine, first.id)
    assert settled.started_at == alone.started_at and settled.factor == 2.0
    assert settled.used_s >= (last_beat - settled.started_at).total_seconds() - 0.001
    engine.dispose()


def test_a_session_that_is_taken_over_costs_what_it_cost_before(kgorch, tmp_path):
    """One GPU of two: its successor saw both before it looked what the session had, and its hours doubled."""
    kgorch.extra_env |= build(tmp_path).env
    extra = '[platform]\nname = "kaggle"\nbegan = "start"\n[quota]\nhours = 10\nresets = "never"'
    plan = kgorch.plan(args={"epochs": 10_000, "sleep": 0.05}, extra=extra)
    supervisor = kgorch.background("start", str(plan))
    kgorch.wait_for_step(5)
    engine = open_database(kgorch.home)
    session = sessions.last(engine, runs.newest(engine, "test").id)
    before = wait_until(lambda: (row := charges.newest(engine, session.id)) and row.used_s > 0 and row)
    assert before.factor == 1.0
    supervisor.kill()
    supervisor.wait()
    adopted = kgorch.background("start", str(plan))
    wait_until(lambda: charges.newest(engine, session.id).used_s > before.used_s + 1)
    assert charges.newest(engine, session.id).factor == 1.0 and adopted.poll() is None
    engine.dispose()
