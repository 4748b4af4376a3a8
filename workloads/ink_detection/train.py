"""Train a 3D U-Net to find ink: DDP, mixed precision on CUDA, Dice after every epoch.

    alone:          python -m workloads.ink_detection.train --data fragments --epochs 2
    on two ranks:   torchrun --nproc-per-node 2 -m workloads.ink_detection.train --data fragments --epochs 2
    through walls:  kgorch start workloads/ink_detection/plan.toml

Lives through cuts: everything that training changes is tracked, and all else is made anew from the arguments.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import CosineAnnealingWarmRestarts, LinearLR, SequentialLR

from orchestrator.worker import attach
from workloads import cli
from workloads.common.files import tell_left_out
from workloads.common.record import Record
from workloads.common.scoring import summed
from workloads.ink_detection.data import Fragments, Tile
from workloads.ink_detection.model import InkUNet, dice_loss, dice_parts

if TYPE_CHECKING:
    from orchestrator.worker.loader import Loader
    from orchestrator.worker.session import Session


def main(
    data: str,
    epochs: int = 32,
    lr: float = 1e-3,
    global_batch: int = 16,
    layers: int = 8,
    tile: int = 64,
    stride: int = 10,
    channels: list[int] = [16, 32, 64],  # noqa: B006  (read only)
    warmup: int = 2,
    validation: str | None = None,
    num_workers: int = 0,
    prefetch: int = 3,
    skip_broken: bool = False,
    seed: int | None = None,
) -> None:
    """Train on all fragments but one, which scores each epoch.

    The defaults suit the fragments of make_fragments.py; plan.toml has those for the real ones.
    --layers is how many of the middle layers to use, --stride the step between tiles, --channels the width
    of each level of the network, --warmup a number of epochs, --validation the fragment held out. --skip-broken leaves out
    fragments that cannot be used.
    """
    with attach(seed=seed) as session:
        if not torch.are_deterministic_algorithms_enabled():
            torch.backends.cudnn.benchmark = True
        cut = {"layers": layers, "tile": tile, "validation": validation, "skip_broken": skip_broken}
        train, valid = Fragments(data, "train", stride=stride, **cut), Fragments(data, "valid", stride=tile, **cut)
        loader = session.loader(
            train, global_batch, num_workers=num_workers, prefetch_factor=prefetch if num_workers else None
        )
        together = session.world_size * (session.microbatch or 16)
        scored = session.loader(
            valid, together, shuffle=False, drop_last=False, num_workers=num_workers, persistent_workers=False
        )

        amp = session.device.type == "cuda"
        model = DistributedDataParallel(InkUNet(channels).to(session.device))
        optimizer = torch.optim.AdamW(model.parameters(), lr)
        scheduler = schedule(optimizer, steps_per_epoch=len(loader), warmup=warmup)
        scaler = torch.amp.GradScaler(session.device.type, enabled=amp)
        record = Record(session)
        session.track(model=model, optimizer=optimizer, scheduler=scheduler, scaler=scaler, record=record)
        tell_left_out(session, train.left_out)

        loss_of = dice_loss()

        def loss(part: Tile) -> Tensor:
            with session.autocast(torch.float16, enabled=amp):
                logits = model(part.volume)
            return loss_of(logits, part.ink)

        for epoch in session.epochs(epochs):
            for batch in session.steps(loader):
                mean_loss = session.backward(batch, loss, scaler=scaler if amp else None)
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad(set_to_none=True)
                session.report(loss=mean_loss, lr=optimizer.param_groups[0]["lr"])
                scheduler.step()
            record.add(epoch=epoch, dice=dice(session, model.module, scored, amp))

        if session.rank == 0 and not session.supervised:  # under kgorch the last checkpoint holds the weights
            save_file(model.module.state_dict(), session.output / "ink.safetensors")


def schedule(optimizer: torch.optim.Optimizer, steps_per_epoch: int, warmup: int) -> SequentialLR:
    """Linear warm-up, then cosines of 10, 20, 40, ... epochs, stepped once a batch."""
    restarts = CosineAnnealingWarmRestarts(optimizer, T_0=10 * steps_per_epoch, T_mult=2, eta_min=1e-6)
    if not warmup:
        return SequentialLR(optimizer, [restarts], [])
    rise = LinearLR(optimizer, start_factor=0.01, total_iters=warmup * steps_per_epoch)
    return SequentialLR(optimizer, [rise, restarts], [warmup * steps_per_epoch])


def dice(session: Session, model: InkUNet, scored: Loader, amp: bool) -> float:
    """Dice over all validation tiles of all ranks."""

    def figures(batch: Tile) -> Tensor:
        with session.autocast(torch.float16, enabled=amp):
            return dice_parts(model(batch.volume), batch.ink)

    overlap, areas = summed(session, model, scored, figures)
    return overlap / max(areas, 1)


if __name__ == "__main__":
    cli.run(main)
