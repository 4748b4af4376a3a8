"""A training whose evaluations say what they are told to say, and the norm of the weights that they saw."""

import argparse
import json
import time
from pathlib import Path

import no_compiler  # noqa: F401
import torch
from torch.nn.parallel import DistributedDataParallel

from kgorch import attach

SAMPLES, GLOBAL_BATCH = 24, 4


def norm_of(net: torch.nn.Module) -> float:
    return float(torch.cat([weight.detach().double().flatten() for weight in net.parameters()]).norm())


def main(accuracies: list[float], sleep: float, when: str, who: str, last: str, loader: str, every: int) -> None:
    """
    when: `after` each epoch, `before` it, or in its `midst`, at its third step. who: `all` ranks report, or the `first`.
    last: what comes after the last epoch: `nothing`, or weights that are `changed`. loader: `ours`, or one of `torch` whose
    order hangs on a generator of its own. every: batches whose gradients are summed, also over the end of an epoch.
    """
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(SAMPLES, 8, generator=generator)
    with attach(seed=3) as session:
        net = torch.nn.Linear(8, 4).to(session.device)
        model = DistributedDataParallel(net)
        optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
        session.track(model=model, optimizer=optimizer)
        points = torch.utils.data.TensorDataset(x, x[:, :4] * 3)
        if loader == "ours":
            batches = session.loader(points, GLOBAL_BATCH)
        else:
            batches = torch.utils.data.DataLoader(
                points, GLOBAL_BATCH, shuffle=True, generator=torch.Generator().manual_seed(9)
            )

        def evaluate(epoch: int) -> None:
            if who == "first" and session.rank:
                return
            time.sleep(3 * sleep if session.rank == 0 else 0)  # others would run ahead meanwhile
            while Path("hold").exists():
                time.sleep(0.05)
            measured = {"accuracy": accuracies[epoch], "weights_norm": norm_of(net)}
            session.report(**measured)
            if session.rank == 0:
                with (session.output / "told.jsonl").open("a") as told:
                    told.write(json.dumps(measured) + "\n")

        for epoch in session.epochs(len(accuracies)):
            if when == "before":
                evaluate(epoch)
            for number, batch in enumerate(session.steps(batches)):
                session.backward(batch, lambda part: ((model(part[0]) - part[1]) ** 2).mean())
                batch_number = epoch * SAMPLES // GLOBAL_BATCH + number + 1
                if batch_number % every == 0:
                    optimizer.step()
                    optimizer.zero_grad()
                time.sleep(sleep)
                if when == "midst" and number == 2:
                    evaluate(epoch)
            if when == "after":
                evaluate(epoch)
        if last == "changed":
            with torch.no_grad():
                net.weight.mul_(2)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--accuracies", type=lambda text: [float(item) for item in text.split("_")], required=True)
    parser.add_argument("--sleep", type=float, default=0.0)
    parser.add_argument("--when", default="after")
    parser.add_argument("--who", default="all")
    parser.add_argument("--last", default="nothing")
    parser.add_argument("--loader", default="ours")
    parser.add_argument("--every", type=int, default=1)
    main(**vars(parser.parse_args()))
