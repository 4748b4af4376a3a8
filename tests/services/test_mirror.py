"""The mirror of verified checkpoints: what is there is whole, what was cut goes on, and training never waits for it."""

from __future__ import annotations

import importlib.util
import os
import random
import shutil
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import fsspec
import pytest
import xxhash
from fsspec.implementations.memory import MemoryFile
from harness import Notes, processes_of, wait_until

from kgorch.checkpoint.folder import (
    MAX_MANIFEST_BYTES,
    list_checkpoints,
    read_checkpoint,
    read_manifest,
    write_manifest,
)
from kgorch.checkpoint.manifest import MANIFEST_NAME, FileEntry, Manifest, Position, checkpoint_folder_name
from kgorch.checkpoint.verify import verify_checkpoint
from kgorch.db import checkpoints as rows
from kgorch.db import runs
from kgorch.db.engine import open_database
from kgorch.services.mirror import END_S, UNDER_WAY, Mirror, MirrorReader
from kgorch.supervisor.loop import SIGTERM_GRACE_S


@pytest.fixture
def engine(tmp_path):
    return open_database(tmp_path / "home")


@pytest.fixture
def run(tmp_path, engine):
    return runs.create(
        engine,
        id="r1",
        name="ink",
        number=1,
        folder=str(tmp_path / "run"),
        workdir=str(tmp_path),
        checkpoints=str(tmp_path / "checkpoints"),
        plan="",
        overrides=[],
        plan_hash="h",
        stages=["train"],
    )


@pytest.fixture
def memory():
    found = fsspec.filesystem("memory")
    yield found
    found.store.clear()
    found.pseudo_dirs[:] = [""]


@pytest.fixture
def mirror(engine, run):
    """Starts mirrors, and ends them with the test."""
    started = []

    def start(url, **options):
        started.append(Mirror(engine, run, str(url), options, Notes()))
        return started[-1]

    yield start
    for one in started:
        one.stop()


def _saved(engine, run, step, *, size=1000, seed=0):
    """A verified checkpoint of `step`."""
    folder = Path(run.checkpoints) / "train" / checkpoint_folder_name(step, final=False)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    files = {}
    for name in ("rank0.safetensors", "rank1.safetensors", "state.json"):
        content = random.Random(f"{name} {step} {seed}").randbytes(size)
        (folder / name).write_bytes(content)
        files[name] = FileEntry(len(content), xxhash.xxh3_128(content).hexdigest())
    at = f"2026-11-20T10:00:0{seed}+00:00"
    write_manifest(folder, Manifest("ink", run.id, "train", Position(step=step), 1, at, files=files))
    columns = {"stage": "train", "step": step, "final": False, "bytes": 3 * size, "metrics": {}}
    rows.record(engine, run.id, str(folder), state="verified", **columns)
    return folder


def _until_idle(mirror):
    wait_until(lambda: not mirror.is_busy, what="the mirror is idle")
    return [mirror._enter.get() for _ in range(mirror._enter.qsize())]


def _fetched(memory, tmp_path, name):
    """The mirrored checkpoint, read out of the far place and verified."""
    shutil.rmtree(tmp_path / "fetched", ignore_errors=True)
    memory.get(f"/backup/ink-r1/{name}", str(tmp_path / "fetched"), recursive=True)
    return verify_checkpoint(tmp_path / "fetched")


def test_what_is_verified_and_kept_is_sent_newest_first_and_is_whole_there(engine, run, mirror, memory, tmp_path):
    for step in (1, 2, 3):
        _saved(engine, run, step)
    rows.set_state(engine, str(Path(run.checkpoints, "train", "step-00000001")), "dropped")
    began, *sent = _until_idle(mirror("memory://backup"))
    assert began == ("mirroring", {"to": "memory://backup", "holds": ""})
    assert [(kind, facts["step"], facts["holds"]) for kind, facts in sent] == [
        ("mirrored", 3, "train 3"),
        ("mirrored", 2, "train 3"),
    ]
    assert [_fetched(memory, tmp_path, f"train/step-0000000{step}").step for step in (2, 3)] == [2, 3]
    assert not memory.exists("/backup/ink-r1/train/step-00000001")
    assert not memory.glob(f"/backup/**/{UNDER_WAY}")


