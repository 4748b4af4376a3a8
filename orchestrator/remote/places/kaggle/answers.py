"""Orders for the client's process, and its answers as the contract's values. Pure, and strict: an answer holds what a server said.

A field of the wrong type is UNANSWERED, never a default: of a push it would say that nothing is known about it, which is true.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kgorch.core.remote.place_values import (
    Account,
    PlaceError,
    PlaceQuota,
    Pushed,
    RemoteStatus,
    SessionOrder,
    Sighting,
    Trouble,
)
from kgorch.remote.places.kaggle import refusals
from kgorch.untrusted_io import parse_json

STATUSES = {
    "QUEUED": RemoteStatus.QUEUED,
    "NEW_SCRIPT": RemoteStatus.QUEUED,
    "RUNNING": RemoteStatus.RUNNING,
    "CANCEL_REQUESTED": RemoteStatus.RUNNING,
    "COMPLETE": RemoteStatus.COMPLETE,
    "ERROR": RemoteStatus.ERROR,
    "CANCEL_ACKNOWLEDGED": RemoteStatus.CANCELLED,
}
"""Of kagglesdk/kernels/types/kernels_enums.py (0.1.37)."""

MEANS = {"ACCESS_TOKEN": "token", "LEGACY_API_KEY": "key", "OAUTH": "oauth"}

MAX_SECONDS = 10.0**10
"""Of any figure of a quota: three centuries."""

NONCE_LINE = re.compile(r"# kgorch-push: .*\bnonce=([0-9a-f]{8,128})\b")
"""Line 2 of the script of every session (remote/bootstrap.py)."""


@dataclass(frozen=True, slots=True)
class Answer:
    """One line of the process: an event of a call that has several, or its value."""

    value: Any = None
    event: Any = None


def encode_order(call: str, arguments: Mapping[str, Any]) -> bytes:
    return json.dumps({"call": call, "arguments": arguments}).encode() + b"\n"


def parse(line: bytes) -> Answer:
    """Raises: PlaceError: the one that the line tells of, or UNANSWERED for a line that is none of these."""
    try:
        answer = parse_json(line)
    except (ValueError, RecursionError) as error:
        raise _unreadable(str(error)) from None
    if not isinstance(answer, dict):
        raise _unreadable("no object")
    if "trouble" in answer:
        try:
            trouble = Trouble(answer["trouble"])
        except ValueError:
            trouble = Trouble.UNANSWERED
        raise PlaceError(
            trouble, str(answer.get("message", ""))[: refusals.MAX_TEXT], _pause(answer.get("retry_after_s"))
        )
    if answer.get("event") is not None:
        return Answer(event=answer["event"])
    if "value" not in answer:
        raise _unreadable("neither a value nor a refusal")
    return Answer(value=answer["value"])


def _pause(value: Any) -> float | None:
    """Seconds of a Retry-After, or None for anything that is not."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= refusals.MAX_RETRY_AFTER_S:
        return None
    return float(value)


def _unreadable(why: str) -> PlaceError:
    return PlaceError(Trouble.UNANSWERED, f"an answer of Kaggle's client cannot be read: {why[:200]}")


def _field(value: Any, name: str, kind: type | tuple[type, ...]) -> Any:
    """A field of an answer. Raises: PlaceError unless it is there and of this type."""
    if not isinstance(value, dict) or name not in value:
        raise _unreadable(f"no {name}")
    found = value[name]
    if not isinstance(found, kind) or (
        isinstance(found, bool) and bool not in (kind if isinstance(kind, tuple) else (kind,))
    ):
        raise _unreadable(f"{name} is {type(found).__name__}")
    return found


def _texts(value: Any, name: str) -> list[str]:
    found = _field(value, name, list)
    if not all(isinstance(item, str) for item in found):
        raise _unreadable(f"{name} holds other things than texts")
    return list(found)


def account(value: Any) -> Account:
    name, means = _field(value, "name", str), _field(value, "means", str)
    if not re.fullmatch(r"[A-Za-z0-9_-]{1,100}", name):
        raise _unreadable(f"no name of an account: {name!r:.100}")
    return Account(name, MEANS.get(means, means.lower()[:40]))


