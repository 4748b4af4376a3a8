"""Plain facts out of rows, folders and processes of a world, for invariants.py.

By SQL of our own, on connections that are closed at once: they are asked often, and a database that is lost under a connection of
ours would be answered out of what is no more.
"""

from __future__ import annotations

import hashlib
import json
import math
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import psutil
import psycopg
from harness import processes_of
from safetensors import safe_open

from kgorch.checkpoint.manifest import shard_names
from kgorch.checkpoint.verify import verify_checkpoint
from kgorch.errors import KgorchError
from kgorch.system import process_identity as identities
from storm.invariants import Charged, Checkpoint, Process
from storm.programs import STAGES

FURTHER = {name: 1_000_000 * before for before, name in enumerate(STAGES)}
"""What is added to a step of a stage, so that one of a later stage is a later one."""

FIGURE = "figure"
"""What programs/weathers.py reports of its weights, and how it is reckoned: figure_of there, _read_back here."""

AT_A_BEGIN = "skipped"
"""What the workloads report when they begin, so also wherever they go on."""

ROLES = {
    "kgorch.launch.shim": "shim",
    "kgorch.snapshots.keeper": "keeper",
    "kgorch.worker.elastic_agent": "torchrun",
    "kgorch.worker.standby_server": "standby",
    "kgorch.nodes.agent": "agent",
}

HELPER = ["sleep", "98765"]
"""What each rank starts (programs/weathered.py)."""


def role_of(process: psutil.Process) -> tuple[str, str]:
    """What a process of a world is, and which rank. A child that a rank has forked has its command line: `loader`."""
    try:
        words = process.cmdline()
        role = _module_role(words)
        if role == "torchrun" and (parent := process.parent()) and _module_role(parent.cmdline()) == "torchrun":
            grandparent = parent.parent()
            if grandparent and _module_role(grandparent.cmdline()) == "torchrun":
                return "loader", ""
            return "rank", str(identities.rank_of(process.pid))
        if words == HELPER:
            return "helper", process.environ().get("RANK", "")
        if "kgorch.cli" in words:
            verb = words[words.index("kgorch.cli") + 1 :][:1]
            if verb in (["start"], ["resume"]) and "--queue" not in words:
                return "supervisor", ""
            return ("daemon" if verb == ["daemon"] else "command"), ""
        return role or "other", ""
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return "gone", ""


def _module_role(words: list[str]) -> str:
    """By the first `-m`: forked ranks and loading processes have the command line of torchrun."""
    return ROLES.get(words[words.index("-m") + 1], "") if "-m" in words[:-1] else ""


def processes(home: Path) -> Iterator[Process]:
    for process in processes_of(home):
        role, rank = role_of(process)
        if role != "gone":
            yield Process(process.pid, role, rank or node_of(process))


def node_of(process: psutil.Process) -> str:
    """The node that is played on this machine; empty for the first one (two_nodes.py)."""
    try:
        return process.environ().get("KGORCH_TEST_NODE", "")
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return ""


class Standing(NamedTuple):
    """The newest run's newest session, as its rows tell; read often, so not by a verb."""

    state: str
    phase: str
    stage: str
    step: int
    supervised: bool


def standing(home: Path) -> Standing | None:
    found = _rows(
        home,
        "SELECT r.state, s.phase, s.stage, s.step, s.supervisor_pid, s.supervisor_started_ticks, s.boot_id FROM runs r"
        " JOIN sessions s ON s.run_id = r.id ORDER BY r.number DESC, s.number DESC LIMIT 1",
    )
    if not found:
        return None
    state, phase, stage, step, pid, ticks, boot = found[0]
    return Standing(state, phase, stage, step + FURTHER.get(stage, 0), identities.is_alive(pid, ticks, boot))


NEWEST = "run_id = (SELECT id FROM runs ORDER BY number DESC LIMIT 1)"


def history(home: Path) -> list[dict[str, Any]]:
    """Sessions of the newest run with their attempts, oldest first."""
    found = {
        session: {"number": number, "phase": phase, "why": why, "attempts": []}
        for session, number, phase, why in _rows(
            home, f"SELECT id, number, phase, why FROM sessions WHERE {NEWEST} ORDER BY number"
        )
    }
    told = _rows(home, "SELECT session_id, number, outcome, cause FROM attempts ORDER BY id")
    for session, number, outcome, cause in told:
        if session in found:
            found[session]["attempts"].append({"number": number, "outcome": outcome, "cause": cause})
    return list(found.values())


def events(home: Path) -> list[dict[str, Any]]:
    """Of the newest run, oldest first."""
    rows = _rows(home, f"SELECT at, kind, phase, facts FROM events WHERE {NEWEST} ORDER BY id")
    found = [{"at": at, "kind": kind, "phase": phase, "facts": json.loads(facts)} for at, kind, phase, facts in rows]
    for facts in (item["facts"] for item in found if item["kind"] == "launched"):
        facts["step"] = facts.get("step", 0) + FURTHER.get(facts.get("stage", ""), 0)
    return found


def rungs(home: Path) -> list[str]:
    return [rung for (rung,) in _rows(home, f"SELECT rung FROM rungs WHERE {NEWEST} ORDER BY id")]


def waits_for_a_person(home: Path) -> bool:
    """Failed, stopped by a person, or unknown: nobody else goes on with it."""
    found = _rows(
        home,
        "SELECT state, (SELECT count(*) FROM resumes WHERE run_id = runs.id AND state IN ('due', 'claimed')"
        " AND due_at IS NOT NULL) FROM runs ORDER BY number DESC LIMIT 1",
    )
    over = {"finished", "suspended", "cut_off", "failed"}
    return (
        not found
        or found[0][0] == "failed"
        or (found[0][1] == 0 and ((now := standing(home)) is None or now.phase in over))
    )


