"""What several verbs begin with: the state folder, its database, the run meant."""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import click

from orchestrator.cli import completion
from orchestrator.core import time_parsing
from orchestrator.core.codes import RunState
from orchestrator.errors import NotFound, PlanError, nearest
from orchestrator.platforms.detect import detect
from orchestrator.platforms.profile import Profile
from orchestrator.system.paths import check_permissions, state_home

if TYPE_CHECKING:
    from sqlalchemy import Engine

    from db.records import RunInfo
    from orchestrator.plan import Plan

json_option = click.option(
    "--json", "as_json", is_flag=True, help="Print JSON; its fields are a promise (docs/json.md)."
)


NAMES = 10_000
"""Among how many the one that was meant is sought, once a name is not known."""

run_argument = click.argument("run", required=False, metavar="[RUN]", shell_complete=completion.runs)


def _plan_path(ctx: click.Context, parameter: click.Parameter, typed: str | None) -> Path | None:
    """The plan that was named, else plan.toml of this folder. Raises: click.UsageError."""
    if typed is None and ctx.resilient_parsing:
        return None
    if typed is None and not os.path.lexists("plan.toml"):
        raise PlanError(
            "no plan is named, and there is no plan.toml in this folder",
            next_step=f"{ctx.command_path} PLAN; or kgorch init, which writes a plan.toml and a train.py",
        )
    return Path(typed or "plan.toml")


plan_argument = click.argument(
    "plan", required=False, metavar="[PLAN]", callback=_plan_path, shell_complete=completion.plans
)
"""PLAN, plan.toml where it is left out."""

set_option = click.option(
    "--set",
    "overrides",
    multiple=True,
    metavar="KEY=VALUE",
    shell_complete=completion.settings,
    help="Override a value of the plan. Stages by name: stage.train.args.epochs=3.",
)


def load_plan(path: Path, overrides: Sequence[str] = ()) -> tuple[Plan, str]:
    """The plan at `path` and its text; where there is none, which run keeps a copy of it.

    Raises: PlanError.
    """
    from orchestrator.plan import load

    if not os.path.lexists(path) and (run := _run_of_missing(path)):
        raise PlanError(
            f"there is no plan {path.absolute()}",
            f"the run {run.name!r}, begun in that folder, keeps a copy of its own: {Path(run.folder) / 'plan.toml'}",
            next_step=f"kgorch resume {run.name}",
        )
    return load(path, overrides)


def _run_of_missing(path: Path) -> RunInfo | None:
    """The run that was begun by a plan which is gone: not finished or failed, and the only one that it can be.

    A name that is only mistyped must not lead to another training: so the file is called plan.toml, or as the run is.
    """
    profile = detect()
    home = state_home(profile.home)
    folder = path.absolute().parent
    if not (home / "kgorch.db").exists() or any(folder.glob("*.toml")):
        return None
    from db import runs
    from db.engine import open_database

    known = [
        run for run in runs.everyone(open_database(home)) if run.workdir == str(folder) and run.state == RunState.ACTIVE
    ]
    named = [run for run in known if run.name == path.stem or path.name == "plan.toml"]
    return named[0] if len(named) == 1 else None


def as_instant(ctx: click.Context, parameter: click.Parameter, typed: str | None) -> datetime | None:
    try:
        return None if typed is None else time_parsing.parse_future_time(typed, datetime.now(UTC))
    except ValueError as error:
        raise click.BadParameter(str(error)) from None


until_option = click.option(
    "--until",
    metavar="TIME",
    callback=as_instant,
    help="When this session shall be over: 18:30 (the next one), or 2026-11-22T03:00+01:00.",
)


def state() -> tuple[Profile, Path, Engine]:
    """The platform, the state folder and its database, made or migrated where needed."""
    from db.engine import open_database

    profile = detect()
    home = state_home(profile.home)
    check_permissions(home)
    return profile, home, open_database(home)


def find_run(engine: Engine, name: str | None) -> RunInfo:
    """The newest run of that name, or of any.

    Raises: NotFound.
    """
    from db import runs

    if name is None:
        if newest := runs.everyone(engine, limit=1):
            return newest[0]
        raise NotFound("there is no run yet", next_step="kgorch start plan.toml")
    plain, slash, number = name.rpartition("/")
    found = runs.newest(engine, name)
    if found is None and slash and number.isdecimal() and len(number) < 10:
        found = runs.numbered(engine, plain, int(number))
    if found is None:
        names = runs.names(engine, limit=NAMES)
        shown = ", ".join(names[:20]) + (" and more" if len(names) > 20 else "")
        raise NotFound(f"there is no run named {name!r}{nearest(name, names)}", f"runs: {shown or 'none'}")
    return found
