"""Real supervisors, torchrun and gloo ranks: starting, saving, stopping, going on."""

from __future__ import annotations

import json
import os
import signal
import time
from datetime import datetime

import psutil
import pytest
from harness import QUOTA, processes_of, wait_until


def test_a_session_is_saved_on_request_stopped_and_gone_on_with(kgorch):
    plan = kgorch.plan(ranks=2, args={"epochs": 400, "sleep": 0.02})
    first = kgorch.background("start", str(plan))
    kgorch.wait_for_step(5)

    second = kgorch("start", str(plan))
    assert "is live" in second.stdout and "nothing was started" in second.stdout
    assert len(processes_of(kgorch.home, "kgorch.launch.shim")) == 1

    saved = kgorch("save", "test")
    assert "saved and verified" in saved.stdout
    at_save = kgorch.status()
    assert at_save["checkpoint"]["verified"] is True and at_save["checkpoint"]["step"] > 0

    stopped = kgorch("stop", "test")
    assert "suspended" in stopped.stdout
    assert first.wait(timeout=60) == 10
    over = kgorch.status()
    assert over["phase"] == "suspended"
    assert over["checkpoint"]["step"] == over["step"] > at_save["checkpoint"]["step"], (
        "saved at the step at which it stopped"
    )
    assert over["next"] == {
        "what": "resume",
        "at": None,
        "command": "kgorch resume test",
        "daemon_alive": False,
    }
    wait_until(lambda: not processes_of(kgorch.home), within_s=20, what="nothing is left")

    again = kgorch.background("resume")
    gone_on = kgorch.wait_for_step(over["step"] + 3)
    assert gone_on["session"]["number"] == 2
    assert [entry["stages"][0]["first_step"] for entry in kgorch.history()] == [0, over["step"]]
    again.send_signal(signal.SIGTERM)
    assert again.wait(timeout=90) == 10
    assert kgorch.status()["why"] == "SIGTERM"


def test_the_wall_is_met_with_a_verified_save_and_the_next_start_goes_on(kgorch):
    plan = kgorch.plan(args={"epochs": 10_000, "sleep": 0.05}, wall="40s")
    done = kgorch("start", str(plan), "--json", code=10)
    view = json.loads(done.stdout)
    assert view["session"]["ended_at"] < view["session"]["wall_at"]
    assert view["phase"] == "suspended" and view["reason"] == "time_limit"
    assert view["checkpoint"]["verified"] and view["checkpoint"]["step"] == view["step"] > 0
    assert view["next"]["what"] == "resume" and view["next"]["at"]
    wait_until(lambda: not processes_of(kgorch.home), within_s=20, what="nothing is left")


def test_a_snapshot_that_is_asked_for_at_each_step_keeps_no_last_save_waiting(kgorch):
    """With steps of some seconds a request for a snapshot was nearly always open, and the last save came steps too late."""
    plan = kgorch.plan(ranks=2, args={"epochs": 10_000, "sleep": 0.9}, wall="24s", every="600s")
    plan.write_text(plan.read_text().replace("[checkpoint]", '[checkpoint]\nsnapshot = "1s"'))
    kgorch("start", str(plan), code=10)
    assert not kgorch.events("last_save_late")
    view = kgorch.status()
    assert view["phase"] == "suspended" and view["checkpoint"]["step"] == view["step"] > 0


@pytest.mark.soak  # the storm does it at any moment
def test_killing_the_supervisor_stops_no_training_and_its_successor_takes_it_over(kgorch):
    plan = kgorch.plan(args={"epochs": 60, "sleep": 0.08}, every="2s")
    supervisor = kgorch.background("start", str(plan))
    kgorch.wait_for_step(10)
    supervisor.kill()
    supervisor.wait()
    before, step = kgorch.pids(), kgorch.status()["step"]
    alone = kgorch("status").stdout
    assert "dead" in alone and "training continues without it" in alone
    time.sleep(2)
    assert kgorch.pids() == before, "the same processes train on"

    done = kgorch("start", str(plan))
    assert "adopted" in done.stderr
    assert [len(entry["attempts"]) for entry in kgorch.history()] == [1], "one session, one launch"
    assert kgorch.status()["state"] == "finished"
    assert kgorch.status()["step"] > step


