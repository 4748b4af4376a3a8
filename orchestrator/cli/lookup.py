"""What several verbs look up first: the state folder with its database, the run that was named, the plan."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from kgorch.core.codes import RunState
from kgorch.errors import NotFound, PlanError, StateUnusable, nearest
from kgorch.platforms.detect import detect
from kgorch.platforms.profile import Profile
from kgorch.system.file_lock import is_locked
from kgorch.system.paths import check_permissions, state_home

if TYPE_CHECKING:
    from sqlalchemy import Engine

    from kgorch.db.rows import RunInfo
    from kgorch.plan import Plan

MAX_NAMES = 10_000
"""Names of runs that are compared with an unknown one, to suggest what was meant."""


def open_state() -> tuple[Profile, Path, Engine]:
    """The detected platform, the state folder, and its database, which is created or migrated where needed."""
    from kgorch.db.engine import open_database

    profile = detect()
    home = state_home(profile.home)
    check_permissions(home)  # a folder that others may write to decides what code runs
    try:
        return profile, home, open_database(home)
    except StateUnusable as error:
        if names := [path.parent.name for path in sorted(home.glob("runs/*/lock")) if is_locked(path)]:
            error.facts += (f"trained here meanwhile, without it: {', '.join(names)}",)
        raise


def find_run(engine: Engine, name: str | None) -> RunInfo:
    """The newest run of this name, or NAME/NUMBER; the newest of all where `name` is None.

    Raises: NotFound.
    """
    from kgorch.db import runs

    if name is None:
        if newest := runs.all_runs(engine, limit=1):
            return newest[0]
        raise NotFound("there is no run yet", next_step="kgorch start plan.toml")
    run = runs.named(engine, name)
    if run is None:
        names = runs.names_with_prefix(engine, limit=MAX_NAMES)
        first_names = ", ".join(names[:20]) + (" and more" if len(names) > 20 else "")
        raise NotFound(f"there is no run named {name!r}{nearest(name, names)}", f"runs: {first_names or 'none'}")
    return run


def load_plan(path: Path, overrides: Sequence[str] = ()) -> tuple[Plan, str]:
    """The plan at `path` and its text.

    Raises: PlanError; where the file was deleted, it names the run that stores a copy.
    """
    from kgorch.plan import load

    if not os.path.lexists(path) and (run := _run_of_missing_plan(path)):
        raise PlanError(
            f"there is no plan {path.absolute()}",
            f"the run {run.name!r}, which was started in that folder, stores a copy: {Path(run.folder) / 'plan.toml'}",
            next_step=f"kgorch resume {run.name}",
            error_code="KG102",
        )
    return load(path, overrides)


def _run_of_missing_plan(path: Path) -> RunInfo | None:
    """The unfinished run that was started from a plan which no longer exists; None unless only one run fits.

    A mistyped name must not lead to another training. So the missing file must be called plan.toml, or like the run, and the
    folder must hold no other TOML file, which may be the one that was meant.
    """
    profile = detect()
    home = state_home(profile.home)
    folder = path.absolute().parent
    if not (home / "kgorch.db").exists() or any(folder.glob("*.toml")):
        return None
    from kgorch.db import runs
    from kgorch.db.engine import open_database

    unfinished = [
        run for run in runs.all_runs(open_database(home)) if run.workdir == str(folder) and run.state == RunState.ACTIVE
    ]
    candidates = [run for run in unfinished if run.name == path.stem or path.name == "plan.toml"]
    return candidates[0] if len(candidates) == 1 else None
