"""What a person types and reads: help, errors, exit codes, --json as promised. No training runs here."""

from __future__ import annotations

import contextlib
import json
import os
import sqlite3
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
from click.testing import CliRunner
from harness import wait_until, weekly_reset
from sqlalchemy import text
from sqlalchemy.exc import OperationalError

from kgorch.admission import fleet_member
from kgorch.cli import cli
from kgorch.cli.commands import VERBS
from kgorch.cli.display import plot, render, status_rows
from kgorch.core.codes import Phase, Reason
from kgorch.core.metrics import metric_curve
from kgorch.core.metrics.metric_curve import Record, Value
from kgorch.core.session.lifecycle_state import LifecycleState
from kgorch.db import charges, checkpoints, curves, queue, rungs, runs, samples, sessions
from kgorch.db.engine import open_database, open_fleet
from kgorch.db.location import Fleet
from kgorch.db.rows import PoolInfo
from kgorch.errors import NotFound
from kgorch.plan import check_entries, load
from kgorch.system import process_identity
from kgorch.system.paths import check_result_path

PROMISES = Path(__file__).parents[1] / "promises"


@pytest.fixture
def engine(kgorch):
    return open_database(kgorch.home)


@pytest.fixture
def run(kgorch, engine):
    """A run in its second session, supervised by this very process, one checkpoint verified."""
    folder = kgorch.home / "runs" / "ink" / "1"
    (folder / "attempts").mkdir(parents=True)
    made = runs.create(
        engine,
        id="r1",
        name="ink",
        number=1,
        folder=str(folder),
        workdir=str(kgorch.folder),
        checkpoints=str(folder / "checkpoints"),
        plan='name = "ink"\n[[stage]]\nname = "train"\nentry = "t.py"\n[forecast]\ntarget = "dice >= 0.72"',
        overrides=[],
        plan_hash="h",
        stages=["train", "predict"],
    )
    first = sessions.open_session(engine, made.id, boot_id="b")
    begun = sessions.open_attempt(
        engine,
        first.id,
        stage="train",
        ranks=2,
        first_step=0,
        folder_of=lambda number: str(folder / "attempts" / f"1.{number}"),
    )
    sessions.close_attempt(engine, begun.id, outcome="suspended", cause="", last_step=10, made_progress=True)
    sessions.record(
        engine, made.id, first.id, kind="attempt_suspended", phase="suspended", facts={"step": 10}, why="the wall"
    )
    us = os.getpid()
    second = sessions.open_session(
        engine,
        made.id,
        boot_id=process_identity.boot_id(),
        supervisor_pid=us,
        supervisor_started_ticks=process_identity.start_ticks(us),
        wall_at=datetime.now(UTC) + timedelta(seconds=100),
        save_lead_s=4.0,
    )
    attempt = sessions.open_attempt(
        engine,
        second.id,
        stage="train",
        ranks=2,
        first_step=10,
        folder_of=lambda number: str(folder / "attempts" / f"2.{number}"),
    )
    rungs.add(
        engine, made.id, second.id, plan_hash="h", stage="train", device="cpu", world_size=2, step=11, rung="microbatch/2",
        why="rank 1: OutOfMemoryError", settings={"settings": {"microbatch": 4, "activation_checkpointing": False}},
    )  # fmt: skip
    for epoch in range(1, 9):
        lasted = {"stage": "train", "epoch": epoch, "step": epoch, "steps": 1, "lasted_s": 0.5, "first": False}
        sessions.add_event(engine, made.id, "epoch", lasted | {"metrics": {"dice": 0.5 + 0.01 * epoch}}, first.id)
    told = {"data": "keyed", "deterministic": "did not hold: put_"}
    for facts in ({"data": "replayed"}, told):
        sessions.add_event(engine, made.id, "exactness", facts, second.id)
    sessions.record(engine, made.id, second.id, kind="attached", phase="training", facts={}, stage="train")
    sessions.record_heartbeat(
        engine,
        second.id,
        attempt.id,
        epoch=1,
        epochs_total=4,
        step=15,
        steps_total=40,
        samples=240,
        step_s=0.5,
        metrics={"dice": 0.5, "loss": float("nan")},
    )
    measured = {"gpu0.mem_used": 2.0**30, "gpu0.util": 87.0, "host.cpu": 12.5, "rank0.data_wait": 0.25}
    samples.write(engine, second.id, [(datetime.now(UTC), measured)])
    checkpoints.record(
        engine,
        made.id,
        str(folder / "checkpoints" / "train" / "step-00000012"),
        state="verified",
        session_id=second.id,
        stage="train",
        step=12,
        final=False,
        bytes=2048,
        save_duration_s=0.5,
        blocking_s=0.01,
        metrics={"dice": 0.4},
    )
    return made


