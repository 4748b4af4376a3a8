"""Experiment trackers, with their real libraries: one continuous run there over all sessions, and no step twice."""

from __future__ import annotations

import json
import os
import re
import struct
import sys
from collections import defaultdict
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from harness import Notes, wait_until
from sqlalchemy import update
from wandb_server import serving

from kgorch.core.metrics import metric_curve
from kgorch.core.metrics.metric_curve import Record, Value
from kgorch.db import curves, runs, samples, sessions
from kgorch.db.engine import open_database
from kgorch.db.tables import Run, SessionRow
from kgorch.plan import TrackSection, parse
from kgorch.services import trackers
from kgorch.trackers import state
from kgorch.trackers.feed import Cursor, Scalar, feed_of, unsent
from kgorch.trackers.mlflow_run import MAX_KEY, key_of
from kgorch.trackers.process import pause_s

PLAN = """
name = "ink"
[[stage]]
name = "train"
entry = "t.py"
args = { lr = 0.5, api_token = "s3cr3t-s3cr3t", hub = { name = "ours", token = "s3cr3t-s3cr3t" }, \
sources = ["https://me:s3cr3t@host/", "b"], places = [{ at = "s3://b", secret = "s3cr3t-s3cr3t" }] }
"""
SENT_ARGUMENTS = {
    "train.lr": "0.5", "train.hub.name": "ours", "train.sources": "['https://host/', 'b']", "train.places.0.at": "s3://b",
}  # fmt: skip
ODD = '<img src=x onerror="alert(1)">/../רע'


@pytest.fixture
def run(tmp_path, engine):
    """A run whose folder is where the state folder has it."""
    folder = tmp_path / "home" / "runs" / "ink" / "1"
    folder.mkdir(parents=True)
    return runs.create(
        engine, id="0123456789ab", name="ink", number=1, folder=str(folder), workdir=str(tmp_path),
        checkpoints=str(folder / "checkpoints"), plan=PLAN, overrides=[], plan_hash="h", stages=["train"],
    )  # fmt: skip


def add_session(engine, run, first_step: int, last_step: int, phase: str = "cut_off", *, dice: bool = True) -> None:
    """A session that trained these steps, five to a record, and reported a loss, an exact figure and one that is none."""
    session = sessions.open_session(engine, run.id, boot_id="b")
    folder = Path(run.folder, "attempts", f"{session.number}.1")
    attempt = sessions.open_attempt(
        engine, session.id, stage="train", ranks=1, first_step=first_step, folder_of=lambda _: str(folder)
    )
    began_s = session.started_at.timestamp()
    records = [
        Record(step, step - 5, 1, began_s + step, {"loss": Value(1 / step, 5), ODD: Value(float("nan"), 5)})
        for step in range(first_step + 5, last_step + 1, 5)
    ]
    if dice:
        records.append(Record(last_step, last_step, 1, began_s + last_step, {"dice": Value(last_step / 100, 1)}))
    curves.write(engine, attempt.id, [metric_curve.encode(record) for record in records])
    early = session.started_at - timedelta(minutes=10)
    samples.write(engine, session.id, [(early, {"gpu0.util": 50.0})])
    sessions.record_heartbeat(engine, session.id, attempt.id, epoch=1, step=last_step)
    sessions.close_attempt(engine, attempt.id, outcome="crashed", cause="", last_step=last_step, made_progress=True)
    sessions.record(
        engine, run.id, session.id, kind="attempt_crashed", phase=phase, facts={}, why="<b>wall</b>", stage="train"
    )


def cut_off_and_done_again(engine, run) -> None:
    """Its first session came to step 30 and was cut off; the second went on from step 20 and came to step 50."""
    add_session(engine, run, 0, 30)
    add_session(engine, run, 20, 50, phase="suspended")


EXPECTED = {"train/loss": [5, 10, 15, 20, 25, 30, 35, 40, 45, 50], "train/dice": [50], "train/kgorch_session": [0, 20]}
"""Tag → steps of the curve after both sessions: the figure of step 30 was undone with its step."""


# What is sent, without any library


