"""The memory ladder: which change of settings follows an out-of-memory.

`Settings` holds all that determines the memory of a training: samples of one forward, whether activations are stored or
recomputed, what the launch is given. A *rung* changes one of them; the plan's *ladder* is the order in which rungs are tried.
`next_rung` walks the ladder from the top and takes the first rung that still changes something and helps against the memory that
ran out. So the settings alone hold the past, and ranks with the same settings choose the same rung without communication. Asking
the supervisor in the middle of a step would make training depend on it.

Three kinds of rungs. The ranks take those *in process* together in the middle of a step and repeat its batch. *Exact* rungs keep
the result, but for the order of sums. The others need a relaunch; those that change the result are taken only where the plan names
them.

BatchNorm's statistics depend on the microbatch. For such a model activation checkpointing therefore comes before any smaller
microbatch, whatever the plan's order, and a smaller microbatch counts as changing the result.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

DEVICE, HOST, OPTIMIZER, EVALUATION = "device", "host", "optimizer", "evaluation"
"""Which memory ran out. `OPTIMIZER` and `EVALUATION` are memory of the device, but a smaller batch of the training helps neither.
On the CPU every rung that applies there helps against all of them but `EVALUATION`."""

DEFAULT = (
    "microbatch/2",
    "activation_checkpointing",
    "expandable_segments",
    "empty_cache/50",
    "num_workers/2",
    "pin_memory=false",
)
"""The ladder of a plan without one: all rungs that keep the result, the cheapest first."""

# What the plan may write, and the kind of the rung. `by`: divided by it, again and again; `to`: set to it.
_FORMS = {
    r"microbatch/(?P<by>[2-9])": "microbatch",
    r"microbatch=(?P<to>[1-9]\d{0,8})": "microbatch",
    "activation_checkpointing": "activation_checkpointing",
    r"num_workers/(?P<by>[2-9])": "num_workers",
    r"num_workers=(?P<to>\d{1,4})": "num_workers",
    "pin_memory=false": "pin_memory",
    "expandable_segments": "allocator",
    r"empty_cache/(?P<to>[1-9]\d{0,5})": "empty_cache",
}
EXAMPLES = (*DEFAULT, "microbatch=12", "num_workers=1", "{ set = { crop = 96 }, changes_result = true }")

_IN_PROCESS = ("microbatch", "activation_checkpointing", "empty_cache")
_HELPS_HOST = ("num_workers", "pin_memory", "set")


@dataclass(frozen=True, slots=True)
class Rung:
    """One step of the ladder.

    Attributes:
        name: as the plan writes it, or `set crop=96`.
        kind: a value of `_FORMS`, or "set".
        by: divisor of a number, applied again and again until 1 or 0 is left; 0 for none.
        to: new value of a number.
        arguments: new values of arguments of the stage.
        changes_result: the training gives another result with it.
        begins_anew: the stage's weights no longer fit, so it starts again at its first step.
    """

    name: str
    kind: str
    by: int = 0
    to: int = 0
    arguments: Mapping[str, Any] = field(default_factory=dict)
    changes_result: bool = False
    begins_anew: bool = False

    @property
    def is_in_process(self) -> bool:
        return self.kind in _IN_PROCESS

    def helps(self, where: str, *, device: str) -> bool:
        """Whether the rung frees memory of that kind on a device, "cpu" or "cuda"."""
        if where == EVALUATION and self.kind in ("microbatch", "activation_checkpointing"):
            return False  # they change training steps alone
        if device == "cpu":
            return self.kind not in ("allocator", "empty_cache", "pin_memory")
        if where == HOST:
            return self.kind in _HELPS_HOST
        if where == OPTIMIZER and self.kind in ("microbatch", "activation_checkpointing"):
            return False
        return self.kind not in ("num_workers", "pin_memory")


@dataclass(frozen=True, slots=True)
class Settings:
    """All settings that determine the memory of a training. Manifests and rows hold them as JSON (`as_dict`).

    Attributes:
        microbatch: samples of one forward and backward on a rank; None for the rank's whole share of a step.
        activation_checkpointing: activations are recomputed in the backward pass.
        workers_at_most: upper bound of a DataLoader's num_workers; None for none.
        workers_divided: divisor of num_workers, applied after the bound.
        pin_memory: False switches it off; None leaves it to the script.
        expandable_segments: the option of PyTorch's allocator.
        empty_cache: optimizer steps between two calls of torch.cuda.empty_cache; 0 for never.
        amp: "" as the script has it; "bf16" or "off" after a loss that was not finite.
        arguments: of the stage, that replace the plan's.
        taken: names of the rungs that can be taken only once.
    """

    microbatch: int | None = None
    activation_checkpointing: bool = False
    workers_at_most: int | None = None
    workers_divided: int = 1
    pin_memory: bool | None = None
    expandable_segments: bool = False
    empty_cache: int = 0
    amp: str = ""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    taken: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_dict(document: Mapping[str, Any]) -> Settings:
        """The settings that as_dict() returned, also in an older or newer version: unknown fields are ignored.

        Raises: ValueError for what are no settings: a found database or checkpoint may hold anything.
        """
        if not isinstance(document, Mapping):
            raise ValueError(f"expected settings, found {document!r:.60}")
        values = {name: document[name] for name in Settings.__slots__ if name in document}
        for name, value in values.items():
            if not _IS_VALID[name](value):
                raise ValueError(f"the setting {name} holds {value!r:.60}")
        return Settings(**(values | {"taken": tuple(values.get("taken", ()))}))

    @property
    def without_result_changes(self) -> Settings:
        """The settings that another run of the same plan may begin with."""
        return replace(self, arguments={}, amp="", taken=tuple(n for n in self.taken if not n.startswith("set ")))

    def workers(self, asked: int) -> int:
        """num_workers of a DataLoader for which the script asks for `asked`."""
        most = asked if self.workers_at_most is None else min(asked, self.workers_at_most)
        return most // self.workers_divided

    def describe(self, base: Settings) -> list[str]:
        """The differences from `base` in words."""
        words = []
        if self.microbatch != base.microbatch:
            words.append(f"microbatch {self.microbatch or 'whole'}")
        if self.activation_checkpointing:
            words.append("activation checkpointing")
        if self.workers_divided > 1 or self.workers_at_most is not None:
            most = "" if self.workers_at_most is None else f" at most {self.workers_at_most}"
            words.append(f"num_workers{most}" + (f" / {self.workers_divided}" if self.workers_divided > 1 else ""))
        if self.pin_memory is False:
            words.append("pin_memory off")
        if self.expandable_segments:
            words.append("expandable_segments")
        if self.empty_cache:
            words.append(f"cache emptied every {self.empty_cache} steps")
        if self.amp:
            words.append(f"AMP {self.amp}")
        return words + [f"{name} = {json.dumps(value)}" for name, value in self.arguments.items()]


def _is_count(value: Any, least: int = 0) -> bool:
    return type(value) is int and value >= least


_IS_VALID: Mapping[str, Callable[[Any], bool]] = {
    "microbatch": lambda value: value is None or _is_count(value, 1),
    "activation_checkpointing": lambda value: isinstance(value, bool),
    "workers_at_most": lambda value: value is None or _is_count(value),
    "workers_divided": lambda value: _is_count(value, 1),
    "pin_memory": lambda value: value is None or isinstance(value, bool),
    "expandable_segments": lambda value: isinstance(value, bool),
    "empty_cache": _is_count,
    "amp": lambda value: value in ("", "bf16", "off"),
    "arguments": lambda value: isinstance(value, Mapping) and all(isinstance(name, str) for name in value),
    "taken": lambda value: isinstance(value, list | tuple) and all(isinstance(name, str) for name in value),
}
"""A check of each field of `Settings`."""


@dataclass(frozen=True, slots=True)
class MemoryFacts:
    """What the ranks have found out about the training, as far as the choice of a rung depends on it.

    Attributes:
        batch: samples of a rank's share of a step; 0 where it is not known.
        divides: a step can be computed in parts: its batch can be split, and the script uses session.backward.
        num_workers: the most that a loader asks for.
        batchnorm: the model has BatchNorm, whose statistics depend on the microbatch.
        blocks: repeated blocks of the model, whose activations can be dropped.
        device: "cpu" or "cuda".
    """

    batch: int = 0
    divides: bool = True
    num_workers: int = 0
    batchnorm: bool = False
    blocks: int = 0
    device: str = "cuda"

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def parse_rung(written: str | Mapping[str, Any]) -> Rung:
    """Parse a rung of the plan's ladder: a string, or a table with `set`.

    Raises: ValueError saying what is expected.
    """
    if isinstance(written, str):
        text = re.sub(r"\s", "", written)
        for form, kind in _FORMS.items():
            if match := re.fullmatch(form, text):
                numbers = {key: int(value) for key, value in match.groupdict().items()}
                return Rung(text, kind, numbers.get("by", 0), numbers.get("to", 0))
        raise ValueError(f"no rung of a ladder: {written!r:.60}; expected one like {', '.join(EXAMPLES)}")
    arguments = written.get("set")
    unknown = sorted(written.keys() - {"set", "changes_result", "begins_anew"})
    if unknown or not isinstance(arguments, Mapping) or not arguments:
        raise ValueError(f"expected {EXAMPLES[-1]}, found {dict(written)!r:.80}")
    for name in ("changes_result", "begins_anew"):
        if not isinstance(written.get(name, False), bool):
            raise ValueError(f"{name}: expected true or false, found {written[name]!r:.40}")
    text = " ".join(f"{name}={json.dumps(value)}" for name, value in arguments.items())
    begins_anew = bool(written.get("begins_anew", False))
    return Rung(
        f"set {text}",
        "set",
        arguments=dict(arguments),
        # an argument may mean anything, so the plan must say that it changes nothing
        changes_result=bool(written.get("changes_result", True)) or begins_anew,
        begins_anew=begins_anew,
    )


def next_rung(
    ladder: Sequence[Rung], now: Settings, base: Settings, facts: MemoryFacts, *, where: str = DEVICE
) -> tuple[Rung, Settings] | None:
    """The rung to take after memory ran out, and the settings after it; None when the ladder is exhausted.

    Args:
        now: the settings with which memory ran out.
        base: the plan's own settings, to which the microbatch returns when activations are no longer stored.
        where: the memory that ran out.
    """
    for rung in in_order(ladder, facts):
        if rung.helps(where, device=facts.device) and (after := _apply(rung, now, base, facts)) is not None:
            return rung, after
    return None


def in_order(ladder: Iterable[Rung], facts: MemoryFacts) -> list[Rung]:
    """The rungs in the order in which they are tried: the plan's, but with BatchNorm activation checkpointing first."""
    if not facts.batchnorm:
        return list(ladder)
    rungs = [replace(rung, changes_result=rung.changes_result or rung.kind == "microbatch") for rung in ladder]
    return sorted(rungs, key=lambda rung: 0 if rung.kind == "activation_checkpointing" else 1)


