"""A training whose state grows and shrinks as it goes on (walls.py): steps that wait more than they compute."""

from __future__ import annotations

import math
import random
import time

import torch
from bounded.ours import Count
from bounded.training import ENDLESS, marks
from torch.nn.parallel import DistributedDataParallel

from kgorch import attach

STEP_S, EVALUATION_S, EPOCH = 0.02, 0.3, 200
MOST, LEAST = 16.0, 1.0
"""MB that a rank remembers besides its model."""

CHANGES, FACTOR = 75, 1.5
"""After so many steps its size is another, by this factor at most."""


class Memory:
    """Of a size that follows from the step alone, so that it is the same however often the training was cut."""

    def __init__(self) -> None:
        self.size = math.sqrt(MOST * LEAST)
        self.bytes = torch.zeros(0, dtype=torch.uint8)
        self.at(0)

    def at(self, step: int) -> None:
        if step % CHANGES == 0:
            drawn = self.size * FACTOR ** random.Random(step).uniform(-1, 1)
            self.size = min(max(drawn, LEAST), MOST)
            self.bytes = torch.full((int(1e6 * self.size),), step % 256, dtype=torch.uint8)

    def state_dict(self) -> dict[str, object]:
        return {"size": self.size, "bytes": self.bytes}

    def load_state_dict(self, state: dict[str, object]) -> None:
        self.size, self.bytes = state["size"], state["bytes"]


def main() -> None:
    torch.set_num_threads(1)
    with attach(seed=0) as session:
        model = DistributedDataParallel(torch.nn.Linear(16, 1))
        optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
        memory = Memory()
        session.track(model=model, optimizer=optimizer, memory=memory, count=Count(marks))
        loader = session.loader(torch.utils.data.TensorDataset(torch.randn(2 * EPOCH, 16)), global_batch=2)
        marks.begin(marks.step)
        for _ in session.epochs(ENDLESS):
            for batch in session.steps(loader):
                session.backward(batch, lambda part: model(part[0]).square().mean())
                optimizer.step()
                optimizer.zero_grad()
                memory.at(marks.step + 1)
                time.sleep(STEP_S)
                marks.done()
            time.sleep(EVALUATION_S)
