"""A copy of mounted data: whole or not there, whatever happens to its process, its source or its disk."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from harness import Notes, wait_until

from kgorch.plan import DataSection
from kgorch.protocol.launch_spec import LaunchSpec
from kgorch.protocol.run_files import CACHE_COMPLETE_FILE
from kgorch.services import data_cache_process
from kgorch.services.data_cache import DataCache
from kgorch.services.data_cache_process import Cache
from kgorch.worker.data.cached_path import CachedPaths


@pytest.fixture
def source(tmp_path):
    folder = tmp_path / "mounted"
    (folder / "deep" / "er").mkdir(parents=True)
    for name in ("b.bin", "a.bin", "deep/c.bin", "deep/er/d.bin"):
        (folder / name).write_bytes(os.urandom(10_000))
    (folder / "empty").write_bytes(b"")
    return folder


class Served:
    """A cache in this process; each `Served` is another process to it."""

    def __init__(self, source: Path, folder: Path, reserve: int = 0) -> None:
        self.told: list[tuple[str, dict[str, str]]] = []
        self.cache = Cache(str(source), folder, reserve, lambda kind, facts: self.told.append((kind, facts)))
        self.folder, self.copy = folder, folder / source.name
        self.cache.attend()

    @property
    def last(self) -> tuple[str, str]:
        kind, facts = self.told[-1]
        return kind, facts.get("copied_bytes", facts.get("why", ""))

    def again(self) -> Served:
        os.close(self.cache._lock)
        return Served(self.cache._source, self.folder, self.cache._reserve_bytes)

    @property
    def is_whole(self) -> bool:
        return (self.folder / CACHE_COMPLETE_FILE).exists()


def _content(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()
    }


def test_a_copy_has_every_byte_and_time_and_is_not_made_twice(source, tmp_path):
    made = Served(source, tmp_path / "cache")
    assert made.last == ("data_cached", "40000") and made.is_whole
    assert _content(made.copy) == _content(source)
    assert (made.copy / "a.bin").stat().st_mtime_ns == (source / "a.bin").stat().st_mtime_ns
    described = json.loads((made.folder / CACHE_COMPLETE_FILE).read_text())["files"]
    assert described.keys() == _content(source).keys()
    assert made.again().last == ("data_cached", "0")


def test_a_single_file_keeps_its_name(source, tmp_path):
    made = Served(source / "a.bin", tmp_path / "cache")
    assert made.copy.name == "a.bin" and made.copy.read_bytes() == (source / "a.bin").read_bytes() and made.is_whole
    made.copy.write_bytes(b"rotten")
    assert made.again().last == ("data_cached", "10000")


def test_a_copy_that_has_rotted_is_found_and_copied_again_before_it_is_used(source, tmp_path):
    made = Served(source, tmp_path / "cache")
    rotten, at = made.copy / "deep" / "c.bin", (made.copy / "deep" / "c.bin").stat()
    rotten.write_bytes(os.urandom(10_000))
    os.utime(rotten, ns=(at.st_atime_ns, at.st_mtime_ns))  # size and time tell nothing
    again = made.again()
    assert again.last == ("data_cached", "10000") and _content(again.copy) == _content(source)


def test_a_source_that_changes_makes_the_copy_stale_until_it_is_made_again(source, tmp_path):
    made = Served(source, tmp_path / "cache")
    (source / "a.bin").write_bytes(b"new")
    (source / "b.bin").unlink()
    (source / "deep" / "er" / "d.bin").unlink()
    (source / "deep" / "er").rmdir()
    (source / "e.bin").write_bytes(b"added")
    made.cache.attend()
    assert [kind for kind, _ in made.told] == ["data_cached", "data_cache_stale", "data_cached"]
    assert _content(made.copy) == _content(source) and not (made.copy / "deep" / "er").exists()


def test_a_source_that_changes_during_the_copy_is_not_taken_for_whole(source, tmp_path, monkeypatch):
    real = data_cache_process.copy_durably

    def meanwhile(reading, writing):
        digest = real(reading, writing)
        (source / "b.bin").write_bytes(b"longer or shorter")
        return digest

    monkeypatch.setattr(data_cache_process, "copy_durably", meanwhile)
    made = Served(source, tmp_path / "cache")
    assert made.last[0] == "data_cache_failed" and "changes while it is copied" in made.last[1] and not made.is_whole
    monkeypatch.undo()
    made.cache.attend()
    assert made.last[0] == "data_cached" and _content(made.copy) == _content(source)


@pytest.mark.parametrize("odd", ["a symbolic link", "no regular file"])
def test_links_and_pipes_are_refused_by_name(source, tmp_path, odd):
    if odd == "a symbolic link":
        (source / "deep" / "odd").symlink_to(source / "a.bin")
    else:
        os.mkfifo(source / "deep" / "odd")
    made = Served(source, tmp_path / "cache")
    assert made.last[0] == "data_cache_failed" and f"deep/odd is {odd}" in made.last[1] and not made.is_whole
    made.cache.attend()
    assert len(made.told) == 1, "said once"


def test_a_cache_inside_of_its_source_is_refused(source):
    made = Served(source, source / "cache")
    assert made.last == ("data_cache_failed", "the cache would lie inside of its source")


def test_a_disk_that_must_keep_room_is_not_filled(source, tmp_path):
    made = Served(source, tmp_path / "cache", reserve=1 << 60)
    assert made.last[0] == "data_cache_failed" and "are to stay free" in made.last[1]
    assert not made.copy.exists() and not made.is_whole


def test_a_copy_that_is_whole_stays_when_the_next_process_finds_less_room_than_is_to_stay_free(source, tmp_path):
    made = Served(source, tmp_path / "cache")
    made.cache._reserve_bytes = 1 << 60
    again = made.again()
    assert again.last == ("data_cached", "0") and again.is_whole and _content(again.copy) == _content(source)


def test_a_source_that_grows_with_no_room_left_takes_nothing_from_who_still_reads_the_copy(
    source, tmp_path, monkeypatch
):
    made, before = Served(source, tmp_path / "cache"), _content(source)
    for name in ("new1.bin", "new2.bin"):
        (source / name).write_bytes(os.urandom(10_000))
    real, asked = Cache._check_room, []

    def check_room(cache, need_bytes):  # others fill the disk once one of the two is copied
        asked.append(need_bytes)
        cache._reserve_bytes = 1 << 60 if len(asked) == 3 else 0
        real(cache, need_bytes)

    monkeypatch.setattr(Cache, "_check_room", check_room)
    made.cache.attend()
    assert asked == [20_000, 10_000, 10_000]
    assert made.last[0] == "data_cache_failed" and "are to stay free" in made.last[1] and not made.is_whole
    assert _content(made.copy) == before
    asked.clear()
    made.cache.attend()
    assert made.last == ("data_cache_failed", made.last[1]) and _content(made.copy) == before
    monkeypatch.undo()
    made.cache._reserve_bytes = 0
    made.cache.attend()
    assert made.last == ("data_cached", "20000") and _content(made.copy) == _content(source)


def test_a_full_disk_gets_its_room_back(source, tmp_path, monkeypatch):
    place = tmp_path / "small"
    place.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=128k", "tmpfs", str(place)], capture_output=True).returncode:
        pytest.skip("no right to mount a small file system")
    try:
        others, empty = place / "others.bin", os.statvfs(place)

        def too_late(_):  # others fill the disk after we have looked
            others.write_bytes(b"x" * (100 << 10))
            return empty

        with monkeypatch.context() as patch:
            patch.setattr(os, "statvfs", too_late)
            made = Served(source, place / "cache")
        assert made.last[0] == "data_cache_failed" and "No space left" in made.last[1]
        assert not made.copy.exists() and not made.is_whole
        others.unlink()
        made.cache.attend()
        assert made.last == ("data_cached", "40000") and _content(made.copy) == _content(source)
        os.close(made.cache._lock)
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True)


def test_two_runs_share_a_copy_and_one_makes_it(source, tmp_path):
    first = Served(source, tmp_path / "cache")
    second = Served(source, tmp_path / "cache")
    assert second.told[-1][0] == "data_cached" and second.told[-1][1]["by"] == "another run"
    (first.folder / CACHE_COMPLETE_FILE).unlink()
    second.cache.attend()
    assert second.last[0] == "data_cache_stale"


def test_a_process_that_is_killed_in_the_midst_of_it_costs_one_file_and_its_successor_goes_on(tmp_path):
    source = tmp_path / "mounted"
    source.mkdir()
    for number in range(300):
        (source / f"{number:03}.bin").write_bytes(os.urandom(20_000))
    order = {"caches": {str(source): str(tmp_path / "cache")}, "reserve": 0}
    ledger = tmp_path / "cache" / "copied.jsonl"

    def start():
        command = [sys.executable, "-m", "kgorch.services.data_cache_process", json.dumps(order)]
        return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)

    killed = start()
    wait_until(lambda: ledger.exists() and len(ledger.read_text().splitlines()) > 5, what="some files")
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    done = len(ledger.read_text().splitlines())
    assert done < 300 and not (tmp_path / "cache" / CACHE_COMPLETE_FILE).exists()
    successor = start()
    kind, facts = json.loads(successor.stdout.readline())
    assert os.getpriority(os.PRIO_PROCESS, successor.pid) == 19
    successor.kill()
    successor.communicate()
    killed.stdout.close()
    assert kind == "data_cached" and int(facts["copied_bytes"]) == (300 - done) * 20_000
    assert _content(tmp_path / "cache" / "mounted") == _content(source)


def test_a_ledger_whose_last_line_was_cut_is_read_up_to_it(source, tmp_path):
    made = Served(source, tmp_path / "cache")
    ledger = made.folder / "copied.jsonl"
    ledger.write_text(ledger.read_text()[:-20])
    assert made.again().last == ("data_cached", "0")  # the last one is empty here


def test_a_path_goes_over_at_an_epochs_end_and_back_when_the_copy_is_stale(source, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    made = Served(source, tmp_path / "cache")
    launch = LaunchSpec(
        "r", "i", "s", "1.1", str(tmp_path), "e", "w", 1, "", "", "", "", data={str(source): str(made.folder)}
    )
    data = CachedPaths(launch, 0)
    path, below = data.path("mounted"), data.path("mounted/deep") / "c.bin"
    assert os.fspath(path) == "mounted" and os.path.join(path, "a.bin") == "mounted/a.bin"
    data.look()
    assert os.fspath(path) == str(made.copy) and os.fspath(below) == str(made.copy / "deep" / "c.bin")
    assert (
        os.fspath(data.path("mountedx")) == "mountedx" and os.fspath(CachedPaths(None, 0).path("mounted")) == "mounted"
    )
    (made.folder / CACHE_COMPLETE_FILE).unlink()
    data.look()
    assert os.fspath(below) == "mounted/deep/c.bin"


def test_arguments_that_name_a_source_are_replaced_once_its_copy_is_whole(source, tmp_path):
    data = DataCache(DataSection(cache=["mounted"], into="local", reserve=1), tmp_path, Notes())
    try:
        kind, facts = data._note.get(timeout=60)
        args = {"data": "mounted", "same": str(source), "other": "mounted/deep", "lr": 0.1, "none": ""}
        assert kind == "data_cached"
        replaced = data.args(args, workdir=str(tmp_path))
        assert replaced == args | {"data": facts["copy"], "same": facts["copy"]}
    finally:
        data.stop()


def test_unasked_only_what_lies_on_another_disk_is_copied_and_only_once_the_training_waits(source, tmp_path):
    with tempfile.TemporaryDirectory(dir="/dev/shm") as other:
        far = Path(other, "far")
        far.mkdir()
        (far / "a.bin").write_bytes(b"far")
        if far.stat().st_dev == tmp_path.stat().st_dev:
            pytest.skip("one disk alone")
        stages = [{"data": str(far), "near": "mounted", "lr": 0.1, "name": "resnet"}]
        data = DataCache(DataSection(cache="auto", into=str(tmp_path / "local"), reserve=1), tmp_path, Notes(), stages)
        try:
            assert list(data.caches) == [str(far)]
            for wait, count in ((0.0, 120), (0.5, 40)):
                for second in range(count):
                    data.consider({"rank0.step_s": 0.1, "rank0.data_wait": wait, "host.cpu": float(second)})
                assert (data._process is not None) == (wait > 0)
            assert data._note.get(timeout=60)[0] == "data_cached"
        finally:
            data.stop()
