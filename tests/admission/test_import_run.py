"""State that another session left: found by its manifests, chosen, copied, hashed, written down. No training runs here."""

from __future__ import annotations

import errno
import json
import os
import shutil
import sqlite3
import subprocess
import sys
from contextlib import closing
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest
from deep_folders import make_deep
from sources import LADDER, PLAN, TRUSTED, Place, checkpoint, session_of, state

from kgorch.admission import folder_scan, import_files, resolve_run, session_start
from kgorch.admission.folder_scan import ScanLimits
from kgorch.admission.requests import LocalState, ResumeRequest, StartRequest
from kgorch.checkpoint import registry
from kgorch.checkpoint.folder import read_checkpoint, write_manifest
from kgorch.checkpoint.manifest import FOLDER_PATTERN, Adjustment
from kgorch.checkpoint.verify import verify_checkpoint
from kgorch.db import checkpoints, import_run, rungs, runs, sessions
from kgorch.db.engine import open_database
from kgorch.errors import CheckpointBroken, KgorchError, NotFound, PlanError, StateUnusable
from kgorch.plan import parse
from kgorch.platforms import colab
from kgorch.platforms.profile import Profile
from kgorch.system import files
from kgorch.untrusted_io import Budget


def damage(folder):
    path = folder / "rank0.safetensors"
    path.write_bytes(b"x" + path.read_bytes()[1:])


def snapshot(root):
    return {path: (path.lstat().st_mtime_ns, path.lstat().st_size) for path in [root, *root.rglob("*")]}


def test_a_run_that_a_source_holds_becomes_ours_with_its_checkpoint_its_history_and_what_it_made(here, source):
    state(source)
    before = snapshot(source)
    opened, told = here.start()
    assert (opened.run.id, opened.row.number, opened.row.first_step) == ("r1", 2, 20)
    found, history, events = here.look()
    copied = here.home / "runs/ink/1/checkpoints/train/step-00000020"
    origin = source / "runs/ink/1/checkpoints/train/step-00000020"
    assert found["checkpoint"]["path"] == str(copied) and found["checkpoint"]["source"] == str(origin)
    assert verify_checkpoint(copied).step == 20 and told.copied == [origin] and told.bytes > 140
    assert [entry["why"] for entry in history] == ["the wall", ""], "the earlier session is known"
    assert (here.home / "runs/ink/1/outputs/submission.csv").read_text() == "ink"
    facts = {"source": str(origin), "run": "r1", "stage": "train", "step": 20, "bytes": 140}
    assert [event.facts for event in events if event.kind == "checkpoint_imported"] == [facts]
    assert snapshot(source) == before, "nothing was written into the source"


BEST = PLAN + '[checkpoint]\nkeep = { last = 1, best = "dice:max" }\n'


def measured(folder, dice: float, at: int | None) -> None:
    """A manifest that says so; `at`: the step on whose weights it was measured."""
    found = read_checkpoint(folder)
    write_manifest(folder, replace(found, metrics={"dice": dice}, measured={} if at is None else {"dice": at}))


def saves(home):
    return home / "runs/ink/1/checkpoints/train"


@pytest.fixture
def evaluated(source):
    """A source with steps 10 to 40, the best of which is 20; 30 was saved by the clock, with the figure of 20."""
    state(source, steps=(10, 20, 30, 40))
    for step, dice, at in [(10, 0.5, 10), (20, 0.9, 20), (30, 0.9, 20), (40, 0.7, 40)]:
        measured(saves(source) / f"step-000000{step}", dice, at)
    return source


def test_the_best_comes_along_to_a_new_machine_beside_the_furthest(here, evaluated):
    opened, told = here.start(BEST)
    assert opened.row.first_step == 40
    engine = open_database(here.home)
    standing = checkpoints.of_run(engine, "r1", "verified")
    assert [(row.step, dict(row.measured)) for row in standing] == [(20, {"dice": 20}), (40, {"dice": 40})]
    assert registry.best_for_ranks(engine, "r1", parse(BEST, "plan.toml"), "train") == {
        "metric": "dice",
        "highest": True,
        "value": 0.9,
    }
    assert not registry.expired_folders(engine, "r1", parse(BEST, "plan.toml"))
    assert [path.name for path in told.copied] == ["step-00000040", "step-00000020"]
    engine.dispose()


def test_where_the_best_is_broken_the_next_best_comes_along(here, evaluated):
    damage(saves(evaluated) / "step-00000020")
    _, told = here.start(BEST)
    assert [path.name for path in told.copied] == ["step-00000040"], "which is the best of what is whole"
    assert any("step-00000020" in note for note in told.notes)


def test_without_keep_best_the_furthest_comes_alone(here, evaluated):
    _, told = here.start()
    assert [path.name for path in told.copied] == ["step-00000040"]


def test_a_best_for_which_there_is_no_room_stays_and_the_run_goes_on(here, evaluated, monkeypatch):
    usage = import_files.shutil.disk_usage
    taken = []

    def disk_usage(path):
        nonlocal taken
        taken += [path] if Path(path).name == "checkpoints" else []  # not the folder for a copy of the database
        return usage(path) if len(taken) < 2 else usage(path)._replace(free=0)

    monkeypatch.setattr(import_files.shutil, "disk_usage", disk_usage)
    opened, told = here.start(BEST)
    assert opened.row.first_step == 40 and [path.name for path in told.copied] == ["step-00000040"]
    assert any("no room" in note and "step-00000020" in note for note in told.notes)


