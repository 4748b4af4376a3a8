"""What a checkpoint holds that is a copy of a foreign program's own.

The copy is a checkpoint like every other: its manifest has sizes and hashes. The program's files keep their bytes; their names,
which may be anything, are in `foreign.json`, and the files themselves are named `f0`, `f1`, …

    step-00000500/
      manifest.json
      foreign.json      {"path": "out/checkpoint-500", "is_folder": true, "files": {"f0": "model.safetensors", …}}
      f0 f1 …

A copy may come from another machine. So nothing in foreign.json leads out of the plan's folder, or to a place that the plan does
not name as one of checkpoints: a file of the program itself is never overwritten.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from kgorch.checkpoint.folder import read_json_file, read_manifest
from kgorch.checkpoint.manifest import MANIFEST_NAME, Manifest
from kgorch.checkpoint.verify import read_chunks
from kgorch.core.checkpoint.foreign_checkpoint import MAX_FILES, matches
from kgorch.errors import CheckpointBroken
from kgorch.system import file_hash

CONTENTS_NAME = "foreign.json"


class Contents(NamedTuple):
    """What a copy holds.

    Attributes:
        path: of the program's checkpoint, relative to the plan's folder.
        is_folder: a folder of files, or one file.
        files: name in the copy → name in the program's checkpoint.
        logged: the step that the program's log was at when it was written; None where that is not known, or counts otherwise than
            the checkpoints.
    """

    path: str
    is_folder: bool
    files: Mapping[str, str]
    logged: int | None = None

    def place_of(self, root: Path, stored: str) -> Path:
        """Where a file of the copy belongs, in a checkpoint that lies at `root`."""
        return root / self.files[stored] if self.is_folder else root


def is_foreign(manifest: Manifest) -> bool:
    """Whether a checkpoint is such a copy."""
    return CONTENTS_NAME in manifest.files


def read_contents(folder: Path, pattern: str | None) -> tuple[Manifest, Contents]:
    """What the copy in `folder` holds; nothing that it says is trusted.

    Args:
        pattern: the plan's place of checkpoints, which `path` must match; None where nothing is written there.
    Raises: CheckpointBroken, CheckpointUnreadable.
    """
    manifest = read_manifest(folder)
    document = read_json_file(folder, manifest, CONTENTS_NAME)
    try:
        return manifest, _parsed(document, manifest, pattern)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointBroken(f"{folder / CONTENTS_NAME} cannot be used: {str(error)[:300]}") from None


def unpack(folder: Path, contents: Contents, target: Path) -> None:
    """Write the program's file or folder to `target`, which must not exist, with its bytes compared on the way.

    Raises: OSError; CheckpointBroken.
    """
    manifest = read_manifest(folder)
    for stored in contents.files:
        place = contents.place_of(target, stored)
        place.parent.mkdir(parents=True, exist_ok=True)
        with open(place, "xb") as file:
            digest, _ = file_hash.copy_and_hash(read_chunks(folder, stored), file)
            file.flush()
            os.fsync(file.fileno())
        if digest != manifest.files[stored].xxh3_128:
            raise CheckpointBroken(f"{folder} does not match its manifest", f"{stored}: expected another hash")


def is_same(target: Path, contents: Contents, manifest: Manifest) -> bool:
    """Whether the program's checkpoint has the files of the copy, and no others, with their bytes."""
    if target.is_symlink() or target.is_dir() != contents.is_folder or not os.path.lexists(target):
        return False
    if contents.is_folder:
        found = {str(path.relative_to(target)) for path in target.rglob("*") if path.is_symlink() or not path.is_dir()}
        if found != set(contents.files.values()):
            return False
    for stored in contents.files:
        path, entry = contents.place_of(target, stored), manifest.files[stored]
        try:
            if path.lstat().st_size != entry.bytes:
                return False
            if file_hash.hash_chunks(read_chunks(path.parent, path.name)) != entry.xxh3_128:
                return False
        except (OSError, CheckpointBroken):
            return False
    return True


def _parsed(document: Mapping[str, Any], manifest: Manifest, pattern: str | None) -> Contents:
    """Raises: ValueError, KeyError, TypeError, AttributeError."""
    path, is_folder, names = document["path"], document["is_folder"], document["files"]
    if isinstance(path, str):
        path = str(PurePosixPath(path))  # a copy may have it as the author of a plan wrote it: "out//step-1"
    if not isinstance(path, str) or _is_outside(path) or (pattern is not None and not matches(path, pattern)):
        raise ValueError(f"path: expected a place like {pattern!r}, found {path!r:.200}")
    if not isinstance(is_folder, bool) or not isinstance(names, dict) or not 0 < len(names) <= MAX_FILES:
        raise ValueError("expected is_folder and files")
    if stray := names.keys() ^ (manifest.files.keys() - {CONTENTS_NAME, MANIFEST_NAME}):
        raise ValueError(f"files: {min(stray)!r:.80} is not in both, or missing")
    if not is_folder and len(names) != 1:
        raise ValueError("files: expected one, for it is no folder")
    parts = [PurePosixPath(name).parts for name in names.values() if isinstance(name, str) and not _is_outside(name)]
    if len(set(parts)) != len(names):
        raise ValueError("files: names that lead out of the folder, or stand twice")
    folders = {part[:end] for part in parts for end in range(1, len(part))}
    if folders & set(parts):
        raise ValueError("files: a file that is also a folder")
    logged = document.get("logged")
    return Contents(path, is_folder, names, logged if type(logged) is int else None)


def _is_outside(name: str) -> bool:
    """Whether a name leads out of its folder, or is no plain relative name at all."""
    path = PurePosixPath(name)
    is_plain = bool(path.parts) and "\0" not in name and len(name) <= 2000 and str(path) == name
    return not is_plain or path.is_absolute() or ".." in path.parts
