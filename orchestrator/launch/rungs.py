"""What is remembered of the memory ladder: which rungs hold for the next attempt, and which one follows an attempt that
ended for want of memory.

Every rung is a row of a run, its stage, the device and the number of ranks: the step before which something changed, and
to what. So the rows are a schedule. A step that is done again is done as it was; what a newer rung at an earlier step
has overtaken drops out. What a launch alone can change (workers, pinned memory, the allocator, arguments) holds from
the beginning, as it stands last. What changes the result holds for the run on any device; the rest belongs to the device
and number of ranks that it was found out on, and another run of the plan begins there with what worked last.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

from sqlalchemy import Engine

from db import checkpoints as checkpoint_rows
from db import rungs as rows
from db import sessions
from db.records import RungInfo, RunInfo
from orchestrator.checkpoint.folder import readable_checkpoints
from orchestrator.checkpoint.manifest import Adjustment, Manifest
from orchestrator.core import memory_ladder, training_health
from orchestrator.core.codes import EventKind
from orchestrator.core.memory_ladder import Facts, Settings
from orchestrator.plan import Plan
from orchestrator.protocol.messages import RungApplied
from orchestrator.snapshots import keeper_client
from orchestrator.system.paths import check_result_path, home_of_folder

ANEW = "begins_anew"
"""Marks the row of a rung with which the stage's weights no longer fit."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where rungs hold: a stage on a device with so many ranks."""

    stage: str
    device: str
    world: int


@dataclass(frozen=True, slots=True)
class Standing:
    """What an attempt begins with.

    Attributes:
        settings: the plan's own, with what a launch alone can change.
        schedule: what changes before which step (LaunchSpec).
        now: all that the newest rung led to.
    """

    settings: Settings
    schedule: list[dict[str, Any]]
    now: Settings


def check(settings: Any) -> None:
    """Of a row that comes from elsewhere. Raises: ValueError for what no attempt could follow."""
    if not isinstance(settings, dict):
        raise ValueError(f"a rung's settings are {settings!r:.60}")
    if "settings" in settings:
        Settings.of(settings["settings"])
    else:
        training_health.check_change(settings)


def arguments_of(plan: Plan, stage: str) -> tuple[list[Mapping[str, Any]], list[Mapping[str, Any]]]:
    """What the plan's own ladder and remedies may set of a stage's arguments, and what of it begins the stage anew."""
    rungs = [rung for rung in plan.rungs_of(stage) if rung.arguments]
    remedies = [remedy.change["arguments"] for remedy in plan.health.remedies if "arguments" in remedy.change]
    return [*(rung.arguments for rung in rungs), *remedies], [rung.arguments for rung in rungs if rung.begins_anew]


def changes(engine: Engine, run: RunInfo, stage: str) -> list[dict[str, Any]]:
    """`changes` of a launch: the stage's rows, as its checkpoints will tell them to whoever has no database.

    One that no manifest could hold (of another's database) is left out, so that it costs no save.
    """
    found, names = [], [column.name for column in fields(Adjustment)]
    for row in rows.of_run(engine, run.id):
        if row.stage == stage:
            with contextlib.suppress(ValueError):
                document = {name: getattr(row, name) for name in names} | {"at": row.at.isoformat()}
                found.append(asdict(Adjustment.from_document(document)))
    return found


def told_by(described: Manifest) -> tuple[list[dict[str, Any]], list[str]]:
    """Columns of the rows that a checkpoint knows of, perhaps more than any database found with it; what is wrong with others."""
    found, wrong = [], []
    for change in described.changes:
        try:
            check(change.settings)
        except ValueError as error:
            wrong.append(f"the rung {change.rung}: {error}")
            continue
        place = {"stage": described.stage, "plan_hash": described.plan_hash, "at": datetime.fromisoformat(change.at)}
        found.append(asdict(change) | place)
    return found, wrong


