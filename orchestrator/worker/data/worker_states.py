"""The random states of a DataLoader's loading processes before their next batches, so that a resume in the middle of an epoch
need not read what the epoch has used.

A loading process draws from generators of its own: the global ones of the process, and its copies of those that the dataset and
the `collate_fn` hold. It writes their states, after each batch, into memory that it shares with the rank. A checkpoint takes those
before the next batch of each process; new processes begin with them.

PyTorch has no hook for a read in a loading process. So the function that makes what reads there (`create_fetcher`) is replaced, in
that process, by one that follows its reads.
"""

from __future__ import annotations

import pickle
import struct
import zlib
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch.utils.data import dataloader, get_worker_info

from kgorch.worker import rng_state
from kgorch.worker.data import random_states
from kgorch.worker.data.dataset_changes import DatasetChanges
from kgorch.worker.data.loader_search import parts_of
from kgorch.worker.data.random_states import LoaderRandomStates
from kgorch.worker.rng_state import RandomStates

SLOT_BYTES = 32 << 10
"""Of one state: three generators of 2.5 to 5 kB, and what the dataset holds. One that is larger is not kept."""

MOST_BYTES = 8 << 20
"""Of all processes together: 16 of them with prefetch_factor 2 need 6 MB. Containers often have 64 MB of shared memory."""

MOST_BEHIND = 10
"""Batches of a process that lie between one that a checkpoint counts as not used and the newest that was given."""

HEADER = struct.Struct("<II")
"""Length and checksum of a slot's content: the process may be killed while it writes."""

UNKNOWN = -1
"""Instead of an epoch in which a process has found the dataset unchanged."""

NAME_BYTES = 200
"""Of the path of what changes in a dataset."""

CPU = torch.device("cpu")


