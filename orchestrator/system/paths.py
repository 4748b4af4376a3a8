"""Paths of the state folder: `$KGORCH_HOME`, else the platform's persistent folder, else the XDG state folder.

kgorch.db
checks/PLAN_HASH-ORIGIN.json      what the last `kgorch check` of a plan measured
foreign/                          which run the checkpoints of foreign programs belong to (worker/foreign/claim.py)
runs/NAME/lock                    held by the live supervisor of a run of that name
runs/NAME/NUMBER/                 one run
    plan.toml                     its own copy
    control.sock                  where ranks report and the command line asks
    checkpoints/STAGE/step-…      (or under the plan's checkpoint.dir)
    attempts/SESSION.NUMBER/      launch.json, lock, logs and records of one launch
    outputs/                      what the run makes
    cached/NAME.json              what it computes once (worker/data/value_cache.py)
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import pwd
import re
import stat
from collections.abc import Mapping
from pathlib import Path

from kgorch.core.names import NAME_PATTERN
from kgorch.errors import NotFound, StateUnusable


def state_home(
    platform_folder: Path | None, environ: Mapping[str, str] = os.environ, *, account: str | None = None
) -> Path:
    """The state folder, absolute; it need not exist.

    Args:
        platform_folder: the platform's folder that outlives a session (platforms.profile.Profile.home); None for none.
        account: name of the user whose folder it is; None for the user of this process.
    Raises: StateUnusable.
    """
    if value := environ.get("KGORCH_HOME"):
        try:  # expanded here, too: in a unit or a Dockerfile no shell has expanded the ~
            return Path(value).expanduser().absolute()
        except RuntimeError:
            raise StateUnusable(
                f"KGORCH_HOME={value!r} names the home of a user that does not exist",
                next_step="point KGORCH_HOME at a folder that can be written",
            ) from None
    if platform_folder:
        return platform_folder
    return Path(environ.get("XDG_STATE_HOME") or _user_folder(account) / ".local" / "state").absolute() / "kgorch"


def _user_folder(account: str | None) -> Path:
    """Home folder from the account database: under sudo, $HOME is often root's."""
    if account:
        with contextlib.suppress(KeyError):  # an account that does not exist is reported by whoever uses it
            entry = pwd.getpwnam(account)
            return Path.home() if entry.pw_uid == os.geteuid() else Path(entry.pw_dir)
    return Path.home()


def check_permissions(home: Path) -> None:
    """Refuse a state folder that other users may write to: they could put a socket, a database or a lock there.

    Raises: StateUnusable.
    """
    try:
        mode = home.stat().st_mode
    except OSError:
        return  # created by us later, or reported as unusable then
    if mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise StateUnusable(
            f"other users of this machine may write to the state folder {home}",
            f"its mode is {stat.S_IMODE(mode):04o}: they could make kgorch run their programs",
            next_step=f"chmod go-w {home}",
            error_code="KG605",
        )


def lock_path(home: Path, name: str) -> Path:
    """The lock that the supervisor of a run of that name holds. Raises: NotFound."""
    return _name_folder(home, name) / "lock"


def check_result_path(home: Path, plan_hash: str, name: str, workdir: str) -> Path:
    """What the last `kgorch check` of a plan measured.

    Args:
        name, workdir: of its run, and of the plan's folder: the hash alone may be another project's as well.
    """
    origin = hashlib.sha256(f"{name}\0{workdir}".encode(errors="surrogateescape")).hexdigest()[:16]
    return home / "checks" / f"{plan_hash}-{origin}.json"


def run_folder(home: Path, name: str, number: int) -> Path:
    """Raises: NotFound for a name that is none of a run."""
    return _name_folder(home, name) / str(number)


def _name_folder(home: Path, name: str) -> Path:
    """The name may come from a command line or from a changed row: the pattern keeps the path inside `home`."""
    if not re.fullmatch(NAME_PATTERN, name):
        raise NotFound(
            f"there is no run named {name[:100]!r}",
            "a run's name has up to 64 letters, digits, dots, underscores and hyphens",
            next_step="`kgorch status` lists the runs",
        )
    return home / "runs" / name


def home_of_folder(folder: str) -> Path:
    """The state folder that a run's folder is in. Raises: ValueError for what is no run's folder."""
    path = Path(folder)
    if not path.is_absolute() or path.parts[-3:-2] != ("runs",):
        raise ValueError("expected a run's folder, as /…/runs/NAME/NUMBER")
    return path.parents[2]


def check_stored_folder(text: str) -> None:
    """Check that the text of a row is a run's folder, relative or absolute (db/tables.py). Raises: ValueError."""
    home_of_folder(text if text.startswith("/") else f"/home/{text}")


def last_run_number(home: Path, name: str) -> int:
    """Highest number of a run of that name with checkpoints or attempts on disk, whatever the database knows; 0 for none."""
    folders = [path for path in _name_folder(home, name).glob("[0-9]*") if path.name.isdecimal()]
    return max((int(folder.name) for folder in folders if _has_content(folder)), default=0)


def _has_content(folder: Path) -> bool:
    """An incomplete copy of a checkpoint does not count; its name has a dot."""
    checkpoints = (path for path in folder.glob("checkpoints/*/step-*") if "." not in path.name)
    return next(folder.glob("attempts/*"), None) is not None or next(checkpoints, None) is not None


def make_run_folder(home: Path, name: str, number: int, plan: str) -> Path:
    """Create the folder of a run, with the text of its plan in it.

    Raises: StateUnusable.
    """
    folder = run_folder(home, name, number)
    try:
        for part in ("attempts", "outputs"):
            (folder / part).mkdir(parents=True, exist_ok=True)
        (folder / "plan.toml").write_text(plan)
    except OSError as error:
        raise StateUnusable(
            f"the folder of run {name!r} cannot be created",
            str(error),
            next_step="point KGORCH_HOME at a folder that can be written",
        ) from None
    return folder


def checkpoints_folder(folder: Path, workdir: Path, checkpoint_dir: str | None, name: str, run_id: str) -> Path:
    """Where a run writes its checkpoints, for as long as it lives.

    The plan's own `checkpoint.dir` may be shared by runs of several state folders, so the run's id is part of the path there.
    """
    return workdir / checkpoint_dir / f"{name}-{run_id}" if checkpoint_dir else folder / "checkpoints"
