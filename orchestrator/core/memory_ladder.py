"""The memory ladder: which rung follows an out-of-memory, and when to climb back.

`Settings` is what memory hangs on at one moment: how many samples one forward takes, whether activations are kept or
computed again, what the launch is given. A *rung* changes it; the plan's ladder is the order in which rungs are tried.
`next_rung` walks the ladder from the top and takes the first rung that still changes something and helps against the
memory that ran out, so all that is known of the past is in the settings themselves, and ranks that hold the same
settings choose the same rung without asking each other.

Three kinds of rungs. *In process*: the ranks take them together in the midst of a step and do the same batch again.
*Exact* ones keep the result (the order of sums aside). The others need a relaunch, and those that change the result are
taken only where the plan names them.

BatchNorm's statistics hang on the microbatch: for such a model activation checkpointing comes before any smaller
microbatch, whatever the plan's order, and a smaller microbatch counts as changing the result.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

DEVICE, HOST, OPTIMIZER, EVALUATION = "device", "host", "optimizer", "evaluation"
"""Which memory ran out. The optimizer's and an evaluation's are the device's, but a smaller batch of the training helps neither. Of
a training on the CPU they are all the same but the evaluation's, and every rung helps."""

DEFAULT = (
    "microbatch/2",
    "activation_checkpointing",
    "expandable_segments",
    "empty_cache/50",
    "num_workers/2",
    "pin_memory=false",
)
"""Without a ladder in the plan: all that keeps the result, the cheapest first."""

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
        by: what a number is divided by, again and again until nothing is left of it; to: what it becomes.
        arguments: of the stage, that become these.
        begins_anew: the stage's weights no longer fit, so it begins from its first step.
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
        if where == EVALUATION and self.kind in ("microbatch", "activation_checkpointing"):
            return False  # of a training step
        if device == "cpu":
            return self.kind not in ("allocator", "empty_cache", "pin_memory")
        if where == HOST:
            return self.kind in _HELPS_HOST
        if where == OPTIMIZER and self.kind in ("microbatch", "activation_checkpointing"):
            return False
        return self.kind not in ("num_workers", "pin_memory")


