"""A probe of a training: a few real steps of it, timed and weighed, in its place (`kgorch check`, preflight/stage_probe.py).

The script runs as always, but `steps` gives it batches as the probe wants them: the first ones, the same ones once more (read
by now), and then the largest of them again and again, with other microbatches, with and without activation checkpointing. One
step of each such trial is timed; on the CPU, where the allocator counts nothing, another is profiled for what lives at each
moment. Tracked learning rate schedules stand still meanwhile: some allow no more steps than the training has. Ranks go the same
way: what the way hangs on is the worst of all of theirs. Nothing here outlives the process but `probe.json`, and
`probe.trying`, the setting that a process was killed in.
"""

from __future__ import annotations

import contextlib
import copy
import json
import math
import statistics
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.optim.lr_scheduler import LRScheduler

from orchestrator.errors import KgorchError
from orchestrator.protocol.launch_spec import LaunchSpec
from orchestrator.system import files
from orchestrator.system.clock import boottime_s
from orchestrator.worker import batches
from orchestrator.worker.backward import Backward
from orchestrator.worker.ladder import Ladder
from orchestrator.worker.loader import Loader
from orchestrator.worker.replay import Replay
from orchestrator.worker.weighing import Weighed, scales

PASS_STEPS, PASS_SHARE = 8, 0.2
"""Steps of a pass over the first batches at most, and what of the probe's time it may take."""


@dataclass
class Trial:
    """One setting: a step's seconds, and what a rank held at most meanwhile. `ran_out`: it did not fit."""

    microbatch: int
    checkpointing: bool
    step_s: float = 0.0
    peak: int = 0
    ran_out: bool = False


