"""Questions about pictures, from the files that the users have, and the samples made of them.

    teacher_outputs.jsonl   {"img_id": 557067, "question": …, "teacher_answer": …, "teacher_reasoning": …,
                             "reasoning_type": "COUNTING"}, one object a line
    train.csv, test.csv     ViVQA: ,question,answer,img_id,type
    IMG_ID.jpg              the pictures, in one folder

A question is one with its line: `img_id` and `question` are needed, and an answer. Reasons are told where they are there and
belong to the right answer. Axes: B batch, H rows, W columns, L tokens of the question, T tokens of the target.
"""

from __future__ import annotations

import csv
import hashlib
import json
import os
import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset

from kgorch.workloads.common.files import DataError, picture
from kgorch.workloads.common.listing import fingerprint, headers
from kgorch.workloads.vqa.curriculum import FORMAT_PART, PADDING, stretches
from kgorch.workloads.vqa.scores import exact

if TYPE_CHECKING:
    from kgorch import Session


class Sample(NamedTuple):
    """One question; in a batch every axis list begins with B. All lengths are fixed: shapes are the same on every rank."""

    image: Tensor  # uint8 [3, H, W]
    question: Tensor  # int64 [L], padded
    target: Tensor  # int64 [T], padded
    part: Tensor  # uint8 [T]: what each token belongs to (curriculum.py)
    at: Tensor  # int64 []: its number in the dataset


@dataclass(frozen=True)
class Asked:
    """One question. image: the picture's file name. reason, kind (the teacher's `reasoning_type`): "" where there is none."""

    image: str
    question: str
    answer: str
    reason: str = ""
    kind: str = ""


def read_questions(
    listing: str | Path, teacher: str | Path | None = None, *, skip_broken: bool = False
) -> tuple[list[Asked], list[str]]:
    """The questions of a listing (`.jsonl` of a teacher, or ViVQA's `.csv`), and the broken lines that were left out.

    Args:
        teacher: teacher_outputs.jsonl beside a `.csv`: its reasons go to the question with the same `img_id` and
            `question`, where its answer is the right one.

    Raises:
        DataError: a file that is missing or empty, no question left, a broken line without `skip_broken`.
    """
    path, broken = Path(listing), list[str]()
    found = list(_lines(path, broken, skip_broken=skip_broken))
    if teacher is not None:
        told = {
            (asked.image, asked.question): asked for asked in _lines(Path(teacher), broken, skip_broken=skip_broken)
        }
        found = [_with_reasons(asked, told.get((asked.image, asked.question))) for asked in found]
    if not found:
        raise DataError(
            f"no question is left in {path}", f"expected at least one whole line, found {len(broken)} broken ones",
            next_step=f"the first of them: {broken[0]}" if broken else "see whether it is the right file",
        )  # fmt: skip
    return found, broken


def _with_reasons(asked: Asked, told: Asked | None) -> Asked:
    if told is None or not exact(told.answer, asked.answer):  # reasons for another answer lead astray
        return asked
    return replace(asked, reason=told.reason, kind=told.kind)


def _lines(path: Path, broken: list[str], *, skip_broken: bool) -> Iterator[Asked]:
    for where, fields in _records(path):
        try:
            yield _asked(fields, where, path)
        except DataError as problem:
            if not skip_broken:
                raise
            broken.append(str(problem))


def _records(path: Path) -> Iterator[tuple[str, Any]]:
    """Each line with its place: an object of a `.jsonl` (a ValueError where it is none), a row of a `.csv`."""
    try:
        with open(path, newline="", encoding="utf-8-sig") as file:
            if path.suffix == ".csv":
                rows = csv.DictReader(file)
                for row in rows:
                    yield f"{path}:{rows.line_num}", row
                return
            for number, line in enumerate(file, 1):
                if line.strip():
                    try:
                        fields = json.loads(line)
                    except ValueError as problem:
                        fields = problem
                    yield f"{path}:{number}", fields
    except (OSError, UnicodeDecodeError, csv.Error) as problem:
        raise DataError(
            f"the listing {path.name} cannot be read", f"{path}: expected ViVQA's .csv or a teacher's .jsonl, found: {problem}",
            next_step="correct `listing`; made-up data: python -m kgorch.workloads.vqa.make_shapes shapes",
        ) from problem  # fmt: skip


def _asked(fields: Any, where: str, path: Path) -> Asked:
    """Raises DataError naming the field that is missing or no text."""
    if not isinstance(fields, dict):
        raise DataError(
            f"{where} is no JSON object", f"expected one object a line, found: {fields!s:.200}",
            next_step="correct this line, or leave such lines out: skip_broken = true",
        )  # fmt: skip
    answer = "answer" if path.suffix == ".csv" else "teacher_answer"
    texts = {name: fields.get(name) for name in ("img_id", "question", answer)}
    if isinstance(texts["img_id"], int):
        texts["img_id"] = str(texts["img_id"])
    optional = {name: fields.get(name) or "" for name in ("teacher_reasoning", "reasoning_type")}
    for name, value in (texts | optional).items():
        if not isinstance(value, str) or (name in texts and not value.strip()):
            names = ", ".join(str(key) for key in fields)
            raise DataError(
                f"{where} has no {name!r}", f"expected a text, found {value!r}; the line's fields: {names or 'none'}",
                next_step="correct this line, or leave such lines out: skip_broken = true",
            )  # fmt: skip
    picture_id = texts["img_id"].strip()
    return Asked(
        picture_id if Path(picture_id).suffix else f"{picture_id}.jpg", composed(texts["question"]), composed(texts[answer]),
        composed(optional["teacher_reasoning"]), composed(optional["reasoning_type"]).upper(),
    )  # fmt: skip


