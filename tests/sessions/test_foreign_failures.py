"""Foreign programs that misbehave: each ends with a message that says what to do, and none loses a complete checkpoint."""

from __future__ import annotations

import json
import shutil
import sys

import pytest
from foreign import contents_of, counts, newest, saved_steps, shell_plan, wait_for_checkpoint
from harness import processes_of, wait_until

from kgorch.checkpoint.foreign_contents import read_contents
from kgorch.errors import CheckpointBroken


def last_cause(kgorch) -> str:
    return kgorch.history()[-1]["why"]


def test_a_program_that_ignores_the_signal_is_killed_in_time_and_its_checkpoint_stands(kgorch):
    script = "trap '' TERM; mkdir -p state; echo '{}' > state/state.json; while :; do sleep 1; done"
    supervisor = kgorch.background("start", str(shell_plan(script).write(kgorch)))
    wait_for_checkpoint(kgorch)
    kgorch("stop")
    assert supervisor.wait(timeout=60) == 10
    [stop] = [event["facts"] for event in kgorch.events("foreign_stopped")]
    assert stop["killed"] == "yes" and 2.0 <= float(stop["took_s"]) < 60.0 and stop["by"] == "SIGTERM"
    assert "was killed" in last_cause(kgorch) and "after SIGTERM without a new checkpoint" in last_cause(kgorch)
    assert contents_of(newest(kgorch)) == {"state.json": b"{}\n"}
    wait_until(lambda: not processes_of(kgorch.home))


def test_the_time_that_a_stop_takes_is_learned(kgorch):
    plan = counts(4000, stop={"signal": "SIGTERM", "grace": "60s"}).write(kgorch)
    leads, saved = [], -1
    for _ in range(2):
        supervisor = kgorch.background("start", str(plan))
        wait_for_checkpoint(kgorch, saved)
        leads.append(json.loads((kgorch.attempt() / "launch.json").read_text())["foreign"]["lead_s"])
        kgorch("stop")
        assert supervisor.wait(timeout=60) == 10
        saved = max(saved_steps(kgorch))  # what the stop saved is of this session, too
    assert leads[0] == 61.0 and leads[1] < 60, leads


def test_what_was_saved_a_moment_before_the_stop_was_not_saved_by_it(kgorch):
    """It was told so of a program that the signal ends at once: "a wall loses nothing"."""
    plan = shell_plan("echo step 1; mkdir -p state; echo 1 > state/state.json; exec sleep 60").write(kgorch)
    supervisor = kgorch.background("start", str(plan))
    wait_for_checkpoint(kgorch)
    written = kgorch.folder / "state.tmp"
    written.write_text("2\n")
    written.replace(kgorch.folder / "state" / "state.json")
    supervisor.terminate()
    assert supervisor.wait(timeout=60) == 10
    [stop] = [event["facts"] for event in kgorch.events("foreign_stopped")]
    assert (stop["saved"], stop["had_checkpoint"]) == ("no", "yes")
    assert contents_of(newest(kgorch)) == {"state.json": b"2\n"}, "and it is taken all the same"


def test_a_save_in_answer_to_a_signal_to_all_processes_is_one(kgorch):
    """As from Slurm: the program has it at the same moment, and may have saved before it is asked once more."""
    script = (
        "trap 'trap : TERM; echo 2 > state.tmp; mv state.tmp state/state.json; sleep 1; exit 0' TERM\n"
        "echo step 1; mkdir -p state; echo 1 > state/state.json; while :; do sleep 0.01; done"
    )
    supervisor = kgorch.background("start", str(shell_plan(script).write(kgorch)))
    wait_for_checkpoint(kgorch)
    [agent] = processes_of(kgorch.home, "kgorch.worker.foreign.agent")
    shell = agent.children()[0]
    agent.terminate()
    shell.terminate()
    assert supervisor.wait(timeout=60) == 10
    [stop] = [event["facts"] for event in kgorch.events("foreign_stopped")]
    assert stop["saved"] == "yes" and contents_of(newest(kgorch)) == {"state.json": b"2\n"}


def test_a_stop_while_a_program_loads_does_not_shorten_the_next_one(kgorch):
    script = "echo step 1; while test -e loads; do sleep 0.1; done; mkdir -p state; echo 1 > state/state.json; sleep 60"
    plan = shell_plan(script, stop={"signal": "SIGTERM", "grace": "6s"}).write(kgorch)
    (kgorch.folder / "loads").touch()
    supervisor = kgorch.background("start", str(plan))
    wait_until(lambda: "step 1" in kgorch.logs(), within_s=60)
    kgorch("stop")
    assert supervisor.wait(timeout=60) == 10
    [stop] = [event["facts"] for event in kgorch.events("foreign_stopped")]
    assert (stop["saved"], stop["killed"], stop["had_checkpoint"]) == ("no", "no", "no")
    (kgorch.folder / "loads").unlink()
    kgorch.background("start", str(plan))
    wait_for_checkpoint(kgorch)
    assert json.loads((kgorch.attempt() / "launch.json").read_text())["foreign"]["lead_s"] == 7.0


