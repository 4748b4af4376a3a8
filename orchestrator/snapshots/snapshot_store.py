"""The snapshots that the keeper holds, and the thread that writes them to disk. Nothing here knows of sockets.

An image is one rank's share of the state: a memfd that the rank maps and fills (worker/checkpoint/snapshot_buffer.py). A snapshot
is complete when all ranks have reported theirs and each image has the snapshot's number in its last bytes, the stamp. A rank writes
the stamp after all else and clears it before it fills the image again. So a rank that is killed while it copies leaves no snapshot
that looks complete, and no report of its death is needed.
"""

from __future__ import annotations

import os
import struct
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from kgorch.core.codes import EventKind
from kgorch.core.memory.snapshot_budget import buffer_count
from kgorch.protocol.messages import JournalEntry, Message
from kgorch.protocol.snapshot_messages import (
    STAMP_BYTES,
    BufferGrant,
    BufferRequest,
    CheckpointWritten,
    PartWritten,
    PersistResult,
    SaveConclusion,
    SaveFailure,
    SnapshotInfo,
    SnapshotReady,
)
from kgorch.snapshots import checkpoint_writer
from kgorch.snapshots.checkpoint_parts import CheckpointTarget, remove_part, write_part
from kgorch.snapshots.checkpoint_writer import Share
from kgorch.system.clock import boottime_s
from kgorch.system.host_memory import free_bytes

PAGE_BYTES = 4096

CONCLUSION_S = 120.0
"""Seconds after which a part of a checkpoint is given up that the supervisor does not complete."""


class SnapshotImage:
    """A memfd of `capacity` bytes and the stamp behind them.

    Args:
        folder: None for host memory; else the folder for a file without a name, where memory is too small.
    Raises: OSError.
    """

    def __init__(self, capacity: int, folder: Path | None = None) -> None:
        self.capacity = capacity
        if folder is None:
            self.descriptor = os.memfd_create("kgorch-image", os.MFD_CLOEXEC)
        else:
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder) as file:
                self.descriptor = os.dup(file.fileno())
            # a full disk is an error here; without allocated blocks it would be SIGBUS in the rank that fills the image
            os.posix_fallocate(self.descriptor, 0, capacity + STAMP_BYTES)
        os.ftruncate(self.descriptor, capacity + STAMP_BYTES)

    @property
    def stamp(self) -> int:
        """Number of the snapshot that the image holds in full; 0 for none."""
        return int(struct.unpack("<q", os.pread(self.descriptor, 8, self.capacity))[0])

    def __del__(self) -> None:
        if hasattr(self, "descriptor"):
            os.close(self.descriptor)


@dataclass
class Snapshot:
    """The state of an attempt at one step.

    Attributes:
        request: of the rank that reported first: names the attempt, the stage and the folder of its checkpoints.
        number: from 1, counted over all attempts.
        slot: of the images, 0 or 1.
        step: of the stage.
        final: the checkpoint closes its stage.
        began_s: CLOCK_BOOTTIME in seconds at which training was held up.
        persist: a rank has asked for it to be written to disk.
        images: by rank.
        files: by rank, what its image holds: name → (offset, bytes).
        blocking_s: seconds for which training was held up.
        ready_s: monotonic reading at which the newest image was reported: while the machine sleeps nothing is written.
        on_disk: it was written.
        rescued: it is written although no rank has asked for that.
    """

    request: BufferRequest
    number: int
    slot: int
    step: int
    final: bool
    began_s: float
    persist: bool
    images: dict[int, SnapshotImage] = field(default_factory=dict)
    files: dict[int, dict[str, tuple[int, int]]] = field(default_factory=dict)
    blocking_s: float = 0.0
    ready_s: float = 0.0
    on_disk: bool = False
    rescued: bool = False

    @property
    def is_complete(self) -> bool:
        """Read from the images each time: a rank may have begun to fill one again."""
        return len(self.files) == self.request.ranks_here and all(
            image.stamp == self.number for image in self.images.values()
        )

    def shares(self) -> list[Share]:
        """The images and what they hold, in the order of the ranks."""
        return [Share(self.images[rank].descriptor, self.files[rank]) for rank in sorted(self.files)]

    def info(self, *, with_files: bool) -> SnapshotInfo:
        """The description that is sent to ranks and supervisors. `with_files`: with what each image holds."""
        files = [
            {name: list(span) for name, span in self.files[rank].items()} for rank in sorted(self.files) if with_files
        ]
        return SnapshotInfo(
            self.request.attempt,
            self.request.run_id,
            self.request.stage,
            self.step,
            self.number,
            self.final,
            self.began_s,
            files,
        )


