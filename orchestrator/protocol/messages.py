"""The messages between supervisor, guard process, snapshot server, ranks and command line: one class each.

Those of the snapshot server are in snapshot_messages.py, those of other nodes in node_messages.py; Message and MESSAGE_KINDS hold
them all.

A class may be renamed; its key in MESSAGE_KINDS and the names of its fields are what goes over the socket, and stay: a
supervisor of this version adopts an attempt whose ranks were started by an older one. The classes hold what no annotation
can say; the codec checks the types. Instants named `…_s` are CLOCK_BOOTTIME in seconds (system/clock.py).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, TypeAlias

from kgorch.protocol.node_messages import NodeCommand, NodeDone, NodeEnded, NodeHello, NodeMetrics, NodeStart, RankStack
from kgorch.protocol.snapshot_messages import (
    BufferGrant,
    BufferRequest,
    CheckpointWritten,
    PartWritten,
    PersistResult,
    SaveConclusion,
    SaveFailure,
    SnapshotInfo,
    SnapshotReady,
)
from kgorch.protocol.values import MAX_NUMBER

MAX_METRICS = 1000
MAX_METRIC_NAME = 200
MAX_METRICS_BYTES = 512 << 10
"""Metrics of a run, characters of a name, and bytes of all names as JSON: with these bounds a Heartbeat fits into one line
(codec.MAX_LINE_BYTES), and a manifest stays below its own bound."""


def is_metric(name: str, value: Any) -> bool:
    """Whether this can be stored and shown as a metric. NaN and infinity are metrics: training that diverges shows them."""
    is_number = type(value) is float or (type(value) is int and -MAX_NUMBER < value < MAX_NUMBER)
    return is_number and len(name) <= MAX_METRIC_NAME and name.isprintable()


# Ranks to the supervisor


@dataclass(frozen=True, slots=True)
class Hello:
    """A rank has connected.

    Attributes:
        attempt: its attempt, as in LaunchSpec; the same in all messages below.
        rank: its number.
        pid: its process.
        step: of the stage, at which it stands.
        state_bytes: size of what it tracks.
        ready: it tracks its state and is about to make its first step.
        stop_s: seconds that a foreign program takes to stop, the copy of its last checkpoint included; None for one that saves
            when it is asked.
    """

    attempt: str
    rank: int
    pid: int
    step: int
    state_bytes: int
    ready: bool = False
    stop_s: float | None = None


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """How far the training is, from rank 0 about once a second.

    Attributes:
        epoch: epochs of the stage that are over.
        step: optimizer steps of the stage.
        samples: samples of the stage, over all ranks.
        gap_s: longest of the recent times between two steps, seconds; an evaluation counts as one.
        step_s: seconds of a typical step.
        steps_total: of the stage; 0 while unknown.
        epochs_total: of the stage; 0 while unknown.
        metrics: what the script reported last, by name. Entries that are no metrics are dropped when a message arrives: a
            Heartbeat refused for them would disconnect the rank, which would send the same again.
    """

    attempt: str
    epoch: int
    step: int
    samples: int
    gap_s: float
    step_s: float
    steps_total: int = 0
    epochs_total: int = 0
    metrics: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        valid = [(name, value) for name, value in self.metrics.items() if is_metric(name, value)]
        if len(valid) != len(self.metrics) or len(valid) > MAX_METRICS:
            object.__setattr__(self, "metrics", dict(valid[:MAX_METRICS]))


@dataclass(frozen=True, slots=True)
class RankMetrics:
    """A rank's figures of itself, about once a second.

    Attributes:
        values: by the names of docs/json.md, in their units; what could not be measured is absent.
    """

    attempt: str
    rank: int
    values: dict[str, float]


@dataclass(frozen=True, slots=True)
class RankProgress:
    """Where a rank is in its training, about once a second, so that hangs are detected (core/session/hang_detection.py).

    Attributes:
        where: one of the places of core/session/hang_detection.py.
        for_s: seconds since it came there.
        still_s: seconds since its main thread moved.
        longest: the most seconds that it spent in each place in this attempt.
    """

    attempt: str
    rank: int
    where: str
    for_s: float
    still_s: float
    longest: dict[str, float]


@dataclass(frozen=True, slots=True)
class JournalEntry:
    """An event for the journal. Also from the guard process, the snapshot server, and the agents of other nodes.

    Attributes:
        attempt: empty for an agent's.
        kind: small letters and underscores.
        facts: of the event, by name.

    Raises: ValueError for anything else.
    """

    attempt: str
    kind: str
    facts: dict[str, str]

    def __post_init__(self) -> None:
        if not re.fullmatch("[a-z_]{1,40}", self.kind) or not all(type(item) is str for item in self.facts.values()):
            raise ValueError(f"not a kind of event, or facts that are not text: {self.kind!r:.80}")


@dataclass(frozen=True, slots=True)
class RungApplied:
    """All ranks changed to these settings before this step (core/memory/memory_ladder.py); one of them tells it.

    Attributes:
        step: before which they hold.
        rung: of the memory ladder.
        why: the reason, in words.
        settings: as core/memory/memory_ladder.py has them.
        changes_result: the training's numbers are not those that they would have been.
        up: a rung was undone.
    """

    attempt: str
    step: int
    rung: str
    why: str
    settings: dict[str, Any]
    changes_result: bool = False
    up: bool = False


@dataclass(frozen=True, slots=True)
class RemedyApplied:
    """All ranks dropped the gradients of a step and made this change of the schedule (core/health/training_health.py)."""

    attempt: str
    remedy: str
    why: str
    change: dict[str, Any]


@dataclass(frozen=True, slots=True)
class DeferredFile:
    """A file of the attempt's folder that the disk did not take: how a rank, or torchrun, ended.

    Raises: ValueError for another file's name.
    """

    attempt: str
    name: str
    content: dict[str, Any]

    def __post_init__(self) -> None:
        if not re.fullmatch(r"rank\d{1,6}\.status\.json|exit\.json", self.name):
            raise ValueError(f"not a file that is sent: {self.name!r:.80}")


# Supervisor to the ranks


@dataclass(frozen=True, slots=True)
class Command:
    """An order to the ranks.

    Attributes:
        what: `save` and go on; `stop` after a save; `down` or `up` one rung of the memory ladder.
        why: the reason, in words.
        wall_s: with `stop`, the instant at which all ends; None for none.
    """

    what: str
    why: str = ""
    wall_s: float | None = None


@dataclass(frozen=True, slots=True)
class DeadlineUpdate:
    """When the ranks save and stop without a command. `at_s`: None for never."""

    at_s: float | None = None


# Command line, daemon, supervisor and guard to a server


@dataclass(frozen=True, slots=True)
class Request:
    """A question or an order that is answered by a Response, or as the server's documentation says.

    Attributes:
        what: to a supervisor `ping`, `save`, `stop`, or from the daemon `suspend`: save and end within `within_s`, and go on
            when there is a daemon again. To the snapshot server: see snapshots/keeper.py.
        within_s: seconds; 0 where it means nothing.
    """

    what: str
    within_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Response:
    ok: bool
    text: str = ""


Message: TypeAlias = (
    Hello | Heartbeat | RankMetrics | RankProgress | CheckpointWritten | SaveFailure | Command | DeadlineUpdate | Request | Response
    | JournalEntry | RungApplied | RemedyApplied | BufferRequest | BufferGrant | SnapshotReady | PersistResult | SnapshotInfo
    | DeferredFile | PartWritten | SaveConclusion | NodeHello | NodeStart | NodeCommand | NodeDone | NodeEnded
    | RankStack | NodeMetrics
)  # fmt: skip

MESSAGE_KINDS: Mapping[str, type[Message]] = MappingProxyType(
    {
        "Hello": Hello,
        "Beat": Heartbeat,
        "Vitals": RankMetrics,
        "Place": RankProgress,
        "Saved": CheckpointWritten,
        "SaveFailed": SaveFailure,
        "Order": Command,
        "Deadline": DeadlineUpdate,
        "Ask": Request,
        "Answer": Response,
        "Note": JournalEntry,
        "RungTaken": RungApplied,
        "Remedied": RemedyApplied,
        "Room": BufferRequest,
        "Images": BufferGrant,
        "Filled": SnapshotReady,
        "Kept": PersistResult,
        "Held": SnapshotInfo,
        "Unwritten": DeferredFile,
        "Part": PartWritten,
        "Concluded": SaveConclusion,
        "NodeHello": NodeHello,
        "NodeStart": NodeStart,
        "NodeOrder": NodeCommand,
        "NodeDone": NodeDone,
        "NodeEnded": NodeEnded,
        "RankStack": RankStack,
        "NodeMetrics": NodeMetrics,
    }
)
"""The value of a line's `message` for each class; stays as it is between versions."""
