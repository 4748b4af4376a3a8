"""The epochs and steps of a script's training loops, and what happens at the boundary between two steps."""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Generator, Iterable, Iterator
from typing import Any

import torch

from kgorch.core.codes import EventKind
from kgorch.core.metrics.metric_curve import Mark
from kgorch.errors import KgorchError
from kgorch.protocol.values import MAX_NUMBER
from kgorch.worker import rng_state, session_end
from kgorch.worker.audit import enumerations
from kgorch.worker.audit.enumerations import CountedBatches
from kgorch.worker.audit.port_audit import PortAudit
from kgorch.worker.data.cached_path import CachedPaths
from kgorch.worker.data.keyed_loader import Loader
from kgorch.worker.data.loader_fast_forward import LoaderFastForward
from kgorch.worker.memory import oom
from kgorch.worker.memory.microbatch import MicrobatchRunner
from kgorch.worker.optimizer_steps import OptimizerSteps
from kgorch.worker.ranks.virtual_ranks import VirtualRanks
from kgorch.worker.restore import ResumePoint
from kgorch.worker.session_state import SessionState
from kgorch.worker.supervision import Supervision


class StepLoop:
    """Gives the script its epochs and batches, and counts them.

    Args:
        runner: computes the steps.
        data: paths that may switch to a local copy between two epochs.
        supervision: None when the script runs alone.
        is_guest: see Session.

    Attributes:
        audit: of what the script gives up.
        in_step: the script has the batch of a step whose boundary is still to come.
        counts_epochs: the script has called `session.epochs`.
    """

    def __init__(
        self,
        state: SessionState,
        runner: MicrobatchRunner,
        data: CachedPaths,
        supervision: Supervision | None,
        *,
        is_guest: bool = False,
    ) -> None:
        self._state, self._runner, self._data, self._supervision = state, runner, data, supervision
        self._point = ResumePoint(state.member.world_size)
        self._loops_seen = self._epochs_wanted = self._refused = 0
        self._epoch_is_open = False
        self._optimizer_steps = OptimizerSteps()
        self.audit = PortAudit(state, runner, self._optimizer_steps, is_guest=is_guest)
        # more than one batch a step where the script accumulates gradients itself
        self._batches_per_step, self._batches_since = 1, 0
        self._batches_of_loop = 0  # from the running epoch to the loop's end; 0 where the loader has no length
        self.in_step = self.counts_epochs = self._is_own = False
        self._is_counted = False  # what the script counts by itself goes on, at the first batch of this process
        self._own_from = 0  # step at which this process began the loop that the script owns

    def resume(self, point: ResumePoint) -> None:
        """Continue from there; before the first step."""
        self._point = point
        self.resume_followed()

    def resume_followed(self) -> None:
        """Continue the loaders that the script iterates itself, those that are known by now. Raises: CannotRestore."""
        point, followed = self._point, self._state.followed
        for name in point.loaders.keys() & followed.keys():
            followed[name].resume(point.loaders[name], point.ranks_before)
        point.loaders = {name: place for name, place in point.loaders.items() if name not in followed}

    def epochs(self, count: int) -> Iterator[int]:
        """See Session.epochs."""
        state, at = self._state, self._state.position
        number, self._loops_seen = self._loops_seen, self._loops_seen + 1
        if number < at.loop or self._point.is_trained:
            return
        if number > at.loop:  # the script has left the loop before it early
            at.loop, at.epoch, at.batch = number, 0, 0
            state.keyed_loader = self._point.keyed = None
        self._epochs_wanted = int(count)
        at.epochs_total = count = min(int(count), 1) if state.quick else int(count)
        while at.epoch < count:
            self._epoch_is_open = self.counts_epochs = True
            self.set_epoch_of_metrics()
            yield at.epoch
            state.probe.epoch_over()
            at.epoch, at.batch, state.keyed_loader = at.epoch + 1, 0, None
            if state.foreign_loader is not None:
                state.foreign_loader.end()
            self._save_best()  # of what an evaluation has reported, also after the last epoch
            self._data.look()
        at.batch, at.epochs_done = 0, count  # loop and epoch stay: `--extend` continues the loop from there

    def set_epoch_of_metrics(self) -> None:
        """What is reported from now on belongs to the running epoch."""
        if self._supervision and (metric_log := self._supervision.metric_log):
            metric_log.epoch = self._state.position.epoch + 1

    def steps(self, loader: Iterable[Any], epochs: int | None = None) -> Iterator[Any]:
        """See Session.steps."""
        for followed in self._state.followed.values():
            followed.expect_steps()
        if epochs is None:
            return CountedBatches(self._steps_of_epoch(loader), lambda: len(loader))  # type: ignore[arg-type]
        batches = (batch for _ in self.epochs(epochs) for batch in self._steps_of_epoch(loader, counts_all=True))
        return CountedBatches(batches, lambda: len(loader) * epochs)  # type: ignore[arg-type]

    def _steps_of_epoch(self, loader: Iterable[Any], *, counts_all: bool = False) -> Generator[Any, None, None]:
        """Args: counts_all: an `enumerate` around it counts the batches of all epochs."""
        state, at, runner, device = self._state, self._state.position, self._runner, self._state.member.device
        source, batches = self._begin_epoch(loader)
        is_empty, divided = True, -1
        for parts in state.resources.timed(batches):
            samples = source.samples_in(at.batch)
            if samples != divided:  # nearly always the same
                divided, (weights, read) = samples, self._divided(source, samples)
            if not self._is_counted:
                self._is_counted, done = True, at.batch + (len(source) * at.epoch if counts_all else 0)
                enumerations.count_on(done, only=(0, 1))  # any other count is one of the script's own, as session.step
            if state.bucket_order.is_resumed:  # not before the first batch: by then the script has wrapped its modules
                self._restore_bucket_order()
            runner.set_batches(parts, weights, read)
            if runner.has_dropout_state:
                rng_state.renew_dropout_state(device)
            is_empty, session_end.empty_epoch = False, None
            self.begin_step()
            try:
                yield parts[0]
            finally:  # also where the script leaves the loop early: then this step does not count
                self.in_step = False
            self._check_divisibility()
            at.batch += 1
            for followed in state.followed.values():  # the script may have taken what belongs to the next step
                is_known = followed.open_batches is not None  # else it was made in this step
                followed.at_boundary(is_first=False, open_batches=None if is_known else 0)
            self.end_step(samples)
        if is_empty and at.batch:
            session_end.empty_epoch = at.epoch
        state.marker.enter("evaluation")

    def _divided(self, source: Loader | LoaderFastForward, samples: int) -> tuple[list[float], list[int]]:
        """Weight and samples of the part of each rank that this process plays, of a step of so many samples."""
        ranks = self._ranks_of(source)
        shares = [source.share_of_rank(self._state.position.batch, rank) for rank in ranks.mine]
        # A process alone divides by the number of virtual ranks after the backward, DDP and FSDP by that of processes.
        divided_by = ranks.count if ranks.world_size == 1 else ranks.world_size
        weights = [share * divided_by / samples for share in shares]
        return weights, [share or 1 for share in shares]  # a rank without a share gets a sample of weight 0

    def _begin_epoch(self, loader: Iterable[Any]) -> tuple[Loader | LoaderFastForward, Iterator[list[Any]]]:
        """The loader, and its batches that are still to do."""
        if not self._epoch_is_open:
            raise KgorchError(
                "session.steps(loader) was called outside of an epoch, or twice in one",
                next_step="write `for epoch in session.epochs(n): for batch in session.steps(loader):`, or steps(loader, n)",
            )
        self._epoch_is_open = False
        state, at = self._state, self._state.position
        source = self._source(loader)
        source.seek(at.epoch, at.batch)
        if isinstance(source, Loader):
            self._resume_keyed(source)
        self.restore_random_states()
        batches = source.parts()  # a fast-forward happens here, so it counts as no step's time
        if state.foreign_loader is not None:
            at.batch = state.foreign_loader.batch
            state.report_loader()
        left = at.epochs_total - at.epoch
        self._batches_of_loop = len(source) * left
        self._update_total()
        trials = state.probe.batches(source, self._epochs_wanted)
        if trials is not None:
            batches = self._from_first_batch(trials)
        elif state.quick:
            at.steps_total, batches = at.step - at.batch + 1, itertools.islice(batches, max(0, 1 - at.batch))
        self._warn_if_untracked()
        for followed in state.followed.values():
            followed.begin_steps()
        shares = (source.share_of_rank(at.batch, rank) for rank in range(self._ranks_of(source).count))
        self._enter_steps(max(shares, default=0))
        return source, batches

    def _resume_keyed(self, source: Loader) -> None:
        saved, self._point.keyed = self._point.keyed, None
        if lost := source.resume(saved):
            print(f"kgorch: {lost}", flush=True)
            self._state.exactness.update(resume=lost)
        self._state.position.batch = source.batch

    def _ranks_of(self, source: Loader | LoaderFastForward) -> VirtualRanks:
        return source.ranks if isinstance(source, Loader) else self._state.division.ranks

    def begin_own(self, share: int) -> None:
        """Before the first step of a loop that the script owns.

        Args:
            share: samples of this rank's share of a step; 0 where it is not known.
        """
        state, self._is_own = self._state, True
        self.restore_random_states()
        if state.bucket_order.is_resumed:
            self._restore_bucket_order()
        self._own_from = state.position.step
        self._warn_if_untracked()
        self._enter_steps(share)

    def _restore_bucket_order(self) -> None:
        state = self._state
        if why := state.bucket_order.restore([*state.tracked.modules()]):
            state.exactness.update(reduction=why)

    @property
    def is_trained(self) -> bool:
        """The stage's last checkpoint was restored, and no step is left."""
        return self._point.is_trained

    @property
    def is_after_step(self) -> bool:
        """What is measured now is measured on the weights of the running step, not on those before it."""
        return self.in_step and (not self._is_own or self._optimizer_steps.has_stepped)

    @property
    def is_between_steps(self) -> bool:
        """No step is running; in a loop that the script owns: it evaluates."""
        return not self.in_step or (self._is_own and self._state.marker.where == "evaluation")

    @property
    def mark(self) -> Mark:
        """Where a metric that is reported now was measured."""
        metric_log = self._supervision.metric_log if self._supervision else None
        step = self._state.position.step + self.is_after_step
        return Mark(step, metric_log.epoch if metric_log else 0, self.is_between_steps)

    def end_own(self, samples: int) -> None:
        """After the last step of a loop that the script owns; a step that has begun without its optimizer's step does not count."""
        steps, at, things = self._optimizer_steps, self._state.position, self._state.tracked.things
        # Of a session that was resumed behind the last step no optimizer has been used.
        is_first = at.step == self._own_from and any(
            isinstance(item, torch.optim.Optimizer) for item in things.values()
        )
        if self.in_step and (steps.has_stepped or not (steps.is_used or is_first)):
            at.step, at.samples, self._batches_since = at.step + 1, at.samples + samples, 0
        self.in_step = False
        self._state.marker.enter("evaluation")
        self._save_best()

    def restore_random_states(self) -> None:
        """Once, before the first step after a resume, or at the end of a session without a step."""
        if self._point.rng:
            rng_state.restore(self._point.rng, self._state.member.device)
            self._point.rng = None

    def _enter_steps(self, share: int) -> None:
        state = self._state
        # The time since the last step, perhaps that of an evaluation, is no step's time.
        state.timer.tick("step" if "first_step" in state.marker.longest else "first_step")
        if self._supervision and state.tracked:
            self._supervision.begin_epoch(share)
        self._save_best()  # of an evaluation before the epoch's first step, or after a resume

    def begin_step(self) -> None:
        """A step begins, or the next batch of one."""
        self.in_step = True
        self._optimizer_steps.begin()

    def close(self) -> None:
        """No further step is observed."""
        self._optimizer_steps.close()

    def end_step(self, samples: int) -> None:
        """Count a batch and, unless gradients of it still wait for their optimizer, a step; save or stop if it is time.

        Raises:
            SessionOver: the session stops here.
            PeersLost: a rank has died.
        """
        state, at = self._state, self._state.position
        self.in_step = False
        at.samples += samples
        self._batches_since += 1
        if self._optimizer_steps.is_accumulating(state.tracked.things):
            state.marker.enter("step")
            return
        at.step += 1
        self.audit.after_step()
        if state.bucket_order.is_learning and (why := state.bucket_order.learn([*state.tracked.modules()])):
            state.exactness.update(reduction=why)
        if summing := self._optimizer_steps.summing:
            state.exactness.update(
                gradients=f"{', '.join(sorted(summing))} sums gradients over steps of another optimizer: no checkpoint holds"
                " them, and a resume between begins the sum anew"
            )
        self._batches_per_step, was = self._batches_since, self._batches_per_step
        self._batches_since = 0
        if self._batches_per_step != was:
            self._update_total()
        self._boundary()

    def _boundary(self) -> None:
        state = self._state
        timer = state.timer
        timer.end_step()
        if state.resources.sample(timer.ticked_s):  # about once a second: both ask the allocator
            self._report_refusals()
        if state.metrics.pending:  # copies from a GPU
            state.metrics.collect()
        if (verdict := state.determinism.verdict) != state.exactness.facts.get("deterministic"):
            state.exactness.update(deterministic=verdict)
        if self._supervision is not None:
            self._supervision.saves.at_boundary(timer.ticked_s)
            self._supervision.at_boundary(state.position.step)

    def expect(self, steps: int | None, epochs: int | None) -> None:
        """See Session.expect."""
        at = self._state.position
        # a Trainer that does not know them may give a number that stands for no end
        steps, epochs = (count if count and count < MAX_NUMBER else None for count in (steps, epochs))
        at.steps_total, at.epochs_total = steps or at.steps_total, epochs or at.epochs_total

    def _update_total(self) -> None:
        if not self._state.quick and not self._is_own:
            at, left = self._state.position, self._batches_of_loop - self._state.position.batch
            at.steps_total = at.step + math.ceil(left / self._batches_per_step) if self._batches_of_loop else 0

    def _save_best(self) -> None:
        """Between two epochs, unless gradients are summed over them."""
        if self._supervision is not None and self._batches_since:
            self._supervision.saves.miss_best()
        elif self._supervision is not None:
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
            source, data = loader, loader.exactness
            state.keyed_loader, state.foreign_loader = loader, None
        else:
            member, state.keyed_loader = state.member, None
            source = state.foreign_loader = LoaderFastForward(
                loader, member.world_size, member.device, point.loader, point.ranks_before
            )
            source.check_untracked(state.tracked.things)
            state.division.refuse("a loader that is not session.loader()'s cannot be divided")
            point.loader, data = None, source.exactness
        state.exactness.update(data=data, deterministic=state.determinism.verdict)
        return source
