"""The shim, the process between supervisor and torchrun: `python -m kgorch.launch.shim FOLDER`.

It has a Unix session of its own, so training survives the end of the terminal and of the supervisor. It starts torchrun and is
the sub-reaper of all processes below it: however torchrun ends, the shim kills what is left, so no process keeps a GPU. If the
shim is killed, torchrun gets SIGKILL from the kernel, and the ranks from torchrun.

It holds the attempt's lock, which was open and locked when it was started (launcher.py): the lock tells a new supervisor that the
attempt lives. It writes torchrun's exit status into exit.json, because only a parent can read one. It holds the page of memory on
which the ranks agree (worker/ranks/consensus_board.py), and starts a keeper where none lives (snapshots/keeper.py); the keeper
outlives it. Standard library only.

It ignores SIGTERM, SIGINT and SIGHUP: they are for the ranks, which save first. SIGUSR1 ends the attempt at once.
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
from typing import Protocol

from kgorch.core.backoff import Backoff
from kgorch.core.codes import EventKind
from kgorch.core.program_command import Launcher
from kgorch.launch.attempt_processes import terminate_attempt
from kgorch.launch.failed_attempt import FailureWatch
from kgorch.launch.log_rotation import LogRotator
from kgorch.protocol import transport
from kgorch.protocol.launch_spec import BOARD_VARIABLE, LAUNCH_VARIABLE, LaunchSpec, NodePlace
from kgorch.protocol.messages import JournalEntry, Request
from kgorch.protocol.run_files import COMPILED_FOLDER, KEEPER_SOCKET
from kgorch.system import process_protection
from kgorch.system.attempt_files import EXIT_FILE, write_attempt_file, write_json
from kgorch.system.clock import boottime_s
from kgorch.system.host_memory import oom_kill_count
from kgorch.system.process_identity import start_ticks, stat_fields

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36  # prctl(2)
BOARD_SLOT_BYTES, NODE_SLOTS = 64, 2
"""Bytes of a rank on the page of agreement (worker/ranks/consensus_board.py); slots besides for what several nodes have agreed on
(worker/ranks/node_board.py)."""

PING_S = 5.0
"""Seconds between two requests by which a keeper that hangs is noticed."""

KEEPER_TIMEOUT_S = 20.0
"""Seconds after which a keeper that does not answer is killed."""

KEEPER_RESTARTS = Backoff(first_s=0.05, longest_s=5.0)
ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""PyTorch's names of one variable: the newer one counts where both are set, and every version reads the older one."""

INTERFACE_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")

COMPILER_CACHES = {"TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton"}
"""Variables that name the caches of torch.compile and of a script's own Triton kernels, and their folders."""

_libc = ctypes.CDLL(None, use_errno=True)


class ChildProcess(Protocol):
    """A child process."""

    pid: int


