"""The process between supervisor and torchrun: `python -m orchestrator.launch.shim FOLDER`.

It has a session of its own, so that no terminal and no supervisor takes training along when it goes. It starts torchrun
and is the sub-reaper of all below: when torchrun has ended, however, nothing is left that holds a GPU. Should it be killed
itself, torchrun dies with it, and the ranks with torchrun. What it was started with stays locked while it lives
(launcher.py), which is how a new supervisor knows; how torchrun ended, it writes down, for a status can be read by a
parent alone. It holds the page of memory on which the ranks agree, and sees to it that a keeper lives (keeper.py), which
outlives it. Standard library only.

SIGTERM and the like are for the ranks, who save first; SIGUSR1 means: end it all now.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path

from orchestrator.core.backoff import Backoff
from orchestrator.core.codes import EventKind
from orchestrator.launch.failed_attempt import FailureWatch
from orchestrator.protocol import transport
from orchestrator.protocol.launch_spec import BOARD_VARIABLE, LAUNCH_VARIABLE, LaunchSpec
from orchestrator.protocol.messages import JournalEntry, Request
from orchestrator.protocol.run_files import KEEPER_SOCKET
from orchestrator.system import process_protection
from orchestrator.system.attempt_files import write_attempt_file, write_json
from orchestrator.system.attempt_processes import terminate_attempt
from orchestrator.system.host_memory import oom_kill_count
from orchestrator.system.log_rotation import LogRotator
from orchestrator.system.process_identity import start_ticks

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
BOARD_SLOT_BYTES = 64
PING_S, KEEPER_ANSWERS_S = 5.0, 20.0
KEEPER_RESTARTS = Backoff(first_s=0.05, longest_s=5.0)
ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""The newer name counts where both are set; every PyTorch reads the older one."""
_libc = ctypes.CDLL(None, use_errno=True)


def main(folder: Path) -> int:
    process_protection.protect()
    for ignored in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(ignored, signal.SIG_IGN)
    launch = LaunchSpec.read(folder / "launch.json")
    _libc.prctl(PR_SET_CHILD_SUBREAPER, 1)
    killed_before = oom_kill_count()
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
    signal.signal(signal.SIGUSR1, functools.partial(_end, torchrun.pid))
    FailureWatch(folder, torchrun.pid, launch.ranks)
    LogRotator(folder / name for name in ("torchrun.log", *(f"rank{rank}.log" for rank in range(launch.ranks))))
    keeper = KeeperKept(launch)  # its thread comes after the fork: what runs in the child takes no locks
    write_json(
        folder / "shim.json",
        {"pid": os.getpid(), "started_ticks": start_ticks(os.getpid()), "torchrun": torchrun.pid},
    )
    status = _wait_for(torchrun.pid)
    end_everything_below(keeper.spare)
    terminate_attempt(folder)  # what another sub-reaper has adopted
    killed = oom_kill_count() - killed_before
    told = {"status": status, "at": datetime.now(UTC).isoformat(), "kernel_kills": killed}
    write_attempt_file(launch, "exit.json", told)
    return 0


def _end(torchrun: int, *_: object) -> None:
    """Not by Popen.kill, which may reap it, and nobody would learn of its end."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(torchrun, signal.SIGKILL)


def command(launch: LaunchSpec) -> list[str]:
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


def environment(launch: LaunchSpec, folder: Path, board: int) -> dict[str, str]:
    told = {
        LAUNCH_VARIABLE: str(folder / "launch.json"),
        BOARD_VARIABLE: f"/proc/{os.getpid()}/fd/{board}",
        # As NVML counts, and so telemetry, the memory watch and the locks of GPUs. CUDA by itself puts the fastest first.
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
    }
    usual = {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    if launch.deterministic != "off":
        usual["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # read when CUDA starts
    return (
        usual
        | dict(os.environ)
        | (_expandable(os.environ) if launch.settings.get("expandable_segments") else {})
        | told
    )


def _expandable(environ: Mapping[str, str]) -> dict[str, str]:
    """PyTorch's settings of the allocator, with what the person has set there; read when CUDA starts."""
    name = next((name for name in ALLOCATOR_VARIABLES if environ.get(name)), ALLOCATOR_VARIABLES[-1])
    asked = [item for item in environ.get(name, "").split(",") if item and not item.startswith("expandable_segments")]
    return {name: ",".join([*asked, "expandable_segments:True"])}


