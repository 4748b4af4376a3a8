"""A fleet on one PostgreSQL.   python benchmarks/fleet.py [--quick] [--json FILE]

- 50 claimers, each a machine with a connection of its own, on a queue of 10,000 rows, by the daemon's own way to choose and claim:
  rows that two of them got (target: none), claims a second (target: ≥ 100)
- `kgorch status` of the same run on PostgreSQL and on SQLite, in turns: time over time (target: ≤ 1.5)

Server and claimers share this machine's processors. It needs PostgreSQL (apt-get install postgresql).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from sqlalchemy import Engine, insert

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE.parent / "tests")]

from postgres import PostgresServer  # noqa: E402

from kgorch.core.codes import EventKind, Reason, ResumeState, RunState  # noqa: E402
from kgorch.db import runs, sessions  # noqa: E402
from kgorch.db.engine import open_database, open_fleet  # noqa: E402
from kgorch.db.location import Fleet  # noqa: E402
from kgorch.db.queue import Claimant  # noqa: E402
from kgorch.db.tables import Resume, Run  # noqa: E402
from kgorch.scheduler import run_selection  # noqa: E402
from kgorch.scheduler.local_devices import LocalDevices  # noqa: E402
from kgorch.scheduler.run_selection import Reachable  # noqa: E402
from kgorch.system.clock import SystemClock  # noqa: E402

PROCESSES, THREADS = 5, 10
NOW = datetime.now(UTC)


def fill_queue(engine: Engine, rows: int) -> None:
    """So many runs that are due, none of which has had a session."""
    names = [f"run{number:05}" for number in range(rows)]
    plain = {
        "number": 1, "folder": "runs/x/1", "workdir": "/w", "checkpoints": "runs/x/1/checkpoints", "plan": "", "overrides": [],
        "plan_hash": "h", "state": RunState.ACTIVE, "why": "", "created_at": NOW, "pool": "", "machine": "",
    }  # fmt: skip
    with engine.begin() as connection:
        connection.execute(insert(Run), [{**plain, "id": name, "name": name} for name in names])
        due = {
            "due_at": NOW - timedelta(seconds=60), "reason": Reason.QUEUED, "state": ResumeState.DUE, "created_at": NOW,
            "ranks": 1, "priority": 0,
        }  # fmt: skip
        connection.execute(insert(Resume), [{**due, "run_id": name} for name in names])
        connection.exec_driver_sql("ANALYZE")


def claim_for(url: str, process: int, seconds: float) -> None:
    """Claim with THREADS machines for so long; prints the rows that they got as JSON."""
    claimed: list[int] = []
    start = threading.Barrier(THREADS + 1)

    def claim(number: int) -> None:
        name = f"m{process:02}-{number:02}"
        engine = open_fleet(Fleet(url, name), Path("/nowhere", name))
        me, devices = Claimant(os.getpid(), number, "b", name), LocalDevices(Path("/nowhere"), SystemClock(), 10**6)
        reachable = Reachable(frozenset({name}), frozenset({name}))
        start.wait()
        until_s = time.monotonic() + seconds
        while time.monotonic() < until_s:
            if entry := run_selection.claim_next(engine, devices, me, datetime.now(UTC), reachable):
                claimed.append(entry.resume.id)
        engine.dispose()

    threads = [threading.Thread(target=claim, args=(number,)) for number in range(THREADS)]
    for thread in threads:
        thread.start()
    start.wait()
    print("ready", flush=True)
    for thread in threads:
        thread.join()
    print(json.dumps(claimed), flush=True)


def measure_claims(server: PostgresServer, rows: int, seconds: float) -> dict[str, Any]:
    url = server.new_database()
    engine = open_fleet(Fleet(url, "filler"), Path("/nowhere"))
    fill_queue(engine, rows)
    engine.dispose()
    command = [sys.executable, str(HERE / "fleet.py"), "--claim", url, "--seconds", str(seconds)]
    several = [
        subprocess.Popen([*command, "--process", str(number)], stdout=subprocess.PIPE, text=True)
        for number in range(PROCESSES)
    ]
    outputs = [process.communicate(timeout=seconds + 300)[0].splitlines() for process in several]
    claimed = [row for lines in outputs for row in json.loads(lines[-1])]
    return {
        "claimers": PROCESSES * THREADS, "rows": rows, "claimed": len(claimed), "twice": len(claimed) - len(set(claimed)),
        "claims_per_s": round(len(claimed) / seconds, 1),
    }  # fmt: skip


def fill_run(engine: Engine, home: Path, events: int) -> None:
    run = runs.create(
        engine, id="r", name="ink", number=1, folder=f"{home}/runs/ink/1", workdir="/w",
        checkpoints=f"{home}/runs/ink/1/checkpoints", plan='name = "ink"\n[[stage]]\nname = "train"\nentry = "x.py"\n',
        overrides=[], plan_hash="h", stages=["train"],
    )  # fmt: skip
    row = sessions.open_session(engine, run.id, boot_id="b", stage="train", step=40, steps_total=90)
    for number in range(events):
        sessions.add_event(engine, run.id, EventKind.EPOCH, {"step": number}, row.id)
    engine.dispose()


def measure_status(server: PostgresServer, repeats: int) -> dict[str, Any]:
    """Median time of `kgorch status` on each database, in turns, and their ratio."""
    with tempfile.TemporaryDirectory() as folder:
        homes = {kind: Path(folder, kind) for kind in ("sqlite", "postgresql")}
        url = server.new_database()
        fill_run(open_database(homes["sqlite"]), homes["sqlite"], 300)
        fill_run(open_fleet(Fleet(url, "here"), homes["postgresql"]), homes["postgresql"], 300)
        times: dict[str, list[float]] = {kind: [] for kind in homes}
        for _ in range(repeats):
            for kind, home in homes.items():
                home.mkdir(exist_ok=True)
                environment = os.environ | {"KGORCH_HOME": str(home)}
                if kind == "postgresql":
                    environment |= {"KGORCH_DATABASE": url, "KGORCH_MACHINE": "here"}
                began_s = time.perf_counter()
                command = [sys.executable, "-m", "kgorch.cli", "status", "ink"]
                subprocess.run(command, env=environment, check=True, stdout=subprocess.DEVNULL)
                times[kind].append(time.perf_counter() - began_s)
    medians = {kind: statistics.median(found) for kind, found in times.items()}
    ratio = statistics.median(ours / theirs for ours, theirs in zip(times["postgresql"], times["sqlite"], strict=True))
    return {f"{kind}_s": round(value, 3) for kind, value in medians.items()} | {"ratio": round(ratio, 2)}


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="1,000 rows and 5 repeats")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--claim", help=argparse.SUPPRESS)
    parser.add_argument("--process", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--seconds", type=float, default=20.0, help=argparse.SUPPRESS)
    options = parser.parse_args(words)
    if options.claim:
        claim_for(options.claim, options.process, options.seconds)
        return
    os.environ.pop("KGORCH_DATABASE", None)
    server = PostgresServer(durable=True)
    try:
        figures = {
            "claims": measure_claims(server, 1_000 if options.quick else 10_000, 3.0 if options.quick else 20.0),
            "status": measure_status(server, 5 if options.quick else 15),
        }
    finally:
        server.remove()
    print(json.dumps(figures, indent=1))
    if options.json:
        options.json.write_text(json.dumps(figures, indent=1) + "\n")
    assert figures["claims"]["twice"] == 0, "a row went to two claimers"


if __name__ == "__main__":
    main()
