"""Search folders of unknown content for checkpoints, by their manifests, and for databases of kgorch.

A source is a folder that another session left: a Kaggle input, a disk that was carried over. Nothing is written into it, no link
in it is followed, and its file names prove nothing: a checkpoint belongs to the run that its manifest names. A mounted data set
may have a million files, so folders are read in turns, a slice of names at a time, within bounds of names, depth, time and bytes.
The bounds cover all sources together: a bound for each file would not help against a folder with very many files.
"""

from __future__ import annotations

import glob
import os
import re
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

from kgorch.admission.source_run import ImportCandidate
from kgorch.checkpoint.folder import MAX_MANIFEST_BYTES, read_manifest
from kgorch.checkpoint.manifest import FOLDER_PATTERN, MANIFEST_NAME
from kgorch.errors import CheckpointBroken, CheckpointUnreadable
from kgorch.launch import rungs
from kgorch.untrusted_io import Budget, BudgetExceeded

SLICE = 2_000
"""Names read of one folder before the others have their turn: a folder of a million images delays what is beside it and does not
hide it."""

MAX_CHECKPOINTS = 20_000
MAX_NOTES = 1_000
MAX_OTHER_NAMES = 50
MAX_WRONG_RUNGS = 8
"""Rungs of one manifest that are reported as invalid."""

RUN_ID = re.compile(r"[A-Za-z0-9_-]{1,32}")
DATABASE = "kgorch.db"
_LEFTOVER = re.compile(FOLDER_PATTERN.pattern + r"\..+")
"""Folders that an interrupted save or a failed verification left beside the checkpoints."""


@dataclass(frozen=True, slots=True)
class ScanLimits:
    """Bounds of a scan. Attributes: levels of folders below a source; file and folder names of all sources together."""

    levels: int = 16
    names: int = 300_000


DEFAULT_LIMITS = ScanLimits()


@dataclass(slots=True)
class ScanResult:
    """What a scan met.

    Attributes:
        checkpoints: of runs of the name.
        databases: paths; they may be of any run, or no databases of kgorch.
        notes: why something was skipped; at most MAX_NOTES.
        other_names: runs of other names, and where one was met; at most MAX_OTHER_NAMES.
        cut: the bound that ended the scan before all was seen; empty if none did.
    """

    checkpoints: list[ImportCandidate] = field(default_factory=list)
    databases: list[Path] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    other_names: dict[str, Path] = field(default_factory=dict)
    cut: str = ""

    def note(self, text: str) -> None:
        if len(self.notes) < MAX_NOTES:
            self.notes.append(text)

    def add_other_name(self, name: str, where: Path) -> None:
        if len(self.other_names) < MAX_OTHER_NAMES:
            self.other_names.setdefault(name, where)


def source_folders(sources: Sequence[str], base: Path) -> tuple[list[Path], list[str]]:
    """The folders that sources name, and a note for each source that names none.

    Args:
        sources: paths or globs, relative to `base`. `…/**` is the folder itself: everything below a source is searched.
    """
    folders: dict[Path, None] = {}
    notes = []
    for source in sources:
        pattern = str(base / Path(source.removesuffix("**") or ".").expanduser())
        if glob.has_magic(pattern):
            paths = sorted(islice(glob.iglob(pattern), DEFAULT_LIMITS.names))  # noqa: PTH207
            matches = [Path(path) for path in paths if _follows_no_link(pattern, path)]
        else:
            matches = [Path(pattern)]
        matches = [path.resolve() for path in matches if os.path.isdir(path)]  # noqa: PTH112 (no error of a mount that has died)
        folders |= dict.fromkeys(matches)
        if not matches:
            notes.append(f"the source {source} names no folder")
    return list(folders), notes


