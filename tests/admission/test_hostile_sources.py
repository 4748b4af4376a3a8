"""What lies in a source may have been put there to harm: it runs nothing, decides nothing, and is read within bounds.

Real files, real databases. The bounds are tested by what is read, or with a clock of the test's own, not by how fast a machine is.
"""

from __future__ import annotations

import json
import os
import shutil
import sqlite3
import subprocess
import sys
import tracemalloc
from contextlib import closing
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sources import LADDER, PLAN, TRUSTED, checkpoint, session_of, state
from sqlalchemy import JSON, create_engine

from kgorch import untrusted_io
from kgorch.admission import folder_scan, source_run, source_scan
from kgorch.admission.requests import LocalState
from kgorch.admission.source_run import ImportCandidate
from kgorch.checkpoint.folder import read_checkpoint, read_manifest
from kgorch.checkpoint.manifest import Adjustment
from kgorch.core.codes import EventKind
from kgorch.db import checkpoints, import_run, rungs, runs, sessions, untrusted_database
from kgorch.db.engine import open_database
from kgorch.db.integrity_check import CODES
from kgorch.db.migrations import versions
from kgorch.db.migrations.run import upgrade
from kgorch.db.tables import Base
from kgorch.db.untrusted_database import COLUMNS, ROWS, ColumnRule, Reader
from kgorch.errors import KgorchError, NotFound
from kgorch.launch import rungs as ladder
from kgorch.plan import parse
from kgorch.platforms.profile import Profile
from kgorch.preflight import resume_position
from kgorch.untrusted_io import Budget, BudgetExceeded

FUZZ = int(os.environ.get("KGORCH_FUZZ", "1"))
ENOUGH = Budget(3600, 1 << 40)


class Clock:
    """Each look at it lets a second pass."""

    def __init__(self, step_s=1.0):
        self.now_s, self.step_s = 0.0, step_s

    def __call__(self):
        self.now_s += self.step_s
        return self.now_s


def write(path, *statements):
    with closing(sqlite3.connect(path)) as database:
        for statement in statements:
            database.execute(*statement) if isinstance(statement, tuple) else database.executescript(statement)
        database.commit()


# What decides


def rung_of(settings, **changes):
    where = {"plan_hash": "h", "stage": "train", "device": "cpu", "world_size": 1, "step": 3, "rung": "set out"}
    return where | {"settings": settings} | changes


ARGUMENTS = {"settings": {"arguments": {"out": "/etc/cron.d", "shell": True}}}


@pytest.mark.parametrize("settings", [ARGUMENTS, {"skip": True, "arguments": {"out": "/etc/cron.d", "shell": True}}])
@pytest.mark.parametrize("told_by", ["database", "manifest"])
def test_a_stranger_sets_no_argument_that_the_plan_does_not_name(here, source, settings, told_by):
    if told_by == "database":
        state(source)
        engine = open_database(source)
        rungs.add(engine, "r1", 1, **rung_of(settings))
        engine.dispose()
    else:
        at = "2026-11-20T11:00:00+00:00"
        checkpoint(source, 20, changes=[Adjustment(3, "set out", "memory ran out", at, settings, "cpu", 1)])
    with pytest.raises(KgorchError, match="not trusted with that") as refused:
        here.start(PLAN + LADDER)
    assert 'train: out = "/etc/cron.d"' in str(refused.value) and "shell = true" in str(refused.value)
    assert refused.value.code == 2 and "--accept-plan" in refused.value.next_step
    assert here.look() is None, "nothing was begun"
    opened, _ = here.start(PLAN + LADDER, consent=TRUSTED)
    assert opened.run.id == "r1" and opened.row.first_step == 20


def test_an_argument_must_have_the_value_that_the_plan_names(here, source):
    state(source)
    engine = open_database(source)
    rungs.add(engine, "r1", 1, **rung_of({"settings": {"arguments": {"crop": True}}}))
    engine.dispose()
    with pytest.raises(KgorchError, match="crop = true"):
        here.start(PLAN + LADDER.replace("crop = 64", "crop = 1"))
    assert here.start(PLAN + LADDER.replace("crop = 64", "crop = true"))[0].run.id == "r1"


