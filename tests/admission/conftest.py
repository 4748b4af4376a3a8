"""A place that a run is started in, and a source that may hold it."""

from __future__ import annotations

import pytest
from sources import Place


@pytest.fixture
def here(tmp_path):
    (tmp_path / "work").mkdir()
    (tmp_path / "source").mkdir()
    (tmp_path / "work" / "t.py").touch()
    return Place(tmp_path / "work", tmp_path / "home")


@pytest.fixture
def source(tmp_path):
    return tmp_path / "source" / "deep" / "kgorch"
