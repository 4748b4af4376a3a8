"""One rank's part of a snapshot: copies the state into a buffer that the keeper has mapped, too, and notifies the keeper.

Only the copy at the agreed step holds up the training. The keeper (snapshots/keeper.py) holds the snapshot in memory, and writes
it to disk beside the training when it was taken for that.

There are two buffers (*slots*), filled in turn. Which one comes next depends only on what all ranks have done at the same
steps, and on the slot in rank 0's request (`admit`): a buffer that is being written to disk is not filled.
"""

from __future__ import annotations

import json
import math
import socket
import time
from collections.abc import Callable, Mapping, Set
from pathlib import Path
from typing import Any, NamedTuple

import torch

from kgorch.checkpoint.manifest import MANIFEST_NAME, Manifest, checkpoint_folder_name, manifest_document
from kgorch.checkpoint.sharding import SHARDING_NAME
from kgorch.core.codes import EventKind
from kgorch.protocol import transport
from kgorch.protocol.codec import LineBuffer, ProtocolError
from kgorch.protocol.launch_spec import LaunchSpec
from kgorch.protocol.messages import JournalEntry, Message, Request, Response
from kgorch.protocol.snapshot_messages import (
    BufferGrant,
    BufferRequest,
    PersistResult,
    SaveFailure,
    SnapshotInfo,
    SnapshotReady,
)
from kgorch.system.clock import boottime_s
from kgorch.worker.checkpoint import sharded_tensors
from kgorch.worker.checkpoint.snapshot_buffer import BufferTooSmall, SnapshotBuffer
from kgorch.worker.checkpoint.state_codec import CapturedState
from kgorch.worker.ranks.consensus_board import SAVE, SLOT, SNAPSHOT, STOP, Board

PATIENCE_S = 600.0
"""Seconds until a save that is not on disk is given up."""

KEEPER_PATIENCE_S = 40.0
"""Seconds for a keeper to start (0.1 s on an idle machine), or to restart and finish a write. The shim kills one that hangs."""

SNAPSHOT_PATIENCE_S = 0.5
"""Seconds to wait for an answer that only a snapshot needs, because the training waits, too."""

OVERHEAD = 0.003
"""Share of the training's time that snapshots may take."""

GROWS = 1.05
"""Factor by which a buffer grows: a state that has outgrown its buffer may grow further."""


class KeeperBusy(Exception):
    """A snapshot needs a larger buffer while the keeper writes a save; the keeper grants it only afterwards."""


class PendingWrite(NamedTuple):
    """A snapshot on its way to disk.

    Attributes:
        number: of the snapshot, as the keeper counts.
        ordinal: number of the snapshot in this attempt: the same on all ranks, whichever keeper counts.
        slot: the buffer.
        step: optimizer steps.
    """

    number: int
    ordinal: int
    slot: int
    step: int


class RankSnapshot(NamedTuple):
    """One rank's part of a snapshot.

    Attributes:
        captured: the state.
        mine: this rank's share of the tensors, by path.
        documents: the JSON files of this rank by name. The first one's name is its shard's, too.
        manifest: of the checkpoint.
        began_s: monotonic reading since which the training waits: the machine may sleep meanwhile.
    """

    captured: CapturedState
    mine: Mapping[str, torch.Tensor]
    documents: Mapping[str, Mapping[str, Any]]
    manifest: Manifest
    began_s: float


