"""Durations as people write them, `"1h 30m"`: of a plan, the configuration and the command line."""

from __future__ import annotations

import re
import sys
from typing import Any

MAX_DURATION_S = 10 * 365 * 86400.0
"""Longest duration that a plan may give, ten years: far above any session, and far below where dates overflow."""

_SECONDS_PER_UNIT = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_PART = r"(\d+(?:\.\d+)?)\s*(ms|[smhd])"


def parse_duration_s(value: Any) -> float:
    """Parse a duration into seconds: `"90s"`, `"1h 30m"`, or a number, which is in seconds already.

    The result has no bounds here: `kgorch quota set` takes zero, and whoever needs more checks it.

    Raises: ValueError saying what is expected.
    """
    if isinstance(value, str) and (parts := re.findall(_PART, value)) and not re.sub(rf"{_PART}|\s", "", value):
        value = sum(float(number) * _SECONDS_PER_UNIT[unit] for number, unit in parts)
    # bool is a subclass of int, and `wall = true` is no number of seconds; an integer of TOML may be beyond all floats
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= sys.float_info.max:
        raise ValueError('expected a duration such as "30s", "90m" or "1h 30m"')
    return float(value)


def parse_positive_duration_s(value: Any) -> float:
    """The same, above 0 and at most `MAX_DURATION_S`. Raises: ValueError saying what is expected."""
    duration_s = parse_duration_s(value)
    if not 0 < duration_s <= MAX_DURATION_S:  # also refuses nan, which TOML can write
        raise ValueError('expected a duration above 0 and at most 10 years, such as "90m"')
    return duration_s
