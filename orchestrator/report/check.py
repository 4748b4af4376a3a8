"""What `kgorch check` found, as the fields of its --json (docs/json.md): machine, stages, memory, time, and the verdict."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, NamedTuple

from sqlalchemy import Engine

from db import samples, sessions
from db.records import RunInfo
from orchestrator.core import cost_estimate, memory_fit, save_deadline
from orchestrator.core.codes import EventKind, Fit
from orchestrator.core.cost_estimate import Loop, Measured, Reached
from orchestrator.core.eta import Hours
from orchestrator.core.memory_fit import CONTEXT, Trial, Verdict
from orchestrator.core.memory_ladder import Facts
from orchestrator.hardware import devices
from orchestrator.launch.requirements import loading_workers
from orchestrator.launch.verdicts import FAIL, PASS, WARN, Line
from orchestrator.limits import quota_pools
from orchestrator.limits.quota_ledger import terms_of
from orchestrator.limits.quota_outlook import PoolHours
from orchestrator.plan import Plan
from orchestrator.platforms.profile import Profile
from orchestrator.preflight.stage_probe import Probed
from orchestrator.report.run_view import View, stamp
from orchestrator.system import files
from orchestrator.system.paths import check_result_path


@dataclass(frozen=True)
class Limit:
    """What a rank may hold. `told`: a person's --device-memory; reserved: of a device that is not here, for other things."""

    total: int
    told: bool
    device: bool
    reserved: int = 0

    @property
    def usable(self) -> int:
        return self.total - (CONTEXT if self.told else self.reserved)

    @property
    def where(self) -> str:
        what = "a device" if self.told or self.device else "the host's free memory, by ranks"
        return f"{self.total / (1 << 30):.1f} GiB, {what}"


def of(
    engine: Engine, plan: Plan, profile: Profile, machine: Sequence[Line], probed: Sequence[Probed], failed: str, *,
    free: int, disk_free: int | None, cores: int, device_memory: int | None, reached: Reached | None,
    on: tuple[str, int] | None = None, besides_s: float = 0.0,
) -> View:  # fmt: skip
    """Args:
    failed: why a stage does not get through its first steps; the ones before it are told. free: bytes of the host.
    reached: where a start would go on; None where it begins a run.
    on: the GPU and their number of a machine that is not here. besides_s: of stages that were not probed.
    """
    stages = [_stage(plan, one, free, device_memory) for one in probed]
    foretold = probed and not failed and all(loop["batches"] for one in probed for loop in one.found.get("loops", ()))
    ahead = _forecast(engine, plan, profile, probed, reached, on, besides_s) if foretold else None
    lines = [*machine, *_of_probe(probed, stages, ahead, free, disk_free, cores, plan)]
    if device_memory and any(one.found.get("trials") and one.found["device"] == "cpu" for one in probed):
        said = "steps were timed on the CPU of this machine: what is foretold of time holds for it, not for a GPU"
        lines.append(Line("time", WARN, said, "kgorch check where the plan is to train"))
    word, why = _verdict(lines, stages, failed)
    return {
        "plan": plan.name,
        "verdict": word,
        "why": why,
        "at": stamp(datetime.now(UTC)),
        "preflight": [line._asdict() for line in lines],
        "stages": stages,
        "forecast": ahead,
    }


def _verdict(lines: Sequence[Line], stages: Sequence[View], failed: str) -> tuple[Fit, str]:
    if failed:
        return Fit.DOES_NOT_RUN, failed
    if broken := next((line for line in lines if line.verdict == FAIL), None):
        return Fit.DOES_NOT_RUN, f"{broken.name}: {broken.said}"
    for word in (Fit.DOES_NOT_FIT, Fit.FITS_WITH):
        if found := next((stage for stage in stages if stage["memory"] and stage["memory"]["verdict"] == word), None):
            return word, f"stage {found['name']}: {found['memory']['why']}"
    if not stages:
        return Fit.FITS, "as far as the machine alone can tell; no steps were taken"
    fullest = max((stage for stage in stages if stage["memory"]), key=lambda s: s["memory"]["held"], default=None)
    return Fit.FITS, f"stage {fullest['name']} takes {fullest['memory']['why']}" if fullest else "no stage takes steps"


