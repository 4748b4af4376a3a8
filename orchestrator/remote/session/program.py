"""One session: inputs, installation, training, record. Whatever happens, it ends by itself, in time, and with exit status 0."""

from __future__ import annotations

import contextlib
import glob
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from pathlib import Path
from typing import Any, Callable

from kgorch.remote.session.common import LOG_NAME, RECORD_NAME, Ended, Order, container_age_s, say, utc_now
from kgorch.remote.session.inputs import find_bundle, find_state, search, unpack
from kgorch.remote.session.installation import environment, install
from kgorch.remote.session.output import (
    checkpoints,
    close_database,
    gpu_names,
    is_finished,
    kill_all_of,
    prune,
    size_of,
    tidy,
)

MAX_OUTPUT_BYTES = 19 * 10**9
"""Kaggle keeps 20 GB of an output; users report 19.5 GB as the limit."""

RECORD_INTERVAL_S = 60.0
TAIL_BYTES = 3000
"""Of the log, in the record of a session that failed."""

OUTCOMES = {0: "finished", 10: "suspended", 11: "quota", 20: "failed", 2: "failed"}
"""What kgorch's exit statuses mean (errors.py). After 2, a mistake in the plan, another session would end in the same way."""

OLDEST_PYTHON = (3, 11)


class OrderSession:
    """The session of an order.

    Attributes:
        child: the process that runs now.
        stops: why the session is to end early, each reason in its turn.
    """

    def __init__(self, order: Order) -> None:
        self.order, self.began_at = order, utc_now()
        self.began = time.monotonic() - min(container_age_s(), order["timeout_s"] / 4)
        self.input = Path(os.environ.get("KGORCH_REMOTE_INPUT") or "/kaggle/input")
        self.output = Path(os.environ.get("KGORCH_REMOTE_OUTPUT") or "/kaggle/working").absolute()
        self.home = self.output / "kgorch"
        self.log = self.output / LOG_NAME
        self.child: Any = None
        self.work: Path | None = None
        self.stops: list[str] = []
        self.gpus: list[str] = []
        self.exit_code, self.is_over = -1, False
        self._shown = 0
        self._writing = threading.Lock()

    # Its course

    def run(self) -> None:
        """From start to record; raises nothing."""
        outcome, message = "error", ""
        try:
            self.output.mkdir(parents=True, exist_ok=True)
            self.write_record("error", "the session did not end by itself")
            self.gpus = gpu_names()
            outcome, message = self.train()
        except Ended as end:
            outcome, message = end.outcome, end.message
        except BaseException:
            message = traceback.format_exc()[-TAIL_BYTES:]
        self.finish(outcome, message)

    def train(self) -> tuple[str, str]:
        """Returns: outcome and message. Raises: Ended; anything else is a bug, or the place's."""
        order = self.order
        say(
            f"session {order['number']} of {order['run']}, {order['session_s']} s; GPUs: {', '.join(self.gpus) or 'none'}"
        )
        if sys.version_info < OLDEST_PYTHON:
            raise Ended("error", f"kgorch needs Python 3.11 or newer, and this place has {sys.version.split()[0]}")
        bundles, outputs = search(self.input)
        folder, marker = find_bundle(bundles, order["bundle"].rpartition("/")[2])
        state = find_state(outputs, order)
        say(f"the bundle is in {folder}; " + (f"the state in {state}" if state else "a new run begins"))
        work = self.work = self.make_work_folder()
        unpack(folder, marker, work)
        python, first = install(work, self.execute)
        code = self.execute(
            [python, "-m", "kgorch.cli", *start_words(order, marker, state, self.wall_s())],
            {**environment(first), "KGORCH_HOME": str(self.home)},
            work / "code",
        )
        self.exit_code = code
        ending = OUTCOMES.get(code, "error")
        if ending == "finished" and not is_finished(self.home, order["run_id"]):
            ending = "error"
        tail = "" if ending in ("finished", "suspended", "quota") else self.tail()
        return ending, "\n".join(filter(None, [*self.stops, tail]))

    def remove_work_folder(self) -> None:
        """A place that is a machine of one's own would fill up."""
        if self.work:
            shutil.rmtree(self.work, ignore_errors=True)

    def wall_s(self) -> int:
        """The plan's wall: kgorch counts it from the container's start on Kaggle, elsewhere from its own."""
        spent_s = 0.0 if container_age_s() else time.monotonic() - self.began
        return max(1, int(self.order["session_s"] - spent_s))

    def make_work_folder(self) -> Path:
        """The same one in each session, if it is free: the run's row holds it, and a change would be noted."""
        work = Path(tempfile.gettempdir(), f"kgorch-{self.order['run_id']}")
        shutil.rmtree(work, ignore_errors=True)
        try:
            work.mkdir(mode=0o700)
        except OSError:
            work = Path(tempfile.mkdtemp(prefix="kgorch-"))
        return work.resolve()

    def execute(self, command: list[str], env: dict[str, str], folder: Path | None = None) -> int:
        """Run a command until its end; what it prints goes into the log and is shown.

        Raises: Ended when the session is to end before the command has begun.
        """
        if self.stops:
            raise Ended("error", self.stops[-1])
        with open(self.log, "ab") as log:
            self.child = subprocess.Popen(
                command, cwd=folder, env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )
        if len(self.stops) > 0:  # it came between the two
            self.signal_child(signal.SIGTERM)
        until = time.monotonic() + RECORD_INTERVAL_S
        while self.child.poll() is None:
            time.sleep(0.2)
            self.show_log()
            if time.monotonic() > until:
                self.write_record("error", "the session did not end by itself")
                until = time.monotonic() + RECORD_INTERVAL_S
        self.show_log()
        code, self.child = self.child.returncode, None
        return int(code)

    # Its end

    def finish(self, outcome: str, message: str) -> None:
        """Leave an output that can be stored and attached. Each step is tried, whatever became of the one before."""
        for number in (signal.SIGTERM, signal.SIGINT):
            with contextlib.suppress(ValueError):  # not in the main thread
                signal.signal(number, signal.SIG_IGN)
        say(f"{outcome}: {message or 'as planned'}")
        steps: list[Callable[[], None]] = [
            lambda: kill_all_of(self.home),
            lambda: close_database(self.home),
            lambda: prune(self.home, checkpoints(self.home, self.order["run_id"]), MAX_OUTPUT_BYTES, self.output),
            lambda: tidy(self.output, self.home),
            self.remove_work_folder,
        ]
        for step in steps:
            try:
                step()
            except Exception as error:
                message += f"\nthe output could not be put in order: {error!r:.300}"
        self.write_record(outcome, message, is_last=True)

    def write_record(self, outcome: str, message: str, *, is_last: bool = False) -> None:
        """What happened so far. After the last one none is written: the guard and the main thread may both want to."""
        order = self.order
        every = checkpoints(self.home, order["run_id"])
        newest: dict[str, Any] = every[-1] if every else {"stage": "", "step": -1, "folder": self.output}
        record = {
            "format": 1,
            **{key: order[key] for key in ("nonce", "run", "run_id", "number")},
            "outcome": outcome,
            "exit_code": self.exit_code,
            "stage": newest["stage"],
            "step": newest["step"],
            "checkpoint": str(newest["folder"].relative_to(self.output)) if every else "",
            "bytes": size_of(self.output),
            "gpus": self.gpus,
            "began_at": self.began_at,
            "ended_at": utc_now(),
            "message": message[-TAIL_BYTES:],
        }
        with self._writing:
            if self.is_over:
                return
            self.is_over = is_last
            content = json.dumps(record, indent=1) + "\n"
            temporary = self.output / f".{RECORD_NAME}.tmp"
            try:
                temporary.write_text(content)
                temporary.replace(self.output / RECORD_NAME)
            except OSError as error:
                say(f"the record cannot be written: {error}\n{content}")

    def end_early(self, why: str, number: int = signal.SIGTERM) -> None:
        """From a signal or from the guard: kgorch saves at SIGTERM."""
        self.stops.append(why)
        self.signal_child(number)
        say(why)

    def signal_child(self, number: int) -> None:
        child = self.child
        if child is not None and child.returncode is None:
            with contextlib.suppress(OSError):
                os.killpg(child.pid, number)

    def tail(self) -> str:
        with contextlib.suppress(OSError):
            return self.log.read_bytes()[-TAIL_BYTES:].decode(errors="replace")
        return ""

    def show_log(self) -> None:
        with contextlib.suppress(OSError, ValueError), open(self.log, "rb") as log:
            log.seek(self._shown)
            content = log.read(1 << 20)
            self._shown += len(content)
            sys.stdout.write(content.decode(errors="replace"))
            sys.stdout.flush()


