"""Checkpoints on disk, as the supervisor handles them: find the newest that can be trusted, set broken ones aside, drop.
Reads manifests and bytes; knows no tensors."""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Callable, Set
from datetime import UTC, datetime
from pathlib import Path

from orchestrator.checkpoint import manifest
from orchestrator.checkpoint.manifest import Manifest
from orchestrator.errors import CheckpointBroken, KgorchError


def newest_verified(
    root: Path, run_id: str, skipped: Callable[[Path, KgorchError], None]
) -> tuple[Path, Manifest] | None:
    """The newest checkpoint of this run under `root` whose every byte was read back just now.

    One that is proven broken is renamed to `….broken`; another run's is left as it is. Both are told to `skipped`, and the
    one before is looked at.

    Raises: CheckpointUnreadable: what cannot be read now is not given up.
    """
    for folder in manifest.checkpoints(root):
        try:
            found = manifest.verify(folder)
        except CheckpointBroken as error:
            skipped(set_aside(folder, root.parent), error)
            continue
        if found.run_id == run_id:
            return folder, found
        skipped(
            folder,
            KgorchError(f"{folder} belongs to another run", f"expected {run_id}, found {found.run_id} ({found.run})"),
        )
    return None


def newest_described(root: Path, run_id: str, *, after: int, but: Set[str]) -> tuple[Path, Manifest, datetime] | None:
    """The newest checkpoint under `root` by its manifest alone, and when that was written: quick, and nothing is changed.

    Args:
        after: a step; only what is newer counts. but: names of folders that do not count.
    """
    try:
        for folder in manifest.checkpoints(root):
            found = manifest.described(folder)
            if found.step <= after:
                return None
            if folder.name not in but and found.run_id == run_id:
                return folder, found, datetime.fromtimestamp((folder / manifest.NAME).stat().st_mtime, UTC)
    except (OSError, KgorchError):  # broken, or not to be read now: who resumes finds out
        pass
    return None


def check_place(folder: Path, root: Path) -> None:
    """Before a checkpoint is read back, renamed or deleted: its path came over a socket or out of a database.

    Args:
        root: the run's checkpoints, a folder a stage.
    Raises: KgorchError unless the folder is named like a checkpoint and lies in a stage's folder, and neither is a link.
    """
    stage = folder.parent
    is_inside = stage.parent == root and stage.name not in ("", ".", "..")
    if not is_inside or not manifest.FOLDER.fullmatch(folder.name) or folder.is_symlink() or stage.is_symlink():
        raise KgorchError(
            f"{folder} is no checkpoint of this run and is left alone",
            f"expected a folder {root}/STAGE/step-…",
            next_step="kgorch checkpoints list",
        )


def set_aside(folder: Path, root: Path) -> Path:
    """Out of the way under a name that nobody takes for a checkpoint; where that is not possible, it stays.

    Raises: as check_place.
    """
    check_place(folder, root)
    for number in range(1000):
        place = folder.with_name(f"{folder.name}.broken{number or ''}")
        if not place.exists():
            try:
                folder.rename(place)
            except OSError:
                return folder
            return place
    return folder


def drop(folder: Path, root: Path) -> None:
    """Delete a checkpoint so that a kill half-way leaves no folder that looks like one. Raises: as check_place."""
    check_place(folder, root)
    aside = folder.with_name(folder.name + ".dropping")
    try:
        folder.rename(aside)
    except FileNotFoundError:
        return
    shutil.rmtree(aside, ignore_errors=True)


def write_speed(folder: Path, probe_bytes: int = 8 << 20) -> float:
    """Bytes a second that reach this folder's disk, flushed: measured by writing a little. 100 MB/s when it cannot be."""
    path = folder / f".speed-{os.getpid()}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        began_s = time.monotonic()
        with open(path, "wb") as file:
            file.write(os.urandom(1 << 20) * (probe_bytes >> 20))
            file.flush()
            os.fsync(file.fileno())
        return probe_bytes / max(time.monotonic() - began_s, 1e-6)
    except OSError:
        return 100e6
    finally:
        with contextlib.suppress(OSError):
            path.unlink()
