"""The rungs of the memory ladder as rows: which settings the next attempt has, and which rung follows one that ran out of memory.

A rung is a row of a run, a stage, a device and a number of ranks: the step before which the settings changed, and the settings
after it. In the order of their steps the rows are a schedule. A step that is done again has the settings that it had the first
time, so a crash after a rung does not show in the result; rows of the same or a later step than a newer row are dropped from the
schedule.

Settings that only a launch can change (loading workers, pinned memory, the allocator, arguments) hold for the whole attempt, as
the newest row has them. What changes the result holds for the run on any device, and for no other run. All else holds for the
device and the number of ranks on which memory ran out, and another run of the plan begins there with what worked last.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

from sqlalchemy import Engine

from kgorch.checkpoint.folder import readable_checkpoints
from kgorch.checkpoint.manifest import Adjustment, Manifest
from kgorch.core.codes import EventKind
from kgorch.core.health import training_health
from kgorch.core.memory import memory_ladder
from kgorch.core.memory.memory_ladder import MemoryFacts, Settings
from kgorch.db import checkpoints as checkpoint_rows
from kgorch.db import rungs as rows
from kgorch.db import sessions
from kgorch.db.rows import RungInfo, RunInfo
from kgorch.plan import Plan
from kgorch.protocol.messages import RungApplied
from kgorch.snapshots import keeper_client
from kgorch.system.paths import check_result_path, home_of_folder

ANEW = "begins_anew"
"""Key of a row's settings: after this rung the stage's weights do not fit any more, and the stage begins anew."""

COLUMNS = {"world": "world_size"}
"""Field of an Adjustment → column of its row, where they differ: manifests keep the name that older versions wrote."""


@dataclass(frozen=True, slots=True)
class RungScope:
    """Where a rung holds: a stage, the model of the GPUs (devices.model_name) and the number of ranks."""

    stage: str
    device: str
    world_size: int


@dataclass(frozen=True, slots=True)
class LaunchSettings:
    """The memory settings of an attempt.

    Attributes:
        settings: the plan's own, with what only a launch can change.
        schedule: the changes, each with the step before which it holds (LaunchSpec.schedule).
        now: the settings after the newest rung.
    """

    settings: Settings
    schedule: list[dict[str, Any]]
    now: Settings


@dataclass(frozen=True, slots=True)
class MemoryShortage:
    """An attempt that ended because memory ran out.

    Attributes:
        session_id: of the attempt's session.
        attempt: its name, as "3.1".
        scope: for which the next rung is chosen.
        step: at which it failed.
        where: the memory that ran out: memory_ladder.DEVICE or HOST.
        why: its first error, for people.
    """

    session_id: int
    attempt: str
    scope: RungScope
    step: int
    where: str
    why: str


@dataclass(frozen=True, slots=True)
class _RungChange:
    """A rung that is about to be written down.

    Attributes:
        step: before which the settings change.
        rung: its name.
        why: the reason, for people.
        settings: after it.
        up: it undoes a rung.
        changes_result: the training computes something else from here on.
        marks: what is kept beside the settings in the row.
    """

    step: int
    rung: str
    why: str
    settings: Settings
    up: bool = False
    changes_result: bool = False
    marks: Mapping[str, Any] = field(default_factory=dict)


def check(settings: Any) -> None:
    """Check the settings of a row from another database. Raises: ValueError for those that no attempt could follow."""
    if not isinstance(settings, dict):
        raise ValueError(f"a rung's settings are {settings!r:.60}")
    if "settings" in settings:
        Settings.from_dict(settings["settings"])
    else:
        training_health.check_change(settings)


def arguments_of(plan: Plan, stage: str) -> tuple[list[Mapping[str, Any]], list[Mapping[str, Any]]]:
    """The arguments of a stage that the plan's own ladder and remedies may set; and those with which the stage begins anew."""
    rungs = [rung for rung in plan.rungs_of(stage) if rung.arguments]
    remedies = [remedy.change["arguments"] for remedy in plan.health.remedies if "arguments" in remedy.change]
    return [*(rung.arguments for rung in rungs), *remedies], [rung.arguments for rung in rungs if rung.begins_anew]


