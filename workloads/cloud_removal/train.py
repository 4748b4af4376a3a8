"""Train a network to take clouds out of Sentinel-2 images: DDP, mixed precision on CUDA, PSNR and SSIM after every epoch.

    alone:          python -m kgorch.workloads.cloud_removal.train --data scenes --epochs 2
    on two ranks:   torchrun --nproc-per-node 2 -m kgorch.workloads.cloud_removal.train --data scenes --epochs 2
    through walls:  kgorch start workloads/cloud_removal/plan.toml

Lives through cuts: everything that training changes is tracked, and all else is made anew from the arguments.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import StepLR

from kgorch import attach
from kgorch.workloads import cli
from kgorch.workloads.cloud_removal.data import Sample, Scenes
from kgorch.workloads.cloud_removal.model import CloudRemover, scores
from kgorch.workloads.common.files import tell_left_out
from kgorch.workloads.common.record import Record
from kgorch.workloads.common.scoring import summed

if TYPE_CHECKING:
    from kgorch import Loader, Session


def main(
    data: str,
    data_list: str | None = None,
    limit: int | None = None,
    epochs: int = 10,
    lr: float = 1e-4,
    decay_every: int = 5,
    decay_from: int = 0,
    clip: float = 1.0,
    global_batch: int = 8,
    crop: int = 32,
    width: int = 24,
    growth: int = 16,
    blocks: int = 2,
    layers: int = 2,
    window: int = 4,
    heads: int = 4,
    taps: int = 3,
    skip_broken: bool = False,
    num_workers: int = 0,
    prefetch: int = 2,
    seed: int | None = None,
) -> None:
    """Train on the places listed as train; those listed as val score each epoch.

    The defaults suit the images of make_scenes.py; plan.toml has those for the real ones. --data is the folder of the images,
    --data-list their list (places.py), --limit how many places of each part are used at most. --crop is the size of the random
    windows, --width, --growth, --blocks, --layers, --window, --heads and --taps that of the network (model.py). The rate is
    halved every --decay-every epochs, counted from epoch --decay-from, and gradients are cut to a norm of --clip.
    """
    with attach(seed=seed) as session:
        if not torch.are_deterministic_algorithms_enabled():
            torch.backends.cudnn.benchmark = True
        root = session.data(data)
        how = {"table": data_list, "limit": limit, "skip_broken": skip_broken, "session": session}
        train, val = Scenes(root, "train", crop=crop, **how), Scenes(root, "val", **how)
        reading = {"num_workers": num_workers, "prefetch_factor": prefetch if num_workers else None}
        loader = session.loader(train, global_batch, **reading)
        # Whole images, one a rank: each is as many pixels as four crops, and they may differ in size.
        scored = session.loader(val, session.world_size, shuffle=False, drop_last=False, **reading)

        amp = session.device.type == "cuda"
        net = CloudRemover(width, growth, blocks, layers, window=window, heads=heads, taps=taps)
        model = DistributedDataParallel(net.to(session.device))
        optimizer = torch.optim.Adam(model.parameters(), lr)
        scheduler = StepLR(optimizer, decay_every, gamma=0.5)
        scaler = torch.amp.GradScaler(session.device.type, enabled=amp)
        record = Record(session)
        session.track(model=model, optimizer=optimizer, scheduler=scheduler, scaler=scaler, record=record)
        tell_left_out(session, train.left_out + val.left_out)

        def loss(part: Sample) -> Tensor:
            with session.autocast(torch.float16, enabled=amp):
                clear = model(part.cloudy, part.sar)
            return nn.functional.l1_loss(clear.float(), part.clear)

        for epoch in session.epochs(epochs):
            for batch in session.steps(loader):
                mean_loss = session.backward(batch, loss, scaler=scaler if amp else None)
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), clip)
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad(set_to_none=True)
                session.report(loss=mean_loss, lr=optimizer.param_groups[0]["lr"])
            rate = optimizer.param_groups[0]["lr"]
            if epoch >= decay_from:
                scheduler.step()
            record.add(epoch=epoch, lr=rate, **scored_by(session, model.module, scored, amp))

        if session.rank == 0 and not session.supervised:  # under kgorch the last checkpoint holds the weights
            save_file(model.module.state_dict(), session.output / "cloud_removal.safetensors")


def scored_by(session: Session, net: nn.Module, scored: Loader, amp: bool) -> dict[str, float]:
    """Means over the images of all ranks: PSNR in dB, SSIM, and the PSNR of the cloudy images as they are."""

    def figures(batch: Sample) -> Tensor:
        with session.autocast(torch.float16, enabled=amp):
            clear = net(batch.cloudy, batch.sar)
        count = torch.ones(len(clear), 1, device=clear.device)
        return torch.cat([scores(clear.float(), batch), count], 1).sum(0)

    *sums, count = summed(session, net, scored, figures)
    return dict(zip(("psnr", "ssim", "cloudy_psnr"), (value / count for value in sums), strict=True))


if __name__ == "__main__":
    cli.run(main)
