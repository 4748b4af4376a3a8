"""A model that is sharded over a mesh of ranks (FSDP2, with tensor parallelism or replicas), or not at all.

Sizes that no number of ranks divides, a weight with fewer rows than ranks, tied weights, two types, a buffer, frozen weights.
"""

import argparse
import hashlib
import time

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from kgorch import attach
from kgorch.worker.session_end import SessionOver


class Block(nn.Module):
    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.norm, self.inner, self.dropout = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Dropout(dropout)
        self.outer = nn.Linear(2 * width, width)

    def forward(self, x):
        return x + self.outer(self.dropout(torch.relu(self.inner(self.norm(x)))))


class Net(nn.Module):
    def __init__(self, width: int, depth: int, dropout: float) -> None:
        super().__init__()
        self.first = nn.Linear(16, width)
        self.blocks = nn.ModuleList(Block(width, dropout) for _ in range(depth))
        self.last = nn.Linear(width, 3)  # fewer rows than ranks: some hold nothing of it
        self.tied = nn.Linear(width, width, bias=False)
        self.tied_again = nn.Linear(width, width, bias=False)
        self.tied_again.weight = self.tied.weight
        self.frozen = nn.Linear(width, width).to(torch.bfloat16).requires_grad_(False)
        self.register_buffer("scale", torch.tensor([1.0, 2.0, 3.0]))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        self.calls += 1
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        x = x + self.tied_again(torch.relu(self.tied(x))) + self.frozen(x.to(torch.bfloat16)).float()
        return self.last(x) * self.scale


def shard(net: Net, kind: str, world_size: int) -> nn.Module:
    if kind == "plain":
        return net
    if kind == "ddp":
        return DistributedDataParallel(net)
    if kind == "fsdp":
        mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("dp",))
    else:
        names = ("replicas", "shards") if kind == "hsdp" else ("dp", "tp")
        mesh = init_device_mesh("cpu", (world_size // 2, 2), mesh_dim_names=names)
    if kind == "2d":
        for block in net.blocks:
            parallelize_module(block, mesh["tp"], {"inner": ColwiseParallel(), "outer": RowwiseParallel()})
        mesh = mesh["dp"]
    for block in net.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(net, mesh=mesh)
    return net


def digest(module: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """Of all weights and moments, gathered."""
    found = hashlib.sha256()
    tensors = [*module.state_dict().values()]
    tensors += [value for state in optimizer.state.values() for _, value in sorted(state.items())]
    for tensor in tensors:
        whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        found.update(whole.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()[:16]


def train(o: argparse.Namespace, session, model, optimizer, schedule) -> None:
    x = torch.randn(100, 16, generator=torch.Generator().manual_seed(5))
    loader = session.loader(torch.utils.data.TensorDataset(x, x[:, :1] * 2), o.batch, drop_last=False)

    def loss_of(part):
        if o.fails_at <= session.step and session.rank == 1 and len(part[0]) > o.fits:
            torch.empty(1 << 46)  # more than any machine has
        return (model(part[0]) - part[1]).square().mean()

    for _ in session.epochs(o.epochs):
        for batch in session.steps(loader):
            print(f"batch {session.step} {batch[0].sum().item():.9g}", flush=True)
            loss = session.backward(batch, loss_of)
            optimizer.step()
            optimizer.zero_grad()
            session.report(loss=loss)
            print(f"step {session.step} microbatch {session.microbatch} loss {loss.item():.17g}", flush=True)
            time.sleep(o.sleep)
        schedule.step()
        if o.measures:
            session.report(score=float(session.epoch))


def main(o: argparse.Namespace) -> None:
    with attach(seed=3) as session:
        torch.manual_seed(7)
        net = Net(o.width, o.depth, o.dropout)
        torch.manual_seed(50 + session.rank)
        model = shard(net, o.mesh, session.world_size)
        optimizer = torch.optim.AdamW([weight for weight in model.parameters() if weight.requires_grad], 1e-2)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, o.epochs)
        session.track(model=model, optimizer=optimizer, schedule=schedule)
        print(f"begin {session.step} {digest(net, optimizer)} {dict(session.exactness)}", flush=True)
        try:
            train(o, session, model, optimizer, schedule)
        except SessionOver:
            print(f"stopped {session.step} {digest(net, optimizer)}", flush=True)
            raise
        again = sum("forward" in vars(block) for block in net.blocks)
        print(f"end {session.step} {digest(net, optimizer)} blocks computed again: {again}", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--mesh", default="fsdp", choices=["plain", "ddp", "fsdp", "hsdp", "2d"])
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--width", type=int, default=10)
    parser.add_argument("--depth", type=int, default=2)
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--sleep", type=float, default=0.0)
    parser.add_argument("--fails-at", "--fails_at", type=int, default=10**9, help="step from which memory runs out")
    parser.add_argument("--measures", action="store_true", help="report a score after each epoch")
    parser.add_argument("--fits", type=int, default=0, help="samples of a microbatch that fit")
    main(parser.parse_args())
