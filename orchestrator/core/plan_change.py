"""A plan that changed between two sessions: what differs, and what of it the run cannot go on with.

A stage that has begun goes on from its checkpoints: with another program or seed it would become neither the old training
nor the new one, so that is refused. What is not known to do harm is taken and shown: a changed argument may be the number of
epochs or another model, and another model is found out when its weights are put back (worker/checkpoint/state_codec.py).

Plans are plain values here, as `Plan.model_dump(mode="json")` gives them.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Values = Mapping[str, Any]

SECRET = ("notify.urls", "notify.command", "checkpoint.mirror", "checkpoint.mirror_options")
"""What may hold a token: that it changed is told, not to what."""

SECRET_ARG = re.compile(r"token|secret|passw|credential|api_?key", re.IGNORECASE)
"""Of a stage's args, by their names."""

LONGEST = 120


@dataclass(frozen=True, slots=True)
class Difference:
    """`old`, `new` as text; empty for what is not there. `note`: what to know of it."""

    key: str
    old: str
    new: str
    note: str = ""

    def __str__(self) -> str:
        text = f"{self.key}: {self.old or 'nothing'} → {self.new or 'nothing'}"
        return f"{text} ({self.note})" if self.note else text


@dataclass(frozen=True, slots=True)
class Judgement:
    """`refusals`: why the run cannot go on by the new plan; `for_good`: nor when a person insists."""

    differences: tuple[Difference, ...]
    refusals: tuple[str, ...] = ()
    for_good: tuple[str, ...] = ()


def judge(old: Values, new: Values, *, begun: Collection[str], done: Collection[str]) -> Judgement:
    """Compare two plans of one run.

    Args:
        begun: names of stages that have steps or checkpoints. done: of those that are finished.
    """
    begun = set(begun) - set(done)
    return Judgement(
        tuple(_differences(old, new, begun)),
        tuple(_refusals(old, new, begun, set(done))),
        tuple(_refusals_for_good(old, new)),
    )


def _refusals_for_good(old: Values, new: Values) -> Iterator[str]:
    before, now = old["checkpoint"]["dir"], new["checkpoint"]["dir"]
    if before != now:
        yield f"checkpoint.dir: its checkpoints lie in {before or 'the state folder'}"


def _refusals(old: Values, new: Values, begun: Collection[str], done: Collection[str]) -> Iterator[str]:
    before, now = _stages(old), _stages(new)
    for name in (name for name in before if name in begun):
        if name not in now:
            yield f"stage {name!r} has begun and is not in the plan any more"
        elif before[name]["entry"] != now[name]["entry"]:
            yield f"stage {name!r} has begun with another program, {before[name]['entry']}"
    if begun and old["seed"] != new["seed"]:
        yield f"the seed of {_named(begun)}, which has begun, is {old['seed']}"
    yield from _out_of_order([*before], [*now], {*begun, *done})


def _out_of_order(before: Sequence[str], now: Sequence[str], gone_through: Collection[str]) -> Iterator[str]:
    """How far a run is follows from its stages' order: behind one that has begun it may change, before it not."""
    old_way = [name for name in before if name in gone_through and name in now]
    new_way = [name for name in now if name in old_way]
    if old_way != new_way:
        yield f"{_named(old_way)} were begun in this order"
    last = max((now.index(name) for name in new_way), default=0)
    if early := [name for name in now[:last] if name not in gone_through]:
        yield f"{_named(early)} would come before {now[last]!r}, which has begun"


def _differences(old: Values, new: Values, begun: Collection[str]) -> Iterator[Difference]:
    before, now = dict(_flat(old)), dict(_flat(new))
    order = [*_stages(old)], [*_stages(new)]
    if order[0] != order[1]:
        yield Difference("stages", ", ".join(order[0]), ", ".join(order[1]))
    for key in dict.fromkeys([*before, *now]):
        if before.get(key) != now.get(key):
            yield Difference(key, *_shown(key, before.get(key), now.get(key)), _note(key, begun))


def _note(key: str, begun: Collection[str]) -> str:
    stage, _, rest = key.removeprefix("stage.").partition(".")
    if not key.startswith("stage.") or stage not in begun:
        return "weights so far were made without it" if key == "deterministic" and begun else ""
    if rest.partition(".")[0] == "weights":
        return "no effect: the stage has begun"
    return "order and batch stay" if rest == "ranks" else ""


def _shown(key: str, old: Any, new: Any) -> tuple[str, str]:
    is_arg = key.startswith("stage.") and SECRET_ARG.search(key.partition(".args.")[2])
    if is_arg or any(key == secret or key.startswith(secret + ".") for secret in SECRET):
        return tuple("…" if value else "" for value in (old, new))  # type: ignore[return-value]
    return _text(old), _text(new)


def _text(value: Any) -> str:
    text = "" if value is None else str(value)
    return text if len(text) <= LONGEST else text[: LONGEST - 1] + "…"


def _flat(value: Values, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every value by its dotted key; stages by name."""
    for key, item in value.items():
        if key == "stage" and not prefix:
            for name, stage in _stages(value).items():
                yield from _flat({k: v for k, v in stage.items() if k != "name"}, f"stage.{name}.")
        elif isinstance(item, Mapping) and item:
            yield from _flat(item, f"{prefix}{key}.")
        else:
            yield prefix + key, item or None if isinstance(item, Mapping) else item


def _stages(plan: Values) -> dict[str, Values]:
    return {stage["name"]: stage for stage in plan["stage"]}


def _named(names: Collection[str]) -> str:
    return ", ".join(repr(name) for name in (sorted(names) if isinstance(names, set) else names))
