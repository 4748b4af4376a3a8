"""Assumptions of an estimate (`kgorch check --on MACHINE --assume NAME=VALUE`), parsed and checked."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from kgorch.core.durations import parse_duration_s
from kgorch.core.forecast.machines import MACHINES, SHARES, Assumptions, MachineSpec
from kgorch.errors import KgorchError, nearest

ALL = ""
"""In place of a stage's name: an assumption about all stages."""

NAMES = tuple(field.name for field in dataclasses.fields(Assumptions))
DURATIONS = ("epoch", "first_epoch", "evaluation", "besides")
COUNTS = ("samples", "validation")


def machine_of(name: str) -> MachineSpec:
    """Raises: KgorchError for one that is not known."""
    if name not in MACHINES:
        raise KgorchError(
            f"--on {name}: no such machine is known{nearest(name, MACHINES)}", f"known: {', '.join(MACHINES)}"
        )
    return MACHINES[name]


def parse_all(texts: Sequence[str], stages: Sequence[str]) -> dict[str, Assumptions]:
    """Assumptions by stage, and by ALL, from texts as `[STAGE.]NAME=VALUE`. Raises: KgorchError."""
    values: dict[str, dict[str, Any]] = {name: {} for name in (ALL, *stages)}
    for text in texts:
        key, equals, value = text.partition("=")
        stage, _, name = key.rpartition(".")
        if not equals or stage not in values or name not in NAMES:
            near = nearest(name, NAMES) if stage in values else nearest(stage, stages)
            raise KgorchError(
                f"--assume {text}: expected NAME=VALUE or STAGE.NAME=VALUE{near}", f"names: {', '.join(NAMES)}",
                f"stages: {', '.join(stages)}", next_step="for example --assume epoch=35m --assume compute=0.3",
            )  # fmt: skip
        values[stage][name] = _value(text, name, value)
    return {name: Assumptions(**(values[ALL] | own)) for name, own in values.items()}


def _value(text: str, name: str, value: str) -> float | int:
    """Durations in seconds. Raises: KgorchError, which names `text`."""
    try:
        if name in DURATIONS:
            return float(parse_duration_s(value))
        number = int(value) if name in COUNTS else float(value)
    except ValueError as error:
        raise KgorchError(f"--assume {text}: {error}") from None
    if not 0 < number < float("inf") or (name in SHARES and number > 1):
        raise KgorchError(f"--assume {text}: expected {'a share of 1' if name in SHARES else 'a number above 0'}")
    return number