def test_what_a_manifest_learns_after_it_was_read_back_is_seen_before_anything_is_dropped(here, evaluated):
    """The evaluation of a step that was saved before it; nobody supervised then."""
    here.start(BEST)
    engine, plan = open_database(here.home), parse(BEST, "plan.toml")
    late = checkpoint(saves(here.home).parent, 44)
    checkpoints.record(engine, "r1", str(late), state="verified", stage="train", step=44, final=False, bytes=1)
    newest = checkpoint(saves(here.home).parent, 48)
    checkpoints.record(engine, "r1", str(newest), state="verified", stage="train", step=48, final=False, bytes=1)
    measured(late, 0.95, 44)
    assert [path.name for path in registry.expired_folders(engine, "r1", plan)] == ["step-00000020", "step-00000040"]
    registry.mark_best(engine, "r1", plan)
    best = checkpoints.best(engine, "r1")
    assert (best.step, best.best, dict(best.measured)) == (44, "dice:max", {"dice": 44})
    registry.mark_best(engine, "r1", parse(PLAN, "plan.toml"))
    assert checkpoints.best(engine, "r1") is None, "a plan that names no best marks none"
    engine.dispose()


def test_paths_and_ids_of_the_other_machine_do_not_come_along(here, source):
    engine = open_database(here.home)
    columns = {"plan": "", "overrides": [], "plan_hash": "", "folder": "", "workdir": "", "checkpoints": ""}
    session_of(engine, runs.create(engine, id="other", name="other", number=1, stages=[], **columns))
    state(source)
    here.start()
    attempts, rows = sessions.attempts(engine, "r1"), checkpoints.of_run(engine, "r1")
    assert [item.folder for item in attempts] == [str(here.home / "runs/ink/1/attempts/1.1")]
    assert [(row.step, row.state, row.save_duration_s) for row in rows] == [(10, "dropped", 2.5), (20, "verified", 2.5)]
    assert all(row.path.startswith(str(here.home)) for row in rows)
    assert {row.session_id for row in rows} == {sessions.of_run(engine, "r1")[0].id}
    assert len(sessions.of_run(engine, "other")) == 1
    engine.dispose()


def test_charges_come_along_once(here, source):
    state(source)
    add = "INSERT INTO charges (session_id, accelerator, factor, started_at, used_s) VALUES (1, 'T4', 2, '2026-11-20 12:00:00', 60)"
    with closing(sqlite3.connect(source / "kgorch.db")) as database:
        database.execute(add)
        database.commit()
    here.start()
    here.start()
    with closing(sqlite3.connect(here.home / "kgorch.db")) as database:
        assert database.execute("SELECT session_id, used_s FROM charges").fetchall() == [(1, 60.0)]


def test_charges_and_corrections_of_their_pool_come_along_once_and_grow(here, source):
    state(source)
    add = "INSERT INTO charges (session_id, pool, accelerator, factor, started_at, used_s, why) VALUES "
    rows = (
        "(1, 'kaggle', 'T4', 2, '2026-11-20 12:00:00', 60, ''), (NULL, 'kaggle', '', 1, '2026-11-20 13:00:00', -5, 'a person'),"
        "(NULL, 'other', '', 1, '2026-11-20 13:00:00', 7, 'a person'), (1, 'kaggle', 'T4', 2, '2026-11-20 13:00:00', 9e999, ''),"
        "(1, 'kaggle', 'T4', -2, '2026-11-20 14:00:00', 50, '')"
    )

    def write(text):
        with closing(sqlite3.connect(source / "kgorch.db")) as database:
            database.execute(text)
            database.commit()

    def charged():
        with closing(sqlite3.connect(here.home / "kgorch.db")) as database:
            return database.execute("SELECT session_id, pool, used_s FROM charges ORDER BY id").fetchall()

    write(add + rows)
    here.start()
    assert charged() == [(1, "kaggle", 60.0), (None, "kaggle", -5.0)], "of its own pool, and nothing that cannot be"
    write("UPDATE charges SET used_s = 90 WHERE used_s = 60")
    checkpoint(source / "runs/ink/1/checkpoints", 30)
    here.start()
    assert charged() == [(1, "kaggle", 90.0), (None, "kaggle", -5.0)]


def test_checkpoints_from_before_a_stage_began_anew_are_not_gone_on_from(here, source):
    folder = state(source, (10, 20))
    engine = open_database(source)
    where = {"plan_hash": "h", "stage": "train", "device": "cpu", "world_size": 1, "step": 0, "rung": "set hidden=96"}
    rungs.add(engine, "r1", 1, **where, settings={"settings": {"arguments": {"hidden": 96}}, "begins_anew": True})
    checkpoints.supersede(engine, "r1", "train", before=datetime.now(UTC), why="the stage began anew")
    engine.dispose()
    opened, _ = here.start(PLAN + LADDER)
    assert opened.run.id == "r1" and opened.row.first_step == 0 and not list(here.home.rglob("step-*"))
    assert (folder / "checkpoints/train/step-00000020").is_dir(), "nothing is written there"


CROPPED = Adjustment(
    3, "set crop=64", "memory ran out", "2026-11-20T11:00:00+00:00", {"settings": {"arguments": {"crop": 64}}}, "cpu", 1,
    changes_result=True,
)  # fmt: skip
LEFT_OUT = Adjustment(
    7, "skip", "the loss is nan", "2026-11-20T11:30:00+00:00", {"skip": True}, "", 1, changes_result=True
)


