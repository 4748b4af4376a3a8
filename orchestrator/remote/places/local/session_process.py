"""The process that runs one local session: `python -m kgorch.remote.places.local.session_process FOLDER`.

It starts the script, kills all that is left of it at the time limit, and records how it ended. It is the sub-reaper of all below,
so that nothing of a session outlives it.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import subprocess
import sys
from pathlib import Path

import psutil

from kgorch.system.file_lock import FileLock
from kgorch.system.files import write

ORDER, SCRIPT, LOG, OUTPUT = "order.json", "script.py", "log.txt", "output"
RUNNING, STARTED, END = "running.lock", "started", "end.json"
PR_SET_CHILD_SUBREAPER = 36


def main(session: Path) -> None:
    lock = FileLock(session / RUNNING)
    if not lock.acquire() or (session / STARTED).exists():
        return
    (session / STARTED).touch()
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    timeout_s = json.loads((session / ORDER).read_bytes())["timeout_s"]
    with open(session / LOG, "ab") as log:
        process = subprocess.Popen(
            [sys.executable, str(session / SCRIPT)],
            cwd=session / OUTPUT,
            env=_environment(session),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    try:
        code = process.wait(timeout=timeout_s)
        how = "error" if code else "complete"
    except subprocess.TimeoutExpired:
        how, code = "killed", -9
    _kill_rest()
    write(session / END, json.dumps({"how": how, "exit": code}).encode(), durable=True)


def _environment(session: Path) -> dict[str, str]:
    """As at a place: nothing of this machine's kgorch, and no credentials."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("KGORCH_", "KAGGLE_"))}
    return kept | {"KGORCH_REMOTE_INPUT": str(session / "input"), "KGORCH_REMOTE_OUTPUT": str(session / OUTPUT)}


def _kill_rest() -> None:
    """SIGKILL to all below this process until nothing is left; what one of them leaves becomes a child of this one."""
    this = psutil.Process()
    while children := this.children(recursive=True):
        for child in children:
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
        psutil.wait_procs(children, timeout=5)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
