"""Faults that a test orders for a method of the server: each is done once for each time that it was ordered."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Fault:
    """What goes wrong with one request.

    Attributes:
        kind: `status` (an HTTP error), `cut` (the connection is closed), `hang` (nothing comes), `text` (200 with `body` as it is),
            `body` (200 with the JSON in `body`), `half` (an upload or download is cut in its middle; of an upload `status` is
            answered where it is given), `slow` (a download comes in parts, in `seconds` altogether),
            `huge` (a download is announced with 2**60 bytes, and nothing comes).
        after: whether the method has done its work before, so that only its answer is lost.
        seconds: how long nothing comes.
        events: of a log stream: how many events come before the cut.
    """

    kind: str
    status: int = 0
    after: bool = False
    headers: dict[str, str] = field(default_factory=dict)
    body: Any = None
    seconds: float = 3600.0
    events: int = 0
