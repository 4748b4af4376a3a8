"""How much of short sessions becomes training that lasts.   python benchmarks/goodput.py [--quick] [--json FILE] [--docs]

kgorch and its peers (benchmarks/bounded/) train the same network in sessions that end by SIGKILL of everything. A step survives
when the next session goes on behind it. Two exposures, each peer as its best user would set it for that:

- `a wall that is told`: each session is killed after --wall seconds, and all know it
- `deaths that nobody is told of`: sessions are killed after a time drawn from an exponential distribution, the same for all;
  each peer saves every N steps, N by Young's rule from what its own saves cost, measured before

The share is held against a yardstick, a plain torchrun loop that never saves: steps that survived × its time of a step ÷ the
session's seconds. It runs for some seconds before and behind each session. What is missing to 100% is told in seconds: start-up,
steps that are slower than the yardstick's, saves and other hold-ups, time unused before the end, steps lost. They add up.

A chain is a short session that leaves a checkpoint, the session that counts, and a look at where a third one goes on. Chains are
independent of each other. The order of peers is drawn by --seed. Brackets are 95% intervals by Student's t over chains; a peer's
distance to kgorch is paired by chain.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

import page  # noqa: E402
from bounded import AT_A_DEATH, AT_A_WALL, PLAIN, Job, Peer, living, version  # noqa: E402

SIZES = ("1MB", "150MB")
OURS = "kgorch"
WALL, DEATH = "a wall that is told", "deaths that nobody is told of"
EXPOSURES: dict[str, Mapping[str, Peer]] = {WALL: AT_A_WALL, DEATH: AT_A_DEATH}
QUICK = {WALL: [OURS, "torch.save by the clock"], DEATH: [OURS, "torch.save every N"]}

TOGETHER = 10
"""Steps of which a mean is taken: what a machine does besides counts as part of a step; a save, which few means see, does not."""

YARDSTICK_S, WARM_STEPS = 12.0, 20
"""Seconds of the yardstick with its start, and the steps that it leaves out."""

UNEVEN = 1.05
"""Yardsticks before and behind a session that differ by more than this; such sessions are counted, and kept."""

PREPARATION_S = 20.0
CALIBRATION_S, CALIBRATION_EVERY = 30.0, 100
DEATHS_S = (10.0, 150.0)
"""Least and most of a session's drawn length."""

T95 = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262, 10: 2.228}
"""Student's t by degrees of freedom, two-sided 95%; 1.96 beyond."""


@dataclass(frozen=True, slots=True)
class Cut:
    """A session as its marks tell it. Seconds are from its beginning; None where it did not come to a step.

    Attributes:
        resumed: the step that it went on behind; done: its last.
        step_s: median over means of ten steps in a row.
        slow_s: how much longer its steps took than as many of that: saves, and whatever else held it up.
        went_on: the step behind which the next session went on; None where none did.
        yardstick_s: seconds of a step of the plain loop, before and behind it.
        cpu_s: user and system time of all its processes.
        began_at: seconds since 1970.
    """

    wall_s: float
    resumed: int | None
    done: int
    startup_s: float | None
    step_s: float | None
    unused_s: float
    slow_s: float
    ended: str
    began_at: float
    cpu_s: float = 0.0
    went_on: int | None = None
    yardstick_s: tuple[float, float] = (0.0, 0.0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--quick", action="store_true", help="kgorch and one peer, one size, one chain of 20 s: two minutes"
    )
    parser.add_argument(
        "--wall", type=float, default=60.0, help="seconds of a session; mean of those that are drawn  [60]"
    )
    parser.add_argument("--chains", type=int, default=4, help="of each peer, size and exposure  [4]")
    parser.add_argument("--size", choices=SIZES, action="append", help="this size of the state alone")
    parser.add_argument("--exposure", choices=["wall", "death"], action="append", help="this one alone")
    parser.add_argument("--only", metavar="PEER", action="append", help="peers whose name holds this")
    parser.add_argument("--seed", type=int, default=0, help="of the order of peers and of the deaths  [0]")
    page.add_options(parser)
    options = parser.parse_args()
    exposures = [WALL if word == "wall" else DEATH for word in options.exposure or ["wall", "death"]]
    chains, wall_s, sizes = options.chains, options.wall, options.size or list(SIZES)
    if options.quick:
        chains, wall_s, sizes = 1, min(wall_s, 20.0), options.size or ["1MB"]
        exposures = exposures if options.exposure else [WALL]

    def peers(exposure: str) -> list[str]:
        names = QUICK[exposure] if options.quick and not options.only else list(EXPOSURES[exposure])
        return [name for name in names if not options.only or any(word in name for word in options.only)]

    def measure() -> dict[str, Any]:
        return measured(
            {exposure: peers(exposure) for exposure in exposures}, sizes, chains, wall_s, options.seed, options.json
        )

    found = page.run(options, measure)
    for what, lines in found["ends"].items():
        print(f"\nkgorch's last seconds, {what}:\n  " + "\n  ".join(lines), file=sys.stderr)


