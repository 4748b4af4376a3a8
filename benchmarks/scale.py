"""Whether kgorch stays flat as things grow.   python benchmarks/scale.py [--quick] [--json FILE] [--docs]

- what a person types and what the daemon does, over 10 to 10,000 runs in the queue and as many past sessions of the run that is
  asked for: time over time, in turns (target ≤ 1.3); and how long a run that becomes due waits for the daemon's claim
- the same over 10⁴ to 10⁷ samples of telemetry
- 1 to 16 ranks on this machine: messages that a supervisor hears a second, its share of a core at the ranks' real pace, and what
  their agreement takes a step (scale_ranks.py)
- the supervisor's memory over nine hours by a hand-moved clock (target: ≤ 80 MB, flat)
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from sqlalchemy import Engine, insert, text

from kgorch.core.codes import Reason, RunState

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

import page  # noqa: E402
import scale_ranks  # noqa: E402

from kgorch.checkpoint import registry  # noqa: E402
from kgorch.db import queue, runs, samples, sessions  # noqa: E402
from kgorch.db.engine import open_database  # noqa: E402
from kgorch.db.tables import Attempt, Charge, Checkpoint, EventRow, Pool, Resume, Run, SessionRow, Stage  # noqa: E402
from kgorch.errors import ExitCode  # noqa: E402
from kgorch.plan import parse  # noqa: E402
from kgorch.report import run_view  # noqa: E402
from kgorch.scheduler.daemon import Daemon  # noqa: E402

VERBS = (
    ["status", "mine"],
    ["history", "mine"],
    ["checkpoints", "list", "mine"],
    ["history", "--events", "mine"],
    ["status", "no-such-run"],
    ["quota"],
    ["queue"],
)
OF_SAMPLES = (["status", "mine"], ["quota"], ["history", "mine"], ["doctor", "mine"])
NOW = datetime.now(UTC)
A_SESSION = 1000
"""Samples, minutes, of each past session; the last one has seconds."""

FIGURES = {
    f"{part}.{name}": 123456.789
    for part in ("gpu0", "gpu1", "rank0", "rank1", "host")
    for name in ("util", "mem_used", "temp_c", "power_w", "cpu", "rss_peak")
}
"""About as many as two GPUs, two ranks and the host give."""


def fill(engine: Engine, *, others: int, past: int, per_run: int = 1, due_in: timedelta = timedelta(hours=5)) -> None:
    """The run `mine` with `past` past sessions; `others` queued runs with `per_run` past sessions each."""
    ids = ["mine", *(f"other-{number}" for number in range(others))]
    with engine.begin() as connection:

        def add(table: Any, rows: list[dict[str, Any]]) -> None:
            for at in range(0, len(rows), 5000):
                connection.execute(insert(table), rows[at : at + 5000])

        home = Path(engine.url.database or "").parent
        add(Run, [_run(run_id, number, home) for number, run_id in enumerate(ids)])
        add(Stage, [{"run_id": run_id, "position": 0, "name": "train"} for run_id in ids])
        spans = [(run_id, past if run_id == "mine" else per_run) for run_id in ids]
        rows = [_session(run_id, number) for run_id, count in spans for number in range(1, count + 1)]
        rows = [{"id": session_id, **row} for session_id, row in enumerate(rows, 1)]
        add(SessionRow, rows)
        add(Attempt, [_attempt(row) for row in rows])
        add(Checkpoint, [_checkpoint(row) for row in rows])
        add(
            EventRow,
            [_event(row, kind) for row in rows for kind in ("attached", "epoch", "checkpoint_verified", "launched")],
        )
        add(Charge, [_charge(row) for row in rows])
        add(Pool, [{"name": "lab", "total_s": 3.6e6, "resets": "rolling 7d", "reserve_s": 0.0, "updated_at": NOW}])
        add(Resume, [_resume(run_id, due_in) for run_id in ids])


def _resume(run_id: str, due_in: timedelta) -> dict[str, Any]:
    return {"run_id": run_id, "state": "due", "due_at": NOW + due_in, "created_at": NOW, "ranks": 1}


def _run(run_id: str, number: int, home: Path) -> dict[str, Any]:
    began = NOW - timedelta(days=30, seconds=number)
    texts = dict.fromkeys(("workdir", "checkpoints", "plan_hash"), "x")
    plan = f'name = "{run_id}"\n[[stage]]\nname = "train"\nentry = "x.py"\n[forecast]\ntarget = "dice >= 0.9"'
    return {
        "id": run_id,
        "name": run_id,
        "number": 1,
        "folder": str(home / "runs" / run_id / "1"),
        **texts,
        "plan": plan,
        "overrides": [],
        "created_at": began,
        "pool": "lab",
    }


def _session(run_id: str, number: int) -> dict[str, Any]:
    began = NOW - timedelta(days=30) + timedelta(minutes=number)
    over = {"phase": "suspended", "why": "the wall", "ended_at": began + timedelta(seconds=50)}
    steps = {"first_step": 10 * number, "step": 10 * number + 10, "steps_total": 200_000, "epochs_total": 20_000}
    figures = {"step_s": 5.0, "stage": "train", "metrics": {"dice": number / 20_000}}
    walls = {"wall_at": began + timedelta(seconds=60), "started_at": began, "boot_id": "b"}
    return {"run_id": run_id, "number": number, **walls, **over, **steps, **figures}


def _attempt(row: dict[str, Any]) -> dict[str, Any]:
    steps = {"first_step": row["first_step"], "last_step": row["step"], "made_progress": True, "outcome": "suspended"}
    times = {"started_at": row["started_at"], "ended_at": row["ended_at"]}
    return {"session_id": row["id"], "number": 1, "stage": "train", "folder": "x", "ranks": 1, **steps, **times}


def _checkpoint(row: dict[str, Any]) -> dict[str, Any]:
    mine = {"run_id": row["run_id"], "session_id": row["id"], "stage": "train", "step": row["step"], "final": False}
    state = "verified" if row["number"] % 3000 == 0 or row["number"] == 1 else "dropped"
    times = {"created_at": row["ended_at"], "verified_at": row["ended_at"], "save_duration_s": 1.0}
    return {**mine, "path": f"/c/{row['id']}", "bytes": 1000, "state": state, "metrics": row["metrics"], **times}


def _charge(row: dict[str, Any]) -> dict[str, Any]:
    what = {"pool": "lab", "accelerator": "T4", "factor": 1.0, "started_at": row["started_at"], "used_s": 50.0}
    return {"session_id": row["id"], "why": "", **what}


def _event(row: dict[str, Any], kind: str) -> dict[str, Any]:
    epoch = {
        "stage": "train",
        "epoch": row["number"],
        "step": row["step"],
        "steps": 10,
        "lasted_s": 50.0,
        "first": False,
    }
    facts = epoch | {"metrics": row["metrics"]} if kind == "epoch" else {}
    return {"run_id": row["run_id"], "session_id": row["id"], "at": row["ended_at"], "kind": kind, "facts": facts}


def fill_samples(engine: Engine, count: int, a_session: int = A_SESSION) -> None:
    """By SQLite itself, so many a second: minutes of the past sessions, at the end an hour of seconds of the last one."""
    seconds = min(count // 2, 3600)
    last = count // a_session + 1
    checked = Path(engine.url.database or "").parent / "checks" / "x.json"  # history holds a check against them
    checked.parent.mkdir(exist_ok=True)
    checked.write_text(json.dumps({"stages": [{"name": "train", "time": None, "memory": {"process": 10**9}}]}))
    statement = text(
        "WITH RECURSIVE n(i) AS (SELECT 0 UNION ALL SELECT i + 1 FROM n WHERE i + 1 < :count) "
        'INSERT INTO samples (session_id, at, span_s, "values") SELECT min(:first + i / :each, :last), '
        "strftime('%Y-%m-%d %H:%M:%S.000000', :began + i * :step, 'unixepoch'), :span, :figures FROM n"
    )
    shared = {"last": last, "each": a_session, "figures": json.dumps(FIGURES, separators=(",", ":"))}
    began = int(NOW.timestamp())
    with engine.begin() as connection:
        minutes = {
            "count": count - seconds,
            "first": 1,
            "span": samples.MINUTE,
            "step": 60,
            "began": began - 86400 * 9999,
        }
        connection.execute(statement, shared | minutes)
        peaks = json.dumps(FIGURES | {f"{key}.max": value for key, value in FIGURES.items()})
        hours = {"count": count // 60, "each": a_session // 60, "span": samples.HOUR, "step": 0, "began": began - 86400}
        connection.execute(statement, shared | {"first": 1, "figures": peaks} | hours)
        newest = {"count": seconds, "first": last, "span": samples.SECOND, "step": 1, "began": began - seconds}
        connection.execute(statement, shared | newest)


def calls(engine: Engine) -> dict[str, Callable[[], object]]:
    """What the verbs do beyond starting a process, and a supervisor after each save."""
    mine = runs.by_id(engine, "mine")
    assert mine is not None
    plan = parse(mine.plan, "the run's plan")
    return {
        "what may go after a save": lambda: registry.expired_folders(engine, mine.id, plan),
        "status": lambda: run_view.of_run(engine, mine),
        "history": lambda: run_view.history(engine, mine, limit=50),
        "resume: which run": lambda: runs.newest_in_states(engine, (RunState.ACTIVE, RunState.FAILED)),
        "resume: how it went": lambda: (
            sessions.duration_and_failures(engine, "mine"),
            sessions.attempts_without_progress(engine, "mine"),
        ),
    }


def looks(engine: Engine, home: Path) -> dict[str, Callable[[], object]]:
    """The daemon's."""
    daemon = Daemon(engine, home, at_once=1, start=lambda entry, token: subprocess.Popen(["true"]))
    return {"a look of the daemon": daemon.tick}