def test_what_the_plans_own_remedies_set_may_have_been_set(here, source):
    state(source)
    engine = open_database(source)
    rungs.add(engine, "r1", 1, **rung_of({"skip": True, "arguments": {"amp": False}}))
    engine.dispose()
    assert here.start(PLAN + "[health]\nnan = [{ set = { amp = false } }]")[0].run.id == "r1"


def test_a_stranger_has_no_stage_begin_anew(here, source):
    """Such a rung leaves the stage's checkpoints behind, ours too."""
    state(source)
    engine = open_database(source)
    rungs.add(engine, "r1", 1, **rung_of({"settings": {}, "begins_anew": True}))
    engine.dispose()
    with pytest.raises(KgorchError, match="train: begin anew, without its checkpoints"):
        here.start(PLAN + LADDER)


def test_further_state_of_our_own_run_sets_no_argument_either(here, source):
    state(source)
    here.start()
    engine = open_database(source)
    row = session_of(engine, runs.newest(engine, "ink"))
    rungs.add(engine, "r1", row.id, **rung_of(ARGUMENTS))
    engine.dispose()
    assert here.start()[0].row.first_step == 20, "nothing there is further than here, so it is not asked"
    checkpoint(source / "runs/ink/1/checkpoints", 40)
    with pytest.raises(KgorchError, match="shell = true"):
        here.start()
    assert here.start(consent=TRUSTED)[0].row.first_step == 40


def test_a_rung_of_the_future_does_not_set_later_checkpoints_aside(here, source):
    state(source)
    engine = open_database(source)
    settings = {"settings": {"arguments": {"hidden": 96}}, "begins_anew": True}
    rungs.add(engine, "r1", 1, **rung_of(settings), at=datetime.now(UTC) + timedelta(days=9000))
    checkpoints.supersede(engine, "r1", "train", before=datetime.now(UTC), why="the stage began anew")
    engine.dispose()
    here.start(PLAN + LADDER)
    engine = open_database(here.home)
    assert ladder.last_restart(engine, "r1", "train").at <= datetime.now(UTC)
    engine.dispose()


def test_the_id_of_another_run_of_ours_is_not_written_into(here, source):
    """Ids travel with what a person publishes: a source could claim that of any run."""
    other, _ = here.start(PLAN.replace('"ink"', '"other"'))
    state(source, run_id=other.run.id)
    opened, told = here.start()
    assert opened.run.id != other.run.id and any("is that of 'other' here" in note for note in told.notes)
    [entry] = here.look("other")[1]
    assert entry["why"] == "", "and nothing of the source's sessions came into it"


def test_what_is_a_persons_decision_or_a_process_at_another_machine_does_not_come_along(here, source):
    state(source, pool="kaggle")
    write(
        source / "kgorch.db",
        ("UPDATE sessions SET supervisor_pid = ?, supervisor_started_ticks = 1, boot_id = 'b'", [os.getpid()]),
        "UPDATE sessions SET wall_boottime_s = 1, fixed_wall_boottime_s = 1; UPDATE attempts SET folder = '/etc'",
    )
    engine = open_database(source)
    sessions.add_event(engine, "r1", EventKind.RUN_CHOSEN, {"run": "r1", "not": ["mine"]})
    engine.dispose()
    _, told = here.start()
    assert not told.notes, "a row that is not imported on purpose is no invalid one"
    engine = open_database(here.home)
    first, _ = sessions.of_run(engine, "r1")
    assert (first.supervisor_pid, first.supervisor_started_ticks, first.boot_id, first.wall_boottime_s) == (
        None,
        None,
        "",
        None,
    )
    assert [item.folder for item in sessions.attempts(engine, "r1")] == [str(here.home / "runs/ink/1/attempts/1.1")]
    assert not sessions.facts_of_kind(engine, "r1", EventKind.RUN_CHOSEN) and runs.newest(engine, "ink").pool == ""
    engine.dispose()


