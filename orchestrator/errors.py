"""The errors that a person may meet, each with its next step, and the exit codes of the command line.

Anything else that reaches the command line is our own bug and shows a traceback.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from enum import IntEnum


class ExitCode(IntEnum):
    """What a verb's exit status means; a promise (README.md)."""

    DONE = 0
    BUG = 1
    MISTAKE = 2
    SUSPENDED = 10
    QUOTA_SPENT = 11
    FAILED = 20


class KgorchError(Exception):
    """What went wrong, the facts (one a line), and what to type next."""

    code = ExitCode.MISTAKE

    def __init__(self, what: str, *facts: str, next_step: str | None = None) -> None:
        super().__init__(what)
        self.what, self.facts, self.next_step = what, facts, next_step

    def __str__(self) -> str:
        lines = [self.what, *(f"  {fact}" for fact in self.facts)]
        return "\n".join(lines + ([f"next: {self.next_step}"] if self.next_step else []))


class PlanError(KgorchError):
    """The plan says something that kgorch cannot take."""


class ConfigError(KgorchError):
    """The person's configuration says something that kgorch cannot take."""


class NotFound(KgorchError):
    """No run, session or checkpoint of that name."""


class StateUnusable(KgorchError):
    """The state folder or its database cannot be read or written."""


class CheckpointBroken(KgorchError):
    """A checkpoint does not match its manifest, or has none that can be trusted."""


class CheckpointUnreadable(KgorchError):
    """A checkpoint that may be whole, but not for us or not now: a disk that fails to read, a newer kgorch's format."""


class CannotRestore(KgorchError):
    """A checkpoint is whole but does not fit what the script tracks."""


class ReplayFailed(KgorchError):
    """The same steps from the same checkpoint did not come out the same, or not at all."""

    code = ExitCode.FAILED


class WeightsRefused(KgorchError):
    """A file of starting weights that cannot be read without running code, or does not fit."""


def nearest(word: str, known: Iterable[str], *, cutoff: float = 0.5) -> str:
    """` (did you mean 'wall'?)`, or nothing when no known word is near; 1 for the same word alone."""
    near = difflib.get_close_matches(word[:200], list(known), n=1, cutoff=cutoff)
    return f" (did you mean '{near[0]}'?)" if near else ""