def calls_of_samples(engine: Engine) -> dict[str, Callable[[], object]]:
    """What a supervisor does with them beside training, and what it clears up once at its beginning."""
    last = sessions.last(engine, "mine")
    assert last is not None
    batch = [(NOW, FIGURES)] * 5
    return {
        "the newest sample": lambda: samples.newest(engine, last.id),
        "an hour of seconds": lambda: samples.series(engine, last.id, NOW - timedelta(hours=1), samples.SECOND),
        "five samples written": lambda: samples.write(engine, last.id, batch),
        "a minute rolled up": lambda: samples.roll_up(engine, last.id),
        "what is too much, looked for": lambda: samples._sessions_beyond(engine, samples.MINUTES_BYTES),
    }


def timed(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def typed(home: Path, words: Sequence[str]) -> Callable[[], object]:
    env = {**os.environ, "KGORCH_HOME": str(home)}

    def run() -> None:
        done = subprocess.run([sys.executable, "-m", "kgorch.cli", *words], env=env, capture_output=True, text=True)
        if done.returncode != (ExitCode.MISTAKE if "no-such-run" in words else 0):
            sys.exit(f"kgorch {' '.join(words)} ended with {done.returncode}: {done.stderr}")

    return run


def daemon_start(home: Path) -> Callable[[], object]:
    """Until the daemon tells systemd that it is ready; it is ended then."""

    def begin() -> None:
        with daemon(home):
            pass

    return begin


@contextlib.contextmanager
def daemon(home: Path) -> Iterator[None]:
    place = home / "ready.sock"
    place.unlink(missing_ok=True)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as ear:
        ear.bind(str(place))
        ear.settimeout(120)
        env = {**os.environ, "KGORCH_HOME": str(home), "NOTIFY_SOCKET": str(place)}
        command = [sys.executable, "-m", "kgorch.cli", "daemon", "--at-once", "1"]
        process = subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            while b"READY=1" not in ear.recv(4096):
                pass
            yield
        finally:
            process.kill()
            process.wait()


def due_to_claimed_s(home: Path, engine: Engine) -> float:
    """With a real daemon: from the instant at which a run becomes due to the claim that is written down."""
    with daemon(home):
        due_at = datetime.now(UTC) + timedelta(seconds=2)
        queue.put(engine, "other-0", reason=Reason.QUEUED, due_at=due_at)
        while (row := queue.pending_resume(engine, "other-0")) and row.state == "due" and not row.failed_starts:
            time.sleep(0.005)
        return (datetime.now(UTC) - due_at).total_seconds()


def measured(table: Mapping[str, Sequence[Callable[[], object]]], rounds: int) -> dict[str, list[float]]:
    """Medians in seconds, a column a folder, which take turns."""
    taken: dict[str, list[list[float]]] = {what: [[] for _ in ways] for what, ways in table.items()}
    for _ in range(rounds + 1):
        for what, ways in table.items():
            for column, way in enumerate(ways):
                taken[what][column].append(timed(way))
    return {what: [statistics.median(times[1:]) for times in columns] for what, columns in taken.items()}


def side_by_side(columns: Sequence[Mapping[str, Callable[[], object]]]) -> dict[str, list[Callable[[], object]]]:
    return {what: [column[what] for column in columns] for what in columns[0]}


# What is measured


def sizes(place: Path, counts: Sequence[int], rounds: int) -> list[dict[str, Any]]:
    homes = [place / f"sessions-{count}" for count in counts]
    engines = [open_database(home) for home in homes]
    for engine, count in zip(engines, counts, strict=True):
        fill(engine, others=count, past=count)
    both = [calls(engine) | looks(engine, home) for engine, home in zip(engines, homes, strict=True)]
    found = {f"{what} (call)": taken for what, taken in measured(side_by_side(both), 3 * rounds).items()}
    table = {f"kgorch {' '.join(verb)}": [typed(home, verb) for home in homes] for verb in VERBS}
    found |= measured(table | {"kgorch daemon, ready": [daemon_start(home) for home in homes]}, rounds)
    found["due until claimed"] = [due_to_claimed_s(home, engine) for home, engine in zip(homes, engines, strict=True)]
    for engine in engines:
        engine.dispose()
    return rows(found, counts, f"{counts[0]} → {counts[-1]:,} runs and sessions")


def amounts(place: Path, counts: Sequence[int], rounds: int) -> list[dict[str, Any]]:
    homes = [place / f"samples-{count}" for count in counts]
    engines = [open_database(home) for home in homes]
    for engine, count in zip(engines, counts, strict=True):
        fill(engine, others=10, past=count // A_SESSION + 1)
        fill_samples(engine, count)
    columns = [calls_of_samples(engine) for engine in engines]
    found = {f"{what} (call)": taken for what, taken in measured(side_by_side(columns), rounds).items()}
    table = {f"kgorch {' '.join(verb)}": [typed(home, verb) for home in homes] for verb in OF_SAMPLES}
    found |= measured(table | {"kgorch daemon, ready": [daemon_start(home) for home in homes]}, rounds)
    for engine in engines:
        engine.dispose()
    return rows(found, counts, f"{counts[0]:,} → {counts[-1]:,} samples")


def rows(found: Mapping[str, Sequence[float]], counts: Sequence[int], group: str) -> list[dict[str, Any]]:
    told = {"group": f"{group}: time / time", "unit": "×", "better": "lower"}
    return [
        told
        | {"name": what if what.startswith("kgorch") else f"kgorch: {what}", "value": taken[-1] / taken[0]}
        | {"figures": {f"{count:,}, ms": 1e3 * seconds for count, seconds in zip(counts, taken, strict=True)}}
        for what, taken in found.items()
    ]


def of_ranks(counts: Sequence[int], seconds: float, votes: int) -> list[dict[str, Any]]:
    heard, agreed = scale_ranks.channel(counts, seconds), scale_ranks.agreement(counts, votes)
    taken = {
        "a message heard, all speaking at once, µs": {count: 1e6 / heard[count]["a_second"] for count in counts},
        "supervisor, each telling once a second, % of a core": {
            count: heard[count]["core_percent"] for count in counts
        },
        "agreement: a look at the board (tick), µs": {count: agreed[count]["tick_us"] for count in counts},
        "agreement: a vote of all, µs": {count: agreed[count]["vote_us"] for count in counts},
    }
    told = {"group": f"{counts[0]} → {counts[-1]} ranks: most / fewest", "unit": "×", "better": "lower"}
    return [
        told
        | {"name": f"kgorch: {what}", "value": by_count[counts[-1]] / by_count[counts[0]]}
        | {"figures": {str(count): figure for count, figure in by_count.items()}}
        for what, by_count in taken.items()
    ]


def of_hours(count: int) -> list[dict[str, Any]]:
    found = scale_ranks.hours(count)
    first, *each = found["mb"]
    told = {"group": "supervisor's memory by the hour", "unit": "MB", "better": "lower"}
    by_hour = {f"{hour} h": mb for hour, mb in enumerate(each, 1)}
    return [
        told | {"name": "kgorch: after a minute", "value": first},
        told | {"name": f"kgorch: after {count} h", "value": each[-1], "figures": {"target ≤": 80} | by_hour},
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small amounts, one hour: a minute")
    parser.add_argument("--count", type=int, default=10_000, help="runs and sessions at most  [10,000]")
    parser.add_argument("--samples", type=int, default=10_000_000, help="at most  [10,000,000]")
    parser.add_argument("--ranks", type=int, default=16, help="at most  [16]")
    parser.add_argument("--hours", type=int, default=9, help="[9]")
    parser.add_argument("--rounds", type=int, default=9, help="[9]")
    parser.add_argument("--only", choices=PARTS, action="append", help="this part alone")
    page.add_options(parser)
    options = parser.parse_args()
    if options.quick:
        options.count, options.samples, options.ranks, options.hours, options.rounds = 1000, 100_000, 2, 1, 1
    page.run(options, lambda: all_of(options))


PARTS = ("sizes", "samples", "ranks", "hours")


def all_of(options: argparse.Namespace) -> dict[str, Any]:
    parts: dict[str, Callable[[Path], list[dict[str, Any]]]] = {
        "sizes": lambda place: sizes(place, up_to(10, options.count), options.rounds),
        "samples": lambda place: amounts(place, up_to(10_000, options.samples), options.rounds),
        "ranks": lambda place: of_ranks(
            [2**power for power in range(options.ranks.bit_length())], 1 if options.quick else 10, 90 if options.quick else 900
        ),
        "hours": lambda place: of_hours(options.hours),
    }  # fmt: skip
    found = []
    with tempfile.TemporaryDirectory() as place:
        for name in options.only or PARTS:
            print(f"{name}…   load {os.getloadavg()[0]:.1f}", file=sys.stderr, flush=True)
            found += parts[name](Path(place))
    return page.results("scale", found, title="What grows and what does not", packages=["sqlalchemy"])


def up_to(least: int, most: int) -> list[int]:
    """The least, the most, and one half-way by their digits where they lie far apart."""
    middle = least * 10 ** round(len(str(most // least)) / 2)
    return [least, *([middle] if least < middle < most and most >= 1000 * least else []), most]


if __name__ == "__main__":
    main()
