"""The daemon's socket, `$KGORCH_HOME/daemon.sock`: JSON lines, for the same user alone (0600, peer's uid).

{"ask": "ping" | "status" | "wake" | "stop"}  →  {"ok": true, …}
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from orchestrator.errors import KgorchError
from orchestrator.protocol import transport
from orchestrator.protocol.codec import LineBuffer, ProtocolError
from orchestrator.protocol.transport import WrongOwner
from orchestrator.system.sockets.control_socket import Job, run_inline, wrong_owner_error
from orchestrator.system.sockets.line_server import LineServer, Peer

SOCKET = "daemon.sock"
LINE_BYTES = 16 << 10

Answer = dict[str, Any]
Reply = Callable[[Answer], None]


class Api(LineServer):
    """Args:
    hear: takes what is asked and a way to answer, which never waits for who asked.
    post: has a job done, by the loop that is to hear; the default is the server's own thread.
    """

    def __init__(
        self, home: Path, hear: Callable[[str, Reply], None], *, post: Callable[[Job], None] = run_inline
    ) -> None:
        self._hear_question, self._post = hear, post
        super().__init__(home / SOCKET, self._take, line_bytes=LINE_BYTES)

    def _take(self, line: bytes, peer: Peer, done: Callable[[], None]) -> None:
        document = json.loads(line)
        asked = document.get("ask") if isinstance(document, dict) else None
        if not isinstance(asked, str):
            raise ValueError("no question")

        def job() -> None:
            try:
                self._hear_question(asked, lambda answer: self.peers.send(peer, json.dumps(answer).encode() + b"\n"))
            finally:
                done()

        self._post(job)


def ask(home: Path, what: str, *, timeout_s: float = 5.0) -> Answer | None:
    """The daemon's answer; None where none lives, or it does not answer in time.

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
                if found := lines.feed(data):
                    answer = json.loads(found[0])
                    return answer if isinstance(answer, dict) else None
    except WrongOwner as error:
        raise wrong_owner_error(error) from None
    except (OSError, ValueError, RecursionError, ProtocolError):
        pass
    return None


def wake(home: Path) -> bool:
    """Have the daemon look at the queue now; False where none of ours lives. What is queued is found anyway, only later."""
    try:
        return ask(home, "wake") is not None
    except KgorchError:
        return False
