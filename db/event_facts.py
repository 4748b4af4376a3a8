"""Validation of the facts of events, for the kinds of events that are read again.

The journal of a run is imported with it, so an event may come from an untrusted database, or from an older or newer kgorch.
Reports and forecasts read these facts by name and type. Events that do not fit are skipped there and not imported.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any

from kgorch.core.codes import EventKind

Facts = Mapping[str, Any]

MAX_NUMBER = 1e15
"""No plausible number of bytes, samples, steps or seconds is larger."""


def is_valid(kind: str, facts: Any) -> bool:
    """Whether an event of this kind may have these facts. Kinds without an entry in SHAPES are not read again: any table may."""
    if not isinstance(facts, Mapping):
        return False
    return all(
        check(facts[name]) if name in facts else name in _OPTIONAL for name, check in SHAPES.get(kind, {}).items()
    )


def is_number(value: Any, minimum: float = -MAX_NUMBER) -> bool:
    return type(value) in (int, float) and math.isfinite(value) and minimum <= value <= MAX_NUMBER


def is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value <= MAX_NUMBER


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_duration_text(value: Any) -> bool:
    """Seconds as a decimal text: what ranks note are texts."""
    return isinstance(value, str) and bool(re.fullmatch(r"\d{1,9}(\.\d{1,9})?", value))


def _is_instant(value: Any) -> bool:
    """ISO 8601 in UTC with a trailing Z, as the journal writes it: they are compared as texts."""
    try:
        return isinstance(value, str) and value.endswith("Z") and bool(datetime.fromisoformat(value))
    except ValueError:
        return False


def _is_instant_or_none(value: Any) -> bool:
    return value is None or _is_instant(value)


def _are_metrics(value: Any) -> bool:
    """Numbers by name. A metric that was not finite is null, NaN or infinity there."""
    if not isinstance(value, Mapping):
        return False
    return all(number is None or type(number) is float or is_number(number) for number in value.values())


def _are_texts(value: Any) -> bool:
    return isinstance(value, Mapping) and all(isinstance(text, str) for text in value.values())


def _are_ids(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


def _are_sent_steps(value: Any) -> bool:
    """Tracker → stage → the last step that it was sent."""
    return isinstance(value, Mapping) and all(
        isinstance(steps, Mapping) and all(is_count(step) for step in steps.values()) for steps in value.values()
    )


_OPTIONAL = {"first"}

SHAPES: Mapping[str, Mapping[str, Callable[[Any], bool]]] = {
    EventKind.EPOCH: {
        "stage": _is_text, "step": is_count, "steps": is_count, "lasted_s": lambda value: is_number(value, 0.0),
        "metrics": _are_metrics, "first": lambda value: isinstance(value, bool),
    },
    EventKind.FORECAST: {
        "stage": _is_text, "end_at": _is_instant, "earliest_at": _is_instant_or_none, "latest_at": _is_instant_or_none,
    },
    EventKind.FOREIGN_STOPPED: {"stage": _is_text, "took_s": _is_duration_text},
    EventKind.RUN_CHOSEN: {"not": _are_ids},
    EventKind.TRACKED: {"failing": _are_texts, "sent": _are_sent_steps, "urls": _are_texts},
    EventKind.TRACKING_FAILED: {"failing": _are_texts, "sent": _are_sent_steps, "urls": _are_texts},
    EventKind.NOTICES_FAILED: {"failing": _are_texts},
    EventKind.NOTICES_ARRIVE: {"failing": _are_texts},
}  # fmt: skip
"""Kind → the facts that are read by name, with the check of each value."""
