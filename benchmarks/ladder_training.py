"""The trainings in which benchmarks/ladder.py measures the memory ladder: every rank of an attempt runs one of these."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch
from activation import Layers, convolutions, transformer_layer
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from kgorch import Session, attach
from kgorch.worker.ranks.consensus_board import _VOTES, Board, size

IMPOSSIBLE = 1 << 46
"""Elements that no allocator can give: it fails as it does when memory has run out."""

BATCH = 8
"""Samples of a rank's step, which takes about 10 ms on one core."""

MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "4 transformer layers": (lambda: Layers([transformer_layer(64) for _ in range(4)]), (32, 64)),
    "6 conv blocks with BatchNorm": (lambda: Layers([convolutions() for _ in range(6)]), (16, 16, 16)),
}

WAYS = ("plain", "session.backward", "with the ladder")
"""Forward and backward as a person writes them; the same through kgorch with no ladder to watch; with one, and losses
looked at."""

Result = TypeVar("Result")


class Spent:
    """Processor time of this thread inside what was wrapped; one within another counts once."""

    def __init__(self) -> None:
        self.seconds, self._depth = 0.0, 0

    def timed(self, call: Callable[..., Result]) -> Callable[..., Result]:
        def wrapped(*args: Any) -> Result:
            self._depth += 1
            began_s = time.thread_time()
            result = call(*args)
            self._depth -= 1
            if not self._depth:
                self.seconds += time.thread_time() - began_s
            return result

        return wrapped