def test_without_a_supervisor_the_ranks_save_before_the_wall_by_themselves(kgorch):
    plan = kgorch.plan(ranks=2, args={"epochs": 10_000, "sleep": 0.05}, wall="60s", every="600s")
    supervisor = kgorch.background("start", str(plan))
    kgorch.wait_for_step(5)
    wall_at = datetime.fromisoformat(kgorch.status()["session"]["wall_at"])
    supervisor.kill()
    shim = psutil.Process(kgorch.pids()["shim"])
    wait_until(lambda: not shim.is_running() or shim.status() == "zombie", within_s=90)
    saved = kgorch.checkpoints()[-1]
    assert (saved / "manifest.json").stat().st_mtime < wall_at.timestamp(), "saved in time"
    kgorch("start", str(plan), "--set", "session.wall=1h", "--set", "stage.train.args.epochs=1", code=None)
    first, second = kgorch.history()
    assert first["phase"] == "suspended" and first["checkpoint"]["step"] == int(saved.name.split("-")[1])
    assert second["stages"][0]["first_step"] == first["checkpoint"]["step"]


def test_a_detached_start_returns_once_the_session_is_open(kgorch):
    plan = kgorch.plan(args={"epochs": 10_000, "sleep": 0.05})
    done = kgorch("start", str(plan), "--detach")
    assert "supervising in the background" in done.stdout
    kgorch.wait_for_step(2)
    assert "is live" in kgorch("start", str(plan), "--detach").stdout
    kgorch("stop")


def test_of_two_starts_at_once_one_supervises_and_the_other_says_so(kgorch):
    plan = kgorch.plan(args={"epochs": 10_000, "sleep": 0.05})
    both = [kgorch.background("start", str(plan)) for _ in range(2)]
    kgorch.wait_for_step(1)
    ended = wait_until(lambda: [process for process in both if process.poll() is not None])
    assert len(ended) == 1 and ended[0].returncode == 0
    assert "is live" in ended[0].communicate()[0]
    assert len(kgorch.history()) == 1
    kgorch("stop")


def test_a_script_that_never_attaches_is_supervised_and_terminal_and_journal_say_so(kgorch):
    plan = kgorch.plan("never_attaches.py", args={"seconds": 0.5})
    said = kgorch("start", str(plan)).stderr
    assert said.count("warning: no rank had called kgorch.attach()") == 1, said
    assert kgorch.status()["state"] == "finished"
    [event] = kgorch.events("never_attached")
    assert "attach()" in event["facts"]["what"]
    assert "hello from a plain script" in kgorch("logs").stdout


def test_a_script_that_never_attaches_is_ended_before_the_wall(kgorch):
    plan = kgorch.plan("never_attaches.py", args={"seconds": 600}, wall="20s", margin="8s")
    kgorch("start", str(plan), code=10)
    session = kgorch.status()["session"]
    assert datetime.fromisoformat(session["ended_at"]) < datetime.fromisoformat(session["wall_at"])
    wait_until(lambda: not processes_of(kgorch.home), within_s=20, what="nothing is left")


def test_a_training_that_ignores_the_stop_is_cut_off_and_nothing_of_it_is_left(kgorch):
    supervisor = kgorch.background("start", str(kgorch.plan("ignores_stop.py", margin="3s", extra=QUOTA)))
    wait_until(lambda: kgorch.try_status().get("phase") == "training", what="the step")
    kgorch.move_wall(12)
    assert supervisor.wait(timeout=60) == 11
    assert kgorch.status()["phase"] == "cut_off"
    wait_until(lambda: not processes_of(kgorch.home), within_s=20, what="nothing is left")


def test_a_closed_terminal_does_not_end_the_session(kgorch):
    plan = kgorch.plan(args={"epochs": 10_000, "sleep": 0.05})
    supervisor = kgorch.background("start", str(plan))
    kgorch.wait_for_step(2)
    supervisor.send_signal(signal.SIGHUP)
    time.sleep(0.5)
    step = kgorch.status()["step"]
    kgorch.wait_for_step(step + 10)
    assert kgorch.status()["session"]["supervisor"]["alive"]
    kgorch("stop")


def test_a_sigterm_to_the_launcher_saves_and_suspends_also_with_loading_processes(kgorch):
    plan = kgorch.plan(ranks=2, args={"epochs": 10_000, "workers": 2, "sleep": 0.05})
    supervisor = kgorch.background("start", str(plan))
    kgorch.wait_for_step(5)
    os.kill(kgorch.pids()["torchrun"], signal.SIGTERM)
    assert supervisor.wait(timeout=90) == 10
    found = kgorch.status()
    assert found["phase"] == "suspended"
    assert found["checkpoint"]["step"] == found["step"] > 0


