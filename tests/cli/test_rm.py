"""`kgorch rm`: what goes, what stays, and what is never touched."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from answered import code_of, make_state
from deep_folders import make_deep

from kgorch.admission import removal
from kgorch.db import charges, queue, runs, sessions
from kgorch.db.engine import open_database
from kgorch.db.tables import Base
from kgorch.errors import ExitCode
from kgorch.system import process_identity
from kgorch.system.file_lock import FileLock

PROMISES = Path(__file__).parents[1] / "promises"


@pytest.fixture
def place(tmp_path, monkeypatch):
    """Two runs, `ink` finished and `digits` waiting in the queue, each with a row in every table and files."""
    (tmp_path / "work").mkdir()
    make_state(tmp_path / "home", tmp_path / "work")
    for name in ("ink", "digits"):
        saved = tmp_path / "home" / "runs" / name / "1" / "checkpoints" / "train" / "step-00000010"
        (saved / "manifest.json").write_text("{}")
        (saved / "rank0.safetensors").write_bytes(b"x" * 5000)
        (saved.parents[2] / "attempts" / "1.1").mkdir(parents=True)
    monkeypatch.setenv("KGORCH_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.chdir(tmp_path / "work")
    return tmp_path


@pytest.fixture
def engine(place):
    return open_database(place / "home")


def rows_of(engine) -> dict[str, int]:
    with engine.connect() as connection:
        return {
            table.name: connection.exec_driver_sql(f'SELECT count(*) FROM "{table.name}"').scalar_one()
            for table in Base.metadata.sorted_tables
        }


def test_a_run_is_removed_with_its_rows_and_files_and_its_hours_stay_counted(place, engine, capfd):
    before = rows_of(engine)
    since = datetime.now(UTC) - timedelta(days=1)
    used_s = charges.used_s(engine, "kaggle", since)
    within = datetime.now(UTC) - timedelta(seconds=30)
    straddling = charges.used_s(engine, "kaggle", within)
    assert used_s > straddling > 0
    assert code_of(["rm", "ink", "--yes"]) == 0
    assert "removed 1 run" in capfd.readouterr().out
    after = rows_of(engine)
    assert not (place / "home" / "runs" / "ink" / "1").exists() and (place / "home" / "runs" / "digits" / "1").is_dir()
    assert {name for name, count in before.items() if count and after[name] == count} == {"pools", "charges", "resumes"}
    assert all(after[name] == before[name] // 2 for name in after if name not in ("pools", "charges", "resumes"))
    assert charges.used_s(engine, "kaggle", since) == pytest.approx(used_s)
    assert charges.used_s(engine, "kaggle", within) == pytest.approx(straddling)
    assert runs.newest(engine, "ink") is None and queue.pending_resume(engine, "digits")
    assert [path.name for path in (place / "home" / "runs" / "ink").iterdir()] == ["lock"]


def test_a_run_that_waits_leaves_the_queue(place, engine, capfd):
    assert code_of(["rm", "digits", "-y"]) == 0
    assert "is removed from the queue" in capfd.readouterr().out
    assert queue.entries(engine) == []


def test_a_dry_run_only_says_what_and_how_many_bytes(place, engine, capfd):
    before = rows_of(engine)
    assert code_of(["rm", "ink", "digits", "--dry-run"]) == 0
    told = capfd.readouterr().out
    assert "ink/1  finished, " in told and "4.9 KiB" in told and "nothing was removed" in told
    assert rows_of(engine) == before and (place / "home" / "runs" / "ink" / "1" / "checkpoints").is_dir()
    assert not (place / "home" / "runs" / "ink" / "lock").exists()


def test_where_nobody_can_be_asked_nothing_is_removed(place, engine, capfd):
    before = rows_of(engine)
    assert code_of(["rm", "ink"]) == ExitCode.MISTAKE
    assert "next: kgorch rm ink --yes" in capfd.readouterr().err
    assert code_of(["rm", "ink", "--json"]) == ExitCode.MISTAKE
    assert code_of(["rm", "ink", "nosuch", "--yes"]) == ExitCode.MISTAKE
    assert rows_of(engine) == before


def test_the_fields_of_json_are_those_that_were_promised(place, capfd):
    assert code_of(["rm", "ink", "--json", "--yes"]) == 0
    [found] = json.loads(capfd.readouterr().out)
    [promised] = json.loads((PROMISES / "rm.json").read_text())
    assert found.keys() == promised.keys() and found["removed"] and found["bytes"] > 5000


def test_a_run_whose_supervisor_lives_is_refused(place, engine, capfd):
    session = sessions.open_session(
        engine, "digits", boot_id=process_identity.boot_id(), supervisor_pid=os.getpid(),
        supervisor_started_ticks=process_identity.start_ticks(os.getpid()),
    )  # fmt: skip
    assert code_of(["rm", "digits", "--yes"]) == ExitCode.MISTAKE
    told = capfd.readouterr().err
    assert "digits/1 is being trained" in told and "next: kgorch stop digits" in told
    sessions.update_session(engine, session.id, supervisor_pid=None)
    held = FileLock(place / "home" / "runs" / "digits" / "lock")
    assert held.acquire()
    assert code_of(["rm", "digits", "--yes"]) == ExitCode.MISTAKE
    held.release()
    assert code_of(["rm", "digits", "--yes"]) == 0


def test_a_run_that_trains_without_a_supervisor_is_refused(place, capfd):
    held = FileLock(place / "home" / "runs" / "ink" / "1" / "attempts" / "1.1" / "lock")
    assert held.acquire()
    assert code_of(["rm", "ink", "--yes"]) == ExitCode.MISTAKE and "ink/1 is being trained" in capfd.readouterr().err
    held.release()
    assert code_of(["rm", "ink", "--yes"]) == 0


def test_an_older_run_is_removed_while_a_newer_one_of_its_name_lives(place, engine):
    held = FileLock(place / "home" / "runs" / "ink" / "lock")  # the supervisor of ink/2
    assert held.acquire()
    assert code_of(["rm", "ink/1", "--yes"]) == 0
    held.release()
    assert runs.newest(engine, "ink") is None


@pytest.mark.parametrize("what", ["1", ".", "checkpoints"])
def test_no_link_is_followed(place, engine, capfd, what):
    elsewhere = place / "elsewhere"
    run = place / "home" / "runs" / "ink" / "1"
    at = run / "checkpoints" if what == "checkpoints" else run.parent if what == "." else run
    shutil.move(at, elsewhere)
    at.symlink_to(elsewhere)
    kept = sorted(elsewhere.rglob("*"))
    code = code_of(["rm", "ink", "--yes"])
    assert sorted(elsewhere.rglob("*")) == kept
    assert code == (0 if what == "checkpoints" else ExitCode.MISTAKE), capfd.readouterr().err
    assert (runs.newest(engine, "ink") is None) == (what == "checkpoints")


@pytest.mark.parametrize("name", ["..", "../../x", "/", "a/b", ""])
def test_a_name_by_hand_leads_nowhere(place, engine, capfd, name):
    dear = place / "x"
    (dear / "1").mkdir(parents=True)
    with engine.begin() as connection:
        connection.exec_driver_sql("UPDATE runs SET name = ? WHERE id = 'ink'", (name,))
    before = sorted(place.rglob("*"))
    with pytest.raises(Exception, match="is not a folder of runs"):
        removal.describe(engine, place / "home", runs.by_id(engine, "ink"))
    assert code_of(["rm", name, "--yes"]) == ExitCode.MISTAKE
    assert [path for path in before if not path.exists()] == []


@pytest.fixture
def elsewhere(place, engine):
    """The checkpoints of `ink`, where its plan's checkpoint.dir has them."""
    root = place / "work" / "saved" / "ink-ink"
    root.parent.mkdir()
    shutil.move(place / "home" / "runs" / "ink" / "1" / "checkpoints", root)
    with engine.begin() as connection:
        connection.exec_driver_sql("UPDATE runs SET checkpoints = ? WHERE id = 'ink'", (str(root),))
    return root


