"""The keeper, a process that holds the ranks' snapshots: `python -m kgorch.snapshots.keeper FOLDER`, one a run.

It has a descriptor of each image of a snapshot (snapshot_store.py), so snapshots outlive rank, torchrun, shim and supervisor. It
writes them to disk beside the training, without PyTorch and without the trainer's GIL, and hands them to a rank that is launched
again.

The shim starts it where none lives, and again if it is killed. It ends when a supervisor says so, or when nobody has been
connected for IDLE_S seconds; what is newer than the disk is written before. Where the disk does not take that, it stays for some
minutes and tries again: the next session goes on from its memory.

Ranks send BufferRequest and SnapshotReady. A `Request` is one of:
    watch          be told of saves from now on
    newest         describe the newest snapshot
    fetch          the same, with the descriptors of its images
    persist        write the newest snapshot, unless it is on disk; `persist again`: also then
    end            the same as persist, then end; the answer is False where the disk did not take it, and it goes on
    forget N       drop snapshot N, with which trainings fail
One thread serves the sockets, another one writes.
"""

from __future__ import annotations

import collections
import fcntl
import os
import queue
import re
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

from kgorch.protocol import codec
from kgorch.protocol.messages import Message, Request, Response
from kgorch.protocol.run_files import KEEPER_SOCKET
from kgorch.protocol.snapshot_messages import BufferRequest, PersistResult, SaveConclusion, SnapshotReady
from kgorch.snapshots.snapshot_store import SnapshotStore
from kgorch.system import priority
from kgorch.system.clock import boottime_s
from kgorch.system.sockets.line_server import MAX_CLIENTS, Peer, Peers
from kgorch.system.sockets.listener import raise_descriptor_limit

IDLE_S, TRIES = 20.0, 15
"""Seconds without a connection after which it ends; how often it tries to write before it ends with snapshots unsaved."""

MAX_UNREAD = 100
"""Messages kept for a supervisor that is not connected; the oldest are dropped."""

NICE = 5
"""Behind the training, where both want the processor; at the time limit the training waits for it anyway."""

LOCK = "keeper.lock"


