"""What a checkpoint folder holds and how it is trusted: shared by the worker that writes and the supervisor that reads.

    step-00000042/            (…-final when it closes a stage)
      manifest.json           written last: this file is what makes the folder a checkpoint
      state.json              the tracked objects with their tensors cut out (rank 0 writes it)
      rank0.safetensors …     each rank's share of the replicated tensors, and its own buffers
      rank0.json …            each rank's own values (random states), and the entry of its shard

A tensor that lies in several shards is each rank's own; another number of ranks reads rank 0's.
Nothing here runs code from the folder, follows a link, or opens a name that leads out of it.
"""

from __future__ import annotations

import errno
import json
import os
import re
import stat
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import xxhash

from orchestrator.errors import CheckpointBroken, CheckpointUnreadable

FORMAT = "kgorch-checkpoint"
VERSION = 1
NAME = "manifest.json"
MAX_MANIFEST_BYTES = 4 << 20
CHUNK_BYTES = 8 << 20
FOLDER = re.compile(r"step-\d{8,}(-final)?")
FILE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


@dataclass(frozen=True, slots=True)
class FileEntry:
    """A file of the checkpoint: its size, and its xxh3_128 as 32 hexadecimal digits."""

    bytes: int
    xxh3_128: str


@dataclass(frozen=True, slots=True)
class Position:
    """Where a training stands, between two optimizer steps.

    Attributes:
        loop: how many `session.epochs()` loops of the stage are over.
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
class Manifest:
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

    @property
    def step(self) -> int:
        return self.position.step

    @property
    def total_bytes(self) -> int:
        return sum(entry.bytes for entry in self.files.values())


def folder_name(step: int, *, final: bool) -> str:
    return f"step-{step:08d}" + ("-final" if final else "")


def fsync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_durably(path: Path, content: bytes) -> FileEntry:
    """Write aside, flush to disk, rename: after it the file is whole or not there."""
    aside = path.with_name(path.name + ".part")
    with open(aside, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    aside.rename(path)
    return FileEntry(len(content), xxhash.xxh3_128(content).hexdigest())


def write(folder: Path, manifest: Manifest) -> None:
    document = {"format": FORMAT, "version": VERSION, **asdict(manifest)}
    write_durably(folder / NAME, json.dumps(document, indent=1, sort_keys=True).encode())


def read(folder: Path) -> Manifest:
    """The folder's manifest, its form checked and its files' sizes compared; contents are not read.

    Raises: CheckpointBroken; CheckpointUnreadable when that is not proven.
    """
    manifest = described(folder)
    for name, entry in manifest.files.items():
        try:
            found = (folder / name).lstat()
        except OSError as error:
            raise _verdict(error, f"{folder} lacks {name}", str(error)) from None
        if not stat.S_ISREG(found.st_mode) or found.st_size != entry.bytes:
            raise CheckpointBroken(
                f"{folder} does not match its manifest", f"{name}: expected {entry.bytes} bytes, found {found.st_size}"
            )
    return manifest


def described(folder: Path) -> Manifest:
    """What the folder's manifest says, its form checked; nothing else is looked at.

    Raises: CheckpointBroken; CheckpointUnreadable.
    """
    try:
        if (folder / NAME).lstat().st_size > MAX_MANIFEST_BYTES:
            raise CheckpointBroken(f"{folder / NAME} is larger than any manifest ({MAX_MANIFEST_BYTES} bytes)")
        with _open(folder, NAME) as file:
            return _parse(json.loads(file.read(MAX_MANIFEST_BYTES + 1)))
    except OSError as error:
        raise _verdict(error, f"{folder} has no readable manifest", str(error)) from None
    except (ValueError, TypeError, KeyError, ArithmeticError, RecursionError) as error:
        raise CheckpointBroken(f"{folder / NAME} is not a manifest", f"{type(error).__name__}: {error}"[:300]) from None


def verify(folder: Path) -> Manifest:
    """The folder's manifest after every byte of it was read back and hashed.

    Raises: CheckpointBroken, with the file, what was expected and what was found; CheckpointUnreadable.
    """
    manifest = read(folder)
    for name, entry in manifest.files.items():
        found = hash_of(folder, name)
        if found != entry.xxh3_128:
            raise CheckpointBroken(
                f"{folder} does not match its manifest",
                f"{name}: expected xxh3 {entry.xxh3_128[:12]}…, found {found[:12]}…",
            )
    return manifest


def hash_of(folder: Path, name: str) -> str:
    digest = xxhash.xxh3_128()
    for chunk in chunks(folder, name):
        digest.update(chunk)
    return digest.hexdigest()


def chunks(folder: Path, name: str) -> Iterator[bytes]:
    """The bytes of a file of the folder, no link followed.

    Raises: CheckpointBroken; CheckpointUnreadable.
    """
    try:
        with _open(folder, name) as file:
            while chunk := file.read(CHUNK_BYTES):
                yield chunk
    except OSError as error:
        raise _verdict(error, f"{folder} cannot be read back", f"{name}: {error}") from None


def shards(described: Manifest) -> list[str]:
    """The names of the shards that a manifest lists, in the order of their ranks; what else lies there is nobody's."""
    ranked = {
        int(match[1]): name for name in described.files if (match := re.fullmatch(r"rank(\d+)\.safetensors", name))
    }
    return [ranked[rank] for rank in sorted(ranked)]


