"""A workload's own main(), each step timed, with a session of kgorch or with one of plain PyTorch (workloads.py).

plain:          torchrun --nproc-per-node=2 workloads_training.py ENTRY ARGS MICROBATCH OUT
under kgorch:   a stage with entry = "workloads_training:main"
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from kgorch import worker
from kgorch.worker import entry
from kgorch.worker.data import batches

Reading = tuple[float, float]
"""Seconds of the clock on the wall, and of this process's processor time, in all of its threads."""


def reading() -> Reading:
    return time.perf_counter(), time.process_time()


def write(readings: list[Reading], out: str) -> None:
    """Those of rank 0: the ranks step together."""
    if int(os.environ["RANK"]) == 0:
        with open(out, "w") as file:
            json.dump(readings, file)


class PlainLoader:
    """A DataLoader with a DistributedSampler. `options` are those that a script gives session.loader."""

    def __init__(
        self, data: Any, global_batch: int, shuffle: bool = True, drop_last: bool = True, **options: Any
    ) -> None:
        if options.get("num_workers"):  # session.loader does the same, and starting workers is no difference of speed
            options.setdefault("persistent_workers", True)
        size = global_batch // dist.get_world_size()
        self.global_batch = global_batch
        self.sampler = DistributedSampler(data, shuffle=shuffle, drop_last=drop_last)
        self._inner = DataLoader(data, size, sampler=self.sampler, drop_last=drop_last, **options)

    def __len__(self) -> int:
        return len(self._inner)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._inner)

    def share_of(self, number: int) -> int:
        return 1


class PlainSession:
    """What a person would write without kgorch, behind the names of orchestrator/worker/session.py that the scripts use."""

    supervised, quick = True, False

    def __init__(self, seed: int | None, microbatch: int, readings: list[Reading]) -> None:
        dist.init_process_group("gloo")
        self.rank, self.world_size, self.device = dist.get_rank(), dist.get_world_size(), torch.device("cpu")
        torch.manual_seed((seed or 0) + self.rank)
        self.output = worker.output_folder()
        self.microbatch, self._readings, self._epoch = microbatch, readings, 0

    def __enter__(self) -> PlainSession:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # gloo's thread lets go of the last reduction, else PyTorch waits for ever: it joins that thread under the GIL
        time.sleep(0.2)
        dist.destroy_process_group()

    def track(self, **things: Any) -> None:
        pass

    def data(self, path: str) -> str:
        return path

    def cached(self, name: str, compute: Callable[[], Any], *, key: Any) -> Any:
        return compute()

    def progress(self, what: str, done: int, total: int | None = None) -> None:
        pass

    def report(self, **metrics: Any) -> None:
        pass

    def loader(self, dataset: Any, global_batch: int, *, is_random: bool = True, **options: Any) -> PlainLoader:
        return PlainLoader(dataset, global_batch, **options)

    def epochs(self, count: int) -> Iterator[int]:
        for self._epoch in range(count):
            yield self._epoch

    def steps(self, loader: PlainLoader) -> Iterator[Any]:
        loader.sampler.set_epoch(self._epoch)
        for batch in loader:
            yield batch
            self._readings.append(reading())

    def backward(self, batch: Any, loss_of: Callable[[Any], Tensor], *, scaler: Any = None) -> Tensor:
        size, total = batches.length(batch), torch.zeros(())
        parts = batches.split(batch, self.microbatch)
        for number, part in enumerate(parts):
            share = batches.length(part) / size
            with ddp_of(loss_of).no_sync() if number < len(parts) - 1 else contextlib.nullcontext():
                loss = loss_of(part)
                (loss * share).backward()
            total += loss.detach() * share
        return total

    def to_device(self, batch: Any) -> Any:
        return batch

    def autocast(self, dtype: torch.dtype = torch.float16, *, enabled: bool = True) -> torch.autocast:
        return torch.autocast("cpu", dtype, enabled=enabled)


def ddp_of(loss_of: Callable[..., Any]) -> DistributedDataParallel:
    """The network that the script's loss calls."""
    cells = (cell.cell_contents for cell in loss_of.__closure__ or ())
    return next(content for content in cells if isinstance(content, DistributedDataParallel))


def plain(target: str, args: dict[str, Any], microbatch: int, out: str) -> None:
    """The stage's function with a plain session."""
    function, readings = entry.function_of(target), list[Reading]()
    script: Any = sys.modules[function.__module__]
    script.attach = lambda seed=None, **more: PlainSession(seed, microbatch, readings)
    function(**args)
    write(readings, out)


def main(inner: str, out: str, **args: Any) -> None:
    """The stage's function under kgorch."""
    from kgorch.worker.step_loop import StepLoop

    readings, boundary = list[Reading](), StepLoop._boundary

    def timed(self: StepLoop) -> None:
        boundary(self)
        readings.append(reading())

    StepLoop._boundary = timed  # type: ignore[method-assign]
    entry.function_of(inner)(**args)
    write(readings, out)


if __name__ == "__main__":
    plain(sys.argv[1], json.loads(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
