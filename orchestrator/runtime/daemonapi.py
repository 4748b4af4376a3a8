"""The daemon's socket, `$KGORCH_HOME/daemon.sock`: JSON lines, for the same user alone (0600, peer's uid).

{"ask": "ping" | "status" | "wake" | "stop"}  →  {"ok": true, …}
"""

from __future__ import annotations

import contextlib
import json
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

from orchestrator import wire
from orchestrator.runtime.listener import Server

SOCKET = "daemon.sock"
LINE_BYTES = 16 << 10
CLIENTS = 64

Answer = dict[str, Any]
Reply = Callable[[Answer], None]


class Api(Server):
    """Args: post: takes what is asked and a way to answer, from the server's thread; it must not block."""

    def __init__(self, home: Path, post: Callable[[str, Reply], None]) -> None:
        self._post = post
        super().__init__(home / SOCKET, self._take, line_bytes=LINE_BYTES, clients=CLIENTS)

    def _take(self, line: bytes, peer: socket.socket) -> None:
        document = json.loads(line)
        asked = document.get("ask") if isinstance(document, dict) else None
        if not isinstance(asked, str):
            raise ValueError("no question")
        self._post(asked, lambda answer: _send(peer, answer))


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
