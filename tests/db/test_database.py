"""The real SQLite: opened one way, migrated by itself, remembered rows as plain values."""

from __future__ import annotations

import contextlib
import sqlite3
import stat
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import StaticPool, create_engine, text

from kgorch.core.codes import Reason
from kgorch.db import checkpoints, queue, runs, sessions
from kgorch.db.engine import LOG_BYTES, open_database
from kgorch.db.migrations import HEAD, REVISIONS, SCHEMA_FILE
from kgorch.db.migrations.run import config, schema, upgrade
from kgorch.db.tables import Base
from kgorch.errors import ExitCode, StateUnusable


@pytest.fixture
def run(engine):
    return runs.create(
        engine,
        id="r1",
        name="ink",
        number=1,
        folder="/f",
        workdir="/w",
        checkpoints="/f/checkpoints",
        plan="",
        overrides=[],
        plan_hash="h",
        stages=["train", "predict"],
    )


@pytest.fixture
def session(engine, run):
    return sessions.open_session(engine, run.id, boot_id="b")


def test_the_database_is_the_owners_alone_and_opened_for_many_readers(engine, tmp_path):
    assert stat.S_IMODE((tmp_path / "home" / "kgorch.db").stat().st_mode) == 0o600
    with engine.connect() as connection:
        assert connection.execute(text("PRAGMA journal_mode")).scalar() == "wal"
        assert connection.execute(text("PRAGMA foreign_keys")).scalar() == 1
        assert connection.execute(text("PRAGMA busy_timeout")).scalar() == 3000


@pytest.mark.parametrize("name", ["a?b", "a%41", "a#b ü"])
def test_the_database_lies_in_the_state_folder_whatever_letters_its_path_has(tmp_path, name):
    open_database(tmp_path / name).dispose()
    assert [path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*") if path.is_file()] == [
        f"{name}/kgorch.db"
    ]
    assert stat.S_IMODE((tmp_path / name / "kgorch.db").stat().st_mode) == 0o600


def test_the_migrations_lead_to_the_models(engine):
    with engine.connect() as connection:
        assert compare_metadata(MigrationContext.configure(connection), Base.metadata) == []


def test_a_new_database_is_what_the_migrations_lead_to_and_a_next_revision_is_not_forgotten(engine):
    migrated = create_engine("sqlite://", poolclass=StaticPool)
    upgrade(migrated)
    assert schema(engine) == schema(migrated) == SCHEMA_FILE.read_text(), "python -m kgorch.db.migrations.run"
    with engine.connect() as connection:
        assert connection.execute(text("SELECT version_num FROM alembic_version")).scalars().all() == [HEAD]


def test_the_revisions_named_in_the_package_are_the_revisions():
    script = ScriptDirectory.from_config(config())
    assert script.get_current_head() == HEAD
    assert tuple(reversed([revision.revision for revision in script.walk_revisions()])) == REVISIONS


def test_a_database_from_a_newer_kgorch_is_refused_with_a_word(engine, tmp_path):
    with engine.begin() as connection:
        connection.execute(text("UPDATE alembic_version SET version_num = '9999'"))
    with pytest.raises(StateUnusable, match="written by a newer kgorch"):
        open_database(tmp_path / "home")


def test_a_file_that_is_no_database_is_refused_and_left_as_it_is(tmp_path):
    (tmp_path / "kgorch.db").write_text("I am a poem, not a database. " * 50)
    with pytest.raises(StateUnusable, match="cannot be used"):
        open_database(tmp_path)
    assert (tmp_path / "kgorch.db").read_text().startswith("I am a poem")


def test_many_processes_may_open_a_new_database_at_once(tmp_path):
    program = "import sys; from pathlib import Path; from kgorch.db.engine import open_database; open_database(Path(sys.argv[1]))"
    several = [
        subprocess.Popen([sys.executable, "-c", program, str(tmp_path)], stderr=subprocess.PIPE, text=True)
        for _ in range(4)
    ]
    assert [(process.communicate()[1], process.returncode) for process in several] == [("", 0)] * 4


