"""What reaches a terminal: no name or text from elsewhere moves its cursor, and a view of a run fits into it."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import sqlite3
import subprocess
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from answered import PLAN, code_of, make_state
from harness import wait_until

from kgorch.checkpoint.folder import write_manifest
from kgorch.checkpoint.manifest import MANIFEST_NAME, FileEntry, Manifest, Position
from kgorch.cli.display import bars, render, watch
from kgorch.core import text
from kgorch.core.codes import Reason
from kgorch.db import checkpoints, runs, sessions
from kgorch.db.engine import open_database
from kgorch.errors import ExitCode
from kgorch.report import failure, forecast, save_advice
from kgorch.system import process_identity
from kgorch.system.file_lock import FileLock

HOSTILE = "\x1b]0;PWNED\x07\x1b]52;c;cm0gLXJm\x07\x1b[2J\x9b31m\u202e\u2066evil\r"
FREE = {
    "runs": ["why"],
    "sessions": ["why", "site", "stage"],
    "attempts": ["cause", "stage"],
    "checkpoints": ["stage", "source"],
    "events": ["kind"],
    "rungs": ["rung", "why", "stage"],
    "resumes": ["why", "last_error"],
    "pools": ["name"],
    "charges": ["pool"],
}
"""Columns that take any text, some of it a stranger's."""

VERBS = [
    ["status", "ink"], ["status", "digits"], ["status", "--all"], ["history", "ink"], ["history", "digits"],
    ["history", "digits", "--events"], ["checkpoints", "list", "ink", "--dropped"], ["checkpoints", "list", "digits"],
    ["checkpoints", "verify", "digits"], ["checkpoints", "prune", "digits", "--dry-run"], ["quota"], ["queue"],
    ["doctor", "digits"], ["report", "digits", "--md"], ["compare", "ink", "digits"], ["top"],
    ["logs", "digits"], ["logs", "digits", "--launcher"], ["stop", "digits"], ["save", "digits"], ["daemon", "status"],
    ["resume", HOSTILE], ["status", HOSTILE], ["start", f"{HOSTILE}.toml"], ["start", "plan.toml", "--set", f"{HOSTILE}=1"],
    [HOSTILE],
    ["check", "plan.toml", "--no-probe"], ["check", f"{HOSTILE}.toml"], ["queue", "add", HOSTILE], ["notify", "test", "plan.toml"],
    ["status", f"--{HOSTILE}"], ["history", "digits", "--plot", HOSTILE], ["logs", "digits", "--attempt", HOSTILE],
]  # fmt: skip


@pytest.fixture(scope="module")
def hostile(tmp_path_factory):
    """A state folder in which every text that kgorch has not written itself would take the terminal over."""
    root = tmp_path_factory.mktemp("hostile")
    (root / "here").mkdir()
    (root / "here" / "plan.toml").write_text(PLAN)
    (root / "here" / "t.py").write_text("")
    make_state(root / "home", root / "here")
    with contextlib.closing(sqlite3.connect(root / "home" / "kgorch.db")) as connection, connection:
        for table, columns in FREE.items():
            for column in columns:
                if column in [name for _, name, *_ in connection.execute(f"PRAGMA table_info({table})")]:
                    with contextlib.suppress(sqlite3.IntegrityError):
                        connection.execute(f'UPDATE "{table}" SET "{column}" = "{column}" || ?', (HOSTILE,))
        metrics = json.dumps({HOSTILE: 0.5, "dice": 0.1})
        for table in ("sessions", "checkpoints"):
            connection.execute(f"UPDATE {table} SET metrics = ?", (metrics,))
        facts = {
            "why": HOSTILE,
            "what": HOSTILE,
            HOSTILE: HOSTILE,
            "loaded": HOSTILE,
            "file": HOSTILE,
            "missing": HOSTILE,
        }
        for kind in (
            "save_failed",
            "exactness",
            "snapshots_off",
            "data_cache_failed",
            "mirror_failed",
            "weights_partly_loaded",
        ):
            connection.execute(
                "INSERT INTO events (run_id, session_id, at, kind, phase, facts)"
                " SELECT run_id, id, started_at, ?, '', ? FROM sessions",
                (kind, json.dumps(facts)),
            )
    for folder in root.glob("home/runs/*/1"):
        attempt = folder / "attempts" / "1.1"
        attempt.mkdir(parents=True)
        for name in ("rank0.log", "torchrun.log"):
            (attempt / name).write_text(f"\x1b[31mred\x1b[0m {HOSTILE}\n")
    return root