def _follows_no_link(pattern: str, match: str) -> bool:
    """Whether the path has no link below the part of the pattern without wildcards.

    A link in that part was named by the user. One below it was made by whoever filled the folder, and could lead anywhere.
    """
    literal = Path(*_parts_without_magic(Path(pattern).parts))
    return Path(match).resolve() == literal.resolve() / Path(match).relative_to(literal)


def _parts_without_magic(parts: Sequence[str]) -> Iterator[str]:
    for part in parts:
        if glob.has_magic(part):
            return
        yield part


def scan_folders(
    folders: Iterable[Path],
    name: str,
    budget: Budget,
    *,
    skip: frozenset[Path] = frozenset(),
    limits: ScanLimits = DEFAULT_LIMITS,
) -> ScanResult:
    """Search these folders and all below for checkpoints of runs of that name and for databases, shallow folders first.

    Args:
        budget: time and bytes; where it or a limit ends the scan, `cut` and the first note say so.
        skip: folders that are not entered.
    """
    result, left, is_too_deep = ScanResult(), limits.names, False
    queue: deque[tuple[Path, int, Iterator[os.DirEntry[str]] | None]] = deque((folder, 0, None) for folder in folders)
    while queue and left > 0 and len(result.checkpoints) < MAX_CHECKPOINTS:
        folder, level, entries = queue.popleft()
        if folder in skip:
            continue
        try:
            budget.spend(0)  # raises when the time is over
            entries = entries or os.scandir(folder)
            batch = list(islice(entries, min(SLICE, left)))
            below = _examine(result, folder, batch, name, budget)
        except BudgetExceeded as error:
            result.cut = str(error)
            break
        except OSError as error:
            result.note(f"{folder} was skipped: {error.strerror}")
            continue
        left -= len(batch)
        if len(batch) == SLICE or left <= 0:
            queue.append((folder, level, entries))  # the rest of a large folder waits until the others had their turn
        if level < limits.levels:
            queue.extend((path, level + 1, None) for path in below)
        is_too_deep = is_too_deep or (level == limits.levels and bool(below))
    if not result.cut and (left <= 0 or is_too_deep):
        result.cut = f"{limits.names} names" if left <= 0 else f"{limits.levels} levels"
    if not result.cut and queue:
        result.cut = f"{MAX_CHECKPOINTS} checkpoints"
    if result.cut:
        what = f"the search reached its limit ({result.cut}) and is not complete"
        result.notes.insert(0, f"{what}: name the folder of the run in resume.sources")
    return result


def _examine(
    result: ScanResult, folder: Path, batch: Sequence[os.DirEntry[str]], name: str, budget: Budget
) -> list[Path]:
    """Add what this slice of a folder holds to the result.

    Returns: the folders below that are to be scanned; none below a checkpoint.
    Raises: BudgetExceeded.
    """
    files = {entry.name: entry for entry in batch if entry.is_file(follow_symlinks=False)}
    if MANIFEST_NAME in files:
        budget.spend(min(files[MANIFEST_NAME].stat(follow_symlinks=False).st_size, MAX_MANIFEST_BYTES))
        try:
            manifest = read_manifest(folder)
        except (CheckpointBroken, CheckpointUnreadable) as error:
            # Other programs have a manifest.json, too: only a folder that is named as a checkpoint is worth a note.
            if FOLDER_PATTERN.fullmatch(folder.name):
                result.note(f"{folder} was skipped: {error.what}")
        else:
            if manifest.run == name and RUN_ID.fullmatch(manifest.run_id):
                result.checkpoints.append(ImportCandidate.of(folder, manifest))
                for wrong in rungs.rows_of_manifest(manifest)[1][:MAX_WRONG_RUNGS]:
                    result.note(f"{folder}: skipped {wrong}")
            else:
                result.add_other_name(manifest.run, folder)
            return []
    if DATABASE in files:
        result.databases.append(folder / DATABASE)
    return [
        Path(entry.path)
        for entry in batch
        if entry.is_dir(follow_symlinks=False) and not _LEFTOVER.fullmatch(entry.name)
    ]
