"""Starts `kgorch start` or `kgorch resume` as a process of its own, which outlives the terminal or the page that asked for it."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from kgorch.errors import ExitCode, KgorchError, parse_message

READY_FD = "KGORCH_READY_FD"
"""Environment variable: the descriptor on which the process says that its session is open."""

EXIT_TIMEOUT_S = 10.0
"""For a child that has closed the pipe to exit, so that its exit code is known."""


class Started(NamedTuple):
    """What became of the process.

    Attributes:
        is_open: its session is open.
        code: its exit status; None while it runs.
        output: what it printed, if it opened no session.
        log: where its messages go.
    """

    pid: int
    is_open: bool
    code: int | None
    output: str
    log: Path


def start(words: Sequence[str], home: Path) -> Started:
    """Run `kgorch WORDS` in the background; return once its session is open, or it has ended without one.

    Raises: KgorchError: the child's error, as it printed it.
    """
    log = home / "supervisor.log"
    # no progress: the log keeps events, and `kgorch status` shows how far the training is
    verb, *rest = words  # which may have a "--", after which nothing is an option
    command = [sys.executable, "-m", "kgorch.cli", verb, "--progress", "none", *rest]
    read_end, write_end = os.pipe()
    with open(log, "ab") as file:
        log_start = file.tell()
        child = subprocess.Popen(
            command,
            start_new_session=True,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            pass_fds=(write_end,),
            env={**os.environ, READY_FD: str(write_end)},
        )
    os.close(write_end)  # else the read below would never end when the child dies
    with open(read_end, "rb") as pipe:
        is_open = bool(pipe.read())  # empty when the child ended without a session
    output = ""
    if not is_open:
        deadline_s = time.monotonic() + EXIT_TIMEOUT_S
        while child.poll() is None and time.monotonic() < deadline_s:
            time.sleep(0.02)
        output = log.read_bytes()[log_start:].decode(errors="replace").strip()
        if child.returncode not in (0, None, ExitCode.QUOTA_SPENT):
            if error := parse_message(output):
                if child.returncode == ExitCode.NO_DATABASE:
                    error.code = ExitCode.NO_DATABASE
                raise error
            why = f"the supervisor exited with status {child.returncode}"
            raise KgorchError(why, *output.splitlines(), next_step=f"see {log}", error_code="KG901")
    return Started(child.pid, is_open, child.returncode, output, log)
