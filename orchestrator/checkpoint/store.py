"""The checkpoints of a run on disk: find the newest that can be trusted, quarantine broken ones, delete.

Manifests and bytes are read, tensors are not. Every path is checked before it is renamed or deleted.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

from kgorch.checkpoint.folder import list_checkpoints, read_manifest
from kgorch.checkpoint.manifest import FOLDER_PATTERN, MANIFEST_NAME, Manifest
from kgorch.checkpoint.verify import verify_checkpoint
from kgorch.errors import CheckpointBroken, KgorchError


def newest_verified(
    root: Path, run_id: str, on_skip: Callable[[Path, KgorchError], None]
) -> tuple[Path, Manifest] | None:
    """The newest checkpoint of this run under `root`, every byte verified by this call; None if there is none.

    Args:
        root: a stage's checkpoints.
        on_skip: called with the folder and the reason for each checkpoint that is passed over: a broken one, which has been
            quarantined, and another run's, which stays as it is.
    Raises: CheckpointUnreadable for one that cannot be read now: it may be whole, so no older one is used in its place.
    """
    for folder in list_checkpoints(root):
        try:
            manifest = verify_checkpoint(folder)
        except CheckpointBroken as error:
            on_skip(quarantine(folder, root.parent), error)
            continue
        if manifest.run_id == run_id:
            return folder, manifest
        owner = f"{manifest.run_id} ({manifest.run})"
        on_skip(folder, KgorchError(f"{folder} belongs to another run", f"expected {run_id}, found {owner}"))
    return None


def newest_by_manifest(
    root: Path, run_id: str, *, after: int, is_known: Callable[[str], bool]
) -> tuple[Path, Manifest, datetime] | None:
    """The newest checkpoint under `root` by its manifest alone, with the time at which that was written.

    Quick, and nothing is changed. None where a manifest cannot be read: resuming verifies, and reports it.

    Args:
        after: a step; only newer checkpoints count.
        is_known: whether a folder of this name does not count.
    """
    try:
        for folder in list_checkpoints(root):
            manifest = read_manifest(folder)
            if manifest.step <= after:
                return None
            if manifest.run_id == run_id and not is_known(folder.name):
                return folder, manifest, datetime.fromtimestamp((folder / MANIFEST_NAME).stat().st_mtime, UTC)
    except (OSError, KgorchError):
        pass
    return None


def check_folder(folder: Path, root: Path) -> None:
    """Make sure that this is a checkpoint of the run, before it is verified, renamed or deleted.

    Its path came over a socket or out of a database: without this check a changed row could have any folder deleted.

    Args:
        root: the run's checkpoints, one folder for each stage.
    Raises: KgorchError unless the folder is named like a checkpoint and lies in a stage's folder, and neither is a link.
    """
    stage = folder.parent
    is_inside = stage.parent == root and stage.name not in ("", ".", "..")
    if not is_inside or not FOLDER_PATTERN.fullmatch(folder.name) or folder.is_symlink() or stage.is_symlink():
        raise KgorchError(
            f"{folder} is not a checkpoint of this run and is left unchanged",
            f"expected a folder {root}/STAGE/step-…",
            next_step="kgorch checkpoints list",
        )


def quarantine(folder: Path, root: Path) -> Path:
    """Rename a broken checkpoint to `….broken`, which is not read as a checkpoint and not deleted.

    Returns its new place; its old one where it cannot be renamed. Raises: as check_folder.
    """
    check_folder(folder, root)
    for number in range(1000):
        place = folder.with_name(f"{folder.name}.broken{number or ''}")
        if not place.exists():
            try:
                folder.rename(place)
            except OSError:
                return folder
            return place
    return folder


def delete(folder: Path, root: Path) -> None:
    """Delete a checkpoint. Renamed first, so that a kill half-way leaves no folder that looks like one.

    Raises: as check_folder.
    """
    check_folder(folder, root)
    aside = folder.with_name(folder.name + ".dropping")
    try:
        folder.rename(aside)
    except FileNotFoundError:
        return
    shutil.rmtree(aside, ignore_errors=True)


def measure_write_speed(folder: Path, probe_bytes: int = 8 << 20) -> float:
    """Bytes a second that reach this folder's disk, measured by a flushed write of `probe_bytes`; 100 MB/s if that fails."""
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
