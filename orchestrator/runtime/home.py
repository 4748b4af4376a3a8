"""Where state lies: `$KGORCH_HOME`, else the platform's folder that outlives the session, else the XDG state folder.

kgorch.db
runs/NAME/lock                    held by the live supervisor of a run of that name
runs/NAME/NUMBER/                 one run
    plan.toml                     its own copy
    control.sock                  where ranks report and the command line asks
    checkpoints/STAGE/step-…      (or under the plan's checkpoint.dir)
    attempts/SESSION.NUMBER/      launch.json, lock, logs and records of one launch
    outputs/                      what the run makes
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import pwd
from collections.abc import Mapping
from pathlib import Path

from db.records import RunInfo
from orchestrator.errors import StateUnusable
from orchestrator.platforms.profile import Profile


def home_of(profile: Profile, environ: Mapping[str, str] = os.environ, *, account: str | None = None) -> Path:
    """`account`: whose it is; None for ours."""
    if told := environ.get("KGORCH_HOME"):
        return Path(told).expanduser().absolute()
    if profile.home:
        return profile.home
    return Path(environ.get("XDG_STATE_HOME") or _persons_folder(account) / ".local" / "state").absolute() / "kgorch"


def _persons_folder(account: str | None) -> Path:
    """By sudo, $HOME is often root's."""
    if account:
        with contextlib.suppress(KeyError):  # an account that there is not is told by who makes use of it
            found = pwd.getpwnam(account)
            return Path.home() if found.pw_uid == os.geteuid() else Path(found.pw_dir)
    return Path.home()


def run_folder(home: Path, name: str, number: int) -> Path:
    return home / "runs" / name / str(number)


def home_of_run(run: RunInfo) -> Path:
    """The state folder that its own folder lies in."""
    return home_of_folder(run.folder)


def home_of_folder(folder: str) -> Path:
    """Raises: ValueError for what is no run's folder."""
    path = Path(folder)
    if not path.is_absolute() or path.parts[-3:-2] != ("runs",):
        raise ValueError("expected a run's folder, as /…/runs/NAME/NUMBER")
    return path.parents[2]


def newest_left(home: Path, name: str) -> int:
    """The highest number of a run of that name that has left checkpoints or attempts here, whatever the database knows; 0: none."""
    folders = [path for path in (home / "runs" / name).glob("[0-9]*") if path.name.isdecimal()]
    return max((int(folder.name) for folder in folders if _holds_something(folder)), default=0)


def _holds_something(folder: Path) -> bool:
    """A checkpoint that is only half copied is nothing; its name has a dot."""
    whole = (path for path in folder.glob("checkpoints/*/step-*") if "." not in path.name)
    return next(folder.glob("attempts/*"), None) is not None or next(whole, None) is not None


def make_run_folder(home: Path, name: str, number: int, plan: str) -> Path:
    """The folder of a run, with the text of its plan in it.

    Raises: StateUnusable.
    """
    folder = run_folder(home, name, number)
    try:
        for part in ("attempts", "outputs"):
            (folder / part).mkdir(parents=True, exist_ok=True)
        (folder / "plan.toml").write_text(plan)
    except OSError as error:
        raise StateUnusable(
            f"the state of {name!r} cannot be written",
            str(error),
            next_step="point KGORCH_HOME at a folder that can be written",
        ) from None
    return folder


def checkpoints_folder(folder: Path, workdir: Path, told: str | None, name: str, run_id: str) -> Path:
    """For as long as the run lives. A folder of the plan's own may be shared by runs of several state folders."""
    return workdir / told / f"{name}-{run_id}" if told else folder / "checkpoints"


def is_held(path: Path) -> bool:
    """Whether a living process holds the lock at `path`; also on a disk that has become read-only."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return False
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)


class Lock:
    """A lock that lives as long as its holder: the kernel lets go of it when the process dies, however it dies."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor: int | None = None

    def take(self) -> bool:
        """True when it is ours now; False when a living process holds it."""
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise StateUnusable(
                f"{self._path} cannot be written",
                str(error),
                next_step="point KGORCH_HOME at a folder that can be written",
            ) from None
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            return False
        self._descriptor = descriptor
        return True

    def release(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
