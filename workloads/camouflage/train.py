"""Train a network to find camouflaged animals, in two stages: the backbone frozen, then thawing part by part.

    alone:          python -m kgorch.workloads.camouflage.train --data animals --epochs 2
    on two ranks:   torchrun --nproc-per-node 2 -m kgorch.workloads.camouflage.train --data animals --epochs 2
    through walls:  kgorch start workloads/camouflage/plan.toml   (both stages, then the prediction)

Lives through cuts: everything that training changes is tracked, and all else is made anew from the arguments. Which parts of
the backbone are frozen is a function of the epoch. They run without gradients, so they cost no backward, and the optimizer
passes over what has none: neither rate nor weight decay moves them.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LambdaLR
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from kgorch import KgorchError, attach
from kgorch.workloads import cli
from kgorch.workloads.camouflage.data import Pairs, Sample
from kgorch.workloads.camouflage.loss import Loss
from kgorch.workloads.camouflage.model import MOST_EXPERTS, CamouflageNet, frozen_at, iou_parts
from kgorch.workloads.camouflage.trained import weights_of
from kgorch.workloads.common.files import tell_left_out
from kgorch.workloads.common.record import Record
from kgorch.workloads.common.scoring import summed

if TYPE_CHECKING:
    from kgorch import Loader, Session

LOWEST = 0.01
"""Where a warm-up begins, as a share of the rate."""


def main(
    data: str,
    epochs: int = 30,
    epochs_before: int = 0,
    lr: float = 6.5e-4,
    final_lr: float = 1e-5,
    warmup: int = 10,
    weight_decay: float = 1e-4,
    clip: float = 0.5,
    size: int = 320,
    global_batch: int = 32,
    dims: list[int] = [80, 160, 288, 584],  # noqa: B006  (read only)
    depths: list[int] = [3, 3, 9, 3],  # noqa: B006
    heads: int = 8,
    width: int = 64,
    experts: int = MOST_EXPERTS,
    loss: str = "bce_iou_edge",
    deep: float = 0.4,
    balance: float = 0.01,
    edges: str = "mask",
    ema: float = 0.0,
    frozen: int = 0,
    unfreeze_every: int = 0,
    first_stage: str | None = None,
    which: str | None = None,
    weights: str | None = None,
    names: str = "*",
    valid: float = 0.1,
    limit: int | None = None,
    table: str = "metrics.csv",
    skip_broken: bool = False,
    num_workers: int = 0,
    prefetch: int = 2,
    seed: int | None = None,
) -> None:
    """Train on <data>/Train but for a share --valid of it, which scores each epoch by the mean IoU of its pictures.

    --frozen of the backbone's four parts begin without training, and one more trains each --unfreeze-every epochs (0: none).
    --first-stage names the stage of the run whose weights are gone on with, --which "best" or "final" of them; --weights is a
    safetensors file instead; --epochs-before of --epochs lie behind them: rate and frozen parts go on from there.
    --names is which pictures ("COD10K-CAM-*"), --limit how many to train on, --warmup a number of epochs, --clip the
    largest norm of the gradients (0: none), --dims, --depths, --heads the backbone, --width that of decoder and experts.
    --loss is bce_iou_edge or structure, --deep the side outputs' weight in the first, --balance what uneven use of the experts
    costs; --edges is mask, or GT_Edge for an output of its own that learns the outlines of that folder.
    --ema averages the weights (0.999; 0: not): the average is scored, kept, and what predicts.
    """
    with attach(seed=seed) as session:
        if not torch.are_deterministic_algorithms_enabled():
            torch.backends.cudnn.benchmark = True
        outlined = is_outlined(edges)
        criterion = Loss(loss, deep, balance).check()
        root = session.data(data)
        choice = {"names": names, "valid": valid, "skip_broken": skip_broken, "session": session}
        train = Pairs(root, "Train", size, limit=limit, edges=outlined, augments=True, **choice)
        validation = Pairs(root, "Validation", size, **choice)
        loader = session.loader(
            train, global_batch, num_workers=num_workers, prefetch_factor=prefetch if num_workers else None
        )
        scored = session.loader(
            validation, global_batch, shuffle=False, drop_last=False, num_workers=num_workers, persistent_workers=False
        )

        net = CamouflageNet(dims, depths, heads, width, experts=experts, edge=outlined)
        if first_stage or weights:
            net.load_state_dict(load_file(weights) if weights else weights_of(session, str(first_stage), which))
        net.never_train(frozen_at(epochs - 1, frozen, unfreeze_every))
        average = AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(ema)).to(session.device) if ema else None
        amp = session.device.type == "cuda"
        # what thaws later has no gradient yet, and DDP must not wait for it
        model = DistributedDataParallel(net.to(session.device), find_unused_parameters=unfreeze_every > 0)
        optimizer = torch.optim.AdamW(
            [weight for weight in net.parameters() if weight.requires_grad], lr, weight_decay=weight_decay
        )
        scheduler = schedule(
            optimizer, len(loader), warmup=warmup, epochs=epochs, before=epochs_before, final=final_lr / lr
        )
        scaler = torch.amp.GradScaler(session.device.type, enabled=amp)
        record = Record(session, table)
        averaged = {"ema": average} if average else {}
        session.track(model=model, optimizer=optimizer, scheduler=scheduler, scaler=scaler, record=record, **averaged)
        net.trained_size.fill_(size)  # after track: what was restored may be from before a rung of the memory ladder
        tell_left_out(session, train.broken + validation.broken)

        def loss_of(part: Sample) -> Tensor:
            with session.autocast(torch.float16, enabled=amp):
                answer = model(part.image)
            return criterion(answer, part.mask, part.edge)

        for done in session.epochs(epochs - epochs_before):
            epoch = epochs_before + done
            net.freeze(frozen_at(epoch, frozen, unfreeze_every))
            for batch in session.steps(loader):
                mean_loss = session.backward(batch, loss_of, scaler=scaler if amp else None)
                if clip:
                    scaler.unscale_(optimizer)
                    nn.utils.clip_grad_norm_(net.parameters(), clip)
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad(set_to_none=True)
                if average:
                    average.update_parameters(net)
                session.report(loss=mean_loss, lr=optimizer.param_groups[0]["lr"])
                scheduler.step()
            judged = average.module if average else net
            record.add(epoch=epoch, frozen=net.backbone.frozen, size=size, iou=iou(session, judged, scored, amp))

        if session.rank == 0 and not session.supervised:  # under kgorch the checkpoints hold the weights
            save_file((average.module if average else net).state_dict(), session.output / "camouflage.safetensors")


def is_outlined(edges: str) -> bool:
    """Whether the network gets an output for the outlines of GT_Edge. Raises KgorchError."""
    if edges not in ("mask", "GT_Edge"):
        raise KgorchError(
            f"edges = {edges!r}", "expected where the outlines come from: mask, or the folder GT_Edge",
            next_step='give edges = "mask" or edges = "GT_Edge"',
        )  # fmt: skip
    return edges == "GT_Edge"


def schedule(
    optimizer: torch.optim.Optimizer, steps_per_epoch: int, *, warmup: int, epochs: int, before: int, final: float
) -> LambdaLR:
    """Linear warm-up, then one cosine down to the share `final` of the rate, stepped once a batch; `before` epochs are behind."""
    rising, all_steps = warmup * steps_per_epoch, epochs * steps_per_epoch

    def share(step: int) -> float:
        step += before * steps_per_epoch
        if step < rising:
            return LOWEST + (1 - LOWEST) * step / rising
        fallen = min((step - rising) / max(all_steps - rising, 1), 1.0)
        return final + (1 - final) * (1 + math.cos(math.pi * fallen)) / 2

    return LambdaLR(optimizer, share)


def iou(session: Session, net: nn.Module, scored: Loader, amp: bool) -> float:
    """The mean over the pictures of all ranks, at the size they are trained at."""

    def figures(batch: Sample) -> Tensor:
        with session.autocast(torch.float16, enabled=amp):
            return iou_parts(net(batch.image).mask, batch.mask)

    total, count = summed(session, net, scored, figures)
    return total / count


if __name__ == "__main__":
    cli.run(main)
