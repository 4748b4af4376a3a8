"""Ranks that do not move: their stacks are kept, and the run goes on."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from types import SimpleNamespace

import psutil
import pytest
from harness import wait_until
from sqlalchemy import create_engine

from kgorch.core.codes import Phase
from kgorch.launch import launcher, stack_dumps
from kgorch.launch.attempts import LaunchedAttempt
from kgorch.protocol.messages import RankProgress
from kgorch.supervisor.attempts.hang_monitor import HangMonitor

HEALTH = "[health]\nhang = {{ {} }}"


@pytest.mark.soak
def test_a_stopped_rank_is_found_and_named_and_the_run_finishes_with_the_same_bits(kgorch):
    plan = kgorch.plan("hangs.py", ranks=2, args={"epochs": 12}, extra=HEALTH.format('step = "4s"'))
    supervisor = kgorch.background("start", str(plan))
    kgorch.wait_for_step(20)
    os.kill(kgorch.pids()["rank1"], signal.SIGSTOP)
    folder = kgorch.attempt()
    assert supervisor.wait(timeout=90) == 0, supervisor.communicate()[0]
    [session] = kgorch.history()
    assert [attempt["outcome"] for attempt in session["attempts"]] == ["hung", "finished"]
    assert "in a step; rank 1: process is stopped" in session["attempts"][0]["cause"]
    [event] = kgorch.events("stacks")
    assert "hangs.py" in event["facts"]["rank0"] and "hangs.py" in event["facts"]["rank1"]
    for rank in (0, 1):
        assert "hangs.py" in (folder / f"rank{rank}.stacks").read_text()
    shown = kgorch("logs", "--stacks").stdout
    assert "rank 0, pid" in shown and "rank 1, pid" in shown and "stopped" in shown
    with_hang = kgorch.export()
    kgorch("start", str(plan), "--fresh")
    assert kgorch.export() == with_hang


def test_a_deadlock_in_one_ranks_loss_is_told_by_its_frame(kgorch):
    once = str(kgorch.folder / "happened")
    args = {"epochs": 2, "at": 6, "rank": 0, "once": once}
    plan = kgorch.plan("hangs.py", ranks=2, args=args, extra=HEALTH.format('step = "6s"'))
    kgorch("start", str(plan))
    [session] = kgorch.history()
    assert [attempt["outcome"] for attempt in session["attempts"]] == ["hung", "finished"]
    assert "rank 0: hangs.py:" in session["attempts"][0]["cause"] and "in loss_of" in session["attempts"][0]["cause"]
    assert {entry["kind"] for entry in kgorch.events()} >= {"ranks_hung", "stacks", "hang_diagnosed", "longest_waits"}


def test_a_long_validation_on_rank_0_alone_and_a_slow_save_are_no_hang(kgorch):
    args = {"epochs": 2, "evaluates": 9.0, "saves": 4.0}
    plan = kgorch.plan("hangs.py", ranks=2, args=args, extra=HEALTH.format('step = "5s"'))
    kgorch("start", str(plan))
    assert [attempt["outcome"] for attempt in kgorch.history()[0]["attempts"]] == ["finished"]
    longest = kgorch.events("longest_waits")[-1]["facts"]["longest_s"]
    assert longest["evaluation"] > 9.0 and longest["step"] > 8.0, "rank 1 waited in its step"
    assert longest["save"] > 4.0


@pytest.mark.soak
def test_a_validation_in_the_midst_of_a_step_is_none_either(kgorch):
    args = {
        "epochs": 1,
        "evaluates": 6.0,
        "in_step": True,
        "sleep": 0.4,
    }  # looked at once a second, it is seen to learn
    kgorch("start", str(kgorch.plan("hangs.py", ranks=1, args=args, extra=HEALTH.format('step = "4s"'))))
    assert [attempt["outcome"] for attempt in kgorch.history()[0]["attempts"]] == ["finished"]


@pytest.mark.soak
def test_a_script_that_never_attaches_is_given_up_after_its_start_has_hung_three_times(kgorch):
    plan = kgorch.plan("never_attaches.py", ranks=1, args={"sleep": 600}, extra=HEALTH.format('start = "12s"'))
    done = kgorch("start", str(plan), code=20)
    assert "in its start" in done.stderr and "never_attaches.py:7" in done.stderr
    assert [attempt["outcome"] for attempt in kgorch.history()[0]["attempts"]] == ["hung", "hung", "crashed"]


RANK = """
import faulthandler, signal, sys, threading
faulthandler.register(signal.SIGUSR2, file=open(sys.argv[1], "a"), all_threads=True, chain=False)
print("up", flush=True)
threading.Event().wait()
"""


def test_a_stopped_rank_that_nobody_can_read_is_woken_to_tell_where_it_stood(tmp_path, monkeypatch):
    (tmp_path / "rank_of_a_test.py").write_text(RANK)
    (tmp_path / "shim.json").write_text(json.dumps({"torchrun": os.getpid()}))
    command = [sys.executable, "-m", "rank_of_a_test", str(tmp_path / "rank0.stacks")]
    rank = subprocess.Popen(command, env={**os.environ, "RANK": "0"}, cwd=tmp_path, stdout=subprocess.PIPE, text=True)
    try:
        assert rank.stdout and rank.stdout.readline() == "up\n"
        rank.send_signal(signal.SIGSTOP)
        wait_until(lambda: psutil.Process(rank.pid).status() == psutil.STATUS_STOPPED)
        monkeypatch.setattr(
            stack_dumps, "_run_py_spy", lambda *_: ""
        )  # as where py-spy is not installed, or not allowed
        [told, gone] = stack_dumps.collect(tmp_path, range(2))
        assert told.state == "stopped" and re.search(r"rank_of_a_test.py:[45] in <module>", str(told))
        assert gone.state == "gone"
    finally:
        rank.kill()
        rank.communicate()


def test_a_rank_that_hangs_is_found_in_an_outage_of_the_database_too(monkeypatch):
    clock = SimpleNamespace(s=0.0, now_s=lambda: clock.s)
    plan = SimpleNamespace(health=SimpleNamespace(hang_s={}))
    state, away = SimpleNamespace(phase=Phase.TRAINING), create_engine("sqlite:////dev/null/kgorch.db")
    live = SimpleNamespace(engine=away, run=SimpleNamespace(id="r"), clock=clock, plan=plan, state=state)
    monkeypatch.setattr(launcher, "is_running", lambda folder: True)
    monitor = HangMonitor(live, lambda *_: None)
    attempt = LaunchedAttempt(
        SimpleNamespace(ranks=1, stage="train", folder="/f"), "1.1", 0, 0, more_stages=False, device=""
    )  # fmt: skip
    monitor.begin(attempt)
    monitor.on_progress(RankProgress("1.1", 0, "step", 0.1, 0.1, {"step": 500.0}))
    monitor.begin(attempt)  # the next launch: what this session has seen holds
    monitor.on_progress(RankProgress("1.1", 0, "step", 0.1, 0.1, {}))
    hung = []
    for clock.s in map(float, range(6000)):
        monitor.look(hung.append)
    assert hung and hung[0].for_s > 1800


PACKAGES = "/venv/lib/python3.11/site-packages"
STUCK = stack_dumps.Frame("/home/me/train.py", 40, "loss_of")
SCRIPT = (
    stack_dumps.Frame("/home/me/train.py", 12, "main"),
    stack_dumps.Frame("<frozen runpy>", 1, "_run_module_as_main"),
)
WAITS_ON_CUDA = {
    "an event": (stack_dumps.Frame(f"{PACKAGES}/torch/cuda/streams.py", 230, "synchronize"),),
    "the device": (stack_dumps.Frame(f"{PACKAGES}/torch/cuda/__init__.py", 1088, "synchronize"),),
    "the GradScaler": (stack_dumps.Frame(f"{PACKAGES}/torch/amp/grad_scaler.py", 350, "_maybe_opt_step"),),
    "a loss that arrives": (stack_dumps.Frame("/kgorch/worker/health/loss_guard.py", 261, "wait"),),
    "a figure": (stack_dumps.Frame("/kgorch/worker/telemetry/reported_metrics.py", 60, "collect"),),
    "a copy of it": (stack_dumps.Frame("/kgorch/worker/telemetry/host_copy.py", 33, "wait"),),
    "a snapshot": (stack_dumps.Frame("/kgorch/worker/checkpoint/snapshot_buffer.py", 112, "fill"),),
}


@pytest.mark.parametrize("frames", WAITS_ON_CUDA.values(), ids=WAITS_ON_CUDA)
def test_a_rank_that_waits_for_its_gpu_is_not_taken_for_the_culprit(frames):
    victim = stack_dumps.Stack(0, psutil.STATUS_SLEEPING, frames + SCRIPT)
    stuck = stack_dumps.Stack(1, psutil.STATUS_SLEEPING, (STUCK, *SCRIPT))
    assert stack_dumps.culprit([victim, stuck]) == stuck


def test_a_rank_that_torchrun_has_forked_does_not_wait_for_others_because_of_the_frames_below_its_own():
    entry = stack_dumps.Frame("/home/me/kgorch/worker/entry.py", 118, "call")
    below = (entry, stack_dumps.Frame(f"{PACKAGES}/torch/distributed/run.py", 955, "run"))
    waits = stack_dumps.Frame(f"{PACKAGES}/torch/autograd/graph.py", 979, "_engine_run_backward")
    victim = stack_dumps.Stack(0, psutil.STATUS_SLEEPING, (waits, *SCRIPT, *below))
    stuck = stack_dumps.Stack(1, psutil.STATUS_SLEEPING, (STUCK, *SCRIPT, *below))
    assert stack_dumps.culprit([victim, stuck]) == stuck


def test_a_rank_that_starts_cuda_waits_for_nobody():
    starting = (stack_dumps.Frame(f"{PACKAGES}/torch/cuda/__init__.py", 400, "_lazy_init"), *SCRIPT)
    assert not stack_dumps.Stack(0, psutil.STATUS_SLEEPING, starting).waits_for_others
