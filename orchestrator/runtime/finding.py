"""What the sources hold of a run: its checkpoints, found by their manifests, and what databases beside them remember of it.

A source is a folder that another session left: a Kaggle input, a disk that was carried over. Nothing is written into it, no
link in it is followed, and its names prove nothing: a checkpoint belongs to the run that its manifest says. A mounted data
set may have a million files, so the search takes the folders in turns, a slice at a time, and ends at a bound.
"""

from __future__ import annotations

import glob
import os
import re
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

from db import transfer
from db.transfer import Rows
from orchestrator import manifest
from orchestrator.errors import CheckpointBroken, CheckpointUnreadable, KgorchError, NotFound
from orchestrator.manifest import Manifest
from orchestrator.runtime import rungs

DEPTH, ENTRIES = 16, 300_000
SLICE = 2_000
RUN_ID = re.compile(r"[A-Za-z0-9_-]{1,32}")
DATABASE = "kgorch.db"
_LEFTOVER = re.compile(manifest.FOLDER.pattern + r"\..+")

Place = tuple[int, int, bool]
"""How far a checkpoint is: its stage's position in the plan (-1 for one that is not in it), the step, whether final."""
NOWHERE: Place = (-1, -1, False)


class Watcher(Protocol):
    """Is told what is found and copied, as it happens."""

    def note(self, text: str) -> None: ...

    def copying(self, done_bytes: int, total_bytes: int) -> None: ...

    def found(self, described: Manifest, folder: Path) -> None: ...


class _Silent:
    def note(self, text: str) -> None:
        pass

    def copying(self, done_bytes: int, total_bytes: int) -> None:
        pass

    def found(self, described: Manifest, folder: Path) -> None:
        pass


SILENT = _Silent()


@dataclass(frozen=True, slots=True)
class Candidate:
    folder: Path
    manifest: Manifest


@dataclass(slots=True)
class Found:
    """What the sources hold of one run; `rows` from that database which heard of it last; `events` to be told of it."""

    run_id: str
    checkpoints: list[Candidate] = field(default_factory=list)
    rows: Rows | None = None
    database: Path | None = None
    events: list[tuple[str, dict[str, Any]]] = field(default_factory=list)

    def furthest_first(self, stages: Sequence[str]) -> list[Candidate]:
        return sorted(self.checkpoints, key=lambda item: place_of(stages, item.manifest), reverse=True)

    def place(self, stages: Sequence[str]) -> Place:
        return max((place_of(stages, item.manifest) for item in self.checkpoints), default=NOWHERE)

    @property
    def is_outdated(self) -> bool:
        return self.rows is not None and self.rows.outdated

    def drop_overtaken(self) -> None:
        """Checkpoints of a stage that has begun anew since: its weights no longer fit."""
        told = [row for item in self.checkpoints for row in rungs.told_by(item.manifest)[0]]
        taken = sorted([*(self.rows.rungs if self.rows else []), *told], key=lambda row: row["at"])
        anew = {row["stage"]: row["at"] for row in taken if row["settings"].get(rungs.ANEW)}
        self.checkpoints = [
            item
            for item in self.checkpoints
            if not (at := anew.get(item.manifest.stage)) or datetime.fromisoformat(item.manifest.created_at) >= at
        ]

    @property
    def has_come_anywhere(self) -> bool:
        return bool(self.checkpoints) or bool(self.rows and (self.rows.finished or self.rows.checkpoints))


@dataclass(slots=True)
class Seen:
    """What a search came by; a note is why something was passed over."""

    checkpoints: list[Candidate] = field(default_factory=list)
    databases: list[Path] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def place_of(stages: Sequence[str], described: Manifest) -> Place:
    position = stages.index(described.stage) if described.stage in stages else -1
    return position, described.step, described.final


def find(sources: Sequence[str], base: Path, name: str, skip: Iterable[Path], watcher: Watcher) -> dict[str, Found]:
    """What the sources hold of the runs of that name, by run id.

    Args:
        sources: folders or globs, relative to `base`.
        skip: our own folders, which a source may enclose.
    """
    folders, notes = roots(sources, base)
    seen = search(folders, name, skip=frozenset(path.resolve() for path in skip))
    found: dict[str, Found] = {}
    for item in seen.checkpoints:
        found.setdefault(item.manifest.run_id, Found(item.manifest.run_id)).checkpoints.append(item)
    for database in seen.databases:
        try:
            with transfer.copy_of(database) as engine:
                remembered = [rows for rows in transfer.read(engine, name) if RUN_ID.fullmatch(rows.run["id"])]
            for row in (row for rows in remembered for row in rows.rungs):
                rungs.check(row["settings"])
        except Exception as error:  # whatever a file that is no database of ours makes SQLite or Alembic say
            seen.notes.append(f"the database {database} was passed over: {str(error).splitlines()[0]}")
            continue
        for rows in remembered:
            known = found.setdefault(rows.run["id"], Found(rows.run["id"]))
            if known.rows is None or known.rows.last_at < rows.last_at:
                known.rows, known.database = rows, database
    for known in found.values():
        known.drop_overtaken()
    for note in (
        *notes,
        *seen.notes[:8],
        *([f"{len(seen.notes) - 8} more were passed over"] if seen.notes[8:] else []),
    ):
        watcher.note(note)
    return found


