"""A training that asks only after its last step what it has continued from, when retention has deleted that."""

import argparse
import shutil

import no_compiler  # noqa: F401
import torch

from kgorch import attach

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--delete", default="")
    folder = parser.parse_args().delete
    with attach(seed=3) as session:
        net = torch.nn.Linear(4, 4)
        optimizer = torch.optim.SGD(net.parameters(), 0.05)
        session.track(net=net, optimizer=optimizer)
        for _ in session.epochs(3):
            for (x,) in session.steps(session.loader(torch.utils.data.TensorDataset(torch.ones(8, 4)), 4)):
                session.backward(x, lambda part: net(part).sum())
                optimizer.step()
        if folder:
            shutil.rmtree(folder)
            print("continued from", session.resumed.step, session.resumed.is_finished)
            try:
                session.resumed.state("net")
            except Exception as error:
                print("late:", type(error).__name__, error)