def _stage(plan: Plan, one: Probed, free: int, device_memory: int | None) -> View:
    found = one.found
    told: View = {
        "name": one.stage.name,
        "ranks": one.ranks,
        "device": "" if device_memory else devices.model_name(),
        "lasted_s": round(one.lasted_s, 2),
        "memory": None,
        "time": None,
    }
    if not found.get("trials"):
        return told
    limit = Limit(
        device_memory or found["device_total"] or free // one.ranks,
        device_memory is not None,
        found["device"] == "cuda",
        found.get("reserved", 0),
    )
    facts = _facts(one)
    verdict, trials = judged(plan, one, limit, facts)
    settings = verdict.settings
    told["memory"] = {
        "verdict": verdict.word,
        "why": verdict.why,
        "limit": limit.total,
        "held": verdict.planned.held,
        "settings": settings.said(plan.memory.settings) if settings else [],
        "held_then": verdict.need.held if verdict.need else None,
        "rungs": list(verdict.rungs),
        "largest_microbatch": verdict.largest,
        "auto_microbatch": memory_fit.even(found["share"], verdict.largest, facts),
        "share": found["share"],
        "parts": found["memory"],
        "process": found["resident"],
        "trials": [trial._asdict() for trial in trials],
    }
    cost = measured(one, verdict)
    told["time"] = {
        "epochs": cost.epochs,
        "batches": cost.batches,
        "step_s": cost.step_s,
        "wait_s": cost.wait_s,
        "wait_share": cost.wait_s / max(cost.step_s + cost.wait_s, 1e-9),
        "cold_step_s": cost.cold_step_s,
        "cold_wait_s": cost.cold_wait_s,
        "samples_per_s": found["share"] * one.ranks / max(cost.step_s + cost.wait_s, 1e-9),
        "startup_s": cost.startup_s,
        "evaluation_s": cost.evaluation_s,
        "epoch_s": cost.epoch_s,
        "first_epoch_s": cost.first_epoch_s,
        "end_s": cost.end_s,
        "save_s": cost.save_s,
        "state_bytes": cost.state_bytes,
        "training_s": cost.training_s,
    }
    return told


def _facts(one: Probed) -> Facts:
    found = one.found
    share = found["share"] if found["divides"] else 0  # a run's ranks do not know it before their first step, either
    return Facts(share, found["num_workers"], found["batchnorm"], found["blocks"], found["device"])


def judged(plan: Plan, one: Probed, limit: Limit, facts: Facts) -> tuple[Verdict, list[Trial]]:
    """On a device what its allocator held counts; on the host the whole process, of which the trials tell how it grows."""
    found, planned = one.found, one.found["trials"][0]["peak"]
    foot = 0 if limit.told or limit.device else found["resident"] - planned
    trials = [
        Trial(
            trial["microbatch"], trial["checkpointing"], max(0, foot) + trial["peak"], trial["step_s"], trial["ran_out"]
        )
        for trial in found["trials"]
    ]
    standing = sum(found["memory"][part] for part in ("weights", "gradients", "optimizer", "buckets"))
    verdict = memory_fit.judge(
        trials, share=found["share"], base=plan.memory.settings, ladder=plan.rungs_of(one.stage.name), facts=facts,
        limit=limit.usable, where=limit.where, standing=max(0, foot) + standing,
    )  # fmt: skip
    return verdict, trials


def measured(one: Probed, verdict: Verdict | None = None) -> Measured:
    """`verdict`: with whose settings the stage would go; their steps are slower or faster than the plan's."""
    found = one.found
    if not found.get("trials"):  # what it does besides steps; of a script that never attached, all of it
        ended = found.get("end_s", one.lasted_s - one.startup_s), found.get("save_s", 0.0), found.get("state_bytes", 0)
        return Measured(one.stage.name, (), 0, 0, 0, 0, one.startup_s, 0, *ended)
    warm, cold, slower = found["warm"], found["cold"], 1.0
    if verdict and verdict.need and verdict.word == Fit.FITS_WITH and verdict.planned.step_s:
        slower = verdict.need.step_s / verdict.planned.step_s
    return Measured(
        stage=one.stage.name,
        loops=tuple(Loop(loop["epochs"], loop["batches"]) for loop in found["loops"]),
        step_s=warm["step_s"] * slower,
        wait_s=warm["wait_s"],
        cold_step_s=cold["first_step_s"],
        cold_wait_s=cold["wait_s"],
        startup_s=one.startup_s + found["warm_up_s"],
        evaluation_s=found["evaluation_s"],
        end_s=found["end_s"],
        save_s=found["save_s"],
        state_bytes=found["state_bytes"],
    )


