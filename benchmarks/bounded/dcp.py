"""torch.distributed.checkpoint.async_save every N steps, as in benchmarks/peers/dcp_async.py.

A checkpoint is whole once its .metadata is there, which the coordinator writes last; the newest such folder is loaded. --wall S: as
in ddp.py, a save behind the first steps, timed until it is on disk, and a last one in time before the wall.
"""

from __future__ import annotations

import os
import shutil
import time
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.nn.parallel import DistributedDataParallel

from bounded import training
from bounded.training import ENDLESS, EPOCH, lead_of, marks


def main() -> None:
    parser = training.options()
    parser.add_argument("--wall", type=float)
    options = parser.parse_args()
    dist.init_process_group("gloo")
    rank, group = dist.get_rank(), dist.new_group(backend="gloo")
    began = psutil.Process(os.getppid()).create_time()  # torchrun's
    model = DistributedDataParallel(training.network(options.size))
    optimizer = training.optimizer_of(model)
    stager = DefaultStager(
        StagingOptions(
            use_pinned_memory=False, use_shared_memory=False, use_async_staging=False, use_non_blocking_copy=False
        )
    )

    def state() -> dict[str, Any]:
        weights, moments = get_state_dict(model, optimizer)
        return {"model": weights, "optimizer": moments}

    first, found = 0, whole(options.folder)
    if found:
        loaded = state()
        dcp.load(loaded, checkpoint_id=found[-1])
        set_state_dict(model, optimizer, model_state_dict=loaded["model"], optim_state_dict=loaded["optimizer"])
        first = int(found[-1].name)
    marks.begin(first)
    loader = training.loader_of(training.samples(), rank, dist.get_world_size())
    saving: Future[Any] | None = None
    timed: list[float] = []
    """When the first save by the clock began, and when it was on disk."""
    over = torch.zeros(1)

    def save() -> Future[Any]:
        if saving:
            saving.result()
            if rank == 0:
                for old in whole(options.folder)[:-2]:
                    shutil.rmtree(old)
        planner = DefaultSavePlanner(enable_plan_caching=True)
        place = options.folder / str(marks.step)
        return dcp.async_save(state(), checkpoint_id=place, planner=planner, process_group=group, async_stager=stager)

    for epoch in range(first // EPOCH, ENDLESS):
        loader.sampler.set_epoch(epoch)  # type: ignore[attr-defined]
        for batch in loader:
            loss = training.loss_of(model, *batch)
            loss.backward()
            training.step_of(optimizer)
            marks.done()
            if options.wall and marks.step == first + training.MEASURED:
                timed.append(time.monotonic())
                saving = save()
                saving.add_done_callback(lambda _: timed.append(time.monotonic()))
            elif options.wall and marks.step % 10 == 0 and timed:
                lead_s = lead_of((timed[1] if len(timed) > 1 else time.monotonic()) - timed[0])
                over.fill_(time.time() - began > options.wall - lead_s)
                dist.all_reduce(over, dist.ReduceOp.MAX)
            if over or (options.every and marks.step % options.every == 0):
                saving = save()
            if over and saving:
                saving.result()
                dist.barrier()
                return


def whole(folder: Path) -> list[Path]:
    return sorted((path.parent for path in folder.glob("*/.metadata")), key=lambda path: int(path.name))


if __name__ == "__main__":
    main()
