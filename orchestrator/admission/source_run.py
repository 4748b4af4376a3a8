"""What a source holds of one run: checkpoints and database rows; how far it has come, and which of several runs to resume.

Run ids, stage names and rungs in a source were written by somebody else. They identify and order; they decide nothing that is
executed without the consent that import_run.py asks for.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import xxhash

from kgorch.checkpoint.folder import readable_checkpoints
from kgorch.checkpoint.manifest import Manifest
from kgorch.db.import_run import RunRows
from kgorch.errors import KgorchError, NotFound
from kgorch.launch import rungs

MAX_RIVALS = 20
"""Runs that an error lists. A source may hold any number of them."""

ProgressKey = tuple[int, int, bool]
"""Orders checkpoints by progress: position of the stage in the plan (-1 if the plan does not have it), step, is it final."""
NO_PROGRESS: ProgressKey = (-1, -1, False)


class SettingChange(NamedTuple):
    """A rung or remedy recorded in a checkpoint or database, reduced to what could decide what runs here.

    Attributes:
        arguments: of the stage's script, a JSON object.
        anew_at: when the stage restarted from its first step because of it, so that older checkpoints do not fit; else None.
    """

    stage: str
    arguments: str
    anew_at: datetime | None = None


@dataclass(frozen=True, slots=True)
class ImportCandidate:
    """A checkpoint folder that a run could be resumed from.

    Attributes:
        manifest: without files, metrics, versions and changes. A data set may hold thousands of manifests of megabytes each, so
            only what is compared stays in memory; the file is read again when the checkpoint is copied.
        bytes: size of its files.
        essence: hash that tells whether the manifest is still the same then.
    """

    folder: Path
    manifest: Manifest
    bytes: int
    essence: str
    changes: tuple[SettingChange, ...] = ()

    @staticmethod
    def of(folder: Path, manifest: Manifest) -> ImportCandidate:
        bare = replace(manifest, files={}, metrics={}, versions={}, changes=())
        changes = tuple(_setting_changes(rungs.rows_of_manifest(manifest)[0]))
        return ImportCandidate(folder, bare, manifest.total_bytes, essence_of(manifest), changes)


def essence_of(manifest: Manifest) -> str:
    """Hash of the run id, the position and the files, with their hashes."""
    files = sorted((name, entry.bytes, entry.xxh3_128) for name, entry in manifest.files.items())
    position = [getattr(manifest.position, name) for name in manifest.position.__slots__]
    content = [manifest.run_id, manifest.stage, position, manifest.final, files]
    return xxhash.xxh3_128(json.dumps(content).encode()).hexdigest()


def _setting_changes(rows: Iterable[Mapping[str, Any]]) -> Iterator[SettingChange]:
    """The rungs that set arguments or restart a stage, without duplicates."""
    changes: dict[SettingChange, None] = {}
    for row in rows:
        settings = row["settings"]
        arguments = settings.get("settings", settings).get("arguments") or {}
        is_restart = bool(settings.get(rungs.ANEW))
        if arguments or is_restart:
            # A time in the future would make every checkpoint of the stage too old.
            at = min(row["at"], datetime.now(UTC)) if is_restart else None
            changes[SettingChange(row["stage"], json.dumps(arguments, sort_keys=True), at)] = None
    yield from changes


@dataclass(slots=True)
class SourceRun:
    """What the sources hold of one run.

    Attributes:
        rows: from the database that has its newest session; None if no database knows the run.
        database: the file of that database.
        folder: the run's folder where no database tells it: by the path of a checkpoint, or by a launch. None if it is not known.
        events: kind and facts, to be recorded when the run is imported.
    """

    run_id: str
    checkpoints: list[ImportCandidate] = field(default_factory=list)
    rows: RunRows | None = None
    database: Path | None = None
    folder: Path | None = None
    events: list[tuple[str, dict[str, Any]]] = field(default_factory=list)

    def furthest_first(self, stages: Sequence[str]) -> list[ImportCandidate]:
        return sorted(self.checkpoints, key=lambda item: progress_of(stages, item.manifest), reverse=True)

    @property
    def unfinished_stages(self) -> set[str]:
        """Stages whose newest checkpoint is not their final one."""
        newest: dict[str, tuple[int, bool]] = {}
        for item in self.checkpoints:
            at = item.manifest.step, item.manifest.final
            newest[item.manifest.stage] = max(newest.get(item.manifest.stage, at), at)
        return {stage for stage, (_, final) in newest.items() if not final}

    def progress(self, stages: Sequence[str]) -> ProgressKey:
        return max((progress_of(stages, item.manifest) for item in self.checkpoints), default=NO_PROGRESS)

    @property
    def is_outdated(self) -> bool:
        return self.rows is not None and self.rows.outdated

    @property
    def has_progress(self) -> bool:
        return bool(self.checkpoints) or bool(self.rows and (self.rows.finished or self.rows.checkpoints))

    @property
    def changes(self) -> list[SettingChange]:
        """Those that its rows and its checkpoints record, without duplicates."""
        of_rows = _setting_changes(self.rows.rungs if self.rows else [])
        return list(dict.fromkeys([*of_rows, *(change for item in self.checkpoints for change in item.changes)]))

    def drop_superseded_checkpoints(self) -> None:
        """Drop checkpoints of a stage that has restarted since: their weights do not fit the changed arguments."""
        restarts: dict[str, datetime] = {}
        for change in self.changes:
            if change.anew_at:
                restarts[change.stage] = max(change.anew_at, restarts.get(change.stage, change.anew_at))
        self.checkpoints = [
            item
            for item in self.checkpoints
            if not (at := restarts.get(item.manifest.stage)) or datetime.fromisoformat(item.manifest.created_at) >= at
        ]


def order_stages(stages: Sequence[str], unfinished: Collection[str], *finished: Collection[str] | None) -> list[str]:
    """The stages of the plan, with the one being trained moved to the end.

    A run that was extended (`kgorch start --extend`) trains a stage again although stages after it have final checkpoints. With
    that stage last, the checkpoint with the greatest ProgressKey is the one to resume from.

    Args:
        unfinished: stages whose newest checkpoint is not their final one.
        finished: stages that are done, one collection for each database that knows the run; None for a database that does not.
    """
    current = [next((name for name in stages if name not in done), None) for done in finished if done is not None]
    last = max((name for name in current if name and name in unfinished), key=stages.index, default=None)
    return [*(name for name in stages if name != last), last] if last else list(stages)


def progress_of(stages: Sequence[str], manifest: Manifest) -> ProgressKey:
    position = stages.index(manifest.stage) if manifest.stage in stages else -1
    return position, manifest.step, manifest.final


def local_run(run_id: str, root: Path, stages: Sequence[str]) -> SourceRun:
    """A run of this state folder in the same form: of each stage the newest checkpoint with a readable manifest."""
    newest = [
        next(
            (ImportCandidate.of(*pair) for pair in readable_checkpoints(root / stage) if pair[1].run_id == run_id), None
        )
        for stage in stages
    ]
    return SourceRun(run_id, [item for item in newest if item])


def choose_run(
    runs: Mapping[str, SourceRun], ours: SourceRun | None, excluded: Iterable[str], wanted: str | None, stages: Sequence[str]
) -> SourceRun | None:  # fmt: skip
    """What the sources hold of the run to resume; None if that is nothing, or if there is no run to resume.

    No run is preferred for its age: which of two trainings is meant is not in the files, and a wrong guess costs hours. The user
    decides once.

    Args:
        runs: those of the sources, by run id.
        ours: our own newest run of the name.
        excluded: ids that are not offered: older or superseded runs of ours, and those that the user has decided against.
        wanted: the run id that the user asks for.
    Raises:
        KgorchError: there are several; it lists them.
        NotFound: the wanted one is not there.
    """
    own = [ours.run_id] if ours else []
    others = [item for key, item in runs.items() if key not in {*own, *excluded} and not item.is_outdated]
    # A run without any progress loses nothing if it is not resumed, so it is no reason to stop and ask.
    if advanced := [item for item in others if item.has_progress]:
        others = advanced
    elif ours:
        others = []
    if wanted:
        if wanted not in {*own, *runs}:
            lines = _lines([*([ours] if ours else []), *runs.values()], stages)
            raise NotFound(
                f"there is no run {wanted} here or in the sources", *lines, next_step="give one of these ids"
            )
        return runs.get(wanted)
    contenders = [*own, *(item.run_id for item in others)]
    if len(contenders) > 1:
        raise KgorchError(
            f"there are {len(contenders)} runs of this name here and in the sources",
            *_lines([*([ours] if ours else []), *others], stages),
            next_step="kgorch start PLAN --run RUN_ID resumes one of them; --fresh begins a new run",
        )
    return runs.get(contenders[0]) if contenders else None


def _lines(items: Iterable[SourceRun], stages: Sequence[str]) -> list[str]:
    """What a user chooses by: run id, progress, when that was, and where it is."""
    lines: dict[str, str] = {}
    for item in items:
        if item.checkpoints:
            newest = item.furthest_first(stages)[0]
            at = datetime.fromisoformat(newest.manifest.created_at)
            text = f"step {newest.manifest.step} of {newest.manifest.stage}, {at:%Y-%m-%d %H:%M} UTC, {newest.folder}"
        elif item.rows:
            text = f"no checkpoint, begun {item.rows.run['created_at']:%Y-%m-%d %H:%M} UTC, {item.database}"
        else:
            text = "no checkpoint, here"
        lines.setdefault(item.run_id, f"{item.run_id}: {text}")
    more = [f"… {len(lines) - MAX_RIVALS} more"] if len(lines) > MAX_RIVALS else []
    return [*list(lines.values())[:MAX_RIVALS], *more]
