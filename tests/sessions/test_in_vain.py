"""Sessions that can come to nothing: too short, without room to save, with a program that fails in the same way each time."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
from harness import QUOTA, Kgorch, wait_until


def script(kgorch: Kgorch, text: str, **changes) -> Path:
    plan = kgorch.plan("mine.py", **changes)
    (kgorch.folder / "mine.py").write_text(text)
    return plan


def test_a_session_over_before_its_first_step_says_where_the_time_went_and_the_second_is_the_last(kgorch):
    plan = script(kgorch, "import time\nprint('prepares', flush=True)\ntime.sleep(600)\n", wall="30s", margin="2s")
    kgorch("start", str(plan), code=10)
    [note] = kgorch.events("no_step")
    assert "the script had not attached" in note["facts"]["why"] and "mine.py:3" in note["facts"]["why"]
    failed = kgorch("start", str(plan), code=20)
    assert "mine.py:3" in failed.stderr and "came to no step either" in failed.stderr


def test_work_after_the_training_that_no_session_is_long_enough_for_is_told_and_goes_on_being_tried(kgorch):
    """Session after session ended as if one more would do. It is not ended at once: such work may continue by its own files."""
    text = """
import time, torch
from kgorch import attach
with attach() as session:
    session.track(net=torch.nn.Linear(4, 1))
    for batch in session.steps(session.loader(torch.randn(64, 4), 8), 1):
        pass
time.sleep(600)
"""
    plan = script(kgorch, text, wall="20s", margin="2s")
    said = kgorch("start", str(plan), code=10).stderr
    for _ in range(3):  # on a machine that is busy a start alone takes longer
        if "step 8, verified" in said:
            break
        said = kgorch("start", str(plan), code=10).stderr
    assert "what follows the training" not in said and kgorch.status()["notices"] == []
    again = kgorch("start", str(plan), code=10).stderr
    assert "time limit; what follows the training had the whole session and did not end" in again, again
    [notice] = kgorch.status()["notices"]
    assert "session.wall" in notice and "stage of its own" in notice


def test_a_wall_that_is_over_is_a_mistake_and_opens_no_session(kgorch):
    """As on Kaggle, where it counts from the container's start."""
    began = '[platform]\nbegan = "boot"'
    told = kgorch("start", str(kgorch.plan(wall="30s", margin="2s", extra=began)), code=2)
    assert "the session's wall is over" in told.stderr and "--until" in told.stderr and "boot" in told.stderr
    assert kgorch.history() == [] and kgorch.status()["session"] is None


needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small disk needs root")


