"""The daemon's socket, `$KGORCH_HOME/daemon.sock`: JSON lines, for the same user alone (0600, peer's uid).

{"ask": "ping" | "status" | "wake" | "stop"}  →  {"ok": true, …}. What cannot be read ends that line alone.
"""

from __future__ import annotations

import contextlib
import json
import selectors
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from orchestrator import wire
from orchestrator.runtime.listener import LOOK_S, Listener

SOCKET = "daemon.sock"
LINE_BYTES = 16 << 10
CLIENTS = 64
"""So many may be connected; for another one the one that was silent for longest goes."""

Answer = dict[str, Any]
Reply = Callable[[Answer], None]


class Api:
    """A thread that turns lines into posts and back.

    Args: post: takes what is asked and a way to answer, from this thread; it must not block.
    """

    def __init__(self, home: Path, post: Callable[[str, Reply], None]) -> None:
        self._path, self._post = home / SOCKET, post
        self._selector = selectors.DefaultSelector()
        self._peers: dict[socket.socket, tuple[float, bytes]] = {}  # when it was heard last, its unfinished line
        self._server = Listener(self._path, self._selector)
        self._waker, self._wakes = socket.socketpair()
        self._selector.register(self._wakes, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run, name="api", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._waker.send(b"!")
        self._thread.join(timeout=2.0)
        with contextlib.suppress(OSError):  # read-only by now; who listens there next takes it away
            self._path.unlink(missing_ok=True)

    def _run(self) -> None:
        while True:
            self._server.look()
            for key, _ in self._selector.select(LOOK_S):
                if key.fileobj is self._wakes:
                    for open_socket in (*self._peers, self._server.socket):
                        open_socket.close()
                    return
                if key.fileobj is self._server.socket:
                    self._accept()
                elif isinstance(key.fileobj, socket.socket):
                    self._read(key.fileobj)

    def _accept(self) -> None:
        peer = self._server.accept()
        if peer is None:
            return
        if len(self._peers) >= CLIENTS:
            self._drop(min(self._peers, key=lambda one: self._peers[one][0]))  # who was silent for longest
        self._peers[peer] = time.monotonic(), b""
        self._selector.register(peer, selectors.EVENT_READ)

    def _read(self, peer: socket.socket) -> None:
        try:
            data = peer.recv(65536)
            *lines, rest = (self._peers[peer][1] + data).split(b"\n")
            if not data or len(rest) > LINE_BYTES:
                raise ConnectionError("closed, or a line without an end")
            self._peers[peer] = time.monotonic(), rest
            for line in lines:
                self._hear(peer, line)
        except (OSError, ValueError, RecursionError):
            self._drop(peer)

    def _hear(self, peer: socket.socket, line: bytes) -> None:
        """Raises: ValueError for what is no question."""
        if len(line) > LINE_BYTES:
            raise ValueError("a line too long")
        document = json.loads(line)
        asked = document.get("ask") if isinstance(document, dict) else None
        if not isinstance(asked, str):
            raise ValueError("no question")
        self._post(asked, lambda answer: _send(peer, answer))

    def _drop(self, peer: socket.socket) -> None:
        with contextlib.suppress(KeyError):
            self._selector.unregister(peer)
            del self._peers[peer]
        peer.close()


def ask(home: Path, what: str, *, timeout_s: float = 5.0) -> Answer | None:
    """The daemon's answer; None where none lives, or it does not answer in time."""
    try:
        with wire.connect(home / SOCKET, timeout_s=timeout_s) as connection:
            connection.sendall(json.dumps({"ask": what}).encode() + b"\n")
            data = b""
            while not data.endswith(b"\n") and (more := connection.recv(65536)):
                data += more
            answer = json.loads(data)
    except (OSError, ValueError):
        return None
    return answer if isinstance(answer, dict) else None


def _send(peer: socket.socket, answer: Answer) -> None:
    with contextlib.suppress(OSError):  # gone; its reader finds out
        peer.sendall(json.dumps(answer).encode() + b"\n")
