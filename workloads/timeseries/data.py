"""Windows that look back over the bars of several time frames, each with what the price did afterwards.

A window is decided when a bar of the first, the traded time frame is over. It holds, of every frame, the newest bars that
were over by then. Its answer is known `horizon` traded bars later. Two instants, the same for all symbols, divide the time:
answers of a part are known before the next part begins, and the traded bars of a window all lie in its own part.
Axes: B batch, F frames, T bars, C figures of a bar.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from kgorch.workloads.common.files import DataError, readable
from kgorch.workloads.timeseries.bars import FIGURES, VOLUME, Bars, seconds_of, utc
from kgorch.workloads.timeseries.layout import Layout

Part = Literal["train", "valid", "test"]
SHARES = (0.7, 0.85)
"""Of all windows' decisions, how many lie before the validation part, and before the test part."""

ANSWERS = {2: ("down", "up"), 3: ("down", "flat", "up")}
"""By number of classes. Of two, an unchanged price counts as down."""

STALE_S = 7 * 86400
"""A window is left out when its frames or its answer lie so much further apart than the bars are long: a file ends early."""


class Window(NamedTuple):
    """One sample; in a batch every axis list begins with B."""

    bars: Tensor  # float32 [F, T, C]
    answer: Tensor  # int64 []: place in ANSWERS
    at: Tensor  # int64 [2]: number of the symbol, when its bar closed
    index: Tensor  # int64 []: which sample of the part this is


class Prices(Dataset[Window]):
    """The windows of one part of the time, over all symbols.

    Args:
        root: a folder or a file, see layout.py.
        frames: the first is the traded one. length: bars of each. horizon: traded bars until the answer.
        classes: 2, or 3 with `threshold`: returns between -threshold and threshold are flat.
        split: two dates at which validation and test begin; without them they are found by SHARES.
        embargo: traded bars at the beginning of validation and test that no window ends in; None for `length`.
        limit: so many windows at most, evenly over the part.
        first: of so many symbols alone, by name.
        skip_broken: leave out symbols of which a file cannot be read; `left_out` says why.

    Raises:
        DataError: the folder does not hold what it should.
    """

    def __init__(
        self, root: str | Path, part: Part, *, frames: Sequence[str] = ("5m", "15m", "1h"), length: int = 48, horizon: int = 4,
        classes: int = 2, threshold: float = 0.006, split: Sequence[str] | None = None, embargo: int | None = None,
        limit: int | None = None, first: int | None = None, skip_broken: bool = False,
    ) -> None:  # fmt: skip
        if classes not in ANSWERS:
            raise DataError(f"classes = {classes}", next_step="give 2 (down, up) or 3 (down, flat, up)")
        self.length, self.horizon, self.classes = length, horizon, classes
        self._threshold = threshold if classes == 3 else 0.0
        layout = Layout(Path(root), frames)
        bars_of = functools.cache(layout.bars)
        self.symbols, self.left_out = readable(list(layout.files)[:first], bars_of, skip_broken=skip_broken)
        self.bars = [bars_of(symbol) for symbol in self.symbols]
        self._newest_FN = [newest_closed(of_frames) for of_frames in self.bars]
        self.usable = [
            self._usable(of_frames, newest_FN) for of_frames, newest_FN in zip(self.bars, self._newest_FN, strict=True)
        ]
        self.valid_from_s, self.test_from_s = self._split(split)
        self._embargo = length if embargo is None else embargo
        self._take(part, limit)

    def of(self, part: Part) -> Prices:
        """Another part of the same prices, which are not read again."""
        other = copy.copy(self)
        other._take(part, None)
        return other

    def _take(self, part: Part, limit: int | None) -> None:
        """Set `places`, int64 [N, 2]: the symbol's number and the traded bar of each window."""
        found = [self._part(number, part) for number in range(len(self.bars))]
        places = np.concatenate([np.stack([np.full_like(bars, n), bars], 1) for n, bars in enumerate(found)] or [EMPTY])
        if limit is not None and len(places) > limit:
            places = places[np.linspace(0, len(places) - 1, limit).round().astype(np.int64)]
        if not len(places):
            raise DataError(
                f"no window for the part '{part}'",
                f"expected {self.length} bars of each time frame, {self.horizon} until the answer, an embargo of {self._embargo}"
                f" between the parts; {len(self.bars)} symbols have {sum(map(len, self.usable))} windows in all",
                next_step="fetch a longer stretch of prices, or lower length or embargo",
            )  # fmt: skip
        self.places = places

    def _usable(self, of_frames: list[Bars], newest_FN: np.ndarray) -> np.ndarray:
        """int64 [N]: the traded bars at whose end a window can be decided, and whose answer is known."""
        traded = of_frames[0]
        bar = np.arange(max(0, len(traded.close) - self.horizon))
        at_s, answer_s = traded.closes_s[bar], traded.closes_s[bar + self.horizon]
        is_usable = answer_s - at_s <= self.horizon * traded.span_s + STALE_S
        for bars, newest in zip(of_frames, newest_FN[:, : len(bar)], strict=True):
            is_usable &= (newest >= self.length) & (at_s - bars.closes_s[newest] <= bars.span_s + STALE_S)
        return bar[is_usable]

    def _split(self, dates: Sequence[str] | None) -> tuple[int, int]:
        """When validation and test begin, seconds since 1970 UTC, for all symbols the same."""
        if dates is None:
            at_s = np.concatenate(
                [of[0].closes_s[bar] for of, bar in zip(self.bars, self.usable, strict=True)] or [EMPTY[:, 0]]
            )
            return tuple(np.quantile(at_s, SHARES, method="lower").tolist()) if len(at_s) else (0, 0)
        try:
            valid_s, test_s = (int(seconds_of(date)) for date in dates)
        except ValueError as problem:
            raise DataError(f"split = {list(dates)}: {problem}", next_step=SPLIT) from None
        if valid_s >= test_s:
            raise DataError(f"split = {list(dates)}: validation does not begin before test", next_step=SPLIT)
        return valid_s, test_s

    def _part(self, number: int, part: Part) -> np.ndarray:
        """Those of a symbol's usable bars that belong to a part."""
        traded, bar = self.bars[number][0], self.usable[number]
        answer_s = traded.closes_s[bar + self.horizon]
        starts = {"train": None, "valid": self.valid_from_s, "test": self.test_from_s}
        ends = {"train": self.valid_from_s, "valid": self.test_from_s, "test": None}
        belongs = np.ones(len(bar), bool)
        if (start_s := starts[part]) is not None:
            belongs &= bar >= np.searchsorted(traded.begins_s, start_s) + max(self._embargo - 1, 0)
        if (end_s := ends[part]) is not None:
            belongs &= answer_s <= end_s
        return bar[belongs]

    def __len__(self) -> int:
        return len(self.places)

    def __getitem__(self, index: int) -> Window:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[Window]:
        """All samples of a batch at once, in a sixth of the time of one after another."""
        places = self.places[list(indices)].tolist()
        windows_BFTC = torch.from_numpy(self.windows(places))
        answers = torch.tensor([self.answer(*place) for place in places])
        at = torch.tensor([[number, int(self.bars[number][0].closes_s[bar])] for number, bar in places])
        return [Window(*sample) for sample in zip(windows_BFTC, answers, at, torch.tensor(indices), strict=True)]

    def window(self, number: int, bar: int) -> np.ndarray:
        """float32 [F, T, C]: what was known of a symbol when that traded bar closed."""
        return self.windows([(number, bar)])[0]

    def windows(self, places: Iterable[Sequence[int]]) -> np.ndarray:
        """float32 [B, F, T, C]: the windows of symbols' numbers and traded bars."""
        pieces = [
            bars.figures_NC[newest - self.length + 1 : newest + 1]
            for number, bar in places
            for bars, newest in zip(self.bars[number], self._newest_FN[number][:, bar].tolist(), strict=True)
        ]
        frames = len(self.bars[0])
        return standardised(np.stack(pieces).reshape(-1, frames, self.length, FIGURES))

    def answer(self, number: int, bar: int) -> int:
        """The class of the return from that traded bar to the one `horizon` later."""
        close = self.bars[number][0].close
        change = close[bar + self.horizon] / close[bar] - 1
        if change > self._threshold:
            return self.classes - 1
        return 0 if self.classes == 2 or change < -self._threshold else 1