def test_a_locked_database_has_an_exit_code_of_its_own_and_a_damaged_one_has_not(kgorch):
    kgorch("queue", "add", str(kgorch.plan()))
    path = kgorch.home / "kgorch.db"
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as holder:
        holder.execute("BEGIN IMMEDIATE")
        assert "database is locked [KG602]" in kgorch("resume", "test", code=ExitCode.NO_DATABASE).stderr
    path.write_bytes(b"no database" * 100)
    assert "KG602" in kgorch("status", code=ExitCode.MISTAKE).stderr


def test_opening_a_database_twice_in_a_process_leaves_the_first_its_locks(engine, tmp_path):
    """Else whoever is last elsewhere takes the log away under it, and what it reads is malformed."""
    held = engine.connect()
    held.execute(text("SELECT count(*) FROM runs")).all()
    open_database(tmp_path / "home").dispose()
    alone = "import sqlite3, sys; sqlite3.connect(sys.argv[1], timeout=0).execute('PRAGMA journal_mode=DELETE')"
    done = subprocess.run(
        [sys.executable, "-c", alone, tmp_path / "home" / "kgorch.db"], capture_output=True, text=True
    )
    assert "database is locked" in done.stderr
    held.close()


@pytest.mark.parametrize(
    "dump", sorted((Path(__file__).parents[1] / "promises").glob("database_*.sql")), ids=lambda path: path.stem
)
def test_databases_of_all_releases_are_brought_up_to_date_and_read(tmp_path, dump):
    with sqlite3.connect(tmp_path / "kgorch.db") as old:
        old.executescript(dump.read_text())
    old.close()
    engine = open_database(tmp_path)
    [found] = runs.all_runs(engine)
    assert (found.name, sessions.last(engine, found.id).step) in (("ink", 42), ("test", 360), ("test", 54))
    with engine.connect() as connection:
        assert compare_metadata(MigrationContext.configure(connection), Base.metadata) == []


def test_paths_below_the_state_folder_are_kept_relative_to_it_and_come_out_below_where_it_lies_now(tmp_path):
    home = tmp_path / "home"
    engine, folder = open_database(home), home / "runs" / "ink" / "1"
    columns = {"workdir": str(home / "work"), "plan": "", "overrides": [], "plan_hash": "h", "stages": ["train"]}
    kept = {"folder": str(folder), "checkpoints": "/elsewhere/ink-r1"}
    assert runs.create(engine, id="r1", name="ink", number=1, **kept, **columns).folder == str(folder)
    session = sessions.open_session(engine, "r1", boot_id="b")
    paths = [str(folder / "checkpoints" / "train" / "step-00000001"), f"{home}2/step-00000002"]
    sessions.open_attempt(engine, session.id, stage="train", ranks=1, folder_of=lambda n: f"{folder}/attempts/1.{n}")
    for step, path in enumerate(paths, 1):
        told = {"stage": "train", "step": step, "final": False, "bytes": 1}
        checkpoints.record(engine, "r1", path, state="verified", **told)
        checkpoints.record(engine, "r1", path, state="verified", **told)
    engine.dispose()
    with sqlite3.connect(home / "kgorch.db") as raw:
        found = [
            raw.execute(f"SELECT {what}").fetchall()
            for what in ("folder, checkpoints FROM runs", "folder FROM attempts")
        ]
    raw.close()
    assert found == [[("runs/ink/1", "/elsewhere/ink-r1")], [("runs/ink/1/attempts/1.1",)]]
    home.rename(tmp_path / "moved")
    engine = open_database(tmp_path / "moved")
    run = runs.by_id(engine, "r1")
    assert (run.folder, run.checkpoints, run.workdir) == (
        f"{tmp_path}/moved/runs/ink/1",
        kept["checkpoints"],
        columns["workdir"],
    )
    assert sessions.last_attempt(engine, session.id).folder == f"{run.folder}/attempts/1.1"
    assert checkpoints.verified_paths(engine, "r1") == {f"{run.folder}/checkpoints/train/step-00000001", paths[1]}
    checkpoints.set_state(engine, f"{run.folder}/checkpoints/train/step-00000001", "dropped")
    assert checkpoints.verified_paths(engine, "r1") == {paths[1]}