class Greedy(torch.autograd.Function):
    """Passes on what it is given; in its backward it asks for too much memory, where told to."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, fails: bool) -> torch.Tensor:
        ctx.fails = fails
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        if ctx.fails:
            torch.empty(IMPOSSIBLE)
        return gradient, None


def _trained(session: Session, name: str, steps: int, batch: int) -> tuple[nn.Module, Any, Any]:
    torch.set_num_threads(1)
    make, shape = MODELS[name]
    model = DistributedDataParallel(make())
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    session.track(model=model, optimizer=optimizer)
    samples = torch.randn(batch, *shape).expand(steps, batch, *shape).flatten(0, 1)
    return model, optimizer, session.loader(torch.utils.data.TensorDataset(samples), batch * session.world_size)


def bookkeeping(out: str, model: str, rounds: int, steps: int) -> None:
    """What retry, health and ladder cost in a step in which nothing happens: stretches of `steps` steps, each way in turn."""
    with attach(seed=0) as session:
        net, optimizer, loader = _trained(session, model, (rounds + 2) * len(WAYS) * steps * session.world_size, BATCH)

        def loss_of(part: Any) -> torch.Tensor:
            return net(part[0]).square().mean()

        def work(part: Any, weight: float) -> torch.Tensor:
            loss = loss_of(part)
            (loss * weight).backward()
            return loss.detach()

        assert session._supervision
        ladder, guard, board = session._supervision.ladder, session._supervision.loss_guard, session._supervision.board
        on = ladder._rungs, guard._policy
        spent, own_s, measured = Spent(), {way: list[float]() for way in WAYS}, rounds * len(WAYS) * steps
        times: dict[str, list[list[float]]] = {way: [] for way in WAYS}
        ended_s = 0.0
        for number, batch in enumerate(session.steps(loader, 1)):
            stretch, within = divmod(number, steps)
            turn, place = divmod(stretch, len(WAYS))
            way = WAYS[(turn + place) % len(WAYS)]  # each follows each other equally often
            ladder._rungs, guard._policy = on if way == WAYS[2] else ((), [])
            if number == measured:
                board.vote = spent.timed(board.vote)  # type: ignore[method-assign]
                net._sync_buffers = spent.timed(net._sync_buffers)  # type: ignore[assignment, arg-type]
                work = spent.timed(work)
            if way == "plain":
                loss_of(batch).backward()
            elif number < measured:
                session.backward(batch, loss_of)
            else:
                spent.seconds, began_s = 0.0, time.thread_time()
                session.accumulate(batch, work)
                own_s[way].append(time.thread_time() - began_s - spent.seconds)
            optimizer.step()
            optimizer.zero_grad()
            now_s = time.perf_counter()
            if within and number < measured:  # the first of a stretch pays for the change
                if within == 1:
                    times[way].append([])
                times[way][-1].append(now_s - ended_s)
            ended_s = now_s
        if session.rank == 0:
            middles = {way: [statistics.median(stretch) for stretch in times[way]] for way in WAYS}
            own = {way: statistics.median(own_s[way]) for way in WAYS[1:]}
            ladder._rungs, guard._policy = on
            vote_s, warm_s = _in_a_row_s(session, Path(out).with_name("votes"))
            after_s = own[WAYS[2]] - own[WAYS[1]] + vote_s
            found = {"stretch_s": middles, "own_s": after_s, "warm_s": warm_s}
            Path(out).write_text(json.dumps(found))


def _in_a_row_s(session: Session, page: Path, times: int = 5000) -> tuple[float, float]:
    """A vote, and the whole bookkeeping of a step, with nothing else in between and nobody waited for: the other rank of this
    page has given all his votes before."""
    page.write_bytes(b"\0" * size(2))
    board = Board(str(page), 0, 2)
    for place in _VOTES:
        board._write(1, place, times << 10)
    assert session._supervision
    retry, health, loss = session._runner.retry, session._supervision.loss_guard, torch.ones(())
    retry._board = board

    def nothing() -> torch.Tensor:
        health.add_loss(loss)
        return loss

    def bookkeeping() -> None:
        health.skips(0)
        retry.run(0, nothing, health=health, scaled=False, can_divide=lambda: True)

    for ddp in session._runner.ddps:
        ddp.require_forward_param_sync = False  # the other rank is not there to share in a broadcast

    def mean_s(call: Callable[[], Any]) -> float:
        began_s = time.thread_time()
        for _ in range(times):
            call()
        return (time.thread_time() - began_s) / times

    return mean_s(lambda: board.vote(0)), mean_s(bookkeeping)


CYCLE, FAILS_AT, UP_AT = 16, 6, 14
"""Steps between two failures of memory; at which of them it fails, and before which the rungs are undone."""


def recovery(out: str, model: str, batch: int, cycles: int, cases: list[tuple[str, int]]) -> None:
    """Memory runs out on the last rank, again and again: at the end of its forward or its backward, for one rung or more.

    What is lost: the failed step's time above a step that already is on the lower rung, a rung, in step times before.
    """
    with attach(seed=0) as session:
        net, optimizer, loader = _trained(session, model, CYCLE * cycles * len(cases) * session.world_size, batch)
        fails_here, to_fail, where = session.rank == session.world_size - 1, 0, ""

        def loss_of(part: Any) -> torch.Tensor:
            nonlocal to_fail
            fails, to_fail = to_fail > 0, to_fail - 1
            y = net(Greedy.apply(part[0].requires_grad_(), fails and where == "backward"))
            if fails and where == "forward":
                torch.empty(IMPOSSIBLE)
            return y.square().mean()

        assert session._supervision
        times: list[float] = []
        lost: dict[str, list[float]] = {f"{where}, {rungs} rungs": [] for where, rungs in cases}
        step_s: dict[str, list[float]] = {name: [] for name in lost}
        for number, batch_read in enumerate(session.steps(loader, 1)):
            cycle, within = divmod(number, CYCLE)
            where, rungs = cases[cycle % len(cases)]
            if within == UP_AT:
                for _ in range(rungs):
                    session._supervision.ladder.up(session._state.position.step, tells=session.rank == 0)
            to_fail = rungs if fails_here and within == FAILS_AT else 0
            began_s = time.perf_counter()
            session.backward(batch_read, loss_of)
            optimizer.step()
            optimizer.zero_grad()
            times.append(time.perf_counter() - began_s)
            if within == CYCLE - 1:
                before = statistics.median(times[1:FAILS_AT])
                after = statistics.median(times[FAILS_AT + 2 : UP_AT])
                step_s[f"{where}, {rungs} rungs"].append(before)
                lost[f"{where}, {rungs} rungs"].append((times[FAILS_AT] - after) / rungs / before)
                times.clear()
        if session.rank == 0:
            Path(out).write_text(json.dumps({"lost_steps": lost, "step_s": step_s}))
