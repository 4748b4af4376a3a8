"""Attaches and trains one step, then sits in it: no stop can take effect."""

import time

import no_compiler  # noqa: F401
import torch

from kgorch import attach

with attach() as session:
    model = torch.nn.Linear(2, 1)
    session.track(model=model)
    for _ in session.steps(session.loader(torch.utils.data.TensorDataset(torch.ones(8, 2)), 2), 100):
        time.sleep(600)
