"""A training in which memory runs out, for real, on one rank or all: an allocation that no machine can give, or RLIMIT_DATA."""

import argparse
import contextlib
import os
import resource
import time

import no_compiler  # noqa: F401
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from kgorch import attach
from kgorch.worker.telemetry import rank_metrics

IMPOSSIBLE = 1 << 46


class Greedy(torch.autograd.Function):
    """Passes on what it is given; asks for too much memory, in forward or backward, while the batch is larger than allowed."""

    armed = ""

    @staticmethod
    def forward(ctx, x):
        if Greedy.armed == "forward":
            torch.empty(IMPOSSIBLE)
        ctx.armed = Greedy.armed
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        if ctx.armed == "backward":
            torch.empty(IMPOSSIBLE)
        return gradient


class Block(nn.Module):
    def __init__(self, width: int, norm: str) -> None:
        super().__init__()
        self.inner, self.dropout, self.outer = nn.Linear(width, 2 * width), nn.Dropout(0.2), nn.Linear(2 * width, width)
        self.norm = nn.BatchNorm1d(width) if norm == "batch" else nn.LayerNorm(width)

    def forward(self, x):
        return x + self.outer(self.dropout(torch.relu(self.inner(self.norm(x)))))


class Net(nn.Module):
    def __init__(self, width: int, norm: str, unused: bool, depth: int) -> None:
        super().__init__()
        self.first = nn.Linear(16, width)
        self.blocks = nn.ModuleList(Block(width, norm) for _ in range(depth))
        self.last = nn.Linear(width, 1)
        self.unused = nn.Linear(4, 4) if unused else None
        self.register_buffer("table", torch.arange(1000.0))

    def forward(self, x):
        shape = x.shape[:2]
        x = Greedy.apply(self.first(x.flatten(0, 1)))
        for number, block in enumerate(self.blocks):
            x = block(x)
            if number == 0:
                x = Greedy.apply(x)
        return self.last(x).view(shape)


class Points(torch.utils.data.Dataset):
    def __init__(self, copies: int) -> None:
        self.x = torch.randn(160, 16, generator=torch.Generator().manual_seed(5))
        self.copies = copies

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        x = self.x[index]
        return x.expand(self.copies, 16), x[:1] * 2


def epochs_of(session, o):
    """The batches of each epoch: of kgorch's loader, of the script's own, or in a loop that the script owns."""
    if o.loop == "kgorch":
        loader = session.loader(Points(o.copies), o.batch, num_workers=0)
    else:
        points, share = Points(o.copies), o.batch // session.world_size
        sampler = torch.utils.data.DistributedSampler(points, session.world_size, session.rank, shuffle=False)
        loader = torch.utils.data.DataLoader(points, share, sampler=sampler)
    if o.loop != "boundary":
        return (session.steps(loader) for _ in session.epochs(o.epochs))

    def own():
        for batch in loader:
            session.boundary(samples=o.batch)
            yield batch

    return (own() for _ in range(o.epochs))


def main(o: argparse.Namespace) -> None:
    if o.late:
        import late_group  # noqa: F401

        torch.distributed.init_process_group("late")
    with attach(seed=3) as session:
        if o.undefined:  # as PyTorch 2.4 to 2.6 leave a group that is made as "cpu:gloo,cuda:nccl"
            group = torch.distributed.distributed_c10d._get_default_group()
            if hasattr(group, "_set_default_backend"):  # 2.4 has one from the first, and its group tells
                group._set_default_backend(torch.distributed.ProcessGroup.BackendType.UNDEFINED)
        torch.manual_seed(7)
        net = Net(o.width, o.norm, o.unused, o.depth)
        torch.manual_seed(50 + session.rank)
        model = DistributedDataParallel(
            net,
            bucket_cap_mb=0.01,
            find_unused_parameters=o.unused,
            gradient_as_bucket_view=o.view,
            static_graph=o.static,
        )
        optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0, enabled=o.scaler)
        session.track(model=model, optimizer=optimizer, scaler=scaler)
        step = 0

        def loss_of(part):
            fails = step >= o.at and (o.rank in (-1, session.rank)) and len(part[0]) > o.fits
            if o.kept and "forward" not in vars(net.blocks[0]):  # as long as activations are kept
                fails = step >= o.at and o.rank in (-1, session.rank)
            Greedy.armed = o.where if fails else ""
            if o.talks:  # as a contrastive loss that gathers
                torch.distributed.all_reduce(torch.ones(1))
            return ((model(part[0]).mean(1, keepdim=True) - part[1]) ** 2).mean()

        for epoch in epochs_of(session, o):
            for batch in epoch:
                if o.limit_mb and step == o.at and o.rank in (-1, session.rank):
                    used = int(next(line for line in open("/proc/self/status") if line.startswith("VmData")).split()[1])
                    resource.setrlimit(resource.RLIMIT_DATA, (used * 1024 + o.limit_mb * 10**6,) * 2)
                with model.no_sync() if o.unsynced and step % 2 == 1 else contextlib.nullcontext():
                    loss = session.backward(batch, loss_of, scaler=scaler)
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad(set_to_none=not o.zeros)
                session.report(loss=loss)
                print(f"step {step} microbatch {session.microbatch} loss {loss.item():.17g}")
                step += 1
                time.sleep(o.pause)
            if o.evaluates and session.rank == 0:
                model.eval()
                with torch.no_grad():
                    torch.empty(IMPOSSIBLE)


def allocator(path):
    """A mock, for nothing real can be had: the share of 15 GiB that rank 1 is said to need is read from a file."""

    def told(device):
        taken = float(open(path).read()) if int(os.environ["RANK"]) == 1 else 0.4
        return {"total": 15 * 2.0**30, "peak": taken * 15 * 2.0**30, "reserved": taken * 15 * 2.0**30}

    return told


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch", type=int, default=32, help="samples of a step, over all ranks")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--rank", type=int, default=1, help="which one fails; -1 for all")
    parser.add_argument("--at", type=int, default=10**9, help="the step from which on it fails")
    parser.add_argument("--where", default="forward")
    parser.add_argument("--fits", type=int, default=8, help="samples that fit")
    parser.add_argument(
        "--limit-mb", "--limit_mb", type=int, default=0, help="RLIMIT_DATA that far above what is taken"
    )
    parser.add_argument("--pause", type=float, default=0.0, help="seconds after each step")
    parser.add_argument("--allocator", default="", help="a file that stands in for CUDA's allocator: there is no GPU")
    parser.add_argument("--loop", default="kgorch", choices=["kgorch", "own", "boundary"])
    parser.add_argument("--norm", default="layer")
    parser.add_argument("--width", type=int, default=32)
    parser.add_argument("--depth", type=int, default=3)
    parser.add_argument("--copies", type=int, default=1)
    for flag in (
        "unused",
        "view",
        "static",
        "scaler",
        "zeros",
        "kept",
        "talks",
        "unsynced",
        "undefined",
        "late",
        "evaluates",
    ):
        parser.add_argument(f"--{flag}", action="store_true")
    options = parser.parse_args()
    if options.allocator:
        rank_metrics._allocator = allocator(options.allocator)
    main(options)
