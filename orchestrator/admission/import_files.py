"""What was found in a source becomes ours: copied, every byte hashed on the way, then written down in one transaction.

A copy gets its name last, so that one killed half-way is nothing; the next start copies again what has no name yet.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from typing import Any

from sqlalchemy import Engine

from db import runs, sessions, transfer
from db.imported import Columns
from db.records import RunInfo
from orchestrator import untrusted_io
from orchestrator.admission.source_scan import (
    NOWHERE,
    Candidate,
    Found,
    Place,
    Watcher,
    essence_of,
    of_run,
    order_of,
    place_of,
)
from orchestrator.checkpoint import registry, store
from orchestrator.checkpoint.folder import read_checkpoint
from orchestrator.checkpoint.manifest import FILE_PATTERN, MANIFEST_NAME, FileEntry, Manifest, checkpoint_folder_name
from orchestrator.checkpoint.verify import read_chunks, verify_checkpoint
from orchestrator.core import retention
from orchestrator.core.codes import CheckpointState, EventKind, RunState
from orchestrator.errors import CheckpointBroken, CheckpointUnreadable, StateUnusable
from orchestrator.launch import rungs
from orchestrator.plan import Plan
from orchestrator.protocol.run_files import CACHE_FOLDER, MAX_CACHED_BYTES
from orchestrator.protocol.values import escape_surrogates
from orchestrator.supervisor import metric_curves
from orchestrator.system import files, hashing
from orchestrator.untrusted_io import Budget, BudgetExceeded

Events = list[tuple[str, dict[str, Any]]]
Moved = Callable[[int], None]
GOES_ON = {"state": RunState.ACTIVE, "why": "", "finished_at": None}
RESERVE_BYTES = 1 << 20
RATED_S, RATED_BYTES = 20.0, 64 << 20
"""What manifests of a source are read again for, to find the best of them."""
OUTPUTS = 100_000
VALUES = 64
"""Files of `session.cached` that are taken from a source at most."""


def bring(engine: Engine, run: Columns, plan: Plan, found: Found, watcher: Watcher) -> RunInfo:
    """Make a run that was found ours. `run` holds its columns, with the paths of this place.

    Raises: CheckpointBroken when none of its checkpoints is whole; CheckpointUnreadable; StateUnusable (disk full).
    """
    stages = [stage.name for stage in plan.stage]
    order = order_of(stages, found.training, found.rows.finished if found.rows else None)
    copied, told = _copy(found, order, run, NOWHERE, watcher)
    remembered = found.rows.checkpoints if found.rows else []
    if not copied and (
        found.checkpoints
        or any(row["state"] in (CheckpointState.VERIFIED, CheckpointState.BROKEN) for row in remembered)
    ):
        raise CheckpointBroken(
            f"no checkpoint of run {found.run_id} in the sources can be used",
            *(facts["why"] for _, facts in told[:8]),
            next_step="have its whole state in a source, or begin anew with --fresh",
        )
    if not copied:
        told.append((EventKind.CHECKPOINT_IMPORTED, {"source": str(found.database), "run": found.run_id}))
    told += _copy_best(found, plan, run, copied, watcher)
    return _write_down(engine, run, stages, found, copied, [*found.events, *told])


def catch_up(engine: Engine, run: RunInfo, plan: Plan, found: Found, watcher: Watcher) -> None:
    """Take in what a source has of our own run and we have not; only while nothing of the run lives.

    Raises: CheckpointUnreadable; StateUnusable.
    """
    stages = [stage.name for stage in plan.stage]
    done = {stage.name for stage in runs.stages(engine, run.id) if stage.finished_at}
    ours = of_run(run.id, Path(run.checkpoints), stages)
    order = order_of(stages, found.training | ours.training, found.rows.finished if found.rows else None, done)
    here = ours.place(order)
    if found.place(order) <= here:
        return
    columns = run._asdict()
    copied, told = _copy(found, order, columns, here, watcher)
    if not copied:
        for kind, facts in told:
            sessions.note(engine, run.id, kind, facts)
        return
    told += _copy_best(found, plan, columns, copied, watcher)
    if found.rows:
        columns |= {name: found.rows.run[name] for name in ("state", "why", "finished_at")}
    _write_down(engine, columns, stages, found, copied, told)


def _write_down(
    engine: Engine, run: Columns, stages: Sequence[str], found: Found, copied: Mapping[str, Columns], events: Events
) -> RunInfo:
    """Stages are done as the database beside the checkpoints says; without one, all before the furthest checkpoint's."""
    if found.rows:
        finished = found.rows.finished
    else:
        furthest = max((stages.index(row["stage"]) for row in copied.values()), default=0)
        finished = dict.fromkeys(stages[:furthest], (datetime.now(UTC), "a later stage has a checkpoint"))

    def path_of(row: Columns) -> str | None:
        folder = Path(run["checkpoints"]) / row["stage"] / checkpoint_folder_name(row["step"], final=row["final"])
        return str(folder) if row["stage"] in stages else None

    used = [read_checkpoint(Path(path)) for path in copied]  # of our copies: the search has kept none of it
    told = sorted((row for described in used for row in rungs.told_by(described)[0]), key=lambda row: row["at"])
    rows = metric_curves.brought(found.rows, _folder_of(found, "attempts")) if found.rows else None
    return transfer.take_in(engine, run, stages, finished, rows, copied, path_of, events, told)