def changes(engine: Engine, run: RunInfo, stage: str) -> list[dict[str, Any]]:
    """The rows of a stage as a launch passes them to the ranks, which write them into each manifest.

    So a run that is found by its checkpoints alone keeps its rungs.
    """
    documents, names = [], [column.name for column in fields(Adjustment)]
    for row in rows.of_run(engine, run.id):
        if row.stage == stage:
            # a row of another's database that no manifest can hold is left out: it would fail each save
            with contextlib.suppress(ValueError):
                document = {name: getattr(row, COLUMNS.get(name, name)) for name in names} | {"at": row.at.isoformat()}
                documents.append(asdict(Adjustment.from_document(document)))
    return documents


def rows_of_manifest(manifest: Manifest) -> tuple[list[dict[str, Any]], list[str]]:
    """Columns of rows for the changes that a checkpoint names, and sentences about those that are not valid."""
    columns, problems = [], []
    for change in manifest.changes:
        try:
            check(change.settings)
        except ValueError as error:
            problems.append(f"the rung {change.rung}: {error}")
            continue
        where = {"stage": manifest.stage, "plan_hash": manifest.plan_hash, "at": datetime.fromisoformat(change.at)}
        columns.append({COLUMNS.get(name, name): value for name, value in asdict(change).items()} | where)
    return columns, problems


def launch_settings(engine: Engine, run: RunInfo, plan: Plan, scope: RungScope) -> LaunchSettings:
    """The settings and the schedule that the run's rows give for a scope."""
    base, entries = plan.memory.settings, list[dict[str, Any]]()
    here = anywhere = base
    for row in rows.of_run(engine, run.id):
        if row.stage != scope.stage:
            continue
        if row.settings.get(ANEW):
            entries.clear()  # all steps are new ones
        if "settings" not in row.settings:  # a remedy (remedies.py): it holds on any device
            entries.append({"step": row.step, **row.settings})
            continue
        anywhere = Settings.from_dict(row.settings["settings"])
        if (row.device, row.world_size) == (scope.device, scope.world_size):
            here = anywhere
            entries = [item for item in entries if item["step"] < row.step or "settings" not in item]
            entries.append({"step": row.step, "settings": here})

    def as_launched(wanted: Settings) -> Settings:
        """With what holds for the whole attempt, whichever step `wanted` is of."""
        microbatch = min((size for size in (wanted.microbatch, base.microbatch) if size is not None), default=None)
        sets = tuple(name for name in anywhere.taken if name.startswith("set "))
        own = tuple(name for name in wanted.taken if not name.startswith("set "))
        return replace(
            wanted,
            microbatch=microbatch,
            workers_at_most=here.workers_at_most,
            workers_divided=here.workers_divided,
            pin_memory=here.pin_memory,
            expandable_segments=here.expandable_segments,
            # arguments change the result: they hold on any device
            arguments=anywhere.arguments,
            taken=own + sets,
        )

    schedule = [
        item | {"settings": as_launched(item["settings"]).as_dict()} if "settings" in item else item
        for item in sorted(entries, key=lambda item: item["step"])
    ]
    return LaunchSettings(as_launched(replace(base, amp=anywhere.amp)), schedule, as_launched(here))


