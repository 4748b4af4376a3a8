"""What the three networks say of the last part of the time, how right they were, and a picture; goes on where it was cut.

    alone:  python -m workloads.timeseries.predict --data prices --weights outputs

Axes: B batch, M networks, N windows of the part; x and y are pixels.
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
from torch import Tensor, nn

from orchestrator.errors import KgorchError
from orchestrator.worker import attach
from workloads import cli
from workloads.common.files import tell_left_out
from workloads.common.trained import trained
from workloads.timeseries.data import Prices, Window
from workloads.timeseries.model import MODELS, hidden_of

if TYPE_CHECKING:
    from orchestrator.worker.session import Session
    from orchestrator.worker.weights import Weights

BUCKETS = (0.5, 0.55, 0.6, 0.7, 0.8, 1.0)
"""Of the probability of the side that was said; half is no opinion at all."""

STRETCH = 120  # bars that the picture shows
SHARP = 3  # drawn so many times larger, then made smaller: Pillow draws no soft edges
GREEN, RED, INK, FAINT = "#1a7f37", "#b42318", "#333333", "#999999"


class Calls(nn.Module):
    """The networks' logits, the same on every rank, so that a cut stage goes on with any number of them."""

    def __init__(self, windows: int) -> None:
        super().__init__()
        self.register_buffer("logits_MN", torch.zeros(len(MODELS), windows))
        self.register_buffer("asked_N", torch.zeros(windows))

    def add(self, index_B: Tensor, logits_MB: Tensor, first: int, count: int) -> None:
        """What this rank found of this step's windows, which are `count` from `first` on; all ranks call it together."""
        found = torch.zeros(len(MODELS) + 1, count, device=self.asked_N.device)
        found[:, index_B - first] = torch.cat([logits_MB, torch.ones_like(logits_MB[:1])])
        dist.all_reduce(found)
        self.logits_MN[:, first : first + count] = found[:-1]
        self.asked_N[first : first + count] = found[-1]


def main(
    data: str,
    frames: list[str] = ["5m", "15m", "1h"],  # noqa: B006  (read only)
    length: int = 48,
    horizon: int = 4,
    global_batch: int = 256,
    weights: str | None = None,
    which: str | None = None,
    num_workers: int = 0,
    prefetch: int = 2,
    skip_broken: bool = False,
) -> None:
    """Write predictions/MODEL.csv, comparison.json (the best network first) and predictions.png to the output folder.

    --frames, --length and --horizon as they were in training; --which is best or final, where not the best that the plan keeps;
    --weights is the folder that holds MODEL.safetensors, needed when run without kgorch.
    """
    with attach() as session:
        prices = Prices(data, "test", frames=frames, length=length, horizon=horizon, skip_broken=skip_broken)
        found = {
            name: trained(session, name, file=weights and str(Path(weights, f"{name}.safetensors")), which=which)
            for name in MODELS
        }
        nets = [network(session, name, found[name], len(frames), length) for name in MODELS]
        calls = Calls(len(prices)).to(session.device)
        session.track(calls=calls)
        tell_left_out(session, prices.left_out)
        loader = session.loader(
            prices, global_batch, shuffle=False, drop_last=False, num_workers=num_workers,
            prefetch_factor=prefetch if num_workers else None,
        )  # fmt: skip
        for batch in session.steps(loader, 1):
            index_B = batch.index.to(session.device)
            first = int(index_B[0]) // global_batch * global_batch
            if session.weight:
                logits_MB = torch.stack([logits(session, net, batch) for net in nets])
            else:  # this rank has no window left, and was lent another rank's
                index_B, logits_MB = index_B[:0], torch.zeros(len(nets), 0, device=session.device)
            calls.add(index_B, logits_MB, first, min(global_batch, len(prices) - first))
        if session.rank == 0:
            write(session, prices, calls, found)


