"""Locks of the state folder, whatever is done to the files that they lie on."""

from __future__ import annotations

import fcntl
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from kgorch.hardware import gpu_locks
from kgorch.system import process_identity
from kgorch.system.file_lock import FileLock, is_locked


def holder(path: Path) -> subprocess.Popen[str]:
    """Another process that holds the lock until its stdin is closed."""
    program = "from kgorch.system.file_lock import FileLock\nfrom pathlib import Path\n"
    program += f"lock = FileLock(Path({str(path)!r}))\n"
    program += "print(lock.acquire(), flush=True)\ninput()"
    made = subprocess.Popen(
        [sys.executable, "-c", program],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert made.stdout and made.stdout.readline() == "True\n"
    return made


@pytest.mark.parametrize("what", ["deleted", "replaced"])
def test_a_lock_whose_file_was_removed_is_held_again_once_its_holder_has_looked(tmp_path, what):
    path = tmp_path / "runs" / "test" / "lock"
    ours = FileLock(path)
    assert ours.acquire() and ours.refresh()
    path.unlink()
    if what == "replaced":
        path.touch()
    assert not is_locked(path)
    assert ours.refresh() and is_locked(path) and not FileLock(path).acquire()
    ours.release()
    assert not is_locked(path) and FileLock(path).acquire()


def test_a_lock_that_another_took_after_its_file_was_removed_is_not_ours_any_more(tmp_path):
    path = tmp_path / "lock"
    ours = FileLock(path)
    assert ours.acquire()
    path.unlink()
    other = holder(path)
    try:
        assert not ours.refresh()
    finally:
        other.communicate("\n")
    assert ours.refresh()


def test_a_lock_taken_on_a_file_that_was_just_replaced_is_taken_on_the_one_that_is_there(tmp_path, monkeypatch):
    """Between opening it and locking it somebody has put another file there, which a third process may lock."""
    path, lock_file = tmp_path / "lock", fcntl.flock

    def replaced_before_the_lock(descriptor: int, how: int) -> None:
        monkeypatch.setattr(fcntl, "flock", lock_file)
        path.unlink()
        path.touch()
        lock_file(descriptor, how)

    monkeypatch.setattr(fcntl, "flock", replaced_before_the_lock)
    ours = FileLock(path)
    assert ours.acquire() and is_locked(path)
    ours.release()

    other = holder(path)
    try:
        path.rename(tmp_path / "held")
        path.touch()

        def restored_before_the_lock(descriptor: int, how: int) -> None:
            monkeypatch.setattr(fcntl, "flock", lock_file)
            (tmp_path / "held").rename(path)
            lock_file(descriptor, how)

        monkeypatch.setattr(fcntl, "flock", restored_before_the_lock)
        assert is_locked(path)
    finally:
        other.communicate("\n")


def test_a_lock_moves_with_its_folder(tmp_path):
    path = tmp_path / "home" / "lock"
    ours = FileLock(path)
    assert ours.acquire()
    (tmp_path / "home").rename(tmp_path / "home2")
    assert is_locked(tmp_path / "home2" / "lock")
    assert ours.refresh() and is_locked(tmp_path / "home2" / "lock")
    ours.release()
    assert not is_locked(tmp_path / "home2" / "lock")


def test_who_only_asks_whether_a_lock_is_held_keeps_nobody_from_taking_it(tmp_path):
    path, is_over = tmp_path / "lock", threading.Event()
    path.touch()

    def ask() -> None:
        while not is_over.wait(0.001):
            is_locked(path)

    asking = threading.Thread(target=ask)
    asking.start()
    try:
        for _ in range(200):
            lock = FileLock(path)
            assert lock.acquire()
            lock.release()
    finally:
        is_over.set()
        asking.join()


def test_which_process_holds_a_file_of_which_folder_is_a_question_to_the_kernel(tmp_path):
    path = tmp_path / "home" / "lock"
    other = holder(path)
    try:
        assert process_identity.has_open_file(other.pid, path)
        path.unlink()
        assert process_identity.has_open_file(other.pid, path)
        path.touch()
        assert process_identity.has_open_file(other.pid, path)
        (tmp_path / "copy").mkdir()
        (tmp_path / "copy" / "lock").touch()
        assert not process_identity.has_open_file(other.pid, tmp_path / "copy" / "lock")
        (tmp_path / "link").symlink_to(tmp_path / "home")
        assert process_identity.has_open_file(other.pid, tmp_path / "link" / "lock")
    finally:
        other.communicate("\n")
    assert not process_identity.has_open_file(other.pid, path)


def test_a_device_whose_lock_file_is_removed_is_claimed_again(tmp_path):
    device = gpu_locks.LockableGpu("GPU-1", "0")
    claim = gpu_locks.GpuLocks(*gpu_locks._lock(tmp_path, [device], 1, share=False), tmp_path)
    (tmp_path / "devices" / "GPU-1.lock").unlink()
    assert gpu_locks.count_free_and_shared(tmp_path, [device]) == (1, 0)
    claim.refresh()
    assert gpu_locks.count_free_and_shared(tmp_path, [device]) == (0, 0)
    claim.release()
    assert gpu_locks.count_free_and_shared(tmp_path, [device]) == (1, 0)
