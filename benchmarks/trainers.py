"""What kgorch costs a Trainer that it adapts.   python benchmarks/trainers.py [--quick] [--json FILE] [--docs]

- a step of some 10 ms of an unmodified Trainer of Transformers and of Lightning, alone and on two gloo ranks, with kgorch over
  without (target ≤ 1.01): wall time, and processor time of a rank, which another program on the machine lengthens less. In blocks
  in turns within one training (trainers_training.py), medians of ratios
- from the command to the first step: `kgorch start` against torchrun, in turns (target ≤ 1 s more)
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

import page  # noqa: E402

LIBRARIES = ("transformers", "lightning")
PROGRAM = HERE / "trainers_training.py"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few blocks, one start of each: a minute")
    parser.add_argument("--rounds", type=int, default=60, help="blocks of each way, of each library and ranks  [60]")
    parser.add_argument("--block", type=float, default=0.4, help="seconds of a block  [0.4]")
    parser.add_argument("--starts", type=int, default=7, help="of each way  [7]")
    page.add_options(parser)
    options = parser.parse_args()
    if options.quick:
        options.rounds, options.starts = 4, 1
    page.run(options, lambda: measured(options.rounds, options.block, options.starts))


def measured(rounds: int, block_s: float, starts: int) -> dict[str, Any]:
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as name:
        for library, ranks in itertools.product(LIBRARIES, (1, 2)):
            settings = {"rounds": rounds, "block_s": block_s, "step_s": 0.01, "start": False}
            done = Training(Path(name, f"{library}{ranks}"), library, ranks, settings).run("kgorch")
            rows.append(of_steps(done["blocks"], library, ranks))
        for library in LIBRARIES:
            rows += of_starts(Path(name, f"start-{library}"), library, starts)
    return page.results(
        "trainers", rows, title="A Trainer under kgorch", packages=LIBRARIES, rounds=rounds, block_s=block_s
    )


class Training:
    """One training of trainers_training.py, in a folder of its own."""

    def __init__(self, folder: Path, library: str, ranks: int, settings: dict[str, Any]) -> None:
        folder.mkdir(parents=True)
        self._folder, self._ranks, self._out = folder, ranks, folder / "out.json"
        told = settings | {"library": library, "out": str(self._out), "folder": str(folder / "own")}
        (folder / "plan.toml").write_text(
            f'name = "bench"\n[[stage]]\nname = "train"\nentry = "{PROGRAM}"\nranks = {ranks}\n'
            '[checkpoint]\nevery = "10m"\n[health]\nhang = "off"\n'
        )
        paths = [str(HERE.parent), str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])]
        self._env = {
            **os.environ, "KGORCH_HOME": str(folder / "home"), "OMP_NUM_THREADS": "1", "TRAINERS": json.dumps(told),
            "PYTHONPATH": os.pathsep.join(paths),
        }  # fmt: skip

    def run(self, way: str) -> dict[str, Any]:
        """What it found. `way`: "kgorch" or "torchrun". Adds the instant of its start."""
        torchrun = ["torch.distributed.run", "--standalone", f"--nproc-per-node={self._ranks}", str(PROGRAM)]
        words = ["kgorch.cli", "start", "plan.toml"] if way == "kgorch" else torchrun
        began = time.time()
        with open(self._folder / "log", "wb") as log:
            command = [sys.executable, "-m", *words]
            done = subprocess.run(
                command, cwd=self._folder, env=self._env, stdout=log, stderr=log, stdin=subprocess.DEVNULL
            )
        if done.returncode or not self._out.exists():
            logs = [path.read_text()[-3000:] for path in self._folder.rglob("rank*.log")]
            sys.exit("\n".join([(self._folder / "log").read_text()[-3000:], *logs]))
        return {"began": began, **json.loads(self._out.read_text())}


def of_steps(blocks: Sequence[dict[str, Any]], library: str, ranks: int) -> dict[str, Any]:
    """Each block without kgorch against those with it before and behind it, as medians of ratios."""
    pairs = [
        (before, block, behind)
        for before, block, behind in zip(blocks, blocks[1:], blocks[2:], strict=False)
        if block["way"] == "alone"
    ]

    def ratios(what: str) -> list[float]:
        return [(before[what] + behind[what]) / 2 / block[what] for before, block, behind in pairs]

    medians = ratios("median_s")
    low, _, high = statistics.quantiles(medians, n=4)
    step_ms = 1e3 * statistics.median(block["median_s"] for _, block, _ in pairs)
    value = statistics.median(medians)
    return {
        "name": f"kgorch: {library}, {ranks} rank{'s'[: ranks > 1]}", "group": "steps of 10 ms: with it / without it",
        "unit": "×", "better": "lower", "value": value, "spread": (low, high),
        "figures": {
            "of a rank's CPU time": statistics.median(ratios("cpu_s")), "step alone, ms": step_ms,
            "µs a step": 1e3 * step_ms * (value - 1), "pairs": len(pairs), "target ≤, % more": 1.0,
        },
    }  # fmt: skip


def of_starts(folder: Path, library: str, count: int) -> Iterator[dict[str, Any]]:
    found: dict[str, list[dict[str, Any]]] = {"kgorch": [], "torchrun": []}
    for number, way in itertools.product(range(count), found):
        training = Training(folder / f"{number}-{way}", library, 1, {"start": True})
        found[way].append(training.run(way))
    took = {way: [done["at"] - done["began"] for done in each] for way, each in found.items()}
    for way, seconds in took.items():
        low, _, high = statistics.quantiles(seconds, n=4) if count > 1 else (None, None, None)
        cpu_s = statistics.median(done["cpu_s"] for done in found[way])
        more = {"more than torchrun, s": statistics.median(seconds) - statistics.median(took["torchrun"])}
        yield {
            "name": way, "group": f"{library}: from the command to the first step", "unit": "s", "better": "lower",
            "value": statistics.median(seconds), "spread": (low, high) if low is not None else None,
            "figures": {"the rank's CPU time, s": cpu_s, "starts": count}
            | (more | {"target ≤, s more": 1.0} if way == "kgorch" else {}),
        }  # fmt: skip


if __name__ == "__main__":
    main()
