"""The training in which benchmarks/checkpoints.py measures: every rank of a real run under `kgorch start` runs `main`.

Its state is that of a transformer of `groups` layers and `width`: weights and AdamW's two moments. Only a small head
is trained, so that a step stays a step of about 10 ms. Every way of saving (peers/) saves this same state, in turns.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import os
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist
from peers import NAMES, Training, Way, emptied, module
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from kgorch.checkpoint.folder import CHUNK_BYTES, list_checkpoints
from kgorch.checkpoint.verify import verify_checkpoint
from kgorch.worker import attach, launch
from kgorch.worker.checkpoint import restore_source, state_codec
from kgorch.worker.checkpoint.snapshot_buffer import share
from kgorch.worker.checkpoint.snapshot_writer import OVERHEAD


class Net(nn.Module):
    """A trunk that is there to be saved, and a head that is trained."""

    def __init__(self, groups: int, width: int) -> None:
        super().__init__()
        shapes = ((width, width), (width,), (width, 4 * width), (4 * width,)) * groups
        self.trunk = nn.ParameterList(nn.Parameter(torch.randn(shape), requires_grad=False) for shape in shapes)
        self.head = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(x)
        return out


def optimizer_of(model: Net) -> torch.optim.AdamW:
    """AdamW as it is after its first step, the trunk's moments with it."""
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    for weight in model.trunk:
        optimizer.state[weight] = {
            "step": torch.tensor(1.0), "exp_avg": torch.randn_like(weight), "exp_avg_sq": torch.rand_like(weight),
        }  # fmt: skip
    return optimizer


