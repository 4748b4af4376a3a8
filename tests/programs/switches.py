"""Trains a model under DistributedDataParallel in several ways, with activation checkpointing switched in the midst and without.

python switches.py RANK WORLD_SIZE FILE: rank 0 prints one line per way, `True` where the bits are the same.
"""

from __future__ import annotations

import os
import sys

import no_compiler  # noqa: F401
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from kgorch.worker.memory.activation_checkpointing import ActivationCheckpointing

WAYS = [{}, {"find_unused_parameters": True}, {"gradient_as_bucket_view": True}, {"static_graph": True}]


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.norm, self.drop = nn.Linear(width, 4 * width), nn.BatchNorm1d(4 * width), nn.Dropout(0.3)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x_BF: torch.Tensor) -> torch.Tensor:
        return x_BF + self.down(self.drop(torch.relu(self.norm(self.up(x_BF)))))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.last = nn.ModuleList(Block(16) for _ in range(4)), nn.Linear(16, 1)

    def forward(self, x_BF: torch.Tensor, skipped: int | None) -> torch.Tensor:
        for number, block in enumerate(self.blocks):
            x_BF = x_BF if number == skipped else block(x_BF)
        return self.last(x_BF)


def trained(rank: int, way: dict[str, bool], *, switched: bool) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model = DistributedDataParallel(Model(), bucket_cap_mb=0.01, **way)
    activations = ActivationCheckpointing({"model": model})
    assert len(activations.blocks) == 4
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    torch.manual_seed(rank)
    for step in range(6):
        if switched and step in (2, 4):
            activations.switch_on() if step == 2 else activations.switch_off()
        skipped = step % 4 if way.get("find_unused_parameters") else None
        if not way.get("static_graph"):  # which bears no no_sync() in its first step
            with model.no_sync():
                model(torch.randn(8, 16), skipped).square().mean().backward()
        model(torch.randn(8, 16), skipped).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [*model.state_dict().values()]


def main() -> None:
    rank, world_size = int(sys.argv[1]), int(sys.argv[2])
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{sys.argv[3]}", rank=rank, world_size=world_size)
    for way in WAYS:
        same = all(map(torch.equal, trained(rank, way, switched=True), trained(rank, way, switched=False)))
        if rank == 0:
            print(same, way)
    sys.stdout.flush()
    os._exit(0)  # the end of gloo's threads aborts a process now and then, with no exception


main()
