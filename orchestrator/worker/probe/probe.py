"""A probe: a few real steps of a training, with time and memory measured, instead of the training (`kgorch check`).

The script runs as usual, but `steps` gives it the batches that the probe chooses: the first ones, the same ones once more (now read
from the page cache), and then the largest of them repeatedly, with other microbatches, with and without activation checkpointing.
One step of each such trial is timed. On the CPU, where the allocator counts nothing, another step is profiled. Tracked
learning rate schedulers do not advance meanwhile, because some allow no more steps than the training has. All ranks make the
same trials: decisions depend on the worst value of all ranks. Nothing outlives the process but `probe.json` (read by
preflight/stage_probe.py), and `probe.trying`, the settings under which a process was killed.
"""

from __future__ import annotations

import contextlib
import copy
import json
import math
import statistics
import time
from collections.abc import Generator, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.optim.lr_scheduler import LRScheduler

from kgorch.errors import KgorchError
from kgorch.protocol.launch_spec import LaunchSpec
from kgorch.system import files
from kgorch.system.clock import boottime_s
from kgorch.worker.data import batches
from kgorch.worker.data.keyed_loader import Loader
from kgorch.worker.data.loader_fast_forward import LoaderFastForward
from kgorch.worker.memory.ladder import Ladder
from kgorch.worker.memory.microbatch import MicrobatchRunner
from kgorch.worker.probe.hooks import ProbeHooks
from kgorch.worker.probe.memory_profiler import StepMemory, memory_profiler

PASS_STEPS, PASS_SHARE = 8, 0.2
"""Limits of a pass over the first batches: steps, and the share of the probe's time."""


@dataclass
class ProbeTrial:
    """One setting.

    Attributes:
        microbatch: samples of one forward and backward.
        checkpointing: with activation checkpointing.
        step_s: seconds of a step.
        peak: highest memory of a rank, bytes.
        ran_out: memory ran out.
    """

    microbatch: int
    checkpointing: bool
    step_s: float = 0.0
    peak: int = 0
    ran_out: bool = False


@dataclass
class ProbeResult:
    """The content of `probe.json`. Instants are readings of CLOCK_BOOTTIME; bytes are those of the rank with the most.

    Attributes:
        attached_at_s, stepped_at_s, ended_at_s: instants of attach(), of the first step, of the end.
        device: type of the torch.device.
        device_total: bytes of the device's memory for each rank that shares it.
        blocks: number of blocks that activation checkpointing can compute again.
        batchnorm: the model has a BatchNorm that is not frozen.
        num_workers: the most loading workers of a loader.
        loops: epochs and global batches of each loop of the script.
        share: samples of the largest rank's share of a step.
        divides: steps can be computed in microbatches: session.loader gives the batch, and session.backward gets it.
        cold, warm: seconds that a step takes and waits for its batch, when the batches are read first and again.
        memory: bytes of a step with the plan's settings: weights, gradients, optimizer, batch, activations, buckets, rest, peak.
        resident: bytes of the whole process in that step.
        trials: one dict of ProbeTrial's attributes each.
        evaluation_s: seconds after an epoch, extrapolated to all batches of its loaders.
        warm_up_s: additional seconds of the first evaluation: imports, start of loading processes.
        end_s: seconds after the last epoch, extrapolated likewise.
        save_s: seconds of the final save.
        state_bytes: bytes of a checkpoint.
        exactness: what is known of identical results and what the script's use of the SDK gives up, in words by topic.
        estimate: further results of an estimate for another machine (estimate_probe.py).
    """

    attached_at_s: float = 0.0
    stepped_at_s: float = 0.0
    ended_at_s: float = 0.0
    device: str = "cpu"
    device_total: int = 0
    blocks: int = 0
    batchnorm: bool = False
    num_workers: int = 0
    loops: list[dict[str, int]] = field(default_factory=list)
    share: int = 0
    divides: bool = True
    cold: dict[str, float] = field(default_factory=dict)
    warm: dict[str, float] = field(default_factory=dict)
    memory: dict[str, int] = field(default_factory=dict)
    resident: int = 0
    trials: list[dict[str, Any]] = field(default_factory=list)
    evaluation_s: float = 0.0
    warm_up_s: float = 0.0
    end_s: float = 0.0
    save_s: float = 0.0
    state_bytes: int = 0
    exactness: dict[str, str] = field(default_factory=dict)
    estimate: dict[str, float] = field(default_factory=dict)