def checkpoints(root: Path) -> list[Path]:
    """Folders named as checkpoints, newest first; a final one stands before a plain one of the same step."""
    try:
        names = [
            entry.name
            for entry in os.scandir(root)
            if FOLDER.fullmatch(entry.name) and entry.is_dir(follow_symlinks=False)
        ]
    except FileNotFoundError:
        return []
    return [root / name for name in sorted(names, key=lambda name: (int(name.split("-")[1]), name), reverse=True)]


def newest_readable(root: Path) -> Iterator[tuple[Path, Manifest]]:
    """Newest first, the checkpoints whose manifests can be read and whose files have the right sizes."""
    for folder in checkpoints(root):
        try:
            yield folder, read(folder)
        except (CheckpointBroken, CheckpointUnreadable):
            continue


def _verdict(error: OSError, what: str, fact: str) -> CheckpointBroken | CheckpointUnreadable:
    """A file that is not there, or is a link or a folder, is proof; a disk or network that fails to read is none."""
    proof = (errno.ENOENT, errno.ELOOP, errno.ENOTDIR, errno.EISDIR, errno.EINVAL, errno.ENAMETOOLONG)
    return (CheckpointBroken if error.errno in proof else CheckpointUnreadable)(what, fact)


def _open(folder: Path, name: str) -> Any:
    flags = (
        os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
    )  # a pipe reads as empty instead of waiting for ever
    return os.fdopen(os.open(folder / name, flags), "rb")


def _parse(document: Any) -> Manifest:
    """A manifest out of JSON that may come from anywhere. Raises ValueError, TypeError or KeyError."""
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise ValueError(f"not a {FORMAT}")
    if type(document["version"]) is int and document["version"] > VERSION:
        raise CheckpointUnreadable(
            f"a checkpoint was written by a newer kgorch, in format {document['version']}",
            f"this one reads up to format {VERSION}",
            next_step="install that newer kgorch",
        )
    if document["version"] != VERSION:
        raise ValueError(f"version {document['version']!r}")
    files = {
        str(name): FileEntry(_count(entry["bytes"]), _hex(entry["xxh3_128"]))
        for name, entry in _table(document["files"]).items()
    }
    if strange := [name for name in files if not FILE.fullmatch(name) or name == NAME]:
        raise ValueError(f"not a plain file name: {strange[0]!r}")
    return Manifest(
        run=_text(document["run"]),
        run_id=_text(document["run_id"]),
        stage=_text(document["stage"]),
        position=Position(**{key: _count(value) for key, value in _table(document["position"]).items()}),
        world_size=_count(document["world_size"]),
        created_at=datetime.fromisoformat(_text(document["created_at"])).astimezone(UTC).isoformat(),
        final=document["final"] is True,
        plan_hash=_text(document["plan_hash"]),
        metrics={str(key): float(value) for key, value in _table(document["metrics"]).items()},
        versions={str(key): _text(value) for key, value in _table(document["versions"]).items()},
        files=files,
    )


def _table(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise TypeError(f"expected a table, found {value!r:.80}")
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"expected text, found {value!r:.80}")
    return value


def _hex(value: Any) -> str:
    if not re.fullmatch(r"[0-9a-f]{32}", _text(value)):
        raise ValueError(f"expected an xxh3_128, found {value!r:.80}")
    return str(value)


def _count(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 1 << 62:  # SQLite's integers have 64 bits
        raise ValueError(f"expected a whole number from 0, found {value!r:.80}")
    return value
