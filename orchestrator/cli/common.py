"""What several verbs begin with: the state folder, its database, the run meant."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import click

from orchestrator.core import instants
from orchestrator.errors import NotFound, nearest
from orchestrator.platforms.detect import detect
from orchestrator.platforms.profile import Profile
from orchestrator.runtime.home import check_safe, home_of

if TYPE_CHECKING:
    from sqlalchemy import Engine

    from db.records import RunInfo

json_option = click.option(
    "--json", "as_json", is_flag=True, help="Print JSON; its fields are a promise (docs/json.md)."
)


def _complete_run(ctx: click.Context, parameter: click.Parameter, typed: str) -> list[str]:
    try:
        from db import runs

        _, _, engine = state()
        return runs.names(engine, beginning=typed, limit=100)
    except Exception:  # completion never disturbs a shell
        return []


NAMES = 10_000
"""Among how many the one that was meant is sought, once a name is not known."""

run_argument = click.argument("run", required=False, metavar="[RUN]", shell_complete=_complete_run)


def as_instant(ctx: click.Context, parameter: click.Parameter, typed: str | None) -> datetime | None:
    try:
        return None if typed is None else instants.until(typed, datetime.now(UTC))
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
    home = home_of(profile)
    check_safe(home)
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
