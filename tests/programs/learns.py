"""A small training that draws on every source of chance: dropout, BatchNorm, and augmentation by three libraries."""

import argparse
import random
import time

import numpy as np
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from orchestrator.worker import attach


class Points(torch.utils.data.Dataset):
    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(5)
        self.x = torch.randn(203, 16, generator=generator)
        self.y = self.x[:, :1] * 2 - self.x[:, 1:2]

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int):
        noise = torch.randn(16) * 0.05 + float(np.random.rand()) * 0.1 + random.random() * 0.1
        return self.x[index] + noise, self.y[index]


def main(epochs: int, sleep: float, workers: int, pad: int) -> None:
    with attach(seed=3) as session:
        net = nn.Sequential(
            nn.Linear(16, 33),
            nn.ReLU(),
            nn.Dropout(0.2),
            nn.Linear(33, 65),
            nn.BatchNorm1d(65),
            nn.ReLU(),
            nn.Linear(65, 1),
        )
        net.register_buffer("padding", torch.zeros(pad))
        model = DistributedDataParallel(net.to(session.device), bucket_cap_mb=0.005)
        optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs)
        session.track(model=model, optimizer=optimizer, scheduler=scheduler)
        loader = session.loader(Points(), 32, num_workers=workers)
        for _ in session.epochs(epochs):
            for batch in session.steps(loader):
                loss = session.backward(batch, lambda part: ((model(part[0]) - part[1]) ** 2).mean())
                optimizer.step()
                optimizer.zero_grad()
                session.report(loss=loss)
                time.sleep(sleep)
            scheduler.step()
            session.report(epoch_draw=random.random() + float(np.random.rand()) + float(torch.rand(())))
        print("trained to the end")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--sleep", type=float, default=0.02)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--pad", type=int, default=0)
    options = parser.parse_args()
    main(options.epochs, options.sleep, options.workers, options.pad)
