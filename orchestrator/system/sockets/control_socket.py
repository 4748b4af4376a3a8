"""The supervisor's control socket: ranks report there, and commands ask. Lines become jobs of a loop, and answers lines."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

from kgorch.errors import KgorchError
from kgorch.protocol import codec, transport
from kgorch.protocol.codec import LineBuffer, ProtocolError
from kgorch.protocol.messages import Hello, Message, Request, Response
from kgorch.protocol.transport import WrongOwner
from kgorch.system.sockets.line_server import MAX_CLIENTS, LineServer, Peer

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
        self.peers.broadcast(codec.encode(message))

    def _on_line(self, line: bytes, peer: Peer, complete: Callable[[], None]) -> None:
        message = codec.decode(line)
        # ranks say hello, commands do not
        peer.is_attached = peer.is_attached or isinstance(message, Hello)

        def job() -> None:
            try:
                self._on_message(message, lambda answer: self.peers.send(peer, codec.encode(answer)))
            finally:
                complete()

        self._post(job)


def ask(path: Path, what: str, *, within_s: float = 0.0, timeout_s: float = 5.0) -> Response | None:
    """Ask the live supervisor; None when there is none. One that does not answer in time has got the request all the same.

    Raises: KgorchError when another user's process listens there.
    """
    is_sent, until_s = False, time.monotonic() + timeout_s
    try:
        with transport.connect(path, timeout_s=timeout_s) as connection:
            transport.send(connection, Request(what, within_s))
            is_sent = True
            lines = LineBuffer()
            while (left_s := until_s - time.monotonic()) > 0:
                for message in transport.receive_messages(connection, lines, patience_s=left_s):
                    if isinstance(message, Response):
                        return message
    except WrongOwner as error:
        raise wrong_owner_error(error) from None
    except (OSError, ProtocolError):
        pass
    return Response(False, "the request was sent and is not answered yet") if is_sent else None


def wrong_owner_error(error: WrongOwner) -> KgorchError:
    """What a person is told when another user's process listens on a socket of ours."""
    return KgorchError(
        f"the socket {error.filename} belongs to another user",
        f"expected: a process of uid {os.geteuid()}; found: {error.strerror}",
        next_step=f"see who may write to {Path(error.filename).parent}, and remove the socket",
    )
