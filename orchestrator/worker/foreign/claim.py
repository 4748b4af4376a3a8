"""Which run the checkpoints at a place belong to: a place that two runs use is claimed by the one that runs there.

The claim is a file in the state folder, named after the place and locked while a program runs there. It remembers what lay
there when the run came: checkpoints of another run, or of the same program started by hand. They are not this run's, are never
copied, and never handed back. And it remembers what the program was handed: after a kill of everything only that, and not what
the next start resumes from, tells whether a checkpoint that nobody has copied is progress.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from kgorch.core.checkpoint.foreign_checkpoint import MAX_CANDIDATES, ForeignCandidate, Handed
from kgorch.errors import KgorchError
from kgorch.protocol.launch_spec import LaunchSpec
from kgorch.system import files

MAX_BYTES = 1 << 20


class Claim:
    """The claim of one stage of a run on the place of its checkpoints.

    Attributes:
        before: signatures of the checkpoints that lay there when this run came.
        is_new: another run was there last, or none.
        taken_ns: time of the newest checkpoint that was copied from there; 0 for none.
        handed: what the program that ran there last was handed.
        complete: signature of the checkpoint that it had left when it ended by itself; empty for none.
    """

    def __init__(self, launch: LaunchSpec, folder: Path, pattern: str) -> None:
        """Raises: KgorchError where another run uses the place now; OSError."""
        place = os.path.realpath(launch.workdir) + "/" + pattern
        folder.mkdir(parents=True, exist_ok=True)
        self._path = folder / f"{hashlib.blake2b(os.fsencode(place), digest_size=16).hexdigest()}.json"
        self._owner = {"place": place, "run": launch.run, "run_id": launch.run_id, "stage": launch.stage}
        self._lock = os.open(
            self._path.with_suffix(".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600
        )
        document = self._read()
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._lock)
            raise KgorchError(
                f"the checkpoints at {pattern!r} in {launch.workdir} are written by run {document.get('run', '?')!r} now",
                "expected a place of its own for each run",
                next_step="give the program another output folder, and stage.foreign.checkpoint the same",
            ) from None
        mine = all(document.get(key) == value for key, value in self._owner.items())
        before, taken_ns = document.get("before"), document.get("taken_ns")
        self.is_new = not (mine and isinstance(before, list) and type(taken_ns) is int)
        self.before = frozenset[str]() if self.is_new else frozenset(map(str, before or ()))
        self.taken_ns: int = 0 if self.is_new else (taken_ns or 0)
        self.handed = Handed() if self.is_new else _handed(document.get("handed"))
        self.complete = "" if self.is_new else str(document.get("complete", ""))

    def take(self, found: Iterable[ForeignCandidate]) -> None:
        """Make the place this run's, whatever lies there being another's. Raises: OSError."""
        self.before, self.taken_ns, self.handed = frozenset(candidate.signature for candidate in found), 0, Handed()
        self.complete = ""
        self._write()

    def note_taken(self, newest_ns: int, handed: Handed) -> None:
        """Remember the time of a checkpoint that was copied or handed back, and what the program was handed. Raises: OSError."""
        self.taken_ns, self.handed = max(self.taken_ns, newest_ns), handed
        self._write()

    def note_complete(self, signature: str) -> None:
        """Remember the result of a program that has ended by itself, should it not be copied now. Raises: OSError."""
        self.complete = signature
        self._write()

    def release(self) -> None:
        """Give the place up; what is remembered of it stays."""
        os.close(self._lock)

    def _write(self) -> None:
        known = {"taken_ns": self.taken_ns, "handed": self.handed._asdict(), "complete": self.complete}
        document = self._owner | {"before": sorted(self.before)[:MAX_CANDIDATES]} | known
        files.write(self._path, json.dumps(document).encode())

    def _read(self) -> Mapping[str, Any]:
        try:
            content = self._path.read_bytes()[:MAX_BYTES]
            document = json.loads(content)
        except (OSError, ValueError):
            return {}
        return document if isinstance(document, dict) else {}


def _handed(value: Any) -> Handed:
    """Of a document; nothing for what an earlier version has written, or somebody else."""
    try:
        history = [(int(at_ns), int(step)) for at_ns, step in value["history"]]
        return Handed(str(value["path"]), int(value["step"]), history)
    except (TypeError, ValueError, LookupError, OverflowError):
        return Handed()
