"""Reports another name at every step, 25,000 in all, as a script does that writes its step into the name."""

from __future__ import annotations

import time

import no_compiler  # noqa: F401
import torch
from torch import nn

from kgorch import attach

NAMES, STEPS = 25_000, 50


def main() -> None:
    torch.set_num_threads(1)
    with attach(seed=5) as session:
        model = nn.Linear(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        session.track(model=model, optimizer=optimizer)
        loader = session.loader([torch.ones(4)] * (STEPS * 8), 8)
        each = NAMES // STEPS
        for number, batch in enumerate(session.steps(loader, 1)):
            loss = session.backward(batch, lambda part: model(part).square().mean())
            optimizer.step()
            optimizer.zero_grad()
            session.report(loss=loss, huge=10**400, **{"\x1b[2Jtitle": 1})
            session.report(
                **{f"a loss of the layer with a long name/{number * each + one}": 0.5 for one in range(each)}
            )
            time.sleep(0.1)


if __name__ == "__main__":
    main()
