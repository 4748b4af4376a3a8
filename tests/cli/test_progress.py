"""What a session in the foreground prints: one row of a terminal, or lines that a notebook can keep for nine hours."""

from __future__ import annotations

import io
import itertools
import json
import os
import signal
import sys
from datetime import UTC, datetime
from types import SimpleNamespace

import pyte
import pytest

from kgorch.cli.display import progress
from kgorch.cli.display.import_progress import ImportProgress
from kgorch.cli.display.live_block import LiveBlock, rows_taken
from kgorch.cli.display.progress import Cadence, Figures, Trends, live_block, live_line, mode_of, plain_line
from kgorch.cli.display.session_messages import SessionMessages
from kgorch.core import text
from kgorch.core.codes import Reason
from kgorch.core.session import events
from kgorch.system import signals

NOW = Figures(
    stage="train",
    phase="training",
    epoch=8,
    epochs_total=40,
    step=718,
    steps_total=3200,
    step_s=0.04,
    metrics={"loss": 0.003086, "accuracy": 0.9539},
    left_s=29_520.0,
)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_plain_line_says_when_how_far_and_how_long_still():
    assert plain_line(NOW, "00:12:31") == (
        "00:12:31  epoch 8/40  step 718/3200  loss 0.003086  accuracy 0.9539  wall in 8h 12m"
    )


def test_the_live_line_says_where_to_it_counts_and_fits_into_any_terminal():
    assert live_line(NOW, 200) == (
        "train  22%  epoch 8/40  step 718/3200  loss 0.003086  accuracy 0.9539  train ends in 1m 39s  wall in 8h 12m"
    )
    assert live_line(NOW, 90) == (
        "train  22%  epoch 8/40  step 718/3200  loss 0.003086  train ends in 1m 39s  wall in 8h 12m"
    ), "metrics give way before the end"
    many = NOW._replace(metrics={f"größe損\x1b[2J{number}": 1.0 for number in range(50)})
    for columns in range(20, 200):
        line = live_line(many, columns)
        assert text.width(line) <= columns and line.isprintable()


def test_nothing_is_said_of_what_is_not_known():
    starting = Figures("", "starting", 0, 0, 0, 0, 0.0, {}, None)
    assert live_line(starting, 80) == "starting"
    assert plain_line(starting, "00:12:31") == "00:12:31  starting"


@pytest.mark.parametrize(
    ("environ", "mode"),
    [
        ({"TERM": "xterm"}, "live"),
        ({"TERM": "xterm-color", "JPY_PARENT_PID": "12"}, "plain"),
        ({"TERM": "xterm", "KAGGLE_KERNEL_RUN_TYPE": "Interactive"}, "plain"),
        ({"TERM": "xterm", "COLAB_RELEASE_TAG": "release"}, "plain"),
        ({"TERM": "xterm", "MPLBACKEND": "module://matplotlib_inline.backend_inline"}, "plain"),
        ({"TERM": "dumb"}, "plain"),
        ({}, "plain"),
    ],
)
def test_a_notebook_gets_plain_lines_although_its_commands_run_on_a_terminal(environ, mode):
    assert mode_of("auto", Terminal(), environ) == mode
    assert mode_of("auto", io.StringIO(), environ) == "plain"
    assert mode_of("auto", None, environ) == "plain", "stderr is closed"
    assert mode_of("live", io.StringIO(), environ) == "live" and mode_of("none", Terminal(), environ) == "none"


def lines_of(hours: float, epochs: int, metrics: dict[str, float]) -> list[str]:
    """Of a session that is looked at every second."""
    seconds, cadence, lines = int(hours * 3600), Cadence(0.0), []
    for second in range(seconds):
        now = NOW._replace(
            epoch=second * epochs // seconds,
            epochs_total=epochs,
            step=second * 10,
            steps_total=seconds * 10,
            metrics=metrics,
            left_s=seconds - second,
        )
        if cadence.is_due(now, float(second)):
            lines.append(plain_line(now, f"{datetime.fromtimestamp(second, UTC):%H:%M:%S}") + "\n")
    return lines


def bytes_in_a_notebook(lines: list[str]) -> int:
    """What a cell's outputs take in an .ipynb, which is written with this indent: nbclient keeps every line as an output."""
    outputs = [{"name": "stdout", "output_type": "stream", "text": [line.replace("\n", "\r\n")]} for line in lines]
    return len(json.dumps({"cells": [{"outputs": outputs}]}, indent=1, ensure_ascii=False).encode())


