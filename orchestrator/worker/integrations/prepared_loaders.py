"""Which loaders of a script around Accelerate were training loaders, in forms that stay small in a checkpoint."""

from __future__ import annotations

import base64
import zlib
from collections.abc import Iterator
from typing import Any

from kgorch.errors import CannotRestore

MAX_BYTES = 1 << 20
"""Of bits that are read: eight million iterations of a loader."""


class PreparedLoaders:
    """Which of the loaders for single epochs were forgotten, in a form that stays small.

    Attributes:
        first: number of the first loader that was prepared after the first step; -1 before that step.
        last: up to this number they were forgotten, but for those that were iterated again.
        newest: number of the training loader that was found last.
        drivers: those of them that were training loaders, as bits.
    """

    def __init__(self, first: int = -1, last: int = -1, newest: int = -1, drivers: str = "0") -> None:
        self.first, self.last, self.newest, self.drivers = first, last, newest, int(drivers, 16)

    @property
    def plain(self) -> dict[str, Any]:
        return {"first": self.first, "last": self.last, "newest": self.newest, "drivers": f"{self.drivers:x}"}

    @property
    def numbers(self) -> Iterator[int]:
        """Of the training loaders among them."""
        return (number for number in range(self.drivers.bit_length()) if self.was_driver(number))

    def has_forgotten(self, number: int) -> bool:
        return self.first >= 0 and self.first <= number <= self.last

    def was_driver(self, number: int | None) -> bool:
        return number is not None and bool(self.drivers >> number & 1)

    def next_driver(self, number: int, prepared: int) -> int:
        """A training loader was found. Returns: the number of the one before. Args: prepared: loaders until now."""
        if self.first < 0:
            self.first = prepared
        before, self.newest = self.newest, number
        return before


def text_of(bits: int) -> str:
    """Bits in a form that stays small where they repeat."""
    return base64.b64encode(zlib.compress(bits.to_bytes(bits.bit_length() // 8 + 1, "little"))).decode()


def bits_of(text: str) -> int:
    """The bits of a text that may be a stranger's. Raises: CannotRestore."""
    inflating = zlib.decompressobj()
    try:
        content = inflating.decompress(base64.b64decode(text, validate=True), MAX_BYTES)
    except (TypeError, ValueError, zlib.error) as error:
        raise CannotRestore("the checkpoint's training epochs cannot be read", repr(error)[:300]) from None
    if not inflating.eof:
        raise CannotRestore(f"the checkpoint's training epochs are cut off, or more than {8 * MAX_BYTES}")
    return int.from_bytes(content, "little")
