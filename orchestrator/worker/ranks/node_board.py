"""Agreement of the ranks of several nodes on the step at which a request takes effect, without a collective that a step waits for.

The ranks of one node share a page (consensus_board.py). The first rank of each node, its *leader*, takes part in exchanges: an
asynchronous MAX of a few numbers, in a gloo group of the leaders alone. An exchange is started between two steps and read some
steps later, when it has long arrived. Both steps are the same on every rank of every node, because each exchange tells the
distance to the next one, and all ranks make the same steps. So a request takes effect at the step at which its exchange is read;
nobody has to acknowledge it. A leader publishes each result on its node's page as soon as it is there; the other ranks read it
there at the same step.

Only rank 0 orders. What another node wants (its ranks got a SIGTERM, or have seen the deadline pass) reaches rank 0 by an exchange,
and becomes an order with the next one.

Two exchanges are INTERVAL_S apart, by the slowest node's steps, but at least one step: an order takes effect within about two such
intervals. With steps longer than that each exchange is read one step after its start.
"""

from __future__ import annotations

import array
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from kgorch.worker.ranks.consensus_board import SAVE, STOP, Board
from kgorch.worker.ranks.process_group import UNLIMITED

INTERVAL_S = 0.25
"""Seconds between two exchanges. One takes 0.1 to 0.3 ms of the thread that trains (benchmarks/nodes.py)."""

MAX_DISTANCE = 64
"""Most steps between two exchanges: a step that suddenly takes seconds must not put off a save for minutes."""

SETTLE_S = 5.0
"""Seconds to wait at the end for an exchange that is under way, so that the other nodes can read it."""

_KINDS, _WISH, _STEP_US = range(3)
_RESULT_KINDS, _RESULT_DISTANCE, _RESULT_NUMBER = 0, 8, 16
"""Places in the numbers of an exchange, and in the slots behind those of the ranks, by turns, where a result is published."""


class Result(NamedTuple):
    """What an exchange has found.

    Attributes:
        kinds: bits of an order, to be carried out where this is read.
        distance: steps to the next exchange.
    """

    kinds: int
    distance: int


class LeaderGroup:
    """The gloo group of the leaders. Every rank must create it, because PyTorch makes groups with all ranks.

    Args:
        leaders: their ranks.
    """

    def __init__(self, leaders: Sequence[int]) -> None:
        self._group: Any = dist.new_group(list(leaders), backend="gloo", timeout=UNLIMITED)
        self._highest = dist.AllreduceOptions()
        self._highest.reduceOp = dist.ReduceOp(dist.ReduceOp.MAX)

    def start(self, numbers: torch.Tensor) -> Any:
        """Begin to replace `numbers` by the highest of all leaders. Returns what to wait for."""
        # what dist.all_reduce does after its checks and log lines, which cost as much as the call
        return self._group.allreduce([numbers], self._highest)

    def highest(self, number: int) -> int:
        """The highest of all leaders' numbers; waits for all of them."""
        numbers = torch.tensor([number])
        dist.all_reduce(numbers, dist.ReduceOp.MAX, group=self._group)
        return int(numbers.item())


class NodeBoard(Board):
    """One rank's view of its node's page, and the exchanges between nodes.

    Args:
        rank: of all nodes. local_rank, local_size: on this node.
        group: of the leaders.
    """

    spans_nodes = True

    def __init__(self, path: str, rank: int, local_rank: int, local_size: int, group: LeaderGroup) -> None:
        super().__init__(path, local_rank, local_size)
        self._is_first, self._is_leader, self._group = rank == 0, local_rank == 0, group
        self._wish = 0
        self._open = 0  # on rank 0: the bits of an order that is on its way
        self._number = 0  # of the exchange that was started last, from 1
        self._next: int | None = None  # the step at which it is read, and the next one is started
        # one memory: to assign to elements of a tensor takes ten times as long
        self._fields = array.array("q", [0, 0, 0])
        self._numbers = torch.frombuffer(self._fields, dtype=torch.int64)
        self._work: Any = None
        self._began_s, self._began_step = 0.0, 0

    def ask(self, kinds: int) -> None:
        """Request that all ranks of all nodes do `kinds`. On the leader of another node than the first: only a stop."""
        if self._is_first:
            super().ask(kinds)
        elif self._is_leader and kinds & STOP:
            self._wish = SAVE | STOP

    @property
    def open_request(self) -> int:
        return self._open

    @property
    def stop_asked(self) -> bool:
        return bool((self._open | self._pending) & STOP)

    def tick(self, step: int) -> int:
        if self._next is None:
            self._next = step
        elif step < self._next:
            if self._is_leader and self._work is not None and self._work.is_completed():
                self._publish()
            return 0
        result = self._result() if self._number else Result(0, 1)
        if result.kinds:
            self._open = 0
        self._number += 1
        self._next = step + result.distance
        # Where an order is carried out now nothing is asked yet: the order changes which buffer is free. After a stop
        # there is no step at which an exchange could be read.
        if self._is_leader and not result.kinds & STOP:
            self._start(step, may_ask=not result.kinds)
        return result.kinds

    def vote_everywhere(self, flag: int) -> int:
        worst = self.vote(flag)
        if self._is_leader:
            worst = self._group.highest(worst)
        return self.vote(worst)

    def settle(self) -> None:
        until_s = time.monotonic() + SETTLE_S
        while self._work is not None and not self._work.is_completed() and time.monotonic() < until_s:
            time.sleep(0.001)

    def _start(self, step: int, *, may_ask: bool) -> None:
        now_s = time.monotonic()
        steps = max(step - self._began_step, 1)
        step_us = int((now_s - self._began_s) / steps * 1e6) if self._began_s else 0
        self._began_s, self._began_step = now_s, step
        kinds = 0
        if self._is_first and may_ask and self._pending:
            with self._lock:
                kinds = self.admit(self._pending)
                self._pending &= ~kinds
            self._open = kinds
        self._fields[_KINDS], self._fields[_WISH], self._fields[_STEP_US] = kinds, self._wish, step_us
        self._work = self._group.start(self._numbers)

    def _result(self) -> Result:
        """Of the exchange that was started last. Raises: PeersLost, RuntimeError of gloo where a node is gone."""
        if self._is_leader:
            if self._work is not None:
                self._work.wait()
                self._publish()
        else:
            self._wait_for(0, lambda: self._read(self._slot, _RESULT_NUMBER) >= self._number)
        result = Result(self._read(self._slot, _RESULT_KINDS), self._read(self._slot, _RESULT_DISTANCE))
        self.acknowledge(self._number)
        return result

    def _publish(self) -> None:
        """Write what has arrived to the page. Of its two places the other one holds the result before this one."""
        self._work = None
        kinds, wish, step_us = self._fields
        if self._is_first and wish:
            super().ask(wish)
        for rank in range(1, self._world):
            # of the two results before this one the older is overwritten: all must have read it
            self._wait_for(rank, lambda rank=rank: self.acknowledged(rank) >= self._number - 2)  # type: ignore[misc]
        distance = min(max(round(INTERVAL_S * 1e6 / step_us), 1), MAX_DISTANCE) if step_us else 1
        self._write(self._slot, _RESULT_KINDS, kinds)
        self._write(self._slot, _RESULT_DISTANCE, distance)
        self._write(self._slot, _RESULT_NUMBER, self._number)  # last: whoever sees it finds the rest

    @property
    def _slot(self) -> int:
        """Where the result of the exchange that was started last is published."""
        return self._world + (self._number & 1)
