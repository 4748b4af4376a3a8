"""Values out of a JSON document that may come from anywhere: each function returns the value, checked, or raises ValueError."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from typing import Any

from kgorch.protocol.values import MAX_NUMBER, escape_surrogates

MAX_TEXT_LENGTH = 1000
"""Characters of a line."""


def json_list(value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise ValueError(f"expected a list, found {value!r:.80}")
    return value


def json_table(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"expected a table, found {value!r:.80}")
    return value


def text_line(value: Any) -> str:
    """One line, for databases and terminals: no control characters, no lone surrogates."""
    if not isinstance(value, str) or not value.isprintable() or len(value) > MAX_TEXT_LENGTH:
        raise ValueError(f"expected a line of text, found {value!r:.80}")
    return value


def cleaned_line(value: Any) -> str:
    """Text that an exception of a script may have made, cut and cleaned so that `text_line` accepts it."""
    if not isinstance(value, str):
        raise ValueError(f"expected a line of text, found {value!r:.80}")
    return "".join(char if char.isprintable() else " " for char in escape_surrogates(value))[:MAX_TEXT_LENGTH]


def hash_digits(value: Any) -> str:
    if not re.fullmatch(r"[0-9a-f]{32}", text_line(value)):
        raise ValueError(f"expected an xxh3_128, found {value!r:.80}")
    return str(value)


def count(value: Any) -> int:
    if type(value) is not int or not 0 <= value < MAX_NUMBER:
        raise ValueError(f"expected a whole number from 0, found {value!r:.80}")
    return value


def number(value: Any) -> float:
    """NaN and infinity are numbers here: a metric may be either."""
    if type(value) not in (int, float):
        raise ValueError(f"expected a number, found {value!r:.80}")
    try:
        return float(value)
    except OverflowError:
        raise ValueError("number out of range") from None


def utc_instant(value: Any) -> str:
    """ISO 8601 in UTC, whatever zone it was written in."""
    try:
        return datetime.fromisoformat(text_line(value)).astimezone(UTC).isoformat()
    except OverflowError:
        raise ValueError(f"an instant beyond the calendar: {value!r:.80}") from None
