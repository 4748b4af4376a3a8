"""Removing a run: its folder, its checkpoints, its rows. What it used of a quota stays counted.

Folders are renamed before the rows go, to names that nothing takes for a run's, and deleted last, manifests first: without its
manifest a checkpoint is none. What a kill leaves in the state folder is deleted by the next removal.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from sqlalchemy import Engine

from db import queue, runs, sessions
from db.records import ResumeInfo, RunInfo, SessionInfo
from orchestrator.checkpoint.manifest import FOLDER_PATTERN, MANIFEST_NAME
from orchestrator.core.codes import OVER, ResumeState, RunState
from orchestrator.core.names import NAME_PATTERN
from orchestrator.errors import KgorchError
from orchestrator.limits import quota_ledger
from orchestrator.system import process_identity
from orchestrator.system.file_lock import FileLock, is_locked
from orchestrator.system.paths import run_folder

_ASIDE = re.compile(r"\..+\.removing(-\d+)?")
_OF_CHECKPOINTS = re.compile(rf"{FOLDER_PATTERN.pattern}(\.[\w.-]+)?|\.speed-\d+")
"""What kgorch writes into a stage's folder: checkpoints, and what is left of saves and of broken ones."""


@dataclass(frozen=True, slots=True)
class Removal:
    """What goes with a run.

    Attributes:
        folder: the run's folder in the state folder; None where there is none any more.
        folder_bytes: what its files hold, checkpoints in it included.
        checkpoints: its checkpoints' folder elsewhere, by the plan's checkpoint.dir; None for none.
        checkpoints_bytes: what the files in that one hold.
        waits: whether it stands in the queue.
    """

    run: RunInfo
    folder: Path | None
    folder_bytes: int
    checkpoints: Path | None
    checkpoints_bytes: int
    waits: bool


@contextlib.contextmanager
def locked(engine: Engine, home: Path, chosen: Sequence[RunInfo]) -> Iterator[None]:
    """Nothing of these runs lives, and nothing of them can be started meanwhile.

    Another run of the same name may live: a name's lock is its supervisor's, which touches its own run alone.

    Raises: KgorchError.
    """
    locks = {run.name: FileLock(home / "runs" / run.name / "lock") for run in chosen if _check_name(home, run)}
    ours = {name for name, lock in locks.items() if lock.acquire()}
    try:
        for run in chosen:
            last = sessions.last(engine, run.id)
            is_open = run.state == RunState.ACTIVE or (last is not None and last.phase not in OVER)
            if is_open and run.name not in ours:
                raise _lives(run)
            if _is_training(run_folder(home, run.name, run.number)) or (last and _is_supervised(last)):
                raise _lives(run)
            resume = queue.open_resume(engine, run.id)
            if resume and resume.state == ResumeState.CLAIMED and _claimant_lives(resume):
                raise KgorchError(f"{_title(run)} is being started just now", next_step=f"kgorch stop {run.name}")
        yield
    finally:
        for lock in locks.values():
            lock.release()


def look(engine: Engine, home: Path, run: RunInfo) -> Removal:
    """What would go. Raises: KgorchError for a folder that is not what it should be."""
    _check_name(home, run)
    folder = run_folder(home, run.name, run.number)
    outside = _checkpoints_outside(run, folder)
    waits = queue.open_resume(engine, run.id) is not None
    is_there = os.path.lexists(folder)
    if is_there and (folder.is_symlink() or not folder.is_dir()):
        raise KgorchError(
            f"{folder} is a link or a file, not the folder of a run; nothing was removed",
            next_step=f"move it away, then kgorch rm {_title(run)}",
        )
    return Removal(
        run,
        folder if is_there else None,
        size_of(folder) if is_there else 0,
        outside,
        size_of(outside) if outside else 0,
        waits,
    )


def remove(engine: Engine, home: Path, what: Removal, *, checkpoints: bool) -> list[Path]:
    """Remove it; `locked` is held. What could not be deleted, which is no run's any more.

    Args:
        checkpoints: also those that lie elsewhere.
    Raises: KgorchError, with nothing removed.
    """
    run = what.run
    if checkpoints and what.checkpoints:
        _check_shape(what.checkpoints)
    last = sessions.last(engine, run.id)
    if last and last.phase not in OVER:  # killed, and not gone on with: its hours are written down to the end
        quota_ledger.complete(engine, last, sessions.last_attempt(engine, last.id), None)
    moved: list[tuple[Path, Path]] = []
    try:
        for folder in (what.folder, what.checkpoints if checkpoints else None):
            if folder:
                aside = _aside(folder)
                folder.rename(aside)
                moved.append((folder, aside))
        runs.remove(engine, run.id)
    except BaseException:
        for folder, aside in reversed(moved):
            aside.rename(folder)
        raise
    left = [aside for _, aside in moved if not _delete(aside)]
    return left + [path for path in _leftovers(home) if not _delete(path)]


