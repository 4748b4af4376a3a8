"""The command line in processes that are forked from one which has imported it: its imports are half of what most tests compute.

A forked command is a process of its own with the command line, environment, folder, descriptors and exit status that a new one
would have. `ForkedCommand` is subprocess.Popen for it. What Python reads only when it starts (its own variables, the locale) and
what a process inherits (limits, namespaces, a cgroup) must be as it was when the server began; else a command is a new process.
Commands on terminals, of shells, and of examples always are.

    python -m forked_cli DESCRIPTOR     the server: a command is forked for each request on that socket

forked_ranks.py has a server of another kind.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import functools
import gc
import importlib
import inspect
import json
import os
import pkgutil
import random
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from kgorch.launch.standby import conditions
from kgorch.system import process_title
from kgorch.system.sockets.listener import raise_descriptor_limit

PREFIXES = ("PYTHON", "LC_", "LD_", "MALLOC")
NAMES = ("LANG", "LANGUAGE", "TZ")
"""Variables that are read when a process starts."""

NOTHING: Mapping[str, str] = MappingProxyType({})

HIGH = 900
"""Descriptors from here on are free in the server."""

PACKAGES = ("admission", "cli", "db", "launch", "limits", "plan", "report", "supervisor")


class ForkedCommand(subprocess.Popen[str]):
    """A command that the server of this process has forked."""

    _status: int
    """Descriptor from which the server's os.waitpid() of it is read."""

    @staticmethod
    def _server() -> Server:
        return server()

    def _execute_child(self, *values: Any) -> None:
        """In the place of fork and exec."""
        given = dict(zip(list(inspect.signature(subprocess.Popen._execute_child).parameters)[1:], values, strict=True))
        streams = [given["p2cread"], given["c2pwrite"], given["errwrite"]]
        streams = [number if given_one == -1 else given_one for number, given_one in enumerate(streams)]
        self._status, status = os.pipe()
        try:
            request = {name: given[name] for name in ("args", "env")}
            request |= {"umask": _umask(), "cwd": os.fspath(given["cwd"]), "targets": [0, 1, 2, *given["pass_fds"]]}
            self.pid = self._server().fork(request, [status, *streams, *given["pass_fds"]])
            self._child_created = True
        finally:
            os.close(status)
            names = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
            self._close_pipe_fds(*(given[name] for name in names))

    def _try_wait(self, wait_flags: int) -> tuple[int, int]:
        if wait_flags == os.WNOHANG and not select.select([self._status], [], [], 0)[0]:
            return 0, 0
        told = os.read(self._status, 4)
        os.close(self._status)
        return self.pid, int.from_bytes(told, "big") if told else signal.SIGKILL  # the server is gone

    def _internal_poll(self, *_: Any, **__: Any) -> int | None:
        if self.returncode is None and self._waitpid_lock.acquire(False):
            try:
                if self.returncode is None and self._try_wait_once():
                    return self.returncode
            finally:
                self._waitpid_lock.release()
        return self.returncode

    def _try_wait_once(self) -> bool:
        pid, status = self._try_wait(os.WNOHANG)
        if pid:
            self._handle_exitstatus(status)
        return bool(pid)


class Server:
    """The server of this process.

    Args:
        module: its program.
        environ: variables that it is started with besides.
        prefixes: of variables that it reads when it starts.
    """

    def __init__(
        self, module: str = "forked_cli", environ: Mapping[str, str] = NOTHING, prefixes: tuple[str, ...] = PREFIXES
    ) -> None:
        raise_descriptor_limit()  # as the standby of these tests does later
        self._started_in, self._prefixes = conditions({}), prefixes
        self._environ = at_start({**os.environ, **environ}, prefixes)
        self._socket, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                # the last word makes room for longer command lines
                [sys.executable, "-m", module, str(theirs.fileno()), "-" * 4096],
                pass_fds=(theirs.fileno(),),
                # of no state folder: a test that ends all processes of its own leaves it alone
                env={**os.environ, **environ, "KGORCH_HOME": "", "PYTHONPATH": _with_tests(os.environ)}
                | process_title.room(),
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        atexit.register(self.close)

    def can_fork(self, environ: Mapping[str, str]) -> bool:
        is_same = at_start(environ, self._prefixes) == self._environ and conditions({}) == self._started_in
        return is_same and sum(len(f"{item}{environ[item]}") + 2 for item in environ) < process_title.ROOM_BYTES

    def fork(self, request: Mapping[str, Any], descriptors: list[int]) -> int:
        """The process's number."""
        content = json.dumps(request).encode()
        socket.send_fds(self._socket, [len(content).to_bytes(4, "big")], descriptors)
        self._socket.sendall(content)
        return int.from_bytes(_received(self._socket, 4), "big")

    def close(self) -> None:
        self._socket.close()
        self._process.kill()
        self._process.wait()


