"""What kgorch costs a training.   python benchmarks/overhead.py [--quick] [--json FILE] [--docs]

- a step of two gloo ranks under kgorch, with a supervisor and all defaults, against the same step in a plain loop while the
  supervisor is stopped; at three lengths of a step (target ≤ 1.005), and the same step with one feature off: what each costs.
  All in turns within one training (overhead_training.py): from one training to the next steps differ by more than that. Medians of
  the pairs' ratios, with 95% intervals by bootstrap; the pairs are kept
- `session.steps` around a loop that does nothing (target ≤ 5 µs a step); a sample read by session.loader against DataLoader's
- of the same pairs the processor time of a rank's main thread (target ≤ 40 µs a step more) and of its other threads, PyTorch's
  among them; that of kgorch's own threads with that of the run's other processes, % of a core (target ≤ 0.5)
- the supervisor's memory and share of a core (targets ≤ 80 MB, ≤ 1%), and telemetry's part of that: a second's samples of the
  host, two ranks and, where a C compiler can build the tests' driver, two GPUs (target ≤ 1%)
- `kgorch status` against importing click, sqlalchemy.orm and rich (target ≤ 1.3)
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent), str(HERE.parent / "tests")]

import page  # noqa: E402

RANKS = 2
SIZES_MS = (2.0, 10.0, 50.0)
ALL, ALONE = "kgorch", "alone"
TIMES = ("step_s", "median_s", "cpu_s", "main_thread_s")
DEAR = ("deterministic = warn",)
"""Off by default: a block has it on."""


def main() -> None:
    if sys.argv[1:2] == ["--sampler"]:
        sampled(Path(sys.argv[2]), float(sys.argv[3]))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="short blocks, each once: some 40 s")
    parser.add_argument(
        "--rounds", type=int, default=25, help="of all features at all lengths  [25: a quarter of an hour]"
    )
    parser.add_argument(
        "--block", type=float, default=0.25, help="seconds of a block: shorter than this machine's own moods  [0.25]"
    )
    page.add_options(parser)
    options = parser.parse_args()
    if options.quick:
        options.rounds, options.block = 1, 0.15
    page.run(options, lambda: measured(options.rounds, options.block, quick=options.quick))


def measured(rounds: int, block_s: float, *, quick: bool) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        told = trained(folder, rounds, block_s)
        blocks = told.pop("blocks")
        rows = list(of_steps(blocks))
        # rank 0 has a thread more than the others, so this is rather too much
        threads = RANKS * 100 * statistics.fmean(block["own_threads_core"] for block in blocks if block["way"] == ALL)
        reading_us = told["reading_us"]["keyed"] - told["reading_us"]["plain"]
        rows += [
            against("session.steps, a step", statistics.median(told["bookkeeping_us"]), 5.0, "µs"),
            against("supervisor's memory", told["rss_mb"], 80.0, "MB"),
            against("all but the ranks' main threads", told["core_percent"] + told["others_percent"] + threads, 0.5, "% of a core"),
            against("of it kgorch's threads in the ranks", threads, 0.5, "% of a core"),
            against("supervisor", told["core_percent"], 1.0, "% of a core"),
            against("of it telemetry, two GPUs", telemetry(folder / "telemetry", 6 if quick else 75), 1.0, "% of a core"),
            against("status / imports", status(folder / "home", 3 if quick else 15), 1.3, ""),
            told_alone("session.loader − DataLoader, a sample", reading_us, "µs"),
        ]  # fmt: skip
    return page.results(
        "overhead", rows, title="A step under kgorch, over the same step alone", rounds=rounds, block_s=block_s, **told
    )


def told_alone(group: str, value: float, unit: str) -> dict[str, Any]:
    return {"name": "kgorch", "group": group, "value": value, "unit": unit, "better": "lower"}


def against(name: str, found: float, target: float, unit: str) -> dict[str, Any]:
    told = {"name": f"kgorch: {name}", "group": "besides: found / target", "unit": "of the target", "better": "lower"}
    return told | {"value": found / target, "figures": {"found": found, "target ≤": target, "in": unit}}


def trained(folder: Path, rounds: int, block_s: float, sizes_ms: Sequence[float] = SIZES_MS) -> dict[str, Any]:
    out = folder / "out.json"
    told = {"out": str(out), "sizes_ms": sizes_ms, "rounds": rounds, "block_s": block_s}
    (folder / "plan.toml").write_text(
        f'name = "bench"\n[[stage]]\nname = "train"\nentry = "{HERE / "overhead_training.py"}"\nranks = {RANKS}\n'
        '[checkpoint]\nevery = "10m"\n[health]\nhang = "off"\n'
    )
    env = {**os.environ, "KGORCH_HOME": str(folder / "home"), "OMP_NUM_THREADS": "1", "OVERHEAD": json.dumps(told)}
    env["PYTHONPATH"] = os.pathsep.join([str(HERE.parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    with open(folder / "log", "wb") as log:
        command = [sys.executable, "-m", "kgorch.cli", "start", "plan.toml"]
        process = subprocess.Popen(command, cwd=folder, env=env, stdout=log, stderr=log, stdin=subprocess.DEVNULL)
        try:
            code = process.wait()
        finally:  # it may be stopped just now; its training dies with its shim, which hears of a stop
            for number in (signal.SIGCONT, signal.SIGTERM):
                with contextlib.suppress(ProcessLookupError):
                    process.send_signal(number)
            process.wait()
    if code:
        sys.exit((folder / "log").read_text()[-3000:])
    found: dict[str, Any] = json.loads(out.read_text())
    return found


def of_steps(blocks: Sequence[dict[str, Any]]) -> Iterable[dict[str, Any]]:
    """Each way's blocks against kgorch's before and behind them, as medians of ratios."""
    ratios: dict[tuple[float, str], list[list[float]]] = {}
    steps: dict[float, list[float]] = {}
    for before, block, behind in zip(blocks, blocks[1:], blocks[2:], strict=False):
        if block["way"] != ALL and before["way"] == behind["way"] == ALL and before["size"] == behind["size"]:
            around = {what: (before[what] + behind[what]) / 2 for what in TIMES}
            with_it, without = (block, around) if block["way"] in DEAR else (around, block)
            found = [with_it[what] / without[what] for what in ("step_s", "median_s", "cpu_s")]
            main_us, cpu_us = (1e6 * (with_it[what] - without[what]) for what in ("main_thread_s", "cpu_s"))
            found += [main_us, cpu_us - main_us]
            ratios.setdefault((block["size"], block["way"]), []).append(found)
            if block["way"] == ALONE:
                steps.setdefault(block["size"], []).append(block["median_s"])
    ways = list(dict.fromkeys(way for _, way in ratios))
    ways.sort(key=lambda way: way != ALONE)
    for size, way in itertools.product(sorted(steps), ways):
        step_ms = 1e3 * statistics.median(steps[size])
        walls, medians, cpus, mains, others = zip(*ratios[size, way], strict=True)
        wall, spread = statistics.median(walls), interval(walls)
        figures = {
            "µs a step": 1e3 * step_ms * (wall - 1), "of median steps": statistics.median(medians),
            "of a rank's CPU time": statistics.median(cpus), "main thread, µs": statistics.median(mains),
            "its 95%": between(interval(mains)), "other threads, µs": statistics.median(others),
            "step alone, ms": step_ms, "pairs": len(walls),
        }  # fmt: skip
        name = "kgorch" if way == ALONE else way
        group = f"steps of {size:g} ms: with it / without it"
        told = {"name": name, "group": group, "unit": "×", "better": "lower", "value": wall, "spread": spread}
        more = {"target ≤, % more": 0.5, "target ≤, main thread": 40.0} if way == ALONE else {}
        yield told | {
            "figures": figures | more,
            "pairs": [[round(each, 5) for each in pair] for pair in ratios[size, way]],
        }


def between(ends: tuple[float, float] | None) -> str | None:
    return ends and f"{ends[0]:.0f} to {ends[1]:.0f}"


def interval(values: Sequence[float], draws: int = 2000) -> tuple[float, float] | None:
    """95%, of the median, by bootstrap over the pairs."""
    if len(values) < 2:
        return None
    drawn = random.Random(0)
    medians = sorted(statistics.median(drawn.choices(values, k=len(values))) for _ in range(draws))
    return medians[int(0.025 * draws)], medians[int(0.975 * draws)]


def telemetry(folder: Path, seconds: float) -> float:
    """A sampler alone in a process, for longer than from one roll-up to the next. Percent of a core."""
    folder.mkdir()
    env = dict(os.environ)
    if shutil.which("cc"):
        from driver import build

        env |= build(folder).env
    command = [sys.executable, str(Path(__file__)), "--sampler", str(folder), str(seconds)]
    return float(subprocess.run(command, env=env, check=True, capture_output=True).stdout)


def sampled(folder: Path, seconds: float) -> None:
    from kgorch.db import runs, sessions
    from kgorch.db.engine import open_database
    from kgorch.hardware.telemetry import RANK_METRICS, Sampler
    from kgorch.protocol.messages import RankMetrics

    engine = open_database(folder)
    texts = dict.fromkeys(("folder", "workdir", "checkpoints", "plan", "plan_hash"), "")
    run = runs.create(engine, id="r", name="bench", number=1, **texts, overrides=[], stages=[])
    session = sessions.open_session(engine, run.id, boot_id="b")
    sampler = Sampler(engine, session.id, folder, lambda kind, facts: None)

    def live(for_s: float) -> None:
        until_s = time.monotonic() + for_s
        while time.monotonic() < until_s:
            for rank in range(2):
                sampler.add_rank_metrics(RankMetrics("1.1", rank, dict.fromkeys(RANK_METRICS, 12345.678)))
            time.sleep(1)

    live(3)
    used_s, began_s = time.process_time(), time.monotonic()
    live(seconds)
    print(100 * (time.process_time() - used_s) / (time.monotonic() - began_s))
    sampler.stop()


def status(home: Path, rounds: int) -> float:
    env = {**os.environ, "KGORCH_HOME": str(home)}
    ratios = []
    for _ in range(rounds):
        spent = []
        for command in (["-m", "kgorch.cli", "status"], ["-c", "import click, sqlalchemy.orm, rich"]):
            began = time.perf_counter()
            subprocess.run([sys.executable, *command], env=env, check=True, capture_output=True)
            spent.append(time.perf_counter() - began)
        ratios.append(spent[0] / spent[1])
    return statistics.median(ratios)


if __name__ == "__main__":
    main()
