"""What a session leaves in its output: checkpoints that are whole, one database file, nothing that a place may not store."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sqlite3
import stat
import subprocess
import time
from pathlib import Path
from typing import Any, Iterator

from kgorch.remote.session.inputs import checkpoint_step


def checkpoints(home: Path, run_id: str) -> list[dict[str, Any]]:
    """Verified checkpoints of the run that are whole, in the order of training: stage, step, folder, final, best.

    Without a database that can be read those count whose manifests and sizes are right: a save takes its name when it is whole.
    """
    try:
        columns = "c.stage, c.step, c.path, c.final, c.best"
        query = (
            f"select {columns} from checkpoints c left join stages s on s.run_id = c.run_id and s.name = c.stage"
            " where c.run_id = ? and c.state = 'verified' order by s.position, c.step, c.final"
        )
        rows = [(stage, home / path, final, best) for stage, _, path, final, best in query_rows(home, query, run_id)]
    except (sqlite3.Error, OSError):
        folders = sorted(home.glob("runs/*/*/checkpoints/*/step-*"), key=lambda path: path.stat().st_mtime)
        rows = [(path.parent.name, path, path.name.endswith("-final"), "") for path in folders if "." not in path.name]
    found = []
    for stage, folder, final, best in rows:
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            step = checkpoint_step(folder, run_id)
            found.append({"stage": stage, "step": step, "folder": folder, "final": bool(final), "best": bool(best)})
    return found


def query_rows(home: Path, query: str, *values: str) -> list[Any]:
    """Raises: sqlite3.Error."""
    with contextlib.closing(
        sqlite3.connect((home / "kgorch.db").as_uri() + "?mode=ro", uri=True, timeout=5)
    ) as database:
        return database.execute(query, values).fetchall()


def is_finished(home: Path, run_id: str) -> bool:
    try:
        return query_rows(home, "select state from runs where id = ?", run_id) == [("finished",)]
    except (sqlite3.Error, OSError):
        return False


def prune(home: Path, every: list[dict[str, Any]], most_bytes: int, output: Path) -> None:
    """Keep the newest checkpoint, the best, and those that close a stage; below `most_bytes` in all, the newest at any price."""
    if not every:
        return  # nothing is known to be whole: nothing is deleted
    *others, newest = every
    retained = [item for item in others if item["final"] or item["best"]]
    folders = {newest["folder"], *(item["folder"] for item in retained)}
    for path in home.glob("runs/*/*/checkpoints/*/step-*"):
        if path not in folders:
            shutil.rmtree(path, ignore_errors=True)
    # what the next session needs least goes first
    victims = [*sorted(home.glob("runs/*/*/attempts/*")), *(item["folder"] for item in retained if not item["final"])]
    for victim in victims:
        if size_of(output) <= most_bytes:
            return
        shutil.rmtree(victim, ignore_errors=True)


def tidy(output: Path, home: Path) -> None:
    """Delete links, sockets and pipes, since nobody knows how a place stores them, and kgorch's own lock files."""
    for path in below(output):
        with contextlib.suppress(OSError):
            kind = path.lstat().st_mode
            is_lock = home in path.parents and (path.name == "lock" or path.suffix == ".lock")
            if is_lock or not (stat.S_ISREG(kind) or stat.S_ISDIR(kind)):
                path.unlink()


def close_database(home: Path) -> None:
    """Move the write-ahead log into the database: one file is whole wherever it is copied."""
    if (home / "kgorch.db").exists():
        with contextlib.closing(sqlite3.connect(home / "kgorch.db", timeout=30)) as database:
            database.execute("pragma wal_checkpoint(truncate)")
            database.execute("pragma journal_mode = delete")


def below(folder: Path) -> Iterator[Path]:
    """Everything below it but links' targets."""
    for at, folders, names in os.walk(folder):
        yield from (Path(at, name) for name in names)
        yield from (Path(at, name) for name in folders if Path(at, name).is_symlink())


def size_of(folder: Path) -> int:
    total = 0
    for path in below(folder):
        with contextlib.suppress(OSError):
            total += path.lstat().st_size
    return total


def gpu_names() -> list[str]:
    try:
        words = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
        done = subprocess.run(words, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.SubprocessError):
        return []
    return (
        [line.strip()[:100] for line in done.stdout.splitlines() if line.strip()][:64] if done.returncode == 0 else []
    )


def kill_all_of(home: Path, within_s: float = 10.0) -> None:
    """SIGKILL to every process of this state folder: ranks outlive their supervisor, and nothing may write from here on."""
    needle = b"KGORCH_HOME=" + os.fsencode(home) + b"\0"
    until = time.monotonic() + within_s
    while time.monotonic() < until:
        living = [int(path.name) for path in Path("/proc").glob("[0-9]*") if is_of(path, needle)]
        for pid in living:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        if not living:
            return
        time.sleep(0.1)


def is_of(process: Path, needle: bytes) -> bool:
    try:
        return int(process.name) != os.getpid() and needle in (process / "environ").read_bytes() + b"\0"
    except OSError:
        return False
