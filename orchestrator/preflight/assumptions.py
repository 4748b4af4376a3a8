"""What a person assumes for an estimate (`kgorch check --on MACHINE --assume NAME=VALUE`), read and checked."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from orchestrator.core.machines import MACHINES, SHARES, Assumed, Machine
from orchestrator.errors import KgorchError, nearest
from orchestrator.plan import parse_duration_s

ALL = ""
"""In place of a stage's name: of all of them."""

NAMES = tuple(field.name for field in dataclasses.fields(Assumed))
DURATIONS = ("epoch", "first_epoch", "evaluation", "besides")
COUNTS = ("samples", "validation")


def machine_of(name: str) -> Machine:
    """Raises: KgorchError for one that is not known."""
    if name not in MACHINES:
        raise KgorchError(
            f"--on {name}: no such machine is known{nearest(name, MACHINES)}", f"known: {', '.join(MACHINES)}"
        )
    return MACHINES[name]


def parsed(said: Sequence[str], stages: Sequence[str]) -> dict[str, Assumed]:
    """By stage, and ALL: from `[STAGE.]NAME=VALUE`. Raises: KgorchError."""
    told: dict[str, dict[str, Any]] = {name: {} for name in (ALL, *stages)}
    for text in said:
        left, equals, value = text.partition("=")
        stage, _, name = left.rpartition(".")
        if not equals or stage not in told or name not in NAMES:
            near = nearest(name, NAMES) if stage in told else nearest(stage, stages)
            raise KgorchError(
                f"--assume {text}: expected NAME=VALUE or STAGE.NAME=VALUE{near}", f"names: {', '.join(NAMES)}",
                f"stages: {', '.join(stages)}", next_step="for example --assume epoch=35m --assume compute=0.3",
            )  # fmt: skip
        told[stage][name] = _value(text, name, value)
    return {name: Assumed(**(told[ALL] | own)) for name, own in told.items()}


def _value(text: str, name: str, value: str) -> float | int:
    try:
        if name in DURATIONS:
            return float(parse_duration_s(value))
        number = int(value) if name in COUNTS else float(value)
    except ValueError as error:
        raise KgorchError(f"--assume {text}: {error}") from None
    if not 0 < number < float("inf") or (name in SHARES and number > 1):
        raise KgorchError(f"--assume {text}: expected {'a share of 1' if name in SHARES else 'a number above 0'}")
    return number
