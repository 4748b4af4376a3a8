"""A model that is not wrapped, on as many ranks as there are: each trains another one. With `--averaged` the script itself averages
the gradients, and each begins with the same weights."""

import argparse

import no_compiler  # noqa: F401
import torch
import torch.distributed as dist
from torch import nn

from kgorch import attach

parser = argparse.ArgumentParser()
parser.add_argument("--averaged", action="store_true")
options = parser.parse_args()

with attach(seed=3) as session:
    if options.averaged:
        torch.manual_seed(3)
    net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1)).to(session.device)
    optimizer = torch.optim.SGD(net.parameters(), 0.01)
    session.track(net=net, optimizer=optimizer)
    chance = torch.Generator().manual_seed(5)
    data = torch.utils.data.TensorDataset(torch.randn(64, 8, generator=chance), torch.randn(64, 1, generator=chance))
    for inputs, targets in session.steps(session.loader(data, 16), 2):
        (net(inputs) - targets).square().mean().backward()
        for weight in net.parameters() if options.averaged else ():
            dist.all_reduce(weight.grad)
            weight.grad /= session.world_size
        optimizer.step()
        optimizer.zero_grad()
