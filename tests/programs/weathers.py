"""A training that a storm comes over (tests/storm): it remembers which samples its kept steps saw, and does not run twice.

Its steps are as weathered.py's. `seen.counts` is tracked, so what was rolled back does not count.
"""

import argparse
import math
import random
from pathlib import Path

import no_compiler  # noqa: F401
import numpy as np
import torch
from nested_loader import nested_loader
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler
from weathered import hold, wait_as_told

from kgorch import attach

SAMPLES, GLOBAL_BATCH, WIDTH = 96, 12, 8
MIB = 1 << 20


class Points(torch.utils.data.Dataset):
    """Number, content, aim. The content is read from a file a sample where a folder is told, and blurred by three libraries."""

    def __init__(self, folder: str) -> None:
        generator = torch.Generator().manual_seed(5)
        self.x, self.folder = torch.randn(SAMPLES, WIDTH, generator=generator), folder

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int):
        more = len(Path(self.folder, f"{index}.txt").read_bytes()) if self.folder else index % 17
        noise = torch.randn(WIDTH) * 0.05 + float(np.random.rand()) * 0.1 + random.random() * 0.1
        return index, self.x[index] + more / 100 + noise, self.x[index, :1] * 2 - self.x[index, 1:2]


class Seen:
    """How often this rank's kept steps saw each sample, by epoch."""

    def __init__(self, epochs: int) -> None:
        self.counts = torch.zeros(epochs, SAMPLES, dtype=torch.int16)

    def state_dict(self):
        return {"counts": self.counts}

    def load_state_dict(self, loaded):
        self.counts.copy_(loaded["counts"])


def figure_of(weights) -> float:
    """What an evaluation might say: it hangs on these weights alone, and goes up and down from epoch to epoch."""
    squares = sum(float((np.asarray(weight.detach().cpu(), dtype=np.float64) ** 2).sum()) for weight in weights)
    return math.sin(1e3 * math.sqrt(squares))


def loader_of(session, kind: str, folder: str, workers: int):
    if kind == "ours":
        return session.loader(Points(folder), GLOBAL_BATCH, num_workers=workers)
    share = GLOBAL_BATCH // session.world_size
    if kind == "nested":
        return nested_loader(Points(folder), share, rank=session.rank, ranks=session.world_size, workers=workers)
    sampler = DistributedSampler(Points(folder), session.world_size, session.rank, seed=7)
    loader = DataLoader(Points(folder), share, sampler=sampler, num_workers=workers)
    return session.follow(loader) if kind == "followed" else loader


def own_steps(session, batches):
    for batch in batches:
        session.boundary()
        yield batch


def main(epochs: int, loader: str, workers: int, folder: str, hungry: bool) -> None:
    with attach(seed=3) as session:
        net = nn.Sequential(
            nn.Linear(WIDTH, 33), nn.BatchNorm1d(33), nn.ReLU(), nn.Dropout(0.2), nn.Linear(33, 17), nn.Linear(17, 1)
        )
        model = DistributedDataParallel(net.to(session.device), bucket_cap_mb=0.001)
        optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs)
        seen = Seen(epochs)
        session.track(model=model, optimizer=optimizer, scheduler=scheduler, seen=seen)
        held = hold(session.rank)

        def loss_of(part):
            if hungry:  # asked for and never touched: a limit on memory meets it, the machine does not
                torch.empty(len(part[0]) * 16 * MIB, dtype=torch.uint8)
            return ((model(part[1]) - part[2]) ** 2).mean()

        batches = loader_of(session, loader, folder, workers)
        is_own = loader == "followed"  # then the loop is the script's
        for epoch in range(session.epoch, epochs) if is_own else session.epochs(epochs):
            for batch in own_steps(session, batches) if is_own else session.steps(batches):
                loss = session.backward(batch, loss_of)
                optimizer.step()
                optimizer.zero_grad()
                seen.counts[epoch, batch[0]] += 1
                session.report(loss=loss)
                wait_as_told()
            scheduler.step()
            if session.rank == 0:
                session.report(figure=figure_of(net.parameters()))
        held.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--loader", choices=["ours", "torch", "nested", "followed"], default="ours")
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--folder", default="")
    parser.add_argument("--hungry", action="store_true")
    options = parser.parse_args()
    main(options.epochs, options.loader, options.workers, options.folder, options.hungry)
