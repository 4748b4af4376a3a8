"""Trains; one rank waits in its loss for ever at `--at` (once with `--once FILE`); rank 0 evaluates alone; saves slowly."""

import argparse
import pathlib
import threading
import time

import no_compiler  # noqa: F401
import torch
from torch.nn.parallel import DistributedDataParallel

from kgorch import attach

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=4)
parser.add_argument("--sleep", type=float, default=0.02)
parser.add_argument("--at", type=int, default=-1)
parser.add_argument("--rank", type=int, default=1)
parser.add_argument("--once", type=str, default="")
parser.add_argument("--evaluates", type=float, default=0.0, help="seconds, after the first epoch")
parser.add_argument("--in_step", action="store_true", help="evaluate in the midst of a step instead")
parser.add_argument("--saves", type=float, default=0.0, help="seconds that it takes to copy the state")
options = parser.parse_args()


class Slow:
    def state_dict(self):
        time.sleep(options.saves)
        return {"none": 0}

    def load_state_dict(self, state):
        pass


def loss_of(part, step):
    happened = options.once and pathlib.Path(options.once).exists()
    if step == options.at and session.rank == options.rank and not happened:
        if options.once:
            pathlib.Path(options.once).touch()
        threading.Event().wait()
    return (model(part[0]) - part[1]).square().mean()


def evaluate():
    net.eval()
    with torch.no_grad():
        for _ in range(10):
            net(torch.ones(4, 2))
            time.sleep(options.evaluates / 10)
    net.train()


with attach(seed=0) as session:
    net = torch.nn.Linear(2, 1)
    model = DistributedDataParallel(net) if session.world_size > 1 else net
    optimizer = torch.optim.SGD(net.parameters(), 0.01, momentum=0.9)
    session.track(model=net, optimizer=optimizer, slow=Slow())
    data = torch.utils.data.TensorDataset(torch.randn(64, 2), torch.randn(64, 1))
    loader = session.loader(data, 4)
    step = 0
    for epoch in session.epochs(options.epochs):
        for step, batch in enumerate(session.steps(loader)):
            session.backward(batch, lambda part, at=16 * epoch + step: loss_of(part, at))
            optimizer.step()
            optimizer.zero_grad()
            time.sleep(options.sleep)
            if options.in_step and epoch == 0 and step == 5:
                evaluate()
        if options.evaluates and session.rank == 0 and not options.in_step and epoch == 0:
            evaluate()
