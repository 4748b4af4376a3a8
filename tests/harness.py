"""kgorch as a person types it, over a state folder of the test's own; and waiting for a condition."""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import functools
import json
import os
import pty
import queue
import select
import shutil
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import forked_cli
import psutil
from click.testing import CliRunner
from sqlalchemy.exc import SQLAlchemyError

from kgorch.cli import cli
from kgorch.errors import KgorchError
from kgorch.launch.standby import SOCKET_VARIABLE, Standby
from kgorch.system.process_identity import rank_of
from kgorch.system.sockets import control_socket

PROGRAMS = Path(__file__).parent / "programs"


QUOTA = "[quota]\nhours = 1\n"
"""Of a plan, for Kgorch.move_wall."""


def wait_until(condition: Callable[[], Any], *, within_s: float = 60.0, what: str | Callable[[], str] = "") -> Any:
    """The condition's first true value; fails the test when none comes in time.

    What is waited for competes with the looks at it: a look that takes long is taken more rarely.

    Args:
        what: what is waited for; a function is asked when the time is over.
    """
    until = time.monotonic() + within_s
    while (began := time.monotonic()) < until:
        if value := condition():
            return value
        time.sleep(min(1.0, max(0.1, 3 * (time.monotonic() - began))))
    raise AssertionError(f"not within {within_s:.0f} s: {what() if callable(what) else what or condition}")


def weekly_reset(days: int = 3) -> str:
    """A quota's weekly reset so many days from today: none falls into the test."""
    return f"{(datetime.now(UTC) + timedelta(days=days)):%A} 00:00 UTC"


class Terminal:
    """A program on a pseudoterminal, and what it has written there.

    Attributes:
        text: all of it, escape sequences too. code: its exit status, once it has ended.
    """

    def __init__(
        self, command: list[str], folder: Path, env: dict[str, str], columns: int, lines: int, within_s: float
    ) -> None:
        env = {
            name: value for name, value in env.items() if name not in ("COLUMNS", "LINES")
        }  # which go before its size
        self.text, self.code, self._content = "", -1, b""
        self._until_s = time.monotonic() + within_s
        self._ours, theirs = pty.openpty()
        self.resize(columns, lines)
        self.process = subprocess.Popen(
            command,
            cwd=folder,
            env=env,
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),  # Ctrl-C and changes of size are signals then
        )
        os.close(theirs)

    def resize(self, columns: int, lines: int) -> None:
        """As a window that is drawn smaller or larger; the program hears of it by SIGWINCH."""
        fcntl.ioctl(self._ours, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))

    def type(self, keys: str) -> None:
        """As on the keyboard; "\x03" is Ctrl-C."""
        os.write(self._ours, keys.encode())

    def read_until(self, text: str) -> str:
        """What came until then, that text included; the rest is for later."""
        while text not in self.text:
            assert self._read(), f"it ended without {text!r}: {self.text[-2000:]!r}"
        at = self.text.index(text) + len(text)
        before, self.text = self.text[:at], self.text[at:]
        return before

    def emulated(self, columns: int, lines: int) -> Emulator:
        """What a terminal of this size shows of all that comes from now on."""
        return Emulator(self, columns, lines)

    def end(self) -> Terminal:
        """Wait for its end."""
        while self._read():
            pass
        self.code = self.process.wait(timeout=60)
        os.close(self._ours)
        return self

    def _read(self) -> bool:
        assert time.monotonic() < self._until_s, f"not within time: {self.text[-2000:]!r}"
        if not select.select([self._ours], [], [], 1.0)[0]:
            return True
        try:
            content = os.read(self._ours, 65536)
        except OSError:  # all who wrote to it are gone
            return False
        self._content += content
        try:
            self.text, self._content = self.text + self._content.decode(), b""
        except UnicodeDecodeError as error:
            assert error.reason == "unexpected end of data", error  # the rest of the letter comes
        return bool(content)


class Emulator:
    """A terminal's screen, as pyte draws it."""

    def __init__(self, terminal: Terminal, columns: int, lines: int) -> None:
        import pyte  # `make gpu`, which imports this module, does not require it

        self._terminal, self.screen = terminal, pyte.Screen(columns, lines)
        self._stream = pyte.Stream(self.screen)

    def lines(self) -> list[str]:
        return [line.rstrip() for line in self.screen.display]

    def wait_for(self, condition: Callable[[list[str]], Any]) -> list[str]:
        """The lines of the screen, once they fulfil the condition."""
        while not condition(self.lines()):
            assert self._terminal._read() or self._terminal.text, self.lines()
            self._stream.feed(self._terminal.text)
            self._terminal.text = ""
        return self.lines()

    def resize(self, columns: int, lines: int) -> None:
        self._terminal.resize(columns, lines)
        self.screen.resize(lines, columns)


NOTEBOOKS = ("JPY_PARENT_PID", "KAGGLE_KERNEL_RUN_TYPE", "COLAB_RELEASE_TAG", "MPLBACKEND")
"""By these kgorch knows a notebook: a test that runs in one is none."""


