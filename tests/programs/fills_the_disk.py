"""Writes into its outputs, once, until their disk is full: which ends it, and leaves no room for a word of how."""

import argparse
import pathlib

import no_compiler  # noqa: F401
import torch

from orchestrator.worker import attach

parser = argparse.ArgumentParser()
parser.add_argument("--once", type=pathlib.Path)
options = parser.parse_args()
with attach(seed=0) as session:
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    session.track(model=model, optimizer=optimizer)
    data = torch.utils.data.TensorDataset(torch.ones(32, 2), torch.ones(32, 1))
    for step, (x, y) in enumerate(session.steps(session.loader(data, 4), 4)):
        session.backward((x, y), lambda part: (model(part[0]) - part[1]).square().mean())
        optimizer.step()
        optimizer.zero_grad()
        if step == 5 and not options.once.exists():
            options.once.touch()
            with open(session.output / "table.csv", "wb", buffering=0) as table:
                while True:
                    table.write(b"0" * 512)
