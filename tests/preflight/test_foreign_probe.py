"""The folder in which a check runs a program of [stage.foreign]: that of the plan, without the checkpoints."""

from __future__ import annotations

import pytest

from kgorch.preflight.foreign_probe import stand_in_folder


@pytest.mark.parametrize(
    ("place", "hidden"),
    [
        ("out/last.pt", {"out"}),
        ("out*/last.pt", {"out", "out-2"}),
        ("*.pt", {"old.pt"}),
        ("*/weights/last.pt", {"out"}),  # only that has some
        ("*/*/weights/last.pt", {"runs"}),
        ("*", set()),
        ("", set()),
    ],
)
def test_what_checkpoints_lie_in_is_left_out_and_the_program_is_not(tmp_path, place, hidden):
    """Of `*/…` nothing was left, and the check said that there is no train.py."""
    work = tmp_path / "work"
    for folder in ("out/weights", "out-2", "runs/exp/weights", "data"):
        (work / folder).mkdir(parents=True)
    for file in ("train.py", "old.pt", "out/weights/last.pt", "runs/exp/weights/last.pt"):
        (work / file).touch()
    everything = {entry.name for entry in work.iterdir()}
    made = stand_in_folder(work, tmp_path / "made", [place])
    assert {entry.name for entry in made.iterdir()} == everything - hidden
