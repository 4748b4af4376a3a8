"""Train one of the networks on prices: DDP, mixed precision on CUDA, accuracy of the direction after every epoch.

    alone:          python -m workloads.timeseries.train --data prices --model lstm --epochs 2
    on two ranks:   torchrun --nproc-per-node 2 -m workloads.timeseries.train --data prices --model mlp --epochs 2
    through walls:  kgorch start workloads/timeseries/plan.toml   (the three, one after another)

Lives through cuts: everything that training changes is tracked, and all else is made anew from the arguments.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import OneCycleLR

from orchestrator.errors import KgorchError
from orchestrator.worker import attach
from workloads import cli
from workloads.common.files import tell_left_out
from workloads.common.record import Record
from workloads.common.scoring import summed
from workloads.timeseries.data import Prices, Window
from workloads.timeseries.model import MODELS

if TYPE_CHECKING:
    from orchestrator.worker.loader import Loader
    from orchestrator.worker.session import Session


def main(
    data: str,
    model: str = "lstm",
    epochs: int = 50,
    lr: float = 2e-3,
    global_batch: int = 256,
    hidden: int = 128,
    frames: list[str] = ["5m", "15m", "1h"],  # noqa: B006  (read only)
    length: int = 48,
    horizon: int = 4,
    weight_decay: float = 1e-2,
    num_workers: int = 0,
    prefetch: int = 2,
    skip_broken: bool = False,
    seed: int | None = None,
) -> None:
    """Train one network on all symbols; the part of the time after it scores each epoch, the last part the end.

    --model is lstm, transformer or mlp; --frames are the time frames, the traded one first; --length bars of each make
    a window, and --horizon bars later the price is compared. --skip-broken leaves out symbols that cannot be read.
    """
    if model not in MODELS:
        raise KgorchError(f"there is no model {model!r}", next_step=f"name one of {', '.join(MODELS)}")
    with attach(seed=seed) as session:
        if not torch.are_deterministic_algorithms_enabled():
            torch.backends.cudnn.benchmark = True
        parts = {
            part: Prices(data, part, frames=frames, length=length, horizon=horizon, skip_broken=skip_broken)
            for part in ("train", "valid", "test")
        }
        reading = {"num_workers": num_workers, "prefetch_factor": prefetch if num_workers else None}
        loader = session.loader(parts["train"], global_batch, **reading)
        scored = {
            part: session.loader(parts[part], global_batch, shuffle=False, drop_last=False)
            for part in ("valid", "test")
        }

        amp = session.device.type == "cuda"
        net = DistributedDataParallel(MODELS[model](len(frames), length, hidden).to(session.device))
        optimizer = torch.optim.AdamW(net.parameters(), lr, weight_decay=weight_decay)
        scheduler = OneCycleLR(optimizer, lr, epochs=epochs, steps_per_epoch=len(loader), pct_start=0.1)
        scaler = torch.amp.GradScaler(session.device.type, enabled=amp)
        record = Record(session, f"{model}.csv")
        session.track(model=net, optimizer=optimizer, scheduler=scheduler, scaler=scaler, record=record)
        tell_left_out(session, parts["train"].left_out)

        def loss(part: Window) -> Tensor:
            with session.autocast(torch.float16, enabled=amp):
                logits = net(part.bars)
            return binary_cross_entropy_with_logits(logits.float(), part.up)

        for epoch in session.epochs(epochs):
            for batch in session.steps(loader):
                mean_loss = session.backward(batch, loss, scaler=scaler if amp else None)
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(net.parameters(), 1.0)
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad(set_to_none=True)
                session.report(loss=mean_loss, lr=optimizer.param_groups[0]["lr"])
                scheduler.step()
            record.add(epoch=epoch, accuracy=accuracy(session, net.module, scored["valid"], amp))

        tested = accuracy(session, net.module, scored["test"], amp)
        session.report(test_accuracy=tested)
        if session.rank == 0:
            (session.output / f"{model}.json").write_text(json.dumps({"model": model, "test_accuracy": tested}) + "\n")
            if not session.supervised:  # under kgorch the last checkpoint holds the weights
                save_file(net.module.state_dict(), session.output / f"{model}.safetensors")


def accuracy(session: Session, net: nn.Module, scored: Loader, amp: bool) -> float:
    """Share of the windows whose direction is said right, over all ranks; half of it is chance."""

    def figures(batch: Window) -> Tensor:
        with session.autocast(torch.float16, enabled=amp):
            right = (net(batch.bars) > 0) == (batch.up > 0.5)
        return torch.stack([right.sum(), torch.tensor(len(right), device=right.device)])

    right, count = summed(session, net, scored, figures)
    return right / count


if __name__ == "__main__":
    cli.run(main)
