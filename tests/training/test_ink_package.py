"""The submission: run lengths that decode to the picture, and an archive whose bytes depend on it alone."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from orchestrator.errors import KgorchError
from workloads.ink_detection.package import run_lengths, submission, write_archive


def decoded(text: str, shape: tuple[int, int]) -> np.ndarray:
    """Pixel by pixel, as the competition explains it: pairs of start and length, counted from 1, row by row."""
    numbers = [int(word) for word in text.split()]
    pixels = np.zeros(shape[0] * shape[1], bool)
    for start, length in zip(numbers[::2], numbers[1::2], strict=True):
        for pixel in range(start, start + length):
            assert not pixels[pixel - 1]
            pixels[pixel - 1] = True
    return pixels.reshape(shape)


@given(st.integers(1, 7), st.integers(1, 7), st.data())
def test_run_lengths_decode_to_the_same_picture(rows: int, columns: int, data: st.DataObject) -> None:
    pixels = data.draw(st.lists(st.booleans(), min_size=rows * columns, max_size=rows * columns))
    ink = np.array(pixels).reshape(rows, columns)
    np.testing.assert_array_equal(decoded(run_lengths(ink), ink.shape), ink)


@pytest.mark.parametrize(
    ("picture", "expected"),
    [([[0, 1], [1, 0]], "2 2"), ([[1, 0], [0, 1]], "1 1 4 1"), ([[1, 1], [1, 1]], "1 4"), ([[0, 0], [0, 0]], "")],
)
def test_runs_are_counted_from_one_and_go_on_into_the_next_row(picture: list[list[int]], expected: str) -> None:
    assert run_lengths(np.array(picture) > 0) == expected


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    folder = tmp_path / "outputs" / "predictions" / "binary"
    folder.mkdir(parents=True)
    for name, pixels in (("b", [[0, 255], [255, 0]]), ("a", [[255, 0], [0, 0]])):
        Image.fromarray(np.array(pixels, np.uint8)).save(folder / f"{name}.png")
    return folder


def test_the_table_has_one_line_a_fragment(pictures: Path) -> None:
    assert submission(pictures) == "Id,Predicted\na,1 1\nb,2 2\n"


def test_nothing_to_package_names_the_folder_and_the_stage_to_run(tmp_path: Path) -> None:
    with pytest.raises(KgorchError, match=r"expected FRAGMENT\.png, found none\nnext: run the predict stage"):
        submission(tmp_path)


def test_an_archive_written_later_has_the_same_bytes(
    pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_archive(tmp_path / "now.zip", submission(pictures))
    monkeypatch.setattr("time.time", lambda: 2e9)
    monkeypatch.setattr("time.localtime", lambda *_: (2033, 5, 18, 3, 33, 20, 2, 138, 0))
    write_archive(tmp_path / "later.zip", submission(pictures))
    assert (tmp_path / "now.zip").read_bytes() == (tmp_path / "later.zip").read_bytes()
    assert zipfile.ZipFile(tmp_path / "now.zip").read("submission.csv").decode() == submission(pictures)


def test_packaging_runs_alone_and_without_torch(pictures: Path, tmp_path: Path) -> None:
    script = "import sys; sys.modules['torch'] = None; from workloads.ink_detection.package import main; main()"
    subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, env={"PYTHONPATH": str(Path(__file__).parents[2])}, check=True
    )
    assert zipfile.ZipFile(tmp_path / "outputs" / "submission.zip").namelist() == ["submission.csv"]
