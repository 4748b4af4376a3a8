"""The forecast out of real rows, and queries that look into indexes and through no table."""

from __future__ import annotations

import math
import time
from datetime import UTC, datetime, timedelta

import pytest
from sqlalchemy import event

from kgorch.core.codes import Reason
from kgorch.core.forecast import eta as core
from kgorch.core.forecast.eta import SessionModel, StepTime
from kgorch.core.limits import quota_windows
from kgorch.core.limits.quota import Quota
from kgorch.db import checkpoints, runs, sessions
from kgorch.limits.quota_outlook import PoolHours
from kgorch.report import forecast, run_view
from kgorch.supervisor import run_forecast
from kgorch.supervisor.run_forecast import ForecastRecorder

BEGAN = datetime(2026, 11, 16, 8, tzinfo=UTC)
PLAN = '[forecast]\ntarget = "iou >= 0.72"'


@pytest.fixture
def run(engine):
    texts = dict.fromkeys(("folder", "workdir", "checkpoints", "plan_hash"), "/x")
    return runs.create(engine, id="r1", name="ink", number=1, plan=PLAN, overrides=[], stages=["train"], **texts)


def past_session(engine, run, began, first_step, last_step, lasted_s, **columns):
    """A session of an hour at most whose training began 60 s after it; ended by the wall."""
    at = {"started_at": began, "ended_at": began + timedelta(seconds=lasted_s), "wall_at": began + timedelta(hours=1)}
    row = sessions.open_session(engine, run.id, boot_id="b")
    figures = {
        "stage": "train",
        "first_step": first_step,
        "step": last_step,
        "steps_total": 10_000,
        "epochs_total": 100,
    }
    sessions.update_session(
        engine,
        row.id,
        **{"phase": "suspended", "wall_kind": Reason.TIME_LIMIT, "save_lead_s": 40.0, **at, **figures, **columns},
    )
    sessions.add_event(engine, run.id, "attached", {}, row.id)
    with engine.begin() as connection:
        attached_at = (began + timedelta(seconds=60)).replace(tzinfo=None).isoformat(" ", timespec="microseconds")
        connection.exec_driver_sql("UPDATE events SET at = ? WHERE session_id = ?", (attached_at, row.id))
    tried = sessions.open_attempt(engine, row.id, stage="train", ranks=1, first_step=first_step, folder_of=str)
    sessions.close_attempt(engine, tried.id, outcome="suspended", cause="", last_step=last_step, made_progress=True)
    with engine.begin() as connection:
        ended_at = at["ended_at"].replace(tzinfo=None).isoformat(" ", timespec="microseconds")
        connection.exec_driver_sql("UPDATE attempts SET ended_at = ? WHERE id = ?", (ended_at, tried.id))
    return sessions.last(engine, run.id)


def test_past_sessions_foretell_how_many_more_are_needed_and_until_when(engine, run):
    for number in range(3):  # 1000 steps in 3500 s, an hour each, the next one 30 s later
        began = BEGAN + number * timedelta(seconds=3590)
        row = past_session(engine, run, began, 1000 * number, 1000 * number + 1000, 3560)
    found = run_forecast.forecast_run(engine, run, row, BEGAN + timedelta(hours=3), is_live=False)
    assert found.steps_left == 7000 and found.startup_s == 60 and found.steps_per_epoch == 100
    assert found.pace.usual_s == pytest.approx(3.5) and found.pace.spans == 3
    assert found.end.usual.sessions == 7
    lasts = found.end.usual.end_at - (BEGAN + timedelta(hours=3))
    assert lasts == pytest.approx(timedelta(seconds=6 * 3630 + 60 + 3500), abs=timedelta(seconds=5))
    assert found.end.early.end_at < found.end.usual.end_at < found.end.late.end_at


def test_a_living_session_is_foretold_how_far_it_comes_before_its_wall(engine, run):
    past_session(engine, run, BEGAN, 0, 1000, 3560)
    began = BEGAN + timedelta(hours=1)
    heartbeat_at = began + timedelta(seconds=1060)
    row = past_session(engine, run, began, 1000, 1500, 3560, phase="training", ended_at=None, heartbeat_at=heartbeat_at)
    found = run_forecast.forecast_run(engine, run, row, heartbeat_at, is_live=True)
    left_s = 3600 - 1060 - 40
    assert found.now_steps == int(left_s / found.pace.usual_s) and 700 < found.now_steps < 1000


