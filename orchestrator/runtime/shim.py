"""The process between supervisor and torchrun: `python -m orchestrator.runtime.shim FOLDER`.

It has a session of its own, so that no terminal and no supervisor takes training along when it goes. It starts torchrun
and is the sub-reaper of all below: when torchrun has ended, however, nothing is left that holds a GPU. Should it be killed
itself, torchrun dies with it, and the ranks with torchrun. What it was started with stays locked while it lives
(launcher.py), which is how a new supervisor knows; how torchrun ended, it writes down, for a status can be read by a
parent alone. It holds the page of memory on which the ranks agree. Standard library only.

SIGTERM and the like are for the ranks, who save first; SIGUSR1 means: end it all now.
"""

from __future__ import annotations

import ctypes
import functools
import json
import os
import signal
import subprocess
import sys
import time
from datetime import UTC, datetime
from pathlib import Path

from orchestrator.runtime.processes import started_ticks
from orchestrator.wire import BOARD_VARIABLE, LAUNCH_VARIABLE, Launch

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
BOARD_SLOT_BYTES = 64
_libc = ctypes.CDLL(None, use_errno=True)


def main(folder: Path) -> int:
    for ignored in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(ignored, signal.SIG_IGN)
    launch = Launch.read(folder / "launch.json")
    _libc.prctl(PR_SET_CHILD_SUBREAPER, 1)
    board = os.memfd_create("kgorch-board")
    os.ftruncate(board, BOARD_SLOT_BYTES * (launch.ranks + 1))
    with open(folder / "torchrun.log", "ab") as log:
        torchrun = subprocess.Popen(
            command(launch),
            env=environment(launch, folder, board),
            cwd=launch.workdir,
            start_new_session=True,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            preexec_fn=functools.partial(_in_child, os.getpid()),
        )
    signal.signal(signal.SIGUSR1, lambda *_: torchrun.kill())
    _write(
        folder / "shim.json",
        {"pid": os.getpid(), "started_ticks": started_ticks(os.getpid()), "torchrun": torchrun.pid},
    )
    status = _wait_for(torchrun.pid)
    end_everything_below()
    _write(folder / "exit.json", {"status": status, "at": datetime.now(UTC).isoformat()})
    return 0


def command(launch: Launch) -> list[str]:
    return [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc-per-node={launch.ranks}",
        "--max-restarts=0",
        f"--log-dir={launch.folder}/torchrun",
        "-m",
        "orchestrator.worker.entry",
    ]


def environment(launch: Launch, folder: Path, board: int) -> dict[str, str]:
    told = {LAUNCH_VARIABLE: str(folder / "launch.json"), BOARD_VARIABLE: f"/proc/{os.getpid()}/fd/{board}"}
    usual = {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    if launch.deterministic != "off":
        usual["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # read when CUDA starts
    return usual | dict(os.environ) | told


def end_everything_below(patience_s: float = 20.0) -> None:
    """SIGKILL to every child; what was below it becomes our child, until there is none.

    Bounded: a process may be stuck in the kernel.
    """
    until = time.monotonic() + patience_s
    while time.monotonic() < until:
        for pid in _children():
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        try:
            pid, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            time.sleep(0.01)


def _children() -> list[int]:
    me = os.getpid()
    found = []
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            try:
                fields = Path(entry.path, "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if int(fields[1]) == me and fields[0] != "Z":
                found.append(int(entry.name))
    return found


def _wait_for(wanted: int) -> int:
    """The exit code of that child (negative: the signal); other processes that end meanwhile are reaped."""
    while True:
        pid, status = os.waitpid(-1, 0)
        if pid == wanted:
            return os.waitstatus_to_exitcode(status)


def _in_child(shim: int) -> None:
    _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != shim:
        os._exit(1)  # it died before the call
    for given in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(given, signal.SIG_DFL)


def _write(path: Path, content: dict[str, object]) -> None:
    aside = path.with_suffix(".part")
    aside.write_text(json.dumps(content))
    aside.rename(path)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
