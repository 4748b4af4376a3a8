"""Loops that are not `for batch in session.steps(loader)`, without a `with` block: by iteration, with several loaders and two
optimizers in turn, and with gradients accumulated by hand."""

import argparse
import random
import time
from pathlib import Path

import no_compiler  # noqa: F401
import torch
from learns import Points
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from kgorch import attach


def network(inputs: int) -> nn.Module:
    return nn.Sequential(nn.Linear(inputs, 32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 1))


def by_iteration(steps: int, sleep: float) -> None:
    """As a language model that draws each batch at random, and keeps its best loss itself."""
    session = attach(seed=3)
    model = DistributedDataParallel(network(16))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    points = Points()
    best, worse = session.resumed.get("best", float("inf")), session.resumed.get("worse", [])
    session.track(model=model, optimizer=optimizer)
    session.expect(steps=steps)
    step = session.step
    while step < steps:
        session.boundary(samples=32 * session.world_size)
        index = torch.randint(0, len(points), (32,))
        x, y = points.x[index] + random.random(), points.y[index]
        optimizer.zero_grad()
        loss = session.backward((x, y), lambda part: ((model(part[0]) - part[1]) ** 2).mean())
        optimizer.step()
        if loss.item() < best:
            best = loss.item()
        elif step % 7 == 0:
            worse = [*worse, round(loss.item(), 3)]
        session.remember(best=best, worse=worse)
        session.report(loss=loss)
        time.sleep(sleep)
        step += 1
    Path(session.output, f"remembered{session.rank}").write_text(f"{best} {worse}")


def in_turn(epochs: int, sleep: float, accumulate: int, workers: int) -> None:
    """Two networks against each other, each with an optimizer, data from two loaders, one of which is longer than the other.

    Where gradients are accumulated their loss is scaled, by a factor that grows every few steps.
    """
    session = attach(seed=3)
    first, second = DistributedDataParallel(network(16)), DistributedDataParallel(network(1))
    optimizers = [torch.optim.AdamW(net.parameters(), 1e-2) for net in (first, second)]
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0, growth_interval=5, enabled=accumulate > 1)
    session.track(first=first, second=second, optimizer=optimizers[0], other=optimizers[1], scaler=scaler)
    points = Points()
    long = session.follow(DataLoader(points, 8, sampler=DistributedSampler(points), num_workers=workers), name="long")
    short = session.follow(DataLoader(points, 16, shuffle=True))
    for epoch in range(session.epoch, epochs):
        for number, ((x, y), (noise, _)) in enumerate(zip(long, short, strict=False), long.next_batch):
            session.boundary(epoch=epoch)
            net, optimizer = (first, optimizers[0]) if number // accumulate % 2 else (second, optimizers[1])
            with torch.set_grad_enabled(net is first):
                guess = first(x + noise[: len(x)].mean())
            if net is second:
                guess = second(guess)
            scaler.scale(((guess - y) ** 2).mean()).backward()
            if number % accumulate == accumulate - 1:
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
                time.sleep(sleep)
    session.end()
    Path(session.output, "after").write_text(f"{session.step} {session.epoch} {scaler.get_scale()}")


class Average:
    def __init__(self, net: nn.Module) -> None:
        self.shadow = {name: weight.detach().clone() for name, weight in net.named_parameters()}

    def update(self, net: nn.Module) -> None:
        for name, weight in net.named_parameters():
            self.shadow[name].lerp_(weight.detach(), 0.1)


def forgetting(steps: int) -> None:
    """Leaves out of its checkpoints what it needs: a second optimizer, a schedule, an average, the place in its loader."""
    session = attach(seed=3)
    net, head = network(16), nn.Linear(1, 1)
    optimizer, second = torch.optim.AdamW(net.parameters(), 1e-2), torch.optim.AdamW(head.parameters(), 1e-2)
    schedule, average = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99), Average(net)
    session.track(net=net, head=head, optimizer=optimizer)
    session.expect(steps=steps)
    while session.step < steps:
        for x, y in DataLoader(Points(), 8, shuffle=True):
            session.boundary()
            ((head(net(x)) - y) ** 2).mean().backward()
            for each in (optimizer, second):
                each.step()
                each.zero_grad()
            schedule.step()
            average.update(net)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--style", default="iterations")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--sleep", type=float, default=0.02)
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--workers", type=int, default=0)
    options = parser.parse_args()
    if options.style == "iterations":
        by_iteration(options.steps, options.sleep)
    elif options.style == "forgetting":
        forgetting(options.steps)
    else:
        in_turn(options.steps, options.sleep, options.accumulate, options.workers)
