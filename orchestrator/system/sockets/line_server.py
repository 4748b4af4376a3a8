"""A server of lines on a Unix socket: many peers, one thread, and no peer that can block it or make it grow without bound.

Sockets never block. A peer's lines are read only as fast as its earlier ones are handled and their answers are taken, and the
number of peers is limited.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path

from kgorch.protocol import transport
from kgorch.protocol.codec import MAX_LINE_BYTES, LineBuffer, ProtocolError
from kgorch.system.sockets.listener import Listener, SocketListener

CHECK_S = 2.0
"""Longest wait of a turn in seconds; the socket file is checked after each turn."""

MAX_CLIENTS = 64
"""Peers that may be connected besides the ranks of an attempt: people's commands, the shim, the supervisor."""

MAX_OUTGOING_BYTES = 1 << 20
"""What may wait for a peer that does not read, besides one line. A peer with more is dropped."""

MAX_IN_PROGRESS, MAX_IN_PROGRESS_BYTES = 16, 256 << 10
"""Lines of one peer that are passed on and not handled yet; more are left in the kernel's buffer, which makes the peer wait.
A rank sends three lines a second: with that buffer a loop may stand still for a minute before a rank notices."""

MAX_ACCEPTS = 16
"""Connections accepted in one turn. The kernel's queue holds 128."""


class Peer:
    """A connection and its two queues. Only `Peers` reads, writes and closes the socket.

    Attributes:
        is_attached: the process exists for this peer, such as a rank: it is dropped last to make room for others.
        incoming: lines that are read and not passed on yet.
        in_progress: bytes of each line that is passed on and not handled yet.
        outgoing: bytes that wait to be sent, each with the open files that go with them.
        events: what the selector watches of it.
        is_failed: it is to be dropped.
        is_closed: it was dropped.
    """

    def __init__(self, connection: socket.socket, line_bytes: int) -> None:
        self.is_attached = False
        self.socket = connection
        self.lines = LineBuffer(line_bytes)
        self.incoming: deque[bytes] = deque()
        self.in_progress: deque[int] = deque()
        self.outgoing: deque[tuple[memoryview, list[int]]] = deque()
        self.outgoing_bytes = self.events = 0
        self.is_failed = self.is_closed = False

    @property
    def may_send(self) -> bool:
        return len(self.in_progress) < MAX_IN_PROGRESS and sum(self.in_progress) < MAX_IN_PROGRESS_BYTES