def test_what_is_there_already_is_not_sent_again_and_what_another_save_left_is(engine, run, mirror, memory, tmp_path):
    folder, there = _saved(engine, run, 5), "/backup/ink-r1/train/step-00000005"
    memory.pipe_file(f"{there}/{UNDER_WAY}", (folder / MANIFEST_NAME).read_bytes())
    memory.pipe_file(f"{there}/rank0.safetensors", b"s" * 1000)  # right size: taken for sent
    memory.pipe_file(f"{there}/rank1.safetensors", b"cut")
    one = mirror("memory://backup")
    assert _until_idle(one)[-1][1]["bytes"] < 3000
    assert memory.cat_file(f"{there}/rank0.safetensors") == b"s" * 1000
    assert memory.cat_file(f"{there}/rank1.safetensors") == (folder / "rank1.safetensors").read_bytes()
    _saved(engine, run, 5, seed=1)  # the same step again, other bits
    one.wake()
    _until_idle(one)
    assert _fetched(memory, tmp_path, "train/step-00000005").created_at.startswith("2026-11-20T10:00:01")
    one.wake()
    assert _until_idle(one) == [], "nothing to do, nothing said"


def test_a_checkpoint_that_learns_what_it_was_measured_at_stays_whole_there(engine, run, mirror, memory, tmp_path):
    folder, there = _saved(engine, run, 5), "/backup/ink-r1/train/step-00000005"
    one = mirror("memory://backup")
    _until_idle(one)
    sent = memory.modified(f"{there}/rank0.safetensors")
    for metrics in ({"dice": 0.5}, {"dice": 0.75}):
        write_manifest(folder, replace(read_manifest(folder), metrics=metrics, measured={"dice": 5}))
        one.wake()
        assert 0 < _until_idle(one)[-1][1]["bytes"] < 1000
        assert _fetched(memory, tmp_path, "train/step-00000005").metrics == metrics
        assert memory.modified(f"{there}/rank0.safetensors") == sent
    memory.pipe_file(f"{there}/{MANIFEST_NAME}", b"{}")  # it lists no files: all are sent
    one.wake()
    assert _until_idle(one)[-1][1]["bytes"] > 3000
    assert _fetched(memory, tmp_path, "train/step-00000005").step == 5


def test_a_stop_while_the_last_file_is_closed_leaves_no_manifest(engine, run, mirror, memory, monkeypatch):
    """Remote filesystems upload what they have buffered when a file is closed."""
    _saved(engine, run, 5)
    [row] = rows.of_run(engine, run.id, "verified")
    is_closing, started = threading.Event(), []

    def close(file):
        if file.path.endswith("/state.json"):
            is_closing.set()
            wait_until(lambda: started and started[0]._stopping.is_set())

    monkeypatch.setattr(MemoryFile, "close", close)
    started.append(mirror("memory://backup"))
    assert is_closing.wait(timeout=10)
    started[0].stop()
    there = "/backup/ink-r1/train/step-00000005"
    assert memory.exists(f"{there}/state.json") and not memory.exists(f"{there}/{MANIFEST_NAME}")
    assert not MirrorReader(run, "memory://backup", {}).holds(row)
    _until_idle(mirror("memory://backup"))
    assert MirrorReader(run, "memory://backup", {}).holds(row)


def test_an_empty_manifest_is_none(engine, run, mirror, memory, tmp_path):
    _saved(engine, run, 5)
    [row] = rows.of_run(engine, run.id, "verified")
    memory.pipe_file(f"/backup/ink-r1/train/step-00000005/{MANIFEST_NAME}", b"")
    assert not MirrorReader(run, "memory://backup", {}).holds(row)
    _until_idle(mirror("memory://backup"))
    assert _fetched(memory, tmp_path, "train/step-00000005").step == 5


@pytest.mark.parametrize("what", ["sparse", "pipe", "link", "folder"])
def test_what_is_no_manifest_is_not_read_and_is_replaced(engine, run, mirror, tmp_path, what):
    _saved(engine, run, 5)
    [row] = rows.of_run(engine, run.id, "verified")
    place = tmp_path / "mirror" / "ink-r1/train/step-00000005" / MANIFEST_NAME
    place.parent.mkdir(parents=True)
    if what == "sparse":
        place.touch()
        os.truncate(place, 1 << 40)
    elif what == "pipe":
        os.mkfifo(place)
    elif what == "link":
        place.symlink_to("/dev/zero")
    else:
        place.mkdir()
    assert not MirrorReader(run, str(tmp_path / "mirror"), {}).holds(row)
    if what != "folder":
        _until_idle(mirror(tmp_path / "mirror"))
        assert MirrorReader(run, str(tmp_path / "mirror"), {}).holds(row)


def test_a_huge_manifest_of_an_object_store_is_not_read(engine, run, memory):
    _saved(engine, run, 5)
    [row] = rows.of_run(engine, run.id, "verified")
    memory.pipe_file(f"/backup/ink-r1/train/step-00000005/{MANIFEST_NAME}", b" " * (MAX_MANIFEST_BYTES + 1))
    assert not MirrorReader(run, "memory://backup", {}).holds(row)


