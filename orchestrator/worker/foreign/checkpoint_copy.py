"""Copies of a foreign program's checkpoints among those of the run, and back to the place where the program looks for them.

A copy is a checkpoint like every other: its folder has a manifest with sizes and hashes, written last. The program's files keep
their bytes; their names, which may be anything, are in `foreign.json`, and the files themselves are named `f0`, `f1`, … What a copy
holds is described in checkpoint/foreign_contents.py.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import json
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from kgorch import __version__
from kgorch.checkpoint.folder import read_manifest, write_durably, write_manifest
from kgorch.checkpoint.foreign_contents import CONTENTS_NAME, Contents, is_same, unpack
from kgorch.checkpoint.manifest import (
    LEFTOVER_PATTERN,
    FileEntry,
    Manifest,
    Position,
    checkpoint_folder_name,
)
from kgorch.checkpoint.verify import read_chunks
from kgorch.core.checkpoint.foreign_checkpoint import WILDCARDS, ForeignCandidate
from kgorch.errors import CheckpointBroken
from kgorch.protocol.launch_spec import LaunchSpec
from kgorch.system import file_hash, files
from kgorch.worker.foreign.candidates import ASIDE_FOLDER, expand

SPARE_BYTES = 1 << 20
"""Free bytes that are required besides the files, for folders and the manifest."""


class Described(NamedTuple):
    """What a manifest says of a copy besides its files.

    Attributes:
        step: that it stands for.
        metrics: by name; those that were measured at `step`, else reported last.
        measured: the step at which each was printed.
        processes: of the program.
        logged: see Contents.
    """

    step: int
    metrics: Mapping[str, float]
    measured: Mapping[str, int]
    processes: int
    logged: int | None


class ChangedMeanwhile(OSError):
    """The program wrote to the checkpoint while it was copied."""


def clear_leftovers(root: Path) -> None:
    """Remove what killed copies left. Of a foreign stage the agent alone writes there."""
    with contextlib.suppress(FileNotFoundError):
        for entry in os.scandir(root):
            if LEFTOVER_PATTERN.fullmatch(entry.name):
                shutil.rmtree(entry.path, ignore_errors=True)


def copy_in(
    launch: LaunchSpec, candidate: ForeignCandidate, described: Described, is_unchanged: Callable[[], bool]
) -> tuple[Path, int]:
    """Copy a checkpoint of the program; its folder among the run's checkpoints, and its bytes.

    Args:
        is_unchanged: called when all is copied: whether the program has not written to it meanwhile.
    Raises: ChangedMeanwhile; OSError, also where the disk has no room. The temporary folder is removed then.
    """
    root, source = Path(launch.checkpoints), Path(launch.workdir, candidate.path)
    place = root / checkpoint_folder_name(described.step, final=False)
    temporary = place.with_name(f"{place.name}.tmp-{launch.attempt}")
    root.mkdir(parents=True, exist_ok=True)
    room = os.statvfs(root)
    if (free := room.f_bavail * room.f_frsize) < candidate.bytes + SPARE_BYTES:
        raise OSError(
            errno.ENOSPC, f"no room for {candidate.bytes} bytes of {candidate.path} (free: {free})", str(root)
        )
    names = {f"f{number}": name for number, name in enumerate(candidate.files)}
    contents = Contents(candidate.path, candidate.is_folder, names, described.logged)
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    try:
        left, entries = candidate.bytes, dict[str, FileEntry]()
        for stored in names:
            entries[stored] = _copy_file(contents.place_of(source, stored), temporary / stored, left)
            left -= entries[stored].bytes
        text = json.dumps(contents._asdict(), indent=1).encode()
        entries[CONTENTS_NAME] = write_durably(temporary / CONTENTS_NAME, text)
        write_manifest(temporary, _manifest(launch, described, entries))
        if not is_unchanged():
            raise ChangedMeanwhile(errno.ESTALE, "it was changed while it was copied", str(source))
        _put(temporary, place)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    return place, sum(entry.bytes for entry in entries.values())


def finalize(launch: LaunchSpec, folder: Path) -> Path:
    """Make the copy in `folder` the final checkpoint of its stage, under a name of its own. Raises: OSError, CheckpointBroken."""
    manifest = read_manifest(folder)
    place = folder.with_name(checkpoint_folder_name(manifest.step, final=True))
    if place.exists():
        return place
    temporary = place.with_name(f"{place.name}.tmp-{launch.attempt}")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    for name in manifest.files:
        try:
            (temporary / name).hardlink_to(folder / name)
        except OSError:  # a file system without hard links
            shutil.copy2(folder / name, temporary / name)
    write_manifest(temporary, replace(manifest, final=True, created_at=datetime.now(UTC).isoformat()))
    _put(temporary, place)
    return place


def restore(launch: LaunchSpec, folder: Path, contents: Contents, pattern: str) -> bool:
    """Put the copy in `folder` back at its place below the plan's folder, unless it is there already.

    What lies there and differs is moved aside. The folder was verified before.

    Returns: whether it had to be copied.
    Raises: OSError; CheckpointBroken, also where a link leads out of the folder that the plan's `pattern` names.
    """
    manifest, target = read_manifest(folder), Path(launch.workdir, contents.path)
    if is_same(target, contents, manifest):
        return False
    # A link in the words of the plan is the user's; the rest of the path comes from the copy, which may be a stranger's.
    named = itertools.takewhile(lambda part: not WILDCARDS.search(part), PurePosixPath(pattern).parts[:-1])
    if not target.parent.resolve().is_relative_to(Path(launch.workdir, *named).resolve()):
        raise CheckpointBroken(f"{folder} cannot be put back: a link leads from {target.parent} to another folder")
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.parent / f"{_restore_prefix(launch)}{launch.attempt}"
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    try:
        copy = temporary / target.name
        unpack(folder, contents, copy)
        move_aside(target)
        copy.rename(target)
        files.sync_folder(target.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return True


def clear_restores(launch: LaunchSpec, pattern: str) -> None:
    """Remove what killed restores of this run left beside its checkpoints, which it must have claimed.

    Never outside of the plan's folder, where a link in the pattern's path may lead.
    """
    root, parent = Path(launch.workdir).resolve(), pattern.rpartition("/")[0]
    for path in expand(root, str(PurePosixPath(parent, f"{_restore_prefix(launch)}*"))):
        if (root / path).parent.resolve().is_relative_to(root):
            shutil.rmtree(root / path, ignore_errors=True)


def move_aside(path: Path) -> Path | None:
    """Move a checkpoint out of the program's sight, into a hidden folder beside it; None where there was none. Raises: OSError."""
    if not os.path.lexists(path):
        return None
    aside = path.parent / ASIDE_FOLDER
    aside.mkdir(exist_ok=True)
    number = next(number for number in range(1 << 30) if not os.path.lexists(aside / f"{path.name}.{number}"))
    return path.rename(aside / f"{path.name}.{number}")


