"""One run's rows out of another state folder's database into this one; what that database says of other runs stays there.

The other database may lie on a read-only disk, be of an older schema, or be no database at all: it is copied, opened and
brought up to date as a copy. Its ids mean nothing here, and its paths neither. What each of its columns may hold, and what is
not read at all: db/imported.py.
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

from db import imported, rungs
from db.engine import open_url
from db.imported import Columns, Reader
from db.records import RunInfo
from db.runs import now, plain
from db.tables import Attempt, Base, Charge, Checkpoint, Curve, EventRow, Run, RungRow, Session, Stage
from orchestrator import untrusted_io
from orchestrator.core.codes import OVER, CheckpointState, EventKind, Outcome, Phase, Reason, RunState
from orchestrator.untrusted_io import Budget

GONE = "nothing of it was heard after this state was kept"
MAX_BYTES = 4 << 30
MAX_FACTOR = 64.0


class Rows(NamedTuple):
    """What a database remembers of one run, by that database's own ids.

    Attributes:
        outdated: that database knows a newer run of the name, or calls this one superseded.
        left_out: how many odd rows of a table were left out.
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
    left_out: Mapping[str, int] = {}

    @property
    def last_at(self) -> datetime:
        """When its newest session began: of two databases that know a run, the later one knows more."""
        found: datetime = max((row["started_at"] for row in self.sessions), default=self.run["created_at"])
        return found

    @property
    def finished(self) -> dict[str, tuple[datetime, str]]:
        """The stages that are done: when, and how they came to be."""
        return {row["name"]: (row["finished_at"], row["note"]) for row in self.stages if row["finished_at"]}


@contextmanager
def copy_of(path: Path, budget: Budget) -> Iterator[Engine]:
    """The database at `path` as a copy that is up to date, for as long as the block runs; nothing is written beside it.

    Raises: imported.Odd, BudgetExceeded, StateUnusable, OSError, sqlite3.Error.
    """
    with TemporaryDirectory(prefix="kgorch-") as folder:
        read = _bounded(budget, folder)
        for suffix in ("", "-wal"):
            source = path.with_name(path.name + suffix)
            if not suffix or source.exists():
                untrusted_io.copy_file(source, Path(folder, "kgorch.db" + suffix), read, MAX_BYTES)
        imported.check_schema(Path(folder, "kgorch.db"), budget)
        engine = open_url(f"sqlite:///{folder}/kgorch.db", guard=imported.guard(budget))
        try:
            yield engine
        finally:
            engine.dispose()


def _bounded(budget: Budget, folder: str) -> Callable[[int], None]:
    """Asked before so many bytes are copied into the folder: half of what is free there stays free, whoever else needs it."""
    left = shutil.disk_usage(folder).free // 2

    def read(count: int) -> None:
        nonlocal left
        budget.spend(count)
        left -= count
        if left < 0:
            raise OSError(errno.ENOSPC, "no room for a copy of it", folder)

    return read


def names(engine: Engine, limit: int) -> list[str]:
    """Of runs that a database knows, for a person who has mistyped one."""
    with engine.connect() as connection:
        found = connection.exec_driver_sql("SELECT DISTINCT name FROM runs LIMIT ?", (limit,)).scalars()
        return [imported.shown(name) for name in found if isinstance(name, str)]


def read(engine: Engine, name: str) -> list[Rows]:
    """All that is remembered of the runs of that name, the newest first.

    Raises: imported.Odd for a value that kgorch does not write: SQLite keeps any.
    """
    with engine.connect() as connection:
        reader = Reader(connection)
        found = reader.rows("runs", "name = ?", name, order="number")[::-1]
        return [
            _rows(reader, run, outdated=position > 0 or run["state"] == RunState.SUPERSEDED)
            for position, run in enumerate({run["id"]: run for run in found}.values())
        ]


def take_in(
    engine: Engine,
    run: Columns,
    stages: Sequence[str],
    finished: Mapping[str, tuple[datetime, str]],
    rows: Rows | None,
    copied: Mapping[str, Columns],
    path_of: Callable[[Columns], str | None],
    events: Sequence[tuple[str, Columns]],
    told_rungs: Sequence[Columns] = (),
) -> RunInfo:
    """Write down a run whose checkpoints were `copied` here, in one transaction; one that is known already learns the rest.

    Args:
        run: the run's own columns, with the paths of this place.
        copied: the columns of each checkpoint that was copied, by its path here.
        path_of: where a checkpoint of these columns lies or would lie here; None for one that has no place here.
        events: kind and facts, for the journal.
        told_rungs: rows that the checkpoints tell of, oldest first.
    """
    with Orm(engine) as orm, orm.begin():
        here = orm.get(Run, run["id"])
        if here is None:
            here = Run(**run)
            orm.add(here)
            orm.flush()
            orm.add_all(Stage(run_id=here.id, position=position, name=name) for position, name in enumerate(stages))
            orm.flush()
        else:
            here.state, here.why, here.finished_at = run["state"], run["why"], run["finished_at"]
        for stage in orm.scalars(select(Stage).where(Stage.run_id == here.id, Stage.finished_at.is_(None))):
            stage.finished_at, stage.note = finished.get(stage.name, (None, stage.note))
        ids = _take_sessions(orm, here, rows) if rows else {}
        _take_checkpoints(orm, here.id, rows.checkpoints if rows else [], copied, path_of, ids, finished)
        _take_rungs(orm, here.id, told_rungs)
        orm.add_all(EventRow(run_id=here.id, at=now(), kind=kind, facts=facts) for kind, facts in events)
        orm.flush()
        return plain(RunInfo, here)


