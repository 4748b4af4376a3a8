"""The socket on which ranks report and the command line asks: one thread that turns lines into posts and back.

Only the owner of the socket (mode 0600, peer's uid compared) is heard. What cannot be read ends that connection alone.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
import threading
from collections.abc import Callable
from pathlib import Path

from orchestrator import wire
from orchestrator.runtime.listener import LOOK_S, Listener
from orchestrator.wire import Message

Reply = Callable[[Message], None]


class Channel:
    """Args: post: takes each message and a way to answer it, from this thread; it must not block."""

    def __init__(self, path: Path, post: Callable[[Message, Reply], None]) -> None:
        self._path, self._post = path, post
        self._selector = selectors.DefaultSelector()
        self._peers: dict[socket.socket, wire.Lines] = {}
        self._guard = threading.Lock()
        self._server = Listener(path, self._selector)  # a dead supervisor's may lie there; the run's lock is ours
        self._waker, self._wakes = socket.socketpair()
        self._selector.register(self._wakes, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run, name="channel", daemon=True)
        self._thread.start()

    def tell_all(self, message: Message) -> None:
        """To every rank and asker that is connected; who comes later is told when it says hello."""
        with self._guard:
            peers = list(self._peers)
        for peer in peers:
            self._send(peer, message)

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
                else:
                    assert isinstance(key.fileobj, socket.socket)
                    self._read(key.fileobj)

    def _accept(self) -> None:
        if peer := self._server.accept():
            with self._guard:
                self._peers[peer] = wire.Lines()
            self._selector.register(peer, selectors.EVENT_READ)

    def _read(self, peer: socket.socket) -> None:
        try:
            data = peer.recv(65536)
            if not data:
                raise ConnectionError("closed")
            for line in self._peers[peer].feed(data):
                self._post(wire.decode(line), lambda answer, to=peer: self._send(to, answer))  # type: ignore[misc]
        except (OSError, wire.WireError):
            self._selector.unregister(peer)
            with self._guard:
                del self._peers[peer]
            peer.close()

    def _send(self, peer: socket.socket, message: Message) -> None:
        with contextlib.suppress(OSError):  # its reader finds out
            wire.send(peer, message)


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
