"""Train a network to find camouflaged animals, in two stages: the backbone frozen, then thawing part by part.

    alone:          python -m workloads.camouflage.train --data animals --epochs 2
    on two ranks:   torchrun --nproc-per-node 2 -m workloads.camouflage.train --data animals --epochs 2
    through walls:  kgorch start workloads/camouflage/plan.toml   (both stages, then the prediction)

Lives through cuts: everything that training changes is tracked, and all else is made anew from the arguments. Which parts of
the backbone are frozen is a function of the epoch. They run without gradients, so they cost no backward, and the optimizer
passes over what has none: neither rate nor weight decay moves them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, SequentialLR

from orchestrator.worker import attach
from workloads import cli
from workloads.camouflage.data import Pairs, Sample
from workloads.camouflage.model import CamouflageNet, frozen_at, iou_parts, total_loss
from workloads.common.files import tell_left_out
from workloads.common.record import Record
from workloads.common.scoring import summed

if TYPE_CHECKING:
    from orchestrator.worker.loader import Loader
    from orchestrator.worker.session import Session


def main(
    data: str,
    epochs: int = 30,
    lr: float = 6.5e-4,
    final_lr: float = 1e-5,
    warmup: int = 10,
    weight_decay: float = 1e-2,
    size: int = 352,
    global_batch: int = 32,
    dims: list[int] = [80, 160, 288, 584],  # noqa: B006  (read only)
    depths: list[int] = [3, 3, 9, 3],  # noqa: B006
    heads: int = 8,
    width: int = 64,
    balance: float = 0.01,
    frozen: int = 0,
    unfreeze_every: int = 0,
    first_stage: str | None = None,
    weights: str | None = None,
    names: str = "*",
    table: str = "metrics.csv",
    skip_broken: bool = False,
    num_workers: int = 0,
    prefetch: int = 2,
    seed: int | None = None,
) -> None:
    """Train on <data>/Train; <data>/Test scores each epoch by the mean IoU of its pictures.

    --frozen of the backbone's four parts begin without training, and one more trains each --unfreeze-every epochs (0: none).
    --first-stage names the stage of the run whose weights are gone on with; --weights is a safetensors file instead.
    --names is which pictures ("COD10K-CAM-*"), --warmup a number of epochs, --dims, --depths, --heads the backbone,
    --width that of decoder and experts, --balance what uneven use of the experts costs.
    """
    with attach(seed=seed) as session:
        if not torch.are_deterministic_algorithms_enabled():
            torch.backends.cudnn.benchmark = True
        train = Pairs(data, "Train", size, names=names, augments=True, skip_broken=skip_broken)
        valid = Pairs(data, "Test", size, names=names, skip_broken=skip_broken)
        loader = session.loader(
            train, global_batch, num_workers=num_workers, prefetch_factor=prefetch if num_workers else None
        )
        scored = session.loader(
            valid, global_batch, shuffle=False, drop_last=False, num_workers=num_workers, persistent_workers=False
        )

        net = CamouflageNet(dims, depths, heads, width)
        if first_stage or weights:
            net.load_state_dict(load_file(weights) if weights else session.weights(first_stage, "model"))
        net.never_train(frozen_at(epochs - 1, frozen, unfreeze_every))
        amp = session.device.type == "cuda"
        # what thaws later has no gradient yet, and DDP must not wait for it
        model = DistributedDataParallel(net.to(session.device), find_unused_parameters=unfreeze_every > 0)
        optimizer = torch.optim.AdamW(
            [weight for weight in net.parameters() if weight.requires_grad], lr, weight_decay=weight_decay
        )
        scheduler = schedule(optimizer, len(loader), warmup=warmup, epochs=epochs, final_lr=final_lr)
        scaler = torch.amp.GradScaler(session.device.type, enabled=amp)
        record = Record(session, table)
        session.track(model=model, optimizer=optimizer, scheduler=scheduler, scaler=scaler, record=record)
        tell_left_out(session, train.broken + valid.broken)

        def loss(part: Sample) -> Tensor:
            with session.autocast(torch.float16, enabled=amp):
                answer = model(part.image)
            return total_loss(answer, part.mask, balance)

        for epoch in session.epochs(epochs):
            net.freeze(frozen_at(epoch, frozen, unfreeze_every))
            for batch in session.steps(loader):
                mean_loss = session.backward(batch, loss, scaler=scaler if amp else None)
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad(set_to_none=True)
                session.report(loss=mean_loss, lr=optimizer.param_groups[0]["lr"])
                scheduler.step()
            record.add(epoch=epoch, frozen=net.backbone.frozen, iou=iou(session, net, scored, amp))

        if session.rank == 0 and not session.supervised:  # under kgorch the last checkpoint holds the weights
            save_file(net.state_dict(), session.output / "camouflage.safetensors")


def schedule(
    optimizer: torch.optim.Optimizer, steps_per_epoch: int, *, warmup: int, epochs: int, final_lr: float
) -> SequentialLR:
    """Linear warm-up, then one cosine down to `final_lr`, stepped once a batch."""
    rising, all_steps = warmup * steps_per_epoch, epochs * steps_per_epoch
    fall = CosineAnnealingLR(optimizer, max(all_steps - rising, 1), eta_min=final_lr)
    if not rising:
        return SequentialLR(optimizer, [fall], [])
    return SequentialLR(optimizer, [LinearLR(optimizer, 0.01, total_iters=rising), fall], [rising])


def iou(session: Session, net: CamouflageNet, scored: Loader, amp: bool) -> float:
    """The mean over the pictures of all ranks, at the size they are trained at."""

    def figures(batch: Sample) -> Tensor:
        with session.autocast(torch.float16, enabled=amp):
            return iou_parts(net(batch.image).mask, batch.mask)

    total, count = summed(session, net, scored, figures)
    return total / count


if __name__ == "__main__":
    cli.run(main)