def begin(engine: Engine, run: RunInfo, plan: Plan, session_id: int, scope: RungScope, step: int) -> LaunchSettings:
    """`launch_settings` for an attempt that begins at `step`, in a new scope, too.

    There it begins with what worked for the plan in another run; else, where the plan asks for it, with the microbatch that
    `kgorch check` measured. Either is written down as a rung.
    """
    if any((row.stage, row.device, row.world_size) == _key(scope) for row in rows.of_run(engine, run.id)):
        return launch_settings(engine, run, plan, scope)
    before = launch_settings(engine, run, plan, scope).now
    others = rows.of_hardware(engine, run, **asdict(scope)) if plan.memory.ladder else []
    if others:
        settings = Settings.from_dict(others[-1].settings["settings"]).without_result_changes
        # Of a model with BatchNorm. Later rows, and those of runs that began with them, hold it without the mark.
        if any(row.changes_result and row.rung.startswith("microbatch") for row in others):
            settings = replace(settings, microbatch=plan.memory.settings.microbatch)
        if settings != plan.memory.settings:
            # what changes the result is this run's own: no other run decides it
            rungs = (*settings.taken, *before.taken)
            settings = replace(settings, amp=before.amp, arguments=before.arguments, taken=rungs)
            name = ", ".join(settings.describe(plan.memory.settings)) or "as the plan begins"
            _add(engine, run, session_id, scope, _RungChange(step, name, "it worked for this plan before", settings))
    elif size := _measured_microbatch(run, plan, scope):
        why, settings = "kgorch check measured that it fits", replace(before, microbatch=size)
        _add(engine, run, session_id, scope, _RungChange(step, f"microbatch={size}", why, settings))
    return launch_settings(engine, run, plan, scope)


def is_unmeasured(engine: Engine, run: RunInfo, plan: Plan, scope: RungScope) -> bool:
    """Whether the plan asks for a measured microbatch, and neither a rung nor a check gives one for that scope."""
    if plan.memory.microbatch != "auto" or _measured_microbatch(run, plan, scope) is not None:
        return False
    has_rung = any((row.stage, row.device, row.world_size) == _key(scope) for row in rows.of_run(engine, run.id))
    return not has_rung and not rows.of_hardware(engine, run, **asdict(scope))


def _measured_microbatch(run: RunInfo, plan: Plan, scope: RungScope) -> int | None:
    """The microbatch that `kgorch check` chose for a scope (memory_fit.even_microbatch); 0 for a rank's whole share.

    None without a check of that scope, or where the plan does not ask for it.
    """
    if plan.memory.microbatch != "auto":
        return None
    # a quick test has the microbatch of the stage that it tests: a check probes the stage alone
    full_stage = next((stage.quick_test_of for stage in plan.stage if stage.name == scope.stage), None)
    key = _key(replace(scope, stage=full_stage or scope.stage))
    with contextlib.suppress(OSError, ValueError, LookupError, TypeError):
        result = json.loads(
            check_result_path(home_of_folder(run.folder), run.plan_hash, run.name, run.workdir).read_text()
        )
        for stage in result["stages"]:
            if (stage["name"], stage["device"], stage["ranks"]) == key:
                if stage["memory"] is None:  # it takes no steps
                    return 0
                size, share = stage["memory"]["auto_microbatch"], stage["memory"]["share"]
                return size if isinstance(size, int) and 0 < size < share else 0
    return None


def record_applied(
    engine: Engine,
    run: RunInfo,
    session_id: int,
    scope: RungScope,
    message: RungApplied,
    *,
    at: datetime | None = None,
) -> None:
    """Write down a rung that the ranks have taken by themselves. Args: at: when; None for now."""
    change = _RungChange(
        message.step,
        message.rung,
        message.why,
        Settings.from_dict(message.settings),
        up=message.up,
        changes_result=message.changes_result,
    )
    _add(engine, run, session_id, scope, change, at)


def take_next(engine: Engine, run: RunInfo, plan: Plan, shortage: MemoryShortage) -> str:
    """Choose the rung for the next attempt, and write it down.

    Repeated for the same attempt it returns the same rung: a supervisor that died after the row judges the attempt again.

    Returns: its name; empty when none is left.
    """
    for row in rows.of_run(engine, run.id):
        # the mark travels in manifests: another machine's session may have had an attempt of that name
        if (row.session_id, row.settings.get("attempt")) == (shortage.session_id, shortage.attempt):
            return row.rung
    scope = shortage.scope
    facts, now = _facts(engine, run, scope), launch_settings(engine, run, plan, scope).now
    ladder = plan.rungs_of(scope.stage)
    choice = memory_ladder.next_rung(ladder, now, plan.memory.settings, facts, where=shortage.where)
    if choice is None:
        return ""
    rung, settings = choice
    change = _RungChange(
        0 if rung.begins_anew else shortage.step,
        rung.name,
        shortage.why,
        settings,
        changes_result=rung.changes_result,
        marks={"attempt": shortage.attempt} | ({ANEW: True} if rung.begins_anew else {}),
    )
    _add(engine, run, shortage.session_id, scope, change)
    return rung.name


