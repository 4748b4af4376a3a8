"""`--detach` of `kgorch start` and `resume`: the same command in a process session of its own, which outlives the terminal."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Sequence

from kgorch.cli.display import render
from kgorch.cli.foreground import READY_FD
from kgorch.cli.lookup import open_state
from kgorch.errors import ExitCode, KgorchError

EXIT_TIMEOUT_S = 10.0
"""For a child that has closed the pipe to exit, so that its exit code is known."""


def start(words: Sequence[str], run: str, *, as_json: bool, verb: str = "start") -> int:
    """Start the verb with these words in the background; return once its session is open, or with its exit code.

    Args:
        run: the name of the run, whose status `as_json` prints.
    Raises: KgorchError: the child's error, as it printed it.
    """
    _, home, _ = open_state()
    log = home / "supervisor.log"
    # no progress: the log keeps events, and `kgorch status` shows how far the training is
    command = [sys.executable, "-m", "kgorch.cli", verb, "--progress", "none", *words]
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
        is_ready = bool(pipe.read())  # empty when the child ended without a session
    if not is_ready:
        deadline_s = time.monotonic() + EXIT_TIMEOUT_S
        while child.poll() is None and time.monotonic() < deadline_s:
            time.sleep(0.02)
        output = log.read_bytes()[log_start:].decode(errors="replace").strip()
        if child.returncode not in (0, None, ExitCode.QUOTA_SPENT):
            raise KgorchError(output.removeprefix("error: ") or f"the supervisor exited with status {child.returncode}")
        if not as_json:
            render.echo(output)
            return child.returncode or 0
    if as_json:
        from kgorch.cli.commands.inspection.status import print_status

        print_status(run, as_json=True)
    else:
        render.echo(f"supervising in the background as pid {child.pid}; its messages go to {log}")
        render.echo("next: kgorch status --watch, kgorch logs -f, kgorch stop")
    return child.returncode or 0
