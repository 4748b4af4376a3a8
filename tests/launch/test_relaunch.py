"""The relaunch ladder on real trainings: memory that no rung in process can help, refused by a real allocator or taken by the
kernel; the documents' ladders, each to its last rung."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from harness import Kgorch, wait_until

from kgorch.checkpoint.folder import readable_checkpoints
from kgorch.system import host_memory

LADDERS = {
    "surface_detection": (["microbatch=12"], {"batch": 16}, {"microbatch": 12}),
    "camouflage": (["microbatch=12", "microbatch/2"], {"batch": 16}, {"microbatch": 6}),
    "cloud_removal": (
        ["microbatch=2", "num_workers=2", {"set": {"crop": 96}}, "activation_checkpointing"],
        {"batch": 4, "workers": 3, "crop": 128},
        {"microbatch": 2, "workers": 2, "crop": 96, "kept": 0},
    ),
    "vqa": (
        ["microbatch=2", {"set": {"answer_length": 128}}, "pin_memory=false", {"set": {"beams": 3}}, "empty_cache/50"],
        {"batch": 3, "answer_length": 160, "beams": 5},
        {"microbatch": 2, "answer_length": 128, "beams": 3},
    ),
    "timeseries": (
        ["microbatch=128", {"set": {"hidden": 96}, "begins_anew": True}, "microbatch=64", "num_workers=1"],
        {"batch": 256, "hidden": 128, "workers": 2},
        {"microbatch": 64, "hidden": 96, "workers": 1},
    ),
}
"""What each system's document lists as its steps, in order: the ladder, the arguments that it begins with, what fits at last."""


def toml(value) -> str:
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{name} = {toml(item)}" for name, item in value.items()) + " }"
    return f"[{', '.join(toml(item) for item in value)}]" if isinstance(value, list) else json.dumps(value)


def outgrown(kgorch: Kgorch, ladder: list, args: dict, fits: dict, ranks: int = 1) -> str:
    """A plan around a training that asks for too much until it may be as small as `fits`."""
    told = {**args, "fits": json.dumps(fits)}
    return str(kgorch.plan("outgrows.py", ranks=ranks, args=told, extra=f"[memory]\nladder = {toml(ladder)}"))


def rungs(kgorch: Kgorch) -> list[str]:
    return [event["facts"]["rung"] for event in kgorch.events("rung_taken")]


@pytest.mark.soak  # test_workloads.py climbs down the demos' own
@pytest.mark.parametrize("system", LADDERS)
def test_a_seeds_ladder_is_climbed_down_to_its_last_rung_and_the_training_finishes(kgorch, system):
    ladder, args, fits = LADDERS[system]
    kgorch("start", outgrown(kgorch, ladder, args, fits))
    names = [
        item if isinstance(item, str) else " ".join(f"set {k}={v}" for k, v in item["set"].items()) for item in ladder
    ]
    no_help = ("pin_memory=false", "empty_cache/50")  # on the CPU
    again = ["microbatch=2"] if "activation_checkpointing" in names else []  # it is whole again, and too large
    assert rungs(kgorch) == [name for name in names if name not in no_help] + again
    status = kgorch.status()
    assert status["state"] == "finished" and [item["rung"] for item in status["memory"]["rungs"]] == rungs(kgorch)
    marked = {item["rung"] for item in status["memory"]["rungs"] if item["changes_result"]}
    assert marked == {name for name in names if name.startswith("set ")}
    [session] = kgorch.history()
    relaunched = [item["outcome"] for item in session["attempts"]]
    assert relaunched == ["out_of_memory"] * (len(relaunched) - 1) + ["finished"]


def test_a_rung_that_needs_a_relaunch_goes_on_where_the_snapshot_was_and_the_ranks_have_one_cause(kgorch):
    ladder = ["microbatch/2", {"set": {"crop": 96}}]
    plan = outgrown(kgorch, ladder, {"crop": 128, "sleep": 0.05, "from-step": 100, "epochs": 40}, {"crop": 96}, ranks=2)
    kgorch("start", plan)
    assert rungs(kgorch) == ["microbatch/2", "microbatch/2", "set crop=96"]
    [out] = kgorch.events("attempt_out_of_memory")
    assert "DefaultCPUAllocator" in out["facts"]["cause"] and out["facts"]["rung"] == "set crop=96"
    launched = kgorch.events("launched")[-1]["facts"]
    assert launched["from"] in ("memory", "disk") and launched["lost_steps"] < 100
    assert "set crop=96 (step" in kgorch("history").stdout and "changes the result" in kgorch("status").stdout


@pytest.mark.parametrize("first", [0, 3])
def test_a_loop_with_its_own_backward_takes_no_rung_that_cannot_help_it(kgorch, first):
    """Each smaller microbatch was an attempt that ran out of memory in the same step. Also where the plan has set one."""
    ladder = ["microbatch/2", {"set": {"crop": 96}}]
    args = {"crop": 128, "own": True, "batch": 8, "from-step": first}
    kgorch("start", outgrown(kgorch, ladder, args, {"crop": 96}), *(["--set", "memory.microbatch=4"] if first else []))
    assert rungs(kgorch) == ["set crop=96"] and len(kgorch.events("launched")) == 2


def test_a_ladder_that_is_exhausted_ends_the_run_and_the_cause_is_shown(kgorch):
    done = kgorch("start", outgrown(kgorch, [{"set": {"crop": 96}}], {"crop": 128}, {"crop": 64}), code=20)
    assert "ladder is exhausted" in done.stderr and "can't allocate memory" in done.stderr
    assert rungs(kgorch) == ["set crop=96"] and len(kgorch.events("launched")) == 2
    assert kgorch.status()["state"] == "failed"


