"""Import of one run's rows from another state folder's database. Rows of other runs stay there.

The other database may lie on a read-only disk, be of an older schema, or be no database at all. It is copied, and the copy is
opened and migrated. Its ids and paths mean nothing here: rows get new ids, and paths of this state folder. What each of its
columns may hold, and which columns are not read: db/untrusted_database.py.
"""

from __future__ import annotations

import errno
import shutil
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from sqlalchemy import Engine, Select, select
from sqlalchemy.orm import Session as Orm

from kgorch import untrusted_io
from kgorch.core.codes import OVER, CheckpointState, EventKind, Outcome, Phase, Reason, RunState
from kgorch.db import rungs, untrusted_database
from kgorch.db.engine import of_file, open_url
from kgorch.db.rows import RunInfo
from kgorch.db.runs import now, to_info
from kgorch.db.tables import Attempt, Charge, Checkpoint, Curve, EventRow, Run, RungRow, SessionRow, Stage
from kgorch.db.untrusted_database import Columns, Reader
from kgorch.untrusted_io import Budget

UNKNOWN_END = "nothing of it was heard after this state was kept"
MAX_BYTES = 4 << 30
"""Of a database and its log that are copied."""

MAX_FACTOR = 64.0
"""Of a charge: pool seconds a session second."""


class RunRows(NamedTuple):
    """The rows of one run in another database, with that database's ids.

    Attributes:
        outdated: that database has a newer run of the name, or calls this one superseded.
        skipped: table → number of its rows that were invalid and left out.
    """

    run: Columns
    outdated: bool
    stages: list[Columns]
    sessions: list[Columns]
    attempts: list[Columns]
    checkpoints: list[Columns]
    events: list[Columns]
    charges: list[Columns]
    rungs: list[Columns]
    curves: list[Columns]
    skipped: Mapping[str, int] = {}

    @property
    def last_at(self) -> datetime:
        """Start of its newest session. Of two databases that have a run, the later one has more of it."""
        started_at: datetime = max((row["started_at"] for row in self.sessions), default=self.run["created_at"])
        return started_at

    @property
    def finished(self) -> dict[str, tuple[datetime, str]]:
        """The finished stages: when, and the note on it."""
        return {row["name"]: (row["finished_at"], row["note"]) for row in self.stages if row["finished_at"]}


class RunImport(NamedTuple):
    """What is recorded of a run whose files were copied here.

    Attributes:
        run: columns of the run, with the paths of this state folder.
        stages: names of the plan's stages, in order.
        rows: what the source's database has of it; None without a database.
        path_of: path that a checkpoint with these columns has or would have here; None where it has no place here.
        finished: finished stages: when, and the note on it.
        copied: path here of each copied checkpoint → its columns.
        events: kind and facts, for the journal.
        rungs: rows that the checkpoints' manifests tell of, oldest first.
    """

    run: Columns
    stages: Sequence[str]
    rows: RunRows | None
    path_of: Callable[[Columns], str | None]
    finished: Mapping[str, tuple[datetime, str]] = {}
    copied: Mapping[str, Columns] = {}
    events: Sequence[tuple[str, Columns]] = ()
    rungs: Sequence[Columns] = ()


@contextmanager
def open_copy(path: Path, budget: Budget) -> Iterator[Engine]:
    """A migrated copy of the database at `path`, for as long as the block runs. Nothing is written beside the original.

    Raises: untrusted_database.InvalidDatabase, BudgetExceeded, StateUnusable, OSError, sqlite3.Error.
    """
    with TemporaryDirectory(prefix="kgorch-") as folder:
        spend = _bounded_by_disk(budget, folder)
        # The log holds the newest rows, and SQLite can neither read a log nor migrate on a read-only disk.
        for suffix in ("", "-wal"):
            source = path.with_name(path.name + suffix)
            if not suffix or source.exists():
                untrusted_io.copy_file(source, Path(folder, "kgorch.db" + suffix), spend, MAX_BYTES)
        untrusted_database.check_schema(Path(folder, "kgorch.db"), budget)
        engine = open_url(of_file(Path(folder, "kgorch.db")), guard=untrusted_database.guard(budget))
        try:
            yield engine
        finally:
            engine.dispose()


