"""Train one of the networks on prices: DDP, mixed precision on CUDA, accuracy of the direction after every epoch.

    alone:          python -m kgorch.workloads.timeseries.train --data prices --model lstm --epochs 2
    on two ranks:   torchrun --nproc-per-node 2 -m kgorch.workloads.timeseries.train --data prices --model mlp --epochs 2
    through walls:  kgorch start workloads/timeseries/plan.toml   (the three, one after another)

Lives through cuts: everything that training changes is tracked, and all else is made anew from the arguments.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import OneCycleLR

from kgorch import KgorchError, attach
from kgorch.workloads import cli
from kgorch.workloads.common.files import tell_left_out
from kgorch.workloads.common.record import Record
from kgorch.workloads.common.scoring import summed
from kgorch.workloads.timeseries.data import Prices, Window
from kgorch.workloads.timeseries.model import MODELS

if TYPE_CHECKING:
    from kgorch import Loader, Session


def main(
    data: str,
    model: str = "lstm",
    epochs: int = 50,
    lr: float = 1e-3,
    global_batch: int = 256,
    hidden: int = 128,
    frames: list[str] = ["5m", "15m", "1h"],  # noqa: B006  (read only)
    length: int = 48,
    horizon: int = 4,
    classes: int = 2,
    threshold: float = 0.006,
    split: list[str] | None = None,
    embargo: int | None = None,
    limit: int | None = None,
    bidirectional: bool = False,
    attention: bool = False,
    layers: int = 3,
    heads: int = 4,
    feedforward: int = 2,
    weight_decay: float = 1e-2,
    label_smoothing: float = 0.0,
    patience: int | None = None,
    num_workers: int = 0,
    prefetch: int = 2,
    persistent_workers: bool = True,
    skip_broken: bool = False,
    seed: int | None = None,
) -> None:
    """Train one network on all symbols; the part of the time after it scores each epoch.

    --model is lstm (with --bidirectional, --attention), transformer (with --layers, --heads, --feedforward) or mlp.
    --frames are the time frames, the traded one first; --length bars of each make a window, and --horizon bars later the price
    is compared. --classes is 2, or 3 with --threshold. --split are the two dates at which validation and test begin, --embargo
    the bars left out there. --limit trains on so many windows only. --patience ends after so many epochs without a better
    accuracy. --skip-broken leaves out symbols that cannot be read.
    """
    options: dict[str, dict[str, Any]] = {
        "lstm": {"bidirectional": bidirectional, "attention": attention},
        "transformer": {"layers": layers, "heads": heads, "feedforward": feedforward},
        "mlp": {},
    }
    if model not in MODELS:
        raise KgorchError(f"there is no model {model!r}", next_step=f"name one of {', '.join(MODELS)}")
    if model == "transformer" and hidden % heads:
        raise KgorchError(f"hidden = {hidden} cannot be divided by heads = {heads}", next_step="change one of them")
    with attach(seed=seed) as session:
        if not torch.are_deterministic_algorithms_enabled():
            torch.backends.cudnn.benchmark = True
        train = Prices(
            data, "train", frames=frames, length=length, horizon=horizon, classes=classes, threshold=threshold, split=split,
            embargo=embargo, limit=limit, skip_broken=skip_broken,
        )  # fmt: skip
        reading = {"prefetch_factor": prefetch, "persistent_workers": persistent_workers} if num_workers else {}
        loader = session.loader(train, global_batch, is_random=False, num_workers=num_workers, **reading)
        scored = session.loader(train.of("valid"), global_batch, shuffle=False, drop_last=False, is_random=False)

        amp = session.device.type == "cuda"
        net = MODELS[model](len(frames), length, classes, hidden=hidden, **options[model]).to(session.device)
        ddp = DistributedDataParallel(net)
        optimizer = torch.optim.AdamW(ddp.parameters(), lr, weight_decay=weight_decay)
        scheduler = OneCycleLR(optimizer, lr, epochs=epochs, steps_per_epoch=len(loader), pct_start=0.1)
        scaler = torch.amp.GradScaler(session.device.type, enabled=amp)
        record = Record(session, f"{model}.csv")
        session.track(model=ddp, optimizer=optimizer, scheduler=scheduler, scaler=scaler, record=record)
        tell_left_out(session, train.left_out)

        def loss(part: Window) -> Tensor:
            with session.autocast(torch.float16, enabled=amp):
                logits = ddp(part.bars)
            return cross_entropy(logits.float(), part.answer, label_smoothing=label_smoothing)

        for epoch in session.epochs(epochs):
            for batch in session.steps(loader):
                mean_loss = session.backward(batch, loss, scaler=scaler if amp else None)
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(ddp.parameters(), 1.0)
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad(set_to_none=True)
                session.report(loss=mean_loss, lr=optimizer.param_groups[0]["lr"])
                scheduler.step()
            record.add(epoch=epoch, accuracy=accuracy(session, net, scored, amp))
            if patience is not None and record.epochs_since_best("accuracy") >= patience:
                break

        if session.rank == 0 and not session.supervised:  # under kgorch the checkpoints hold the weights
            save_file(net.state_dict(), session.output / f"{model}.safetensors")


def accuracy(session: Session, net: nn.Module, scored: Loader, amp: bool) -> float:
    """Share of the windows whose class is said right, over all ranks."""

    def figures(batch: Window) -> Tensor:
        with session.autocast(torch.float16, enabled=amp):
            right = net(batch.bars).argmax(1) == batch.answer
        return torch.stack([right.sum(), torch.tensor(len(right), device=right.device)])

    right, count = summed(session, net, scored, figures)
    return right / count


if __name__ == "__main__":
    cli.run(main)