@pytest.fixture
def small_disk(tmp_path):
    """A disk of 8 MB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", folder]).returncode:
        pytest.skip("this container allows no mount")
    yield folder
    subprocess.run(["umount", "-l", folder], check=True)


def on_disk(folder: Path) -> str:
    return f'dir = "{folder}"'


@needs_root
def test_no_training_begins_whose_first_save_cannot_fit(kgorch, small_disk):
    plan = kgorch.plan(args={"epochs": 50, "sleep": 0.1, "pad": 4_000_000})
    plan.write_text(plan.read_text().replace("[checkpoint]", f"[checkpoint]\n{on_disk(small_disk)}"))
    done = kgorch("start", str(plan), code=20)
    assert "there is no room for a checkpoint" in done.stderr and "checkpoint.dir" in done.stderr
    assert kgorch.status()["step"] < 10


@needs_root
def test_a_run_that_can_save_no_more_is_refused_before_a_session_is_opened(kgorch, small_disk):
    plan = kgorch.plan(args={"epochs": 50, "sleep": 0.1, "pad": 300_000})
    plan.write_text(plan.read_text().replace("[checkpoint]", f"[checkpoint]\n{on_disk(small_disk)}"))
    supervisor = kgorch.background("start", str(plan))
    kgorch.wait_for_step(2)
    kgorch("stop")
    assert supervisor.wait(timeout=60) == 10
    fill(small_disk, leave_bytes=500_000)
    refused = kgorch("start", str(plan), code=2)
    assert "there is no room for a checkpoint" in refused.stderr and len(kgorch.history()) == 1


@needs_root
def test_a_session_that_could_save_nothing_ends_the_run_and_says_why(kgorch, small_disk):
    """It ended with 10, and `resume` did the same again."""
    plan = kgorch.plan(args={"epochs": 500, "sleep": 0.05, "pad": 300_000}, every="600s", margin="3s", extra=QUOTA)
    plan.write_text(plan.read_text().replace("[checkpoint]", f"[checkpoint]\n{on_disk(small_disk)}"))
    supervisor = kgorch.background("start", str(plan))
    wait_until(lambda: kgorch.try_status() and kgorch.events("attached"))
    fill(small_disk, leave_bytes=100_000)
    kgorch.move_wall(10)
    assert supervisor.wait(timeout=90) == 20
    said = supervisor.communicate()[0]
    assert "nothing of this session could be saved" in said and "no room for" in said
    assert kgorch.status()["state"] == "failed" and kgorch.status()["next"]["at"] is None


@needs_root
def test_checkpoints_of_two_fifths_of_the_disk_are_saved_again_and_again(kgorch, small_disk):
    """As 7 GB on Kaggle's 20: two of them stayed, and no further one had room."""
    subprocess.run(["mount", "-o", "remount,size=40m", small_disk], check=True)
    plan = kgorch.plan(args={"epochs": 12, "sleep": 0.1, "pad": 1_900_000}, every="1s")
    plan.write_text(plan.read_text().replace("[checkpoint]", f"[checkpoint]\n{on_disk(small_disk)}"))
    kgorch("start", str(plan))
    [saved] = kgorch.look("checkpoints", "list", "test")
    assert 15e6 < saved["bytes"] < 16e6 and saved["final"]
    verified, failed = kgorch.events("checkpoint_verified"), kgorch.events("save_failed")
    # One that comes while the one before is still being verified finds the older one, and no room.
    assert len(verified) > 3 and len(failed) < len(verified) / 2
    assert kgorch.status()["state"] == "finished"


def fill(disk: Path, *, leave_bytes: int) -> None:
    room = os.statvfs(disk)
    (disk / "others").write_bytes(b"x" * max(0, room.f_bavail * room.f_frsize - leave_bytes))


def test_who_takes_a_session_over_tells_of_no_step_as_lost_that_is_on_disk(kgorch):
    """It counted from the session's first step, whatever had been saved since."""
    text = """
import os, time, torch
from kgorch.worker import attach
with attach() as session:
    net = torch.nn.Linear(4, 1)
    session.track(net=net)
    for batch in session.steps(session.loader(torch.randn(64, 4), 8), 1000):
        time.sleep(600 if os.path.exists("sit") else 0.1)
"""
    plan = script(kgorch, text, wall="60s", margin="2s", every="600s")
    plan.write_text(plan.read_text().replace("[checkpoint]", '[checkpoint]\nsnapshot = "off"'))
    supervisor = kgorch.background("start", str(plan))
    kgorch.wait_for_step(10)
    kgorch("save")
    saved = kgorch.status()["checkpoint"]["step"]
    (kgorch.folder / "sit").touch()
    supervisor.kill()
    supervisor.wait()
    adopted = kgorch.background("start", str(plan))
    assert adopted.wait(timeout=90) == 10
    [cut] = kgorch.events("grace_expired")
    assert cut["facts"]["saved_step"] >= saved > 5 and not kgorch.events("never_attached")
    assert cut["facts"]["lost_steps"] == kgorch.status()["step"] - cut["facts"]["saved_step"]


