"""Checkpoints that a user pins or drops by name, and those that go by the plan's rule."""

from __future__ import annotations

from pathlib import Path

import lived_in
import pytest
from sqlalchemy.exc import SQLAlchemyError

from kgorch.checkpoint import registry, store
from kgorch.core.codes import CheckpointState
from kgorch.db import checkpoints, runs
from kgorch.errors import KgorchError
from kgorch.plan import parse

RUN = "surface-unet3d-1"


@pytest.fixture
def home(tmp_path):
    made = lived_in.Home(tmp_path / "home")
    lived_in.surface(made)
    yield made
    made.engine.dispose()


def verified(home):
    return {row.step: row for row in checkpoints.of_run(home.engine, RUN, CheckpointState.VERIFIED)}


def test_a_pinned_checkpoint_stays_whatever_the_plan_keeps(home):
    plan = parse(
        'name = "x"\n[[stage]]\nname = "train"\nentry = "x.py"\n[checkpoint]\nkeep = { last = 1 }\ndisk = "1MiB"', "x"
    )
    before = {path.name for path in registry.expired_folders(home.engine, RUN, plan)}
    assert "step-00004600" in before
    checkpoints.set_pinned(home.engine, verified(home)[4600].path, True)
    after = {path.name for path in registry.expired_folders(home.engine, RUN, plan)}
    assert before - after == {"step-00004600"}


def test_the_newest_of_a_stage_that_is_extended_stays_though_a_later_stage_is_done(home):
    plan = parse(
        'name = "x"\n[[stage]]\nname = "train"\nentry = "x.py"\n[[stage]]\nname = "tune"\nentry = "x.py"\n'
        '[checkpoint]\nkeep = { last = 3 }\ndisk = "1MiB"',
        "x",
    )
    newest = max(verified(home).items())[1]
    runs.set_plan(home.engine, RUN, plan="", overrides=[], plan_hash="x", stages=["train", "tune"])
    for step in (10, 20):
        folder = Path(newest.path).parents[1] / "tune" / f"step-{step:08d}"
        folder.mkdir(parents=True)
        columns = {"stage": "tune", "step": step, "final": step == 20, "bytes": 2**20}
        checkpoints.record(home.engine, RUN, str(folder), state="verified", **columns)
    runs.finish_stage(home.engine, RUN, "tune")
    dropped = {path.name for path in registry.expired_folders(home.engine, RUN, plan)}
    assert Path(newest.path).name not in dropped and "step-00000010" in dropped and "step-00000020" not in dropped


def test_what_the_plans_rule_drops_is_marked_also_when_the_database_refuses_at_first(home):
    """The journal of a session does an entry again that the database did not take."""
    plan = parse('name = "x"\n[[stage]]\nname = "train"\nentry = "x.py"\n[checkpoint]\nkeep = { last = 1 }', "x")
    expired = registry.expired_folders(home.engine, RUN, plan)
    root = home.home / "runs/surface-unet3d/1/checkpoints"

    def delete(folder):
        store.delete(folder, root)
        return True

    with home.engine.begin() as connection:
        connection.exec_driver_sql(
            "CREATE TRIGGER full BEFORE UPDATE ON checkpoints BEGIN SELECT RAISE(FAIL, 'disk is full'); END"
        )
    with pytest.raises(SQLAlchemyError):
        registry.drop_expired(home.engine, RUN, plan, delete)
    with home.engine.begin() as connection:
        connection.exec_driver_sql("DROP TRIGGER full")
    registry.drop_expired(home.engine, RUN, plan, delete)
    assert expired and not any(path.exists() for path in expired)
    assert not {str(path) for path in expired} & {row.path for row in verified(home).values()}


def test_what_cannot_be_dropped_any_more_in_a_session_stays_verified(home):
    plan = parse('name = "x"\n[[stage]]\nname = "train"\nentry = "x.py"\n[checkpoint]\nkeep = { last = 1 }', "x")
    before = verified(home)
    registry.drop_expired(home.engine, RUN, plan, lambda folder: False)
    assert registry.expired_folders(home.engine, RUN, plan) and verified(home) == before


def test_the_newest_and_a_pinned_checkpoint_are_not_dropped(home):
    run = runs.by_id(home.engine, RUN)
    rows = verified(home)
    root = home.home / "runs/surface-unet3d/1/checkpoints"
    with pytest.raises(KgorchError, match="newest verified"):
        registry.drop(home.engine, run.id, rows[max(rows)], root)
    checkpoints.set_pinned(home.engine, rows[4600].path, True)
    with pytest.raises(KgorchError, match="pinned"):
        registry.drop(home.engine, run.id, verified(home)[4600], root)
    assert all((root / "train" / f"step-{step:08d}").is_dir() for step in rows)


def test_a_dropped_checkpoint_is_gone_from_disk_and_marked(home):
    root = home.home / "runs/surface-unet3d/1/checkpoints"
    registry.drop(home.engine, RUN, verified(home)[4600], root)
    assert 4600 not in verified(home) and not (root / "train" / "step-00004600").exists()


def test_the_verbs_pin_and_drop_by_step(kgorch, home):
    kgorch.home = home.home
    assert "is pinned" in kgorch("checkpoints", "pin", "surface-unet3d", "--step", "4600").stdout
    assert [row["step"] for row in kgorch.look("checkpoints", "list") if row["pinned"]] == [4600]
    assert "pinned" in kgorch("checkpoints", "drop", "surface-unet3d", "--step", "4600", code=2).stderr
    kgorch("checkpoints", "unpin", "surface-unet3d", "--step", "4600")
    assert "step-00004600" in kgorch("checkpoints", "drop", "surface-unet3d", "--step", "4600").stdout
    assert "no verified checkpoint" in kgorch("checkpoints", "pin", "surface-unet3d", "--step", "4600", code=2).stderr


def test_a_pin_that_comes_after_the_choice_keeps_the_checkpoint(home, monkeypatch):
    """A person pins while a session drops: the choice was made, and the row is not yet marked."""
    plan = parse('name = "x"\n[[stage]]\nname = "train"\nentry = "x.py"\n[checkpoint]\nkeep = { last = 1 }', "x")
    first, *others = chosen = registry.expired_folders(home.engine, RUN, plan)
    monkeypatch.setattr(registry, "expired_folders", lambda *_: chosen)
    checkpoints.set_pinned(home.engine, str(first), True)
    deleted = []
    registry.drop_expired(home.engine, RUN, plan, lambda folder: not deleted.append(folder))
    assert deleted == others and str(first) in {row.path for row in verified(home).values()}


def test_a_checkpoint_that_is_pinned_or_not_marked_is_not_deleted_by_name(home):
    root = home.home / "runs/surface-unet3d/1/checkpoints"
    row = next(item for item in verified(home).values() if not item.pinned)
    checkpoints.set_pinned(home.engine, row.path, True)
    with pytest.raises(KgorchError, match="is pinned"):
        registry.drop(home.engine, RUN, row, root)  # as it was read before the pin
    checkpoints.set_pinned(home.engine, row.path, False)
    with home.engine.begin() as connection:
        connection.exec_driver_sql(
            "CREATE TRIGGER full BEFORE UPDATE ON checkpoints BEGIN SELECT RAISE(FAIL, 'disk is full'); END"
        )
    with pytest.raises(SQLAlchemyError):
        registry.drop(home.engine, RUN, row, root)
    assert Path(row.path).is_dir()
