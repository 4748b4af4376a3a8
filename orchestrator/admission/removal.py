"""Remove a run: its folder, its checkpoints, its rows. What it used of a quota stays counted.

Folders are renamed first, to names that no run and no checkpoint has. Then the rows are deleted, then the folders, manifests
first: a folder without its manifest is no checkpoint. Renamed folders that a kill leaves are deleted by the next removal.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from sqlalchemy import Engine

from kgorch import untrusted_io
from kgorch.checkpoint.manifest import FOLDER_PATTERN, MANIFEST_NAME
from kgorch.core.codes import OVER, REMOTE_OPEN, ResumeState, RunState
from kgorch.core.names import NAME_PATTERN
from kgorch.db import fleet, queue, remote, runs, sessions
from kgorch.db.rows import ResumeInfo, RunInfo, SessionInfo
from kgorch.errors import KgorchError
from kgorch.limits import late_charges
from kgorch.slurm import jobs
from kgorch.system import files, process_identity
from kgorch.system.file_lock import FileLock, is_locked
from kgorch.system.paths import run_folder

_RENAMED = re.compile(r"\..+\.removing(-\d+)?")
_OF_CHECKPOINTS = re.compile(rf"{FOLDER_PATTERN.pattern}(\.[\w.-]+)?|\.speed-\d+")
"""Names that kgorch creates in a stage's folder: checkpoints, interrupted saves, broken checkpoints, tests of the disk's speed."""


@dataclass(frozen=True, slots=True)
class Removal:
    """What would be removed with a run.

    Attributes:
        folder: the run's folder in the state folder; None if it is gone.
        folder_bytes: size of its files, including checkpoints in it.
        checkpoints: the folder of its checkpoints outside of the state folder, by the plan's checkpoint.dir; None for none.
        checkpoints_bytes: size of the files in that one.
        is_queued: whether the run is in the daemon's queue.
        remote: addresses of its sessions at another place, which stay there.
    """

    run: RunInfo
    folder: Path | None
    folder_bytes: int
    checkpoints: Path | None
    checkpoints_bytes: int
    is_queued: bool
    remote: Sequence[str] = ()


@contextlib.contextmanager
def hold_locks(engine: Engine, home: Path, removals: Sequence[RunInfo]) -> Iterator[None]:
    """Make sure that no process of these runs is alive, and that none can be started for as long as the block runs.

    Another run of the same name may be alive: its supervisor holds the lock of the name, and touches only its own run.

    Raises: KgorchError.
    """
    locks = {run.name: FileLock(home / "runs" / run.name / "lock") for run in removals if _check_name(home, run)}
    ours = {name for name, lock in locks.items() if lock.acquire()}
    try:
        for run in removals:
            elsewhere = remote.newest(engine, run.id)
            if elsewhere and elsewhere.state in REMOTE_OPEN:
                raise KgorchError(
                    f"session {elsewhere.number} of {_title(run)} is not over at {elsewhere.place}; nothing was removed",
                    next_step=f"kgorch stop {run.name}, and try again when that session is over",
                )
            jobs.refuse_here(engine, run, {}, then="remove it")
            last = sessions.last(engine, run.id)
            is_open = run.state == RunState.ACTIVE or (last is not None and last.phase not in OVER)
            if is_open and run.name not in ours:
                raise _alive_error(run)
            if _is_training(run_folder(home, run.name, run.number)) or (last and _is_supervised(engine, last)):
                raise _alive_error(run)
            resume = queue.pending_resume(engine, run.id)
            if resume and resume.state == ResumeState.CLAIMED and _is_claimant_alive(engine, resume):
                raise KgorchError(f"{_title(run)} is being started", next_step=f"kgorch stop {run.name}")
        yield
    finally:
        for lock in locks.values():
            lock.release()


def describe(engine: Engine, home: Path, run: RunInfo) -> Removal:
    """What would be removed. Raises: KgorchError if the run's folder is a link or a file."""
    _check_name(home, run)
    folder = run_folder(home, run.name, run.number)
    outside = _checkpoints_outside(run, folder)
    is_queued = queue.pending_resume(engine, run.id) is not None
    exists = os.path.lexists(folder)
    if exists and (folder.is_symlink() or not folder.is_dir()):
        raise KgorchError(
            f"{folder} is a link or a file, not the folder of a run; nothing was removed",
            next_step=f"move it away, then kgorch rm {_title(run)}",
        )
    return Removal(
        run,
        folder if exists else None,
        size_of(folder) if exists else 0,
        outside,
        size_of(outside) if outside else 0,
        is_queued,
        [row.url for row in remote.of_run(engine, run.id) if row.url and not row.deleted_at],
    )


