"""Made-up pictures of coloured shapes with questions in Vietnamese, in the files of ViVQA and of its users, and small models.

    <out>/train/N.jpg, test/N.jpg               the pictures, by img_id
    <out>/train.csv, test.csv                   ViVQA's columns: ,question,answer,img_id,type
    <out>/teacher_outputs.jsonl                 what a teacher said to train.csv: img_id, question, teacher_answer, …
    <out>/students/blip-vqa-base, phobert-base, vit5-base

To say the colour of a shape one has to find it beside the other. One answer in twenty of the made-up teacher is wrong.
"""

from __future__ import annotations

import argparse
import csv
import json
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image, ImageDraw

from kgorch.workloads.vqa.data import read_questions
from kgorch.workloads.vqa.make_students import make_students, texts_of

COLOURS = {
    "đỏ": (214, 40, 40), "vàng": (250, 204, 21), "xanh lá": (34, 160, 70),
    "xanh dương": (40, 90, 220), "tím": (150, 60, 190), "trắng": (245, 245, 245),
}  # fmt: skip
SHAPES = ("hình tròn", "hình vuông", "hình tam giác")
COUNTS = {1: "một", 2: "hai"}
SIDES = ("trái", "phải")
SIZE, HALF = 32, 16
WRONG = 0.05
"""Share of the teacher's answers."""


class Made(NamedTuple):
    """A question. kind: the teacher's reasoning_type. type: ViVQA's (0 object, 1 number, 2 colour). answers: all of its kind."""

    question: str
    answer: str
    reason: str
    kind: str
    type: int
    answers: Sequence[str]


def make_picture(random: np.random.Generator) -> tuple[Image.Image, list[tuple[str, str, str]]]:
    """A picture, and of each thing in it: shape, colour, side."""
    image = Image.new("RGB", (SIZE, SIZE), tuple(random.integers(20, 60, 3).tolist()))
    draw = ImageDraw.Draw(image)
    count = int(random.integers(1, 3))
    shapes, colours = random.permutation(SHAPES)[:count], random.permutation(list(COLOURS))[:count]
    things = []
    for shape, colour, half in zip(shapes, colours, random.permutation(2)[:count], strict=True):
        side = int(random.integers(10, 14))
        left, top = int(half * HALF + random.integers(1, HALF - side)), int(random.integers(1, SIZE - side))
        box = (left, top, left + side, top + side)
        if shape == "hình tròn":
            draw.ellipse(box, fill=COLOURS[colour])
        elif shape == "hình vuông":
            draw.rectangle(box, fill=COLOURS[colour])
        else:
            draw.polygon([(left, box[3]), (box[2], box[3]), (left + side // 2, top)], fill=COLOURS[colour])
        things.append((str(shape), str(colour), SIDES[half]))
    return image, things


def questions_of(things: list[tuple[str, str, str]]) -> list[Made]:
    (shape, colour, side), (last_shape, last_colour, last_side) = things[0], things[-1]
    listed = " và ".join(f"{shape} màu {colour}" for shape, colour, _ in things)
    count = COUNTS[len(things)]
    seen = f"Trong ảnh có {shape} ở bên {side}"
    return [
        Made(f"Màu của {shape} là gì?", colour, f"{seen} và nó có màu {colour}.", "DESCRIPTIVE", 2, tuple(COLOURS)),
        Made(f"Hình bên {last_side} có màu gì?", last_colour, f"Bên {last_side} là {last_shape} màu {last_colour}.", "SPATIAL", 2,
             tuple(COLOURS)),
        Made(f"Bên {side} là hình gì?", shape, f"{seen} và nó có màu {colour}.", "SPATIAL", 0, SHAPES),
        Made("Có bao nhiêu hình trong ảnh?", count, f"Trong ảnh có {listed} nên có {count} hình.", "COUNTING", 1,
             tuple(COUNTS.values())),
    ]  # fmt: skip


def make_shapes(out: Path, pictures: int, test: int, seed: int) -> None:
    """Write pictures, listings and students; a function of its arguments alone."""
    rows: dict[str, list[list[object]]] = {"train": [], "test": []}
    told = []
    for number in range(pictures + test):
        random = np.random.default_rng([seed, number])
        image, things = make_picture(random)
        part = "train" if number < pictures else "test"
        (out / part).mkdir(parents=True, exist_ok=True)
        image.save(out / part / f"{number}.jpg", quality=95, subsampling=0)  # colours of thin edges stay what they are
        for made in questions_of(things):
            wrong = random.random() < WRONG
            answer = (
                str(random.choice([other for other in made.answers if other != made.answer])) if wrong else made.answer
            )
            rows[part].append([len(rows[part]), made.question, made.answer, number, made.type])
            if part == "train":
                told.append({
                    "img_id": number, "question": made.question, "teacher_answer": answer, "teacher_reasoning": made.reason,
                    "reasoning_type": made.kind,
                })  # fmt: skip
    for part, of_part in rows.items():
        with open(out / f"{part}.csv", "w", newline="", encoding="utf-8") as file:
            csv.writer(file).writerows([["", "question", "answer", "img_id", "type"], *of_part])
    text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in told)
    (out / "teacher_outputs.jsonl").write_text(text, encoding="utf-8")
    questions, answers = texts_of(read_questions(out / "teacher_outputs.jsonl")[0])
    make_students(out / "students", questions, answers, seed=seed, image_size=SIZE)


def main() -> None:
    """Parse, then write it all."""
    parser = argparse.ArgumentParser(
        description="Write pictures of coloured shapes, questions about them, and small models to begin with.",
        epilog="example: python -m kgorch.workloads.vqa.make_shapes shapes --pictures 1000 --test 80",
    )
    parser.add_argument("out", type=Path, help="folder to write to")
    parser.add_argument("--pictures", type=int, default=1000, help="to train on, each with 4 questions (default: 1000)")
    parser.add_argument("--test", type=int, default=80, help="pictures of test.csv (default: 80)")
    parser.add_argument("--seed", type=int, default=0, help="same seed, same files (default: 0)")
    options = parser.parse_args()
    make_shapes(options.out, options.pictures, options.test, options.seed)


if __name__ == "__main__":
    main()