def test_a_feed_has_each_step_once_and_marks_each_session(engine, run):
    cut_off_and_done_again(engine, run)
    feed = feed_of(engine, run, system=True)
    steps = defaultdict(list)
    for item in feed.scalars:
        steps[item.tag].append(item.step)
    assert {tag: steps[tag] for tag in EXPECTED} == EXPECTED
    first, second = feed.marks
    assert first.text == "session 1: cut_off (<b>wall</b>), steps of train 0 to 30; attempt 1 crashed at step 30"
    assert second.step == 20 and feed.phase == "suspended"
    assert not any(item.tag.startswith("system/") for item in feed_of(engine, run, system=False).scalars)


def test_telemetry_is_sent_by_minutes_once_they_are_final(engine, run):
    add_session(engine, run, 0, 30)
    [session] = sessions.of_run(engine, run.id)
    at = session.started_at.replace(second=0, microsecond=0)
    samples.write(
        engine, session.id, [(at + timedelta(seconds=40 * number), {"gpu0.util": 50.0}) for number in range(1, 7)]
    )
    samples.roll_up(engine, session.id)
    later = feed_of(engine, run, system=True, now=at + timedelta(minutes=4))
    found = [item for item in later.scalars if item.tag == "system/gpu0.util"]
    assert [item.at_s - at.timestamp() for item in found] == [0, 60, 120], "not the one that is rolled up anew"
    assert len({item.step for item in found}) == 3


def test_telemetry_by_hours_has_the_first_hour_of_each_older_session(engine, run):
    began = datetime(2026, 11, 25, 10, 20, 30, tzinfo=UTC)
    with engine.begin() as connection:
        connection.execute(update(Run).values(created_at=began))
    # two begin in one minute, the third lasts over an hour, and the five behind it are sent by minutes
    starts = [began + timedelta(seconds=s) for s in (0, 20, 300)] + [
        began + timedelta(hours=2, minutes=m) for m in range(5)
    ]
    for number, start in enumerate(starts):
        session = sessions.open_session(engine, run.id, boot_id="b")
        with engine.begin() as connection:
            connection.execute(update(SessionRow).where(SessionRow.id == session.id).values(started_at=start))
        at = [start + timedelta(seconds=10), *([start + timedelta(hours=1)] if number == 2 else [])]
        samples.write(engine, session.id, [(instant, {"gpu0.util": number}) for instant in at])
        samples.roll_up(engine, session.id)
    found = [
        item
        for item in feed_of(engine, runs.by_id(engine, run.id), system=True, now=began + timedelta(hours=4)).scalars
        if item.tag == "system/gpu0.util"
    ]
    assert [item.value for item in found] == [0, 1, 2, 2, 3, 4, 5, 6, 7]
    assert [item.step for item in found[:4]] == [0, 1, 5, 40], (
        "an hour that begins before its session counts from there"
    )
    assert [item.at_s for item in found[:2]] == [began.timestamp() - 30] * 2


def test_what_was_sent_is_not_sent_again_and_what_comes_late_at_the_same_step_is():
    cursor = Cursor()
    first = [Scalar("train/loss", 5, 0.0, 1.0), Scalar("train/loss", 10, 0.0, 0.5)]
    assert unsent(first, cursor) == first
    cursor.advance(first)
    done_again = [Scalar("train/loss", 10, 9.0, 0.5), Scalar("train/dice", 10, 9.0, 0.7)]
    assert unsent(done_again, cursor) == done_again[1:]
    imported = Cursor(stages={"train": 8})
    assert [item.step for item in unsent(first, imported)] == [10]
    imported.advance(first)
    assert imported.sent_steps() == {"train": 10}


def test_how_far_a_tracker_was_sent_is_read_again_and_anything_else_is_nothing(tmp_path):
    path = tmp_path / "wandb.json"
    stored = state.TrackerState("abc", Cursor({"train/loss": 5}, {"train": 4}))
    state.store(path, stored)
    assert state.load(path) == stored
    for text in ("", "[]", '{"reference": 1}', '{"reference": "a", "tags": {"a": "b"}, "stages": {}}', "[" * 100_000):
        path.write_text(text)
        assert state.load(path) is None


def test_a_name_that_mlflow_does_not_allow_becomes_one_that_stays_apart_from_others():
    assert key_of("train/loss") == "train/loss"
    odd = [f"train/{name}" for name in (ODD, "a//b", "a/", "é", "è", "x" * 300, "../../etc")]
    keys = [key_of(name) for name in odd]
    assert len(set(keys)) == len(odd)
    assert all(len(key) <= MAX_KEY and "//" not in key and "/../" not in key for key in keys)


