"""`kgorch events` and `kgorch metrics --parquet`: the journal as lines that can be followed, and curves as a file."""

from __future__ import annotations

import json
import subprocess
from datetime import UTC, datetime
from pathlib import Path

import pytest
from answered import make_state

from kgorch.core.metrics import metric_curve
from kgorch.core.metrics.metric_curve import Record, Value
from kgorch.db import curves, runs, sessions
from kgorch.db.engine import open_database

PROMISE = Path(__file__).parents[1] / "promises" / "event_line.json"


@pytest.fixture
def state(kgorch):
    """A finished run `ink` and one that is not, `digits`."""
    make_state(kgorch.home, kgorch.folder)
    return kgorch


def lines(text: str) -> list[dict]:
    return [json.loads(line) for line in text.splitlines()]


def test_events_are_json_lines_with_the_promised_fields(state):
    found = lines(state("events", "ink", "--json").stdout)
    assert [event["kind"] for event in found] == ["exactness", "epoch", "rung_taken", "attempt_suspended"]
    assert [event["id"] for event in found] == sorted(event["id"] for event in found)
    promised = json.loads(PROMISE.read_text())
    for event in found:
        shape = {name: type(value).__name__ for name, value in event.items() if name != "facts"}
        assert shape | {"facts": {}} == promised, "a new field is written into tests/promises and docs/json.md"
    assert lines(state("events", "ink", "-n", "1", "--json").stdout) == found[-1:]


def test_events_of_a_run_that_is_over_end_also_where_they_are_followed(state):
    assert len(lines(state("events", "ink", "-f", "--json").stdout)) == 4
    assert lines(state("events", "ink", "-f", "--json", "-n", "0").stdout) == []


def test_an_event_that_comes_while_it_is_followed_is_printed_before_the_end(state):
    following = state.background("events", "digits", "-f", "--json")
    assert following.stdout
    for _ in range(4):
        following.stdout.readline()  # it follows from here on
    engine = open_database(state.home)
    run = runs.newest(engine, "digits")
    sessions.add_event(engine, run.id, "mirror_failed", {"why": "a <b>\nline"})
    assert json.loads(following.stdout.readline())["facts"] == {"why": "a <b>\nline"}
    runs.set_state(engine, run.id, "failed", "it is over")
    assert following.wait(timeout=60) == 0


def test_events_are_read_by_a_person_too(state):
    printed = state("events", "ink").stdout
    assert "exactness" in printed and '"data": "keyed"' in printed


@pytest.fixture
def curve(state):
    """Values of `digits`, one of them no number, with a name that a column of the table has."""
    engine = open_database(state.home)
    [attempt] = sessions.attempts(engine, "digits")
    at_s = datetime(2026, 11, 25, 12, tzinfo=UTC).timestamp()
    records = [
        Record(5, 0, 1, at_s, {"loss": Value(0.5, 5)}),
        Record(5, 5, 1, at_s + 1, {"<b>דice</b>": Value(0.25, 1), "step": Value(float("nan"), 1)}),
        Record(9, 5, 2, at_s + 5, {"loss": Value(0.25, 4)}),
    ]
    curves.write(engine, attempt.id, [metric_curve.encode(record) for record in records])
    return state


def test_metrics_are_written_as_parquet_in_long_form(curve):
    parquet = pytest.importorskip("pyarrow.parquet")
    path = curve.folder / "metrics.parquet"
    curve("metrics", "digits", "--parquet", str(path))
    table = parquet.read_table(path)
    rows = table.to_pylist()
    assert [(row["step"], row["metric"], row["steps"], row["epoch"]) for row in rows] == [
        (5, "loss", 5, 1), (5, "<b>דice</b>", 5, 1), (5, "step", 5, 1), (9, "loss", 4, 2),
    ]  # fmt: skip
    assert rows[0]["run"] == "digits" and rows[0]["stage"] == "train" and rows[0]["value"] == 0.5
    assert rows[0]["at"] == datetime(2026, 11, 25, 12, 0, 1, tzinfo=UTC), "of the newest record of the step"
    assert rows[2]["value"] != rows[2]["value"], "NaN"
    curve("metrics", "digits", "--parquet", str(path), "--name", "loss")
    assert parquet.read_table(path).num_rows == 2, "it replaces the file"


def test_a_parquet_file_that_cannot_be_written_is_told(curve):
    pytest.importorskip("pyarrow")
    told = curve("metrics", "digits", "--parquet", "missing/metrics.parquet", code=2).stderr
    assert "missing/metrics.parquet cannot be written [KG503]\n  there is no such folder" in told
    assert "exclude each other" in curve("metrics", "digits", "--csv", "--parquet", "x", code=2).stderr


def test_a_reader_that_ends_early_is_no_error(state):
    words = " ".join(state.command("events", "ink", "--json"))
    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c", f"{words} | head -n 1"], env=state.env(), capture_output=True, text=True
    )
    assert done.returncode == 0 and len(lines(done.stdout)) == 1 and not done.stderr
