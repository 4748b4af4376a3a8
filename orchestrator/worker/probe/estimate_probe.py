"""A probe that computes nothing: the first step of a script as it would be on another GPU (`kgorch check --on`).

The script runs to its first batch as usual, on the CPU. Then step_estimate.py evaluates the step that `session.backward` gets, with
each microbatch that the verdict depends on. After that the script ends successfully, so that a later stage finds the weights of
this one.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from kgorch.worker.data import batches
from kgorch.worker.data.keyed_loader import Loader
from kgorch.worker.data.loader_fast_forward import LoaderFastForward
from kgorch.worker.probe.probe import Probe
from kgorch.worker.probe.step_estimate import EstimatedTrial, Rates, StepEstimate, Work

PATIENCE_S = 60.0
"""Seconds for the trials of a stage; the first two are always made."""


class EstimateProbe(Probe):
    """The hooks of a probe that estimates the step."""

    as_on_cuda = True

    _estimate: StepEstimate | None = None
    _sample_s = 0.0
    _sizes: tuple[int, ...] = ()

    def forward(self) -> contextlib.AbstractContextManager[Any]:
        return self._estimate.forward() if self._estimate else contextlib.nullcontext()

    def batches(self, source: Loader | LoaderFastForward, epochs: int) -> Iterator[list[Any]]:
        self.result.loops.append({"epochs": epochs, "batches": len(source)})
        self.result.share, self.result.divides = self._share_of(source), isinstance(source, Loader)
        if not any(isinstance(thing, torch.optim.Optimizer) for thing in self._tracked.values()):
            raise SystemExit(0)  # a prediction would compute all that it is given
        if isinstance(source, Loader):
            self._sample_s = source.sample_s()
            others = [loader.size for loader in self.loaders if loader is not source]
            self._sizes = (source.size, sum(others))
        yield next(source.parts())
        raise SystemExit(0)  # the step did not use session.backward(), so there is no estimate

    def before_backward(self, batch: Any, work: Work) -> None:
        """Estimate the step on rank 0, and end the script on all ranks.

        Raises:
            SystemExit: always, unless the estimate fails.
            KgorchError: the step's shapes depend on values.
        """
        if self._rank == 0:
            self._estimate_step(batch, work)
        dist.barrier()
        raise SystemExit(0)

    def script_over(self) -> None:
        """Nothing to measure: only the first step was reached."""

    def _estimate_step(self, batch: Any, work: Work) -> None:
        machine = dict(self._gpu)
        bus, rates = machine.pop("bus"), Rates(**machine)
        buckets = self._standing_parts()["buckets"]
        self._estimate = estimate = StepEstimate(self._tracked, self._runner.ddps, rates, buckets)
        ranks, base = dist.get_world_size(), self._ladder.settings
        reduce_s = 2 * (ranks - 1) / ranks * estimate.gradient_bytes() / bus
        optimizer_s = estimate.optimizer_cost.seconds(rates.launch_s)
        at_the_end = estimate.standing + estimate.gradient_bytes() + estimate.optimizer_peak
        division = batches.division(batch, self.result.share)
        samples = min(division.samples, self.result.share)
        is_whole = division.way == batches.WHOLE
        self.result.divides = self.result.divides and not is_whole
        planned = samples if is_whole else min(base.microbatch or samples, samples)
        began_s, first = time.monotonic(), None
        for microbatch, checkpointing in self._settings(planned, base.activation_checkpointing):
            if is_whole and microbatch != planned:
                continue
            if len(self.result.trials) >= 2 and time.monotonic() - began_s > PATIENCE_S:
                break
            self._ladder.try_out(replace(base, microbatch=microbatch, activation_checkpointing=checkpointing))
            parts = division.parts(batch, microbatch)
            trial = estimate.trial(parts, work)
            if first is None:
                first, forward, read_values = trial, estimate.forward_cost, estimate.read_values
                self.result.memory = self._parts(estimate, trial, batches.size(parts[0]), at_the_end)
            self.result.trials.append({
                "microbatch": microbatch, "checkpointing": checkpointing, "ran_out": False,
                "peak": max(trial.peak, at_the_end),
                "step_s": trial.step.seconds(rates.launch_s) + optimizer_s + reduce_s,
            })  # fmt: skip
        self._ladder.try_out(base)
        assert first is not None
        self.result.device = "cuda"
        self.result.estimate = {
            "samples": self._sizes[0] if self._sizes else 0,
            "validation": self._sizes[1] if self._sizes else 0,
            "sample_s": self._sample_s,
            "forward_s": forward.seconds(rates.launch_s) / planned,
            "flops_half": first.step.flops["half"] / samples,
            "flops_full": first.step.flops["full"] / samples,
            "optimizer_s": optimizer_s,
            "reduce_s": reduce_s,
            "read_values": read_values,
            "weights": sum(item.numel() for item in estimate.trained()),
        }

    def _parts(
        self, estimate: StepEstimate, trial: EstimatedTrial, batch_bytes: int, at_the_end: int
    ) -> dict[str, int]:
        parts = self._standing_parts() | {
            "optimizer": estimate.optimizer_bytes,
            "gradients": estimate.gradient_bytes(),
            "batch": batch_bytes,
            "activations": trial.forward,
        }
        peak = max(trial.peak, at_the_end)
        return parts | {"rest": max(0, peak - sum(parts.values())), "peak": peak}