def test_the_first_session_alone_says_that_its_range_is_a_guess(engine, run):
    row = past_session(engine, run, BEGAN, 0, 1000, 3560)
    found = forecast.of_run(engine, run, row, BEGAN + timedelta(hours=2), is_live=False)
    assert any("give or take a quarter" in said for said in found["assumes"])


def test_what_has_not_trained_or_is_finished_has_no_forecast(engine, run):
    row = sessions.open_session(engine, run.id, boot_id="b")
    assert forecast.of_run(engine, run, row, BEGAN, is_live=True) is None
    row = past_session(engine, run, BEGAN, 0, 1000, 3560)
    runs.set_state(engine, run.id, "finished")
    assert forecast.of_run(engine, runs.by_id(engine, run.id), row, BEGAN, is_live=False) is None


def test_what_follows_a_training_in_its_script_is_not_foretold(engine, run):
    """One more session was promised, session after session, though all steps were done."""
    row = past_session(engine, run, BEGAN, 0, 10_000, 3560)
    assert forecast.of_run(engine, run, row, BEGAN, is_live=False) is None


def test_a_run_without_a_known_length_has_a_pace_and_no_end(engine, run):
    row = past_session(engine, run, BEGAN, 0, 1000, 3560, steps_total=0, epochs_total=0)
    found = forecast.of_run(engine, run, row, BEGAN, is_live=False)
    assert found["pace_s"] == 3.5 and found["steps_left"] is None and found["end_at"] is None


def test_a_target_is_foretold_from_checkpoints_where_no_epochs_are_known(engine, run):
    row = past_session(engine, run, BEGAN, 0, 1000, 3560, metrics={"iou": 0.5 + 0.015 * 10})
    for epoch in range(1, 10):
        checkpoints.record(
            engine, run.id, f"/c/{epoch}", state="verified", stage="train", step=100 * epoch, final=False, bytes=1,
            metrics={"iou": 0.5 + 0.015 * epoch},
        )  # fmt: skip
    target = forecast.of_run(engine, run, row, BEGAN + timedelta(hours=2), is_live=False)["target"]
    assert target["verdict"] == "foreseeable" and target["epochs"] == pytest.approx(5, abs=0.4)
    assert target["step"] == pytest.approx(1467, abs=40) and target["best"] == pytest.approx(0.65)


