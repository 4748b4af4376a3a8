"""When a rank's state is saved: at the requests that all ranks have agreed on, at the best metric, and at the end.

All of it happens between two optimizer steps, on the thread that trains.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from kgorch import __version__
from kgorch.checkpoint.manifest import Manifest, creation_instant
from kgorch.errors import UNWRITABLE
from kgorch.protocol.launch_spec import LaunchSpec
from kgorch.system.clock import boottime_s
from kgorch.worker import local_tensors, rng_state, session_end
from kgorch.worker.checkpoint import (
    gc_pause,
    replicas,
    sharded_tensors,
    snapshot_buffer,
    state_codec,
    trainable_weights,
)
from kgorch.worker.checkpoint.snapshot_writer import RankSnapshot, is_on_disk
from kgorch.worker.checkpoint.state_codec import CapturedState
from kgorch.worker.memory.ladder import manifest_entries
from kgorch.worker.ranks import consensus_board, process_group
from kgorch.worker.ranks.consensus_board import DOWN, SAVE, SLOT, SNAPSHOT, STOP, UP
from kgorch.worker.session_end import SessionOver
from kgorch.worker.session_state import SessionState

if TYPE_CHECKING:
    from kgorch.worker.supervision import Supervision

ROOM_PAUSES_S = (1.0, 2.0, 4.0, 8.0)
"""Seconds before each further try of a stage's final save that the disk did not take."""

AFTER_A_MISS = 5.0
"""Intervals until the next snapshot after one that could not be taken: the attempt may have cost half a second."""


class BoundaryState(NamedTuple):
    """The state at a step boundary.

    Attributes:
        captured: all of it.
        mine: this rank's share of the tensors, by path.
        began_s: monotonic reading at which capturing it began to hold up the training.
    """

    captured: CapturedState
    mine: dict[str, torch.Tensor]
    began_s: float


def capture_boundary(
    state: SessionState, check: Callable[[dict[str, torch.Tensor]], float] | None = None
) -> BoundaryState:
    """The state as it is now.

    Args:
        check: inspects the modules' and optimizers' part of this rank's share, and returns the seconds that it took.
    """
    member = state.member
    # Queued kernels have to be computed in any case, so waiting for them is not part of what a save costs.
    if member.device.type == "cuda":
        torch.cuda.current_stream().synchronize()
    began_s, checked_s = time.monotonic(), 0.0
    with gc_pause.paused():  # many small objects are made here, which could trigger a collection that takes longer
        captured = state_codec.capture(state.tracked.things)
    mine = snapshot_buffer.share(captured.tensors, captured.own, member.rank, member.world_size)
    busy_s = time.monotonic() - began_s
    if check is not None:
        checked_s = check(state.tracked.replicated(mine))
    return BoundaryState(captured, mine, time.monotonic() - busy_s - checked_s)  # without waiting for the other ranks


