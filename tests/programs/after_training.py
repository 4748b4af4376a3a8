"""A training of a few steps, and work after it: what a script does once its `with attach()` block is over.

The first time that work takes `after` seconds, and none after that; with `fail` it raises the first time instead.
With `enough` the training stops early, after so many steps.
"""

import argparse
import time
from pathlib import Path

import no_compiler  # noqa: F401
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from kgorch import attach


def main(epochs: int, sleep: float, after: float, enough: int, fail: bool) -> None:
    with attach(seed=3) as session:
        net = DistributedDataParallel(nn.Linear(8, 1).to(session.device))
        optimizer = torch.optim.AdamW(net.parameters(), 1e-2)
        session.track(net=net, optimizer=optimizer)
        chance = torch.Generator().manual_seed(5)
        data = torch.utils.data.TensorDataset(
            torch.randn(64, 8, generator=chance), torch.randn(64, 1, generator=chance)
        )
        loader = session.loader(data, 16)
        for batch in session.steps(loader, epochs):
            if enough and session.step == enough:
                break
            session.backward(batch, lambda part: (net(part[0]) - part[1]).square().mean())
            optimizer.step()
            optimizer.zero_grad()
            time.sleep(sleep)
        rank, output = session.rank, session.output
    begun, done = Path(output, f"begun{rank}"), Path(output, f"done{rank}")
    is_first = not begun.exists()
    begun.write_text(begun.read_text() + "x" if begun.exists() else "x")
    if is_first:
        if fail:
            raise RuntimeError("the work after the training fails once")
        time.sleep(after)
    done.write_text(f"{float(net.module.weight.detach().sum()):.9f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--sleep", type=float, default=0.0)
    parser.add_argument("--after", type=float, default=0.0)
    parser.add_argument("--enough", type=int, default=0)
    parser.add_argument("--fail", action="store_true")
    options = parser.parse_args()
    main(options.epochs, options.sleep, options.after, options.enough, options.fail)
