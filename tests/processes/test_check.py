"""A quick test as a stage, and `kgorch check`: measured in children, foretold, held against what came."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

PROMISE = Path(__file__).parents[1] / "promises" / "check.json"
QUICK = '[[stage]]\nname = "quick"\nquick_test_of = "train"\n\n'


def shape(value):
    if isinstance(value, dict):
        return {key: shape(item) for key, item in sorted(value.items())}
    if isinstance(value, list):
        return [shape(value[-1])] if value else []
    return "null" if value is None else type(value).__name__


def checked(kgorch, *args: str, code: int = 0):
    return json.loads(kgorch("check", *args, "--json", code=code).stdout)


def line(found, name):
    return next(item for item in found["preflight"] if item["name"] == name)


def test_a_quick_test_does_one_step_and_the_stage_after_it_all(kgorch):
    path = kgorch.plan(ranks=1, args={"epochs": 2, "sleep": 0.0})
    path.write_text(path.read_text().replace("[[stage]]", QUICK + "[[stage]]", 1))
    kgorch("start", str(path))
    found = kgorch.status()
    assert found["state"] == "finished"
    quick, train = kgorch.history()[0]["stages"]
    assert (quick["name"], quick["last_step"]) == ("quick", 1)
    assert (train["name"], train["first_step"], train["last_step"]) == ("train", 0, 12)


def test_a_check_measures_foretells_leaves_nothing_and_is_held_against_the_run(kgorch):
    path = kgorch.plan(ranks=2, args={"epochs": 60, "sleep": 0.05}, wall="1h", every="600s")
    page = kgorch.folder / "report.html"
    began_s = time.monotonic()
    found = checked(kgorch, str(path), "--html", str(page))
    assert time.monotonic() - began_s < 180
    assert found["verdict"] == "fits", found["why"]
    assert shape(found) == json.loads(PROMISE.read_text()), (
        "a new field is written into tests/promises and docs/json.md"
    )

    stage = found["stages"][0]
    memory, time_ = stage["memory"], stage["time"]
    weights = (16 * 33 + 33 + 33 * 65 + 65 + 65 * 2 + 65 + 1) * 4  # what learns.py builds, BatchNorm's included
    assert memory["parts"]["gradients"] == weights
    assert memory["parts"]["optimizer"] == pytest.approx(2 * weights, rel=0.05), "AdamW keeps two figures of each"
    assert memory["share"] == 16 and memory["largest_microbatch"] == 16
    by_size = {trial["microbatch"]: trial for trial in memory["trials"] if not trial["checkpointing"]}
    assert 1 not in by_size, "BatchNorm has no statistics of one sample"
    assert by_size[2]["held"] < by_size[16]["held"] < memory["limit"]
    assert by_size[2]["step_s"] > 0.05
    assert (time_["epochs"], time_["batches"]) == (60, 6)
    assert 0.05 < time_["step_s"] < 5 and time_["epoch_s"] > 6 * 0.05
    assert found["forecast"]["sessions"] == 1 and found["forecast"]["training_s"] > 60 * time_["epoch_s"]
    assert "Foretold" in page.read_text() and "<html" in page.read_text()

    assert not list(kgorch.home.glob(".check-*")) and not list(kgorch.home.glob("runs/*"))
    assert not (kgorch.folder / "outputs").exists()

    kgorch("start", str(path))
    told = kgorch("history").stderr
    assert "checked: train: an epoch" in told and "a rank's process" in told


def test_what_does_not_fit_is_said_with_what_would_and_the_exit_code_tells(kgorch):
    path = kgorch.plan("hungry.py", ranks=1, args={"at": 0, "fits": 8, "rank": -1, "batch": 32, "epochs": 1})
    found = checked(kgorch, str(path))
    assert found["verdict"] == "fits with", found
    memory = found["stages"][0]["memory"]
    assert memory["settings"] == ["microbatch 8"] and memory["rungs"] == ["microbatch/2"]
    assert memory["largest_microbatch"] in range(8, 16)
    assert {trial["microbatch"] for trial in memory["trials"] if trial["ran_out"]} >= {16}

    small = checked(kgorch, str(path), "--device-memory", "512.05MiB", code=20)
    assert small["verdict"] == "does not fit" and "no rung" in small["why"]


def test_a_training_that_fails_in_its_first_steps_is_found_before_an_hour_is_spent(kgorch):
    found = checked(kgorch, str(kgorch.plan("crashes.py", ranks=1, args={"at": 0})), code=20)
    assert found["verdict"] == "does not run"
    assert "ValueError: the loss went wrong at step 0" in found["why"]
    assert not list(kgorch.home.glob(".check-*"))


def test_a_plan_that_needs_gpus_is_neither_passed_nor_begun_without_them(kgorch):
    path = kgorch.plan(ranks=1, extra="gpus = 2")
    found = checked(kgorch, str(path), code=20)
    assert line(found, "gpus")["verdict"] == "fail" and "needs 2" in line(found, "gpus")["said"]
    assert found["stages"] == [], "nothing was probed"
    refused = kgorch("start", str(path), code=2)
    assert "the plan needs 2 GPUs" in refused.stderr and "next:" in refused.stderr


def test_the_machine_alone_is_looked_at_in_a_moment_and_what_is_wrong_is_named(kgorch):
    (kgorch.folder / "file").write_text("no folder")
    path = kgorch.plan(ranks=1, wall="9h", extra="[checkpoint2]\n")
    assert "unknown key" in kgorch("check", str(path), code=2).stderr
    path = kgorch.plan(ranks=1, wall="9h", extra="[quota]\nhours = 30\n")
    path.write_text(path.read_text().replace("[checkpoint]", '[checkpoint]\ndir = "file/below"\nmirror = "nowhere"'))
    found = checked(kgorch, str(path), "--no-probe", code=20)
    verdicts = {item["name"]: item["verdict"] for item in found["preflight"]}
    assert verdicts["checkpoints"] == verdicts["mirror"] == "fail"
    assert verdicts["python"] == verdicts["torch"] == verdicts["entries"] == "pass"
    assert "30.0 of 30 h left" in line(found, "quota")["said"]
    assert "9:00:00" in line(found, "platform")["said"]


def test_a_checkpoint_that_a_start_would_go_on_from_is_read_back(kgorch):
    path = kgorch.plan(ranks=1, args={"epochs": 1000, "sleep": 0.05}, every="600s")
    kgorch("start", str(path), "--detach")
    kgorch.wait_for_step(2)
    kgorch("stop")
    step = kgorch.status()["checkpoint"]["step"]
    found = checked(kgorch, str(path), "--no-probe")
    assert f"train, step {step}, read back" in line(found, "checkpoint")["said"]
    shard = next(kgorch.checkpoints()[-1].glob("*.safetensors"))
    broken = bytearray(shard.read_bytes())
    broken[-1] ^= 1
    shard.write_bytes(broken)
    told = checked(kgorch, str(path), "--no-probe")
    assert any(item["name"] == "checkpoint" and item["verdict"] == "warn" for item in told["preflight"])
