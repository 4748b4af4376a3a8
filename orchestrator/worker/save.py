"""One rank's part of a snapshot: copy the state into an image that the keeper holds too, and tell it so.

The copy at the agreed step is all that holds the training up. What becomes of the snapshot is the keeper's business
(snapshots/keeper.py): it stays in memory, and is written to disk beside the training when it was taken for that.

Two slots, filled in turn. Which one comes next hangs only on what all ranks have done at the same steps, and on what
rank 0 says with each request (`admit`): one that is being written is not filled.
"""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable, Mapping, Set
from pathlib import Path
from typing import Any, NamedTuple

import torch

from orchestrator.checkpoint.manifest import MANIFEST_NAME, Manifest, checkpoint_folder_name, manifest_document
from orchestrator.core.codes import EventKind
from orchestrator.protocol import transport
from orchestrator.protocol.codec import LineBuffer, ProtocolError
from orchestrator.protocol.launch_spec import LaunchSpec
from orchestrator.protocol.messages import JournalEntry, Message, Request, Response
from orchestrator.protocol.snapshot_messages import (
    BufferGrant,
    BufferRequest,
    PersistResult,
    SaveFailure,
    SnapshotInfo,
    SnapshotReady,
)
from orchestrator.system.clock import boottime_s
from orchestrator.worker.board import SAVE, SLOT, SNAPSHOT, STOP, Board
from orchestrator.worker.image import Image, TooSmall
from orchestrator.worker.state import Captured

PATIENCE_S = 600.0
KEEPER_PATIENCE_S = 40.0
"""For a keeper to come up, or up again, and to have written what it is writing: 0.1 s on an idle machine. One that hangs is
killed by the shim in the meantime."""

SNAPSHOT_PATIENCE_S = 0.5
"""For an answer that only a snapshot needs: training waits."""

OVERHEAD = 0.003
"""The part of the training's time that snapshots may take."""

GROWS = 1.05
"""A state that has outgrown its image may go on growing."""


class KeeperWrites(Exception):
    """A snapshot has grown while a save is on its way to disk: only then does the keeper give more room."""


class Writing(NamedTuple):
    """A snapshot on its way to disk. `taken`: the same for all ranks, whichever keeper counts."""

    number: int
    taken: int
    slot: int
    step: int