def _bounded_by_disk(budget: Budget, folder: str) -> Callable[[int], None]:
    """A function that is called before so many bytes are copied into the folder. Half of its disk's free space stays free,
    because other programs need it, too."""
    available_bytes = shutil.disk_usage(folder).free // 2

    def spend(count: int) -> None:
        nonlocal available_bytes
        budget.spend(count)
        available_bytes -= count
        if available_bytes < 0:
            raise OSError(errno.ENOSPC, "no room for a copy of it", folder)

    return spend


def run_names(engine: Engine, limit: int) -> list[str]:
    """Names of runs in a database, to suggest one to a user who has mistyped it."""
    with engine.connect() as connection:
        names = connection.exec_driver_sql("SELECT DISTINCT name FROM runs LIMIT ?", (limit,)).scalars()
        return [untrusted_database.printable(name) for name in names if isinstance(name, str)]


def read_runs(engine: Engine, name: str) -> list[RunRows]:
    """All rows of the runs of that name, the newest run first.

    Raises: untrusted_database.InvalidDatabase for a value that kgorch does not write; SQLite stores any.
    """
    with engine.connect() as connection:
        reader = Reader(connection)
        rows = reader.rows("runs", "name = ?", name, order="number")[::-1]
        return [
            _run_rows(reader, run, outdated=position > 0 or run["state"] == RunState.SUPERSEDED)
            for position, run in enumerate({run["id"]: run for run in rows}.values())
        ]


def record_import(engine: Engine, imported: RunImport) -> RunInfo:
    """Record an imported run in one transaction. A run that this database has already is completed."""
    columns, rows, finished = imported.run, imported.rows, imported.finished
    with Orm(engine) as orm, orm.begin():
        run = orm.get(Run, columns["id"])
        if run is None:
            run = Run(**columns)
            orm.add(run)
            orm.flush()
            orm.add_all(
                Stage(run_id=run.id, position=position, name=name) for position, name in enumerate(imported.stages)
            )
            orm.flush()
        else:
            run.state, run.why, run.finished_at = columns["state"], columns["why"], columns["finished_at"]
        for stage in orm.scalars(select(Stage).where(Stage.run_id == run.id, Stage.finished_at.is_(None))):
            stage.finished_at, stage.note = finished.get(stage.name, (None, stage.note))
        ids = _import_sessions(orm, run, rows) if rows else {}
        _import_checkpoints(orm, run.id, imported, ids)
        _import_rungs(orm, run.id, imported.rungs)
        orm.add_all(EventRow(run_id=run.id, at=now(), kind=kind, facts=facts) for kind, facts in imported.events)
        orm.flush()
        return to_info(RunInfo, run)


def _import_sessions(orm: Orm, run: Run, rows: RunRows) -> dict[int, int]:
    """Add the sessions that this database does not have, with all rows that refer to them. Returns their ids → our ids.

    A session is recognized by its start, since ids and even numbers may differ.
    """
    known = {row.started_at: row for row in orm.scalars(select(SessionRow).where(SessionRow.run_id == run.id))}
    number = max((row.number for row in known.values()), default=0)
    ids, new, attempts = {}, set(), _by_session(rows.attempts)
    for columns in rows.sessions:
        if (row := known.get(columns["started_at"])) is None:
            number = max(columns["number"], number + 1)
            row = SessionRow(**_ended(columns) | {"id": None, "run_id": run.id, "number": number})
            orm.add(row)
            orm.flush()
            new.add(columns["id"])
            for attempt in attempts[columns["id"]].values():
                _import_attempt(orm, attempt, row, f"{run.folder}/attempts", rows.curves)
        ids[columns["id"]] = row.id
    recorded = {(row.at, row.kind) for row in orm.scalars(select(EventRow).where(EventRow.run_id == run.id))}
    for event in rows.events:
        if event["session_id"] in new or (event["session_id"] is None and (event["at"], event["kind"]) not in recorded):
            orm.add(EventRow(**event | {"id": None, "run_id": run.id, "session_id": ids.get(event["session_id"])}))
    for columns in rows.sessions:
        if columns["id"] in new and columns["phase"] not in OVER:
            lost = {"at": now(), "kind": EventKind.SESSION_LOST, "phase": Phase.CUT_OFF, "facts": {"why": UNKNOWN_END}}
            orm.add(EventRow(run_id=run.id, session_id=ids[columns["id"]], **lost))
    _import_charges(orm, rows.charges, ids)
    for rung in rows.rungs:
        if rung["session_id"] in new:
            orm.add(
                RungRow(**_not_in_future(rung) | {"id": None, "run_id": run.id, "session_id": ids[rung["session_id"]]})
            )
    return ids