def count_failed_climbs(engine: Engine, run: RunInfo, scope: RungScope) -> int:
    """How often ranks took a rung again after one was undone, in all runs of the plan in this scope.

    After two of them no rung is undone any more (core/memory/memory_pressure.py).
    """
    history = rows.of_hardware(engine, run, **asdict(scope))
    return sum(
        before.up and not after.up and before.run_id == after.run_id and _in_process(before) != _in_process(after)
        for before, after in pairwise(history)
    )


def _in_process(row: RungInfo) -> tuple[Any, ...]:
    """The settings that ranks change without another launch."""
    settings = Settings.from_dict(row.settings["settings"])
    return settings.microbatch, settings.activation_checkpointing, settings.empty_cache


def last_restart(engine: Engine, run_id: str, stage: str) -> RungInfo | None:
    """The newest rung with which the stage began anew."""
    restarts = [row for row in rows.of_run(engine, run_id) if row.stage == stage and row.settings.get(ANEW)]
    return restarts[-1] if restarts else None


def move_superseded(engine: Engine, run: RunInfo, stage: str, root: Path) -> None:
    """Move the checkpoints under `root` of a stage that begins anew into a folder beside it; forget its snapshots.

    Nothing is deleted. Safe to repeat: what is newer than the rung stays.
    """
    if not (rung := last_restart(engine, run.id, stage)):
        return
    # after the first launch since then a snapshot is of the new beginning
    if not sessions.has_launch_since(engine, rung):
        folder = Path(run.folder)
        while (snapshot := keeper_client.newest(folder)) and snapshot.stage == stage:
            keeper_client.forget(folder, snapshot.number)
    target = root.with_name(f"{root.name}~superseded")  # no stage can have this name
    for folder, manifest in list(readable_checkpoints(root)):
        if manifest.run_id == run.id and manifest.is_older_than(rung.at):
            target.mkdir(exist_ok=True)
            # the new beginning will save at the same steps, so the name is made unique
            moved_to = folder.rename(target / f"{folder.name}-{rung.at:%Y%m%dT%H%M%S}")
            checkpoint_rows.set_path(engine, str(folder), str(moved_to))
    checkpoint_rows.supersede(engine, run.id, stage, before=rung.at, why=f"the stage began anew: {rung.rung}")


def _add(
    engine: Engine, run: RunInfo, session_id: int, scope: RungScope, change: _RungChange, at: datetime | None = None
) -> None:
    rows.add(
        engine, run.id, session_id, at=at, plan_hash=run.plan_hash, stage=scope.stage, device=scope.device,
        world_size=scope.world_size, step=change.step, rung=change.rung, why=change.why, up=change.up,
        changes_result=change.changes_result, settings={"settings": change.settings.as_dict(), **change.marks},
    )  # fmt: skip


def _key(scope: RungScope) -> tuple[str, str, int]:
    return scope.stage, scope.device, scope.world_size


def _facts(engine: Engine, run: RunInfo, scope: RungScope) -> MemoryFacts:
    """The newest facts that the stage's ranks reported; of one that never attached only the kind of device is known."""
    for facts in reversed(sessions.facts_of_kind(engine, run.id, EventKind.MEMORY_FACTS)):
        with contextlib.suppress(KeyError, TypeError, ValueError):  # the journal may be another machine's
            if facts["stage"] == scope.stage:
                numbers = {name: int(facts[name]) for name in ("batch", "num_workers", "blocks")}
                divides = facts.get("divides") != "False"  # earlier versions did not tell
                has_batchnorm, device = facts["batchnorm"] == "True", str(facts["device"])
                return MemoryFacts(**numbers, divides=divides, batchnorm=has_batchnorm, device=device)
    return MemoryFacts(device="cpu" if scope.device == "cpu" else "cuda")
