"""A small training that begins with the weights that another stage has left, where one is named."""

import argparse
import time

import no_compiler  # noqa: F401
import torch
from torch import nn

from kgorch import attach


class Points(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 48

    def __getitem__(self, index: int):
        return torch.full((4,), index / 48) + torch.randn(4) * 0.1


def main(epochs: int, sleep: float, of: str) -> None:
    with attach(seed=3) as session:
        model = nn.Linear(4, 1)
        if of:
            model.load_state_dict(session.weights(of))
        optimizer = torch.optim.SGD(model.parameters(), 1e-2)
        session.track(model=model, optimizer=optimizer)
        loader = session.loader(Points(), 8)
        for _ in session.epochs(epochs):
            for batch in session.steps(loader):
                session.backward(batch, lambda part: model(part).square().mean())
                optimizer.step()
                optimizer.zero_grad()
                time.sleep(sleep)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--sleep", type=float, default=0.0)
    parser.add_argument("--of", default="")
    options = parser.parse_args()
    main(options.epochs, options.sleep, options.of)
