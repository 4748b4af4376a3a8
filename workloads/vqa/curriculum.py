"""What the student is told to say, and how much each part of it counts in which epoch.

    <answer>Đen</answer> <reasoning>[DESCRIPTIVE] Màu của chiếc váy là đen.</reasoning>

The target is the same in every epoch; a phase only changes the weights of its parts. It is a function of the epoch's number
alone, so a resume within an epoch trains as the cut session did. The answer comes first: the first tokens of what is generated
are enough to score it. The tags, the phases and their weights are those of the users' own program (docs/vqa.md).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import NamedTuple

ANSWER, ANSWER_END, REASONING, REASONING_END = TAGS = ("<answer>", "</answer>", "<reasoning>", "</reasoning>")
PADDING, FORMAT_PART, ANSWER_PART, REASON_PART = range(4)
"""What a token of the target belongs to; the end of the text belongs to the format."""


@dataclass(frozen=True)
class Phase:
    """Weights of the three parts of a target in the loss; each part counts as one, however many tokens it has."""

    name: str
    format: float
    answer: float
    reason: float

    @property
    def weights(self) -> tuple[float, float, float]:
        return self.format, self.answer, self.reason


def phase_at(epoch: int, epochs: int = 100, answer_until: int = 15, format_until: int = 30) -> Phase:
    """The phase of an epoch, counted from 0; the borders belong to the later phase.

    The last phase moves weight from format and answer to the reasons: 0.30, 0.25, 0.45 at its first epoch, towards
    0.25, 0.15, 0.60 at its end.
    """
    if epoch < answer_until:
        return Phase("ANSWER_FOCUS", format=0.60, answer=0.35, reason=0.05)
    if epoch < format_until:
        return Phase("FORMAT_LEARNING", format=0.50, answer=0.30, reason=0.20)
    progress = (epoch - format_until) / max(epochs - format_until, 1)
    form, reason = 0.30 - 0.05 * progress, 0.45 + 0.15 * progress
    return Phase("REASONING_QUALITY", format=form, answer=1 - form - reason, reason=reason)


def stretches(answer: str, reason: str, kind: str) -> list[tuple[str, int]]:
    """The texts of a target and the part that each belongs to; without reasons the answer alone."""
    told = [(ANSWER, FORMAT_PART), (answer, ANSWER_PART), (ANSWER_END, FORMAT_PART)]
    if reason:
        begin = f"{REASONING} [{kind}]" if kind else REASONING
        told += [(begin, FORMAT_PART), (reason, REASON_PART), (REASONING_END, FORMAT_PART)]
    return told


class Parsed(NamedTuple):
    """A generated text. is_whole: both pairs of tags are there, in order, and nothing else is outside them."""

    answer: str
    kind: str
    reason: str
    is_whole: bool


_WHOLE = re.compile(rf"\s*{ANSWER}(.*?){ANSWER_END}\s*{REASONING}\s*(?:\[\s*(\w+)\s*\])?(.*?){REASONING_END}\s*", re.S)
_ANSWER = re.compile(rf"{ANSWER}\s*(.*?)\s*(?:</?\s*(?:answer|reasoning)|$)", re.S)


def parsed(said: str) -> Parsed:
    """The parts of what was generated; where no answer is marked, all of it is taken for the answer."""
    if whole := _WHOLE.fullmatch(said):
        return Parsed(whole[1].strip(), whole[2] or "", whole[3].strip(), is_whole=True)
    marked = _ANSWER.search(said)
    return Parsed(marked[1] if marked else said.strip(), "", "", is_whole=False)
