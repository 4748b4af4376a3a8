"""Trains with an operation that has no deterministic way."""

import torch

from kgorch import attach

with attach(seed=0) as session:
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    session.track(model=model, optimizer=optimizer)
    data = torch.utils.data.TensorDataset(torch.ones(32, 2))
    for batch in session.steps(session.loader(data, 8), 2):
        torch.zeros(3).put_(torch.tensor([1, 1]), torch.tensor([1.0, 2.0]))
        session.backward(batch, lambda part: model(part[0]).square().mean())
        optimizer.step()
        optimizer.zero_grad()
