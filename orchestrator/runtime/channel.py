"""The socket on which ranks report and the command line asks: lines become posts, and answers lines."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

from orchestrator.errors import KgorchError
from orchestrator.protocol import codec, sockets
from orchestrator.protocol.codec import LineBuffer, ProtocolError
from orchestrator.protocol.messages import Hello, Message, Request, Response
from orchestrator.protocol.sockets import WrongOwner
from orchestrator.runtime.listener import CLIENTS, Peer, Server

Reply = Callable[[Message], None]
Job = Callable[[], None]


def at_once(job: Job) -> None:
    job()


class Channel(Server):
    """Args:
    hear: takes each message and a way to answer it, which never waits for who asked.
    post: has a job done, by the loop that is to hear. The default is the server's own thread: then `hear` must not block.
    """

    def __init__(
        self, path: Path, hear: Callable[[Message, Reply], None], *, post: Callable[[Job], None] = at_once
    ) -> None:
        self._hear_message, self._post = hear, post
        super().__init__(path, self._take)

    def expect(self, ranks: int) -> None:
        """So many may be connected besides those who ask."""
        self.peers.clients = CLIENTS + ranks

    def tell_all(self, message: Message) -> None:
        """To every rank and asker that is connected; who comes later is told when it says hello."""
        self.peers.send_all(codec.encode(message))

    def _take(self, line: bytes, peer: Peer, done: Callable[[], None]) -> None:
        message = codec.decode(line)
        peer.is_attached = peer.is_attached or isinstance(message, Hello)

        def job() -> None:
            try:
                self._hear_message(message, lambda answer: self.peers.send(peer, codec.encode(answer)))
            finally:
                done()

        self._post(job)


def ask(path: Path, what: str, *, within_s: float = 0.0, timeout_s: float = 5.0) -> Response | None:
    """Ask a live supervisor; None when there is none. One that is busy for too long has heard all the same.

    Raises: KgorchError when another user's process listens there.
    """
    connected, until_s = False, time.monotonic() + timeout_s
    try:
        with sockets.connect(path, timeout_s=timeout_s) as connection:
            sockets.send(connection, Request(what, within_s))
            connected = True
            lines = LineBuffer()
            while (left_s := until_s - time.monotonic()) > 0:
                for message in sockets.receive_messages(connection, lines, patience_s=left_s):
                    if isinstance(message, Response):
                        return message
    except WrongOwner as error:
        raise not_ours(error) from None
    except (OSError, ProtocolError):
        pass
    return Response(False, "asked, not answered yet") if connected else None


def not_ours(error: WrongOwner) -> KgorchError:
    return KgorchError(
        f"the socket {error.filename} belongs to another user",
        f"expected: a process of uid {os.geteuid()}; found: {error.strerror}",
        next_step=f"see who may write to {Path(error.filename).parent}, and remove the socket",
    )
