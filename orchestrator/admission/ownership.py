"""Whether the living processes of a run belong to this state folder: users delete lock files, and copy or move whole folders.

Pid, start time and boot id tell that a process is alive (system/process_identity.py). The lock file that it has open tells for
which state folder it works. So the holder of a deleted lock is still recognised, and a copy of a state folder does not take the
processes of the original for its own.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

from sqlalchemy import Engine

from kgorch.core.codes import OVER
from kgorch.db import fleet, runs, sessions
from kgorch.db.rows import AttemptInfo, RunInfo, SessionInfo
from kgorch.errors import KgorchError, StateUnusable
from kgorch.launch import launcher
from kgorch.protocol.codec import ProtocolError
from kgorch.protocol.launch_spec import LaunchSpec
from kgorch.supervisor.recorder import say
from kgorch.system import process_identity
from kgorch.system.paths import lock_path

CHECK_S = 1.0
"""Seconds between two checks of the locks and the run's folder."""

LOCK_DEPTHS = (3, 6)
"""Parts of a lock's path below the state folder: runs/NAME/lock, runs/NAME/NUMBER/attempts/ATTEMPT/lock."""


class InUseElsewhere(KgorchError):
    """The run's processes are alive and work for another state folder."""


def is_live(engine: Engine, home: Path, name: str, *, fresh: bool = False) -> bool:
    """Whether a living process supervises the newest run of that name although we hold its lock: the lock file was deleted, or
    the process is on another machine of the fleet.

    Args:
        fresh: a new run of the name is to begin. That is allowed in a copy of the state folder, too.
    Raises: InUseElsewhere if this state folder is a copy of one whose run is alive.
    """
    run = runs.newest(engine, name)
    last = sessions.last(engine, run.id) if run else None
    if run is None or last is None or last.phase in OVER:
        return False
    if fleet.is_elsewhere(engine, last.machine):
        return fleet.is_leased(engine, last.id)
    lock, pid = lock_path(home, name), last.supervisor_pid
    if pid and pid != os.getpid() and process_identity.is_alive(pid, last.supervisor_started_ticks, last.boot_id):
        if process_identity.has_open_file(pid, lock):
            return True
        if not fresh and (original := _home_of(pid, name)):
            raise _copy_error(home, original, run, last)
    attempt = sessions.last_attempt(engine, last.id)
    if attempt and attempt.outcome is None and not fresh:
        _refuse_training_elsewhere(home, run, last, Path(attempt.folder))
    return False


def refuse_moved(home: Path, run: RunInfo, attempt: AttemptInfo) -> None:
    """Refuse to adopt training whose state folder was moved: its ranks go on to report and save under the former path.

    Raises: InUseElsewhere.
    """
    folder = Path(attempt.folder)
    with contextlib.suppress(OSError, ValueError, TypeError, ProtocolError):
        launched = Path(LaunchSpec.read(folder / "launch.json").folder)
        if not (launched.exists() and launched.samefile(folder)):
            former = launched.parents[len(folder.relative_to(home).parts) - 1]
            raise InUseElsewhere(
                f"the state folder was moved while {run.name} trains, which reports and saves to {former}",
                next_step=f"mv {home} {former}; then kgorch resume {run.name} with KGORCH_HOME={former}",
            )


def _refuse_training_elsewhere(home: Path, run: RunInfo, last: SessionInfo, folder: Path) -> None:
    """Raises: InUseElsewhere if processes of the attempt are alive and work for another state folder."""
    shim = launcher.shim_pid(folder)
    if shim and not launcher.is_running(folder) and (original := _home_of(shim, run.name)):
        raise _copy_error(home, original, run, last)


def _home_of(pid: int, name: str) -> Path | None:
    """The state folder of which the process holds the lock of the run or of an attempt; None if it holds none."""
    with contextlib.suppress(OSError):
        for entry in os.scandir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                parts = Path(str(Path(entry.path).readlink()).removesuffix(" (deleted)")).parts
                for depth in LOCK_DEPTHS:
                    if parts[-depth : 2 - depth] == ("runs", name) and parts[-1] == "lock":
                        return Path(*parts[:-depth])
    return None


def _copy_error(home: Path, original: Path, run: RunInfo, last: SessionInfo) -> InUseElsewhere:
    return InUseElsewhere(
        f"{home} is a copy of the state folder {original}, whose {run.name} still runs",
        f"session {last.number}, {last.phase} at step {last.step} when it was copied",
        next_step=f"KGORCH_HOME={original} kgorch stop {run.name}; then the same command resumes here from what was copied."
        " Or kgorch start PLAN --fresh begins another run here",
    )


class RunFolderMonitor:
    """Notices that the state folder was deleted or moved while a run trains, and tells the user at once."""

    def __init__(self, folder: Path, name: str) -> None:
        self._folder, self._name, self._has_warned = folder, name, False

    def look(self) -> None:
        if not self._has_warned and (problem := self._problem()):
            self._has_warned = True
            say(f"note: {problem}; what it saves from now on may be lost: kgorch stop does not reach it, Ctrl-C does")

    def check(self) -> None:
        """To be called when the session is over. Raises: StateUnusable if it cannot be resumed."""
        self.look()
        was_replaced = "the state folder was deleted or moved during the session, and created again"
        if problem := self._problem() or (was_replaced if self._has_warned else ""):
            raise StateUnusable(
                problem, next_step="kgorch start PLAN resumes from the checkpoints that are left, or begins a new run"
            )

    def _problem(self) -> str:
        # Saves create the run's folder again, so only a file that is written once tells that the former one is gone.
        if (self._folder / "plan.toml").exists():
            return ""
        return f"the state folder {self._folder.parents[2]} is gone, deleted or moved while {self._name} trained"


@contextlib.contextmanager
def call_regularly(*checks: Callable[[], object]) -> Iterator[None]:
    """Call these every CHECK_S on a thread for as long as the block runs."""
    is_over = threading.Event()

    def run() -> None:
        while not is_over.wait(CHECK_S):
            for check in checks:
                check()

    thread = threading.Thread(target=run, name="locks", daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()
