"""A socket file under which a process is found, for as long as the process lives, and the peers that connect to it.

Whoever tidies up a folder may take the file away. What is connected already goes on then, and nobody new gets through: ranks
of the next attempt would find no keeper while the old one holds its lock. So the file is looked at, and made again.

Only the owner of the socket (mode 0600, peer's uid compared) is heard. No peer can make its server wait or grow without bound:
sockets never block, a peer's lines are read only as fast as its earlier ones are dealt with and their answers taken, and there
are no more than so many peers.
"""

from __future__ import annotations

import contextlib
import os
import resource
import selectors
import socket
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path

from orchestrator.protocol import sockets
from orchestrator.protocol.codec import MAX_LINE_BYTES, LineBuffer, ProtocolError

LOOK_S = 2.0
"""Who selects waits no longer than that, and then looks."""

CLIENTS = 64
"""Peers that may be connected besides the ranks of an attempt: people's commands, the shim, the supervisor."""

OUT_BYTES = 1 << 20
"""What may wait for a peer that does not read, besides one line. With more it is dropped."""

UNANSWERED, UNANSWERED_BYTES = 16, 256 << 10
"""Lines of one peer that are handed on and not dealt with yet; more are left in the kernel's buffer, which makes the peer wait.
A rank says three lines a second: with that buffer a loop may stand still for a minute before a rank notices."""

ACCEPTED = 16
"""Connections of one turn. The kernel's queue holds 128."""

DESCRIPTORS = 1 << 16


def raise_descriptor_limit() -> None:
    """The soft limit of open files, usually 1024, which a few hundred ranks and clients use up. Children inherit it: the loaders
    of a training share their tensors by open files."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


class Listener:
    """Attributes:
    socket: registered with the selector.
    """

    def __init__(self, path: Path, selector: selectors.BaseSelector) -> None:
        self._path, self._selector = path, selector
        self._spare: int | None = None
        self._keep_spare()
        self.socket = self._open()

    def look(self) -> None:
        """Listen anew where the file is gone or another's; a path that nobody can write just now is for the next time."""
        with contextlib.suppress(OSError):
            if self._found() != self._file:
                before, self.socket = self.socket, self._open()
                self._selector.unregister(before)
                before.close()

    def accept(self) -> socket.socket | None:
        """The next who connects; None when it is gone again, is another user's, or no descriptor is free for it."""
        try:
            return sockets.accept(self.socket)
        except OSError:
            self._turn_away()
            return None

    def close(self) -> None:
        self._selector.unregister(self.socket)
        self.socket.close()
        if self._spare is not None:
            os.close(self._spare)
            self._spare = None

    def _turn_away(self) -> None:
        """Take one connection by the spare descriptor and close it: left in the queue it would have every select return at once."""
        if self._spare is not None:
            os.close(self._spare)
            self._spare = None
            with contextlib.suppress(OSError):
                if peer := sockets.accept(self.socket):
                    peer.close()
        else:
            time.sleep(0.05)
        self._keep_spare()

    def _keep_spare(self) -> None:
        with contextlib.suppress(OSError):
            self._spare = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)

    def _open(self) -> socket.socket:
        opened = sockets.listen(self._path)
        opened.setblocking(False)
        self._file = self._found()
        self._selector.register(opened, selectors.EVENT_READ)
        return opened

    def _found(self) -> tuple[int, int] | None:
        try:
            found = self._path.stat()
        except FileNotFoundError:
            return None
        return found.st_dev, found.st_ino


class Peer:
    """A connection, and what waits on both ways. Its Peers alone reads, writes and closes the socket.

    Attributes:
        is_attached: it is one that the process lives for, a rank say: not among those that make room for others.
    """

    def __init__(self, connection: socket.socket, line_bytes: int) -> None:
        self.is_attached = False
        self.socket = connection
        self.lines = LineBuffer(line_bytes)
        self.heard: deque[bytes] = deque()  # not handed on yet
        self.unanswered: deque[int] = deque()  # bytes of each line that is handed on and not dealt with
        self.out: deque[tuple[memoryview, list[int]]] = deque()
        self.out_bytes = self.events = 0
        self.is_over = self.is_closed = False

    @property
    def may_be_heard(self) -> bool:
        return len(self.unanswered) < UNANSWERED and sum(self.unanswered) < UNANSWERED_BYTES