def _shape(value):
    """JSON as its types, for comparing with what is promised."""
    if isinstance(value, dict):
        return {key: _shape(item) for key, item in sorted(value.items())}
    if isinstance(value, list):
        return [_shape(value[-1])] if value else []
    return "null" if value is None else type(value).__name__


def test_status_tells_how_far_headers_are_read_until_the_training_attaches(kgorch, engine, run):
    row = sessions.last(engine, run.id)
    told = {"what": "headers", "done": "4000", "total": "10000", "left_s": "90"}
    sessions.add_event(engine, run.id, "reading", told, row.id)
    assert "headers: 4000 of 10000, 90 s left" in kgorch.status()["notices"]
    sessions.record(engine, run.id, row.id, kind="attached", phase="training", facts={}, stage="train")
    assert not [line for line in kgorch.status()["notices"] if "headers" in line]


def test_status_says_that_a_foreign_checkpoint_was_moved_until_a_later_one_is_good(kgorch, engine, run):
    """The program looked for it by a file of its own, and failed; only the journal knew why it was gone."""
    row = sessions.of_run(engine, run.id)[0]  # later sessions look for it as well
    facts = {"checkpoint": "ck/step_20", "why": "it was written last; it is now ck/.kgorch-aside/step_20.0"}
    said = "ck/step_20 was not taken: it was written last; it is now ck/.kgorch-aside/step_20.0"
    sessions.add_event(engine, run.id, "foreign_skipped", facts, row.id)
    assert said in kgorch.status()["notices"]
    sessions.add_event(engine, run.id, "checkpoint_verified", {}, row.id)
    assert said not in kgorch.status()["notices"]


@pytest.mark.parametrize(
    ("phase", "shown"), [("finished", "finished"), ("cut_off", "cut off: the session's time limit")]
)
def test_a_run_that_finished_at_its_wall_has_no_reason_beside_it(phase, shown):
    view = {"session": None, "phase": phase, "why": "the session's time limit"}
    assert status_rows._phase(view) == shown


def test_status_says_that_a_script_is_not_saved_until_it_attaches_and_of_no_stage_that_is_done(kgorch, engine, run):
    """`start` said it once, and `status` showed "none yet"."""
    row = sessions.last(engine, run.id)
    facts = {"stage": "train", "what": "it has not called kgorch.attach()"}

    def notices():
        return [line for line in kgorch.status()["notices"] if "train is not saved: it has not called" in line]

    sessions.add_event(engine, run.id, "not_attached", facts, row.id)
    assert notices() and "kgorch adopt" in notices()[0]
    sessions.record(engine, run.id, row.id, kind="attached", phase="training", facts={}, stage="train")
    assert not notices()
    sessions.add_event(engine, run.id, "tracks_nothing", facts, row.id)
    assert notices()
    sessions.add_event(engine, run.id, "stage_finished", {"stage": "train"}, row.id)
    assert not notices()


@pytest.mark.parametrize(
    ("verb", "promise"),
    [
        (["status"], "status"),
        (["history"], "history"),
        (["history", "--events"], "events"),
        (["checkpoints", "list", "--dropped"], "checkpoints"),
        (["metrics"], "metrics"),
    ],
)
def test_the_fields_of_json_are_those_that_were_promised(kgorch, run, verb, promise):
    found = _shape(json.loads(kgorch(*verb, "--json").stdout))
    promised = json.loads((PROMISES / f"{promise}.json").read_text())
    assert found == promised, (
        "a field that is promised may not change; a new one is written into tests/promises and docs/json.md"
    )


@pytest.fixture
def quota(engine, run):
    """The run spends the hours of a pool; another pool is known from a charge alone."""
    told = PoolInfo("kaggle", 30 * 3600.0, weekly_reset(), 7200.0, datetime.now(UTC))
    charges.set_pool(engine, run.id, told)
    session = sessions.last(engine, run.id)
    sessions.update_session(engine, session.id, pool="kaggle")
    began = datetime.now(UTC) - timedelta(seconds=60)
    charges.charge(engine, session.id, "kaggle", [(began, 60.0)], factor=2.0, accelerator="T4")
    charges.correct(engine, "old", began, 1800.0, "a person says so")