# What each column may hold


def test_each_column_of_each_table_has_a_rule_or_is_not_read():
    """A new column decides nothing before somebody has thought about it."""
    tables = {name: {column.name for column in table.columns} for name, table in Base.metadata.tables.items()}
    assert tables.keys() - COLUMNS.keys() == {
        "machines",
        "pools",
        "remote_bundles",
        "remote_sessions",
        "resumes",
        "samples",
        "slurm_jobs",
    }, "of this machine alone"
    assert {name: set(rules) for name, rules in COLUMNS.items()} == {name: tables[name] for name in COLUMNS}
    assert COLUMNS.keys() == ROWS.keys()
    for table, rules in COLUMNS.items():
        for name, rule in rules.items():
            is_document = isinstance(Base.metadata.tables[table].columns[name].type, JSON)
            documents = (ColumnRule.METRICS, ColumnRule.TABLE, ColumnRule.FACTS, ColumnRule.SETTINGS)
            assert is_document == (rule in documents or name == "overrides"), f"{table}.{name}"
            assert rule is not ColumnRule.CODE or f"{table}.{name}" in CODES


@pytest.mark.parametrize(
    ("cell", "value"),
    [
        ("runs.number", 2**40), ("runs.created_at", "9999-01-01 00:00:00"), ("runs.state", "superb"),
        ("runs.overrides", '{"a": 1}'), ("runs.overrides", "[1]"), ("runs.plan", "a" + ".a" * 100_000 + " = 1"),
        ("runs.overrides", '["x={a' + ".a" * 100_000 + '=1}"]'), ("runs.plan", "#" * 300_000),
        ("sessions.phase", "trainin"), ("sessions.step", -1), ("sessions.step", 2**62), ("sessions.step_s", 9e999),
        ("sessions.save_lead_s", -1.0), ("sessions.save_lead_s", 1e12), ("sessions.started_at", "tomorrow"),
        ("sessions.why", b"\xff\x00"),
        ("sessions.metrics", "[" * 200 + "]" * 200), ("attempts.last_step", 1.5), ("attempts.made_progress", 7),
        ("checkpoints.step", -3), ("checkpoints.save_duration_s", 1e300), ("checkpoints.state", ""), ("rungs.settings", "{"),
    ],
)  # fmt: skip
def test_a_value_that_cannot_be_costs_the_history_alone(here, source, cell, value):
    state(source)
    engine = open_database(source)
    rungs.add(engine, "r1", 1, **rung_of({"settings": {}}))
    engine.dispose()
    table, column = cell.split(".")
    write(source / "kgorch.db", (f"UPDATE {table} SET {column} = ?", [value]))
    opened, told = here.start()
    assert (opened.run.id, opened.row.first_step, opened.row.number) == ("r1", 20, 1), "the checkpoint, no session"
    assert f"{cell} holds" in told.notes[0] and told.notes[0].isprintable()


def test_an_event_whose_facts_are_not_of_its_kind_is_left_out(here, source):
    state(source)
    engine = open_database(source)
    epoch = {
        "stage": "train",
        "epoch": 1,
        "step": 10,
        "steps": 10,
        "lasted_s": 0.5,
        "metrics": {"dice": None},
        "first": True,
    }
    for facts in (epoch, epoch | {"metrics": 5}, epoch | {"lasted_s": "long"}, epoch | {"step": 2**63}, {}, []):
        sessions.add_event(engine, "r1", "epoch", facts, 1)
    sessions.add_event(engine, "r1", "forecast", {"end_at": "soon"}, 1)
    engine.dispose()
    _, told = here.start()
    assert [event.facts for event in here.look()[2] if event.kind in ("epoch", "forecast")] == [epoch]
    assert "6 invalid rows of events were left out" in told.notes[0]


