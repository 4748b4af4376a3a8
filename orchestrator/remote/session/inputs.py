"""Find the bundle and the state below the input folder, and verify both."""

from __future__ import annotations

import collections
import hashlib
import json
import os
import time
from pathlib import Path
from typing import Any

from kgorch.remote.session.common import MARKER_NAME, RECORD_NAME, Ended, Order, read_table

MAX_LEVELS, MAX_FOLDERS, MAX_NAMES, SEARCH_S = 8, 200_000, 20_000, 180.0
"""Of a search below the input: levels, folders in all, names of one folder, seconds. A data set may have a million files."""


def search(root: Path) -> tuple[list[Path], list[Path]]:
    """Folders below `root` that hold a bundle, and folders that hold a session's record; shallow ones first, no link followed."""
    bundles, outputs = [], []
    queue, left, until = collections.deque([(os.path.realpath(root), 0)]), MAX_FOLDERS, time.monotonic() + SEARCH_S
    while queue and left > 0 and time.monotonic() < until:
        folder, level = queue.popleft()
        left -= 1
        if Path(folder, RECORD_NAME).is_file():
            outputs.append(Path(folder))  # what lies below was written by that session: no bundle is looked for there
            continue
        if Path(folder, MARKER_NAME).is_file():
            bundles.append(Path(folder))
            continue
        if level < MAX_LEVELS:
            queue.extend((path, level + 1) for path in subfolders(folder))
    return bundles, outputs


def subfolders(folder: str) -> list[str]:
    try:
        with os.scandir(folder) as entries:
            some = (entry for _, entry in zip(range(MAX_NAMES), entries))
            return sorted(entry.path for entry in some if entry.is_dir(follow_symlinks=False))
    except OSError:
        return []


def find_bundle(folders: list[Path], name: str) -> tuple[Path, dict[str, Any]]:
    """The folder and the marker of the bundle of that name, which holds the marker's hash. Raises: Ended."""
    others = []
    for folder in folders:
        try:
            marker = read_table(folder / MARKER_NAME)
            content = {key: value for key, value in marker.items() if key != "digest"}
            digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
        except (OSError, ValueError) as error:
            others.append(f"{folder}: {error}")
            continue
        if digest == marker.get("digest") and name == f"kgorch-{digest[:40]}":
            return folder, marker
        others.append(f"{folder}: another bundle, or a changed one")
    raise Ended("no_bundle", f"the bundle {name} is not attached; " + ("; ".join(others[:5]) or "there is none"))


def unpack(folder: Path, marker: dict[str, Any], work: Path) -> None:
    """Copy the bundle's files to their paths below `work`, each compared with its hash. Raises: Ended."""
    for entry in marker["files"]:
        target = work / entry["path"]
        if ".." in Path(entry["path"]).parts or work not in target.parents:
            raise Ended("no_bundle", f"the bundle has a file outside of its folder: {entry['path']!r:.200}")
        target.parent.mkdir(parents=True, exist_ok=True)
        digest = hashlib.sha256()
        try:
            with open(folder / entry["stored"], "rb") as source, open(target, "xb") as copy:
                for chunk in iter(lambda: source.read(1 << 20), b""):
                    digest.update(chunk)
                    copy.write(chunk)
        except OSError as error:
            raise Ended("no_bundle", f"a file of the bundle, {entry['stored']}, cannot be copied: {error}") from None
        if digest.hexdigest() != entry["sha256"]:
            raise Ended("no_bundle", f"the file {entry['stored']} ({entry['path']}) does not match the bundle's hash")
        target.chmod(0o755 if entry["executable"] else 0o644)


def find_state(folders: list[Path], order: Order) -> Path | None:
    """The output of the session before, with the checkpoint that is expected in it; None where none is expected.

    Raises: Ended, so that no session begins anew, or from other state, by mistake.
    """
    if order["expected_step"] < 0:
        return None
    faults = []
    for folder in folders:
        try:
            record = read_table(folder / RECORD_NAME)
            if record.get("run_id") != order["run_id"] or not 0 < record.get("number", 0) < order["number"]:
                raise ValueError(
                    f"the record of session {record.get('number')!r:.20} of run {record.get('run_id')!r:.40}"
                )
            step = checkpoint_step(folder / str(record.get("checkpoint")), order["run_id"])
            if step != order["expected_step"]:
                raise ValueError(f"its newest checkpoint is of step {step}")
            return folder
        except (OSError, ValueError, TypeError, KeyError) as error:
            faults.append(f"{folder}: {error}")
    wanted = (
        f"a session of run {order['run_id']} with a checkpoint of step {order['expected_step']} ({order['source']})"
    )
    raise Ended("no_state", f"expected the output of {wanted}; " + ("; ".join(faults[:5]) or "no output is attached"))


def checkpoint_step(folder: Path, run_id: str) -> int:
    """The step of a checkpoint of that run whose files have the sizes of its manifest. Raises: OSError, ValueError, KeyError."""
    manifest = read_table(folder / "manifest.json")
    if manifest["run_id"] != run_id:
        raise ValueError(f"{folder} is of another run")
    for name, entry in manifest["files"].items():
        if (folder / name).lstat().st_size != entry["bytes"]:
            raise ValueError(f"{folder / name} has not the size that its manifest says")
    return int(manifest["position"]["step"])