def test_absolute_paths_of_a_database_become_relative_to_the_state_folder_of_that_time(tmp_path):
    """Where it was moved before it was migrated, too. What two rows would share, and what lies elsewhere, stays."""
    now, home = "2026-11-20 12:00:00", tmp_path / "home"
    home.mkdir()
    made = create_engine(f"sqlite:///{home}/kgorch.db")
    upgrade(made, "0004")
    with made.begin() as connection:
        for run, number, root in (("a", 1, "/former"), ("b", 2, "/older/../odd"), ("c", 3, "/no/run's")):
            folder = f"{root}/runs/ink/{number}" if run != "c" else root
            connection.execute(
                text(
                    "INSERT INTO runs (id, name, number, folder, workdir, checkpoints, plan, overrides, plan_hash, state, why,"
                    " created_at, pool) VALUES (:id, 'ink', :number, :folder, '/work', :checkpoints, '', '[]', '', 'active',"
                    " '', :now, '')"
                ),
                {"id": run, "number": number, "folder": folder, "now": now, "checkpoints": f"{folder}/checkpoints"},
            )
        connection.execute(
            text(
                "INSERT INTO sessions (id, run_id, number, place, phase, why, boot_id, started_at, lead_s, stage, first_step,"
                " epoch, epochs_total, step, steps_total, samples, step_s, metrics, exactness) VALUES (1, 'a', 1, 'local',"
                " 'suspended', '', 'b', :now, 0, '', 0, 0, 0, 0, 0, 0, 0, '{}', '{}')"
            ),
            {"now": now},
        )
        connection.execute(
            text(
                "INSERT INTO attempts (session_id, number, stage, folder, ranks, first_step, last_step, cause, started_at)"
                " VALUES (1, 1, 'train', '/former/runs/ink/1/attempts/1.1', 1, 0, 0, '', :now)"
            ),
            {"now": now},
        )
        for path in (
            "/former/runs/ink/1/cp/1",
            "/elsewhere/2",
            "/former/runs/ink/1/cp/3",
            "runs/ink/1/cp/3",
            "/formerly/4",
        ):
            connection.execute(
                text(
                    "INSERT INTO checkpoints (run_id, stage, step, final, path, bytes, state, why, took_s, blocking_s,"
                    " metrics, created_at, source) VALUES ('a', 'train', 1, 0, :path, 1, 'verified', '', 0, 0, '{}', :now, '')"
                ),
                {"path": path, "now": now},
            )
    made.dispose()
    engine = open_database(home)
    folders = {run.id: (run.folder, run.checkpoints) for run in runs.all_runs(engine)}
    assert folders == {
        "a": (f"{home}/runs/ink/1", f"{home}/runs/ink/1/checkpoints"),
        "b": (f"{home}/runs/ink/2", f"{home}/runs/ink/2/checkpoints"),
        "c": ("/no/run's", "/no/run's/checkpoints"),
    }
    assert sessions.last_attempt(engine, 1).folder == f"{home}/runs/ink/1/attempts/1.1"
    assert checkpoints.verified_paths(engine, "a") == {
        f"{home}/runs/ink/1/cp/1", "/elsewhere/2", "/former/runs/ink/1/cp/3", f"{home}/runs/ink/1/cp/3", "/formerly/4",
    }  # fmt: skip


def test_instants_come_back_aware_and_in_utc(engine, run, session):
    wall_at = datetime(2026, 11, 20, 12, tzinfo=UTC).astimezone(tz=None)
    sessions.update_session(engine, session.id, wall_at=wall_at)
    found = sessions.last(engine, run.id).wall_at
    assert found == wall_at and found.tzinfo is UTC


