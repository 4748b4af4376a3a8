"""Agreement of the ranks of one machine on the step at which a request takes effect, without a collective.

The board is a page of shared memory: one word for the open request, which rank 0 alone writes, and one slot per rank. A rank that
sees a new request writes its step and then the request's number into its slot. Once every slot has the number, all ranks compute
the same target: the highest of the steps + HORIZON. A rank that has done HORIZON steps since its own acknowledgement waits for the
others, so no rank passes the target unaware. A step without a request costs one read.

Measured on two cores with steps of 9 ms: 1–3 µs a step, no disagreement in 76 requests.
"""

from __future__ import annotations

import mmap
import os
import struct
import threading
import time
from collections.abc import Callable
from pathlib import Path

SAVE, STOP, SNAPSHOT, SLOT, DOWN, UP = 1, 2, 4, 8, 16, 32
"""Bits of a request: a save, a stop after it, a snapshot that stays in memory, the number of the buffer (slot) that it goes to,
one rung down the memory ladder, one rung up."""

HORIZON = 2
"""Steps between the highest acknowledgement and the target. With one, rank 0 would wait for a rank that is two boundaries ahead,
and that one in a collective for rank 0."""

MOST_STEPS = 2 + HORIZON
"""Steps from a request until all ranks carry it out, at most: the running one, another until a rank has seen the request that came
to its boundary a moment before, and HORIZON. The lead counts them (core/checkpoint/save_deadline.py, STEPS_TO_AGREE)."""

SLOT_BYTES = 64  # a cache line, so that ranks do not write to each other's
GONE = 1 << 60
"""Request number of a rank that is done: higher than any."""

_WORD = struct.Struct("<q")
_REQUEST, _ACK_STEP, _ACK_ID, _FAILED, _VOTES, _PID, _PASSED, _COMPARED = 0, 0, 8, 16, (24, 32), 40, 48, 56
SPINS, NAP_S, LIVES_S = 200, 50e-6, 0.2
"""Waiting: reads without a pause, then seconds between two reads, and seconds between two checks that the other rank lives."""


class PeersLost(RuntimeError):
    """Another rank has died, or has not reached a step boundary for too long. The launcher ends this attempt."""


NODE_SLOTS = 2
"""Slots behind those of the ranks, for what several nodes have agreed on (node_board.py)."""


def size(world_size: int) -> int:
    """Bytes of a board."""
    return SLOT_BYTES * (world_size + 1 + NODE_SLOTS)