@pytest.mark.slow
def test_a_rung_that_changes_the_weights_begins_the_stage_anew_and_nothing_is_deleted(kgorch):
    ladder = [{"set": {"hidden": 4}, "begins_anew": True}]
    args = {"hidden": 8, "sleep": 0.05, "from-step": 100, "epochs": 40}
    plan = outgrown(kgorch, ladder, args, {"hidden": 4})
    kgorch("start", plan, "--set", "checkpoint.every=1s")
    assert kgorch.status()["state"] == "finished" and kgorch.status()["step"] == 160
    before = list(kgorch.home.glob("runs/*/*/checkpoints/train~superseded/step-*/manifest.json"))
    assert before
    assert kgorch.events("launched")[-1]["facts"]["from"] == "the beginning"
    listed = json.loads(kgorch("checkpoints", "list", "--json", "--dropped").stdout)
    superseded = {item["path"] for item in listed if item["state"] == "superseded"}
    assert superseded == {str(path.parent) for path in before}


@pytest.mark.soak
def test_the_optimizers_first_step_that_finds_no_room_is_done_by_a_smaller_model(kgorch):
    extra = "[memory]\nladder = [{ set = { hidden = 64 }, begins_anew = true }]"
    kgorch("start", str(kgorch.plan("steps_too_far.py", ranks=1, args={"hidden": 4096}, extra=extra)))
    [out] = kgorch.events("attempt_out_of_memory")
    assert (
        "can't allocate memory" in out["facts"]["cause"]
        and "optimizer"
        in json.loads(next(kgorch.home.glob("runs/*/*/attempts/1.1/rank0.status.json")).read_text())["error"]["memory"]
    )
    assert rungs(kgorch) == ["set hidden=64"] and kgorch.status()["state"] == "finished"


def test_an_optimizer_that_finds_no_room_on_one_rank_has_that_very_step_done_by_the_rung(kgorch):
    """The others are a step ahead by then: a rung that began with theirs would never be in force."""
    plan = outgrown(kgorch, ["microbatch/2"], {"late": 1, "from-step": 3, "epochs": 3}, {"microbatch": 2}, ranks=2)
    kgorch("start", plan, "--set", "memory.microbatch=4")
    assert kgorch.status()["state"] == "finished" and rungs(kgorch) == ["microbatch/2"]
    [entry] = kgorch.history()
    assert [attempt["outcome"] for attempt in entry["attempts"]] == ["out_of_memory", "finished"]
    assert [rung["step"] for rung in entry["rungs"]] == [3]
    newest, *_ = readable_checkpoints(kgorch.home / "runs/test/1/checkpoints/train")
    assert [(item.step, item.rung) for item in newest[1].changes] == [(3, "microbatch/2")], "known without a database"


@pytest.fixture
def bounded(tmp_path):
    """A control group of 1300 MiB, and how a process enters it."""
    made = _control_group(1300 << 20)
    if made is None:
        pytest.skip("this machine lets nobody make a control group for memory")
    yield made
    for pid in (made / "cgroup.procs").read_text().split():
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(pid), signal.SIGKILL)
    wait_until(lambda: not (made / "cgroup.procs").read_text().split(), what="the group is empty")
    made.rmdir()


def _control_group(size: int) -> Path | None:
    for version, root, path in host_memory._groups():
        folder = root / path.lstrip("/") / f"kgorch-\udce9-{os.getpid()}"  # not UTF-8: a group may have any name
        try:
            folder.mkdir()
            (folder / ("memory.max" if version == 2 else "memory.limit_in_bytes")).write_text(str(size))
        except OSError:
            with contextlib.suppress(OSError):
                folder.rmdir()
            continue
        return folder
    return None


def test_a_control_group_of_any_name_bounds_what_is_free(bounded):
    code = f"import os; open({str(bounded / 'cgroup.procs')!r}, 'w').write(str(os.getpid()))\n"
    code += "from kgorch.launch import standby; from kgorch.system import host_memory\n"
    code += "print(host_memory.free_and_total()[1] >> 20, any('kgorch-' in line for line in standby.conditions({})))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.split() == ["1300", "True"], done.stderr


def test_what_the_kernel_kills_for_want_of_memory_takes_a_rung_of_the_hosts(kgorch, bounded):
    extra = "[memory]\nladder = [{ set = { crop = 96 } }]"
    args = {"crop": 128, "fits": '{"crop": 96}', "touch": True, "sleep": 0.05, "from-step": 80, "epochs": 40}
    plan = kgorch.plan("outgrows.py", ranks=1, args=args, extra=extra)
    inside = f"echo $$ > {bounded}/cgroup.procs && exec {sys.executable} -m kgorch.cli start {plan}"
    done = subprocess.run(
        ["sh", "-c", inside], cwd=kgorch.folder, env=kgorch.env(), capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr + kgorch.logs()
    [out] = kgorch.events("attempt_out_of_memory")
    assert (
        "the kernel's OOM killer has killed a process" in out["facts"]["cause"]
        and out["facts"]["rung"] == "set crop=96"
    )
    launched = kgorch.events("launched")[-1]["facts"]
    assert launched["from"] in ("memory", "disk") and launched["lost_steps"] < 80


def test_a_rank_that_a_person_kills_is_no_matter_of_memory(kgorch):
    plan = kgorch.plan(args={"epochs": 10_000, "sleep": 0.02}, ranks=1, extra='[memory]\nladder = ["num_workers/2"]')
    kgorch.background("start", str(plan))
    kgorch.wait_for_step(1)
    os.kill(kgorch.pids()["rank0"], signal.SIGKILL)
    wait_until(lambda: kgorch.events("attempt_crashed"))
    kgorch("stop")
    assert not kgorch.events("attempt_out_of_memory") and not rungs(kgorch)
