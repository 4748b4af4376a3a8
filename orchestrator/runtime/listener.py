"""A socket file under which a process is found, for as long as the process lives.

Whoever tidies up a folder may take the file away. What is connected already goes on then, and nobody new gets through: ranks
of the next attempt would find no keeper while the old one holds its lock. So the file is looked at, and made again.

Only the owner of the socket (mode 0600, peer's uid compared) is heard.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
import sys
import threading
from collections.abc import Callable
from pathlib import Path

from orchestrator import wire

LOOK_S = 2.0
"""Who selects waits no longer than that, and then looks."""


class Listener:
    """Attributes:
    socket: registered with the selector.
    """

    def __init__(self, path: Path, selector: selectors.BaseSelector) -> None:
        self._path, self._selector = path, selector
        self.socket = self._open()

    def look(self) -> None:
        """Listen anew where the file is gone or another's; a path that nobody can write just now is for the next time."""
        with contextlib.suppress(OSError):
            if self._found() != self._file:
                before, self.socket = self.socket, self._open()
                self._selector.unregister(before)
                before.close()

    def accept(self) -> socket.socket | None:
        """The next who connects; None when it is gone again, or is another user's."""
        return wire.accept(self.socket)

    def _open(self) -> socket.socket:
        opened = wire.listen(self._path)
        self._file = self._found()
        self._selector.register(opened, selectors.EVENT_READ)
        return opened

    def _found(self) -> tuple[int, int] | None:
        try:
            found = self._path.stat()
        except FileNotFoundError:
            return None
        return found.st_dev, found.st_ino


class Server:
    """A thread that hands on each line that somebody sends. What cannot be read ends that connection alone.

    Args:
        hear: takes a line and who sent it, from this thread; it must not block. ValueError, WireError: it cannot read that.
        clients: so many may be connected; for another one the one that was silent for longest goes.
    """

    def __init__(
        self,
        path: Path,
        hear: Callable[[bytes, socket.socket], None],
        *,
        line_bytes: int = wire.MAX_LINE_BYTES,
        clients: int = sys.maxsize,
    ) -> None:
        self._path, self._hear, self._line_bytes, self._clients = path, hear, line_bytes, clients
        self._selector = selectors.DefaultSelector()
        self._peers: dict[socket.socket, wire.Lines] = {}  # who was heard last is last
        self._guard = threading.Lock()
        self._server = Listener(path, self._selector)
        self._waker, self._wakes = socket.socketpair()
        self._selector.register(self._wakes, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run, name=path.stem, daemon=True)
        self._thread.start()

    def peers(self) -> list[socket.socket]:
        with self._guard:
            return list(self._peers)

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
                elif key.fileobj in self._peers:
                    self._read(key.fileobj)

    def _accept(self) -> None:
        if peer := self._server.accept():
            if len(self._peers) >= self._clients:
                self._drop(next(iter(self._peers)))
            with self._guard:
                self._peers[peer] = wire.Lines(self._line_bytes)
            self._selector.register(peer, selectors.EVENT_READ)

    def _read(self, peer: socket.socket) -> None:
        try:
            data = peer.recv(65536)
            if not data:
                raise ConnectionError("closed")
            with self._guard:
                lines = self._peers[peer] = self._peers.pop(peer)
            for line in lines.feed(data):
                self._hear(line, peer)
        except (OSError, ValueError, RecursionError, wire.WireError):
            self._drop(peer)

    def _drop(self, peer: socket.socket) -> None:
        self._selector.unregister(peer)
        with self._guard:
            del self._peers[peer]
        peer.close()
