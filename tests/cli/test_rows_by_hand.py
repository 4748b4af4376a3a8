"""A database in which somebody has written by hand: every verb answers, or names the row; nothing outside is touched.

Ours first; then a stranger's that lies in a source: whatever it holds, the plan that is typed decides what runs."""

from __future__ import annotations

import importlib
import json
import os
import shutil
import sqlite3
from contextlib import closing, suppress
from pathlib import Path

import pytest
import xxhash
from answered import ALLOWED, PLAN, code_of, make_state
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from kgorch.checkpoint.folder import write_manifest
from kgorch.checkpoint.manifest import FileEntry, Manifest, Position
from kgorch.cli import odd_row
from kgorch.core.limits import quota_windows
from kgorch.db import integrity_check, sessions
from kgorch.db.engine import open_database
from kgorch.db.event_facts import SHAPES
from kgorch.db.integrity_check import first_invalid_value
from kgorch.db.tables import Base
from kgorch.errors import ExitCode
from kgorch.launch import remedies
from kgorch.launch import rungs as ladder
from kgorch.plan import parse
from kgorch.system.paths import check_stored_folder

READERS = {"pools.resets": quota_windows.parse, "runs.folder": check_stored_folder}
FUZZ = int(os.environ.get("KGORCH_FUZZ", "1"))