def split(asked: Sequence[Asked], share: float, seed: int = 0) -> tuple[list[Asked], list[Asked]]:
    """Training and validation: all questions of a picture go to the same part, decided by its name and the seed alone.

    A split by line would put one picture on both sides, and a teacher's file that was balanced by repeating lines the very
    same question.
    """
    parts: tuple[list[Asked], list[Asked]] = ([], [])
    for item in asked:
        number = hashlib.blake2b(f"{seed}/{item.image}".encode(), digest_size=8).digest()
        parts[int.from_bytes(number) < share * 2**64].append(item)
    for name, part in zip(("training", "validation"), parts, strict=True):
        if not part:
            raise DataError(
                f"no question is left for {name}", f"{len(asked)} questions, valid_share = {share}",
                next_step="another valid_share, or a listing of its own: valid = \"…/test.csv\"",
            )  # fmt: skip
    return parts


def spread(asked: Sequence[Asked], limit: int | None) -> list[Asked]:
    """At most `limit` questions, from all over the list."""
    if limit is None or limit >= len(asked):
        return list(asked)
    return [asked[at] for at in np.linspace(0, len(asked) - 1, limit).astype(np.int64)]


def with_pictures(
    asked: Sequence[Asked],
    root: str | Path,
    *,
    session: Session | None = None,
    skip_broken: bool = False,
    name: str = "all",
) -> tuple[list[Asked], list[str]]:
    """The questions whose picture in `root` can be opened, and what was said of the pictures that were left out.

    Headers are read once in a run, whole pictures with `skip_broken`; each picture is still checked when it is read.

    Raises:
        DataError: a picture that is missing or none, without `skip_broken`; none is left.
    """
    folder, names = Path(root), sorted({item.image for item in asked})

    def look(image: str) -> None:
        try:
            if skip_broken:
                picture(folder / image)
            else:
                with Image.open(folder / image):
                    pass
        except (DataError, OSError, SyntaxError, ValueError, Image.DecompressionBombError) as problem:
            raise DataError(
                f"{image} cannot be read", f"{folder / image}: expected a picture, found: {problem.__cause__ or problem}",
                next_step="correct `data`, the folder of the pictures; or leave such questions out: skip_broken = true",
            ) from problem  # fmt: skip

    key = fingerprint(folder, names)
    broken = headers(session, f"pictures-{name}", names, look, key=key, skip_broken=skip_broken).broken
    left_out = {names[at] for at in broken}
    sound = [item for item in asked if item.image not in left_out]
    if not sound:
        raise DataError(
            f"all {len(names)} pictures are broken", f"the first one: {broken[0]}",
            next_step="correct `data`, the folder of the pictures",
        )  # fmt: skip
    return sound, list(broken.values())


class Questions(Dataset[Sample]):
    """Questions as samples.

    Args:
        root: the folder of the pictures; session.data(…) reads from the local copy once there is one.
        ask, tell: the tokenizers of questions and of answers.
        size: rows and columns that the image encoder expects.
    """

    def __init__(
        self, asked: Sequence[Asked], root: os.PathLike[str], ask: Any, tell: Any, *, size: int, question_length: int = 64,
        answer_length: int = 160,
    ) -> None:  # fmt: skip
        self.asked, self.root, self.ask, self.tell = list(asked), root, ask, tell
        self.size, self.question_length, self.answer_length = size, question_length, answer_length

    def target(self, asked: Asked) -> tuple[list[int], list[int]]:
        """Tokens and their parts, the end among them; what is too long loses the end of its reasons."""
        tokens, parts = list[int](), list[int]()
        for text, part in stretches(asked.answer, asked.reason, asked.kind):
            piece = self.tell(text, add_special_tokens=False).input_ids
            tokens, parts = tokens + piece, parts + [part] * len(piece)
        room = self.answer_length - 1
        return [*tokens[:room], self.tell.eos_token_id], [*parts[:room], FORMAT_PART]

    def __len__(self) -> int:
        return len(self.asked)

    def __getitem__(self, index: int) -> Sample:
        asked = self.asked[index]
        question = self.ask(asked.question, truncation=True, max_length=self.question_length).input_ids
        tokens, parts = self.target(asked)
        image = Image.fromarray(picture(Path(self.root, asked.image))).resize(
            (self.size, self.size), Image.Resampling.BICUBIC
        )
        return Sample(
            torch.from_numpy(np.array(image)).permute(2, 0, 1).contiguous(),
            padded(question, self.question_length, self.ask.pad_token_id),
            padded(tokens, self.answer_length, self.tell.pad_token_id),
            padded(parts, self.answer_length, PADDING).to(torch.uint8),
            torch.tensor(index),
        )


def composed(text: str) -> str:
    """Letters with their marks as one character each, as both tokenizers know them; single spaces."""
    return " ".join(unicodedata.normalize("NFC", text).split())


def padded(values: list[Any], length: int, pad: float) -> Tensor:
    return torch.tensor([*values, *[pad] * (length - len(values))])
