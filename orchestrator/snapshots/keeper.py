"""The process that holds the ranks' snapshots: `python -m orchestrator.snapshots.keeper FOLDER`, one a run.

A snapshot is an image in each rank's memfd (worker/checkpoint/snapshot_buffer.py), of which this process has a descriptor: it
outlives rank, torchrun, shim and supervisor. Here it is written to disk beside the training, without PyTorch and without the
trainer's GIL; from here a relaunched rank gets it back. Two slots a rank, filled in turn, so that one snapshot is always whole; an
image bears the number of its snapshot in its last bytes, written after all else and wiped before it is filled anew: a
rank killed while it copies leaves no snapshot that looks whole.

The shim starts it where none lives, and again should it be killed. It ends when a supervisor says so, or when nobody has
been connected for a while; what is newer than the disk is written then.

Ranks send BufferRequest and SnapshotReady. `Request`s: `watch` (be told of saves), `newest`, `fetch` (the newest with its
descriptors), `persist` (write the newest, unless it is on disk), `end` (the same, then go),
`forget N` (drop a snapshot that makes trainings fail).
One thread for the sockets, one that writes.
"""

from __future__ import annotations

import collections
import fcntl
import os
import queue
import re
import signal
import struct
import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from orchestrator.core.codes import EventKind
from orchestrator.core.snapshot_budget import images
from orchestrator.protocol import codec
from orchestrator.protocol.messages import JournalEntry, Message, Request, Response
from orchestrator.protocol.run_files import KEEPER_SOCKET
from orchestrator.protocol.snapshot_messages import (
    STAMP_BYTES,
    BufferGrant,
    BufferRequest,
    CheckpointWritten,
    PersistResult,
    SaveFailure,
    SnapshotInfo,
    SnapshotReady,
)
from orchestrator.snapshots import checkpoint_writer
from orchestrator.snapshots.checkpoint_writer import Share
from orchestrator.system.clock import boottime_s
from orchestrator.system.host_memory import free_bytes
from orchestrator.system.sockets.line_server import MAX_CLIENTS, Peer, Peers
from orchestrator.system.sockets.listener import raise_descriptor_limit

IDLE_S, TRIES = 20.0, 15
NICE = 5
"""Behind the training, where both want the processor; at the wall the training waits anyway."""

LOCK = "keeper.lock"


class Memory:
    """One image: a memfd of `capacity` bytes and the stamp behind them; a file without a name where memory does not allow it."""

    def __init__(self, capacity: int, folder: Path | None = None) -> None:
        self.capacity = capacity
        if folder is None:
            self.descriptor = os.memfd_create("kgorch-image", os.MFD_CLOEXEC)
        else:
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder) as file:
                self.descriptor = os.dup(file.fileno())
            os.posix_fallocate(self.descriptor, 0, capacity + STAMP_BYTES)  # a full disk says so here, not by SIGBUS
        os.ftruncate(self.descriptor, capacity + STAMP_BYTES)

    @property
    def stamp(self) -> int:
        return int(struct.unpack("<q", os.pread(self.descriptor, 8, self.capacity))[0])

    def __del__(self) -> None:
        if hasattr(self, "descriptor"):
            os.close(self.descriptor)


@dataclass
class Snapshot:
    """What the ranks of an attempt have put aside at one step."""

    room: BufferRequest
    number: int
    slot: int
    step: int
    final: bool
    began_s: float
    persist: bool
    memory: dict[int, Memory] = field(default_factory=dict)
    files: dict[int, dict[str, tuple[int, int]]] = field(default_factory=dict)
    blocking_s: float = 0.0
    on_disk: bool = False
    rescued: bool = False

    @property
    def is_whole(self) -> bool:
        return len(self.files) == self.room.ranks and all(item.stamp == self.number for item in self.memory.values())

    def shares(self) -> list[Share]:
        return [Share(self.memory[rank].descriptor, self.files[rank]) for rank in sorted(self.files)]

    def told(self, *, with_files: bool) -> SnapshotInfo:
        shares = [
            {name: list(span) for name, span in self.files[rank].items()} for rank in sorted(self.files) if with_files
        ]
        return SnapshotInfo(
            self.room.attempt,
            self.room.run_id,
            self.room.stage,
            self.step,
            self.number,
            self.final,
            self.began_s,
            shares,
        )


