"""The standby: a process that has imported PyTorch, and forks the shims of attempts (worker/standby_server.py).

An attempt that is started from it begins with PyTorch imported, which otherwise takes two seconds of each launch: the next one
after a crash, the next rung of the memory ladder, the next stage. A supervisor starts one as soon as it knows its plan, so that
the import runs beside the rest of a start; a daemon keeps one for all its sessions.

A standby is never needed. Where none runs, or it was started under other conditions than the launch (its environment, its limits,
its namespaces), the shim is a new process. It ends when nobody holds its socket any more.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import resource
import select
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from kgorch.core.program_command import Launcher
from kgorch.protocol.launch_spec import LAUNCH_VARIABLE
from kgorch.system import process_title
from kgorch.system.process_identity import start_ticks
from kgorch.system.sockets.listener import raise_descriptor_limit

ANSWER_S = 120.0
"""Seconds to wait for the answer to a launch. PyTorch may still be imported, from a slow disk; a new process would wait as long."""

MOST_BYTES = 1 << 20
"""Of a request: the environment is in it."""

SOCKET_VARIABLE = "KGORCH_STANDBY"
"""Environment variable: the descriptor of a daemon's standby, in a process that the daemon has started."""

RANK_DEFAULTS = {"PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1"}
"""Variables of a training on torchrun, unless the user has set them. torchrun sets the second one itself, with a warning."""

