"""How a session ends: the exceptions that end a script, and the step of the stage's final checkpoint.

Does not import PyTorch: entry.py needs it when there may be no memory left to load anything.
"""

from __future__ import annotations

final_step: int | None = None
"""Step of the stage's final checkpoint, once it is on disk; entry.py puts it in the record of how this rank ended."""


class SessionOver(SystemExit):
    """Ends the script at a step boundary with exit status 0. Scripts must not catch it.

    Attributes:
        saved: whether the last save is on disk.
    """

    def __init__(self, *, saved: bool) -> None:
        super().__init__(0)
        self.saved = saved


class SaveLost(RuntimeError):
    """The final save of a stage has failed."""