def standing(engine: Engine, run: RunInfo, plan: Plan, place: Place) -> Standing:
    """What the run's rungs come to at a place."""
    base, entries = plan.memory.settings, list[dict[str, Any]]()
    here = anywhere = base
    for row in rows.of_run(engine, run.id):
        if row.stage != place.stage:
            continue
        if row.settings.get(ANEW):
            entries.clear()
        if "settings" not in row.settings:
            entries.append({"step": row.step, **row.settings})
            continue
        anywhere = Settings.of(row.settings["settings"])
        if (row.device, row.world) == (place.device, place.world):
            here = anywhere
            entries = [item for item in entries if item["step"] < row.step or "settings" not in item]
            entries.append({"step": row.step, "settings": here})

    def as_launched(found: Settings) -> Settings:
        microbatch = min((size for size in (found.microbatch, base.microbatch) if size is not None), default=None)
        sets = tuple(name for name in anywhere.taken if name.startswith("set "))
        own = tuple(name for name in found.taken if not name.startswith("set "))
        return replace(
            found,
            microbatch=microbatch,
            workers_at_most=here.workers_at_most,
            workers_divided=here.workers_divided,
            pin_memory=here.pin_memory,
            expandable_segments=here.expandable_segments,
            arguments=anywhere.arguments,
            taken=own + sets,
        )

    schedule = [
        item | {"settings": as_launched(item["settings"]).as_dict()} if "settings" in item else item
        for item in sorted(entries, key=lambda item: item["step"])
    ]
    return Standing(as_launched(replace(base, amp=anywhere.amp)), schedule, as_launched(here))


def begin(engine: Engine, run: RunInfo, plan: Plan, session_id: int, place: Place, step: int) -> Standing:
    """The same for an attempt that begins at `step`. At a new place it begins with what worked there for the plan before; else,
    where the plan asks for that, with what was measured there.
    """
    if any((row.stage, row.device, row.world) == _of(place) for row in rows.of_run(engine, run.id)):
        return standing(engine, run, plan, place)
    before = standing(engine, run, plan, place).now
    worked = rows.at(engine, plan_hash=run.plan_hash, **asdict(place)) if plan.memory.ladder else []
    if worked:
        kept = Settings.of(worked[-1].settings["settings"]).kept_result
        if kept != plan.memory.settings:
            kept = replace(kept, amp=before.amp, arguments=before.arguments, taken=(*kept.taken, *before.taken))
            said = ", ".join(kept.said(plan.memory.settings)) or "as the plan begins"
            _add(engine, run, session_id, place, step, said, "it worked for this plan before", kept)
    elif size := _measured(run, plan, place):
        why = "kgorch check measured that it fits"
        _add(engine, run, session_id, place, step, f"microbatch={size}", why, replace(before, microbatch=size))
    return standing(engine, run, plan, place)


def is_unmeasured(engine: Engine, run: RunInfo, plan: Plan, place: Place) -> bool:
    """Whether the plan asks for a measured microbatch, and neither a rung nor a check tells one for that place."""
    if plan.memory.microbatch != "auto" or _measured(run, plan, place) is not None:
        return False
    known = any((row.stage, row.device, row.world) == _of(place) for row in rows.of_run(engine, run.id))
    return not known and not rows.at(engine, plan_hash=run.plan_hash, **asdict(place))


def _measured(run: RunInfo, plan: Plan, place: Place) -> int | None:
    """The microbatch that `kgorch check` chose for a place (fit.even), 0 for a rank's whole share; None without a check of that
    place, or where the plan does not ask for it.
    """
    if plan.memory.microbatch != "auto":
        return None
    tested = next((stage.quick_test_of for stage in plan.stage if stage.name == place.stage), None)
    wanted = replace(place, stage=tested or place.stage)
    with contextlib.suppress(OSError, ValueError, LookupError, TypeError):
        told = json.loads(check_result_path(home_of_folder(run.folder), run.plan_hash).read_text())
        for stage in told["stages"]:
            if (stage["name"], stage["device"], stage["ranks"]) == _of(wanted):
                if stage["memory"] is None:  # it takes no steps
                    return 0
                size, share = stage["memory"]["auto_microbatch"], stage["memory"]["share"]
                return size if isinstance(size, int) and 0 < size < share else 0
    return None


def heard(engine: Engine, run: RunInfo, session_id: int, place: Place, told: RungApplied) -> None:
    """Write down a rung that the ranks took by themselves."""
    _add(
        engine, run, session_id, place, told.step, told.rung, told.why, Settings.of(told.settings),
        up=told.up, changes_result=told.changes_result,
    )  # fmt: skip


