"""A frozen base with a trained head. `teacher`: a copy of the head without gradients follows it. `thaws`: a part of the base is
trained from the second epoch on."""

import argparse
import time
from pathlib import Path

import no_compiler  # noqa: F401
import torch
from torch import nn

from kgorch import attach, trainable


class Net(nn.Module):
    def __init__(self, base: int) -> None:
        super().__init__()
        self.base = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16))
        generator = torch.Generator().manual_seed(base)
        with torch.no_grad():
            for weight in self.base.parameters():
                weight.normal_(generator=generator)
        self.base.requires_grad_(False)
        self.head, self.teacher = nn.Linear(16, 1), nn.Linear(16, 1)
        self.teacher.requires_grad_(False)
        self.teacher.load_state_dict(self.head.state_dict())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        features = self.base(x)
        return self.head(features) - 0.1 * self.teacher(features)

    def follow(self) -> None:
        for slow, fast in zip(self.teacher.parameters(), self.head.parameters(), strict=True):
            slow.data = slow.data * 0.9 + fast.data * 0.1  # which PyTorch does not count as a change in place


def main(base: int, epochs: int, sleep: float, teacher: bool, thaws: bool) -> None:
    session = attach(seed=3)
    net = Net(base)
    optimizer = torch.optim.AdamW(net.parameters(), 1e-2)
    session.track(model=trainable(net), optimizer=optimizer)
    x = torch.randn(64, 8, generator=torch.Generator().manual_seed(1))
    loader = session.loader(torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True)), global_batch=8)
    for batch in session.steps(loader, epochs=epochs):
        if thaws and session.epoch:
            net.base[2].requires_grad_(True)
        session.backward(batch, lambda part: (net(part[0]) - part[1]).pow(2).mean())
        optimizer.step()
        optimizer.zero_grad()
        if teacher:
            net.follow()
        time.sleep(sleep)
    session.end()
    torch.save(net.state_dict(), Path(session.output, "net.pt"))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--base", type=int, default=1)
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--sleep", type=float, default=0.0)
    parser.add_argument("--teacher", action="store_true")
    parser.add_argument("--thaws", action="store_true")
    main(**vars(parser.parse_args()))
