"""Sizes and names as a plan writes them: how they are parsed, and the field types that carry them and durations."""

from __future__ import annotations

import re
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field
from pydantic_core import PydanticCustomError

from kgorch.core.durations import parse_positive_duration_s
from kgorch.core.names import NAME_PATTERN

_BYTES_PER_UNIT = {
    "": 1,
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KiB": 1 << 10,
    "MiB": 1 << 20,
    "GiB": 1 << 30,
    "TiB": 1 << 40,
}

MAX_SIZE_BYTES = 1 << 63
"""Sizes are below it, as those of files are: larger integers cannot be shown, nor stored in the database."""

INVALID_NAME = "invalid_name"
"""pydantic's type of the error for a name; diagnostics.py adds a name that would fit."""


def parse_size_bytes(value: Any) -> int:
    """Parse a size into bytes: `"15GiB"`, `"500 MB"`, or an integer, which is in bytes already.

    Units of both families are known, powers of 1000 (MB) and of 1024 (MiB): disks are sold in one, memory in the other.

    Raises: ValueError saying what is expected.
    """
    if isinstance(value, str) and (match := re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]i?B|B|)", value.strip())):
        value = int(min(float(match[1]) * _BYTES_PER_UNIT[match[2]], MAX_SIZE_BYTES))
    if isinstance(value, bool) or not isinstance(value, int) or value >= MAX_SIZE_BYTES:
        raise ValueError('expected a size such as "500MB" or "15GiB"')
    return value


def _positive_size_bytes(value: Any) -> int:
    size_bytes = parse_size_bytes(value)
    if size_bytes <= 0:
        raise ValueError('expected a size above 0, such as "15GiB"')
    return size_bytes


def _checked_name(value: str) -> str:
    if not re.fullmatch(NAME_PATTERN, value):
        text = "expected 1 to 64 letters, digits, '.', '_' or '-', the first a letter or a digit"
        raise PydanticCustomError(INVALID_NAME, "{text}", {"text": text})
    return value


Seconds = Annotated[float, BeforeValidator(parse_positive_duration_s)]
"""Field type of a duration above 0 and at most `MAX_DURATION_S`, in seconds."""

Bytes = Annotated[int, BeforeValidator(_positive_size_bytes)]
"""Field type of a size above 0, in bytes."""

BytesOrZero = Annotated[int, BeforeValidator(parse_size_bytes), Field(ge=0)]
"""Field type of a size in bytes that may be 0."""

Name = Annotated[str, AfterValidator(_checked_name)]
"""Field type of the name of a run, a stage, a pool or a platform."""
