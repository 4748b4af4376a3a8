"""A training of whose schedules one allows no more steps than it has, over a loader whose last batch is a single sample; then
a stage that only evaluates (`--only evaluation`), or one with a loader of PyTorch's own (`--only foreign`)."""

import argparse
import time

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from kgorch import attach


class Slow(TensorDataset):
    """Each sample takes a hundredth of a second to read."""

    def __getitem__(self, index):
        time.sleep(0.01)
        return super().__getitem__(index)


def main(only: str, epochs: int) -> None:
    with attach(seed=3) as session:
        model = DistributedDataParallel(nn.Linear(64, 1).to(session.device))
        optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
        data = Slow(torch.randn(17, 64), torch.randn(17, 1))
        if only == "evaluation":
            session.track(model=model)
            for inputs, _ in session.loader(Slow(*(item.repeat(10, 1) for item in data.tensors)), 17):
                model(inputs)
            return
        loader = DataLoader(data, 16) if only == "foreign" else session.loader(data, 16, drop_last=False)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=epochs * len(loader))
        other = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], 1.0)
        warm = torch.optim.lr_scheduler.LinearLR(other, 0.01, total_iters=24)  # goes on from the rate that it finds
        session.track(model=model, optimizer=optimizer, schedule=schedule, other=other, warm=warm)
        for batch in session.steps(loader, epochs):
            session.backward(batch, lambda part: (model(part[0]) - part[1]).square().mean())
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            other.step()
            warm.step()
            assert other.param_groups[0]["lr"] <= 1.0, "a rate that grows without end"


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", default="")
    parser.add_argument("--epochs", type=int, default=2)
    options = parser.parse_args()
    main(options.only, options.epochs)