def test_the_supervisor_notes_epochs_of_ten_seconds_and_more_and_one_forecast(engine, run, monkeypatch):
    row = past_session(engine, run, BEGAN, 0, 1000, 3560, heartbeat_at=BEGAN + timedelta(seconds=3560))
    clock, noted = [100.0], []
    monkeypatch.setattr(run_forecast, "boottime_s", lambda: clock[0])
    recorder = ForecastRecorder(engine, run, lambda kind, facts: noted.append((kind, facts)))
    for second in range(0, 60, 2):  # an epoch of 100 steps every 6 seconds
        clock[0] = 100.0 + second
        metrics = {"iou": 0.5, "loss": math.nan}
        recorder.on_heartbeat(row._replace(step=1000 + 100 * second // 6, epoch=10 + second // 6, metrics=metrics))
    epochs = [facts for kind, facts in noted if kind == "epoch"]
    assert [facts["lasted_s"] for facts in epochs] == [12.0] * 4
    assert [facts["steps"] for facts in epochs] == [200] * 4
    assert [facts["first"] for facts in epochs] == [True, False, False, False]
    assert {tuple(facts["metrics"].values()) for facts in epochs} == {(0.5, None)}, "JSON knows no NaN"
    assert [kind for kind, _ in noted].count("forecast") == 1


def test_of_what_is_done_nothing_is_foretold(engine, run):
    row = past_session(engine, run, BEGAN, 9000, 10_000, 3560)
    noted = []
    ForecastRecorder(engine, run, lambda kind, facts: noted.append(kind)).record(row, is_live=False)
    assert noted == [], "history would hold it against the end"


def test_more_steps_than_were_said_do_not_end_in_the_past(engine, run):
    row = past_session(engine, run, BEGAN, 0, 12_000, 3560)
    found = run_forecast.forecast_run(engine, run, row, BEGAN + timedelta(hours=1), is_live=False)
    assert found.steps_left == 0 and found.end.usual.end_at >= BEGAN + timedelta(hours=1)


def epoch(engine, run, step, lasted_s, *, first, metrics=None):
    told = {"stage": "train", "epoch": step // 100, "step": step, "steps": 100, "metrics": metrics or {}}
    sessions.add_event(engine, run.id, "epoch", told | {"lasted_s": lasted_s, "first": first})


def test_the_beginning_of_a_cold_epoch_makes_no_pace_faster_than_all(engine, run):
    past_session(engine, run, BEGAN, 0, 800, 60 + 200 + 800)  # a second a step; its first epoch took 200 s longer
    for number in range(1, 9):
        epoch(engine, run, 100 * number, 300.0 if number == 1 else 100.0, first=number == 1)
    past_session(engine, run, BEGAN + timedelta(hours=1), 800, 1600, 60 + 200 + 800)
    began = BEGAN + timedelta(hours=2)
    now = began + timedelta(seconds=60 + 30)
    row = past_session(engine, run, began, 1600, 1610, 3560, phase="training", ended_at=None, heartbeat_at=now)
    pace = run_forecast.forecast_run(engine, run, row, now, is_live=True).pace
    assert pace.usual_s == pytest.approx(1.0, rel=0.02) and pace.slow_s < 1.3


def test_a_session_in_which_the_wall_clock_was_put_back_says_nothing_of_the_pace(engine, run):
    past_session(engine, run, BEGAN, 0, 1000, 3560)
    row = past_session(engine, run, BEGAN + timedelta(hours=1), 1000, 2000, -600)
    pace = run_forecast.forecast_run(engine, run, row, BEGAN + timedelta(hours=2), is_live=False).pace
    assert pace.usual_s == pytest.approx(3.5) and pace.spans == 1


def test_a_target_given_on_the_command_line_counts_however_it_is_spaced(run):
    given = run._replace(overrides=["forecast.target = dice >= 0.9"])
    assert str(run_forecast.target_of(given)) == "dice ≥ 0.9"


@pytest.mark.parametrize("resets", ["Sat 00:00 UTC", "rolling 24h", "monthly 1 00:00 Europe/Berlin"])
def test_a_thousand_sessions_under_a_quota_are_foretold_at_once(resets):
    quota = Quota("kaggle", 4 * 3600, quota_windows.parse(resets))
    ahead = SessionModel(length_s=3600.0, startup_s=60.0, hours=PoolHours(quota, [], 1.0))
    began_s = time.process_time()
    assert core.estimate_end(10**9, StepTime(0.9, 1.0, 1.1, 3), BEGAN, None, ahead).usual is None, (
        "more sessions than are looked at"
    )
    assert time.process_time() - began_s < 3.0, "it took more than ten"


BIG = ("runs", "sessions", "attempts", "checkpoints", "resumes", "samples", "events", "charges")


def plans_of(engine, call):
    """What SQLite says of each query of a call, with the query."""
    asked = []

    def hear(connection, cursor, statement, parameters, context, many):
        asked.append((statement, parameters))

    event.listen(engine, "before_cursor_execute", hear)
    call()
    event.remove(engine, "before_cursor_execute", hear)
    with engine.connect() as connection:
        return [
            (step[3], statement)
            for statement, parameters in asked
            if statement.startswith("SELECT")
            for step in connection.exec_driver_sql(f"EXPLAIN QUERY PLAN {statement}", parameters)
        ]


CALLS = {
    "status": lambda engine, run: run_view.of_run(engine, run),
    "history": lambda engine, run: run_view.history(engine, run, limit=50),
    "resume": lambda engine, run: runs.newest_in_states(engine, ("active", "failed")),
    "opening": lambda engine, run: (
        sessions.duration_and_failures(engine, run.id),
        sessions.attempts_without_progress(engine, run.id),
    ),
    "finding": lambda engine, run: (runs.newest(engine, "ink"), runs.by_number(engine, "ink", 1)),
}


@pytest.mark.parametrize("what", CALLS)
def test_no_verb_looks_through_a_whole_table(engine, run, what):
    past_session(engine, run, BEGAN, 0, 1000, 3560)
    plans = plans_of(engine, lambda: CALLS[what](engine, run))
    assert plans
    through = [(step, asked) for step, asked in plans if step.startswith("SCAN") and step.split()[1] in BIG]
    assert not through


def test_looking_through_a_table_would_be_seen(engine, run):
    plans = plans_of(engine, lambda: runs.count(engine))
    assert any(step.startswith("SCAN runs") for step, _ in plans)
