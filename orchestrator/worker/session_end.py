"""How a session ends: the exceptions that end a script, what is done then, and the step of the stage's final checkpoint.

Does not import PyTorch before a session is closed: entry.py needs it when there may be no memory left to load anything.
"""

from __future__ import annotations

import atexit
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

from kgorch.errors import CannotRestore

if TYPE_CHECKING:
    from kgorch.worker.own_loop import OwnLoop
    from kgorch.worker.session_state import SessionState
    from kgorch.worker.supervision import Supervision

_end_of_session: Callable[[BaseException | None], None] | None = None

empty_epoch: int | None = None
"""Number from 0 of the newest epoch, where earlier sessions have done all of its steps and this one has none yet."""

final_step: int | None = None
"""Step of the stage's final checkpoint, once it is on disk; entry.py puts it in the record of how this rank ended."""


class SessionOver(SystemExit):
    """Ends the script at a step boundary with exit status 0. Scripts must not catch it.

    Attributes:
        is_saved: the last save is on disk.
    """

    def __init__(self, *, is_saved: bool) -> None:
        super().__init__(0)
        self.is_saved = is_saved


class SaveLost(RuntimeError):
    """The final save of a stage has failed. `errno`: of the system's error; 0 for another one."""

    def __init__(self, message: str, errno: int) -> None:
        super().__init__(message)
        self.errno = errno


def opened(end: Callable[[BaseException | None], None]) -> None:
    """A session is open: `end` ends it, given the error that ended the script, or None.

    entry.py calls it after the script; a script that runs alone ends it at exit.
    """
    global _end_of_session
    if _end_of_session is None:
        atexit.register(_end_at_exit)
    _end_of_session = end


def is_open() -> bool:
    """Whether a session is open."""
    return _end_of_session is not None


def end(error: BaseException | None) -> None:
    """End the open session, if there is one."""
    global _end_of_session
    ending, _end_of_session = _end_of_session, None
    if ending:
        ending(error)


def close(
    error: BaseException | None,
    state: SessionState,
    own_loop: OwnLoop,
    supervision: Supervision | None,
    *,
    leaves_group: bool,
    check: Callable[[], None] = lambda: None,
) -> None:
    """Count the last step, save the final state of a stage that is done, and close the connections.

    Args:
        error: what ended the script; None where it came to its end. An exception is given the step and the place where it was
            raised, for the record of how this rank ended (entry.py).
        supervision: None when the script runs alone.
        leaves_group: no other library uses the process group afterwards.
        check: see Session.at_end.

    Raises:
        See Session.end.
    """
    from kgorch.worker.ranks import process_group  # a session is open, so PyTorch is loaded

    over, place = isinstance(error, SessionOver), state.marker.at_failure(state.tracked.modules())
    finished = error is None or (isinstance(error, SystemExit) and error.code in (None, 0) and not over)
    if finished:
        try:
            check()
            own_loop.close()
        except (SessionOver, CannotRestore) as stop:  # the wall came with the last step
            close(stop, state, own_loop, supervision, leaves_group=leaves_group)
            raise
    if supervision:
        supervision.leave(finished=finished, over=over)
    if isinstance(error, Exception):
        error.at_step = state.position.step  # type: ignore[attr-defined]
        error.at_place = place  # type: ignore[attr-defined]
    if leaves_group and (finished or over):
        process_group.leave(state.member)


def _end_at_exit() -> None:
    end(SystemExit(1) if hasattr(sys, "last_value") else None)
