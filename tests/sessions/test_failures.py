"""What ends a training early: kills at every place, crashes, full disks, broken checkpoints, mistakes in the plan."""

from __future__ import annotations

import os
import re
import shutil
import signal
import sqlite3
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from harness import Kgorch, processes_of, wait_until

from kgorch.launch import launcher
from kgorch.protocol import transport
from kgorch.protocol.messages import Response
from kgorch.protocol.snapshot_messages import CheckpointWritten
from kgorch.scheduler import daemon_api
from kgorch.system.file_lock import FileLock
from kgorch.system.process_identity import start_ticks
from kgorch.system.sockets.control_socket import ControlSocket, ask


def test_a_path_that_comes_over_the_socket_is_no_folder_to_rename(kgorch, tmp_path):
    """One line had a supervisor of root rename a folder of the system."""
    kgorch.background("start", str(kgorch.plan(ranks=1, args={"epochs": 500, "sleep": 0.05})))
    kgorch.wait_for_step(2)
    dear, inside = tmp_path / "dear", next(kgorch.home.glob("runs/*/*/checkpoints/train"))
    dear.mkdir()
    (inside / "step-00000009").symlink_to(dear)
    paths = [dear, tmp_path / "step-00000001", inside / ".." / ".." / ".." / "dear", inside, inside / "step-00000009"]
    paths[1].mkdir()
    with transport.connect(next(kgorch.home.glob("runs/*/*/control.sock"))) as connection:
        for path in paths:
            transport.send(connection, CheckpointWritten("1.1", str(path), step=1, bytes=0, blocking_s=0.0, took_s=0.0))
        wait_until(lambda: len(kgorch.events("reader_failed")) == len(paths))
    assert [path.is_dir() for path in paths[:2]] == [True, True] and (inside / "step-00000009").is_symlink()
    assert sorted(path.name for path in tmp_path.iterdir() if "broken" in path.name) == []
    assert "is not a checkpoint of this run and is left unchanged" in kgorch.events("reader_failed")[0]["facts"]["why"]


@pytest.mark.soak  # the storm does it at any moment
def test_what_is_killed_is_launched_again_and_leaves_no_orphan(kgorch):
    plan = kgorch.plan(ranks=2, args={"epochs": 60, "sleep": 0.03}, every="1s")
    supervisor = kgorch.background("start", str(plan))
    for count, victim in enumerate(["rank1", "torchrun", "shim"], 1):
        wait_until(
            lambda count=count: kgorch.try_status() and [len(one["attempts"]) for one in kgorch.history()] == [count]
        )
        step = kgorch.status()["step"]
        kgorch.wait_for_step(step + 20)
        pids = kgorch.pids()
        os.kill(pids[victim], signal.SIGKILL)
        wait_until(
            lambda pids=pids: not any(map(start_ticks, pids.values())), within_s=60, what="all of the attempt gone"
        )
    assert supervisor.wait(timeout=90) == 0, supervisor.communicate()[0]
    [session] = kgorch.history()
    assert [attempt["outcome"] for attempt in session["attempts"]] == ["crashed"] * 3 + ["finished"]
    assert "rank 1 was killed" in session["attempts"][0]["cause"]
    assert kgorch.status()["step"] == 60 * 6


TWO_STAGES = """
name = "test"
[[stage]]
name = "train"
entry = "goes_on_with.py"
args = { epochs = 8, sleep = %s }
[[stage]]
name = "tune"
entry = "goes_on_with.py"
args = { epochs = 8, sleep = %s, of = "train" }
[checkpoint]
every = "700ms"
"""


def in_two_stages(kgorch: Kgorch, train_s: float = 0.0, tune_s: float = 0.0) -> Path:
    plan = kgorch.plan("goes_on_with.py")
    plan.write_text(TWO_STAGES % (train_s, tune_s))
    return plan