def rungs_of(place):
    engine = open_database(place.home)
    try:
        return [(row.step, row.rung, row.changes_result, dict(row.settings)) for row in rungs.of_run(engine, "r1")]
    finally:
        engine.dispose()


def test_a_run_found_by_its_checkpoints_alone_knows_what_has_changed_its_result(here, source):
    checkpoint(source, 10, changes=[CROPPED])
    checkpoint(source, 20, changes=[CROPPED, LEFT_OUT])
    here.start(PLAN + LADDER)
    held = [(item.step, item.rung, True, item.settings) for item in (CROPPED, LEFT_OUT)]
    assert rungs_of(here) == held
    told = here.look()[2]
    assert [event.facts["rung"] for event in told if event.kind == "rung_taken"] == ["set crop=64", "skip"]


def test_what_a_database_tells_of_a_rung_its_checkpoints_do_not_tell_again(here, source):
    folder = state(source, (10,))
    engine = open_database(source)
    where = {"plan_hash": "h", "stage": "train", "device": "cpu", "world_size": 1, "changes_result": True}
    settings = dict(CROPPED.settings)
    rungs.add(engine, "r1", 1, **where, step=3, rung=CROPPED.rung, why=CROPPED.why, settings=settings)
    engine.dispose()
    checkpoint(folder / "checkpoints", 20, changes=[CROPPED, LEFT_OUT], minute=1)
    here.start(PLAN + LADDER)
    assert [row[:2] for row in rungs_of(here)] == [(3, "set crop=64"), (7, "skip")]


def test_a_checkpoint_that_tells_an_odd_rung_is_gone_on_from_and_a_note_says_so(here, source):
    folder = checkpoint(source, 20, changes=[replace(CROPPED, settings={"settings": {"microbatch": "8"}}), LEFT_OUT])
    opened, told = here.start()
    assert opened.row.first_step == 20 and [row[1] for row in rungs_of(here)] == ["skip"]
    assert f"{folder}: skipped the rung set crop=64" in told.notes[0]


ODD = [
    {"settings": 5},
    [],
    ["settings"],
    None,
    "settings",
    {"settings": {"microbatch": "8"}},
    {"settings": {"taken": 1}},
    {"lr": "low"},
]


@pytest.mark.parametrize("odd", ODD, ids=json.dumps)
def test_a_database_with_a_rung_that_cannot_be_read_costs_the_history_alone(here, source, odd):
    state(source)
    engine = open_database(source)
    where = {"plan_hash": "h", "stage": "train", "device": "cpu", "world_size": 1, "step": 0, "rung": "microbatch/2"}
    rungs.add(engine, "r1", 1, **where, settings={"settings": {}})
    engine.dispose()
    with closing(sqlite3.connect(source / "kgorch.db")) as database:
        database.execute("UPDATE rungs SET settings = ?", [json.dumps(odd)])
        database.commit()
    opened, told = here.start()
    assert (opened.run.id, opened.row.first_step, opened.row.number) == ("r1", 20, 1), "the checkpoint, no session"
    assert f"the database {source}/kgorch.db was skipped" in told.notes[0]


def test_a_session_that_was_alive_when_its_state_was_kept_is_closed_as_it_was_last_heard(here, source):
    state(source, over=False)
    here.start()
    _, (first, _), events = here.look()
    assert first["phase"] == "cut_off" and first["attempts"][0]["outcome"] == "lost"
    assert first["lasted_s"] < 60, "not until now, whenever that is"
    assert [event.phase for event in events if event.kind == "session_lost"] == ["cut_off"]


def test_a_broken_newest_is_passed_over_and_the_one_before_is_used(here, source):
    folder = state(source, (10, 20, 30))
    damage(folder / "checkpoints/train/step-00000030")
    (folder / "checkpoints/train/step-00000020/rank0.safetensors").unlink()
    opened, told = here.start()
    assert opened.row.first_step == 10
    passed = [event.facts["why"] for event in here.look()[2] if event.kind == "checkpoint_skipped"]
    assert len(passed) == 2 and "xxh3" in passed[0] and "lacks" in passed[1] and len(told.notes) == 2
    assert [path.name for path in here.home.glob("runs/ink/1/checkpoints/train/*")] == ["step-00000010"]


def test_when_none_is_whole_the_run_does_not_begin_anew_by_itself(here, source):
    damage(state(source, (10,)) / "checkpoints/train/step-00000010")
    with pytest.raises(CheckpointBroken, match=r"no checkpoint of run r1(.|\n)*--fresh"):
        here.start()
    assert here.look() is None, "and nothing is known of it here"
    opened, _ = here.start(fresh=True)
    assert opened.run.id != "r1"


def test_a_stage_whose_checkpoints_were_lost_keeps_it_known_that_it_had_some(here, source):
    root = state(source, (10,)) / "checkpoints"
    checkpoint(root, 12, final=True)
    shutil.rmtree(root / "train" / "step-00000010")
    engine = open_database(source)
    lost = {"stage": "predict", "step": 5, "final": False, "bytes": 1}
    checkpoints.record(engine, "r1", "/elsewhere/predict/step-00000005", state="verified", **lost)
    engine.dispose()
    here.start()
    engine = open_database(here.home)
    states = {(row.stage, row.step): row.state for row in checkpoints.of_run(engine, "r1")}
    engine.dispose()
    assert states == {("train", 10): "dropped", ("train", 12): "verified", ("predict", 5): "broken"}


