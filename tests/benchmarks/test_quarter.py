"""Days by a hand-moved clock (benchmarks/quarter.py): hours are neither overspent nor left while work waits."""

from __future__ import annotations

from pathlib import Path

import pytest

from kgorch.scheduler import daemon

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def quarter(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import quarter

    return quarter


@pytest.mark.slow
def test_in_days_of_spot_kills_and_reboots_no_window_is_overspent_and_nobody_waits_in_vain(
    quarter, tmp_path, monkeypatch
):
    monkeypatch.setattr(daemon, "SLICE_S", 0.0)  # one run a look, as on a busy machine
    world = quarter.play(2, tmp_path, days=8)
    rows = quarter.audit(world)
    assert {row.pool for row in rows} == {"kaggle", "lab", "month", "rolling"}
    assert not [row for row in rows if row.is_overspent]
    assert not any(world.idle_s.values())
    assert world.counts["taken back"] and world.counts["ended by quota"] and world.counts["ended by the wall"]
    spent = {pool: max(row.used_h / row.allowed_h for row in rows if row.pool == pool) for pool in ("kaggle", "lab")}
    assert min(spent.values()) > 0.98, "the hours are used up"


def test_the_quarter_would_show_a_daemon_that_sleeps_and_a_session_that_overspends(quarter, tmp_path, monkeypatch):
    monkeypatch.setattr(quarter.Woken, "tick", lambda self: None)
    assert any(quarter.play(1, tmp_path, days=1).idle_s.values())
    row = quarter.Row("kaggle", quarter.BEGIN, allowed_h=30.0, charged_h=29.0, used_h=30.1, lost_h=0.0)
    assert row.is_overspent and not row._replace(used_h=29.9).is_overspent
