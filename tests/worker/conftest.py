"""What tests of trainings in the test's process need."""

from __future__ import annotations

import pytest

from kgorch.worker import session_end


@pytest.fixture
def alone(monkeypatch, tmp_path):
    """No session around the test, and none left after it."""
    for name in ("KGORCH_LAUNCH", "MASTER_ADDR", "RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    yield
    session_end.end(SystemExit(1))
