"""Asks its allocator for what no machine has, until all is as small as `--fits` says: `{"crop": 96, "microbatch": 2}`.

What may have to fit: the arguments, `microbatch` and `workers` as they are in force, and `kept`, blocks whose activations are.
`--own`: without `session.backward`. `--touch`: asks for 2 GiB and fills them.
`--late`: in the optimizer's step of this rank alone, when the others have done theirs.
"""

import argparse
import json
import time

import no_compiler  # noqa: F401
import torch
from torch import nn

from kgorch import attach

parser = argparse.ArgumentParser()
parser.add_argument("--fits", type=json.loads, required=True)
parser.add_argument("--from-step", type=int, default=3)
parser.add_argument("--touch", action="store_true")
parser.add_argument("--own", action="store_true")
parser.add_argument("--late", type=int)
parser.add_argument("--batch", type=int, default=4)
parser.add_argument("--epochs", type=int, default=2)
parser.add_argument("--sleep", type=float, default=0.0)
for name in ("workers", "crop", "hidden", "answer_length", "beams"):
    parser.add_argument(f"--{name}", type=int, default=0)
options = parser.parse_args()

now = {}


class Late(torch.optim.SGD):
    def step(self):
        if options.late is not None and outgrown():
            time.sleep(0.5)
            torch.empty(1 << 50)
        super().step()


def outgrown() -> bool:
    is_mine = options.late in (None, session.rank)
    return is_mine and step >= options.from_step and any(now[name] > size for name, size in options.fits.items())


with attach(seed=0) as session:
    width = options.hidden or 8
    blocks = [nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width)) for _ in range(2)]
    model = nn.Sequential(nn.Linear(8, width), *blocks, nn.Linear(width, 8))
    optimizer = Late(model.parameters(), 0.01)
    session.track(model=model, optimizer=optimizer)
    data = torch.utils.data.TensorDataset(torch.ones(4 * options.batch * session.world_size, 8))
    loader = session.loader(data, options.batch * session.world_size, num_workers=options.workers)
    step = session._state.position.step

    def loss_of(part):
        kept = sum("forward" not in vars(block) for block in blocks)
        now.update(vars(options) | {"microbatch": len(part[0]), "workers": loader._inner.num_workers, "kept": kept})
        if options.late is None and outgrown():
            torch.ones(1 << 29) if options.touch else torch.empty(1 << 50)
        return model(part[0]).square().mean()

    for batch in session.steps(loader, options.epochs):
        if options.own:
            loss_of(batch).backward()
        else:
            session.backward(batch, loss_of)
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        time.sleep(options.sleep)