# The plan


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('to = ["tensorbord"]', "track.to"),
        ('to = ["wandb", "wandb"]', "'wandb' is named twice"),
        ('project = "a/b"', "expected a name without / "),
        ('uri = "https://me:hunter2@host/"', "without a user and a password"),
    ],
)
def test_a_mistake_in_the_plan_is_told_without_a_secret(line, said):
    with pytest.raises(Exception, match="track") as caught:
        parse(f"{PLAN}[track]\n{line}\n", "plan.toml")
    assert said in str(caught.value) and "hunter2" not in str(caught.value)


def test_the_plan_on_the_page_is_one():
    page = (Path(__file__).parents[2] / "docs" / "trackers.md").read_text()
    [block] = re.findall(r"```toml\n(.*?)```", page, re.DOTALL)
    section = parse(PLAN + block, "trackers.md").track
    assert section.to == ["tensorboard", "wandb", "mlflow"] and section.project == "ink" and section.uri


def test_a_plan_without_trackers_keeps_its_hash_and_so_does_one_with_them():
    assert parse(PLAN, "plan.toml").hash == parse(f'{PLAN}[track]\nto = ["wandb"]\n', "plan.toml").hash


def test_what_a_tracker_needs_is_told_before_a_session_is_opened(monkeypatch):
    with pytest.raises(Exception, match="MLFLOW_TRACKING_URI"):
        trackers.check(TrackSection(to=["mlflow"]), {})
    trackers.check(TrackSection(to=["mlflow"]), {"MLFLOW_TRACKING_URI": "sqlite:///x.db"})
    monkeypatch.setattr(sys, "path", [])
    monkeypatch.setattr(sys, "path_importer_cache", {})
    for name in [name for name in sys.modules if name.partition(".")[0] == "wandb"]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(Exception, match="wandb is not installed"):
        trackers.check(TrackSection(to=["wandb"]), {})


# TensorBoard


def tensorboard_steps(folder: Path) -> dict[str, list[int]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(folder), size_guidance={"scalars": 0, "tensors": 0})
    found.Reload()
    return {tag: [item.step for item in found.Scalars(tag)] for tag in found.Tags()["scalars"]}


def test_tensorboard_shows_each_step_once_over_sessions_that_were_cut_off(engine, run):
    pytest.importorskip("tensorboard")
    section = TrackSection(to=["tensorboard"])
    add_session(engine, run, 0, 30)
    [sent] = trackers.send_now(run, section)
    assert sent.why is None and sent.sent == {"train": 30}
    folder = Path(sent.url)
    assert tensorboard_steps(folder)["train/loss"] == [5, 10, 15, 20, 25, 30]
    (folder / "somebody.else").touch()
    add_session(engine, run, 20, 50, phase="suspended")
    [sent] = trackers.send_now(run, section)
    steps = tensorboard_steps(folder)
    assert {tag: steps[tag] for tag in EXPECTED} == EXPECTED
    assert f"train/{ODD}" in steps
    assert len([*folder.iterdir()]) == 2, "one file of ours, and that of somebody else"


def test_a_living_tensorboard_sees_steps_that_an_attempt_undid_replaced(engine, run, tmp_path):
    pytest.importorskip("tensorboard")
    from kgorch.trackers.tensorboard_files import TensorBoardFiles
    from kgorch.trackers.tracker import TrackedRun, TrackerSettings

    tracker = TensorBoardFiles(TrackedRun(run, TrackerSettings(folder="tb"), {}, tmp_path))
    add_session(engine, run, 0, 30)
    tracker.send(feed_of(engine, run, system=False), [])
    [first] = Path(tracker.url).iterdir()
    tracker.send(feed_of(engine, run, system=False), [])
    assert [*Path(tracker.url).iterdir()] == [first], "nothing has changed, so nothing is written anew"
    assert tensorboard_steps(Path(tracker.url))["train/dice"] == [30]
    add_session(engine, run, 20, 50)
    tracker.send(feed_of(engine, run, system=False), [])
    tracker.close("")
    [second] = Path(tracker.url).iterdir()
    assert second != first and tensorboard_steps(Path(tracker.url))["train/dice"] == [50]
    assert Path(tracker.url) == tmp_path / "tb" / "ink-1"