def _import_attempt(orm: Orm, columns: Columns, session: SessionRow, folder: str, curves: Sequence[Columns]) -> None:
    attempt = _attempt(columns, session, folder)
    orm.add(attempt)
    orm.flush()
    pieces = (piece for piece in curves if piece["attempt_id"] == columns["id"])
    orm.add_all(Curve(**piece | {"id": None, "attempt_id": attempt.id}) for piece in pieces)


def _not_in_future(rung: Columns) -> Columns:
    """A rung that restarts its stage supersedes checkpoints from before it: a future one would supersede those to come."""
    return rung | {"at": min(rung["at"], now())}


def _by_session(attempts: Sequence[Columns]) -> Mapping[int, dict[int, Columns]]:
    """Session id → number → attempt, so that each is there once: another database's table need not be as strict as ours."""
    result: dict[int, dict[int, Columns]] = defaultdict(dict)
    for attempt in attempts:
        result[attempt["session_id"]][attempt["number"]] = attempt
    return result


def _import_rungs(orm: Orm, run_id: str, rungs_of_manifests: Sequence[Columns]) -> None:
    """Add the rows that only the checkpoints' manifests have."""
    orm.flush()

    def key(row: Columns) -> tuple[Any, ...]:
        return tuple(row[name] for name in ("stage", "step", "rung", "device", "world_size", "up"))

    known = {key(row) for row in _all(orm, select(RungRow).where(RungRow.run_id == run_id))}
    for columns in rungs_of_manifests:
        if key(columns) not in known:
            row = RungRow(**_not_in_future(columns) | {"run_id": run_id, "session_id": None})
            orm.add_all([row, rungs.event_of(row)])


def _import_charges(orm: Orm, theirs: Sequence[Columns], ids: Mapping[int, int]) -> None:
    """Add the usage of its sessions, and the user's corrections of the same pools. A known charge can only grow."""
    orm.flush()
    pools = {columns["pool"] for columns in theirs}
    mine = Charge.session_id.in_(ids.values()) | (Charge.session_id.is_(None) & Charge.pool.in_(pools))
    ours = {(row.session_id, row.pool, row.started_at): row for row in orm.scalars(select(Charge).where(mine))}
    for columns in theirs:
        if columns["session_id"] is not None and columns["session_id"] not in ids:
            continue
        session_id = None if columns["session_id"] is None else ids[columns["session_id"]]
        known = ours.get((session_id, columns["pool"], columns["started_at"]))
        if not _is_plausible(columns):
            continue
        if known is None:
            orm.add(Charge(**columns | {"id": None, "session_id": session_id}))
        elif session_id is not None:
            known.used_s = max(known.used_s, columns["used_s"])


def _is_plausible(charge: Columns) -> bool:
    """An untrusted database may hold any number. No usage lasts ten years or costs nothing; a correction may be negative."""
    used_s, factor = charge["used_s"], charge["factor"]
    minimum_s = -untrusted_database.TEN_YEARS_S if charge["session_id"] is None else 0.0
    return bool(minimum_s <= used_s <= untrusted_database.TEN_YEARS_S and 0.0 < factor <= MAX_FACTOR)


def _ended(session: Columns) -> Columns:
    """Columns of a session that is over. One that was live when its database was copied ended at its last heartbeat."""
    last_at = session["heartbeat_at"] or session["started_at"]
    if session["phase"] in OVER:
        return session | {"boot_id": "", "ended_at": session["ended_at"] or last_at}
    lost = {"phase": Phase.CUT_OFF, "reason": Reason.LOST, "why": UNKNOWN_END, "ended_at": last_at}
    return session | {"boot_id": ""} | lost


