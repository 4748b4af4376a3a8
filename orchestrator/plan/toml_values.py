"""Values of a TOML file as text on one line: for an error message bounded and printable, and whole as a literal."""

from __future__ import annotations

import json
from datetime import date, datetime, time
from typing import Any

from kgorch.core.text import in_one_line

MAX_WIDTH = 60
"""Characters of a value that a message shows, so that the key before it and the hint behind it stay on a line."""

MAX_DEPTH = 4
"""Nested tables and lists that are shown. A value may be nested as deeply as Python's recursion limit allows."""

MAX_ITEMS = 10
"""Items of a list or a table that are shown."""

MAX_DIGITS = 60
"""Digits of an integer that are shown. A hexadecimal one may have more than the 4300 that Python converts to decimals at all."""


def format_value(value: Any) -> str:
    """Write a value as TOML does, cut to `MAX_WIDTH` characters."""
    text = _toml(value, 0)
    return text if len(text) <= MAX_WIDTH else text[: MAX_WIDTH - 3] + "…"


def toml_literal(value: Any) -> str:
    """The value as a TOML file has it. Raises: TypeError for what TOML has no value for, such as None."""
    match value:
        case bool():
            return "true" if value else "false"
        case str():
            return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
        case int():
            return int.__repr__(value)  # an IntEnum has a repr of its own
        case float():
            return float.__repr__(value)  # as has NumPy's float64
        case date() | time():
            return value.isoformat()
        case list() | tuple():
            return f"[{', '.join(map(toml_literal, value))}]"
        case dict():
            return f"{{{', '.join(f'{toml_literal(str(key))} = {toml_literal(item)}' for key, item in value.items())}}}"
    raise TypeError(f"TOML has no value for {value!r:.200}, a {type(value).__name__}")


def _toml(value: Any, depth: int) -> str:
    if depth > MAX_DEPTH:
        return "…"
    match value:
        case bool():
            return "true" if value else "false"
        case str():
            return json.dumps(value[:80], ensure_ascii=False) if value.isprintable() else ascii(value[:80])
        case date() | datetime() | time():
            return value.isoformat()
        case list():
            return "[" + ", ".join(_toml(item, depth + 1) for item in value[:MAX_ITEMS]) + "]"
        case dict():
            shown = [*value.items()][:MAX_ITEMS]
            inner = ", ".join(f"{in_one_line(str(key))} = {_toml(item, depth + 1)}" for key, item in shown)
            return f"{{ {inner} }}" if inner else "{}"
        case int() if abs(value) >= 10**MAX_DIGITS:
            return f"a number of more than {MAX_DIGITS} digits"
    return str(value)
