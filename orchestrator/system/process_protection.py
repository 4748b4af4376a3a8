"""Protection of kgorch's own processes from other users (umask) and from the kernel's out-of-memory killer (oom_score_adj).

Supervisor, daemon, shim and keeper create files that their owner alone can read. With CAP_SYS_RESOURCE they lower their own
score; without it the scores of the ranks are raised, which every process may do to itself. A killed rank resumes from the
keeper's snapshot; the snapshots of a killed keeper are lost. Ranks have the user's own umask and score: their files are the
user's.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

PRIVATE = 0o077
LESS_LIKELY, MORE_LIKELY = -500, 300
"""Added to oom_score_adj of our processes, or else of the ranks; one unit counts as a thousandth of the machine's memory."""

VARIABLE = "KGORCH_USUAL"
"""Passes the user's own umask and score to a child process that protects itself, too."""

_original: tuple[int, int] | None = None
_has_low_score = False


def protect() -> None:
    """Protect this process and those that it starts, unless they restore the user's settings. Never fails; safe to repeat."""
    global _original, _has_low_score
    if _original is not None:
        return
    before = os.umask(PRIVATE)  # the only way to read the umask of this process is to set one
    value = os.environ.pop(VARIABLE, "")
    try:
        umask, score = (int(word) for word in value.split(":"))
    except ValueError:
        umask, score = before, _score()
    _original = umask, score
    _has_low_score = _set_score(max(score + LESS_LIKELY, -1000))


def user_umask() -> int:
    """The user's own umask, for programs of the user; -1, which changes nothing, in a process that is not protected."""
    return _original[0] if _original else -1


def child_environment() -> dict[str, str]:
    """Variables for a child process that protects itself."""
    return {VARIABLE: f"{_original[0]}:{_original[1]}"} if _original else {}


def rank_oom_score() -> int | None:
    """oom_score_adj for programs of the user; None in a process that is not protected."""
    return (_original[1] if _has_low_score else min(_original[1] + MORE_LIKELY, 1000)) if _original else None


def restore_user_settings() -> None:
    """Give this process the umask and score for ranks; called in a child that is about to become torchrun."""
    if _original and (score := rank_oom_score()) is not None:
        os.umask(_original[0])
        _set_score(score)


def _score() -> int:
    with contextlib.suppress(OSError, ValueError):
        return int(Path("/proc/self/oom_score_adj").read_text())
    return 0


def _set_score(score: int) -> bool:
    try:
        Path("/proc/self/oom_score_adj").write_text(str(score))
    except OSError:
        return False
    return True
