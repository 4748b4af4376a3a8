"""Whether what still runs of a run belongs to this state folder: people delete lock files, and copy or move whole folders.

A pid with its start and boot says that a process lives (system/process_identity.py), the lock's file that it has open says for
which folder it works. So a lock that was deleted keeps its holder, and a copy of the folder does not get the original's processes.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

from sqlalchemy import Engine

from db import runs, sessions
from db.records import AttemptInfo, RunInfo, SessionInfo
from orchestrator.core.codes import OVER
from orchestrator.errors import KgorchError, StateUnusable
from orchestrator.launch import launcher
from orchestrator.protocol.codec import ProtocolError
from orchestrator.protocol.launch_spec import LaunchSpec
from orchestrator.supervisor.recorder import say
from orchestrator.system import process_identity
from orchestrator.system.paths import lock_path

LOOK_S = 1.0


class ElsewhereInUse(KgorchError):
    """What the database tells of runs for another state folder."""


def is_live(engine: Engine, home: Path, name: str, *, fresh: bool = False) -> bool:
    """Whether the newest run of that name is supervised by a living process, though its lock is ours: that was deleted.

    Args:
        fresh: another run of the name is to begin, which a copy of the folder may have.
    Raises: ElsewhereInUse where this folder is a copy of one whose run is under way.
    """
    run = runs.newest(engine, name)
    last = sessions.last(engine, run.id) if run else None
    if run is None or last is None or last.phase in OVER:
        return False
    lock, pid = lock_path(home, name), last.supervisor_pid
    if pid and pid != os.getpid() and process_identity.is_alive(pid, last.supervisor_started_ticks, last.boot_id):
        if process_identity.has_open_file(pid, lock):
            return True
        if not fresh and (original := _home_of(pid, name)):
            raise _copied(home, original, run, last)
    attempt = sessions.last_attempt(engine, last.id)
    if attempt and attempt.outcome is None and not fresh:
        _refuse_training_elsewhere(home, run, last, Path(attempt.folder))
    return False


def refuse_moved(home: Path, run: RunInfo, attempt: AttemptInfo) -> None:
    """A training that is to be taken over reports and saves to where its launch said.

    Raises: ElsewhereInUse when that is another folder.
    """
    folder = Path(attempt.folder)
    with contextlib.suppress(OSError, ValueError, TypeError, ProtocolError):
        told = Path(LaunchSpec.read(folder / "launch.json").folder)
        if not (told.exists() and told.samefile(folder)):
            former = told.parents[len(folder.relative_to(home).parts) - 1]
            raise ElsewhereInUse(
                f"the state folder was moved while {run.name} trains, which reports and saves to {former}",
                next_step=f"mv {home} {former}; then kgorch resume {run.name} with KGORCH_HOME={former}",
            )


def _refuse_training_elsewhere(home: Path, run: RunInfo, last: SessionInfo, folder: Path) -> None:
    """Raises: ElsewhereInUse when the attempt's processes live, and not for this folder."""
    shim = launcher.written_shim(folder)
    if shim and not launcher.is_running(folder) and (original := _home_of(shim, run.name)):
        raise _copied(home, original, run, last)


def _home_of(pid: int, name: str) -> Path | None:
    """The state folder whose lock of the run, or of an attempt of it, that process holds."""
    with contextlib.suppress(OSError):
        for entry in os.scandir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                parts = Path(str(Path(entry.path).readlink()).removesuffix(" (deleted)")).parts
                for back in (3, 6):  # …/runs/NAME/lock, …/runs/NAME/NUMBER/attempts/ATTEMPT/lock
                    if parts[-back : 2 - back] == ("runs", name) and parts[-1] == "lock":
                        return Path(*parts[:-back])
    return None


def _copied(home: Path, original: Path, run: RunInfo, last: SessionInfo) -> ElsewhereInUse:
    return ElsewhereInUse(
        f"{home} is a copy of the state folder {original}, whose {run.name} still runs",
        f"session {last.number}, {last.phase} at step {last.step} when it was copied",
        next_step=f"KGORCH_HOME={original} kgorch stop {run.name}; then the same again goes on here from what was copied."
        " Or start PLAN --fresh for a run of its own",
    )


class Kept:
    """Whether the run still lies where it lay: who deletes the state folder while a run trains is told so at once."""

    def __init__(self, folder: Path, name: str) -> None:
        self._folder, self._name, self._is_told = folder, name, False

    def look(self) -> None:
        if not self._is_told and self._gone():
            self._is_told = True
            say(
                f"note: {self._gone()}; what it saves from now on may be lost: kgorch stop does not reach it, Ctrl-C does"
            )

    def check(self) -> None:
        """At the session's end. Raises: StateUnusable for one that cannot be gone on with."""
        self.look()
        if gone := self._gone() or (self._is_told and "the state folder was deleted or moved meanwhile, and made anew"):
            raise StateUnusable(
                str(gone), next_step="kgorch start PLAN goes on from what checkpoints are left, or begins anew"
            )

    def _gone(self) -> str:
        if (self._folder / "plan.toml").exists():  # the folder itself is made anew by what is saved there
            return ""
        return f"the state folder {self._folder.parents[2]} is gone, deleted or moved while {self._name} trained"


@contextlib.contextmanager
def held(*holds: Callable[[], object]) -> Iterator[None]:
    """Look after locks regularly, on a thread, for as long as the block runs."""
    is_over = threading.Event()

    def look() -> None:
        while not is_over.wait(LOOK_S):
            for hold in holds:
                hold()

    thread = threading.Thread(target=look, name="locks", daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()
