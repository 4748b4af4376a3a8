"""All figures of a run's report: the fields that `kgorch report --json` promises (docs/json.md).

It reads the database and the run's files, with the supervisor alive or dead, and years later. Parts that other verbs show are
theirs: `status`, `sessions`, `metrics` and `checks` are what `kgorch status`, `history` and `metrics` show.
"""

from __future__ import annotations

import contextlib
import shlex
import tomllib
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path

from sqlalchemy import Engine

from kgorch.admission.resolve_run import load_stored_plan
from kgorch.checkpoint import folder as checkpoint_folder
from kgorch.checkpoint.export import name_of_export
from kgorch.core.codes import CheckpointState
from kgorch.core.plan_compatibility import flat_values, shown_value, shown_values
from kgorch.db import checkpoints, sessions
from kgorch.db.rows import AttemptInfo, CheckpointInfo, RunInfo, SessionInfo
from kgorch.errors import KgorchError
from kgorch.protocol.codec import ProtocolError
from kgorch.protocol.launch_spec import LaunchSpec
from kgorch.report import check_comparison, curves, forecast, metrics, run_problems, run_view, timeline
from kgorch.report.json_fields import View, stamp
from kgorch.report.metrics import RunMetrics
from kgorch.system.paths import home_of_folder

MAX_SESSIONS, MAX_CHECKPOINTS, MAX_PROBLEMS = 200, 100, 200
"""Newest of each in a report."""

MAX_CURVES = 24
"""Metrics that have a curve; the table of metrics has all."""

MAX_FORECASTS = 400


def of_run(engine: Engine, run: RunInfo, now: datetime | None = None) -> View:
    """The report of a run. What cannot be read (a plan that is no plan any more, a manifest) is left out."""
    now = now or datetime.now(UTC)
    rows = sessions.of_run(engine, run.id)
    attempts = sessions.attempts(engine, run.id)
    saved = checkpoints.of_run(engine, run.id)
    curve = metrics.of_run(engine, run)
    problems = run_problems.of_run(engine, run, rows, attempts)
    plan, plan_error = _plan(run)
    return {
        "run": run.name,
        "run_number": run.number,
        "made_at": stamp(now),
        "created_at": stamp(run.created_at),
        "finished_at": stamp(run.finished_at),
        "trained_s": sum(_lasted_s(row, now) for row in rows),
        "status": run_view.of_run(engine, run, now=now),
        "sessions": run_view.history(engine, run, limit=MAX_SESSIONS),
        "sessions_total": len(rows),
        "timeline": timeline.of_run(engine, run, now),
        "metrics": metrics.table(curve),
        "curves": _curves(curve),
        "resumes": _resumes(attempts),
        "problems": problems[-MAX_PROBLEMS:],
        "problems_total": len(problems),
        "forecasts": _forecasts(engine, run),
        "checks": [
            item._asdict() for item in check_comparison.compare_with_run(engine, run, home_of_folder(run.folder))
        ],
        "checkpoints": _checkpoints(saved),
        "checkpoints_total": len(saved),
        "environment": _environment(engine, run, rows, attempts),
        "plan": plan,
        "plan_error": plan_error,
        "plan_hash": run.plan_hash,
        "overrides": len(run.overrides),
        "commands": _commands(run, saved),
    }


def _lasted_s(row: SessionInfo, now: datetime) -> float:
    """Never less than 0: the wall clock may have been set back."""
    until = row.ended_at or row.heartbeat_at or row.started_at
    return max(0.0, (until - row.started_at).total_seconds())


def _resumes(attempts: Sequence[AttemptInfo]) -> list[View]:
    """Where later attempts of a stage continued: marks on its curves."""
    return [{"stage": item.stage, "step": item.first_step} for item in attempts if item.first_step > 0]


def _forecasts(engine: Engine, run: RunInfo) -> View:
    """The forecasts that were made, and how they compare with the end."""
    past, made = forecast.accuracy(engine, run), forecast.course(engine, run)
    return {
        "count": past.forecasts if past else len(made),
        "in_range": past.in_range if past else None,
        "median_error": round(past.median_error, 4) if past else None,
        "made": made[-MAX_FORECASTS:],
    }


