"""A database in which somebody has written by hand: every verb answers, or names the row; nothing outside is touched."""

from __future__ import annotations

import importlib
import json
import os
import shutil
import sqlite3
from pathlib import Path

import pytest
from answered import ALLOWED, PLAN, code_of, make_state
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from db import soundness
from db.engine import open_database
from db.soundness import PHASES, first_oddity
from db.tables import Base
from orchestrator.cli import cause
from orchestrator.core import windows
from orchestrator.core.session import Phase
from orchestrator.errors import ExitCode
from orchestrator.runtime.home import check_kept_folder

READERS = {"pools.resets": windows.parse, "runs.folder": check_kept_folder}
FUZZ = int(os.environ.get("KGORCH_FUZZ", "1"))

VERBS = [
    ["status", "ink"], ["status", "digits", "--json"], ["status", "--all"], ["history", "ink"], ["history", "digits", "--json"],
    ["history", "--events"], ["checkpoints", "list", "--dropped"], ["checkpoints", "list", "digits", "--json"],
    ["checkpoints", "prune", "ink"], ["checkpoints", "prune", "digits", "--keep", "1"], ["checkpoints", "verify"], ["quota"],
    ["quota", "kaggle", "--json"], ["quota", "set", "--used", "1h", "--pool", "kaggle"], ["queue"], ["queue", "--json"],
    ["queue", "remove", "digits"], ["doctor"], ["doctor", "digits", "--json"], ["logs"], ["stop", "digits"], ["save", "ink"],
    ["daemon", "status"], ["resume", "digits"], ["start", "plan.toml"],
]  # fmt: skip

COLUMNS = [
    (table.name, column.name)
    for table in Base.metadata.sorted_tables
    for column in table.columns
    if not column.primary_key
]

values = st.one_of(
    st.sampled_from(
        [
            None, "", "x", b"\xff\x00", 0, -1, 2**62, -(2**63), 1e300, 9e999, -9e999, 0.5, "0001-01-01 00:00:00",
            "9999-12-31 23:59:59.999999", "2026-13-45", "2026-11-21 00:00:00", "{", "[]", "{}", "[1]", '{"a": 1}', "null", "1",
            '{"step": []}', '{"dice": "x"}', '{"dice": 1e999}', "[" * 5000, "/", "/etc", "..", "../../etc", "\x1b[2J",
            "☃", "x" * 3000, '"x"',
            "finished", "suspended", "training", "due", "verified", "train", "kaggle", "ink", "digits", "microbatch/2",
            "rolling 7d", "Sat 00:00 UTC", "rolling 0d", "epoch", "exactness", "notice", "failed",
        ]
    ),
    st.integers(-(2**63), 2**63 - 1),
    st.floats(allow_nan=False),
    st.text(max_size=5),
)  # fmt: skip


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    """A state folder as kgorch has written it; beside it a folder that is nobody's business."""
    root = tmp_path_factory.mktemp("rows")
    (root / "here").mkdir()
    (root / "here" / "plan.toml").write_text(PLAN)
    (root / "here" / "t.py").write_text("")
    make_state(root / "home", root / "here")
    (root / "elsewhere").mkdir()
    (root / "elsewhere" / "dear").write_text("dear")
    with sqlite3.connect(root / "home" / "kgorch.db") as connection:
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    return root


@pytest.fixture(scope="module")
def at_home(sound):
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(sound / "here")
        patch.setenv("KGORCH_HOME", str(sound / "changed"))
        patch.setenv("XDG_CONFIG_HOME", str(sound / "config"))
        for verb in ("start", "resume"):
            patch.setattr(f"orchestrator.cli.{verb}.run_session", lambda *_, **__: int(ExitCode.SUSPENDED))
        yield sound


