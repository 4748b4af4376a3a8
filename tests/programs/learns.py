"""A small training with all that must be remembered: dropout, BatchNorm, augmentation by three libraries, a schedule, a loss
scale that grows, an average of the weights, a generator of each rank's own."""

import argparse
import random
import time

import no_compiler  # noqa: F401
import numpy as np
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from kgorch import attach


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


class Chance:
    """A generator of each rank's own, remembered like anything with state_dict."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)

    def state_dict(self):
        return {"state": self.generator.get_state()}

    def load_state_dict(self, loaded):
        self.generator.set_state(loaded["state"])


def main(epochs: int, sleep: float, workers: int, pad: int, bare: bool) -> None:
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
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0, growth_interval=7)
        ema = AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(0.9))
        chance = Chance(session.rank)
        session.track(
            model=net if bare else model,
            optimizer=optimizer,
            scheduler=scheduler,
            scaler=scaler,
            ema=ema,
            chance=chance,
        )
        loader = session.loader(Points(), 32, num_workers=workers)
        session.report(weights=sum(weight.numel() for weight in net.parameters()))
        for _ in session.epochs(epochs):
            for batch in session.steps(loader):
                weight = torch.rand((), generator=chance.generator) + 0.5
                loss = session.backward(
                    batch,
                    lambda part, weight=weight: weight * ((model(part[0]) - part[1]) ** 2).mean(),
                    scaler=scaler,
                )
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
                ema.update_parameters(net)
                session.report(loss=loss)
                time.sleep(sleep)
            scheduler.step()
            session.report(epoch_draw=random.random() + float(np.random.rand()) + float(torch.rand(())))
        print("trained to the end")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--sleep", type=float, default=0.05)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--pad", type=int, default=0)
    parser.add_argument("--bare", action="store_true", help="track the module inside its DDP")
    options = parser.parse_args()
    main(options.epochs, options.sleep, options.workers, options.pad, options.bare)
