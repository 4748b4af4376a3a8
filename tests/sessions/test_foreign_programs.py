"""Programs that know nothing of kgorch: cut by a wall, killed, cut again, and finished with the weights of an uncut run."""

from __future__ import annotations

import json
import shutil
import signal
import sys
import time
from pathlib import Path

import pytest
import torch
from foreign import ForeignPlan, alone, contents_of, counts, newest, saved_steps, shell_plan, wait_for_checkpoint
from harness import Kgorch, processes_of, wait_until
from safetensors.torch import load

HURRY = ("--set", "stage.train.args.pause=0.0")

NO_WALL = ("--set", "session.wall=1h")
"""In its place: what `--set` changed stays with the run."""

COUNT = 1200

TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone")


def cut_three_times(kgorch: Kgorch, plan: Path, *hurry: str, pauses_s: float, grace: str = "") -> list[int]:
    """A SIGKILL of everything, two walls, and the end. Returns the steps of its checkpoints.

    The walls are three times what this machine needs to a first checkpoint, so each session gets on, but together shorter than
    the program's pauses, so none ends before its wall.

    Args:
        hurry: words for the last start, which need not pause. pauses_s: of the whole program.
        grace: the plan's key for it, where the program has to end by itself however crowded the machine is.
    """
    began_s = time.monotonic()
    kgorch.background("start", str(plan), *NO_WALL)
    reached = wait_for_checkpoint(kgorch)
    wall_s = min(max(20, round(3 * (time.monotonic() - began_s))), round(0.45 * pauses_s))
    wall = ("--set", f"session.wall={wall_s}s", *(("--set", f"{grace}={wall_s // 3}s") if grace else ()))
    kgorch.kill_everything()
    wait_until(lambda: not processes_of(kgorch.home))
    for _ in range(2):
        kgorch("start", str(plan), *wall, code=10)
        assert max(saved_steps(kgorch)) > reached
        reached = max(saved_steps(kgorch))
    kgorch("start", str(plan), *NO_WALL, *hurry)
    assert kgorch.status()["state"] == "finished"
    return saved_steps(kgorch)