def test_what_retention_dropped_is_removed_only_once_a_newer_one_is_whole_there(engine, run, mirror, tmp_path):
    (tmp_path / "backup").mkdir()
    first = _saved(engine, run, 1)
    one = mirror(tmp_path / "backup")
    _until_idle(one)
    second = _saved(engine, run, 2)
    (second / "rank1.safetensors").unlink()  # cannot be sent
    rows.set_state(engine, str(first), "dropped")
    shutil.rmtree(first)
    one.wake()
    [(kind, facts)] = _until_idle(one)
    assert kind == "mirror_failed" and "rank1.safetensors" in facts["why"] and facts["holds"] == "train 1"
    there = tmp_path / "backup" / "ink-r1" / "train"
    assert [verify_checkpoint(folder).step for folder in list_checkpoints(there)] == [1]
    _saved(engine, run, 2)
    one.wake(now=True)
    _until_idle(one)
    assert [path.name for path in there.iterdir()] == ["step-00000002"] and verify_checkpoint(there / "step-00000002")


def test_what_only_did_not_come_here_from_another_machine_stays_in_the_mirror(engine, run, mirror, tmp_path):
    (tmp_path / "backup").mkdir()
    first = _saved(engine, run, 1)
    _saved(engine, run, 2)
    _until_idle(mirror(tmp_path / "backup"))
    shutil.rmtree(first)
    rows.set_state(engine, str(first), "dropped", "it stayed on the machine over-there")
    _until_idle(mirror(tmp_path / "backup"))
    there = tmp_path / "backup" / "ink-r1" / "train"
    assert [verify_checkpoint(folder).step for folder in list_checkpoints(there)] == [2, 1]


def test_a_place_that_is_not_there_is_told_once_and_tried_again(engine, run, mirror, tmp_path):
    _saved(engine, run, 1)
    one = mirror("backup")  # relative to the plan's folder
    assert [kind for kind, _ in _until_idle(one)] == ["mirroring", "mirror_failed"]
    one.wake(now=True)
    assert _until_idle(one) == []
    assert not (tmp_path / "backup").exists(), "it may be a disk that is not mounted"
    (tmp_path / "backup").mkdir()
    one.wake(now=True)
    assert [kind for kind, _ in _until_idle(one)] == ["mirrored"]


class Refuses(fsspec.AbstractFileSystem):
    """A far place that says too much."""

    protocol = "refuses"

    def __init__(self, key="", client=None, **options):
        super().__init__(**options)
        self.said = f"key {key} of {client} refused"

    def open(self, path, *args, **options):
        raise PermissionError(self.said)


def test_no_secret_comes_into_a_note(engine, run, mirror):
    _saved(engine, run, 1)
    fsspec.register_implementation("refuses", Refuses, clobber=True)
    notes = _until_idle(mirror("refuses://user:hunter2@far/x", key="s3cr3t", client={"password": ["hunter3"]}))
    assert [kind for kind, _ in notes] == ["mirroring", "mirror_failed"] and "PermissionError" in notes[1][1]["why"]
    assert not [word for word in ("hunter2", "s3cr3t", "hunter3") if word in str(notes)]


@pytest.mark.parametrize(
    ("mirror", "said"),
    [
        ('"s3://bucket/x"', "needs the package s3fs"),
        ('"sftp://host/x"', 'SFTPFileSystem requires "paramiko"'),
        ('"s4://bucket/x"', "fsspec knows no 's4' (did you mean 's3'?)"),
    ],
)
def test_a_mirror_that_nobody_here_can_speak_to_is_refused_before_anything_starts(kgorch, mirror, said):
    if installed := [name for name in ("s3fs", "paramiko") if name in said and importlib.util.find_spec(name)]:
        pytest.skip(f"{installed[0]} is installed")
    done = kgorch("start", str(_plan(kgorch, mirror)), code=2)
    assert said in done.stderr and "next:" in done.stderr and "pip install fsspec" not in done.stderr
    assert not list(kgorch.home.glob("runs/*/*"))


MIRRORS = """
import os, signal, sys; from pathlib import Path; from test_mirror import Mirror, open_database, runs, wait_until
engine, flush, left = open_database(Path(sys.argv[1]) / "home"), os.fsync, int(sys.argv[2])
def fsync(descriptor):
    global left
    left -= 1
    if not left: os.kill(os.getpid(), signal.SIGKILL)
    flush(descriptor)
os.fsync = fsync
mirror = Mirror(engine, runs.newest(engine, "ink"), "backup", {}, lambda kind, facts: None)
wait_until(lambda: not mirror.is_busy)
"""


