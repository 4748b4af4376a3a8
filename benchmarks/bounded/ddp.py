"""Plain DDP as PyTorch's tutorial has it: rank 0 saves by torch.save; written aside and renamed, so that a kill tears nothing.

--never: no save, and nothing is loaded. --wall S: a save behind the first steps, whose seconds it takes, and by them a last one in
time before a wall S seconds after torchrun began; then it ends. --stateful: torchdata's StatefulDataLoader, whose state of each
rank is saved, too; without it an epoch begins anew after loading.
"""

from __future__ import annotations

import os
import time
from datetime import timedelta

import psutil
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from bounded import training
from bounded.training import ENDLESS, lead_of, marks


def main() -> None:
    parser = training.options()
    parser.add_argument("--never", action="store_true")
    parser.add_argument("--stateful", action="store_true")
    parser.add_argument("--wall", type=float)
    parser.add_argument(
        "--timeout", type=float, default=1800, help="seconds until a collective fails; PyTorch's default"
    )
    options = parser.parse_args()
    dist.init_process_group("gloo", timeout=timedelta(seconds=options.timeout))
    rank, world = dist.get_rank(), dist.get_world_size()
    began = psutil.Process(os.getppid()).create_time()  # torchrun's

    model = DistributedDataParallel(training.network(options.size))
    optimizer = training.optimizer_of(model)
    loader = (training.stateful_loader_of if options.stateful else training.loader_of)(training.samples(), rank, world)
    saved = options.folder / "saved.pt"

    def save(epoch: int) -> float:
        """Its seconds."""
        at_s = time.monotonic()
        loaders: list[object] = [None] * world
        if options.stateful:
            dist.all_gather_object(loaders, loader.state_dict())  # type: ignore[attr-defined]
        if rank == 0:
            aside = saved.with_suffix(".tmp")
            state = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict(), "loaders": loaders}
            torch.save({**state, "step": marks.step, "epoch": epoch}, aside)
            aside.rename(saved)
        return time.monotonic() - at_s

    first = first_epoch = 0
    if saved.exists() and not options.never:
        state = torch.load(saved)
        model.module.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first, first_epoch = state["step"], state["epoch"]
        if options.stateful:
            loader.load_state_dict(state["loaders"][rank])  # type: ignore[attr-defined]
    marks.begin(first)
    over, lead_s = torch.zeros(1), 0.0
    for epoch in range(first_epoch, ENDLESS):
        loader.sampler.set_epoch(epoch)  # type: ignore[attr-defined]
        for batch in loader:
            loss = training.loss_of(model, *batch)
            loss.backward()
            training.step_of(optimizer)
            marks.done(loss=loss.detach())
            if options.never:
                continue
            if options.wall and marks.step == first + training.MEASURED:
                lead_s = lead_of(save(epoch))
            elif options.wall and marks.step % 10 == 0 and lead_s:
                over.fill_(time.time() - began > options.wall - lead_s)
                dist.all_reduce(over, dist.ReduceOp.MAX)
            if over or (options.every and marks.step % options.every == 0):
                save(epoch)
            if over:
                dist.barrier()
                return


if __name__ == "__main__":
    main()