def size_of(folder: Path) -> int:
    """Bytes of the files below it; no link is followed."""
    total, left = 0, [folder]
    while left:
        with contextlib.suppress(OSError), os.scandir(left.pop()) as entries:
            for entry in entries:
                with contextlib.suppress(OSError):
                    if entry.is_dir(follow_symlinks=False):
                        left.append(Path(entry.path))
                    else:
                        total += entry.stat(follow_symlinks=False).st_size
    return total


def _check_name(home: Path, run: RunInfo) -> bool:
    """The name comes out of a database: it must not lead out of the state folder."""
    above = home / "runs" / run.name
    if not re.fullmatch(NAME_PATTERN, run.name) or run.number < 1 or above.is_symlink() or above.parent.is_symlink():
        raise KgorchError(
            f"{above} is no folder of runs and is left alone",
            f"expected a folder, not a link, named as a run is: {home}/runs/NAME",
            next_step="kgorch status --all",
        )
    return True


def _checkpoints_outside(run: RunInfo, folder: Path) -> Path | None:
    """Where the plan's checkpoint.dir has it, if it is named as kgorch names it."""
    told = Path(run.checkpoints)
    if told == folder / "checkpoints" or told.name != f"{run.name}-{run.id}" or not told.is_absolute():
        return None
    return told if told.is_dir() and not told.is_symlink() else None


def _check_shape(root: Path) -> None:
    """Raises: KgorchError where something lies among the checkpoints that kgorch has not put there."""
    for stage in root.iterdir():
        is_stage = stage.is_dir() and not stage.is_symlink()
        strange = [stage] if not is_stage and not _OF_CHECKPOINTS.fullmatch(stage.name) else []
        if is_stage:
            strange = [
                path for path in stage.iterdir() if path.is_symlink() or not _OF_CHECKPOINTS.fullmatch(path.name)
            ]
        if strange:
            raise KgorchError(
                f"{root} holds what is no checkpoint; nothing was removed",
                str(strange[0]),
                next_step="move that away; or leave out --checkpoints, and they stay",
            )


def _aside(folder: Path) -> Path:
    """A name beside it that is no run's and no checkpoint's."""
    for number in range(10_000):
        place = folder.with_name(f".{folder.name}.removing{f'-{number}' if number else ''}")
        if not os.path.lexists(place):
            return place
    raise KgorchError(
        f"{folder.parent} is full of folders that are being removed", next_step="delete .*.removing there"
    )


def _leftovers(home: Path) -> list[Path]:
    """What a kill left of an earlier removal, unless it is under way in another process (which deletes it as well)."""
    return [path for path in (home / "runs").glob("*/.*.removing*") if _ASIDE.fullmatch(path.name)]


def _delete(folder: Path) -> bool:
    for place, _, files in os.walk(folder):
        if MANIFEST_NAME in files:
            with contextlib.suppress(OSError):
                Path(place, MANIFEST_NAME).unlink()
    shutil.rmtree(folder, ignore_errors=True)  # by descriptors: no link that appears meanwhile is followed
    return not os.path.lexists(folder)


def _is_training(folder: Path) -> bool:
    return any(is_locked(lock) for lock in folder.glob("attempts/*/lock"))


def _is_supervised(last: SessionInfo) -> bool:
    alive = process_identity.is_alive(last.supervisor_pid, last.supervisor_started_ticks, last.boot_id)
    return last.phase not in OVER and alive


def _claimant_lives(resume: ResumeInfo) -> bool:
    return process_identity.is_alive(resume.claimed_pid, resume.claimed_ticks, resume.claimed_boot)


def _lives(run: RunInfo) -> KgorchError:
    return KgorchError(
        f"{_title(run)} lives: it is being trained; nothing was removed", next_step=f"kgorch stop {run.name}"
    )


def _title(run: RunInfo) -> str:
    return f"{run.name}/{run.number}"