def measured(
    peers: Mapping[str, Sequence[str]], sizes: Sequence[str], chains: int, wall_s: float, seed: int, keep: Path | None
) -> dict[str, Any]:
    """keep: groups that this file has, and that are not measured now, stay, with their commit; written after each chain."""
    missing = sorted({name for exposure in peers for name in peers[exposure] if not version(EXPOSURES[exposure][name])})
    packages = sorted({peer.needs for named in EXPOSURES.values() for peer in named.values() if version(peer)})
    before = json.loads(keep.read_text()) if keep and keep.exists() else {}
    of_commit = {} if before.get("commit") == page.commit() else {"commit": before.get("commit")}
    rows = [{**row, "figures": {**of_commit, **row["figures"]}} for row in before.get("rows", [])]
    ends: dict[str, list[str]] = dict(before.get("ends", {}))
    every: dict[str, dict[str, int]] = dict(before.get("every", {}))
    settings: dict[str, str] = dict(before.get("settings", {}))
    found: dict[str, Any] = {}
    for size in sizes:
        for exposure, all_names in peers.items():
            names = [name for name in all_names if name not in missing]
            group = f"{size} of state, {exposure}"
            with tempfile.TemporaryDirectory() as place:
                every[group] = calibrated(names, size, wall_s, Path(place)) if exposure == DEATH else {}
            cuts: dict[str, list[Cut]] = {name: [] for name in names}
            for number in range(chains):
                with tempfile.TemporaryDirectory() as place:
                    lines = chain(
                        cuts, exposure, size, every[group], wall_s, random.Random(f"{seed}:{number}"), Path(place)
                    )
                ends.setdefault(group, []).extend(lines)
                rows = [row for row in rows if row["group"] != group] + group_rows(group, cuts)
                settings |= {
                    f"{name}, {exposure}" if name == OURS else name: EXPOSURES[exposure][name].setting for name in names
                }
                found = page.results(
                    "goodput", rows, packages=packages, wall_s=wall_s, seed=seed, every=every, missing=missing, ends=ends,
                    settings=settings, title=f"Sessions of {wall_s:.0f} s: share of their seconds that became lasting steps",
                )  # fmt: skip
                if keep:
                    keep.with_suffix(".part.json").write_text(json.dumps(found, indent=1))
    if keep:
        keep.with_suffix(".part.json").unlink(missing_ok=True)
    return found


def chain(
    cuts: Mapping[str, list[Cut]],
    exposure: str,
    size: str,
    every: Mapping[str, int],
    wall_s: float,
    drawn: random.Random,
    place: Path,
) -> list[str]:
    """One of each peer, into `cuts`; what kgorch's journal tells of its end."""
    order = list(cuts)
    drawn.shuffle(order)
    length_s = wall_s
    if exposure == DEATH:
        length_s = min(max(drawn.expovariate(1 / wall_s), DEATHS_S[0]), DEATHS_S[1])
    jobs: dict[str, Job] = {}
    for name in order:
        folder = place / name.replace(" ", "-") / "own"
        folder.mkdir(parents=True)
        jobs[name] = Job(folder, size, every.get(name, 0), PREPARATION_S if exposure == WALL else None)
        session(EXPOSURES[exposure][name], jobs[name], PREPARATION_S, "preparation")
    yardsticks = [yardstick(size, place / "yardstick0")]
    counted: dict[str, Cut] = {}
    for number, name in enumerate(order):
        job = Job(jobs[name].folder, size, jobs[name].every, length_s if exposure == WALL else None)
        counted[name] = session(EXPOSURES[exposure][name], job, length_s, "session")
        yardsticks.append(yardstick(size, place / f"yardstick{number + 1}"))
    for number, name in enumerate(order):
        job = Job(jobs[name].folder, size, jobs[name].every, 10 * length_s if exposure == WALL else None)
        went_on = session(EXPOSURES[exposure][name], job, 4 * wall_s, "next", begins=True).resumed
        cut = replace(counted[name], went_on=went_on, yardstick_s=(yardsticks[number], yardsticks[number + 1]))
        cuts[name].append(cut)
        _say(f"{size:>6} {exposure}: {name}: {share(cut):.1f}%  {cut}")
    return last_seconds(jobs[OURS].folder, counted[OURS]) if OURS in counted else []