@pytest.mark.parametrize("damage", ["a byte", pytest.param("all of it", marks=pytest.mark.soak)])
def test_an_earlier_stage_whose_last_checkpoint_broke_is_trained_to_its_end_again_when_it_is_read(
    damage, kgorch, tmp_path
):
    (tmp_path / "alone").mkdir()
    alone = Kgorch(tmp_path / "alone", tmp_path / "alone" / "home")
    alone("start", str(in_two_stages(alone)))

    kgorch.background("start", str(in_two_stages(kgorch, 0.08, 0.6)))
    wait_until(lambda: (now := kgorch.try_status()) and now["stage"] == "tune" and now["step"] > 8, within_s=90)
    kgorch("stop")
    stopped_at = kgorch.status()["step"]
    [final] = kgorch.home.glob("runs/*/*/checkpoints/train/*-final")
    if damage == "a byte":
        [shard] = final.glob("*.safetensors")
        shard.write_bytes(shard.read_bytes()[:-1] + b"!")
    else:
        shutil.rmtree(final)
    kgorch("start", str(in_two_stages(kgorch)), "--accept-changes")

    assert [event["facts"]["stage"] for event in kgorch.events("stage_reopened")] == ["train"]
    launched = [(event["facts"]["stage"], event["facts"]["step"]) for event in kgorch.events("launched")][2:]
    assert [stage for stage, _ in launched] == ["tune", "train", "tune"]
    # a save beside the training may be of the last step, too
    assert 0 < launched[1][1] <= 48 and launched[2][1] == stopped_at
    assert all(kgorch.export(stage=stage) == alone.export(stage=stage) for stage in ("train", "tune"))


@pytest.mark.soak  # the storm does it at any moment
def test_when_all_is_killed_the_next_start_goes_on_from_the_newest_checkpoint(kgorch):
    plan = kgorch.plan(args={"epochs": 25, "sleep": 0.03}, every="1s")
    kgorch.background("start", str(plan))
    wait_until(kgorch.checkpoints)
    kgorch.kill_everything()
    wait_until(lambda: not processes_of(kgorch.home))
    dead = kgorch("status").stdout
    assert "dead" in dead and "no process of the session is running" in dead
    kgorch("start", str(plan))
    first, second = kgorch.history()
    assert (first["phase"], second["phase"]) == ("cut_off", "finished")
    assert second["stages"][0]["first_step"] == first["checkpoint"]["step"] > 0


@pytest.mark.soak
def test_a_crash_is_tried_again_and_the_run_finishes(kgorch):
    plan = kgorch.plan("crashes.py", ranks=1, args={"at": 5, "once": str(kgorch.folder / "happened")})
    kgorch("start", str(plan))
    [session] = kgorch.history()
    assert [attempt["outcome"] for attempt in session["attempts"]] == ["crashed", "finished"]
    assert "ValueError: the loss went wrong at step 5" in session["attempts"][0]["cause"]


def test_a_crash_that_comes_again_and_again_ends_the_run_with_its_first_cause(kgorch):
    plan = kgorch.plan("crashes.py", ranks=1, args={"at": 5})
    done = kgorch("start", str(plan), code=20)
    assert done.stderr.count("ValueError: the loss went wrong at step 5 (") <= 6
    assert "failed again" not in done.stderr, "the second time is the last"
    end = done.stderr[done.stderr.index("error: test failed") :]
    assert "2 consecutive attempts ended with the same error" in end and "next:" in end
    assert end.splitlines()[0].endswith(" [KG401]")
    assert re.search(r"crashes\.py:\d+\)", end) and 'raise ValueError(f"the loss' in end
    assert len(kgorch.history()[0]["attempts"]) == 2, "the same line and step again: a third would end in the same way"
    status = kgorch.status()
    assert status["state"] == "failed" and "ValueError" in status["why"]
    failure = status["failure"]
    assert (failure["rank"], failure["step"], failure["times"], failure["code"]) == (0, 5, 2, "KG401")
    assert "crashes.py" in failure["traceback"][-3] and failure["traceback"][-1].startswith("ValueError: the loss went")
    shown = kgorch("status").stdout
    assert (
        "rank 0 first, at step 5" in shown
        and "rank0.log" in shown
        and shown.splitlines()[-3].strip().startswith("ValueError")
    )
    assert "the loss went wrong" in kgorch(*failure["command"].split()[1:]).stdout