def test_the_fields_of_the_quota_are_those_that_were_promised(kgorch, quota):
    found = json.loads(kgorch("quota", "kaggle", "--json").stdout)
    assert _shape(found) == json.loads((PROMISES / "quota.json").read_text())
    [pool] = found
    assert pool["left_s"] == pytest.approx(28 * 3600 - pool["used_s"]) and 0 < pool["used_s"] < 600
    assert pool["needs"] == {"runs": 1, "known": 1, "still_s": 12.5}
    short = json.loads(kgorch("status", "--json").stdout)["quota"]
    assert (short["pool"], short["hours"], short["resets_at"]) == ("kaggle", 30.0, pool["resets_at"])


def test_the_fields_of_the_queue_are_those_that_were_promised(kgorch, engine, run):
    queue.put(
        engine, run.id, reason=Reason.TIME_LIMIT, due_at=datetime.now(UTC), resource_request={"ranks": 2, "priority": 5}
    )
    found = json.loads(kgorch("queue", "--json").stdout)
    assert _shape(found) == json.loads((PROMISES / "queue.json").read_text())
    assert found[0]["run"] == "ink" and found[0]["ranks"] == 2 and found[0]["priority"] == 5


def test_the_fields_of_the_daemon_are_those_that_were_promised(kgorch, engine, run):
    assert json.loads(kgorch("daemon", "status", "--json").stdout) is None
    queue.put(engine, run.id, reason=Reason.TIME_LIMIT, due_at=datetime.now(UTC) + timedelta(hours=1))
    kgorch.background("daemon")
    found = wait_until(lambda: json.loads(kgorch("daemon", "status", "--json").stdout))
    assert _shape(found) == json.loads((PROMISES / "daemon.json").read_text())
    assert (found["due"], found["waiting"], found["running"]) == (0, 1, ["ink"])


def test_the_quota_tells_in_words_what_is_left_and_who_spends_it(kgorch, quota):
    text = kgorch("quota").stdout
    assert "left of 30h 00m (kaggle), renewed at" in text and "2h 00m reserved" in text
    assert "in use by ink, session 2, factor 2" in text and "1 run(s) still need 12s" in text
    assert "30m 00s used (old), no limit known" in text
    assert "left of 30h 00m (kaggle)" in kgorch("status").stdout
    assert "(old)" not in kgorch("quota", "kaggle").stdout


def test_what_was_used_can_be_corrected_also_to_less(kgorch, quota):
    text = kgorch("quota", "set", "--used", "12h 30m", "--pool", "kaggle").stdout
    assert "kaggle: 12h 30m used; the charges had added up to 2m" in text
    assert "15h 30m left" in text or "15h 29m left" in text, "a session runs meanwhile"
    less = json.loads(kgorch("quota", "set", "--used", "1h", "--pool", "kaggle", "--json").stdout)
    assert less["used_s"] == pytest.approx(3600, abs=60) and less["computed_s"] == pytest.approx(45000, abs=60)
    kgorch("quota", "set", "--used", "40h", "--pool", "kaggle")
    assert json.loads(kgorch("quota", "kaggle", "--json").stdout)[0]["left_s"] == 0.0


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["set", "--used", "1h"], "there are several pools, and none was named"),
        (["set", "--used", "1h", "--pool", "kagle"], "did you mean 'kaggle'"),
        (["kagle"], "did you mean 'kaggle'"),
        (["set", "--used", "12.5", "--pool", "kaggle"], "expected a duration"),
        (["set", "--used", "-5h", "--pool", "kaggle"], "expected a duration"),
        (["set"], "--used"),
    ],
)
def test_a_mistake_with_the_quota_is_answered_with_what_was_meant(kgorch, quota, words, said):
    assert said in kgorch("quota", *words, code=2).stderr


def test_without_any_charge_the_quota_says_so(kgorch):
    assert "no hours are counted" in kgorch("quota").stdout
    assert json.loads(kgorch("quota", "--json").stdout) == []


@pytest.fixture
def waiting(engine, run):
    """The run's newest session waited for its data for an hour, and its last save failed twice."""
    session = sessions.last(engine, run.id)
    row = {
        "gpu0.util": 40.0, "gpu0.mem_used": 12e9, "gpu0.mem_total": 15e9, "host.cpu": 30.0, "host.cores": 4.0,
        "rank0.step_s": 0.5, "rank0.data_wait": 0.55, "rank0.cpu": 50.0,
    }  # fmt: skip
    began = session.started_at
    samples.write(engine, session.id, [(began + timedelta(seconds=second), row) for second in range(0, 3600, 5)])
    sessions.add_event(engine, run.id, "memory_facts", {"batch": "16", "num_workers": "0"}, session.id)
    for why in ("disk full", "disk full still"):
        sessions.add_event(engine, run.id, "save_failed", {"why": why}, session.id)
    rungs.add(
        engine, run.id, session.id, plan_hash="h", stage="train", device="T4", world_size=2, step=7, rung="microbatch/2",
        why="out of memory", settings={},
    )  # fmt: skip
    return run


