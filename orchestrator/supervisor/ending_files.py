"""How a session ended, in a file of the run's folder: where the database could not be written before the supervisor had to go.

Who settles the session later takes the end from here: a person's stop stays a stop, and nothing is queued twice.
"""

from __future__ import annotations

import contextlib
import json
from datetime import datetime
from pathlib import Path
from typing import Any

from kgorch.system.attempt_files import write_json

INSTANTS = ("due_at", "wall_at")
NEEDED = frozenset({"kind", "phase", "facts"})
KNOWN = NEEDED | {
    "resume", "closes", "finishes", "adjustment",
    "reason", "why", "save_lead_s", "wall_boottime_s", "wall_kind", "wall_at", "epoch", "step", "samples",
}  # fmt: skip
"""What an entry holds; one that another version wrote with more is none that can be taken."""

_NAME = "session-{}.ended.json"


def write(folder: Path, number: int, entry: dict[str, Any]) -> None:
    """`entry`: as kgorch.db.sessions.record takes it. Raises: OSError."""
    write_json(_path(folder, number), json.loads(json.dumps(entry, default=_text)))


def read(folder: Path, number: int) -> dict[str, Any] | None:
    """None where the session left no such file, or one that nobody wrote whole."""
    try:
        entry = json.loads(_path(folder, number).read_text())
        for part in (entry, entry.get("resume") or {}):
            for name in INSTANTS:
                if part.get(name):
                    part[name] = datetime.fromisoformat(part[name])
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None
    return entry if isinstance(entry, dict) and NEEDED <= entry.keys() <= KNOWN else None


def newest(folder: Path) -> tuple[int, dict[str, Any] | None]:
    """Number of the newest session that left such a file, and what it holds."""
    before, after = _NAME.split("{}")
    texts = [path.name.removeprefix(before).removesuffix(after) for path in folder.glob(_NAME.format("*"))]
    number = max((int(text) for text in texts if text.isdecimal()), default=0)
    return number, read(folder, number)


def forget(folder: Path, number: int) -> None:
    with contextlib.suppress(OSError):
        _path(folder, number).unlink()


def _path(folder: Path, number: int) -> Path:
    return folder / _NAME.format(number)


def _text(value: Any) -> str:
    return value.isoformat() if isinstance(value, datetime) else str(value)
