r"""Answer a listing's questions; goes on where it was cut.

    alone:  python -m kgorch.workloads.vqa.predict --data shapes/test --listing shapes/test.csv --students shapes/students \
                --weights outputs/student.safetensors

Axes: N questions, T tokens of the answer.
"""

from __future__ import annotations

import json
import textwrap
import unicodedata
from collections.abc import Sequence
from pathlib import Path
from statistics import mean

import numpy as np
import torch
import torch.distributed as dist
from PIL import Image, ImageDraw, ImageFont
from safetensors.torch import load_model
from torch import nn

from kgorch import KgorchError, attach
from kgorch.workloads import cli
from kgorch.workloads.common.files import picture, tell_left_out
from kgorch.workloads.common.precision import finite
from kgorch.workloads.common.trained import trained
from kgorch.workloads.vqa import parts
from kgorch.workloads.vqa.curriculum import parsed
from kgorch.workloads.vqa.data import Asked, Questions, read_questions, spread, with_pictures
from kgorch.workloads.vqa.fetch import complete
from kgorch.workloads.vqa.model import Student
from kgorch.workloads.vqa.scores import exact, rouge_l, token_f1

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
    listing: str,
    students: str,
    teacher: str | None = None,
    limit: int | None = None,
    image_encoder: str = "blip-vqa-base",
    text_encoder: str = "phobert-base",
    decoder: str = "vit5-base",
    text_tokenizer: str | None = None,
    answer_tokenizer: str | None = None,
    download: bool = False,
    question_length: int = 64,
    answer_length: int = 160,
    fusion: str = "mlp",
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

    --listing is ViVQA's test.csv or a teacher's .jsonl, --data the folder of its pictures, --limit answers so many questions only;
    lengths, fusion and folders as they were in training; --which is best or final, where not the best that the plan keeps;
    --weights is a safetensors file, needed when run without kgorch.
    """
    folders = parts.Folders.of(students, image_encoder, text_encoder, decoder, text_tokenizer, answer_tokenizer)
    if download:
        complete(folders.needed)
    with attach() as session:
        ask, tell = folders.tokenizers(question_length)
        student = Student(*folders.models, fusion=fusion, layers=fusion_layers, tokens=len(tell))
        found = trained(session, "train", file=weights, which=which)
        if weights:
            load_model(student, weights)  # one of save_model lacks the second names of tied tensors
        else:
            student.load_state_dict(found)
        found.clear()  # the student has them: 1.5 GB that need not be held twice
        student.to(session.device).eval()
        asked, broken = read_questions(listing, teacher, skip_broken=skip_broken)
        asked, unreadable = with_pictures(asked, data, session=session, skip_broken=skip_broken, name="predict")
        tell_left_out(session, [*broken, *unreadable])
        dataset = Questions(
            spread(asked, limit), session.data(data), ask, tell, size=student.vision_encoder.config.image_size,
            question_length=question_length, answer_length=answer_length,
        )  # fmt: skip
        # Each rank keeps what it answered itself, and the position counts batches of all ranks.
        divided = [session.world_size, eval_batch]
        if (before := session.resumed.get("divided", divided)) != divided:
            raise KgorchError(
                "this stage cannot go on with another number of ranks, or another eval_batch",
                f"ranks and eval_batch were {before}, now they are {divided}",
                next_step="start this stage anew, or go on with what it had",
            )
        session.remember(divided=divided)
        page = Page(len(dataset), answer_length).to(session.device)
        session.track(page=page)
        loader = session.loader(
            dataset, eval_batch * session.world_size, shuffle=False, drop_last=False, num_workers=num_workers,
            prefetch_factor=prefetch if num_workers else None,
        )  # fmt: skip
        for batch in session.steps(loader, 1):
            if session.weight:  # else this rank has no question left, and was lent another rank's
                here = session.to_device(batch)
                said_BT = finite(
                    session,
                    lambda here=here: student.say(here.image, here.question, beams=beams, length=answer_length),
                    output_of=student.decoder.get_output_embeddings(),
                )
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
            said = list(zip(dataset.asked, texts, strict=True))
            write(said, Path(data), session.output / "predictions", pictures)
            figures = figures_of(said)
            session.report(**figures)
            by_kind = {kind: figures_of([one for one in said if one[0].kind == kind]) for kind in kinds_of(said)}
            summary = {"questions": len(said), **figures, "by_reasoning_type": by_kind, "weights": found.facts}
            (session.output / "predictions.json").write_text(json.dumps(summary, indent=1) + "\n")


def write(said: Sequence[Said], root: Path, folder: Path, pictures: int) -> None:
    """answers.jsonl and the pictures."""
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "answers.jsonl", "w", encoding="utf-8") as file:
        for asked, text in said:
            found = parsed(text)
            line = {
                "image": asked.image, "question": asked.question, "answer": asked.answer, "predicted": found.answer,
                "reasoning_type": found.kind, "reasoning": found.reason, "said": text,
            }  # fmt: skip
            file.write(json.dumps(line, ensure_ascii=False) + "\n")
    of_picture: dict[str, list[Said]] = {}
    for asked, text in said:
        of_picture.setdefault(asked.image, []).append((asked, text))
    for name in list(of_picture)[:pictures]:
        side_by_side(root / name, of_picture[name]).save(folder / f"{Path(name).stem}.png", optimize=True)


def figures_of(said: Sequence[Said]) -> dict[str, float]:
    """How good the answers are, the share with all tags in order, and where reasons are known how near the student's come."""
    answers = [(parsed(text), asked) for asked, text in said]
    reasons = [rouge_l(found.reason, asked.reason) for found, asked in answers if asked.reason]
    figures = {
        "test_accuracy": mean(exact(found.answer, asked.answer) for found, asked in answers),
        "test_f1": mean(token_f1(found.answer, asked.answer) for found, asked in answers),
        "test_format": mean(found.is_whole for found, _ in answers),
    }
    return figures | ({"test_rouge_l": mean(reasons)} if reasons else {})


def kinds_of(said: Sequence[Said]) -> list[str]:
    """The teacher's reasoning types, where it gave some."""
    return sorted({asked.kind for asked, _ in said if asked.kind})


def side_by_side(path: Path, said: Sequence[Said], side: int = 144, width: int = 620) -> Image.Image:
    """The picture, and beside it what was asked, what is right and what the student said, in green where it matches."""
    lines = list[tuple[str, str]]()
    for asked, text in said:
        right = exact(parsed(text).answer, asked.answer)
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