def _restore_prefix(launch: LaunchSpec) -> str:
    """Of temporary folders in a place that other runs may use, too."""
    return f".kgorch-restore-{launch.run_id}-"


def _copy_file(source: Path, target: Path, most: int) -> FileEntry:
    """Raises: OSError; ChangedMeanwhile where it has more bytes than all files had that are left."""
    with open(target, "xb", buffering=0) as file:
        try:
            digest, count = file_hash.copy_and_hash(read_chunks(source.parent, source.name), file, max_bytes=most)
        except CheckpointBroken as error:  # gone, or replaced by something that is no file
            raise ChangedMeanwhile(errno.ESTALE, str(error)) from None
        if count > most:
            raise ChangedMeanwhile(errno.ESTALE, "it grew while it was copied", str(source))
        os.fsync(file.fileno())
    return FileEntry(count, digest)


def _put(temporary: Path, place: Path) -> None:
    files.sync_folder(temporary)
    if place.exists():  # of an attempt whose report was lost
        shutil.rmtree(temporary)
    else:
        temporary.rename(place)
    files.sync_folder(place.parent)


def _manifest(launch: LaunchSpec, described: Described, entries: Mapping[str, FileEntry]) -> Manifest:
    return Manifest(
        run=launch.run,
        run_id=launch.run_id,
        stage=launch.stage,
        position=Position(step=described.step),
        world_size=described.processes,
        created_at=datetime.now(UTC).isoformat(),
        plan_hash=launch.plan_hash,
        metrics=described.metrics,
        measured=described.measured,
        versions={"kgorch": __version__},
        files=entries,
    )
