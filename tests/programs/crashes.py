"""Trains, and fails at a step: always (`--at 5`), or the first time that it comes there (`--once FILE`).
The message is another one each time, as that of an error with an address in it.

With `--fills` it fails of a disk that it has filled with a table, which leaves no room for a word of it.
"""

import argparse
import os
import pathlib
import time

import no_compiler  # noqa: F401
import torch

from kgorch import attach

parser = argparse.ArgumentParser()
parser.add_argument("--at", type=int, default=5)
parser.add_argument("--once", type=str, default="")
parser.add_argument("--fills", action="store_true")
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
        time.sleep(0.05)
        if step == options.at and not (options.once and pathlib.Path(options.once).exists()):
            if options.once:
                pathlib.Path(options.once).touch()
            if options.fills:
                with open(session.output / "table.csv", "wb", buffering=0) as table:
                    while table.write(b"0" * 512):
                        pass
            raise ValueError(f"the loss went wrong at step {step} (process {os.getpid()})")
