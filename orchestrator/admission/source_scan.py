"""What the sources hold of a run: its checkpoints, found by their manifests, and what databases beside them remember of it.

A source is a folder that another session left: a Kaggle input, a disk that was carried over. Nothing is written into it, no
link in it is followed, and its names prove nothing: a checkpoint belongs to the run that its manifest says. A mounted data
set may have a million files, so the search takes the folders in turns, a slice at a time, and ends at a bound. Time and bytes
are bounded over all that is read together, and of a manifest is kept what is compared: who attaches a data set may have put
thousands of them into it.
"""

from __future__ import annotations

import contextlib
import glob
import json
import os
import re
import sqlite3
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import xxhash

from db import transfer
from db.imported import shown
from db.transfer import Rows
from orchestrator.checkpoint.folder import MAX_MANIFEST_BYTES, read_manifest, readable_checkpoints
from orchestrator.checkpoint.manifest import FOLDER_PATTERN, MANIFEST_NAME, Manifest
from orchestrator.errors import CheckpointBroken, CheckpointUnreadable, KgorchError, NotFound, nearest
from orchestrator.launch import rungs
from orchestrator.untrusted_io import Budget, BudgetExceeded

DEPTH, ENTRIES = 16, 300_000
SLICE = 2_000
SEARCH_S, SEARCH_BYTES = 60.0, 256 << 20
"""What one search of all sources may take: manifests and databases of an honest run are read in a second."""

CHECKPOINTS = 20_000
NAMES = 50
"""Other runs that are remembered, for a person who has mistyped a name or renamed a run."""

RIVALS, NOTES = 20, 8
"""So many are shown."""

RUN_ID = re.compile(r"[A-Za-z0-9_-]{1,32}")
DATABASE = "kgorch.db"
_LEFTOVER = re.compile(FOLDER_PATTERN.pattern + r"\..+")

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


class Change(NamedTuple):
    """A rung or a remedy that a checkpoint or a database tells of, as far as it could decide what runs here.

    Attributes:
        arguments: of the stage, as JSON. anew_at: when the stage began anew with it, so that older checkpoints do not fit.
    """

    stage: str
    arguments: str
    anew_at: datetime | None = None


@dataclass(frozen=True, slots=True)
class Candidate:
    """A checkpoint that was found.

    Attributes:
        manifest: without its files, metrics, versions and changes: there may be many. It is read again when it is copied.
        bytes: of its files. essence: a hash of what must still be the same then.
    """

    folder: Path
    manifest: Manifest
    bytes: int
    essence: str
    changes: tuple[Change, ...] = ()

    @staticmethod
    def of(folder: Path, described: Manifest) -> Candidate:
        bare = replace(described, files={}, metrics={}, versions={}, changes=())
        told = tuple(_changes(rungs.told_by(described)[0]))
        return Candidate(folder, bare, described.total_bytes, essence_of(described), told)


def essence_of(described: Manifest) -> str:
    """A hash of what a checkpoint is: whose, where it stands, and its files."""
    files = sorted((name, entry.bytes, entry.xxh3_128) for name, entry in described.files.items())
    position = [getattr(described.position, name) for name in described.position.__slots__]
    told = [described.run_id, described.stage, position, described.final, files]
    return xxhash.xxh3_128(json.dumps(told).encode()).hexdigest()


def _changes(rows: Iterable[Mapping[str, Any]]) -> Iterator[Change]:
    """Those of a list of rungs that set arguments or began a stage anew, each once."""
    found: dict[Change, None] = {}
    for row in rows:
        settings = row["settings"]
        arguments = settings.get("settings", settings).get("arguments") or {}
        anew = bool(settings.get(rungs.ANEW))
        if arguments or anew:
            at = min(row["at"], datetime.now(UTC)) if anew else None
            found[Change(row["stage"], json.dumps(arguments, sort_keys=True), at)] = None
    yield from found


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

    @property
    def training(self) -> set[str]:
        """Stages whose newest checkpoint is not their final one."""
        newest: dict[str, tuple[int, bool]] = {}
        for item in self.checkpoints:
            at = item.manifest.step, item.manifest.final
            newest[item.manifest.stage] = max(newest.get(item.manifest.stage, at), at)
        return {stage for stage, (_, final) in newest.items() if not final}

    def place(self, stages: Sequence[str]) -> Place:
        return max((place_of(stages, item.manifest) for item in self.checkpoints), default=NOWHERE)

    @property
    def is_outdated(self) -> bool:
        return self.rows is not None and self.rows.outdated

    @property
    def changes(self) -> list[Change]:
        """What its rows and its checkpoints tell of, each once."""
        told = [
            *_changes(self.rows.rungs if self.rows else []),
            *(one for item in self.checkpoints for one in item.changes),
        ]
        return list(dict.fromkeys(told))

    def drop_overtaken(self) -> None:
        """Checkpoints of a stage that has begun anew since: its weights no longer fit."""
        anew: dict[str, datetime] = {}
        for change in self.changes:
            if change.anew_at:
                anew[change.stage] = max(change.anew_at, anew.get(change.stage, change.anew_at))
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
    """What a search came by; a note is why something was passed over.

    Attributes:
        others: runs of other names, and where one was seen.
        cut: what the search ended at, where it has not seen all.
    """

    checkpoints: list[Candidate] = field(default_factory=list)
    databases: list[Path] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    others: dict[str, Path] = field(default_factory=dict)
    cut: str = ""

    def note(self, text: str) -> None:
        if len(self.notes) < 1000:
            self.notes.append(text)

    def saw(self, name: str, where: Path) -> None:
        if len(self.others) < NAMES:
            self.others.setdefault(name, where)