def choose(
    found: Mapping[str, Found], ours: Found | None, foreign: Iterable[str], wanted: str | None, stages: Sequence[str]
) -> Found | None:
    """What the sources hold of the run to go on with; None when they hold nothing of it, or of any.

    Args:
        ours: our own newest run of the name.
        foreign: ids that are no rivals: older or superseded ones of ours, those that a person has decided against.
        wanted: the run id that a person asks for.
    Raises: KgorchError that lists the rivals; NotFound for a wanted one that is not there.
    """
    own = [ours.run_id] if ours else []
    others = [item for key, item in found.items() if key not in {*own, *foreign} and not item.is_outdated]
    if moved := [item for item in others if item.has_come_anywhere]:
        others = moved
    elif ours:
        others = []
    if wanted:
        if wanted not in {*own, *found}:
            lines = _lines([*([ours] if ours else []), *found.values()], stages)
            raise NotFound(
                f"there is no run {wanted} here or in the sources", *lines, next_step="give one of these ids"
            )
        return found.get(wanted)
    contenders = [*own, *(item.run_id for item in others)]
    if len(contenders) > 1:
        raise KgorchError(
            f"there are {len(contenders)} runs of this name here and in the sources",
            *_lines([*([ours] if ours else []), *others], stages),
            next_step="kgorch start PLAN --run RUN_ID goes on with one of them; --fresh begins anew",
        )
    return found.get(contenders[0]) if contenders else None


def of_run(run_id: str, root: Path, stages: Sequence[str]) -> Found:
    """What lies under our own checkpoint folder: of each stage the newest that can be read."""
    newest = [
        next((Candidate(*pair) for pair in manifest.newest_readable(root / stage) if pair[1].run_id == run_id), None)
        for stage in stages
    ]
    return Found(run_id, [item for item in newest if item])


def roots(sources: Sequence[str], base: Path) -> tuple[list[Path], list[str]]:
    """The folders that sources name, and a note for each that names none. `…/**` is that folder: all below is searched."""
    folders: dict[Path, None] = {}
    notes = []
    for source in sources:
        told = str(base / Path(source.removesuffix("**") or ".").expanduser())
        matches = sorted(islice(glob.iglob(told), ENTRIES)) if glob.has_magic(told) else [told]  # noqa: PTH207
        matched = [Path(match).resolve() for match in matches if Path(match).is_dir()]
        folders |= dict.fromkeys(matched)
        if not matched:
            notes.append(f"the source {source} names no folder")
    return list(folders), notes


def search(
    folders: Iterable[Path],
    name: str,
    *,
    skip: frozenset[Path] = frozenset(),
    depth: int = DEPTH,
    entries: int = ENTRIES,
) -> Seen:
    """Checkpoints of runs of that name, and databases, in these folders and below, the shallow ones first.

    Looks at no more than `entries` names, `depth` levels deep, and notes where that was not all.
    """
    seen, left, too_deep = Seen(), entries, False
    queue: deque[tuple[Path, int, Iterator[os.DirEntry[str]] | None]] = deque((folder, 0, None) for folder in folders)
    while queue and left > 0:
        folder, level, scan = queue.popleft()
        if folder in skip:
            continue
        try:
            scan = scan or os.scandir(folder)
            batch = list(islice(scan, min(SLICE, left)))
            below = _look_at(seen, folder, batch, name)
        except OSError as error:
            seen.notes.append(f"{folder} was passed over: {error.strerror}")
            continue
        left -= len(batch)
        if len(batch) == SLICE or left <= 0:
            queue.append((folder, level, scan))  # the rest of a large folder comes after all that waits
        if level < depth:
            queue.extend((path, level + 1, None) for path in below)
        too_deep = too_deep or (level == depth and bool(below))
    if left <= 0 or too_deep:
        bound = f"{entries} names" if left <= 0 else f"{depth} levels"
        seen.notes.insert(0, f"the search ended at {bound} and has not seen all: name the folder in resume.sources")
    return seen


def _look_at(seen: Seen, folder: Path, batch: Sequence[os.DirEntry[str]], name: str) -> list[Path]:
    """Take in what the folder is; the folders below it that are still to be looked at."""
    files = {entry.name for entry in batch if entry.is_file(follow_symlinks=False)}
    if manifest.NAME in files:
        try:
            described = manifest.described(folder)
        except (CheckpointBroken, CheckpointUnreadable) as error:
            if manifest.FOLDER.fullmatch(folder.name):
                seen.notes.append(f"{folder} was passed over: {error.what}")
        else:
            if described.run == name and RUN_ID.fullmatch(described.run_id):
                seen.checkpoints.append(Candidate(folder, described))
                seen.notes.extend(f"{folder}: passed over {wrong}" for wrong in rungs.told_by(described)[1])
            return []
    if DATABASE in files:
        seen.databases.append(folder / DATABASE)
    return [
        Path(entry.path)
        for entry in batch
        if entry.is_dir(follow_symlinks=False) and not _LEFTOVER.fullmatch(entry.name)
    ]


def _lines(items: Iterable[Found], stages: Sequence[str]) -> list[str]:
    """What a person chooses by: a run's id, how far it is, when that was, where it lies."""
    lines: dict[str, str] = {}
    for item in items:
        if item.checkpoints:
            newest = item.furthest_first(stages)[0]
            at = datetime.fromisoformat(newest.manifest.created_at)
            text = f"step {newest.manifest.step} of {newest.manifest.stage}, {at:%Y-%m-%d %H:%M} UTC, {newest.folder}"
        elif item.rows:
            text = f"no checkpoint, begun {item.rows.run['created_at']:%Y-%m-%d %H:%M} UTC, {item.database}"
        else:
            text = "no checkpoint, here"
        lines.setdefault(item.run_id, f"{item.run_id}: {text}")
    return list(lines.values())
