"""How a foreign program is asked to stop, and killed when it goes on."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kgorch.system.clock import boottime_s
from kgorch.worker.foreign.program import Program


def clear_file(root: Path, how: Mapping[str, Any]) -> None:
    """Remove the file of a stop, before a start and after an end: the next program would end at once."""
    if how.get("file"):
        with contextlib.suppress(OSError):
            (root / how["file"]).unlink()


class ProgramStop:
    """The stop of one program.

    Args:
        how: `stop` of LaunchSpec.foreign: `signal`, its name, or `file`, a path below `root`, or `kill`.

    Attributes:
        asked_s: instant at which it was asked; 0 before.
        was_killed: it went on, and was killed.
    """

    def __init__(self, program: Program, root: Path, how: Mapping[str, Any]) -> None:
        self._program, self._how = program, how
        self._file = root / how["file"] if how.get("file") else None
        self._asked: set[int] = set()
        self.asked_s, self.was_killed = 0.0, False

    @property
    def means(self) -> str:
        """What asks it, in words."""
        if self._file:
            return f"the file {self._how['file']}"
        return str(self._how.get("signal") or "SIGKILL")

    def drive(self, kill_at_s: float) -> None:
        """Ask, or kill at that instant; to be called until nothing of the program lives."""
        first = not self.asked_s
        self.asked_s = self.asked_s or boottime_s()
        if self._how.get("kill") or boottime_s() >= kill_at_s:
            self.was_killed = True
            self._program.kill()
        elif self._file and first:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            os.close(os.open(self._file, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW, 0o600))
        elif self._how.get("signal") and (first or self._program.status is not None):
            # Its first process may end alone, as a shell does: what it leaves behind is asked in its turn. Once each: a second
            # signal makes many programs end without a save.
            number = signal.Signals[self._how["signal"]]
            for pid in self._program.roots():
                if pid not in self._asked:
                    self._asked.add(pid)
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, number)
