"""Prices as exchanges hand them out, and the windows that look back from a bar.

    <root>/<SYMBOL>/<frame>.csv   time,open,high,low,close,volume, a line a bar; frame: "5m", "15m", "1h", "1d"

`time` is when the bar begins, in seconds since 1970 UTC. The first frame is the one that is traded: each of its bars gives a
window. A window holds, of every frame, the newest bars that were over when the bar closed, so nothing of it lies ahead.
Axes: B batch, F frames, T bars, C figures of a bar.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from workloads.common.files import DataError, readable

Part = Literal["train", "valid", "test"]
SHARES: dict[str, tuple[float, float]] = {"train": (0.0, 0.7), "valid": (0.7, 0.85), "test": (0.85, 1.0)}
COLUMNS = ("time", "open", "high", "low", "close", "volume")
FIGURES = 5
SECONDS = {"m": 60, "h": 3600, "d": 86400}


class Window(NamedTuple):
    """One sample; in a batch every axis list begins with B."""

    bars: Tensor  # float32 [F, T, C]
    up: Tensor  # float32 []: 1 where the price stands higher `horizon` bars later
    at: Tensor  # int64 [2]: number of the symbol, when its bar closed
    index: Tensor  # int64 []: which sample of the part this is


@dataclass(frozen=True)
class Bars:
    """One symbol at one frame, in the order of time."""

    begins_s: np.ndarray  # int64 [N]
    span_s: int
    close: np.ndarray  # float64 [N]
    figures_NC: np.ndarray  # float32 [N, C]

    def newest_closed(self, at_s: int) -> int:
        """Index of the newest bar that is over at that instant; -1 for none."""
        return int(np.searchsorted(self.begins_s + self.span_s, at_s, side="right")) - 1


class Prices(Dataset[Window]):
    """The windows of one part of the time, over all symbols.

    Args:
        part: train comes before valid, valid before test; what a window's answer reaches into belongs to none of them.
        frames: the first is the traded one. length: bars of each. horizon: bars until the answer.
        skip_broken: leave out symbols of which a file cannot be read; `left_out` says why.

    Raises:
        DataError: the folder does not hold what it should.
    """

    def __init__(
        self, root: str | Path, part: Part, *, frames: Sequence[str] = ("5m", "15m", "1h"), length: int = 48, horizon: int = 4,
        skip_broken: bool = False,
    ) -> None:  # fmt: skip
        self.length, self.horizon = length, horizon

        @functools.cache
        def bars_of(symbol: str) -> list[Bars]:
            return [read(Path(root) / symbol / f"{frame}.csv", frame) for frame in frames]

        self.symbols, self.left_out = readable(symbols_of(Path(root)), bars_of, skip_broken=skip_broken)
        self.bars = [bars_of(symbol) for symbol in self.symbols]
        self.places = [
            (number, index) for number, of_frames in enumerate(self.bars) for index in self._usable(of_frames, part)
        ]
        if not self.places:
            raise DataError(
                f"no window for the part '{part}' of {root}",
                f"expected {length} bars of each of {', '.join(frames)} and {horizon} more, found too few",
                next_step="fetch a longer stretch of prices, or lower length",
            )

    def _usable(self, of_frames: list[Bars], part: Part) -> range:
        traded, (start, end) = of_frames[0], SHARES[part]
        count = len(traded.close)
        first, last = int(start * count), int(end * count) - self.horizon
        while first < last and not all(
            bars.newest_closed(int(traded.begins_s[first]) + traded.span_s) >= self.length for bars in of_frames
        ):
            first += 1
        return range(first, max(first, last))

    def __len__(self) -> int:
        return len(self.places)

    def __getitem__(self, index: int) -> Window:
        number, bar = self.places[index]
        traded = self.bars[number][0]
        at_s = int(traded.begins_s[bar]) + traded.span_s
        windows = []
        for bars in self.bars[number]:
            newest = bars.newest_closed(at_s)
            windows.append(standardised(bars.figures_NC[newest - self.length + 1 : newest + 1]))
        up = traded.close[bar + self.horizon] > traded.close[bar]
        return Window(
            torch.from_numpy(np.stack(windows)),
            torch.tensor(float(up)),
            torch.tensor([number, at_s], dtype=torch.int64),
            torch.tensor(index),
        )


def standardised(figures_TC: np.ndarray) -> np.ndarray:
    """Each figure by its own spread in the window, but not shifted: the sign of a return is what matters."""
    spread_C = np.sqrt((figures_TC**2).mean(0)) + 1e-6
    return (figures_TC / spread_C).astype(np.float32)


def symbols_of(root: Path) -> list[str]:
    found = sorted(folder.name for folder in root.iterdir() if folder.is_dir()) if root.is_dir() else []
    if not found:
        raise DataError(
            f"there are no prices in {root}", "expected a folder a symbol, with a file FRAME.csv a time frame",
            next_step=f"correct the path, or: python -m workloads.timeseries.make_prices {root}",
        )  # fmt: skip
    return found


def read(path: Path, frame: str) -> Bars:
    """One file, checked: its columns, its times, its prices."""
    span = re.fullmatch(r"(\d+)([mhd])", frame)
    if span is None:
        raise DataError(f"{frame!r} is no time frame", next_step='write it as "5m", "1h" or "1d"')
    try:
        with open(path, encoding="utf-8") as file:
            head = [name.strip().lower() for name in file.readline().split(",")]
            if missing := [name for name in COLUMNS if name not in head]:
                raise DataError(
                    f"{path} has no column {missing[0]!r}", f"found {', '.join(head)}",
                    next_step=f"its first line names the columns: {','.join(COLUMNS)}; or: skip_broken = true",
                )  # fmt: skip
            table = np.loadtxt(file, delimiter=",", usecols=[head.index(name) for name in COLUMNS], ndmin=2)
    except (OSError, ValueError) as problem:
        raise DataError(
            f"{path.name} of {path.parent.name} cannot be read", f"{path}: expected a CSV of numbers, found: {problem}",
            next_step="fetch this file again, or leave such symbols out: skip_broken = true",
        ) from problem  # fmt: skip
    see_that_they_are_prices(path, table)
    time, open_, high, low, close, volume = table.T
    before = np.concatenate([close[:1], close[:-1]])
    width = np.maximum(high - low, 1e-9 * close)
    loud = np.log1p(volume)
    figures = (
        np.log(close / before),
        np.log(close / open_),
        np.log(high / low),
        (2 * close - high - low) / width,
        loud - loud.mean(),
    )
    return Bars(time.astype(np.int64), int(span[1]) * SECONDS[span[2]], close, np.stack(figures, 1).astype(np.float32))


def see_that_they_are_prices(path: Path, table: np.ndarray) -> None:
    """Raises DataError naming the first line that is wrong."""
    time, prices, volume = table[:, 0], table[:, 1:5], table[:, 5]
    wrong = {
        "a price that is not above 0": ~(np.isfinite(prices) & (prices > 0)).all(1),
        "a volume below 0": ~(np.isfinite(volume) & (volume >= 0)),
        "a high below its low": prices[:, 1] < prices[:, 2],
        "a time that does not come after the one before": np.concatenate([[False], ~(np.diff(time) > 0)])
        | ~np.isfinite(time),
    }
    for what, lines in wrong.items():
        if lines.any():
            line = int(np.argmax(lines))
            found = ",".join(f"{value:g}" for value in table[line])
            raise DataError(
                f"{path}:{line + 2}: {what}",
                f"found {found}",
                next_step="correct this line or leave it out, or leave out such symbols: skip_broken = true",
            )