def _copy(
    found: Found, stages: Sequence[str], run: Columns, beyond: Place, watcher: Watcher
) -> tuple[dict[str, Columns], Events]:
    """The furthest checkpoint that is whole and beyond that place; of each stage before it the newest final one, which
    later stages may read; and what the run has made.

    Returns the columns of what was copied by its path here, and what the journal shall tell.
    """
    root, copied, events = Path(run["checkpoints"]), dict[str, Columns](), Events()
    of_stage = ([item for item in found.furthest_first(stages) if item.manifest.stage == name] for name in stages[::-1])
    by_stage = [items for items in of_stage if items]
    first = [next((item for item in items if not n or item.manifest.final), None) for n, items in enumerate(by_stage)]
    outputs = {**_values_of(found, Path(run["folder"])), **_outputs_of(found, watcher)}
    with _writing(root):
        total = _room_for([item for item in first if item], outputs, root)
        moved = _counter(watcher, total)
        for items in by_stage:
            for item in items:
                if not item.manifest.final if copied else place_of(stages, item.manifest) <= beyond:
                    continue
                target = _target(root, item)
                try:
                    _copy_checkpoint(item, target, moved)
                except CheckpointBroken as error:
                    watcher.note(f"{item.folder} was passed over: {error}")
                    events.append(
                        (
                            EventKind.CHECKPOINT_SKIPPED,
                            {"checkpoint": str(item.folder), "why": escape_surrogates(str(error))},
                        )
                    )
                    continue
                described = read_checkpoint(target)
                copied[str(target)] = columns = _columns(item.folder, described)
                facts = {name: columns[name] for name in ("source", "stage", "step", "bytes")}
                events.append((EventKind.CHECKPOINT_IMPORTED, facts | {"run": found.run_id}))
                watcher.found(described, item.folder)
                break
        for path, folder in outputs.items() if copied or not found.checkpoints else ():
            _copy_output(path, Path(run["folder"], folder.name, path.relative_to(folder)), moved, watcher)
    return copied, events


