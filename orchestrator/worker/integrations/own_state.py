"""Where a script around Accelerate begins by itself: at a state of its own that it loads, or at its first epoch."""

from __future__ import annotations

from pathlib import Path

from kgorch.errors import CannotRestore
from kgorch.worker.checkpoint.resumed_state import ResumedState


class OwnState:
    """A script that begins at a state of its own leaves out the epochs before it: it has to be the same ones in each session.

    Attributes:
        name: of the folder that the script has loaded before its first iteration (`Accelerator.load_state`); None for none.
    """

    def __init__(self, resumed: ResumedState) -> None:
        self._resumed = resumed
        self.name: str | None = None

    def note(self, folder: str) -> None:
        """The script loads a state. Raises: see `check`."""
        self.name = Path(folder).resolve().name
        self.check()

    def check(self) -> None:
        """Raises: CannotRestore where the run has begun elsewhere."""
        first = self._resumed.get("own_state", self.name)  # earlier versions did not know it
        if not self._resumed or self.name == first:
            return
        how = f"name {first!r} in its flag" if first else "leave out its flag"
        raise CannotRestore(
            f"the script begins {_beginning(self.name)}, and this run has begun {_beginning(first)}",
            f"kgorch resumes at step {self._resumed.step} by itself, and counts the epochs from where the run has begun",
            next_step=f"have it begin {_beginning(first)}: {how} for that (--resume_from_checkpoint)",
        )


def _beginning(own_state: str | None) -> str:
    return f"at its own state {own_state!r}" if own_state else "at its first epoch"
