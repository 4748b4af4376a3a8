"""What a checkpoint folder holds, as its manifest lists it. No file is read here.

    step-00000042/            (…-final when it closes a stage)
      manifest.json           written last: the folder is a checkpoint once this file exists
      state.json              the tracked objects with their tensors cut out (written by rank 0)
      sharding.json           version 2 alone: how tensors are sharded over ranks (sharding.py; written by rank 0)
      rank0.safetensors …     each rank's share of the replicated tensors, and its own buffers
      rank0.json …            each rank's own values (random states), and the entry of its shard

A tensor that lies in several shards belongs to each rank by itself; another number of ranks reads rank 0's. Names of files
are plain: nothing that a manifest says leads out of its folder.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from typing import Any

from kgorch import untrusted_io
from kgorch.checkpoint.json_values import (
    cleaned_line,
    count,
    hash_digits,
    json_list,
    json_table,
    number,
    text_line,
    utc_instant,
)
from kgorch.errors import CheckpointUnreadable
from kgorch.protocol.values import escape_surrogates

MANIFEST_NAME = "manifest.json"
MANIFEST_FORMAT = "kgorch-checkpoint"
MANIFEST_VERSION, SHARDED_VERSION = 1, 2
"""Without and with sharded tensors. A checkpoint has the lowest version that says all of it, so that an older kgorch reads those
without, and refuses those with sharded tensors as newer than itself."""

MAX_WORLD_SIZE = 1 << 16
FOLDER_PATTERN = re.compile(r"step-\d{8,}(-final)?")
FILE_PATTERN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
LEFTOVER_PATTERN = re.compile(FOLDER_PATTERN.pattern + r"(\.tmp-[\w.-]+|\.dropping)")
"""Folders that a kill leaves of a save or of a deletion."""


@dataclass(frozen=True, slots=True)
class FileEntry:
    """A file of the checkpoint.

    Attributes:
        bytes: its size.
        xxh3_128: its hash, as 32 hexadecimal digits.
    """

    bytes: int
    xxh3_128: str


@dataclass(frozen=True, slots=True)
class Position:
    """Where a training is, between two optimizer steps.

    Attributes:
        loop: `session.epochs()` loops of the stage that are over.
        epoch: epochs of this loop that are over.
        batch: global batches of this epoch that are used up.
        step: optimizer steps since the stage began.
        samples: samples used up since the stage began, over all ranks.
    """

    loop: int = 0
    epoch: int = 0
    batch: int = 0
    step: int = 0
    samples: int = 0


@dataclass(frozen=True, slots=True)
class Adjustment:
    """A rung of the memory ladder or a remedy, with the step from which it holds.

    It is a row of the table of rungs. Manifests repeat it because a checkpoint outlives its database.

    Attributes:
        step: of the stage, before which it was applied.
        rung: name of the rung or the remedy.
        why: the reason, in words.
        at: UTC instant, ISO 8601.
        settings: {"settings": …} (core/memory/memory_ladder.py), or an entry of the schedule without its step
            (core/health/training_health.py).
        device: on which it was found to be necessary.
        world: number of ranks there.
        up: a rung was undone.
        changes_result: the training's numbers are not those that they would have been.
    """

    step: int
    rung: str
    why: str
    at: str
    settings: Mapping[str, Any]
    device: str
    world: int
    up: bool = False
    changes_result: bool = False

    @staticmethod
    def from_document(document: Mapping[str, Any]) -> Adjustment:
        """Raises: ValueError, KeyError. The meaning of the settings is not checked."""
        return Adjustment(
            step=count(document["step"]),
            rung=cleaned_line(document["rung"]),
            why=cleaned_line(document["why"]),
            at=utc_instant(document["at"]),
            settings=json_table(document["settings"]),
            device=cleaned_line(document["device"]),
            world=count(document["world"]),
            up=document["up"] is True,
            changes_result=document["changes_result"] is True,
        )


@dataclass(frozen=True, slots=True)
class Manifest:
    """The content of manifest.json.

    Attributes:
        run: name of the run.
        run_id: identity of the run.
        stage: name of the stage.
        position: of the training.
        world_size: number of ranks; fewer processes may have computed them (worker/ranks/virtual_ranks.py).
        created_at: UTC instant, ISO 8601.
        final: the checkpoint closes its stage.
        plan_hash: identity of the plan.
        metrics: reported last, by name.
        versions: of the libraries, by name.
        files: of the folder, by name; the manifest itself is not among them.
        divisible: fewer processes may compute the ranks: every step so far went through session.backward.
        changes: of the stage, oldest first, as far as the attempt knew of them.
        measured: by metric, the step on whose weights it was measured; absent for those of older versions.
        sharded: some tensors lie in pieces (sharding.py).
    """

    run: str
    run_id: str
    stage: str
    position: Position
    world_size: int
    created_at: str
    final: bool = False
    plan_hash: str = ""
    metrics: Mapping[str, float] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, FileEntry] = field(default_factory=dict)
    divisible: bool = False
    changes: Sequence[Adjustment] = ()
    measured: Mapping[str, int] = field(default_factory=dict)
    sharded: bool = False

    @property
    def step(self) -> int:
        return self.position.step

    @property
    def total_bytes(self) -> int:
        return sum(entry.bytes for entry in self.files.values())

    def is_older_than(self, at: datetime) -> bool:
        """Whether it was created before that instant: its stage may have begun anew then."""
        return datetime.fromisoformat(self.created_at) < at


def creation_instant(changes: Sequence[Adjustment]) -> str:
    """Of a manifest that names these changes: now, and not before any of them, though the clock was put back since.

    By it a stage that has begun anew is told from its former beginning.
    """
    return max((datetime.now(UTC), *(datetime.fromisoformat(change.at) for change in changes))).isoformat()


def checkpoint_folder_name(step: int, *, final: bool) -> str:
    return f"step-{step:08d}" + ("-final" if final else "")


def shard_names(manifest: Manifest) -> list[str]:
    """The shards that a manifest lists, in the order of their ranks; other files in the folder are ignored."""
    ranked = {
        int(match[1]): name for name in manifest.files if (match := re.fullmatch(r"rank(\d+)\.safetensors", name))
    }
    return [ranked[rank] for rank in sorted(ranked)]


def manifest_document(manifest: Manifest) -> dict[str, Any]:
    """The JSON document that `parse_manifest` reads."""
    content = asdict(manifest)
    version = SHARDED_VERSION if content.pop("sharded") else MANIFEST_VERSION
    return {"format": MANIFEST_FORMAT, "version": version, **content}


def parse_manifest(content: bytes) -> Manifest:
    """A manifest out of bytes that may come from anywhere.

    Raises: ValueError, which says what is wrong; CheckpointUnreadable for a newer format.
    """
    try:
        return _manifest(json_table(untrusted_io.parse_json(content)))
    except KeyError as error:
        raise ValueError(f"it lacks {error}") from None


def _manifest(document: dict[str, Any]) -> Manifest:
    _check_version(document)
    if not 1 <= count(document["world_size"]) <= MAX_WORLD_SIZE:
        raise ValueError(f"world_size {document['world_size']}")
    return Manifest(
        run=text_line(document["run"]),
        run_id=text_line(document["run_id"]),
        stage=text_line(document["stage"]),
        position=_position(document["position"]),
        world_size=document["world_size"],
        created_at=utc_instant(document["created_at"]),
        final=document["final"] is True,
        divisible=document.get("divisible") is True,
        plan_hash=text_line(document["plan_hash"]),
        # a script chooses the names of its metrics: a strange one must not make its checkpoints unreadable
        metrics={escape_surrogates(key): number(value) for key, value in json_table(document["metrics"]).items()},
        versions={text_line(key): text_line(value) for key, value in json_table(document["versions"]).items()},
        files=_files(document["files"]),
        changes=tuple(Adjustment.from_document(json_table(item)) for item in json_list(document.get("changes", []))),
        measured={
            escape_surrogates(key): count(step) for key, step in json_table(document.get("measured", {})).items()
        },
        sharded=document["version"] == SHARDED_VERSION,
    )


def _check_version(document: dict[str, Any]) -> None:
    """A newer format is no proof of damage: it must not be quarantined as broken."""
    if document.get("format") != MANIFEST_FORMAT:
        raise ValueError(f"not a {MANIFEST_FORMAT}")
    if count(document["version"]) > SHARDED_VERSION:
        raise CheckpointUnreadable(
            f"a checkpoint was written by a newer kgorch, in format {document['version']}",
            f"this one reads up to format {SHARDED_VERSION}",
            next_step="install that newer kgorch",
            error_code="KG603",
        )
    if document["version"] not in (MANIFEST_VERSION, SHARDED_VERSION):
        raise ValueError(f"version {document['version']!r}")


def _files(value: Any) -> dict[str, FileEntry]:
    files = {
        name: FileEntry(count(json_table(entry)["bytes"]), hash_digits(entry["xxh3_128"]))
        for name, entry in json_table(value).items()
    }
    if strange := [name for name in files if not FILE_PATTERN.fullmatch(name) or name == MANIFEST_NAME]:
        raise ValueError(f"not a plain file name: {strange[0]!r:.80}")
    return files


def _position(value: Any) -> Position:
    position = {name: count(item) for name, item in json_table(value).items()}
    if unknown := position.keys() - Position.__dataclass_fields__.keys():
        raise ValueError(f"position has no {min(unknown)!r:.80}")
    return Position(**position)
