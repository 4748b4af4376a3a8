"""Copy what a source holds of a run into this state folder: every byte is hashed on the way, then one transaction records the run.

A copy gets its name last, so what a kill leaves of one is no checkpoint; the next start copies again what has no name yet.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from typing import Any

from sqlalchemy import Engine

from kgorch import untrusted_io
from kgorch.admission.requests import ImportWatcher
from kgorch.admission.source_run import (
    NO_PROGRESS,
    ImportCandidate,
    ProgressKey,
    SourceRun,
    essence_of,
    local_run,
    order_stages,
    progress_of,
)
from kgorch.checkpoint import registry, store
from kgorch.checkpoint.folder import read_checkpoint
from kgorch.checkpoint.manifest import FILE_PATTERN, MANIFEST_NAME, FileEntry, Manifest, checkpoint_folder_name
from kgorch.checkpoint.verify import read_chunks, verify_checkpoint
from kgorch.core.checkpoint import retention
from kgorch.core.codes import CheckpointState, EventKind, RunState
from kgorch.db import import_run, runs, sessions
from kgorch.db.import_run import RunImport
from kgorch.db.rows import RunInfo
from kgorch.db.untrusted_database import Columns
from kgorch.errors import NO_ROOM, CheckpointBroken, CheckpointUnreadable, StateUnusable
from kgorch.launch import rungs
from kgorch.plan import Plan
from kgorch.protocol.run_files import CACHE_FOLDER, MAX_CACHED_BYTES
from kgorch.protocol.values import escape_surrogates
from kgorch.supervisor import metric_curves
from kgorch.system import file_hash, files
from kgorch.untrusted_io import Budget, BudgetExceeded

OnBytes = Callable[[int], None]
"""Called with the number of bytes of each piece that was copied."""

ACTIVE = {"state": RunState.ACTIVE, "why": "", "finished_at": None}
"""Columns of a run that goes on."""

RESERVE_BYTES = 1 << 20
"""Stays free on the disk: the database that records the copies grows, too."""

METRICS_S, METRICS_BYTES = 20.0, 64 << 20
"""Seconds and bytes for reading manifests a second time, to find the best checkpoint by its metrics."""

MAX_OUTPUTS = 100_000
MAX_CACHED_VALUES = 64
"""Files of `session.cached` that are copied from a source."""


def import_files(engine: Engine, run: Columns, plan: Plan, source: SourceRun, watcher: ImportWatcher) -> RunInfo:
    """Copy the checkpoints and outputs of a run that this state folder does not know, and record the run.

    Args:
        run: its columns, with the paths of this state folder.
    Raises: CheckpointBroken if none of its checkpoints is whole; CheckpointUnreadable; StateUnusable, for example on a full disk.
    """
    stages = [stage.name for stage in plan.stage]
    order = order_stages(stages, source.unfinished_stages, source.rows.finished if source.rows else None)
    copy = _RunCopy(run, source, watcher)
    copy.copy_furthest(order, NO_PROGRESS)
    rows = source.rows.checkpoints if source.rows else []
    has_had_some = any(row["state"] in (CheckpointState.VERIFIED, CheckpointState.BROKEN) for row in rows)
    if not copy.checkpoints and (source.checkpoints or has_had_some):
        raise CheckpointBroken(
            f"no checkpoint of run {source.run_id} in the sources can be used",
            *(facts["why"] for _, facts in copy.events[:8]),
            next_step="put its complete output into a source, or begin a new run with --fresh",
        )
    if not copy.checkpoints:
        copy.events.append((EventKind.CHECKPOINT_IMPORTED, {"source": str(source.database), "run": source.run_id}))
    copy.copy_best(plan)
    copy.events[:0] = source.events
    return copy.record(engine, stages)


def sync_from_source(engine: Engine, run: RunInfo, plan: Plan, source: SourceRun, watcher: ImportWatcher) -> None:
    """Copy what a source has of a run of this state folder and the state folder has not. No process of the run may be alive.

    Raises: CheckpointUnreadable; StateUnusable.
    """
    stages = [stage.name for stage in plan.stage]
    finished = {stage.name for stage in runs.stages(engine, run.id) if stage.finished_at}
    ours = local_run(run.id, Path(run.checkpoints), stages)
    unfinished = source.unfinished_stages | ours.unfinished_stages
    order = order_stages(stages, unfinished, source.rows.finished if source.rows else None, finished)
    if source.progress(order) <= ours.progress(order):
        return
    columns = run._asdict()
    copy = _RunCopy(columns, source, watcher)
    copy.copy_furthest(order, ours.progress(order))
    if not copy.checkpoints:
        for kind, facts in copy.events:
            sessions.add_event(engine, run.id, kind, facts)
        return
    copy.copy_best(plan)
    if source.rows:
        columns |= {name: source.rows.run[name] for name in ("state", "why", "finished_at")}
    copy.record(engine, stages)


@dataclass(slots=True)
class _RunCopy:
    """The copy of one run out of its source.

    Attributes:
        run: columns of the run, with the paths of this state folder.
        checkpoints: columns of each checkpoint that was copied, by its path here.
        events: kind and facts, to be recorded.
    """

    run: Columns
    source: SourceRun
    watcher: ImportWatcher
    checkpoints: dict[str, Columns] = field(default_factory=dict)
    events: list[tuple[str, dict[str, Any]]] = field(default_factory=list)

    @property
    def root(self) -> Path:
        return Path(self.run["checkpoints"])

    def copy_furthest(self, order: Sequence[str], beyond: ProgressKey) -> None:
        """Copy the furthest checkpoint that is whole and beyond that progress; of each stage before it the newest final one, which
        later stages may read; and the outputs and cached values of the run.

        Raises: CheckpointUnreadable; StateUnusable.
        """
        source, folder = self.source, Path(self.run["folder"])
        furthest = source.furthest_first(order)
        by_stage = [[item for item in furthest if item.manifest.stage == name] for name in order[::-1]]
        by_stage = [items for items in by_stage if items]
        first = [
            next((item for item in items if not n or item.manifest.final), None) for n, items in enumerate(by_stage)
        ]
        outputs = {**_cached_values(source, folder), **_outputs(source, self.watcher)}
        with _disk_errors(self.root):
            on_bytes = _byte_counter(self.watcher, _require_space([item for item in first if item], outputs, self.root))
            for items in by_stage:
                for item in items:
                    is_needed = item.manifest.final if self.checkpoints else progress_of(order, item.manifest) > beyond
                    if is_needed and self._copy(item, on_bytes):
                        break
            for path, top in outputs.items() if self.checkpoints or not source.checkpoints else ():
                _copy_output(path, folder / top.name, path.relative_to(top), on_bytes, self.watcher)

    def _copy(self, item: ImportCandidate, on_bytes: OnBytes) -> bool:
        """Copy a checkpoint; False if it is broken. Raises: CheckpointUnreadable; OSError of the local disk."""
        try:
            _copy_checkpoint(item, _target(self.root, item), on_bytes)
        # A read error ends the start: as with our own checkpoints, only one that is proven to be broken is skipped.
        except CheckpointBroken as error:
            self._skip(item, error, str(item.folder))
            return False
        self._add(item)
        return True

    def copy_best(self, plan: Plan) -> None:
        """Copy the best checkpoint of each stage by the plan's `keep.best`.

        A run resumes from its furthest checkpoint; on a new machine the best one of earlier sessions would be lost. If there is no
        room for it, it stays in the source and the run goes on.
        """
        rule = registry.retention_rule(plan).best
        for stage in plan.stage if rule and self.checkpoints else ():
            items = {str(item.folder): item for item in self.source.checkpoints if item.manifest.stage == stage.name}
            rated = list(_with_metrics(items))
            while rule and (best := retention.best_of(rated, *rule)):
                item = items[best.key]
                target = _target(self.root, item)
                if str(target) in self.checkpoints:
                    break
                rated.remove(best)
                try:
                    with _disk_errors(self.root):
                        _copy_checkpoint(
                            item, target, _byte_counter(self.watcher, _require_space([item], (), self.root))
                        )
                except (CheckpointBroken, CheckpointUnreadable, StateUnusable) as error:
                    self._skip(item, error, f"the best checkpoint of stage {stage.name}, {item.folder},")
                    continue
                self._add(item)
                break

    def _skip(self, item: ImportCandidate, error: Exception, subject: str) -> None:
        self.watcher.note(f"{subject} was skipped: {error}")
        facts = {"checkpoint": str(item.folder), "why": escape_surrogates(str(error))}
        self.events.append((EventKind.CHECKPOINT_SKIPPED, facts))

    def _add(self, item: ImportCandidate) -> None:
        target = _target(self.root, item)
        manifest = read_checkpoint(target)
        self.checkpoints[str(target)] = columns = _columns(item.folder, manifest)
        facts = {name: columns[name] for name in ("source", "stage", "step", "bytes")}
        self.events.append((EventKind.CHECKPOINT_IMPORTED, facts | {"run": self.source.run_id}))
        self.watcher.checkpoint_copied(manifest, item.folder)

    def record(self, engine: Engine, stages: Sequence[str]) -> RunInfo:
        """Write everything into the database, in one transaction.

        Stages are finished as the source's database says. Without one, all stages before the furthest checkpoint's are.
        """
        rows = self.source.rows
        if rows:
            finished = rows.finished
            rows = metric_curves.complete_curves(rows, _folder_of(self.source, "attempts"))
        else:
            furthest = max((stages.index(row["stage"]) for row in self.checkpoints.values()), default=0)
            finished = dict.fromkeys(stages[:furthest], (datetime.now(UTC), "a later stage has a checkpoint"))

        def path_of(row: Columns) -> str | None:
            folder = self.root / row["stage"] / checkpoint_folder_name(row["step"], final=row["final"])
            return str(folder) if row["stage"] in stages else None

        # The search did not keep the rungs of the manifests in memory: they are read from our copies.
        of_checkpoints = [
            row for path in self.checkpoints for row in rungs.rows_of_manifest(read_checkpoint(Path(path)))[0]
        ]
        of_checkpoints.sort(key=lambda row: row["at"])
        imported = RunImport(
            self.run,
            stages,
            rows,
            path_of,
            finished=finished,
            copied=self.checkpoints,
            events=self.events,
            rungs=of_checkpoints,
        )
        return import_run.record_import(engine, imported)


def _with_metrics(folders: Iterable[str]) -> Iterator[retention.RetentionCandidate]:
    """The checkpoints as retention compares them; as many as the budget allows to be read again."""
    budget = Budget(METRICS_S, METRICS_BYTES)
    for folder in folders:
        with contextlib.suppress(CheckpointBroken, CheckpointUnreadable, OSError, BudgetExceeded):
            budget.spend(Path(folder, MANIFEST_NAME).lstat().st_size)
            manifest = read_checkpoint(Path(folder))
            order = manifest.step + 0.5 * manifest.final  # the final one of a step comes after a periodic one
            rated = retention.RetentionCandidate(
                folder, manifest.stage, manifest.step, manifest.total_bytes, order, verified=True, final=manifest.final
            )
            yield replace(rated, metrics=manifest.metrics, measured=manifest.measured)


def _copy_checkpoint(item: ImportCandidate, target: Path, on_bytes: OnBytes) -> None:
    """Copy and verify one checkpoint folder.

    Raises: CheckpointBroken; CheckpointUnreadable, which proves nothing about the checkpoint; OSError of the local disk.
    """
    if target.is_dir():
        try:
            if verify_checkpoint(target).run_id == item.manifest.run_id:
                return  # an earlier start has copied it
        except CheckpointBroken:
            if target == item.folder:
                raise
        store.quarantine(target, target.parent.parent)
    manifest = read_checkpoint(item.folder)
    aside = target.with_name(f"{target.name}.tmp-found")
    shutil.rmtree(aside, ignore_errors=True)  # left by an earlier start
    aside.mkdir(parents=True)
    try:
        for name, entry in manifest.files.items():
            _copy_file(item.folder, aside / name, on_bytes, entry)
        _copy_file(item.folder, aside / MANIFEST_NAME, on_bytes, None)
        # The source may be written to while it is read: the manifest that was chosen must be the one that was copied.
        if essence_of(read_checkpoint(aside)) != item.essence:
            raise CheckpointBroken(f"{item.folder} changed while it was copied")
        # Durable before it has its name: a folder with a checkpoint's name counts as whole after a power failure.
        files.sync_folder(aside)
        aside.rename(target)
        files.sync_folder(target.parent)
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise


def _copy_file(folder: Path, target: Path, on_bytes: OnBytes, expected: FileEntry | None) -> None:
    chunks, max_bytes = read_chunks(folder, target.name.removesuffix(".part")), expected.bytes if expected else None
    with open(target, "xb") as file:
        digest, count = file_hash.copy_and_hash(chunks, file, max_bytes=max_bytes, on_chunk=on_bytes)
        file.flush()
        os.fsync(file.fileno())
    if expected and (digest != expected.xxh3_128 or count != expected.bytes):
        raise CheckpointBroken(
            f"{folder} does not match its manifest",
            f"{target.name}: expected xxh3 {expected.xxh3_128[:12]}…, found {digest[:12]}…",
        )


def _copy_output(path: Path, top: Path, name: Path, on_bytes: OnBytes, watcher: ImportWatcher) -> None:
    """Copy a file to `name` below our own folder `top`, and nowhere else: a training may have made links in it."""
    target = top / name
    if not target.parent.resolve().is_relative_to(top.resolve()):
        watcher.note(f"the output {path} was skipped: a link leads from {target.parent} out of the run's folder")
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    aside = target.with_name(target.name + ".part")
    aside.unlink(missing_ok=True)
    try:
        untrusted_io.copy_file(path, aside, on_bytes, durable=True)
        aside.rename(target)
    except untrusted_io.SourceUnreadable as error:
        watcher.note(f"the output {path} was skipped: {error}")
    finally:
        aside.unlink(missing_ok=True)


def _outputs(source: SourceRun, watcher: ImportWatcher) -> dict[Path, Path]:
    """Regular files of the run's output folder in the source. Returns: that folder, by file."""
    top = _folder_of(source, "outputs")
    if top is None:
        return {}
    found = (Path(entry.path) for entry in untrusted_io.walk(top) if entry.is_file(follow_symlinks=False))
    paths = list(islice(found, MAX_OUTPUTS + 1))
    if len(paths) > MAX_OUTPUTS:
        watcher.note(f"{top} holds more than {MAX_OUTPUTS} files: the first {MAX_OUTPUTS} of them are copied")
    return dict.fromkeys(paths[:MAX_OUTPUTS], top)