# MLflow


@pytest.mark.slow  # MLflow creates its store by some forty migrations
def test_mlflow_has_one_run_with_each_step_once_and_what_is_not_secret_of_the_plan(engine, run, tmp_path):
    mlflow = pytest.importorskip("mlflow")
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    section = TrackSection(to=["mlflow"], uri=uri, project="experiments")
    add_session(engine, run, 0, 30)
    [sent] = trackers.send_now(run, section)
    assert sent.why is None, Path(run.folder, "trackers", "mlflow.log").read_text()
    (Path(run.folder) / "trackers" / "mlflow.json").unlink()  # as on another machine
    add_session(engine, run, 20, 50, phase="suspended")
    [sent] = trackers.send_now(run, section)
    assert sent.why is None and sent.sent == {"train": 50}
    client = mlflow.MlflowClient(tracking_uri=uri)
    [found] = client.search_runs([client.get_experiment_by_name("experiments").experiment_id])
    history = {
        key: [item.step for item in client.get_metric_history(found.info.run_id, key)] for key in found.data.metrics
    }
    assert history["train/loss"] == EXPECTED["train/loss"]
    assert history["train/dice"] == [30, 50], "what was sent stays: MLflow only appends"
    assert history[key_of(f"train/{ODD}")] == EXPECTED["train/loss"]
    assert found.data.tags["kgorch.session.1"].startswith("session 1: cut_off")
    assert found.data.params == SENT_ARGUMENTS and found.info.status == "SCHEDULED"


# Weights & Biases


