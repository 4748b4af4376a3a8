"""Processor time of a rank's main thread in a step: kgorch with session.backward, beside the same loop in plain PyTorch.

    python benchmarks/main_thread.py [--rounds N] [--tree DIR ...] [--json FILE]

Two gloo ranks, steps of about 3 ms, blocks of both ways in turns within one training; all batches were read before. Thread
time, because the wall time of two busy cores proves nothing below 5%. With `--tree` the same of other checkouts of kgorch, in
turns: what a change costs.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve()
BLOCK, BLOCKS = 50, 24
"""Steps of a block, and blocks of each way in a training."""


def train() -> None:
    """What each rank runs. Prints the median seconds of a step: plain, kgorch."""
    import time

    import torch
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel

    from kgorch import attach

    with attach(seed=0) as session:
        torch.manual_seed(0)
        net = nn.Sequential(
            nn.Linear(64, 256), nn.BatchNorm1d(256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 1)
        )
        model = DistributedDataParallel(net)
        optimizer = torch.optim.SGD(model.parameters(), 1e-3)
        session.track(model=model, optimizer=optimizer)
        x = torch.randn(64, 64)
        batch = (x[:32], x[:32, :1])
        took: dict[str, list[float]] = {"plain": [], "kgorch": []}

        def loss_of(part):
            return (model(part[0]) - part[1]).square().mean()

        def plain() -> None:
            loss_of(batch).backward()
            optimizer.step()
            optimizer.zero_grad()

        began_s = time.thread_time()
        for number, given in enumerate(session.steps([batch] * (BLOCK * BLOCKS + 1), 1)):
            if number and number % BLOCK == 0:  # a block of the other way, all ranks at the same place
                took["kgorch"].append((time.thread_time() - began_s) / BLOCK)
                began_s = time.thread_time()
                for _ in range(BLOCK):
                    plain()
                took["plain"].append((time.thread_time() - began_s) / BLOCK)
                began_s = time.thread_time()
            loss = session.backward(given, loss_of)
            optimizer.step()
            optimizer.zero_grad()
            session.report(loss=loss)
        medians = {way: statistics.median(times[2:]) for way, times in took.items()}  # the first ones warm up
        print("medians", json.dumps(medians), flush=True)


def measured(tree: Path) -> dict[str, float]:
    """Of rank 0, microseconds of a step."""
    program = "import sys; sys.path[:0] = sys.argv[2:4]; import main_thread; main_thread.attempt(sys.argv[1])"
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [sys.executable, "-c", program, f"{folder}/run", str(HERE.parent), str(HERE.parents[1] / "tests")],
            env={**os.environ, "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
        )
    if done.returncode:
        raise SystemExit(done.stderr)
    return {way: 1e6 * seconds for way, seconds in json.loads(done.stdout).items()}


def attempt(folder: str) -> None:
    import ranks

    ranks.PROGRAMS = HERE.parent
    ran = ranks.run(
        Path(folder), HERE.name, 2, {"train": True}, ladder=["microbatch/2"], health={"nan": ["skip"]}, timeout_s=300
    )
    lines = ran.lines(starting="medians ")
    if not lines:
        raise SystemExit(ran.said())
    print(lines[0].removeprefix("medians "))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--train", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--rounds", type=int, default=3, help="trainings of each tree, in turns  [3]")
    parser.add_argument(
        "--tree", type=Path, action="append", default=[], help="another checkout of kgorch, beside this one"
    )
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.train:
        train()
        return
    trees = [HERE.parents[1], *(tree.resolve() for tree in options.tree)]
    # without its own package, a tree would be measured with the installed one
    if before := [str(tree) for tree in trees if not (tree / "kgorch").is_dir()]:
        parser.error(f"{', '.join(before)}: from before the package was named kgorch")
    found: dict[str, list[dict[str, float]]] = {str(tree): [] for tree in trees}
    for number in range(options.rounds):
        for tree in trees:
            found[str(tree)].append(measured(tree))
            figures = found[str(tree)][-1]
            print(
                f"round {number + 1}, {tree.name}: plain {figures['plain']:.0f} µs, kgorch {figures['kgorch']:.0f} µs",
                flush=True,
            )
    for tree, rounds in found.items():
        own = [one["kgorch"] - one["plain"] for one in rounds]
        whole = [one["kgorch"] for one in rounds]
        print(
            f"{tree}: kgorch {statistics.median(whole):.0f} µs a step ({min(whole):.0f} to {max(whole):.0f}),"
            f" of its own {statistics.median(own):.0f} µs ({min(own):.0f} to {max(own):.0f})"
        )
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
