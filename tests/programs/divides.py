"""Dropout and BatchNorm, with all its chance inside session.backward: fewer processes can play its ranks."""

import argparse
import time

import no_compiler  # noqa: F401
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from kgorch import attach


def main(epochs: int, sleep: float, plain: bool, half: bool) -> None:
    with attach(seed=3) as session:
        net = nn.Sequential(
            nn.Linear(16, 32, bias=plain),  # before BatchNorm its gradient would be noise
            nn.Identity() if plain else nn.BatchNorm1d(32),
            nn.ReLU(),
            nn.Dropout(0.0 if plain else 0.3),
            nn.Linear(32, 1),
        )
        model = DistributedDataParallel(net.to(session.device))
        optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs)
        # A small scale: the gradients of the half type lie where it has few numbers left.
        scaler = torch.amp.GradScaler(session.device.type, init_scale=1.0, growth_interval=20, enabled=half)
        session.track(model=model, optimizer=optimizer, schedule=schedule, scaler=scaler)

        def loss_of(part):
            with session.autocast(enabled=half):
                return (model(part[0]).float() - part[1]).square().mean()

        generator = torch.Generator().manual_seed(5)
        x = torch.randn(200, 16, generator=generator)
        loader = session.loader(torch.utils.data.TensorDataset(x, x[:, :1] * 2), 32)
        for _ in session.epochs(epochs):
            for batch in session.steps(loader):
                session.report(loss=session.backward(batch, loss_of, scaler=scaler))
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
                time.sleep(sleep)
            schedule.step()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--sleep", type=float, default=0.0)
    parser.add_argument("--plain", action="store_true", help="no dropout, no BatchNorm")
    parser.add_argument("--half", action="store_true", help="fp16 autocast and a GradScaler")
    options = parser.parse_args()
    main(options.epochs, options.sleep, options.plain, options.half)