@dataclass
class Found:
    """What `probe.json` holds. Instants are readings of CLOCK_BOOTTIME, bytes are of the rank that holds most.

    Attributes:
        loops: epochs and global batches of each loop of the script.
        share: samples of a rank's share of a step. blocks: that can drop their activations.
        divides: the ladder can take it in parts: session.loader gives it, and session.backward is given it.
        cold, warm: seconds a step takes and waits for its batch, when the batches are read first and again.
        memory: of a step as the plan has it, in bytes: weights, gradients, optimizer, batch, activations, buckets, rest.
        resident: of the whole process in that step.
        evaluation_s: after an epoch. end_s: after the last one. Both as long as all their batches would take.
        warm_up_s: of the evaluation the first time alone: imports, loading processes that begin.
        estimate: what an estimate for another machine knows besides (worker/probe_estimate.py).
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
    estimate: dict[str, float] = field(default_factory=dict)


class Probe:
    """`as_on_cuda`: scripts are to choose types as they would on a GPU."""

    as_on_cuda = False

    def __init__(self, launch: LaunchSpec, rank: int, device: torch.device, ladder: Ladder) -> None:
        assert launch.probe is not None
        self._path, self._rank, self._device = Path(launch.folder) / "probe.json", rank, device
        self._seconds, self._limit = float(launch.probe["seconds"]), launch.probe.get("memory")
        self._gpu: Mapping[str, float] = launch.probe.get("gpu") or {}
        self._killed = [tuple(setting) for setting in launch.probe.get("killed", ())]
        self._ladder = ladder
        self._backward: Backward
        self._scales = scales(device)
        self.found = Found(attached_at_s=boottime_s(), device=device.type)
        if device.type == "cuda":
            sharing = math.ceil(dist.get_world_size() / torch.cuda.device_count())
            self.found.device_total = torch.cuda.get_device_properties(device).total_memory // sharing
        self.loaders: list[Loader] = []
        self._since_s = time.monotonic()
        self._tracked: Mapping[str, Any] = {}
        self._schedules: list[tuple[LRScheduler, dict[str, Any]]] = []
        self._rates: list[tuple[dict[str, Any], dict[str, Any]]] = []

    def know(self, tracked: Mapping[str, Any], state_bytes: int, backward: Backward) -> None:
        self._tracked, self.found.state_bytes, self._backward = tracked, state_bytes, backward

    def forward(self) -> contextlib.AbstractContextManager[Any]:
        """Around that of a microbatch."""
        return self._scales.forward()

    def instead(self, batch: Any, work: Callable[[Any, float], torch.Tensor]) -> None:
        """What a probe does in place of a step, if it does."""

    # The batches

    def batches(self, source: Loader | Replay, epochs: int) -> Iterator[list[Any]]:
        """What the script trains on instead of an epoch; `source` stands at its beginning."""
        self.found.loops.append({"epochs": epochs, "batches": len(source)})
        if len(self.found.loops) > 1:  # another loop of the script: seen to work, no more
            yield from _first(source.parts())
            self._over()
            return
        schedules = (thing for thing in self._tracked.values() if isinstance(thing, LRScheduler))
        self._schedules = [(thing, copy.deepcopy(thing.state_dict())) for thing in schedules]
        optimizers = (thing for thing in self._tracked.values() if isinstance(thing, torch.optim.Optimizer))
        groups = (group for one in optimizers for group in one.param_groups)
        self._rates = [(group, {key: group[key] for key in group if key != "params"}) for group in groups]
        self.found.divides = isinstance(source, Loader)
        began_s = time.monotonic()
        count, parts, self.found.cold = yield from self._pass(source, PASS_STEPS, began_s)
        self.found.warm = self.found.cold
        if isinstance(source, Loader):
            source.seek(0, 0)
            _, parts, self.found.warm = yield from self._pass(source, count, None)
        if parts is not None:
            yield from self._trials(parts, began_s)
        self._over()

    def _pass(
        self, source: Loader | Replay, most: int, began_s: float | None
    ) -> Generator[list[Any], None, tuple[int, list[Any] | None, dict[str, float]]]:
        """Steps, and waiting for their batches. With `began_s` no more than time allows, agreed on by all ranks.

        Returns: how many, the largest batch (an epoch's last one may be small), the seconds.
        """
        waits, steps, parts = list[float](), list[float](), None
        iterator = source.parts()
        for _ in range(most):
            asked_s = time.monotonic()
            try:
                given = next(iterator)
            except StopIteration:
                break
            waits.append(time.monotonic() - asked_s)
            self.found.stepped_at_s = self.found.stepped_at_s or boottime_s()
            self.found.share = self.found.share or self._share_of(source)
            if parts is None or _samples(given) >= _samples(parts):
                parts = given
            took_s, _ = yield from self._step(given, "time")
            steps.append(took_s)
            late = began_s is not None and time.monotonic() - began_s > PASS_SHARE * self._seconds
            if len(steps) >= 2 and self._worst(float(late))[0]:
                break
        first, rest = slice(0, 1), slice(1, None) if len(steps) > 1 else slice(None)
        told = {
            "first_wait_s": sum(waits[first]),
            "first_step_s": sum(steps[first]),
            "wait_s": statistics.fmean(waits[rest]) if waits else 0.0,
            "step_s": statistics.median(steps[rest]) if steps else 0.0,
        }
        worst = self._worst(*told.values())
        return len(steps), parts, dict(zip(told, worst, strict=True))

    def _share_of(self, source: Loader | Replay) -> int:
        """The largest of a first step; a loader that is not ours tells it with its first batch."""
        return int(self._worst(max(source.share_of_rank(0, rank) for rank in range(dist.get_world_size())))[0])

    def _step(self, parts: list[Any], how: str) -> Generator[list[Any], None, tuple[float, Weighed]]:
        """Returns: seconds, and what was weighed (`how`: "time", "weigh")."""
        for schedule, kept in self._schedules:
            schedule.load_state_dict(copy.deepcopy(kept))
        for group, settings in self._rates:  # many schedules go on from the rate that they find
            group.update(settings)
        self._scales.begin(deeply=how == "weigh")
        began_s = time.monotonic()
        yield parts
        weighed = self._scales.end()
        return time.monotonic() - began_s, weighed

    # Trials

    def _trials(self, parts: list[Any], began_s: float) -> Iterator[list[Any]]:
        base = self._ladder.settings
        planned = min(base.microbatch or self.found.share, self.found.share)
        done: list[Trial] = []
        for microbatch, checkpointing in self._wanted(planned, base.activation_checkpointing):
            spent_s, whole = self._worst(time.monotonic() - began_s, float(bool(done) and not self._backward.came))
            if whole and microbatch != planned:
                continue  # what does not go through session.backward is never taken in parts
            if done and (spent_s > self._seconds or not self._may_fit(done, microbatch, checkpointing)):
                continue
            if done:
                self._say_trying(microbatch, checkpointing)
            asked = replace(base, microbatch=microbatch, activation_checkpointing=checkpointing)
            self._ladder.hold(asked)
            trial = Trial(microbatch, checkpointing)
            yield from self._step(parts, "time")  # the first one of a kind takes longer
            took_s, light = yield from self._step(parts, "time")
            _, deep = yield from self._step(parts, "weigh")
            if not done:  # later the profiler's own memory counts, too
                self.found.memory = self._split(deep, _samples(parts))
                self.found.resident = int(self._worst(light.rss)[0])
            held = self._ladder.settings
            ran_out = (held.microbatch, held.activation_checkpointing) != (microbatch, checkpointing)
            worst = self._worst(took_s, self._standing() + deep.peak, float(ran_out))
            trial.step_s, trial.peak, trial.ran_out = worst[0], int(worst[1]), bool(worst[2])
            done.append(trial)
        self._ladder.hold(base)
        if self._rank == 0:
            self._path.with_suffix(".trying").unlink(missing_ok=True)
        self.found.divides = self.found.divides and self._backward.came
        self.found.trials = [vars(trial) for trial in (*done, *self._those_killed())]

    def _say_trying(self, microbatch: int, checkpointing: bool) -> None:
        """To who launches a probe again that was killed in it."""
        if self._rank == 0:
            files.write(self._path.with_suffix(".trying"), json.dumps([microbatch, checkpointing]).encode())

    def _those_killed(self) -> list[Trial]:
        return [Trial(size or self.found.share, kind, ran_out=True) for size, kind in self._killed]

    def _wanted(self, planned: int, checkpointing: bool) -> Iterator[tuple[int, bool]]:
        """Settings in the order of what they tell: as planned, the line through fewer samples, the other kind, all between."""
        share, seen = self.found.share, set[tuple[int, bool]]()
        least = min(planned, 2 if self._ladder.has_batchnorm else 1)  # which has no statistics of one sample
        powers = [1 << power for power in range(share.bit_length()) if least <= 1 << power < share]
        kinds = [checkpointing] + ([not checkpointing] if self._ladder.activations.blocks else [])
        second = max(least, planned // 2) if planned > least else min(2 * planned, share)
        order = [(planned, kinds[0]), (second, kinds[0]), (share, kinds[0]), (least, kinds[0])]
        order += [(size, kind) for kind in kinds[1:] for size in (planned, second, share)]
        order += [(size, kind) for kind in kinds for size in reversed(powers)]
        for wanted in order:
            if wanted not in seen:
                seen.add(wanted)
                yield wanted

    def _may_fit(self, done: list[Trial], microbatch: int, checkpointing: bool) -> bool:
        """By the line through what was weighed: a host whose memory runs out kills without a word."""
        ran_out = [trial for trial in (*done, *self._those_killed()) if trial.ran_out]
        if any(trial.microbatch <= microbatch and (trial.checkpointing or not checkpointing) for trial in ran_out):
            return False
        alike = [trial for trial in done if trial.checkpointing == checkpointing or checkpointing]
        if not self._limit or len(alike) < 2:
            return True
        low, high = min(alike, key=lambda t: t.microbatch), max(alike, key=lambda t: t.microbatch)
        if low.microbatch == high.microbatch:
            return True
        slope = (high.peak - low.peak) / (high.microbatch - low.microbatch)
        besides = 0 if self._device.type == "cuda" else max(0, self.found.resident - done[0].peak)
        return bool(besides + low.peak + slope * (microbatch - low.microbatch) < self._limit)

    # Bytes

    def _standing(self) -> int:
        """What lives between two steps and was there before the scales were set up; on CUDA the allocator counts it."""
        return 0 if self._device.type == "cuda" else sum(self._parts_standing().values())

    def _parts_standing(self) -> dict[str, int]:
        modules = [thing for thing in self._tracked.values() if isinstance(thing, torch.nn.Module)]
        weights = {id(item): item for module in modules for item in (*module.parameters(), *module.buffers())}
        optimizers = [thing for thing in self._tracked.values() if isinstance(thing, torch.optim.Optimizer)]
        states = [value for one in optimizers for state in one.state.values() for value in state.values()]
        return {
            "weights": sum(item.nbytes for item in weights.values()),
            "optimizer": sum(value.nbytes for value in states if isinstance(value, torch.Tensor)),
            "buckets": sum(
                item.nbytes for ddp in self._backward.ddps for item in ddp.parameters() if item.requires_grad
            ),
        }

    def _split(self, deep: Weighed, samples: int) -> dict[str, int]:
        parts = self._parts_standing()
        optimizers = [thing for thing in self._tracked.values() if isinstance(thing, torch.optim.Optimizer)]
        given = [item for one in optimizers for group in one.param_groups for item in group["params"]]
        trained = {id(item): item for item in given if item.requires_grad}  # an average of weights has no gradients
        batch, microbatch = self._backward.parts[0][0], self._backward.microbatch or samples
        parts["gradients"] = sum(item.nbytes for item in trained.values())
        parts["batch"] = batches.size(batch) * min(microbatch, samples) // max(samples, 1)
        parts["activations"] = deep.forward
        total = deep.peak + self._standing()
        # At the peak some of the activations are gone and some of the gradients there: the parts need not add up to it.
        return parts | {"rest": max(0, total - sum(parts.values())), "peak": total}

    def _worst(self, *values: float) -> list[float]:
        """The greatest of all ranks' values: what the way hangs on must be alike."""
        where = self._device if self._device.type == "cuda" else torch.device("cpu")
        told = torch.tensor(values, dtype=torch.float64, device=where)
        dist.all_reduce(told, dist.ReduceOp.MAX)
        return [float(value) for value in told]

    # The rest of the script

    def _over(self) -> None:
        for loader in self.loaders:
            loader.seen.clear()
        self._since_s = time.monotonic()

    def epoch_over(self) -> None:
        """All between two epochs is the evaluation."""
        if len(self.found.loops) == 1:
            first_times = [loader.seen[:2] for loader in self.loaders if len(loader.seen) > 1]
            self.found.warm_up_s = sum(max(0.0, first - second) for first, second in first_times)
            self.found.evaluation_s = self._as_whole() - self.found.warm_up_s
        self._over()

    def _as_whole(self) -> float:
        """Seconds since the last batch was trained on, with all batches of the loaders that were read."""
        missing_s = sum((len(loader) - len(times)) * times[-1] for loader in self.loaders if (times := loader.seen))
        return time.monotonic() - self._since_s + max(0.0, missing_s)

    def script_over(self) -> None:
        self.found.end_s, self._since_s = self._as_whole(), time.monotonic()

    def saved(self) -> None:
        self.found.save_s = time.monotonic() - self._since_s
        self.found.blocks, self.found.batchnorm = len(self._ladder.activations.blocks), self._ladder.has_batchnorm
        self.found.num_workers = self._ladder.most_workers
        self.found.ended_at_s = boottime_s()
        if self._rank == 0:
            files.write(self._path, json.dumps(vars(self.found)).encode())


def _samples(parts: list[Any]) -> int:
    """0 in a batch that holds no tensor."""
    try:
        return batches.length(parts[0])
    except KgorchError:
        return 0


def _first(parts: Iterator[list[Any]]) -> Iterator[list[Any]]:
    with contextlib.suppress(StopIteration):
        yield next(parts)
