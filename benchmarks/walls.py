"""Whether the last save is in place when the wall comes.   python benchmarks/walls.py [--quick] [--json FILE] [--docs]

Short sessions, several at a time, each a real `kgorch start` with a torchrun of two ranks, on disks whose speed is drawn anew for
each session and changes within it (slow_disk.c), with a state whose size changes (walls_training.py). At the wall everything is
killed by SIGKILL; what lies on the disk then is read back. Told are:

- the share of the sessions in which the last step that the ranks had done was in a checkpoint that was written, read back and
  noted by kgorch before the wall, and whose hashes are right after the kill (target 100%). A session that came to no step
  has nothing to save; it is told and not counted.
- the seconds before the wall that were not trained in: from the last step, and from the moment when all was over.

For each miss the journal of the session's end is printed and kept.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import math
import mmap
import random
import shutil
import signal
import sqlite3
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from multiprocessing import get_context
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

import page  # noqa: E402
from bounded import living  # noqa: E402

from kgorch.checkpoint.folder import list_checkpoints  # noqa: E402
from kgorch.checkpoint.verify import verify_checkpoint  # noqa: E402
from kgorch.errors import KgorchError  # noqa: E402

SLOWEST, FASTEST = 4.0, 200.0
"""MB a second of a session's disk, drawn evenly between their logarithms."""

CHANGES, FACTOR = 2, 2.0
"""So often in a session its speed is multiplied by something between 1/FACTOR and FACTOR."""

FLUSH_S = 0.05
"""What a flush may take at most besides its bytes."""

LAST_WORDS_S = 15.0
PR_SET_PDEATHSIG = 1


@dataclass(frozen=True, slots=True)
class End:
    """How a session ended. Seconds are before its wall; steps are the training's.

    Attributes:
        last: the last step that the ranks had done; None when there was none in this session.
        saved: step of the newest checkpoint whose hashes are right after the kill.
        noted: the newest that kgorch's database says is verified.
        noted_s: when kgorch noted it. over_s: when all processes were gone by themselves; None when the kill came first.
        lead_s: what kgorch meant to need, as told last; took_s: what its last save took.
        disk: MB a second, from when on.
    """

    lane: int
    number: int
    phase: str
    why: str
    last: int | None
    saved: int
    noted: int
    unused_s: float
    noted_s: float | None
    over_s: float | None
    lead_s: float
    took_s: float
    state_mb: float
    disk: Sequence[tuple[float, float]]
    journal: Sequence[str] = ()

    @property
    def is_in_place(self) -> bool:
        return self.last is not None and min(self.saved, self.noted) >= self.last and self.phase == "suspended"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="3 sessions of 20 s, at once: half a minute")
    parser.add_argument("--sessions", type=int, default=200, help="[200]")
    parser.add_argument("--wall", type=float, default=30.0, help="seconds of a session  [30]")
    parser.add_argument(
        "--at-once", type=int, default=3, help="more than the cores bear, and sessions come to no step  [3]"
    )
    parser.add_argument("--seed", type=int, default=1, help="of disks  [1]")
    page.add_options(parser)
    options = parser.parse_args()
    if options.quick:
        options.sessions, options.wall, options.at_once = 3, 20.0, 3
    if not shutil.which("cc"):
        sys.exit("error: a slow disk needs a C compiler, cc\nnext: apt-get install gcc")
    page.run(options, lambda: measured(options.sessions, options.wall, options.at_once, options.seed))