def _forecast(
    engine: Engine, plan: Plan, profile: Profile, probed: Sequence[Probed], reached: Reached | None,
    on: tuple[str, int] | None, besides_s: float,
) -> View:  # fmt: skip
    costs = [measured(one) for one in probed]
    if besides_s:
        costs.append(Measured("", (), 0, 0, 0, 0, 0, 0, besides_s, 0, 0))
    wall_s = plan.session.wall or profile.wall_s
    slowest = max(costs, key=lambda cost: cost.save_s + max(cost.evaluation_s, cost.step_s))
    lead_s = save_deadline.lead_s(
        save_s=2 * slowest.save_s,  # of one save that was seen; it is read back, too
        gap_s=slowest.evaluation_s,
        step_s=slowest.step_s,
        margin_s=plan.session.margin or save_deadline.default_margin_s(wall_s),
    )
    now, terms = datetime.now(UTC), terms_of(plan, profile, on)
    hours: Hours | None = None
    if terms:
        hours = PoolHours(terms.quota, quota_pools.uses(engine, terms.quota, now), terms.factor)
    # Besides the last ones the best, and a new best until it is read back and the one before may go.
    kept = plan.checkpoint.keep.last + 2 * (plan.checkpoint.keep.best is not None)
    found = cost_estimate.lay_out(
        costs, now, wall_s=wall_s, lead_s=lead_s, hours=hours, factor=terms.factor if terms else 1.0, kept=kept,
        reached=reached,
    )  # fmt: skip
    return {
        "goes_on_from": {"stage": reached.stage, "step": reached.step} if reached and reached.stage else None,
        "training_s": found.training_s,
        "wall_s": wall_s,
        "lead_s": lead_s,
        "sessions": found.sessions,
        "epochs_a_session": found.epochs_a_session,
        "end_at": stamp(found.end.usual.end_at) if found.end.usual else None,
        "earliest_at": stamp(found.end.early.end_at) if found.end.early else None,
        "latest_at": stamp(found.end.late.end_at) if found.end.late else None,
        "quota_s": found.quota_s if terms else None,
        "disk_bytes": found.disk_bytes,
    }


def _of_probe(
    probed: Sequence[Probed], stages: Sequence[View], ahead: View | None, free: int, disk_free: int | None, cores: int, plan: Plan
) -> list[Line]:  # fmt: skip
    """What can be said of the machine only now."""
    lines: list[Line] = []
    for one, stage in zip(probed, stages, strict=True):
        found, name = one.found, f"stage {stage['name']}"
        lines += _of_saving(name, one, is_alone=not any(other.found for other in probed))
        if not found.get("trials"):
            continue
        busy = one.ranks * (1 + found["num_workers"])
        if busy > cores and one.ranks * loading_workers(one.stage) <= cores:  # else it is said already
            said = f"{one.ranks} ranks with {found['num_workers']} loading workers each on {cores} cores"
            lines.append(
                Line(
                    name, WARN, said, "fewer num_workers, if the steps wait for the CPU" if found["num_workers"] else ""
                )
            )
        lines += _of_microbatch(name, stage, plan.memory.microbatch)
        if not all(loop["batches"] for loop in found["loops"]):
            said = "its loader has no length, so nobody can say how long an epoch is"
            lines.append(Line(name, WARN, said, "a dataset with __len__ has the end foretold"))
        if stage["memory"]["verdict"] == Fit.DOES_NOT_FIT and not found["divides"] and found["share"] > 1:
            said = "the ladder takes only batches in parts that session.loader gives and session.backward is given"
            lines.append(Line(name, WARN, said, "use both in the script, or a smaller batch"))
        if stage["time"]["wait_share"] > 0.1:
            said = f"{stage['time']['wait_share']:.0%} of the time it waits for its batches"
            lines.append(Line(name, WARN, said, "more num_workers, or [data] cache"))
        resident = found["resident"] * one.ranks
        if resident > free:
            said = f"its ranks take {resident / (1 << 30):.1f} GiB of the host, {free / (1 << 30):.1f} are free"
            lines.append(Line(name, FAIL, said, "a smaller microbatch, fewer ranks or workers"))
    if ahead:
        needed, bound = ahead["disk_bytes"], plan.checkpoint.disk
        room = min((size for size in (disk_free, bound) if size is not None), default=None)
        said = f"checkpoints take {needed / (1 << 20):.0f} MiB" + (
            f" of {room / (1 << 20):.0f}" if room is not None else ""
        )
        fits = room is None or needed <= room
        lines.append(
            Line("disk", PASS if fits else WARN, said, "" if fits else "keep fewer, or [checkpoint] disk, dir")
        )
        if ahead["end_at"] is None:
            said = "the end is not to be seen: no session is long enough, or no hours come back"
            lines.append(Line("time", FAIL, said, "a longer session.wall, or more quota.hours"))
    return lines