def test_the_doctors_fields_are_those_that_were_promised(kgorch, waiting):
    found = json.loads(kgorch("doctor", "--json").stdout)
    found["machine"] |= {"gpus": [], "driver": None, "may_trace": True}  # this machine's
    promised = json.loads((PROMISES / "doctor.json").read_text())
    assert _shape(found) == promised, "a new field is written into tests/promises and docs/json.md"


def test_the_doctor_tells_what_slows_the_run_down_what_happened_and_what_to_change(kgorch, waiting):
    text = kgorch("doctor", "ink").stdout
    assert "bad: GPU 40%" in text and "mean 55%" in text and "cores 4" in text
    assert "num_workers = 2: loading beside the training (saves 55% of the time at most)" in text
    assert "save failed 2 times" in text and "disk full still" in text
    assert "step 7: microbatch/2 (out of memory)" in text


def test_without_a_run_the_doctor_tells_of_the_machine(kgorch):
    found = json.loads(kgorch("doctor", "--json").stdout)
    assert found["run"] is None and found["machine"]["cores"] >= 1 and found["machine"]["torch"]
    assert "cores; memory" in kgorch("doctor").stdout


def test_every_promised_field_is_documented():
    text = (Path(__file__).parents[2] / "docs" / "json.md").read_text()

    def keys(value):
        if isinstance(value, dict):
            for key, item in value.items():
                yield key
                yield from keys(item)
        elif isinstance(value, list):
            for item in value:
                yield from keys(item)

    for promise in PROMISES.glob("*.json"):
        for key in keys(json.loads(promise.read_text())):
            assert f"`{key}`" in text or key in ("dice", "loss"), key


def test_status_tells_where_the_run_stands(kgorch, run):
    text = kgorch("status").stdout
    assert "train (at step 15) → predict" in text
    assert "15 of 40, epoch 1 of 4" in text
    assert f"alive, pid {os.getpid()}" in text
    assert "step 12 of train, verified" in text and "2.0 KiB" in text
    assert "dice 0.5  loss nan" in text


def test_status_foretells_the_end_and_the_target(kgorch, run):
    said = {line.split()[0]: line for line in kgorch("status").stdout.splitlines()}
    assert "of train" in said["end"] and "between" in said["end"] and "this one does 25 steps" in said["end"]
    assert "dice ≥ 0.72 in about 1 epochs" in said["target"] and "(best 0.58)" in said["target"]


def test_an_end_in_another_year_says_which():
    at = {"end_at": "2031-11-22T12:00:00Z", "earliest_at": "2030-03-01T12:00:00Z", "latest_at": None}
    said = render.span(at)
    assert "22 Nov 2031" in said and "01 Mar 2030" in said and "an unknown time" in said


def test_a_finished_run_has_no_forecast_and_its_history_tells_how_the_earlier_ones_held(kgorch, run, engine):
    for late in ("2000-01-01T00:00:00Z", "2100-01-01T00:00:00Z"):
        facts = {"stage": "train", "earliest_at": "1999-01-01T00:00:00Z", "end_at": late, "latest_at": late}
        sessions.add_event(engine, run.id, "forecast", facts)
    runs.set_state(engine, run.id, "finished")
    assert json.loads(kgorch("status", "--json").stdout)["forecast"] is None
    assert "1 of 2 forecasts contained the end" in kgorch("history").stderr


def test_history_tells_what_a_check_foretold_beside_epochs_that_were_not_a_sessions_first(kgorch, run, engine):
    facts = {"stage": "predict", "step": 20, "metrics": {}, "steps": 10}
    first, *others = ({**facts, "lasted_s": lasted_s} for lasted_s in (9.0, 2.0, 4.0))
    for facts in ({**first, "first": True}, *others):
        sessions.add_event(engine, run.id, "epoch", facts)
    told = {"name": "predict", "time": {"epoch_s": 1.5, "batches": 5}, "memory": None}
    kept = check_result_path(kgorch.home, run.plan_hash, run.name, run.workdir)
    kept.parent.mkdir(parents=True, exist_ok=True)
    kept.write_text(json.dumps({"stages": [told]}))
    assert "check: predict: an epoch predicted 1.5s, measured 1.5s (+0%)" in kgorch("history").stderr