LATE = frozenset({"CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "CUBLAS_WORKSPACE_CONFIG"})
LATE_PREFIXES = ("KGORCH_", "XDG_", "TORCHINDUCTOR_", "TRITON_")
"""Variables that nothing reads before the fork: PyTorch reads its own of these when CUDA starts or when it compiles."""


class StandbyUnavailable(Exception):
    """The standby does not start this launch; a new process can."""


def conditions(environ: Mapping[str, str]) -> list[str]:
    """What a forked process has from its standby, and must be the same as here: the environment that was read by imports, limits
    and namespaces."""
    variables = sorted(
        f"{name}={value}" for name, value in environ.items() if name not in LATE and not name.startswith(LATE_PREFIXES)
    )
    names = (name for name in dir(resource) if name.startswith("RLIMIT_"))
    limits = [f"{name}: {resource.getrlimit(getattr(resource, name))}" for name in names]
    spaces = [str(path.readlink()) for path in sorted(Path("/proc/self/ns").iterdir())]
    placement = [
        str(sorted(os.sched_getaffinity(0))),
        str(os.nice(0)),
        os.fsdecode(Path("/proc/self/cgroup").read_bytes()),
    ]
    return [
        *variables,
        *limits,
        *spaces,
        *placement,
        f"{os.getuid()}:{os.getgid()}",
        str(Path("/proc/self/root").readlink()),
    ]


class ForkedShim:
    """The shim that a standby has forked, with what its starter uses of subprocess.Popen. Its exit status is unknown: 0."""

    def __init__(self, pid: int) -> None:
        self.pid, self._ticks = pid, start_ticks(pid)

    def poll(self) -> int | None:
        """None while it runs."""
        return None if self._ticks is not None and start_ticks(self.pid) == self._ticks else 0

    def wait(self, timeout: float | None = None) -> int:
        """Raises: subprocess.TimeoutExpired."""
        until_s = None if timeout is None else time.monotonic() + timeout
        while self.poll() is None:
            if until_s is not None and time.monotonic() >= until_s:
                raise subprocess.TimeoutExpired("shim", timeout or 0.0)
            time.sleep(0.02)
        return 0


class Standby:
    """A standby's socket, and the process itself where it was started here.

    Args:
        connection: of a standby that runs already; None to start one.
        environ: of one that is started.
    """

    def __init__(self, connection: socket.socket | None = None, *, environ: Mapping[str, str] = os.environ) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._socket = connection or self._start(environ)

    def warm_up(self) -> None:
        """Have it import PyTorch, unless it has. Returns at once."""
        with contextlib.suppress(OSError):  # it has ended: `is_usable` tells
            self._socket.sendall(bytes(8))

    def launch(self, folder: Path, environ: Mapping[str, str], descriptors: Sequence[int]) -> ForkedShim:
        """Have the shim of the attempt in `folder` forked.

        Args:
            descriptors: stay open in it; the first one takes its output.
        Raises: StandbyUnavailable; nothing was started then.
        """
        request = {
            "folder": str(folder),
            "environ": dict(environ),
            "conditions": conditions({**RANK_DEFAULTS, **environ}),
        }
        content = json.dumps(request).encode()
        if len(content) > MOST_BYTES:
            raise StandbyUnavailable("the environment is too large")
        try:
            self._socket.settimeout(ANSWER_S)
            socket.send_fds(self._socket, [len(content).to_bytes(8, "big")], list(descriptors))
            self._socket.sendall(content)
            answer = json.loads(self._receive_line())
        except (OSError, ValueError) as error:
            self.close()  # a late answer would be taken for that of the next launch; it forks nothing for who has closed
            raise StandbyUnavailable(f"the standby does not answer: {error}") from None
        if not isinstance(answer, dict) or not isinstance(answer.get("pid"), int):
            raise StandbyUnavailable(str(answer.get("why") if isinstance(answer, dict) else answer))
        return ForkedShim(answer["pid"])

    def connect_another(self) -> socket.socket:
        """A further connection, for another process that launches. Raises: OSError."""
        ours, theirs = socket.socketpair()
        with theirs:
            socket.send_fds(self._socket, [bytes(8)], [theirs.fileno()])
        return ours

    @property
    def is_usable(self) -> bool:
        """It has not ended."""
        if self._socket.fileno() < 0:
            return False
        with contextlib.suppress(OSError):
            return not (select.select([self._socket], [], [], 0)[0] and not self._socket.recv(1, socket.MSG_PEEK))
        return False

    def close(self) -> None:
        """It ends, where it was started here. Shims that it has forked go on."""
        self._socket.close()
        if self._process is not None:
            self._process.terminate()
            self._process.wait()

    def _receive_line(self) -> bytes:
        line = b""
        while not line.endswith(b"\n"):
            if not (part := self._socket.recv(4096)):
                raise ConnectionError("it has ended")
            line += part
        return line

    def _start(self, environ: Mapping[str, str]) -> socket.socket:
        """Raises: OSError."""
        raise_descriptor_limit()  # as a supervisor does later: the limit is one of the conditions
        ours, theirs = socket.socketpair()
        variables = {name: value for name, value in environ.items() if name != LAUNCH_VARIABLE}
        with theirs:
            self._process = subprocess.Popen(
                # the last word makes room for the longer command line of a shim
                [sys.executable, "-m", "kgorch.worker.standby_server", str(theirs.fileno()), "-" * 512],
                pass_fds=(theirs.fileno(),),
                start_new_session=True,  # a Ctrl-C in the terminal is for the supervisor
                cwd="/",
                env=RANK_DEFAULTS | variables | process_title.room(),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
        return ours


_shared: Standby | None = None
"""That of this process: what it launches, it launches one after another."""

_is_wanted = False


def prepare(launchers: Iterable[str] = (Launcher.TORCHRUN,)) -> None:
    """Start a standby for the launches of this process, or take its daemon's. Returns at once.

    May be called before the plan is read, for its import of PyTorch takes longest of all, and again with what the plan says.

    Args:
        launchers: of the stages to come; where none is torchrun, a standby is ended.
    """
    global _is_wanted
    was_wanted, _is_wanted = _is_wanted, Launcher.TORCHRUN in launchers
    if _is_wanted and not was_wanted:
        atexit.register(close)
        renew()
    elif not _is_wanted:
        close()


def renew() -> None:
    """Start another standby where the one that was prepared has ended."""
    global _shared
    if _is_wanted and not current():
        close()
        with contextlib.suppress(OSError):  # without one, launches take longer
            descriptor = os.environ.pop(SOCKET_VARIABLE, None)
            _shared = Standby(socket.socket(fileno=int(descriptor)) if descriptor else None)
            _shared.warm_up()


def current() -> Standby | None:
    """The standby of this process, if it can be used."""
    return _shared if _shared and _shared.is_usable else None


def close() -> None:
    """End the standby."""
    global _shared
    if _shared:
        _shared.close()
        _shared = None