def test_an_error_of_the_sdk_in_a_rank_ends_the_run_with_its_own_code(kgorch):
    (kgorch.folder / "twice.py").write_text(
        "import torch\nfrom kgorch import attach\n\nmodel = torch.nn.Linear(1, 1)\n"
        "with attach(seed=0) as session:\n    session.track(model=model)\n    session.track(model=model)\n"
    )
    done = kgorch("start", str(kgorch.plan("twice.py", ranks=1)), code=20)
    [first] = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert first.endswith(" [KG403]") and "session.track() was called twice" in done.stderr
    assert kgorch.status()["failure"]["code"] == "KG403"


def test_the_code_of_an_error_in_the_background_is_shown_once(kgorch):
    plan = kgorch.plan(ranks=1)
    told = kgorch("start", str(plan), "--detach", "--set", "session.wall=1s", code=2).stderr
    assert told.splitlines()[0].endswith(" [KG301]") and told.count("KG301") == told.count("error: ") == 1, told


def test_a_rank_whose_entry_cannot_be_imported_fails_the_run_at_once(kgorch):
    (kgorch.folder / "broken_module.py").write_text("import no_such_library\n\ndef main():\n    pass\n")
    plan = kgorch.plan("broken_module:main", ranks=1)
    done = kgorch("start", str(plan), code=20)
    assert "no_such_library" in done.stderr
    assert len(kgorch.history()[0]["attempts"]) == 1


def test_an_argument_that_the_entry_does_not_take_is_named(kgorch):
    (kgorch.folder / "module.py").write_text("def main(epochs: int):\n    pass\n")
    plan = kgorch.plan("module:main", ranks=1, args={"epoch": 3})
    done = kgorch("start", str(plan), code=20)
    assert "takes no argument 'epoch' (did you mean 'epochs'?)" in done.stderr


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        ("nothing_here:main", "there is no module 'nothing_here'"),
        ("learns:mian", "has no 'mian' (did you mean 'main'?)"),
        ("trian.py", "there is no script"),
    ],
)
def test_an_entry_that_is_not_there_is_refused_before_anything_starts(kgorch, entry, said):
    plan = kgorch.plan(entry)
    done = kgorch("start", str(plan), code=2)
    assert said in done.stderr
    assert not list(kgorch.home.glob("runs/*/*"))


def test_a_wall_that_no_save_fits_into_is_refused(kgorch):
    done = kgorch("start", str(kgorch.plan(wall="2s")), code=2)
    assert "session.wall = 2 s is over before a save would be" in done.stderr


def test_a_wall_before_the_first_step_is_tried_twice_then_the_run_says_why_and_may_be_mended(kgorch):
    plan = kgorch.plan("never_attaches.py", wall="20s", args={"sleep": 600})
    kgorch("start", str(plan), code=10)
    second = kgorch("start", str(plan), code=20)
    assert "the wall came before the first step" in kgorch.status()["why"]
    assert "[KG410]" in second.stderr and "next: kgorch start PLAN --set session.wall=…" in second.stderr
    assert "next        kgorch start PLAN --set session.wall=…" in kgorch("status").stdout
    kgorch("start", str(plan), "--set", "session.wall=60s", "--set", "stage.train.args.sleep=0")  # mended, it goes on


@pytest.mark.soak  # the storm does it at any moment
def test_a_broken_checkpoint_is_set_aside_and_the_one_before_is_used(kgorch):
    plan = kgorch.plan(ranks=1, args={"epochs": 1000, "sleep": 0.02})
    kgorch.background("start", str(plan))
    kgorch.wait_for_step(3)
    for _ in range(2):
        kgorch("save")
    kgorch.kill_everything()
    before, newest = kgorch.checkpoints()[-2:]
    shard = newest / "rank0.safetensors"
    content = bytearray(shard.read_bytes())
    content[-5] ^= 1
    shard.write_bytes(content)
    assert "BROKEN" in kgorch("checkpoints", "verify", code=2).stdout
    kgorch("start", str(plan), "--set", "stage.train.args.epochs=1", code=None)
    assert (newest.parent / (newest.name + ".broken")).is_dir()
    assert kgorch.history()[-1]["stages"][0]["first_step"] == int(before.name.split("-")[1])
    [event] = kgorch.events("checkpoint_quarantined")
    assert newest.name in event["facts"]["checkpoint"] and "xxh3" in event["facts"]["why"]


