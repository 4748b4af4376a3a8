"""`kgorch top` and `kgorch status --watch` on the whole screen: what is shown at which size, and which keys do what."""

from __future__ import annotations

import contextlib
import signal

import pytest
from answered import make_state

from kgorch.cli.display import bars, top_screen, watch
from kgorch.cli.display.screen import Screen, ScreenLine, keys_in
from kgorch.core import text
from kgorch.db import curves, sessions
from kgorch.db.engine import open_database
from kgorch.report.glance import Glance, Trend

RUN = {
    "run": "digits",
    "run_number": 2,
    "state": "active",
    "phase": "training",
    "stage": "train",
    "step": 1316,
    "steps_total": 3200,
    "progress": {"stage": 0.41, "run": 0.41, "session": 0.5},
    "headline": {"name": "loss", "value": 0.0412, "line": [3.0, 2.0, 1.0]},
    "session": {"left_s": 16_200.0, "training_alive": True, "ended_at": None},
    "forecast": {"stage": "train", "end_at": "2020-01-02T03:04:05Z"},
    "next": {"what": "train", "at": None, "command": None},
}
HOSTILE = RUN | {"run": "損失\x1b[2J\u202e" * 900, "headline": {"name": "m\n" * 5000, "value": None, "line": []}}
UNKNOWN = RUN | {
    "progress": {"stage": None},
    "headline": None,
    "session": None,
    "forecast": None,
    "next": None,
    "step": 0,
}
VIEWS = [RUN, HOSTILE, UNKNOWN, *({**RUN, "run": f"run-{number}"} for number in range(50))]


@pytest.mark.parametrize("columns", [10, 20, 40, 80, 130, 300])
@pytest.mark.parametrize("lines", [1, 2, 6, 12, 24, 60])
def test_the_table_of_runs_fits_any_terminal_and_the_chosen_run_is_on_it(columns, lines):
    for chosen in (0, 1, 30, 52):
        made = top_screen.frame(VIEWS, columns, lines, chosen)
        assert 0 < len(made) <= lines
        for line in made:
            assert text.width(line.text) <= columns and line.text.isprintable() and line.label is None
        assert lines < 2 or [line.kind for line in made].count("chosen") == 1
        assert lines < 6 or "q quits" in made[-1].text or columns < 20


@pytest.mark.parametrize(
    ("columns", "titles"),
    [
        (10, ["run"]),
        (40, ["run", "state"]),
        (80, ["run", "state", "progress", "then"]),
        (130, ["run", "state", "progress", "step", "wall in", "metric", "then"]),
    ],
)
def test_a_narrow_terminal_keeps_the_most_important_columns(columns, titles):
    assert [column.title for column in top_screen.columns_of(columns)] == titles


def test_a_row_tells_how_far_how_well_and_until_when():
    row = top_screen.frame([RUN], 130, 12)[1].text
    for part in ("digits/2", "training", "━━━─────  41%", "1316", "4h 30m", "loss 0.0412 █▅▁", "train ends 2020-01-02"):
        assert part in row, part
    gone = RUN | {"session": RUN["session"] | {"training_alive": False}}
    assert "no process" in top_screen.frame([gone], 130, 12)[1].text
    assert "finished" in top_screen.frame([RUN | {"state": "finished"}], 130, 12)[1].text
    assert "there is no run yet" in top_screen.frame([], 80, 24)[1].text


FOUND = {"step": 5, "steps_total": 10, "stage": "b", "stages": [{"name": "a"}, {"name": "b"}], "session": None}
ROWS = [
    ("run", "x"),
    ("phase", "training"),
    ("step", "5 of 10"),
    ("metrics", "loss 1"),
    ("host", "cpu 1%"),
    ("next", "training"),
]
GLANCE = Glance(
    (Trend("accuracy", (0.1, 0.5, 0.9)), Trend("損失", (3.0, 1.0))), tuple(f"line {number}" for number in range(99))
)


def test_trends_come_before_the_metrics_and_the_log_fills_the_rest():
    made = watch.frame(FOUND, ROWS, 80, 24, GLANCE)
    labels = [line.label for line in made]
    assert labels[:7] == ["run", "phase", "progress", "accuracy", "metric", "metrics", "host"]
    assert next(line for line in made if line.label == "accuracy").bar == "▁▅█  "
    assert [line.text for line in made if line.label == "metric"] == ["1 損失"]
    assert [line.text for line in made if line.kind == "log"][-1] == "line 98" and len(made) == 24
    assert labels.count("log") == 1


def test_the_bar_says_which_stage_it_is_about():
    [line] = [line for line in watch.frame(FOUND, ROWS, 80, 24) if line.label == "progress"]
    assert line.text == "stage 2 of 2, b: 5 of 10" and "50%" in line.bar


