"""The socket on which ranks report and the command line asks: lines become posts, and answers lines."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable
from pathlib import Path

from orchestrator import wire
from orchestrator.runtime.listener import Server
from orchestrator.wire import Message

Reply = Callable[[Message], None]


class Channel(Server):
    """Args: post: takes each message and a way to answer it, from the server's thread; it must not block."""

    def __init__(self, path: Path, post: Callable[[Message, Reply], None]) -> None:
        super().__init__(path, lambda line, peer: post(wire.decode(line), lambda answer: _send(peer, answer)))

    def tell_all(self, message: Message) -> None:
        """To every rank and asker that is connected; who comes later is told when it says hello."""
        for peer in self.peers():
            _send(peer, message)


def ask(path: Path, what: str, *, within_s: float = 0.0, timeout_s: float = 5.0) -> wire.Answer | None:
    """Ask a live supervisor; None when there is none. One that is busy for too long has heard all the same."""
    connected = False
    try:
        with wire.connect(path, timeout_s=timeout_s) as connection:
            connection.sendall(wire.encode(wire.Ask(what, within_s)))
            connected = True
            lines = wire.Lines()
            while data := connection.recv(65536):
                for line in lines.feed(data):
                    if isinstance(answer := wire.decode(line), wire.Answer):
                        return answer
    except (OSError, wire.WireError):
        pass
    return wire.Answer(False, "asked, not answered yet") if connected else None


def _send(peer: socket.socket, message: Message) -> None:
    with contextlib.suppress(OSError):  # gone; its reader finds out
        wire.send(peer, message)