def test_a_program_without_pytorch_is_cut_three_times_and_finishes_as_if_it_was_not(kgorch, tmp_path):
    plan = counts(COUNT).write(kgorch)
    words = counts(COUNT, pause=0.0).stage["argv"]
    hurry = ("--set", f"stage.train.argv={json.dumps(words)}")
    steps = cut_three_times(kgorch, plan, *hurry, pauses_s=0.1 * COUNT)
    alone(tmp_path / "alone", sys.executable, "counts.py", str(COUNT), "state", env={"COUNTS_PAUSE": "0"})
    expected = (tmp_path / "alone" / "state" / "state.json").read_bytes()
    assert contents_of(newest(kgorch)) == {"state.json": expected}
    assert steps == sorted(steps) and steps[-1] == COUNT
    commands = [item["command"] for item in kgorch.look("report", "test")["commands"]]
    assert "kgorch checkpoints export test state.json" in commands
    out = kgorch.folder / "exported.json"
    kgorch("checkpoints", "export", "test", str(out))
    assert out.read_bytes() == expected
    status = kgorch.status()
    assert status["step"] == COUNT and status["metrics"]["loss"] == pytest.approx(1 / COUNT, abs=1e-6)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_ddp_program_with_flags_and_folders_is_cut_three_times_and_has_the_same_weights(kgorch, tmp_path):
    args = {
        "max_steps": 900,
        "save_steps": 10,
        "pause": 0.25,
        "layers": [16, 8],
        "no_decay": True,
        "learning_rate": 0.05,
    }
    section = {
        "checkpoint": "out/checkpoint-*",
        "incomplete": ["tmp-*"],
        "again": ["--resume_from_checkpoint", "{checkpoint}"],
        "stop": {"signal": "SIGTERM", "grace": "5s"},
        "step": {"log": r"step (\d+)/(\d+)"},
        "metrics": {"loss": {"log": r"loss ([\d.]+)"}},
    }
    plan = ForeignPlan({"entry": "flags.py", "ranks": 2, "args": args}, section).write(kgorch)
    steps = cut_three_times(kgorch, plan, *HURRY, pauses_s=900 * 0.25)
    assert steps[-1] == 900 and all(step % 10 == 0 for step in steps)
    words = [
        "--max_steps",
        "900",
        "--save_steps",
        "900",
        "--layers",
        "16",
        "8",
        "--no_decay",
        "--learning_rate",
        "0.05",
    ]
    alone(tmp_path / "alone", *TORCHRUN, "--nproc-per-node=2", "flags.py", *words)
    expected = load((tmp_path / "alone" / "out" / "checkpoint-900" / "model.safetensors").read_bytes())
    found = load(contents_of(newest(kgorch))["model.safetensors"])
    assert found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_program_with_a_config_file_that_overwrites_its_checkpoint_is_cut_three_times_and_has_the_same_weights(
    kgorch, tmp_path
):
    section = {
        "checkpoint": "out/ckpt.pt",
        "again": ["--init_from=resume"],
        "stop": {"signal": "SIGTERM", "grace": "5s"},
        "step": {"log": r"iter (\d+):"},
        "metrics": {"loss": {"log": r"loss ([\d.]+)"}},
    }
    stage = {
        "entry": "configurator.py",
        "argv": ["small.py", "--compile=False"],
        "args": {"max_iters": 900, "pause": 0.25},
        "flags": "--key=value",
        "ranks": 1,
    }
    plan = ForeignPlan(stage, section).write(kgorch)
    (kgorch.folder / "small.py").write_text("eval_interval = 10\nn_embd = 4\n")
    cut_three_times(kgorch, plan, *HURRY, pauses_s=900 * 0.25)
    (tmp_path / "small.py").write_text("n_embd = 4\neval_interval = 900\n")
    words = [str(tmp_path / "small.py"), "--compile=False", "--max_iters=900"]
    alone(tmp_path / "alone", *TORCHRUN, "--nproc-per-node=1", "configurator.py", *words)
    expected = torch.load(tmp_path / "alone" / "out" / "ckpt.pt", weights_only=True)
    (tmp_path / "found.pt").write_bytes(contents_of(newest(kgorch))["ckpt.pt"])
    found = torch.load(tmp_path / "found.pt", weights_only=True)
    assert found["iter_num"] == expected["iter_num"] == 900
    assert all(torch.equal(found["model"][name], expected["model"][name]) for name in expected["model"])


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_program_that_saves_on_sigterm_loses_no_step_at_a_wall(kgorch, tmp_path):
    section = {
        "checkpoint": "ckpts/epoch_*.pt",
        "incomplete": ["*.tmp"],
        "again": ["resume={checkpoint}"],
        "stop": {"signal": "SIGTERM", "grace": "5s"},
        "step": {"log": r"global_step=(\d+)"},
        "metrics": {"loss": {"log": r"loss=([\d.]+)"}},
    }
    args = {"epochs": 60, "hidden": [8, 4], "amp": False, "pause": 0.15}
    stage = {"entry": "overrides.py", "args": args, "flags": "key=value", "launcher": "none"}
    plan = ForeignPlan(stage, section).write(kgorch)
    cut_three_times(kgorch, plan, *HURRY, pauses_s=60 * 20 * 0.15, grace="stage.train.foreign.stop.grace")
    ends = [event["facts"] for event in kgorch.events("foreign_stopped")]
    assert len(ends) == 2 and all((facts["saved"], facts["killed"]) == ("yes", "no") for facts in ends)
    walls = [entry for entry in kgorch.history() if entry["phase"] == "suspended"]
    assert len(walls) == 2
    alone(tmp_path / "alone", sys.executable, "overrides.py", "epochs=60", "hidden=[8,4]")
    expected = torch.load(tmp_path / "alone" / "ckpts" / "epoch_60.pt", weights_only=True)
    (tmp_path / "found.pt").write_bytes(contents_of(newest(kgorch))["epoch_60.pt"])
    found = torch.load(tmp_path / "found.pt", weights_only=True)
    assert all(torch.equal(found["model"][name], expected["model"][name]) for name in expected["model"])


def test_the_best_checkpoint_is_the_one_that_was_evaluated_after_its_save(kgorch):
    save = "echo {0} > state/new.tmp && mv state/new.tmp state/checkpoint-{0}.json"
    script = (
        f"mkdir -p state; echo step 1000; {save.format(1000)}; until test -e evaluated; do sleep 0.1; done;"
        f" echo dice 0.91; echo step 1100; {save.format(1100)}; until test -e ended; do sleep 0.1; done"
    )
    metrics = {"dice": {"log": r"dice ([\d.]+)"}}
    plan = shell_plan(script, checkpoint="state/checkpoint-*.json", metrics=metrics)
    plan.extra = '[checkpoint]\nkeep = { last = 1, best = "dice:max" }'
    supervisor = kgorch.background("start", str(plan.write(kgorch)), *NO_WALL)
    wait_for_checkpoint(kgorch)
    (kgorch.folder / "evaluated").touch()
    wait_for_checkpoint(kgorch, above=1000)
    (kgorch.folder / "ended").touch()
    assert supervisor.wait(timeout=120) == 0
    rows = {(row["step"], row["final"]): row for row in kgorch.look("checkpoints", "list")}
    assert set(rows) == {(1000, False), (1100, True)}
    assert {step: bool(row["best"]) for (step, _), row in rows.items()} == {1000: True, 1100: False}
    out = kgorch.folder / "best.json"
    kgorch("checkpoints", "export", "test", str(out), "--best")
    assert out.read_text() == "1000\n"