class Peers:
    """Those who are connected to a socket file: lines come from them and go to them, without waiting for any.

    `send`, `send_all`, `done`, `wake` and `len` are for any thread, all else for the one that calls `turn`.

    Args:
        hear: takes a line and who sent it, within `turn`; it must not block, and leads to `done(peer)` once that line is dealt
            with. Exceptions of its end that connection alone.
        left: told of each peer that is gone.
        clients: so many may be connected; for another one the one that was silent for longest goes, an attached one last.
    """

    def __init__(
        self,
        path: Path,
        hear: Callable[[bytes, Peer], None],
        *,
        left: Callable[[Peer], None] = lambda _: None,
        line_bytes: int = MAX_LINE_BYTES,
        clients: int = CLIENTS,
    ) -> None:
        self.clients = clients
        self._path, self._hear, self._left, self._line_bytes = path, hear, left, line_bytes
        self._selector = selectors.DefaultSelector()
        self._peers: dict[Peer, None] = {}  # who was heard last is last
        self._changed: set[Peer] = set()
        self._guard = threading.RLock()
        self._wakes, self._waker = socket.socketpair()
        for end in (self._wakes, self._waker):
            end.setblocking(False)
        self._selector.register(self._wakes, selectors.EVENT_READ)
        self._listener = Listener(path, self._selector)

    def __len__(self) -> int:
        return len(self._peers)

    def turn(self, timeout_s: float = LOOK_S) -> None:
        """Take and give what can be taken and given, waiting at most so long for the first of it."""
        self._settle()
        for key, mask in self._selector.select(0 if self._changed else timeout_s):
            if key.fileobj is self._wakes:
                with contextlib.suppress(BlockingIOError):
                    self._wakes.recv(4096)
            elif key.fileobj is self._listener.socket:
                self._accept()
            elif isinstance(peer := key.data, Peer) and not peer.is_closed:
                if mask & selectors.EVENT_WRITE:
                    with self._guard:
                        self._write(peer)
                if mask & selectors.EVENT_READ:
                    self._read(peer)
        self._settle()
        self._listener.look()

    def send(self, peer: Peer, line: bytes, descriptors: Sequence[int] = ()) -> None:
        """What it does not take at once goes later. One that does not read is dropped; for one that is gone nothing is done."""
        with self._guard:
            if peer.is_closed or peer.is_over:
                return
            if peer.out and peer.out_bytes + len(line) > OUT_BYTES:
                peer.is_over = True
            else:
                try:
                    copies = _duplicates(descriptors)  # the files may be closed before the peer takes them
                except OSError:
                    peer.is_over, copies = True, []
                peer.out.append((memoryview(line), copies))
                peer.out_bytes += len(line)
                self._write(peer)
            if peer.out or peer.is_over:
                self._change(peer)

    def send_all(self, line: bytes) -> None:
        with self._guard:
            for peer in list(self._peers):
                self.send(peer, line)

    def done(self, peer: Peer) -> None:
        """A line of this peer's is dealt with."""
        with self._guard:
            was_heard = peer.may_be_heard
            if peer.unanswered:
                peer.unanswered.popleft()
            if peer.heard or not was_heard:
                self._change(peer)

    def wake(self) -> None:
        """Have `turn` return."""
        with contextlib.suppress(OSError):  # a wake-up is pending already, or all is over
            self._waker.send(b"!")

    def close(self) -> None:
        for peer in list(self._peers):
            self.drop(peer)
        self._listener.close()
        self._selector.close()
        self._wakes.close()
        self._waker.close()
        with contextlib.suppress(OSError):  # read-only by now; who listens there next takes it away
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
            for _, descriptors in peer.out:
                sockets.close_all(descriptors)
            peer.out.clear()
            peer.heard.clear()
            peer.socket.close()
        self._left(peer)

    def _change(self, peer: Peer) -> None:
        """Have the next turn look what to do with it."""
        self._changed.add(peer)
        self.wake()

    def _settle(self) -> None:
        with self._guard:
            changed, self._changed = self._changed, set()
        for peer in changed:
            if peer.is_over:
                self.drop(peer)
            elif not peer.is_closed:
                self._hand_on(peer)
                self._watch(peer)

    def _accept(self) -> None:
        for _ in range(ACCEPTED):
            if not (connection := self._listener.accept()):
                return
            self._take_in(connection)

    def _take_in(self, connection: socket.socket) -> None:
        if len(self._peers) >= self.clients:
            self.drop(next((peer for peer in self._peers if not peer.is_attached), next(iter(self._peers))))
        peer = Peer(connection, self._line_bytes)
        with self._guard:
            self._peers[peer] = None
        self._watch(peer)

    def _read(self, peer: Peer) -> None:
        try:
            data = peer.socket.recv(65536)
            if not data:
                raise ConnectionError("closed")
            peer.heard += peer.lines.feed(data)
        except BlockingIOError:
            return
        except (OSError, ProtocolError):
            self.drop(peer)
            return
        with self._guard:
            self._peers[peer] = self._peers.pop(peer)
        self._hand_on(peer)
        self._watch(peer)

    def _hand_on(self, peer: Peer) -> None:
        """So many lines at most: then it is another's turn."""
        for _ in range(UNANSWERED):
            with self._guard:
                if peer.is_closed or peer.is_over or peer.out or not peer.heard or not peer.may_be_heard:
                    return
                line = peer.heard.popleft()
                peer.unanswered.append(len(line))
            try:
                self._hear(line, peer)
            except (OSError, ValueError, RecursionError, ProtocolError):  # not a line of ours
                self.drop(peer)
            except Exception:  # one line that nobody foresaw must not take all others along
                _say(traceback.format_exc())
                self.drop(peer)
        if peer.heard:
            self._changed.add(peer)

    def _watch(self, peer: Peer) -> None:
        """Register for what can be done with it now: read only when nothing of it waits."""
        with self._guard:
            if peer.is_closed:
                return
            reads = not peer.out and not peer.heard and peer.may_be_heard
            wanted = (selectors.EVENT_READ if reads else 0) | (selectors.EVENT_WRITE if peer.out else 0)
            if wanted == peer.events:
                return
            if not wanted:
                self._selector.unregister(peer.socket)
            elif peer.events:
                self._selector.modify(peer.socket, wanted, peer)
            else:
                self._selector.register(peer.socket, wanted, peer)
            peer.events = wanted

    def _write(self, peer: Peer) -> None:
        """What the kernel takes of what waits for it."""
        try:
            while peer.out:
                data, descriptors = peer.out[0]
                sent = socket.send_fds(peer.socket, [data], descriptors) if descriptors else peer.socket.send(data)
                sockets.close_all(descriptors)
                peer.out_bytes -= sent
                peer.out[0] = (data[sent:], [])
                if sent == len(data):
                    peer.out.popleft()
        except BlockingIOError:
            pass
        except OSError:
            peer.is_over = True
        if peer.is_over or (not peer.out and peer.events & selectors.EVENT_WRITE):
            self._changed.add(peer)


