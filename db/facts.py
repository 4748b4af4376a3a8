"""What the facts of an event look like, for the kinds that are read again.

The journal of a run travels with it, so an event may come from a stranger's database, or from an older or newer kgorch. Reports
and forecasts take these facts apart by name and type: what does not fit is passed over there, and not taken in here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any

from orchestrator.core.codes import EventKind

Facts = Mapping[str, Any]

LARGEST = 1e15
"""Bytes, samples, steps, seconds: nobody has more."""


def is_sound(kind: str, facts: Any) -> bool:
    """Whether facts may stand in an event of this kind; of a kind that nobody reads again, any table may."""
    if not isinstance(facts, Mapping):
        return False
    return all(
        check(facts[name]) if name in facts else name in _OPTIONAL for name, check in SHAPES.get(kind, {}).items()
    )


def is_number(value: Any, least: float = -LARGEST) -> bool:
    return type(value) in (int, float) and math.isfinite(value) and least <= value <= LARGEST


def is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value <= LARGEST


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_instant(value: Any) -> bool:
    """In UTC, as the journal writes it: such texts are compared as texts."""
    try:
        return isinstance(value, str) and value.endswith("Z") and bool(datetime.fromisoformat(value))
    except ValueError:
        return False


def _is_instant_or_none(value: Any) -> bool:
    return value is None or _is_instant(value)


def _are_metrics(value: Any) -> bool:
    """A metric that is no number stands there as null, NaN or infinity."""
    if not isinstance(value, Mapping):
        return False
    return all(figure is None or type(figure) is float or is_number(figure) for figure in value.values())


def _are_texts(value: Any) -> bool:
    return isinstance(value, Mapping) and all(isinstance(text, str) for text in value.values())


def _are_ids(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


_OPTIONAL = {"first"}

SHAPES: Mapping[str, Mapping[str, Callable[[Any], bool]]] = {
    EventKind.EPOCH: {
        "stage": _is_text, "step": is_count, "steps": is_count, "lasted_s": lambda value: is_number(value, 0.0),
        "metrics": _are_metrics, "first": lambda value: isinstance(value, bool),
    },
    EventKind.FORECAST: {
        "stage": _is_text, "end_at": _is_instant, "earliest_at": _is_instant_or_none, "latest_at": _is_instant_or_none,
    },
    EventKind.RUN_CHOSEN: {"not": _are_ids},
    EventKind.NOTICES_FAILED: {"failing": _are_texts},
    EventKind.NOTICES_ARRIVE: {"failing": _are_texts},
}  # fmt: skip
"""Kind → the facts that are read by name, and what each may hold."""