def test_on_a_low_screen_the_log_goes_first_and_then_what_matters_less():
    made = watch.frame(FOUND, ROWS, 40, 5, GLANCE)
    assert [line.label for line in made] == ["run", "phase", "progress", "accuracy", "metric"]


@pytest.mark.parametrize(
    "values", [[], [1.0], [2.0, 2.0], [1e308, -1e308], [0.0, 5e-324], [float(n) for n in range(999)]]
)
@pytest.mark.parametrize("columns", [0, 5, 6, 60])
def test_a_trend_fits_whatever_the_values_are(values, columns):
    shown = bars.trend(values, columns)
    assert len(shown) <= columns and (bool(shown) == (len(values) > 1 and columns >= bars.MIN_COLUMNS))


@pytest.mark.parametrize(
    ("content", "keys"),
    [
        ("\x1b[B\r", ["down", "enter"]),
        ("\x1b[A\x1bOA\x1b[6~q", ["up", "up", "page down", "q"]),
        ("jjé\n", ["j", "j", "é", "enter"]),
        ("\x1b[1;5Cq", ["q"]),
        ("\x1b", []),
        ("\x00\x7f\ufffd", ["\ufffd"]),
    ],
)
def test_keys_that_are_read_at_once_all_count(content, keys):
    assert keys_in(content) == keys


def test_a_ctrl_c_that_a_callback_has_swallowed_ends_the_screen_all_the_same():
    def frame(columns, lines):
        with contextlib.suppress(KeyboardInterrupt):  # as Python does in callbacks of weak references
            signal.raise_signal(signal.SIGINT)
        return [ScreenLine(None, "", "drawn")]

    before = signal.getsignal(signal.SIGINT)
    with Screen() as screen, pytest.raises(KeyboardInterrupt):
        screen.show(frame, 5.0)
    assert signal.getsignal(signal.SIGINT) is before


# On a real terminal, drawn by an emulator


@pytest.fixture
def runs_at_home(kgorch):
    make_state(kgorch.home, kgorch.folder)
    engine = open_database(kgorch.home)
    attempt = sessions.attempts(engine, "digits")[0]
    lines = [f'{{"s":{step},"e":1,"t":1700000000,"v":{{"dice":0.{step}}}}}' for step in range(1, 9)]
    curves.write(engine, attempt.id, lines)
    yield engine
    engine.dispose()


def test_top_shows_all_runs_opens_the_chosen_one_follows_the_size_and_gives_the_terminal_back(kgorch, runs_at_home):
    terminal = kgorch.on_terminal("top", columns=130, lines=20, env={"NO_COLOR": "1"})
    emulator = terminal.emulated(130, 20)
    shown = emulator.wait_for(lambda lines: "2 runs; q quits" in "\n".join(lines))
    assert shown[0].startswith("run ") and {line.split()[0] for line in shown[1:3]} == {"ink", "digits"}
    first, second = (line.split()[0] for line in shown[1:3])
    emulator.resize(40, 8)
    emulator.wait_for(lambda lines: lines[0].split() == ["run", "state"] and any("2 runs" in line for line in lines))
    terminal.type("\x1b[B")
    terminal.type("\r")
    emulator.wait_for(lambda lines: lines[0].split() == ["run", second])
    assert any(line.startswith("phase") for line in emulator.lines())
    terminal.type("q")
    emulator.wait_for(lambda lines: any("2 runs" in line for line in lines))
    terminal.type("q")
    ended = terminal.end()
    assert ended.code == 0 and ended.text.endswith(("\x1b[?25h", "\x1b[?1049l", "\x1b[?25h\x1b[?1049l")) and first
    assert not [code for code in ("\x1b[31m", "\x1b[32m") if code in ended.text], "NO_COLOR"


def test_ctrl_c_ends_top_as_q_does(kgorch, runs_at_home):
    terminal = kgorch.on_terminal("top", columns=80, lines=12)
    emulator = terminal.emulated(80, 12)
    emulator.wait_for(lambda lines: any("q quits" in line for line in lines))
    terminal.type("\x03")
    assert terminal.end().code == 0


def test_in_a_pipe_top_is_a_table_that_ends(kgorch, runs_at_home):
    lines = [line.split("\t") for line in kgorch("top").stdout.splitlines()]
    assert lines[0] == ["run", "state", "progress", "step", "wall in", "metric", "then"]
    assert sorted(row[0] for row in lines[1:]) == ["digits", "ink"] and all(len(row) == 7 for row in lines)


def test_without_any_run_top_says_how_to_begin(kgorch):
    terminal = kgorch.on_terminal("top", columns=80, lines=12)
    terminal.emulated(80, 12).wait_for(lambda lines: any("kgorch start plan.toml" in line for line in lines))
    terminal.type("q")
    assert terminal.end().code == 0