def measured(sessions: int, wall_s: float, at_once: int, seed: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as place:
        library = Path(place, "slow_disk.so")
        subprocess.run(["cc", "-shared", "-fPIC", "-O2", "-o", library, HERE / "slow_disk.c", "-ldl"], check=True)
        with ProcessPoolExecutor(at_once, get_context("spawn"), _dies_with_us) as pool:
            lanes = [
                pool.submit(lane, number, len(range(number, sessions, at_once)), wall_s, seed, Path(place))
                for number in range(at_once)
            ]
            ends = [end for done in as_completed(lanes) for end in done.result()]
    return figures(ends, wall_s, at_once)


def lane(number: int, sessions: int, wall_s: float, seed: int, place: Path) -> list[End]:
    """One training through its sessions, one after another. In a process of its own, below which all of them run."""
    folder = place / f"lane{number}"
    for part in (folder / "home", folder / "disk"):
        part.mkdir(parents=True)
    (folder / "plan.toml").write_text(
        'name = "walls"\n[[stage]]\nname = "train"\nentry = "walls_training:main"\nranks = 2\n'
        f'[session]\nwall = "{wall_s:g}s"\n[checkpoint]\ndir = "disk"\n'
    )
    time.sleep(number * 1.5)  # they begin one after another, as on machines of their own
    return [
        session(number, count, folder, wall_s, random.Random(f"{seed}.{number}.{count}")) for count in range(sessions)
    ]


def session(lane: int, number: int, folder: Path, wall_s: float, chance: random.Random) -> End:
    times = [0.0, *sorted(chance.uniform(0.1, 0.95) * wall_s for _ in range(CHANGES))]
    speeds = [math.exp(chance.uniform(math.log(SLOWEST), math.log(FASTEST)))]
    for _ in range(CHANGES):
        speeds.append(min(max(speeds[-1] * FACTOR ** chance.uniform(-1, 1), SLOWEST / 2), FASTEST))
    disk = Disk(folder / f"page{number}", chance.uniform(0, FLUSH_S))
    marks, changes = folder / f"session{number}", list(zip(times, speeds, strict=True))
    command = [sys.executable, "-m", "kgorch.cli", "start", "plan.toml"]
    env = {
        "LD_PRELOAD": str(folder.parent / "slow_disk.so"),
        "SLOW_DISK_PAGE": str(disk.page), "SLOW_DISK_BELOW": str(folder / "disk"),
    }  # fmt: skip
    disk.turn(speeds[0])
    with living.started(command, folder, marks, **env) as it:
        for at, speed in [*changes[1:], (wall_s, speeds[-1])]:
            it.watch(lambda: False, at)
            disk.turn(speed)
        it.is_over()
        it.kill()
    steps = [at for life in it.lives() for at in life.steps]
    end = ended(lane, number, folder, it.began_at, wall_s)
    return End(
        **end, disk=[(round(at, 2), round(speed, 2)) for at, speed in changes],
        last=steps[-1][0] if steps else None,
        unused_s=it.began_s + wall_s - steps[-1][1] if steps else wall_s,
        over_s=it.began_s + wall_s - it.ended_s if it.ended_s else None,
    )  # fmt: skip


class Disk:
    def __init__(self, page: Path, flush_s: float) -> None:
        self.page, self._flush_s = page, flush_s
        page.write_bytes(bytes(mmap.PAGESIZE))

    def turn(self, mb_per_s: float) -> None:
        with open(self.page, "r+b") as file, mmap.mmap(file.fileno(), mmap.PAGESIZE) as mapped:
            struct.pack_into("qq", mapped, 0, int(1e9 / mb_per_s), int(1e9 * self._flush_s))


def ended(lane: int, number: int, folder: Path, began_at: float, wall_s: float) -> dict[str, Any]:
    """What lies on the disk after the kill, and what kgorch's database tells of the session."""
    saved = noted = 0
    for place in list_checkpoints(next((folder / "disk").iterdir(), folder) / "train"):
        try:
            saved = verify_checkpoint(place).step
            break
        except KgorchError:
            continue
    with sqlite3.connect(folder / "home" / "kgorch.db") as kept:
        row, phase, why, lead_s = kept.execute(
            "SELECT id, phase, why, save_lead_s FROM sessions ORDER BY id DESC LIMIT 1"
        ).fetchone()
        noted, size, took_s = kept.execute(
            "SELECT step, bytes, save_duration_s FROM checkpoints WHERE state = 'verified' ORDER BY step DESC LIMIT 1"
        ).fetchone() or (0, 0, 0.0)
        events = kept.execute("SELECT at, kind, phase, facts FROM events WHERE session_id = ? ORDER BY id", (row,))
        journal, noted_s = [], None
        for at, kind, to, facts in events:
            left_s = began_at + wall_s - datetime.fromisoformat(at).replace(tzinfo=UTC).timestamp()
            noted_s = left_s if kind == "checkpoint_verified" else noted_s
            if left_s < LAST_WORDS_S:
                journal.append(f"−{left_s:.2f} s {kind} {to} {facts}"[:240])
    return {
        "lane": lane, "number": number, "phase": phase, "why": why, "saved": saved, "noted": noted, "noted_s": noted_s,
        "lead_s": lead_s, "took_s": took_s, "state_mb": round(size / 1e6, 2), "journal": journal,
    }  # fmt: skip


def figures(ends: Sequence[End], wall_s: float, at_once: int) -> dict[str, Any]:
    trained = [end for end in ends if end.last is not None]
    middle = math.sqrt(SLOWEST * FASTEST)
    classes = {
        "kgorch": trained,
        f"kgorch, disks below {middle:.0f} MB/s": [end for end in trained if end.disk[0][1] < middle],
        f"kgorch, disks from {middle:.0f} MB/s on": [end for end in trained if end.disk[0][1] >= middle],
    }
    rows: list[dict[str, Any]] = []
    for name, some in classes.items():
        told = {"name": name, "unit": "%", "better": "higher", "group": "last save verified before the wall"}
        hit = [end for end in some if end.is_in_place]
        lost = [end.last - end.saved for end in some if end.last is not None and end not in hit]
        more = {
            "sessions": len(some), "saved": len(hit), "steps lost by the others": max(lost, default=0),
            "last save took, s": _median([end.took_s for end in some]),
            "ended by itself": sum(end.over_s is not None for end in some),
        }  # fmt: skip
        if name == "kgorch":
            more["without a step"] = len(ends) - len(trained)
        rows.append(told | {"value": 100 * len(hit) / len(some) if some else None, "figures": more})
    for group, of in (
        ("unused before the wall, from the last step on", lambda end: end.unused_s),
        ("left over before the wall, the save being noted", lambda end: end.noted_s if end.is_in_place else None),
        ("left over before the wall, all processes being gone", lambda end: end.over_s),
    ):
        for name, some in classes.items():
            values = sorted(value for end in some if (value := of(end)) is not None)
            told = {"name": name, "unit": "s", "better": "lower", "group": group, "value": _median(values)}
            if len(values) > 1:
                low, _, high = statistics.quantiles(values, n=4)
                told |= {"spread": (low, high), "figures": {"least": values[0], "most": values[-1]}}
            rows.append(told)
    misses = [asdict(end) for end in trained if not end.is_in_place]
    for miss in misses:
        print(f"\nmissed: {json.dumps({**miss, 'journal': None})}\n  " + "\n  ".join(miss["journal"]), file=sys.stderr)
    return page.results(
        "walls", rows, title=f"The last save before a wall after {wall_s:g} s, {len(ends)} sessions on slow disks",
        wall_s=wall_s, at_once=at_once, without_a_step=len(ends) - len(trained), misses=misses,
        sessions=[asdict(end) | {"journal": None} for end in ends],
    )  # fmt: skip


def _median(values: Sequence[float]) -> float | None:
    return statistics.median(values) if values else None


def _dies_with_us() -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # a session that runs is killed on the way out


if __name__ == "__main__":
    main()
