"""What the three networks say of the last part of the time, how right they were, and a picture; goes on where it was cut.

    alone:  python -m kgorch.workloads.timeseries.predict --data prices --weights outputs

Axes: B batch, M networks, N windows of the part, K classes; x and y are pixels.
"""

from __future__ import annotations

import csv
import itertools
import json
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.distributed as dist
from PIL import Image, ImageDraw, ImageFont
from safetensors.torch import save_file
from torch import Tensor, nn

from kgorch import KgorchError, attach
from kgorch.workloads import cli
from kgorch.workloads.common.files import tell_left_out
from kgorch.workloads.common.precision import finite
from kgorch.workloads.common.trained import trained
from kgorch.workloads.timeseries.data import ANSWERS, Prices, Window
from kgorch.workloads.timeseries.model import MODELS, options_of

if TYPE_CHECKING:
    from kgorch import Session
    from kgorch.worker.checkpoint.stage_weights import Weights

BUCKETS = {2: (0.5, 0.55, 0.6, 0.7, 0.8, 1.0), 3: (1 / 3, 0.4, 0.5, 0.6, 0.7, 1.0)}
"""By number of classes: of the probability of the class that was said. The first is what a guess has."""

STRETCH = 120  # bars that the picture shows
SHARP = 3  # drawn so many times larger, then made smaller: Pillow draws no soft edges
GREEN, RED, INK, FAINT = "#1a7f37", "#b42318", "#333333", "#999999"


class Calls(nn.Module):
    """The networks' logits, the same on every rank, so that a cut stage goes on with any number of them."""

    def __init__(self, windows: int, classes: int) -> None:
        super().__init__()
        self.register_buffer("logits_MNK", torch.zeros(len(MODELS), windows, classes))
        self.register_buffer("asked_N", torch.zeros(windows))

    def add(self, index_B: Tensor, logits_MBK: Tensor, first: int, count: int) -> None:
        """What this rank found of this step's windows, which are `count` from `first` on; all ranks call it together."""
        found = torch.zeros(len(MODELS) + 1, count, logits_MBK.shape[2], device=self.asked_N.device)
        found[:, index_B - first] = torch.cat([logits_MBK, torch.ones_like(logits_MBK[:1])])
        dist.all_reduce(found)
        self.logits_MNK[:, first : first + count] = found[:-1]
        self.asked_N[first : first + count] = found[-1, :, 0]


def main(
    data: str,
    frames: list[str] = ["5m", "15m", "1h"],  # noqa: B006  (read only)
    length: int = 48,
    horizon: int = 4,
    threshold: float = 0.006,
    split: list[str] | None = None,
    embargo: int | None = None,
    global_batch: int = 256,
    weights: str | None = None,
    which: str | None = None,
    num_workers: int = 0,
    prefetch: int = 2,
    persistent_workers: bool = True,
    skip_broken: bool = False,
) -> None:
    """Write predictions/MODEL.csv, models/MODEL.safetensors, comparison.json (the best network first) and predictions.png.

    They lie in the output folder. --frames, --length, --horizon, --threshold, --split and --embargo as they were in training;
    all else is read off the weights. --which is best or final, where not the best that the plan keeps; --weights is the folder
    that holds MODEL.safetensors, needed when run without kgorch.
    """
    with attach() as session:
        found = {
            name: trained(session, name, file=weights and str(Path(weights, f"{name}.safetensors")), which=which)
            for name in MODELS
        }
        classes = options_of(found["lstm"])["classes"]
        prices = Prices(
            data, "test", frames=frames, length=length, horizon=horizon, classes=classes, threshold=threshold, split=split,
            embargo=embargo, skip_broken=skip_broken,
        )  # fmt: skip
        nets = [network(session, name, found[name], classes, len(frames), length) for name in MODELS]
        calls = Calls(len(prices), classes).to(session.device)
        session.track(calls=calls)
        tell_left_out(session, prices.left_out)
        reading = {"prefetch_factor": prefetch, "persistent_workers": persistent_workers} if num_workers else {}
        loader = session.loader(
            prices, global_batch, shuffle=False, drop_last=False, is_random=False, num_workers=num_workers, **reading
        )
        for batch in session.steps(loader, 1):
            index_B = batch.index.to(session.device)
            first = int(index_B[0]) // global_batch * global_batch
            if session.weight:
                logits_MBK = torch.stack([logits(session, net, batch) for net in nets])
            else:  # this rank has no window left, and was lent another rank's
                index_B, logits_MBK = index_B[:0], torch.zeros(len(nets), 0, classes, device=session.device)
            calls.add(index_B, logits_MBK, first, min(global_batch, len(prices) - first))
        if session.rank == 0:
            write(session, prices, calls, found)