def _take_sessions(orm: Orm, run: Run, rows: Rows) -> dict[int, int]:
    """Sessions that are not known here, and what belongs to them. Returns our ids by theirs."""
    known = {row.started_at: row for row in orm.scalars(select(Session).where(Session.run_id == run.id))}
    number = max((row.number for row in known.values()), default=0)
    ids, new, attempts = {}, set(), _by_session(rows.attempts)
    for columns in rows.sessions:
        if (row := known.get(columns["started_at"])) is None:
            number = max(columns["number"], number + 1)
            row = Session(**_ended(columns) | {"id": None, "run_id": run.id, "number": number})
            orm.add(row)
            orm.flush()
            new.add(columns["id"])
            for attempt in attempts[columns["id"]].values():
                _take_attempt(orm, attempt, row, f"{run.folder}/attempts", rows.curves)
        ids[columns["id"]] = row.id
    told = {(row.at, row.kind) for row in orm.scalars(select(EventRow).where(EventRow.run_id == run.id))}
    for event in rows.events:
        if event["session_id"] in new or (event["session_id"] is None and (event["at"], event["kind"]) not in told):
            orm.add(EventRow(**event | {"id": None, "run_id": run.id, "session_id": ids.get(event["session_id"])}))
    for columns in rows.sessions:
        if columns["id"] in new and columns["phase"] not in OVER:
            lost = {"at": now(), "kind": EventKind.SESSION_LOST, "phase": Phase.CUT_OFF, "facts": {"why": GONE}}
            orm.add(EventRow(run_id=run.id, session_id=ids[columns["id"]], **lost))
    _take_charges(orm, rows.charges, ids)
    for rung in rows.rungs:
        if rung["session_id"] in new:
            orm.add(RungRow(**_past(rung) | {"id": None, "run_id": run.id, "session_id": ids[rung["session_id"]]}))
    return ids


def _take_attempt(orm: Orm, columns: Columns, session: Session, folder: str, curves: Sequence[Columns]) -> None:
    made = _attempt(columns, session, folder)
    orm.add(made)
    orm.flush()
    mine = (piece for piece in curves if piece["attempt_id"] == columns["id"])
    orm.add_all(Curve(**piece | {"id": None, "attempt_id": made.id}) for piece in mine)


def _past(rung: Columns) -> Columns:
    """One of the future would set checkpoints aside that are not saved yet."""
    return rung | {"at": min(rung["at"], now())}


def _by_session(attempts: Sequence[Columns]) -> Mapping[int, dict[int, Columns]]:
    """By session and number, each once: another's table need not be as strict as ours."""
    found: dict[int, dict[int, Columns]] = defaultdict(dict)
    for attempt in attempts:
        found[attempt["session_id"]][attempt["number"]] = attempt
    return found


def _take_rungs(orm: Orm, run_id: str, told: Sequence[Columns]) -> None:
    """Those that no database has told."""
    orm.flush()

    def what(row: Columns) -> tuple[Any, ...]:
        return tuple(row[name] for name in ("stage", "step", "rung", "device", "world", "up"))

    known = {what(row) for row in _all(orm, select(RungRow).where(RungRow.run_id == run_id))}
    for row in told:
        if what(row) not in known:
            taken = RungRow(**_past(row) | {"run_id": run_id, "session_id": None})
            orm.add_all([taken, rungs.told(taken)])


def _take_charges(orm: Orm, theirs: Sequence[Columns], ids: Mapping[int, int]) -> None:
    """What its sessions used, and what a person corrected of the same pools; what is known already grows at most."""
    orm.flush()
    pools = {columns["pool"] for columns in theirs}
    mine = Charge.session_id.in_(ids.values()) | (Charge.session_id.is_(None) & Charge.pool.in_(pools))
    ours = {(row.session_id, row.pool, row.from_at): row for row in orm.scalars(select(Charge).where(mine))}
    for columns in theirs:
        if columns["session_id"] is not None and columns["session_id"] not in ids:
            continue
        session_id = None if columns["session_id"] is None else ids[columns["session_id"]]
        known = ours.get((session_id, columns["pool"], columns["from_at"]))
        if not _can_be(columns):
            continue
        if known is None:
            orm.add(Charge(**columns | {"id": None, "session_id": session_id}))
        elif session_id is not None:
            known.used_s = max(known.used_s, columns["used_s"])


