"""`kgorch report` and `kgorch compare`: one file each, whatever names, figures and clocks the run has left."""

from __future__ import annotations

import contextlib
import json
import math
import re
import sqlite3
from datetime import UTC, datetime, timedelta
from html.parser import HTMLParser
from pathlib import Path

import pytest
from answered import PLAN, code_of, make_state

from kgorch.cli.pages import comparison_page
from kgorch.core.metrics import metric_curve
from kgorch.core.metrics.metric_curve import Record, Value
from kgorch.db import curves, runs, sessions
from kgorch.db.engine import open_database

PROMISES = Path(__file__).parents[1] / "promises"
HOSTILE = "<img src=x onerror=alert(1)>\"'\u202e&lt;{{7*7}}\x1b[2J"
RTL = "דיוק המודל"


def records(names: dict[str, list[float]], at_s: float) -> list[str]:
    """Lines of a curve: a value each two steps, of every name."""
    length = max(len(values) for values in names.values())
    return [
        metric_curve.encode(
            Record(
                2 * index + 2,
                2 * index,
                1,
                at_s + index,
                {name: Value(values[index], 1) for name, values in names.items() if index < len(values)},
            )
        )
        for index in range(length)
    ]


@pytest.fixture
def home(tmp_path, monkeypatch):
    """The runs ink and digits; ink has curves with gaps, and every text that a stranger could choose is markup."""
    (tmp_path / "here").mkdir()
    home = tmp_path / "home"
    make_state(home, tmp_path / "here")
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setenv("KGORCH_HOME", str(home))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    engine = open_database(home)
    nan = math.nan
    names = {
        "loss": [1.0, 0.5, nan, 0.25, math.inf, 0.2],
        HOSTILE: [1.0, 2.0],
        RTL: [3.0],
        "m" * 10_000: [1e308, -1e308],
    }
    for name in ("ink", "digits"):
        run = runs.newest(engine, name)
        attempt = sessions.attempts(engine, run.id)[0]
        curves.write(engine, attempt.id, records(names, run.created_at.timestamp()))
    engine.dispose()
    with contextlib.closing(sqlite3.connect(home / "kgorch.db")) as connection, connection:
        connection.execute("UPDATE attempts SET cause = ?, outcome = 'crashed'", (HOSTILE * 500,))
        connection.execute(
            "UPDATE sessions SET why = ?, site = ?, metrics = ?", (HOSTILE, HOSTILE, json.dumps({HOSTILE: 1.0}))
        )
        connection.execute("UPDATE rungs SET why = ?, rung = ?", (HOSTILE, HOSTILE))
        connection.execute("UPDATE events SET facts = ? WHERE kind = 'exactness'", (json.dumps({HOSTILE: HOSTILE}),))
    return home


