"""What kgorch adds to a step, measured in one process: plain steps of a DDP first, then the same under a session.

A machine is not equally fast for long, so the loops are compared by blocks of steps in turns: of the session, and of a second
model outside it.

Prints one line of facts: seconds of a step on the host, waits for the device, snapshots and what they held up.
"""

import argparse
import collections
import cProfile
import itertools
import json
import pstats
import statistics
import time
import warnings

import torch

if not torch.cuda.is_available():
    import no_compiler  # noqa: F401
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from kgorch import attach

BUSY_S = 1.0
WARM_UP, AUDITED, BLOCK = 3, 40, 20
"""Steps that are not measured: plain ones, and those under kgorch, which looks for state that is not saved in its first ones;
and steps of a block."""


class Net(nn.Module):
    def __init__(self, width: int, depth: int, pad_mb: int) -> None:
        super().__init__()
        layers = (layer for _ in range(depth) for layer in (nn.Linear(width, width), nn.BatchNorm1d(width), nn.ReLU()))
        self.layers = nn.Sequential(*layers)
        self.register_buffer("padding", torch.zeros(pad_mb << 18))

    def forward(self, x):
        return self.layers(x)


def cycles_of(seconds: float) -> int:
    """Of torch.cuda._sleep."""
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda._sleep(10**7)
    begin.record()
    torch.cuda._sleep(10**8)
    end.record()
    end.synchronize()
    return int(10**8 * seconds * 1e3 / begin.elapsed_time(end))


class Waits:
    """Counts PyTorch's warnings that an operation waits for the device, from any thread."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"

    def __enter__(self):
        self._caught = warnings.catch_warnings(record=True)
        self._said = self._caught.__enter__()
        warnings.simplefilter("always")
        if self._on_gpu:
            torch.cuda.set_sync_debug_mode("warn")
        return self

    def __exit__(self, *_):
        if self._on_gpu:
            torch.cuda.set_sync_debug_mode("default")
        self._caught.__exit__(*_)

    @property
    def places(self) -> list[str]:
        return [
            f"{item.filename}:{item.lineno}" for item in self._said if "called a synchronizing" in str(item.message)
        ]


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def copy_speed(device: torch.device, size: int) -> float:
    """Bytes a second of a plain copy from the device to pinned memory."""
    source = torch.empty(size, dtype=torch.uint8, device=device)
    target = torch.empty(size, dtype=torch.uint8, pin_memory=device.type == "cuda")
    times = []
    for _ in range(5):
        synchronize(device)
        began_s = time.perf_counter()
        target.copy_(source, non_blocking=True)
        synchronize(device)
        times.append(time.perf_counter() - began_s)
    return size / statistics.median(times[1:])


def main(o: argparse.Namespace) -> None:
    with attach(seed=0) as session:
        device = session.device
        facts = {"device": device.type}
        if o.copies:
            facts["copy_bytes_s"] = copy_speed(device, min(o.pad_mb, 1024) << 20)
        model, optimizer = trained(o, device)
        plain_model, plain_optimizer = trained(o, device)
        session.track(model=model, optimizer=optimizer)
        x = torch.randn(o.rows, o.width)
        # one sample a step, which is a whole batch: collecting samples is no cost of a step
        dataset = torch.utils.data.TensorDataset(x.expand(10**6 if o.seconds else o.steps, *x.shape))
        loader = session.loader(dataset, 1)
        on_device = (x.to(device),)
        cycles = cycles_of(BUSY_S) if device.type == "cuda" else 0

        def loss_of(part, model=model):
            if o.work and device.type == "cuda":
                torch.cuda._sleep(
                    int(o.work * cycles / BUSY_S)
                )  # the host is ahead of its device, as in real trainings
            return model(part[0].flatten(0, -2)).square().mean()

        def plain_step(part=on_device):
            loss_of(part, plain_model).backward()
            plain_optimizer.step()
            plain_optimizer.zero_grad(set_to_none=True)

        for _ in range(5):
            plain_step()
        synchronize(device)
        facts |= measure(plain_step, device, cycles, o.steps)
        blocks, plain_blocks, plain_batches = [], [], iter(torch.utils.data.DataLoader(dataset, 1))

        state_bytes = sum(item.nbytes for item in [*model.parameters(), *model.buffers()])
        times, waits, behind_s, snapshots, block_began_s = [], [], [], {}, 0.0
        began_s = time.monotonic()
        audited = min(AUDITED, o.steps // 4)
        third = (o.steps - audited) // 3
        block = min(BLOCK, max(third, 1))
        profile = cProfile.Profile() if o.profile else None
        for number, batch in enumerate(session.steps(loader, 1)):
            if profile and number == audited:
                profile.enable()
            if (
                not profile
                and not o.seconds
                and audited <= number <= audited + third
                and (number - audited) % block == 0
            ):
                synchronize(device)
                if block_began_s:
                    blocks.append((time.perf_counter() - block_began_s) / block)
                plain_blocks.append(plain_loop(plain_step, plain_batches, device, block))
                block_began_s = time.perf_counter()
            if cycles and not o.seconds and number == audited + 2 * third:
                synchronize(device)
                torch.cuda._sleep(cycles)
            is_counted = not profile and not o.seconds and audited + third <= number < audited + 2 * third
            with Waits(device) if is_counted else NoCount() as counter:
                began_step_s = time.perf_counter()
                loss = session.backward(batch, loss_of)
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
                session.report(loss=loss)
                took_s = time.perf_counter() - began_step_s
            if is_counted:
                times.append(took_s)
                waits += counter.places
            elif not o.seconds and 0 <= number - audited - 2 * third < 3:
                behind_s.append(took_s)
            saver = getattr(session._supervision, "writer", None)
            if saver is not None and saver.blocking_s:
                snapshots[saver.blocking_s] = [time.monotonic() - began_s, saver.blocking_s, saver.interval_s]
            if o.seconds and time.monotonic() - began_s > o.seconds:
                break
        if profile:
            profile.disable()
            facts["spent_us"] = spent_us(profile, o.steps - audited)
        synchronize(device)
        facts |= {
            "kgorch_s": statistics.median(times) if times else 0.0,
            "kgorch_loop_s": statistics.median(blocks) if blocks else 0.0,
            "plain_loop_s": statistics.median(plain_blocks) if plain_blocks else 0.0,
            "kgorch_waits": len(waits),
            "waits_at": sorted(set(waits)),
            "behind_busy_s": max(behind_s, default=0.0),
            "snapshots": list(snapshots.values()),
            "state_bytes": state_bytes,
        }
        print("facts", json.dumps(facts), flush=True)


def trained(o: argparse.Namespace, device: torch.device) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model and its optimizer."""
    model = DistributedDataParallel(Net(o.width, o.depth, o.pad_mb).to(device), broadcast_buffers=False)
    return model, torch.optim.AdamW(model.parameters(), 1e-4)