def _attempt(columns: Columns, session: SessionRow, folder: str) -> Attempt:
    changes: Columns = {
        "id": None,
        "session_id": session.id,
        "folder": f"{folder}/{session.number}.{columns['number']}",
    }
    if columns["outcome"] is None:
        made_progress = columns["last_step"] > columns["first_step"]
        changes |= {
            "outcome": Outcome.LOST,
            "cause": UNKNOWN_END,
            "ended_at": session.ended_at,
            "made_progress": made_progress,
        }
    return Attempt(**columns | changes)


def _import_checkpoints(orm: Orm, run_id: str, imported: RunImport, ids: Mapping[int, int]) -> None:
    """Record the copied checkpoints as verified and the source's others as dropped.

    A stage of which none could be copied keeps its usable ones as broken, so that a launch does not restart it by itself.

    Args:
        ids: session ids of the source → ours.
    """
    copied = imported.copied
    ours = {row.path: row for row in orm.scalars(select(Checkpoint).where(Checkpoint.run_id == run_id))}
    stages_with_verified = {row.stage for row in ours.values() if row.state == CheckpointState.VERIFIED} | {
        row["stage"] for row in copied.values()
    }
    theirs = imported.rows.checkpoints if imported.rows else []
    known = {path: row for row in theirs if (path := imported.path_of(row))}
    newest = max(ids.values(), default=None)
    for path, columns in (known | {path: known.get(path, {}) | row for path, row in copied.items()}).items():
        row = ours.get(path)
        if path in copied:
            state = {"state": CheckpointState.VERIFIED, "why": "", "verified_at": now()}
        elif row is not None:
            continue
        else:
            is_missing = columns["stage"] not in stages_with_verified and columns["stage"] not in imported.finished
            was_usable = columns["state"] in (CheckpointState.VERIFIED, CheckpointState.BROKEN)
            state = {
                "state": CheckpointState.BROKEN if is_missing and was_usable else CheckpointState.DROPPED,
                "why": "it was not found whole in a source",
            }
        session_id = ids.get(columns["session_id"]) if columns.get("session_id") else newest
        if row is None:
            here = {"id": None, "run_id": run_id, "path": path, "session_id": session_id}
            orm.add(Checkpoint(**columns | here | state))
        else:
            for name, value in (dict(copied[path]) | state).items():
                setattr(row, name, value)


def _run_rows(reader: Reader, run: Columns, *, outdated: bool) -> RunRows:
    run_id, of_run, of_sessions = run["id"], "run_id = ?", "session_id IN (SELECT id FROM sessions WHERE run_id = ?)"
    pools = f"SELECT pool FROM charges WHERE {of_sessions} AND pool <> ''"  # corrections of the pools that its sessions used
    corrections = f"session_id IS NULL AND why <> '' AND pool IN ({pools})"
    return RunRows(
        run,
        outdated,
        stages=sorted(reader.rows("stages", of_run, run_id), key=lambda row: row["position"]),
        sessions=sorted(reader.rows("sessions", of_run, run_id), key=lambda row: row["number"]),
        attempts=reader.rows("attempts", of_sessions, run_id),
        checkpoints=reader.rows("checkpoints", of_run, run_id),
        events=reader.rows("events", "run_id = ? AND kind <> ?", run_id, EventKind.RUN_CHOSEN.value),
        charges=reader.rows("charges", f"{of_sessions} OR ({corrections})", run_id, run_id),
        rungs=reader.rows("rungs", of_run, run_id),
        curves=sorted(
            reader.rows("curves", f"attempt_id IN (SELECT id FROM attempts WHERE {of_sessions})", run_id),
            key=lambda row: (row["attempt_id"], row["number"]),
        ),
        skipped=reader.skipped,
    )


def _all(orm: Orm, query: Select[Any]) -> list[Columns]:
    return [{column.key: getattr(row, column.key) for column in row.__table__.columns} for row in orm.scalars(query)]