@functools.cache
def server() -> Server:
    return Server()


def popen(command: list[str], *, env: Mapping[str, str], **options: Any) -> subprocess.Popen[str]:
    """subprocess.Popen for a command of kgorch, forked where that is the same."""
    kind = ForkedCommand if server().can_fork(env) else subprocess.Popen
    return kind(command, env=env, text=True, **options)


def at_start(environ: Mapping[str, str], prefixes: tuple[str, ...]) -> dict[str, str]:
    return {name: value for name, value in environ.items() if name.startswith(prefixes) or name in NAMES}


def _umask() -> int:
    found = os.umask(0o077)
    os.umask(found)
    return found


def _with_tests(environ: Mapping[str, str]) -> str:
    return os.pathsep.join(filter(None, [str(Path(__file__).parent), environ.get("PYTHONPATH", "")]))


def _received(connection: socket.socket, count: int) -> bytes:
    content = b""
    while len(content) < count:
        part = connection.recv(count - len(content))
        if not part:
            raise ConnectionError("the other side has ended")
        content += part
    return content


def serve(connection: socket.socket) -> list[str]:
    """Fork for each request. Returns in a forked process, its command."""
    children: dict[int, tuple[int, int]] = {}  # by pidfd: its number, and where its status is told
    poll = select.poll()
    poll.register(connection, select.POLLIN)
    while True:
        for ready, _ in poll.poll():
            if ready != connection.fileno():
                pid, status = children.pop(ready)
                poll.unregister(ready)
                os.close(ready)
                _, code = os.waitpid(pid, 0)
                with contextlib.suppress(BrokenPipeError):
                    os.write(status, code.to_bytes(4, "big"))
                os.close(status)
                continue
            head, descriptors, _, _ = socket.recv_fds(connection, 4, 64)
            if not head:
                sys.exit(0)
            request = json.loads(_received(connection, int.from_bytes(head, "big")))
            pid = os.fork()
            if pid == 0:
                return become(request, descriptors[1:], connection)
            for descriptor in descriptors[1:]:
                os.close(descriptor)
            pidfd = os.pidfd_open(pid)
            children[pidfd] = pid, descriptors[0]
            poll.register(pidfd, select.POLLIN)


def become(request: dict[str, Any], descriptors: list[int], connection: socket.socket) -> list[str]:
    """In the child: be what the command would start, and tell the number by which it is found."""
    os.setsid()
    process_title.replace(request["args"], request["env"])
    connection.sendall(os.getpid().to_bytes(4, "big"))
    connection.detach()  # its number will be another's
    moved = [fcntl.fcntl(descriptor, fcntl.F_DUPFD, HIGH) for descriptor in descriptors]
    os.closerange(3, HIGH)
    for target, descriptor in zip(request["targets"], moved, strict=True):
        os.dup2(descriptor, target)
    os.closerange(HIGH, HIGH + len(moved))
    os.chdir(request["cwd"])
    os.umask(request["umask"])
    sys.path[0] = request["cwd"]  # as `python -m` does
    random.seed()
    words: list[str] = request["args"]
    return words[3:]


def main() -> None:
    for name in PACKAGES:
        package = importlib.import_module(f"kgorch.{name}")
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            if not module.name.endswith("__main__") and ".migrations." not in module.name:
                importlib.import_module(module.name)
    assert "torch" not in sys.modules, "a command does not import it"
    gc.collect()
    gc.freeze()
    words = serve(socket.socket(fileno=int(sys.argv[1])))
    sys.argv = [sys.argv[0], *words]
    sys.path[:] = [path for path in sys.path if path != str(Path(__file__).parent)]
    importlib.import_module("kgorch.cli").main()


if __name__ == "__main__":
    main()