def spent_us(profile: cProfile.Profile, steps: int) -> list[tuple[str, float]]:
    """Microseconds of a step in each of kgorch's functions, with the built-in ones that it calls; the longest first."""
    spent: collections.Counter[str] = collections.Counter()
    for (file, line, name), (_, _, own_s, _, callers) in pstats.Stats(profile).stats.items():
        if "/kgorch/" in file:
            spent[f"{file.partition('/kgorch/')[2]}:{line} {name}"] += own_s
        elif file == "~":
            for (calling, line, by), (_, _, own_s, _) in callers.items():
                if "/kgorch/" in calling:
                    spent[f"{calling.partition('/kgorch/')[2]}:{line} {by}"] += own_s
    return [(name, round(seconds / steps * 1e6, 1)) for name, seconds in spent.most_common()]


def plain_loop(step, batches, device: torch.device, steps: int) -> float:
    """Seconds of a step in a loop of PyTorch's own, with its loader and the copy to the device."""
    began_s = time.perf_counter()
    for part in itertools.islice(batches, steps):
        step([item.to(device) for item in part])
    synchronize(device)
    return (time.perf_counter() - began_s) / steps


class NoCount:
    """Nothing is counted."""

    places: tuple[str, ...] = ()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass


def measure(step, device, cycles: int, steps: int) -> dict[str, object]:
    """As many plain steps as are measured under kgorch."""
    times, count = [], max(steps // 2 - WARM_UP, 1)
    with Waits(device) as counter:
        for _ in range(count):
            began_s = time.perf_counter()
            step()
            times.append(time.perf_counter() - began_s)
        synchronize(device)
    if cycles:
        torch.cuda._sleep(cycles)
    began_s = time.perf_counter()
    step()
    behind_s = time.perf_counter() - began_s
    synchronize(device)
    return {
        "plain_s": statistics.median(times),
        "plain_waits": len(counter.places),
        "plain_waits_at": sorted(set(counter.places)),
        "plain_behind_busy_s": behind_s,
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--seconds", type=float, default=0.0, help="trains so long instead, for snapshots")
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--depth", type=int, default=4)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--pad-mb", "--pad_mb", type=int, default=0, help="MiB of state besides")
    parser.add_argument("--work", type=float, default=0.0, help="seconds that the device takes for a forward more")
    parser.add_argument("--profile", action="store_true", help="what a step spends where, in place of the measurements")
    parser.add_argument("--copies", action="store_true", help="measure a plain copy to pinned memory first")
    main(parser.parse_args())
