"""Remembers more with every step: some 100 kB on each rank, besides its model."""

import argparse
import time

import no_compiler  # noqa: F401
import torch
from torch import nn

from kgorch import attach


class Memory:
    def __init__(self) -> None:
        self.seen = torch.zeros(0)

    def state_dict(self):
        return {"seen": self.seen}

    def load_state_dict(self, loaded):
        self.seen = loaded["seen"]


parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=1000)
options = parser.parse_args()

with attach(seed=0) as session:
    model, memory = nn.Linear(4, 1), Memory()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    session.track(model=model, optimizer=optimizer, memory=memory)
    loader = session.loader(torch.utils.data.TensorDataset(torch.ones(8, 4)), 2)
    for batch in session.steps(loader, options.epochs):
        session.backward(batch, lambda part: model(part[0]).square().mean())
        optimizer.step()
        optimizer.zero_grad()
        memory.seen = torch.cat([memory.seen, torch.ones(25_000)])
        time.sleep(0.3)
