"""Turn the predicted pictures into the competition's submission; needs no torch.

    alone:  python -m workloads.ink_detection.package

Axes: H rows, W columns.
"""

from __future__ import annotations

import zipfile
from pathlib import Path

import numpy as np
from PIL import Image

from orchestrator.errors import KgorchError
from orchestrator.worker import output_folder
from workloads import cli

Image.MAX_IMAGE_PIXELS = 2**29  # see data.py, which is not imported here: it needs torch


def main(predictions: str = "predictions/binary", archive: str = "submission.zip") -> None:
    """Write the archive with submission.csv; both paths are relative to the output folder."""
    output = output_folder()
    write_archive(output / archive, submission(output / predictions))


def submission(folder: Path) -> str:
    """`Id,Predicted`, one line a picture, in the order of the fragments' names."""
    pictures = sorted(folder.glob("*.png"))
    if not pictures:
        raise KgorchError(
            "there is nothing to package", f"{folder}: expected FRAGMENT.png, found none",
            next_step="run the predict stage first",
        )  # fmt: skip
    lines = [f"{path.stem},{run_lengths(np.asarray(Image.open(path)) > 0)}" for path in pictures]
    return "\n".join(["Id,Predicted", *lines]) + "\n"


def run_lengths(ink_HW: np.ndarray) -> str:
    """`start length start length …` of the ink, row by row, pixels counted from 1."""
    padded = np.concatenate([[False], ink_HW.ravel(), [False]])
    edges = np.flatnonzero(padded[1:] != padded[:-1])
    starts, ends = edges[::2], edges[1::2]
    return " ".join(f"{start + 1} {end - start}" for start, end in zip(starts, ends, strict=True))


def write_archive(path: Path, table: str) -> None:
    """One submission.csv in a zip whose bytes depend on the table alone: no clock, user or platform in it."""
    entry = zipfile.ZipInfo("submission.csv", date_time=(1980, 1, 1, 0, 0, 0))
    entry.create_system, entry.external_attr = 3, 0o644 << 16
    entry.compress_type = zipfile.ZIP_DEFLATED
    aside = path.with_suffix(".part")
    with zipfile.ZipFile(aside, "w") as archive:
        archive.writestr(entry, table)
    aside.rename(path)


if __name__ == "__main__":
    cli.run(main)