def remove(engine: Engine, home: Path, removal: Removal, *, checkpoints: bool) -> list[Path]:
    """Remove a run; the caller is within `hold_locks`.

    Args:
        checkpoints: also those outside of the state folder.
    Returns: paths that could not be deleted; they belong to no run any more.
    Raises: KgorchError, OSError, SQLAlchemyError; nothing was removed then.
    """
    run = removal.run
    if checkpoints and removal.checkpoints:
        _check_content(removal.checkpoints)
    last = sessions.last(engine, run.id)
    if last and last.phase not in OVER:  # killed and not resumed: nobody else would charge its last hours to the quota
        late_charges.complete(engine, last, sessions.last_attempt(engine, last.id), None)
    renamed: list[tuple[Path, Path]] = []
    try:
        for folder in (removal.folder, removal.checkpoints if checkpoints else None):
            if folder:
                aside = _aside(folder)
                folder.rename(aside)
                renamed.append((folder, aside))
        runs.remove(engine, run.id)
    except BaseException:
        for folder, aside in reversed(renamed):
            aside.rename(folder)
        raise
    undeleted = [aside for _, aside in renamed if not _delete(aside)]
    return undeleted + [path for path in _leftovers(home) if not _delete(path)]


def size_of(folder: Path) -> int:
    """Bytes of the files below a folder; no link is followed."""
    total = 0
    for entry in untrusted_io.walk(folder):
        with contextlib.suppress(OSError):
            if not entry.is_dir(follow_symlinks=False):
                total += entry.stat(follow_symlinks=False).st_size
    return total


def _check_name(home: Path, run: RunInfo) -> bool:
    """True. The name comes out of a database, and a name with `..` or a link would lead out of the state folder.

    Raises: KgorchError.
    """
    above = home / "runs" / run.name
    if not re.fullmatch(NAME_PATTERN, run.name) or run.number < 1 or above.is_symlink() or above.parent.is_symlink():
        raise KgorchError(
            f"{above} is not a folder of runs; nothing was removed",
            f"expected a folder, not a link, named as a run is: {home}/runs/NAME",
            next_step="kgorch status --all",
        )
    return True


def _checkpoints_outside(run: RunInfo, folder: Path) -> Path | None:
    """The folder below the plan's checkpoint.dir; None if there is none, or if it is not named as kgorch names it.

    The path comes out of a database: only a folder with the name and the id of the run is surely its own.
    """
    path = Path(run.checkpoints)
    if path == folder / "checkpoints" or path.name != f"{run.name}-{run.id}" or not path.is_absolute():
        return None
    return path if path.is_dir() and not path.is_symlink() else None


def _check_content(root: Path) -> None:
    """Raises: KgorchError if the folder of checkpoints contains something that kgorch did not create."""
    for stage in root.iterdir():
        is_stage = stage.is_dir() and not stage.is_symlink()
        unknown = [stage] if not is_stage and not _OF_CHECKPOINTS.fullmatch(stage.name) else []
        if is_stage:
            unknown = [
                path for path in stage.iterdir() if path.is_symlink() or not _OF_CHECKPOINTS.fullmatch(path.name)
            ]
        if unknown:
            raise KgorchError(
                f"{root} holds something that is not a checkpoint; nothing was removed",
                str(unknown[0]),
                next_step="move it away; or leave out --checkpoints, which keeps them",
            )


def _aside(folder: Path) -> Path:
    """A free path beside the folder that no run and no checkpoint has."""
    for number in range(10_000):
        path = folder.with_name(f".{folder.name}.removing{f'-{number}' if number else ''}")
        if not os.path.lexists(path):
            return path
    raise KgorchError(
        f"{folder.parent} is full of folders that are being removed", next_step="delete .*.removing there"
    )


def _leftovers(home: Path) -> list[Path]:
    """Renamed folders of an earlier removal that was killed, or of one that another process is deleting now."""
    above = (path for path in (home / "runs").glob("*") if path.is_dir() and not path.is_symlink())
    found = (path for folder in above for path in folder.glob(".*.removing*") if _RENAMED.fullmatch(path.name))
    return [path for path in found if path.is_dir() and not path.is_symlink()]


def _delete(folder: Path) -> bool:
    """Delete a folder; False if something of it is left."""
    for entry in untrusted_io.walk(folder):
        if entry.name == MANIFEST_NAME:
            with contextlib.suppress(OSError):
                Path(entry.path).unlink()
    files.remove_tree(folder)
    return not os.path.lexists(folder)


def _is_training(folder: Path) -> bool:
    return any(is_locked(lock) for lock in folder.glob("attempts/*/lock"))


def _is_supervised(engine: Engine, last: SessionInfo) -> bool:
    if fleet.is_elsewhere(engine, last.machine):
        return last.phase not in OVER and fleet.is_leased(engine, last.id)
    alive = process_identity.is_alive(last.supervisor_pid, last.supervisor_started_ticks, last.boot_id)
    return last.phase not in OVER and alive


def _is_claimant_alive(engine: Engine, resume: ResumeInfo) -> bool:
    if fleet.is_elsewhere(engine, resume.claimant_machine):
        expires_at = resume.lease_expires_at
        return expires_at is not None and expires_at > fleet.server_now(engine)
    return process_identity.is_alive(resume.claimant_pid, resume.claimant_started_ticks, resume.claimant_boot_id)


def _alive_error(run: RunInfo) -> KgorchError:
    return KgorchError(f"{_title(run)} is being trained; nothing was removed", next_step=f"kgorch stop {run.name}")


def _title(run: RunInfo) -> str:
    return f"{run.name}/{run.number}"