def wandb_records(path: Path) -> Iterator[bytes]:
    """The records of a `.wandb` file: a header of seven bytes, then LevelDB's log format (blocks of 32 KiB, records in pieces)."""
    content, at, record = path.read_bytes(), 7, b""
    assert content.startswith(b":W&B")
    while at + 7 <= len(content):
        if (left := 32768 - at % 32768) < 7:  # the rest of a block that is too short for a header
            at += left
            continue
        length, kind = struct.unpack_from("<HB", content, at + 4)
        record += content[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # a whole record, or the last piece of one
            yield record
            record = b""


def wandb_rows(folder: Path, kind: str = "history") -> list[dict]:
    """The history in the files that W&B writes offline, or what changed of the `config`."""
    from wandb.proto import wandb_internal_pb2

    rows = []
    for path in sorted(folder.glob("wandb/offline-run-*/*.wandb")):
        for data in wandb_records(path):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(data)
            if record.WhichOneof("record_type") == kind:
                items = record.history.item if kind == "history" else record.config.update
                rows.append({item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items})
    return rows


def test_wandb_offline_has_each_step_once_over_two_sessions_of_one_run(engine, run, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    section = TrackSection(to=["wandb"], project="ink")
    add_session(engine, run, 0, 30)
    [sent] = trackers.send_now(run, section)
    assert sent.why is None, (sent, Path(run.folder, "trackers", "wandb.log").read_text())
    add_session(engine, run, 20, 50, phase="suspended")
    [sent] = trackers.send_now(run, section)
    assert sent.why is None and sent.sent == {"train": 50}
    folder = Path(run.folder, "trackers")
    rows = wandb_rows(folder)
    with_loss = [row for row in rows if "train/loss" in row]
    assert [row["train/kgorch_step"] for row in with_loss] == EXPECTED["train/loss"]
    assert all(row["_timestamp"] > 0 for row in with_loss)
    config = {key: str(value) for row in wandb_rows(folder, "config") for key, value in row.items()}
    assert {key: value for key, value in config.items() if key.startswith("train")} == SENT_ARGUMENTS
    assert not [path for path in folder.rglob("*") if path.is_file() and b"s3cr3t" in path.read_bytes()]
    assert len({path.name.rpartition("-")[2] for path in folder.glob("wandb/offline-run-*")}) == 1, "one id"


@pytest.fixture
def wandb_server(monkeypatch):
    pytest.importorskip("wandb")
    with serving() as server:
        for name, value in server.environ.items():
            monkeypatch.setenv(name, value)
        yield server


def send_to_wandb(run) -> None:
    [sent] = trackers.send_now(run, TrackSection(to=["wandb"], system=False))
    assert sent.why is None, (sent, Path(run.folder, "trackers", "wandb.log").read_text())


@pytest.mark.parametrize("is_another_machine", [False, True])
def test_wandb_is_sent_what_comes_late_at_a_step_it_has(engine, run, wandb_server, is_another_machine):
    add_session(engine, run, 0, 30, dice=False)
    send_to_wandb(run)
    # twice it goes on from step 30, which was validated only then; the first time it comes no further
    for number, last_step in ((2, 30), (3, 50)):
        if is_another_machine:
            Path(run.folder, "trackers", "wandb.json").unlink()
        add_session(engine, run, 30, last_step)
        send_to_wandb(run)
        sessions_there = [value for _, value in wandb_server.values("train/kgorch_session")]
        assert sessions_there == [*range(1, number + 1)]
    assert [step for step, _ in wandb_server.values("train/dice")] == [30, 50]
    for tag in ("train/loss", f"train/{ODD}"):
        assert [step for step, _ in wandb_server.values(tag)] == EXPECTED["train/loss"]


def test_wandb_is_sent_again_what_was_not_uploaded(engine, run, wandb_server):
    add_session(engine, run, 0, 30)
    send_to_wandb(run)
    # killed in the midst of the first upload, after two rows of six
    of_loss = [row for row in wandb_server.history if "train/loss" in row][:2]
    wandb_server.history = [row for row in wandb_server.history if row["train/kgorch_step"] <= 10]
    wandb_server.summary = {"train/kgorch_step": 10, "train/loss": of_loss[-1]["train/loss"], "train/kgorch_session": 1}
    send_to_wandb(run)
    before = (list(wandb_server.history), wandb_server.summary)
    add_session(engine, run, 20, 50)
    send_to_wandb(run)
    wandb_server.history, wandb_server.summary = before
    send_to_wandb(run)
    for tag, steps in (EXPECTED | {"train/dice": [30, 50]}).items():
        assert [step for step, _ in wandb_server.values(tag)] == steps


def test_wandb_is_sent_once_what_was_undone_and_done_again_by_a_later_session(engine, run, wandb_server):
    add_session(engine, run, 0, 30)
    send_to_wandb(run)
    add_session(engine, run, 20, 25, dice=False)
    send_to_wandb(run)
    add_session(engine, run, 20, 30)
    send_to_wandb(run)
    assert [step for step, _ in wandb_server.values("train/dice")] == [30]


# The supervisor's side


@pytest.mark.slow
def test_a_tracker_that_cannot_be_reached_delays_nothing_and_is_told_once(engine, run, monkeypatch):
    pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    monkeypatch.setenv("MLFLOW_TRACKING_TOKEN", "s3cr3t-s3cr3t")
    add_session(engine, run, 0, 30)
    notes = Notes()
    one = trackers.of(run, TrackSection(to=["mlflow"], uri="http://127.0.0.1:9"), notes)
    assert one and notes.empty(), "its process starts beside it"
    kind, facts = notes.get(timeout=240)  # low priority: on a busy machine its imports take minutes
    assert kind == "tracking_failed" and list(facts["failing"]) == ["mlflow"]
    assert "s3cr3t" not in json.dumps(facts)
    one.hurry()
    wait_until(lambda: not one.is_busy, within_s=240)
    one.stop()
    assert notes.empty(), "the same failure again is no news"


def test_a_process_that_is_killed_is_told_and_stop_ends_one_that_hangs(engine, run, tmp_path, monkeypatch):
    add_session(engine, run, 0, 30)
    # A tracker's process that hangs, whatever its library does: it is none of Python's.
    program = tmp_path / "hangs"
    program.write_text("#!/bin/sh\nexec sleep 1000\n")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    notes = Notes()
    one = trackers.of(run, TrackSection(to=["tensorboard"]), notes)
    assert one
    [member] = one._members
    process = wait_until(lambda: member._process)
    process.kill()
    kind, facts = notes.get(timeout=60)
    assert kind == "tracking_failed" and "status -9" in facts["failing"]["tensorboard"]
    one.stop()
    assert not one.is_busy and process.poll() is not None


@pytest.mark.timeout(600)
def test_a_library_that_is_slow_to_import_does_not_delay_what_comes_later(engine, run, tmp_path, monkeypatch):
    real = Path(pytest.importorskip("tensorboard").__file__).parent
    (tmp_path / "slow" / "tensorboard").mkdir(parents=True)
    slow = f"import time\ntime.sleep(2)\n__path__ = [{str(real)!r}]\n"
    (tmp_path / "slow" / "tensorboard" / "__init__.py").write_text(slow)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path / 'slow'}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    add_session(engine, run, 0, 30)
    notes = Notes()
    one = trackers.of(run, TrackSection(to=["tensorboard"]), notes)
    kind, facts = notes.get(timeout=240)
    assert one and kind == "tracked"
    add_session(engine, run, 30, 50)
    folder = Path(facts["urls"]["tensorboard"])
    wait_until(lambda: 50 in tensorboard_steps(folder).get("train/loss", ()), within_s=240)
    one.stop()


def test_reading_takes_a_small_share_of_a_core_and_the_pause_has_a_bound():
    assert [pause_s(reading_s) for reading_s in (0.0, 0.1, 1000.0)] == [5.0, 20.0, 60.0]


def test_two_processes_do_not_feed_one_tracker(engine, run):
    from kgorch.system.file_lock import FileLock

    add_session(engine, run, 0, 30)
    folder = Path(run.folder, "trackers")
    folder.mkdir()
    lock = FileLock(folder / "tensorboard.lock")
    assert lock.acquire()
    [sent] = trackers.send_now(run, TrackSection(to=["tensorboard"]))
    assert sent.why == "another process of kgorch sends this run's metrics"
    lock.release()
    [sent] = trackers.send_now(run, TrackSection(to=["tensorboard"]))
    assert sent.why is None


# Whole sessions


@pytest.mark.slow
def test_a_training_that_is_stopped_killed_and_resumed_is_one_curve_in_tensorboard(kgorch):
    pytest.importorskip("tensorboard")
    plan = kgorch.plan(
        args={"epochs": 20, "sleep": 0.6}, extra='[track]\nto = ["tensorboard"]\nfolder = "tb"\nsystem = false'
    )
    total = 20 * 6
    kgorch.stop_and_kill(plan, total, hurry=("--set", "stage.train.args.sleep=0.0"), within_s=120)
    assert not any(event["facts"]["failing"] for event in kgorch.events("tracked"))
    # a session's end waits half a minute for its trackers: on a busy machine something may be left
    [sent] = json.loads(kgorch("track", "test", "--json").stdout)
    steps = tensorboard_steps(kgorch.folder / "tb" / "test-1")
    expected = defaultdict(list)
    for point in kgorch.look("metrics")["points"]:
        for name in point["values"]:
            expected[f"train/{name}"].append(point["step"])
    assert expected and {tag: steps[tag] for tag in expected} == expected
    assert all(found == sorted(set(found)) for found in steps.values()), "no step twice"
    assert sent["sent"]["train"] == expected["train/loss"][-1] and sent["why"] is None
    assert not [line for line in kgorch.status()["notices"] if "tensorboard" in line]


@pytest.mark.slow
def test_a_run_whose_plan_names_no_tracker_is_sent_on_request(kgorch):
    pytest.importorskip("tensorboard")
    kgorch("start", str(kgorch.plan(args={"epochs": 1})))
    assert "names no trackers" in kgorch("track", code=2).stderr
    database = open_database(kgorch.home)
    [info] = runs.all_runs(database)
    session = sessions.newest_of_runs(database, [info.id])[info.id]
    failing = {"failing": {"tensorboard": "full", "wandb": "no network"}, "sent": {}, "urls": {}}
    sessions.add_event(database, info.id, "tracking_failed", failing, session.id)
    assert [line.partition(" ")[0] for line in kgorch.status()["notices"]] == ["tensorboard", "wandb"]
    [sent] = json.loads(kgorch("track", "--to", "tensorboard", "--json").stdout)
    assert sent["why"] is None and sent["sent"]["train"] > 0
    assert tensorboard_steps(Path(sent["url"]))["train/loss"]
    assert set(sent) == set(json.loads((Path(__file__).parents[1] / "promises" / "track.json").read_text())[0])
    [notice] = kgorch.status()["notices"]
    assert notice.startswith("wandb is not sent the metrics: no network"), "what was sent is not told any more"
