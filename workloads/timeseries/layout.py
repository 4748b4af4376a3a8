"""Where the files of prices lie: which file holds which symbol at which time frame.

    <data>/SYMBOL/FRAME.csv               BTCUSDT/5m.csv
    <data>/**/SYMBOL-FRAME[-PERIOD].csv   klines/BTCUSDT/5m/BTCUSDT-5m-2024-01.zip, BTC_USDT-1h.csv; also with "_"; EURUSD_M15.csv
    <data>/SYMBOL.csv                     AAPL.csv: bars of the traded frame
    <data>/FILE.csv, or <data> itself     with a column of symbols (symbol, ticker, Name): bars of the traded frame, or of the
                                          one in its name: forex-15m.csv

A folder uses one of them. A symbol without a file of a longer frame gets that frame's bars from the traded one's. MetaTrader
writes 15m as M15.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from kgorch.workloads.common.files import DataError
from kgorch.workloads.timeseries.bars import Bars, Rows, bars_of, coarser, has_symbols, read, span_of

SUFFIXES = (".csv", ".txt", ".zip")
FRAME = r"[1-9]\d*[mhdw]|(?:[MHDW]|MN)[1-9]\d*"

Files = dict[str, tuple[Path, ...]]
"""Of one symbol: time frame → its files, in the order of their names."""


class Layout:
    """The symbols of a folder and their files.

    Args:
        frames: time frames, the traded one first.

    Raises:
        DataError: there is no file of the traded frame.
    """

    def __init__(self, root: Path, frames: Sequence[str]) -> None:
        self.frames = tuple(frames)
        for frame in frames:
            span_of(frame)
        self._rows = functools.cache(read)
        self.files = self._files(root)
        if not self.files:
            raise DataError(
                f"there are no prices in {root}",
                f"expected SYMBOL/{frames[0]}.csv, SYMBOL-{frames[0]}.csv or SYMBOL.csv (bars of {frames[0]})",
                next_step=f"correct data or frames, or make prices: python -m kgorch.workloads.timeseries.make_prices {root}",
            )

    def _files(self, root: Path) -> dict[str, Files]:
        named: dict[str, dict[str, list[Path]]] = {}
        flat: list[Path] = []
        paths = [root] if root.is_file() else sorted(path for path in root.rglob("*") if path.suffix in SUFFIXES)
        for path in paths:
            match = re.fullmatch(rf"(.+?)[-_]({FRAME})([-_].*)?", path.stem)
            if re.fullmatch(FRAME, path.stem) and path.parent != root:
                named.setdefault(path.parent.name, {}).setdefault(frame_of(path.stem), []).append(path)
            elif match:
                for symbol in self._several(path, root) or [match[1]]:
                    named.setdefault(symbol, {}).setdefault(frame_of(match[2]), []).append(path)
            elif path == root or path.parent == root:
                flat.append(path)
        if named := {symbol: files for symbol, files in named.items() if files.keys() & set(self.frames)}:
            return {symbol: {frame: tuple(of) for frame, of in named[symbol].items()} for symbol in sorted(named)}
        found: dict[str, Files] = {}
        for path in flat:
            symbols = sorted(self._rows(path)) if has_symbols(path) else [path.stem]
            for symbol in symbols:
                if symbol in found:
                    raise DataError(
                        f"{symbol} is in two files", f"{found[symbol][self.frames[0]][0]} and {path}",
                        next_step="keep one of them in the folder",
                    )  # fmt: skip
                found[symbol] = {self.frames[0]: (path,)}
        return dict(sorted(found.items()))

    def _several(self, path: Path, root: Path) -> list[str]:
        """The symbols of a file that lies in the folder itself and holds several; [] for any other."""
        if root not in (path, path.parent) or not has_symbols(path):
            return []
        try:
            return sorted(rows) if len(rows := self._rows(path)) > 1 else []
        except DataError:
            return []  # said when its turn comes: it may be left out

    def bars(self, symbol: str) -> list[Bars]:
        """One symbol at every frame. Raises DataError."""
        files, traded = self.files[symbol], self.frames[0]
        if traded not in files:
            raise DataError(
                f"{symbol} has no file of {traded}, the traded time frame", f"it has {', '.join(sorted(files))}",
                next_step="fetch its file, name another frame first, or leave out such symbols: skip_broken = true",
            )  # fmt: skip
        first = self._joined(symbol, traded)
        return [first, *(self._joined(symbol, f) if f in files else coarser(first, f) for f in self.frames[1:])]

    def _joined(self, symbol: str, frame: str) -> Bars:
        """The bars of one frame, from one file or from those of several periods."""
        parts = [(bars_of(self._rows_of(symbol, path), path, frame), path) for path in self.files[symbol][frame]]
        if len(parts) == 1:
            return parts[0][0]
        parts.sort(key=lambda part: int(part[0].begins_s[0]))
        for (before, earlier), (after, later) in itertools.pairwise(parts):
            if after.begins_s[0] < before.closes_s[-1]:
                raise DataError(
                    f"{later} begins before {earlier} ends", next_step="keep one file of each period in the folder"
                )
        begins_s = np.concatenate([part.begins_s for part, _ in parts])
        values_NV = np.concatenate([part.values_NV for part, _ in parts])
        return bars_of(Rows(begins_s, values_NV, np.arange(len(begins_s))), parts[0][1], frame)

    def _rows_of(self, symbol: str, path: Path) -> Rows:
        rows = self._rows(path)
        if symbol not in rows and len(rows) > 1:
            raise DataError(
                f"{path} holds no bars of {symbol}", f"its column of symbols holds {', '.join(sorted(rows))[:200]}",
                next_step="name the file after one of them, or leave out such symbols: skip_broken = true",
            )  # fmt: skip
        return rows[symbol] if symbol in rows else next(iter(rows.values()))


def frame_of(text: str) -> str:
    """A time frame as plans have it: "15m" for MetaTrader's "M15". Its months, "MN1", stay what they are: no plan has them."""
    match = re.fullmatch(r"([MHDW])(\d+)", text)
    return f"{match[2]}{match[1].lower()}" if match else text
