"""Fails at a step while something of it waits for a device that never comes to an end. There is no GPU: what waits is a call of
C that keeps Python's lock, as a lock of CUDA's allocator does.

`--how`: `metric`, a reported figure that nobody can read; `atexit`, something of the end of the process; `peer`, the other rank.
"""

import argparse
import atexit
import ctypes
import os

import no_compiler  # noqa: F401
import torch

from kgorch import attach


def hang() -> None:
    while True:  # a signal ends one sleep
        ctypes.PyDLL(None).sleep(1000)


class Figure(torch.Tensor):
    """Of a step that the device does not finish. Its copy is queued, and never arrives."""

    is_cuda = property(lambda self: os.environ.get("LATE") == "1")

    def __float__(self) -> float:
        hang()
        return 0.0


class Event:
    """A mock of torch.cuda.Event."""

    def record(self) -> None:
        pass

    def query(self) -> bool:
        return False

    def synchronize(self) -> None:
        hang()


parser = argparse.ArgumentParser()
parser.add_argument("--how", default="metric")
options = parser.parse_args()
empty = torch.empty
torch.empty = lambda *size, pin_memory=False, **more: empty(*size, **more)
torch.cuda.Event = Event
os.environ["LATE"] = "1"
with attach(seed=0) as session:
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    session.track(model=model, optimizer=optimizer)
    data = torch.utils.data.TensorDataset(torch.ones(32, 2), torch.ones(32, 1))
    for step, _ in enumerate(session.steps(session.loader(data, 4), 4)):
        if options.how == "metric":
            session.report(loss=torch.ones(()).as_subclass(Figure))
        if step == 3:
            if options.how == "atexit":
                atexit.register(hang)
            if options.how == "peer" and session.rank == 0:
                print("waits", flush=True)
                hang()
            raise ValueError("the loss went wrong")