EMPTY = np.empty((0, 2), np.int64)
SPLIT = 'give two dates, the first before the second: split = ["2023-01-01", "2024-01-01"]'


def newest_closed(of_frames: Sequence[Bars]) -> np.ndarray:
    """int32 [F, N]: of each frame the index of the newest bar that is over when traded bar n is; -1 for none.

    Computed once for all bars: a search for each window took a sixth of the time to read it.
    """
    closes_s = of_frames[0].closes_s
    return np.stack([bars.newest_closed(closes_s) for bars in of_frames]).astype(np.int32)


def standardised(figures_BFTC: np.ndarray) -> np.ndarray:
    """Each figure by its own spread in the window, but not shifted: the sign of a return is what matters. In place.

    The log volume alone is shifted, by its mean in the window: nothing outside the window is used.
    """
    figures_BFTC[..., VOLUME] -= figures_BFTC[..., VOLUME].mean(-1, keepdims=True)
    figures_BFTC /= np.sqrt((figures_BFTC**2).mean(-2, keepdims=True)) + 1e-6
    return figures_BFTC


LOOKED_AT = 20
"""Symbols that a preflight reads: it has a minute for all it does."""


def preflight(
    data: str, frames: Sequence[str] = ("5m", "15m", "1h"), length: int = 48, horizon: int = 4, split: Sequence[str] | None = None,
    embargo: int | None = None, skip_broken: bool = False,
) -> str:  # fmt: skip
    """One line that describes the prices, after the first symbols' files and a window of each part were read. Raises DataError."""
    train = Prices(
        data, "train", frames=frames, length=length, horizon=horizon, split=split, embargo=embargo, first=LOOKED_AT,
        skip_broken=skip_broken,
    )  # fmt: skip
    parts: dict[Part, Prices] = {"train": train, "valid": train.of("valid"), "test": train.of("test")}
    for prices in parts.values():
        _ = prices[0]
    count = len(Layout(Path(data), frames).files)
    read = len(train.symbols)
    counts = ", ".join(f"{len(prices):,} {name}" for name, prices in parts.items())
    return (
        f"{count} symbols, {read} read; their windows: {counts}; validation from {utc(train.valid_from_s)},"
        f" test from {utc(train.test_from_s)}"
    )
