"""The file or link that names a foreign program's newest checkpoint: it names the one that is handed, and loses nothing else."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from kgorch.errors import KgorchError
from kgorch.plan.foreign import LatestSection
from kgorch.worker.foreign.latest_pointer import LatestPointer

PATTERN = "out/step_*"


def pointer(root: Path, pattern: str = PATTERN, **section: str) -> LatestPointer:
    return LatestPointer(root, pattern, LatestSection(**section).model_dump())


@pytest.fixture
def root(tmp_path):
    for number in ("0000100", "0000200"):
        folder = tmp_path / "out" / f"step_{number}"
        folder.mkdir(parents=True)
        (folder / "model.bin").write_bytes(b"weights")
    return tmp_path


@pytest.mark.parametrize(
    ("text", "written"),
    [
        ("{name}", "step_0000100"),
        ("{checkpoint}\n", "out/step_0000100\n"),
        ("{number}", "100"),
        ("v1 {name} {number}", "v1 step_0000100 100"),
    ],
)
def test_a_file_names_what_is_handed_in_the_words_of_the_plan_and_is_not_touched_again(root, text, written):
    latest, path = pointer(root, file="out/latest", text=text), root / "out" / "latest"
    path.write_text("step_0000200")
    assert "and held 'step_0000200'" in latest.set("out/step_0000100")
    before = path.stat()
    assert path.read_text() == written and latest.set("out/step_0000100") == "" and path.stat() == before
    assert latest.problem() == ""
    path.unlink()
    assert "and held" not in latest.set("out/step_0000100") and path.read_text() == written, "on a new machine"


def test_a_link_leads_to_what_is_handed_from_wherever_it_lies(root):
    latest, path = pointer(root, link="newest/here"), root / "newest" / "here"
    assert latest.set("out/step_0000100") and path.resolve() == root / "out" / "step_0000100"
    assert latest.set("out/step_0000200") and (path / "model.bin").read_bytes() == b"weights"
    assert latest.set("out/step_0000200") == latest.problem() == ""


def test_what_names_no_checkpoint_is_moved_aside_where_none_is_handed(root):
    latest, path = pointer(root, file="out/latest"), root / "out" / "latest"
    assert latest.set("") == "", "there is none"
    path.write_text("step_0000200")
    assert "goes on from there" in latest.set("") and path.exists(), (
        "another run's checkpoint lies there, and it names that"
    )
    path.write_text("step_0000300")
    assert "'step_0000300', which is no checkpoint that is there" in latest.set("") and not path.exists()
    assert [kept.read_text() for kept in (root / "out" / ".kgorch-aside").iterdir()] == ["step_0000300"]
    link = pointer(root, link="out/link")
    (root / "out" / "link").symlink_to("step_0000300")
    assert link.set("") and not os.path.lexists(root / "out" / "link")


def as_written(path: Path) -> tuple[int, ...]:
    found = path.lstat()  # without the time of the last read
    return found.st_ino, found.st_mode, found.st_size, found.st_mtime_ns, found.st_ctime_ns


def test_nothing_else_is_overwritten(root):
    """As where the plan names a file of results."""
    for name, make in {
        "folder": Path.mkdir,
        "long": lambda path: path.write_text("x" * 300),
        "lines": lambda path: path.write_text("loss 0.1\nloss 0.2\n"),
        "pipe": os.mkfifo,
    }.items():
        make(root / "out" / name)
        before = as_written(root / "out" / name)
        with pytest.raises(KgorchError, match=f"out/{name} is no file with the name of a checkpoint"):
            pointer(root, file=f"out/{name}").set("out/step_0000100")
        assert as_written(root / "out" / name) == before and "is no file" in pointer(root, file=f"out/{name}").problem()
    (root / "out" / "latest").write_text("step_0000100")
    with pytest.raises(KgorchError, match="out/latest is no link"):
        pointer(root, link="out/latest").set("out/step_0000100")
    with pytest.raises(KgorchError, match="cannot be used: Not a directory"):
        pointer(root, file="out/latest/here").set("out/step_0000100")


def test_a_number_that_a_name_does_not_have_is_an_error_and_a_check_says_what_is_wrong(root):
    latest = pointer(root, "out/*", file="latest", text="{number}")
    (root / "out" / "best").mkdir()
    (root / "out" / "best" / "model.bin").write_bytes(b"weights")
    with pytest.raises(KgorchError, match="latest cannot name out/best"):
        latest.set("out/best")
    assert latest.problem() in ("latest holds nothing, expected '200'", "latest holds nothing, expected '100'")
    (root / "latest").write_text("step_0000200")
    assert "latest holds 'step_0000200', expected '" in latest.problem()
    (root / "latest").write_text("100\n")
    assert latest.problem() == ""
    shutil.rmtree(root / "out" / "step_0000100")
    shutil.rmtree(root / "out" / "step_0000200")
    assert "expected the number of a checkpoint, and none has one" in latest.problem()
