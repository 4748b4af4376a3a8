"""What is looked at of a run does not grow with it."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
from sqlalchemy import event

from kgorch.db import runs
from kgorch.db.engine import open_database
from kgorch.db.tables import Base
from kgorch.report import run_view

ROOT = Path(__file__).parents[2]


@contextlib.contextmanager
def rows_loaded():
    loaded = []

    def note(row, _):
        loaded.append(type(row).__name__)

    event.listen(Base, "load", note, propagate=True)
    try:
        yield loaded
    finally:
        event.remove(Base, "load", note)


@pytest.fixture
def loads(tmp_path, monkeypatch):
    """The rows that a look loads of a run with so many past sessions, each with a checkpoint, attempt, charge and four events."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import scale

    def of(past: int, look) -> int:
        engine = open_database(tmp_path / str(past))
        scale.fill(engine, others=1, past=past)
        with rows_loaded() as loaded:
            look(engine, runs.by_id(engine, "mine"))
        return len(loaded)

    return of


@pytest.mark.parametrize(
    "look", [run_view.of_run, lambda *run: run_view.history(*run, limit=50)], ids=["status", "history"]
)
def test_a_run_of_two_thousand_sessions_loads_as_few_rows_as_one_of_two_hundred(loads, look):
    """`status` had come to load all checkpoints of a run: 0.7 s with 10,000 of them."""
    few, many = loads(200, look), loads(2000, look)
    assert 0 < many < 1.2 * few