def _copy_best(found: Found, plan: Plan, run: Columns, copied: dict[str, Columns], watcher: Watcher) -> Events:
    """Of each stage the best by the plan's keep.best, into `copied` as well: what goes on is the furthest, and on a new machine
    the best of earlier sessions would be lost. One for which there is no room stays in the source, and the run goes on."""
    root, events, rule = Path(run["checkpoints"]), Events(), registry.retention_rule(plan).best
    for stage in plan.stage if rule and copied else ():
        items = {str(item.folder): item for item in found.checkpoints if item.manifest.stage == stage.name}
        known = list(_rated(items))
        while rule and (best := retention.best_of(known, *rule)) and str(_target(root, items[best.key])) not in copied:
            item = items[best.key]
            known.remove(best)
            try:
                with _writing(root):
                    _copy_checkpoint(item, _target(root, item), _counter(watcher, _room_for([item], (), root)))
            except (CheckpointBroken, CheckpointUnreadable, StateUnusable) as error:
                watcher.note(f"the best checkpoint of stage {stage.name}, {item.folder}, was passed over: {error}")
                events.append(
                    (
                        EventKind.CHECKPOINT_SKIPPED,
                        {"checkpoint": str(item.folder), "why": escape_surrogates(str(error))},
                    )
                )
                continue
            described = read_checkpoint(_target(root, item))
            copied[str(_target(root, item))] = columns = _columns(item.folder, described)
            facts = {name: columns[name] for name in ("source", "stage", "step", "bytes")}
            events.append((EventKind.CHECKPOINT_IMPORTED, facts | {"run": found.run_id}))
            watcher.found(described, item.folder)
            break
    return events


def _rated(folders: Iterable[str]) -> Iterator[retention.Kept]:
    """Checkpoints as retention compares them: as many of a source's as may be read for it."""
    budget = Budget(RATED_S, RATED_BYTES)
    for folder in folders:
        with contextlib.suppress(CheckpointBroken, CheckpointUnreadable, OSError, BudgetExceeded):
            budget.spend(Path(folder, MANIFEST_NAME).lstat().st_size)
            told = read_checkpoint(Path(folder))
            order = told.step + 0.5 * told.final
            rated = retention.Kept(
                folder, told.stage, told.step, told.total_bytes, order, verified=True, final=told.final
            )
            yield replace(rated, metrics=told.metrics, measured=told.measured)


def _copy_checkpoint(item: Candidate, target: Path, moved: Moved) -> None:
    """Raises: CheckpointBroken; CheckpointUnreadable: what cannot be read just now is not given up; OSError of our disk."""
    if target.is_dir():
        try:
            if verify_checkpoint(target).run_id == item.manifest.run_id:
                return  # an earlier start came as far as this
        except CheckpointBroken:
            if target == item.folder:
                raise
        store.quarantine(target, target.parent.parent)
    described = read_checkpoint(item.folder)
    aside = target.with_name(f"{target.name}.tmp-found")
    shutil.rmtree(aside, ignore_errors=True)  # of an earlier start
    aside.mkdir(parents=True)
    try:
        for name, entry in described.files.items():
            _copy_file(item.folder, aside / name, moved, entry)
        _copy_file(item.folder, aside / MANIFEST_NAME, moved, None)
        if essence_of(read_checkpoint(aside)) != item.essence:
            raise CheckpointBroken(f"{item.folder} changed while it was copied")
        files.sync_folder(aside)
        aside.rename(target)
        files.sync_folder(target.parent)
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise


def _copy_file(folder: Path, target: Path, moved: Moved, expected: FileEntry | None) -> None:
    chunks, max_bytes = read_chunks(folder, target.name.removesuffix(".part")), expected.bytes if expected else None
    with open(target, "xb") as file:
        digest, count = hashing.copy_hashed(chunks, file, max_bytes=max_bytes, on_chunk=moved)
        file.flush()
        os.fsync(file.fileno())
    if expected and (digest != expected.xxh3_128 or count != expected.bytes):
        raise CheckpointBroken(
            f"{folder} does not match its manifest",
            f"{target.name}: expected xxh3 {expected.xxh3_128[:12]}…, found {digest[:12]}…",
        )


def _copy_output(path: Path, target: Path, moved: Moved, watcher: Watcher) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    aside = target.with_name(target.name + ".part")
    aside.unlink(missing_ok=True)
    try:
        untrusted_io.copy_file(path, aside, moved, durable=True)
        aside.rename(target)
    except untrusted_io.SourceUnreadable as error:
        watcher.note(f"the output {path} was passed over: {error}")
    finally:
        aside.unlink(missing_ok=True)


