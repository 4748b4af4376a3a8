"""What a supervisor knows of its session just now, and what its parts post to its loop."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from subprocess import Popen
from typing import Any, Protocol

from sqlalchemy import Engine

from kgorch.core.session.events import Event
from kgorch.core.session.lifecycle_state import LAST_WORDS_S, LifecycleState
from kgorch.core.session.notification_policy import Notice
from kgorch.db.rows import RunInfo, SessionInfo
from kgorch.hardware.gpu_locks import GpuLocks
from kgorch.launch.attempts import LaunchedAttempt, RestorePoint
from kgorch.launch.standby import ForkedShim
from kgorch.limits.wall_sources import Walls
from kgorch.nodes.node_group import NodeGroup
from kgorch.plan import Plan
from kgorch.protocol.messages import RankMetrics
from kgorch.system.clock import Clock

KEEPER_S = 120.0
"""Seconds that a session without a wall waits for a save when it ends."""


@dataclass(frozen=True, slots=True)
class OpenSession:
    """A session that a supervisor is to see through.

    Attributes:
        row: the session's row, just opened, or that of a living one to adopt.
        session: where the lifecycle begins.
        adopted: the attempt that runs already; None for a session that is new.
    """

    run: RunInfo
    plan: Plan
    row: SessionInfo
    session: LifecycleState
    adopted: LaunchedAttempt | None = None
    walls: Walls = field(default_factory=Walls)
    claim: GpuLocks = field(default_factory=GpuLocks)


@dataclass(slots=True)
class LiveSession:
    """The state of a supervised session. The loop alone changes it; other threads read single attributes.

    Attributes:
        row: the session's row as it will be written, with the ranks' latest figures.
        state: where the lifecycle stands.
        attempt: what runs; None between two attempts.
        last_attempt: the same, also once it has ended.
        processes: the folder of the attempt that was started or adopted last, whose processes may live.
        is_attached: whether a rank of the attempt has called `attach`.
        saved_step: the newest step of the stage that is on disk.
        environ: in which the session's GPUs are the visible ones.
        nodes: the other nodes of the session.
        recorded: folders of the checkpoints that are verified and written down, or about to be.
    """

    engine: Engine
    run: RunInfo
    plan: Plan
    row: SessionInfo
    state: LifecycleState
    clock: Clock
    environ: Mapping[str, str]
    recorded: set[str]
    nodes: NodeGroup
    saved_step: int = 0
    attempt: LaunchedAttempt | None = None
    last_attempt: LaunchedAttempt | None = None
    processes: Path | None = None
    is_attached: bool = False

    @property
    def folder(self) -> Path:
        return Path(self.run.folder)

    def is_current(self, attempt: str) -> bool:
        return self.attempt is not None and attempt == self.attempt.name

    def left_s(self, at_most_s: float = KEEPER_S) -> float:
        """Seconds until the wall, for a wait that must not last longer."""
        wall_s = self.state.wall_s
        return at_most_s if wall_s is None else min(max(wall_s - self.clock.now_s(), LAST_WORDS_S), at_most_s)


# What threads post to the loop, besides the events of core/session/events.py


@dataclass(frozen=True, slots=True)
class AttemptStarted:
    """Its processes run. `gone`: folders of checkpoints that were recorded, and are not in the database any more."""

    attempt: LaunchedAttempt
    process: Popen[bytes] | ForkedShim
    found: RestorePoint
    gone: frozenset[str]


@dataclass(frozen=True, slots=True)
class LaunchFailed:
    """An attempt could not be started. `tries`: after so many of these in a row the run has failed; inf for what passes."""

    why: str
    tries: float = 1


@dataclass(frozen=True, slots=True)
class NodesLost:
    """Fewer nodes are there than the stage needs: the session ends here, and its resume waits for others."""

    why: str


@dataclass(frozen=True, slots=True)
class AttemptGone:
    """The attempt's processes are gone, and what they saved is verified. `step`: that its failed ranks recorded; else 0."""

    attempt: LaunchedAttempt
    step: int = 0


@dataclass(frozen=True, slots=True)
class AttemptEnded:
    """How it ended, judged by what its processes left. `failed_by_itself`: a rank raised, and not only lost its peers."""

    attempt: LaunchedAttempt
    event: Event
    failed_by_itself: bool


@dataclass(frozen=True, slots=True)
class StacksCollected:
    """The stacks of an attempt that hangs; `cause`: in one sentence, `facts`: for the journal."""

    attempt: LaunchedAttempt
    cause: str
    facts: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class RungOrdered:
    """The ranks are to go one rung of the memory ladder down, or up. `order`: "down" or "up"."""

    order: str
    facts: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Refined:
    """An event of time, once a look at the disk has shown what it means."""

    event: Event


Input = (
    Event
    | AttemptStarted
    | LaunchFailed
    | NodesLost
    | AttemptGone
    | AttemptEnded
    | StacksCollected
    | RungOrdered
    | Refined
)


class SupervisorLoop(Protocol):
    """What the parts of a supervisor may ask of its loop. All but `post` is called in the loop."""

    def post(self, item: Callable[[], None] | Input) -> None:
        """From any thread."""

    def dispatch(self, event: Event) -> None:
        """Move the session by an event: record it, act, tell."""

    def set_timer(self, name: str, in_s: float, then: Callable[[], None]) -> None:
        """Call `then` in the loop, in so many seconds; in place of what this name was set to before."""

    def launch_again(self) -> None: ...

    def notify(self, notice: Notice | None) -> None: ...

    def after_heartbeat(self) -> None:
        """The session's row has new figures."""

    def add_rank_metrics(self, metrics: RankMetrics) -> None: ...

    def allow_ranks(self, ranks: int) -> None:
        """So many connect besides commands."""
