"""`kgorch checkpoints verify --replay`: the same steps twice from one checkpoint, compared bit by bit."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import struct
from dataclasses import asdict
from pathlib import Path

import pytest
from driver import build
from harness import processes_of, wait_until

from kgorch.checkpoint.safetensors_header import Span
from kgorch.db import runs
from kgorch.db.engine import open_database
from kgorch.plan import parse
from kgorch.preflight import determinism_check

PROMISES = Path(__file__).parents[1] / "promises"


def _suspended(kgorch, plan) -> list[Path]:
    """A run that was stopped at a checkpoint, which is returned."""
    supervisor = kgorch.background("start", str(plan))
    kgorch.wait_for_step(2)
    kgorch("stop", code=None)
    assert supervisor.wait(60) == 10
    return kgorch.checkpoints()


def _nothing_is_left(kgorch) -> bool:
    return not list(kgorch.home.glob("runs/*/*/replay")) and not processes_of(kgorch.home)


@pytest.mark.soak
def test_an_exact_training_gives_equal_bits_and_the_run_stays_as_it_was(kgorch):
    plan = kgorch.plan(ranks=2, args={"epochs": 40, "sleep": 0.05, "workers": 1}, every="600s")
    before, status = _suspended(kgorch, plan), kgorch.status()
    found = json.loads(kgorch("checkpoints", "verify", "test", "--replay", "7", "--json").stdout)
    assert found["equal"] and found["to_step"] == found["from_step"] + 7 and found["ranks"] == 2
    assert found["tensors"] > 20 and found["bytes"] > 10_000 and found["from_step"] == status["step"]
    promised = json.loads((PROMISES / "replay.json").read_text())
    assert found.keys() == promised.keys()
    as_it_was = {"next": 0, "forecast": 0}  # both tell of now
    assert kgorch.checkpoints() == before and kgorch.status() | as_it_was == status | as_it_was
    assert _nothing_is_left(kgorch)


def test_a_training_with_chance_of_its_own_is_named_by_its_tensors_and_its_outputs_are_not_touched(kgorch):
    _suspended(kgorch, kgorch.plan("uses_urandom.py", ranks=1, every="600s"))
    [seen] = kgorch.home.glob("runs/*/*/outputs/seen")
    seen.write_text("before")
    done = kgorch("checkpoints", "verify", "test", "--replay", "3", code=20)
    assert "3 steps from step" in done.stderr and "2 of 4 tensors differ" in done.stderr
    assert "'noisy.weight' in rank0.safetensors: 2 elements, by at most 0." in done.stderr
    assert "'noisy.bias'" in done.stderr and "steady" not in done.stderr and "os.urandom" in done.stderr
    assert seen.read_text() == "before"
    [difference] = json.loads(kgorch("checkpoints", "verify", "--replay", "1", "--json", code=20).stdout)["differing"]
    assert difference["tensor"] == "noisy.weight" and difference["elements"] == 1 and 0 < difference["max_abs"] < 1
    [promised] = json.loads((PROMISES / "replay.json").read_text())["differing"]
    assert difference.keys() == promised.keys()
    assert _nothing_is_left(kgorch)


def test_a_replay_launches_the_stage_as_the_run_does_but_in_folders_of_its_own(kgorch, tmp_path):
    plan = kgorch.plan("uses_urandom.py", every="600s", extra='[health]\nnan = ["lr/2"]\ncollective_timeout = "20m"')
    plan.write_text(plan.read_text().replace("ranks = 1", 'ranks = 1\nlauncher = "torchrun-cli"'))
    *_, checkpoint = _suspended(kgorch, plan)
    engine = open_database(kgorch.home)
    run = runs.newest(engine, "test")
    Path(run.folder, "cached").mkdir(exist_ok=True)
    Path(run.folder, "cached", "mean.json").write_text("{}")
    parsed = parse(run.plan, "plan.toml")
    spec = determinism_check._launch_spec(engine, run, parsed, checkpoint, tmp_path / "first", os.environ)
    own = {"attempt", "folder", "socket", "keeper", "checkpoints", "output", "cached"}
    of_the_session = {"resume", "snapshot", "snapshot_s", "wall_s", "deadline_s"}
    as_the_run = json.loads((kgorch.attempt() / "launch.json").read_text())
    differing = {key: value for key, value in json.loads(json.dumps(asdict(spec))).items() if value != as_the_run[key]}
    assert differing.keys() <= own | of_the_session, differing
    assert all(Path(differing[key]).is_relative_to(tmp_path / "first") for key in own - {"attempt"})
    assert Path(spec.cached, "mean.json").read_text() == "{}"


def test_a_replay_is_refused_while_the_run_trains_and_one_that_is_interrupted_leaves_nothing(kgorch):
    supervisor = kgorch.background("start", str(kgorch.plan(args={"epochs": 400, "sleep": 0.1}, every="600s")))
    kgorch.wait_for_step(2)
    assert "test is being trained" in kgorch("checkpoints", "verify", "test", "--replay", "3", code=2).stderr
    kgorch("stop", code=None)
    assert supervisor.wait(60) == 10
    for given, code in ((signal.SIGINT, 130), (signal.SIGTERM, 143)):
        replaying = kgorch.background("checkpoints", "verify", "test", "--replay", "1000")
        wait_until(lambda: len(processes_of(kgorch.home)) > 3, what="it trains")
        replaying.send_signal(given)
        assert replaying.wait(60) == code
        assert _nothing_is_left(kgorch)


def test_a_replay_waits_for_no_gpu_of_another_run_and_holds_its_own(kgorch, tmp_path):
    _suspended(kgorch, kgorch.plan("uses_urandom.py", ranks=1, every="600s"))
    driver = build(tmp_path)
    driver.be(gpus=1, uuids=["GPU-1"])
    kgorch.extra_env |= driver.env
    (kgorch.home / "devices").mkdir(exist_ok=True)
    with open(kgorch.home / "devices" / "GPU-1.lock", "w+") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        said = kgorch("checkpoints", "verify", "test", "--replay", "3", code=2).stderr
        assert "GPU 0 is locked by" in said and "queue add" not in said
        fcntl.flock(lock, fcntl.LOCK_UN)
        replaying = kgorch.background("checkpoints", "verify", "test", "--replay", "1000")
        wait_until(lambda: len(processes_of(kgorch.home)) > 3, what="it trains")
        with pytest.raises(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        replaying.send_signal(signal.SIGTERM)
        assert replaying.wait(60) == 143 and _nothing_is_left(kgorch)
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_what_a_killed_replay_left_training_on_its_gpu_is_ended_by_the_next_one(kgorch, tmp_path):
    _suspended(kgorch, kgorch.plan(ranks=1, args={"epochs": 1000, "sleep": 0.05}, every="600s"))
    driver = build(tmp_path)
    driver.be(gpus=1, uuids=["GPU-1"])
    kgorch.extra_env |= driver.env
    killed = kgorch.background("checkpoints", "verify", "--replay", "1000")
    wait_until(lambda: list(kgorch.home.glob("runs/*/*/replay/first/attempt/shim.json")))
    killed.kill()
    killed.wait()
    assert processes_of(kgorch.home)
    kgorch("checkpoints", "verify", "--replay", "2")
    assert _nothing_is_left(kgorch)


def test_a_checkpoint_that_is_not_there_or_options_that_do_not_fit_are_a_mistake(kgorch):
    kgorch("start", str(kgorch.plan("crashes.py", ranks=1, args={"at": 99})))
    for words in (["--replay", "3", "--step", "999"], ["--replay", "3"], ["--step", "3"], ["--replay", "0"]):
        assert kgorch("checkpoints", "verify", *words, code=2).stderr


@pytest.mark.parametrize(
    ("dtype", "form", "values", "elements", "most"),
    [
        ("F32", "<2f", ((1.0, 2.0), (1.0, 2.5)), 1, 0.5),
        ("F32", "<2f", ((0.0, 2.0), (-0.0, 2.0)), 1, 0.0),
        ("F32", "<2f", ((float("nan"), 2.0), (1.0, 2.0)), 1, None),
        ("BF16", "<2H", ((0x3F80, 0x4000), (0x3F80, 0x4040)), 1, 1.0),
        ("U64", "<2Q", ((1, 2), (4, 3)), 2, 3.0),
        ("C64", "<4f", ((1.0, 1.0, 0.0, 0.0), (1.0, 1.0, 3.0, 4.0)), 1, 5.0),
        ("F8_E5M2", "<2B", ((1, 2), (1, 3)), None, None),
    ],
)
def test_how_far_two_tensors_lie_apart_is_told_for_every_type(tmp_path, dtype, form, values, elements, most):
    for name, content in zip(("a", "b"), values, strict=True):
        (tmp_path / name).write_bytes(struct.pack(form, *content))
    span = Span(dtype, (2,), 0, struct.calcsize(form))
    assert not determinism_check._same(tmp_path / "a", span, tmp_path / "b", span)
    assert determinism_check._same(tmp_path / "a", span, tmp_path / "a", span)
    assert determinism_check._apart(tmp_path / "a", span, tmp_path / "b", span) == (elements, most)