def test_a_phase_and_its_event_are_written_together_or_not_at_all(engine, run, session):
    with pytest.raises(Exception, match="JSON"):
        sessions.record(engine, run.id, session.id, kind="Broken", phase="training", facts={"x": object()})
    assert sessions.last(engine, run.id).phase == "queued"
    assert sessions.events(engine, run.id, limit=10) == []


def test_attempts_without_progress_are_counted_back_to_the_last_gain_and_lost_ones_not_at_all(engine, run, session):
    outcomes = [("crashed", True), ("crashed", False), ("lost", False), ("wall", False)]
    for outcome, made_progress in outcomes:
        attempt = sessions.open_attempt(engine, session.id, stage="train", ranks=1, first_step=0, folder_of=str)
        sessions.close_attempt(engine, attempt.id, outcome=outcome, cause="", last_step=5, made_progress=made_progress)
    assert sessions.attempts_without_progress(engine, run.id) == 2
    attempt = sessions.open_attempt(engine, session.id, stage="train", ranks=1, first_step=0, folder_of=str)
    sessions.close_attempt(engine, attempt.id, outcome="lost", cause="", last_step=9, made_progress=True)
    assert sessions.attempts_without_progress(engine, run.id) == 0, "one that was killed with all else had come further"
    attempt = sessions.open_attempt(engine, session.id, stage="train", ranks=1, first_step=0, folder_of=str)
    sessions.close_attempt(engine, attempt.id, outcome="crashed", cause="", last_step=9, made_progress=False)
    assert sessions.attempts_without_progress(engine, run.id) == 1
    sessions.record(engine, run.id, session.id, kind="retries_exhausted", phase="failed", facts={})
    assert sessions.attempts_without_progress(engine, run.id) == 0, (
        "who starts a failed run again has done something about it"
    )


def test_a_queued_resume_takes_the_place_of_the_one_before(engine, run):
    due_at = datetime.now(UTC) + timedelta(hours=1)
    session = sessions.open_session(engine, run.id, boot_id="b")
    for why, at in [("the wall", None), ("quota", due_at)]:
        sessions.record(
            engine,
            run.id,
            session.id,
            kind="x",
            phase="suspended",
            facts={},
            resume={"reason": Reason.QUOTA, "why": why, "due_at": at},
        )
    assert queue.pending_resume(engine, run.id).why == "quota"
    queue.mark_started(engine, run.id, queue.Claimant(1, 1, "b"), by="pid 1")
    assert queue.pending_resume(engine, run.id) is None


def test_the_newest_verified_checkpoint_is_the_furthest_whatever_the_clock_said_and_whoever_wrote_first(
    engine, run, session
):
    for step, minute in [(20, 1), (10, 2)]:
        checkpoints.record(
            engine,
            run.id,
            f"/cp/{step}",
            state="verified",
            session_id=session.id,
            stage="train",
            step=step,
            final=False,
            bytes=1,
            created_at=datetime(2026, 11, 20, 12, minute, tzinfo=UTC),
        )
    assert checkpoints.newest_verified(engine, run.id).step == 20
    checkpoints.set_state(engine, "/cp/20", "broken")
    assert checkpoints.newest_verified(engine, run.id).step == 10


def _verified(engine, run, stage, step, *, final):
    path = f"/cp/{stage}/{step}"
    checkpoints.record(engine, run.id, path, state="verified", stage=stage, step=step, final=final, bytes=1)


