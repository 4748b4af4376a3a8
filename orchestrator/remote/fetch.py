"""Fetch what a run has reached at a place, and import it as any source's state: bounded, verified, without trust."""

from __future__ import annotations

import glob
import shutil
from dataclasses import dataclass
from pathlib import Path

from kgorch.admission import import_files, import_run, remote_sessions, source_scan
from kgorch.admission.requests import Consent, ImportWatcher, LocalState
from kgorch.checkpoint.manifest import checkpoint_folder_name
from kgorch.core.codes import CheckpointState
from kgorch.db.rows import RemoteSessionInfo
from kgorch.db.untrusted_database import Columns
from kgorch.errors import KgorchError, NotFound, StateUnusable
from kgorch.remote import session_record
from kgorch.remote.place import RECORD_NAME, Place
from kgorch.remote.remote_run import RemoteRun
from kgorch.system.file_lock import FileLock
from kgorch.system.paths import lock_path

DATABASE = "kgorch.db"


@dataclass(frozen=True, slots=True)
class Fetched:
    """What was fetched.

    Attributes:
        session: where it was reached.
        folder: of the files on this machine.
        files: their number.
    """

    session: RemoteSessionInfo
    folder: Path
    files: int


def fetch(
    state: LocalState, found: RemoteRun, place: Place, watcher: ImportWatcher, consent: Consent, *, everything: bool
) -> Fetched:
    """The newest and the best checkpoint, outputs and database of the run's last good session; with `everything` all files.

    Raises: NotFound; KgorchError; PlaceError.
    """
    run = found.run
    best = remote_sessions.remote_best(state.engine, run)
    if best is None:
        raise NotFound(
            f"no session of {run.name!r} has verified a checkpoint yet",
            next_step=f"kgorch status {run.name}",
            error_code="KG702",
        )
    if best.deleted_at:
        raise NotFound(f"the output of session {best.number} was removed at {best.place}", error_code="KG702")
    folder = Path(run.folder) / "remote" / f"{best.number:03d}"
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    files = place.collect(best.name, folder, (RECORD_NAME, DATABASE), watcher.copy_progress)
    record = session_record.read(folder / RECORD_NAME)
    if record.nonce != best.nonce:
        raise KgorchError(f"the output of {best.name} at {best.place} is another session's", next_step="kgorch history")
    if everything:
        _refuse_without_room(folder, record.bytes)
        patterns = ["*"]
    else:
        patterns = [f"{glob.escape(record.checkpoint)}/*"] if record.checkpoint else []
        patterns += [*_best_checkpoints(found, folder), "kgorch/runs/*/*/outputs/*"]
    files += place.collect(best.name, folder, tuple(patterns), watcher.copy_progress)
    _import(state, found, folder, watcher, consent)
    return Fetched(best, folder, len({*files}))


def _refuse_without_room(folder: Path, output_bytes: int) -> None:
    """Raises: StateUnusable where the output of a session does not fit on the disk of the folder, which has a part of it."""
    need = output_bytes - sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    free = shutil.disk_usage(folder).free
    if need > free:
        raise StateUnusable(
            f"there is no room in {folder} for the output of the session",
            f"{need} bytes are to be fetched, {free} are free",
            next_step="make room, point KGORCH_HOME at a larger disk, or fetch without --all",
            error_code="KG501",
        )


def _import(state: LocalState, found: RemoteRun, folder: Path, watcher: ImportWatcher, consent: Consent) -> None:
    run, lock = found.run, FileLock(lock_path(state.home, found.run.name))
    if not lock.acquire():
        raise KgorchError(
            f"{run.name!r} is being trained on this machine", next_step=f"kgorch stop {run.name}", error_code="KG303"
        )
    try:
        contents = source_scan.scan_sources([glob.escape(str(folder))], Path(run.workdir), run.name, ())
        for note in contents.notes:
            watcher.note(note)
        source = contents.runs.get(run.id)
        if source is None:
            raise NotFound(f"what was fetched into {folder} holds no state of the run {run.id}", error_code="KG702")
        import_run.check_settings(source, found.plan, consent)
        import_files.sync_from_source(state.engine, run, found.plan, source, watcher)
    finally:
        lock.release()


def _best_checkpoints(found: RemoteRun, folder: Path) -> list[str]:
    """Patterns of the checkpoints that the fetched database calls best. Only stage and step are taken from it."""
    contents = source_scan.scan_sources([glob.escape(str(folder))], folder, found.run.name, ())
    source = contents.runs.get(found.run.id)
    rows: list[Columns] = source.rows.checkpoints if source and source.rows else []
    return [
        f"*/{glob.escape(row['stage'])}/{checkpoint_folder_name(row['step'], final=row['final'])}/*"
        for row in rows
        if row["stage"] in found.settings.stages and row["state"] == CheckpointState.VERIFIED and row.get("best")
    ]