@pytest.mark.parametrize("epochs", [1, 40, 1000, 30_000])
@pytest.mark.parametrize(
    "metrics", [{"loss": 0.0031, "accuracy": 0.954}, {"m" * 30 + str(n): 1 / 3 for n in range(99)}]
)
def test_nine_hours_add_less_than_100_kilobytes_to_a_notebook(epochs, metrics):
    lines = lines_of(9, epochs, metrics)
    assert bytes_in_a_notebook(lines) < 100_000
    assert 300 <= len(lines) <= 300 + progress.MAX_EPOCH_LINES + 1


def test_in_the_first_hour_there_is_a_line_a_minute_and_later_one_every_two():
    minutes = [int(line[0:2]) * 60 + int(line[3:5]) for line in lines_of(9, 1, {})]
    gaps = {later - earlier for earlier, later in itertools.pairwise(minutes)}
    assert gaps == {1, 2} and len(lines_of(1, 1, {})) == 60


def test_each_of_a_few_epochs_has_its_line():
    told = {line.split("epoch ")[1].split("/")[0] for line in lines_of(9, 40, {})}
    assert told == {str(epoch) for epoch in range(40)}
    starts = [line.split()[0] for line in lines_of(1, 4, {}) if "epoch 1/4" in line]
    assert starts[0].endswith(":15:00"), "at the epoch's end, not a minute later"


def test_the_live_rows_are_written_anew_only_when_they_have_changed():
    terminal = Terminal()
    block = LiveBlock(terminal)
    for _ in range(10):
        block.show(["train  22%"])
    assert terminal.getvalue() == "\r\x1b[2Ktrain  22%"
    block.above("train: saving")
    block.clear()
    assert terminal.getvalue().endswith("\r\x1b[2Ktrain: saving\ntrain  22%\r\x1b[2K")
    assert "\n" not in terminal.getvalue().replace("train: saving\n", ""), "one row, never two"


def screen_of(written: str, columns: int = 80, lines: int = 24) -> list[str]:
    """What a terminal shows after these bytes."""
    screen = pyte.Screen(columns, lines)
    pyte.Stream(screen).feed(written.replace("\n", "\r\n"))
    return [line.rstrip() for line in screen.display]


def test_several_rows_are_erased_as_one_and_messages_scroll_above_them():
    terminal = Terminal()
    block = LiveBlock(terminal)
    block.show(["one", "two", "three"])
    block.above("a message")
    block.show(["four"])
    block.above("another")
    block.show(["five", "six"])
    assert screen_of(terminal.getvalue())[:6] == ["a message", "another", "five", "six", "", ""]
    block.clear()
    assert screen_of(terminal.getvalue())[:4] == ["a message", "another", "", ""]


def test_rows_that_a_narrower_terminal_has_wrapped_are_erased_as_well():
    assert rows_taken(["x" * 79, "y" * 20], 80) == 2
    assert rows_taken(["x" * 79, "y" * 20], 40) == 3
    assert rows_taken(["損" * 30], 40) == 2 and rows_taken([], 80) == 1 and rows_taken(["", ""], 80) == 2


GPU = {"gpu0.util": 97.0, "gpu0.mem_used": 12.1 * 2**30, "gpu0.mem_total": 15.0 * 2**30}


def trends_of(*steps: dict[str, float]) -> Trends:
    trends = Trends()
    for step, metrics in enumerate(steps):
        trends.add(NOW._replace(step=step, metrics=metrics))
    return trends


def test_the_block_has_bars_of_stage_and_session_with_what_their_ends_are():
    trends = trends_of({"loss": 3.0}, {"loss": 2.0}, {"loss": 1.0})
    now = NOW._replace(session_s=59_040.0)
    assert live_block(now, trends, GPU, 100, 30) == [
        "train       ━━━━━────────────────────  22%  epoch 8/40  step 718/3200  train ends in 1m 39s",
        "session     ━━━━━━━━━━━━─────────────  50%  wall in 8h 12m",
        "loss        █▅▁                             1",
        "gpu 0       97% util, 12.1 of 15.0 GiB",
        "train  loss 0.003086  accuracy 0.9539",
    ]