class WorkerStates:
    """The states of the processes of one iterator, which may stay for many epochs. The rank makes it before they start.

    Args:
        processes: number of loading processes. The process n % processes reads batch n of an epoch.
        prefetch: batches that a process may read before the first of them is given.
        begins: states as of `before` with which the processes begin the epoch `begins_at`; empty where they begin as they are.
        begins_at: as `epoch`.
        is_known: the dataset was found unchanged before.

    Attributes:
        epoch: epochs that the processes have begun before the running one.
    """

    @classmethod
    def of(
        cls, processes: int, prefetch: int, begins: Sequence[Any], begins_at: int, *, is_known: bool
    ) -> WorkerStates | None:
        """None where there is no room for them."""
        if processes * (prefetch + MOST_BEHIND) * SLOT_BYTES > MOST_BYTES:
            return None
        try:
            return cls(processes, prefetch, begins, begins_at, is_known=is_known)
        except (RuntimeError, OSError):  # shared memory is scarce in containers
            return None

    def __init__(
        self, processes: int, prefetch: int, begins: Sequence[Any] = (), begins_at: int = 0, *, is_known: bool = False
    ) -> None:
        self._slots, self._begins, self._begins_at = prefetch + MOST_BEHIND, list(begins), begins_at
        self._is_known = is_known
        self._memory = torch.zeros(processes, self._slots, SLOT_BYTES, dtype=torch.uint8).share_memory_()  # type: ignore[no-untyped-call]
        # by process: the epoch in which it has found the dataset unchanged; what it has found to change
        self._unchanged_in = torch.full((processes,), UNKNOWN).share_memory_()  # type: ignore[no-untyped-call]
        self._changed = torch.zeros(processes, NAME_BYTES, dtype=torch.uint8).share_memory_()  # type: ignore[no-untyped-call]
        self.epoch = 0

    @property
    def are_unchanged(self) -> bool:
        """All processes have found the dataset unchanged in this epoch."""
        return bool((self._unchanged_in == self.epoch).all())

    @property
    def changed(self) -> str:
        """As DatasetChanges has it, of any process."""
        names = (row.numpy().tobytes().rstrip(b"\0") for row in self._changed)
        return next(filter(None, names), b"").decode(errors="replace")

    def before(self, number: int, skipped: int) -> list[Any] | None:
        """The states of each process before the first batch that it reads from this one on.

        Args:
            number: of a batch in the running epoch.
            skipped: batches of the epoch that these processes have not read.

        Returns:
            As plain JSON, by process; None where a state is not known, or the dataset changes as it is read.
        """
        processes = len(self._memory)
        has_written = not (self._begins and self.epoch == self._begins_at and number - skipped < processes)
        if has_written and not self.are_unchanged:
            return None
        found = [None] * processes
        for batch in range(number, number + processes):
            process = batch % processes
            if (state := self._read(process, (batch - skipped) // processes)) is None:
                return None
            found[process] = state
        return found

    def _read(self, process: int, count: int) -> Any:
        if not count and self._begins and self.epoch == self._begins_at:
            return self._begins[process]  # it may not have written yet
        content = self._memory[process, count % self._slots].numpy().tobytes()
        length, checksum = HEADER.unpack_from(content)
        written = content[HEADER.size : HEADER.size + length]
        if not length or zlib.crc32(written) != checksum:
            return None
        epoch, number, (python, torch_state, numpy), held = pickle.loads(written)
        if (epoch, number) != (self.epoch, count):
            return None
        return random_states.plain(RandomStates(rng_state.as_tensor(torch_state), python, numpy, None), held)

    # In a loading process

    def follow_reads(self) -> None:
        """Have the reads of this loading process followed."""
        info, kind = get_worker_info(), dataloader._DatasetKind
        assert info is not None
        create = kind.create_fetcher
        epochs, reads = 0, cast("_Reads | None", None)

        def followed(*args: Any, **named: Any) -> Any:
            nonlocal epochs, reads
            fetcher = create(*args, **named)  # type: ignore[no-untyped-call]
            if fetcher.dataset is info.dataset:
                begin = self._begins[info.id] if self._begins and epochs == self._begins_at else None
                is_known = self._is_known if reads is None else reads.has_not_changed
                reads = _Reads(self, fetcher, info.id, epochs, begin, is_known=is_known)
                fetcher.fetch, epochs = reads.fetch, epochs + 1
            return fetcher

        kind.create_fetcher = staticmethod(followed)  # type: ignore[method-assign]

    def write(self, process: int, count: int, written: bytes, unchanged_in: int, changed: str) -> None:
        """Write the content of a slot, and whether the dataset has changed, in the loading process."""
        self._unchanged_in[process] = unchanged_in
        if name := bytearray(changed.encode(errors="replace")[:NAME_BYTES]):
            self._changed[process, : len(name)] = torch.frombuffer(name, dtype=torch.uint8)
        content = HEADER.pack(len(written), zlib.crc32(written)) + written
        if len(content) <= SLOT_BYTES:
            slot = self._memory[process, count % self._slots]
            slot[: len(content)] = torch.frombuffer(bytearray(content), dtype=torch.uint8)


class _Reads:
    """The reads of an epoch in a loading process.

    Args:
        begin: the states with which it begins; None: those that it has.
        is_known: the dataset was found unchanged before.
    """

    def __init__(
        self, states: WorkerStates, fetcher: Any, process: int, epoch: int, begin: Any, *, is_known: bool
    ) -> None:
        self._shared, self._fetch, self._process, self._epoch = states, fetcher.fetch, process, epoch
        things = fetcher.dataset, fetcher.collate_fn
        held = parts_of(SimpleNamespace(dataset=things[0], collate_fn=things[1])).generators
        self._states = LoaderRandomStates(CPU, held)
        self._changes = DatasetChanges(*things, is_known=is_known or begin is not None)
        self._count = 0
        if begin is not None:
            self._states.set(begin)
        self._write()

    def fetch(self, index: Any) -> Any:
        """Read a batch."""
        batch = self._fetch(index)
        self._count += 1
        self._changes.count_batch()
        self._write()
        return batch

    @property
    def has_not_changed(self) -> bool:
        """The dataset is known to be unchanged."""
        return self._changes.is_unchanged

    def _write(self) -> None:
        libraries, held = self._states.quick()
        quick = libraries.python, libraries.torch.numpy().tobytes(), libraries.numpy
        plain = {
            path: state.numpy().tobytes() if isinstance(state, torch.Tensor) else state for path, state in held.items()
        }
        written = pickle.dumps((self._epoch, self._count, quick, plain), pickle.HIGHEST_PROTOCOL)
        unchanged_in = self._epoch if self._changes.is_unchanged else UNKNOWN
        self._shared.write(self._process, self._count, written, unchanged_in, self._changes.changed)