class Page(HTMLParser):
    """Tags, attributes and text of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.attributes: set[str] = set()
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attrs}

    def handle_data(self, data):
        self.text += data


def write(*args: str) -> str:
    assert code_of([*args, "-o", "page.html"]) == 0
    return Path("page.html").read_text()


@pytest.mark.parametrize("verb", [["report", "ink"], ["report", "digits"], ["compare", "ink", "digits"]], ids=" ".join)
def test_a_page_is_one_file_without_script_and_no_text_in_it_is_markup(home, capsys, verb):
    text = write(*verb)
    page = Page(text)
    assert not page.tags & {"script", "img", "link", "iframe", "object", "form", "a"}, page.tags
    assert not {name for name in page.attributes if name.startswith("on")} and "src" not in page.attributes
    assert "default-src 'none'" in text and not re.search(r"https?://", text.replace("http-equiv", ""))
    assert "onerror=alert(1)" in page.text and "49" not in page.text.partition("{{7*7}}")[0][-3:]
    assert "\u202e" not in text and "\x1b" not in text
    assert RTL in page.text and len(text.encode()) < 200_000


def test_a_report_has_its_parts_and_tells_what_was_done_about_a_crash(home):
    text = Page(write("report", "digits")).text
    for part in (
        "Curves",
        "Sessions",
        "Problems",
        "Forecast",
        "Checkpoints",
        "Environment",
        "Plan",
        "How to reproduce",
    ):
        assert part in text, part
    assert "not continued yet" in text and "crashed: " in text
    assert "kgorch start digits.run1.toml --fresh --set session.wall=1h" in text
    assert "/plan.toml digits.run1.toml" in text, "a newer digits.toml of the user is not written over"


def test_curves_have_gaps_where_values_are_not_finite(home):
    text = write("report", "ink")
    loss = next(part for part in text.split("<figure>") if "<figcaption><bdi>loss</bdi>" in part).partition(
        "</figure>"
    )[0]
    assert "2 values not finite" in loss
    assert loss.count("<polyline") == 1 and loss.count("<circle") == 2, "1, 0.5 | 0.25 | 0.2"
    assert "nan" not in re.sub(r"<[^>]*>", "", loss) and "inf" not in "".join(re.findall(r'points="([^"]*)"', text))


def test_a_plan_s_secrets_stay_out_of_every_form_of_the_report(home, capsys):
    engine = open_database(home)
    plan = PLAN + '[stage.args]\napi_token = "hush-1"\n[notify]\nurls = ["https://user:hush-2@example.org/hook"]\n'
    runs.set_plan(
        engine,
        "ink",
        plan=plan,
        stages=["train"],
        plan_hash="h",
        overrides=["stage.train.args.api_token=hush-3", 'stage.train.args.hub={token="hush-4"}'],
    )
    engine.dispose()
    assert code_of(["report", "ink", "--json"]) == 0 and code_of(["report", "ink", "--md"]) == 0
    shown = capsys.readouterr().out + write("report", "ink")
    assert "stage.train.args.api_token" in shown and "hush" not in shown


def test_a_run_without_sessions_and_metrics_and_with_a_broken_plan_has_a_report(home, tmp_path):
    engine = open_database(home)
    runs.create(
        engine, id="new", name="new", number=1, folder=str(home / "runs/new/1"), workdir=str(tmp_path), checkpoints=str(tmp_path),
        plan="name = [", overrides=[], plan_hash="h", stages=["train"],
    )  # fmt: skip
    engine.dispose()
    text = Page(write("report", "new")).text
    assert "has reported no metrics" in text and "No session has begun" in text
    assert "stored plan cannot be read" in text
    assert "cannot be read" in Page(write("compare", "new", "ink")).text


def test_a_clock_that_was_set_back_gives_no_negative_time(home, capsys):
    engine = open_database(home)
    last = sessions.last(engine, "ink")
    sessions.update_session(engine, last.id, ended_at=last.started_at - timedelta(days=2))
    engine.dispose()
    with contextlib.closing(sqlite3.connect(home / "kgorch.db")) as connection, connection:
        connection.execute(
            "UPDATE runs SET created_at = ?", ((datetime.now(UTC) + timedelta(days=9)).strftime("%Y-%m-%d %H:%M:%S"),)
        )
    assert code_of(["report", "ink", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["trained_s"] == 0 and all(item["from"] <= item["to"] for item in report["timeline"]["sessions"])
    assert 'width="-' not in write("report", "ink")


def test_a_database_that_is_broken_is_named_and_no_page_is_left(home, capsys):
    for file in home.glob("kgorch.db*"):
        file.write_bytes(b"SQLite format 3\x00" + b"\xff" * 4096)
    assert code_of(["report", "ink", "-o", "page.html"]) == 2
    assert "kgorch.db" in capsys.readouterr().err and not list(Path().glob("*page.html*"))


def test_a_page_that_cannot_be_written_says_so(home, capsys):
    assert code_of(["report", "ink", "-o", "missing/page.html"]) == 2
    assert "missing/page.html cannot be written [KG503]\n  No such file or directory" in capsys.readouterr().err


def test_markdown_of_the_report_holds_no_markup_of_a_stranger(home, capsys):
    assert code_of(["report", "ink", "--md"]) == 0
    text = capsys.readouterr().out
    assert "<img" not in text.replace("\\<", "") and "## ink: training run" in text and "| stage | metric |" in text


@pytest.mark.parametrize(
    "words",
    [["report", "ink", "--md"], ["report", "ink", "--json"], ["compare", "ink", "digits", "--json"]],
    ids=" ".join,
)
def test_what_would_be_printed_is_written_to_the_file_that_is_named(home, capsys, words):
    assert code_of(words) == 0
    printed, written = capsys.readouterr().out, write(*words)
    assert written.splitlines()[:2] == printed.splitlines()[:2] and written.count("\n") == printed.count("\n")
    assert "\x1b" not in written


def test_a_plot_is_no_json(home, capsys):
    for other in ("--json", "--events"):
        assert code_of(["history", "ink", "--plot", "loss", other]) == 2
        assert f"--plot and {other} exclude each other" in capsys.readouterr().err


def test_rows_of_a_comparison_name_the_stage_where_there_are_several():
    runs = [{"label": "a", "state": "active", "step": 1, "trained_s": 1, "sessions": 1, "problems": 0}]
    item = {"name": "loss", "mode": "min", "best": [0.5], "winner": None}
    rows = comparison_page.rows({"runs": runs, "metrics": [item | {"stage": "train"}], "plan_differences": []})[1]
    assert rows[-1][0] == "best loss (min)"
    both = [item | {"stage": stage} for stage in ("train", "tune")]
    rows = comparison_page.rows({"runs": runs, "metrics": both, "plan_differences": []})[1]
    assert [row[0] for row in rows[-2:]] == ["best train: loss (min)", "best tune: loss (min)"]


def test_the_differences_of_plans_are_shown_first_and_the_better_run_is_marked(home, capsys):
    engine = open_database(home)
    runs.set_plan(
        engine,
        "digits",
        plan=PLAN.replace("ink", "digits") + "[stage.args]\nlr = 0.1\n",
        stages=["train"],
        overrides=[],
    )
    engine.dispose()
    assert code_of(["compare", "ink", "digits"]) == 0
    rows = dict(line.split("\t", 1) for line in capsys.readouterr().out.splitlines())
    assert rows["stage.train.args.lr"] == "default\t0.1" and rows["state"] == "finished\tactive"
    assert "seed" not in rows, "what is equal is left out"


@pytest.mark.parametrize("names", [["ink"], ["ink"] * 13, ["ink", "inc"]], ids=["one", "thirteen", "unknown"])
def test_runs_that_cannot_be_compared_are_a_mistake(home, capsys, names):
    assert code_of(["compare", *names]) == 2
    assert "next: " in (err := capsys.readouterr().err) or "did you mean 'ink'" in err


def _shape(value):
    if isinstance(value, dict):
        return {key: _shape(item) for key, item in sorted(value.items())}
    if isinstance(value, list):
        return [_shape(value[-1])] if value else []
    return "null" if value is None else type(value).__name__


@pytest.mark.parametrize(
    ("verb", "promise"), [(["report", "ink"], "report"), (["compare", "ink", "digits"], "compare")]
)
def test_the_fields_of_report_and_compare_are_those_that_were_promised(home, capsys, verb, promise):
    assert code_of([*verb, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    for own in ("status", "sessions", "metrics") if promise == "report" else ():
        found.pop(own)  # promised by status, history and metrics
    found = _shape(found)
    path = PROMISES / f"{promise}.json"
    assert found == json.loads(path.read_text()), "a new field is written into tests/promises and docs/json.md"
