"""A small training that kgorch can cut and continue at any step. Written by `kgorch init`; change it to your own.

    kgorch start plan.toml              through any number of sessions
    python train.py                     alone, without kgorch around it
    torchrun --nproc-per-node 2 train.py

Two moons of points are told apart by a small network: a few seconds on a CPU. What a training of your own needs of it are
the lines that name `session`.
"""

from __future__ import annotations

import argparse
import math

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

from kgorch import attach


def moons(count: int, seed: int) -> TensorDataset:
    """Points on two half circles that interlock, with noise; made up here, so that nothing needs to be downloaded."""
    chance = torch.Generator().manual_seed(seed)
    angle = math.pi * torch.rand(count, generator=chance)
    label = torch.randint(0, 2, (count,), generator=chance)
    upper = torch.stack([angle.cos(), angle.sin()], 1)
    lower = torch.stack([1 - angle.cos(), 0.5 - angle.sin()], 1)
    points = torch.where(label[:, None] == 0, upper, lower) + 0.1 * torch.randn(count, 2, generator=chance)
    return TensorDataset(points, label)


def main(epochs: int, lr: float) -> None:
    with attach() as session:  # joins the ranks, chooses the device, seeds every generator by the plan's `seed`
        net = nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2))
        model = DistributedDataParallel(net.to(session.device))
        optimizer = torch.optim.AdamW(model.parameters(), lr)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs)
        # All that must survive a cut. It is saved by kgorch, and restored here when there is something to resume.
        session.track(model=model, optimizer=optimizer, scheduler=scheduler)

        # The effective batch is 128, on any number of ranks and in any microbatches.
        loader = session.loader(moons(4096, seed=1), global_batch=128)
        points, labels = (part.to(session.device) for part in moons(1024, seed=2).tensors)

        def loss_of(part: tuple[Tensor, Tensor]) -> Tensor:
            return cross_entropy(model(part[0]), part[1])

        for _ in session.epochs(epochs):
            for batch in session.steps(loader):  # saves and stops between two steps, all ranks at the same one
                loss = session.backward(batch, loss_of)
                optimizer.step()
                optimizer.zero_grad()
                session.report(loss=loss)
            scheduler.step()
            with torch.no_grad():
                accuracy = (net(points).argmax(1) == labels).float().mean().item()
            session.report(accuracy=accuracy)  # for `kgorch status`, and keep = { best = "accuracy:max" }


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--lr", type=float, default=1e-3)
    options = parser.parse_args()
    main(options.epochs, options.lr)
