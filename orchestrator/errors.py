"""Errors for the user, each with its next step, and the exit codes of the command line.

Any other exception that reaches the command line is a bug of kgorch and shows a traceback.
"""

from __future__ import annotations

import difflib
import errno
from collections.abc import Iterable
from enum import IntEnum

NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
"""Errors of a full disk, or of a user's share of one."""

UNWRITABLE = (*NO_ROOM, errno.EROFS, errno.EIO)
"""Errors of a full or failing disk, which may pass. After another one (the folder was deleted) a second try gains nothing."""


class ExitCode(IntEnum):
    """Exit statuses of the verbs, which scripts may rely on. docs/reference/exit-codes.md is written from the comments."""

    DONE = 0  # the run is finished, or the verb did what it says
    BUG = 1  # an error of kgorch itself; only this one shows a traceback
    MISTAKE = 2  # a mistake in plan, option or path; also what click exits with for wrong options
    SUSPENDED = 10  # the session is over, and a resume is queued
    QUOTA_SPENT = 11  # the quota's hours are spent; a resume is queued for their renewal
    FAILED = 20  # training failed and will not be retried; the first cause is printed


class KgorchError(Exception):
    """An error for the user.

    Attributes:
        what: what went wrong, and where.
        facts: one for each line: what was expected, what was found.
        next_step: what to type or change.
        code: exit code of the verb.
    """

    code = ExitCode.MISTAKE

    def __init__(self, what: str, *facts: str, next_step: str | None = None) -> None:
        super().__init__(what)
        self.what, self.facts, self.next_step = what, facts, next_step

    def __str__(self) -> str:
        lines = [self.what, *(f"  {fact}" for fact in self.facts)]
        return "\n".join(lines + ([f"next: {self.next_step}"] if self.next_step else []))


class PlanError(KgorchError):
    """The plan is not valid."""


class ConfigError(KgorchError):
    """The user's configuration file is not valid."""


class NotFound(KgorchError):
    """There is no run, session or checkpoint of that name."""


class StateUnusable(KgorchError):
    """The state folder or its database cannot be read or written."""


class CheckpointBroken(KgorchError):
    """A checkpoint does not match its manifest, or has no valid manifest."""


class CheckpointUnreadable(KgorchError):
    """A checkpoint that may be whole and cannot be read now: the disk fails, or a newer kgorch wrote it."""


class CannotRestore(KgorchError):
    """A checkpoint is whole and does not fit the objects that the script tracks."""


class ReplayFailed(KgorchError):
    """Steps that were repeated from the same checkpoint gave another result, or failed."""

    code = ExitCode.FAILED


class WeightsRefused(KgorchError):
    """A file of initial weights cannot be read without running code from it, or does not fit the model."""


def nearest(word: str, choices: Iterable[str], *, cutoff: float = 0.5) -> str:
    """A hint for a mistyped word: ` (did you mean 'wall'?)`; empty if no choice is similar.

    Args:
        cutoff: similarity from 0 to 1 that a choice needs; 1 for the same word only.
    """
    # The length is bounded because the comparison takes time with the product of both lengths.
    near = difflib.get_close_matches(word[:200], list(choices), n=1, cutoff=cutoff)
    return f" (did you mean '{near[0]}'?)" if near else ""
