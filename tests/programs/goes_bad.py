"""Trains a small net whose losses or weights go bad: a sample that is no number, or too large for half precision (`--bad 5 8`:
in the last rank's part of those steps), weights that are spoilt once at a step (`--spoil 9`), a crash (`--crash 9`)."""

import argparse
import pathlib
import time

import no_compiler  # noqa: F401
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from kgorch import attach

BATCH = 4

parser = argparse.ArgumentParser()
parser.add_argument("--bad", type=int, nargs="*", default=[])
parser.add_argument("--value", type=float, default=float("nan"))
parser.add_argument("--leave_out", type=int, nargs="*", default=[])
parser.add_argument("--spoil", type=int, default=-1)
parser.add_argument("--crash", type=int, default=-1)
parser.add_argument("--half", action="store_true")
parser.add_argument("--steps", type=int, default=20)
parser.add_argument("--sleep", type=float, default=0.0)
options = parser.parse_args()


def for_the_first_time(name: str) -> bool:
    marker = pathlib.Path(f"{name}.done")
    if marker.exists():
        return False
    marker.touch()
    return True


generator = torch.Generator().manual_seed(3)
x = torch.randn(options.steps * BATCH, 6, generator=generator)
y = x.sum(dim=1, keepdim=True)
for bad in options.bad:
    x[bad * BATCH + BATCH - 1] = options.value

with attach(seed=1) as session:
    net = nn.Sequential(
        nn.Linear(6, 8), nn.BatchNorm1d(8) if not options.half else nn.Identity(), nn.Dropout(0.2), nn.Linear(8, 1)
    )
    model = DistributedDataParallel(net.to(session.device))
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    scaler = torch.amp.GradScaler(session.device.type, enabled=options.half)
    session.track(model=model, optimizer=optimizer, scaler=scaler)

    def loss_of(part):
        with session.autocast(torch.float16, enabled=options.half):
            out = model(part[0])
        loss = (out - part[1]).square().mean()
        return loss.half() if options.half and out.dtype == torch.float16 else loss.float()

    loader = session.loader(torch.utils.data.TensorDataset(x, y), BATCH, shuffle=False)
    for _ in session.epochs(1):
        for batch in session.steps(loader):
            step = session._state.position.step
            if step not in options.leave_out:
                loss = session.backward(batch, loss_of, scaler=scaler if options.half else None)
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
                print(
                    f"step {step} loss {float(loss):.6f} scale {scaler.get_scale()} lr {optimizer.param_groups[0]['lr']}"
                )
            time.sleep(options.sleep)
            if session.rank == 0 and step == options.crash and for_the_first_time("crash"):
                raise ValueError("a crash")
            if step == options.spoil and for_the_first_time(f"spoil{session.rank}"):
                with torch.no_grad():
                    net[0].weight[0, 0] = torch.nan