def _of_microbatch(name: str, stage: View, planned: int | str | None) -> Iterator[Line]:
    """The microbatch that fits, where it is another than the plan begins with: a larger one is faster, a smaller one runs out of
    no memory first. What is measured for another machine (no device) begins nothing here.
    """
    best, share = stage["memory"]["auto_microbatch"], stage["memory"]["share"]
    begins_with = min(planned if isinstance(planned, int) else share, share)
    if not stage["device"] or not best:
        return
    if planned == "auto":
        yield Line(name, PASS, f'a microbatch of {best} fits, and microbatch = "auto" begins with it')
    elif best != begins_with:
        said = f"a microbatch of {best} fits, the plan begins with {begins_with}; the effective batch is the same"
        yield Line(name, PASS, said, 'memory.microbatch = "auto" begins with what fits')


def _of_saving(name: str, one: Probed, *, is_alone: bool) -> Iterator[Line]:
    """A stage of which nothing can be saved. One that only prepares or packs something needs no saves, beside one that trains."""
    if not one.found:
        said = f"{one.stage.entry} ran to its end and never called orchestrator.worker.attach(): nothing of it can be saved"
        yield Line(name, FAIL if is_alone else WARN, said, 'call it around the training (README, "Your training")')


def keep(home: Path, plan: Plan, found: Mapping[str, Any]) -> None:
    """For `kgorch history`, which holds it against what came, and `microbatch = "auto"` (launch/rungs.py)."""
    path = check_result_path(home, plan.hash)
    path.parent.mkdir(parents=True, exist_ok=True)
    files.write(path, json.dumps(found).encode())


SESSIONS_SEEN = 50
"""The newest of a run: what it takes changes with its plan, and a run may have thousands."""


class Held(NamedTuple):
    """A figure that a check foretold, and what came; in bytes or seconds."""

    stage: str
    what: str
    foretold: float
    came: float
    is_bytes: bool = False


def held(engine: Engine, run: RunInfo, home: Path) -> list[Held]:
    """The last check of a run's plan held against the run; empty without one, or while too little was seen."""
    try:
        told = json.loads(check_result_path(home, run.plan_hash).read_text())
        return [*_epochs_held(engine, run, told["stages"]), *_memory_held(engine, run, told["stages"])]
    except (OSError, ValueError, LookupError, TypeError):
        return []


def _epochs_held(engine: Engine, run: RunInfo, stages: Sequence[View]) -> Iterator[Held]:
    events = sessions.of_kind(engine, run.id, EventKind.EPOCH, limit=1000)
    for stage in stages:
        every = [event.facts for event in events if event.facts["stage"] == stage["name"]]
        mine = [facts for facts in every if not facts.get("first")] or every  # a session's first one is cold
        steps = sum(facts["steps"] for facts in mine)
        if steps and stage["time"] and stage["time"]["batches"]:
            came_s = sum(facts["lasted_s"] for facts in mine) * stage["time"]["batches"] / steps
            yield Held(stage["name"], "an epoch", stage["time"]["epoch_s"], came_s)


def _memory_held(engine: Engine, run: RunInfo, stages: Sequence[View]) -> Iterator[Held]:
    """Of the run's largest stage, in its newest sessions: samples do not say of which stage they are."""
    foretold = max((stage["memory"]["process"] for stage in stages if stage["memory"]), default=0)
    came = [
        value
        for row in sessions.of_run(engine, run.id, limit=SESSIONS_SEEN)
        for sample in samples.series(engine, row.id, row.started_at - timedelta(hours=1), samples.HOUR)
        for key, value in sample.values.items()
        if re.fullmatch(r"rank\d+\.rss_peak\.max", key)
    ]
    if foretold and came:
        yield Held("", "a rank's process", foretold, max(came), is_bytes=True)