@pytest.mark.soak
def test_a_stage_that_ends_without_a_supervisor_is_followed_by_the_next_one(kgorch):
    plan = kgorch.plan(args={"epochs": 20, "sleep": 0.03})
    plan.write_text(plan.read_text() + '[[stage]]\nname = "after"\nentry = "never_attaches.py"\nranks = 1\n')
    supervisor = kgorch.background("start", str(plan))
    kgorch.wait_for_step(10)
    supervisor.kill()
    supervisor.wait()
    wait_until(lambda: not processes_of(kgorch.home), what="the training to end by itself")
    kgorch("resume")
    found = kgorch.status()
    assert found["state"] == "finished" and [stage["done"] for stage in found["stages"]] == [True, True]
    assert [stage["name"] for entry in kgorch.history() for stage in entry["stages"]] == ["train", "after"]


@pytest.mark.slow
def test_how_long_the_last_save_takes_is_reckoned_with_what_all_ranks_keep_by_now(kgorch):
    plan = str(kgorch.plan("grows.py", ranks=2))
    for step in (6, 10):
        supervisor = kgorch.background("start", plan)
        kgorch.wait_for_step(step, within_s=120)
        kgorch("stop")
        assert supervisor.wait(timeout=60) == 10
    told = [event["facts"]["state_bytes"] for event in sorted(kgorch.events("attached"), key=lambda event: event["at"])]
    assert told[0] < 10_000 and told[-1] >= 2 * 6 * 100_000  # six steps, two ranks


def test_state_that_the_script_does_not_track_is_told_while_it_trains_and_at_the_end(kgorch):
    plan = kgorch.plan("owns_loop.py", args={"style": "forgetting", "steps": 12})
    said = kgorch("start", str(plan)).stderr
    assert (
        said.count("warning: optimizer `second` (AdamW)") == 2 and said.count("give it to session.track(), or") == 2
    ), said


def test_an_override_that_is_kept_is_told_where_the_plan_file_says_something_else_now(kgorch):
    plan = kgorch.plan(args={"epochs": 3})
    kgorch("start", str(plan), "--set", "stage.train.args.epochs=1", "--set", "session.wall=1h")
    plan.write_text(plan.read_text().replace("epochs = 3", "epochs = 2"))
    said = kgorch("start", str(plan), "--extend", "--set", "session.wall=2h", code=2).stderr
    assert "kept from an earlier --set, whatever the plan file says now: stage.train.args.epochs=1\n" in said, said


AFTER_THE_LOOP = """
import time

import torch

from kgorch import attach

with attach(seed=0) as session:
    net = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    session.track(net=net, optimizer=optimizer)
    for epoch in session.epochs(400):
        for x in session.steps(session.loader(torch.ones(4, 2), 4)):
            loss = session.backward(x, lambda part: net(part).square().mean())
            optimizer.step()
            optimizer.zero_grad()
            time.sleep(0.1)
        print(epoch, loss.item())
"""


def test_a_loop_that_needs_a_step_in_a_resumed_epoch_is_told_why_it_has_none_and_goes_on_once_it_is_mended(kgorch):
    plan = kgorch.plan("after.py")
    (kgorch.folder / "after.py").write_text(
        AFTER_THE_LOOP
    )  # a step an epoch: every save comes after an epoch's last step
    supervisor = kgorch.background("start", str(plan))
    kgorch.wait_for_step(3)
    supervisor.send_signal(signal.SIGTERM)
    assert supervisor.wait(timeout=60) == 10
    saved = kgorch.status()["step"]
    said = kgorch("start", str(plan), code=20).stderr
    assert f"this session continues after the last step of epoch {saved}, so there was no step left" in said, said
    mended = AFTER_THE_LOOP.replace("    for epoch in", "    loss = torch.tensor(float('nan'))\n    for epoch in")
    (kgorch.folder / "after.py").write_text(mended.replace("400", str(saved + 2)))
    kgorch("start", str(plan))
    assert kgorch.status()["step"] == saved + 2


def test_an_error_in_the_first_batch_is_not_taken_for_an_epoch_without_steps_and_a_code_of_the_script_s_own_is_no_harm(
    kgorch,
):
    plan = kgorch.plan("after.py")
    broken = "class Broken:\n    __len__ = lambda self: 8\n    __getitem__ = lambda self, at: unknown\n"
    script = AFTER_THE_LOOP.replace("with attach", f"{broken}\nwith attach").replace("torch.ones(4, 2)", "Broken()")
    (kgorch.folder / "after.py").write_text(script)
    said = kgorch("start", str(plan), code=20).stderr
    assert "NameError: name 'unknown' is not defined" in said and "after the last step" not in said, said

    own = "class Odd(Exception): error_code = 7\n    raise Odd('as some clients have')\n"
    (kgorch.folder / "after.py").write_text(AFTER_THE_LOOP.replace("    net = torch", f"    {own}    net = torch", 1))
    said = kgorch("start", str(plan), "--fresh", code=20).stderr
    assert "as some clients have" in said and "[KG401]" in said, said