class Holder:
    """What is held, and what is being written. Pure of sockets: `tell` takes what the supervisor is to know, `kept` the ranks."""

    def __init__(
        self, tell: Callable[[Message], None], kept: Callable[[str, PersistResult], None], post: Callable[..., None]
    ) -> None:
        self._tell, self._kept, self._post = tell, kept, post
        self._memory: dict[int, list[Memory]] = {}  # of each rank, by slot
        self._slots: dict[int, Snapshot] = {}
        self._rooms: dict[int, BufferRequest] = {}
        self._count, self._first, self._last = 2, 1, 0
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="writer")
        self._cleared: set[str] = set()
        self._next: Snapshot | None = None
        self.writing: Snapshot | None = None

    def newest(self) -> Snapshot | None:
        whole = [snapshot for snapshot in self._slots.values() if snapshot.is_whole]
        return max(whole, key=lambda snapshot: snapshot.number, default=None)

    def room(self, room: BufferRequest) -> tuple[BufferGrant, list[int]]:
        """Images for a rank. A new attempt's come only while nothing is written, so that it fills none of those under way."""
        if all(known.attempt != room.attempt for known in self._rooms.values()):
            self._begin(room)
        self._rooms[room.rank] = room
        capacity = -(-room.bytes // 4096) * 4096
        mine = self._memory.get(room.rank, [])
        if len(mine) != max(self._count, 1) or mine[0].capacity < capacity:
            folder = None if self._count and self._fits(room, capacity) else Path(room.root)
            mine = self._memory[room.rank] = [Memory(capacity, folder) for _ in range(max(self._count, 1))]
        newest = self.newest()
        slot = 1 - newest.slot if newest and len(mine) == 2 else 0
        return BufferGrant(self._count, mine[0].capacity, self._first, slot), [item.descriptor for item in mine]

    def filled(self, filled: SnapshotReady) -> None:
        """Raises: ValueError for what cannot be, with nothing changed."""
        room = self._rooms.get(filled.rank)
        if room is None or room.attempt != filled.attempt:
            return  # an attempt that is over
        mine = self._memory.get(filled.rank, [])
        end = max((start + size for start, size in filled.files.values()), default=0)
        if filled.slot >= len(mine) or end > mine[filled.slot].capacity:
            raise ValueError(f"rank {filled.rank} has no image that holds what it says of slot {filled.slot}")
        snapshot = self._slots.get(filled.slot)
        if snapshot is None or snapshot.number != filled.number:
            snapshot = Snapshot(
                room, filled.number, filled.slot, filled.step, filled.final, filled.began_s, filled.persist
            )
            self._slots[filled.slot] = snapshot
        self._last = max(self._last, filled.number)
        snapshot.memory[filled.rank] = mine[filled.slot]
        snapshot.files[filled.rank] = {name: (start, size) for name, (start, size) in filled.files.items()}
        snapshot.began_s = min(snapshot.began_s, filled.began_s)
        snapshot.blocking_s = max(snapshot.blocking_s, filled.blocking_s)
        if snapshot.persist and snapshot.is_whole:
            self.write(snapshot)

    def forget(self, number: int) -> None:
        """A snapshot with which a training fails; it is neither gone on from nor written."""
        self._slots = {slot: item for slot, item in self._slots.items() if item.number != number}

    def write(self, snapshot: Snapshot) -> None:
        if self.writing:
            self._next = snapshot
            return
        self.writing = snapshot
        self._writer.submit(self._write, snapshot)

    def rescue(self, *, again: bool = False) -> None:
        """Write the newest, which no rank has asked to be written; `again`: what was written of it was read back broken."""
        newest = self.newest()
        if newest and again:
            newest.on_disk = False
        if newest and not newest.on_disk and newest not in (self.writing, self._next):
            newest.rescued = not newest.persist
            self.write(newest)

    def _fits(self, room: BufferRequest, capacity: int) -> bool:
        """Whether a rank's images may grow so far; its first ones were weighed with all others' when the attempt began."""
        if room.rank not in self._memory:
            return True
        held = sum(item.capacity for mine in self._memory.values() for item in mine)
        need = (held // self._count) - self._memory[room.rank][0].capacity + capacity
        return images(need, free_bytes() + held, room.bound if room.bound >= 0 else None)[0] >= self._count

    def _begin(self, room: BufferRequest) -> None:
        """A new attempt: images of an older one that fit are used again, the others go once their snapshot does."""
        held = sum(item.capacity for mine in self._memory.values() for item in mine)
        need = room.bytes * room.ranks
        count, why = images(need, free_bytes() + held, room.bound if room.bound >= 0 else None)
        if why:
            self._tell(JournalEntry(room.attempt, EventKind.SNAPSHOTS_OFF, {"what": why}))
        if count != self._count or set(self._rooms) != set(range(room.ranks)):
            self._memory.clear()  # what a snapshot in a slot needs, it holds itself
        self._rooms.clear()
        self._count, self._first = count, self._last + 1

    def _write(self, snapshot: Snapshot) -> None:
        """In the writing thread."""
        root, error = Path(snapshot.room.root), ""
        place, total = root, 0
        try:
            if snapshot.room.root not in self._cleared:
                checkpoint_writer.clear_leftovers(root)
                self._cleared.add(snapshot.room.root)
            place, total = checkpoint_writer.persist(
                snapshot.shares(), root, snapshot.room.attempt, lambda: snapshot.is_whole
            )
        except Exception as problem:
            error = f"{type(problem).__name__}: {problem}"
        took_s = boottime_s() - snapshot.began_s
        self._post(lambda: self._written(snapshot, place, total, took_s, error))

    def _written(self, snapshot: Snapshot, place: Path, total: int, took_s: float, error: str) -> None:
        attempt, step = snapshot.room.attempt, snapshot.step
        if error:
            self._tell(SaveFailure(attempt, -1, step, error))
        else:
            snapshot.on_disk = True
            self._tell(
                CheckpointWritten(
                    attempt, str(place), step, total, snapshot.blocking_s, took_s, snapshot.final, snapshot.rescued
                )
            )
        self._kept(attempt, PersistResult(snapshot.number, error))
        self.writing, following, self._next = None, self._next, None
        if following and following.is_whole:  # its image may have been filled anew since
            self.write(following)


class Server:
    """The sockets around a Holder. A question that must wait for the disk waits in `_later`."""

    def __init__(self, folder: Path) -> None:
        self._jobs: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._holder = Holder(self._tell, self._kept, self._post)
        self._ranks: dict[Peer, str] = {}
        self._watchers: set[Peer] = set()
        self._untold: collections.deque[Message] = collections.deque(maxlen=100)
        self._later: list[tuple[Peer | None, Callable[[], None]]] = []
        self._alone_since_s, self._tries = boottime_s(), 0
        self._ends = self._is_over = False
        self._peers = Peers(folder / KEEPER_SOCKET, self._hear, on_close=self._forget)

    def run(self) -> None:
        while not self._is_over:
            self._peers.turn(1.0)
            while not self._jobs.empty():
                self._jobs.get()()
            if not self._holder.writing:
                waiting, self._later = self._later, []
                for peer, job in waiting:
                    self._do(peer, job)
                self._is_over = self._is_over or self._ends
            self._look_whether_alone()

    def _do(self, peer: Peer | None, job: Callable[[], None]) -> None:
        try:
            job()
        except Exception:  # a folder with a NUL in its name, say: it must not take all snapshots along
            traceback.print_exc()
            if peer:
                self._peers.drop(peer)
        if peer:
            self._peers.complete(peer)

    def _look_whether_alone(self) -> None:
        if len(self._peers):
            self._alone_since_s = boottime_s()
        elif boottime_s() - self._alone_since_s > IDLE_S and not self._holder.writing:
            self._holder.rescue()
            self._later.append((None, self._end_if_alone))

    def _end_if_alone(self) -> None:
        """Unless somebody has come meanwhile, or the disk has not taken what only we hold: then it is tried again."""
        newest, self._alone_since_s = self._holder.newest(), boottime_s()
        self._tries += 1
        self._is_over = not len(self._peers) and (newest is None or newest.on_disk or self._tries >= TRIES)

    def _post(self, job: Callable[[], None]) -> None:
        self._jobs.put(job)
        self._peers.wake()

    def _hear(self, line: bytes, peer: Peer) -> None:
        if not self._take(peer, codec.decode(line)):
            self._peers.complete(peer)

    def _forget(self, peer: Peer) -> None:
        """It is gone, and what it waited for is nobody's question any more."""
        self._ranks.pop(peer, None)
        self._watchers.discard(peer)
        self._later = [(of, job) for of, job in self._later if of is not peer]

    def _take(self, peer: Peer, message: Message) -> bool:
        """Whether the answer waits in `_later`."""
        match message:
            case BufferRequest(attempt=attempt, ranks=ranks):
                self._ranks[peer], peer.is_attached, self._peers.clients = attempt, True, MAX_CLIENTS + ranks
                self._later.append((peer, lambda: self._give_room(peer, message)))
                return True
            case SnapshotReady():
                self._holder.filled(message)
            case Request("watch"):
                self._watchers.add(peer)
                peer.is_attached = True
                while self._untold:
                    self._send(peer, self._untold.popleft())
            case Request("newest" | "fetch" as what):
                self._give_newest(peer, with_files=what == "fetch")
            case Request(what) if re.fullmatch("forget [0-9]{1,18}", what):
                self._holder.forget(int(what.removeprefix("forget ")))
                self._send(peer, Response(True, ""))
            case Request("persist" | "persist again" | "end" as what):
                self._holder.rescue(again=what == "persist again")
                self._ends = self._ends or what == "end"  # also where who asked does not wait for the disk
                self._later.append((peer, lambda: self._send(peer, Response(True, ""))))
                return True
        return False

    def _give_room(self, peer: Peer, room: BufferRequest) -> None:
        try:
            answer, descriptors = self._holder.room(room)
        except OSError as error:  # no memory after all, or no file: the rank says so
            self._send(peer, Response(False, f"{type(error).__name__}: {error}"))
        else:
            self._send(peer, answer, descriptors)

    def _give_newest(self, peer: Peer, *, with_files: bool) -> None:
        newest = self._holder.newest()
        if newest is None:
            self._send(peer, Response(False, "nothing is held"))
        else:
            descriptors = [share.descriptor for share in newest.shares()] if with_files else []
            self._send(peer, newest.told(with_files=with_files), descriptors)

    def _tell(self, message: Message) -> None:
        if not self._watchers:
            self._untold.append(message)
        for watcher in list(self._watchers):
            self._send(watcher, message)

    def _kept(self, attempt: str, kept: PersistResult) -> None:
        for peer in [peer for peer, of in self._ranks.items() if of == attempt]:
            self._send(peer, kept)

    def _send(self, peer: Peer, message: Message, descriptors: Sequence[int] = ()) -> None:
        self._peers.send(peer, codec.encode(message), descriptors)


def main(folder: Path) -> int:
    lock = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return 0  # one lives
    for ignored in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):  # the ranks save through us
        signal.signal(ignored, signal.SIG_IGN)
    os.nice(NICE)
    raise_descriptor_limit()
    Server(folder).run()
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
