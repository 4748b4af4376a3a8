"""The messages between ranks, snapshot server and supervisor about snapshots and checkpoints; see messages.py for the rest."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

MAX_RANKS = 4096
"""Of one attempt."""

MAX_IMAGE_BYTES = 1 << 46
"""Of one rank's share of the state."""

IMAGE_FILE_PATTERN = re.compile(r"[\w.-]{1,100}")
"""Name of a file within a snapshot's image."""

STAMP_BYTES = 4096
"""Behind an image: the number of its snapshot, once the snapshot is complete. A page, so that mappings stay aligned."""


# Between the ranks and the snapshot server


@dataclass(frozen=True, slots=True)
class BufferRequest:
    """A rank needs host memory for its snapshots.

    Attributes:
        run_id: of the run.
        stage: of the run.
        root: folder of the stage's checkpoints.
        rank: who asks.
        ranks: of the attempt.
        bytes: of one image.
        bound: the plan's bound on the images of all ranks, bytes; -1 for none.
        here: ranks of the attempt on this node; 0 for all of them.
        node: number of this node, where the attempt has several.

    Raises: ValueError for numbers that cannot be.
    """

    attempt: str
    run_id: str
    stage: str
    root: str
    rank: int
    ranks: int
    bytes: int
    bound: int = -1
    here: int = 0
    node: int = 0

    @property
    def ranks_here(self) -> int:
        """Ranks whose images are in this server."""
        return self.here or self.ranks

    @property
    def is_part(self) -> bool:
        """Whether other nodes have the rest of the attempt's ranks."""
        return 0 < self.here < self.ranks

    def __post_init__(self) -> None:
        if not 0 <= self.here <= self.ranks or not 0 <= self.node < MAX_RANKS:
            raise ValueError(f"not a possible node: {self.here} of {self.ranks} ranks on node {self.node}")
        if not 0 <= self.rank < self.ranks <= MAX_RANKS or not 0 <= self.bytes <= MAX_IMAGE_BYTES or self.bound < -1:
            raise ValueError(f"not a possible buffer: rank {self.rank} of {self.ranks}, {self.bytes} bytes")


@dataclass(frozen=True, slots=True)
class BufferGrant:
    """The images' descriptors come with this line, one for each slot.

    Attributes:
        count: of the slots; with one there is none to spare for snapshots between saves.
        bytes: of one image.
        number: of the attempt's first snapshot.
        slot: that the attempt fills first.
    """

    count: int
    bytes: int
    number: int
    slot: int


@dataclass(frozen=True, slots=True)
class SnapshotReady:
    """A rank's image in this slot is complete.

    Attributes:
        number: of the snapshot, from 1.
        slot: 0 or 1.
        step: of the stage.
        files: what the image holds, as name: [offset, bytes].
        final: the checkpoint closes its stage.
        persist: the snapshot is to be written to disk.
        began_s: instant at which training was held up.
        blocking_s: seconds for which it was.

    Raises: ValueError for a snapshot that cannot be.
    """

    attempt: str
    rank: int
    number: int
    slot: int
    step: int
    files: dict[str, list[int]]
    final: bool
    persist: bool
    began_s: float
    blocking_s: float

    def __post_init__(self) -> None:
        if self.number < 1 or self.slot not in (0, 1):
            raise ValueError(f"not a snapshot: {self.number} in slot {self.slot}")
        _check_image_files(self.files)


@dataclass(frozen=True, slots=True)
class PersistResult:
    """To the ranks: that snapshot is on disk, or why it is not.

    Attributes:
        error: empty if it is.
        errno: of the error, as the system counts them; 0 for another one.
    """

    number: int
    error: str = ""
    errno: int = 0


# The snapshot server to the supervisor


@dataclass(frozen=True, slots=True)
class CheckpointWritten:
    """A checkpoint is in its place. It is not verified yet.

    Attributes:
        path: of its folder.
        step: of the stage.
        bytes: of all its files.
        blocking_s: seconds for which training was held up.
        took_s: seconds from there until it was in its place; meaningless if `rescued`.
        final: it closes its stage.
        rescued: it was written from an older snapshot, without the ranks.
    """

    attempt: str
    path: str
    step: int
    bytes: int
    blocking_s: float
    took_s: float
    final: bool = False
    rescued: bool = False


@dataclass(frozen=True, slots=True)
class PartWritten:
    """The shares of one node's ranks are flushed to the temporary folder of a checkpoint; the supervisor completes it.

    Attributes:
        root: folder of the stage's checkpoints.
        node: whose ranks.
        ranks, all_ranks: number of ranks in this part, and of the attempt.
        blocking_s, took_s, final, rescued: as in CheckpointWritten.
    """

    attempt: str
    root: str
    node: int
    step: int
    ranks: int
    all_ranks: int
    blocking_s: float
    took_s: float
    final: bool = False
    rescued: bool = False


@dataclass(frozen=True, slots=True)
class SaveConclusion:
    """To a snapshot server: what became of a checkpoint of which it wrote a part. `error`, `errno`: as in PersistResult."""

    attempt: str
    step: int
    final: bool
    error: str = ""
    errno: int = 0


@dataclass(frozen=True, slots=True)
class SaveFailure:
    """A save failed. Also from ranks. `rank`: whose part failed; -1 when it was no rank's."""

    attempt: str
    rank: int
    step: int
    error: str


@dataclass(frozen=True, slots=True)
class SnapshotInfo:
    """The newest complete snapshot in the server's memory. To the request `fetch` the images' descriptors come with this line.

    Attributes:
        attempt: that made it.
        step: of the stage.
        number: of the snapshot.
        final: it closes its stage.
        at_s: instant at which it was begun.
        shares: each rank's files, as in SnapshotReady; empty unless fetched.

    Raises: ValueError for files that cannot be.
    """

    attempt: str
    run_id: str
    stage: str
    step: int
    number: int
    final: bool
    at_s: float
    shares: list[dict[str, list[int]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        for files in self.shares:
            _check_image_files(files)


def _check_image_files(files: Mapping[str, list[int]]) -> None:
    """Raises: ValueError. The files of an image are read at these offsets without another look."""
    for name, span in files.items():
        if not IMAGE_FILE_PATTERN.fullmatch(name) or len(span) != 2 or not all(type(n) is int and n >= 0 for n in span):
            raise ValueError(f"not a file of an image: {name!r:.80} at {span!r:.80}")
