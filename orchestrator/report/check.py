"""The report of `kgorch check`: machine, memory and time of each stage, forecast, verdict.

The fields are those that `kgorch check --json` promises (docs/json.md).
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from sqlalchemy import Engine

from kgorch.core.checkpoint import save_deadline
from kgorch.core.codes import Fit
from kgorch.core.forecast import cost_estimate
from kgorch.core.forecast.cost_estimate import Loop, ResumePosition, StageMeasurement
from kgorch.core.forecast.eta import QuotaForecast, SessionModel
from kgorch.core.memory import memory_fit
from kgorch.core.memory.memory_fit import CONTEXT, Trial, Verdict
from kgorch.core.memory.memory_ladder import MemoryFacts
from kgorch.launch.requirements import loading_workers
from kgorch.launch.verdicts import FAIL, PASS, WARN, CheckLine
from kgorch.limits import quota_pools
from kgorch.limits.quota_ledger import terms_of
from kgorch.limits.quota_outlook import PoolHours
from kgorch.plan import Plan
from kgorch.platforms.profile import Profile
from kgorch.preflight import foreign_probe
from kgorch.preflight.stage_probe import StageProbe
from kgorch.report.json_fields import View, stamp
from kgorch.system import files
from kgorch.system.paths import check_result_path


@dataclass(frozen=True, slots=True)
class CheckTarget:
    """The machine that a plan is checked for: this one, or one of another kind (`kgorch check --on`).

    Attributes:
        free_bytes: free memory of the host.
        disk_bytes: free bytes on the disk for checkpoints; None if they are not known.
        cores: CPU cores that the processes may use.
        device_memory: bytes of each GPU by --device-memory; None to take what the probe measured.
        gpus: model and number of the GPUs of a machine that is not this one; None for this one.
        environ: variables in which the GPUs that were probed are the visible ones.
    """

    profile: Profile
    free_bytes: int
    disk_bytes: int | None
    cores: int
    device_memory: int | None = None
    gpus: tuple[str, int] | None = None
    environ: Mapping[str, str] = field(default_factory=lambda: os.environ)


@dataclass(frozen=True, slots=True)
class Findings:
    """What the checks of the machine and the probes of the stages found.

    Attributes:
        lines: of the machine.
        probes: of the stages, in the order of the plan; those before a failure.
        failure: why a stage does not get through its first steps; empty if all do.
        unprobed_s: seconds of training in stages that were not probed.
    """

    lines: Sequence[CheckLine]
    probes: Sequence[StageProbe]
    failure: str = ""
    unprobed_s: float = 0.0


@dataclass(frozen=True, slots=True)
class MemoryLimit:
    """Memory that a rank may hold.

    Attributes:
        total: bytes.
        is_assumed: `total` is --device-memory, not measured.
        is_device: the rank trains on a GPU.
        reserved: bytes of a device that is not here that PyTorch's allocator cannot get.
    """

    total: int
    is_assumed: bool
    is_device: bool
    reserved: int = 0

    @property
    def usable(self) -> int:
        # Without a device nobody could measure what CUDA takes of it besides PyTorch's allocator.
        return self.total - (CONTEXT if self.is_assumed else self.reserved)

    @property
    def where(self) -> str:
        what = "a device" if self.is_assumed or self.is_device else "the host's free memory, by ranks"
        return f"{self.total / (1 << 30):.1f} GiB, {what}"


def report(engine: Engine, plan: Plan, target: CheckTarget, findings: Findings, reached: ResumePosition | None) -> View:
    """The report of a check.

    Args:
        reached: the position from which a start would resume; None if it begins a run.
    """
    probes = findings.probes
    stages = [_stage(plan, probe, target) for probe in probes]
    # Without the length of every loop there is nothing to forecast from.
    can_forecast = probes and not findings.failure and not any(probe.stage.foreign for probe in probes)
    can_forecast = can_forecast and all(
        loop["batches"] for probe in probes for loop in probe.measurements.get("loops", ())
    )
    forecast = _forecast(engine, plan, target, findings, reached) if can_forecast else None
    lines = [*findings.lines, *_stage_lines(plan, target, probes, stages), *_forecast_lines(plan, target, forecast)]
    if target.device_memory and any(
        probe.measurements.get("trials") and probe.measurements["device"] == "cpu" for probe in probes
    ):
        text = "steps were timed on the CPU of this machine: the forecast of time is for it, not for a GPU"
        lines.append(CheckLine("time", WARN, text, "kgorch check where the plan is to train"))
    verdict, why = _verdict(lines, stages, findings.failure)
    return {
        "plan": plan.name,
        "verdict": verdict,
        "why": why,
        "at": stamp(datetime.now(UTC)),
        "preflight": [line._asdict() for line in lines],
        "stages": stages,
        "forecast": forecast,
    }


def _verdict(lines: Sequence[CheckLine], stages: Sequence[View], failure: str) -> tuple[Fit, str]:
    if failure:
        return Fit.DOES_NOT_RUN, failure
    if line := next((line for line in lines if line.verdict == FAIL), None):
        return Fit.DOES_NOT_RUN, f"{line.name}: {line.said}"
    for verdict in (Fit.DOES_NOT_FIT, Fit.FITS_WITH):
        if stage := next(
            (stage for stage in stages if stage["memory"] and stage["memory"]["verdict"] == verdict), None
        ):
            return verdict, f"stage {stage['name']}: {stage['memory']['why']}"
    if not stages:
        return Fit.FITS, "as far as the machine alone can tell; no steps were taken"
    fullest = max((stage for stage in stages if stage["memory"]), key=lambda s: s["memory"]["held"], default=None)
    if fullest:
        return Fit.FITS, f"stage {fullest['name']} takes {fullest['memory']['why']}"
    if stage := next((stage for stage in stages if "foreign" in stage), None):
        _, said, _ = foreign_probe.describe(stage["foreign"])[0]
        return (
            Fit.FITS,
            f"stage {stage['name']}: {said}; how much memory it needs is not measured for a program that saves by itself",
        )
    return Fit.FITS, "no stage takes steps"


def _stage(plan: Plan, probe: StageProbe, target: CheckTarget) -> View:
    """One entry of the field `stages`; `memory` and `time` are null for a stage that took no steps."""
    figures = probe.measurements
    view: View = {
        "name": probe.stage.name,
        "ranks": probe.ranks,
        "device": "" if target.device_memory else probe.device,
        "lasted_s": round(probe.lasted_s, 2),
        "exactness": figures.get("exactness", {}),
        "memory": None,
        "time": None,
    }
    if probe.stage.foreign:
        view["foreign"] = figures["foreign"]
    if not figures.get("trials"):
        return view
    limit = MemoryLimit(
        target.device_memory or figures["device_total"] or target.free_bytes // probe.ranks,
        is_assumed=target.device_memory is not None,
        is_device=figures["device"] == "cuda",
        reserved=figures.get("reserved", 0),
    )
    facts = _facts(probe)
    verdict, trials = judge_memory(plan, probe, limit, facts)
    settings = verdict.settings
    view["memory"] = {
        "verdict": verdict.word,
        "why": verdict.why,
        "limit": limit.total,
        "held": verdict.planned.held,
        "settings": settings.describe(plan.memory.settings) if settings else [],
        "held_then": verdict.need.held if verdict.need else None,
        "rungs": list(verdict.rungs),
        "largest_microbatch": verdict.largest,
        "auto_microbatch": memory_fit.even_microbatch(figures["share"], verdict.largest, facts),
        "share": figures["share"],
        "parts": figures["memory"],
        "process": figures["resident"],
        "trials": [trial._asdict() for trial in trials],
    }
    cost = stage_cost(probe, verdict)
    view["time"] = {
        "epochs": cost.epochs,
        "batches": cost.batches,
        "step_s": cost.step_s,
        "wait_s": cost.wait_s,
        "wait_share": cost.wait_s / max(cost.step_s + cost.wait_s, 1e-9),
        "cold_step_s": cost.cold_step_s,
        "cold_wait_s": cost.cold_wait_s,
        "samples_per_s": figures["share"] * probe.ranks / max(cost.step_s + cost.wait_s, 1e-9),
        "startup_s": cost.startup_s,
        "evaluation_s": cost.evaluation_s,
        "epoch_s": cost.epoch_s,
        "first_epoch_s": cost.first_epoch_s,
        "end_s": cost.end_s,
        "save_s": cost.save_s,
        "state_bytes": cost.state_bytes,
        "training_s": cost.training_s,
    }
    return view


def _facts(probe: StageProbe) -> MemoryFacts:
    figures = probe.measurements
    # A batch that cannot be divided counts as unknown, as it is for the ranks of a run before their first step.
    return MemoryFacts(
        batch=figures["share"],
        divides=figures["divides"],
        num_workers=figures["num_workers"],
        batchnorm=figures["batchnorm"],
        blocks=figures["blocks"],
        device=figures["device"],
    )


def judge_memory(plan: Plan, probe: StageProbe, limit: MemoryLimit, facts: MemoryFacts) -> tuple[Verdict, list[Trial]]:
    """Whether a stage fits, from the trials of its probe.

    On a GPU the bytes that PyTorch's allocator held count. On the host the whole process counts: what it holds besides the
    tensors of the plan's own setting is added to each trial.
    """
    figures = probe.measurements
    first_peak = figures["trials"][0]["peak"]
    base = 0 if limit.is_assumed or limit.is_device else max(0, figures["resident"] - first_peak)
    trials = [
        Trial(trial["microbatch"], trial["checkpointing"], base + trial["peak"], trial["step_s"], trial["ran_out"])
        for trial in figures["trials"]
    ]
    fixed = sum(figures["memory"][part] for part in ("weights", "gradients", "optimizer", "buckets"))
    verdict = memory_fit.judge(
        trials, share=figures["share"], base=plan.memory.settings, ladder=plan.rungs_of(probe.stage.name), facts=facts,
        limit=limit.usable, where=limit.where, fixed_bytes=base + fixed,
    )  # fmt: skip
    return verdict, trials


def stage_cost(probe: StageProbe, verdict: Verdict | None = None) -> StageMeasurement:
    """Seconds and bytes of a stage.

    Args:
        verdict: if the stage fits only with other settings than the plan's, their steps are slower.
    """
    figures = probe.measurements
    if not figures.get("trials"):  # no steps; the time of a script that never called attach() is all after its start
        end_s = figures.get("end_s", probe.lasted_s - probe.startup_s)
        save_s, state_bytes = figures.get("save_s", 0.0), figures.get("state_bytes", 0)
        return StageMeasurement(probe.stage.name, (), 0, 0, 0, 0, probe.startup_s, 0, end_s, save_s, state_bytes)
    warm, cold, slowdown = figures["warm"], figures["cold"], 1.0
    if verdict and verdict.need and verdict.word == Fit.FITS_WITH and verdict.planned.step_s:
        slowdown = verdict.need.step_s / verdict.planned.step_s
    return StageMeasurement(
        stage=probe.stage.name,
        loops=tuple(Loop(loop["epochs"], loop["batches"]) for loop in figures["loops"]),
        step_s=warm["step_s"] * slowdown,
        wait_s=warm["wait_s"],
        cold_step_s=cold["first_step_s"],
        cold_wait_s=cold["wait_s"],
        startup_s=probe.startup_s + figures["warm_up_s"],
        evaluation_s=figures["evaluation_s"],
        end_s=figures["end_s"],
        save_s=figures["save_s"],
        state_bytes=figures["state_bytes"],
    )


def _forecast(
    engine: Engine, plan: Plan, target: CheckTarget, findings: Findings, reached: ResumePosition | None
) -> View:
    costs = [stage_cost(probe) for probe in findings.probes]
    if findings.unprobed_s:
        costs.append(StageMeasurement("", (), 0, 0, 0, 0, 0, 0, findings.unprobed_s, 0, 0))
    wall_s = plan.session.wall or target.profile.wall_s
    slowest = max(costs, key=lambda cost: cost.save_s + max(cost.evaluation_s, cost.step_s))
    save_lead_s = save_deadline.save_lead_s(
        save_s=2 * slowest.save_s,  # one save was measured; the supervisor reads it back, too
        gap_s=slowest.evaluation_s,
        step_s=slowest.step_s,
        margin_s=plan.session.margin or save_deadline.default_margin_s(wall_s),
    )
    now, terms = datetime.now(UTC), terms_of(plan, target.profile, target.gpus or target.environ)
    hours: QuotaForecast | None = None
    if terms:
        hours = PoolHours(terms.quota, quota_pools.uses(engine, terms.quota, now), terms.factor)
    # Besides the last ones there are the best, and a new one until it is read back and an old one may be deleted.
    count = plan.checkpoint.keep.last + 1 + (plan.checkpoint.keep.best is not None)
    model = SessionModel(length_s=wall_s, ending_s=save_lead_s, hours=hours)
    outlay = cost_estimate.estimate_cost(costs, now, model, factor=terms.factor if terms else 1.0, position=reached)
    end = outlay.end
    return {
        "goes_on_from": {"stage": reached.stage, "step": reached.step} if reached and reached.stage else None,
        "training_s": outlay.training_s,
        "wall_s": wall_s,
        "save_lead_s": save_lead_s,
        "sessions": outlay.sessions,
        "epochs_a_session": outlay.epochs_a_session,
        "end_at": stamp(end.usual.end_at) if end.usual else None,
        "earliest_at": stamp(end.early.end_at) if end.early else None,
        "latest_at": stamp(end.late.end_at) if end.late else None,
        "quota_s": outlay.quota_s if terms else None,
        "disk_bytes": cost_estimate.disk_bytes(costs, count),
    }


def _stage_lines(
    plan: Plan, target: CheckTarget, probes: Sequence[StageProbe], stages: Sequence[View]
) -> Iterator[CheckLine]:
    """Lines about the machine that need the figures of the probes."""
    for probe, stage in zip(probes, stages, strict=True):
        figures, name = probe.measurements, f"stage {stage['name']}"
        if probe.stage.foreign:
            for is_good, text, do in foreign_probe.describe(figures["foreign"]):
                yield CheckLine(name, PASS if is_good else WARN, text, do)
            if (best := plan.checkpoint.keep.best) and not ((step := probe.stage.foreign.step) and step.log):
                text = f"keep.best: no checkpoint can be the best by {best}, for nothing says at which step a value was printed"
                yield CheckLine(name, WARN, text, "stage.foreign.step = { log = 'step (\\d+)' }")
            continue
        yield from _saving_lines(name, probe, is_alone=not any(other.measurements for other in probes))
        if not figures.get("trials"):
            continue
        busy = probe.ranks * (1 + figures["num_workers"])
        # Workers that an argument num_workers of the plan names are compared with the cores already (launch/requirements.py).
        if busy > target.cores and probe.ranks * loading_workers(probe.stage) <= target.cores:
            text = f"{probe.ranks} ranks with {figures['num_workers']} loading workers each on {target.cores} cores"
            do = "fewer num_workers, if the steps wait for the CPU" if figures["num_workers"] else ""
            yield CheckLine(name, WARN, text, do)
        yield from _microbatch_lines(name, stage, plan.memory.microbatch)
        yield from _port_lines(name, stage["exactness"])
        if not all(loop["batches"] for loop in figures["loops"]):
            text = "how many steps it takes is unknown: its loader has no length, or the script owns the loop"
            do = "give the dataset a __len__, or call session.expect(steps=…): then there is a forecast"
            yield CheckLine(name, WARN, text, do)
        if stage["memory"]["verdict"] == Fit.DOES_NOT_FIT and not figures["divides"] and figures["share"] > 1:
            text = "the memory ladder can divide only batches that session.loader yields and session.backward receives"
            yield CheckLine(name, WARN, text, "use both in the script, or a smaller batch")
        if stage["time"]["wait_share"] > 0.1:
            text = f"{stage['time']['wait_share']:.0%} of the time it waits for its batches"
            yield CheckLine(name, WARN, text, "more num_workers, or [data] cache")
        resident = figures["resident"] * probe.ranks
        if resident > target.free_bytes:
            text = f"its ranks take {resident / (1 << 30):.1f} GiB of the host, {target.free_bytes / (1 << 30):.1f} are free"
            yield CheckLine(name, FAIL, text, "a smaller microbatch, fewer ranks or workers")


def _forecast_lines(plan: Plan, target: CheckTarget, forecast: View | None) -> Iterator[CheckLine]:
    """Whether the checkpoints fit on the disk, and whether the training ever ends."""
    if not forecast:
        return
    needed = forecast["disk_bytes"]
    room = min((size for size in (target.disk_bytes, plan.checkpoint.disk) if size is not None), default=None)
    text = f"checkpoints take {needed / (1 << 20):.0f} MiB" + (
        f" of {room / (1 << 20):.0f}" if room is not None else ""
    )
    if room is None or needed <= room:
        yield CheckLine("disk", PASS, text)
    else:
        yield CheckLine("disk", WARN, text, "keep fewer, or [checkpoint] disk, dir")
    if forecast["end_at"] is None:
        text = "there is no forecast of the end: no session is long enough, or the quota never renews"
        yield CheckLine("time", FAIL, text, "a longer session.wall, or more quota.hours")


def _microbatch_lines(name: str, stage: View, planned: int | str | None) -> Iterator[CheckLine]:
    """The microbatch that fits, if it is not the one that the plan begins with.

    A larger one is faster, a smaller one does not run out of memory first. What was measured for another machine (no device) is
    not used here.
    """
    best, share = stage["memory"]["auto_microbatch"], stage["memory"]["share"]
    first = min(planned if isinstance(planned, int) else share, share)
    if not stage["device"] or not best:
        return
    if planned == "auto":
        yield CheckLine(name, PASS, f'a microbatch of {best} fits, and microbatch = "auto" begins with it')
    elif best != first:
        text = f"a microbatch of {best} fits, the plan begins with {first}; the effective batch is the same"
        yield CheckLine(name, PASS, text, 'memory.microbatch = "auto" begins with what fits')


def _port_lines(name: str, exactness: Mapping[str, str]) -> Iterator[CheckLine]:
    """What the script's use of the SDK gives up."""
    if untracked := exactness.get("untracked"):
        yield CheckLine(name, WARN, untracked, "docs/your-training.md")
    if weights := exactness.get("weights"):
        yield CheckLine(name, WARN, weights, "wrap the model, or plan ranks = 1")
    if ladder := exactness.get("ladder"):
        yield CheckLine(name, PASS, f"memory ladder: {ladder}", "session.backward, where memory is short")
    if "; " in (data := exactness.get("data", "")):
        yield CheckLine(name, PASS, f"data: {data}", 'docs/checkpoints.md, "How exact a resume is"')


def _saving_lines(name: str, probe: StageProbe, *, is_alone: bool) -> Iterator[CheckLine]:
    """A stage without attach() cannot be saved. Beside a stage that trains, one that only prepares data needs no saves."""
    if not probe.measurements:
        text = f"{probe.stage.entry} ran to its end and never called kgorch.attach(): nothing of it can be saved"
        yield CheckLine(
            name,
            FAIL if is_alone else WARN,
            text,
            "call it around the training (docs/your-training.md), or kgorch adopt",
        )


def keep(home: Path, plan: Plan, workdir: Path, view: Mapping[str, Any]) -> None:
    """Write the report where `kgorch history` compares it with the run and `microbatch = "auto"` reads it (launch/rungs.py).

    Args:
        workdir: the plan's folder.
    Raises: OSError.
    """
    path = check_result_path(home, plan.hash, plan.name, str(workdir))
    path.parent.mkdir(parents=True, exist_ok=True)
    files.write(path, json.dumps(view).encode())