def test_texts_come_without_what_a_terminal_obeys(here, source):
    state(source)
    engine = open_database(source)
    sessions.add_event(engine, "r1", "odd\x1b[2J", {"what": "\x1b]52;c;cHduZWQ=\x07", "deep": [{"k\x9b": "\ud800"}]}, 1)
    engine.dispose()
    write(source / "kgorch.db", "UPDATE sessions SET why = char(27) || '[2J', stage = char(155) || 'x'")
    write(source / "kgorch.db", ("UPDATE attempts SET outcome = 'crashed', cause = ?", ["line\nline\x1b[31m"]))
    here.start()
    _, (first, _), events = here.look()
    assert first["why"] == "?[2J" and first["attempts"][0]["cause"] == "line\nline?[31m"
    [odd] = [event for event in events if event.kind.startswith("odd")]
    assert odd.kind == "odd?[2J" and odd.facts == {"what": "?]52;c;cHduZWQ=?", "deep": [{"k?": "?"}]}


def test_of_very_many_rows_the_newest_are_read(engine, monkeypatch):
    columns = {"plan": "", "overrides": [], "plan_hash": "", "folder": "", "workdir": "", "checkpoints": ""}
    runs.create(engine, id="r1", name="ink", number=1, stages=[], **columns)
    for number in range(9):
        sessions.add_event(engine, "r1", "noted", {"number": number})
    monkeypatch.setattr(untrusted_database, "ROWS", ROWS | {"events": 3})
    [rows] = import_run.read_runs(engine, "ink")
    assert [event["facts"]["number"] for event in rows.events] == [6, 7, 8]
    monkeypatch.setattr(untrusted_database, "TEXT_BYTES", 100)
    with engine.connect() as connection, pytest.raises(untrusted_database.InvalidDatabase, match="MiB of text"):
        Reader(connection).rows("events", "run_id = ?", "r1")


# What a database is made of

ENDLESS = "WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM c) SELECT x FROM c"
COLUMNS_OF_EVENTS = (
    "1 AS id, 'r1' AS run_id, NULL AS session_id, '2026-11-20 12:00:00' AS at, 'x' AS kind, '' AS phase, '{}' AS facts"
)
VERSIONS = sorted(path.name[:4] for path in Path(versions.__path__[0]).glob("0*.py"))
SCHEMAS = {
    "a view without end": f"DROP TABLE charges; CREATE VIEW charges AS {ENDLESS}",
    "a view of very many rows": "DROP TABLE events; "
    f"CREATE VIEW events AS SELECT {COLUMNS_OF_EVENTS} FROM ({ENDLESS} LIMIT 100000000)",
    "a view besides": f"CREATE VIEW harmless AS {ENDLESS}",
    "a trigger": "CREATE TRIGGER t AFTER UPDATE ON alembic_version BEGIN DELETE FROM runs; END",
    "a table": "CREATE TABLE more (id INTEGER)",
    "a virtual table": "DROP TABLE charges; CREATE VIRTUAL TABLE charges USING fts5(id)",
    "a computed column": "ALTER TABLE runs ADD COLUMN big TEXT AS (hex(zeroblob(100000000)))",
    "very many indexes": ";".join(f"CREATE INDEX i{number} ON runs(name)" for number in range(300)),
    "a check of rows": "DROP TABLE charges; CREATE TABLE charges (id INTEGER, CHECK (id > 0))",
    "a function": "CREATE INDEX i ON runs(instr(name, hex(name)))",
    "a quoted function": 'CREATE INDEX i ON runs("instr"(name, name))',
    "a function behind a comment": "CREATE INDEX i ON runs(instr/**/(name, name))",
    "a function behind a line": "CREATE INDEX i ON runs(instr --\n (name, name))",
    "an index of some rows": "CREATE INDEX i ON runs(name) WHERE name GLOB '*a*b*'",
    "joined texts": "CREATE INDEX i ON runs(name || name)",
    "a computed default": "DROP TABLE charges; CREATE TABLE charges (id INTEGER, big TEXT DEFAULT (zeroblob(9)))",
    "a very long definition": f"CREATE INDEX i ON runs(name) WHERE name <> '{'x' * 50_000}'",
}  # fmt: skip