@pytest.mark.parametrize("columns", [20, 40, 59, 60, 80, 200])
@pytest.mark.parametrize("lines", [1, 8, 12, 24])
def test_the_block_fits_and_a_small_terminal_has_one_line(columns, lines):
    hostile = {f"größe損\x1b[2J{number}": float(number) for number in range(50)}
    trends = trends_of(hostile, {name: value * 2 for name, value in hostile.items()})
    rows = live_block(NOW._replace(metrics=hostile, session_s=60_000.0), trends, GPU, columns, lines)
    assert all(text.width(row) <= columns and row.isprintable() for row in rows)
    assert len(rows) <= max(1, lines // 2) and (len(rows) == 1) == (lines < 12 or columns < 60)


def test_nothing_but_the_phase_is_known_before_the_first_step():
    starting = Figures("train", "starting", 0, 0, 0, 0, 0.0, {}, None)
    assert live_block(starting, Trends(), {}, 100, 30) == ["train starting"]


def test_a_trend_of_nine_hours_stays_small_and_leaves_out_what_is_not_finite():
    trends = Trends()
    for step in range(100_000):
        value = float("nan") if step % 7 == 3 else float(step)
        trends.add(
            NOW._replace(step=step, metrics={"loss": value, "none": None, "lr": 1.0, "accuracy": 1.0, "f1": 1.0})
        )
    assert set(trends.values) == {"loss", "accuracy"} and len(trends.values["loss"]) <= Trends.MAX_VALUES
    assert trends.values["loss"][-1] == 99_999


def test_what_others_write_to_stderr_comes_above_the_live_line(monkeypatch):
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    with progress.Printer("live", lambda: NOW) as printer:
        printer.say("digits: session 1 opened")
        print("kgorch: the database \x1b[2Jcannot be written", file=sys.stderr)
    assert sys.stderr is terminal
    plain = terminal.getvalue().replace("\x1b[1A\r\x1b[2K", "").replace("\r\x1b[2K", "|")
    assert "\x1b" not in plain and "kgorch: the database ?[2Jcannot be written\n" in plain
    assert plain.startswith("|digits: session 1 opened\n") and plain.endswith("|"), "nothing of the line is left"


def test_a_terminal_that_takes_nothing_does_not_hold_up_who_speaks(monkeypatch):
    tried = []

    class Held(Terminal):
        def write(self, said: str) -> int:
            tried.append(said)
            raise OSError(5, "Input/output error")

    monkeypatch.setattr(sys, "stderr", Held())
    with progress.Printer("live", lambda: NOW) as printer:
        for number in range(100):
            printer.say(f"line {number}")
    assert tried, "its error ends nothing: neither who speaks nor the session"


def test_files_that_are_fetched_one_after_the_other_show_the_size_of_each(monkeypatch):
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(progress, "NOTEBOOKS", ())
    monkeypatch.setenv("MPLBACKEND", "")
    with ImportProgress() as watcher:
        for done, total in ((1 << 30, 2 << 30), (2 << 30, 2 << 30), (1 << 30, 4 << 30), (3 << 30, 0)):
            watcher.copy_progress(done, total)
            watcher._bar.refresh()
    shown = terminal.getvalue()
    places = [shown.find(text) for text in ("50% of 2.0 GiB", "100% of 2.0 GiB", "25% of 4.0 GiB", "copying 3.0 GiB")]
    assert -1 not in places and places == sorted(places), shown


def test_ctrl_c_again_is_advised_after_a_ctrl_c_and_not_after_kgorch_stop(monkeypatch, capsys):
    monkeypatch.setattr(signals, "_interrupts", 0)
    stop = events.StopRequested(Reason.USER)  # the supervisor's event is the same for both
    run = SimpleNamespace(name="digits", checkpoints="")
    with (
        signals.handlers(on_terminate=lambda: None, on_interrupt=lambda: None),
        SessionMessages(None, SimpleNamespace(run=run), "none") as messages,
    ):
        messages.hear(stop)
        os.kill(os.getpid(), signal.SIGINT)
        messages.hear(stop)
    told = capsys.readouterr().err.splitlines()
    assert told == ["digits: kgorch stop: saving", "digits: saving; Ctrl-C again to stop at once"]
