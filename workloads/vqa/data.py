"""Questions about pictures, with what a teacher said to them, one JSON object a line.

    <root>/train.jsonl, valid.jsonl   {"image": "images/7.png", "question": …, "answer": …,
                                       "teacher": {"answer": …, "reasoning": …}}
    <root>/images/                    the pictures; `image` is relative to <root>

`teacher` may be missing, and so may either of its two. Where the teacher's answer is another than `answer`, its reasons lead
astray: then the right answer is told without them. Of a listing only where its lines begin is kept in memory.
Axes: B batch, H rows, W columns, L tokens of the question, T tokens of the answer.
"""

from __future__ import annotations

import copy
import json
import unicodedata
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset

from workloads.common.files import DataError, picture, readable
from workloads.vqa.curriculum import FULL_REASONING, Phase
from workloads.vqa.scores import exact


class Sample(NamedTuple):
    """One question; in a batch every axis list begins with B. All lengths are fixed, so shapes do not hang on the ranks."""

    image: Tensor  # uint8 [3, H, W]
    question: Tensor  # int64 [L], padded
    target: Tensor  # int64 [T], padded
    weight: Tensor  # float32 [T]: of each token in the loss, 0 on padding
    at: Tensor  # int64 []: its number in the dataset


@dataclass(frozen=True)
class Asked:
    """One line of a listing."""

    image: Path
    question: str
    answer: str
    reason: str  # "" where the teacher gave none, or another answer


class Questions(Dataset[Sample]):
    """The questions of one listing.

    Args:
        part: the listing's name, "train" or "valid".
        ask, tell: the tokenizers of questions and of answers.
        size: rows and columns that the image encoder expects.
        limit: only so many of the questions, spread over the listing; None takes all.
        skip_broken: leave out what cannot be read; Questions.broken says what that was.

    Raises:
        DataError: a listing that is missing, empty or malformed, a picture that is missing or none.
    """

    def __init__(
        self, root: str | Path, part: str, ask: Any, tell: Any, *, size: int, question_length: int = 64,
        answer_length: int = 160, limit: int | None = None, skip_broken: bool = False,
    ) -> None:  # fmt: skip
        self.root, self.path, self.ask, self.tell = Path(root), Path(root) / f"{part}.jsonl", ask, tell
        self.size, self.question_length, self.answer_length = size, question_length, answer_length
        self.phase = FULL_REASONING
        begins = line_beginnings(self.path)
        if limit is not None and limit < len(begins):
            begins = begins[np.linspace(0, len(begins) - 1, limit).astype(np.int64)]
        seen = set[Path]()
        kept, self.broken = readable(
            begins, lambda begin: self._see(int(begin), seen, whole=True), skip_broken=skip_broken
        )
        if not skip_broken:
            for begin in begins:
                self._see(int(begin), seen, whole=False)
        self.begins = np.array(kept, np.int64)
        if not len(self.begins):
            raise DataError(
                f"no question is left in {self.path}", f"expected at least one line, found {len(begins)}, all broken",
                next_step=f"the first of them: {self.broken[0]}" if self.broken else "raise limit",
            )  # fmt: skip

    def _see(self, begin: int, seen: set[Path], *, whole: bool) -> None:
        """Raises DataError for a line that is broken, or its picture: its head alone, unless `whole`."""
        image = self.read(begin).image
        if image not in seen:
            picture(image) if whole else see_head(image)
            seen.add(image)

    def in_phase(self, phase: Phase) -> Questions:
        """The same questions, with the targets of that phase."""
        other = copy.copy(self)
        other.phase = phase
        return other

    def read(self, begin: int) -> Asked:
        """The line that begins at this byte, checked."""
        with open(self.path, "rb") as file:
            file.seek(begin)
            line = file.readline()
        try:
            found = json.loads(line)
        except ValueError as problem:
            raise DataError(
                f"{self.path}:{self.line_number(begin)} is no JSON", f"expected one object a line, found: {problem}",
                next_step="correct this line, or leave such lines out: skip_broken = true",
            ) from problem  # fmt: skip
        teacher = found.get("teacher") if isinstance(found, dict) else None
        fields = found if isinstance(found, dict) else {}
        wanted = {name: fields.get(name) for name in ("image", "question", "answer")}
        if teacher is not None:
            told = teacher if isinstance(teacher, dict) else {"answer": None}
            wanted |= {f"teacher.{name}": told.get(name, "-") for name in ("answer", "reasoning")}
        for name, value in wanted.items():
            if not isinstance(value, str) or not value.strip():
                raise DataError(
                    f"{self.path}:{self.line_number(begin)} has no {name!r}",
                    f"expected a text, found {value!r}; the line's fields: {', '.join(fields) or 'none'}",
                    next_step="correct this line, or leave such lines out: skip_broken = true",
                )
        answer, reason = composed(wanted["answer"]), ""
        if teacher and exact(teacher.get("answer", answer), answer):
            reason = composed(teacher.get("reasoning", ""))
        return Asked(self.root / wanted["image"], composed(wanted["question"]), answer, reason)

    def line_number(self, begin: int) -> int:
        """Counted from 1, empty lines too; for messages."""
        with open(self.path, "rb") as file:
            return file.read(begin).count(b"\n") + 1

    def asked(self, index: int) -> Asked:
        """Question and answer as they are written."""
        return self.read(int(self.begins[index]))

    def target(self, asked: Asked) -> tuple[list[int], list[float]]:
        """Tokens and their weights, the end among them; what is too long loses the end of its reasons."""
        tokens, weights = list[int](), list[float]()
        for text, weight in self.phase.told(asked.answer, asked.reason):
            piece = self.tell(text, add_special_tokens=False).input_ids
            tokens, weights = tokens + piece, weights + [weight] * len(piece)
        room = self.answer_length - 1
        return [*tokens[:room], self.tell.eos_token_id], [*weights[:room], self.phase.format]

    def __len__(self) -> int:
        return len(self.begins)

    def __getitem__(self, index: int) -> Sample:
        asked = self.asked(index)
        question = self.ask(asked.question, truncation=True, max_length=self.question_length).input_ids
        tokens, weights = self.target(asked)
        image = Image.fromarray(picture(asked.image)).resize((self.size, self.size), Image.Resampling.BICUBIC)
        return Sample(
            torch.from_numpy(np.array(image)).permute(2, 0, 1).contiguous(),
            padded(question, self.question_length, self.ask.pad_token_id),
            padded(tokens, self.answer_length, self.tell.pad_token_id),
            padded(weights, self.answer_length, 0.0),
            torch.tensor(index),
        )


