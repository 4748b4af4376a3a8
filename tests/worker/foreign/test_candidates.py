"""What lies at the place of a foreign program's checkpoints is hostile: it is found within bounds, and nothing is followed."""

from __future__ import annotations

import errno
import os

import pytest

from kgorch.core.checkpoint import foreign_checkpoint
from kgorch.worker.foreign import candidates
from kgorch.worker.foreign.candidates import scan


def checkpoint(root, name, **files):
    folder = root / "out" / name
    folder.mkdir(parents=True)
    for file, content in (files or {"model": b"1"}).items():
        (folder / file).write_bytes(content)
    return folder


def test_folders_and_files_that_match_are_found_the_newest_first(tmp_path):
    for number, name in enumerate(("checkpoint-1000", "checkpoint-999")):
        folder = checkpoint(tmp_path, name, a=b"12", b=b"3")
        os.utime(folder / "a", ns=(number, 10**18 + number))
        os.utime(folder / "b", ns=(0, 0))
    checkpoint(tmp_path, "tmp-checkpoint-5")
    (tmp_path / "out" / "checkpoint-7").mkdir()
    found = scan(tmp_path, "out/checkpoint-*")
    assert [item.path for item in found] == ["out/checkpoint-999", "out/checkpoint-1000"], "an empty folder is none yet"
    assert found[0].files == ("a", "b") and found[0].bytes == 3 and found[0].newest_ns == 10**18 + 1
    (tmp_path / "ckpt.pt").write_bytes(b"12345")
    [single] = scan(tmp_path, "ckpt.pt")
    assert (single.path, single.is_folder, single.files, single.bytes) == ("ckpt.pt", False, ("ckpt.pt",), 5)


def test_wildcards_stand_for_parts_of_the_path_and_no_hidden_names(tmp_path):
    for version in ("version_0", ".version_1"):
        checkpoint(tmp_path, f"{version}/checkpoints/epoch=1")
    assert [item.path for item in scan(tmp_path, "out/*/checkpoints/*")] == ["out/version_0/checkpoints/epoch=1"]


def test_a_change_of_any_file_changes_the_signature_and_a_deletion_makes_nothing_newer(tmp_path):
    folder = checkpoint(tmp_path, "checkpoint-1", a=b"1", b=b"2")
    [before] = scan(tmp_path, "out/*")
    assert scan(tmp_path, "out/*") == [before]
    (folder / "b").unlink()
    [after] = scan(tmp_path, "out/*")
    assert after.signature != before.signature and after.newest_ns <= before.newest_ns


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda path: path.symlink_to("/etc/passwd"), "the link 'x'"),
        (lambda path: path.symlink_to("."), "the link 'x'"),
        (os.mkfifo, "'x', which is no file"),
        (lambda path: path.with_name("a\nb").touch(), "a name that cannot be stored"),
        (lambda path: path.with_name(os.fsdecode(b"\xff")).touch(), "a name that cannot be stored"),
    ],
)
def test_a_checkpoint_with_a_link_a_pipe_or_a_strange_name_is_not_taken_and_says_why(tmp_path, make, told):
    folder = checkpoint(tmp_path, "checkpoint-1")
    make(folder / "x")
    [found] = scan(tmp_path, "out/checkpoint-*")
    assert told in found.problem


def test_one_that_cannot_be_read_says_why_and_is_as_new_as_its_folder(tmp_path, monkeypatch):
    def refused(*_):
        raise PermissionError(errno.EACCES, "Permission denied")

    os.utime(checkpoint(tmp_path, "checkpoint-1"), ns=(0, 10**18))
    monkeypatch.setattr(candidates, "_walk", refused)
    [found] = scan(tmp_path, "out/checkpoint-*")
    assert (found.problem, found.newest_ns) == ("cannot be read: Permission denied", 10**18)


def test_a_link_in_the_place_of_a_checkpoint_is_no_checkpoint(tmp_path):
    checkpoint(tmp_path, "checkpoint-1")
    (tmp_path / "out" / "checkpoint-latest").symlink_to("checkpoint-1")
    assert [item.path for item in scan(tmp_path, "out/checkpoint-*")] == ["out/checkpoint-1"]


def test_too_many_files_and_too_many_folders_in_each_other_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(candidates, "MAX_FILES", 3)
    checkpoint(tmp_path, "checkpoint-1", **{f"f{number}": b"" for number in range(4)})
    deep = checkpoint(tmp_path, "checkpoint-2")
    deep.joinpath(*"abcdefghij").mkdir(parents=True)
    problems = {item.path: item.problem for item in scan(tmp_path, "out/checkpoint-*")}
    assert "more than 3 files" in problems["out/checkpoint-1"] and "nested deeper" in problems["out/checkpoint-2"]


def test_of_very_many_checkpoints_the_newest_are_looked_at(tmp_path, monkeypatch):
    monkeypatch.setattr(candidates, "MAX_CANDIDATES", 2)
    for number in range(5):
        os.utime(checkpoint(tmp_path, f"checkpoint-{number}") / "model", ns=(0, 10**18 + number))
    assert [item.path for item in scan(tmp_path, "out/*")] == ["out/checkpoint-4", "out/checkpoint-3"]
    assert foreign_checkpoint.MAX_CANDIDATES >= 100
