"""A database that is lost, broken, locked or cannot be written; a plan that is gone; a clock that is wrong."""

from __future__ import annotations

import sqlite3
from datetime import datetime

import pytest

pytestmark = pytest.mark.slow

QUICKLY = ("--set", "stage.train.args.sleep=0", "--set", "stage.train.args.epochs=1")


def last_step(kgorch) -> int:
    return max(int(path.name.split("-")[1]) for path in kgorch.checkpoints())


def test_a_broken_database_is_left_as_it_is_and_moved_aside_costs_the_history_alone(suspended):
    plan, database, saved = suspended.folder / "plan.toml", suspended.home / "kgorch.db", last_step(suspended)
    for damage in (b"no database" * 1000, database.read_bytes()[:5000]):
        database.write_bytes(damage)
        for name in ("kgorch.db-wal", "kgorch.db-shm"):
            (suspended.home / name).unlink(missing_ok=True)
        said = suspended("start", str(plan), code=2).stderr
        assert "cannot be used" in said and f"mv {database}" in said
        assert database.read_bytes() == damage
    database.rename(database.with_suffix(".broken"))
    for part in ("outputs", "cached"):
        (suspended.home / "runs/test/1" / part).mkdir(exist_ok=True)
        (suspended.home / "runs/test/1" / part / "made.json").write_text("[1]")
    suspended("start", str(plan), *QUICKLY)
    assert suspended.status()["state"] == "finished"
    assert suspended.history()[0]["stages"][0]["first_step"] == saved
    assert all((suspended.home / "runs/test/2" / part / "made.json").is_file() for part in ("outputs", "cached"))


def test_fresh_without_the_database_does_not_write_among_what_the_lost_run_left(suspended):
    plan = suspended.folder / "plan.toml"
    old = suspended.checkpoints()
    (suspended.home / "kgorch.db").unlink()
    suspended("start", str(plan), "--fresh", *QUICKLY)
    assert suspended.status()["run_number"] == 2 and all(path.is_dir() for path in old)


def test_a_plan_that_is_gone_is_not_needed_to_go_on(suspended):
    plan = suspended.folder / "plan.toml"
    plan.unlink()
    said = suspended("start", str(plan), code=2).stderr
    assert "kgorch resume test" in said and str(plan) in said
    suspended.background("resume")
    suspended.wait_for_step(last_step(suspended) + 1)
    suspended("stop")


def test_a_database_that_another_program_holds_is_said_in_one_line(suspended):
    plan = suspended.folder / "plan.toml"
    other = sqlite3.connect(suspended.home / "kgorch.db", isolation_level=None)
    other.execute("BEGIN EXCLUSIVE")
    said = suspended("start", str(plan), code=12).stderr
    other.execute("ROLLBACK")
    other.close()
    assert "locked" in said and "next:" in said


@pytest.mark.parametrize("years", [1, pytest.param(-1, marks=pytest.mark.soak)])
def test_a_session_whose_clock_was_a_year_wrong_costs_nothing(suspended, years):
    """As such a session leaves its rows; libfaketime itself makes torchrun's sleeps fail."""
    plan = suspended.folder / "plan.toml"
    with sqlite3.connect(suspended.home / "kgorch.db") as database:
        tables = [name for (name,) in database.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
        for table in tables:
            for column in [row[1] for row in database.execute(f"PRAGMA table_info({table})") if row[2] == "DATETIME"]:
                moved = f"(substr({column}, 1, 4) + {years}) || substr({column}, 5)"
                database.execute(f"UPDATE {table} SET {column} = {moved} WHERE {column} IS NOT NULL")
    database.close()
    suspended("start", str(plan), *QUICKLY)
    first, second = suspended.history()
    assert suspended.status()["state"] == "finished"
    assert first["lasted_s"] >= 0 and second["lasted_s"] >= 0
    assert second["stages"][0]["first_step"] == first["stages"][0]["last_step"]
    apart = datetime.fromisoformat(second["started_at"]) - datetime.fromisoformat(first["started_at"])
    assert (apart.days < 0) == (years > 0), "the first session did have the wrong clock"
