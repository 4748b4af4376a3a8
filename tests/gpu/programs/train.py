"""A small training with what real ones use on a GPU: 3D convolutions, BatchNorm, an LSTM, mixed precision. It can lack memory
(an allocation that no machine can give, or a real limit on the allocator), fail or hang with a busy device, or validate alone.

On a CPU the same code runs, but for what only CUDA has; the arguments are the same.
"""

import argparse
import gc
import json
import pathlib
import threading
import time

import torch

if not torch.cuda.is_available():
    import no_compiler  # noqa: F401  (a rehearsal imports torch._dynamo for nothing, 1.5 s a rank)
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from kgorch import attach

IMPOSSIBLE = 1 << 46
FOREVER_CYCLES = 10**12  # of torch.cuda._sleep: some minutes, whatever the clock rate
PRECISIONS = {"fp16": torch.float16, "bf16": torch.bfloat16, "off": torch.float32}


class Allocates(torch.autograd.Function):
    """Passes on what it is given; asks for too much memory on its device when it is told to, in forward or backward."""

    armed = ""

    @staticmethod
    def forward(ctx, x):
        if Allocates.armed == "forward":
            torch.empty(IMPOSSIBLE, device=x.device)
        ctx.armed = Allocates.armed
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        if ctx.armed == "backward":
            torch.empty(IMPOSSIBLE, device=gradient.device)
        return gradient


class Block(nn.Module):
    def __init__(self, width: int, norm: str) -> None:
        super().__init__()
        self.conv = nn.Conv3d(width, width, 3, padding=1, bias=norm == "none")
        self.norm = nn.GroupNorm(2, width) if norm == "group" else nn.BatchNorm3d(width)
        self.dropout = nn.Dropout3d(0.1)

    def forward(self, x):
        return x + self.dropout(torch.relu(self.norm(self.conv(x))))


class Net(nn.Module):
    def __init__(self, o: argparse.Namespace) -> None:
        super().__init__()
        self.first = nn.Conv3d(1, o.width, 3, padding=1)
        self.blocks = nn.ModuleList(Block(o.width, o.norm) for _ in range(o.blocks))
        self.lstm = nn.LSTM(o.width, 2 * o.width, num_layers=2, dropout=o.lstm_dropout, batch_first=True)
        self.last = nn.Linear(2 * o.width, 1)
        self.unused = nn.Linear(4, 4) if o.unused else None
        self.register_buffer("padding", torch.zeros(o.pad_mb << 18))

    def forward(self, x_NCDHW):
        x = Allocates.apply(self.first(x_NCDHW))
        for block in self.blocks:
            x = block(x)
        x_NDC = x.mean((3, 4)).transpose(1, 2).contiguous()
        x = Allocates.apply(self.lstm(x_NDC)[0])
        return self.last(x[:, -1]).squeeze(1)


def squeeze(share: float) -> None:
    """Leave the allocator `share` of what a step takes beyond what lies between two steps."""
    torch.cuda.synchronize()
    gc.collect()
    torch.cuda.empty_cache()
    least, most = torch.cuda.memory_reserved(), torch.cuda.max_memory_reserved()
    total = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
    torch.cuda.set_per_process_memory_fraction((least + share * (most - least)) / total)


def fill(leave_mb: int) -> list[torch.Tensor]:
    """Take the device's memory but so much, in smaller and smaller parts."""
    filler, size = [], 1 << 30
    while size >= 1 << 20:
        if torch.cuda.mem_get_info()[0] - size < leave_mb << 20:
            size //= 2
        else:
            filler.append(torch.empty(size, dtype=torch.uint8, device="cuda"))
    return filler


def group_facts(session, model) -> dict[str, object]:
    """How the ranks communicate, and whether the drain protocol can be used; what cannot be asked is absent."""
    facts: dict[str, object] = {"device": str(session.device)}
    try:
        backend = model.process_group._get_backend(session.device)
        facts |= {"backend": type(backend).__name__, "sequence": backend._get_sequence_number_for_group()}
        facts["timeout_s"] = backend.options._timeout.total_seconds()
    except (AttributeError, RuntimeError):
        pass
    try:
        from kgorch.worker.memory.ddp_drain import GradientReduction

        facts["way"] = GradientReduction([model]).mode(microbatched=False)
    except (AttributeError, RuntimeError) as error:
        facts["way"] = f"{type(error).__name__}: {error}"
    return facts


def allocator_facts(session) -> dict[str, int]:
    if session.device.type != "cuda":
        return {}
    torch.cuda.synchronize()
    stats = torch.cuda.memory_stats()
    names = {"allocated": "allocated_bytes.all.current", "reserved": "reserved_bytes.all.current", "ooms": "num_ooms"}
    return {name: stats[key] for name, key in names.items()}