@functools.cache
def shared_standby() -> Standby:
    """The standby of this process."""
    made = Standby(environ=Kgorch(Path(), Path()).env() | {"KGORCH_HOME": ""})
    atexit.register(made.close)
    return made


@dataclass
class Kgorch:
    """The command line over a state folder of the test's own.

    `folder` is where plans and programs lie; `home` is $KGORCH_HOME; `extra_env` goes to all that is started. With `own_standby`
    each supervisor starts a standby of its own; else all of this process share one, as the sessions of a daemon do.
    """

    folder: Path
    home: Path
    started: list[subprocess.Popen[str]] = field(default_factory=list)
    extra_env: dict[str, str] = field(default_factory=dict)
    own_standby: bool = False

    def env(self) -> dict[str, str]:
        return {
            **{name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"},
            "KGORCH_HOME": str(self.home),
            "XDG_CONFIG_HOME": str(self.home),
            "COLUMNS": "200",
            **self.extra_env,
        }

    def command(self, *args: str) -> list[str]:
        return [sys.executable, "-m", "kgorch.cli", *args]

    @contextlib.contextmanager
    def standby_options(self, *args: str) -> Iterator[dict[str, Any]]:
        """Of Popen, for a command that launches."""
        if args[0] not in ("start", "resume") or self.own_standby:
            yield {"env": self.env()}
            return
        with shared_standby().connect_another() as connection:
            number = connection.fileno()
            yield {"env": self.env() | {SOCKET_VARIABLE: str(number)}, "pass_fds": (number,)}

    def __call__(self, *args: str, code: int | None = 0, timeout_s: float = 240) -> subprocess.CompletedProcess[str]:
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        with (
            self.standby_options(*args) as options,
            forked_cli.popen(self.command(*args), cwd=self.folder, **pipes, **options) as process,
        ):
            try:
                texts = process.communicate(timeout=timeout_s)
            except BaseException:
                process.kill()
                raise
        done = subprocess.CompletedProcess(process.args, process.returncode, *texts)
        assert code is None or done.returncode == code, (
            f"exit {done.returncode}\n{done.stdout}\n{done.stderr}\n{self.logs()}"
        )
        assert "Traceback" not in done.stderr, done.stderr
        return done

    def background(self, *args: str) -> subprocess.Popen[str]:
        with self.standby_options(*args) as options:
            pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
            process = forked_cli.popen(self.command(*args), cwd=self.folder, start_new_session=True, **pipes, **options)
        self.started.append(process)
        return process

    def on_terminal(
        self, *args: str, columns: int = 80, lines: int = 24, env: dict[str, str] | None = None, within_s: float = 120
    ) -> Terminal:
        """A verb on a terminal of its own of that size, as in a window, or behind a notebook's `!`."""
        outside = {name: value for name, value in self.env().items() if name not in NOTEBOOKS}
        return Terminal(
            self.command(*args), self.folder, {**outside, "TERM": "xterm", **(env or {})}, columns, lines, within_s
        )

    def look(self, *args: str) -> Any:
        """What a verb that only looks prints as JSON. In this process: a command's imports would keep a core busy while a
        test waits.

        Raises: whatever the verb does.
        """
        done = CliRunner().invoke(cli, [*args, "--json"], env=self.env(), catch_exceptions=False)
        return json.loads(done.stdout)

    def status(self, *args: str) -> dict[str, Any]:
        found: dict[str, Any] = self.look("status", *args)
        return found

    def try_status(self) -> dict[str, Any]:
        """The status, or {} while there is no run yet."""
        try:
            return self.status()
        except (KgorchError, SQLAlchemyError):
            return {}

    def wait_for_step(self, step: int, *, within_s: float = 60) -> dict[str, Any]:
        found: dict[str, Any] = wait_until(
            lambda: (
                (s := self.try_status())
                and s["session"]
                and s["step"] >= step
                and s["phase"] in ("training", "saving")
                and s
            ),
            within_s=within_s,
            what=lambda: f"step {step}: {self.try_status()}\n{self.logs()}",
        )
        return found

    def stop_and_kill(
        self,
        plan: Path,
        steps: int,
        *,
        hurry: tuple[str, ...] = (),
        env: dict[str, str] | None = None,
        within_s: float = 60,
    ) -> None:
        """Train in three sessions: one is stopped after a fifth of the steps, one is killed after two fifths.

        On a busy machine seconds pass until a step is seen here and all are killed: three fifths of the steps must last longer.

        Args:
            hurry, env: words and variables for the last start, which need not be as slow as those that are cut.
        """
        supervisor = self.background("start", str(plan))
        self.wait_for_step(steps // 5, within_s=within_s)
        # Not by `kgorch stop`: on a busy machine Python's start takes longer than the steps that are left.
        answer = control_socket.ask(self.home / "runs/test/1/control.sock", "stop", timeout_s=60)
        assert answer and answer.ok and supervisor.wait(timeout=60) == 10
        supervisor = self.background("start", str(plan))
        self.wait_for_step(steps * 2 // 5, within_s=within_s)
        self.kill_everything()
        supervisor.wait()
        self.extra_env |= env or {}
        self("start", str(plan), *hurry)
        assert self.status()["step"] == steps, (self.status(), self.logs())
        phases = [entry["phase"] for entry in self.history()]
        assert phases == ["suspended", "cut_off", "finished"], f"a session ended before it was cut: {phases}"

    def move_wall(self, in_s: int) -> None:
        """Move the wall of the session, whose plan has QUOTA, to so many seconds from now: a slow start takes none of them."""
        self("quota", "set", "--used", f"{3600 - in_s}s")

    def history(self) -> list[dict[str, Any]]:
        entries: list[dict[str, Any]] = self.look("history")
        return entries

    def events(self, kind: str | None = None) -> list[dict[str, Any]]:
        entries = self.look("history", "--events", "-n", "100000")
        return [entry for entry in entries if kind in (None, entry["kind"])]

    def plan(self, program: str = "learns.py", **changes: Any) -> Path:
        """A plan around a program of tests/programs, which is copied beside it."""
        for path in PROGRAMS.glob("*.py"):
            shutil.copy(path, self.folder)
        parts = {
            "name": "test",
            "ranks": 1,
            "args": {},
            "wall": None,
            "margin": None,
            "every": "3s",
            "extra": "",
        } | changes
        if parts["wall"] and not parts["margin"] and float(parts["wall"].rstrip("smh")) >= 12:
            parts["margin"] = "3s"  # a machine that stands still for a second is no matter of the test
        args = ", ".join(f"{key} = {json.dumps(value)}" for key, value in parts["args"].items())
        lines = [
            f'name = "{parts["name"]}"',
            "[[stage]]",
            'name = "train"',
            f'entry = "{program}"',
            f"ranks = {parts['ranks']}",
            f"args = {{ {args} }}",
            "[checkpoint]",
            f'every = "{parts["every"]}"',
            "[session]",
        ]
        lines += [f'{key} = "{parts[key]}"' for key in ("wall", "margin") if parts[key]]
        path = self.folder / "plan.toml"
        path.write_text("\n".join([*lines, parts["extra"]]) + "\n")
        return path

    def attempt(self) -> Path:
        """The folder of the newest attempt."""
        return max(self.home.glob("runs/*/*/attempts/*"), key=lambda path: [int(part) for part in path.name.split(".")])

    def pids(self) -> dict[str, int]:
        """shim, torchrun, rank0, rank1 … of the newest attempt, as far as they live."""
        told = json.loads((self.attempt() / "shim.json").read_text())
        found = {"shim": told["pid"], "torchrun": told["torchrun"]}
        for child in psutil.Process(told["torchrun"]).children():
            found[f"rank{rank_of(child.pid)}"] = child.pid
        return found

    def standby(self) -> psutil.Process | None:
        """The process that has imported PyTorch for the launches of the supervisor, if it is its own."""
        return next(iter(processes_of(self.home, "kgorch.worker.standby_server")), None)

    def checkpoints(self) -> list[Path]:
        """Those in their place; saves under way have a dot in their names."""
        return sorted(path for path in self.home.glob("runs/*/*/checkpoints/*/step-*") if "." not in path.name)

    def export(self, name: str = "test", stage: str = "") -> bytes:
        out = self.folder / f"exported{stage}.safetensors"
        self("checkpoints", "export", name, str(out), "--all", *(["--stage", stage] if stage else []))
        return out.read_bytes()

    def logs(self) -> str:
        texts = [
            f"── {path}\n{path.read_text(errors='replace')[-3000:]}"
            for path in sorted(self.home.glob("runs/*/*/attempts/*/*.log"))
        ]
        return "\n".join(texts)[-12000:]

    def kill_everything(self) -> None:
        """SIGKILL to every process that belongs to this state folder."""
        for process in processes_of(self.home):
            try:
                process.kill()
            except psutil.NoSuchProcess:
                pass


def command_lines() -> list[bytes]:
    """Of all processes, of which some end meanwhile."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            found.append(path.read_bytes())
    return found


def processes_of(home: Path, running: str = "") -> list[psutil.Process]:
    """Those that live and belong to this state folder; `running`: that have this word in their command line."""
    found = []
    for process in psutil.process_iter():
        try:
            if (
                process.pid != os.getpid()
                and process.environ().get("KGORCH_HOME") == str(home)
                and process.status() != psutil.STATUS_ZOMBIE
                and (not running or running in process.cmdline())
            ):
                found.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return found


class Notes(queue.SimpleQueue):
    """Takes entries for a run's journal (core/codes.py, Note) and holds them for the test."""

    def __call__(self, kind: str, facts: dict) -> None:
        self.put((kind, facts))