@pytest.mark.parametrize("what", SCHEMAS)
def test_a_database_that_is_not_made_of_our_tables_alone_is_not_asked(here, source, what):
    state(source)
    write(source / "kgorch.db", SCHEMAS[what])
    opened, told = here.start()
    assert (opened.run.id, opened.row.first_step, opened.row.number) == ("r1", 20, 1), "the checkpoint, no session"
    assert f"the database {source}/kgorch.db was skipped: " in told.notes[0]


@pytest.mark.parametrize("revision", VERSIONS)
def test_the_schemas_of_all_our_versions_are_asked(tmp_path, revision):
    engine = create_engine(f"sqlite:///{tmp_path}/kgorch.db")
    upgrade(engine, revision)
    engine.dispose()
    untrusted_database.check_schema(tmp_path / "kgorch.db", ENOUGH)


def test_a_statement_on_a_strangers_database_ends_with_the_budget():
    with closing(sqlite3.connect(":memory:")) as connection:
        untrusted_database.guard(Budget(100, 1, Clock()))(connection)
        with pytest.raises(sqlite3.OperationalError, match="interrupted"):
            connection.execute(f"SELECT count(*) FROM ({ENDLESS})").fetchone()
        untrusted_database.guard(ENOUGH)(connection)
        with pytest.raises(sqlite3.DataError, match="too big"):
            connection.execute("SELECT hex(zeroblob(100000000))").fetchone()
        with pytest.raises(sqlite3.OperationalError, match="too many attached"):
            connection.execute("ATTACH ':memory:' AS more")


def test_when_the_budget_ends_in_a_database_the_others_are_not_read_and_it_is_said(here, source, monkeypatch, tmp_path):
    state(source)
    for name in "ab":
        state(tmp_path / "source" / "deep" / name, run_id="r1")
    budget = Budget(3600, 1 << 20)
    read = import_run.read_runs
    monkeypatch.setattr(import_run, "read_runs", lambda *args: [read(*args), budget.spend(1 << 20)])
    found = source_scan.scan_sources(["../source/**"], here.work, "ink", [], budget)
    assert found.runs["r1"].rows is None and found.cut == "more than 1 MiB were to be read"
    assert found.notes == ["3 databases were not read to the end: more than 1 MiB were to be read"]


# What is read at all


def test_a_sparse_database_takes_no_more_room_than_it_has_bytes(source, tmp_path):
    state(source)
    os.truncate(source / "kgorch.db", 3 << 30)
    read = []
    untrusted_io.copy_file(source / "kgorch.db", tmp_path / "copy", read.append)
    assert sum(read) < 1 << 20 and (tmp_path / "copy").stat().st_blocks * 512 < 1 << 20
    assert (tmp_path / "copy").stat().st_size == 3 << 30
    with open(source / "kgorch.db", "rb") as one, open(tmp_path / "copy", "rb") as other:
        assert one.read(1 << 20) == other.read(1 << 20)


def test_a_copy_has_the_bytes_between_holes_and_after_them(tmp_path):
    with open(tmp_path / "file", "wb") as file:
        for at in (0, 5 << 20, 9 << 20):
            file.seek(at)
            file.write(b"data" * 1000)
    untrusted_io.copy_file(tmp_path / "file", tmp_path / "copy", lambda _: None)
    assert (tmp_path / "copy").read_bytes() == (tmp_path / "file").read_bytes()
    assert untrusted_io.allocated_bytes(tmp_path / "file") < 1 << 20


def test_a_database_larger_than_what_is_free_is_not_copied(here, source, monkeypatch):
    state(source)
    usage = shutil.disk_usage(here.work)
    monkeypatch.setattr(import_run.shutil, "disk_usage", lambda _: usage._replace(free=100_000))
    found = source_scan.scan_sources(["../source/**"], here.work, "ink", [])
    assert found.runs["r1"].rows is None and "no room for a copy" in found.notes[0]