def test_who_stops_at_once_is_told_what_is_lost_beyond_the_snapshot_in_memory(kgorch):
    """It was counted from the newest checkpoint before the stop, though the snapshot was written then."""
    text = """
import os, time, torch
from kgorch.worker import attach
with attach() as session:
    net = torch.nn.Linear(4, 1)
    session.track(net=net)
    for batch in session.steps(session.loader(torch.randn(64, 4), 8), 1000):
        time.sleep(0.1)
        while os.path.exists("sit"):
            time.sleep(0.1)
"""
    plan = script(kgorch, text, every="600s")
    plan.write_text(plan.read_text().replace("[checkpoint]", '[checkpoint]\nsnapshot = "3s"'))
    supervisor = kgorch.background("start", str(plan))
    kgorch.wait_for_step(10)
    kgorch("save")
    saved = kgorch.status()["checkpoint"]["step"]
    wait_until(
        lambda: (held := kgorch.status()["snapshot"]) and held["step"] > saved,
        within_s=240,
        what="a snapshot beyond it",
    )

    def sits_beyond_its_snapshot() -> bool:
        (kgorch.folder / "sit").touch()
        time.sleep(2.0)  # its last step is told in a second
        status = kgorch.status()
        if status["step"] == status["snapshot"]["step"]:
            (kgorch.folder / "sit").unlink()
        return status["step"] > status["snapshot"]["step"]

    wait_until(sits_beyond_its_snapshot)
    supervisor.send_signal(signal.SIGINT)
    wait_until(lambda: kgorch.events("stop_requested"))
    supervisor.send_signal(signal.SIGINT)
    assert supervisor.wait(timeout=60) == 10
    [cut], status = kgorch.events("grace_expired"), kgorch.status()
    assert cut["facts"]["saved_step"] == status["checkpoint"]["step"] > saved
    assert cut["facts"]["lost_steps"] == status["step"] - cut["facts"]["saved_step"] > 0
    assert status["phase"] == "cut_off"


def test_a_refused_connection_of_the_script_is_the_cause_and_not_the_rank_that_was_ended_for_it(kgorch):
    text = """
import socket, time, torch
from kgorch.worker import attach
with attach() as session:
    net = torch.nn.Linear(4, 1)
    session.track(net=net)
    for batch in session.steps(session.loader(torch.randn(64, 4), 8), 100):
        if session.rank == 0:
            socket.create_connection(("127.0.0.1", 9))
        time.sleep(600)
"""
    done = kgorch("start", str(script(kgorch, text, ranks=2)), code=20)
    assert "rank 0: ConnectionRefusedError" in done.stderr and "(mine.py:9)" in done.stderr


def test_a_script_that_trains_and_tracks_nothing_is_told_of_at_its_first_step_and_fails_the_check(kgorch):
    text = """
import time, torch
from kgorch.worker import attach
with attach() as session:
    for batch in session.steps(session.loader(torch.randn(64, 4), 8), 100):
        time.sleep(0.0 if session.quick else 0.2)
"""
    plan = script(kgorch, text)
    checked = kgorch("check", str(plan), code=None)
    assert checked.returncode != 0 and "it takes steps and has not called session.track()" in checked.stdout, (
        checked.stdout
    )
    supervisor = kgorch.background("start", str(plan))
    [note] = wait_until(lambda: kgorch.try_status() and kgorch.events("tracks_nothing"))
    assert "session.track()" in note["facts"]["what"] and supervisor.poll() is None


def test_a_script_that_never_attaches_fails_the_check(kgorch):
    checked = kgorch("check", str(script(kgorch, "print('trains')\n")), code=None)
    assert checked.returncode != 0 and "never called kgorch.attach()" in checked.stdout, checked.stdout


def test_checkpoints_that_were_taken_away_are_missed_by_name_and_not_by_a_traceback(suspended):
    [folder] = suspended.home.glob("runs/*/*/checkpoints")
    folder.rename(suspended.folder / "elsewhere")
    failed = suspended("start", str(suspended.folder / "plan.toml"), code=20)
    assert "no checkpoint of stage 'train' can be used" in failed.stderr
