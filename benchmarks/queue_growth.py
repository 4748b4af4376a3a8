"""Whether the queue stays flat: `status`, `queue`, a look of the daemon and a claim, over an empty database and over one with many
queued runs and past sessions; and how long a due run waits until it is claimed.

python benchmarks/queue_growth.py --runs 10000
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

from sqlalchemy import Engine, insert

from db import queue, runs, sessions
from db.engine import open_database
from db.tables import Resume, Run, Session
from orchestrator.report import view
from orchestrator.runtime import resuming
from orchestrator.runtime.daemon import Daemon

BATCH = 2000


def fill(engine: Engine, count: int, due_in: timedelta) -> None:
    """So many runs, each with a session that is over and a place in the queue."""
    now = datetime.now(UTC)
    for begin in range(0, count, BATCH):
        numbers = range(begin, min(begin + BATCH, count))
        with engine.begin() as connection:
            connection.execute(insert(Run), [run(number, now) for number in numbers])
            connection.execute(insert(Session), [session(number, now) for number in numbers])
            connection.execute(
                insert(Resume),
                [
                    {"run_id": f"id{number}", "due_at": now + due_in, "state": "due", "created_at": now, "ranks": 1}
                    for number in numbers
                ],
            )


def run(number: int, now: datetime) -> dict[str, object]:
    name = f"run{number}"
    places = dict.fromkeys(("folder", "workdir", "checkpoints"), "/nowhere")
    kept = {"plan": "", "overrides": [], "plan_hash": "h", "created_at": now}
    return {"id": f"id{number}", "name": name, "number": 1, **places, **kept}


def session(number: int, now: datetime) -> dict[str, object]:
    times = {"started_at": now, "ended_at": now}
    return {"run_id": f"id{number}", "number": 1, "phase": "suspended", "boot_id": "b", "step": 5, **times}


def median_ms(what: Callable[[], object], times: int) -> float:
    taken = []
    for _ in range(times):
        began_s = time.perf_counter()
        what()
        taken.append(1000 * (time.perf_counter() - began_s))
    return statistics.median(taken)


def typed(home: Path, *words: str) -> Callable[[], object]:
    env = {**os.environ, "KGORCH_HOME": str(home)}
    return lambda: subprocess.run([sys.executable, "-m", "orchestrator.cli", *words], env=env, capture_output=True)


def measured(home: Path, count: int, due_in: timedelta, at_once: int) -> dict[str, float]:
    engine = open_database(home)
    fill(engine, max(count, 1), due_in)
    daemon = Daemon(engine, home, at_once=at_once, start=lambda entry, token: subprocess.Popen(["true"]))
    newest = runs.newest(engine, "run0")
    assert newest is not None
    running = sessions.open_session(engine, newest.id, boot_id=resuming.us().boot, **us())
    found = {
        "status_ms": median_ms(typed(home, "status", "run0", "--json"), 7),
        "history_ms": median_ms(typed(home, "history", "run0", "--json"), 7),
        "view_ms": median_ms(lambda: view.of_run(engine, newest), 50),
        "tick_busy_ms": median_ms(daemon.tick, 50),
    }
    sessions.update_session(engine, running.id, phase="suspended")
    if due_in > timedelta(0):
        found["tick_idle_ms"] = median_ms(daemon.tick, 50)
    return found


def us() -> dict[str, int | None]:
    return {"supervisor_pid": resuming.us().pid, "supervisor_started_ticks": resuming.us().ticks}


def due_to_claimed_s(home: Path, count: int) -> float:
    """With a real daemon: from the instant at which a run becomes due to the claim that is written down."""
    engine = open_database(home)
    fill(engine, count, timedelta(hours=5))
    process = subprocess.Popen(
        [sys.executable, "-m", "orchestrator.cli", "daemon"], env={**os.environ, "KGORCH_HOME": str(home)}
    )
    time.sleep(4)
    due_at = datetime.now(UTC) + timedelta(seconds=3)
    queue.put(engine, "id0", why="benchmark", due_at=due_at)
    while (row := queue.open_resume(engine, "id0")) and row.state == "due" and not row.tries:
        time.sleep(0.005)
    late_s = (datetime.now(UTC) - due_at).total_seconds()
    process.terminate()
    process.wait()
    return late_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=10_000)
    many = parser.parse_args().runs
    with tempfile.TemporaryDirectory() as folder:
        for title, due_in in (("due later", timedelta(hours=5)), ("all due", timedelta(0))):
            empty = measured(Path(folder, f"empty {title}"), 0, due_in, at_once=1)
            full = measured(Path(folder, f"full {title}"), many, due_in, at_once=1)
            ratios = {name: round(full[name] / empty[name], 2) for name in empty}
            print(json.dumps({"queue": f"{many} {title}", "empty": empty, "full": full, "ratio": ratios}, indent=1))
        late_s = due_to_claimed_s(Path(folder, "late"), many)
        print(json.dumps({"due_to_claimed_s": round(late_s, 3)}))


if __name__ == "__main__":
    main()