def test_history_shows_the_newest_sessions_as_many_as_are_asked_for(kgorch, run, engine):
    for _ in range(60):
        sessions.open_session(engine, run.id, boot_id="b")
    assert [item["number"] for item in json.loads(kgorch("history", "--json").stdout)] == list(range(13, 63))
    assert [item["number"] for item in json.loads(kgorch("history", "--json", "-n", "2").stdout)] == [61, 62]
    assert "-n 62 shows all" in kgorch("history").stderr


def test_history_plots_a_metric_over_steps_or_with_the_steps_over_hours(kgorch, run):
    pytest.importorskip("plotext")
    drawn = kgorch("history", "--plot", "dice").stdout
    assert "dice" in drawn and "step" in drawn and "hours" not in drawn and "█" not in drawn
    drawn = kgorch("history", "--plot", "dice", "--x", "hours").stdout
    assert "dice" in drawn and "steps" in drawn and "hours since" in drawn and len(drawn.splitlines()) > 20
    assert "no metric 'dise' (did you mean 'dice'?)" in kgorch("history", "--plot", "dise", code=2).stderr


@pytest.mark.parametrize(
    ("values", "power"),
    [
        ([1e308], "1e308"),
        ([-1e308, 1e308], "1e308"),
        ([1e-320, 2e-320], "1e-300"),
        ([0.0, 5e-324], "1e-300"),
        ([0.5, 0], ""),
    ],
)
def test_values_as_large_or_small_as_floats_can_be_are_drawn(capsys, values, power):
    pytest.importorskip("plotext")
    plot._plot("loss", [*enumerate(values)], "step")
    drawn = capsys.readouterr().out
    assert (f"loss, in {power}" if power else "loss ") in drawn and "..." not in drawn


def recorded(run, attempt: str, *records: Record) -> None:
    """What rank 0 of an attempt has written."""
    folder = Path(run.folder, "attempts", attempt)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / metric_curve.FILE_NAME).write_text("".join(f"{metric_curve.encode(item)}\n" for item in records))


def losses(first: int, step: int, loss: float) -> Record:
    return Record(step, first, 1, 1.8e9, {"loss": Value(loss, step - first), "lr": Value(0.1, step - first)})


def test_metrics_tells_the_last_and_the_best_of_each_over_all_sessions(kgorch, run):
    evaluated = Record(12, 12, 1, 1.8e9, {"dice": Value(0.1 + 0.2, 1)})
    recorded(run, "1.1", losses(0, 10, 0.5), losses(10, 14, 0.1))
    recorded(run, "2.1", losses(10, 12, 0.25), evaluated, losses(12, 15, 0.75))
    told = kgorch("metrics")
    assert told.stdout.splitlines() == [
        "stage\tmetric\tlast\tat step\tbest\tat step\tbest is\tvalues",
        "train\tloss\t0.75\t15\t0.25\t12\tmin\t3",
        "train\tlr\t0.1\t15\t\t\t\t3",
        "train\tdice\t0.3\t12\t0.3\t12\tmax\t1",
    ]
    assert not told.stderr
    shown = kgorch.on_terminal("metrics", columns=100)
    assert "values of steps are means over some seconds" in shown.end().text and shown.code == 0
    assert "means" not in kgorch.on_terminal("metrics", "--name", "dice").end().text, "an evaluation's are exact"
    rows = kgorch("metrics", "ink", "--csv", "--name", "loss", "--name", "dice").stdout.splitlines()
    assert rows[0] == "stage,step,epoch,at,steps,loss,dice"
    assert rows[2] == "train,12,1,2027-01-15T08:00:00.000Z,2,0.25,0.30000000000000004"
    assert [row.split(",")[1] for row in rows[1:]] == ["10", "12", "15"]


def test_metrics_of_a_version_that_wrote_no_curve_are_those_of_its_journal(kgorch, run):
    found = json.loads(kgorch("metrics", "--json").stdout)
    assert [(item["step"], item["values"]["dice"]) for item in found["points"]] == [
        (epoch, 0.5 + 0.01 * epoch) for epoch in range(1, 9)
    ]


def test_metrics_are_in_the_database_where_the_attempts_folder_is_gone(kgorch, run, engine):
    attempt = sessions.attempts(engine, run.id)[-1]
    curves.write(engine, attempt.id, [metric_curve.encode(losses(10, 12, 0.25))])
    assert "train\tloss\t0.25\t12" in kgorch("metrics").stdout


