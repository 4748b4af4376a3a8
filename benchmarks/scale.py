"""Whether verbs stay flat: their time over a full database against an empty one, within one run.   python benchmarks/scale.py

Three state folders: one run with one session; the same beside 10,000 queued runs and 10,000 past sessions of others; and one
run that has 10,000 past sessions itself. Each verb is timed as a whole process and, without the process, as calls; the
folders take turns, medians are compared (target ≤ 1.3).
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
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from sqlalchemy import Engine, insert

from db import runs, sessions
from db.engine import open_database
from db.tables import Attempt, Charge, Checkpoint, EventRow, Pool, Resume, Run, Session, Stage
from orchestrator.report import view

VERBS = (
    ["status"],
    ["history"],
    ["checkpoints", "list"],
    ["history", "--events"],
    ["status", "no-such-run"],
    ["quota"],
)
NOW = datetime.now(UTC)


def fill(engine: Engine, *, others: int, past: int, per_run: int = 1) -> None:
    """The run `mine` with `past` past sessions; `others` queued runs with `per_run` past sessions each."""
    ids = ["mine", *(f"other-{number}" for number in range(others))]
    with engine.begin() as connection:

        def add(table: Any, rows: list[dict[str, Any]]) -> None:
            for at in range(0, len(rows), 5000):
                connection.execute(insert(table), rows[at : at + 5000])

        add(Run, [_run(run_id, number) for number, run_id in enumerate(ids)])
        add(Stage, [{"run_id": run_id, "position": 0, "name": "train"} for run_id in ids])
        spans = [(run_id, past if run_id == "mine" else per_run) for run_id in ids]
        rows = [_session(run_id, number) for run_id, count in spans for number in range(1, count + 1)]
        rows = [{"id": session_id, **row} for session_id, row in enumerate(rows, 1)]
        add(Session, rows)
        add(Attempt, [_attempt(row) for row in rows])
        add(Checkpoint, [_checkpoint(row) for row in rows])
        add(
            EventRow,
            [_event(row, kind) for row in rows for kind in ("Attached", "epoch", "CheckpointVerified", "launched")],
        )
        add(Charge, [_charge(row) for row in rows])
        add(Pool, [{"name": "lab", "total_s": 3.6e6, "resets": "rolling 7d", "reserve_s": 0.0, "told_at": NOW}])
        add(Resume, [{"run_id": run_id, "state": "due", "due_at": NOW, "created_at": NOW} for run_id in ids])


def _run(run_id: str, number: int) -> dict[str, Any]:
    began = NOW - timedelta(days=30, seconds=number)
    texts = dict.fromkeys(("folder", "workdir", "checkpoints", "plan_hash"), "x")
    plan = '[forecast]\ntarget = "dice >= 0.9"'
    return {
        "id": run_id,
        "name": run_id,
        "number": 1,
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
    steps = {"first_step": row["first_step"], "last_step": row["step"], "gained": True, "outcome": "suspended"}
    times = {"started_at": row["started_at"], "ended_at": row["ended_at"]}
    return {"session_id": row["id"], "number": 1, "stage": "train", "folder": "x", "ranks": 1, **steps, **times}


def _checkpoint(row: dict[str, Any]) -> dict[str, Any]:
    mine = {"run_id": row["run_id"], "session_id": row["id"], "stage": "train", "step": row["step"], "final": False}
    state = "verified" if row["number"] % 3000 == 0 or row["number"] == 1 else "dropped"
    times = {"created_at": row["ended_at"], "verified_at": row["ended_at"], "took_s": 1.0}
    return {**mine, "path": f"/c/{row['id']}", "bytes": 1000, "state": state, "metrics": row["metrics"], **times}


def _charge(row: dict[str, Any]) -> dict[str, Any]:
    what = {"pool": "lab", "accelerator": "T4", "factor": 1.0, "from_at": row["started_at"], "used_s": 50.0}
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


def calls(engine: Engine) -> dict[str, Callable[[], object]]:
    """What the verbs do beyond starting a process."""
    mine = runs.by_id(engine, "mine")
    assert mine is not None
    return {
        "status": lambda: view.of_run(engine, mine),
        "history": lambda: view.history(engine, mine, limit=50),
        "resume: which run": lambda: runs.newest_in(engine, ("active", "failed")),
        "resume: how it went": lambda: (sessions.trained(engine, "mine"), sessions.without_progress(engine, "mine")),
    }


def timed(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def typed(home: Path, words: list[str]) -> Callable[[], object]:
    env = {**os.environ, "KGORCH_HOME": str(home)}
    named = words if words[-1] in ("no-such-run", "quota") else [*words, "mine"]
    return lambda: subprocess.run([sys.executable, "-m", "orchestrator.cli", *named], env=env, capture_output=True)


def measured(table: dict[str, list[Callable[[], object]]], rounds: int) -> dict[str, list[float]]:
    """Medians in seconds, a column a folder, which take turns."""
    taken: dict[str, list[list[float]]] = {what: [[] for _ in ways] for what, ways in table.items()}
    for _ in range(rounds + 1):
        for what, ways in table.items():
            for column, way in enumerate(ways):
                taken[what][column].append(timed(way))
    return {what: [statistics.median(times[1:]) for times in columns] for what, columns in taken.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        shapes = {"one": (0, 1), "among others": (asked.count, 1), "long run": (0, asked.count)}
        homes = [Path(folder, name.replace(" ", "-")) for name in shapes]
        engines = [open_database(home) for home in homes]
        for engine, (others, past) in zip(engines, shapes.values(), strict=True):
            fill(engine, others=others, past=past)
        columns = [calls(engine) for engine in engines]
        table = {f"{what} (call)": [column[what] for column in columns] for what in columns[0]}
        found = measured(table, 3 * asked.rounds)
        found |= measured({" ".join(verb): [typed(home, verb) for home in homes] for verb in VERBS}, asked.rounds)
        for engine in engines:
            engine.dispose()
    print(f"{'':<28}{'':>10}" + "".join(f"{name:>24}" for name in list(shapes)[1:]))
    for what, (plain, *full) in found.items():
        ratios = "".join(f"{1000 * seconds:>13.1f} ms {seconds / plain:>5.2f} ×" for seconds in full)
        print(f"{what:<28}{1000 * plain:>7.1f} ms{ratios}")
    if asked.json:
        asked.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