LIKE_IMAGENET = """
import json, os, sys, time
for epoch, acc in enumerate(json.loads(sys.argv[1])):
    said = f"Epoch: [{epoch}][1/1] Loss 0.5"
    if sys.argv[2] == "before":
        print(said)
    time.sleep(1)
    while epoch and not os.path.exists(f"copied-{epoch}"):
        time.sleep(0.05)
    if sys.argv[2] == "before":
        print(f" * Acc@1 {acc}")
    with open("checkpoint.json", "w") as file:
        json.dump({"epoch": epoch, "acc": acc}, file)
    if sys.argv[2] == "after":
        time.sleep(2.5)
        print(f"{said} * Acc@1 {acc}")
"""
"""In the manner of PyTorch's examples/imagenet/main.py: epochs count from 0, each is evaluated and saved over the one before."""


@pytest.mark.parametrize("evaluates", ["before", "after"])
def test_the_best_checkpoint_is_the_one_with_that_value_where_each_is_saved_over_the_one_before(kgorch, evaluates):
    """The next epoch is printed at once after the save; or nothing is printed but the values, and they follow the save."""
    accs = [3.125, 15.625, 6.25, 9.375]
    (kgorch.folder / "main.py").write_text(LIKE_IMAGENET)
    stage = {"entry": "main.py", "argv": [json.dumps(accs), evaluates], "launcher": "none"}
    section = {
        "checkpoint": "checkpoint.json",
        "stop": {"signal": "SIGTERM", "grace": "2s"},
        "step": {"log": r"Epoch: \[(\d+)\]"},
        "metrics": {"acc": {"log": r"\* Acc@1 ([\d.]+)"}},
    }
    plan = ForeignPlan(stage, section, extra='[checkpoint]\nkeep = { last = 9, best = "acc:max" }')
    supervisor = kgorch.background("start", str(plan.write(kgorch)), *NO_WALL)
    step = -1
    for epoch in range(1, len(accs)):
        step = wait_for_checkpoint(kgorch, above=step)
        (kgorch.folder / f"copied-{epoch}").touch()
    assert supervisor.wait(timeout=120) == 0
    competing = {
        row["step"]: (row["metrics"]["acc"], json.loads(contents_of(Path(row["path"]))["checkpoint.json"])["acc"])
        for row in kgorch.look("checkpoints", "list")
        if row["measured"].get("acc") == row["step"]
    }
    assert list(competing.values()) == [(acc, acc) for acc in accs]
    out = kgorch.folder / "best.json"
    said = kgorch("checkpoints", "export", "test", str(out), "--best").stderr
    assert json.loads(out.read_text()) == {"epoch": 1, "acc": 15.625} and "acc 15.625" in said


def test_a_run_goes_on_elsewhere_from_the_newest_checkpoint_at_the_same_place(kgorch, tmp_path):
    plan = counts(1200).write(kgorch)
    kgorch("start", str(plan), "--set", "session.wall=30s", code=10)
    saved = json.loads(contents_of(newest(kgorch))["state.json"])["step"]
    there = Kgorch(tmp_path / "elsewhere", tmp_path / "other-home")
    there.folder.mkdir()
    shutil.copytree(kgorch.home, tmp_path / "source", ignore=shutil.ignore_patterns("*.sock"))
    plan = counts(1200, pause=0.01).write(there)
    plan.write_text(plan.read_text() + f'[resume]\nsources = ["{tmp_path}/source"]\n')
    there("start", str(plan), *NO_WALL)
    log = (there.attempt() / "rank0.log").read_text()
    assert f"goes on at {saved}\n" in log, log
    assert json.loads(contents_of(newest(there))["state.json"])["step"] == 1200


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_program_of_accelerate_has_its_ranks_and_save_state_is_handed_back(kgorch, tmp_path):
    pytest.importorskip("accelerate")
    section = {
        "checkpoint": "out/step_*",
        "again": ["--resume_from_checkpoint", "{checkpoint}"],
        "stop": {"signal": "SIGTERM", "grace": "3s"},
        "step": {"log": r"step (\d+)/(\d+)"},
        "metrics": {"loss": {"log": r"loss ([\d.]+)"}},
    }
    stage = {"entry": "accelerated.py", "launcher": "accelerate", "ranks": 2, "args": {"steps": 60}}
    kgorch.extra_env |= {"PAUSE_S": "0.5"}
    plan = ForeignPlan(stage, section).write(kgorch)
    supervisor = kgorch.background("start", str(plan))
    wait_for_checkpoint(kgorch)
    supervisor.send_signal(signal.SIGTERM)
    assert supervisor.wait(timeout=60) == 10
    kgorch.extra_env |= {"PAUSE_S": "0"}
    kgorch("start", str(plan))
    assert "with 2 processes" in kgorch.logs()
    assert saved_steps(kgorch)[-1] == 60
    words = ["--nproc-per-node=2", "accelerated.py", "--steps=60", "--checkpointing_steps=60"]
    alone(tmp_path / "alone", *TORCHRUN, *words, env={"ACCELERATE_USE_CPU": "true"})
    expected = load((tmp_path / "alone" / "out" / "step_60" / "model.safetensors").read_bytes())
    found = load(contents_of(newest(kgorch))["model.safetensors"])
    assert found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)