def _cached_values(source: SourceRun, run_folder: Path) -> dict[Path, Path]:
    """Values of `session.cached` (worker/data/value_cache.py) that this state folder does not have. Returns: as _outputs.

    A rank reads such a value as untrusted input: bounded JSON, under the very key that it asks for.
    """
    top, values = _folder_of(source, CACHE_FOLDER), dict[Path, Path]()
    with contextlib.suppress(OSError):  # without the folder, or if it cannot be read, the values are computed again
        for entry in islice(os.scandir(top), MAX_OUTPUTS) if top else ():
            if (
                len(values) < MAX_CACHED_VALUES
                and FILE_PATTERN.fullmatch(entry.name)
                and entry.name.endswith(".json")
                and entry.is_file(follow_symlinks=False)
                and not Path(run_folder, CACHE_FOLDER, entry.name).exists()
                and entry.stat(follow_symlinks=False).st_size <= MAX_CACHED_BYTES
            ):
                values[Path(entry.path)] = Path(entry.path).parent
    return values


def _folder_of(source: SourceRun, name: str) -> Path | None:
    """A folder of the run: beside the source's database, else beside the checkpoints. None if its place is not known, or if a link
    is on the way to it.
    """
    folder = source.folder
    if source.rows and source.database:
        run = source.rows.run
        folder = source.database.parent / "runs" / run["name"] / str(run["number"])
    top = folder / name if folder else None
    return top if top and top.resolve() == top else None


