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
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import xxhash

from orchestrator import foreign
from orchestrator.errors import CheckpointBroken, CheckpointUnreadable
from orchestrator.wire import plain_text

FORMAT = "kgorch-checkpoint"
VERSION = 1
NAME = "manifest.json"
MAX_MANIFEST_BYTES = 4 << 20
CHUNK_BYTES = 8 << 20
READ_BYTES = 256 << 10  # stays in a core's cache between the kernel's copy and the hash
READERS = 4
MAX_WORLD = 1 << 16
MAX_TEXT = 1000
FOLDER = re.compile(r"step-\d{8,}(-final)?")
FILE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
LEFTOVER = re.compile(FOLDER.pattern + r"(\.tmp-[\w.-]+|\.dropping)")
"""What a kill leaves of a save or of a deletion."""


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
class Change:
    """What holds from a step on: a rung of memory or a remedy, as the table of rungs has it; a checkpoint outlives its database.

    Attributes:
        settings: {"settings": …} (core/memory.py), or an entry of the schedule without its step (core/health.py).
        device, world: where it was found out.
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
    def of(document: Mapping[str, Any]) -> Change:
        """Raises: ValueError, KeyError. What the settings mean is not looked at."""
        return Change(
            step=_count(document["step"]),
            rung=_line(document["rung"]),
            why=_line(document["why"]),
            at=_instant(document["at"]),
            settings=_table(document["settings"]),
            device=_line(document["device"]),
            world=_count(document["world"]),
            up=document["up"] is True,
            changes_result=document["changes_result"] is True,
        )


@dataclass(frozen=True, slots=True)
class Manifest:
    """Attributes:
    world_size: its ranks; fewer processes may have played them (worker/ranks/virtual_ranks.py).
    divisible: they may: all steps so far went through session.backward.
    changes: of the stage, oldest first, all that the attempt knew of.
    metrics: what was reported last, by name.
    measured: the step on whose weights each of them was measured; none for what was written before this was known.
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
    changes: Sequence[Change] = ()
    measured: Mapping[str, int] = field(default_factory=dict)

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
    """A JSON file: written aside, flushed to disk, renamed. After it the file is whole or not there.

    Raises: OSError, also for what nobody could read again.
    """
    try:
        foreign.check(content)
    except ValueError as error:
        raise OSError(errno.EFBIG, str(error), str(path)) from None
    aside = path.with_name(path.name + ".part")
    with open(aside, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    aside.rename(path)
    return FileEntry(len(content), xxhash.xxh3_128(content).hexdigest())


def as_document(manifest: Manifest) -> dict[str, Any]:
    """What `parse` reads."""
    return {"format": FORMAT, "version": VERSION, **asdict(manifest)}


def write(folder: Path, manifest: Manifest) -> None:
    """Without its metrics where they make it larger than `described` reads: a good checkpoint is worth more.

    Raises: OSError, also for what nobody could read again.
    """
    content = _content(manifest)
    if len(content) > MAX_MANIFEST_BYTES and manifest.metrics:
        content = _content(replace(manifest, metrics={}))
    if len(content) > MAX_MANIFEST_BYTES:
        raise OSError(errno.EFBIG, f"a manifest of {len(content)} bytes, more than is read again", str(folder / NAME))
    try:
        parse(content)
    except ValueError as error:
        raise OSError(errno.EINVAL, f"not a manifest that could be read again: {error}", str(folder / NAME)) from None
    write_durably(folder / NAME, content)


def _content(manifest: Manifest) -> bytes:
    return json.dumps(as_document(manifest), indent=1, sort_keys=True).encode()


def read(folder: Path) -> Manifest:
    """The folder's manifest, its form checked and its files' sizes compared; contents are not read.

    Raises: CheckpointBroken; CheckpointUnreadable when that is not proven.
    """
    manifest = described(folder)
    for name, entry in manifest.files.items():
        try:
            found = (folder / name).lstat()
        except OSError as error:
            raise foreign.verdict(error, f"{folder} lacks {name}", str(error)) from None
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
        return parse(foreign.read_all(folder, NAME, MAX_MANIFEST_BYTES))
    except OSError as error:
        raise foreign.verdict(error, f"{folder} has no readable manifest", str(error)) from None
    except ValueError as error:
        raise CheckpointBroken(f"{folder / NAME} is not a manifest", str(error)[:300]) from None


def verify(folder: Path) -> Manifest:
    """The folder's manifest after every byte of it was read back and hashed, several files at a time.

    Raises: CheckpointBroken, with the file, what was expected and what was found; CheckpointUnreadable.
    """
    from concurrent.futures import ThreadPoolExecutor

    manifest = read(folder)
    pool = ThreadPoolExecutor(max_workers=READERS)
    try:
        for name, found in zip(
            manifest.files, pool.map(lambda name: hash_of(folder, name), manifest.files), strict=True
        ):
            if found != (expected := manifest.files[name].xxh3_128):
                raise CheckpointBroken(
                    f"{folder} does not match its manifest",
                    f"{name}: expected xxh3 {expected[:12]}…, found {found[:12]}…",
                )
    finally:
        pool.shutdown(cancel_futures=True)
    return manifest


def document(folder: Path, described: Manifest, name: str) -> dict[str, Any]:
    """A JSON file of the checkpoint: a table, compared with the manifest before it is taken apart.

    Raises: CheckpointBroken, CheckpointUnreadable.
    """
    entry = described.files.get(name)
    if entry is None:
        raise CheckpointBroken(f"the manifest of {folder} lists no {name}")
    try:
        content = foreign.read_all(folder, name)
        if len(content) != entry.bytes or xxhash.xxh3_128(content).hexdigest() != entry.xxh3_128:
            raise ValueError("it does not match the manifest")
        found = foreign.parse(content)
        if not isinstance(found, dict):
            raise ValueError("it holds no table")
    except OSError as error:
        raise foreign.verdict(error, f"{folder / name} cannot be read", str(error)) from None
    except ValueError as error:
        raise CheckpointBroken(f"{folder / name} is broken", str(error)[:300]) from None
    return found


def hash_of(folder: Path, name: str) -> str:
    """Raises: CheckpointBroken; CheckpointUnreadable."""
    digest = xxhash.xxh3_128()
    for chunk in chunks(folder, name):
        digest.update(chunk)
    return digest.hexdigest()


def chunks(folder: Path, name: str) -> Iterator[memoryview]:
    """The bytes of a regular file of the folder, each piece in the place of the one before.

    Raises: CheckpointBroken; CheckpointUnreadable.
    """
    buffer = memoryview(bytearray(READ_BYTES))
    try:
        with foreign.open_file(folder, name) as file:
            left = os.fstat(file.fileno()).st_size  # one that grows while it is read has no end
            while left > 0 and (count := file.readinto(buffer)):
                yield buffer[:count]
                left -= count
    except OSError as error:
        raise foreign.verdict(error, f"{folder} cannot be read back", f"{name}: {error}") from None


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


def parse(content: bytes) -> Manifest:
    """A manifest out of bytes that may come from anywhere.

    Raises: ValueError, which says what is wrong; CheckpointUnreadable for a newer format.
    """
    try:
        return _manifest(_table(foreign.parse(content)))
    except KeyError as error:
        raise ValueError(f"it lacks {error}") from None


def _manifest(document: dict[str, Any]) -> Manifest:
    if document.get("format") != FORMAT:
        raise ValueError(f"not a {FORMAT}")
    if _count(document["version"]) > VERSION:
        raise CheckpointUnreadable(
            f"a checkpoint was written by a newer kgorch, in format {document['version']}",
            f"this one reads up to format {VERSION}",
            next_step="install that newer kgorch",
        )
    if document["version"] != VERSION:
        raise ValueError(f"version {document['version']!r}")
    files = {
        name: FileEntry(_count(_table(entry)["bytes"]), _hex(entry["xxh3_128"]))
        for name, entry in _table(document["files"]).items()
    }
    if strange := [name for name in files if not FILE.fullmatch(name) or name == NAME]:
        raise ValueError(f"not a plain file name: {strange[0]!r:.80}")
    position = {name: _count(value) for name, value in _table(document["position"]).items()}
    if unknown := position.keys() - Position.__dataclass_fields__.keys():
        raise ValueError(f"position has no {min(unknown)!r:.80}")
    if not 1 <= _count(document["world_size"]) <= MAX_WORLD:
        raise ValueError(f"world_size {document['world_size']}")
    return Manifest(
        run=_text(document["run"]),
        run_id=_text(document["run_id"]),
        stage=_text(document["stage"]),
        position=Position(**position),
        world_size=document["world_size"],
        created_at=_instant(document["created_at"]),
        final=document["final"] is True,
        divisible=document.get("divisible") is True,
        plan_hash=_text(document["plan_hash"]),
        # names of figures are the script's own and must not make its checkpoints unreadable
        metrics={plain_text(key): _figure(value) for key, value in _table(document["metrics"]).items()},
        versions={_text(key): _text(value) for key, value in _table(document["versions"]).items()},
        files=files,
        changes=tuple(Change.of(_table(item)) for item in _list(document.get("changes", []))),
        measured={plain_text(key): _count(step) for key, step in _table(document.get("measured", {})).items()},
    )


def _list(value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise ValueError(f"expected a list, found {value!r:.80}")
    return value


def _table(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"expected a table, found {value!r:.80}")
    return value


def _text(value: Any) -> str:
    """One line, for databases and terminals: no control characters, no lone surrogates."""
    if not isinstance(value, str) or not value.isprintable() or len(value) > MAX_TEXT:
        raise ValueError(f"expected a line of text, found {value!r:.80}")
    return value


def _line(value: Any) -> str:
    """Of text that somebody's exception may have made: cut to what `_text` takes."""
    if not isinstance(value, str):
        raise ValueError(f"expected a line of text, found {value!r:.80}")
    return "".join(char if char.isprintable() else " " for char in plain_text(value))[:MAX_TEXT]


def _hex(value: Any) -> str:
    if not re.fullmatch(r"[0-9a-f]{32}", _text(value)):
        raise ValueError(f"expected an xxh3_128, found {value!r:.80}")
    return str(value)


def _count(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 1 << 62:  # SQLite's integers have 64 bits
        raise ValueError(f"expected a whole number from 0, found {value!r:.80}")
    return value


def _figure(value: Any) -> float:
    if type(value) not in (int, float):
        raise ValueError(f"expected a number, found {value!r:.80}")
    try:
        return float(value)
    except OverflowError:
        raise ValueError("a number beyond all measure") from None


def _instant(value: Any) -> str:
    try:
        return datetime.fromisoformat(_text(value)).astimezone(UTC).isoformat()
    except OverflowError:
        raise ValueError(f"an instant beyond the calendar: {value!r:.80}") from None
