"""What a person sees of a session: on a terminal, in a notebook's cell, in a log."""

from __future__ import annotations

import os
import re
import sys

import pytest

from kgorch.core import text

LEARNS = {"epochs": 4, "sleep": 0.15}


def test_on_a_terminal_a_session_is_one_row_that_is_rewritten_in_place(kgorch):
    plan = kgorch.plan(args=LEARNS)
    ended = kgorch.on_terminal("start", str(plan), columns=60).end()
    assert ended.code == 0
    rows = re.split(r"\r\x1b\[2K|\r\n", ended.text)
    assert all(text.width(row) < 60 or "finished" in row for row in rows), "none is wrapped"
    assert any("%  epoch" in row and "train ends in" in row for row in rows)
    assert not re.findall(r"\x1b\[(?!2K)", ended.text), "the cursor goes up to no row above"
    assert len(rows) < 60, "about one a second, and only what has changed"


# the first of them is what a real kernel sets, below
@pytest.mark.parametrize("place", [pytest.param({"JPY_PARENT_PID": "1"}, marks=pytest.mark.soak), {"TERM": "dumb"}])
def test_where_every_byte_is_kept_a_session_is_lines(kgorch, place):
    ended = kgorch.on_terminal("start", str(kgorch.plan(args=LEARNS)), env=place).end()
    assert ended.code == 0 and "\x1b" not in ended.text
    lines = [
        line for line in ended.text.splitlines() if re.match(r"\d\d:\d\d:\d\d  epoch \d/4  step \d+/\d+ .* loss ", line)
    ]
    assert 1 <= len(lines) <= 4 + 1, ended.text


def test_a_log_tells_how_far_a_session_is_and_none_only_what_happens(kgorch):
    plan = str(kgorch.plan(args=LEARNS))
    assert re.search(r"^\d\d:\d\d:\d\d  epoch \d/4", kgorch("start", plan).stderr, re.MULTILINE)
    silent = kgorch("start", plan, "--fresh", "--progress", "none").stderr
    assert "session 1 opened" in silent and "train: training" in silent and "is finished" in silent
    assert "epoch" not in silent


def test_a_kernel_of_jupyter_keeps_lines_and_few_of_them(kgorch):
    nbclient = pytest.importorskip("nbclient", reason="needs nbclient and ipykernel (the dev extra)")
    nbformat = pytest.importorskip("nbformat")
    pytest.importorskip("ipykernel")
    command = " ".join(kgorch.command("start", "plan.toml"))
    kgorch.plan(args=LEARNS)
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(f"!{command}")])
    kernel = {"KGORCH_HOME": str(kgorch.home), "XDG_CONFIG_HOME": str(kgorch.home)}
    client = nbclient.NotebookClient(
        notebook, timeout=240, kernel_name="python3", resources={"metadata": {"path": str(kgorch.folder)}}
    )
    with pytest.MonkeyPatch.context() as patch:
        for name, value in kernel.items():
            patch.setenv(name, value)
        client.execute()
    shown = "".join(output["text"] for output in notebook.cells[0].outputs)
    assert "\x1b" not in shown and re.search(r"^\d\d:\d\d:\d\d  epoch \d/4", shown, re.MULTILINE), shown
    assert "is finished" in shown and len(shown.splitlines()) < 15
    assert len(nbformat.writes(notebook)) < 4_000


def test_a_first_ctrl_c_is_answered_at_once(kgorch):
    plan = kgorch.plan(args={"epochs": 1000, "sleep": 0.1})
    terminal = kgorch.on_terminal("start", str(plan))
    terminal.read_until("epoch")
    terminal.type("\x03")
    terminal.read_until("test: saving; Ctrl-C again to stop at once")
    ended = terminal.end()
    assert ended.code == 10 and "saved: step" in ended.text and "verified" in ended.text


def test_kgorch_stop_gives_the_terminal_of_the_session_no_advice_about_ctrl_c(kgorch):
    plan = kgorch.plan(args={"epochs": 1000, "sleep": 0.1})
    terminal = kgorch.on_terminal("start", str(plan))
    terminal.read_until("epoch")
    kgorch("stop")
    ended = terminal.end()
    assert ended.code == 10 and "test: kgorch stop: saving" in ended.text and "Ctrl-C" not in ended.text


def test_a_crash_is_told_at_its_first_time_with_its_place_and_its_traceback(kgorch):
    plan = kgorch.plan("crashes.py", args={"at": 2, "once": str(kgorch.folder / "happened")})
    said = kgorch("start", str(plan)).stderr
    [at] = [index for index, line in enumerate(said.splitlines()) if "failed at step 2: rank 0: ValueError" in line]
    lines = said.splitlines()
    assert re.search(r"\(.*crashes\.py:\d+\)$", lines[at]), "file and line"
    assert "ValueError: the loss went wrong at step 2" in lines[at + 4 : at + 6][-1] + lines[at + 4]
    assert lines.index("train: recovering (step 2)") > at, "before the next attempt, not at the end"


@pytest.mark.soak  # without any stream: tests/sessions/test_state_folder.py
def test_a_session_without_a_standard_error_runs_as_well(kgorch):
    plan = str(kgorch.plan(args={"epochs": 1}))
    command = " ".join(kgorch.command("start", plan))
    assert os.system(f"cd {kgorch.folder} && KGORCH_HOME={kgorch.home} {command} 2>&- >/dev/null") == 0
    assert kgorch.status()["phase"] == "finished" and sys.executable in command
