"""The parts of a session that exist only under kgorch, and what the supervisor is told about once a second."""

from __future__ import annotations

import functools
import os
import signal
from collections.abc import Iterator

import torch

from kgorch.core.codes import EventKind
from kgorch.protocol.launch_spec import BOARD_VARIABLE, LaunchSpec
from kgorch.protocol.messages import Heartbeat, Hello, JournalEntry, Message, RankMetrics
from kgorch.worker.checkpoint import restore_source
from kgorch.worker.checkpoint.best_checkpoint import BestCheckpoint
from kgorch.worker.checkpoint.restore_source import RestoreSource
from kgorch.worker.checkpoint.snapshot_writer import SnapshotWriter
from kgorch.worker.health.loss_guard import LossGuard
from kgorch.worker.memory.ladder import Ladder
from kgorch.worker.memory.oom_retry import StepGuards
from kgorch.worker.probe.estimate_probe import EstimateProbe
from kgorch.worker.probe.probe import Probe
from kgorch.worker.ranks.consensus_board import Board
from kgorch.worker.ranks.node_board import LeaderGroup, NodeBoard
from kgorch.worker.ranks.process_group import RankInfo
from kgorch.worker.ranks.supervisor_link import SupervisorLink
from kgorch.worker.save_coordinator import SaveCoordinator
from kgorch.worker.session_end import SaveLost
from kgorch.worker.session_state import SessionState
from kgorch.worker.telemetry.metric_log import MetricLog


class StatusReporter:
    """Builds the messages about this rank. Called by the link's thread, except `hello`, which both threads call."""

    def __init__(self, state: SessionState, launch: LaunchSpec) -> None:
        self._state, self._attempt = state, launch.attempt

    def hello(self) -> Hello:
        """Who this rank is; sent first on every connection, and once more when it is ready to save."""
        rank, tracked, step = self._state.member.rank, self._state.tracked, self._state.position.step
        return Hello(self._attempt, rank, os.getpid(), step, tracked.state_bytes, tracked.is_ready)

    def messages(self) -> Iterator[Message]:
        """What is sent about once a second."""
        state, rank = self._state, self._state.member.rank
        yield state.marker.message(self._attempt, rank, state.tracked.modules())
        if not state.probe.is_probe:  # a probe reads and resets the same peaks of memory
            yield RankMetrics(self._attempt, rank, state.resources.read(state.timer.step_s))
        if rank == 0:
            yield self._beat()

    def _beat(self) -> Heartbeat:
        state, at = self._state, self._state.position
        gap_s = state.timer.take_gap_s()
        return Heartbeat(
            self._attempt,
            at.epoch or at.epochs_done,
            at.step,
            at.samples,
            gap_s=gap_s,
            step_s=state.timer.usual_s,
            steps_total=at.steps_total,
            epochs_total=at.epochs_total,
            metrics=state.metrics.values,
        )


def _join_board(launch: LaunchSpec, member: RankInfo) -> Board:
    """The board of this node's ranks. On several nodes all ranks call this together."""
    path, node = os.environ[BOARD_VARIABLE], launch.node
    if node is None:
        return Board(path, member.rank, member.world_size)
    return NodeBoard(path, member.rank, member.rank - node.first_rank, node.ranks_here, LeaderGroup(node.leaders))


