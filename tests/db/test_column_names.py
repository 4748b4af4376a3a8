"""A database whose columns had their former names: migration 0009 renames them and changes nothing else."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from importlib import import_module
from pathlib import Path

import pytest

from kgorch.core.codes import Outcome, Phase, Reason
from kgorch.db import charges, checkpoints, queue, rungs, runs, sessions
from kgorch.db.engine import open_database
from kgorch.db.integrity_check import first_invalid_value
from kgorch.db.tables import Base

DUMP = (Path(__file__).parents[1] / "promises" / "database_0008.sql").read_text()
"""Of a run that was killed once, stopped once and queued again; as version 0008 left it."""

MIGRATION = import_module("kgorch.db.migrations.versions.0009_plain_names")


@pytest.fixture
def home(tmp_path):
    (tmp_path / "home").mkdir(mode=0o700)
    with closing(sqlite3.connect(tmp_path / "home" / "kgorch.db")) as old:
        old.executescript(DUMP)
    return tmp_path / "home"


def rows(home: Path) -> dict[str, list[dict[str, object]]]:
    """All rows of all tables that version 0008 had, by column name."""
    with closing(sqlite3.connect(home / "kgorch.db")) as database:
        database.row_factory = sqlite3.Row
        tables = [
            table
            for table in Base.metadata.tables
            if not table.startswith(("remote_", "slurm_")) and table != "machines"
        ]
        return {table: [dict(row) for row in database.execute(f"SELECT * FROM {table}")] for table in tables}


def test_a_real_database_of_version_8_reads_as_before(home):
    engine = open_database(home)
    [run] = runs.all_runs(engine)
    killed, stopped = sessions.of_run(engine, run.id)
    assert (killed.phase, killed.reason) == (Phase.CUT_OFF, Reason.LOST)
    assert (stopped.phase, stopped.reason, stopped.step) == (Phase.SUSPENDED, Reason.USER, 54)
    assert stopped.site == "local" and stopped.save_lead_s > 100 and stopped.wall_boottime_s > killed.first_step
    assert stopped.started_at < stopped.heartbeat_at < stopped.ended_at
    first, second = sessions.attempts(engine, run.id)
    assert (first.outcome, first.made_progress, second.outcome) == (Outcome.LOST, True, Outcome.STOPPED)
    newest = checkpoints.newest_verified(engine, run.id)
    assert newest.step == 54 and 0 < newest.blocking_s < newest.save_duration_s
    due = queue.pending_resume(engine, run.id)
    assert (due.reason, due.failed_starts, due.last_session_at) == (Reason.QUEUED, 0, stopped.started_at)
    assert charges.newest(engine, stopped.id).started_at < stopped.ended_at
    assert charges.pool(engine, "generic").updated_at > killed.started_at
    assert first_invalid_value(engine, {}) is None


def test_each_value_stands_in_the_renamed_column_of_its_row(home):
    with closing(sqlite3.connect(home / "kgorch.db")) as old:
        old.execute(
            "INSERT INTO rungs (run_id, plan_hash, stage, device, world, at, step, rung, why, up, changes_result, settings)"
            " SELECT id, 'h', 'train', 'cpu', 2, created_at, 5, 'microbatch/2', 'memory ran out', 0, 0, '{\"settings\": {}}'"
            " FROM runs"
        )
        old.commit()
    before = rows(home)
    engine = open_database(home)
    [run] = runs.all_runs(engine)
    assert [row.world_size for row in rungs.of_run(engine, run.id)] == [2]
    engine.dispose()
    for table, now in rows(home).items():
        names = MIGRATION.COLUMNS.get(table, {})
        assert before[table], f"the table {table} is compared with nothing"
        expected = [{names.get(name, name): value for name, value in row.items()} for row in before[table]]
        # later migrations have added columns
        assert [{name: row[name] for name in old} for row, old in zip(now, expected, strict=True)] == expected


def test_every_renamed_column_is_one_of_today():
    for table, names in MIGRATION.COLUMNS.items():
        columns = Base.metadata.tables[table].columns
        assert set(names.values()) <= set(columns.keys()) and not set(names) & set(columns.keys()), table
