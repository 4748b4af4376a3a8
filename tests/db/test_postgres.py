"""The PostgreSQL of a fleet: created once, migrated as SQLite is, the same values in and out, and errors that say what to do."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import text

from kgorch.core.codes import EventKind
from kgorch.db import runs, sessions
from kgorch.db.engine import open_database, open_fleet
from kgorch.db.location import Fleet, fleet
from kgorch.db.migrations import HEAD
from kgorch.db.postgres import ServerAway
from kgorch.db.tables import Base
from kgorch.errors import ConfigError, StateUnusable

ONLY_POSTGRESQL = {"ix_resumes_order", "uq_sessions_live"}


@pytest.fixture
def engine(postgres, tmp_path):
    made = open_fleet(Fleet(postgres.new_database(), "here"), tmp_path)
    yield made
    made.dispose()


@pytest.fixture
def run(engine):
    return runs.create(
        engine, id="r", name="ink", number=1, folder="/f", workdir="/w", checkpoints="/c", plan="", overrides=["a=1"],
        plan_hash="h", stages=["train"],
    )  # fmt: skip


def test_the_migrations_lead_to_the_models(engine):
    with engine.connect() as connection:
        differences = compare_metadata(MigrationContext.configure(connection), Base.metadata)
    unexpected = [one for one in differences if one[0] != "remove_index" or one[1].name not in ONLY_POSTGRESQL]
    assert unexpected == []


def test_several_processes_may_open_a_new_database_at_once(postgres, tmp_path):
    program = "import sys; from pathlib import Path; from kgorch.db.engine import open_database; open_database(Path(sys.argv[1]))"
    environment = os.environ | {"KGORCH_DATABASE": postgres.empty_database(), "KGORCH_MACHINE": "a"}
    several = [
        subprocess.Popen(
            [sys.executable, "-c", program, str(tmp_path)], stderr=subprocess.PIPE, text=True, env=environment
        )
        for _ in range(3)
    ]
    assert [(process.communicate()[1], process.returncode) for process in several] == [("", 0)] * 3
    made = open_fleet(Fleet(environment["KGORCH_DATABASE"], "a"), tmp_path)
    with made.connect() as connection:
        assert connection.execute(text("SELECT version_num FROM alembic_version")).scalars().all() == [HEAD]
    made.dispose()
    assert not (tmp_path / "kgorch.db").exists()


def test_metrics_that_are_no_numbers_and_texts_with_a_nul_are_stored(engine, run):
    session = sessions.open_session(engine, run.id, boot_id="b")
    metrics = {"loss": math.nan, "best": math.inf, "dice": 0.5}
    sessions.update_session(engine, session.id, metrics=metrics, why="a\0b")
    sessions.add_event(engine, run.id, EventKind.BUG, {"what": "a\0b", "seen": [1, None]}, session.id)
    row = sessions.last(engine, run.id)
    assert math.isnan(row.metrics["loss"]) and row.metrics["best"] == math.inf and row.metrics["dice"] == 0.5
    assert row.why == "a\N{REPLACEMENT CHARACTER}b"
    assert sessions.events(engine, run.id, limit=1)[0].facts == {"what": "a\0b", "seen": [1, None]}
    assert runs.by_id(engine, run.id).overrides == ["a=1"]


def test_paths_are_relative_to_each_machines_own_state_folder(postgres, tmp_path):
    url, homes = postgres.new_database(), [tmp_path / "a", tmp_path / "b"]
    first, second = (open_fleet(Fleet(url, home.name), home) for home in homes)
    folder = homes[0] / "runs" / "ink" / "1"
    runs.create(
        first, id="r", name="ink", number=1, folder=str(folder), workdir="/w", checkpoints=f"{folder}/checkpoints",
        plan="", overrides=[], plan_hash="h", stages=["train"],
    )  # fmt: skip
    seen = runs.by_id(second, "r")
    assert (seen.folder, seen.machine) == (f"{homes[1]}/runs/ink/1", "a")
    first.dispose()
    second.dispose()


def test_a_run_has_at_most_one_session_that_is_not_over(engine, run):
    session = sessions.open_session(engine, run.id, boot_id="b")
    with pytest.raises(Exception, match="uq_sessions_live"):
        sessions.open_session(engine, run.id, boot_id="another")
    sessions.update_session(engine, session.id, phase="suspended")
    assert sessions.open_session(engine, run.id, boot_id="another").number == 2


def refused(url: str, tmp_path: Path) -> str:
    with pytest.raises(StateUnusable) as raised:
        open_fleet(Fleet(url, "here"), tmp_path)
    return f"{raised.value}\n{raised.value.next_step}"


def test_a_database_that_cannot_be_used_is_named_with_a_next_step_and_without_its_password(postgres, tmp_path):
    said = refused("postgresql+psycopg://me:secret@127.0.0.1:1/kgorch", tmp_path)
    assert "127.0.0.1" in said and "secret" not in said and "pg_isready" in said
    said = refused(postgres.url("missing"), tmp_path)
    assert "does not exist" in said and "createdb" in said
    said = refused("postgresql+psycopg://me:secret@host:port/kgorch", tmp_path)
    assert "secret" not in said and "KGORCH_DATABASE" in said


@pytest.mark.parametrize(("user", "database"), [("kgorch", "missing"), ("nobody", "postgres")])
def test_a_server_that_has_refused_for_good_is_not_away(postgres, user, database, tmp_path):
    with pytest.raises(StateUnusable) as raised:
        open_fleet(Fleet(postgres.url(database, user), "here"), tmp_path)
    assert not isinstance(raised.value, ServerAway) and "does not exist" in str(raised.value)


def test_a_server_that_takes_no_further_connection_or_does_not_listen_is_away(postgres, tmp_path):
    with pytest.raises(ServerAway):
        open_fleet(Fleet("postgresql+psycopg://me@127.0.0.1:1/kgorch", "here"), tmp_path)
    postgres.execute("CREATE DATABASE crowded CONNECTION LIMIT 0", "CREATE ROLE guest LOGIN")
    with pytest.raises(ServerAway, match="too many connections for database"):
        open_fleet(Fleet(postgres.url("crowded", "guest"), "here"), tmp_path)


def test_a_wrong_password_is_told_as_one(postgres, tmp_path):
    postgres.execute("CREATE ROLE guarded LOGIN PASSWORD 'right'", "CREATE DATABASE guarded OWNER guarded")
    rules = postgres.data / "pg_hba.conf"
    before = rules.read_text()
    rules.write_text(f"local guarded guarded scram-sha-256\n{before}")
    try:
        postgres.execute("SELECT pg_reload_conf()")
        url = postgres.url("guarded", "guarded:wrong")
        said = refused(url, tmp_path)
        assert "password authentication failed" in said and ".pgpass" in said and "wrong" not in said.split("next")[0]
        open_fleet(Fleet(url.replace("wrong", "right"), "here"), tmp_path).dispose()
    finally:
        rules.write_text(before)
        postgres.execute("SELECT pg_reload_conf()")


def test_the_database_is_that_of_the_environment_else_of_the_configuration_else_sqlite(tmp_path, monkeypatch):
    config = tmp_path / "config.toml"
    config.write_text('[fleet]\ndatabase = "postgresql://db/kgorch"\nmachine = "gpu-a"\nlease = "90s"\n')
    assert fleet({"KGORCH_CONFIG": str(config)}) == Fleet("postgresql+psycopg://db/kgorch", "gpu-a", 90.0)
    both = {"KGORCH_CONFIG": str(config), "KGORCH_DATABASE": "postgresql+psycopg://other/x", "KGORCH_MACHINE": "b"}
    assert fleet(both) == Fleet("postgresql+psycopg://other/x", "b", 90.0)
    assert fleet({"KGORCH_CONFIG": str(tmp_path / "none")}) is None
    for wrong in ({"KGORCH_DATABASE": "mysql://me:secret@x/y"}, {**both, "KGORCH_MACHINE": "../a"}):
        with pytest.raises(ConfigError) as raised:
            fleet(wrong)
        assert "secret" not in str(raised.value)


def test_a_state_folder_without_a_fleet_keeps_its_own_database(tmp_path, monkeypatch):
    monkeypatch.delenv("KGORCH_DATABASE", raising=False)
    monkeypatch.setenv("KGORCH_CONFIG", str(tmp_path / "none"))
    open_database(tmp_path / "home").dispose()
    assert (tmp_path / "home" / "kgorch.db").exists()