@contextmanager
def mounted(kgorch: Kgorch, place: Path, size: str) -> Iterator[Path]:
    """A small file system of its own."""
    place.mkdir()
    if subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size},mode=0700", "tmpfs", str(place)], capture_output=True
    ).returncode:
        pytest.skip("no right to mount a small file system")
    try:
        yield place
    finally:
        kgorch.kill_everything()
        subprocess.run(["umount", "-l", str(place)], check=True)


@pytest.fixture
def small_disk(kgorch):
    with mounted(kgorch, kgorch.folder / "small", "4m") as place:
        yield place


def test_a_full_disk_fails_the_save_and_neither_the_training_nor_the_checkpoint_before(kgorch, small_disk):
    plan = kgorch.plan(args={"epochs": 10_000, "sleep": 0.05, "pad": 45_000}, every="600s")
    plan.write_text(plan.read_text().replace("[checkpoint]", '[checkpoint]\ndir = "small"'))
    supervisor = kgorch.background("start", str(plan))
    kgorch.wait_for_step(3)
    kgorch("save")
    good = kgorch.status()["checkpoint"]
    left = [Path(good["path"]).name]  # the checkpoint before it is deleted beside the training, and makes room
    wait_until(lambda: [path.name for path in small_disk.glob("test-*/train/*")] == left, what="the one before")
    (small_disk / "filler").write_bytes(b"0" * (shutil.disk_usage(small_disk).free - 300_000))
    failed = kgorch("save", code=2)
    assert "No space left" in failed.stderr or "no room" in failed.stderr
    step = kgorch.status()["step"]
    kgorch.wait_for_step(step + 10)
    assert kgorch.status()["checkpoint"] == good, "the verified one stays"
    assert kgorch.events("save_failed")
    assert "free some space in" in " ".join(kgorch.status()["notices"])
    wait_until(lambda: [path.name for path in small_disk.glob("test-*/train/*")] == left, what="no leftovers")
    (small_disk / "filler").unlink()
    kgorch("save")
    assert kgorch.status()["checkpoint"]["step"] > good["step"]
    kgorch("stop")
    said, _ = supervisor.communicate(timeout=90)
    assert said.count("error: a save failed") == 1 and "next: free some space in" in said and "checkpoint.dir" in said


def test_a_last_state_that_a_full_disk_does_not_take_is_in_memory_for_the_next_session(kgorch, small_disk):
    plan = kgorch.plan(args={"epochs": 10_000, "sleep": 0.05, "pad": 45_000}, every="600s")
    plan.write_text(plan.read_text().replace("[checkpoint]", '[checkpoint]\ndir = "small"'))
    supervisor = kgorch.background("start", str(plan))
    kgorch.wait_for_step(3)
    kgorch("save")
    (small_disk / "filler").write_bytes(b"0" * (shutil.disk_usage(small_disk).free - 300_000))
    kgorch.wait_for_step(kgorch.status()["step"] + 20)
    kgorch("stop", code=None)
    assert supervisor.wait(timeout=90) == 10
    status = kgorch.status()
    assert status["phase"] == "cut_off" and status["checkpoint"]["step"] < status["step"]
    (small_disk / "filler").unlink()
    kgorch.background("start", str(plan))
    launched = wait_until(lambda: (found := kgorch.events("launched")) and len(found) == 2 and found[-1]["facts"])
    assert launched["from"] == "memory" and status["checkpoint"]["step"] < launched["step"] <= status["step"]
    kgorch("stop")


