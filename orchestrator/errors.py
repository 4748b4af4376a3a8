"""Errors for the user, each with its next step, and the exit codes of the command line.

Any other exception that reaches the command line is a bug of kgorch and shows a traceback.
"""

from __future__ import annotations

import difflib
import errno
import re
import sys
from collections.abc import Iterable
from enum import IntEnum

from kgorch.core.error_codes import code_of_module

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
    NO_DATABASE = 12  # the database is locked, its disk full or its server away: a later try may succeed
    FAILED = 20  # training failed and will not be retried; the first cause is printed


class KgorchError(Exception):
    """An error for the user.

    Attributes:
        what: what went wrong, and where.
        facts: one for each line: what was expected, what was found.
        next_step: what to type or change.
        code: exit code of the verb.
        error_code: of its troubleshooting topic, `KG203`, which `kgorch explain KG203` prints; empty in code that is not
            kgorch's. A raise site gives it where it differs from that of its class, else of its module (core/error_codes.py).
    """

    code = ExitCode.MISTAKE
    error_code = ""

    def __init__(self, what: str, *facts: str, next_step: str | None = None, error_code: str | None = None) -> None:
        super().__init__(what)
        self.what, self.facts, self.next_step = what, facts, next_step
        # kept on the object, because the traceback that tells the module is lost when the error is pickled
        self.error_code = error_code or self.error_code or code_of_module(_module_that_constructs(self))

    def __str__(self) -> str:
        """Without the error code: this text is stored, and becomes a part of other messages."""
        return self._text(self.what)

    @property
    def headline(self) -> str:
        """`what`, with the error code at the end of its first line."""
        first, line_break, rest = self.what.partition("\n")
        return f"{first} [{self.error_code}]{line_break}{rest}" if self.error_code else self.what

    # Not `message`: PyTorch constructs an exception of a loading process anew by that name, where its class has it.
    def render(self) -> str:
        """What a person is shown: `error: WHAT [KG203]`, the facts, and `next: …`."""
        return f"error: {self._text(self.headline)}"

    def _text(self, what: str) -> str:
        lines = [what, *(f"  {fact}" for fact in self.facts)]
        return "\n".join(lines + ([f"next: {self.next_step}"] if self.next_step else []))


def parse_message(text: str) -> KgorchError | None:
    """The error whose `render()` a process has printed, among other lines; None if there is none."""
    lines = text.strip().splitlines()
    at = next((number for number, line in enumerate(lines) if line.startswith("error: ")), None)
    if at is None:
        return None
    match = re.fullmatch(r"error: (.*?)(?: \[(KG\d{3})\])?", lines[at])
    what, error_code = match.groups() if match else (lines[at], None)
    next_step = next((line.removeprefix("next: ") for line in lines[at:] if line.startswith("next: ")), None)
    facts = [line.removeprefix("  ") for line in lines[at + 1 :] if line.startswith("  ")]
    return KgorchError(what, *facts, next_step=next_step, error_code=error_code)


def _module_that_constructs(error: KgorchError) -> str:
    """The module whose code constructs the error: the first frame that is not a constructor of it."""
    frame = sys._getframe(2)
    while frame.f_back and frame.f_code.co_name == "__init__" and frame.f_locals.get("self") is error:
        frame = frame.f_back
    spec = frame.f_globals.get("__spec__")  # names a module that runs as __main__, too
    return str(spec.name if spec else frame.f_globals.get("__name__", ""))


class PlanError(KgorchError):
    """The plan is not valid."""


class ConfigError(KgorchError):
    """The user's configuration file is not valid."""

    error_code = "KG107"


class NotFound(KgorchError):
    """There is no run, session or checkpoint of that name."""

    error_code = "KG109"


class StateUnusable(KgorchError):
    """The state folder or its database cannot be read or written."""

    error_code = "KG601"


class DatabaseUnusable(StateUnusable):
    """The database is locked, its disk full or its server away: a later try may succeed."""

    code = ExitCode.NO_DATABASE
    error_code = "KG602"


class CheckpointBroken(KgorchError):
    """A checkpoint does not match its manifest, or has no valid manifest."""

    error_code = "KG201"


class CheckpointUnreadable(KgorchError):
    """A checkpoint that may be whole and cannot be read now: the disk fails, or a newer kgorch wrote it."""

    error_code = "KG202"


class CannotRestore(KgorchError):
    """A checkpoint is whole and does not fit the objects that the script tracks."""

    error_code = "KG203"


class ReplayFailed(KgorchError):
    """Steps that were repeated from the same checkpoint gave another result, or failed."""

    code = ExitCode.FAILED
    error_code = "KG205"


class WeightsRefused(KgorchError):
    """A file of initial weights cannot be read without running code from it, or does not fit the model."""

    error_code = "KG209"


def nearest(word: str, choices: Iterable[str], *, cutoff: float = 0.5) -> str:
    """A hint for a mistyped word: ` (did you mean 'wall'?)`; empty if no choice is similar.

    Args:
        cutoff: similarity from 0 to 1 that a choice needs; 1 for the same word only.
    """
    # The length is bounded because the comparison takes time with the product of both lengths.
    near = difflib.get_close_matches(word[:200], list(choices), n=1, cutoff=cutoff)
    return f" (did you mean '{near[0]}'?)" if near else ""