class Row(NamedTuple):
    path: str
    step: int
    state: str
    final: bool
    why: str
    stage: str
    figure: float | None


def checkpoint_rows(home: Path) -> list[Row]:
    query = "SELECT path, stage, step, state, final, why, metrics, measured FROM checkpoints ORDER BY id"
    return [
        Row(
            str(home / path),
            step + FURTHER.get(stage, 0),
            state,
            bool(final),
            why,
            stage,
            _figure(step, metrics, measured),
        )
        for path, stage, step, state, final, why, metrics, measured in _rows(home, query)
    ]


def _figure(step: int, metrics: str, measured: str) -> float | None:
    """That these weights, of this step, were measured at."""
    return json.loads(metrics).get(FIGURE) if json.loads(measured).get(FIGURE) == step else None


def checkpoints(home: Path) -> Iterator[Checkpoint]:
    """All that have a row, those on disk read back."""
    for row in checkpoint_rows(home):
        folder = Path(row.path)
        if row.state != "verified":
            yield Checkpoint(
                row.path, row.step, row.state, folder.is_dir(), row.final, row.why, stage=row.stage, figure=row.figure
            )
            continue
        try:
            yield _read_back(folder, row)
        except (KgorchError, OSError) as error:
            yield Checkpoint(row.path, row.step, row.state, False, row.final, f"{type(error).__name__}: {error}"[:300])


def is_whole(folder: Path) -> bool:
    try:
        verify_checkpoint(folder)
    except (KgorchError, OSError):
        return False
    return True


def _read_back(folder: Path, row: Row) -> Checkpoint:
    """With what its manifest says of its weights: it may know of a measurement that the row does not.

    Raises: KgorchError, OSError.
    """
    described, counts, squares = verify_checkpoint(folder), [], 0.0
    for name in shard_names(described):
        with safe_open(folder / name, "numpy") as shard:
            names = shard.keys()
            counts += [shard.get_tensor(name) for name in names if name == "seen.counts"]
            weights = [name for name in names if name.startswith("model.") and name.endswith((".weight", ".bias"))]
            squares += sum(float((shard.get_tensor(name).astype(np.float64) ** 2).sum()) for name in weights)
    seen = sum(counts) if counts else None
    is_measured = described.measured.get(FIGURE) == described.step
    return Checkpoint(
        row.path, row.step, row.state, True, row.final, "", described.position.samples,
        None if seen is None else int(seen.sum()), 0 if seen is None else int(seen.max()), row.stage,
        described.metrics[FIGURE] if is_measured else None, math.sin(1e3 * math.sqrt(squares)) if is_measured else None,
    )  # fmt: skip


def charges(home: Path) -> Iterator[Charged]:
    """Of sessions that are over."""
    told = _rows(
        home,
        "SELECT s.number, s.started_at, s.ended_at, s.phase, count(c.id), coalesce(sum(c.used_s), 0.0), s.heartbeat_at,"
        " (SELECT count(*) FROM attempts a WHERE a.session_id = s.id) FROM sessions s"
        " LEFT JOIN charges c ON c.session_id = s.id GROUP BY s.id",
    )
    for number, started_at, ended_at, phase, rows, used_s, heartbeat_at, launches in told:
        until = (
            heartbeat_at if phase == "cut_off" and heartbeat_at else ended_at
        )  # what was cut off ended when it was heard last
        if until and ended_at:
            lasted_s = (datetime.fromisoformat(until) - datetime.fromisoformat(started_at)).total_seconds()
            yield Charged(number, rows, used_s, lasted_s, launches)


DATABASES: dict[Path, str] = {}
"""By the state folder: the PostgreSQL, as libpq names it, of a run that is one of a fleet."""


def _rows(home: Path, query: str) -> list[tuple[Any, ...]]:
    if home in DATABASES:
        return _rows_of_fleet(DATABASES[home], query)
    try:
        with closing(sqlite3.connect(f"file:{home}/kgorch.db?mode=ro", uri=True, timeout=3)) as database:
            return database.execute(query).fetchall()
    except sqlite3.Error:
        return []


def _rows_of_fleet(database: str, query: str) -> list[tuple[Any, ...]]:
    """As SQLite gives them: documents and instants as text."""
    try:
        with psycopg.connect(database, connect_timeout=3) as connection:
            rows = connection.execute(query).fetchall()
    except psycopg.Error:
        return []
    return [tuple(value.isoformat() if isinstance(value, datetime) else value for value in row) for row in rows]


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def metrics(document: dict[str, Any]) -> dict[str, float]:
    """Of what `kgorch metrics --json` says, each epoch's mean of each metric over its steps, and how many steps a loss is of."""
    found: dict[str, list[float]] = {}
    for point in document["points"]:
        weight = max(point["steps"], 1)
        for name, value in point["values"].items():
            if name == AT_A_BEGIN:
                continue
            total = found.setdefault(f"{point['stage']}: {name} of epoch {point['epoch']}", [0.0, 0.0])
            total[0] += weight * (math.nan if value is None else value)
            total[1] += weight
    # a value of between two epochs stands beside the last mean, whose steps a save has divided: each step reports a loss alone
    counts = {f"{key}, steps": total[1] for key, total in found.items() if ": loss of" in key}
    return {key: total[0] / total[1] for key, total in found.items()} | counts