def network(session: Session, name: str, found: Weights, frames: int, length: int) -> nn.Module:
    """One of the three as it was trained, as wide as its weights are: a rung of memory's ladder may have changed that."""
    net = MODELS[name](frames, length, hidden_of(found))
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
    """[B] on the session's device, in as many pieces as a training step is cut into."""
    pieces = batch.bars.split(session.microbatch or len(batch.bars))
    with session.autocast(torch.float16, enabled=session.device.type == "cuda"):
        return torch.cat([net(piece.to(session.device)) for piece in pieces]).float()


def write(session: Session, prices: Prices, calls: Calls, weights: dict[str, Weights]) -> None:
    """The three results; of a quick test those windows alone that were asked."""
    asked = torch.nonzero(calls.asked_N.cpu()).flatten().tolist()
    windows = [place_of(prices, index) for index in asked]
    up_N = np.array([up for *_, up in windows])
    folder = session.output / "predictions"
    folder.mkdir(parents=True, exist_ok=True)
    probabilities: dict[str, np.ndarray] = {}
    comparison = []
    for name, logits_N in zip(MODELS, calls.logits_MN.cpu(), strict=True):
        found_N = probabilities[name] = logits_N[asked].double().sigmoid().numpy()
        with open(folder / f"{name}.csv", "w", newline="", encoding="utf-8") as file:
            table = csv.writer(file, lineterminator="\n")
            table.writerow(["symbol", "time", "probability", "up"])
            for (symbol, at_s, up), probability in zip(windows, found_N, strict=True):
                table.writerow([symbol, at_s, f"{probability:.4f}", int(up)])
        accuracy = float(((found_N > 0.5) == up_N).mean())
        line = {"model": name, "test_accuracy": accuracy, "windows": len(asked), "buckets": buckets(found_N, up_N)}
        comparison.append(line | {"weights": weights[name].facts})
    session.report(**{f"{item['model']}_accuracy": item["test_accuracy"] for item in comparison})
    comparison.sort(key=lambda item: -item["test_accuracy"])
    (session.output / "comparison.json").write_text(json.dumps(comparison, indent=1) + "\n")
    drawn(prices, asked, up_N, probabilities).save(session.output / "predictions.png", optimize=True)


def place_of(prices: Prices, index: int) -> tuple[str, int, bool]:
    """Symbol, when the bar closed (s since 1970 UTC), and whether the price stood higher later."""
    number, bar = prices.places[index]
    traded = prices.bars[number][0]
    at_s = int(traded.begins_s[bar]) + traded.span_s
    return prices.symbols[number], at_s, bool(traded.close[bar + prices.horizon] > traded.close[bar])


def buckets(found_N: np.ndarray, up_N: np.ndarray) -> list[dict[str, float | int | None]]:
    """How often what was said with such a probability was right; None where nothing was."""
    sure_N, right_N = np.maximum(found_N, 1 - found_N), (found_N > 0.5) == up_N
    which_N = np.digitize(sure_N, BUCKETS[1:-1])
    return [
        {"from": low, "to": high, "windows": int(here.sum()), "accuracy": float(right_N[here].mean()) if here.any() else None}
        for number, (low, high) in enumerate(itertools.pairwise(BUCKETS))
        for here in [which_N == number]
    ]  # fmt: skip


# The picture


