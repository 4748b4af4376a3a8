"""Download the published models that a student is made of: the only moment at which a network is needed.

    python -m kgorch.workloads.vqa.fetch students        students/blip-vqa-base, phobert-base, vit5-base; some 3 GB
    download = true                               in the plan: each session fetches what its machine lacks

On Kaggle the notebook's setting "Internet" must be on. Without it: run the command where there is a network, upload the folder
as a dataset, attach it, and name it in the plan's `students`.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import subprocess
import sys
from pathlib import Path

from kgorch.workloads.common.files import DataError
from kgorch.workloads.vqa import parts


def incomplete(folders: dict[Path, parts.Folder]) -> dict[Path, parts.Folder]:
    """The folders that lack a file of their model or tokenizer."""
    return {folder: part for folder, part in folders.items() if part.missing(folder, part.model + part.tokens)}


def complete(folders: dict[Path, parts.Folder]) -> None:
    """Download what lacks. Several ranks may call it at once: one downloads, the others wait for it.

    In a process of its own, because huggingface_hub reads HF_HUB_OFFLINE once, and the training stays offline.

    Raises: DataError.
    """
    if not incomplete(folders):
        return
    root = next(iter(folders)).parent
    root.mkdir(parents=True, exist_ok=True)
    with open(root / ".fetch.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        lacking = incomplete(folders)
        if not lacking:
            return
        pairs = [word for folder, part in lacking.items() for word in (part.published, str(folder))]
        done = subprocess.run(
            [sys.executable, "-m", "kgorch.workloads.vqa.hub", *pairs], stdout=sys.stderr, stderr=subprocess.PIPE, text=True,
            env=os.environ | {"HF_HUB_OFFLINE": "0"},
        )  # fmt: skip
    if left := incomplete(folders):
        folder, part = next(iter(left.items()))
        said = (done.stderr.strip().splitlines() or ["the repository lacks files"])[-1]
        raise DataError(
            f"{part.published} cannot be downloaded", f"to {folder}: {said:.300}",
            next_step='on Kaggle switch on "Internet" in the notebook\'s settings; without a network attach the models as a dataset'
            " and name it in `students`",
        )  # fmt: skip


def main() -> None:
    """Parse, then fetch."""
    parser = argparse.ArgumentParser(
        description="Download BLIP's image encoder, PhoBERT and ViT5 as they are published.",
        epilog="example: python -m kgorch.workloads.vqa.fetch students",
    )
    parser.add_argument("students", type=Path, help="folder to write to")
    options = parser.parse_args()
    folders = {
        options.students / part.published.partition("/")[2]: part for part in (parts.IMAGE, parts.TEXT, parts.DECODER)
    }
    try:
        complete(folders)
    except DataError as problem:
        sys.exit(f"error: {problem}")
    for folder in folders:
        print(f"{folder}: whole")


if __name__ == "__main__":
    main()