def change(root: Path, cells: list[tuple[tuple[str, str], object]]) -> list[str]:
    """A copy of the state folder with other values in some cells. Returns those that SQLite took."""
    shutil.rmtree(root / "changed", ignore_errors=True)
    shutil.copytree(root / "home", root / "changed")
    taken = []
    connection = sqlite3.connect(root / "changed" / "kgorch.db")
    for (table, column), value in cells:
        try:
            connection.execute(f'UPDATE "{table}" SET "{column}" = ?', (value,))
            taken.append(f"{table}.{column} = {value!r}")
        except sqlite3.IntegrityError:
            continue  # what the database itself refuses
    connection.commit()
    connection.close()
    return taken


def outside(root: Path) -> list[str]:
    return sorted(str(path.relative_to(root)) for name in ("elsewhere", "here") for path in (root / name).rglob("*"))


def test_what_kgorch_has_written_is_sound(sound):
    assert first_oddity(open_database(sound / "home"), READERS) is None


def test_the_phases_are_those_of_the_lifecycle():
    assert set(PHASES) == {phase.value for phase in Phase}


@pytest.mark.parametrize(
    ("cell", "value", "said"),
    [
        (
            ("sessions", "started_at"),
            "yesterday",
            "sessions.started_at of row 1: expected an instant, found 'yesterday'",
        ),
        (("sessions", "phase"), "training?", "expected one of queued, starting"),
        (("sessions", "step"), "ten", "sessions.step of row 1: expected a number, found 'ten'"),
        (("sessions", "metrics"), '{"dice": "high"}', "expected numbers by name"),
        (("runs", "overrides"), "[1]", "expected a list of texts"),
        (("checkpoints", "bytes"), 9e999, "expected a number"),
        (("checkpoints", "final"), 7, "expected 0 or 1"),
        (("events", "facts"), "[]", "expected an object of JSON"),
        (
            ("runs", "folder"),
            "x",
            "runs.folder of row ink: expected a run's folder, as /…/runs/NAME/NUMBER, found 'x'",
        ),
        (("runs", "folder"), "/etc", "expected a run's folder"),
        (("pools", "resets"), "never ever", 'expected "Sat 00:00 UTC", '),
    ],
)
def test_an_oddity_is_named_by_table_column_and_row(sound, cell, value, said):
    change(sound, [(cell, value)])
    assert said in (first_oddity(open_database(sound / "changed"), READERS) or "")


def test_a_verb_that_a_row_breaks_names_it_and_a_bug_of_ours_still_shows_itself(at_home, capfd, monkeypatch):
    change(at_home, [(("sessions", "started_at"), "yesterday")])
    assert code_of(["status", "digits"]) == ExitCode.MISTAKE
    told = capfd.readouterr().err
    assert "holds what kgorch has not written: sessions.started_at of row 2" in told and "next: " in told
    assert "ValueError: " in told, "what it broke is told, too"
    change(at_home, [])
    for ours in (
        ZeroDivisionError(),
        UnicodeEncodeError("latin-1", "→", 0, 1, "not in it"),
        FileNotFoundError(2, "gone", "x"),
    ):
        monkeypatch.setattr("orchestrator.report.view.of_run", lambda *_, ours=ours, **__: (_ for _ in ()).throw(ours))
        with pytest.raises(type(ours)):
            code_of(["status", "digits"])


def fail(monkeypatch: pytest.MonkeyPatch, where: str, error: Exception) -> None:
    """Have a function of ours raise that once it has done what it does."""
    module, _, name = where.rpartition(".")
    real = getattr(importlib.import_module(module), name)

    def raises(*args: object, **named: object) -> None:
        found = real(*args, **named)
        raise error if found is not Ellipsis else AssertionError

    monkeypatch.setattr(where, raises)


@pytest.mark.parametrize("error", [KeyError("phase"), ValueError("no"), TypeError("no"), AttributeError("no")])
def test_an_odd_row_of_another_run_does_not_hide_a_bug_of_ours(at_home, capfd, monkeypatch, error):
    change(at_home, [])
    with sqlite3.connect(at_home / "changed" / "kgorch.db") as connection:
        connection.execute("UPDATE sessions SET step = 'ten', phase = 'odd' WHERE run_id = 'ink'")
        connection.execute("UPDATE runs SET folder = '/etc' WHERE id = 'ink'")
    fail(monkeypatch, "orchestrator.report.view.of_run", error)
    with pytest.raises(type(error)):
        code_of(["status", "digits"])