def test_metrics_draws_over_steps_epochs_or_hours(kgorch, run):
    pytest.importorskip("plotext")
    recorded(run, "2.1", losses(10, 12, 0.25), losses(12, 15, 0.75))
    for axis, label in (("step", "step"), ("epoch", "epoch"), ("hours", "hours since the run started")):
        drawn = kgorch("metrics", "--plot", "--name", "loss", "--x", axis).stdout
        assert "loss" in drawn and label in drawn and "dice" not in drawn and "\x1b" not in drawn


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--name", "dise"], "no metric 'dise' (did you mean 'dice'?)"),
        (["--stage", "tran"], "no metrics of a stage 'tran' (did you mean 'train'?)"),
        (["--json", "--csv"], "--json, --csv, --parquet and --plot exclude each other"),
        (["--x", "weeks"], "'weeks' is not one of"),
    ],
)
def test_what_metrics_cannot_show_is_said(kgorch, run, args, said):
    assert said in kgorch("metrics", *args, code=2).stderr


def test_metrics_of_a_run_that_has_reported_nothing_are_an_empty_table(kgorch, run, engine):
    with engine.begin() as connection:
        connection.execute(text("DELETE FROM events WHERE kind = 'epoch'"))
    shown = kgorch("metrics")
    assert shown.stdout.splitlines() == ["stage\tmetric\tlast\tat step\tbest\tat step\tbest is\tvalues"]
    [line] = shown.stderr.splitlines()
    assert "no metrics were reported" in line and "session.report(" in line and "stage.foreign.metrics" in line
    assert kgorch("metrics", "--json").stderr == kgorch("metrics", "--csv").stderr == ""
    assert kgorch("metrics", "--csv").stdout == "stage,step,epoch,at,steps\n"
    assert json.loads(kgorch("metrics", "--json").stdout)["points"] == []


def test_status_of_a_dead_supervisor_says_so_and_what_to_type(kgorch, run, engine):
    last = sessions.last(engine, run.id)
    sessions.update_session(engine, last.id, supervisor_started_ticks=1)
    text = kgorch("status", "ink").stdout
    assert "dead" in text and "kgorch resume ink" in text


def test_a_nan_metric_is_null_in_json_which_has_no_nan(kgorch, run):
    assert '"loss": null' in kgorch("status", "--json").stdout


def test_tables_are_tab_separated_when_piped(kgorch, run):
    head, *rows = kgorch("history").stdout.splitlines()
    assert head.split("\t")[0] == "session" and [row.split("\t")[0] for row in rows] == ["1", "2"]


def test_all_runs_are_listed(kgorch, run):
    assert "ink\t1\tactive\ttraining" in kgorch("status", "--all").stdout
    assert [item["run"] for item in json.loads(kgorch("status", "--all", "--json").stdout)] == ["ink"]


@pytest.mark.parametrize("verb", VERBS)
def test_every_verbs_help_ends_with_an_example(kgorch, verb):
    text = kgorch(verb, "--help").stdout
    assert f"kgorch {verb}" in text.split("Example:")[1]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["stats"], "no verb 'stats' (did you mean 'status'?)"),
        (["status"], "there is no run yet"),
        (["resume", "nothing"], "there is no run named 'nothing'"),
        (["start", "nowhere.toml"], "there is no plan nowhere.toml"),
        (["start", "plan.toml", "--fsh"], "no such option: --fsh (did you mean '--fresh'?)"),
        (["checkpoints", "export", "nothing", "x"], "there is no run"),
        (["save"], "there is no run yet"),
    ],
)
def test_a_mistake_exits_2_with_a_word_and_no_traceback(kgorch, words, said):
    done = kgorch(*words, code=2)
    assert said in done.stderr and not done.stdout


def test_a_run_named_nearly_right_is_suggested(kgorch, run):
    assert "did you mean 'ink'?" in kgorch("status", "inkk", code=2).stderr


def test_resume_with_nothing_to_do_says_so_and_exits_0(kgorch, engine):
    assert "no unfinished run to continue" in kgorch("resume").stdout


def test_stop_of_a_run_that_does_not_run_says_so(kgorch, run, engine):
    assert "is not running" in kgorch("stop", "ink").stdout


def test_init_from_a_workload_copies_a_training_of_ones_own_and_never_over_one(kgorch):
    kgorch("init", "--from", "workloads/timeseries", "mine")
    folder = kgorch.folder / "mine"
    for name in ("plan.toml", "demo.toml"):
        plan, _ = load(folder / name)
        check_entries(plan, folder)
        assert all(not stage.entry.startswith(("workloads", "kgorch")) for stage in plan.stage)
    for source in folder.glob("*.py"):
        assert "kgorch.workloads.timeseries" not in source.read_text()
        compile(source.read_text(), source.name, "exec")
    (folder / "train.py").write_text("mine")
    refused = kgorch("init", "--from", "timeseries", "mine", code=2)
    assert "exists already" in refused.stderr and (folder / "train.py").read_text() == "mine"
    assert "kgorch check 'my own/plan.toml'" in kgorch("init", "--from", "timeseries", "my own").stdout
    assert "did you mean 'timeseries'" in kgorch("init", "--from", "workloads/timeserie", code=2).stderr