@pytest.mark.soak  # the storm does it at any moment
def test_a_database_locked_by_another_program_does_not_stop_the_training(kgorch):
    plan = kgorch.plan(args={"epochs": 10_000, "sleep": 0.05}, every="2s")
    supervisor = kgorch.background("start", str(plan))
    kgorch.wait_for_step(3)
    count = len(kgorch.checkpoints())
    other = sqlite3.connect(kgorch.home / "kgorch.db", isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    time.sleep(6)
    other.execute("ROLLBACK")
    other.close()
    wait_until(lambda: len(kgorch.events("checkpoint_verified")) > count + 1, within_s=60)
    assert supervisor.poll() is None
    kgorch("stop")


@pytest.mark.parametrize("what", ["taken away", "another's"])
def test_who_asks_after_a_socket_file_was_taken_away_is_heard(tmp_path, what):
    channel = ControlSocket(tmp_path / "control.sock", lambda message, reply: reply(Response(True, message.what)))
    api = daemon_api.Api(tmp_path, lambda asked, reply: reply({"ok": asked}))
    for name in ("control.sock", daemon_api.SOCKET):
        (tmp_path / name).unlink()
        if what == "another's":
            transport.listen(tmp_path / name).close()
    assert wait_until(lambda: ask(tmp_path / "control.sock", "status"), within_s=20) == Response(True, "status")
    assert wait_until(lambda: daemon_api.ask(tmp_path, "ping"), within_s=20) == {"ok": "ping"}
    channel.close()
    api.close()
    assert not list(tmp_path.iterdir())


def test_what_runs_can_be_told_and_ended_on_a_disk_that_has_become_read_only(tmp_path):
    attempt, seen = tmp_path / "attempt", tmp_path / "seen"
    seen.mkdir()
    held = FileLock(attempt / "lock")
    assert held.acquire()
    if subprocess.run(["mount", "--bind", attempt, seen], capture_output=True).returncode:
        pytest.skip("no right to mount")
    listening = ControlSocket(seen / "control.sock", lambda *_: None), daemon_api.Api(seen, lambda *_: None)
    try:
        subprocess.run(["mount", "-o", "remount,ro,bind", seen], check=True)
        for one in listening:
            one.close()
        assert launcher.is_running(seen) and not launcher.kill(seen, patience_s=0.1)
        held.release()
        assert not launcher.is_running(seen) and launcher.kill(seen)
        launcher.wait(seen)
    finally:
        subprocess.run(["umount", "-l", seen], check=True)


def test_a_training_that_fills_the_disk_is_said_to_have_done_so_though_nothing_can_be_written(kgorch):
    with mounted(kgorch, kgorch.home, "6m"):
        plan = kgorch.plan("crashes.py", args={"fills": True, "once": str(kgorch.folder / "happened")})
        supervisor = kgorch.background("start", str(plan))
        wait_until((kgorch.folder / "happened").exists, within_s=90)
        wait_until(lambda: not launcher.is_running(kgorch.attempt()), within_s=60)
        time.sleep(2)  # the supervisor has judged it, with the disk still full
        [table] = kgorch.home.glob("runs/*/*/outputs/table.csv")
        table.unlink()
        assert supervisor.wait(timeout=120) == 0, supervisor.communicate()[0]
        first = kgorch.history()[0]["attempts"][0]
        assert first["outcome"] == "crashed"
        assert first["cause"].startswith("rank 0: OSError: [Errno 28] No space left on device (crashes.py:")
        [record] = kgorch.home.glob("runs/*/*/attempts/1.1/rank0.status.json")
        assert "table.write" in record.read_text()


def test_a_log_on_a_full_disk_ends_no_supervisor(kgorch):
    plan = kgorch.plan(args={"epochs": 100_000, "sleep": 0.05}, ranks=1)
    with open("/dev/full", "w") as full:
        supervisor = subprocess.Popen(
            kgorch.command("start", str(plan)), cwd=kgorch.folder, env=kgorch.env(), stdout=full, stderr=full, text=True
        )
    kgorch.started.append(supervisor)
    step = kgorch.wait_for_step(3)["step"]
    with sqlite3.connect(kgorch.home / "kgorch.db", isolation_level=None) as database:
        database.execute("BEGIN IMMEDIATE")
        time.sleep(8)  # a save falls due, which cannot be written down
        database.execute("ROLLBACK")
    assert supervisor.poll() is None
    kgorch.wait_for_step(step + 20)
    assert kgorch.status()["session"]["supervisor"]["alive"]


@pytest.mark.parametrize("home", ["/proc/kgorch", "a file"])
def test_a_state_folder_that_cannot_be_written_is_named(kgorch, home):
    if home == "a file":
        kgorch.home.write_text("not a folder")
    else:
        kgorch.home = type(kgorch.home)(home)
    done = kgorch("start", str(kgorch.plan()), code=2)
    assert "cannot be written" in done.stderr and "KGORCH_HOME" in done.stderr


def test_a_changed_plan_is_taken_with_a_note_and_another_model_is_refused_by_name(suspended):
    plan, kgorch = suspended.folder / "plan.toml", suspended
    good = {path: path.read_bytes() for folder in kgorch.checkpoints() for path in folder.iterdir()}
    text = plan.read_text()
    plan.write_text(text.replace('"train"', '"learn"'))
    refused = kgorch("start", str(plan), code=2).stderr
    assert "'train' has begun and is not in the plan" in refused and "--fresh" in refused
    plan.write_text(text.replace("pad = 3", "pad = 7"))
    done = kgorch("start", str(plan), code=20)
    assert "the plan has changed: stage.train.args.pad: 3 → 7" in done.stderr
    [event] = kgorch.events("plan_changed")
    assert event["facts"]["changed"] == [{"key": "stage.train.args.pad", "old": "3", "new": "7"}]
    assert "CannotRestore" in done.stderr and "padding: (3,) → (7,)" in done.stderr
    assert all(path.read_bytes() == content for path, content in good.items()), "nothing of the old weights is lost"
    plan.write_text(text.replace("1.0", "0.0").replace("20", "1"))
    kgorch("start", str(plan))
    assert kgorch.status()["state"] == "finished"
    first = kgorch.history()[-1]["stages"][0]["first_step"]
    assert first >= 2, "with the old model it goes on where it was"


@pytest.mark.slow
def test_a_person_may_insist_on_a_plan_that_would_be_refused(suspended):
    plan, kgorch = suspended.folder / "plan.toml", suspended
    shutil.copy(kgorch.folder / "learns.py", kgorch.folder / "moved.py")
    plan.write_text(plan.read_text().replace("learns.py", "moved.py").replace("1.0", "0.0").replace("20", "1"))
    assert "with another program, learns.py" in kgorch("start", str(plan), code=2).stderr
    kgorch("start", str(plan), "--accept-changes")
    [event] = kgorch.events("plan_changed")
    assert "another program" in event["facts"]["accepted"][0]
    assert kgorch.history()[-1]["stages"][0]["first_step"] >= 2


def test_a_plan_of_the_same_name_in_another_folder_does_not_take_a_run_over(suspended):
    other = suspended.folder.with_name("other")
    shutil.copytree(suspended.folder, other)
    refused = suspended("start", str(other / "plan.toml"), code=2).stderr
    assert f"begun in {suspended.folder}, which is still there" in refused and "--accept-changes" in refused
    assert len(suspended.history()) == 1
    suspended.folder.rename(suspended.folder.with_name("moved"))
    suspended.folder = other
    suspended("start", str(other / "plan.toml"), "--set", "stage.train.args.sleep=0")
    assert suspended.status()["state"] == "finished"
    third = shutil.copytree(other, other.with_name("third"))
    refused = suspended("start", str(third / "plan.toml"), code=2).stderr
    assert (
        f"begun in {other}, which is still there" in refused and "is finished" in refused and "another name" in refused
    )
    assert "is finished" in suspended("start", str(third / "plan.toml"), "--accept-changes").stdout


@pytest.mark.slow  # three attempts, each of which waits for room
def test_a_last_save_that_fails_is_never_called_finished(kgorch, small_disk):
    (small_disk / "filler").write_bytes(b"0" * (shutil.disk_usage(small_disk).free - 800_000))
    plan = kgorch.plan(ranks=1, args={"epochs": 2, "sleep": 0, "pad": 45_000}, every="600s")
    plan.write_text(plan.read_text().replace("[checkpoint]", '[checkpoint]\ndir = "small"'))
    done = kgorch("start", str(plan), code=20)
    assert "its last save failed: OSError: [Errno 28] no room for" in done.stderr
    assert kgorch.status()["state"] == "failed"


def test_a_last_save_waits_for_room_on_a_full_disk(kgorch, small_disk):
    """The next two attempts would end alike, within seconds: the run was failed before a person could free some space."""
    filler = small_disk / "filler"
    filler.write_bytes(b"0" * (shutil.disk_usage(small_disk).free - 800_000))
    plan = kgorch.plan(ranks=2, args={"epochs": 2, "sleep": 0, "pad": 45_000}, every="600s")
    plan.write_text(plan.read_text().replace("[checkpoint]", '[checkpoint]\ndir = "small"'))
    supervisor = kgorch.background("start", str(plan))
    wait_until(lambda: kgorch.try_status() and kgorch.events("save_failed"), what="the first try")
    filler.unlink()
    assert supervisor.wait(timeout=60) == 0
    assert kgorch.status()["checkpoint"]["final"] and len(kgorch.history()[0]["attempts"]) == 1


def test_a_text_that_is_no_unicode_does_not_upset_the_supervisor(kgorch):
    (kgorch.folder / "fails.py").write_text('raise ValueError("caf\\udce9.tif")')
    done = kgorch("start", str(kgorch.plan("fails.py", ranks=1)), code=20)
    assert "ValueError: caf" in done.stderr


def test_a_metric_that_is_no_number_is_named(kgorch):
    program = """
import torch
from kgorch.worker import attach
with attach() as session:
    session.report(per_class=torch.ones(3))
"""
    (kgorch.folder / "reports.py").write_text(program)
    done = kgorch("start", str(kgorch.plan("reports.py", ranks=1)), code=20)
    assert "session.report(per_class=…): expected a number" in done.stderr


def test_where_checkpoints_lie_cannot_change_in_a_run(suspended):
    plan, kgorch = suspended.folder / "plan.toml", suspended
    done = kgorch("start", str(plan), "--set", "checkpoint.dir=elsewhere", code=2)
    assert "checkpoint.dir of 'test' has changed" in done.stderr and "--fresh" in done.stderr


def test_a_run_whose_checkpoints_are_gone_does_not_begin_anew_by_itself(suspended):
    plan, kgorch = suspended.folder / "plan.toml", suspended
    for folder in kgorch.checkpoints():
        shutil.rmtree(folder)
    done = kgorch("start", str(plan), code=20)
    assert "no checkpoint of stage 'train' can be used" in done.stderr


def test_training_left_over_from_a_session_that_is_over_is_ended_before_the_next_begins(kgorch):
    plan = kgorch.plan(args={"epochs": 10_000, "sleep": 0.05}, every="1s")
    supervisor = kgorch.background("start", str(plan))
    wait_until(kgorch.checkpoints)
    supervisor.kill()
    supervisor.wait()
    left_over = kgorch.pids()
    with sqlite3.connect(kgorch.home / "kgorch.db") as database:  # killed between "over" and the end of its processes
        database.execute("UPDATE sessions SET phase = 'suspended'")
        database.execute("UPDATE attempts SET outcome = 'wall'")
    database.close()
    kgorch.background("resume")
    wait_until(lambda: len(kgorch.history()) == 2 and kgorch.attempt().name == "2.1")
    assert not [pid for pid in left_over.values() if start_ticks(pid)], "nothing but zombies"
    kgorch("stop")
