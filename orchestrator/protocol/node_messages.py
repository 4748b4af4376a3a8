"""The messages between a supervisor and the agents of other nodes (kgorch.nodes); see messages.py for the rest."""

from __future__ import annotations

import re
from dataclasses import dataclass

MAX_TEXT, MAX_FRAMES, MAX_METRICS = 4000, 100, 300


@dataclass(frozen=True, slots=True)
class NodeHello:
    """An agent has connected and authenticated itself.

    Attributes:
        node: its number, from 1; the supervisor's node is 0.
        host: name of its machine.
        kgorch, torch, python: versions; `torch` is empty where PyTorch is not installed.
        gpus: number of visible GPUs.
        at: UTC by the node's clock, seconds since 1970.
        probe: name of the file that it has written into the run's folder.

    Raises: ValueError for anything else.
    """

    node: int
    host: str
    kgorch: str
    torch: str
    python: str
    gpus: int
    at: float
    probe: str

    def __post_init__(self) -> None:
        texts = (self.host, self.kgorch, self.torch, self.python)
        if self.node < 1 or self.gpus < 0 or any(len(text) > 255 or not text.isprintable() for text in texts):
            raise ValueError(f"not a node: {self.node!r:.80}")
        if not re.fullmatch(r"\.probe-[\w.-]{1,100}", self.probe):
            raise ValueError(f"not a probe: {self.probe!r:.80}")


@dataclass(frozen=True, slots=True)
class NodeStart:
    """Start this node's part of an attempt.

    Attributes:
        attempt: its name.
        launch: path of the attempt's launch.json, which the agent adapts to its node.
        number: of this node among those of the attempt, from 1.
        address: of the first node; `port`: where its torchrun listens.
        ranks: number of ranks of each node, the first node first.
    """

    attempt: str
    launch: str
    number: int
    address: str
    port: int
    ranks: list[int]


@dataclass(frozen=True, slots=True)
class NodeCommand:
    """An order to an agent.

    Attributes:
        what: "kill" the attempt; "stacks", send a RankStack of each rank; "persist", have the keeper write its newest snapshot;
            "end", the same, then end keeper and agent.
        number: of the order; NodeDone names it. 0 for one that is not answered.
    """

    what: str
    number: int = 0


@dataclass(frozen=True, slots=True)
class NodeDone:
    """An order is carried out, as far as it could be. `number`: of the order."""

    number: int


@dataclass(frozen=True, slots=True)
class RankStack:
    """Where a rank of another node stands.

    Attributes:
        state: of its process (launch/stack_dumps.py).
        frames: path, line and function of each call, innermost first.

    Raises: ValueError for frames that cannot be.
    """

    rank: int
    state: str
    frames: list[list[str]]

    def __post_init__(self) -> None:
        if len(self.frames) > MAX_FRAMES or any(len(frame) != 3 or not frame[1].isdecimal() for frame in self.frames):
            raise ValueError("not the frames of a stack")


@dataclass(frozen=True, slots=True)
class NodeMetrics:
    """What an agent has measured on its node.

    Attributes:
        values: by the names of a telemetry sample (docs/json.md), as `gpu0.util` and `host.cpu`.

    Raises: ValueError for other names, or too many.
    """

    values: dict[str, float]

    def __post_init__(self) -> None:
        if len(self.values) > MAX_METRICS or not all(
            re.fullmatch(r"(gpu\d{1,3}|host)\.[a-z_]{1,20}", name) for name in self.values
        ):
            raise ValueError("not the metrics of a node")


@dataclass(frozen=True, slots=True)
class NodeEnded:
    """The processes of an attempt have ended on a node.

    Attributes:
        attempt: its name.
        how: as launcher.describe_exit; or why they could not be started.

    Raises: ValueError for a text that is too long.
    """

    attempt: str
    how: str

    def __post_init__(self) -> None:
        if len(self.how) > MAX_TEXT:
            raise ValueError("a text that is too long")