def test_a_database_held_by_another_program_is_said_not_thrown(kgorch, run, engine):
    engine.dispose()
    other = sqlite3.connect(kgorch.home / "kgorch.db", isolation_level=None)
    other.execute("PRAGMA journal_mode=DELETE")
    other.execute("BEGIN EXCLUSIVE")
    done = kgorch("status", code=12, timeout_s=40)  # not for as long as a new database would be waited for
    other.close()
    assert "database" in done.stderr and "next:" in done.stderr


@pytest.fixture
def five_checkpoints(run, engine):
    """Steps 1 to 5 of `train`, all verified, their folders there."""
    folders = []
    for step in range(1, 6):
        folder = Path(run.checkpoints) / "train" / f"step-{step:08d}"
        folder.mkdir(parents=True)
        checkpoints.record(
            engine, run.id, str(folder), state="verified", stage="train", step=step, final=False, bytes=10, metrics={}
        )
        folders.append(folder)
    return folders


def test_prune_drops_what_the_rule_lets_go_and_a_dry_run_only_says_so(kgorch, five_checkpoints):
    said = kgorch("checkpoints", "prune", "ink", "--keep", "2", "--dry-run").stdout
    assert said.count("would drop") == 3 and all(folder.is_dir() for folder in five_checkpoints)
    kgorch("checkpoints", "prune", "ink", "--keep", "2")
    assert [folder.is_dir() for folder in five_checkpoints] == [False, False, False, True, True]
    assert "1\t\tdropped" in kgorch("checkpoints", "list", "ink", "--dropped").stdout
    assert kgorch("checkpoints", "prune", "ink", "--keep", "2").stdout == ""


def test_logs_print_the_end_of_what_a_rank_said_and_follow_until_nobody_supervises(kgorch, run, engine):
    folder = kgorch.home / "runs" / "ink" / "1" / "attempts" / "2.1"
    folder.mkdir()
    (folder / "rank1.log").write_text("".join(f"line {number}\n" for number in range(100_000)))
    assert kgorch("logs", "ink", "--rank", "1", "-n", "2").stdout == "line 99998\nline 99999\n"
    assert "there is no rank0.log" in kgorch("logs", "ink", code=2).stderr
    last = sessions.last(engine, run.id)
    sessions.record(engine, run.id, last.id, kind="x", phase="suspended", facts={})
    assert kgorch("logs", "ink", "-f", "--rank", "1", "-n", "1").stdout == "line 99999\n"


@pytest.mark.parametrize("name", ["../../x", "a/../../../x", "..", "/etc/x", "a/b/1", "x" * 300])
def test_a_name_leads_to_no_path_outside_of_the_state_folder(kgorch, name):
    kgorch.home = kgorch.folder / "deep" / "home"
    kgorch.home.mkdir(parents=True)
    before = set(kgorch.folder.parent.rglob("*"))
    for verb in (["resume"], ["status"], ["stop"], ["save"], ["logs"], ["history"], ["doctor"], ["queue", "add"]):
        done = CliRunner().invoke(cli, [*verb, name], env=kgorch.env())
        assert done.exit_code == 2 or isinstance(done.exception, NotFound), (verb, done)
    made = set(kgorch.folder.parent.rglob("*")) - before
    assert {path.name.partition(".")[2].partition("-")[0] for path in made} == {"db"}, made


@pytest.mark.parametrize("mode", [0o770, 0o707, 0o1777])
def test_a_state_folder_that_others_may_write_to_is_refused_with_what_to_type(kgorch, mode):
    kgorch.home.mkdir()
    kgorch.home.chmod(mode)
    for verb in (["status"], ["daemon", "status"], ["start", str(kgorch.plan())], ["queue"]):
        said = kgorch(*verb, code=2).stderr
        assert "other users of this machine may write to" in said and f"next: chmod go-w {kgorch.home}" in said, said
    assert not list(kgorch.home.iterdir())
    kgorch.home.chmod(0o755)
    assert "there is no run yet" in kgorch("status", code=2).stderr


