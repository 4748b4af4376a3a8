"""What kgorch's own processes are protected from: other users' eyes, and the kernel when memory runs out.

Supervisor, daemon, shim and keeper write files of their owner alone. Where they may, they have the kernel spare them (that takes
CAP_SYS_RESOURCE); else the ranks are offered first, which anybody may do of his own. A rank that is killed goes on from the
keeper's snapshot; what a killed keeper held is gone. Ranks have the person's own umask and score: what they write is the person's.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

PRIVATE = 0o077
SPARED, EXPOSED = -500, 300
"""Of oom_score_adj, which counts as so many thousandths of the machine's memory: added here, or there."""

VARIABLE = "KGORCH_USUAL"
"""To a process that we start and that protects itself: what the person had."""

_usual: tuple[int, int] | None = None
_is_spared = False


def begin() -> None:
    """Protect this process and, as far as they do not ask for the usual, those that it starts. Never fails; safe to repeat."""
    global _usual, _is_spared
    if _usual is not None:
        return
    before = os.umask(PRIVATE)
    told = os.environ.pop(VARIABLE, "")
    try:
        umask, score = (int(word) for word in told.split(":"))
    except ValueError:
        umask, score = before, _score()
    _usual = umask, score
    _is_spared = _set_score(max(score + SPARED, -1000))


def umask() -> int:
    """The person's own, for what is started for him: -1, which changes nothing, in a process that is not protected."""
    return _usual[0] if _usual else -1


def handed_on() -> dict[str, str]:
    """Variables for a process that protects itself."""
    return {VARIABLE: f"{_usual[0]}:{_usual[1]}"} if _usual else {}


def score_of_ranks() -> int | None:
    """Of what is started for the person; None in a process that is not protected."""
    return (_usual[1] if _is_spared else min(_usual[1] + EXPOSED, 1000)) if _usual else None


def for_ranks() -> None:
    """In a process that is about to become torchrun."""
    if _usual and (score := score_of_ranks()) is not None:
        os.umask(_usual[0])
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