class Supervision:
    """The connections of a rank to the other ranks, the supervisor and the keeper.

    Attributes:
        board: agreement of the ranks by a shared page.
        link: connection to the supervisor.
        writer: snapshots of this rank's share of the state.
        ladder: memory settings in force.
        loss_guard: detection of losses and weights that are not finite.
        best: saves at the best value of the plan's metric; None where the plan keeps no best checkpoint.
        metric_log: rank 0's record of reported metrics; None on other ranks and in a probe.
        saves: when the state is saved, and what else the ranks do at a boundary.
    """

    def __init__(self, state: SessionState, launch: LaunchSpec) -> None:
        self._state, self._launch = state, launch
        member, reporter = state.member, StatusReporter(state, launch)
        self.board = _join_board(launch, member)
        self.link = SupervisorLink(launch, self.board, reporter.hello, reporter.messages)
        state.events.connect(launch.attempt, self.link.send)
        self.writer = SnapshotWriter(launch, member.rank, member.world_size, self.board, self.link.send)
        # The writer knows which buffer is free, so it decides when a request may go to all ranks.
        self.board.admit = self.writer.admit
        self.best: BestCheckpoint | None = None
        if launch.best:
            self.best = BestCheckpoint(launch, member.rank, self.board, self.writer, state.metrics, self.link.send)
        if member.shares_gpu and member.rank == 0:
            why = f"{member.world_size} ranks share {torch.cuda.device_count()} GPUs; NCCL takes one rank a GPU"
            self.link.send(JournalEntry(launch.attempt, EventKind.GLOO_INSTEAD_OF_NCCL, {"why": why}))
        self.ladder = Ladder(launch, member.device, self.link.send)
        # Without a vote of all ranks a step cannot be dropped together: the next attempt leaves its batch out, as on CUDA.
        late = member.device.type == "cuda" or self.board.spans_nodes
        self.loss_guard = LossGuard(launch, member.rank, self.ladder, self.link.send, late=late)
        self.metric_log: MetricLog | None = None
        if launch.probe is not None:
            kind = EstimateProbe if launch.probe.get("gpu") else Probe
            # A probe reports to probe.json and records no metrics.
            state.probe = kind(launch, member.rank, member.device, self.ladder)
        elif member.rank == 0:
            self.metric_log = MetricLog(launch)
            state.metrics.on_arrival = self.metric_log.add
        # SIGTERM means that the time limit has come nearer. The handler only makes a request: it may interrupt any line.
        signal.signal(signal.SIGTERM, lambda *_: self.link.ask_stop())
        self.guards = StepGuards(self.ladder, self.loss_guard, self.board, member.rank)
        self.saves = SaveCoordinator(state, launch, self)

    @functools.cached_property
    def source(self) -> RestoreSource | None:
        """What this attempt continues from; None where the stage begins. Raises: CheckpointBroken, SnapshotGone."""
        return restore_source.find(self._launch.resume, self._launch.snapshot, self.writer.fetch)

    def leave(self, *, finished: bool, over: bool) -> None:
        """At the end of the session: save the final state of a stage, and close the connections.

        Args:
            finished: the script has ended without an error, so the stage is done.
            over: the script was stopped at a boundary.

        Raises:
            SaveLost: the final save has failed.
            Unwell: the final state is not finite.
        """
        state, saved = self._state, True
        try:
            if finished or over:  # the device answers, so copies of metrics that are under way may be waited for
                state.metrics.collect(wait=True)
            if finished:
                state.probe.script_over()
                saved = self.saves.save_final()
                state.probe.saved(state.exactness.facts)
                self.board.leave()
        finally:
            self.board.settle()
            state.marker.enter("end")
            if self.metric_log:
                self.metric_log.close()
            self.link.close()
        if not saved:
            raise SaveLost(f"the stage is done, but its last save failed: {self.writer.error}", self.writer.errno)

    def at_boundary(self, step: int) -> None:
        """Between two steps, after the saves: apply what is due before `step`."""
        self.ladder.empty_cache(step)
        if step == self.ladder.next_change:
            self.ladder.change(step)
        self.loss_guard.boundary(step)

    def begin_epoch(self, largest_share: int) -> None:
        """Before the first step of an epoch: apply the settings and remedies that earlier attempts had in force there.

        Args:
            largest_share: samples of the largest rank's share of the step.
        """
        state = self._state
        self.ladder.begin(state.position.step, largest_share)
        self.ladder.report_facts(state.member.rank)
        self.loss_guard.begin(state.tracked.things, state.position.step)