def start_words(order: Order, marker: dict[str, Any], state: Path | None, wall_s: int) -> list[str]:
    """`kgorch start` for this session: the first one begins the run, a later one never begins anew."""
    sources = [glob.escape(str(state))] if state else []
    settings = [
        *marker["overrides"],
        f"session.wall={wall_s}s",
        f"resume.sources={json.dumps(sources)}",
        "quota.hours=1000000",  # the driver has allotted what is left of the account's hours: nothing is counted twice
    ]
    return [
        *("start", marker["plan"], "--progress", "plain", "--new-id", order["run_id"]),
        *(word for setting in settings for word in ("--set", setting)),
        *(["--continue", "--run", order["run_id"]] if state else []),
    ]


def watch(session: OrderSession) -> None:
    """The guard: between the time at which kgorch ends by itself and the place's limit it ends whatever is still there."""
    order = session.order
    spare_s = order["timeout_s"] - order["session_s"]

    def sleep_until(share: float) -> None:
        time.sleep(max(0.0, session.began + order["session_s"] + share * spare_s - time.monotonic()))

    sleep_until(0.25)
    session.end_early(f"kgorch had not ended {0.25 * spare_s:.0f} s after its time: it was asked to")
    sleep_until(0.5)
    session.end_early(f"kgorch did not end {0.5 * spare_s:.0f} s after its time: it was killed", signal.SIGKILL)
    sleep_until(0.85)
    exit_now = threading.Timer(0.1 * spare_s, os._exit, [0])
    exit_now.start()  # also where the disk hangs on which the record is to be written
    if not session.is_over:
        session.write_record("error", "the session's end took too long and was cut off", is_last=True)
    os._exit(0)


def main(text: str) -> None:
    """Run the session of an order, a JSON table."""
    session = OrderSession(json.loads(text))
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: session.end_early("the place ended the session (SIGTERM)"))
    threading.Thread(target=watch, args=(session,), daemon=True).start()
    session.run()
