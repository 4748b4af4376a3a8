"""Trains a small net for a few steps; prints its first bits as it begins. For starting weights."""

import no_compiler  # noqa: F401
import torch
from torch import nn

from kgorch import attach

with attach(seed=1) as session:
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1)).to(session.device)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    session.track(model=model, optimizer=optimizer)
    print(f"begins with {[round(value, 4) for value in model[0].weight.flatten().tolist()]}")
    data = torch.utils.data.TensorDataset(torch.ones(8, 2), torch.ones(8, 1))
    for x, y in session.steps(session.loader(data, 4), 2):
        session.backward((x, y), lambda part: (model(part[0]) - part[1]).square().mean())
        optimizer.step()
        optimizer.zero_grad()