class Board:
    """One rank's view of the shared page.

    Args:
        path: a file of `size(world_size)` zero bytes that every rank of the attempt can open.
        patience_s: seconds to wait for the acknowledgement of the others.

    Attributes:
        spans_nodes: there are ranks on other nodes, which see nothing of this page.
        admit: on rank 0, maps the requests that are pending to those that all ranks are asked now; 0 for not yet.
        worst_rank: the first rank that gave the highest flag of the last vote.
    """

    spans_nodes = False

    def __init__(self, path: str, rank: int, world_size: int, *, patience_s: float = 120.0) -> None:
        self.admit: Callable[[int], int] = lambda pending: pending
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            self._map = mmap.mmap(descriptor, size(world_size))
        finally:
            os.close(descriptor)
        self._rank, self._world, self._patience_s = rank, world_size, patience_s
        self._lock = threading.RLock()  # reentrant: a signal handler may ask while this very thread posts
        self._pending = 0  # on rank 0: pending requests that are not yet written to the page
        self._settled = 0  # the request word that this rank has carried out
        self._request = 0  # the request word that this rank has acknowledged
        self._acked_at = 0
        self._target: int | None = None
        self._votes = self.worst_rank = 0
        self._compared: tuple[int, int] | None = None  # step and flag of the last comparison
        self._write(rank, _PID, os.getpid())

    def ask(self, kinds: int) -> None:
        """Request that all ranks do `kinds` (SAVE, STOP, SNAPSHOT, …) at a common step. From any thread; ignored on other ranks
        than 0."""
        if self._rank == 0:
            with self._lock:
                self._pending |= kinds

    @property
    def open_request(self) -> int:
        """On rank 0: the bits that all ranks were asked for and have not yet carried out; 0 for none."""
        (word,) = _WORD.unpack_from(self._map, _REQUEST)
        return 0 if word == self._settled else int(word & 0xFF)

    @property
    def stop_asked(self) -> bool:
        """On rank 0: a stop is open or pending."""
        return bool((self.open_request | self._pending) & STOP)

    def tick(self, step: int) -> int:
        """Call between two steps on every rank. Returns the bits that all ranks carry out now; almost always 0.

        Raises:
            PeersLost: the others did not acknowledge within `patience_s`.
        """
        if self._pending:  # only rank 0 has any
            self._post()
        (word,) = _WORD.unpack_from(self._map, _REQUEST)
        if word == self._settled:
            return 0
        if word != self._request:
            self._request, self._acked_at, self._target = word, step, None
            # The step first: a reader that sees the number must find the step that belongs to it.
            self._write(self._rank, _ACK_STEP, step)
            self.acknowledge(word >> 8)
        if self._target is None:
            self._target = self._agree(step)
        if step != self._target:
            return 0
        self._settled = word
        return int(word & 0xFF)

    def vote(self, flag: int) -> int:
        """The highest flag (0 to 255) that any rank gives at this vote. All ranks vote equally often, and wait for each other.

        Each rank has two words in turn, because it may write its next vote before the last rank has read this one.

        Raises:
            PeersLost: a rank has died.
        """
        if self._world == 1:
            self.worst_rank = 0
            return flag
        self._votes += 1
        place = _VOTES[self._votes & 1]
        self._write(self._rank, place, self._votes << 8 | flag)
        flags = [flag if rank == self._rank else self._vote_of(rank, place) for rank in range(self._world)]
        worst = max(flags)
        self.worst_rank = flags.index(worst)
        return worst

    def vote_everywhere(self, flag: int) -> int:
        """The same of the ranks of all nodes. It may wait for the network, so it is not for the midst of a step."""
        return self.vote(flag)

    def pass_step(self, step: int) -> None:
        """Mark this step boundary as passed without a comparison, so that no rank waits here for this one."""
        self._write(self._rank, _PASSED, step + 1)

    def compare(self, step: int, flag: int) -> int | None:
        """The highest flag (0 to 15) of all ranks at this step boundary; None where a rank has passed it without comparing.

        A rank that passes does not wait. One that compares waits until the others have reached the same boundary. A word holds
        the last two comparisons: a rank may reach its next one before a slow rank has read this one, and waits there, so it is
        never further ahead.

        Raises:
            PeersLost: a rank has died.
        """
        before, flag_before = self._compared or (step, 0)
        self._compared = (step, flag)
        word = step << 24 | min(step - before, 0xFFFF) << 8 | flag_before << 4 | flag
        self._write(self._rank, _COMPARED, word)
        self._write(self._rank, _PASSED, step + 1)  # + 1, because a page of zeros means that nothing was passed
        flags = [self._compared_by(rank, step) for rank in range(self._world)]
        values = [flag for flag in flags if flag is not None]
        return max(values) if len(values) == self._world else None

    def _compared_by(self, rank: int, step: int) -> int | None:
        self._wait_for(rank, lambda: self._read(rank, _PASSED) > step)
        word = self._read(rank, _COMPARED)
        last, since = word >> 24, word >> 8 & 0xFFFF
        if last == step:
            return word & 0xF
        return word >> 4 & 0xF if since and last - since == step else None

    def _vote_of(self, rank: int, place: int) -> int:
        word = self._read(rank, place)
        if word >> 8 < self._votes:
            self._wait_for(rank, lambda: self._read(rank, place) >> 8 >= self._votes)
            word = self._read(rank, place)
        return word & 0xFF

    def _wait_for(self, rank: int, is_there: Callable[[], bool]) -> None:
        looks, look_for_life_s = 0, 0.0
        while not is_there():
            looks += 1
            # A vote usually takes microseconds, a sleep at least 50 of them; with more ranks than cores the others must run.
            if looks < SPINS:
                os.sched_yield()
                continue
            if looks % 1000 == 0 and (now_s := time.monotonic()) > look_for_life_s:
                look_for_life_s = now_s + LIVES_S
                if (pid := self._read(rank, _PID)) and not Path(f"/proc/{pid}").exists():
                    raise PeersLost(f"rank {rank} has died")
            time.sleep(NAP_S)

    def acknowledge(self, number: int) -> None:
        """This rank has seen what has this number."""
        self._write(self._rank, _ACK_ID, number)

    def acknowledged(self, rank: int) -> int:
        """The highest number that a rank has acknowledged."""
        return self._read(rank, _ACK_ID)

    def leave(self) -> None:
        """This rank is done: the others need not wait for it."""
        self._write(self._rank, _ACK_STEP, 0)
        self.acknowledge(GONE)

    def settle(self) -> None:
        """At the end of this rank: leave nothing open that other nodes wait for."""

    def save_failed(self, number: int) -> None:
        """This rank's part of the save with this number has failed, so rank 0 need not wait for it."""
        self._write(self._rank, _FAILED, number)

    def failed_rank(self, number: int) -> int | None:
        """The first rank whose part of the save with this number has failed; None where there is none."""
        return next((rank for rank in range(self._world) if self._read(rank, _FAILED) >= number), None)

    def _post(self) -> None:
        (word,) = _WORD.unpack_from(self._map, _REQUEST)
        if word != self._settled:
            return  # one request at a time: this one is posted when the open one is carried out
        # Locked, so that a request of another thread between the two lines is not lost.
        with self._lock:
            kinds = self.admit(self._pending)
            self._pending &= ~kinds
        if not kinds:
            return
        _WORD.pack_into(self._map, _REQUEST, ((word >> 8) + 1) << 8 | kinds)

    def _agree(self, step: int) -> int | None:
        number, until = self._request >> 8, None
        while True:
            if all(self.acknowledged(rank) >= number for rank in range(self._world)):
                return max(self._read(rank, _ACK_STEP) for rank in range(self._world)) + HORIZON
            # Not yet at the limit: train on, and look again at the next boundary.
            if step < self._acked_at + HORIZON:
                return None
            until = until or time.monotonic() + self._patience_s
            if time.monotonic() > until:
                raise PeersLost(
                    f"rank {self._rank} waited {self._patience_s:.0f} s at step {step} for the others to take an order"
                )
            time.sleep(0.0001)

    def _read(self, rank: int, field: int) -> int:
        return int(_WORD.unpack_from(self._map, SLOT_BYTES * (rank + 1) + field)[0])

    def _write(self, rank: int, field: int, value: int) -> None:
        _WORD.pack_into(self._map, SLOT_BYTES * (rank + 1) + field, value)