def test_the_final_checkpoint_of_an_earlier_stage_comes_along_for_the_later_one_to_read(here, source):
    root = state(source, (10,)) / "checkpoints"
    checkpoint(root, 30, final=True)
    checkpoint(root, 5, stage="predict")
    here.start()
    names = {str(path.relative_to(here.home / "runs/ink/1/checkpoints")) for path in here.home.rglob("step-*")}
    assert names == {"train/step-00000030-final", "predict/step-00000005"}


def test_without_a_database_the_run_is_made_from_its_manifests(here, source):
    checkpoint(source, 30, final=True)
    checkpoint(source, 5, stage="predict")
    opened, _ = here.start()
    found = here.look()[0]
    assert opened.run.id == "r1" and opened.row.number == 1
    assert [(stage["name"], stage["done"]) for stage in found["stages"]] == [("train", True), ("predict", False)]


@pytest.mark.parametrize("content", ["garbage", "half", "newer", "no run in it", "a link", "wrong types"])
def test_a_database_that_cannot_be_read_is_a_note_and_not_an_end(here, source, content, tmp_path):
    state(source)
    path = source / "kgorch.db"
    if content == "garbage":
        path.write_bytes(b"I am a poem. " * 1000)
    elif content == "half":
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    elif content == "a link":
        path.rename(tmp_path / "elsewhere.db")
        path.symlink_to(tmp_path / "elsewhere.db")
    else:
        change = {
            "newer": "UPDATE alembic_version SET version_num = '9999'",
            "no run in it": "UPDATE runs SET name = 'else'",
            "wrong types": "UPDATE sessions SET number = 'first'",
        }
        with closing(sqlite3.connect(path)) as database:
            database.execute(change[content])
            database.commit()
    opened, told = here.start()
    assert (opened.run.id, opened.row.first_step, opened.row.number) == ("r1", 20, 1)
    assert any("database" in note for note in told.notes) == (content not in ("no run in it", "a link"))


@pytest.mark.parametrize(("version", "sessions_before"), [("0001", 1), ("0008", 2)])
def test_an_older_database_is_brought_up_to_date_as_a_copy(here, source, version, sessions_before):
    dump = (Path(__file__).parents[1] / "promises" / f"database_{version}.sql").read_text()
    source.mkdir(parents=True)
    with closing(sqlite3.connect(source / "kgorch.db")) as old:
        old.executescript(dump)
        old.execute("UPDATE runs SET name = 'ink'")
        old.commit()
        [(run_id, step)] = old.execute("SELECT run_id, max(step) FROM sessions").fetchall()
    before = (source / "kgorch.db").read_bytes()
    checkpoint(source, step, run_id=run_id)
    opened, told = here.start(consent=replace(TRUSTED, changes=True))  # it keeps overrides, and another plan
    assert opened.run.id == run_id and opened.row.number == sessions_before + 1 and not told.notes
    assert (source / "kgorch.db").read_bytes() == before


HOSTILE = 'stage=[{name="train",entry="subprocess:call",ranks=1,args={args="id > PWNED\\u001b",shell=true}}]'


@pytest.mark.parametrize(
    "override",
    [HOSTILE, 'notify.command=["/bin/sh","-c","id"]', 'checkpoint.mirror="/tmp"', 'stage.train.entry="os:getpid"'],
)
def test_what_a_found_database_keeps_does_not_decide_what_runs(here, source, override):
    """A data set that somebody attaches is a source, too: its overrides ran any command."""
    state(source, overrides=["seed=5", override])
    with pytest.raises(KgorchError, match="not trusted with that") as refused:
        here.start()
    shown = str(refused.value)
    assert (
        override.partition("=")[0] in shown
        and "--accept-plan" in shown
        and all(map(str.isprintable, shown.split("\n")))
    )
    assert not list(here.home.glob("runs/ink/*/plan.toml")), "nothing was begun"


def test_overrides_of_a_found_run_hold_where_they_are_given_again_or_trusted(here, source):
    state(source, overrides=["session.margin=5s", "session.wall=2h"])
    opened, _ = here.start(overrides=["session.margin=6s", "session.wall=1h"])
    assert opened.run.overrides == ["session.margin=6s", "session.wall=1h"]
    shutil.rmtree(here.home)
    opened, _ = here.start(overrides=["session.margin=6s"], consent=TRUSTED)
    assert opened.run.overrides == ["session.wall=2h", "session.margin=6s"]


ONE_STAGE = PLAN.replace('[[stage]]\nname = "predict"\nentry = "t.py"\n', "")
OF_BOTH = ["stage.predict.args.x=1", "session.margin=6s", "stage.train.args.y=2"]


def test_an_override_of_a_stage_that_the_plan_has_no_more_is_dropped_with_a_note(here):
    here.start(overrides=OF_BOTH)
    opened, told = here.start(ONE_STAGE)
    assert opened.run.overrides == OF_BOTH[1:] and here.start(ONE_STAGE)[0].run.overrides == OF_BOTH[1:]
    [note] = [note for note in told.notes if "predict" in note and "--set" in note]
    assert "stage.predict.args.x=1" in note and "no such stage" in note
    with pytest.raises(PlanError, match="there is no stage 'predict'"):
        here.start(ONE_STAGE, overrides=["stage.predict.args.x=1"])


def test_an_override_that_names_a_stage_by_the_name_that_another_one_gives_it_is_kept(here):
    renamed = ["stage.train.name=fit", "stage.fit.args.y=2"]
    here.start(overrides=renamed)
    assert here.start()[0].run.overrides == renamed