def session(peer: Peer, job: Job, seconds: float, name: str, *, begins: bool = False) -> Cut:
    """One session until it is killed, or until it ends by itself; `begins`: only until it has told where it goes on."""
    marks = job.folder.parent / name
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    with living.started(peer.command(job), job.folder, marks) as it:
        it.watch((lambda: bool(it.lives())) if begins else (lambda: False), seconds)
        over = it.is_over()
        it.kill()
        reap()
    now = resource.getrusage(resource.RUSAGE_CHILDREN)
    cut = _cut(it, seconds, over=over, cpu_s=now.ru_utime + now.ru_stime - used.ru_utime - used.ru_stime)
    if cut.resumed is None:
        _say(f"{job.folder.parent.name}, {name}: no step was made: {it.said()[-1500:]}")
    return cut


def reap() -> None:
    """All killed processes are waited for: their time counts then."""
    with contextlib.suppress(ChildProcessError):
        while True:
            if os.waitpid(-1, os.WNOHANG) == (0, 0):
                time.sleep(0.01)


def _cut(it: living.Session, wall_s: float, *, over: bool, cpu_s: float) -> Cut:
    lives = it.lives()
    steps = [step for life in lives for step in life.steps]
    resumed = lives[0].resumed if lives else None
    ended = "killed"
    if over and it.ended_s:
        ended = f"by itself with {it.process.returncode} after {it.ended_s - it.began_s:.1f} s"
    if len(steps) < 2 * TOGETHER:
        return Cut(wall_s, resumed, resumed or 0, None, None, wall_s, 0.0, ended, it.began_at, cpu_s)
    step_s = _step_s([step.at_s for step in steps])
    first_s, last_s = steps[0].at_s - step_s, steps[-1].at_s
    slow_s, unused_s = last_s - first_s - step_s * len(steps), it.began_s + wall_s - last_s
    return Cut(
        wall_s, resumed, steps[-1].number, first_s - it.began_s, step_s, unused_s, slow_s, ended, it.began_at, cpu_s
    )


def _step_s(at: Sequence[float]) -> float:
    spans = [later - sooner for sooner, later in zip(at[::TOGETHER], at[TOGETHER::TOGETHER], strict=False)]
    return statistics.median(spans) / TOGETHER


def yardstick(size: str, place: Path) -> float:
    """Seconds of a step of the plain loop, its mean."""
    (place / "own").mkdir(parents=True)
    with living.started(PLAIN.command(Job(place / "own", size, 0)), place / "own", place / "marks") as it:
        it.watch(lambda: False, YARDSTICK_S)
        it.kill()
        reap()
    at = [step.at_s for life in it.lives() for step in life.steps][WARM_STEPS:]
    if len(at) < 2:
        raise SystemExit(f"the yardstick came to no step: {it.said()[-1500:]}")
    return (at[-1] - at[0]) / (len(at) - 1)


def calibrated(names: Sequence[str], size: str, mean_s: float, place: Path) -> dict[str, int]:
    """N of each peer by Young's rule: steps between two saves for deaths each `mean_s` on average."""
    found = {}
    for name in names:
        folder = place / name.replace(" ", "-") / "own"
        folder.mkdir(parents=True)
        if name == OURS:
            continue
        cut = session(AT_A_DEATH[name], Job(folder, size, CALIBRATION_EVERY), CALIBRATION_S, "calibration")
        if cut.step_s is None:
            raise SystemExit(f"{name} came to no step")
        steps = cut.done - (cut.resumed or 0)
        found[name] = young(CALIBRATION_EVERY * cut.slow_s / steps, mean_s, cut.step_s)
        _say(f"{size:>6} {name}: a save each {found[name]} steps of {1e3 * cut.step_s:.1f} ms")
    return found


