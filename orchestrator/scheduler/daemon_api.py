"""The daemon's socket, `$KGORCH_HOME/daemon.sock`: lines of JSON, for the same user only (mode 0600, and the uid of the peer).

{"ask": "ping" | "status" | "wake" | "stop"}  →  {"ok": true, …}
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kgorch.errors import KgorchError
from kgorch.protocol import transport
from kgorch.protocol.codec import LineBuffer, ProtocolError
from kgorch.protocol.transport import WrongOwner
from kgorch.system.sockets.control_socket import Job, run_inline, wrong_owner_error
from kgorch.system.sockets.line_server import LineServer, Peer

SOCKET = "daemon.sock"
LINE_BYTES = 16 << 10
"""Longest request. A peer that sends a longer line is dropped."""

Answer = dict[str, Any]
Reply = Callable[[Answer], None]


class Api(LineServer):
    """The server of the socket, on a thread of its own.

    Args:
        answer: is called with each question and with a function that sends the reply and never waits for the peer.
        post: passes a job to the loop that is to answer; by default it is run on the server's thread.
    """

    def __init__(
        self, home: Path, answer: Callable[[str, Reply], None], *, post: Callable[[Job], None] = run_inline
    ) -> None:
        self._answer, self._post = answer, post
        super().__init__(home / SOCKET, self._on_line, line_bytes=LINE_BYTES)

    def _on_line(self, line: bytes, peer: Peer, done: Callable[[], None]) -> None:
        document = json.loads(line)
        question = document.get("ask") if isinstance(document, dict) else None
        if not isinstance(question, str):
            raise ValueError("no question")  # drops this peer

        def job() -> None:
            try:
                self._answer(question, lambda answer: self.peers.send(peer, json.dumps(answer).encode() + b"\n"))
            finally:
                done()

        self._post(job)


def ask(home: Path, what: str, *, timeout_s: float = 5.0) -> Answer | None:
    """The daemon's answer; None where no daemon runs, or where it does not answer in time.

    Raises: KgorchError when another user's process listens there.
    """
    until_s, lines = time.monotonic() + timeout_s, LineBuffer()
    try:
        with transport.connect(home / SOCKET, timeout_s=timeout_s) as connection:
            connection.sendall(json.dumps({"ask": what}).encode() + b"\n")
            while (left_s := until_s - time.monotonic()) > 0:
                connection.settimeout(left_s)
                if not (data := connection.recv(65536)):
                    return None
                if complete := lines.feed(data):
                    answer = json.loads(complete[0])
                    return answer if isinstance(answer, dict) else None
    except WrongOwner as error:
        raise wrong_owner_error(error) from None
    except (OSError, ValueError, RecursionError, ProtocolError):
        pass
    return None


def wake(home: Path) -> bool:
    """Have the daemon look at the queue now; False where this user has none. Without this it finds a new row only a bit later."""
    try:
        return ask(home, "wake") is not None
    except KgorchError:
        return False
