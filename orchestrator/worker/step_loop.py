"""The epochs and steps of a script's training loops, and what happens at the boundary between two steps."""

from __future__ import annotations

import copy
import itertools
import sys
from collections.abc import Iterable, Iterator
from typing import Any

from orchestrator.core.codes import EventKind
from orchestrator.errors import KgorchError
from orchestrator.worker import rng_state
from orchestrator.worker.checkpoint import state_codec
from orchestrator.worker.data.cached_path import CachedPaths
from orchestrator.worker.data.keyed_loader import Loader
from orchestrator.worker.data.loader_fast_forward import LoaderFastForward
from orchestrator.worker.memory import oom
from orchestrator.worker.memory.microbatch import MicrobatchRunner
from orchestrator.worker.restore import ResumePoint
from orchestrator.worker.session_state import SessionState
from orchestrator.worker.supervision import Supervision


class StepLoop:
    """Gives the script its epochs and batches, and counts them.

    Args:
        runner: computes the steps.
        data: paths that may switch to a local copy between two epochs.
        supervision: None when the script runs alone.

    Attributes:
        in_step: the script has the batch of a step whose boundary is still to come.
    """

    def __init__(
        self, state: SessionState, runner: MicrobatchRunner, data: CachedPaths, supervision: Supervision | None
    ) -> None:
        self._state, self._runner, self._data, self._supervision = state, runner, data, supervision
        self._point = ResumePoint(state.member.world_size)
        self._loops_seen = self._epochs_wanted = self._refused = 0
        self._epoch_is_open = False
        self.in_step = False

    def resume(self, point: ResumePoint) -> None:
        """Continue from there; before the first step."""
        self._point = point

    def epochs(self, count: int) -> Iterator[int]:
        """See Session.epochs."""
        state, at = self._state, self._state.position
        number, self._loops_seen = self._loops_seen, self._loops_seen + 1
        if number < at.loop or self._point.is_trained:
            return
        if number > at.loop:  # the script has left the loop before it early
            at.loop, at.epoch, at.batch = number, 0, 0
        self._epochs_wanted = int(count)
        at.epochs_total = count = min(int(count), 1) if state.quick else int(count)
        while at.epoch < count:
            self._epoch_is_open = True
            if self._supervision and (metric_log := self._supervision.metric_log):
                metric_log.epoch = at.epoch + 1
            yield at.epoch
            state.probe.epoch_over()
            at.epoch, at.batch = at.epoch + 1, 0
            if state.foreign_loader is not None:
                state.foreign_loader.end()
            self._save_best()  # of what an evaluation has reported, also after the last epoch
            self._data.look()
        at.batch, at.epochs_done = 0, count  # loop and epoch stay: `--extend` continues the loop from there

    def steps(self, loader: Iterable[Any], epochs: int | None = None) -> Iterator[Any]:
        """See Session.steps."""
        if epochs is None:
            return self._steps_of_epoch(loader)
        return (batch for _ in self.epochs(epochs) for batch in self._steps_of_epoch(loader))

    def _steps_of_epoch(self, loader: Iterable[Any]) -> Iterator[Any]:
        state, at, runner, device = self._state, self._state.position, self._runner, self._state.member.device
        source, batches = self._begin_epoch(loader)
        world_size = state.member.world_size
        for parts in state.resources.timed(batches):
            samples, ranks = source.samples_in(at.batch), state.division.ranks
            shares = [source.share_of_rank(at.batch, rank) for rank in ranks.mine]
            # A process alone divides by the number of virtual ranks after the backward, DDP by that of processes.
            divided_by = ranks.count if world_size == 1 else world_size
            weights = [share * divided_by / samples for share in shares]
            # Inside the loop, because the warm-up needs a batch.
            if self._point.needs_warmup:
                yield from self._warm_up(parts, weights)
            runner.set_batches(parts, weights)
            if runner.has_dropout_state:
                rng_state.renew_dropout_state(device)
            self.in_step = True
            try:
                yield parts[0]
            finally:  # also where the script leaves the loop early: then this step does not count
                self.in_step = False
            self._check_divisibility()
            at.step += 1
            at.batch += 1
            at.samples += samples
            self._boundary()
        state.marker.enter("evaluation")

    def _begin_epoch(self, loader: Iterable[Any]) -> tuple[Loader | LoaderFastForward, Iterator[list[Any]]]:
        """The loader, and its batches that are still to do."""
        if not self._epoch_is_open:
            raise KgorchError(
                "session.steps(loader) was called outside of an epoch, or twice in one",
                next_step="write `for epoch in session.epochs(n): for batch in session.steps(loader):`, or steps(loader, n)",
            )
        self._epoch_is_open = False
        state, at, point = self._state, self._state.position, self._point
        source = self._source(loader)
        source.seek(at.epoch, at.batch)
        if point.rng:
            rng_state.restore(point.rng, state.member.device)
            point.rng = None
        batches = source.parts()  # a fast-forward happens here, so it counts as no step's time
        if state.foreign_loader is not None:
            at.batch = state.foreign_loader.batch
            state.report_loader()
        left = at.epochs_total - at.epoch
        at.steps_total = at.step - at.batch + len(source) * left if len(source) else 0
        trials = state.probe.batches(source, self._epochs_wanted)
        if trials is not None:
            batches = self._from_first_batch(trials)
        elif state.quick:
            at.steps_total, batches = at.step - at.batch + 1, itertools.islice(batches, max(0, 1 - at.batch))
        self._warn_if_untracked()
        # The time since the last step, perhaps that of an evaluation, is no step's time.
        state.timer.tick("step" if "first_step" in state.marker.longest else "first_step")
        if self._supervision and state.tracked:
            shares = (source.share_of_rank(at.batch, rank) for rank in range(state.division.ranks.count))
            self._supervision.begin_epoch(max(shares, default=0))
        self._save_best()  # of an evaluation before the epoch's first step, or after a resume
        return source, batches

    def _boundary(self) -> None:
        state = self._state
        timer = state.timer
        timer.step_s = timer.tick()
        if state.resources.sample(timer.ticked_s):  # about once a second: both ask the allocator
            self._report_refusals()
        if state.metrics.pending:  # copies from a GPU
            state.metrics.collect()
        state.exactness.update(deterministic=state.determinism.verdict)
        if self._supervision is not None:
            self._supervision.saves.at_boundary(timer.ticked_s)
            self._supervision.at_boundary(state.position.step)

    def _save_best(self) -> None:
        if self._supervision is not None:
            self._supervision.saves.between_epochs()

    def _from_first_batch(self, trials: Iterator[list[Any]]) -> Iterator[list[Any]]:
        """A probe's batches: they may be the first ones again."""
        for parts in trials:
            self._state.position.batch = 0
            yield parts

    def _report_refusals(self) -> None:
        """Report allocations that failed in steps that succeeded: cuDNN then takes an algorithm that needs less memory."""
        if refused := oom.refusals.look():
            self._refused += refused
            self._state.exactness.update(
                memory=f"{self._refused} allocations were refused in steps that came through: near the memory limit another"
                " algorithm may have been used, whose bits differ"
            )

    def _warn_if_untracked(self) -> None:
        """Before the first step, while nothing is lost yet."""
        state, launch = self._state, self._state.launch
        if launch and not state.tracked and state.member.rank == 0 and state.position.step == state.position.batch == 0:
            what = "it takes steps and has not called session.track(): nothing of it can be saved"
            state.probe.untracked(what)
            print(f"kgorch: {what}", file=sys.stderr, flush=True)
            state.events.send(EventKind.TRACKS_NOTHING, {"stage": launch.stage, "what": what})

    def _check_divisibility(self) -> None:
        """Fewer processes can play this run's ranks only if each batch goes through `session.backward` as it came."""
        if not self._runner.saw_batch:
            self._state.division.refuse("each batch must go to session.backward() as session.steps() gave it")
        elif self._runner.communicates:
            self._state.division.refuse("the ranks communicate in the forward or backward of a step")

    def _source(self, loader: Iterable[Any]) -> Loader | LoaderFastForward:
        state, point = self._state, self._point
        source: Loader | LoaderFastForward
        if isinstance(loader, Loader):
            source, state.foreign_loader, data = loader, None, "keyed"
        else:
            member = state.member
            source = state.foreign_loader = LoaderFastForward(
                loader, member.world_size, member.device, point.loader, point.ranks_before
            )
            source.check_untracked(state.tracked.things)
            state.division.refuse("a loader that is not session.loader()'s cannot be divided")
            point.loader, data = None, source.exactness
        state.exactness.update(data=data, deterministic=state.determinism.verdict)
        return source

    def _warm_up(self, parts: list[Any], weights: list[float]) -> Iterator[Any]:
        """The batch once to no effect: everything that the script does with it to tracked objects is undone."""
        state, runner, device = self._state, self._runner, self._state.member.device
        # Copies on the CPU: a second state may not fit on the device.
        before, rng = state_codec.capture(state.tracked.things), rng_state.capture(device)
        copies = {name: tensor.to("cpu", copy=True) for name, tensor in before.tensors.items()}
        played = dict(state.division.ranks.random_states)
        self._point.needs_warmup, runner.is_warmup = False, True
        # A deep copy, because the script may change its batch in place.
        runner.set_batches(copy.deepcopy(parts), weights)
        yield runner.parts[0][0]
        runner.is_warmup = False
        state.division.ranks.random_states = played
        for module in state.tracked.modules():
            module.zero_grad(set_to_none=True)
        state_codec.put_back(state.tracked.things, before, copies)
        rng_state.restore(rng, device)
