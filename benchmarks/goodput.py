"""How much of short sessions becomes training that lasts.   python benchmarks/goodput.py [--quick] [--json FILE] [--docs]

kgorch and its peers (benchmarks/bounded/) train the same network in sessions at whose wall everything is killed by SIGKILL, in
turns within one run. A step survives when the next session goes on behind it. Two shares are told:

- of the steps that were possible: (wall − the session's own start-up until its first step) × its own speed. What is missing is what
  saving, losing and stopping early cost. Target: kgorch ≥ 97% at 60 s, and first.
- of the wall's seconds: surviving steps × time of a step. That counts start-up, too.

Speed is a median within the session: of the means of ten steps in a row, so that what a machine does besides counts as part of
a step, and a save, which few of these see, does not. From one session to the next a shared machine's speed changes by a fifth.
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
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

import page  # noqa: E402
from bounded import PEERS, Job, living, version  # noqa: E402

EVERY = {"1MB": 50, "150MB": 250}
"""N, steps between two saves: near Young's optimum for a kill each minute, some 5 ms and 150 ms a save, 15 ms a step."""

QUICK = ["kgorch", "DDP, torch.save every N steps"]
TOGETHER = 10


@dataclass(frozen=True, slots=True)
class Cut:
    """A session as its marks tell it. Seconds are from its beginning; None where it did not come to a step.

    Attributes:
        slow_s: how much longer its steps took than as many of the median: saves, and whatever else held it up.
        began_at: seconds since 1970.
    """

    resumed: int | None
    done: int
    startup_s: float | None
    step_s: float | None
    unused_s: float
    slow_s: float
    ended: str
    began_at: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one peer, one size, one session of 20 s: a minute")
    parser.add_argument("--wall", type=float, default=60.0, help="seconds of a session  [60]")
    parser.add_argument("--sessions", type=int, default=3, help="of each peer and size  [3]")
    parser.add_argument("--size", choices=EVERY, action="append", help="this size of the state alone")
    parser.add_argument("--only", metavar="PEER", action="append", help="peers whose name holds this")
    page.add_options(parser)
    options = parser.parse_args()

    def measure() -> dict[str, Any]:
        names = [name for name in PEERS if not options.only or any(word in name for word in options.only)]
        if options.quick:
            return measured(names if options.only else QUICK, options.size or ["1MB"], 1, min(options.wall, 20.0))
        return measured(names, options.size or list(EVERY), options.sessions, options.wall)

    found = page.run(options, measure)
    for size, lines in found["ends"].items():
        print(f"\nkgorch's last seconds, {size}:\n  " + "\n  ".join(lines), file=sys.stderr)


def measured(names: Sequence[str], sizes: Sequence[str], sessions: int, wall_s: float) -> dict[str, Any]:
    missing = [name for name in names if not version(PEERS[name])]
    names = [name for name in names if name not in missing]
    cuts: dict[str, list[Cut]] = {}
    ends: dict[str, list[str]] = {}
    with tempfile.TemporaryDirectory() as place:
        for number in range(sessions + 1):
            for size in sizes:
                for name in names[number % len(names) :] + names[: number % len(names)]:
                    folder = Path(place) / f"{name}-{size}".replace(" ", "-")
                    folder.mkdir(exist_ok=True)
                    job = Job(folder / "own", size, EVERY[size], wall_s)
                    cut = session(name, job, number, probes=number == sessions)
                    cuts.setdefault(f"{name}\n{size}", []).append(cut)
                    _say(f"{size:>6} {name:<30} {'resumed at' if number == sessions else ''} {cut}")
                    if name == "kgorch" and number == sessions:
                        ends[size] = last_seconds(folder / "own", cuts[f"{name}\n{size}"][:-1], wall_s)
    rows = [row(name, size, cuts[f"{name}\n{size}"], wall_s) for size in sizes for name in names]
    return page.results(
        "goodput", rows, packages=sorted({PEERS[name].needs for name in names}), wall_s=wall_s, sessions=sessions,
        every={size: EVERY[size] for size in sizes}, missing=missing,
        ends=ends, settings={name: PEERS[name].setting for name in names},
        title=f"Steps that survive sessions of {wall_s:.0f} s, of those that were possible",
    )  # fmt: skip


def session(name: str, job: Job, number: int, *, probes: bool) -> Cut:
    """One session until its wall, or until it ends by itself; `probes`: only until it has told where it goes on."""
    wall_s = job.wall_s or 0.0
    job.folder.mkdir(exist_ok=True)
    marks = job.folder.parent / f"session{number}"
    told = Job(job.folder, job.size, job.every, 10 * wall_s) if probes and name != "kgorch" else job
    with living.started(PEERS[name].command(told), job.folder, marks) as it:

        def has_begun() -> bool:
            return bool(it.lives())

        it.watch(has_begun if probes else lambda: False, 4 * wall_s if probes else wall_s)
        over = it.is_over()
        it.kill()
    cut = _cut(it, wall_s, over=over)
    if cut.resumed is None:
        _say(f"{name} made no step: {it.said()[-1500:]}")
    return cut


