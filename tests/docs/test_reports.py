"""The kept reports (docs/reports) are of the plans as they are, and the documents' sums are computed."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

from kgorch.core.forecast.machines import MACHINES
from kgorch.errors import KgorchError
from kgorch.preflight import assumptions

ROOT = Path(__file__).parents[2]
REPORTS = runpy.run_path(str(ROOT / "docs" / "reports.py"))
EVERY = list(REPORTS["pages"]())
PAGES = [one for one in EVERY if one[-1].exists()]


@pytest.mark.parametrize(("workload", "path", "plan", "machine", "page"), PAGES, ids=[page.stem for *_, page in PAGES])
def test_a_report_is_of_what_its_plan_says_now(workload, path, plan, machine, page):
    assert machine in MACHINES
    assert REPORTS["mark"](path, plan) in page.read_text(), f"{path} has changed: make reports OF={workload}"


def test_each_real_plan_has_a_report():
    assert [page.name for *_, page in EVERY if not page.exists()] == [], "make reports"
    workloads = {path.parent.name for path in ROOT.glob("workloads/*/plan.toml")}
    assert {workload for workload, *_ in EVERY} == workloads, "docs/reports.toml"


def test_the_page_of_each_workload_leads_to_its_reports():
    for name in {workload for workload, *_ in PAGES}:
        text = (ROOT / "docs" / f"{name}.md").read_text()
        assert REPORTS["linked"](name, text) == text, "make reports"


def test_the_list_of_reports_and_the_sums_are_drawn_anew():
    assert (REPORTS["PAGES"] / "README.md").read_text() == REPORTS["index"](), "make reports"


def test_what_is_assumed_of_one_stage_goes_before_what_is_assumed_of_all():
    found = assumptions.parse_all(["epoch=35m", "second.epoch=10s", "compute=0.3"], ["first", "second"])
    assert (found["first"].epoch, found["second"].epoch) == (2100.0, 10.0)
    assert {one.compute for one in found.values()} == {0.3}
    assert found["second"].by_model.epoch is None


@pytest.mark.parametrize(
    ("said", "why"),
    [
        ("epoch", "expected NAME=VALUE"),
        ("third.epoch=1m", "expected NAME=VALUE"),
        ("compute=1.5", "a share of 1"),
        ("samples=0", "a number above 0"),
        ("samples=many", "invalid literal"),
    ],
)
def test_an_assumption_that_is_none_is_refused_by_name(said, why):
    with pytest.raises(KgorchError, match=why):
        assumptions.parse_all([said], ["first", "second"])


def test_a_machine_that_is_not_known_is_refused_with_those_that_are():
    with pytest.raises(KgorchError, match="t4x3") as refused:
        assumptions.machine_of("t4x3")
    assert "t4x2" in str(refused.value) or any("t4x2" in fact for fact in refused.value.facts)