def test_an_output_that_is_one_large_hole_is_copied_as_a_hole(here, source):
    folder = state(source)
    (folder / "outputs" / "huge").touch()
    os.truncate(folder / "outputs" / "huge", 1 << 42)
    opened, _ = here.start()
    copied = here.home / "runs/ink/1/outputs/huge"
    assert opened.run.id == "r1" and copied.stat().st_size == 1 << 42 and copied.stat().st_blocks < 100


def large_manifest(folder, files=8_000):
    made = checkpoint(folder, 10)
    text = json.loads((made / "manifest.json").read_text())
    entry = {"bytes": 1, "xxh3_128": "0" * 32}
    text["files"] |= {f"rank{number}.safetensors{'x' * 60}": entry for number in range(1, files)}
    (made / "manifest.json").write_text(json.dumps(text))
    return made


def test_very_many_links_to_one_large_manifest_are_read_up_to_the_budget(tmp_path, monkeypatch):
    made = large_manifest(tmp_path / "first")
    size = (made / "manifest.json").stat().st_size
    for number in range(300):
        (folder := tmp_path / str(number)).mkdir()
        os.link(made / "manifest.json", folder / "manifest.json")
    asked, described = [], read_manifest
    monkeypatch.setattr(folder_scan, "read_manifest", lambda folder: [asked.append(folder), described(folder)][1])
    seen = folder_scan.scan_folders([tmp_path], "ink", Budget(3600, 10 * size))
    assert len(asked) == len(seen.checkpoints) == 10
    assert seen.cut.endswith("were to be read") and "is not complete" in seen.notes[0]


def test_of_a_large_manifest_little_is_kept(tmp_path):
    described = read_manifest(large_manifest(tmp_path))
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        kept = [ImportCandidate.of(tmp_path, read_manifest(next(tmp_path.rglob("step-*")))) for _ in range(5)]
        taken = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert len({item.essence for item in kept}) == 1 and kept[0].bytes == described.total_bytes
    assert taken < 500_000, "five, of which each has a file of a megabyte"


def test_the_search_ends_with_its_time(tmp_path):
    for number in range(50):
        checkpoint(tmp_path / str(number), 10, run_id=f"r{number}")
    seen = folder_scan.scan_folders([tmp_path], "ink", Budget(20, 1 << 30, Clock()))
    assert len(seen.checkpoints) < 20 and seen.cut == "it took longer than 20 s"


def test_twenty_thousand_folders_are_gone_through(tmp_path):
    for number in range(20_000):
        (tmp_path / str(number)).mkdir()
    checkpoint(tmp_path / "9" / "deep", 10)
    assert len(folder_scan.scan_folders([tmp_path], "ink", ENOUGH).checkpoints) == 1


def test_a_budget_bounds_time_and_bytes_over_all_that_is_read():
    budget = Budget(100, 1000)
    budget.spend(1000)
    assert not budget.is_spent
    with pytest.raises(BudgetExceeded):
        budget.spend(1)
    assert budget.is_spent
    with pytest.raises(BudgetExceeded, match="longer than 3 s"):
        late = Budget(3, 1000, Clock())
        for _ in range(5):
            late.spend(0)


ODD_FILES = {
    "a pipe": os.mkfifo,
    "a link to a device": lambda path: path.symlink_to("/dev/zero"),
    "a link to itself": lambda path: path.symlink_to(path.name),
    "a folder": lambda path: path.mkdir(),
}


@pytest.mark.parametrize("what", ODD_FILES)
@pytest.mark.parametrize("name", ["kgorch.db", "kgorch.db-wal", "manifest.json"])
def test_what_is_no_plain_file_holds_nobody_up(here, source, what, name):
    """In a process that can be ended: who opens a pipe waits for ever."""
    folder = state(source, (10,))
    path = (checkpoint(folder / "checkpoints", 20) if name == "manifest.json" else source) / name
    path.unlink(missing_ok=True)
    ODD_FILES[what](path)
    program = (
        "import sys; from pathlib import Path; from kgorch.admission import source_scan\n"
        f"found = source_scan.scan_sources(['../source/**'], Path({str(here.work)!r}), 'ink', [])\n"
        "print(*sorted(found.runs['r1'].checkpoints[0].folder.name for _ in '1'))"
    )
    found = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )  # fmt: skip
    assert found.returncode == 0 and "step-00000010" in found.stdout, found.stderr


