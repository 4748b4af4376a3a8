"""Values as text for the templates. It may come from elsewhere: Jinja escapes it, and control characters are replaced here."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from kgorch.core import text as texts
from kgorch.core.formats import duration, size

MAX_CHARACTERS = 400
SPARK_WIDTH, SPARK_HEIGHT = 100.0, 24.0


def plain(value: object, most: int = MAX_CHARACTERS) -> str:
    """One line without control characters and direction marks, of bounded length."""
    text = texts.in_one_line(str(value))
    return text if len(text) <= most else f"{text[: most - 1]}…"


def lines(value: object, most: int = 20_000) -> str:
    """The same with its lines."""
    text = texts.printable(str(value))
    return text if len(text) <= most else f"{text[: most - 1]}…"


def words(code: object) -> str:
    """`cut_off` as `cut off`."""
    return plain(str(code).replace("_", " "))


def number(value: Any) -> str:
    if value is None:
        return "–"
    if isinstance(value, bool) or not isinstance(value, int | float):
        return plain(value)
    if not math.isfinite(value):
        return "nan"
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}"


def percent(share: float | None) -> str:
    """Rounded down: 100% is what is done."""
    return "–" if share is None else f"{math.floor(100 * share)}%"


def spark(line: Sequence[float]) -> str:
    """The points of a polyline in a box of 100 by 24."""
    low, high = min(line), max(line)
    height = (high - low) or 1.0
    step = SPARK_WIDTH / max(1, len(line) - 1)
    pairs = ((index * step, (SPARK_HEIGHT - 4) * (1 - (value - low) / height) + 2) for index, value in enumerate(line))
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in pairs)


def templates() -> Environment:
    environment = Environment(
        loader=PackageLoader("kgorch.web"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    for function in (plain, lines, words, number, percent, spark, duration, size):
        environment.filters[function.__name__] = function
    return environment