def take_next(
    engine: Engine,
    run: RunInfo,
    plan: Plan,
    session_id: int,
    place: Place,
    step: int,
    *,
    where: str,
    why: str,
    attempt: str,
) -> str:
    """Choose the rung for the attempt after one that ended at `step` for want of memory, and write it down.

    Args:
        where: the memory that ran out. attempt: that ended so; asked again for it, the answer is the same.
    Returns: its name; empty when none is left.
    """
    for row in rows.of_run(engine, run.id):
        if row.settings.get("attempt") == attempt:
            return row.rung
    facts, now = _facts(engine, run, place), standing(engine, run, plan, place).now
    found = memory_ladder.next_rung(plan.rungs_of(place.stage), now, plan.memory.settings, facts, where=where)
    if found is None:
        return ""
    rung, after = found
    anew: dict[str, Any] = {"attempt": attempt} | ({ANEW: True} if rung.begins_anew else {})
    at = 0 if rung.begins_anew else step
    _add(engine, run, session_id, place, at, rung.name, why, after, changes_result=rung.changes_result, marks=anew)
    return rung.name


def climbed_in_vain(engine: Engine, run: RunInfo, place: Place) -> int:
    """How often a rung was undone for want of need and one taken again in process, in all runs of the plan at this place."""
    told = rows.at(engine, plan_hash=run.plan_hash, **asdict(place))
    return sum(
        before.up and not after.up and before.run_id == after.run_id and _in_process(before) != _in_process(after)
        for before, after in pairwise(told)
    )


def _in_process(row: RungInfo) -> tuple[Any, ...]:
    found = Settings.of(row.settings["settings"])
    return found.microbatch, found.activation_checkpointing, found.empty_cache


def begun_anew_at(engine: Engine, run_id: str, stage: str) -> RungInfo | None:
    """The newest rung with which the stage's weights no longer fitted."""
    found = [row for row in rows.of_run(engine, run_id) if row.stage == stage and row.settings.get(ANEW)]
    return found[-1] if found else None


def set_aside(engine: Engine, run: RunInfo, stage: str, root: Path) -> None:
    """What a stage that begins anew has left: its checkpoints under `root` into a folder beside it, its snapshots forgotten.

    Nothing is deleted. Safe to repeat: what is newer than the rung stays.
    """
    if not (rung := begun_anew_at(engine, run.id, stage)):
        return
    if not sessions.launched_since(engine, run.id, stage, rung.at):
        folder = Path(run.folder)
        while (held := keeper_client.newest(folder)) and held.stage == stage:
            keeper_client.forget(folder, held.number)
    aside = root.with_name(f"{root.name}~superseded")  # no stage can be named so
    for folder, found in list(readable_checkpoints(root)):
        if found.run_id == run.id and is_overtaken(found, rung.at):
            aside.mkdir(exist_ok=True)
            place = folder.rename(aside / f"{folder.name}-{rung.at:%Y%m%dT%H%M%S}")
            checkpoint_rows.moved(engine, str(folder), str(place))  # the new stage will save at the same steps
    checkpoint_rows.supersede(engine, run.id, stage, before=rung.at, why=f"the stage began anew: {rung.rung}")


def is_overtaken(found: Manifest, at: datetime) -> bool:
    return datetime.fromisoformat(found.created_at) < at


def _add(
    engine: Engine, run: RunInfo, session_id: int, place: Place, step: int, rung: str, why: str, settings: Settings, *,
    up: bool = False, changes_result: bool = False, marks: Mapping[str, Any] | None = None,
) -> None:  # fmt: skip
    rows.add(
        engine, run.id, session_id, plan_hash=run.plan_hash, stage=place.stage, device=place.device, world=place.world,
        step=step, rung=rung, why=why, up=up, changes_result=changes_result,
        settings={"settings": settings.as_dict(), **(marks or {})},
    )  # fmt: skip


def _of(place: Place) -> tuple[str, str, int]:
    return place.stage, place.device, place.world


def _facts(engine: Engine, run: RunInfo, place: Place) -> Facts:
    """As the stage's ranks told them last; of a training that never came so far, or told no sense, the device alone is known."""
    for last in reversed(sessions.told(engine, run.id, EventKind.MEMORY_FACTS)):
        with contextlib.suppress(KeyError, TypeError, ValueError):  # the journal may be another machine's
            if last["stage"] == place.stage:
                numbers = {name: int(last[name]) for name in ("batch", "num_workers", "blocks")}
                return Facts(**numbers, batchnorm=last["batchnorm"] == "True", device=str(last["device"]))
    return Facts(device="cpu" if place.device == "cpu" else "cuda")