def test_links_in_a_ring_and_links_that_a_glob_meets_are_not_followed(tmp_path):
    (tmp_path / "in" / "a").mkdir(parents=True)
    (tmp_path / "in" / "a" / "ring").symlink_to(tmp_path / "in")
    checkpoint(tmp_path / "secret", 10)
    (tmp_path / "in" / "b").symlink_to(tmp_path / "secret")
    checkpoint(tmp_path / "in" / "a" / "kept", 20)
    folders, _ = folder_scan.source_folders(["in/*"], tmp_path)
    assert folders == [tmp_path / "in" / "a"]
    assert [item.manifest.step for item in folder_scan.scan_folders(folders, "ink", ENOUGH).checkpoints] == [20]
    (tmp_path / "mine").symlink_to(tmp_path / "secret")
    assert folder_scan.source_folders(["mine", "mine/**"], tmp_path)[0] == [tmp_path / "secret"], (
        "a link that a person names"
    )


def test_rivals_without_number_are_listed_up_to_a_bound(here, source):
    for number in range(60):
        checkpoint(source / str(number), 10, run_id=f"r{number}")
    with pytest.raises(KgorchError, match="60 runs of this name") as refused:
        here.start()
    assert len(refused.value.facts) == source_run.MAX_RIVALS + 1 and refused.value.facts[-1] == "… 40 more"


def a_database(tmp_path):
    state(tmp_path / "whole")
    with closing(sqlite3.connect(tmp_path / "whole" / "kgorch.db")) as database:
        database.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    return (tmp_path / "whole" / "kgorch.db").read_bytes()


def test_a_database_with_changed_bytes_is_read_or_passed_over(tmp_path):
    content = a_database(tmp_path)
    (tmp_path / "in").mkdir()
    edits = st.lists(
        st.tuples(st.integers(0, len(content) - 1), st.binary(min_size=1, max_size=40)), min_size=1, max_size=8
    )

    @given(edits)
    @settings(max_examples=60 * FUZZ, deadline=None, database=None)
    def run(edits):
        changed = bytearray(content)
        for at, put in edits:
            changed[at : at + len(put)] = put
        (tmp_path / "in" / "kgorch.db").write_bytes(changed)
        found = source_scan.scan_sources(["in"], tmp_path, "ink", [], Budget(60, 1 << 30))
        assert found.runs.keys() <= {"r1"} or all(folder_scan.RUN_ID.fullmatch(run_id) for run_id in found.runs)
        assert all(note.isprintable() for note in found.notes)

    run()


# What is said


def test_a_start_says_where_it_has_looked_and_that_a_new_run_begins(here, source):
    _, told = here.start()
    assert told.notes == ["looked in ../source/**: no state of 'ink'; a new run begins"]
    _, told = here.start()
    assert not told.notes, "it is known now"


def test_a_start_names_other_runs_that_it_has_seen_and_the_nearest(here, source):
    checkpoint(source, 20, run="inks")
    state(source / "other")
    write(source / "other" / "kgorch.db", "UPDATE runs SET name = 'zebra' || char(27)")
    shutil.rmtree(source / "other" / "runs")
    _, told = here.start()
    said = (
        "looked in ../source/**: no state of 'ink'; it holds 'inks', 'zebra?' (did you mean 'inks'?); a new run begins"
    )
    assert told.notes == [said]


def test_a_start_that_has_not_seen_all_says_so(here, source, monkeypatch):
    monkeypatch.setattr(source_scan, "SEARCH_BYTES", 10)
    checkpoint(source, 20)
    _, told = here.start()
    assert "no state of 'ink' (the search stopped at its limit: more than 0 MiB" in told.notes[-1]


