"""Answer a listing's questions; goes on where it was cut.

    alone:  python -m workloads.vqa.predict --data shapes --students shapes/students --weights outputs/student.safetensors

Axes: N questions, T tokens of the answer.
"""

from __future__ import annotations

import json
import textwrap
import unicodedata
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from PIL import Image, ImageDraw, ImageFont
from safetensors.torch import load_model
from torch import nn

from orchestrator.errors import KgorchError
from orchestrator.worker import attach
from workloads import cli
from workloads.common.files import picture, tell_left_out
from workloads.common.trained import trained
from workloads.vqa import parts
from workloads.vqa.curriculum import answer_in
from workloads.vqa.data import Asked, Questions
from workloads.vqa.model import Student
from workloads.vqa.scores import exact, token_f1

Said = tuple[Asked, str]  # what was asked, and all that the student said


class Page(nn.Module):
    """The tokens that this rank has said, row by row of the listing.

    A module of buffers, because kgorch keeps the buffers of every rank, and each rank answers other questions.
    """

    def __init__(self, questions: int, length: int) -> None:
        super().__init__()
        self.register_buffer("said_NT", torch.zeros(questions, length, dtype=torch.int32))
        self.register_buffer("answered_N", torch.zeros(questions, dtype=torch.int32))

    def joined(self) -> tuple[np.ndarray, np.ndarray]:
        """Both over all ranks; the page stays as it is, for it may be saved once more."""
        both = self.said_NT.clone(), self.answered_N.clone()
        for rows in both:
            dist.all_reduce(rows)
        return both[0].cpu().numpy(), both[1].cpu().numpy()


def main(
    data: str,
    students: str,
    image_encoder: str = "blip",
    text_encoder: str = "phobert",
    decoder: str = "vit5",
    part: str = "valid",
    question_length: int = 64,
    answer_length: int = 160,
    fusion_layers: int = 2,
    beams: int = 5,
    eval_batch: int = 4,
    pictures: int = 24,
    weights: str | None = None,
    which: str | None = None,
    num_workers: int = 0,
    prefetch: int = 2,
    skip_broken: bool = False,
) -> None:
    """Write predictions/answers.jsonl, predictions.json, and predictions/NAME.png of the first --pictures pictures, to the output
    folder.

    --part names the listing; lengths, layers and folders as they were in training; --which is best or final, where not the best
    that the plan keeps; --weights is a safetensors file, needed when run without kgorch.
    """
    with attach() as session:
        folders = [str(Path(students, name)) for name in (image_encoder, text_encoder, decoder)]
        ask, tell = parts.question_tokens(folders[1], question_length), parts.answer_tokens(folders[2])
        student = Student(*folders, layers=fusion_layers)
        found = trained(session, "train", file=weights, which=which)
        if weights:
            load_model(student, weights)  # one of save_model lacks the second names of tied tensors
        else:
            student.load_state_dict(found)
        found.clear()  # the student has them: 1.5 GB that need not be held twice
        student.to(session.device).eval()
        dataset = Questions(
            data, part, ask, tell, size=student.image.config.image_size, question_length=question_length,
            answer_length=answer_length, skip_broken=skip_broken,
        )  # fmt: skip
        tell_left_out(session, dataset.broken)
        page = Page(len(dataset), answer_length).to(session.device)
        session.track(page=page)
        loader = session.loader(
            dataset, eval_batch * session.world_size, shuffle=False, drop_last=False, num_workers=num_workers,
            prefetch_factor=prefetch if num_workers else None,
        )  # fmt: skip
        amp = session.device.type == "cuda"
        for batch in session.steps(loader, 1):
            if session.weight:  # else this rank has no question left, and was lent another rank's
                here = session.to_device(batch)
                with session.autocast(torch.float16, enabled=amp):
                    said_BT = student.say(here.image, here.question, beams=beams, length=answer_length)
                page.said_NT[here.at] = said_BT.int()
                page.answered_N[here.at] += 1
        said_NT, answered_N = page.joined()
        if not session.quick and (answered_N != 1).any():
            raise KgorchError(
                f"{int((answered_N != 1).sum())} questions were answered never or twice",
                next_step="start this stage anew; it cannot go on with another number of ranks",
            )
        if session.rank == 0:
            texts = tell.batch_decode(said_NT, skip_special_tokens=True)
            said = [(dataset.asked(index), text) for index, text in enumerate(texts)]
            figures = write(said, Path(data), session.output / "predictions", pictures)
            session.report(**figures)
            summary = {"questions": len(said), **figures, "weights": found.facts}
            (session.output / "predictions.json").write_text(json.dumps(summary, indent=1) + "\n")


def write(said: list[Said], root: Path, folder: Path, pictures: int) -> dict[str, float]:
    """answers.jsonl and the pictures; how good the answers are."""
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "answers.jsonl", "w", encoding="utf-8") as file:
        for asked, text in said:
            line = {
                "image": asked.image.relative_to(root).as_posix() if asked.image.is_relative_to(root) else str(asked.image),
                "question": asked.question, "answer": asked.answer, "predicted": answer_in(text), "said": text,
            }  # fmt: skip
            file.write(json.dumps(line, ensure_ascii=False) + "\n")
    of_picture: dict[Path, list[Said]] = {}
    for asked, text in said:
        of_picture.setdefault(asked.image, []).append((asked, text))
    for path in list(of_picture)[:pictures]:
        side_by_side(path, of_picture[path]).save(folder / f"{path.stem}.png", optimize=True)
    pairs = [(answer_in(text), asked.answer) for asked, text in said]
    return {
        "test_accuracy": sum(exact(*pair) for pair in pairs) / len(pairs),
        "test_f1": sum(token_f1(*pair) for pair in pairs) / len(pairs),
    }


def side_by_side(path: Path, said: Sequence[Said], side: int = 144, width: int = 620) -> Image.Image:
    """The picture, and beside it what was asked, what is right and what the student said, in green where it matches."""
    lines = list[tuple[str, str]]()
    for asked, text in said:
        right = exact(answer_in(text), asked.answer)
        lines.append((f"{asked.question}  →  {asked.answer}", "black"))
        lines += [
            (line, "#1a7f37" if right else "#b42318")
            for line in textwrap.wrap(text, 66, initial_indent="   ") or ["   –"]
        ]
    font, marks = font_with_marks(13)
    height = max(side + 8, 18 * len(lines) + 8)
    sheet = Image.new("RGB", (side + width, height), "white")
    draw = ImageDraw.Draw(sheet)
    sheet.paste(Image.fromarray(picture(path)).resize((side, side), Image.Resampling.NEAREST), (4, 4))
    for number, (line, colour) in enumerate(lines):
        draw.text((side + 14, 4 + 18 * number), line if marks else without_marks(line), fill=colour, font=font)
    return sheet


def font_with_marks(size: int) -> tuple[ImageFont.FreeTypeFont | ImageFont.ImageFont, bool]:
    """A font, and whether it knows Vietnamese letters: Pillow's own does not."""
    try:
        return ImageFont.truetype("DejaVuSans.ttf", size), True
    except OSError:
        return ImageFont.load_default(size), False


def without_marks(text: str) -> str:
    plain = unicodedata.normalize("NFD", text.replace("đ", "d").replace("Đ", "D").replace("→", "->").replace("–", "-"))
    return "".join(letter for letter in plain if not unicodedata.combining(letter))


if __name__ == "__main__":
    cli.run(main)
