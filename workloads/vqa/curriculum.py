"""What the student is told to say, epoch by epoch, and how much each part of it counts.

A phase is a function of the epoch's number alone, so a resume in the midst of an epoch is told what the cut one was.
The answer comes first and the reasons after it: the first tokens of what is generated are enough to score it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

ANSWER, REASON = "Trả lời:", "Lý do:"


@dataclass(frozen=True)
class Phase:
    """Weights of a token in the loss: of the words that mark the format (and of the end), of the answer, of the reasons.

    With a weight of 0 for the reasons these are not told at all, and the end follows the answer.
    """

    name: str
    format: float
    answer: float
    reason: float

    def told(self, answer: str, reason: str) -> list[tuple[str, float]]:
        """The stretches of the target, each with the weight of its tokens; the end weighs `format`."""
        stretches = [(ANSWER, self.format), (answer, self.answer)]
        if reason and self.reason:
            stretches += [(REASON, self.format), (reason, self.reason)]
        return stretches


ANSWER_FOCUS = Phase("ANSWER_FOCUS", format=0.5, answer=1.0, reason=0.0)
FORMAT_LEARNING = Phase("FORMAT_LEARNING", format=2.0, answer=1.0, reason=0.3)
FULL_REASONING = Phase("FULL_REASONING", format=1.0, answer=1.0, reason=1.0)
PHASES = (ANSWER_FOCUS, FORMAT_LEARNING, FULL_REASONING)


def phase_at(epoch: int, answer_until: int = 15, format_until: int = 30) -> Phase:
    """The phase of an epoch, counted from 0; the borders belong to the later phase."""
    if epoch < answer_until:
        return ANSWER_FOCUS
    return FORMAT_LEARNING if epoch < format_until else FULL_REASONING


def answer_in(said: str) -> str:
    """The answer in what was generated; all of it, where it does not keep to the format."""
    found = re.search(rf"{ANSWER}\s*(.*?)\s*(?:{REASON}|$)", said, re.S)
    return found[1] if found else said.strip()
