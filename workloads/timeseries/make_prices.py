"""Made-up prices in the real layout, whose direction can be learnt, and not well from one time frame alone.

A slow tide, some hours long, pushes the price a little up or down; it drowns in the noise of a single bar and shows in
the coarser ones. A faster swing turns back on itself within some bars. Volume tells how strong the tide is, not which way.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np

BASE_S, FRAMES = 300, {"5m": 1, "15m": 3, "1h": 12}
NOISE, TIDE, SWING = 0.001, 0.45, 0.35
"""Of a bar's log return: its deviation; the other two as shares of it."""

BEGIN_S = 1_700_000_000 // 3600 * 3600


def make_symbol(folder: Path, bars: int, seed: int, number: int) -> None:
    """Write one symbol at every frame; a function of its arguments alone."""
    random = np.random.default_rng([seed, number])
    tide, swing = remembering(random, bars, 60), remembering(random, bars, 2)
    returns = NOISE * (
        random.standard_normal(bars) + TIDE * tide - SWING * np.concatenate([[0], swing[:-1]]) + SWING * swing
    )
    close = 100 * np.exp(np.cumsum(returns))
    open_ = np.concatenate([[100.0], close[:-1]])
    reach = np.abs(random.standard_normal((2, bars))) * NOISE / 2
    high, low = np.maximum(open_, close) * np.exp(reach[0]), np.minimum(open_, close) * np.exp(-reach[1])
    volume = np.round(1000 * np.exp(0.4 * np.abs(tide) + 0.2 * random.standard_normal(bars)))

    folder.mkdir(parents=True, exist_ok=True)
    for name, count in FRAMES.items():
        groups = bars // count
        cut = {
            key: value[: groups * count].reshape(groups, count)
            for key, value in (("o", open_), ("h", high), ("l", low), ("c", close), ("v", volume))
        }
        rows = np.stack(
            [
                BEGIN_S + np.arange(groups) * BASE_S * count,
                cut["o"][:, 0], cut["h"].max(1), cut["l"].min(1), cut["c"][:, -1], cut["v"].sum(1),
            ],
            1,
        )  # fmt: skip
        np.savetxt(
            folder / f"{name}.csv", rows, delimiter=",", fmt=["%d", "%.6f", "%.6f", "%.6f", "%.6f", "%d"],
            header="time,open,high,low,close,volume", comments="",
        )  # fmt: skip


def remembering(random: np.random.Generator, count: int, bars: float) -> np.ndarray:
    """Noise of deviation 1 that forgets itself within so many bars."""
    keep = np.exp(-1 / bars)
    found, shocks = np.empty(count), random.standard_normal(count) * np.sqrt(1 - keep**2)
    value = float(random.standard_normal())
    for index in range(count):
        value = keep * value + shocks[index]
        found[index] = value
    return found


def main() -> None:
    """Parse, then write one folder a symbol."""
    parser = argparse.ArgumentParser(
        description="Write made-up prices at several time frames.",
        epilog="example: python -m kgorch.workloads.timeseries.make_prices prices --symbols 3 --bars 12000",
    )
    parser.add_argument("out", type=Path, help="folder to write to")
    parser.add_argument("--symbols", type=int, default=2, help="how many (default: 2)")
    parser.add_argument("--bars", type=int, default=6000, help="5-minute bars of each (default: 6000, three weeks)")
    parser.add_argument("--seed", type=int, default=0, help="same seed, same files (default: 0)")
    options = parser.parse_args()
    for number in range(options.symbols):
        make_symbol(options.out / f"MADE{number + 1}", options.bars, options.seed, number)


if __name__ == "__main__":
    main()