def young(save_s: float, mean_s: float, step_s: float) -> int:
    """Steps between two saves that cost `save_s` each; a save is taken to cost a millisecond at least."""
    return max(10, 10 * round(math.sqrt(2 * max(save_s, 1e-3) * mean_s) / step_s / 10))


def last_seconds(folder: Path, cut: Cut, seconds: float = 12.0) -> list[str]:
    """What kgorch's journal tells of the end of its session: seconds before it was killed, what, and the facts of it."""
    told = subprocess.run(
        [sys.executable, "-m", "kgorch.cli", "history", "--events", "-n", "5000", "--json"],
        env={**os.environ, "KGORCH_HOME": str(folder / "home")}, cwd=HERE.parent, capture_output=True, text=True,
    )  # fmt: skip
    lines = []
    for event in json.loads(told.stdout or "[]"):
        left_s = cut.began_at + cut.wall_s - datetime.fromisoformat(event["at"]).timestamp()
        if -2 < left_s < seconds:
            facts = " ".join(f"{key}={value}" for key, value in event["facts"].items())
            lines.append(f"−{left_s:5.2f} s  {event['kind']} {facts}"[:200])
    return lines


# ── what the cuts say ──


def parts(cut: Cut) -> dict[str, float]:
    """A session's seconds: these add up to its wall."""
    step_s = statistics.mean(cut.yardstick_s)
    if cut.startup_s is None or cut.step_s is None or cut.resumed is None:
        return {"lasting": 0.0, "start-up": cut.wall_s, "slower steps": 0.0, "saves": 0.0, "unused": 0.0, "lost": 0.0}
    went_on = cut.resumed if cut.went_on is None else cut.went_on
    return {
        "lasting": (went_on - cut.resumed) * step_s,
        "start-up": cut.startup_s,
        "slower steps": (cut.done - cut.resumed) * (cut.step_s - step_s),
        "saves": cut.slow_s,
        "unused": cut.unused_s,
        "lost": (cut.done - went_on) * step_s,
    }


def share(cut: Cut) -> float:
    """Per cent of the session's seconds."""
    return 100 * parts(cut)["lasting"] / cut.wall_s


def interval(values: Sequence[float]) -> tuple[float, float] | None:
    """95%, of the mean."""
    if len(values) < 2:
        return None
    reach = T95.get(len(values) - 1, 1.96) * statistics.stdev(values) / math.sqrt(len(values))
    return statistics.mean(values) - reach, statistics.mean(values) + reach


def group_rows(group: str, cuts: Mapping[str, Sequence[Cut]]) -> list[dict[str, Any]]:
    return [row(name, group, chains, cuts.get(OURS, [])) for name, chains in cuts.items()]


def row(name: str, group: str, cuts: Sequence[Cut], ours: Sequence[Cut]) -> dict[str, Any]:
    shares = [share(cut) for cut in cuts]
    behind = [share(own) - each for own, each in zip(ours, shares, strict=False)] if name != OURS else []
    told = [parts(cut) for cut in cuts]
    figures: dict[str, Any] = {
        "behind kgorch, points": _between(statistics.mean(behind), interval(behind)) if behind else None,
        **{f"{part}, s": statistics.mean(each[part] for each in told) for part in told[0] if part != "lasting"},
        "steps lost": statistics.median(
            cut.done - (cut.resumed or 0 if cut.went_on is None else cut.went_on) for cut in cuts
        ),
        "CPU, s": statistics.mean(cut.cpu_s for cut in cuts),
        "gone by itself": f"{sum(cut.ended != 'killed' for cut in cuts)} of {len(cuts)}",
        "uneven": sum(max(cut.yardstick_s) > UNEVEN * min(cut.yardstick_s) for cut in cuts),
    }
    failed = sum(cut.went_on is None for cut in cuts)
    return {
        "name": name, "group": group, "unit": "%", "better": "higher", "value": statistics.mean(shares), "spread": interval(shares),
        "note": f"{failed} of {len(cuts)} did not go on" if failed else None, "figures": figures,
        "sessions": [asdict(cut) for cut in cuts],
    }  # fmt: skip


def _between(value: float, ends: tuple[float, float] | None) -> str:
    return f"{value:.1f} ({ends[0]:.1f} to {ends[1]:.1f})" if ends else f"{value:.1f}"


def _say(text: str) -> None:
    print(f"{text}   load {os.getloadavg()[0]:.1f}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