def _checkpoints(saved: Sequence[CheckpointInfo]) -> list[View]:
    """The newest ones that exist: retention has deleted most of the others."""
    chosen = [item for item in saved if item.state != CheckpointState.DROPPED][-MAX_CHECKPOINTS:]
    return [
        {
            "stage": item.stage,
            "step": item.step,
            "state": item.state,
            "final": item.final,
            "best": item.best or None,
            "bytes": item.bytes,
            "save_s": round(item.save_duration_s, 3),
            "at": stamp(item.created_at),
            "path": item.path,
        }
        for item in sorted(chosen, key=lambda item: item.created_at)
    ]


def _environment(
    engine: Engine, run: RunInfo, rows: Sequence[SessionInfo], attempts: Sequence[AttemptInfo]
) -> list[View]:
    """What the training ran with, as `what` and `value`; what is not known is left out."""
    facts: dict[str, str] = _device(attempts[-1]) if attempts else {}
    facts["sites"] = ", ".join(dict.fromkeys(row.site for row in rows))
    facts = {**_versions(engine, run), **facts}
    facts |= {"working folder": run.workdir, "state folder": run.folder, "checkpoints": run.checkpoints}
    if run.pool:
        facts["quota"] = run.pool
    return [{"what": what, "value": value} for what, value in facts.items() if value]


def _device(attempt: AttemptInfo) -> dict[str, str]:
    """Of the attempt's own machine, which need not be this one."""
    facts = {"ranks": str(attempt.ranks)}
    with contextlib.suppress(OSError, ValueError, TypeError, ProtocolError):
        facts["device"] = LaunchSpec.read(Path(attempt.folder) / "launch.json").device
    return facts


def _versions(engine: Engine, run: RunInfo) -> Mapping[str, str]:
    newest = checkpoints.newest_verified(engine, run.id)
    if newest is None:
        return {}
    try:
        return checkpoint_folder.read_manifest(Path(newest.path)).versions
    except (KgorchError, OSError):
        return {}


def _plan(run: RunInfo) -> tuple[list[View], str | None]:
    """Its values by dotted key, secrets left out; and why there are none."""
    try:
        values = shown_values(load_stored_plan(run).model_dump(mode="json", exclude_defaults=True))
    except (KgorchError, LookupError) as error:
        return [], str(error).splitlines()[0]
    return [{"key": key, "value": value} for key, value in values.items()], None


def _commands(run: RunInfo, saved: Sequence[CheckpointInfo]) -> list[View]:
    """What to type to train it again, and to get its result, with the reason of each."""
    plan = f"{run.name}.run{run.number}.toml"  # the folder may have a newer plan under the run's own name
    overrides = [(key, _shown(key, value)) for key, _, value in (item.partition("=") for item in run.overrides)]
    options = "".join(f" --set {shlex.quote(f'{key}={value}')}" for key, value in overrides)
    commands = [
        (f"cd {shlex.quote(run.workdir)}", "the plan's paths are relative to its folder"),
        (f"cp {shlex.quote(str(Path(run.folder) / 'plan.toml'))} {shlex.quote(plan)}", "the plan as the run stores it"),
        (f"kgorch start {shlex.quote(plan)} --fresh{options}", "trains anew, by the same plan and seed"),
    ]
    if verified := [item for item in saved if item.state == CheckpointState.VERIFIED]:
        out = name_of_export(Path(verified[-1].path))
        export = f"kgorch checkpoints export {shlex.quote(run.name)} {shlex.quote(out)}"
        commands.append((export, "writes the weights of the newest checkpoint to a file"))
    return [{"command": command, "what": what} for command, what in commands]


def _shown(key: str, text: str) -> str:
    """The value of an override; "…" where it, or a part of it, may be secret."""
    with contextlib.suppress(tomllib.TOMLDecodeError):
        parts = flat_values({key: tomllib.loads(f"value = {text}")["value"]})
        if any(shown_value(*part) == "…" for part in parts):
            return "…"
    return shown_value(key, text)


def _curves(curve: RunMetrics) -> list[View]:
    """Charts over steps. Where the plan does not say which direction is better, the mode is that of the table of metrics."""
    found = curves.charts(curve, axis="step", names=tuple(curve.names[:MAX_CURVES]))
    modes = {item["name"]: item["mode"] for item in found["table"]}
    return [chart | {"mode": chart["mode"] or modes.get(chart["name"])} for chart in found["charts"]]
