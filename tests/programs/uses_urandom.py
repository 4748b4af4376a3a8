"""Trains with a chance that no checkpoint can hold: a little noise from os.urandom on one of its two layers."""

import os
import struct
import time

import no_compiler  # noqa: F401
import torch

from kgorch import attach

with attach(seed=0) as session:
    steady, noisy = torch.nn.Linear(2, 1), torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD([*steady.parameters(), *noisy.parameters()], 0.1)
    session.track(steady=steady, noisy=noisy)
    data = torch.utils.data.TensorDataset(torch.ones(64, 2), torch.ones(64, 1))
    for batch in session.steps(session.loader(data, 4), 40):
        session.backward(
            batch, lambda part: ((steady(part[0]) - part[1]) ** 2 + (noisy(part[0]) - part[1]) ** 2).mean()
        )
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            noisy.weight[0, 0] = struct.unpack("<I", os.urandom(4))[0] / 2**32
        (session.output / "seen").write_text("trained")
        time.sleep(0.1)