def drawn(
    prices: Prices, asked: list[int], up_N: np.ndarray, probabilities: dict[str, np.ndarray], width: int = 1100, height: int = 210
) -> Image.Image:  # fmt: skip
    """A row a network: a stretch of one symbol's prices with what was said at each bar, and accuracy by confidence."""
    shown = stretch(prices, asked)
    sheet = Image.new("RGB", (width * SHARP, (height * len(probabilities) + 24) * SHARP), "white")
    draw = ImageDraw.Draw(sheet)
    border = int(0.76 * width)
    for row, (name, found_N) in enumerate(probabilities.items()):
        top = row * height
        right = float(((found_N > 0.5) == up_N).mean())
        symbol = prices.symbols[prices.places[asked[shown[0]]][0]]
        say(draw, 12, top + 10, f"{name}: {right:.1%} of {len(asked)} right; here {symbol}, {len(shown)} bars", INK)
        draw_calls(draw, prices, asked, shown, up_N, found_N, (12, top + 34, border - 20, top + height - 10))
        draw_buckets(draw, buckets(found_N, up_N), (border, top + 34, width - 12, top + height - 10))
    foot = height * len(probabilities)
    marker(draw, 18, foot + 10, rising=True, right=True)
    say(draw, 28, foot + 4, "said up", INK)
    marker(draw, 98, foot + 10, rising=False, right=True)
    say(draw, 108, foot + 4, "said down; filled green: right, hollow red: wrong", INK)
    say(draw, border, foot + 4, "right, by probability of what was said", INK)
    return sheet.resize((width, sheet.height // SHARP), Image.Resampling.LANCZOS)


def stretch(prices: Prices, asked: list[int]) -> range:
    """Which of the asked windows are shown: from the middle of the first symbol's."""
    first = prices.places[asked[0]][0]
    of_symbol = sum(prices.places[index][0] == first for index in asked)
    begin = max(0, (of_symbol - STRETCH) // 2)
    return range(begin, min(begin + STRETCH, of_symbol))


def draw_calls(
    draw: ImageDraw.ImageDraw, prices: Prices, asked: list[int], shown: range, up_N: np.ndarray, found_N: np.ndarray,
    box: tuple[int, int, int, int],
) -> None:  # fmt: skip
    left, top, right, bottom = box
    places = [prices.places[asked[number]] for number in shown]
    close = np.array([prices.bars[symbol][0].close[bar] for symbol, bar in places])
    x = np.linspace(left + 6, right - 6, len(close))
    y = bottom - 12 - (close - close.min()) / max(float(np.ptp(close)), 1e-12) * (bottom - top - 24)
    draw.line([(a * SHARP, b * SHARP) for a, b in zip(x, y, strict=True)], fill=FAINT, width=SHARP)
    for number, a, b in zip(shown, x, y, strict=True):
        rising = bool(found_N[number] > 0.5)
        marker(draw, a, b + (8 if rising else -8), rising=rising, right=rising == bool(up_N[number]))


def marker(draw: ImageDraw.ImageDraw, x: float, y: float, *, rising: bool, right: bool, size: float = 3.4) -> None:
    """A triangle that points to where the price is said to go."""
    tip = -size if rising else size
    corners = [(x, y + tip), (x - size, y - tip), (x + size, y - tip)]
    draw.polygon(
        [(a * SHARP, b * SHARP) for a, b in corners], fill=GREEN if right else "white", outline=GREEN if right else RED,
        width=SHARP,
    )  # fmt: skip


def draw_buckets(
    draw: ImageDraw.ImageDraw, found: list[dict[str, float | int | None]], box: tuple[int, int, int, int]
) -> None:
    """A bar a bucket, from 0 to 1; the line is at a half, which is chance."""
    left, top, right, bottom = box
    floor, wide = bottom - 30, (right - left) / len(found)
    for number, bucket in enumerate(found):
        x = left + number * wide
        say(draw, x, floor + 3, f"{bucket['from']:.0%}", INK)
        say(draw, x, floor + 16, f"{bucket['windows']:,}", FAINT)
        if (accuracy := bucket["accuracy"]) is not None:
            y = floor - accuracy * (floor - top)
            draw.rectangle(
                [int(v * SHARP) for v in (x, y, x + 0.7 * wide, floor)], fill=GREEN if accuracy > 0.5 else RED
            )
            say(draw, x, y - 13, f"{accuracy:.0%}", INK)
    half = int((floor + top) / 2 * SHARP)
    draw.line([(left * SHARP, half), (right * SHARP, half)], fill=INK, width=SHARP)


def say(draw: ImageDraw.ImageDraw, x: float, y: float, text: str, colour: str) -> None:
    draw.text((x * SHARP, y * SHARP), text, fill=colour, font=ImageFont.load_default(11 * SHARP))


if __name__ == "__main__":
    cli.run(main)