class KeeperServer:
    """The sockets around a SnapshotStore. A request that must wait for the disk waits in `_deferred`."""

    def __init__(self, folder: Path) -> None:
        self._jobs: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._store = SnapshotStore(self._report, self._confirm, self._post)
        self._ranks: dict[Peer, str] = {}  # the attempt of each
        self._watchers: set[Peer] = set()
        self._unread: collections.deque[Message] = collections.deque(maxlen=MAX_UNREAD)
        self._deferred: list[tuple[Peer | None, Callable[[], None]]] = []
        self._alone_since_s, self._tries = boottime_s(), 0
        self._folder, self._is_over = folder, False
        self._peers = Peers(folder / KEEPER_SOCKET, self._on_line, on_close=self._on_close)

    def run(self) -> None:
        """Serve until a supervisor has said `end`, or nobody has been connected for IDLE_S seconds."""
        while not self._is_over:
            self._peers.turn(1.0)
            while not self._jobs.empty():
                self._jobs.get()()
            if not self._store.writing:
                waiting, self._deferred = self._deferred, []
                for peer, job in waiting:
                    self._do(peer, job)
            self._store.check_parts(boottime_s())
            self._check_idle()

    def _do(self, peer: Peer | None, job: Callable[[], None]) -> None:
        try:
            job()
        except Exception:  # an odd request, a folder with a NUL in its name for example, must not lose all snapshots
            traceback.print_exc()
            if peer:
                self._peers.drop(peer)
        if peer:
            self._peers.complete(peer)

    def _check_idle(self) -> None:
        if len(self._peers):
            self._alone_since_s, self._tries = boottime_s(), 0
        elif boottime_s() - self._alone_since_s > IDLE_S and not self._store.writing:
            # a part only a supervisor can complete; without its folder the run was removed
            if not self._store.has_part and self._folder.is_dir():
                self._store.write_newest()
            self._deferred.append((None, self._end_if_alone))

    def _end_if_alone(self) -> None:
        """End, unless somebody has connected meanwhile, or the disk has not taken what only we hold: then try again."""
        self._alone_since_s = boottime_s()
        self._tries += 1
        if not len(self._peers):
            self._end_if_saved()
            self._is_over |= self._tries >= TRIES

    def _end_if_saved(self) -> None:
        newest = self._store.newest()
        self._is_over |= newest is None or newest.on_disk or self._store.has_part

    def _post(self, job: Callable[[], None]) -> None:
        self._jobs.put(job)
        self._peers.wake()

    def _on_line(self, line: bytes, peer: Peer) -> None:
        if not self._handle(peer, codec.decode(line)):
            self._peers.complete(peer)

    def _on_close(self, peer: Peer) -> None:
        self._ranks.pop(peer, None)
        self._watchers.discard(peer)
        self._deferred = [(of, job) for of, job in self._deferred if of is not peer]

    def _handle(self, peer: Peer, message: Message) -> bool:
        """Handle a message. True when the answer waits in `_deferred`."""
        match message:
            case BufferRequest(attempt=attempt, ranks=ranks):
                self._ranks[peer], peer.is_attached, self._peers.clients = attempt, True, MAX_CLIENTS + ranks
                self._deferred.append((peer, lambda: self._send_grant(peer, message)))
                return True
            case SnapshotReady():
                self._store.add(message)
            case SaveConclusion():
                self._store.conclude(message)
            case Request("watch"):
                self._watchers.add(peer)
                peer.is_attached = True
                while self._unread:
                    self._send(peer, self._unread.popleft())
            case Request("newest" | "fetch" as what):
                self._send_newest(peer, with_files=what == "fetch")
            case Request(what) if re.fullmatch("forget [0-9]{1,18}", what):
                self._store.forget(int(what.removeprefix("forget ")))
                self._send(peer, Response(True, ""))
            case Request("persist" | "persist again" | "end" as what):
                self._store.write_newest(again=what == "persist again")
                if what == "end":
                    self._deferred.append((None, self._end_if_saved))  # also where the peer does not wait for the disk
                self._deferred.append((peer, lambda: self._send(peer, Response(what != "end" or self._is_over))))
                return True
        return False

    def _send_grant(self, peer: Peer, request: BufferRequest) -> None:
        try:
            grant, descriptors = self._store.grant(request)
        except OSError as error:  # no memory after all, or no file: the rank raises it
            self._send(peer, Response(False, f"{type(error).__name__}: {error}"))
        else:
            self._send(peer, grant, descriptors)

    def _send_newest(self, peer: Peer, *, with_files: bool) -> None:
        newest = self._store.newest()
        if newest is None or self._store.has_part:  # a part alone restores nobody
            self._send(peer, Response(False, "nothing is held"))
        else:
            descriptors = [share.descriptor for share in newest.shares()] if with_files else []
            self._send(peer, newest.info(with_files=with_files), descriptors)

    def _report(self, message: Message) -> None:
        """Send to all supervisors that watch; keep it for the next one while there is none."""
        if not self._watchers:
            self._unread.append(message)
        for watcher in list(self._watchers):
            self._send(watcher, message)

    def _confirm(self, attempt: str, result: PersistResult) -> None:
        """Send to the ranks of an attempt."""
        for peer in [peer for peer, name in self._ranks.items() if name == attempt]:
            self._send(peer, result)

    def _send(self, peer: Peer, message: Message, descriptors: Sequence[int] = ()) -> None:
        self._peers.send(peer, codec.encode(message), descriptors)


def main(folder: Path) -> int:
    """Be the keeper of the run in `folder`, unless one lives."""
    lock = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return 0  # another keeper of this run lives
    for ignored in (
        signal.SIGTERM,
        signal.SIGINT,
        signal.SIGHUP,
    ):  # ranks save on these signals, and need the keeper for it
        signal.signal(ignored, signal.SIG_IGN)
    priority.lower(NICE)
    raise_descriptor_limit()
    KeeperServer(folder).run()
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