class Probe(ProbeHooks):
    """The hooks of a probe that computes the steps."""

    is_probe = True

    def __init__(self, launch: LaunchSpec, rank: int, device: torch.device, ladder: Ladder) -> None:
        assert launch.probe is not None
        self._path, self._rank, self._device = Path(launch.folder) / "probe.json", rank, device
        self._seconds, self._limit = float(launch.probe["seconds"]), launch.probe.get("memory")
        self._gpu: Mapping[str, float] = launch.probe.get("gpu") or {}
        self._killed = [tuple(setting) for setting in launch.probe.get("killed", ())]
        self._ladder = ladder
        self._runner: MicrobatchRunner
        self._profiler = memory_profiler(device)
        self.result = ProbeResult(attached_at_s=boottime_s(), device=device.type)
        if device.type == "cuda":
            sharing = math.ceil(dist.get_world_size() / torch.cuda.device_count())
            self.result.device_total = torch.cuda.get_device_properties(device).total_memory // sharing
        self.loaders: list[Loader] = []
        self._since_s = time.monotonic()
        self._own_since_s: float | None = None  # where the script owns the loop
        self._own_times_s: list[float] = []
        self._is_deep = False
        self._tracked: Mapping[str, Any] = {}
        self._schedules: list[tuple[LRScheduler, dict[str, Any]]] = []
        self._rates: list[tuple[dict[str, Any], dict[str, Any]]] = []

    def learn(self, tracked: Mapping[str, Any], state_bytes: int, runner: MicrobatchRunner) -> None:
        self._tracked, self.result.state_bytes, self._runner = tracked, state_bytes, runner

    def add_loader(self, loader: Loader) -> None:
        self.loaders.append(loader)

    def untracked(self, what: str) -> None:
        raise KgorchError(
            what, next_step="name what a checkpoint must hold: session.track(model=…, optimizer=…)", error_code="KG403"
        )

    def forward(self) -> contextlib.AbstractContextManager[Any]:
        return self._profiler.forward()

    # Batches

    def batches(self, source: Loader | LoaderFastForward, epochs: int) -> Iterator[list[Any]]:
        self.result.loops.append({"epochs": epochs, "batches": len(source)})
        if len(self.result.loops) > 1:  # another loop of the script: one step shows that it works
            yield from _first(source.parts())
            self._restart_clock()
            return
        schedules = (thing for thing in self._tracked.values() if isinstance(thing, LRScheduler))
        self._schedules = [(thing, copy.deepcopy(thing.state_dict())) for thing in schedules]
        optimizers = (thing for thing in self._tracked.values() if isinstance(thing, torch.optim.Optimizer))
        groups = (group for one in optimizers for group in one.param_groups)
        self._rates = [(group, {key: group[key] for key in group if key != "params"}) for group in groups]
        self.result.divides = isinstance(source, Loader)
        began_s = time.monotonic()
        count, parts, self.result.cold = yield from self._pass(source, PASS_STEPS, began_s)
        self.result.warm = self.result.cold
        if isinstance(source, Loader):
            source.seek(0, 0)
            _, parts, self.result.warm = yield from self._pass(source, count, None)
        if parts is not None:
            yield from self._trials(parts, began_s)
        self._restart_clock()

    def own_step(self, share: int, total: int) -> bool:
        now_s, times = time.monotonic(), self._own_times_s
        if self._own_since_s is None:
            self.result.loops.append({"epochs": 1, "batches": total})
            self.result.divides, self.result.stepped_at_s = False, boottime_s()
        else:
            times.append(now_s - self._own_since_s)
        self.result.share = max(self.result.share, share)
        if self._is_deep:
            self._end_own(self._profiler.end())
            return True
        late = len(times) >= PASS_STEPS or sum(times) > PASS_SHARE * self._seconds
        if len(times) >= 2 and self._worst(float(late))[0]:
            self._is_deep = True
            self._profiler.begin(deeply=True)
        self._own_since_s = time.monotonic()
        return False

    def _end_own(self, deep: StepMemory) -> None:
        """Only the plan's own settings are tried: the script's batches cannot be given again."""
        self.result.share = int(self._worst(self.result.share)[0])
        first, *rest = self._own_times_s[:-1]  # the last one was profiled
        measures = {"first_wait_s": 0.0, "first_step_s": first, "wait_s": 0.0, "step_s": statistics.median(rest)}
        self.result.cold = self.result.warm = dict(zip(measures, self._worst(*measures.values()), strict=True))
        self.result.memory = self._memory_parts(deep, self.result.share)
        self.result.resident = int(self._worst(deep.rss)[0])
        settings = self._ladder.settings
        trial = ProbeTrial(settings.microbatch or self.result.share, settings.activation_checkpointing)
        trial.step_s = self.result.warm["step_s"]
        trial.peak = int(self._worst(self._standing_bytes() + deep.peak)[0])
        self.result.trials = [vars(trial)]
        self._restart_clock()

    def _pass(
        self, source: Loader | LoaderFastForward, most: int, began_s: float | None
    ) -> Generator[list[Any], None, tuple[int, list[Any] | None, dict[str, float]]]:
        """Time steps and the waits for their batches.

        Args:
            most: limit of steps.
            began_s: monotonic reading of the probe's beginning; with it the pass ends when its share of the time is used up, on all
                ranks together.

        Returns:
            Number of steps; the largest batch (an epoch's last one may be small); seconds by name.
        """
        waits, steps, parts = list[float](), list[float](), None
        iterator = source.parts()
        for _ in range(most):
            asked_s = time.monotonic()
            try:
                batch_parts = next(iterator)
            except StopIteration:
                break
            waits.append(time.monotonic() - asked_s)
            self.result.stepped_at_s = self.result.stepped_at_s or boottime_s()
            self.result.share = self.result.share or self._share_of(source)
            if parts is None or _samples(batch_parts) >= _samples(parts):
                parts = batch_parts
            took_s, _ = yield from self._step(batch_parts, "time")
            steps.append(took_s)
            late = began_s is not None and time.monotonic() - began_s > PASS_SHARE * self._seconds
            if len(steps) >= 2 and self._worst(float(late))[0]:
                break
        first, rest = slice(0, 1), slice(1, None) if len(steps) > 1 else slice(None)
        measures = {
            "first_wait_s": sum(waits[first]),
            "first_step_s": sum(steps[first]),
            "wait_s": statistics.fmean(waits[rest]) if waits else 0.0,
            "step_s": statistics.median(steps[rest]) if steps else 0.0,
        }
        worst = self._worst(*measures.values())
        return len(steps), parts, dict(zip(measures, worst, strict=True))

    def _share_of(self, source: Loader | LoaderFastForward) -> int:
        """The largest share of a first step. A foreign loader knows it after its first batch."""
        return int(self._worst(max(source.share_of_rank(0, rank) for rank in range(dist.get_world_size())))[0])

    def _step(self, parts: list[Any], how: str) -> Generator[list[Any], None, tuple[float, StepMemory]]:
        """One step. `how`: "time" or "profile". Returns its seconds and memory."""
        for schedule, kept in self._schedules:
            schedule.load_state_dict(copy.deepcopy(kept))
        for group, settings in self._rates:  # many schedulers continue from the current learning rate
            group.update(settings)
        self._profiler.begin(deeply=how == "profile")
        began_s = time.monotonic()
        yield parts
        profile = self._profiler.end()
        return time.monotonic() - began_s, profile

    # Trials

    def _trials(self, parts: list[Any], began_s: float) -> Iterator[list[Any]]:
        base = self._ladder.settings
        planned = min(base.microbatch or self.result.share, self.result.share)
        done: list[ProbeTrial] = []
        for microbatch, checkpointing in self._settings(planned, base.activation_checkpointing):
            spent_s, whole = self._worst(time.monotonic() - began_s, float(bool(done) and not self._divides))
            if whole and microbatch != planned:
                continue  # it is never computed in parts
            if done and (spent_s > self._seconds or not self._should_fit(done, microbatch, checkpointing)):
                continue
            if done:
                self._record_trial(microbatch, checkpointing)
            trial_settings = replace(base, microbatch=microbatch, activation_checkpointing=checkpointing)
            self._ladder.try_out(trial_settings)
            trial = ProbeTrial(microbatch, checkpointing)
            yield from self._step(parts, "time")  # the first step with new settings takes longer
            took_s, light = yield from self._step(parts, "time")
            _, deep = yield from self._step(parts, "profile")
            if not done:  # later the profiler's own memory counts as well
                self.result.memory = self._memory_parts(deep, _samples(parts))
                self.result.resident = int(self._worst(light.rss)[0])
            final = self._ladder.settings
            ran_out = (final.microbatch, final.activation_checkpointing) != (microbatch, checkpointing)
            worst = self._worst(took_s, self._standing_bytes() + deep.peak, float(ran_out))
            trial.step_s, trial.peak, trial.ran_out = worst[0], int(worst[1]), bool(worst[2])
            done.append(trial)
        self._ladder.try_out(base)
        if self._rank == 0:
            self._path.with_suffix(".trying").unlink(missing_ok=True)
        self.result.divides = self.result.divides and self._divides
        self.result.trials = [vars(trial) for trial in (*done, *self._killed_trials())]

    @property
    def _divides(self) -> bool:
        """Whether the newest step used session.backward, with a batch that can be divided."""
        return self._runner.saw_batch and not self._runner.is_whole

    def _record_trial(self, microbatch: int, checkpointing: bool) -> None:
        """Record the settings, for the next launch if this process is killed."""
        if self._rank == 0:
            files.write(self._path.with_suffix(".trying"), json.dumps([microbatch, checkpointing]).encode())

    def _killed_trials(self) -> list[ProbeTrial]:
        return [ProbeTrial(size or self.result.share, kind, ran_out=True) for size, kind in self._killed]

    def _settings(self, planned: int, checkpointing: bool) -> Iterator[tuple[int, bool]]:
        """Settings by decreasing information: the planned ones, a second size (they define a line), the other kind, all between."""
        share, choices = self.result.share, set[tuple[int, bool]]()
        least = min(planned, 2 if self._ladder.has_batchnorm else 1)  # BatchNorm has no statistics of one sample
        powers = [1 << power for power in range(share.bit_length()) if least <= 1 << power < share]
        kinds = [checkpointing] + ([not checkpointing] if self._ladder.activations.blocks else [])
        second = max(least, planned // 2) if planned > least else min(2 * planned, share)
        order = [(planned, kinds[0]), (second, kinds[0]), (share, kinds[0]), (least, kinds[0])]
        order += [(size, kind) for kind in kinds[1:] for size in (planned, second, share)]
        order += [(size, kind) for kind in kinds for size in reversed(powers)]
        for choice in order:
            if choice not in choices:
                choices.add(choice)
                yield choice

    def _should_fit(self, done: list[ProbeTrial], microbatch: int, checkpointing: bool) -> bool:
        """Whether the settings should fit, by the line through the measured sizes: a host without memory kills without an error."""
        ran_out = [trial for trial in (*done, *self._killed_trials()) if trial.ran_out]
        if any(trial.microbatch <= microbatch and (trial.checkpointing or not checkpointing) for trial in ran_out):
            return False
        alike = [trial for trial in done if trial.checkpointing == checkpointing or checkpointing]
        if not self._limit or len(alike) < 2:
            return True
        low, high = min(alike, key=lambda t: t.microbatch), max(alike, key=lambda t: t.microbatch)
        if low.microbatch == high.microbatch:
            return True
        slope = (high.peak - low.peak) / (high.microbatch - low.microbatch)
        besides = 0 if self._device.type == "cuda" else max(0, self.result.resident - done[0].peak)
        return bool(besides + low.peak + slope * (microbatch - low.microbatch) < self._limit)

    # Memory

    def _standing_bytes(self) -> int:
        """Bytes that live between two steps and before the profiler starts; 0 on CUDA, where the allocator counts them."""
        return 0 if self._device.type == "cuda" else sum(self._standing_parts().values())

    def _standing_parts(self) -> dict[str, int]:
        modules = [thing for thing in self._tracked.values() if isinstance(thing, torch.nn.Module)]
        weights = {id(item): item for module in modules for item in (*module.parameters(), *module.buffers())}
        optimizers = [thing for thing in self._tracked.values() if isinstance(thing, torch.optim.Optimizer)]
        states = [value for one in optimizers for state in one.state.values() for value in state.values()]
        return {
            "weights": sum(item.nbytes for item in weights.values()),
            "optimizer": sum(value.nbytes for value in states if isinstance(value, torch.Tensor)),
            "buckets": sum(item.nbytes for ddp in self._runner.ddps for item in ddp.parameters() if item.requires_grad),
        }

    def _memory_parts(self, deep: StepMemory, samples: int) -> dict[str, int]:
        parts = self._standing_parts()
        optimizers = [thing for thing in self._tracked.values() if isinstance(thing, torch.optim.Optimizer)]
        batch_parts = [item for one in optimizers for group in one.param_groups for item in group["params"]]
        trained = {
            id(item): item for item in batch_parts if item.requires_grad
        }  # an average of weights has no gradients
        microbatch = self._runner.microbatch or samples
        batch_bytes = (
            batches.size(self._runner.parts[0][0]) if self._runner.parts else 0
        )  # the script's own is not known
        parts["gradients"] = sum(item.nbytes for item in trained.values())
        parts["batch"] = batch_bytes * min(microbatch, samples) // max(samples, 1)
        parts["activations"] = deep.forward
        total = deep.peak + self._standing_bytes()
        # At the peak some activations are freed and some gradients exist, so the parts need not add up to it.
        return parts | {"rest": max(0, total - sum(parts.values())), "peak": total}

    def _worst(self, *values: float) -> list[float]:
        """The highest values of all ranks, because all ranks must decide alike."""
        where = self._device if self._device.type == "cuda" else torch.device("cpu")
        measures = torch.tensor(values, dtype=torch.float64, device=where)
        dist.all_reduce(measures, dist.ReduceOp.MAX)
        return [float(value) for value in measures]

    # The rest of the script

    def _restart_clock(self) -> None:
        for loader in self.loaders:
            loader.durations_s.clear()
        self._since_s = time.monotonic()

    def epoch_over(self) -> None:
        """Everything between two epochs counts as evaluation."""
        if len(self.result.loops) == 1:
            first_times = [loader.durations_s[:2] for loader in self.loaders if len(loader.durations_s) > 1]
            self.result.warm_up_s = sum(max(0.0, first - second) for first, second in first_times)
            self.result.evaluation_s = self._extrapolated_s() - self.result.warm_up_s
        self._restart_clock()

    def _extrapolated_s(self) -> float:
        """Seconds since the last training step, extrapolated to all batches of the loaders that were read."""
        missing_s = sum(
            (len(loader) - len(times)) * times[-1] for loader in self.loaders if (times := loader.durations_s)
        )
        return time.monotonic() - self._since_s + max(0.0, missing_s)

    def script_over(self) -> None:
        self.result.end_s, self._since_s = self._extrapolated_s(), time.monotonic()

    def saved(self, exactness: Mapping[str, str]) -> None:
        self.result.exactness = dict(exactness)
        self.result.save_s = time.monotonic() - self._since_s
        self.result.blocks, self.result.batchnorm = len(self._ladder.activations.blocks), self._ladder.has_batchnorm
        self.result.num_workers = self._ladder.most_workers
        self.result.ended_at_s = boottime_s()
        if self._rank == 0:
            files.write(self._path, json.dumps(vars(self.result)).encode())


def _samples(parts: list[Any]) -> int:
    """Samples of a batch; 0 for a batch without a tensor."""
    try:
        return batches.length(parts[0])
    except KgorchError:
        return 0


def _first(parts: Iterator[list[Any]]) -> Iterator[list[Any]]:
    with contextlib.suppress(StopIteration):
        yield next(parts)
