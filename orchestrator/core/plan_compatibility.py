"""Whether a run can continue with a changed plan: what differs, and which of the differences are refused.

A stage that has started continues from its checkpoints. With another program or seed the result would be neither the old
training nor the new one, so these changes are refused. A change that is not known to do harm is accepted and shown: a changed
argument may be the number of epochs or another model, and another model is detected when its weights are restored
(worker/checkpoint/state_codec.py).

Plans are plain values here, as `Plan.model_dump(mode="json")` returns them: core imports no pydantic.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kgorch.core.former_names import current_name

PlanValues = Mapping[str, Any]

SECRET_KEYS = ("notify.urls", "notify.command", "checkpoint.mirror", "checkpoint.mirror_options", "track.uri")
"""Keys whose values may hold a token: that they changed is shown, but no value."""

SECRET_ARGUMENT = re.compile(r"token|secret|passw|credential|api_?key", re.IGNORECASE)
"""Names of a stage's arguments whose values are treated alike."""

MAX_SHOWN = 120
"""Characters of a value that are shown."""


@dataclass(frozen=True, slots=True)
class PlanDifference:
    """A key whose value differs.

    Attributes:
        key (str): dotted, stages by name; "stages" for their order.
        old (str): text of the value in the run's plan; empty where it has none.
        new (str): text of the value in the new plan; empty where it has none.
        note (str): effect of the change that a user would not expect; empty for none.
    """

    key: str
    old: str
    new: str
    note: str = ""

    def __str__(self) -> str:
        text = f"{self.key}: {self.old or 'nothing'} → {self.new or 'nothing'}"
        return f"{text} ({self.note})" if self.note else text


@dataclass(frozen=True, slots=True)
class PlanCompatibility:
    """The comparison of two plans of a run.

    Attributes:
        differences (tuple[PlanDifference, ...]): all of them.
        refusals (tuple[str, ...]): why the run cannot continue with the new plan, unless the user insists (--accept-changes).
        permanent_refusals (tuple[str, ...]): why it cannot even then.
    """

    differences: tuple[PlanDifference, ...]
    refusals: tuple[str, ...] = ()
    permanent_refusals: tuple[str, ...] = ()


def compare_plans(
    old: PlanValues, new: PlanValues, *, started: Collection[str], finished: Collection[str]
) -> PlanCompatibility:
    """Compare two plans of one run.

    Args:
        started: names of stages that have steps or checkpoints, finished ones or not.
        finished: names of stages that are finished.
    """
    active = set(started) - set(finished)
    return PlanCompatibility(
        tuple(_differences(old, new, active)),
        tuple(_refusals(old, new, active, set(finished))),
        tuple(_permanent_refusals(old, new)),
    )


def shown_values(plan: PlanValues) -> dict[str, str]:
    """Every value that a plan sets, as text by its dotted key, stages by name. Of a value that may be secret only "…" is shown."""
    texts = {key: shown_value(key, value) for key, value in flat_values(plan)}
    return {key: text for key, text in texts.items() if text}


def _permanent_refusals(old: PlanValues, new: PlanValues) -> Iterator[str]:
    old_folder, new_folder = old["checkpoint"]["dir"], new["checkpoint"]["dir"]
    if old_folder != new_folder:  # the run's row names the old one, and nothing moves the checkpoints
        yield f"checkpoint.dir: its checkpoints lie in {old_folder or 'the state folder'}"


def _refusals(old: PlanValues, new: PlanValues, active: Collection[str], finished: Collection[str]) -> Iterator[str]:
    old_stages, new_stages = _stages(old), _stages(new)
    for name in (name for name in old_stages if name in active):
        if name not in new_stages:
            yield f"stage {name!r} has begun and is not in the plan any more"
        elif current_name(old_stages[name]["entry"]) != current_name(new_stages[name]["entry"]):
            yield f"stage {name!r} has begun with another program, {old_stages[name]['entry']}"
    if active and old["seed"] != new["seed"]:  # finished stages keep their result, later ones may have another seed
        yield f"the seed of {_quoted(active)}, which has begun, is {old['seed']}"
    yield from _order_refusals([*old_stages], [*new_stages], {*active, *finished})


def _order_refusals(old: Sequence[str], new: Sequence[str], started: Collection[str]) -> Iterator[str]:
    """The position of a run follows from the order of its stages: it may change after a stage that has started, not before."""
    old_order = [name for name in old if name in started and name in new]
    new_order = [name for name in new if name in old_order]
    if old_order != new_order:
        yield f"{_quoted(old_order)} were begun in this order"
    # a finished stage may be dropped: nothing runs it again
    last = max((new.index(name) for name in new_order), default=0)
    if earlier := [name for name in new[:last] if name not in started]:
        yield f"{_quoted(earlier)} would come before {new[last]!r}, which has begun"


def _differences(old: PlanValues, new: PlanValues, active: Collection[str]) -> Iterator[PlanDifference]:
    old_values, new_values = dict(flat_values(old)), dict(flat_values(new))
    old_order, new_order = [*_stages(old)], [*_stages(new)]
    if old_order != new_order:
        yield PlanDifference("stages", ", ".join(old_order), ", ".join(new_order))
    for key in dict.fromkeys([*old_values, *new_values]):
        before, after = old_values.get(key), new_values.get(key)
        if before != after:
            yield PlanDifference(key, shown_value(key, before), shown_value(key, after), _note(key, active))


def _note(key: str, active: Collection[str]) -> str:
    stage, _, rest = key.removeprefix("stage.").partition(".")
    if not key.startswith("stage.") or stage not in active:
        return "weights so far were made without it" if key == "deterministic" and active else ""
    if rest.partition(".")[0] == "weights":  # read at the first step alone; from there on checkpoints have them
        return "no effect: the stage has begun"
    return "order and batch stay" if rest == "ranks" else ""


def shown_value(key: str, value: Any) -> str:
    """A value of a plan as text; "…" where it may be secret."""
    is_secret_argument = key.startswith("stage.") and SECRET_ARGUMENT.search(key.partition(".args.")[2])
    if is_secret_argument or any(key == secret or key.startswith(secret + ".") for secret in SECRET_KEYS):
        return "…" if value else ""
    text = "" if value is None else str(value)
    return text if len(text) <= MAX_SHOWN else text[: MAX_SHOWN - 1] + "…"


def flat_values(values: PlanValues, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every value by its dotted key, stages by name, what a list has of tables and lists by position.

    An empty table counts as no value.
    """
    for key, item in values.items():
        if key == "stage" and not prefix:
            for name, stage in _stages(values).items():
                yield from flat_values({k: v for k, v in stage.items() if k != "name"}, f"stage.{name}.")
        elif isinstance(item, Mapping) and item:
            yield from flat_values(item, f"{prefix}{key}.")
        elif isinstance(item, list) and any(isinstance(part, Mapping | list) for part in item):
            yield from flat_values({str(number): part for number, part in enumerate(item)}, f"{prefix}{key}.")
        else:
            yield prefix + key, item or None if isinstance(item, Mapping) else item


def _stages(plan: PlanValues) -> dict[str, PlanValues]:
    return {stage["name"]: stage for stage in plan["stage"]}


def _quoted(names: Collection[str]) -> str:
    return ", ".join(repr(name) for name in (sorted(names) if isinstance(names, set) else names))