def test_an_override_of_a_stage_that_the_plan_has_no_more_does_not_come_along_from_a_source(here, source):
    state(source, overrides=OF_BOTH)
    with pytest.raises(KgorchError, match="overrides of the run") as refused:
        here.start(ONE_STAGE)
    assert not [fact for fact in refused.value.facts if "predict" in fact]
    opened, told = here.start(ONE_STAGE, consent=replace(TRUSTED, changes=True))
    assert opened.run.overrides == OF_BOTH[1:]
    assert [note for note in told.notes if "stage.predict.args.x=1" in note and "no such stage" in note]


def test_rows_that_lie_in_the_write_ahead_log_alone_are_read(here, source):
    state(source)
    with closing(sqlite3.connect(source / "kgorch.db")) as writer:
        writer.execute("PRAGMA wal_autocheckpoint=0")
        writer.execute("UPDATE sessions SET why = 'in the log'")
        writer.commit()
        shutil.copytree(source, copy := source.parent / "copied")
    shutil.rmtree(source)
    assert (copy / "kgorch.db-wal").stat().st_size
    here.start()
    assert here.look()[1][0]["why"] == "in the log"


def test_what_a_source_has_further_of_our_own_run_comes_in_and_what_it_has_less_does_not(here, source, tmp_path):
    state(source)
    engine = open_database(source)
    sessions.add_event(engine, "r1", "never_attached", {})
    engine.dispose()
    here.start()
    root = source / "runs/ink/1/checkpoints"
    shutil.rmtree(root / "train/step-00000020")
    assert here.start()[0].row.first_step == 20
    engine = open_database(source)
    row = session_of(engine, runs.newest(engine, "ink"))
    sessions.record(engine, "r1", row.id, kind="attempt_suspended", phase="suspended", facts={}, why="later")
    engine.dispose()
    checkpoint(root, 40)
    opened, _ = here.start()
    assert (opened.run.id, opened.run.number, opened.row.first_step) == ("r1", 1, 40)
    _, history, events = here.look()
    assert [entry["number"] for entry in history] == [1, 2, 3, 4, 5]
    assert history[3]["why"] == "later", "what happened there comes after what was known here"
    kinds = [event.kind for event in events if event.phase == "suspended" or event.kind == "never_attached"]
    assert sorted(kinds) == ["attempt_suspended", "attempt_suspended", "never_attached"], "and nothing comes twice"


def test_a_source_whose_further_checkpoints_are_broken_changes_nothing_here(here, source):
    folder = state(source)
    here.start()
    shutil.rmtree(folder / "checkpoints/train/step-00000020")
    damage(checkpoint(folder / "checkpoints", 40))
    opened, _ = here.start()
    assert opened.row.first_step == 20 and len(here.look()[1]) == 3
    assert [path.name for path in here.home.rglob("step-*")] == ["step-00000020"], "and step 10 is of no use"


def test_a_run_that_is_finished_there_is_finished_here(here, source):
    folder = state(source)
    checkpoint(folder / "checkpoints", 30, final=True)
    engine = open_database(source)
    runs.set_state(engine, "r1", "finished")
    engine.dispose()
    opened, _ = here.start()
    assert isinstance(opened, resolve_run.NoSession) and opened.why == "finished"
    assert (here.home / "runs/ink/1/outputs/submission.csv").is_file()


def test_two_runs_of_one_name_are_listed_and_a_person_chooses_once(here, source, tmp_path):
    state(source)
    state(tmp_path / "source" / "second", (5,), run_id="r2")
    with pytest.raises(KgorchError) as caught:
        here.start()
    assert caught.value.code == 2 and "--run" in caught.value.next_step
    assert [line.split(",")[0] for line in sorted(caught.value.facts)] == [
        "r1: step 20 of train",
        "r2: step 5 of train",
    ]
    assert str(source) in "".join(caught.value.facts) and "2026-11-20 12:00 UTC" in caught.value.facts[0]
    with pytest.raises(NotFound, match="there is no run r3"):
        here.start(run_id="r3")
    assert here.look() is None
    assert here.start(run_id="r2")[0].run.id == "r2"
    assert here.start()[0].run.id == "r2", "the choice is remembered"
    switched, _ = here.start(run_id="r1")
    assert (switched.run.id, switched.run.number) == ("r1", 2)
    assert here.start()[0].run.id == "r1"


def test_our_own_run_is_a_rival_of_a_sources_until_a_person_chooses(here, source):
    first, _ = here.start()
    state(source)
    with pytest.raises(KgorchError, match="2 runs of this name"):
        here.start()
    assert here.start(run_id=first.run.id)[0].run.id == first.run.id
    assert here.start()[0].run.id == first.run.id


def test_what_a_fresh_run_has_replaced_is_no_rival(here, source):
    state(source)
    state(source, (5,), run_id="r2", number=2)
    assert here.start()[0].run.id == "r2"
    opened, _ = here.start(fresh=True)
    assert opened.run.number == 3
    assert here.start()[0].run.id == opened.run.id


def test_a_fresh_start_ignores_the_sources(here, source):
    state(source)
    opened, told = here.start(fresh=True)
    assert opened.run.id != "r1" and not told.notes and not told.copied


