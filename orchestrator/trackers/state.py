"""How far a tracker was sent, kept in the run's folder: `trackers/NAME.json`, written by the tracker's process alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

from kgorch.system import files
from kgorch.trackers.feed import Cursor

MAX_BYTES = 4 << 20
"""Of the file: some 1,000 tags with long names take 0.3 MB."""


class TrackerState(NamedTuple):
    """How far a tracker was sent, and by which reference it knows the run."""

    reference: str
    cursor: Cursor


def load(path: Path) -> TrackerState | None:
    """None where there is no such file, or none that kgorch has written."""
    try:
        with open(path, "rb") as file:
            document: Any = json.loads(file.read(MAX_BYTES))
        steps = [{str(tag): int(step) for tag, step in document[name].items()} for name in ("tags", "stages")]
        return TrackerState(str(document["reference"]), Cursor(*steps))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None


def store(path: Path, state: TrackerState) -> None:
    """Raises: OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    document = {"reference": state.reference, "tags": state.cursor.tags, "stages": state.cursor.stages}
    files.write(path, json.dumps(document).encode(), mode=0o600)