class SnapshotWriter:
    """The snapshots of one rank.

    Attributes:
        blocking_s: seconds for which the last snapshot held up the training.
        error: why the last save has failed, else "".
        errno: of that error, where the system has one; else 0.
        failed_steps: steps of all saves of this attempt that have failed. `error` lasts until the next snapshot only.
    """

    def __init__(
        self,
        launch: LaunchSpec,
        rank: int,
        world_size: int,
        board: Board,
        tell: Callable[[SaveFailure | JournalEntry], None],
    ) -> None:
        self._launch, self._rank, self._world, self._board, self._tell = launch, rank, world_size, board, tell
        self._keeper: socket.socket | None = None
        self._lines = LineBuffer()
        self._images: list[SnapshotBuffer] = []
        self._pinned = False
        self._first = 1  # number of this attempt's first snapshot, as the keeper counts
        self._ordinal = self._slot = 0  # snapshots of this attempt, failed ones included: the same on all ranks
        self._count = 2  # buffers; 1 where memory is short, 0 where they are files
        self._promised = 0  # the slot of the request that was admitted last
        self._writing: PendingWrite | None = None
        self._tree: Mapping[str, Any] = {}
        self._names: Set[str] = frozenset()
        self._sharding: Mapping[str, Any] = {}
        self._encoded: dict[str, bytes] = {}
        self.blocking_s, self.error, self.errno = 0.0, "", 0
        self._blocking_before_s = math.inf
        self.failed_steps: set[int] = set()

    @property
    def interval_s(self) -> float | None:
        """Seconds between two snapshots; None where none are taken between saves."""
        if self._launch.snapshot_s is None or self._count < 2:
            return None
        # the smaller of two: a machine that stood still for a second costs no minutes without snapshots
        return max(self._launch.snapshot_s, min(self.blocking_s, self._blocking_before_s) / OVERHEAD)

    def prepare(self, need_bytes: int, device: torch.device) -> None:
        """Have the buffers allocated and touched before the first step.

        Args:
            need_bytes: of this rank's share.
            device: of the state.
        """
        self._pinned = device.type == "cuda"
        try:
            self._make_room(need_bytes, KEEPER_PATIENCE_S)
        except OSError as error:
            self._lose_keeper()
            print(f"kgorch: no room for snapshots yet: {error}", flush=True)

    def admit(self, pending: int) -> int:
        """On rank 0: the requests of all that are pending that all ranks are asked now, with the slot to fill.

        Args:
            pending: bits of ranks/consensus_board.py.

        Returns:
            0 for not yet.
        """
        busy = self._is_writing()
        if pending & STOP:
            # A stop does not wait for a save that is being written: it goes to the other buffer.
            kinds = pending | SAVE
        elif busy and (pending & SAVE or self._count < 2):
            kinds = pending & SNAPSHOT if self._count == 2 else 0  # a save waits for the one that is being written
        else:
            kinds = pending
        if not kinds:
            return 0
        slot = 1 - (self._writing.slot if self._writing and busy else self._slot) if self._count == 2 else 0
        # Kept for own_slot: a save without a request must not use the buffer that this request will fill.
        self._promised = slot
        return kinds | (SLOT if slot else 0)

    @property
    def _number(self) -> int:
        return self._first + self._ordinal - 1

    def next_slot(self) -> int:
        """The slot of a save that all ranks make without a request, after each has waited for its own last one."""
        return 1 - self._slot if self._count == 2 else 0

    def own_slot(self) -> int:
        """The slot of a save that all ranks make at once, before an open request is done. On rank 0, while nothing is written."""
        if self._count == 2 and self._board.open_request:
            return 1 - self._promised
        return self.next_slot()

    def save(self, snapshot: RankSnapshot, *, slot: int, persist: bool) -> bool:
        """Copy the state to a buffer. Returns whether that succeeded.

        Args:
            slot: the buffer.
            persist: the keeper writes the snapshot to disk.
        """
        self._ordinal, self._slot = self._ordinal + 1, slot  # also if it fails on this rank alone
        self.error, self.errno = "", 0
        files = {name: json.dumps(document).encode() for name, document in snapshot.documents.items()}
        if self._rank == 0:
            files |= self._of_all(snapshot.captured, snapshot.manifest)
        # A keeper that has died is started again by the shim, so a save is worth a second try.
        for again in (True, False):
            try:
                self._fill(snapshot, files, slot, persist=persist)
                return True
            except KeeperBusy:
                return False
            except OSError as error:
                self._lose_keeper()
                if not (again and persist):
                    self._fail(snapshot.manifest.step, error, persist)
                    return False
        raise AssertionError

    def _of_all(self, captured: CapturedState, manifest: Manifest) -> dict[str, bytes]:
        """The files that rank 0 writes for all ranks. Tree, names and layouts rarely change, so they are encoded when they do."""
        sharding = sharded_tensors.document_of(captured.tensors)
        now = captured.tree, set(captured.tensors), sharding
        if now != (self._tree, self._names, self._sharding):
            self._tree, self._names, self._sharding = now
            plain = self._names - sharding.get("tensors", {}).keys()
            self._encoded = {
                "state.json": json.dumps(captured.tree).encode(),
                "tensors": json.dumps(sorted(plain)).encode(),
            }
            if sharding:
                self._encoded[SHARDING_NAME] = json.dumps(sharding).encode()
        return {"described": json.dumps(manifest_document(manifest)).encode(), **self._encoded}

    def wait(self) -> bool:
        """Wait until the last save is on disk. Returns False when it has failed, or when the keeper is gone and nobody knows."""
        until = time.monotonic() + PATIENCE_S
        while self._is_writing(patience_s=0.05):
            assert self._writing
            if (failed := self._board.failed_rank(self._writing.ordinal)) is not None:
                self._finish(f"rank {failed} could not take part")
            elif time.monotonic() > until:
                self._finish("it takes too long")
        return not self.error

    def fetch(self) -> tuple[SnapshotInfo, list[int]]:
        """The newest snapshot that the keeper holds, and the descriptors of its buffers. Raises: OSError."""
        self._connect(KEEPER_PATIENCE_S)
        assert self._keeper
        transport.send(self._keeper, Request("fetch"))
        answer, descriptors = self._answer(SnapshotInfo, KEEPER_PATIENCE_S)
        assert isinstance(answer, SnapshotInfo)
        return answer, descriptors

    def _fill(self, snapshot: RankSnapshot, files: Mapping[str, bytes], slot: int, *, persist: bool) -> None:
        """Fill the buffer and notify the keeper. Raises: OSError, KeeperBusy."""
        mine, manifest = snapshot.mine, snapshot.manifest
        shard = next(iter(snapshot.documents)).removesuffix(".json") + ".safetensors"
        patience_s = KEEPER_PATIENCE_S if persist else 0.0
        size = sum(tensor.nbytes for tensor in mine.values()) + sum(len(content) for content in files.values())
        if self._count < 2 and persist:
            self.wait()  # the only buffer must not be filled while it is written
        if not self._images:  # the wait may have found the keeper gone
            self._make_room(size + 512 * len(mine) + 65536, patience_s)
        try:
            spans = self._image(slot).fill(mine, files, self._number)
        except BufferTooSmall as error:
            if not persist and self._is_writing():  # the keeper would answer only after the save
                raise KeeperBusy from None
            self._make_room(int(error.need * GROWS), patience_s)
            spans = self._image(slot).fill(mine, files, self._number)
        layout = {name or shard: list(span) for name, span in spans.items()}
        self._blocking_before_s = self.blocking_s or math.inf
        self.blocking_s = time.monotonic() - snapshot.began_s
        assert self._keeper
        transport.send(
            self._keeper,
            SnapshotReady(
                self._launch.attempt, self._rank, self._number, self._slot_of(slot), manifest.step, layout,
                manifest.final, persist, boottime_s() - self.blocking_s, self.blocking_s,
            ),
        )  # fmt: skip
        if persist:
            self._writing = PendingWrite(self._number, self._ordinal, self._slot_of(slot), manifest.step)

    def _slot_of(self, slot: int) -> int:
        """The slot as far as there are buffers: a keeper that started after it was chosen may have room for one alone."""
        return min(slot, len(self._images) - 1)

    def _image(self, slot: int) -> SnapshotBuffer:
        return self._images[self._slot_of(slot)]

    def _fail(self, step: int, error: OSError, persist: bool) -> None:
        if persist:  # a failed snapshot is replaced by the next one
            self.error, self._writing = str(error), None
            self.failed_steps.add(step)
            self._board.save_failed(self._ordinal)
            self._tell(SaveFailure(self._launch.attempt, self._rank, step, f"{type(error).__name__}: {error}"))

    def _finish(self, error: str, errno: int = 0) -> PendingWrite:
        """The save that is being written has ended. Args: error: why it has failed, else ""."""
        assert self._writing
        ended, self._writing, self.error, self.errno = self._writing, None, error, errno
        if error:
            self.failed_steps.add(ended.step)
        return ended

    def _is_writing(self, patience_s: float = 0.0) -> bool:
        if self._writing and self._keeper:
            try:
                for message in transport.receive_messages(self._keeper, self._lines, patience_s=patience_s):
                    if isinstance(message, PersistResult) and message.number == self._writing.number:
                        self._finish(message.error, message.errno)
                        break
            except (OSError, ProtocolError):
                self._lose_keeper()
        return self._writing is not None

    def _make_room(self, need: int, patience_s: float) -> None:
        self._images = []  # release the old ones first
        self._connect(patience_s)
        assert self._keeper
        spec = self._launch
        # The message has integers alone: -1 means no limit of host memory.
        bound = -1 if spec.memory_bytes is None else spec.memory_bytes
        node = spec.node
        transport.send(
            self._keeper,
            BufferRequest(
                spec.attempt,
                spec.run_id,
                spec.stage,
                spec.checkpoints,
                self._rank,
                self._world,
                need,
                bound,
                node.ranks_here if node else 0,
                node.number if node else 0,
            ),
        )
        answer, descriptors = self._answer(BufferGrant, patience_s)
        assert isinstance(answer, BufferGrant)
        pinned = self._pinned and answer.count > 0  # without room in memory the buffers are files
        self._images = [SnapshotBuffer(descriptor, answer.bytes, pinned=pinned) for descriptor in descriptors]
        if self._pinned and not all(image.is_pinned for image in self._images):
            why = (
                "CUDA cannot register this memory"
                if pinned
                else "there is no room for them in memory, so they are files"
            )
            self._tell(
                JournalEntry(spec.attempt, EventKind.SNAPSHOTS_NOT_PINNED, {"rank": str(self._rank), "why": why})
            )
        # The first snapshot goes to the keeper's choice: the other buffer may hold the newest complete snapshot.
        if not self._ordinal:
            self._slot = 1 - answer.slot
        self._first, self._count = answer.number, answer.count

    def _answer(self, kind: type[Message], patience_s: float) -> tuple[Message, list[int]]:
        """The keeper's answer of that kind; reports on saves that nobody waits for are skipped. Raises: OSError."""
        assert self._keeper
        until, received = time.monotonic() + max(patience_s, SNAPSHOT_PATIENCE_S), list[int]()
        try:
            while time.monotonic() < until:
                messages, descriptors = transport.receive(self._keeper, self._lines, patience_s=1.0)
                received += descriptors
                for message in messages:
                    if isinstance(message, kind):
                        received, granted = [], received
                        return message, granted
                    if isinstance(message, Response):
                        raise OSError(message.text)
        except ProtocolError as error:
            raise ConnectionError(str(error)) from None
        finally:
            transport.close_all(received)
        raise TimeoutError("the keeper does not answer")

    def _connect(self, patience_s: float) -> None:
        until = time.monotonic() + patience_s
        while self._keeper is None:
            try:
                self._keeper, self._lines = transport.connect(self._launch.keeper), LineBuffer()
            except OSError:
                if time.monotonic() >= until:
                    raise
                time.sleep(0.05)

    def _lose_keeper(self) -> None:
        """Drop the connection. A save that was being written counts as failed: no rank waits for it, and it is requested again."""
        if self._keeper:
            self._keeper.close()
        self._keeper, self._images = None, []
        if self._writing:
            lost = self._finish("the keeper is gone")
            self._board.save_failed(lost.ordinal)
            if self._rank == 0:
                self._tell(SaveFailure(self._launch.attempt, -1, lost.step, self.error))


def is_on_disk(launch: LaunchSpec, step: int, *, final: bool) -> bool:
    """Whether the stage has a checkpoint of this step."""
    return Path(launch.checkpoints, checkpoint_folder_name(step, final=final), MANIFEST_NAME).exists()