def quota(value: Any) -> PlaceQuota | None:
    """Of the GPUs; None where Kaggle says nothing of them."""
    if not isinstance(value, dict):
        raise _unreadable("no quota")
    gpu = value.get("gpu")
    if gpu is None:
        return None
    figures = [float(_field(gpu, name, (int, float))) for name in ("used_s", "reserved_s", "allowed_s")]
    if not all(math.isfinite(figure) and 0 <= figure < MAX_SECONDS for figure in figures):
        raise _unreadable("a quota is no number of seconds")
    at = _field(gpu, "refreshes_at", str)
    if at and not re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d{1,9})?\+00:00", at):
        raise _unreadable("the time of the quota's renewal")
    return PlaceQuota(figures[0], figures[1], figures[2], at)


def sighting(value: Any) -> Sighting:
    word = _field(value, "status", str)[:40]
    message = _field(value, "message", str)[: refusals.MAX_TEXT]
    return Sighting(STATUSES.get(word, RemoteStatus.UNKNOWN), word, message)


def pushed(value: Any, name: str) -> Pushed:
    """Of the answer to a push. Raises: PlaceError for whatever is not an accepted push of this name with all of its inputs."""
    error = _field(value, "error", str)
    if error:
        raise PlaceError(refusals.trouble_of_text(error), error[: refusals.MAX_TEXT])
    version = _field(value, "version", (int, type(None)))
    ref, url, invalid = _field(value, "ref", str), _field(value, "url", str), _texts(value, "invalid")
    if not version or version < 1:
        raise PlaceError(Trouble.UNANSWERED, "Kaggle named no version of what was pushed")
    if _slug(ref) != name and _slug(url) != name:
        # a title that makes another slug gives another kernel; find_push then finds nothing under ours
        raise PlaceError(Trouble.UNANSWERED, f"Kaggle answered for {ref[:200]!r} instead of {name}")
    if invalid:
        raise PlaceError(Trouble.UNATTACHED, "Kaggle started it without " + ", ".join(invalid)[:500])
    return Pushed(version, ref[:200], url[:500])


def _slug(reference: str) -> str:
    """Last part of a reference, `/code/owner/slug`, `owner/slug` or a URL; " v3" may follow (users' reports)."""
    return re.sub(r" v\d+$", "", reference).rpartition("/")[2].lower()


def found_push(value: Any, order: SessionOrder, url: str) -> Pushed:
    """Of the answer to the question for a session's source. Raises: PlaceError, REFUSED where it has another nonce."""
    head, ref = _field(value, "head", str), _field(value, "ref", str)
    version = _field(value, "version", (int, type(None)))
    lines = head.split("\n")
    match = NONCE_LINE.match(lines[1]) if len(lines) > 1 else None
    if not match or match[1] != order.nonce:
        raise PlaceError(Trouble.REFUSED, f"another session lies at Kaggle under the name {order.name}")
    return Pushed(max(version or 1, 1), ref[:200], url)


def sizes(value: Any) -> dict[str, int]:
    found = _field(value, "sizes", dict)
    return {str(name): int(_field(found, name, int)) for name in found}


def progress_of(event: Any) -> tuple[int, int] | None:
    """How many bytes of a file have come, and how many it has, 0 where nobody says; None for an event of another kind."""
    if not isinstance(event, dict) or "bytes" not in event:
        return None
    return int(_field(event, "bytes", int)), int(_field(event, "of", int))


def file_of(event: Any) -> str:
    """Name of the file that has come; empty for an event that tells of progress alone."""
    return str(_field(event, "file", str)) if event else ""


def file_count(value: Any) -> int:
    return int(_field(value, "files", int))


def word(value: Any) -> str:
    return str(_field(value, "status", str))[:40]


def error(value: Any) -> str:
    return str(_field(value, "error", str))[: refusals.MAX_TEXT]


def event(value: Any) -> tuple[int, str]:
    """Number of an event of a log, from 1, and its text."""
    return int(_field(value, "number", int)), str(_field(value, "text", str))
