"""One job in whose midst memory shrinks, and ways of getting over it: benchmarks/ladder.py compares them.

The job goes once through all samples, in order, on one process. From the sample on at which its memory shrinks, an allocation
fails for real wherever more than FITS samples are computed at once. Each optimizer step is a line of FOLDER/steps: the monotonic
clock, how many samples it took, and how many are done.   python benchmarks/ladder_job.py WAY FOLDER SHRINKS_AT [BATCH]
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch
from activation import Layers, transformer_layer
from torch import nn

BATCH, FITS, STEPS, SAVE_EVERY, SHRINKS_AT = 32, 8, 150, 25, 95
SAMPLES = BATCH * STEPS
IMPOSSIBLE = 1 << 46


class Job:
    """Args:
    shrinks_at: the optimizer step of a run without trouble; never when it is above STEPS.
    """

    def __init__(self, folder: Path, shrinks_at: int, rank: int = 0) -> None:
        self._steps = open(folder / f"steps{rank or ''}", "a", buffering=1)
        self._shrunk, self._shrinks_at = folder / f"shrunk{rank or ''}", shrinks_at * BATCH
        self._saved = folder / "saved.pt"
        torch.set_num_threads(1)
        torch.manual_seed(0)
        self.model: nn.Module = Layers([transformer_layer(128) for _ in range(2)])
        self.data = torch.randn(64, 32, 128).repeat(SAMPLES // 64, 1, 1)
        self.done = 0
        self.took(0)

    def took(self, samples: int) -> None:
        """One optimizer step."""
        self.done += samples
        print(time.monotonic(), samples, self.done, file=self._steps)

    def loss_of(self, x: torch.Tensor) -> torch.Tensor:
        if self.done >= self._shrinks_at:
            self._shrunk.touch()
        if len(x) > FITS and self._shrunk.exists():
            torch.empty(IMPOSSIBLE)
        return self.model(x).square().mean()

    def train(self, batch: int, *, resume: bool) -> None:
        """As a person writes it: saved every SAVE_EVERY steps of the job, and gone on with from there."""
        optimizer = torch.optim.SGD(self.model.parameters(), 1e-3)
        if resume and self._saved.exists():
            saved = torch.load(self._saved)
            self.model.load_state_dict(saved["model"])
            optimizer.load_state_dict(saved["optimizer"])
            self.done = saved["done"]
        while self.done < SAMPLES:
            x = self.data[self.done : self.done + batch]
            self.loss_of(x).backward()
            optimizer.step()
            optimizer.zero_grad()
            before = self.done // (SAVE_EVERY * BATCH)
            self.took(len(x))
            if self.done // (SAVE_EVERY * BATCH) > before:
                aside = self._saved.with_suffix(".tmp")
                torch.save(
                    {"model": self.model.state_dict(), "optimizer": optimizer.state_dict(), "done": self.done}, aside
                )
                aside.replace(self._saved)


def kgorch(folder: str, shrinks_at: int) -> None:
    from kgorch import attach

    with attach(seed=0) as session:
        job = Job(Path(folder), shrinks_at)
        optimizer = torch.optim.SGD(job.model.parameters(), 1e-3)
        session.track(model=job.model, optimizer=optimizer)
        loader = session.loader(torch.utils.data.TensorDataset(job.data), BATCH, shuffle=False)
        for batch in session.steps(loader, 1):
            session.backward(batch, lambda part: job.loss_of(part[0]))
            optimizer.step()
            optimizer.zero_grad()
            job.took(len(batch[0]))


def restart(folder: Path, shrinks_at: int, batch: int) -> None:
    """One life of the process; a shell starts it again with half the batch."""
    Job(folder, shrinks_at).train(batch, resume=True)


def accelerate(folder: Path, shrinks_at: int, *, helped: bool = False) -> None:
    """As its documentation has it: model, optimizer and loop inside the function, which begins anew with a smaller batch.

    helped: half the batch each time instead of nine tenths, and from the last save.
    """
    from accelerate.utils import find_executable_batch_size

    batch = BATCH

    def half() -> int:
        nonlocal batch
        batch //= 2
        return batch

    @find_executable_batch_size(starting_batch_size=BATCH, reduce_batch_size_fn=half if helped else None)
    def inner(batch_size: int) -> None:
        Job(folder, shrinks_at).train(batch_size, resume=helped)

    inner()


def accelerate_ddp(folder: Path, shrinks_at: int) -> None:
    """The same on two ranks, of which one runs out of memory."""
    import torch.distributed as dist
    from accelerate.utils import find_executable_batch_size

    dist.init_process_group("gloo")
    rank = dist.get_rank()

    @find_executable_batch_size(starting_batch_size=BATCH)
    def inner(batch_size: int) -> None:
        job = Job(folder, shrinks_at if rank else STEPS + 1, rank)
        job.model = nn.parallel.DistributedDataParallel(job.model)
        job.train(batch_size, resume=False)

    inner()
    dist.destroy_process_group()


def main() -> None:
    way, folder, shrinks_at = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
    if way == "restart":
        restart(folder, shrinks_at, int(sys.argv[4]))
    elif way == "accelerate_ddp":
        accelerate_ddp(folder, shrinks_at)
    else:
        accelerate(folder, shrinks_at, helped=way == "accelerate_helped")


if __name__ == "__main__":
    main()