def _outputs_of(found: Found, watcher: Watcher) -> dict[Path, Path]:
    """The plain files that the run had made, by their paths, where they lie beside the database that knows it."""
    top = _folder_of(found, "outputs")
    if top is None:
        return {}
    names = ((Path(folder), name) for folder, _, names in os.walk(top) for name in names)
    paths = [folder / name for folder, name in islice(names, OUTPUTS + 1)]
    if len(paths) > OUTPUTS:
        watcher.note(f"{top} holds more than {OUTPUTS} files: the first {OUTPUTS} of them are copied")
    return {path: top for path in paths[:OUTPUTS] if stat.S_ISREG(path.lstat().st_mode)}


def _values_of(found: Found, ours: Path) -> dict[Path, Path]:
    """What the run had computed once (worker/cached.py) and has not here, as `_outputs_of`. A rank reads such a value as a
    stranger's: bounded JSON, under the very key that it asks for."""
    top, values = _folder_of(found, CACHE_FOLDER), dict[Path, Path]()
    with contextlib.suppress(OSError):  # there is none, or it cannot be read now: it is computed again
        for entry in islice(os.scandir(top), OUTPUTS) if top else ():
            is_one = FILE_PATTERN.fullmatch(entry.name) and entry.name.endswith(".json")
            is_one = (
                is_one and entry.is_file(follow_symlinks=False) and not Path(ours, CACHE_FOLDER, entry.name).exists()
            )
            if is_one and entry.stat(follow_symlinks=False).st_size <= MAX_CACHED_BYTES and len(values) < VALUES:
                values[Path(entry.path)] = Path(entry.path).parent
    return values


def _folder_of(found: Found, name: str) -> Path | None:
    """A folder of the run, where it lies beside the database that knows it."""
    if not (found.rows and found.database):
        return None
    top = found.database.parent / "runs" / found.rows.run["name"] / str(found.rows.run["number"]) / name
    return top if top.resolve() == top else None  # else somebody's link


def _room_for(first: Sequence[Candidate], outputs: Iterable[Path], root: Path) -> int:
    """Bytes that are to be copied. Raises: StateUnusable when they do not fit."""
    needed = sum(item.bytes for item in first if not _target(root, item).is_dir())
    for path in outputs:
        with contextlib.suppress(OSError):  # of the source: it is passed over when it is copied
            needed += untrusted_io.allocated_bytes(path)
    root.mkdir(parents=True, exist_ok=True)
    if shutil.disk_usage(root).free < needed + RESERVE_BYTES:
        raise _no_room(root, f"{needed} bytes are to be copied, {shutil.disk_usage(root).free} are free")
    return needed


@contextlib.contextmanager
def _writing(root: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise _no_room(root, str(error)) from None
        raise StateUnusable(
            f"what was found cannot be written to {root}",
            str(error),
            next_step="point KGORCH_HOME at a folder that can be written",
        ) from None


def _no_room(root: Path, fact: str) -> StateUnusable:
    return StateUnusable(
        f"there is no room in {root} for what was found",
        fact,
        next_step="make room, or point KGORCH_HOME at a larger disk",
    )


def _counter(watcher: Watcher, total_bytes: int) -> Moved:
    done = 0

    def moved(count: int) -> None:
        nonlocal done
        done += count
        watcher.copying(done, total_bytes)

    return moved


def _target(root: Path, item: Candidate) -> Path:
    return root / item.manifest.stage / checkpoint_folder_name(item.manifest.step, final=item.manifest.final)


def _columns(folder: Path, described: Manifest) -> Columns:
    return {
        "stage": described.stage,
        "step": described.step,
        "final": described.final,
        "bytes": described.total_bytes,
        "metrics": dict(described.metrics),
        "measured": dict(described.measured),
        "created_at": datetime.fromisoformat(described.created_at),
        "source": escape_surrogates(str(folder)),
    }