def _require_space(items: Sequence[ImportCandidate], outputs: Iterable[Path], root: Path) -> int:
    """The number of bytes that are to be copied. Raises: StateUnusable if the disk has no room for them."""
    needed = sum(item.bytes for item in items if not _target(root, item).is_dir())
    for path in outputs:
        with contextlib.suppress(OSError):  # the file is skipped when it is copied
            needed += untrusted_io.allocated_bytes(path)
    root.mkdir(parents=True, exist_ok=True)
    if shutil.disk_usage(root).free < needed + RESERVE_BYTES:
        raise _no_room(root, f"{needed} bytes are to be copied, {shutil.disk_usage(root).free} are free")
    return needed


@contextlib.contextmanager
def _disk_errors(root: Path) -> Iterator[None]:
    """Turn an OSError of the local disk into StateUnusable. Errors of the source have types of their own."""
    try:
        yield
    except OSError as error:
        if error.errno in NO_ROOM:
            raise _no_room(root, str(error)) from None
        raise StateUnusable(
            f"the run from the source cannot be written to {root}",
            str(error),
            next_step="point KGORCH_HOME at a folder that can be written",
        ) from None


def _no_room(root: Path, fact: str) -> StateUnusable:
    return StateUnusable(
        f"there is no room in {root} for the run from the source",
        fact,
        next_step="make room, or point KGORCH_HOME at a larger disk",
        error_code="KG501",
    )


def _byte_counter(watcher: ImportWatcher, total_bytes: int) -> OnBytes:
    done = 0

    def add(count: int) -> None:
        nonlocal done
        done += count
        watcher.copy_progress(done, total_bytes)

    return add


def _target(root: Path, item: ImportCandidate) -> Path:
    return root / item.manifest.stage / checkpoint_folder_name(item.manifest.step, final=item.manifest.final)


def _columns(folder: Path, manifest: Manifest) -> Columns:
    return {
        "stage": manifest.stage,
        "step": manifest.step,
        "final": manifest.final,
        "bytes": manifest.total_bytes,
        "metrics": dict(manifest.metrics),
        "measured": dict(manifest.measured),
        "created_at": datetime.fromisoformat(manifest.created_at),
        "source": escape_surrogates(str(folder)),
    }
