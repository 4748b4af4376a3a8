"""Three ranks whose DDP sums gradients in buckets. Prints on each rank what a resume makes of them.

python sums_of_three.py RANK FILE: the sums of a resumed process beside those of the run before, and of one without the saved order;
then the notes of a resume where rank 0 alone has a hook on a gradient.
"""

from __future__ import annotations

import os
import sys
from datetime import timedelta

import no_compiler  # noqa: F401
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from kgorch.worker.memory.bucket_order import BucketOrder


def wrapped() -> DistributedDataParallel:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 33), nn.ReLU(), nn.Linear(33, 17), nn.ReLU(), nn.Linear(17, 1))
    return DistributedDataParallel(net, bucket_cap_mb=0.001)


def sums(ddp: DistributedDataParallel, rank: int) -> torch.Tensor:
    ddp.zero_grad()
    ddp(torch.randn(4, 8, generator=torch.Generator().manual_seed(rank))).square().sum().backward()
    return torch.cat([weight.grad.flatten() for weight in ddp.parameters()])


def resumed(saved: object, ddp: DistributedDataParallel) -> str:
    order = BucketOrder(3)
    order.resume(saved)
    return order.restore([ddp])


def main() -> None:
    rank = int(sys.argv[1])
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{sys.argv[2]}", rank=rank, world_size=3, timeout=timedelta(seconds=60)
    )
    before, order = wrapped(), BucketOrder(3)
    sums(before, rank)
    order.learn([before])
    aim, anew, other = sums(before, rank), wrapped(), wrapped()
    note = resumed(order.saved, anew)
    print(torch.equal(sums(anew, rank), aim), torch.equal(sums(other, rank), aim), repr(note))

    hooked, order = wrapped(), BucketOrder(3)
    if rank == 0:
        hooked.module[0].weight.register_hook(lambda gradient: None)
    sums(hooked, rank)
    order.learn([hooked])
    dist.all_reduce(torch.ones(1))  # of the script: it has to meet the same one on all ranks
    hooked = wrapped()
    if rank == 0:
        hooked.module[0].weight.register_hook(lambda gradient: None)
    note = resumed(order.saved, hooked)
    sums(hooked, rank)
    print(order.saved, note)
    sys.stdout.flush()
    os._exit(0)  # the end of gloo's threads aborts a process now and then, with no exception


main()