@pytest.mark.parametrize("what", ["../../escaped", "rank0/../../x", "/etc/passwd", ".hidden", "manifest.json"])
def test_names_that_lead_out_of_the_checkpoint_copy_nothing(here, source, what, tmp_path):
    folder = checkpoint(source, 20)
    text = (folder / "manifest.json").read_text().replace("rank0.safetensors", what)
    (folder / "manifest.json").write_text(text)
    before = snapshot(tmp_path / "work")
    opened, told = here.start()
    assert opened.run.id != "r1" and "not a manifest" in told.notes[0]
    assert snapshot(tmp_path / "work") == before and not list(tmp_path.glob("escaped*"))


@pytest.mark.parametrize("what", ["stage", "run_id"])
def test_a_manifest_whose_stage_or_run_leads_elsewhere_copies_nothing(here, source, what, tmp_path):
    folder = checkpoint(source, 20)
    text = (folder / "manifest.json").read_text()
    text = text.replace('"train"', '"../../.."') if what == "stage" else text.replace('"r1"', '"../../../x"')
    (folder / "manifest.json").write_text(text)
    if what == "stage":
        with pytest.raises(CheckpointBroken):
            here.start()
    else:
        assert here.start()[0].run.id != "../../../x"
    assert not [path for path in tmp_path.rglob("step-*") if source not in path.parents]


@pytest.mark.parametrize("kind", ["shard", "manifest", "pipe", "folder", "outputs"])
def test_no_link_and_no_pipe_is_followed(here, source, kind, tmp_path):
    state(source, (10,))
    folder = checkpoint(source / "runs/ink/1/checkpoints", 20)
    secret = tmp_path / "secret"
    if kind in ("shard", "manifest"):
        path = folder / ("rank0.safetensors" if kind == "shard" else "manifest.json")
        path.rename(secret)
        path.symlink_to(secret)
    elif kind == "pipe":
        (folder / "manifest.json").unlink()
        os.mkfifo(folder / "manifest.json")
    elif kind == "folder":
        folder.rename(secret)
        folder.symlink_to(secret)
    else:
        shutil.rmtree(folder)
        shutil.rmtree(outputs := source / "runs/ink/1/outputs")
        secret.mkdir()
        (secret / "key").touch()
        outputs.symlink_to(secret)
    opened, _ = here.start()
    assert opened.row.first_step == 10
    assert not [path for path in here.home.rglob("*") if path.is_symlink() or path.name == "key"]


def test_a_copy_killed_half_way_leaves_nothing_that_counts_and_the_next_start_succeeds(here, source):
    state(source)
    program = f"""
import os, signal
from pathlib import Path
from kgorch.db.engine import open_database
from kgorch.platforms.profile import Profile
from kgorch.admission import session_start
from kgorch.admission.requests import LocalState, StartRequest
class Killer:
    note = checkpoint_copied = lambda *_: None
    def copy_progress(self, done, total): os.kill(os.getpid(), signal.SIGKILL)
home = Path({str(here.home)!r})
where = Path({str(here.work)!r}, "plan.toml")
session_start.start(LocalState(open_database(home), home, Profile("test")), StartRequest({PLAN!r}, where), watcher=Killer())
"""
    assert subprocess.run([sys.executable, "-c", program]).returncode == -9
    assert not [path for path in here.home.rglob("step-*") if FOLDER_PATTERN.fullmatch(path.name)]
    assert here.look() is None
    opened, _ = here.start()
    assert opened.row.first_step == 20
    assert [path.name for path in here.home.rglob("step-*")] == ["step-00000020"], "no leftovers"


def test_a_copy_that_was_made_and_not_written_down_is_used_as_it_is(here, source, monkeypatch):
    state(source)
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(import_run, "record_import", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        here.start()
    copied = here.home / "runs/ink/1/checkpoints/train/step-00000020"
    made = copied.stat().st_ino
    assert here.start()[0].row.first_step == 20 and copied.stat().st_ino == made


@pytest.fixture
def small_disk(tmp_path):
    place = tmp_path / "small"
    place.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(place)], capture_output=True).returncode:
        pytest.skip("no right to mount a small file system")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


def test_a_disk_that_is_too_small_is_said_before_anything_is_copied(here, source, small_disk):
    checkpoint(source, 1000, content=b"x" * 5000)
    place = Place(here.work, small_disk / "home")
    with pytest.raises(StateUnusable, match=r"no room(.|\n)*5000000 bytes are to be copied(.|\n)*make room"):
        place.start()
    assert not list(small_disk.rglob("step-*")) and place.look() is None


def test_sources_are_folders_and_globs_relative_to_the_plan(tmp_path, monkeypatch):
    for name in ("a/x", "a/y", "b"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "a" / "file").touch()
    monkeypatch.setenv("HOME", str(tmp_path / "b"))
    told = ["a/**", "a/*", "~", str(tmp_path / "a/x"), "nowhere"]
    folders, notes = folder_scan.source_folders(told, tmp_path)
    assert folders == [tmp_path / "a", tmp_path / "a/x", tmp_path / "a/y", tmp_path / "b"]
    assert notes == ["the source nowhere names no folder"]
    with pytest.raises(PlanError, match=r"\*\* at the end alone"):
        parse(PLAN.replace("../source/**", "/a/**/b"), "plan.toml")


