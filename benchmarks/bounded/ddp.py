"""Plain DDP as PyTorch's tutorial has it: rank 0 saves by torch.save; written aside and renamed, so that a kill tears nothing.

--each-epoch: at the end of an epoch alone. --wall S: besides every N steps a last time, LEAD_S before a wall S seconds after the
process began, and ends.
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
from bounded.training import ENDLESS, EPOCH, marks

LEAD_S = 2.0


def main() -> None:
    parser = training.options()
    parser.add_argument("--each-epoch", action="store_true")
    parser.add_argument("--wall", type=float)
    parser.add_argument(
        "--timeout", type=float, default=1800, help="seconds until a collective fails; PyTorch's default"
    )
    options = parser.parse_args()
    dist.init_process_group("gloo", timeout=timedelta(seconds=options.timeout))
    rank, every = dist.get_rank(), EPOCH if options.each_epoch else options.every
    began = psutil.Process(os.getppid()).create_time()  # torchrun's

    model = DistributedDataParallel(training.network(options.size))
    optimizer = training.optimizer_of(model)
    saved = options.folder / "saved.pt"

    def save() -> None:
        if rank == 0:
            aside = saved.with_suffix(".tmp")
            state = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict(), "step": marks.step}
            torch.save(state, aside)
            aside.rename(saved)

    first = 0
    if saved.exists():
        state = torch.load(saved)
        model.module.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first = state["step"]
    marks.begin(first)
    loader = training.loader_of(training.samples(), rank, dist.get_world_size())
    over = torch.zeros(1)
    for epoch in range(first // EPOCH, ENDLESS):
        loader.sampler.set_epoch(epoch)  # type: ignore[attr-defined]
        for batch in loader:
            loss = training.loss_of(model, *batch)
            loss.backward()
            training.step_of(optimizer)
            marks.done(loss=loss.detach())
            if options.wall and marks.step % 10 == 0:
                over.fill_(time.time() - began > options.wall - LEAD_S)
                dist.all_reduce(over, dist.ReduceOp.MAX)
            if marks.step % every == 0 or over:
                save()
            if over:
                dist.barrier()
                return


if __name__ == "__main__":
    main()