class KeeperKept:
    """Starts a keeper where none lives, and again when it has gone, for as long as this process lives."""

    def __init__(self, launch: LaunchSpec) -> None:
        self._launch, self._folder, self._is_over = launch, Path(launch.keeper).parent, threading.Event()
        self._mine: subprocess.Popen[bytes] | None = None
        self._guard = threading.Lock()
        threading.Thread(target=self._keep, name="keeper", daemon=True).start()

    def spare(self) -> int | None:
        """Start none any more; the pid of the one that is our child, which is to live on.

        It is up by then: who ends it next must be able to reach it.
        """
        with self._guard:
            self._is_over.set()
            until = time.monotonic() + 5.0
            while self._mine and self._mine.poll() is None and time.monotonic() < until:
                with contextlib.suppress(OSError):
                    transport.connect(self._folder / KEEPER_SOCKET).close()
                    break
                time.sleep(0.01)
            return self._mine.pid if self._mine else None

    def _keep(self) -> None:
        failures, told = 0, ""
        while True:
            try:
                with transport.connect(self._folder / KEEPER_SOCKET) as connection:
                    failures, told = 0, ""
                    self._watch(connection)
            except OSError:
                with self._guard:
                    if self._is_over.is_set():
                        return
                    why = self._start()
                if why and why != told:
                    told = why
                    self._tell(why)
                failures += 1  # a keeper that cannot start is not started in a tight loop
                self._is_over.wait(KEEPER_RESTARTS.after(failures))

    def _watch(self, connection: socket.socket) -> None:
        """Until it has gone. One that does not answer is ended: ranks would wait for it."""
        while True:
            transport.send(connection, Request("newest"))
            connection.settimeout(KEEPER_ANSWERS_S)
            try:
                answered = connection.recv(65536)
            except TimeoutError:
                os.kill(transport.peer_credentials(connection)[0], signal.SIGKILL)
                raise
            if not answered:
                return
            self._is_over.wait(PING_S)

    def _start(self) -> str:
        """One that comes up beside it ends at once: the lock is taken. Returns: why there can be none, on a read-only disk, say."""
        if self._mine and self._mine.poll() is None:
            return ""  # it is coming up
        try:
            with open(self._folder / "keeper.log", "ab") as log:
                self._mine = subprocess.Popen(
                    [sys.executable, "-m", "orchestrator.snapshots.keeper", str(self._folder)],
                    start_new_session=True,
                    cwd="/",
                    env={
                        name: value for name, value in os.environ.items() if name != LAUNCH_VARIABLE
                    },  # it outlives us
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                )
        except OSError as error:
            return str(error)
        return ""

    def _tell(self, why: str) -> None:
        with contextlib.suppress(OSError), transport.connect(self._launch.socket) as supervisor:
            transport.send(supervisor, JournalEntry(self._launch.attempt, EventKind.KEEPER_NOT_STARTED, {"why": why}))


def end_everything_below(spared: Callable[[], int | None], patience_s: float = 20.0) -> None:
    """SIGKILL to every child but the spared one; what was below it becomes our child, until there is none.

    Bounded: a process may be stuck in the kernel.
    """
    until, spare = time.monotonic() + patience_s, spared()
    while time.monotonic() < until:
        children = [pid for pid in _children() if pid != spare]
        for pid in children:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        reaped = False
        for pid in children:
            with contextlib.suppress(ChildProcessError):
                reaped = os.waitpid(pid, os.WNOHANG)[0] != 0 or reaped
        if not children:
            return
        if not reaped:
            time.sleep(0.01)


def _children() -> list[int]:
    """Zombies among them: whose parent has ended is ours by the time it is one itself."""
    me = os.getpid()
    found = []
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            try:
                fields = Path(entry.path, "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if int(fields[1]) == me:
                found.append(int(entry.name))
    return found


def _wait_for(wanted: int) -> int:
    """The exit code of that child (negative: the signal); other processes that end meanwhile are reaped."""
    while True:
        pid, status = os.waitpid(-1, 0)
        if pid == wanted:
            return os.waitstatus_to_exitcode(status)


def _in_child(shim: int) -> None:
    process_protection.restore_user_settings()
    _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != shim:
        os._exit(1)  # it died before the call
    for given in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(given, signal.SIG_DFL)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
