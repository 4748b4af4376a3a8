"""The standby's process: `python -m kgorch.worker.standby_server DESCRIPTOR` (see launch/standby.py).

At the first word of a client it imports PyTorch and the SDK, once; then it forks a shim for each request. It trains nothing, starts
no thread and does not touch CUDA, so that its children can do all of it. It ends when the last connection is closed.

A request is eight bytes with the length of what follows, and open files beside them; then JSON: the attempt's `folder`, the
`environ` of its shim, and the `conditions` under which it may be forked. The answer is a line of JSON with the `pid`, or with
`why` not. A length of 0 with an open file hands over another connection; without one it asks for the import alone.
"""

from __future__ import annotations

import functools
import gc
import importlib
import json
import os
import select
import selectors
import signal
import socket
import sys
import traceback
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

from kgorch.launch import shim
from kgorch.launch.standby import MOST_BYTES, conditions
from kgorch.system import process_title

LOOK_S = 1.0
PATIENCE_S = 10.0


class StandbyServer:
    """Serves the connections of one standby."""

    def __init__(self, connection: socket.socket) -> None:
        self._conditions = conditions(os.environ)
        self._selector = selectors.DefaultSelector()
        self._selector.register(connection, selectors.EVENT_READ)

    def serve(self) -> None:
        """Until the last connection is closed."""
        while self._selector.get_map():
            for key, _ in self._selector.select(LOOK_S):
                connection: Any = key.fileobj
                try:
                    self._answer(connection)
                except (OSError, ValueError):  # closed, or none of ours
                    self._selector.unregister(connection)
                    connection.close()
            with suppress(ChildProcessError):
                os.waitpid(-1, os.WNOHANG)

    def _answer(self, connection: socket.socket) -> None:
        """Raises: OSError or ValueError to drop the connection."""
        connection.settimeout(PATIENCE_S)
        head, descriptors, _, _ = socket.recv_fds(connection, 8, 64)
        try:
            size = int.from_bytes(head, "big") if len(head) == 8 else -1
            if size == 0 and descriptors:
                self._selector.register(socket.socket(fileno=os.dup(descriptors[0])), selectors.EVENT_READ)
                return
            if len(head) == 8:
                _import_agent()
            if size == 0:
                return
            if not 0 < size <= MOST_BYTES or not descriptors:
                raise ValueError("no request")
            request = json.loads(_read(connection, size))
            if _has_ended(connection):  # it has waited too long, and started another process
                raise ConnectionError("closed")
            answer = self._fork(request, descriptors)
            connection.sendall(json.dumps(answer).encode() + b"\n")
        finally:
            for descriptor in descriptors:
                os.close(descriptor)

    def _fork(self, request: dict[str, Any], descriptors: list[int]) -> dict[str, Any]:
        if request["conditions"] != self._conditions:
            return {"why": "the standby was started under other conditions"}
        if len(list(Path("/proc/self/task").iterdir())) > 1:
            return {"why": "the standby has threads, which a fork would lose"}
        if not process_title.fits(request["environ"]):
            return {"why": "the environment is too large to be shown in /proc"}
        pid = os.fork()
        if pid == 0:
            self._become_shim(Path(request["folder"]), request["environ"], descriptors[0])
        return {"pid": pid}

    def _become_shim(self, folder: Path, environ: dict[str, str], log: int) -> NoReturn:
        """In the child: what `python -m kgorch.launch.shim` would be in a new process."""
        status = 1
        try:
            os.setsid()
            for stream in (1, 2):
                os.dup2(log, stream)
            os.close(log)
            gc.enable()
            for key in list(self._selector.get_map().values()):
                connection: Any = key.fileobj
                connection.close()
            self._selector.close()
            sys.argv = ["kgorch.launch.shim", str(folder)]
            process_title.replace([sys.executable, "-m", *sys.argv], environ)
            status = shim.main(folder, _import_agent().fork)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)


def _has_ended(connection: socket.socket) -> bool:
    """The client has closed it."""
    look = select.poll()
    look.register(connection, select.POLLRDHUP)
    return bool(look.poll(0))


def _read(connection: socket.socket, size: int) -> bytes:
    content = b""
    while len(content) < size:
        if not (part := connection.recv(size - len(content))):
            raise ConnectionError("closed")
        content += part
    return content


@functools.cache
def _import_agent() -> ModuleType:
    """With it comes PyTorch."""
    agent = importlib.import_module("kgorch.worker.elastic_agent")
    agent.share_memory()
    return agent


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    connection = socket.socket(fileno=int(sys.argv[1]))
    os.environ.pop(process_title.ROOM_VARIABLE, None)
    gc.disable()  # nothing here makes garbage, and a collection would copy what the children share
    StandbyServer(connection).serve()


if __name__ == "__main__":
    main()
