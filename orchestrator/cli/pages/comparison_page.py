"""`kgorch compare` as a page, and as the rows of a table."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from kgorch.cli.display import render
from kgorch.cli.pages import chart
from kgorch.cli.pages.html import number, page

View = dict[str, Any]


def html(comparison: View) -> str:
    """The comparison as one self-contained page."""
    return page("comparison.html", comparison=comparison, charts=list(_charts(comparison)))


def _charts(comparison: View) -> Iterator[chart.Chart]:
    for item in comparison["curves"]:
        lines = {line["run"]: list(zip(line["x"], line["y"], strict=True)) for line in item["lines"]}
        if drawn := chart.line_chart(f"{item['stage']}: {item['name']}", lines, x_label="step"):
            yield drawn


def rows(comparison: View) -> tuple[list[str], list[list[str]]]:
    """Header and rows: results first, then the keys in which the plans differ."""
    runs = comparison["runs"]
    lines = [
        ["state", *(run["state"] for run in runs)],
        ["step", *(str(run["step"]) for run in runs)],
        ["trained", *(render.duration(run["trained_s"]) for run in runs)],
        ["sessions", *(str(run["sessions"]) for run in runs)],
        ["problems", *(str(run["problems"]) for run in runs)],
    ]
    has_stages = len({item["stage"] for item in comparison["metrics"]}) > 1
    for item in comparison["metrics"][: render.MAX_METRICS]:
        values = ["–" if value is None else number(value) for value in item["best"]]
        if item["winner"] is not None:
            values[item["winner"]] += " *"
        stage = f"{item['stage']}: " if has_stages else ""
        lines.append([f"best {stage}{item['name']} ({item['mode']})", *values])
    for item in comparison["plan_differences"]:
        lines.append([item["key"], *("default" if value is None else value for value in item["values"])])
    return ["", *(run["label"] for run in runs)], lines