def test_a_run_that_was_renamed_in_its_plan_is_named(here, source):
    here.start(PLAN.replace('"ink"', '"spaces"'))
    _, told = here.start()
    assert told.notes[1:] == ["'spaces', begun in this folder, is at step 0: a plan of another name begins another run"]


@pytest.mark.parametrize("asked", ["--continue", "[resume] required"])
def test_who_wants_to_go_on_gets_no_new_run(here, source, asked):
    text, options = (PLAN, {"required": True}) if asked == "--continue" else (PLAN + "required = true", {})
    with pytest.raises(NotFound, match="no new run may begin") as refused:
        here.start(text, **options)
    assert refused.value.code == 2 and "looked in ../source/**: no state of 'ink'" in refused.value.facts
    assert "[resume] sources" in refused.value.next_step and here.look() is None
    state(source)
    assert here.start(text, **options)[0].run.id == "r1"
    assert here.start(text, **options)[0].run.id == "r1"
    assert here.start(text, fresh=True)[0].run.id != "r1", "a person may begin anew"


def test_a_plan_that_requires_state_says_so_without_sources(here):
    with pytest.raises(NotFound, match="no sources are named"):
        here.start(PLAN.replace('sources = ["../source/**"]', "sources = []\nrequired = true"))
    assert parse(PLAN + "required = true", "").hash == parse(PLAN, "").hash, "no run is another one by it"


def test_a_manifest_that_changes_between_search_and_copy_is_not_used(here, source, monkeypatch):
    made = checkpoint(source, 20)
    read = read_checkpoint

    def another(folder):
        found = read(folder)
        return replace(found, run_id="r2") if "tmp-found" in str(folder) else found

    monkeypatch.setattr("kgorch.admission.import_files.read_checkpoint", another)
    with pytest.raises(KgorchError, match="changed while it was copied"):
        here.start()
    assert made.is_dir()


# What `kgorch check` says of it


def checked(place, text=PLAN, overrides=()):
    """The lines that `kgorch check` has about checkpoints and sources; nothing must have changed by it."""
    engine, plan = open_database(place.home), parse(text, "plan.toml", list(overrides))
    try:
        before = sorted((place.home / "runs").rglob("*"))
        told = list(resume_position.find(LocalState(engine, place.home, Profile("test")), plan, place.work, overrides))
        assert sorted((place.home / "runs").rglob("*")) == before
        return [(line.verdict, line.said) for line in told]
    finally:
        engine.dispose()


def test_a_check_says_what_a_start_would_go_on_from_in_a_source(here, source):
    assert checked(here) == [("pass", "looked in ../source/**: no state of 'ink'; a start begins a new run")]
    folder = state(source)
    [(verdict, said)] = checked(here)
    assert verdict == "pass" and f"train, step 20, in {folder}/checkpoints/train/step-00000020, read back" in said
    (folder / "checkpoints/train/step-00000020/rank0.safetensors").write_bytes(b"x" * 140)
    [(broken, _), (verdict, said)] = checked(here)
    assert (broken, verdict) == ("warn", "pass") and "step 10" in said
    assert here.start()[0].row.first_step == 10
    [(broken, _), (_, said)] = checked(here)
    assert broken == "warn" and said == "train, step 10, read back; a start goes on from it"


def test_a_check_fails_where_a_start_would_be_refused(here, source, tmp_path):
    required = PLAN + "required = true"
    assert checked(here, required)[0][0] == "fail"
    state(source, overrides=["session.wall=1h"])
    [(verdict, said)] = checked(here)
    assert verdict == "fail" and "--set session.wall=1h" in said
    assert checked(here, overrides=["session.wall=2h"])[0][0] == "pass"
    state(tmp_path / "source" / "second", (5,), run_id="r2")
    [(verdict, said)] = checked(here)
    assert verdict == "fail" and "2 runs of this name" in said


def test_a_check_of_a_finished_run_says_that_a_start_does_nothing(here):
    opened, _ = here.start()
    engine = open_database(here.home)
    runs.set_state(engine, opened.run.id, "finished")
    engine.dispose()
    assert checked(here) == [("pass", "the run ink is finished: a start does nothing")]