def network(session: Session, name: str, found: Weights, classes: int, frames: int, length: int) -> nn.Module:
    """One of the three as it was trained: a rung of memory's ladder may have changed what the plan says."""
    options = options_of(found)
    if options["classes"] != classes:
        raise KgorchError(
            f"{name} tells {options['classes']} classes apart, lstm {classes}", next_step="train all with the same classes"
        )  # fmt: skip
    net = MODELS[name](frames, length, **options)
    try:
        net.load_state_dict(found)
    except RuntimeError as problem:
        raise KgorchError(
            f"the weights of {name} do not fit {frames} frames of {length} bars", str(problem).splitlines()[-1].strip(),
            next_step="give frames and length as they were in training",
        ) from problem  # fmt: skip
    return net.to(session.device).eval()


@torch.no_grad()
def logits(session: Session, net: nn.Module, batch: Window) -> Tensor:
    """[B, K] on the session's device, in as many pieces as a training step is cut into."""
    pieces = batch.bars.to(session.device).split(session.microbatch or len(batch.bars))
    return finite(session, lambda: torch.cat([net(piece) for piece in pieces]).float())


def write(session: Session, prices: Prices, calls: Calls, weights: dict[str, Weights]) -> None:
    """The results; of a quick test those windows alone that were asked."""
    asked = torch.nonzero(calls.asked_N.cpu()).flatten().tolist()
    answer_N = np.array([prices.answer(*prices.places[index]) for index in asked])
    for folder in ("predictions", "models"):
        (session.output / folder).mkdir(parents=True, exist_ok=True)
    said: dict[str, np.ndarray] = {}
    comparison = []
    commonest = float(np.bincount(answer_N).max() / len(asked))
    for name, logits_NK in zip(MODELS, calls.logits_MNK.cpu(), strict=True):
        found_NK = said[name] = logits_NK[asked].double().softmax(1).numpy()
        write_table(session.output / "predictions" / f"{name}.csv", prices, asked, answer_N, found_NK)
        save_file(dict(weights[name]), session.output / "models" / f"{name}.safetensors")
        accuracy = float((found_NK.argmax(1) == answer_N).mean())
        line = {"model": name, "test_accuracy": accuracy, "commonest_class": commonest, "windows": len(asked)}
        comparison.append(line | {"buckets": buckets(found_NK, answer_N), "weights": weights[name].facts})
    session.report(**{f"{item['model']}_accuracy": item["test_accuracy"] for item in comparison})
    comparison.sort(key=lambda item: -item["test_accuracy"])
    (session.output / "comparison.json").write_text(json.dumps(comparison, indent=1) + "\n")
    drawn(prices, asked, answer_N, said).save(session.output / "predictions.png", optimize=True)


def write_table(path: Path, prices: Prices, asked: list[int], answer_N: np.ndarray, found_NK: np.ndarray) -> None:
    """A line a window: symbol, when its bar closed (seconds since 1970 UTC), each class's probability, what came."""
    classes = ANSWERS[prices.classes]
    with open(path, "w", newline="", encoding="utf-8") as file:
        table = csv.writer(file, lineterminator="\n")
        table.writerow(["symbol", "time", *classes, "answer"])
        for index, answer, found_K in zip(asked, answer_N, found_NK, strict=True):
            number, bar = prices.places[index]
            at_s = prices.bars[number][0].closes_s[bar]
            table.writerow([prices.symbols[number], at_s, *(f"{value:.4f}" for value in found_K), classes[answer]])


def buckets(found_NK: np.ndarray, answer_N: np.ndarray) -> list[dict[str, float | int | None]]:
    """How often what was said with such a probability was right; None where nothing was."""
    edges = BUCKETS[found_NK.shape[1]]
    sure_N, right_N = found_NK.max(1), found_NK.argmax(1) == answer_N
    which_N = np.digitize(sure_N, edges[1:-1])
    return [
        {"from": low, "to": high, "windows": int(here.sum()), "accuracy": float(right_N[here].mean()) if here.any() else None}
        for number, (low, high) in enumerate(itertools.pairwise(edges))
        for here in [which_N == number]
    ]  # fmt: skip


# The picture