def test_an_odd_row_of_the_run_that_the_code_had_no_hand_in_does_not_hide_a_bug_either(at_home, capfd, monkeypatch):
    change(at_home, [])
    with sqlite3.connect(at_home / "changed" / "kgorch.db") as connection:
        connection.execute("UPDATE checkpoints SET source = x'ff00' WHERE run_id = 'digits'")
    monkeypatch.setattr("orchestrator.report.view.of_run", lambda *_, **__: {}["ours"])
    with pytest.raises(KeyError):
        code_of(["status", "digits"])


def test_a_bug_of_ours_shows_itself_at_once_whatever_the_database_holds(at_home, monkeypatch):
    change(at_home, [])
    with sqlite3.connect(at_home / "changed" / "kgorch.db") as connection:
        rows = ((2, "2026-11-22 00:00:00", 0, '{"host.cpu": 1.0}') for _ in range(200_000))
        connection.executemany('INSERT INTO samples (session_id, at, span_s, "values") VALUES (?, ?, ?, ?)', rows)
    read: list[str] = []
    real = soundness._as_kept
    monkeypatch.setattr(soundness, "_as_kept", lambda *args: read.append(str(real(*args))) or real(*args))
    monkeypatch.setattr("orchestrator.report.view.of_run", lambda *_, **__: {}["ours"])
    with pytest.raises(KeyError):
        code_of(["status", "digits"])
    assert read and all(f"LIMIT {cause.NEWEST}" in statement for statement in read)


@pytest.mark.parametrize("folder", ["x", "/etc"])
def test_a_runs_folder_by_hand_is_named_by_whatever_trips_over_it(at_home, capfd, folder):
    change(at_home, [(("runs", "folder"), folder)])
    assert code_of(["history", "ink"]) == ExitCode.MISTAKE
    assert "holds what kgorch has not written: runs.folder of row" in capfd.readouterr().err


@pytest.mark.parametrize("name", ["", "step-00000001"])  # another training's, perhaps
def test_a_path_in_a_row_has_nothing_deleted_that_is_no_checkpoint(at_home, capfd, name):
    change(at_home, [])
    dear = at_home / "elsewhere"
    if name:
        dear = Path(shutil.copytree(dear, dear / name))
    rest = "final, bytes, state, why, source, took_s, blocking_s, metrics, created_at"
    connection = sqlite3.connect(at_home / "changed" / "kgorch.db")
    connection.execute(
        f"INSERT INTO checkpoints (run_id, stage, step, path, {rest})"
        f" SELECT run_id, stage, 1, '{dear}', {rest} FROM checkpoints WHERE run_id = 'digits'"
    )
    connection.commit()
    connection.close()
    assert code_of(["checkpoints", "prune", "digits", "--keep", "1"]) == ExitCode.MISTAKE
    assert f"{dear} is no checkpoint" in capfd.readouterr().err
    assert (dear / "dear").read_text() == "dear"


@given(
    cells=st.lists(st.tuples(st.sampled_from(COLUMNS), values), min_size=1, max_size=2),
    verb=st.sampled_from(VERBS),
)
@settings(
    max_examples=120 * FUZZ, deadline=None, database=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_any_value_in_any_row_is_answered_or_named(at_home, capfd, cells, verb):
    taken = change(at_home, cells)
    before = outside(at_home)
    code = code_of(verb)
    told = capfd.readouterr()
    assert code in ALLOWED and "Traceback" not in told.err, (taken, verb, told.err)
    assert outside(at_home) == before, (taken, verb)
    if "--json" in verb and code == 0:
        json.loads(told.out)