VERBS = [
    ["status", "ink"], ["status", "digits", "--json"], ["status", "--all"], ["top"], ["report", "ink", "--md"],
    ["report", "digits", "--json"], ["compare", "ink", "digits"], ["history", "ink"], ["history", "digits", "--json"],
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
    return root


@pytest.fixture(scope="module")
def at_home(sound):
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(sound / "here")
        patch.setenv("KGORCH_HOME", str(sound / "changed"))
        patch.setenv("XDG_CONFIG_HOME", str(sound / "config"))
        for verb in ("start", "resume"):
            patch.setattr(f"kgorch.cli.commands.training.{verb}.run_session", lambda *_, **__: int(ExitCode.SUSPENDED))
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
    assert first_invalid_value(open_database(sound / "home"), READERS) is None


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
    assert said in (first_invalid_value(open_database(sound / "changed"), READERS) or "")


def test_a_verb_that_a_row_breaks_names_it_and_a_bug_of_ours_still_shows_itself(at_home, capfd, monkeypatch):
    change(at_home, [(("sessions", "started_at"), "yesterday")])
    assert code_of(["status", "digits"]) == ExitCode.MISTAKE
    told = capfd.readouterr().err
    assert "holds a value that kgorch did not write: sessions.started_at of row 2" in told and "next: " in told
    assert "ValueError: " in told, "what it broke is told, too"
    change(at_home, [])
    for ours in (
        ZeroDivisionError(),
        UnicodeEncodeError("latin-1", "→", 0, 1, "not in it"),
        FileNotFoundError(2, "gone", "x"),
    ):
        monkeypatch.setattr("kgorch.report.run_view.of_run", lambda *_, ours=ours, **__: (_ for _ in ()).throw(ours))
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
    fail(monkeypatch, "kgorch.report.run_view.of_run", error)
    with pytest.raises(type(error)):
        code_of(["status", "digits"])


def test_an_odd_row_of_the_run_that_the_code_had_no_hand_in_does_not_hide_a_bug_either(at_home, capfd, monkeypatch):
    change(at_home, [])
    with sqlite3.connect(at_home / "changed" / "kgorch.db") as connection:
        connection.execute("UPDATE checkpoints SET source = x'ff00' WHERE run_id = 'digits'")
    monkeypatch.setattr("kgorch.report.run_view.of_run", lambda *_, **__: {}["ours"])
    with pytest.raises(KeyError):
        code_of(["status", "digits"])


def test_a_bug_of_ours_shows_itself_at_once_whatever_the_database_holds(at_home, monkeypatch):
    change(at_home, [])
    with sqlite3.connect(at_home / "changed" / "kgorch.db") as connection:
        rows = ((2, "2026-11-22 00:00:00", 0, '{"host.cpu": 1.0}') for _ in range(200_000))
        connection.executemany('INSERT INTO samples (session_id, at, span_s, "values") VALUES (?, ?, ?, ?)', rows)
    read: list[str] = []
    real = integrity_check._select_unconverted
    monkeypatch.setattr(
        integrity_check, "_select_unconverted", lambda *args: read.append(str(real(*args))) or real(*args)
    )
    monkeypatch.setattr("kgorch.report.run_view.of_run", lambda *_, **__: {}["ours"])
    with pytest.raises(KeyError):
        code_of(["status", "digits"])
    assert read and all(f"LIMIT {odd_row.MAX_ROWS}" in statement for statement in read)


@pytest.mark.parametrize("folder", ["x", "/etc"])
def test_a_runs_folder_by_hand_is_named_by_whatever_trips_over_it(at_home, capfd, folder):
    change(at_home, [(("runs", "folder"), folder)])
    assert code_of(["history", "ink"]) == ExitCode.MISTAKE
    assert "holds a value that kgorch did not write: runs.folder of row" in capfd.readouterr().err


@pytest.mark.parametrize("name", ["", "step-00000001"])  # another training's, perhaps
def test_a_path_in_a_row_has_nothing_deleted_that_is_no_checkpoint(at_home, capfd, name):
    change(at_home, [])
    dear = at_home / "elsewhere"
    if name:
        dear = Path(shutil.copytree(dear, dear / name))
    rest = "final, bytes, state, why, source, save_duration_s, blocking_s, metrics, created_at"
    connection = sqlite3.connect(at_home / "changed" / "kgorch.db")
    connection.execute(
        f"INSERT INTO checkpoints (run_id, stage, step, path, {rest})"
        f" SELECT run_id, stage, 1, '{dear}', {rest} FROM checkpoints WHERE run_id = 'digits'"
    )
    connection.commit()
    connection.close()
    assert code_of(["checkpoints", "prune", "digits", "--keep", "1"]) == ExitCode.MISTAKE
    assert f"{dear} is not a checkpoint" in capfd.readouterr().err
    assert (dear / "dear").read_text() == "dear"


@given(
    cells=st.lists(st.tuples(st.sampled_from(COLUMNS), values), min_size=1, max_size=2),
    verb=st.sampled_from(VERBS),
)
@settings(
    max_examples=120 * FUZZ, deadline=None, database=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@example(cells=[(("attempts", "ranks"), "x")], verb=["doctor"])  # met inside an object
@example(cells=[(("resumes", "failed_starts"), "x")], verb=["resume", "digits"])
@example(cells=[(("samples", "values"), "null")], verb=["status", "ink"])
@example(cells=[(("charges", "used_s"), "")], verb=["quota"])  # of no run that is known there
@example(cells=[(("charges", "used_s"), 251606587726)], verb=["quota"])  # no instant is so late
def test_any_value_in_any_row_is_answered_or_named(at_home, capfd, cells, verb):
    taken = change(at_home, cells)
    before = outside(at_home)
    code = code_of(verb)
    told = capfd.readouterr()
    assert code in ALLOWED and "Traceback" not in told.err, (taken, verb, told.err)
    assert outside(at_home) == before, (taken, verb)
    if "--json" in verb and code == 0:
        json.loads(told.out)


# A stranger's database

MINE = """
name = "digits"
[[stage]]
name = "train"
entry = "t.py"
args = { lr = 0.1 }
[memory]
ladder = ["microbatch/2", { set = { crop = 96 } }]
[resume]
sources = ["../foreign/**"]
"""


@pytest.fixture(scope="module")
def stranger(tmp_path_factory):
    """A person's folder with a plan, and a source with a state folder as kgorch has written it, which its owner then edits."""
    root = tmp_path_factory.mktemp("stranger")
    for name in ("here", "elsewhere", "sound"):
        (root / name).mkdir()
    (root / "here" / "plan.toml").write_text(MINE)
    (root / "here" / "t.py").write_text("")
    (root / "elsewhere" / "dear").write_text("dear")
    make_state(root / "sound", root / "here")
    saved = root / "sound" / "runs" / "digits" / "1" / "checkpoints" / "train" / "step-00000010"
    (saved / "rank0.safetensors").write_bytes(b"weights")
    files = {"rank0.safetensors": FileEntry(7, xxhash.xxh3_128(b"weights").hexdigest())}
    at = "2026-11-20T10:00:00+00:00"
    write_manifest(saved, Manifest("digits", "digits", "train", Position(step=10), 1, at, files=files))
    with closing(sqlite3.connect(root / "sound" / "kgorch.db")) as connection:
        connection.execute("UPDATE runs SET overrides = '[]'")  # else each start would end at them
        connection.commit()
    return root


def hostile(marker: Path) -> dict[tuple[str, str], list[object]]:
    """What would run a command, lead out of the folder or hand the script an argument, if anybody believed it."""
    touch = f'["touch", "{marker}"]'
    arguments = {"out": str(marker), "shell": True}
    stage = f'stage=[{{name="train",entry="subprocess:call",ranks=1,args={{args="touch {marker}",shell=true}}}}]'
    elsewhere = [
        'checkpoint.mirror="/tmp"',
        'checkpoint.dir="/tmp"',
        'stage.train.entry="os:getpid"',
        "data.cache=['/etc']",
    ]
    paths = ["/etc", str(marker), "../../../elsewhere", "/"]
    return {
        ("runs", "overrides"): [json.dumps(item) for item in ([f"notify.command={touch}"], [stage], elsewhere, ["x={a.b=[[[["])],
        ("runs", "plan"): [MINE.replace('"t.py"', '"subprocess:call"') + f"[notify]\ncommand = {touch}\n", "a" + ".a" * 50_000],
        ("rungs", "settings"): [
            json.dumps({"settings": {"arguments": arguments}}), json.dumps({"skip": True, "arguments": arguments}),
            json.dumps({"settings": {}, "begins_anew": True}), json.dumps({"settings": {"arguments": {"crop": 97}}}),
        ],
        ("events", "facts"): [json.dumps(item) for item in ({}, {"not": ["digits"], "stage": 5, "failing": [], "end_at": "x"})],
        ("events", "kind"): ["chosen", "notices_failed", "forecast", "weights_partly_loaded", "epoch", "save_failed"],
        ("runs", "workdir"): paths, ("runs", "folder"): paths, ("runs", "checkpoints"): paths, ("attempts", "folder"): paths,
        ("checkpoints", "path"): paths, ("runs", "state"): ["finished", "failed"], ("runs", "id"): ["../..", "ink"],
    }  # fmt: skip


READ_AFTERWARDS = [
    ["status", "digits"], ["status", "digits", "--json"], ["history", "digits"], ["history", "digits", "--json"],
    ["history", "digits", "--events"], ["checkpoints", "list", "digits", "--dropped"], ["doctor", "digits"], ["quota"],
]  # fmt: skip


def pick_up(root: Path, cells: list[tuple[tuple[str, str], object]], patch: pytest.MonkeyPatch) -> list[object]:
    """`kgorch start` beside a source in which these cells were edited, up to where it would train. What it would train."""
    shutil.rmtree(root / "home", ignore_errors=True)
    shutil.rmtree(root / "foreign", ignore_errors=True)
    shutil.copytree(root / "sound", root / "foreign")
    with closing(sqlite3.connect(root / "foreign" / "kgorch.db")) as connection:
        for (table, column), value in cells:
            with suppress(sqlite3.IntegrityError):
                connection.execute(f'UPDATE "{table}" SET "{column}" = ?', (value,))
        connection.commit()
    trained: list[object] = []

    def train(engine, opened, **_):
        place = ladder.RungScope("train", "cpu", 2)
        trained.append((opened, ladder.launch_settings(engine, opened.run, opened.plan, place)))
        opened.claim.release()
        opened.lock.release()
        return int(ExitCode.SUSPENDED)

    patch.setattr("kgorch.cli.commands.training.start.run_session", train)
    return trained


def bytes_of(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


STRANGERS = [cell for cell in COLUMNS if cell[0] not in ("resumes", "samples", "pools")]


@given(data=st.data())
@settings(
    max_examples=60 * FUZZ, deadline=None, database=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_whatever_a_strangers_database_holds_the_plan_that_is_typed_decides_what_runs(stranger, capfd, data):
    marker = stranger / "elsewhere" / "PWNED"
    any_cell = st.tuples(st.sampled_from(STRANGERS), values)
    aimed = st.sampled_from([(cell, value) for cell, wanted in hostile(marker).items() for value in wanted])
    cells = data.draw(st.lists(any_cell | aimed, min_size=1, max_size=3))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(stranger / "here")
        patch.setenv("KGORCH_HOME", str(stranger / "home"))
        patch.setenv("XDG_CONFIG_HOME", str(stranger / "config"))
        trained = pick_up(stranger, cells, patch)
        before, source = outside(stranger), bytes_of(stranger / "foreign")
        verbs = [["start", "plan.toml"], *(READ_AFTERWARDS if data.draw(st.booleans()) else READ_AFTERWARDS[-3:])]
        for verb in verbs:
            code = code_of(verb, within_s=60)
            told = capfd.readouterr()
            assert code in ALLOWED and "Traceback" not in told.err, (cells, verb, told.err)
            assert code == 0 or verb[0] == "start" or not trained, (cells, verb, told.err)
            if "--json" in verb and code == 0:
                json.loads(told.out)
        assert outside(stranger) == before and not marker.exists(), cells
        assert bytes_of(stranger / "foreign") == source, cells
    for opened, standing in trained:
        assert opened.plan.model_dump() == parse(MINE, "plan.toml").model_dump(), cells
        assert (opened.run.plan, opened.run.overrides, opened.run.workdir) == (MINE, [], str(stranger / "here")), cells
        assert not standing.settings.arguments and not remedies.arguments(standing.schedule), cells
        home = str(stranger / "home")
        assert opened.run.folder.startswith(home) and opened.run.checkpoints.startswith(home), cells


def test_the_stranger_whose_cells_are_edited_is_gone_on_from(stranger, capfd):
    """Else the property above would hold of a database that nobody reads."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(stranger / "here")
        patch.setenv("KGORCH_HOME", str(stranger / "home"))
        for cells, code in (
            ([], ExitCode.SUSPENDED),
            ([(("runs", "overrides"), hostile(Path("/x"))["runs", "overrides"][0])], ExitCode.MISTAKE),
            ([(("rungs", "settings"), hostile(Path("/x"))["rungs", "settings"][0])], ExitCode.MISTAKE),
        ):
            trained = pick_up(stranger, cells, patch)
            assert code_of(["start", "plan.toml"]) == code
            if code == ExitCode.SUSPENDED:
                [(opened, _)] = trained
                assert (opened.run.id, opened.row.number, opened.row.first_step) == ("digits", 2, 10)
        assert "shell = true" in capfd.readouterr().err


@pytest.mark.parametrize("are_tables", [True, False])
def test_no_event_of_any_shape_breaks_what_reads_the_journal(at_home, capfd, are_tables):
    """A journal of before may hold any: they were taken over as they came. What is no table is an oddity that may be named."""
    kinds = [*SHAPES, "weights_partly_loaded", "save_failed", "snapshots_off", "data_cached", "mirror_failed", "exactness",
             "stacks", "memory_facts", "longest_waits", "launched", "attached"]  # fmt: skip
    odd = [{}, {"stage": "train"}, {"stage": 5, "metrics": 5, "failing": 5, "not": 5, "longest_s": 5, "rank0": []}]
    change(at_home, [])
    engine = open_database(at_home / "changed")
    for run in ("ink", "digits"):
        for kind in kinds:
            for facts in odd if are_tables else ([], 5, None):
                sessions.add_event(engine, run, kind, facts, 1 if run == "ink" else 2)
    engine.dispose()
    for run in ("ink", "digits"):
        for verb in (["status"], ["history"], ["history", "--events"], ["doctor"]):
            code = code_of([verb[0], run, *verb[1:]])
            told = capfd.readouterr()
            assert (code == 0 if are_tables else code in ALLOWED) and "Traceback" not in told.err, (verb, run, told.err)
