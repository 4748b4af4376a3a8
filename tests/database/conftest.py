"""A database of the test's own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import Engine

from db.engine import open_database


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    made = open_database(tmp_path / "home")
    yield made
    made.dispose()
