"""The supervisor's control socket: ranks report there, and commands ask. Lines become jobs of a loop, and answers lines."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

from orchestrator import wire
from orchestrator.errors import KgorchError
from orchestrator.system.sockets.line_server import MAX_CLIENTS, LineServer, Peer
from orchestrator.wire import Message

Reply = Callable[[Message], None]
Job = Callable[[], None]


def run_inline(job: Job) -> None:
    """Run a job on the thread of the caller."""
    job()


class ControlSocket(LineServer):
    """Args:
    on_message: takes each message and a function that answers it, which never waits for the peer.
    post: has a job run by the loop that `on_message` belongs to. The default is the server's own thread: then
        `on_message` must not block.
    """

    def __init__(
        self, path: Path, on_message: Callable[[Message, Reply], None], *, post: Callable[[Job], None] = run_inline
    ) -> None:
        self._on_message, self._post = on_message, post
        super().__init__(path, self._on_line)

    def allow_ranks(self, ranks: int) -> None:
        """Allow that many connections besides those of commands."""
        self.peers.clients = MAX_CLIENTS + ranks

    def broadcast(self, message: Message) -> None:
        """Send to every connected rank and command; a peer that connects later gets the state with its hello."""
        self.peers.broadcast(wire.encode(message))

    def _on_line(self, line: bytes, peer: Peer, complete: Callable[[], None]) -> None:
        message = wire.decode(line)
        peer.is_attached = peer.is_attached or isinstance(message, wire.Hello)

        def job() -> None:
            try:
                self._on_message(message, lambda answer: self.peers.send(peer, wire.encode(answer)))
            finally:
                complete()

        self._post(job)


def ask(path: Path, what: str, *, within_s: float = 0.0, timeout_s: float = 5.0) -> wire.Answer | None:
    """Ask the live supervisor; None when there is none. One that does not answer in time has got the request all the same.

    Raises: KgorchError when another user's process listens there.
    """
    is_sent, until_s = False, time.monotonic() + timeout_s
    try:
        with wire.connect(path, timeout_s=timeout_s) as connection:
            wire.send(connection, wire.Ask(what, within_s))
            is_sent = True
            lines = wire.Lines()
            while (left_s := until_s - time.monotonic()) > 0:
                for message in wire.messages(connection, lines, patience_s=left_s):
                    if isinstance(message, wire.Answer):
                        return message
    except wire.WrongOwner as error:
        raise wrong_owner_error(error) from None
    except (OSError, wire.WireError):
        pass
    return wire.Answer(False, "the request was sent and is not answered yet") if is_sent else None


def wrong_owner_error(error: wire.WrongOwner) -> KgorchError:
    """What a person is told when another user's process listens on a socket of ours."""
    return KgorchError(
        f"the socket {error.filename} belongs to another user",
        f"expected: a process of uid {os.geteuid()}; found: {error.strerror}",
        next_step=f"see who may write to {Path(error.filename).parent}, and remove the socket",
    )