class Peers:
    """The connections to a socket file, or to another listener. No method waits for a peer.

    `send`, `broadcast`, `complete`, `wake` and `len` may be called from any thread, all else from the one that calls `turn`.

    Args:
        path: of the socket file; a function makes another listener for a selector.
        on_line: takes a line and its peer, within `turn`. It must not block, and leads to `complete(peer)` once that line is
            handled. An exception drops that peer alone.
        on_close: called for each peer that is gone.
        clients: most peers at a time; for another one the longest silent peer is dropped, an attached one last.
    """

    def __init__(
        self,
        path: Path | Callable[[selectors.BaseSelector], Listener],
        on_line: Callable[[bytes, Peer], None],
        *,
        on_close: Callable[[Peer], None] = lambda _: None,
        line_bytes: int = MAX_LINE_BYTES,
        clients: int = MAX_CLIENTS,
    ) -> None:
        self.clients = clients
        self._path, self._on_line, self._on_close, self._line_bytes = path, on_line, on_close, line_bytes
        self._selector = selectors.DefaultSelector()
        self._peers: dict[Peer, None] = {}  # the one that sent last is last
        self._changed: set[Peer] = set()
        self._guard = threading.RLock()  # reentrant: broadcast calls send while it holds it
        self._thread: int | None = None  # that called `turn` last
        # another thread that has queued a line must end the wait of select
        self._wake_reader, self._wake_writer = socket.socketpair()
        for end in (self._wake_reader, self._wake_writer):
            end.setblocking(False)
        self._selector.register(self._wake_reader, selectors.EVENT_READ)
        self._listener = SocketListener(path, self._selector) if isinstance(path, Path) else path(self._selector)

    def __len__(self) -> int:
        return len(self._peers)

    def turn(self, timeout_s: float = CHECK_S) -> None:
        """Read and send what can be read and sent; waits up to `timeout_s` for the first of it."""
        self._thread = threading.get_ident()
        self._process_changes()
        for key, mask in self._selector.select(0 if self._changed else timeout_s):
            if key.fileobj is self._wake_reader:
                with contextlib.suppress(BlockingIOError):
                    self._wake_reader.recv(4096)
            elif key.fileobj is self._listener.socket:
                self._accept()
            elif isinstance(peer := key.data, Peer) and not peer.is_closed:
                if mask & selectors.EVENT_WRITE:
                    with self._guard:
                        self._write(peer)
                if mask & selectors.EVENT_READ:
                    self._read(peer)
        self._process_changes()
        self._listener.check()

    def send(self, peer: Peer, line: bytes, descriptors: Sequence[int] = ()) -> None:
        """Send a line, with open files. What the peer does not take now is sent later; one that does not read is dropped."""
        with self._guard:
            if peer.is_closed or peer.is_failed:
                return
            if peer.outgoing and peer.outgoing_bytes + len(line) > MAX_OUTGOING_BYTES:
                peer.is_failed = True
            else:
                try:
                    copies = _duplicate(descriptors)  # the files may be closed before the peer takes them
                except OSError:
                    peer.is_failed, copies = True, []
                peer.outgoing.append((memoryview(line), copies))
                peer.outgoing_bytes += len(line)
                self._write(peer)
            if peer.outgoing or peer.is_failed:
                self._mark_changed(peer)

    def broadcast(self, line: bytes) -> None:
        with self._guard:
            for peer in list(self._peers):
                self.send(peer, line)

    def complete(self, peer: Peer) -> None:
        """Report that the oldest line in progress of this peer is handled."""
        with self._guard:
            could_send = peer.may_send
            if peer.in_progress:
                peer.in_progress.popleft()
            if peer.incoming or not could_send:
                self._mark_changed(peer)

    def wake(self) -> None:
        """Make `turn` return."""
        with contextlib.suppress(OSError):  # a wake-up is pending already, or this is closed
            self._wake_writer.send(b"!")

    def close(self) -> None:
        for peer in list(self._peers):
            self.drop(peer)
        self._listener.close()
        self._selector.close()
        self._wake_reader.close()
        self._wake_writer.close()
        if isinstance(self._path, Path):
            with contextlib.suppress(OSError):  # read-only by now; the next server there replaces it
                self._path.unlink(missing_ok=True)

    def drop(self, peer: Peer) -> None:
        with self._guard:
            if peer.is_closed:
                return
            peer.is_closed = True
            if peer.events:
                self._selector.unregister(peer.socket)
            del self._peers[peer]
            self._changed.discard(peer)
            for _, descriptors in peer.outgoing:
                transport.close_all(descriptors)
            peer.outgoing.clear()
            peer.incoming.clear()
            peer.socket.close()
        self._on_close(peer)

    def _mark_changed(self, peer: Peer) -> None:
        """Have the next turn process this peer."""
        self._changed.add(peer)
        if threading.get_ident() != self._thread:  # which looks before it waits
            self.wake()

    def _process_changes(self) -> None:
        with self._guard:
            changed, self._changed = self._changed, set()
        for peer in changed:
            if peer.is_failed:
                self.drop(peer)
            elif not peer.is_closed:
                self._pass_on(peer)
                self._register(peer)

    def _accept(self) -> None:
        for _ in range(MAX_ACCEPTS):
            if not (connection := self._listener.accept()):
                return
            self._add(connection)

    def _add(self, connection: socket.socket) -> None:
        # room is made rather than refused: a rank whose connection broke must get through
        if len(self._peers) >= self.clients:
            self.drop(next((peer for peer in self._peers if not peer.is_attached), next(iter(self._peers))))
        peer = Peer(connection, self._line_bytes)
        with self._guard:
            self._peers[peer] = None
        self._register(peer)

    def _read(self, peer: Peer) -> None:
        try:
            data = peer.socket.recv(65536)
            if not data:
                raise ConnectionError("closed")
            peer.incoming += peer.lines.feed(data)
        except BlockingIOError:
            return
        except (OSError, ProtocolError):
            self.drop(peer)
            return
        with self._guard:
            self._peers[peer] = self._peers.pop(peer)  # now the last in the order of dropping
        self._pass_on(peer)
        self._register(peer)

    def _pass_on(self, peer: Peer) -> None:
        """Pass on up to MAX_IN_PROGRESS lines; then it is another peer's turn."""
        for _ in range(MAX_IN_PROGRESS):
            with self._guard:
                if peer.is_closed or peer.is_failed or peer.outgoing or not peer.incoming or not peer.may_send:
                    return
                line = peer.incoming.popleft()
                peer.in_progress.append(len(line))
            try:
                self._on_line(line, peer)
            except (OSError, ValueError, RecursionError, ProtocolError):  # not a line of this protocol
                self.drop(peer)
            except Exception:  # an unforeseen line must not end the server for all others
                _log(traceback.format_exc())
                self.drop(peer)
        if peer.incoming:
            self._changed.add(peer)

    def _register(self, peer: Peer) -> None:
        """Register what the selector is to watch: readable only while nothing of this peer waits."""
        with self._guard:
            if peer.is_closed:
                return
            reads = not peer.outgoing and not peer.incoming and peer.may_send
            events = (selectors.EVENT_READ if reads else 0) | (selectors.EVENT_WRITE if peer.outgoing else 0)
            if events == peer.events:
                return
            if not events:
                self._selector.unregister(peer.socket)
            elif peer.events:
                self._selector.modify(peer.socket, events, peer)
            else:
                self._selector.register(peer.socket, events, peer)
            peer.events = events

    def _write(self, peer: Peer) -> None:
        """Send as much as the kernel takes now."""
        try:
            while peer.outgoing:
                data, descriptors = peer.outgoing[0]
                count = socket.send_fds(peer.socket, [data], descriptors) if descriptors else peer.socket.send(data)
                transport.close_all(descriptors)  # the kernel has them: they go with the first piece of a line alone
                peer.outgoing_bytes -= count
                peer.outgoing[0] = (data[count:], [])
                if count == len(data):
                    peer.outgoing.popleft()
        except BlockingIOError:
            pass
        except OSError:
            peer.is_failed = True
        if peer.is_failed or (not peer.outgoing and peer.events & selectors.EVENT_WRITE):
            self._changed.add(peer)


