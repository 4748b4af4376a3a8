"""Messages as JSON, one a line: encode, decode with every type checked, and cut a byte stream into lines.

Lines come from any process that may open the socket, of this version or another. What is decoded holds exactly the declared
types, to any depth: a bool is no int, numbers are finite and within MAX_NUMBER, text is free of lone surrogates. Unknown fields
are ignored, because a newer side may send more.

Standard library alone, because every rank imports this. msgspec's decoder refuses NaN, which metrics may be, and text with lone
surrogates; its `convert` after json.loads would save the 28 lines of `_check_for` and cost each process 12 ms and 1.3 MB.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, fields
from types import NoneType, UnionType
from typing import Any, TypeVar, cast, get_args, get_origin, get_type_hints

from kgorch.protocol.messages import MESSAGE_KINDS, Message
from kgorch.protocol.values import MAX_NUMBER, escape_surrogates

PROTOCOL_VERSION = 1
MAX_LINE_BYTES = 1 << 20

T = TypeVar("T")
_KIND_NAMES = {kind: name for name, kind in MESSAGE_KINDS.items()}


class ProtocolError(Exception):
    """The other side sent what this version cannot read."""


def encode(message: Message) -> bytes:
    """The message as a line. NaN in metrics is written as Python's json does, which JSON proper does not know."""
    document = {"v": PROTOCOL_VERSION, "message": _KIND_NAMES[type(message)], **asdict(message)}
    return json.dumps(document).encode() + b"\n"


def decode(line: bytes) -> Message:
    """The message in a line that any process may have sent.

    Raises: ProtocolError.
    """
    try:
        document = json.loads(line)
        kind = MESSAGE_KINDS[document["message"]]
        if document["v"] != PROTOCOL_VERSION:
            raise ProtocolError(f"version {document['v']!r:.80}, expected {PROTOCOL_VERSION}")
        # nearly all lines: a lone surrogate can only be in an escape, or in bytes beyond ASCII
        return from_dict(kind, document, is_clean=line.isascii() and b"\\u" not in line)
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise ProtocolError(f"{type(error).__name__}: {error}"[:200]) from None


def from_dict(kind: type[T], document: Mapping[str, Any], *, is_clean: bool = False) -> T:
    """A dataclass out of JSON that any process may have written. Keys that are no fields are ignored.

    Args:
        kind: its fields are str, int, float, bool, None, Any, and lists, dicts with text as keys, and unions of these.
        is_clean: its text has no lone surrogates.
    Raises: ProtocolError, also for what the class itself refuses by ValueError.
    """
    values = {}
    try:
        for name, declared, has_type in _checks_of(cast("Any", kind)):
            if name in document:
                value = values[name] = document[name] if is_clean else _without_surrogates(document[name])
                if not has_type(value):
                    raise ProtocolError(f"{kind.__name__}.{name}: expected {declared}, found {value!r:.80}")
        return kind(**values)
    except (ValueError, TypeError, RecursionError) as error:
        raise ProtocolError(f"{kind.__name__}: {error}"[:200]) from None


@functools.cache
def _checks_of(kind: type[Any]) -> list[tuple[str, str, Callable[[Any], bool]]]:
    """Name, annotation and check of each field."""
    types = get_type_hints(kind)
    return [(item.name, str(item.type), _check_for(types[item.name])) for item in fields(kind)]


def _check_for(declared: Any) -> Callable[[Any], bool]:
    """A function that tells whether a value has exactly this type: composed once, because messages come every second."""
    if declared is Any:
        return lambda value: True
    if declared in (int, float):
        allowed = (int,) if declared is int else (int, float)
        # NaN fails the comparison, as it would pass every later one
        return lambda value: type(value) in allowed and -MAX_NUMBER < value < MAX_NUMBER
    if declared in (str, bool, NoneType):
        return lambda value: type(value) is declared
    inner = [_check_for(item) for item in get_args(declared)]
    if get_origin(declared) is dict:  # JSON's keys are text
        return lambda value: type(value) is dict and all(map(inner[1], value.values()))
    if get_origin(declared) is list:
        return lambda value: type(value) is list and all(map(inner[0], value))
    if isinstance(declared, UnionType):
        return lambda value: any(has_type(value) for has_type in inner)
    if isinstance(declared, type):
        # a StrEnum comes as text: the caller knows what another version's word means; nothing else comes out of JSON
        allowed_type = str if issubclass(declared, str) else declared
        return lambda value: type(value) is allowed_type
    raise TypeError(f"no check for the type {declared}")


def _without_surrogates(value: Any) -> Any:
    if isinstance(value, dict):
        return {escape_surrogates(key): _without_surrogates(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_without_surrogates(item) for item in value]
    return escape_surrogates(value) if isinstance(value, str) else value


class LineBuffer:
    """Cuts a byte stream into lines. A line without an end is refused before it fills the memory."""

    def __init__(self, limit: int = MAX_LINE_BYTES) -> None:
        self._rest, self._limit = bytearray(), limit  # grows in place: bytes would be copied whole for each piece

    def feed(self, data: bytes) -> list[bytes]:
        """The lines that `data` completes, oldest first. Takes time in proportion to `data`.

        Raises: ProtocolError for a line longer than the limit.
        """
        *lines, rest = data.split(b"\n")
        if lines:
            lines[0] = bytes(self._rest) + lines[0]
            self._rest = bytearray()
        self._rest += rest
        if max(map(len, (*lines, self._rest))) > self._limit:
            raise ProtocolError(f"a line longer than {self._limit} bytes")
        return lines