def _target(snapshot: Snapshot) -> CheckpointTarget:
    return CheckpointTarget(Path(snapshot.request.root), snapshot.request.attempt, snapshot.step, snapshot.final)


class SnapshotStore:
    """Two slots, filled in turn, so that one snapshot is always complete; with little memory one slot, or files.

    All methods are called on the thread of the caller's loop.

    Args:
        report: takes messages for the supervisor.
        confirm: takes an attempt's name and, for its ranks, whether their snapshot is on disk.
        post: has a function called on the thread of the loop.
    Attributes:
        writing: the snapshot that is being written to disk.
    """

    def __init__(
        self,
        report: Callable[[Message], None],
        confirm: Callable[[str, PersistResult], None],
        post: Callable[..., None],
    ) -> None:
        self._report, self._confirm, self._post = report, confirm, post
        self._images: dict[int, list[SnapshotImage]] = {}  # of each rank, by slot
        self._slots: dict[int, Snapshot] = {}
        self._requests: dict[int, BufferRequest] = {}  # of the ranks of the newest attempt
        self._count, self._first, self._last = 2, 1, 0
        # one writer: what a kill leaves on disk has one owner, who clears it
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="writer")
        self._cleared: set[str] = set()
        self._next: Snapshot | None = None
        self.writing: Snapshot | None = None
        self._part: Snapshot | None = None  # that is written here, and waits for the other nodes
        self._part_until_s = 0.0

    def newest(self) -> Snapshot | None:
        """The newest complete snapshot."""
        complete = [snapshot for snapshot in self._slots.values() if snapshot.is_complete]
        return max(complete, key=lambda snapshot: snapshot.number, default=None)

    @property
    def has_part(self) -> bool:
        """Whether the newest snapshot is of one node's ranks alone."""
        newest = self.newest()
        return newest is not None and newest.request.is_part

    def grant(self, request: BufferRequest) -> tuple[BufferGrant, list[int]]:
        """Images for a rank, with their descriptors.

        The caller waits until nothing is written, else a new attempt could fill an image that is on its way to disk.

        Raises: OSError.
        """
        if all(other.attempt != request.attempt for other in self._requests.values()):
            self._begin_attempt(request)
        self._requests[request.rank] = request
        capacity = -(-request.bytes // PAGE_BYTES) * PAGE_BYTES
        mine = self._images.get(request.rank, [])
        if len(mine) != max(self._count, 1) or mine[0].capacity < capacity:
            folder = None if self._count and self._fits(request, capacity) else Path(request.root)
            mine = self._images[request.rank] = [SnapshotImage(capacity, folder) for _ in range(max(self._count, 1))]
        newest = self.newest()
        slot = 1 - newest.slot if newest and len(mine) == 2 else 0
        return BufferGrant(self._count, mine[0].capacity, self._first, slot), [image.descriptor for image in mine]

    def add(self, message: SnapshotReady) -> None:
        """Add a rank's image to its snapshot. Raises: ValueError for what cannot be, with nothing changed."""
        request = self._requests.get(message.rank)
        if request is None or request.attempt != message.attempt:
            return  # an attempt that is over
        mine = self._images.get(message.rank, [])
        end = max((start + size for start, size in message.files.values()), default=0)
        if message.slot >= len(mine) or end > mine[message.slot].capacity:
            raise ValueError(f"rank {message.rank} has no image that holds what it says of slot {message.slot}")
        snapshot = self._slots.get(message.slot)
        if snapshot is None or snapshot.number != message.number:
            snapshot = Snapshot(
                request, message.number, message.slot, message.step, message.final, message.began_s, message.persist
            )
            self._slots[message.slot] = snapshot
        self._last = max(self._last, message.number)
        snapshot.images[message.rank] = mine[message.slot]
        snapshot.files[message.rank] = {name: (start, size) for name, (start, size) in message.files.items()}
        snapshot.began_s = min(snapshot.began_s, message.began_s)
        snapshot.blocking_s, snapshot.ready_s = max(snapshot.blocking_s, message.blocking_s), time.monotonic()
        if snapshot.persist and snapshot.is_complete:
            self.write(snapshot)

    def conclude(self, message: SaveConclusion) -> None:
        """The supervisor has completed the checkpoint of which a part was written here, or has given it up."""
        part = self._part
        if part and (part.request.attempt, part.step, part.final) == (message.attempt, message.step, message.final):
            if message.error:  # on the writer's thread: before the next part is written
                self._writer.submit(remove_part, part.shares(), _target(part), part.request.node)
            self._conclude(part, message.error, message.errno)

    def check_parts(self, now_s: float) -> None:
        """Give up a part that nobody completes: its supervisor is dead, or another node has lost its snapshot."""
        if self._part and now_s > self._part_until_s:
            self._conclude(self._part, "the supervisor has not completed the checkpoint", 0)

    def forget(self, number: int) -> None:
        """Drop a snapshot with which a training fails: it is neither restored nor written any more."""
        self._slots = {slot: item for slot, item in self._slots.items() if item.number != number}

    def write(self, snapshot: Snapshot) -> None:
        """Write a snapshot to disk, after the one that is being written; of those that wait only the newest is written."""
        if self.writing:
            self._next = snapshot
            return
        self.writing = snapshot
        self._writer.submit(self._write, snapshot)

    def write_newest(self, *, again: bool = False) -> None:
        """Write the newest snapshot unless it is on disk. `again`: also then, because it was read back broken."""
        newest = self.newest()
        if newest and again:
            newest.on_disk = False
        if newest and not newest.on_disk and newest not in (self.writing, self._next):
            newest.rescued = not newest.persist
            self.write(newest)

    def _fits(self, request: BufferRequest, capacity: int) -> bool:
        """Whether a rank's images may grow to `capacity` bytes; its first ones were allowed when the attempt began."""
        if request.rank not in self._images:
            return True
        allocated = self._allocated_bytes()
        need = (allocated // self._count) - self._images[request.rank][0].capacity + capacity
        bound = request.bound if request.bound >= 0 else None
        return buffer_count(need, free_bytes() + allocated, bound)[0] >= self._count

    def _allocated_bytes(self) -> int:
        return sum(image.capacity for mine in self._images.values() for image in mine)

    def _begin_attempt(self, request: BufferRequest) -> None:
        """Images of an earlier attempt that fit are used again; the others are freed with their snapshot."""
        bound = request.bound if request.bound >= 0 else None
        count, why = buffer_count(request.bytes * request.ranks_here, free_bytes() + self._allocated_bytes(), bound)
        if why:
            self._report(JournalEntry(request.attempt, EventKind.SNAPSHOTS_OFF, {"what": why}))
        if count != self._count or len(self._requests) != request.ranks_here or request.rank not in self._requests:
            self._images.clear()  # a snapshot holds its own images, so none that is complete is lost
        self._requests.clear()
        self._count, self._first = count, self._last + 1

    def _write(self, snapshot: Snapshot) -> None:
        """Runs on the writer's thread."""
        root, error, number = Path(snapshot.request.root), "", 0
        place, size, is_part = root, 0, snapshot.request.is_part
        try:
            # where others write, too, the supervisor clears up before it starts an attempt
            if not is_part and snapshot.request.root not in self._cleared:
                checkpoint_writer.clear_leftovers(root)
                self._cleared.add(snapshot.request.root)
            if is_part:
                write_part(snapshot.shares(), _target(snapshot), snapshot.request.node, lambda: snapshot.is_complete)
            else:
                place, size = checkpoint_writer.persist(
                    snapshot.shares(), root, snapshot.request.attempt, lambda: snapshot.is_complete
                )
        except Exception as problem:  # whatever it is, the supervisor is told, and the next snapshot can be written
            error, number = f"{type(problem).__name__}: {problem}", getattr(problem, "errno", None) or 0
        took_s = snapshot.blocking_s + time.monotonic() - snapshot.ready_s
        if is_part and not error:
            self._post(lambda: self._await_others(snapshot, took_s))
        else:
            self._post(lambda: self._finish_write(snapshot, place, size, took_s, error, number))

    def _await_others(self, snapshot: Snapshot, took_s: float) -> None:
        request = snapshot.request
        self._part, self._part_until_s = snapshot, boottime_s() + CONCLUSION_S
        self._report(
            PartWritten(
                request.attempt, request.root, request.node, snapshot.step, request.ranks_here, request.ranks,
                snapshot.blocking_s, took_s, snapshot.final, snapshot.rescued,
            )
        )  # fmt: skip

    def _conclude(self, part: Snapshot, error: str, number: int) -> None:
        self._part, part.on_disk = None, not error
        self._end_write(part, error, number)

    def _finish_write(self, snapshot: Snapshot, place: Path, size: int, took_s: float, error: str, number: int) -> None:
        attempt, step = snapshot.request.attempt, snapshot.step
        if error:
            self._report(SaveFailure(attempt, -1, step, error))
        else:
            snapshot.on_disk = True
            self._report(
                CheckpointWritten(
                    attempt, str(place), step, size, snapshot.blocking_s, took_s, snapshot.final, snapshot.rescued
                )
            )
        self._end_write(snapshot, error, number)

    def _end_write(self, snapshot: Snapshot, error: str, number: int) -> None:
        self._confirm(snapshot.request.attempt, PersistResult(snapshot.number, error, number))
        self.writing, following, self._next = None, self._next, None
        if following and following.is_complete:  # else ranks have filled its images again
            self.write(following)
