"""One run, one supervisor, one training: whatever is done to the state folder meanwhile."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import replace

import pytest
from harness import Kgorch, processes_of, wait_until

from kgorch.system.file_lock import is_locked
from kgorch.system.process_identity import start_ticks

pytestmark = pytest.mark.slow

LONG = {"epochs": 100_000, "sleep": 0.05}


def shims(kgorch: Kgorch) -> list[int]:
    return [process.pid for process in processes_of(kgorch.home, "kgorch.launch.shim")]


def test_a_deleted_lock_lets_no_second_supervisor_in(kgorch):
    supervisor = kgorch.background("start", str(kgorch.plan(args=LONG)))
    kgorch.wait_for_step(2)
    locks = [kgorch.home / "runs" / "test" / "lock", kgorch.attempt() / "lock"]
    for deleted in (locks[:1], locks):
        for lock in deleted:
            lock.unlink()
        said = kgorch("start", "plan.toml").stdout
        assert f"test is live: pid {supervisor.pid}" in said, said
        assert len(shims(kgorch)) == 1
        wait_until(lambda: is_locked(locks[0]))
    kgorch("stop")
    assert supervisor.wait(timeout=60) == 10
    wait_until(lambda: not processes_of(kgorch.home), within_s=20)
    assert len(kgorch.history()) == 1


def test_a_training_whose_locks_were_deleted_is_taken_over_and_not_begun_beside(kgorch):
    supervisor = kgorch.background("start", str(kgorch.plan(args=LONG)))
    kgorch.wait_for_step(2)
    supervisor.kill()
    supervisor.wait()
    for lock in kgorch.home.rglob("lock"):
        lock.unlink()
    [shim] = shims(kgorch)
    second = kgorch.background("start", "plan.toml")
    wait_until(lambda: kgorch.events("adopted"), within_s=30)
    step = kgorch.status()["step"]
    kgorch.wait_for_step(step + 5)
    assert shims(kgorch) == [shim]
    kgorch("stop")
    assert second.wait(timeout=60) == 10, second.communicate()[0]
    wait_until(lambda: not processes_of(kgorch.home), within_s=20)


def test_a_copy_of_the_state_folder_leaves_the_training_of_the_original_alone(kgorch, tmp_path):
    supervisor = kgorch.background("start", str(kgorch.plan(args=LONG)))
    kgorch.wait_for_step(2)
    copy = replace(kgorch, home=tmp_path / "copy", started=[])
    shutil.copytree(kgorch.home, copy.home, ignore=shutil.ignore_patterns("*.sock"))
    socket = (kgorch.home / "runs" / "test" / "1" / "control.sock").stat().st_ino
    for verb in (["start", "plan.toml"], ["resume", "test"]):
        said = copy(*verb, code=2, timeout_s=60).stderr
        assert f"{copy.home} is a copy of the state folder {kgorch.home}" in said and "next:" in said, said
    supervisor.kill()
    supervisor.wait()
    for verb in (["start", "plan.toml"], ["resume"]):
        said = copy(*verb, code=2, timeout_s=60).stderr
        assert f"{copy.home} is a copy of the state folder {kgorch.home}" in said and "next:" in said, said
    assert (kgorch.home / "runs" / "test" / "1" / "control.sock").stat().st_ino == socket
    assert len(shims(kgorch)) == 1 and not shims(copy)
    second = kgorch.background("start", "plan.toml")
    wait_until(lambda: kgorch.events("adopted"), within_s=30)
    kgorch("stop")
    assert second.wait(timeout=60) == 10, second.communicate()[0]
    goes_on = copy.background("start", "plan.toml")
    wait_until(lambda: copy.try_status() and len(copy.history()) == 2, within_s=30)
    copy.wait_for_step(3)
    copy("stop")
    assert goes_on.wait(timeout=60) == 10, goes_on.communicate()[0]


def test_a_state_folder_goes_on_where_it_was_moved_to(suspended):
    plan, step = suspended.folder / "plan.toml", suspended.status()["step"]
    moved = replace(suspended, home=suspended.home.with_name("home2"), started=[])
    suspended.home.rename(moved.home)
    try:
        quick = ("--set", "stage.train.args.sleep=0", "--set", "stage.train.args.epochs=1")
        moved("start", str(plan), *quick)
        _, second = moved.history()
        assert second["stages"][0]["first_step"] == step
        assert moved.status()["state"] == "finished"
        assert str(suspended.home) + "/" not in str(moved.look("checkpoints", "list", "test"))
        moved("checkpoints", "verify", "test")
    finally:
        moved.kill_everything()
    assert not suspended.home.exists()


def test_a_training_whose_state_folder_was_moved_is_not_taken_over(kgorch, tmp_path):
    """Its ranks report and save to where the folder was."""
    supervisor = kgorch.background("start", str(kgorch.plan(args=LONG)))
    kgorch.wait_for_step(2)
    [shim] = shims(kgorch)
    moved = replace(kgorch, home=tmp_path / "home2", started=[])
    kgorch.home.rename(moved.home)
    assert f"test is live: pid {supervisor.pid}" in moved("start", "plan.toml").stdout
    supervisor.kill()
    supervisor.wait()
    said = moved("start", "plan.toml", code=2, timeout_s=60).stderr
    assert f"mv {moved.home} {kgorch.home}" in said, said
    assert start_ticks(shim) and not shims(moved)
    shutil.rmtree(kgorch.home, ignore_errors=True)
    moved.home.rename(kgorch.home)
    second = kgorch.background("start", "plan.toml")
    wait_until(lambda: kgorch.events("adopted"), within_s=30)
    kgorch("stop")
    assert second.wait(timeout=60) == 10, second.communicate()[0]


def test_a_session_without_a_terminal_or_any_stream_ends_as_any_other(kgorch):
    plan = kgorch.plan(args={"epochs": 1, "sleep": 0})
    command = f"exec {' '.join(kgorch.command())} start {plan} <&- >&- 2>&-"
    done = subprocess.run(["sh", "-c", command], cwd=kgorch.folder, env=kgorch.env(), timeout=120)
    assert done.returncode == 0 and kgorch.status()["state"] == "finished"


def test_a_plans_folder_that_is_gone_is_said_before_a_session_is_opened(suspended):
    shutil.move(suspended.folder, suspended.folder.with_name("moved"))
    suspended.folder.mkdir()
    workdir = suspended.folder
    said = replace(suspended, folder=workdir.parent)
    workdir.rmdir()
    sessions = len(said.history())
    error = said("resume", code=2, timeout_s=60).stderr
    assert f"the plan's folder {workdir} is gone" in error and "next: kgorch start" in error
    assert len(said.history()) == sessions
    shutil.move(workdir.with_name("moved"), workdir)


def test_a_state_folder_that_is_deleted_while_it_trains_is_told_and_no_success(kgorch):
    supervisor = kgorch.background("start", str(kgorch.plan(args={"epochs": 30, "sleep": 0.05})))
    kgorch.wait_for_step(2)
    shutil.rmtree(kgorch.home, ignore_errors=True)
    assert supervisor.wait(timeout=120) == 2
    said = supervisor.communicate()[0]
    assert f"the state folder {kgorch.home} is gone, deleted or moved while test trained" in said and "next:" in said, (
        said
    )
    assert said.index("note: ") < said.index("error: ")
