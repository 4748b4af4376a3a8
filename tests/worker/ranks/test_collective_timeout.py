"""[health] collective_timeout, by real gloo ranks: how long a rank waits for a late one in a collective."""

from __future__ import annotations

import json

import pytest
import ranks

from kgorch.errors import PlanError
from kgorch.plan import parse

PLAN = 'name = "x"\n[[stage]]\nname = "t"\nentry = "t.py"\n'


def test_a_rank_waits_for_a_late_one_as_long_as_the_plan_says_and_for_a_cached_value_as_long_as_it_takes(tmp_path):
    attempt = ranks.run(tmp_path, "late_rank.py", 2, {"late": 22.0}, collective_timeout_s=20.0)
    assert attempt.codes[1] == 1 and attempt.lines(1, starting="found") == ["found worth it"], attempt.said()
    error = json.loads((tmp_path / "rank1.status.json").read_text())["error"]
    assert "imed out" in error["message"] and "20000ms" in error["message"] and error["is_collateral"]


@pytest.mark.parametrize(("told", "timeout_s"), [('"30m"', 1800.0), ("45", 45.0), ('"off"', None)])
def test_the_plans_time_out_of_collectives_is_a_duration_or_off(told, timeout_s):
    assert parse(PLAN, "plan.toml", [f"health.collective_timeout={told}"]).health.collective_timeout_s == timeout_s
    assert parse(PLAN, "plan.toml").health.collective_timeout_s is None


@pytest.mark.parametrize("told", ['"on"', '"0s"', "true", '"-5m"'])
def test_another_time_out_of_collectives_is_a_mistake_in_the_plan(told):
    with pytest.raises(PlanError, match="collective_timeout"):
        parse(PLAN, "plan.toml", [f"health.collective_timeout={told}"])