class Server:
    """Peers with a thread of their own, for a loop that takes jobs.

    Args:
        hear: takes a line, who sent it, and what to call once that is dealt with; it must not block. ValueError, ProtocolError: it
            cannot read that.
    """

    def __init__(
        self,
        path: Path,
        hear: Callable[[bytes, Peer, Callable[[], None]], None],
        *,
        line_bytes: int = MAX_LINE_BYTES,
        clients: int = CLIENTS,
    ) -> None:
        self.peers = Peers(
            path,
            lambda line, peer: hear(line, peer, lambda: self.peers.done(peer)),
            line_bytes=line_bytes,
            clients=clients,
        )
        self._is_over = False
        self._thread = threading.Thread(target=self._run, name=path.stem, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._is_over = True
        self.peers.wake()
        self._thread.join(timeout=2.0)

    def _run(self) -> None:
        while not self._is_over:
            try:
                self.peers.turn()
            except Exception:  # our own bug: whoever is connected must be heard all the same
                _say(traceback.format_exc())
                time.sleep(0.1)
        self.peers.close()


def _duplicates(descriptors: Sequence[int]) -> list[int]:
    """Raises: OSError, with none left open."""
    copies: list[int] = []
    try:
        for descriptor in descriptors:
            copies.append(os.dup(descriptor))
    except OSError:
        sockets.close_all(copies)
        raise
    return copies


def _say(text: str) -> None:
    with contextlib.suppress(OSError):  # stderr may be a file on a disk that is full
        print(text, file=sys.stderr, flush=True)
