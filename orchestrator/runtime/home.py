"""Where state lies: `$KGORCH_HOME`, else the platform's folder that outlives the session, else the XDG state folder.

kgorch.db
checks/PLAN_HASH.json             what the last `kgorch check` of a plan measured
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
import fcntl
import os
import pwd
import re
import stat
import time
from collections.abc import Mapping
from pathlib import Path

from db.records import RunInfo
from orchestrator.core.names import NAME
from orchestrator.errors import NotFound, StateUnusable
from orchestrator.platforms.profile import Profile


def home_of(profile: Profile, environ: Mapping[str, str] = os.environ, *, account: str | None = None) -> Path:
    """`account`: whose it is; None for ours. Raises: StateUnusable."""
    if told := environ.get("KGORCH_HOME"):
        try:
            return Path(told).expanduser().absolute()
        except RuntimeError:
            raise StateUnusable(
                f"KGORCH_HOME={told!r} begins with the home of a user that there is not",
                next_step="point KGORCH_HOME at a folder that can be written",
            ) from None
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


def check_safe(home: Path) -> None:
    """Others who may write to the state folder may put a socket, a database or a lock of theirs there.

    Raises: StateUnusable.
    """
    try:
        mode = home.stat().st_mode
    except OSError:
        return  # it is made by us, or said to be unusable, later
    if mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise StateUnusable(
            f"the state folder {home} may be written to by other users of this machine",
            f"its mode is {stat.S_IMODE(mode):04o}: they could have kgorch run what they like",
            next_step=f"chmod go-w {home}",
        )


def lock_path(home: Path, name: str) -> Path:
    """Of the lock that the supervisor of a run of that name holds. Raises: NotFound."""
    return _folder_of(home, name) / "lock"


def check_path(home: Path, plan_hash: str) -> Path:
    """What the last `kgorch check` of a plan measured."""
    return home / "checks" / f"{plan_hash}.json"


def run_folder(home: Path, name: str, number: int) -> Path:
    return _folder_of(home, name) / str(number)


def _folder_of(home: Path, name: str) -> Path:
    """Whoever typed the name, or wrote the row that it stands in: it leads nowhere else."""
    if not re.fullmatch(NAME, name):
        raise NotFound(
            f"there is no run named {name[:100]!r}",
            "a run's name has up to 64 letters, digits, dots, underscores and hyphens",
            next_step="`kgorch status` lists the runs",
        )
    return home / "runs" / name


def home_of_run(run: RunInfo) -> Path:
    """The state folder that its own folder lies in."""
    return home_of_folder(run.folder)


def home_of_folder(folder: str) -> Path:
    """Raises: ValueError for what is no run's folder."""
    path = Path(folder)
    if not path.is_absolute() or path.parts[-3:-2] != ("runs",):
        raise ValueError("expected a run's folder, as /…/runs/NAME/NUMBER")
    return path.parents[2]


def check_kept_folder(kept: str) -> None:
    """That a row's text is a run's folder, relative or absolute (db/tables.py). Raises: ValueError."""
    home_of_folder(kept if kept.startswith("/") else f"/home/{kept}")


def newest_left(home: Path, name: str) -> int:
    """The highest number of a run of that name that has left checkpoints or attempts here, whatever the database knows; 0: none."""
    folders = [path for path in _folder_of(home, name).glob("[0-9]*") if path.name.isdecimal()]
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
    while True:
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return False
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
            held = False
        except BlockingIOError:
            held = True
        lies_there = lies_at(descriptor, path)
        os.close(descriptor)
        if lies_there:  # else it was replaced meanwhile, and what counts is the file that lies there now
            return held


def lies_at(descriptor: int, path: Path) -> bool:
    """Whether the open file is the one under that path: a lock on any other keeps nobody out."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


class Lock:
    """A lock that lives as long as its holder: the kernel lets go of it when the process dies, however it dies.

    People delete lock files that they take for stale. So a lock counts only on the file that lies at its path, and the
    holder looks after it regularly (`hold`).
    """

    ASKED_S = 0.1
    """So long it may be held by processes that only ask whether it is held."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptors: list[int] = []  # the newest last; older ones lie in a folder that was moved

    def take(self) -> bool:
        """True when it is ours now; False when a living process holds it. Raises: StateUnusable."""
        try:
            return self._take(self.ASKED_S)
        except OSError as error:
            raise StateUnusable(
                f"{self.path} cannot be written",
                str(error),
                next_step="point KGORCH_HOME at a folder that can be written",
            ) from None

    def hold(self) -> bool:
        """Whether it is still ours; made so again where its file was deleted or replaced and nobody else has taken it.

        In a folder that was moved it is held where that lies now: nothing is made at the former place.
        """
        if any(lies_at(descriptor, self.path) for descriptor in self._descriptors):
            return True
        remains = any(os.fstat(descriptor).st_nlink for descriptor in self._descriptors)
        if remains and not self.path.parent.exists():
            return True
        try:
            return self._take(0.0)
        except OSError:  # a disk that is full or read-only just now: the next look tries again
            return False

    def release(self) -> None:
        while self._descriptors:
            os.close(self._descriptors.pop())

    def _take(self, patience_s: float) -> bool:
        until = time.monotonic() + patience_s
        while True:
            self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if lies_at(descriptor, self.path):
                    break
            except BlockingIOError:
                if lies_at(descriptor, self.path) and time.monotonic() >= until:
                    os.close(descriptor)
                    return False
                time.sleep(0.005)
            os.close(descriptor)
        for old in [old for old in self._descriptors if os.fstat(old).st_nlink == 0]:
            self._descriptors.remove(old)
            os.close(old)
        self._descriptors.append(descriptor)
        return True