@dataclass
class Bench:
    """What all measurements share."""

    training: Training
    ways: dict[str, Way]
    advance: Callable[[int], None]
    copied: Callable[[], None]
    steps: int
    number: int = 0

    def next(self) -> int:
        self.number += 1
        return self.number

    def saved(self, way: Way) -> tuple[float, float]:
        """Seconds that a save blocks and that it takes, while the training stands still; of the slowest rank."""
        self.advance(1)  # the same step is not saved twice
        dist.barrier()
        began_s = time.perf_counter()
        way.save(self.next())
        blocked_s = time.perf_counter() - began_s
        way.wait()
        dist.barrier()
        took_s = time.perf_counter() - began_s
        way.tidy()
        dist.barrier()
        return slowest(blocked_s), slowest(took_s)

    def trained(
        self, steps: int, save: Callable[[], None] | None = None, wait: Callable[[], None] | None = None
    ) -> float:
        """Seconds of so many steps, with one save that is durable at their end."""
        dist.barrier()
        began_s = time.perf_counter()
        self.advance(steps // 5)
        if save:
            save()
        self.advance(steps - steps // 5)
        if wait:
            wait()
        dist.barrier()
        return time.perf_counter() - began_s


def slowest(seconds: float) -> float:
    found = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return float(found)


def main(out: str, groups: int, width: int, ways: list[str], rounds: int, steps: int, work: int) -> None:
    torch.set_num_threads(1)
    told = launch()
    assert told
    with attach(seed=0) as session:
        inner = Net(groups, width)
        model, optimizer = DistributedDataParallel(inner), optimizer_of(inner)
        training = Training(
            session.rank, session.world_size, session,
            lambda: {"model": inner.state_dict(), "optimizer": optimizer.state_dict()}, Path(),
        )  # fmt: skip
        made: dict[str, Way] = {}
        try:
            results = compared(training, made, model, optimizer, Path(told.folder), ways, rounds, steps, work)
        finally:
            for way in made.values():
                way.close()
        if session.rank == 0:
            Path(out).write_text(json.dumps(results))


def compared(
    training: Training, made: dict[str, Way], model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path,
    ways: list[str], rounds: int, steps: int, work: int,
) -> dict[str, Any]:  # fmt: skip
    """Set up one way after the other, each warmed up and its memory looked at; then measure."""
    session, taken_bytes, missing = training.session, dict[str, int](), dict[str, str]()
    model(torch.randn(2, 64)).sum().backward()  # what a step takes is no cost of saving
    optimizer.step()
    optimizer.zero_grad()
    cost_of_copy = copier(training, {"model": model, "optimizer": optimizer})
    before = memory_before(training.rank)
    with memory_taken(training.rank, before) as taken:
        session.track(model=model, optimizer=optimizer)
        made["kgorch"] = module("kgorch").Saving(training)
        bench = Bench(training, made, stepping(session, model, optimizer, work), cost_of_copy, steps)
        for _ in range(3):
            bench.saved(made["kgorch"])
    taken_bytes["kgorch"] = taken["bytes"]
    for name in [name for name in ways if name != "kgorch"]:
        before = memory_before(training.rank)
        if why := make(bench, name, folder / "peers" / NAMES[name]):
            missing[name] = why
            continue
        with memory_taken(training.rank, before) as taken:  # not before: DLRover forks, which threads may not survive
            for _ in range(2):
                bench.saved(made[name])
        taken_bytes[name] = taken["bytes"]
    return {
        "state_bytes": session._state.tracked.state_bytes,
        "memory_bytes": taken_bytes,
        "images_bytes": images_bytes(),
        "missing": missing,
        "peers": {
            name: {"version": way.version, "setting": way.setting, "lacks": way.lacks} for name, way in made.items()
        },
        **measured(bench, rounds),
    }


def make(bench: Bench, name: str, folder: Path) -> str:
    """Put the peer among the ways; why it could not be, else ""."""
    if bench.training.rank == 0:
        emptied(folder)
    dist.barrier()
    at = bench.training
    try:
        bench.ways[name] = module(name).Saving(Training(at.rank, at.world, at.session, at.state, folder))
    except Exception as error:
        return f"{type(error).__name__}: {error}"[:200]
    return ""


def measured(bench: Bench, rounds: int) -> dict[str, Any]:
    """Everything in turns, so that what the machine does besides falls on all alike."""
    copies, blocked, took = [], {name: [] for name in bench.ways}, {name: [] for name in bench.ways}
    for _ in range(2 * rounds):
        for name, way in bench.ways.items():
            if name == "kgorch":
                dist.barrier()
                began_s = time.perf_counter()
                bench.copied()
                copies.append(slowest(time.perf_counter() - began_s))
            one, all_ = bench.saved(way)
            blocked[name].append(one)
            took[name].append(all_)
    found: dict[str, Any] = {"copy_s": copies, "blocking_s": blocked, "end_to_end_s": took}
    if bench.steps:
        found |= lost(bench, rounds)
    return found | loading(bench, rounds)


def lost(bench: Bench, rounds: int) -> dict[str, Any]:
    """Training time that a save costs: its stretch of steps against the stretches before and after, which have none."""
    found: dict[str, list[float]] = {name: [] for name in bench.ways}
    plain = [bench.trained(bench.steps)]
    for _ in range(rounds):
        for name, way in bench.ways.items():
            with_s = bench.trained(bench.steps, partial(way.save, bench.next()), way.wait)
            way.tidy()
            plain.append(bench.trained(bench.steps))
            found[name].append(with_s - (plain[-2] + plain[-1]) / 2)
    return {
        "lost_s": found,
        "lost_by_snapshot_s": lost_by_snapshots(bench, 4 * rounds),
        "plain_s": plain,
        "steps": bench.steps,
        "overhead": OVERHEAD,
    }


def lost_by_snapshots(bench: Bench, rounds: int) -> list[float]:
    """The same of snapshots; nothing follows on one, so that shorter stretches will do."""
    ours: Any = bench.ways["kgorch"]
    found, steps = [], max(bench.steps // 5, 5)
    before_s = bench.trained(steps)
    for _ in range(rounds):
        with_s = bench.trained(steps, ours.put_aside)
        after_s = bench.trained(steps)
        found.append(with_s - (before_s + after_s) / 2)
        before_s = after_s
    return found


def loading(bench: Bench, rounds: int) -> dict[str, Any]:
    """Reading every byte back and putting all into the model on every rank, against reading the files on every rank."""
    told = launch()
    assert told
    folder = list_checkpoints(Path(told.checkpoints))[0]
    reads, loads, streamed = [], [], []
    session = bench.training.session
    for _ in range(rounds):
        for into, work in ((reads, read_all), (streamed, stream_all), (loads, verify_and_load)):
            dist.barrier()
            began_s = time.perf_counter()
            work(folder, session)
            dist.barrier()
            into.append(time.perf_counter() - began_s)
    return {"read_s": reads, "stream_s": streamed, "load_s": loads}


def read_all(folder: Path, session: Any) -> None:
    for path in folder.iterdir():
        path.read_bytes()


def stream_all(folder: Path, session: Any) -> None:
    """The same without keeping it: every piece into the place of the one before."""
    buffer = memoryview(bytearray(CHUNK_BYTES))
    for path in folder.iterdir():
        with open(path, "rb", buffering=0) as file:
            while file.readinto(buffer):
                pass


def verify_and_load(folder: Path, session: Any) -> None:
    if session.rank == 0:  # before a launch it is the supervisor that verifies, once for all ranks
        verify_checkpoint(folder)
    dist.barrier()
    found = restore_source.FolderSource(folder)
    state_codec.restore(
        session._state.tracked.things, found.tree | found.own(session.rank)["own"], found.reader(session.rank).fetch
    )


def copier(training: Training, tracked: dict[str, Any]) -> Callable[[], None]:
    """One memory copy of this rank's share, into memory that was touched before."""
    captured = state_codec.capture(tracked)
    mine = share(captured.tensors, captured.own, training.rank, training.world)
    into = {name: tensor.detach().clone() for name, tensor in mine.items()}

    def copy() -> None:
        for name, tensor in mine.items():
            into[name].copy_(tensor)

    copy()
    return copy


def stepping(session: Any, model: nn.Module, optimizer: torch.optim.Optimizer, work: int) -> Callable[[int], None]:
    """A function that trains so many steps further, in the one loop of session.steps."""
    square = torch.randn(192, 192)
    count = 200_000
    loader = session.loader(
        torch.utils.data.TensorDataset(torch.randn(1, 64).expand(count, 64)), 2 * session.world_size
    )
    batches: Iterator[Any] = iter(session.steps(loader, 1))

    def advance(steps: int) -> None:
        for _ in range(steps):
            batch = next(batches)
            session.backward(batch, lambda part: model(part[0]).square().mean())
            optimizer.step()
            optimizer.zero_grad()
            for _ in range(work):  # what a larger model would compute
                square @ square

    return advance


def memory_before(rank: int) -> int:
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # what others have freed
    dist.barrier()
    found = memory_bytes() if rank == 0 else 0
    dist.barrier()
    return found


@contextmanager
def memory_taken(rank: int, before: int) -> Iterator[dict[str, int]]:
    """How far the memory of ranks, keeper and whatever else they have started rises above what it was `before`."""
    taken, over = {"bytes": 0}, threading.Event()

    def watch() -> None:
        while not over.wait(0.03):
            taken["bytes"] = max(taken["bytes"], memory_bytes() - before)

    watcher = threading.Thread(target=watch)
    if rank == 0:
        watcher.start()
    try:
        yield taken
    finally:
        over.set()
        if rank == 0:
            watcher.join()
        dist.barrier()


def memory_bytes() -> int:
    """What all processes of the training hold, shared memory counted once (proportional set size).

    Of the keeper only what is its own: its images are the ranks', and it maps them now and then.
    """
    torchrun = psutil.Process(os.getppid())
    return _held(keeper(), "Pss_Anon") + sum(
        _held(process, "Pss") for process in [torchrun, *torchrun.children(recursive=True)]
    )


def _held(process: psutil.Process, what: str) -> int:
    with contextlib.suppress(OSError):  # it has just ended
        text = Path(f"/proc/{process.pid}/smaps_rollup").read_text()
        if found := re.search(rf"^{what}: +(\d+) kB", text, re.M):
            return int(found[1]) << 10
    return 0


def images_bytes() -> int:
    """What the keeper's images take in memory, all ranks' together."""
    files = Path(f"/proc/{keeper().pid}/fd").iterdir()
    images = [path.stat() for path in files if "kgorch-image" in str(path.readlink())]
    return sum({file.st_ino: file.st_blocks * 512 for file in images}.values())


def keeper() -> psutil.Process:
    told = launch()
    assert told
    words = ["-m", "kgorch.snapshots.keeper", str(Path(told.keeper).parent)]
    return next(process for process in psutil.process_iter(["cmdline"]) if (process.info["cmdline"] or [])[1:] == words)