def test_the_newest_checkpoint_is_of_the_stage_that_goes_on_though_a_later_one_is_done(engine, run):
    runs.set_plan(engine, run.id, plan="", overrides=[], plan_hash="x", stages=["train", "tune"])
    for stage, step in [("train", 10), ("tune", 90)]:
        _verified(engine, run, stage, step, final=True)
        runs.finish_stage(engine, run.id, stage)
    assert checkpoints.newest_verified(engine, run.id).stage == "tune"
    assert [row.stage for row in checkpoints.of_run(engine, run.id)] == ["train", "tune"]
    runs.reopen_stage(engine, run.id, "train", "")
    assert checkpoints.newest_verified(engine, run.id).stage == "train"
    numbered = checkpoints.verified_with_numbers(engine, run.id)
    assert (
        [row.stage for _, row in numbered]
        == [row.stage for row in checkpoints.of_run(engine, run.id)]
        == ["tune", "train"]
    )


def test_the_newest_checkpoint_is_of_no_stage_that_the_plan_has_lost_and_that_stage_comes_first(engine, run):
    runs.set_plan(engine, run.id, plan="", overrides=[], plan_hash="x", stages=["quick", "train"])
    for stage, step in [("quick", 90), ("train", 10)]:
        _verified(engine, run, stage, step, final=True)
        runs.finish_stage(engine, run.id, stage)
    runs.set_plan(engine, run.id, plan="", overrides=[], plan_hash="x", stages=["train"])
    assert checkpoints.newest_verified(engine, run.id).stage == "train"
    assert [stage.name for stage in runs.stages(engine, run.id)] == ["quick", "train"]
    assert [row.stage for row in checkpoints.of_run(engine, run.id)] == ["quick", "train"]


def test_a_checkpoint_keeps_its_number_in_its_stage_whatever_was_dropped_before_it(engine, run):
    states = {"train": ["dropped", "verified", "broken", "verified"], "tune": ["superseded", "verified"]}
    for stage, of_stage in states.items():
        for step, state in enumerate(of_stage):
            checkpoints.record(
                engine, run.id, f"/cp/{stage}/{step}", state=state, stage=stage, step=step, final=False, bytes=1
            )
    stand = {(row.stage, row.step): number for number, row in checkpoints.verified_with_numbers(engine, run.id)}
    assert stand == {("train", 1): 1, ("train", 3): 3, ("tune", 1): 1}
    found = checkpoints.of_run(engine, run.id, "dropped", "broken")
    assert [(row.step, row.state) for row in found] == [(0, "dropped"), (2, "broken")]


def test_a_changed_plan_brings_new_stages_in_and_keeps_those_that_are_done(engine, run):
    runs.finish_stage(engine, run.id, "train")
    runs.set_plan(engine, run.id, plan="", overrides=[], plan_hash="x", stages=["package"])
    assert {stage.name: stage.finished_at is not None for stage in runs.stages(engine, run.id)} == {
        "train": True,
        "package": False,
    }


def test_a_session_that_the_wall_clock_has_end_before_it_began_counts_as_no_time_trained(engine, run):
    noon = datetime(2026, 11, 20, 12, tzinfo=UTC)
    for ended_at in (noon.replace(year=2025), noon.replace(hour=13)):
        row = sessions.open_session(engine, run.id, boot_id="b")
        sessions.update_session(engine, row.id, started_at=noon, ended_at=ended_at)
    assert sessions.duration_and_failures(engine, run.id) == (3600.0, 0)


def test_the_log_that_a_reader_has_made_grow_shrinks_once_the_reader_has_gone(tmp_path):
    engine = open_database(tmp_path)
    log = tmp_path / "kgorch.db-wal"

    def write(count: int) -> None:
        for _ in range(count):
            with engine.begin() as connection:
                connection.exec_driver_sql("INSERT INTO blocks VALUES (randomblob(1048576))")

    with engine.begin() as connection:
        connection.exec_driver_sql("CREATE TABLE blocks (content BLOB)")
    with contextlib.closing(sqlite3.connect(tmp_path / "kgorch.db")) as reader:
        reader.execute("BEGIN")
        reader.execute("SELECT count(*) FROM blocks").fetchall()
        write(40)
        assert log.stat().st_size > 40 << 20
    write(6)
    assert log.stat().st_size <= LOG_BYTES