def test_a_source_on_a_mount_that_has_died_names_no_folder_and_colab_says_to_mount_drive(tmp_path, monkeypatch):
    """The errors of a dead FUSE mount are played: a real one needs /dev/fuse."""
    (tmp_path / colab.DRIVE).mkdir(parents=True)

    def dead(call):
        def answer(path, *args, **words):
            if "MyDrive" in str(path):
                raise OSError(errno.ENOTCONN, "Transport endpoint is not connected", str(path))
            return call(path, *args, **words)

        return answer

    for name in ("stat", "scandir"):
        monkeypatch.setattr(os, name, dead(getattr(os, name)))
    assert folder_scan.source_folders([str(tmp_path / colab.DRIVE)], tmp_path)[0] == []
    assert "no checkpoint of the run is in Drive" in colab.next_session("ink", {}, tmp_path)


def test_an_empty_list_of_sources_searches_nothing_and_none_is_the_platforms(here, source, tmp_path):
    state(source)
    platform = Profile("test", sources=(str(tmp_path / "source" / "**"),))
    for text, found in [(PLAN.replace('"../source/**"', ""), False), (PLAN.partition("[resume]")[0], True)]:
        engine = open_database(here.home)
        opened = session_start.start(
            LocalState(engine, here.home, platform), StartRequest(text, here.work / "plan.toml")
        )
        opened.lock.release()
        assert (opened.run.id == "r1") == found
        engine.dispose()
        shutil.rmtree(here.home)


def test_resume_of_a_name_unknown_here_looks_in_the_platforms_sources(here, source, tmp_path):
    state(source, workdir=str(here.work))
    engine = open_database(here.home)
    platform = Profile("test", sources=(str(tmp_path / "source"),))
    with pytest.raises(NotFound, match="there is no run named 'nothing'"):
        session_start.resume(LocalState(engine, here.home, platform), ResumeRequest("nothing"))
    with pytest.raises(KgorchError, match=r"it would run t\.py(.|\n)*--accept-plan"):
        session_start.resume(LocalState(engine, here.home, platform), ResumeRequest("ink"))
    opened = session_start.resume(LocalState(engine, here.home, platform), ResumeRequest("ink", consent=TRUSTED))
    opened.lock.release()
    engine.dispose()
    assert (opened.run.id, opened.row.first_step, opened.run.workdir) == ("r1", 20, str(here.work))


def test_resume_takes_the_number_of_a_run_too_and_tells_of_a_newer_one(here):
    engine = open_database(here.home)
    state_of_it = LocalState(engine, here.home, Profile("test"))
    for number in (1, 2):
        runs.create(
            engine, id=f"r{number}", name="ink", number=number, folder=str(here.home / f"runs/ink/{number}"), workdir="/w",
            checkpoints="runs/c", plan=PLAN, overrides=[], plan_hash="h", stages=["train"],
        )  # fmt: skip
        runs.set_state(engine, f"r{number}", "finished")
        assert session_start.resume(state_of_it, ResumeRequest(f"ink/{number}")).run.number == number
    with pytest.raises(KgorchError, match="a newer run of this name continues instead: number 2"):
        session_start.resume(state_of_it, ResumeRequest("ink/1"))
    engine.dispose()


def test_resume_of_a_run_whose_code_is_not_here_says_what_to_type(here, source, tmp_path):
    state(source)
    engine = open_database(here.home)
    with pytest.raises(NotFound, match=r"/elsewhere, is not on this machine(.|\n)*kgorch start PLAN"):
        session_start.resume(
            LocalState(engine, here.home, Profile("test", sources=(str(tmp_path / "source"),))), ResumeRequest("ink")
        )
    engine.dispose()


def test_our_own_state_is_not_taken_for_a_source_that_encloses_it(here, tmp_path):
    text = PLAN.replace("../source", "..")
    first, _ = here.start(text)
    checkpoint(Path(first.run.checkpoints), 10, run_id=first.run.id)
    opened, told = here.start(text)
    assert opened.run.id == first.run.id and not told.copied


def scan_below(folder, **options):
    return folder_scan.scan_folders([folder], "ink", Budget(60, 1 << 30), **options)


def test_the_search_ends_at_its_bounds_and_says_so(tmp_path):
    deep = tmp_path.joinpath(*"abcdefgh")
    checkpoint(deep, 10)
    assert [item.manifest.step for item in scan_below(tmp_path).checkpoints] == [10]
    seen = scan_below(tmp_path, limits=ScanLimits(levels=5))
    assert not seen.checkpoints and "5 levels" in seen.notes[0]
    seen = scan_below(tmp_path, limits=ScanLimits(names=6))
    assert not seen.checkpoints and "6 names" in seen.notes[0]


def test_a_folder_with_very_many_files_does_not_hide_what_lies_beside_it(tmp_path, monkeypatch):
    monkeypatch.setattr(folder_scan, "SLICE", 10)
    (tmp_path / "a" / "images").mkdir(parents=True)
    for number in range(300):
        (tmp_path / "a" / "images" / f"{number}.png").touch()
    checkpoint(tmp_path / "b" / "c", 10)
    seen = scan_below(tmp_path, limits=ScanLimits(names=100))
    assert len(seen.checkpoints) == 1 and "100 names" in seen.notes[0]


def test_leftovers_other_runs_and_our_own_folders_are_not_found(tmp_path):
    checkpoint(tmp_path / "mine", 10)
    checkpoint(tmp_path / "other", 20, run="else")
    for name in (".broken", ".tmp-1.1", ".dropping"):
        left = checkpoint(tmp_path / "left" / name, 30)
        left.rename(left.with_name(left.name + name))
    inner = checkpoint(tmp_path / "inner", 40)
    checkpoint(inner / "nested", 50)
    seen = scan_below(tmp_path, skip=frozenset({tmp_path / "mine"}))
    assert [item.manifest.step for item in seen.checkpoints] == [40]