def test_a_home_of_nobody_and_a_working_folder_that_is_gone_are_a_persons_mistakes(kgorch):
    kgorch.extra_env = {"KGORCH_HOME": "~nobodyatall/x"}
    said = kgorch("status", code=2).stderr
    assert "'~nobodyatall/x'" in said and "next:" in said
    gone = kgorch.folder / "gone"
    gone.mkdir()
    kgorch.extra_env = {}
    for verb in ("status", "start plan.toml", "init", "resume"):
        command = f"cd {gone} && rmdir {gone} && exec {' '.join(kgorch.command())} {verb}"
        done = subprocess.run(["sh", "-c", command], env=kgorch.env(), capture_output=True, text=True)
        gone.mkdir()
        assert done.returncode == 2 and "working folder" in done.stderr and "next: cd" in done.stderr, done


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_a_stream_that_is_closed_costs_nothing_but_what_would_be_written_there(kgorch, closed):
    plan = kgorch.plan("counts_steps.py")
    program = "import sys, os; from kgorch.cli import main; main(sys.argv[1:])"
    command = f"exec {sys.executable} -c '{program}' {{}} {closed}"
    done = subprocess.run(["sh", "-c", command.format(f"check {plan} --no-probe")], cwd=kgorch.folder, env=kgorch.env())
    assert done.returncode in (0, 2), done
    done = subprocess.run(["sh", "-c", command.format("status")], cwd=kgorch.folder, env=kgorch.env())
    assert done.returncode == 2, done


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, "next: kgorch resume ink"),
        (
            {"KAGGLE_KERNEL_RUN_TYPE": "Interactive"},
            "attach this session's output (save a version of the notebook first",
        ),
        ({"KAGGLE_KERNEL_RUN_TYPE": "Batch"}, "attach this session's output to the next one: Add Input"),
        ({"COLAB_RELEASE_TAG": "release"}, "--set checkpoint.mirror=/content/drive/MyDrive/kgorch"),
    ],
)
def test_the_next_step_of_a_session_is_one_that_can_be_done_on_the_next_machine(monkeypatch, capsys, environ, expected):
    from kgorch.cli import foreground

    for name in ("KAGGLE_KERNEL_RUN_TYPE", "COLAB_RELEASE_TAG"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    following = {"at": None, "daemon_alive": False}
    foreground._print_end({"run": "ink", "why": "the wall", "checkpoint": None, "next": following}, Phase.SUSPENDED)
    said = capsys.readouterr().err
    assert expected in said and ("kgorch start PLAN" in said) == bool(environ)


@pytest.mark.parametrize(("phase", "code"), [(Phase.FAILED, 20), (Phase.SUSPENDED, 10)])
def test_a_database_that_cannot_be_read_at_the_end_leaves_the_session_its_exit_code(monkeypatch, capsys, phase, code):
    from kgorch.cli import foreground
    from kgorch.report import run_view

    def away(*_, **__):
        raise OperationalError("SELECT", {}, OSError("the server is away"))

    monkeypatch.setattr(run_view, "of_run", away)
    monkeypatch.setattr(runs, "by_id", away)
    monkeypatch.setattr(foreground, "SessionMessages", lambda *_: contextlib.nullcontext(MagicMock()))
    ready = SimpleNamespace(run=SimpleNamespace(id="r1", name="ink"), supervise=lambda *_: LifecycleState(phase=phase))
    assert foreground.run_session(None, ready, as_json=False) == code
    assert "the server is away" in capsys.readouterr().err


def test_the_fleets_fields_are_those_that_were_promised(kgorch, postgres):
    assert json.loads(kgorch("fleet", "--json").stdout) is None
    kgorch.extra_env = {"KGORCH_DATABASE": postgres.new_database(), "KGORCH_MACHINE": "gpu-a"}
    engine = open_fleet(Fleet(kgorch.extra_env["KGORCH_DATABASE"], "gpu-a"), kgorch.home)
    run = runs.create(
        engine, id="r", name="ink", number=1, folder=f"{kgorch.home}/runs/ink/1", workdir="/w", checkpoints="/c", plan="",
        overrides=[], plan_hash="h", stages=["train"],
    )  # fmt: skip
    fleet_member.register(engine, kgorch.home)
    sessions.open_session(engine, run.id, boot_id="b", stage="train", step=4, steps_total=9)
    engine.dispose()
    found = json.loads(kgorch("fleet", "--json").stdout)
    found["machines"][0]["gpus"] = ["Tesla T4"]  # this machine's
    assert _shape(found) == json.loads((PROMISES / "fleet.json").read_text())
    shown = kgorch("fleet").stdout
    assert "gpu-a (this one)" in shown and "ink (train 4/9)" in shown