@dataclass(frozen=True, slots=True)
class Search:
    """The result of a search.

    Attributes:
        runs: of the name, by run id.
        sources: where it looked, as the plan or the platform says.
    """

    runs: dict[str, Found]
    sources: tuple[str, ...]
    others: Mapping[str, Path]
    cut: str = ""

    def in_words(self, name: str) -> str:
        """What a person is told who may have expected something there."""
        where = ", ".join(self.sources[:3]) + (f" and {len(self.sources) - 3} more" if self.sources[3:] else "")
        if not self.runs:
            far = f" (the search ended at {self.cut})" if self.cut else ""
            others = f"; it holds {_quoted(self.others)}{nearest(name, self.others)}" if self.others else ""
            return f"looked in {where}: no state of {name!r}{far}{others}"
        return f"looked in {where}: {len(self.runs)} run{'s' if len(self.runs) > 1 else ''} of the name {name!r}"


def _quoted(names: Iterable[str], most: int = 5) -> str:
    known = sorted(names)
    return ", ".join(repr(shown(name)) for name in known[:most]) + (
        f" and {len(known) - most} more" if known[most:] else ""
    )


def order_of(stages: Sequence[str], training: Collection[str], *finished: Collection[str] | None) -> list[str]:
    """The stages with the one that is trained as the last: how far a run is tells its newest checkpoint. In a run that was extended
    stages behind that one have final checkpoints, too.

    Args:
        training: stages whose newest checkpoint is not their final one.
        finished: the stages that are done, as each database that knows the run has it; None for none.
    """
    trained = [next((name for name in stages if name not in done), None) for done in finished if done is not None]
    last = max((name for name in trained if name and name in training), key=stages.index, default=None)
    return [*(name for name in stages if name != last), last] if last else list(stages)


def place_of(stages: Sequence[str], described: Manifest) -> Place:
    position = stages.index(described.stage) if described.stage in stages else -1
    return position, described.step, described.final


def find(
    sources: Sequence[str], base: Path, name: str, skip: Iterable[Path], watcher: Watcher, budget: Budget | None = None
) -> Search:
    """What the sources hold of the runs of that name.

    Args:
        sources: folders or globs, relative to `base`.
        skip: our own folders, which a source may enclose.
        budget: of the whole search; default: `SEARCH_S` and `SEARCH_BYTES`.
    """
    budget = budget or Budget(SEARCH_S, SEARCH_BYTES)
    folders, notes = roots(sources, base)
    seen = search(folders, name, skip=frozenset(path.resolve() for path in skip), budget=budget)
    found: dict[str, Found] = {}
    for item in seen.checkpoints:
        found.setdefault(item.manifest.run_id, Found(item.manifest.run_id)).checkpoints.append(item)
    for number, database in enumerate(seen.databases):
        try:
            remembered = _remembered(database, name, seen, budget)
        except Exception as error:  # whatever a file that is no database of ours makes SQLite or Alembic say
            if budget.is_spent:
                seen.cut = seen.cut or _in_words(budget)
                seen.notes.insert(0, f"{len(seen.databases) - number} databases were not read to the end: {seen.cut}")
                break
            seen.note(f"the database {database} was passed over: {_first_line(error)}")
            continue
        for rows in remembered:
            known = found.setdefault(rows.run["id"], Found(rows.run["id"]))
            if known.rows is None or known.rows.last_at < rows.last_at:
                known.rows, known.database = rows, database
    for known in found.values():
        known.drop_overtaken()
    for note in (
        *notes,
        *seen.notes[:NOTES],
        *([f"{len(seen.notes) - NOTES} more were passed over"] if seen.notes[NOTES:] else []),
    ):
        watcher.note(note)
    others = {other: where for other, where in seen.others.items() if other != name}
    return Search(found, tuple(sources), others, seen.cut)


def _remembered(database: Path, name: str, seen: Seen, budget: Budget) -> list[Rows]:
    """What a database knows of the runs of that name. Raises: as transfer.copy_of and transfer.read."""
    with transfer.copy_of(database, budget) as engine:
        told = [rows for rows in transfer.read(engine, name) if RUN_ID.fullmatch(rows.run["id"])]
        with contextlib.suppress(sqlite3.Error):
            for other in transfer.names(engine, NAMES):
                seen.saw(other, database)
    for rows in told:
        for row in rows.rungs:
            rungs.check(row["settings"])
        for table, count in rows.left_out.items():
            seen.note(f"the database {database}: {count} rows of {table} that cannot be were left out")
    return told