class LineServer:
    """Peers on a thread of their own, for a loop that takes jobs.

    Args:
        on_line: takes a line, its peer, and a function to call once the line is handled. It must not block. ValueError and
            ProtocolError mean that it cannot read the line.
    """

    def __init__(
        self,
        path: Path | Callable[[selectors.BaseSelector], Listener],
        on_line: Callable[[bytes, Peer, Callable[[], None]], None],
        *,
        on_close: Callable[[Peer], None] = lambda _: None,
        line_bytes: int = MAX_LINE_BYTES,
        clients: int = MAX_CLIENTS,
    ) -> None:
        self.peers = Peers(
            path,
            lambda line, peer: on_line(line, peer, lambda: self.peers.complete(peer)),
            on_close=on_close,
            line_bytes=line_bytes,
            clients=clients,
        )
        self._is_closing = False
        self._thread = threading.Thread(
            target=self._run, name=path.stem if isinstance(path, Path) else "agents", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        self._is_closing = True
        self.peers.wake()
        self._thread.join(timeout=2.0)

    def _run(self) -> None:
        while not self._is_closing:
            try:
                self.peers.turn()
            except Exception:  # a bug of ours: the connected peers must be served all the same
                _log(traceback.format_exc())
                time.sleep(0.1)  # such a bug may repeat at once, and would take a core from the training
        self.peers.close()


def _duplicate(descriptors: Sequence[int]) -> list[int]:
    """Raises: OSError, with no copy open."""
    copies: list[int] = []
    try:
        for descriptor in descriptors:
            copies.append(os.dup(descriptor))
    except OSError:
        transport.close_all(copies)
        raise
    return copies


def _log(text: str) -> None:
    with contextlib.suppress(OSError):  # stderr may be a file on a disk that is full
        print(text, file=sys.stderr, flush=True)