def test_a_program_that_ends_with_status_0_and_has_saved_nothing_is_no_finished_training(kgorch):
    done = kgorch("start", str(shell_plan("echo no data found").write(kgorch)), code=20)
    told = done.stdout + done.stderr
    assert "ended with status 0 and left no complete checkpoint: expected one at state/state.json" in told
    assert "found there: nothing" in told and "no data found" in told


def test_a_program_that_goes_into_the_background_is_told_so(kgorch):
    script = f"{sys.executable} -c 'while True: pass' & mkdir -p state; echo 1 > state/state.json"
    done = kgorch("start", str(shell_plan(script).write(kgorch)), code=20)
    assert "while 1 processes that it had started went on to train" in done.stdout + done.stderr
    wait_until(lambda: not processes_of(kgorch.home))


def test_a_program_that_fails_again_and_again_ends_the_run_with_its_last_words(kgorch):
    script = "echo step 3; echo 'ValueError: bad learning rate' >&2; exit 3"
    done = kgorch("start", str(shell_plan(script).write(kgorch)), code=20)
    told = done.stdout + done.stderr
    assert "ended with status 3; its last words: 'ValueError: bad learning rate'" in told
    assert "3 consecutive attempts ended without progress" in told, "a step in the log is no progress"


def test_a_crash_goes_on_from_the_newest_complete_checkpoint(kgorch):
    count = "$(test -e once && echo 30 || echo 12)"
    script = f"{sys.executable} counts.py {count} state; test -e once || {{ touch once; exit 1; }}"
    kgorch("start", str(shell_plan(script).write(kgorch)))
    assert "goes on at 12" in kgorch.logs()
    assert saved_steps(kgorch)[-1] == 30


@pytest.mark.parametrize("goes_on", [False, True])
def test_a_program_that_begins_anew_at_its_fixed_file_is_told(kgorch, goes_on):
    """Its steps were counted on from those before, as if it had gone on."""
    resumes = "n=$(cat state/n); " if goes_on else ""
    script = f"n=0; {resumes}while :; do n=$((n+1)); echo step $n; mkdir -p state; echo $n > n; mv n state/n; sleep 0.2; done"
    plan = shell_plan(script, checkpoint="state/n", incomplete=["tmp"])
    step = -1
    for more in (9, 0):
        supervisor = kgorch.background("start", str(plan.write(kgorch)))
        wait_for_checkpoint(kgorch, step + more)
        supervisor.terminate()
        assert supervisor.wait(timeout=60) == 10
        step = max(saved_steps(kgorch))
    told = kgorch.status()["exactness"].get("training", "")
    assert bool(told) is not goes_on
    if not goes_on:
        assert "was handed state/n, of step " in told and "it seems to train anew; correct stage.foreign.again" in told


def test_a_shell_that_dies_of_the_signal_does_not_take_the_save_of_its_child_along(kgorch):
    saver = (
        "import os, signal, sys, time\n"
        "def save(*_):\n    time.sleep(0.5); open('state.tmp', 'w').write('saved')\n"
        "    os.makedirs('state', exist_ok=True); os.replace('state.tmp', 'state/state.json'); sys.exit(0)\n"
        "signal.signal(signal.SIGTERM, save)\n"
        "for step in range(10**6): print('step', step, flush=True); time.sleep(0.1)\n"
    )
    stop = {"signal": "SIGTERM", "grace": "10s"}
    plan = shell_plan(f"{sys.executable} saver.py; echo done", stop=stop).write(kgorch)
    (kgorch.folder / "saver.py").write_text(saver)
    kgorch("start", str(plan), "--set", "session.wall=40s", code=10)
    assert contents_of(newest(kgorch)) == {"state.json": b"saved"}
    assert kgorch.history()[-1]["phase"] == "suspended"


def test_a_program_is_stopped_by_a_file_that_is_gone_again_afterwards(kgorch):
    loop = "until test -e STOP; do step=$((step + 1)); echo step $step; sleep 0.1; done"
    script = f"mkdir -p state; step=0; {loop}; echo $step > state/state.json"
    kgorch(
        "start",
        str(shell_plan(script, stop={"file": "STOP", "grace": "10s"}).write(kgorch)),
        "--set",
        "session.wall=40s",
        code=10,
    )
    assert int(contents_of(newest(kgorch))["state.json"]) > 1
    assert not (kgorch.folder / "STOP").exists()


