"""`kgorch report` as a page and as Markdown: chooses what is shown of the figures of report/run_report.py, and in which words."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any

from kgorch.cli.display import render
from kgorch.cli.pages import chart
from kgorch.cli.pages.chart import Chart, Stretch, Timeline
from kgorch.cli.pages.html import date, number, page
from kgorch.core import text as texts
from kgorch.report import forecast, timeline

View = dict[str, Any]

MAX_ROWS = 60
"""Newest sessions that the timeline draws; the table below has the others."""

MARKS = {
    "save": "checkpoint",
    "wall": "wall",
    "stage_finished": "checkpoint",
    "run_finished": "checkpoint",
    "plan_changed": "rung",
    "rung": "rung",
    "remedy": "rung",
}
"""Kinds of marks (report/timeline.py) as the style sheet knows them; all others are problems."""


def html(report: View) -> str:
    """The report as one self-contained page."""
    charts = list(_charts(report))
    drawn = {item["name"] for item in report["curves"]}
    return page(
        "run_report.html",
        report=report,
        summary=summary(report),
        figures=figures(report),
        charts=charts,
        curves_left=len({item["name"] for item in report["metrics"]} - drawn),
        timeline=_timeline(report),
        forecast_chart=_forecast_chart(report),
    )


def summary(report: View) -> list[str]:
    """What was trained, how far it came and how it ended, in sentences."""
    status = report["status"]
    stages = " → ".join(item["name"] + (" (done)" if item["done"] else "") for item in status["stages"])
    sentences = [f"Stages: {stages}."] if stages else []
    sessions = report["sessions_total"]
    how = {"finished": "It is finished", "failed": "It failed", "superseded": "Another run has taken its place"}
    state = how.get(status["state"], f"It is not finished; its newest session: {render.words(status['phase'])}")
    sentences.append(f"{state}, after {sessions} session{'s' if sessions != 1 else ''}.")
    if status["why"]:
        sentences.append(f"{status['why'].rstrip('.')}.")
    return sentences


def figures(report: View) -> list[tuple[str, str]]:
    """The most important figures, with their names."""
    status = report["status"]
    steps = str(status["step"]) + (f" of {status['steps_total']}" if status["steps_total"] else "")
    items = [("state", render.words(status["state"])), ("step", steps)]
    if status["epochs_total"]:
        items.append(("epoch", f"{status['epoch']} of {status['epochs_total']}"))
    if best := status["best"]:
        items.append((f"best {best['by'].rpartition(':')[0]}", f"{number(best['value'])} at step {best['step']}"))
    items += [
        ("trained", render.duration(report["trained_s"])),
        ("created", date(report["created_at"])),
        ("finished", date(report["finished_at"])),
        ("sessions", str(report["sessions_total"])),
        ("problems", str(report["problems_total"])),
    ]
    return [
        *items,
        *((item["what"], item["value"]) for item in report["environment"] if item["what"] in ("device", "ranks")),
    ]


def _charts(report: View) -> Iterator[tuple[Chart, str]]:
    several = len(report["status"]["stages"]) > 1
    marks: dict[str, list[tuple[float, str]]] = {}
    for item in report["resumes"]:
        marks.setdefault(item["stage"], []).append((item["step"], f"continued from step {item['step']}"))
    for item in report["curves"]:
        for series in item["series"]:
            title = f"{series['stage']}: {item['name']}" if several else item["name"]
            points = list(zip(series["x"], series["y"], strict=True))
            drawn = chart.line_chart(title, {title: points}, x_label="step", marks=marks.get(series["stage"], ()))
            if drawn:
                yield drawn._replace(gaps=series["not_finite"]), f"{series['points']} values"


def _timeline(report: View) -> Timeline | None:
    rows = []
    line = report["timeline"]
    for session in line["sessions"][-MAX_ROWS:]:
        start, number_ = session["from"], session["number"]
        lasted_h = forecast.hours_since(start, session["to"])
        parts = [
            Stretch(
                forecast.hours_since(start, item["from"]),
                forecast.hours_since(start, item["to"]),
                "failed" if item["outcome"] in timeline.BAD else "attempt",
                f"{item['stage']} {item['first_step']}→{item['last_step']}: {item['outcome'] or 'running'}",
            )
            for item in line["attempts"]
            if item["session"] == number_
        ]
        for mark in line["marks"]:
            at_h = forecast.hours_since(start, mark["at"])
            # a far wall would leave no room for the rest
            if mark["session"] == number_ and (mark["kind"] != "wall" or at_h <= 1.5 * lasted_h):
                parts.append(Stretch(at_h, at_h, MARKS.get(mark["kind"], "problem"), mark["text"]))
        rows.append((f"{number_} · {start[5:16].replace('T', ' ')}", parts))
    return chart.timeline(rows)


def _forecast_chart(report: View) -> Chart | None:
    lines = forecast.lines(report["forecasts"]["made"], report["created_at"], report["finished_at"])
    return chart.line_chart(
        "predicted end, by the time of the forecast", lines, x_label="hours since the run was created"
    )


def markdown(report: View) -> str:
    """The report for a pull request: figures, metrics, sessions and problems as tables."""
    lines = [f"## {_cell(report['run'])}: training run", "", _cell(" ".join(summary(report))), ""]
    lines += _table(["figure", "value"], figures(report))
    if report["metrics"]:
        lines += ["", "### Metrics", ""]
        rows = [
            (
                item["stage"],
                item["name"],
                number(item["last"]),
                f"{number(item['best'])} ({item['mode']}, step {item['best_step']})",
            )
            for item in report["metrics"][:40]
        ]
        lines += _table(["stage", "metric", "last", "best"], rows)
    lines += ["", "### Sessions", ""]
    sessions = [
        (str(item["number"]), date(item["started_at"]), render.duration(item["lasted_s"]), _steps(item), _end(item))
        for item in report["sessions"][-40:]
    ]
    lines += _table(["session", "began", "lasted", "steps", "ended"], sessions)
    if report["problems"]:
        lines += ["", "### Problems", ""]
        problems = [(date(item["at"]), item["what"], item["done"] or "noted") for item in report["problems"][-40:]]
        lines += _table(["when", "what", "what was done"], problems)
    lines += ["", "### How to reproduce", "", "```sh"]
    lines += [
        f"{texts.in_one_line(item['command']).replace('```', '')}  # {item['what']}" for item in report["commands"]
    ]
    return "\n".join([*lines, "```", ""])


def _steps(item: View) -> str:
    return ", ".join(f"{stage['name']} {stage['first_step']}→{stage['last_step']}" for stage in item["stages"]) or "–"


def _end(item: View) -> str:
    return render.words(item["phase"]) + (f": {item['why']}" if item["why"] else "")


def _table(head: list[str], rows: Iterable[tuple[str, ...]]) -> list[str]:
    return [
        f"| {' | '.join(head)} |",
        f"|{'---|' * len(head)}",
        *(f"| {' | '.join(_cell(cell) for cell in row)} |" for row in rows),
    ]


def _cell(text: str) -> str:
    """One line in which nothing is Markdown or HTML: a name may hold a link, a picture or a pipe."""
    return re.sub(r"([\\`*_{}\[\]<>|#!~&@])", r"\\\1", texts.cut(texts.in_one_line(str(text)), 300))
