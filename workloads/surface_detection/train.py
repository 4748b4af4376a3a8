"""Train a 3D U-Net to find papyrus surfaces: DDP, mixed precision on CUDA, Dice on volumes held out.

    alone:          python -m kgorch.workloads.surface_detection.train --data volumes --epochs 2
    on two ranks:   torchrun --nproc-per-node 2 -m kgorch.workloads.surface_detection.train --data volumes --epochs 2
    through walls:  kgorch start workloads/surface_detection/plan.toml

Lives through cuts: everything that training changes is tracked, and all else is made anew from the arguments.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from kgorch import attach
from kgorch.workloads import cli
from kgorch.workloads.common.files import tell_left_out
from kgorch.workloads.common.record import Record
from kgorch.workloads.common.scoring import summed
from kgorch.workloads.surface_detection import schedule
from kgorch.workloads.surface_detection.data import Patch, Patches
from kgorch.workloads.surface_detection.model import SurfaceUNet, dice_parts, loss_of, weights_of
from kgorch.workloads.surface_detection.volumes import Reader, split, usable

if TYPE_CHECKING:
    from kgorch import Loader, Session

THRESHOLDS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)


def main(
    data: str,
    epochs: int = 40,
    warmup: int = 2,
    first_cycle: int = 10,
    cycle_growth: int = 2,
    end_low: bool = False,
    lr: float = 2e-3,
    weight_decay: float = 1e-4,
    clip: float = 1.0,
    global_batch: int = 16,
    patch: int = 32,
    patches: int = 8,
    positive: float = 1.5,
    valid: int = 2,
    valid_scroll: str | None = None,
    valid_every: int = 2,
    width: int = 8,
    depth: int = 2,
    dropout: float = 0.2,
    kernel: int = 3,
    ignore: int | None = 2,
    unpacked: str | None = None,
    unpacked_gib: float = 0.0,
    limit: int | None = None,
    skip_broken: bool = False,
    num_workers: int = 0,
    prefetch: int = 3,
    seed: int | None = None,
) -> None:
    """Train on the volumes of train.csv but --valid of them, or but those of --valid-scroll, which score each --valid-every epochs.

    The defaults suit the volumes of make_volumes.py; plan.toml has those for the real ones. --patch is the side of a patch in
    voxels, --patches how many of each volume make an epoch, --positive how many lie on a surface for each that may lie anywhere;
    --width, --depth, --dropout and --kernel are those of the network (model.py); --warmup, --first-cycle and --cycle-growth
    those of the learning rate (schedule.py), in epochs; --ignore is the label of voxels that count for nothing; --unpacked is
    a folder for decoded volumes, of at most --unpacked-gib; --limit trains on so many of the volumes only.
    """
    with attach(seed=seed) as session:
        if not torch.are_deterministic_algorithms_enabled():
            torch.backends.cudnn.benchmark = True
        folder = session.data(data)
        volumes, left_out = usable(session, folder, "train", skip_broken=skip_broken)
        reader = Reader(folder, unpacked, unpacked_gib)
        to_train, to_score = split(volumes, valid, valid_scroll)
        train = Patches(reader, to_train[:limit], side=patch, count=patches, positive=positive)
        held = Patches(reader, to_score, side=patch, count=patches, positive=positive, train=False)
        reading = {"num_workers": num_workers, "prefetch_factor": prefetch if num_workers else None}
        loader = session.loader(train, global_batch, **reading)
        together = session.world_size * (session.microbatch or 16)
        scored = session.loader(held, together, shuffle=False, drop_last=False, **reading)

        amp = session.device.type == "cuda"
        net = SurfaceUNet(width, depth, dropout, kernel=kernel)
        model = DistributedDataParallel(net.to(session.device))
        optimizer = torch.optim.AdamW(model.parameters(), lr, weight_decay=weight_decay)
        steps = len(loader)
        plan = schedule.cycles(epochs * steps, warmup * steps, first_cycle * steps, cycle_growth, end_low=end_low)
        scheduler = schedule.scheduler(optimizer, plan, cycle_growth)
        scaler = torch.amp.GradScaler(session.device.type, enabled=amp)
        record = Record(session)
        session.track(model=model, optimizer=optimizer, scheduler=scheduler, scaler=scaler, record=record)
        tell_left_out(session, left_out)
        if session.rank == 0:
            print(
                f"network: {weights_of(net):,} weights; {len(train)} patches an epoch, {len(held)} to score", flush=True
            )
            print(plan.said(lr, steps), flush=True)

        def loss(part: Patch) -> Tensor:
            with session.autocast(torch.float16, enabled=amp):
                logits = model(part.image)
            return loss_of(logits, part.label, ignore)

        for epoch in session.epochs(epochs):
            for batch in session.steps(loader):
                mean_loss = session.backward(batch, loss, scaler=scaler if amp else None)
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), clip)
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad(set_to_none=True)
                session.report(loss=mean_loss, lr=optimizer.param_groups[0]["lr"])
                scheduler.step()
            if (epoch + 1) % valid_every == 0 or epoch + 1 == epochs:
                record.add(epoch=epoch, **dice(session, model.module, scored, ignore))

        if session.rank == 0 and not session.supervised:  # under kgorch the last checkpoint holds the weights
            save_file(model.module.state_dict(), session.output / "surface.safetensors")


def dice(session: Session, net: nn.Module, scored: Loader, ignore: int | None) -> dict[str, float]:
    """Over all scored patches of all ranks: Dice at a threshold of 0.5, the best threshold of nine, and Dice there."""

    def figures(batch: Patch) -> Tensor:
        with session.autocast(torch.float16, enabled=session.device.type == "cuda"):
            logits = net(batch.image)
        return dice_parts(logits.sigmoid(), batch.label, THRESHOLDS, ignore)

    sums = summed(session, net, scored, figures)
    overlaps, areas = sums[: len(THRESHOLDS)], sums[len(THRESHOLDS) :]
    found = [overlap / max(area, 1) for overlap, area in zip(overlaps, areas, strict=True)]
    best = max(range(len(found)), key=found.__getitem__)
    return {"dice": found[THRESHOLDS.index(0.5)], "threshold": THRESHOLDS[best], "dice_at_threshold": found[best]}


if __name__ == "__main__":
    cli.run(main)
