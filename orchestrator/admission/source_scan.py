"""What the sources of a plan hold of the runs of one name: checkpoints, and what databases beside them record of the runs."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from kgorch.admission.folder_scan import MAX_OTHER_NAMES, RUN_ID, ScanResult, scan_folders, source_folders
from kgorch.admission.source_run import SourceRun
from kgorch.db import import_run
from kgorch.db.import_run import RunRows
from kgorch.db.untrusted_database import printable
from kgorch.errors import nearest
from kgorch.launch import rungs
from kgorch.untrusted_io import Budget, BudgetExceeded

SEARCH_S, SEARCH_BYTES = 60.0, 256 << 20
"""Seconds and bytes of one search of all sources; the manifests and databases of one run are read in a second.

Source: DECISIONS.md, "One budget for a whole search".
"""

MAX_SHOWN_NOTES = 8


@dataclass(frozen=True, slots=True)
class SourceContents:
    """The result of a search.

    Attributes:
        runs: runs of the name, by run id.
        sources: where it searched, as the plan or the platform has it.
        other_names: runs of other names, and where one was met.
        notes: what was skipped, and why; for the user.
        cut: the bound that ended the search before all was seen; empty if none did.
    """

    runs: dict[str, SourceRun]
    sources: tuple[str, ...]
    other_names: Mapping[str, Path]
    notes: Sequence[str] = ()
    cut: str = ""

    def describe(self, name: str) -> str:
        """For a user who may have expected a run there: where was searched, what is there instead."""
        where = ", ".join(self.sources[:3]) + (f" and {len(self.sources) - 3} more" if self.sources[3:] else "")
        if self.runs:
            return f"looked in {where}: {len(self.runs)} run{'s' if len(self.runs) > 1 else ''} of the name {name!r}"
        limit = f" (the search stopped at its limit: {self.cut})" if self.cut else ""
        others = f"; it holds {_quote(self.other_names)}{nearest(name, self.other_names)}" if self.other_names else ""
        return f"looked in {where}: no state of {name!r}{limit}{others}"


def _quote(names: Iterable[str], most: int = 5) -> str:
    every = sorted(names)
    more = f" and {len(every) - most} more" if every[most:] else ""
    return ", ".join(repr(printable(name)) for name in every[:most]) + more


def scan_sources(
    sources: Sequence[str], base: Path, name: str, skip: Iterable[Path], budget: Budget | None = None
) -> SourceContents:
    """Search the sources for the runs of that name.

    Args:
        sources: folders or globs, relative to `base`.
        skip: folders of this state folder, which a source may enclose.
        budget: of the whole search; default: `SEARCH_S` and `SEARCH_BYTES`.
    """
    budget = budget or Budget(SEARCH_S, SEARCH_BYTES)
    folders, notes = source_folders(sources, base)
    scan = scan_folders(folders, name, budget, skip=frozenset(path.resolve() for path in skip))
    runs: dict[str, SourceRun] = {}
    for item in scan.checkpoints:
        runs.setdefault(item.manifest.run_id, SourceRun(item.manifest.run_id)).checkpoints.append(item)
    for number, database in enumerate(scan.databases):
        try:
            every = _read_database(database, name, scan, budget)
        except Exception as error:  # SQLite and Alembic raise many types for a file that is no database of kgorch
            if budget.is_spent:
                scan.cut = scan.cut or _reason_of(budget)
                scan.notes.insert(0, f"{len(scan.databases) - number} databases were not read to the end: {scan.cut}")
                break
            scan.note(f"the database {database} was skipped: {_first_line(error)}")
            continue
        for rows in every:
            run = runs.setdefault(rows.run["id"], SourceRun(rows.run["id"]))
            if run.rows is None or run.rows.last_at < rows.last_at:
                run.rows, run.database = rows, database
    for run in runs.values():
        run.drop_superseded_checkpoints()
        run.folder = _run_folder(run, name, folders)
    notes += scan.notes[:MAX_SHOWN_NOTES]
    if (more := len(scan.notes) - MAX_SHOWN_NOTES) > 0:
        notes.append(f"{more} more were skipped")
    other_names = {other: where for other, where in scan.other_names.items() if other != name}
    return SourceContents(runs, tuple(sources), other_names, notes, scan.cut)


def _run_folder(run: SourceRun, name: str, sources: Sequence[Path]) -> Path | None:
    """The run's folder by the path of its newest checkpoint that lies in one, /…/runs/NAME/NUMBER/checkpoints/STAGE/step-….

    Only a folder inside of a source: where a user has named the checkpoints alone, what lies beside them was not named.
    """
    for item in sorted(run.checkpoints, key=lambda item: item.manifest.created_at, reverse=True):
        match item.folder.parts:
            case (*_, "runs", run_name, number, "checkpoints", _, _) if run_name == name and number.isdecimal():
                folder = item.folder.parents[2]
                if any(folder.is_relative_to(source) for source in sources):
                    return folder
    return None


def _read_database(database: Path, name: str, scan: ScanResult, budget: Budget) -> list[RunRows]:
    """What a database records of the runs of that name; its other runs and its notes go into `scan`.

    Raises: as import_run.open_copy and import_run.read_runs.
    """
    # As a copy: SQLite can neither read a log nor migrate on a read-only disk.
    with import_run.open_copy(database, budget) as engine:
        every = [rows for rows in import_run.read_runs(engine, name) if RUN_ID.fullmatch(rows.run["id"])]
        with contextlib.suppress(sqlite3.Error):  # the names only help a user who has mistyped one
            for other in import_run.run_names(engine, MAX_OTHER_NAMES):
                scan.add_other_name(other, database)
    for rows in every:
        for row in rows.rungs:
            rungs.check(row["settings"])
        for table, count in rows.skipped.items():
            scan.note(f"the database {database}: {count} invalid rows of {table} were left out")
    return every


def _first_line(error: Exception) -> str:
    """For a note; some errors have no message."""
    return printable((str(error).splitlines() or [""])[0] or type(error).__name__, 300)


def _reason_of(budget: Budget) -> str:
    """Why a budget that is spent is so."""
    try:
        budget.spend(0)
    except BudgetExceeded as error:
        return str(error)
    return ""