@pytest.fixture
def at_home(hostile, tmp_path, monkeypatch):
    shutil.copytree(hostile / "home", tmp_path / "home")
    monkeypatch.chdir(hostile / "here")
    monkeypatch.setenv("KGORCH_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    for verb in ("start", "resume"):
        monkeypatch.setattr(
            f"kgorch.cli.commands.training.{verb}.run_session", lambda *_, **__: int(ExitCode.SUSPENDED)
        )


def controls(shown: str) -> list[str]:
    """What a terminal would obey, but for colours and the ends of lines."""
    return [
        letter
        for letter in text.COLOUR.sub("", re.sub(r"\r+\n", "\n", shown))
        if not letter.isprintable() and letter not in "\n\t"
    ]


@pytest.mark.parametrize("verb", VERBS, ids=lambda verb: " ".join(verb).replace(HOSTILE, "HOSTILE"))
def test_no_verb_prints_what_a_terminal_would_obey(at_home, capfd, verb):
    code = code_of(verb)
    out, err = capfd.readouterr()
    assert code in (0, 2, 20)
    assert not controls(out) and not controls(err), (out, err)


def test_the_hostile_texts_are_really_shown(at_home, capfd):
    for verb, stream in (
        (["status", "digits"], 0),
        (["history", "digits"], 0),
        (["logs", "digits"], 0),
        ([HOSTILE], 1),
    ):
        code_of(verb)
        assert "evil" in capfd.readouterr()[stream], verb


def test_nor_does_it_on_a_terminal_where_tables_are_drawn(kgorch, hostile):
    shutil.copytree(hostile / "home", kgorch.home)
    for verb in (["status", "digits"], ["history", "digits"], ["checkpoints", "list", "digits"], ["logs", "digits"]):
        shown = kgorch.on_terminal(*verb, columns=400).end()
        assert shown.code == 0 and "evil" in shown.text
        assert not controls(shown.text), shown.text
        assert verb[0] != "logs" or "\x1b[31mred\x1b[0m" in shown.text, "a training's colours stay"


def test_the_bytes_of_a_log_are_had_raw_by_who_asks_for_them(kgorch, hostile):
    shutil.copytree(hostile / "home", kgorch.home)

    def logged(*options):
        command = kgorch.command("logs", "digits", *options)
        return subprocess.run(command, env=kgorch.env(), stdout=subprocess.PIPE, check=True).stdout

    assert logged() == b"\x1b[31mred\x1b[0m ??evil\r\n", "colours stay, and so does the end of a line"
    assert logged("--raw") == f"\x1b[31mred\x1b[0m {HOSTILE}\n".encode()


@pytest.mark.parametrize(
    "facts", [{}, {"stage": "train"}, {"stage": "train", "end_at": "soon"}, {"stage": 1, "end_at": None}]
)
@pytest.mark.parametrize("kind", ["forecast", "epoch"])
def test_an_event_of_a_strangers_making_ends_no_verb(at_home, capfd, kind, facts):
    engine = open_database(Path(os.environ["KGORCH_HOME"]))
    run = runs.newest(engine, "ink")
    assert run is not None
    before = forecast.accuracy(engine, run)
    sessions.add_event(engine, run.id, kind, facts)
    assert forecast.accuracy(engine, run) == before
    engine.dispose()
    for verb in (["history", "ink"], ["status", "ink"], ["status", "digits"]):
        assert code_of(verb) == 0
    assert "Traceback" not in capfd.readouterr().err


def test_a_cell_of_a_table_is_one_cell_whatever_its_text(capsys):
    render.table(["a", "b"], [["one\ttwo\nthree", "x"]])
    assert capsys.readouterr().out == "a\tb\none two three\tx\n"


def test_thousands_of_metrics_and_a_name_of_megabytes_are_a_line():
    shown = render.metrics({"m" * 5_000_000: 1.0} | {f"loss/{step}": 1.0 for step in range(25_000)})
    assert len(shown) < 400 and "and 24989 more" in shown


# A run whose supervisor and ranks are gone


@pytest.fixture
def cut_off(kgorch):
    """The supervisor died at step 1106, the ranks trained and saved on, up to step 1862, and died as well."""
    engine = open_database(kgorch.home)
    folder = kgorch.home / "runs" / "mine" / "1"
    run = runs.create(
        engine, id="r1", name="mine", number=1, folder=str(folder), workdir=str(kgorch.folder),
        checkpoints=str(folder / "checkpoints"), plan=PLAN.replace("ink", "mine"), overrides=[], plan_hash="h", stages=["train"],
    )  # fmt: skip
    wall_at = datetime.now(UTC) - timedelta(seconds=10)
    session = sessions.open_session(
        engine,
        run.id,
        boot_id=process_identity.boot_id(),
        supervisor_pid=1,
        supervisor_started_ticks=1,
        wall_at=wall_at,
    )
    attempt = sessions.open_attempt(
        engine, session.id, stage="train", ranks=1, folder_of=lambda number: str(folder / f"1.{number}")
    )
    sessions.record(engine, run.id, session.id, kind="attached", phase="training", facts={}, stage="train")
    sessions.record_heartbeat(engine, session.id, attempt.id, epoch=1, epochs_total=4, step=1316, steps_total=3200)
    for step in (1106, 1862):
        saved = folder / "checkpoints" / "train" / f"step-{step:08d}"
        saved.mkdir(parents=True)
        file = FileEntry(40, "0" * 32)
        at = "2026-11-20T10:00:00+00:00"
        write_manifest(saved, Manifest("mine", "r1", "train", Position(step=step), 1, at, files={"a.json": file}))
    checkpoints.record(
        engine, run.id, str(folder / "checkpoints" / "train" / "step-00001106"), state="verified", session_id=session.id,
        stage="train", step=1106, final=False, bytes=10, metrics={},
    )  # fmt: skip
    return engine, run


def shown(kgorch, *args: str) -> dict[str, str]:
    """`kgorch status`, by label."""
    return {line.split()[0]: line[render.INDENT :] for line in kgorch("status", *args).stdout.splitlines()}


def test_a_run_whose_processes_are_gone_is_told_as_it_is(kgorch, cut_off):
    said = shown(kgorch, "mine")
    assert said["phase"] == "ended without a supervisor"
    assert said["checkpoint"].startswith("step 1862 of train, on disk")
    assert said["stages"] == "train (at step 1316)"
    assert "its wall was at" in said["session"] and "wall in" not in said["session"]
    assert said["next"] == "kgorch resume mine"
    found = kgorch.status("mine")
    assert found["phase"] == "training" and found["checkpoint"]["step"] == 1106, "promised fields keep their meaning"
    assert found["on_disk"]["step"] == 1862 and not found["next"]["daemon_alive"]


@pytest.mark.parametrize("state", ["broken", "superseded", "dropped"])
def test_a_checkpoint_that_was_given_up_is_not_told_as_saved(kgorch, cut_off, state):
    engine, run = cut_off
    path = str(Path(run.checkpoints) / "train" / "step-00001862")
    checkpoints.record(engine, run.id, path, state=state, stage="train", step=1862, final=False, bytes=10, metrics={})
    assert shown(kgorch, "mine")["checkpoint"].startswith("step 1106 of train, verified")


def test_a_manifest_that_is_broken_is_passed_over_in_silence(kgorch, cut_off):
    _, run = cut_off
    (Path(run.checkpoints) / "train" / "step-00001862" / MANIFEST_NAME).write_text("{")
    assert shown(kgorch, "mine")["checkpoint"].startswith("step 1106 of train, verified")


def test_a_resume_that_is_queued_says_whether_a_daemon_lives_that_begins_it(kgorch, cut_off):
    engine, run = cut_off
    due_at = datetime.now(UTC) + timedelta(hours=1)
    last = sessions.last(engine, run.id)
    sessions.record(
        engine,
        run.id,
        last.id,
        kind="attempt_suspended",
        phase="suspended",
        facts={},
        resume={"reason": Reason.TIME_LIMIT, "why": "the wall", "due_at": due_at},
    )
    assert "no daemon is running that would start it" in shown(kgorch)["next"]
    with held(kgorch.home / "daemon.lock"):
        assert shown(kgorch)["next"].startswith("the daemon continues it, due")
        assert kgorch.status()["next"]["daemon_alive"]
        sessions.record(
            engine,
            run.id,
            last.id,
            kind="x",
            phase="suspended",
            facts={},
            resume={"reason": Reason.USER, "why": "a person", "due_at": None},
        )
        assert shown(kgorch)["next"] == "kgorch resume mine", "what a person stopped, no daemon begins"


@contextlib.contextmanager
def held(path: Path):
    lock = FileLock(path)
    assert lock.acquire()
    try:
        yield
    finally:
        lock.release()


def test_a_run_that_failed_foretells_nothing(kgorch, cut_off):
    engine, run = cut_off
    last = sessions.last(engine, run.id)
    sessions.record(engine, run.id, last.id, kind="retries_exhausted", phase="failed", facts={}, why="it went wrong")
    runs.set_state(engine, run.id, "failed")
    assert "end" not in shown(kgorch) and kgorch.status()["forecast"] is None
    assert shown(kgorch)["next"] == "fix the cause, then kgorch resume mine"


@pytest.mark.parametrize(
    ("code", "slurm", "said"),
    [
        ("KG401", None, "fix it, then kgorch remote start PLAN"),
        ("KG410", None, "kgorch start PLAN --set session.wall=…, with"),
        ("KG410", {"job": "7"}, "kgorch slurm submit PLAN --time …, with"),
    ],
)
def test_what_follows_a_failure_is_the_command_of_the_place(code, slurm, said):
    view = {"failure": {"code": code}, "next": {"command": "kgorch remote start PLAN"}, "slurm": slurm}
    typed = failure.next_step(view, first="fix it,")
    assert typed.startswith(said) and typed.endswith("then kgorch remote start PLAN")


def test_the_failure_says_where_it_was_in_a_persons_own_code():
    told = """Traceback (most recent call last):
  File "<frozen runpy>", line 88, in _run_code
  File "/home/me/train.py", line 17, in <module>
    main()
  File "/venv/lib/python3.11/site-packages/torch/nn/module.py", line 5, in forward
    raise ValueError("shape")
ValueError: shape
"""
    assert failure.location(told) == "/home/me/train.py:17" and failure.location("killed") is None
    assert failure.location(told.replace("/home/me/", "/venv/lib/python3.11/")).endswith("module.py:5")


def test_a_save_that_failed_says_what_to_do_where_the_disk_is_full(tmp_path, monkeypatch):
    monkeypatch.setattr(save_advice, "free_bytes", lambda folder: 1_000_000)
    assert "checkpoint.dir" in save_advice.advice(tmp_path / "not" / "there", 2_673_050)
    assert save_advice.advice(tmp_path, 10_000) is None, "there is room: something else was wrong"
    assert save_advice.advice(tmp_path, 0), "of an unknown size, on a disk that is nearly full"


def test_the_quota_of_a_pool_that_is_not_there_is_a_mistake(kgorch):
    assert "there is no pool 'nopool'" in kgorch("quota", "nopool", code=2).stderr


# status --watch


@pytest.fixture
def rows():
    """Of a run that trains, some values long, some in letters that are two columns wide."""
    labels = [
        "run",
        "phase",
        "stages",
        "step",
        "session",
        "supervisor",
        "checkpoint",
        "snapshot",
        "gpu 0",
        "host",
        "ranks",
    ]
    labels += ["metrics", "exactness", "end", "notice", "next"]
    return [
        (label, f"{label} {'損失 and words ' * (8 if label in ('host', 'exactness', 'notice') else 1)}")
        for label in labels
    ]


FOUND = {
    "step": 1316,
    "steps_total": 3200,
    "session": {
        "number": 2,
        "started_at": "2026-11-20T10:00:00Z",
        "wall_at": "2026-11-20T19:00:00Z",
        "left_s": 16_200.0,
        "save_lead_s": 90.0,
    },
}


@pytest.mark.parametrize("columns", [20, 40, 80, 200])
@pytest.mark.parametrize("lines", [1, 6, 12, 24, 60])
def test_the_view_fits_and_what_matters_most_does_not_fall_off(rows, columns, lines):
    made = watch.frame(FOUND, rows, columns, lines)
    assert len(made) <= lines
    for line in made:
        whole = f"{line.label:<{render.INDENT}}{line.bar}{line.text}"
        assert text.width(whole) <= columns and whole.isprintable()
    labels = [line.label for line in made]
    assert labels[0] == "run"
    if lines >= 12:
        assert {"progress", "session", "metrics", "end", "next"} <= set(labels)
    if (lines, columns) == (60, 80):
        assert {"supervisor", "exactness", "host"} <= set(labels) and len(made) > len(rows), "long values go on below"


def test_two_bars_tell_how_far_the_run_and_the_session_are(rows):
    shown = {line.label: line.bar for line in watch.frame(FOUND, rows, 80, 24) if line.bar}
    [session] = [line.text for line in watch.frame(FOUND, rows, 60, 24) if line.label == "session"][:1]
    assert session.startswith("wall in 4h 30m"), "what matters is not what is cut"
    assert "41%" in shown["progress"] and "50%" in shown["session"]
    assert shown["session"].count(bars.FULL) == shown["session"].count(bars.EMPTY)
    endless = {**FOUND, "steps_total": None, "session": {**FOUND["session"], "wall_at": None, "left_s": None}}
    assert not [line.bar for line in watch.frame(endless, rows, 80, 24) if line.bar.strip()]


@pytest.fixture
def lives(cut_off):
    """The same run, supervised by this very process."""
    engine, run = cut_off
    last = sessions.last(engine, run.id)
    us = os.getpid()
    sessions.update_session(
        engine,
        last.id,
        supervisor_pid=us,
        supervisor_started_ticks=process_identity.start_ticks(us),
        wall_at=datetime.now(UTC) + timedelta(hours=1),
    )
    return engine, run, last


def test_watching_takes_the_screen_follows_its_size_and_leaves_the_end_on_it(kgorch, lives):
    engine, run, last = lives
    terminal = kgorch.on_terminal("status", "mine", "--watch", columns=100, lines=30)
    terminal.read_until("\x1b[?1049h")
    terminal.read_until("supervisor")
    terminal.resize(60, 8)

    def frame() -> str:
        terminal.read_until("\x1b[H")
        return terminal.read_until("training continues")

    small = wait_until(lambda: (shown := frame()) and "supervisor" not in shown and shown, what="a smaller frame")
    assert "progress" in small and "mine" in small and small.count("\n") < 8
    sessions.record(engine, run.id, last.id, kind="attempt_suspended", phase="suspended", facts={}, why="the wall")
    ended = terminal.end()
    after = ended.text.split("\x1b[?1049l")[1]
    assert "suspended: the wall" in after and ended.code == 0


def test_a_window_that_is_dragged_for_long_stops_no_watching(kgorch, lives):
    engine, run, last = lives
    terminal = kgorch.on_terminal("status", "mine", "--watch", columns=100, lines=30)
    terminal.read_until("supervisor")
    for number in range(1500):
        terminal.resize(60 + number % 2, 8)
        if not number % 50:
            terminal.read_until("\x1b[H")
    terminal.resize(90, 8)
    wait_until(lambda: " " * 61 in terminal.read_until("training continues"), what="a wider frame")
    sessions.record(engine, run.id, last.id, kind="attempt_suspended", phase="suspended", facts={}, why="the wall")
    assert terminal.end().code == 0


def test_watching_in_a_notebook_gives_lines_and_no_screen(kgorch, lives):
    engine, run, last = lives
    terminal = kgorch.on_terminal("status", "mine", "--watch", env={"JPY_PARENT_PID": "1"})
    terminal.read_until("step 1316/3200")
    sessions.record(engine, run.id, last.id, kind="attempt_suspended", phase="suspended", facts={}, why="the wall")
    ended = terminal.end()
    assert "suspended: the wall" in ended.text and "\x1b" not in ended.text and ended.code == 0