def main(o: argparse.Namespace) -> None:
    with attach(seed=3) as session:
        fills = o.leave_mb and o.rank in (-1, session.rank) and session.device.type == "cuda"
        filler = fill(o.leave_mb) if fills else []
        torch.manual_seed(7)
        net = Net(o).to(session.device)
        if o.norm == "sync":
            net = nn.SyncBatchNorm.convert_sync_batchnorm(net)
        torch.manual_seed(50 + session.rank)
        model = DistributedDataParallel(net, bucket_cap_mb=0.02, find_unused_parameters=o.unused)
        optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
        scaler = torch.amp.GradScaler(
            session.device.type, init_scale=1024.0, growth_interval=5, enabled=o.amp == "fp16"
        )
        session.track(model=model, optimizer=optimizer, scaler=scaler)
        generator = torch.Generator().manual_seed(5)
        x_NCDHW = torch.randn(o.samples, 1, o.layers, o.side, o.side, generator=generator)
        loader = session.loader(torch.utils.data.TensorDataset(x_NCDHW, x_NCDHW.mean((1, 2, 3, 4)) * 20), o.batch)
        print("facts", json.dumps(group_facts(session, model)), flush=True)
        lines, memory, step = [], [], session_step(session)

        def is_mine() -> bool:
            return o.rank in (-1, session.rank) and not (o.once and pathlib.Path(o.once).exists())

        def mark() -> None:
            for path in filter(None, (o.once, o.mark)):
                pathlib.Path(path).write_text(repr(time.clock_gettime(time.CLOCK_BOOTTIME)))

        def loss_of(part):
            fits = o.fits - (step - o.at if o.shrinks else 0)
            lacks = o.at <= step < o.until and is_mine() and len(part[0]) > max(fits, 1)
            if o.kept:  # as long as activations are kept
                lacks = o.at <= step and is_mine() and "forward" not in vars(net.blocks[0])
            Allocates.armed = o.where if lacks else ""
            with session.autocast(PRECISIONS[o.amp], enabled=o.amp != "off"):
                output = model(part[0])
            return (output.float() - part[1]).square().mean()

        def print_results() -> None:
            for number, microbatch, loss in lines:
                print(f"step {number} microbatch {microbatch} loss {loss.item():.17g}")
            print("memory", json.dumps(memory))
            print("facts", json.dumps(allocator_facts(session) | {"held": len(filler)}), flush=True)

        for epoch in session.epochs(o.epochs):
            for batch in until_stop(session.steps(loader), print_results):
                if o.squeeze and step == o.at and session.device.type == "cuda" and is_mine():
                    squeeze(o.squeeze)
                loss = session.backward(batch, loss_of, scaler=scaler)
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad(set_to_none=True)
                session.report(loss=loss)
                lines.append((step, session.microbatch, loss))
                if session.device.type == "cuda":
                    memory.append([torch.cuda.memory_allocated(), torch.cuda.memory_reserved()])
                if step in (o.fail, o.hang) and is_mine():
                    busy(session, loss)
                    mark()
                    if step == o.fail:
                        raise ValueError(f"failed at step {step}, with its device busy")
                    wait_for_ever(loss)
                if o.tells:
                    print(f"at step {step}", flush=True)
                step += 1
                time.sleep(o.pause)
            if o.validate and epoch == 0 and session.rank == 0:
                time.sleep(o.validate)
        print_results()


def until_stop(items, print_results):
    """The same, with `tell` before the script ends at a step boundary."""
    iterator = iter(items)
    while True:
        try:
            item = next(iterator)
        except StopIteration:
            return
        except SystemExit:
            print_results()
            raise
        yield item


def session_step(session) -> int:
    """The optimizer step at which this attempt begins."""
    return int(session._state.position.step) if session.supervised else 0


def busy(session, loss) -> None:
    """Let the device compute for minutes, with a metric that comes after it."""
    if session.device.type == "cuda":
        torch.cuda._sleep(FOREVER_CYCLES)
        session.report(late=loss + 1)


def wait_for_ever(loss) -> None:
    if loss.is_cuda:
        (loss + 1).item()
    else:
        threading.Event().wait()


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--samples", type=int, default=48)
    parser.add_argument("--batch", type=int, default=8, help="of a step, over all ranks")
    parser.add_argument("--width", type=int, default=4)
    parser.add_argument("--blocks", type=int, default=2)
    parser.add_argument("--layers", type=int, default=4, help="depth of a volume")
    parser.add_argument("--side", type=int, default=8, help="height and width of a volume")
    parser.add_argument("--norm", default="batch", choices=("batch", "group", "sync"))
    parser.add_argument("--lstm-dropout", "--lstm_dropout", type=float, default=0.0)
    parser.add_argument("--amp", default="off", choices=PRECISIONS)
    parser.add_argument("--unused", action="store_true", help="a layer that no step uses")
    parser.add_argument("--pad-mb", "--pad_mb", type=int, default=0, help="MiB of state besides")
    parser.add_argument("--pause", type=float, default=0.0, help="seconds after each step")
    parser.add_argument("--tells", action="store_true", help="a line for each step, without waiting for the device")
    parser.add_argument("--rank", type=int, default=-1, help="which one lacks memory, fails or hangs; -1 for all")
    parser.add_argument("--at", type=int, default=10**9, help="the step from which on memory is short")
    parser.add_argument("--until", type=int, default=10**9, help="the step from which on it is not")
    parser.add_argument("--fits", type=int, default=10**9, help="samples that fit then")
    parser.add_argument("--kept", action="store_true", help="nothing fits while activations are kept")
    parser.add_argument("--shrinks", action="store_true", help="one sample less fits with every step")
    parser.add_argument("--where", default="backward")
    parser.add_argument(
        "--squeeze", type=float, default=0.0, help="limit the allocator to so much of what a step takes"
    )
    parser.add_argument(
        "--leave-mb", "--leave_mb", type=int, default=0, help="fill the GPU but for so much, before DDP"
    )
    parser.add_argument("--fail", type=int, default=-1, help="the step after which to raise, with a busy device")
    parser.add_argument(
        "--hang", type=int, default=-1, help="the step after which to wait for a device that is busy for minutes"
    )
    parser.add_argument("--once", default="", help="fail or hang only while this file is not there")
    parser.add_argument("--mark", default="", help="where to write when that was (CLOCK_BOOTTIME)")
    parser.add_argument(
        "--validate", type=float, default=0.0, help="seconds that rank 0 validates alone after the first epoch"
    )
    return parser.parse_args()


if __name__ == "__main__":
    main(options())