def _cut(it: living.Session, wall_s: float, *, over: bool) -> Cut:
    lives = it.lives()
    steps = [step for life in lives for step in life.steps]
    resumed = lives[0].resumed if lives else None
    ended = "killed at the wall"
    if over and it.ended_s:
        ended = f"by itself with {it.process.returncode} after {it.ended_s - it.began_s:.1f} s"
    if len(steps) < 2 * TOGETHER:
        return Cut(resumed, resumed or 0, None, None, wall_s, 0.0, ended, it.began_at)
    step_s = _step_s([step.at_s for step in steps])
    first_s, last_s = steps[0].at_s - step_s, steps[-1].at_s
    slow_s, unused_s = last_s - first_s - step_s * len(steps), it.began_s + wall_s - last_s
    return Cut(resumed, steps[-1].number, first_s - it.began_s, step_s, unused_s, slow_s, ended, it.began_at)


def last_seconds(folder: Path, cuts: Sequence[Cut], wall_s: float, seconds: float = 12.0) -> list[str]:
    """What kgorch's journal tells of the end of each session: seconds before its wall, what, and the facts of it."""
    told = subprocess.run(
        [sys.executable, "-m", "kgorch.cli", "history", "--events", "-n", "5000", "--json"],
        env={**os.environ, "KGORCH_HOME": str(folder / "home")}, cwd=HERE.parent, capture_output=True, text=True,
    )  # fmt: skip
    lines = []
    for number, cut in enumerate(cuts):
        for event in json.loads(told.stdout or "[]"):
            left_s = cut.began_at + wall_s - datetime.fromisoformat(event["at"]).timestamp()
            if -2 < left_s < seconds:
                facts = " ".join(f"{key}={value}" for key, value in event["facts"].items())
                lines.append(f"session {number + 1}  −{left_s:5.2f} s  {event['kind']} {facts}"[:200])
    return lines


def _step_s(at: Sequence[float]) -> float:
    spans = [later - sooner for sooner, later in zip(at[::TOGETHER], at[TOGETHER::TOGETHER], strict=False)]
    return statistics.median(spans) / TOGETHER


def row(name: str, size: str, cuts: Sequence[Cut], wall_s: float) -> dict[str, Any]:
    """Of all sessions together; the last of `cuts` only tells where it would go on. `spread`: the worst and best session.

    Where a session made no step, its start-up and speed count as in the middle of the peer's others, and it goes on where the next
    does.
    """
    went_on: list[int] = []
    for cut in reversed(cuts):
        went_on.insert(0, cut.resumed if cut.resumed is not None else went_on[0] if went_on else 0)
    whole = [cut for cut in cuts[:-1] if cut.step_s is not None and cut.startup_s is not None]
    if not whole:
        return _row(name, size, 0.0, (0.0, 0.0), {"sessions": [asdict(cut) for cut in cuts]})
    step_s = statistics.median(cut.step_s for cut in whole if cut.step_s)
    startup_s = statistics.median(cut.startup_s for cut in whole if cut.startup_s is not None)
    survived = [after - before for before, after in itertools.pairwise(went_on)]
    steps_s = [cut.step_s or step_s for cut in cuts[:-1]]
    rooms_s = [wall_s - (startup_s if cut.startup_s is None else cut.startup_s) for cut in cuts[:-1]]
    possible = [room_s / each_s for room_s, each_s in zip(rooms_s, steps_s, strict=True)]
    shares = [100 * kept / could for kept, could in zip(survived, possible, strict=True)]
    lost = [max(0, cut.done - after) for cut, after in zip(cuts[:-1], went_on[1:], strict=True)]
    figures = {
        "of the wall, %": 100 * sum(survived) / sum(wall_s / each_s for each_s in steps_s),
        "steps survived": sum(survived),
        "steps possible": round(sum(possible)),
        "steps lost a session": statistics.median(lost),
        "unused before the wall, s": statistics.median(cut.unused_s for cut in cuts[:-1]),
        "slower steps and saves, s": statistics.median(cut.slow_s for cut in whole),
        "start-up, s": startup_s,
        "step, ms": 1e3 * step_s,
    }
    return _row(
        name, size, 100 * sum(survived) / sum(possible), (min(shares), max(shares)),
        {"figures": figures, "sessions": [asdict(cut) for cut in cuts]},
    )  # fmt: skip


def _row(name: str, size: str, value: float, spread: tuple[float, float], more: dict[str, Any]) -> dict[str, Any]:
    told = {"name": name, "group": f"{size} of state", "value": value, "unit": "%", "better": "higher"}
    return {**told, "spread": spread, **more}


def _say(text: str) -> None:
    print(f"{text}   load {os.getloadavg()[0]:.1f}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