def test_checkpoints_of_a_folder_of_the_plans_own_stay_unless_they_are_asked_for(place, elsewhere, capfd):
    (elsewhere / "train" / "step-00000011.broken").mkdir()
    assert (
        code_of(["rm", "ink", "--yes", "--dry-run", "--checkpoints"]) == 0 and "removed, too" in capfd.readouterr().out
    )
    assert code_of(["rm", "ink", "--yes"]) == 0
    assert "not removed; --checkpoints removes them" in capfd.readouterr().out
    assert (elsewhere / "train" / "step-00000010" / "manifest.json").exists()


def test_checkpoints_that_are_asked_for_go_and_their_neighbours_stay(place, engine, elsewhere):
    (elsewhere.parent / "other-run").mkdir()
    assert code_of(["rm", "ink", "--yes", "--checkpoints"]) == 0
    assert [path.name for path in elsewhere.parent.iterdir()] == ["other-run"]


@pytest.mark.parametrize("strange", ["notes.txt", "train/notes.txt", "train/step-00000012"])
def test_checkpoints_among_which_something_else_lies_are_left_alone(place, engine, elsewhere, capfd, strange):
    path = elsewhere / strange
    path.symlink_to("/etc") if "step" in strange else path.write_text("dear")
    before = rows_of(engine)
    assert code_of(["rm", "ink", "--yes", "--checkpoints"]) == ExitCode.MISTAKE
    assert "holds something that is not a checkpoint" in capfd.readouterr().err
    assert os.path.lexists(path) and rows_of(engine) == before and (place / "home" / "runs" / "ink" / "1").is_dir()