class SaveCoordinator:
    """Saves the state of this rank, together with the other ranks.

    Attributes:
        saved_at: the step that was saved last; None where that save is not on disk.
    """

    def __init__(self, state: SessionState, launch: LaunchSpec, supervision: Supervision) -> None:
        self._state, self._launch = state, launch
        self._board, self._writer, self._best = supervision.board, supervision.writer, supervision.best
        self._ladder, self._guard = supervision.ladder, supervision.loss_guard
        self._metric_log, self._link = supervision.metric_log, supervision.link
        self._next_snapshot_s = math.inf
        self.saved_at: int | None = None
        self._compared = 0

    def plan_snapshot(self, intervals: float = 1.0) -> None:
        """Set when rank 0 asks for the next snapshot that stays in memory."""
        is_asking = self._state.tracked and self._state.member.rank == 0
        interval_s = self._writer.interval_s if is_asking else None
        self._next_snapshot_s = math.inf if interval_s is None else time.monotonic() + interval_s * intervals

    def at_boundary(self, now_s: float) -> None:
        """Do what all ranks have agreed on for this step; almost always nothing.

        Args:
            now_s: monotonic reading.

        Raises:
            SessionOver: the session stops here.
            PeersLost: a rank has died.
        """
        step = self._state.position.step
        if now_s >= self._next_snapshot_s and not self._is_last_save_near():
            self._next_snapshot_s = math.inf  # until it is taken
            self._board.ask(SNAPSHOT)
        request = self._board.tick(step)
        # The determinism check (preflight/determinism_check.py) has all ranks stop at the same given step.
        if step == self._launch.stop_at:
            raise SessionOver(is_saved=self._save_and_wait())
        if request:
            self._carry_out(request)
        if self._best and self._state.tracked and (request := self._best.after_step(step, self.saved_at)):
            began_s = time.monotonic()
            self._save_best(request)
            self._best.add_cost(time.monotonic() - began_s)

    def _is_last_save_near(self) -> bool:
        """Whether the request of the last save would have to wait for that of a snapshot: with steps of some seconds a snapshot
        is nearly always asked for."""
        deadline_s, steps_s = self._link.deadline_s, consensus_board.MOST_STEPS * self._state.timer.usual_s
        return deadline_s is not None and boottime_s() + steps_s >= deadline_s

    def between_epochs(self) -> None:
        """Save the state if an evaluation between two epochs has found it to be the best. Raises: SessionOver, PeersLost."""
        if not self._best or not self._state.tracked:
            return
        if request := self._best.between_epochs(self._state.position.step, self.saved_at):
            self._save_best(request)

    def miss_best(self) -> None:
        """The same where gradients are summed over the epoch's end: the state cannot be saved, and the user is told."""
        if self._best and self._state.tracked:
            self._best.miss(self._state.position.step)

    def save_final(self) -> bool:
        """Save the state at the end of the stage. Where the disk is full, wait for room: training is over, and nothing else to do.

        Returns: whether it is on disk.
        """
        is_saved = self._save_and_wait(final=True)
        for pause_s in ROOM_PAUSES_S:  # so many on each rank, for all are told the same error
            if is_saved or self._writer.errno not in UNWRITABLE:
                break
            time.sleep(pause_s)
            is_saved = self._save_and_wait(final=True)
        if is_saved and self._state.tracked and not self._state.probe.is_probe:
            session_end.final_step = self._state.position.step
        return is_saved

    def capture(self) -> BoundaryState | None:
        """The state, after all ranks have checked that it is finite; None where nothing is tracked. Raises: Unwell."""
        if not self._state.tracked:
            return None
        self._compare_ranks()
        if self._state.probe.is_probe:  # whose state is never resumed from
            return capture_boundary(self._state)
        return capture_boundary(
            self._state,
            lambda tensors: self._guard.check_state(tensors, self._state.position.step, self._board.vote_everywhere),
        )

    def _compare_ranks(self) -> None:
        """Tell of weights that are not the same on all ranks, at the first saves. All ranks call it together."""
        state = self._state
        if state.member.world_size == 1 or self._compared == replicas.COMPARISONS:
            return
        self._compared += 1
        if names := replicas.differing(state.tracked.things, self._board.vote_everywhere):
            self._compared = replicas.COMPARISONS
            what = replicas.DIFFER.format(", ".join(names))
            state.exactness.update(weights=what)
            if state.member.rank == 0:
                print(f"kgorch: {what}", file=sys.stderr, flush=True)

    def save(self, slot: int, boundary: BoundaryState | None, *, persist: bool, final: bool = False) -> bool:
        """Copy the state to a snapshot buffer. Returns whether that succeeded.

        A step that is saved already is not saved again, except as the stage's final one.

        Args:
            slot: of the two buffers.
            boundary: from `capture`.
            persist: the keeper writes the snapshot to disk.
            final: the checkpoint closes the stage.
        """
        step = self._state.position.step
        if boundary is None or (self.saved_at == step and not final):
            return True
        # Only here, because saves are rare: the check makes a warning of its own.
        self._state.determinism.probe()
        self._state.update_exactness()
        with gc_pause.paused():
            is_saved = self._write(slot, boundary, persist=persist, final=final)
        if is_saved and persist:
            self.saved_at = step
            if self._best and not final:
                self._best.record_save(step)
        return is_saved

    def _carry_out(self, request: int) -> None:
        slot, step, is_first = 1 if request & SLOT else 0, self._state.position.step, self._state.member.rank == 0
        if request & STOP:
            raise SessionOver(is_saved=self._save_and_wait(slot=slot))
        if request & DOWN:
            self._ladder.down(step, "memory is nearly full", tells=is_first, must=False)
        if request & UP:
            self._ladder.up(step, tells=is_first)
        if not request & (SAVE | SNAPSHOT):
            return
        self._state.marker.enter("save")
        if request & SAVE:
            self._writer.wait()  # a save of a new best may have come between the request and this step
        is_captured = self.save(slot, self.capture(), persist=bool(request & SAVE))
        self._state.marker.enter("step")
        self.plan_snapshot(1.0 if is_captured else AFTER_A_MISS)

    def _save_best(self, request: int) -> None:
        """On all ranks, at the step on whose weights rank 0's best value was measured. A pending stop is done here, too."""
        if request & STOP:
            raise SessionOver(is_saved=self._save_and_wait(slot=1 if request & SLOT else 0))
        marker = self._state.marker
        where = marker.where
        marker.enter("save")
        self._writer.wait()
        self.saved_at = None  # a save of this step, if any, is not on disk
        self.save(1 if request & SLOT else 0, self.capture(), persist=True)
        marker.enter(where)

    def _save_and_wait(self, *, slot: int | None = None, final: bool = False) -> bool:
        """Save, and wait until it is on disk; a second time if the keeper is lost meanwhile, because training stands still."""
        if not self._state.tracked:
            return True
        self._state.marker.enter("save")
        boundary = self.capture()
        # Training stands still, so the captured state stays valid, and a save that was lost with its keeper can be repeated.
        for _ in range(2):
            if slot is None:  # no request has chosen one that is not being written
                self._writer.wait()
                slot = self._writer.next_slot()
            if self.save(slot, boundary, persist=True, final=final) and self._writer.wait():
                return True
            # The keeper may have died after the rename and before its report.
            if is_on_disk(self._launch, self._state.position.step, final=final):
                return True
            self.saved_at = slot = None
        return False

    def _write(self, slot: int, boundary: BoundaryState, *, persist: bool, final: bool) -> bool:
        # The capture has waited for the device already, and the manifest is to hold the newest metrics.
        self._state.metrics.collect(wait=True)
        if self._metric_log:
            self._metric_log.cut()
        sharded = local_tensors.is_any_sharded(boundary.captured.tensors.values())
        manifest = self._manifest(final=final, sharded=sharded)
        documents = self._rank_documents(boundary.captured, boundary.mine)
        snapshot = RankSnapshot(boundary.captured, boundary.mine, documents, manifest, boundary.began_s)
        return self._writer.save(snapshot, slot=slot, persist=persist)

    def _manifest(self, *, final: bool, sharded: bool) -> Manifest:
        state, launch, changes = self._state, self._launch, tuple(self._ladder.changes.entries)
        return Manifest(
            run=launch.run,
            run_id=launch.run_id,
            stage=launch.stage,
            final=final,
            position=state.position.as_manifest(),
            world_size=state.division.ranks.count,
            divisible=state.division.is_divisible,
            created_at=creation_instant(changes),
            plan_hash=launch.plan_hash,
            metrics=state.metrics.values,
            measured=state.metrics.measured,
            versions=process_group.versions(__version__, state.member.device)
            | {"deterministic": state.determinism.level}
            | manifest_entries(self._ladder.settings),
            changes=changes,
            sharded=sharded,
        )

    def _rank_documents(self, captured: CapturedState, mine: Iterable[str]) -> dict[str, dict[str, Any]]:
        """rankK.json of each rank that this process plays; the first one's lists the tensors that the process writes."""
        ranks, device = self._state.division.ranks, self._state.member.device
        random_states = {ranks.first: rng_state.capture(device), **ranks.random_states}
        if (loader := self._state.foreign_loader) is not None:
            random_states[ranks.first]["loader"] = loader.place
        places = {name: place for name, item in self._state.followed.items() if (place := item.place)}
        # Left out where there are none: a checkpoint of a script that does not use them has the bytes that it always had.
        further: dict[str, Any] = {"loaders": places} if places else {}
        keyed = self._state.keyed_loader
        if keyed is not None and (place := keyed.place(self._state.position.batch))["used"]:
            further["keyed"] = place
        if self._state.remembered.values:
            further["remembered"] = self._state.remembered.values
        if (buckets := self._state.bucket_order.saved) is not None:
            further["buckets"] = buckets
        if losses := self._guard.recent_losses:
            further["losses"] = losses
        if frozen := trainable_weights.fingerprints(self._state.tracked.things):
            further["frozen"] = frozen
        if gradients := self._state.tracked.thawed_or_frozen():
            further["requires_grad"] = gradients
        return {
            f"rank{rank}.json": {
                "rng": random_states[rank],
                "own": captured.own_tree,
                "tensors": sorted(mine) if rank == ranks.first else [],
                **further,
                **(sharded_tensors.rank_entry(captured.tensors) if rank == ranks.first else {}),
            }
            for rank in ranks.mine
        }