class Saver:
    """Attributes: blocking_s: what the last snapshot held the training up; error: why the last save failed, else ""."""

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
        self._images: list[Image] = []
        self._pinned = False
        self._first = 1  # this attempt's first number, as the keeper counts
        self._taken = self._slot = 0  # how many this attempt has taken, failed ones too: the same on all ranks
        self._count = 2
        self._promised = 0  # the slot of the request that was admitted last
        self._writing: Writing | None = None
        self._tree: Mapping[str, Any] = {}
        self._names: Set[str] = frozenset()
        self._encoded: dict[str, bytes] = {}
        self.blocking_s, self.error = 0.0, ""

    @property
    def interval_s(self) -> float | None:
        """Seconds from one snapshot to the next; None where there are none between saves."""
        if self._launch.snapshot_s is None or self._count < 2:
            return None
        return max(self._launch.snapshot_s, self.blocking_s / OVERHEAD)

    def prepare(self, need_bytes: int, device: torch.device) -> None:
        """Have the images laid and touched, before the first step. `need_bytes`: of this rank's share."""
        self._pinned = device.type == "cuda"
        try:
            self._make_room(need_bytes, KEEPER_PATIENCE_S)
        except OSError as error:
            self._lose_keeper()
            print(f"kgorch: no room for snapshots yet: {error}", flush=True)

    def admit(self, wanted: int) -> int:
        """On rank 0, of the kinds that were asked for: what all ranks are asked now, and with which slot; 0 for not yet."""
        busy = self._is_writing()
        if wanted & STOP:
            kinds = wanted | SAVE
        elif busy and (wanted & SAVE or self._count < 2):
            kinds = wanted & SNAPSHOT if self._count == 2 else 0  # a save waits: one is on its way
        else:
            kinds = wanted
        if not kinds:
            return 0
        slot = 1 - (self._writing.slot if self._writing and busy else self._slot) if self._count == 2 else 0
        self._promised = slot
        return kinds | (SLOT if slot else 0)

    @property
    def _number(self) -> int:
        return self._first + self._taken - 1

    def next_slot(self) -> int:
        """For a save that all ranks make without a request; each waits for its own last one first."""
        return 1 - self._slot if self._count == 2 else 0

    def own_slot(self) -> int:
        """On rank 0, while nothing is written: for a save that all ranks make at once, before what an open request asks for."""
        if self._count == 2 and self._board.open_request:
            return 1 - self._promised
        return self.next_slot()

    def save(
        self, captured: Captured, mine: Mapping[str, torch.Tensor], docs: Mapping[str, Mapping[str, Any]],
        described: Manifest, *, slot: int, persist: bool, began_s: float,
    ) -> bool:  # fmt: skip
        """Copy the state aside, whence the keeper writes it if `persist`. False when it could not be.

        Args:
            mine: this rank's share of the tensors.
            docs: the JSON files of this rank. The first of them bears the name of its shard, too.
            began_s: when the training was held up.
        """  # fmt: skip
        self._taken, self._slot, self.error = self._taken + 1, slot, ""  # also if it fails here, and not elsewhere
        files = {name: json.dumps(document).encode() for name, document in docs.items()}
        if self._rank == 0:
            files |= self._of_all(captured, described)
        shard = next(iter(docs)).removesuffix(".json") + ".safetensors"
        patience_s = KEEPER_PATIENCE_S if persist else 0.0
        for again in (True, False):
            try:
                self._fill(mine, files, shard, described, slot, persist, began_s, patience_s)
                return True
            except KeeperWrites:
                return False
            except OSError as error:
                self._lose_keeper()
                if not (again and persist):
                    self._fail(described.step, error, persist)
                    return False
        raise AssertionError

    def _of_all(self, captured: Captured, described: Manifest) -> dict[str, bytes]:
        """What rank 0 writes for all. The tree and the names are much the same each time: they are encoded when they change."""
        if captured.tree != self._tree or captured.tensors.keys() != self._names:
            self._tree, self._names = captured.tree, set(captured.tensors)
            self._encoded = {
                "state.json": json.dumps(captured.tree).encode(),
                "tensors": json.dumps(sorted(captured.tensors)).encode(),
            }
        return {"described": json.dumps(manifest_document(described)).encode(), **self._encoded}

    def wait(self) -> bool:
        """Until the last save is on disk. False when it failed, or nobody knows: the keeper is gone."""
        until = time.monotonic() + PATIENCE_S
        while self._is_writing(patience_s=0.05):
            assert self._writing
            if (failed := self._board.failed_rank(self._writing.taken)) is not None:
                self.error, self._writing = f"rank {failed} could not take part", None
            elif time.monotonic() > until:
                self.error, self._writing = "it takes too long", None
        return not self.error

    def fetch(self) -> tuple[SnapshotInfo, list[int]]:
        """The newest snapshot that the keeper holds. Raises: OSError."""
        self._connect(KEEPER_PATIENCE_S)
        assert self._keeper
        transport.send(self._keeper, Request("fetch"))
        answer, descriptors = self._answer(SnapshotInfo, KEEPER_PATIENCE_S)
        assert isinstance(answer, SnapshotInfo)
        return answer, descriptors

    def _fill(
        self, mine: Mapping[str, torch.Tensor], files: Mapping[str, bytes], shard: str, described: Manifest, slot: int,
        persist: bool, began_s: float, patience_s: float,
    ) -> None:  # fmt: skip
        size = sum(tensor.nbytes for tensor in mine.values()) + sum(len(content) for content in files.values())
        if not self._images:
            self._make_room(size + 512 * len(mine) + 65536, patience_s)
        if self._count < 2 and persist:
            self.wait()
        try:
            spans = self._image(slot).fill(mine, files, self._number)
        except TooSmall as error:
            if not persist and self._is_writing():  # its answer would come behind the save, and be waited for in vain
                raise KeeperWrites from None
            self._make_room(int(error.need * GROWS), patience_s)
            spans = self._image(slot).fill(mine, files, self._number)
        named = {name or shard: list(span) for name, span in spans.items()}
        self.blocking_s = boottime_s() - began_s
        assert self._keeper
        transport.send(
            self._keeper,
            SnapshotReady(
                self._launch.attempt, self._rank, self._number, self._slot_of(slot), described.step, named,
                described.final, persist, began_s, self.blocking_s,
            ),
        )  # fmt: skip
        if persist:
            self._writing = Writing(self._number, self._taken, self._slot_of(slot), described.step)

    def _slot_of(self, slot: int) -> int:
        """A keeper that came up since the slot was chosen may have room for one image only."""
        return min(slot, len(self._images) - 1)

    def _image(self, slot: int) -> Image:
        return self._images[self._slot_of(slot)]

    def _fail(self, step: int, error: OSError, persist: bool) -> None:
        if persist:  # a snapshot that cannot be taken is made up for by the next
            self.error, self._writing = str(error), None
            self._board.save_failed(self._taken)
            self._tell(SaveFailure(self._launch.attempt, self._rank, step, f"{type(error).__name__}: {error}"))

    def _is_writing(self, patience_s: float = 0.0) -> bool:
        if self._writing and self._keeper:
            try:
                for message in transport.receive_messages(self._keeper, self._lines, patience_s=patience_s):
                    if isinstance(message, PersistResult) and message.number == self._writing.number:
                        self.error, self._writing = message.error, None
                        break
            except (OSError, ProtocolError):
                self._lose_keeper()
        return self._writing is not None

    def _make_room(self, need: int, patience_s: float) -> None:
        self._images = []  # let the old ones go first
        self._connect(patience_s)
        assert self._keeper
        told = self._launch
        bound = -1 if told.memory_bytes is None else told.memory_bytes
        transport.send(
            self._keeper,
            BufferRequest(
                told.attempt,
                told.run_id,
                told.stage,
                told.checkpoints,
                self._rank,
                self._world,
                need,
                bound,
            ),
        )
        answer, descriptors = self._answer(BufferGrant, patience_s)
        assert isinstance(answer, BufferGrant)
        pinned = self._pinned and answer.count > 0  # with no room in memory the images are files
        self._images = [Image(descriptor, answer.bytes, pinned=pinned) for descriptor in descriptors]
        if self._pinned and not all(image.is_pinned for image in self._images):
            why = (
                "CUDA cannot register this memory"
                if pinned
                else "there is no room for them in memory, so they are files"
            )
            self._tell(
                JournalEntry(told.attempt, EventKind.SNAPSHOTS_NOT_PINNED, {"rank": str(self._rank), "why": why})
            )
        if not self._taken:
            self._slot = 1 - answer.slot
        self._first, self._count = answer.number, answer.count

    def _answer(self, kind: type[Message], patience_s: float) -> tuple[Message, list[int]]:
        """The keeper's, passing over word of saves that nobody waits for any more. Raises: OSError."""
        assert self._keeper
        until, kept = time.monotonic() + max(patience_s, SNAPSHOT_PATIENCE_S), list[int]()
        try:
            while time.monotonic() < until:
                messages, descriptors = transport.receive(self._keeper, self._lines, patience_s=1.0)
                kept += descriptors
                for message in messages:
                    if isinstance(message, kind):
                        kept, given = [], kept
                        return message, given
                    if isinstance(message, Response):
                        raise OSError(message.text)
        except ProtocolError as error:
            raise ConnectionError(str(error)) from None
        finally:
            transport.close_all(kept)
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
        """What it was writing, nobody will hear of; so that no rank waits for it, and the supervisor asks again."""
        if self._keeper:
            self._keeper.close()
        self._keeper, self._images = None, []
        if self._writing:
            lost, self._writing, self.error = self._writing, None, "the keeper is gone"
            self._board.save_failed(lost.taken)
            if self._rank == 0:
                self._tell(SaveFailure(self._launch.attempt, -1, lost.step, self.error))


def is_on_disk(launch: LaunchSpec, step: int, *, final: bool) -> bool:
    return Path(launch.checkpoints, checkpoint_folder_name(step, final=final), MANIFEST_NAME).exists()