def composed(text: str) -> str:
    """Letters with their marks as one character each, as both tokenizers know them; single spaces."""
    return " ".join(unicodedata.normalize("NFC", text).split())


def padded(values: list[Any], length: int, pad: float) -> Tensor:
    return torch.tensor([*values, *[pad] * (length - len(values))])


def line_beginnings(path: Path) -> np.ndarray:
    """Where the lines that are not empty begin, in bytes: int64 [N]."""
    try:
        with open(path, "rb") as file:
            lines, begins = list[int](), 0
            for line in file:
                if line.strip():
                    lines.append(begins)
                begins += len(line)
    except OSError as problem:
        raise DataError(
            f"the listing {path.name} cannot be read", f"{path}: expected a JSON object a line, found: {problem}",
            next_step=f"correct the path, or: python -m workloads.vqa.make_shapes {path.parent}",
        ) from problem  # fmt: skip
    if not lines:
        raise DataError(
            f"the listing {path.name} is empty", f"{path}: expected a JSON object a line, found none",
            next_step="write the questions of this part into it",
        )  # fmt: skip
    return np.array(lines, np.int64)


def see_head(path: Path) -> None:
    """Raises DataError unless a picture begins there; its body is read when it is its turn."""
    try:
        with Image.open(path):
            pass
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as problem:
        raise DataError(
            f"{path.name} cannot be read", f"{path}: expected a picture, found: {problem}",
            next_step="fetch this file again, or leave such samples out: skip_broken = true",
        ) from problem  # fmt: skip