def test_what_may_not_be_read_is_passed_over_with_a_note(tmp_path, monkeypatch):
    checkpoint(tmp_path / "open", 10)
    (tmp_path / "closed").mkdir()
    scan = os.scandir

    def guarded(path):
        if Path(path).name == "closed":  # root may read all: the kernel would not refuse it
            raise PermissionError(13, "Permission denied", str(path))
        return scan(path)

    monkeypatch.setattr(folder_scan.os, "scandir", guarded)
    seen = scan_below(tmp_path)
    assert len(seen.checkpoints) == 1 and "closed was skipped: Permission denied" in seen.notes[0]


def test_values_that_were_computed_once_come_along_as_plain_bounded_files(here, source):
    theirs = state(source) / "cached"
    theirs.mkdir()
    (theirs / "headers.json").write_bytes(b"{}\n[1]")
    (theirs / "notes.txt").write_text("no value")
    (theirs / ".hidden.json").write_text("1")
    (theirs / "link.json").symlink_to("/etc/passwd")
    os.mkfifo(theirs / "pipe.json")
    (theirs / "huge.json").touch()
    os.truncate(theirs / "huge.json", 1 << 40)
    (theirs / "folder.json").mkdir()
    here.start()
    ours = here.home / "runs/ink/1/cached"
    assert [path.name for path in ours.iterdir()] == ["headers.json"]
    assert (ours / "headers.json").read_bytes() == b"{}\n[1]"


def test_outputs_are_plain_files_alone(here, source):
    folder = state(source)
    (folder / "outputs" / "deep").mkdir()
    (folder / "outputs" / "deep" / "map.npy").write_bytes(b"map")
    (folder / "outputs" / "link").symlink_to("/etc/passwd")
    os.mkfifo(folder / "outputs" / "pipe")
    here.start()
    copied = here.home / "runs/ink/1/outputs"
    assert {path.name for path in copied.rglob("*") if path.is_file()} == {"submission.csv", "map.npy"}


def test_an_output_is_not_written_through_a_link_that_a_training_has_made(here, source, tmp_path):
    folder = state(source)
    (folder / "outputs" / "deep").mkdir()
    (folder / "outputs" / "deep" / "map.npy").write_bytes(b"theirs")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "map.npy").write_bytes(b"ours")
    ours = here.home / "runs/ink/1/outputs"
    ours.mkdir(parents=True)
    (ours / "deep").symlink_to(tmp_path / "elsewhere")
    _, told = here.start()
    assert (tmp_path / "elsewhere" / "map.npy").read_bytes() == b"ours" and (ours / "submission.csv").exists()
    assert any("a link leads from" in note for note in told.notes)


def test_folders_of_outputs_may_be_nested_without_end(here, source):
    make_deep(state(source) / "outputs")
    here.start()
    assert (here.home / "runs/ink/1/outputs/submission.csv").exists()
    files.remove_tree(source)  # pytest cannot
    assert not source.exists()


def without_database(source, **columns):
    """What is left of a run whose database was lost; its folder."""
    folder = state(source, **columns)
    for path in source.glob("kgorch.db*"):
        path.unlink()
    (folder / "cached").mkdir()
    (folder / "cached" / "headers.json").write_text("[1]")
    return folder


def brought(here):
    """Names of the outputs and cached values that are here."""
    return {path.name for part in ("outputs", "cached") for path in here.home.glob(f"runs/ink/*/{part}/**/*")}


def test_without_a_database_outputs_and_cached_values_come_along_all_the_same(here, source):
    folder = without_database(source)
    (folder / "outputs" / "link").symlink_to("/etc/passwd")
    os.mkfifo(folder / "outputs" / "pipe")
    here.start()
    assert brought(here) == {"submission.csv", "headers.json"}


@pytest.mark.parametrize("owner", ["r1", "r2"])
def test_without_our_database_outputs_come_along_where_the_plan_has_put_the_checkpoints_elsewhere(here, owner):
    checkpoint(here.work / "saves" / "ink-r1", 20)
    lost = here.home / "runs/ink/1"
    for name, content in {
        "outputs/submission.csv": "ink",
        "attempts/1.1/launch.json": json.dumps({"run_id": owner}),
    }.items():
        (lost / name).parent.mkdir(parents=True)
        (lost / name).write_text(content)
    opened, _ = here.start(PLAN + '[checkpoint]\ndir = "saves"\n')
    assert (opened.run.id, opened.run.number, opened.row.first_step) == ("r1", 2, 20)
    assert (here.home / "runs/ink/2/outputs/submission.csv").is_file() == (owner == "r1")


@pytest.mark.parametrize("what", ["the folder of checkpoints alone", "another name", "no number", "a link"])
def test_without_a_database_nothing_comes_from_outside_of_a_source_or_from_what_is_no_runs_folder(here, source, what):
    folder, text = without_database(source), PLAN
    match what:
        case "the folder of checkpoints alone":
            text = PLAN.replace("../source/**", str(folder / "checkpoints"))
        case "another name":
            folder.parent.rename(folder.parents[1] / "other")
        case "no number":
            folder.rename(folder.with_name("newest"))
        case "a link":
            for part in ("outputs", "cached"):
                (folder / part).rename(secret := source / f"secret-{part}")
                (folder / part).symlink_to(secret)
    assert here.start(text)[0].row.first_step == 20
    assert brought(here) == set()
