"""A database of the test's own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from sources import Place
from sqlalchemy import Engine

from db.engine import open_database


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    made = open_database(tmp_path / "home")
    yield made
    made.dispose()


@pytest.fixture
def here(tmp_path):
    (tmp_path / "work").mkdir()
    (tmp_path / "source").mkdir()
    (tmp_path / "work" / "t.py").touch()
    return Place(tmp_path / "work", tmp_path / "home")


@pytest.fixture
def source(tmp_path):
    return tmp_path / "source" / "deep" / "kgorch"