def _can_be(charge: Columns) -> bool:
    """A stranger's database may hold any number: no use lasts ten years, or costs nothing."""
    used_s, factor = charge["used_s"], charge["factor"]
    least_s = -imported.TEN_YEARS_S if charge["session_id"] is None else 0.0
    return bool(least_s <= used_s <= imported.TEN_YEARS_S and 0.0 < factor <= MAX_FACTOR)


def _ended(session: Columns) -> Columns:
    """A session that was alive when its database was kept has lasted until it was last heard of, for all we know."""
    heard_at = session["beat_at"] or session["started_at"]
    if session["phase"] in OVER:
        return session | {"boot_id": "", "ended_at": session["ended_at"] or heard_at}
    return session | {"boot_id": "", "phase": Phase.CUT_OFF, "reason": Reason.LOST, "why": GONE, "ended_at": heard_at}


def _attempt(columns: Columns, session: Session, folder: str) -> Attempt:
    place: Columns = {"id": None, "session_id": session.id, "folder": f"{folder}/{session.number}.{columns['number']}"}
    if columns["outcome"] is None:
        gained = columns["last_step"] > columns["first_step"]
        place |= {"outcome": Outcome.LOST, "cause": GONE, "ended_at": session.ended_at, "gained": gained}
    return Attempt(**columns | place)


def _take_checkpoints(
    orm: Orm,
    run_id: str,
    theirs: Sequence[Columns],
    copied: Mapping[str, Columns],
    path_of: Callable[[Columns], str | None],
    ids: Mapping[int, int],
    finished: Mapping[str, Any],
) -> None:
    """Those that were copied are verified; of the others it stays known that they were.

    A stage that had some, of which none could be copied, keeps them as broken: a launch must not begin it anew by itself.
    """
    ours = {row.path: row for row in orm.scalars(select(Checkpoint).where(Checkpoint.run_id == run_id))}
    here = {row.stage for row in ours.values() if row.state == CheckpointState.VERIFIED} | {
        row["stage"] for row in copied.values()
    }
    known = {path: row for row in theirs if (path := path_of(row))}
    newest = max(ids.values(), default=None)
    for path, columns in (known | {path: known.get(path, {}) | row for path, row in copied.items()}).items():
        row = ours.get(path)
        if path in copied:
            state = {"state": CheckpointState.VERIFIED, "why": "", "verified_at": now()}
        elif row is not None:
            continue
        else:
            missing = columns["stage"] not in here and columns["stage"] not in finished
            was = columns["state"] in (CheckpointState.VERIFIED, CheckpointState.BROKEN)
            state = {
                "state": CheckpointState.BROKEN if missing and was else CheckpointState.DROPPED,
                "why": "it was not found whole in a source",
            }
        session_id = ids.get(columns["session_id"]) if columns.get("session_id") else newest
        place = {"run_id": run_id, "path": path, "session_id": session_id}
        if row is None:
            orm.add(Checkpoint(**columns | place | state | {"id": None}))
        else:
            for name, value in (dict(copied[path]) | state).items():
                setattr(row, name, value)


def _rows(reader: Reader, run: Columns, *, outdated: bool) -> Rows:
    mine, run_id = "session_id IN (SELECT id FROM sessions WHERE run_id = ?)", run["id"]
    pools = f"SELECT pool FROM charges WHERE {mine} AND pool <> ''"  # corrections of the pools that its sessions used
    return Rows(
        run,
        outdated,
        sorted(reader.rows("stages", "run_id = ?", run_id), key=lambda row: row["position"]),
        sorted(reader.rows("sessions", "run_id = ?", run_id), key=lambda row: row["number"]),
        reader.rows("attempts", mine, run_id),
        reader.rows("checkpoints", "run_id = ?", run_id),
        reader.rows("events", "run_id = ? AND kind <> 'chosen'", run_id),
        reader.rows("charges", f"{mine} OR (session_id IS NULL AND why <> '' AND pool IN ({pools}))", run_id, run_id),
        reader.rows("rungs", "run_id = ?", run_id),
        sorted(
            reader.rows("curves", f"attempt_id IN (SELECT id FROM attempts WHERE {mine})", run_id),
            key=lambda row: (row["attempt_id"], row["number"]),
        ),
        reader.left_out,
    )


def _all(orm: Orm, chosen: Select[Any]) -> list[Columns]:
    return [_columns(row) for row in orm.scalars(chosen)]


def _columns(row: Base) -> Columns:
    return {column.key: getattr(row, column.key) for column in row.__table__.columns}
