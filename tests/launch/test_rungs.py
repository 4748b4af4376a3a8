"""What is remembered of the memory ladder: rows in, what the next attempt begins with out."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from sqlalchemy import create_engine

from kgorch import plan as plans
from kgorch.checkpoint.json_values import MAX_TEXT_LENGTH
from kgorch.checkpoint.manifest import Adjustment, creation_instant
from kgorch.core.codes import Phase
from kgorch.core.memory.memory_ladder import DEVICE, HOST, MemoryFacts, Settings, next_rung
from kgorch.db import checkpoints, import_run, runs, samples, sessions
from kgorch.db import rungs as rows
from kgorch.db.engine import open_database
from kgorch.db.rows import RungInfo
from kgorch.hardware import devices
from kgorch.launch import remedies, rungs
from kgorch.launch.attempts import LaunchedAttempt
from kgorch.launch.rungs import MemoryShortage, RungScope
from kgorch.protocol.launch_spec import LaunchSpec
from kgorch.protocol.messages import RankProgress, RemedyApplied, RungApplied
from kgorch.report import check, doctor
from kgorch.supervisor.attempts.memory_monitor import MemoryMonitor
from kgorch.system.paths import check_result_path

HERE, OTHER = RungScope("train", "Tesla T4", 2), RungScope("train", "Tesla P100", 1)
PLAN = """
name = "ink"
[[stage]]
name = "train"
entry = "train.py"
[memory]
ladder = ["microbatch/2", "num_workers/2", { set = { crop = 96 } }, { set = { hidden = 96 }, begins_anew = true }]
"""


@pytest.fixture
def plan():
    return plans.parse(PLAN, "plan.toml")


def begin_run(engine, number=1, name="ink", workdir="/w"):
    made = runs.create(
        engine, id=f"r{number}", name=name, number=number, folder="/f", workdir=workdir, checkpoints="/f/checkpoints",
        plan=PLAN, overrides=[], plan_hash="h", stages=["train"],
    )  # fmt: skip
    return made, sessions.open_session(engine, made.id, boot_id="b").id


@pytest.fixture
def run(engine):
    return begin_run(engine)[0]


@pytest.fixture
def session(engine, run):
    return sessions.last(engine, run.id).id


def told(step, settings, **how):
    return RungApplied("1.1", step, "microbatch/2", "memory ran out", settings.as_dict(), **how)


def take(engine, run, plan, session, step=50, place=HERE, where="host"):
    attempt = f"1.{len(rows.of_run(engine, run.id)) + 1}"
    shortage = MemoryShortage(session, attempt, place, step, where, "it was killed")
    return rungs.take_next(engine, run, plan, shortage)


def facts(engine, run, session, **more):
    known = {"stage": "train", "batch": "16", "num_workers": "4", "batchnorm": "False", "blocks": "0", "device": "cuda"}
    sessions.add_event(engine, run.id, "memory_facts", known | more, session)


def test_rungs_are_a_schedule_and_a_newer_one_at_an_earlier_step_overtakes_the_later(engine, run, plan, session):
    for step, size in ((10, 8), (40, 4), (30, 2)):
        rungs.record_applied(engine, run, session, HERE, told(step, Settings(microbatch=size)))
    found = rungs.launch_settings(engine, run, plan, HERE)
    assert [(item["step"], item["settings"]["microbatch"]) for item in found.schedule] == [(10, 8), (30, 2)]
    assert found.settings.microbatch is None, "as the plan begins, for the steps before"


def test_auto_begins_with_what_a_check_measured_at_that_place_until_more_is_known(engine, plan, session, tmp_path):
    run = runs.newest(engine, "ink")._replace(folder=str(tmp_path / "runs" / "ink" / "1"))
    auto = plan.model_copy(update={"memory": plan.memory.model_copy(update={"microbatch": "auto"})})
    memory = {"auto_microbatch": 11, "share": 32}
    stages = [
        {"name": "train", "device": "Tesla T4", "ranks": 2, "memory": memory},
        {"name": "predict", "memory": None},
    ]
    kept = check_result_path(tmp_path, "h", "ink", "/w")
    kept.parent.mkdir()
    kept.write_text(json.dumps({"stages": stages}))
    assert rungs.begin(engine, run, auto, session, OTHER, 0).now.microbatch is None, "another device"
    assert rungs.begin(engine, run, plan, session, HERE, 0).now.microbatch is None, "nobody asked"
    wanting = [rungs.is_unmeasured(engine, run, auto, place) for place in (OTHER, HERE, replace(HERE, stage="predict"))]
    assert wanting == [True, False, True] and not rungs.is_unmeasured(engine, run, plan, OTHER)
    found = rungs.begin(engine, run, auto, session, HERE, 40)
    assert found.now.microbatch == 11
    assert [(item["step"], item["settings"]["microbatch"]) for item in found.schedule] == [(40, 11)]
    [row] = rows.of_run(engine, run.id)
    assert (row.rung, row.why, row.changes_result) == ("microbatch=11", "kgorch check measured that it fits", False)

    assert take(engine, run, auto, session, where=DEVICE) == "microbatch/2"
    again, its = begin_run(engine, number=2)
    again = again._replace(folder=run.folder)
    assert rungs.begin(engine, again, auto, its, HERE, 0).now.microbatch == 6, "it ran out of memory with 11"
    for text in ("", "[]", '{"stages": [{"name": "train"}]}', json.dumps({"stages": [stages[0] | {"memory": None}]})):
        kept.write_text(text)
        third, its = begin_run(engine, number=3 + len(text))
        place = RungScope("train", "Tesla T4", 4)
        assert rungs.begin(engine, third._replace(folder=run.folder), auto, its, place, 0).now.microbatch is None


def test_what_a_launch_alone_can_change_holds_for_the_steps_before_it_too(engine, run, plan, session):
    facts(engine, run, session)
    rungs.record_applied(engine, run, session, HERE, told(10, Settings(microbatch=8)))
    assert take(engine, run, plan, session) == "num_workers/2"
    assert take(engine, run, plan, session) == "num_workers/2"
    found = rungs.launch_settings(engine, run, plan, HERE)
    assert found.settings.workers(4) == 1 and found.settings.microbatch is None
    assert [item["settings"]["workers_divided"] for item in found.schedule] == [4, 4]


def test_a_remedy_of_which_each_rank_tells_is_one(engine, run, session):
    attempt = SimpleNamespace(stage="train", ranks=2)
    for rank, step in ((0, 10), (1, 10), (0, 12), (1, 13)):
        skipped = RemedyApplied("1.1", "skip", f"rank {rank}: loss is nan", {"step": step})
        remedies.write(engine, run, session, attempt, skipped, datetime.now(UTC))
    assert [remedy.step for remedy in remedies.past(engine, run, "train")] == [10, 12, 13]


@pytest.mark.parametrize(
    ("change", "changes"), [({"step": 8, "seen": 10}, False), ({"step": 8, "seen": 10, "lr": 0.5}, True)]
)
def test_a_remedy_that_only_goes_back_is_not_said_to_change_the_result(change, changes):
    run, attempt = SimpleNamespace(plan_hash="h"), SimpleNamespace(stage="train", ranks=2)
    made = remedies.columns(run, attempt, RemedyApplied("1.1", "rollback", "nan", change))
    assert (made["step"], made["changes_result"]) == (8, changes)


def test_the_remedies_of_a_beginning_that_was_given_up_do_not_count(engine, run, plan, session):
    attempt = SimpleNamespace(stage="train", ranks=2)

    def apply(step):
        skipped = RemedyApplied("1.1", "skip", "loss is nan", {"step": step})
        remedies.write(engine, run, session, attempt, skipped, datetime.now(UTC))

    apply(40)
    facts(engine, run, session, num_workers="0")
    assert [take(engine, run, plan, session) for _ in range(2)] == ["set crop=96", "set hidden=96"]
    assert remedies.past(engine, run, "train") == []
    apply(40)
    assert [remedy.step for remedy in remedies.past(engine, run, "train")] == [40]


def test_a_clock_that_was_put_back_since_a_stage_began_anew_takes_nothing_from_the_new_beginning(engine, run, session):
    at = datetime.now(UTC) + timedelta(hours=1)
    where = {
        "plan_hash": "h",
        "stage": "train",
        "device": "",
        "world_size": 2,
        "step": 0,
        "rung": "set hidden=96",
        "why": "x",
    }
    attempt = sessions.open_attempt(engine, session, stage="train", ranks=1, first_step=0, folder_of=str)
    marks = {"attempt": f"1.{attempt.number}", "begins_anew": True, "settings": {}}
    rows.add(engine, run.id, session, at=at, **where, settings=marks)
    restart = rungs.last_restart(engine, run.id, "train")
    assert not sessions.has_launch_since(engine, restart)
    sessions.close_attempt(engine, attempt.id, outcome="crashed", cause="", last_step=0, made_progress=False)
    sessions.open_attempt(engine, session, stage="train", ranks=1, first_step=0, folder_of=str)
    assert sessions.has_launch_since(engine, restart), "its snapshots are of the new beginning"
    changes = [Adjustment.from_document(document) for document in rungs.changes(engine, run, "train")]
    assert datetime.fromisoformat(creation_instant(changes)) >= restart.at, "and so are its checkpoints"


def test_another_device_begins_as_the_plan_does_but_keeps_what_changed_the_result(engine, run, plan, session):
    facts(engine, run, session, num_workers="0")
    rungs.record_applied(engine, run, session, HERE, told(10, Settings(microbatch=8)))
    assert take(engine, run, plan, session) == "set crop=96"
    found = rungs.begin(engine, run, plan, session, OTHER, 60)
    assert found.settings.arguments == {"crop": 96} and found.schedule == [] and found.now.microbatch is None
    assert take(engine, run, plan, session, place=OTHER) == "set hidden=96", "crop is not taken twice"


def test_a_new_run_of_the_plan_begins_with_what_worked_and_keeps_the_result(engine, run, plan, session):
    facts(engine, run, session, num_workers="0")
    rungs.record_applied(engine, run, session, HERE, told(10, Settings(microbatch=8)))
    take(engine, run, plan, session)
    again, later = begin_run(engine, 2)
    found = rungs.begin(engine, again, plan, later, HERE, 0)
    assert found.settings.arguments == {} and [item["step"] for item in found.schedule] == [0]
    assert found.now == replace(Settings(), microbatch=8)
    assert rungs.begin(engine, again, plan, later, HERE, 0) == found and len(rows.of_run(engine, again.id)) == 1
    assert rungs.begin(engine, again, plan, later, OTHER, 0).schedule == []


def test_a_new_run_does_not_begin_with_a_microbatch_that_changed_the_result(engine, run, plan, session):
    """Under BatchNorm. What a launch alone changes stays exact, and is taken over."""
    rungs.record_applied(engine, run, session, HERE, told(10, Settings(microbatch=8), changes_result=True))
    facts(engine, run, session)
    assert take(engine, run, plan, session) == "num_workers/2"
    again, later = begin_run(engine, 2)
    assert rungs.begin(engine, again, plan, later, HERE, 0).now == replace(Settings(), workers_divided=2)
    third, later = begin_run(engine, 3)  # also from a run that took it over from the first
    rungs.record_applied(engine, again, later, HERE, told(0, Settings(microbatch=8)))
    assert rungs.begin(engine, third, plan, later, HERE, 0).now.microbatch is None


def test_a_run_of_another_name_or_folder_is_not_of_the_same_plan(engine, run, plan, session, tmp_path):
    """Two projects whose plans say no more than `entry = "train.py"` have the same hash."""
    rungs.record_applied(engine, run, session, HERE, told(10, Settings(microbatch=8)))
    auto = plan.model_copy(update={"memory": plan.memory.model_copy(update={"microbatch": "auto"})})
    stages = [{"name": "train", "device": "Tesla T4", "ranks": 2, "memory": {"auto_microbatch": 11, "share": 32}}]
    check.keep(tmp_path, auto.model_copy(update={"name": run.name}), Path(run.workdir), {"stages": stages})
    for number, where in ((2, {"workdir": "/elsewhere"}), (3, {"name": "wolf"})):
        other, later = begin_run(engine, number, **where)
        other = other._replace(folder=str(tmp_path / "runs" / other.name / "1"))
        assert rungs.is_unmeasured(engine, other, auto, HERE)
        assert rungs.begin(engine, other, plan, later, HERE, 0).now.microbatch is None


def test_a_plan_without_a_ladder_remembers_nothing_of_other_runs(engine, run, plan, session):
    rungs.record_applied(engine, run, session, HERE, told(10, Settings(microbatch=8)))
    again, later = begin_run(engine, 2)
    bare = plans.parse(PLAN, "plan.toml", ["memory.ladder=[]"])
    assert rungs.begin(engine, again, bare, later, HERE, 0).schedule == []


def test_a_microbatch_that_a_person_lowers_is_lower_also_where_rungs_were_taken(engine, run, plan, session):
    rungs.record_applied(engine, run, session, HERE, told(10, Settings(microbatch=8)))
    lower = plans.parse(PLAN, "plan.toml", ["memory.microbatch=2"])
    found = rungs.launch_settings(engine, run, lower, HERE)
    assert found.settings.microbatch == 2 and found.schedule[0]["settings"]["microbatch"] == 2


def test_changes_of_other_kinds_pass_through_wherever_they_were_made(engine, run, plan, session):
    rungs.record_applied(engine, run, session, HERE, told(40, Settings(microbatch=8)))
    for step, change in ((41, {"skip": True}), (30, {"lr": 0.5})):
        rows.add(
            engine, run.id, session, plan_hash="h", stage="train", device="Tesla P100", world_size=1, step=step, rung="x",
            settings=change,
        )  # fmt: skip
    rungs.record_applied(engine, run, session, HERE, told(20, Settings(microbatch=4)))
    schedule = rungs.launch_settings(engine, run, plan, HERE).schedule
    assert [item["step"] for item in schedule] == [20, 30, 41]
    assert schedule[1:] == [{"step": 30, "lr": 0.5}, {"step": 41, "skip": True}]


def test_a_rung_that_begins_anew_forgets_the_steps_before_and_sets_the_checkpoints_aside(engine, plan, tmp_path):
    run, session = begin_run(engine)
    run = run._replace(folder=str(tmp_path), checkpoints=str(tmp_path / "checkpoints"))
    facts(engine, run, session, num_workers="0")
    rungs.record_applied(engine, run, session, HERE, told(10, Settings(microbatch=8)))
    columns = {"stage": "train", "step": 5, "final": False, "bytes": 1, "created_at": datetime.now(UTC)}
    checkpoints.record(engine, run.id, "/old", state="verified", **columns)
    assert [take(engine, run, plan, session) for _ in range(3)] == ["set crop=96", "set hidden=96", ""]
    found = rungs.launch_settings(engine, run, plan, HERE)
    assert [item["step"] for item in found.schedule] == [0] and found.settings.arguments == {"crop": 96, "hidden": 96}
    later = columns | {"created_at": datetime.now(UTC) + timedelta(seconds=1)}
    checkpoints.record(engine, run.id, "/new", state="verified", **later)
    rungs.move_superseded(engine, run, "train", tmp_path / "checkpoints" / "train")
    assert {row.path: row.state for row in checkpoints.of_run(engine, run.id)} == {
        "/old": "superseded",
        "/new": "verified",
    }


def test_without_a_word_of_the_ranks_the_device_alone_is_known(engine, run, plan, session):
    assert take(engine, run, plan, session, where="device") == "set crop=96"
    assert rows.of_run(engine, run.id)[-1].changes_result


def test_a_launch_tells_the_ranks_the_stages_rows_that_a_manifest_can_hold(engine, run, plan, session):
    rungs.record_applied(engine, run, session, HERE, told(10, Settings(microbatch=8)))
    where = {"plan_hash": "h", "device": "", "world_size": 2, "why": "nan " * 1000, "settings": {"skip": True}}
    rows.add(engine, run.id, session, **where, stage="train", step=12, rung="skip")
    rows.add(engine, run.id, session, **where, stage="train", step=-1, rung="another's")
    rows.add(engine, run.id, session, **where, stage="predict", step=3, rung="skip")
    changes = [Adjustment.from_document(document) for document in rungs.changes(engine, run, "train")]
    assert [(item.step, item.rung, item.device) for item in changes] == [
        (10, "microbatch/2", "Tesla T4"),
        (12, "skip", ""),
    ]
    assert len(changes[1].why) == MAX_TEXT_LENGTH


def test_rungs_travel_with_their_run(engine, run, plan, session, tmp_path):
    rungs.record_applied(engine, run, session, HERE, told(10, Settings(microbatch=8)))
    elsewhere = open_database(tmp_path / "elsewhere")
    [found] = import_run.read_runs(engine, "ink")
    ours = found.run | {"folder": "/f", "checkpoints": "/f/checkpoints"}
    for _ in range(2):
        import_run.record_import(elsewhere, import_run.RunImport(ours, ["train"], found, lambda _: None))
    [row] = rows.of_run(elsewhere, run.id)
    assert (row.step, row.rung, row.device) == (10, "microbatch/2", "Tesla T4")
    assert rungs.launch_settings(elsewhere, run, plan, HERE) == rungs.launch_settings(engine, run, plan, HERE)
    elsewhere.dispose()


def test_an_attempt_that_ran_out_of_memory_is_no_attempt_without_progress(engine, run, session):
    for outcome in ("crashed", "out_of_memory", "out_of_memory"):
        attempt = sessions.open_attempt(engine, session, stage="train", ranks=1, first_step=0, folder_of=str)
        sessions.close_attempt(engine, attempt.id, outcome=outcome, cause="", last_step=0, made_progress=False)
    assert sessions.attempts_without_progress(engine, run.id) == 1


def test_an_attempt_takes_one_rung_however_often_its_end_is_judged(engine, run, plan, session):
    facts(engine, run, session)
    shortage = MemoryShortage(session, "1.7", HERE, 50, "host", "it was killed")
    first = rungs.take_next(engine, run, plan, shortage)
    assert rungs.take_next(engine, run, plan, shortage) == first
    assert len(rows.of_run(engine, run.id)) == 1


def test_a_rung_that_came_with_a_checkpoint_is_not_taken_for_one_of_an_attempt_of_that_name(engine, run, plan, session):
    """Without the old database sessions are counted from 1 again, and so are the names of their attempts."""
    shortage = MemoryShortage(session, "1.1", HERE, 50, "host", "it was killed")
    facts(engine, run, session)
    rungs.take_next(engine, run, plan, shortage)
    changes = [Adjustment.from_document(document) for document in rungs.changes(engine, run, "train")]
    [columns], _ = rungs.rows_of_manifest(SimpleNamespace(changes=changes, stage="train", plan_hash="h"))
    again, session = begin_run(engine, 2)
    facts(engine, again, session)
    rows.add(engine, again.id, None, **columns)
    before = rungs.launch_settings(engine, again, plan, HERE).now
    assert rungs.take_next(engine, again, plan, replace(shortage, session_id=session))
    assert rungs.launch_settings(engine, again, plan, HERE).now != before


def test_a_climb_is_in_vain_when_a_rung_in_process_follows_it_in_the_same_run(engine, run, plan, session):
    def change(size, up=False, **more):
        rungs.record_applied(engine, run, session, HERE, told(10, Settings(microbatch=size, **more), up=up))

    change(4)
    change(8, up=True)
    assert rungs.count_failed_climbs(engine, run, HERE) == 0
    change(8, workers_divided=2)  # the host's memory: no word against the climb
    assert rungs.count_failed_climbs(engine, run, HERE) == 0
    change(16, up=True)
    change(8)
    assert rungs.count_failed_climbs(engine, run, HERE) == 1


@pytest.mark.parametrize(("taken", "change"), [(None, "a batch twice as large"), (4, "memory.microbatch = 8: ")])
def test_the_doctor_raises_the_microbatch_that_is_in_force_before_the_batch(
    engine, run, session, tmp_path, taken, change
):
    launch = LaunchSpec("ink", "r1", "train", "1.1", str(tmp_path), "e", "w", 2, "", "", "", "", device=HERE.device)
    launch.write()
    sessions.open_attempt(engine, session, stage="train", ranks=2, first_step=0, folder_of=lambda _: str(tmp_path))
    facts(engine, run, session)
    idle = {"gpu0.util": 40.0, "gpu0.mem_used": 3e9, "gpu0.mem_total": 15e9, "rank0.cpu": 99.0, "rank0.step_s": 0.3}
    samples.write(engine, session, [(datetime.now(UTC), idle)])
    if taken:
        rungs.record_applied(engine, run, session, HERE, told(5, Settings(microbatch=taken)))
    rungs.record_applied(engine, run, session, OTHER, told(5, Settings(microbatch=1)))
    [finding] = doctor.of_run(engine, run)["findings"]
    assert finding["cause"] == "small_batch" and finding["change"].startswith(change)


odd = (
    st.none()
    | st.booleans()
    | st.integers(-2, 3)
    | st.sampled_from(["", "off", "8", 0.5, -1.0, 1e308, 10**30, [1], ["set crop=96"], {"crop": 96}, {"1": [None]}])
)
names = st.sampled_from([*Settings.__slots__, "unknown"])
changes = st.sampled_from(["skip", "call", "seen", "lr", "amp", "scaler", "arguments", "step", "begins_anew"])
documents = st.one_of(
    odd,
    st.dictionaries(changes, odd, max_size=3),
    st.fixed_dictionaries({"settings": odd | st.dictionaries(names, odd, max_size=3)}, optional={"begins_anew": odd}),
)


@given(st.lists(documents, min_size=1, max_size=3))
@example([{"settings": {"microbatch": 2, "taken": ["set crop=96"], "arguments": {"crop": 96}}}])
@example([{"skip": True, "call": 1, "arguments": {"crop": 96}, "lr": 0.5, "seen": 4}])
@settings(max_examples=1000, deadline=None, database=None)
def test_what_comes_from_elsewhere_is_refused_or_can_be_followed(documents):
    plan = plans.parse(PLAN, "plan.toml")
    try:
        for document in documents:
            rungs.check(document)
    except ValueError:
        return
    at = datetime.now(UTC)
    kept = [
        RungInfo(1, "r1", 1, "h", "train", "Tesla T4", 2, at, 5, "?", "?", False, False, document)
        for document in documents
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rows, "of_run", lambda *_: kept)
        found = rungs.launch_settings(None, SimpleNamespace(id="r1"), plan, HERE)
        arguments = found.settings.arguments | remedies.arguments(found.schedule)
    assert all(isinstance(name, str) for name in arguments)
    for entry in found.schedule:
        if "settings" in entry:
            assert (
                entry["step"] == 5
                and Settings.from_dict(json.loads(json.dumps(entry["settings"]))).describe(Settings()) is not None
            )
    for where in (DEVICE, HOST):
        next_rung(plan.memory.rungs, found.now, plan.memory.settings, MemoryFacts(16, 4, True, 2), where=where)


def test_gpus_of_two_nodes_are_not_taken_for_one(engine, run, plan, session, monkeypatch):
    """This node's two GPUs are those of its own ranks: the next ranks have the GPUs of the other node."""
    monkeypatch.setattr(devices, "gpu_of_rank", lambda ranks, environ: [rank % 2 for rank in range(ranks)])
    attempt = LaunchedAttempt(
        SimpleNamespace(ranks=4, stage="train"), "1.1", 0, 0, more_stages=False, device=HERE.device
    )  # fmt: skip
    clock = SimpleNamespace(s=0.0, now_s=lambda: clock.s)
    nodes = SimpleNamespace(node_of=lambda rank: rank // 2)
    state = SimpleNamespace(phase=Phase.TRAINING)
    live = SimpleNamespace(engine=engine, run=run, plan=plan, clock=clock, state=state, environ={}, nodes=nodes)
    monitor = MemoryMonitor(live)
    monitor.begin(attempt)
    posted = []
    values = {f"gpu{gpu}.{name}": size for gpu in (0, 1) for name, size in (("mem_total", 1.0), ("mem_used", 0.6))}
    for rank in range(4):
        values |= {f"rank{rank}.total": 1.0, f"rank{rank}.peak": 0.6, f"rank{rank}.reserved": 0.6}
    for clock.s in map(float, range(300)):
        monitor.look(values, posted.append)
    assert not posted, "each GPU is filled to 60%"


def test_an_order_to_the_ranks_is_not_repeated_until_something_changes_and_holds_no_other_back(
    engine, run, plan, session
):
    attempt = LaunchedAttempt(
        SimpleNamespace(ranks=2, stage="train"), "1.1", 0, 0, more_stages=False, device=HERE.device
    )  # fmt: skip
    clock = SimpleNamespace(s=0.0, now_s=lambda: clock.s)
    state, away = SimpleNamespace(phase=Phase.TRAINING), create_engine("sqlite:////dev/null/kgorch.db")
    nodes = SimpleNamespace(node_of=lambda rank: 0)
    live = SimpleNamespace(engine=away, run=run, plan=plan, clock=clock, state=state, environ={}, nodes=nodes)
    monitor = MemoryMonitor(live)
    monitor.begin(attempt)

    def orders(share, seconds):
        values = {f"rank{rank}.{name}": size for rank in (0, 1) for name, size in (("total", 1.0), ("peak", share))}
        posted = []
        for clock.s in map(float, seconds):
            monitor.look(values, posted.append)
        return [ordered.order for ordered in posted]

    assert orders(0.99, range(100)) == ["down"], "in an outage of the database, too"
    live.engine = engine
    rungs.record_applied(engine, run, session, HERE, told(10, Settings(microbatch=2)))
    monitor.begin(attempt)
    assert orders(0.99, range(100, 500)) == ["down"]
    assert orders(0.2, range(500, 2500)) == ["up"], "nothing was taken, but there is room now"
    monitor.on_progress(RankProgress("1.1", 0, "evaluation", 1.0, 0.0, {}))
    clock.s = 2500.0
    monitor.begin(attempt)
    assert orders(0.99, range(2500, 3000)) == [], "no rung makes an evaluation less"
    monitor.on_progress(RankProgress("1.1", 0, "step", 1.0, 0.0, {}))
    assert orders(0.99, range(3000, 3500)) == ["down"]