def _first_line(error: Exception) -> str:
    """For a note; some errors say nothing."""
    return shown((str(error).splitlines() or [""])[0] or type(error).__name__, 300)


def _in_words(budget: Budget) -> str:
    try:
        budget.spend(0)
    except BudgetExceeded as error:
        return str(error)
    return ""


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
        next((Candidate.of(*pair) for pair in readable_checkpoints(root / stage) if pair[1].run_id == run_id), None)
        for stage in stages
    ]
    return Found(run_id, [item for item in newest if item])


def roots(sources: Sequence[str], base: Path) -> tuple[list[Path], list[str]]:
    """The folders that sources name, and a note for each that names none. `…/**` is that folder: all below is searched."""
    folders: dict[Path, None] = {}
    notes = []
    for source in sources:
        told = str(base / Path(source.removesuffix("**") or ".").expanduser())
        if glob.has_magic(told):
            matches = sorted(islice(glob.iglob(told), ENTRIES))  # noqa: PTH207
            matched = [Path(match) for match in matches if _leads_nowhere_else(told, match)]
        else:
            matched = [Path(told)]
        matched = [path.resolve() for path in matched if path.is_dir()]
        folders |= dict.fromkeys(matched)
        if not matched:
            notes.append(f"the source {source} names no folder")
    return list(folders), notes


def _leads_nowhere_else(pattern: str, match: str) -> bool:
    """Whether no link below the part of the pattern that a person has spelled out was followed: whoever filled the folder
    made it."""
    spelled = Path(*(part for part in _before_magic(Path(pattern).parts)))
    return Path(match).resolve() == spelled.resolve() / Path(match).relative_to(spelled)


def _before_magic(parts: Sequence[str]) -> Iterator[str]:
    for part in parts:
        if glob.has_magic(part):
            return
        yield part


def search(
    folders: Iterable[Path],
    name: str,
    *,
    skip: frozenset[Path] = frozenset(),
    depth: int = DEPTH,
    entries: int = ENTRIES,
    budget: Budget | None = None,
) -> Seen:
    """Checkpoints of runs of that name, and databases, in these folders and below, the shallow ones first.

    Looks at no more than `entries` names, `depth` levels deep, for as long as the budget lasts, and notes where that was not all.
    """
    budget = budget or Budget(SEARCH_S, SEARCH_BYTES)
    seen, left, too_deep = Seen(), entries, False
    queue: deque[tuple[Path, int, Iterator[os.DirEntry[str]] | None]] = deque((folder, 0, None) for folder in folders)
    while queue and left > 0 and len(seen.checkpoints) < CHECKPOINTS:
        folder, level, scan = queue.popleft()
        if folder in skip:
            continue
        try:
            budget.spend(0)
            scan = scan or os.scandir(folder)
            batch = list(islice(scan, min(SLICE, left)))
            below = _look_at(seen, folder, batch, name, budget)
        except BudgetExceeded as error:
            seen.cut = str(error)
            break
        except OSError as error:
            seen.note(f"{folder} was passed over: {error.strerror}")
            continue
        left -= len(batch)
        if len(batch) == SLICE or left <= 0:
            queue.append((folder, level, scan))  # the rest of a large folder comes after all that waits
        if level < depth:
            queue.extend((path, level + 1, None) for path in below)
        too_deep = too_deep or (level == depth and bool(below))
    if not seen.cut and (left <= 0 or too_deep):
        seen.cut = f"{entries} names" if left <= 0 else f"{depth} levels"
    if not seen.cut and queue:
        seen.cut = f"{CHECKPOINTS} checkpoints"
    if seen.cut:
        what = f"the search ended at its bound ({seen.cut}) and has not seen all"
        seen.notes.insert(0, f"{what}: name the folder in resume.sources")
    return seen


def _look_at(seen: Seen, folder: Path, batch: Sequence[os.DirEntry[str]], name: str, budget: Budget) -> list[Path]:
    """Take in what the folder is; the folders below it that are still to be looked at. Raises: BudgetSpent."""
    files = {entry.name: entry for entry in batch if entry.is_file(follow_symlinks=False)}
    if MANIFEST_NAME in files:
        budget.spend(min(files[MANIFEST_NAME].stat(follow_symlinks=False).st_size, MAX_MANIFEST_BYTES))
        try:
            described = read_manifest(folder)
        except (CheckpointBroken, CheckpointUnreadable) as error:
            if FOLDER_PATTERN.fullmatch(folder.name):
                seen.note(f"{folder} was passed over: {error.what}")
        else:
            if described.run == name and RUN_ID.fullmatch(described.run_id):
                seen.checkpoints.append(Candidate.of(folder, described))
                for wrong in rungs.told_by(described)[1][:NOTES]:
                    seen.note(f"{folder}: passed over {wrong}")
            else:
                seen.saw(described.run, folder)
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
    more = [f"… {len(lines) - RIVALS} more"] if len(lines) > RIVALS else []
    return [*list(lines.values())[:RIVALS], *more]