def test_mirrors_killed_at_every_flush_leave_no_half_checkpoint_and_the_next_goes_on(engine, run, tmp_path):
    for step in (1, 2):
        _saved(engine, run, step)
    (tmp_path / "backup").mkdir()
    there, cut = tmp_path / "backup" / "ink-r1" / "train", set()
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])}
    for flushes in range(1, 30):
        done = subprocess.run([sys.executable, "-c", MIRRORS, str(tmp_path), str(flushes)], env=env)
        for folder in there.glob("step-*"):
            if (folder / MANIFEST_NAME).exists():
                verify_checkpoint(folder)
            else:
                cut.add((folder.name, len(list(folder.iterdir()))))
        if done.returncode == 0:
            break
    assert len(cut) > 3, "it was cut in the middle, at many places"
    assert [verify_checkpoint(folder).step for folder in list_checkpoints(there)] == [2, 1]
    assert not list(there.rglob("*.tmp"))


# In a run


def _plan(kgorch, mirror, **changes):
    plan = kgorch.plan(**changes)
    plan.write_text(plan.read_text().replace("[checkpoint]", f"[checkpoint]\nmirror = {mirror}"))
    return plan


def _mirrored(kgorch, place):
    [folder] = place.glob("test-*")
    return [verify_checkpoint(path) for path in list_checkpoints(folder / "train")]


def test_a_run_is_mirrored_as_it_trains_and_what_was_missed_follows_at_a_sessions_end(kgorch):
    place, away = kgorch.folder / "backup", kgorch.folder / "not mounted"
    place.mkdir()
    plan = _plan(kgorch, '"backup"', args={"epochs": 10_000, "sleep": 0.05}, every="1s")
    kgorch.background("start", str(plan))
    wait_until(lambda: kgorch.try_status() and len(kgorch.events("mirrored")) > 2)
    kgorch.kill_everything()
    wait_until(lambda: not processes_of(kgorch.home))
    [folder] = place.glob("test-*")
    # one that the kill has cut short has no manifest yet, and is written again
    assert sum(1 for path in folder.glob("train/step-*/manifest.json") if verify_checkpoint(path.parent)) >= 2
    place.rename(away)
    saved = len(kgorch.events("checkpoint_verified"))
    supervisor = kgorch.background("start", str(plan))
    wait_until(lambda: len(kgorch.events("checkpoint_verified")) > saved + 1, what="training goes on")
    [notice] = kgorch.status()["notices"]
    assert "the mirror fails" in notice and "no such folder to mirror into" in notice
    assert notice in kgorch("status").stdout and not place.exists()
    away.rename(place)
    kgorch("stop")
    assert supervisor.wait(timeout=60) == 10
    assert kgorch.status()["notices"] == []
    found = _mirrored(kgorch, place)
    assert found[0].step == kgorch.status()["checkpoint"]["step"], "it was tried once more at the end"
    assert {item.step for item in found} == {read_checkpoint(path).step for path in kgorch.checkpoints()}


def test_a_mirror_that_is_full_disturbs_nothing_but_itself(kgorch):
    place = kgorch.folder / "small"
    place.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(place)], capture_output=True).returncode:
        pytest.skip("no right to mount a small file system")
    try:
        plan = _plan(kgorch, '"small"', ranks=1, args={"epochs": 20, "sleep": 0.02, "pad": 500_000}, every="1s")
        kgorch("start", str(plan))
        assert kgorch.status()["state"] == "finished" and not kgorch.events("save_failed")
        assert len(kgorch.events("mirror_failed")) == 1, "once a cause"
        [notice] = kgorch.status()["notices"]
        assert "No space left" in notice
    finally:
        kgorch.kill_everything()
        subprocess.run(["umount", "-l", str(place)], check=True)


class Hangs(fsspec.AbstractFileSystem):
    """A far place that never answers."""

    protocol = "hangs"

    def open(self, path, *args, **options):
        threading.Event().wait()


def test_a_mirror_that_hangs_holds_neither_the_training_up_nor_the_end_of_a_session_beyond_its_wall(kgorch):
    program = """
import sys, fsspec; from test_mirror import Hangs; from kgorch.cli import main
fsspec.register_implementation("hangs", Hangs); sys.exit(main())
"""
    plan = _plan(kgorch, '"hangs://far"', args={"epochs": 10_000, "sleep": 0.05}, every="1s", margin="20s")
    env = kgorch.env() | {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])}
    supervisor = subprocess.Popen([sys.executable, "-c", program, "start", str(plan)], cwd=kgorch.folder, env=env)
    kgorch.started.append(supervisor)
    wait_until(lambda: kgorch.try_status() and len(kgorch.events("checkpoint_verified")) > 1, what="training goes on")
    supervisor.terminate()
    assert supervisor.wait(timeout=SIGTERM_GRACE_S + 20) == 10, "long before the minute that it has without a wall"
    assert END_S > SIGTERM_GRACE_S + 20
    [notice] = kgorch.status()["notices"]
    assert "the mirror is behind: it holds nothing of this run yet" in notice