def levels(ladder: Sequence[Rung], now: Settings, base: Settings, facts: MemoryFacts) -> list[Settings]:
    """The settings that rungs in process have passed through, the one with most memory first and `now` last.

    They are computed from the ladder, not remembered: after a resume the ranks know their settings alone.
    """
    in_process = [rung for rung in ladder if rung.is_in_process]
    widest = replace(
        now, microbatch=base.microbatch, activation_checkpointing=False, empty_cache=base.empty_cache,
        taken=tuple(name for name in now.taken if not name.startswith("empty_cache")),
    )  # fmt: skip
    result = [widest]
    while result[-1] != now and (below := next_rung(in_process, result[-1], base, facts)):
        result.append(below[1])
    return result if result[-1] == now else [now]


def _apply(rung: Rung, now: Settings, base: Settings, facts: MemoryFacts) -> Settings | None:
    """The settings after a rung; None when it would change nothing."""
    match rung.kind:
        case "microbatch" if facts.divides:
            least = 2 if facts.batchnorm else 1  # BatchNorm has no statistics of one value
            whole = facts.batch or now.microbatch or 0
            current = min(now.microbatch or whole, whole)
            smaller = max(rung.to or -(-current // rung.by), least)
            return replace(now, microbatch=smaller) if smaller < current else None
        # without stored activations the plan's microbatch may fit again
        case "activation_checkpointing" if not now.activation_checkpointing and facts.blocks:
            return replace(now, activation_checkpointing=True, microbatch=base.microbatch)
        case "num_workers":
            asked = now.workers(facts.num_workers)
            if rung.by and asked:
                return replace(now, workers_divided=now.workers_divided * rung.by)
            if rung.to < asked and not rung.by:
                return replace(now, workers_at_most=rung.to, workers_divided=1)
        case "pin_memory" if now.pin_memory is not False:
            return replace(now, pin_memory=False)
        case "allocator" if not now.expandable_segments:
            return replace(now, expandable_segments=True)
        case "empty_cache" if rung.name not in now.taken:
            return replace(now, empty_cache=rung.to, taken=(*now.taken, rung.name))
        case "set" if rung.name not in now.taken:
            return replace(now, arguments=dict(now.arguments) | dict(rung.arguments), taken=(*now.taken, rung.name))
    return None