def test_a_folder_that_is_not_named_as_a_runs_checkpoints_is_never_taken_for_one(place, engine, elsewhere):
    with engine.begin() as connection:
        connection.exec_driver_sql("UPDATE runs SET checkpoints = ? WHERE id = 'ink'", (str(place / "work"),))
    assert code_of(["rm", "ink", "--yes", "--checkpoints"]) == 0
    assert elsewhere.is_dir()


@pytest.mark.parametrize("at", ["rename", "rows", "delete"])
def test_a_removal_that_is_cut_off_is_finished_by_the_next(place, engine, monkeypatch, at):
    folder = place / "home" / "runs" / "ink" / "1"
    with monkeypatch.context() as patch:
        if at == "rename":
            patch.setattr(removal.runs, "remove", lambda *_: os._exit(9))
        elif at == "rows":
            patch.setattr(removal, "_delete", lambda *_: os._exit(9))
        else:
            patch.setattr(shutil, "rmtree", lambda *_, **__: os._exit(9))
        if (pid := os.fork()) == 0:
            with contextlib.suppress(BaseException):
                code_of(["rm", "ink", "--yes"])
            os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 9
    assert not folder.exists()
    left = [path for path in folder.parent.iterdir() if path.name.endswith(".removing")]
    assert len(left) == 1 and (at != "delete" or not list(left[0].rglob("manifest.json")))
    assert code_of(["rm", "ink" if at == "rename" else "digits", "--yes"]) == 0
    assert runs.newest(engine, "ink") is None and not left[0].exists()


def test_what_a_killed_removal_left_is_deleted_at_any_depth_and_through_no_link(place, engine, tmp_path):
    for name in ("x", "y"):
        (tmp_path / "precious" / f".{name}.removing").mkdir(parents=True)
        (tmp_path / "precious" / f".{name}.removing" / "manifest.json").write_text("{}")
    home = place / "home"
    deep = home / "runs" / "demo" / ".9.removing"
    deep.mkdir(parents=True)
    make_deep(deep)
    (home / "runs" / "demo" / ".x.removing").symlink_to(tmp_path / "precious" / ".x.removing")
    (home / "runs" / "linked").symlink_to(tmp_path / "precious")
    assert [removal._delete(path) for path in removal._leftovers(home)] == [True]
    assert not deep.exists() and len([*(tmp_path / "precious").glob("*/manifest.json")]) == 2


def test_a_database_that_cannot_be_written_leaves_all_in_its_place(place, engine, monkeypatch):
    def fails(*_: object) -> None:
        raise RuntimeError("no")

    monkeypatch.setattr(removal.runs, "remove", fails)
    with pytest.raises(RuntimeError):
        code_of(["rm", "ink", "--yes"])
    assert (
        place / "home" / "runs" / "ink" / "1" / "checkpoints" / "train" / "step-00000010" / "manifest.json"
    ).exists()