@dataclass(frozen=True, slots=True)
class Settings:
    """What memory hangs on, as it stands.

    Attributes:
        microbatch: samples of one forward and backward on a rank; None for its whole share.
        workers_at_most, workers_divided: what the script asks of a DataLoader's workers is bounded by, after division.
        empty_cache: optimizer steps between two of emptying the allocator's cache; 0 for never.
        amp: "" as the script has it; "bf16" or "off" after a NaN.
        taken: names of the rungs that are taken once.
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
    def of(document: Mapping[str, Any]) -> Settings:
        """From as_dict(), also an older or newer one's: what is not known here is passed over.

        Raises: ValueError for what are no settings: they may come from elsewhere.
        """
        if not isinstance(document, Mapping):
            raise ValueError(f"expected settings, found {document!r:.60}")
        known = {name: document[name] for name in Settings.__slots__ if name in document}
        for name, value in known.items():
            if not _SETTINGS[name](value):
                raise ValueError(f"the setting {name} holds {value!r:.60}")
        return Settings(**(known | {"taken": tuple(known.get("taken", ()))}))

    @property
    def kept_result(self) -> Settings:
        """Without what changes the result: what another run of the same plan may begin with."""
        return replace(self, arguments={}, amp="", taken=tuple(n for n in self.taken if not n.startswith("set ")))

    def workers(self, asked: int) -> int:
        """Of a DataLoader, for which the script asks so many."""
        most = asked if self.workers_at_most is None else min(asked, self.workers_at_most)
        return most // self.workers_divided

    def said(self, base: Settings) -> list[str]:
        """What differs from `base`, in words."""
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


_SETTINGS: Mapping[str, Callable[[Any], bool]] = {
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
"""What each may hold."""


@dataclass(frozen=True, slots=True)
class Facts:
    """What the ranks know of the training and the choice hangs on.

    Attributes:
        batch: samples of a rank's share of a step. num_workers: the most that a loader asks for.
        batchnorm: its statistics would hang on the microbatch. blocks: repeated ones, whose activations can be dropped.
        device: "cpu" or "cuda".
    """

    batch: int = 0
    num_workers: int = 0
    batchnorm: bool = False
    blocks: int = 0
    device: str = "cuda"

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def of(document: Mapping[str, Any]) -> Facts:
        return Facts(**{name: document[name] for name in Facts.__slots__ if name in document})


def parse_rung(written: str | Mapping[str, Any]) -> Rung:
    """A rung of the plan's ladder.

    Raises: ValueError, which says what is expected.
    """
    if isinstance(written, str):
        text = re.sub(r"\s", "", written)
        for form, kind in _FORMS.items():
            if match := re.fullmatch(form, text):
                named = {key: int(value) for key, value in match.groupdict().items()}
                return Rung(text, kind, named.get("by", 0), named.get("to", 0))
        raise ValueError(f"no rung of a ladder: {written!r:.60}; expected one like {', '.join(EXAMPLES)}")
    arguments = written.get("set")
    unknown = sorted(written.keys() - {"set", "changes_result", "begins_anew"})
    if unknown or not isinstance(arguments, Mapping) or not arguments:
        raise ValueError(f"expected {EXAMPLES[-1]}, found {dict(written)!r:.80}")
    for name in ("changes_result", "begins_anew"):
        if not isinstance(written.get(name, False), bool):
            raise ValueError(f"{name}: expected true or false, found {written[name]!r:.40}")
    said = " ".join(f"{name}={json.dumps(value)}" for name, value in arguments.items())
    anew = bool(written.get("begins_anew", False))
    return Rung(
        f"set {said}",
        "set",
        arguments=dict(arguments),
        changes_result=bool(written.get("changes_result", True)) or anew,
        begins_anew=anew,
    )


def next_rung(
    ladder: Sequence[Rung], now: Settings, base: Settings, facts: Facts, *, where: str = DEVICE
) -> tuple[Rung, Settings] | None:
    """The rung to take after memory ran out, and the settings that follow; None when the ladder is exhausted.

    Args:
        base: the plan's own settings, to which the microbatch returns when activations are no longer kept.
    """
    for rung in in_order(ladder, facts):
        if rung.helps(where, device=facts.device) and (after := _taken(rung, now, base, facts)) is not None:
            return rung, after
    return None


def in_order(ladder: Iterable[Rung], facts: Facts) -> list[Rung]:
    """The plan's order; with BatchNorm what keeps its statistics comes first."""
    rungs = [replace(rung, changes_result=rung.changes_result or _splits_batchnorm(rung, facts)) for rung in ladder]
    if not facts.batchnorm:
        return rungs
    return sorted(rungs, key=lambda rung: 0 if rung.kind == "activation_checkpointing" else 1)


def levels(ladder: Sequence[Rung], now: Settings, base: Settings, facts: Facts) -> list[Settings]:
    """The settings that rungs in process have led through, the widest first and `now` last."""
    in_process = [rung for rung in ladder if rung.is_in_process]
    widest = replace(
        now, microbatch=base.microbatch, activation_checkpointing=False, empty_cache=base.empty_cache,
        taken=tuple(name for name in now.taken if not name.startswith("empty_cache")),
    )  # fmt: skip
    found = [widest]
    while found[-1] != now and (below := next_rung(in_process, found[-1], base, facts)):
        found.append(below[1])
    return found if found[-1] == now else [now]


def _splits_batchnorm(rung: Rung, facts: Facts) -> bool:
    return rung.kind == "microbatch" and facts.batchnorm


def _taken(rung: Rung, now: Settings, base: Settings, facts: Facts) -> Settings | None:
    """The settings after a rung; None when it would change nothing."""
    match rung.kind:
        case "microbatch":
            least = 2 if facts.batchnorm else 1  # BatchNorm has no statistics of one value
            whole = facts.batch or now.microbatch or 0
            current = min(now.microbatch or whole, whole)
            smaller = max(rung.to or -(-current // rung.by), least)
            return replace(now, microbatch=smaller) if smaller < current else None
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