def drawn(
    prices: Prices,
    asked: list[int],
    answer_N: np.ndarray,
    said: dict[str, np.ndarray],
    width: int = 1100,
    height: int = 210,
) -> Image.Image:
    """A row a network: a stretch of one symbol's prices with what was said at each bar, and accuracy by confidence."""
    shown = stretch(prices, asked)
    sheet = Image.new("RGB", (width * SHARP, (height * len(said) + 24) * SHARP), "white")
    draw = ImageDraw.Draw(sheet)
    border = int(0.76 * width)
    symbol = prices.symbols[prices.places[asked[shown[0]]][0]]
    for row, (name, found_NK) in enumerate(said.items()):
        top, said_N = row * height, found_NK.argmax(1)
        right = float((said_N == answer_N).mean())
        say(draw, 12, top + 10, f"{name}: {right:.1%} of {len(asked)} right; here {symbol}, {len(shown)} bars", INK)
        draw_calls(draw, prices, asked, shown, answer_N, said_N, (12, top + 34, border - 20, top + height - 10))
        draw_buckets(draw, buckets(found_NK, answer_N), (border, top + 34, width - 12, top + height - 10))
    foot = height * len(said)
    left = 18
    for number, answer in enumerate(ANSWERS[prices.classes]):
        marker(draw, left, foot + 10, rises(number, prices.classes), right=True)
        say(draw, left + 10, foot + 4, f"said {answer}", INK)
        left += 80
    say(draw, left + 10, foot + 4, "filled green: right, hollow red: wrong", INK)
    say(draw, border, foot + 4, "right, by probability of what was said", INK)
    return sheet.resize((width, sheet.height // SHARP), Image.Resampling.LANCZOS)


def rises(said: int, classes: int) -> int:
    """1 for up, -1 for down, 0 for flat."""
    return (said > 0) - (said == 0) if classes == 2 else said - 1


def stretch(prices: Prices, asked: list[int]) -> range:
    """Which of the asked windows are shown: from the middle of the first symbol's."""
    first = prices.places[asked[0]][0]
    of_symbol = sum(prices.places[index][0] == first for index in asked)
    begin = max(0, (of_symbol - STRETCH) // 2)
    return range(begin, min(begin + STRETCH, of_symbol))


def draw_calls(
    draw: ImageDraw.ImageDraw, prices: Prices, asked: list[int], shown: range, answer_N: np.ndarray, said_N: np.ndarray,
    box: tuple[int, int, int, int],
) -> None:  # fmt: skip
    left, top, right, bottom = box
    places = [prices.places[asked[number]] for number in shown]
    close = np.array([prices.bars[symbol][0].close[bar] for symbol, bar in places])
    x = np.linspace(left + 6, right - 6, len(close))
    y = bottom - 12 - (close - close.min()) / max(float(np.ptp(close)), 1e-12) * (bottom - top - 24)
    draw.line([(a * SHARP, b * SHARP) for a, b in zip(x, y, strict=True)], fill=FAINT, width=SHARP)
    for number, a, b in zip(shown, x, y, strict=True):
        way = rises(int(said_N[number]), prices.classes)
        marker(draw, a, b + (8 if way > 0 else -8), way, right=bool(said_N[number] == answer_N[number]))


def marker(draw: ImageDraw.ImageDraw, x: float, y: float, way: int, *, right: bool, size: float = 3.4) -> None:
    """A triangle that points to where the price is said to go; a square for flat."""
    tip = -way * size
    corners = [(x, y + tip), (x - size, y - tip), (x + size, y - tip)]
    if way == 0:
        corners = [(x - size, y - size), (x + size, y - size), (x + size, y + size), (x - size, y + size)]
    draw.polygon(
        [(a * SHARP, b * SHARP) for a, b in corners], fill=GREEN if right else "white", outline=GREEN if right else RED,
        width=SHARP,
    )  # fmt: skip


def draw_buckets(
    draw: ImageDraw.ImageDraw, found: list[dict[str, float | int | None]], box: tuple[int, int, int, int]
) -> None:
    """A bar a bucket, from 0 to 1; the line is what a guess has."""
    left, top, right, bottom = box
    floor, wide, chance = bottom - 30, (right - left) / len(found), found[0]["from"] or 0.0
    for number, bucket in enumerate(found):
        x = left + number * wide
        say(draw, x, floor + 3, f"{bucket['from']:.0%}", INK)
        say(draw, x, floor + 16, f"{bucket['windows']:,}", FAINT)
        if (accuracy := bucket["accuracy"]) is not None:
            y = floor - accuracy * (floor - top)
            draw.rectangle(
                [int(v * SHARP) for v in (x, y, x + 0.7 * wide, floor)], fill=GREEN if accuracy > chance else RED
            )
            say(draw, x, y - 13, f"{accuracy:.0%}", INK)
    guess = int((floor - chance * (floor - top)) * SHARP)
    draw.line([(left * SHARP, guess), (right * SHARP, guess)], fill=INK, width=SHARP)


def say(draw: ImageDraw.ImageDraw, x: float, y: float, text: str, colour: str) -> None:
    draw.text((x * SHARP, y * SHARP), text, fill=colour, font=ImageFont.load_default(11 * SHARP))


if __name__ == "__main__":
    cli.run(main)