@pytest.mark.parametrize("entry", ["./gone.sh", "no-such-program-anywhere"])
def test_a_program_that_is_not_there_is_told_before_a_session_is_opened(kgorch, entry):
    plan = shell_plan("true")
    plan.stage["entry"] = entry
    done = kgorch("start", str(plan.write(kgorch)), code=2)
    assert f"there is no program {entry!r}" in done.stderr


def test_a_run_whose_checkpoints_are_gone_does_not_begin_anew_by_itself(kgorch):
    plan = counts(400).write(kgorch)
    supervisor = kgorch.background("start", str(plan))
    wait_for_checkpoint(kgorch)
    kgorch("stop")
    assert supervisor.wait(timeout=60) == 10
    for folder in kgorch.checkpoints():
        folder.rename(kgorch.folder / folder.name)
    done = kgorch("start", str(plan), code=None)
    assert done.returncode in (2, 20) and "no checkpoint of stage 'train' can be used" in done.stdout + done.stderr


def test_a_place_at_which_the_checkpoint_does_not_belong_is_refused_at_the_start(kgorch):
    plan = counts(4000).write(kgorch)
    supervisor = kgorch.background("start", str(plan))
    saved = wait_for_checkpoint(kgorch)
    kgorch("stop")
    assert supervisor.wait(timeout=60) == 10
    counts(4000, checkpoint="state/*.pt").write(kgorch)
    for consent in ([], ["--accept-changes"]):
        done = kgorch("start", str(plan), *consent, code=2)
        assert "stage.train.foreign.checkpoint of 'test' has changed" in done.stderr
        assert "its newest checkpoint is to lie at state/state.json, which 'state/*.pt' does not name" in done.stderr
    with pytest.raises(CheckpointBroken, match=r"cannot be used: path: expected a place like 'state/\*.pt', found"):
        read_contents(newest(kgorch), "state/*.pt")  # the first line alone is shown of a failed launch
    counts(4000, checkpoint="state/*.json").write(kgorch)
    kgorch.background("start", str(plan))
    wait_for_checkpoint(kgorch, saved)


def test_two_runs_in_one_place_are_told_apart(kgorch):
    first = counts(4000).write(kgorch)
    kgorch.background("start", str(first))
    wait_for_checkpoint(kgorch)
    other = kgorch.folder / "other.toml"
    other.write_text(first.read_text().replace('name = "test"', 'name = "other"'))
    done = kgorch("start", str(other), code=20)
    assert "the checkpoints at 'state/state.json'" in done.stdout + done.stderr
    assert "are written by run 'test' now" in done.stdout + done.stderr


FINDS_ITS_LATEST = """
n=0
if test -e out/latest; then
  n=$(cat out/latest); n=${n#00}
  test -d out/step-00$n || { echo there is no step-00$n; exit 3; }
  echo goes on at $n
fi
while test $n -lt 60; do
  n=$((n + 1)); mkdir -p out/step-00$n; printf 00$n > out/latest
  echo step $n; echo x > out/step-00$n/weights.bin
  while test -e writes; do echo y >> out/step-00$n/weights.bin; sleep 0.1; done
  if test -e waits; then sleep 3; fi
done
"""


def test_a_program_that_finds_its_checkpoint_by_a_file_goes_on_after_a_kill_and_on_another_machine(kgorch):
    """After a kill before the first copy the file named the folder that was moved aside, and the program could not start."""
    latest = {"file": "out/latest", "text": "00{number}"}
    plan = shell_plan(FINDS_ITS_LATEST, checkpoint="out/step-*", incomplete=[], settled="1s", latest=latest).write(
        kgorch
    )
    out, writes, waits = (kgorch.folder / name for name in ("out", "writes", "waits"))
    writes.touch()
    supervisor = kgorch.background("start", str(plan))
    wait_until(lambda: (out / "step-001" / "weights.bin").exists(), within_s=60)
    kgorch.kill_everything()
    supervisor.wait()
    wait_until(lambda: not processes_of(kgorch.home))
    writes.unlink()
    waits.touch()
    supervisor = kgorch.background("start", str(plan))
    wait_for_checkpoint(kgorch, 1)
    assert "out/latest holds '001', which is no checkpoint that is there" in str(kgorch.events("foreign_note"))
    kgorch("stop")
    assert supervisor.wait(timeout=60) == 10
    reached = max(saved_steps(kgorch))
    shutil.rmtree(out)  # as on another machine
    waits.unlink()
    kgorch("start", str(plan))
    assert f"goes on at {reached}" in kgorch.logs() and kgorch.status()["step"] == 60