def main(folder: Path, start: Callable[..., ChildProcess] = subprocess.Popen) -> int:
    """Run the attempt whose launch.json is in `folder` to its end.

    Args:
        start: starts torchrun; with the arguments of Popen.
    """
    process_protection.protect()
    for ignored in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(ignored, signal.SIG_IGN)
    launch = LaunchSpec.read(folder / "launch.json")
    _libc.prctl(PR_SET_CHILD_SUBREAPER, 1)
    # the kernel's count is of the whole control group, which others may share: the difference is what counts
    killed_before = oom_kill_count()
    board = os.memfd_create("kgorch-board")
    os.ftruncate(board, BOARD_SLOT_BYTES * (len(launch.ranks_here) + 1 + NODE_SLOTS))
    with open(folder / "torchrun.log", "ab") as log:
        torchrun = start(
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
    if launch.foreign is None:  # the agent of a foreign program ends by itself, after it has copied the last checkpoint
        FailureWatch(Path(launch.folder), torchrun.pid, launch.ranks_here)
    LogRotator([folder / "torchrun.log", *(Path(launch.folder, f"rank{rank}.log") for rank in launch.ranks_here)])
    keeper = KeeperMonitor(launch)  # its thread comes after the fork: what runs in the child takes no locks
    write_json(
        folder / "shim.json",
        {"pid": os.getpid(), "started_ticks": start_ticks(os.getpid()), "torchrun": torchrun.pid},
    )
    status = _wait_for(torchrun.pid)
    kill_children(keeper.release)
    terminate_attempt(folder)  # helpers that another sub-reaper has adopted are no children of ours
    killed = oom_kill_count() - killed_before
    end = {"status": status, "at": datetime.now(UTC).isoformat(), "at_s": boottime_s(), "kernel_kills": killed}
    write_attempt_file(launch, EXIT_FILE, end)
    return 0


def _end(torchrun: int, *_: object) -> None:
    """Kill torchrun. Not by Popen.kill, which may reap it: then its status would be lost to `_wait_for`."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(torchrun, signal.SIGKILL)


def command(launch: LaunchSpec) -> list[str]:
    """The command line of torchrun, or of the agent that runs a foreign program."""
    if launch.foreign is not None:
        return [sys.executable, "-m", "kgorch.worker.foreign.agent"]
    is_plain = launch.launcher == Launcher.TORCHRUN_CLI
    return [
        sys.executable,
        "-m",
        "torch.distributed.run" if is_plain else "kgorch.worker.elastic_agent",
        *_rendezvous(launch.node),
        f"--nproc-per-node={len(launch.ranks_here)}",
        "--max-restarts=0",
        f"--log-dir={launch.own_folder}/torchrun",
        "-m",
        "kgorch.worker.entry",
    ]


def _rendezvous(node: NodePlace | None) -> list[str]:
    """How torchrun finds the others. Static: the nodes are known, and one that is lost ends the attempt."""
    if node is None:
        return ["--standalone"]
    return [
        f"--nnodes={len(node.ranks)}",
        f"--node-rank={node.number}",
        "--rdzv-backend=static",
        f"--master-addr={node.address}",
        f"--master-port={node.port}",
    ]


def environment(launch: LaunchSpec, folder: Path, board: int) -> dict[str, str]:
    """Of torchrun and the ranks: the user's variables go before our defaults, and what kgorch needs goes before both."""
    ours = {
        LAUNCH_VARIABLE: str(folder / "launch.json"),
        BOARD_VARIABLE: f"/proc/{os.getpid()}/fd/{board}",
        # the order of NVML, which telemetry, the memory monitor and the GPU locks use; CUDA by itself puts the fastest first
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
    }
    defaults = {"PYTHONUNBUFFERED": "1"}
    if launch.launcher in (Launcher.TORCHRUN, Launcher.TORCHRUN_CLI):  # as torchrun itself would, with a warning
        defaults["OMP_NUM_THREADS"] = "1"
    if launch.keeper:  # else /tmp, which a new machine or a reboot empties, and where others may write
        compiled = Path(launch.keeper).parent / COMPILED_FOLDER
        defaults |= {name: str(compiled / kind) for name, kind in COMPILER_CACHES.items()}
    if launch.node and launch.node.interface:  # by itself gloo takes the address of the host's name, often 127.0.1.1
        defaults |= dict.fromkeys(INTERFACE_VARIABLES, launch.node.interface)
    if launch.deterministic != "off":
        defaults["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # read when CUDA starts
    return (
        defaults
        | dict(os.environ)
        | (_expandable(os.environ) if launch.settings.get("expandable_segments") else {})
        | ours
    )


def _expandable(environ: Mapping[str, str]) -> dict[str, str]:
    """The variable of PyTorch's allocator, with the user's own settings in it; read when CUDA starts."""
    name = next((name for name in ALLOCATOR_VARIABLES if environ.get(name)), ALLOCATOR_VARIABLES[-1])
    others = [item for item in environ.get(name, "").split(",") if item and not item.startswith("expandable_segments")]
    return {name: ",".join([*others, "expandable_segments:True"])}


class KeeperMonitor:
    """Starts a keeper where none lives, and another one when it ends, for as long as this process lives.

    The keeper is no part of the shim: the next attempt needs the snapshots, also when this shim was killed.
    """

    def __init__(self, launch: LaunchSpec) -> None:
        self._launch, self._folder, self._is_over = launch, Path(launch.keeper).parent, threading.Event()
        self._mine: subprocess.Popen[bytes] | None = None
        self._guard = threading.Lock()
        threading.Thread(target=self._keep, name="keeper", daemon=True).start()

    def release(self) -> int | None:
        """Stop the monitor. Returns the pid of the keeper that is our child, which must not be killed with the others.

        Waits until it listens: whoever ends it next must be able to reach it.
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
        failures, last_error = 0, ""
        while True:
            try:
                with transport.connect(self._folder / KEEPER_SOCKET) as connection:
                    failures, last_error = 0, ""
                    self._watch(connection)
            except OSError:
                with self._guard:
                    if self._is_over.is_set():
                        return
                    error = self._start()
                if error and error != last_error:  # once, not at each try
                    last_error = error
                    self._report(error)
                failures += 1  # a keeper that cannot start is not started in a tight loop
                self._is_over.wait(KEEPER_RESTARTS.after(failures))

    def _watch(self, connection: socket.socket) -> None:
        """Return when the keeper has ended. One that does not answer is killed: ranks would wait for it."""
        while True:
            transport.send(connection, Request("newest"))
            connection.settimeout(KEEPER_TIMEOUT_S)
            try:
                answer = connection.recv(65536)
            except TimeoutError:
                os.kill(transport.peer_credentials(connection)[0], signal.SIGKILL)
                raise
            if not answer:
                return
            self._is_over.wait(PING_S)

    def _start(self) -> str:
        """Start a keeper. Returns the error when none can be started, on a read-only disk for example; else "".

        Two cannot live side by side: the second one finds the lock taken and ends at once.
        """
        if self._mine and self._mine.poll() is None:
            return ""  # it is starting
        try:
            with open(self._folder / "keeper.log", "ab") as log:
                self._mine = subprocess.Popen(
                    [sys.executable, "-m", "kgorch.snapshots.keeper", str(self._folder)],
                    start_new_session=True,
                    cwd="/",
                    # without the variable by which all processes of the attempt are found and killed: it outlives them
                    env={name: value for name, value in os.environ.items() if name != LAUNCH_VARIABLE},
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                )
        except OSError as error:
            return str(error)
        return ""

    def _report(self, why: str) -> None:
        with contextlib.suppress(OSError), transport.connect(self._launch.socket) as supervisor:
            transport.send(supervisor, JournalEntry(self._launch.attempt, EventKind.KEEPER_NOT_STARTED, {"why": why}))


def kill_children(excluded: Callable[[], int | None], timeout_s: float = 20.0) -> None:
    """Send SIGKILL to every child but one, until there is none: the children of a killed process become ours.

    Args:
        excluded: returns the pid to leave alone, or None.
        timeout_s: seconds until this is given up, since a process may be stuck in the kernel.
    """
    until, keeper = time.monotonic() + timeout_s, excluded()
    while time.monotonic() < until:
        children = [pid for pid in _children() if pid != keeper]
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
    """Pids of our children, zombies among them."""
    me = os.getpid()
    children = []
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            try:
                parent = int(stat_fields(entry.name)[1])
            except OSError:
                continue
            if parent == me:
                children.append(int(entry.name))
    return children


def _wait_for(child: int) -> int:
    """The exit code of that child (negative: the signal); other children that end meanwhile are reaped."""
    while True:
        pid, status = os.waitpid(-1, 0)
        if pid == child:
            return os.waitstatus_to_exitcode(status)


def _in_child(shim: int) -> None:
    """Run between fork and exec of torchrun."""
    process_protection.restore_user_settings()
    _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != shim:
        os._exit(1)  # the shim died before the call, so no signal will come
    # an ignored signal stays ignored after exec, and ranks save on SIGTERM
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
