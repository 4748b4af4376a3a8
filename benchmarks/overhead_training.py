"""What overhead.py starts under kgorch: one training of two ranks that takes its steps in turns as it is, with one feature off, and
without kgorch at all, in blocks; and writes down how long each block took.

A feature is switched off in place, the way its key of the plan does for a whole session. All ranks follow one list of blocks, so
no word between them is needed. All batches were read before: what reading costs is told by itself.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import random
import signal
import statistics
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import psutil
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from kgorch import Loader, Session, attach

SAMPLES, WIDTH = 16, 64
ALL, ALONE = "kgorch", "alone"
ENDLESS = 10**9
SETTLES = 3
"""Steps of a block that are not counted: the first ones after a change find cold caches."""


class Endless:
    """A dataset that nobody reads."""

    def __len__(self) -> int:
        return ENDLESS

    def __getitem__(self, index: int) -> Any:
        raise AssertionError("the batches are there already")


class Ready(Loader):
    """session.loader()'s, with every batch read before."""

    given: Any = None

    def parts(self) -> Iterator[list[Any]]:
        return itertools.repeat([self.given])


class Training:
    """A network whose step is made as long as asked by multiplying matrices, without kgorch and under it."""

    def __init__(self, session: Session) -> None:
        layers = [
            nn.Linear(WIDTH, 256),
            nn.ReLU(),
            nn.BatchNorm1d(256),
            nn.Linear(256, 256),
            nn.ReLU(),
            nn.Linear(256, 1),
        ]
        self.session, self.work = session, 0
        self.model = DistributedDataParallel(nn.Sequential(*layers))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), 1e-4)
        self.square, self.batch = torch.randn(192, 192), torch.randn(SAMPLES, WIDTH)
        session.track(model=self.model, optimizer=self.optimizer)
        loader = session.loader(Endless(), SAMPLES * session.world_size)
        loader.__class__ = Ready
        setattr(loader, "given", self.batch)  # noqa: B010
        self.batches = session.steps(loader, 1)

    def loss_of(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(self.work):
            self.square @ self.square
        return self.model(x).square().mean()

    def alone(self, steps: int) -> list[float]:
        """When each step was done."""
        done_s = []
        for _ in range(steps):
            loss = self.loss_of(self.batch)
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            done_s.append(time.perf_counter())
        return done_s

    def supervised(self, steps: int) -> list[float]:
        done_s = []
        for batch in itertools.islice(self.batches, steps):
            self.session.backward(batch, self.loss_of)
            self.optimizer.step()
            self.optimizer.zero_grad()
            done_s.append(time.perf_counter())
        return done_s


# What is off in a block


class Switches:
    def __init__(self, session: Session, model: DistributedDataParallel) -> None:
        self._session, self._model = session, model
        parents = psutil.Process().parents()
        self.supervisor = next(process for process in parents if "kgorch.cli" in process.cmdline())
        self.stopped_s = 0.0

    def of(self, name: str) -> AbstractContextManager[None]:
        stack = ExitStack()
        session = self._session
        if name in (ALONE, "snapshots in memory"):
            stack.enter_context(self._no_snapshots())
        if name in (ALONE, "supervisor, telemetry, beats"):
            stack.enter_context(self._nobody_supervises())
        if name in ("memory ladder", "memory ladder and health checks"):
            stack.enter_context(mock.patch.object(session._supervision.ladder, "_rungs", ()))
        if name in ("health checks", "memory ladder and health checks"):
            stack.enter_context(mock.patch.object(session._supervision.loss_guard, "_policy", []))
        if name == "vitals of the ranks":
            stack.enter_context(mock.patch.object(session._state.resources, "read", lambda step_s: {}))
        if name == "deterministic = warn":
            stack.callback(torch.use_deterministic_algorithms, False)
            torch.use_deterministic_algorithms(True, warn_only=True)
        if name == ALONE:
            self._model.require_forward_param_sync = True  # kgorch has done that by hand in its own steps
        return stack

    @contextmanager
    def _no_snapshots(self) -> Iterator[None]:
        """Their clock stands meanwhile: they come no sooner afterwards."""
        left_s = self._session._supervision.saves._next_snapshot_s - time.monotonic()
        self._session._supervision.saves._next_snapshot_s = math.inf
        try:
            yield
        finally:
            self._session._supervision.saves._next_snapshot_s = time.monotonic() + left_s

    @contextmanager
    def _nobody_supervises(self) -> Iterator[None]:
        with mock.patch.object(self._session._supervision.link, "_status", tuple):
            if self._session.rank != 0:
                yield
                return
            self.supervisor.send_signal(signal.SIGSTOP)
            began_s = time.monotonic()
            try:
                yield
            finally:
                self.stopped_s += time.monotonic() - began_s
                self.supervisor.send_signal(signal.SIGCONT)


FEATURES = (
    "memory ladder", "health checks", "memory ladder and health checks", "snapshots in memory", "vitals of the ranks",
    "supervisor, telemetry, beats", "deterministic = warn",
)  # fmt: skip


def main(out: str, sizes_ms: list[float], rounds: int, block_s: float) -> None:
    torch.set_num_threads(1)
    with attach(seed=0) as session:
        training = Training(session)
        switches = Switches(session, training.model)
        training.supervised(20)
        found: dict[str, Any] = {"bookkeeping_us": bookkeeping_us(training), "reading_us": reading_us(session)}
        training.supervised(20)
        works = {size: calibrated(training, size / 1e3) for size in sizes_ms}
        besides = Besides(switches)
        found["blocks"] = [
            taken
            for _, size in itertools.product(range(rounds), sizes_ms)
            for taken in one_round(training, switches, size, works[size], block_s)
        ]
        found |= besides.told()
        if session.rank == 0:
            Path(out).write_text(json.dumps(found))


def one_round(
    training: Training, switches: Switches, size_ms: float, work: int, block_s: float
) -> list[dict[str, Any]]:
    """Each way once, the order drawn anew, kgorch as it is before and behind each of them."""
    training.work, steps = work, max(10, int(1e3 * block_s / size_ms))
    ways = random.Random(training.session._state.position.step).sample((ALONE, ALONE, *FEATURES), len(FEATURES) + 2)
    order = [ALL, *itertools.chain.from_iterable((way, ALL) for way in ways)]
    found = []
    for way in order:
        with switches.of(way):
            take = training.alone if way == ALONE else training.supervised
            take(SETTLES)
            dist.barrier()
            thread_s, used_s, own_s = time.thread_time(), time.process_time(), own_threads_s()
            done_s = [time.perf_counter(), *take(steps)]
            thread_s, used_s = (time.thread_time() - thread_s) / steps, (time.process_time() - used_s) / steps
            own_s = (own_threads_s() - own_s) / (done_s[-1] - done_s[0])
        each_s = [later - sooner for sooner, later in itertools.pairwise(done_s)]
        of_all = {"step_s": statistics.fmean(each_s), "median_s": statistics.median(each_s), "cpu_s": used_s}
        found.append({"size": size_ms, "way": way, **of_all, "main_thread_s": thread_s, "own_threads_core": own_s})
    return found


def own_threads_s() -> float:
    """Processor time of kgorch's threads in this rank. All others beside the main thread are PyTorch's, which sum the gradients."""
    mine = [thread.ident for thread in threading.enumerate() if thread.name.startswith("kgorch-")]
    return sum(time.clock_gettime(time.pthread_getcpuclockid(ident)) for ident in mine if ident is not None)


def calibrated(training: Training, step_s: float) -> int:
    """How many matrices are to be multiplied for steps of that length; the same on all ranks."""

    def took_s(work: int) -> float:
        training.work, times = work, []
        for _ in range(5):
            began_s = time.perf_counter()
            training.alone(4)
            times.append((time.perf_counter() - began_s) / 4)
        return statistics.median(times)

    bare_s, loaded_s = took_s(0), took_s(40)
    work = torch.tensor(max(0.0, (step_s - bare_s) / max((loaded_s - bare_s) / 40, 1e-6)))
    dist.broadcast(work, 0)
    return int(work)


class Besides:
    """Shares of a core of the run's processes that are no ranks, while the supervisor is not stopped, and its memory."""

    def __init__(self, switches: Switches) -> None:
        self._switches, self._began_s = switches, time.monotonic()
        ranks: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(ranks, os.getpid())
        home = os.environ["KGORCH_HOME"]
        self._processes = [
            process
            for process in psutil.process_iter(["environ"])
            if process.pid not in ranks and (process.info["environ"] or {}).get("KGORCH_HOME") == home
        ]
        self._used_s = self._cpu_s()

    def _cpu_s(self) -> dict[psutil.Process, float]:
        return {process: sum(process.cpu_times()[:2]) for process in self._processes}

    def told(self) -> dict[str, float]:
        supervisor = self._switches.supervisor
        ran_s = time.monotonic() - self._began_s - self._switches.stopped_s
        percents = {process: 100 * (used - self._used_s[process]) / ran_s for process, used in self._cpu_s().items()}
        return {
            "core_percent": percents[supervisor],
            "others_percent": sum(percents.values()) - percents[supervisor],
            "rss_mb": supervisor.memory_info().rss / 1e6,
        }


def bookkeeping_us(training: Training, steps: int = 5000, rounds: int = 5) -> list[float]:
    """`session.steps` alone, around a loop that does nothing, against that loop; a step."""
    found = []
    with Switches(training.session, training.model)._no_snapshots():
        for _ in range(rounds):
            times = []
            for batches in (itertools.repeat(training.batch), training.batches):
                dist.barrier()
                began_s = time.perf_counter()
                for _ in itertools.islice(batches, steps):
                    pass
                times.append(time.perf_counter() - began_s)
            found.append(1e6 * (times[1] - times[0]) / steps)
    return found


def reading_us(session: Session, batches: int = 60) -> dict[str, float]:
    """A sample read by PyTorch's DataLoader and by session.loader, which seeds the generators for each; in turns."""
    data = TensorDataset(torch.randn(SAMPLES * batches * session.world_size, WIDTH))
    sampler = DistributedSampler(data, session.world_size, session.rank)
    plain = DataLoader(data, SAMPLES, sampler=sampler, drop_last=True)
    with mock.patch.object(session._supervision.ladder, "loader_options", lambda options: options):
        ours = session.loader(data, SAMPLES * session.world_size)
    times: dict[str, list[float]] = {"plain": [], "keyed": []}
    for _ in range(5):
        for name, loader in (("plain", plain), ("keyed", ours)):
            began_s = time.perf_counter()
            count = sum(SAMPLES for _ in loader)
            times[name].append(1e6 * (time.perf_counter() - began_s) / count)
    return {name: statistics.median(taken) for name, taken in times.items()}


if __name__ == "__main__":
    told = json.loads(os.environ["OVERHEAD"])
    main(**told)
