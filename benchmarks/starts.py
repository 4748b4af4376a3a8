"""How soon a training takes its first step, and a command answers.   python benchmarks/starts.py [--quick] [--json FILE] [--docs]

- from the command to the first step, `kgorch start` and torchrun with the same training (benchmarks/bounded/), in turns: a new
  run, and one that goes on from a checkpoint (target: 1 s before torchrun)
- under a daemon, from the end of a session to the first step of the next one, on a machine that stays (target ≤ 0.8 s)
- `kgorch --help` and `kgorch status` (targets ≤ 0.12 and 0.20 s) beside a bare start of Python: the least of many, for what
  else a machine does only ever adds to it
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

import page  # noqa: E402
from bounded import Job, Peer, kgorch, living, torchrun  # noqa: E402

SIZE, EVERY = "1MB", 50
PEERS = {
    "kgorch": Peer("kgorch", "`kgorch start`", kgorch),
    "torchrun": Peer("torch", f"torch.save every {EVERY} steps", lambda job: torchrun("ddp.py", job)),
}
NEW, RESUMED = "from the command to the first step, a new run", "the same, going on from a checkpoint"
NEXT = "daemon: from a session's end to the next one's first step"
ANSWERS = "until a command answers, the least"
COMMANDS = {
    "python -c pass": (["-c", "pass"], None),
    "kgorch --help": (["-m", "kgorch.cli", "--help"], 0.12),
    "kgorch status": (["-m", "kgorch.cli", "status"], 0.20),
}
FEW, PATIENCE_S = 5, 120.0
PREPARED, SESSION_S = 120, 15.0
"""Steps of the run that the second kind of start goes on from; the wall of the daemon's sessions."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one start of each, two sessions: two minutes")
    parser.add_argument("--starts", type=int, default=9, help="of each way and kind  [9]")
    parser.add_argument("--sessions", type=int, default=9, help="of the daemon, after the first  [9]")
    parser.add_argument("--answers", type=int, default=20, help="of each command  [20]")
    page.add_options(parser)
    options = parser.parse_args()
    if options.quick:
        options.starts, options.sessions, options.answers = 1, 1, 3
    page.run(options, lambda: measured(options.starts, options.sessions, options.answers))


def measured(starts: int, sessions: int, answers: int) -> dict[str, Any]:
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        rows += of_starts(place, starts)
        waits = waits_of_daemon(place / "daemon", sessions)
        rows.append({"name": "kgorch", **timed(NEXT, waits), "figures": {"sessions": len(waits), "target ≤, s": 0.8}})
        rows += of_commands(place / "home", answers)
    settings = {name: peer.setting for name, peer in PEERS.items()}
    return page.results("starts", rows, title="Seconds until the first step", packages=["torch"], settings=settings)


def timed(group: str, seconds: Sequence[float]) -> dict[str, Any]:
    """Median and quartiles."""
    low, _, high = statistics.quantiles(seconds, n=4) if len(seconds) > 1 else (None, None, None)
    spread = (low, high) if low is not None else None
    return {"group": group, "unit": "s", "better": "lower", "value": statistics.median(seconds), "spread": spread}


def of_starts(place: Path, count: int) -> Iterator[dict[str, Any]]:
    for group in (NEW, RESUMED):
        found: dict[str, list[float]] = {way: [] for way in PEERS}
        jobs: dict[str, Job] = {}
        for number in range(count):
            for way in PEERS:
                if number == 0 or group == NEW:
                    folder = place / f"{way}-{len(group)}-{number}" / "own"
                    folder.mkdir(parents=True)
                    jobs[way] = Job(folder, SIZE, EVERY)
                    if group == RESUMED:
                        first_step(way, jobs[way], "before", PREPARED, saves=way == "kgorch")
                found[way].append(first_step(way, jobs[way], f"start{number}", FEW))
        for way, seconds in found.items():
            less = statistics.median(seconds) - statistics.median(found["torchrun"])
            figures = (
                {"starts": count, "more than torchrun, s": less, "target ≤, s more": -1.0} if way == "kgorch" else {}
            )
            yield {"name": way, **timed(group, seconds), "figures": figures}


def first_step(way: str, job: Job, name: str, steps: int, *, saves: bool = False) -> float:
    """Seconds from the command to the first step; everything is killed when `steps` are done.

    Args:
        saves: ask for a checkpoint then, and wait for it.
    """
    with living.started(PEERS[way].command(job), job.folder, job.folder.parent / name) as it:
        if not it.watch(lambda: bool(it.lives() and len(it.lives()[0].steps) >= steps), PATIENCE_S):
            raise SystemExit(f"{way} came to no step: {it.said()[-1500:]}")
        if saves:
            command = [sys.executable, "-m", "kgorch.cli", "save", "bounded"]
            subprocess.run(command, env=it.env, check=True, capture_output=True, timeout=PATIENCE_S)
        return it.lives()[0].steps[0].at_s - it.began_s


def waits_of_daemon(folder: Path, count: int) -> list[float]:
    """Between the sessions of a run that one daemon carries; the first one's end may find its standby without PyTorch."""
    job = Job(folder / "own", SIZE, EVERY, SESSION_S)
    job.folder.mkdir(parents=True)
    plan = kgorch(job)[-1]
    cli = [sys.executable, "-m", "kgorch.cli"]
    with living.started([*cli, "daemon"], job.folder, folder / "marks") as it:
        subprocess.run([*cli, "start", plan, "--queue"], env=it.env, cwd=job.folder, check=True, capture_output=True)
        if not it.watch(
            lambda: len(it.lives()) >= count + 2 and len(it.lives()[-1].steps) >= FEW, (count + 3) * 4 * SESSION_S
        ):
            raise SystemExit(f"the daemon came to {len(it.lives())} sessions: {it.said()[-1500:]}")
        told = subprocess.run(
            [*cli, "history", "--json"], env=it.env, cwd=HERE.parent, check=True, capture_output=True, text=True
        )
        since_1970 = time.time() - time.monotonic()
        lives = it.lives()
    ends = {
        one["number"]: datetime.fromisoformat(one["ended_at"]).timestamp() - since_1970
        for one in json.loads(told.stdout)
        if one["ended_at"]
    }
    return [lives[number].steps[0].at_s - ends[number] for number in range(2, count + 2)]


def of_commands(home: Path, count: int) -> Iterator[dict[str, Any]]:
    env = {**os.environ, "KGORCH_HOME": str(home), "PYTHONPATH": str(HERE.parent)}
    found: dict[str, list[float]] = {name: [] for name in COMMANDS}
    for _ in range(count):
        for name, (words, _target) in COMMANDS.items():
            began = time.perf_counter()
            subprocess.run([sys.executable, *words], env=env, capture_output=True)
            found[name].append(time.perf_counter() - began)
    for name, seconds in found.items():
        target = COMMANDS[name][1]
        figures = {"median, s": statistics.median(seconds), "times": count} | (
            {"target ≤, s": target} if target else {}
        )
        told = {"name": name, "group": ANSWERS, "unit": "s", "better": "lower", "value": min(seconds), "spread": None}
        yield told | {"figures": figures}


if __name__ == "__main__":
    main()
