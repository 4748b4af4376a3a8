"""One rank's part of a checkpoint: copy aside, then write, flush and name it beside the training.

Each rank fills its image at the agreed step (the only part that holds training up); a thread writes the shard, then
`rankK.json` as its done mark. Rank 0's thread waits for all marks, writes the manifest last, flushes the folder,
renames it to its name and flushes the parent. A kill at any moment leaves a folder under another name, which nobody
reads; nothing is ever overwritten.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import xxhash

from orchestrator import manifest
from orchestrator.manifest import FileEntry, Manifest
from orchestrator.wire import Saved, SaveFailed
from orchestrator.worker.board import Board
from orchestrator.worker.image import Image, layout_of, share
from orchestrator.worker.state import Captured

MARK_PATIENCE_S = 600.0


@dataclass(frozen=True, slots=True)
class Job:
    """A filled image and all that goes into the files around it.

    `own`: this rank's own part of the tree. `names`: all tensors of the state, and those that this rank writes.
    """

    number: int
    manifest: Manifest
    tree: Mapping[str, Any]
    own: Mapping[str, Any]
    names: tuple[frozenset[str], frozenset[str]]
    rng: Mapping[str, Any]
    began_s: float
    blocking_s: float


class Saver:
    """Saves of one rank, one in flight.

    Args:
        root: the stage's folder of checkpoints.
        attempt: id of this attempt; part of the temporary name, so that no dead attempt's leftovers are taken for ours.
        tell: takes Saved and SaveFailed, from the writing thread.
    """

    def __init__(
        self,
        root: Path,
        attempt: str,
        rank: int,
        world_size: int,
        board: Board,
        tell: Callable[[Saved | SaveFailed], None],
    ) -> None:
        self._root, self._attempt, self._rank, self._world, self._board, self._tell = (
            root,
            attempt,
            rank,
            world_size,
            board,
            tell,
        )
        self._image: Image | None = None
        self._thread: threading.Thread | None = None
        self._number = 0
        self.succeeded = True
        """How this rank's part of the last save ended; on rank 0, how the save did. Known after wait()."""

    def save(self, captured: Captured, rng: Mapping[str, Any], described: Manifest) -> float:
        """Copy the state aside and write it beside the training; returns the seconds that training was held up."""
        self.wait()
        began_s = time.monotonic()
        mine = share(captured.tensors, captured.own, self._rank, self._world)
        if self._image is None or self._image.layout != layout_of(mine):
            self._image = None  # let the old one go first: at most one lies in memory
            self._image = Image(mine)
        self._image.fill(mine)
        blocking_s = time.monotonic() - began_s
        self._number += 1
        names = frozenset(captured.tensors), frozenset(mine)
        job = Job(self._number, described, captured.tree, captured.own_tree, names, rng, began_s, blocking_s)
        self._thread = threading.Thread(target=self._persist, args=(job,), name="kgorch-save")
        self._thread.start()
        return blocking_s

    def wait(self) -> None:
        if self._thread:
            self._thread.join()

    def _persist(self, job: Job) -> None:
        aside = self._root / f"{manifest.folder_name(job.manifest.step, final=job.manifest.final)}.tmp-{self._attempt}"
        try:
            aside.mkdir(parents=True, exist_ok=True)
            self._write_share(aside, job)
            if self._rank == 0:
                self._publish(aside, job)
            elif (failed := self._board.failed_rank(job.number)) is not None:
                raise OSError(errno.EIO, f"rank {failed} could not write its share")
            self.succeeded = True
        except OSError as error:
            self.succeeded = False
            self._board.save_failed(job.number)
            self._clear(aside)
            self._tell(SaveFailed(self._attempt, self._rank, job.manifest.step, f"{type(error).__name__}: {error}"))

    def _clear(self, aside: Path) -> None:
        """Take away what this rank has written of a save that failed; rank 0 takes all. The last one out takes the folder."""
        if self._rank == 0:
            shutil.rmtree(aside, ignore_errors=True)
            return
        for path in aside.glob(f"rank{self._rank}.*"):
            path.unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            aside.rmdir()

    def _write_share(self, aside: Path, job: Job) -> None:
        assert self._image is not None
        room = os.statvfs(aside)
        if room.f_bavail * room.f_frsize < len(self._image) + (1 << 20):
            raise OSError(
                errno.ENOSPC,
                f"no room for {len(self._image)} bytes (free: {room.f_bavail * room.f_frsize})",
                str(aside),
            )
        shard = f"rank{self._rank}.safetensors"
        entry = _write_hashed(aside / shard, self._image.content)
        files = {shard: asdict(entry)}
        if self._rank == 0:
            files["state.json"] = asdict(manifest.write_durably(aside / "state.json", json.dumps(job.tree).encode()))
        manifest.write_durably(
            aside / f"rank{self._rank}.json",
            json.dumps({"rng": job.rng, "own": job.own, "tensors": sorted(job.names[1]), "files": files}).encode(),
        )

    def _publish(self, aside: Path, job: Job) -> None:
        files: dict[str, FileEntry] = {}
        missing = set(job.names[0])
        for rank in range(self._world):
            content = self._mark_of(aside, rank, job.number)
            files[f"rank{rank}.json"] = FileEntry(len(content), xxhash.xxh3_128(content).hexdigest())
            mark = json.loads(content)
            files |= {name: FileEntry(**entry) for name, entry in mark["files"].items()}
            missing -= set(mark["tensors"])
        if missing:  # ranks whose tensors differ have split them differently
            raise OSError(errno.EINVAL, f"no rank has written {min(missing)}: the ranks track different tensors")
        manifest.write(aside, replace(job.manifest, files=files))
        manifest.fsync_folder(aside)
        place = self._root / manifest.folder_name(job.manifest.step, final=job.manifest.final)
        if place.exists():  # an earlier attempt put the same step there and died before it told; ours says nothing new
            shutil.rmtree(aside)
        else:
            aside.rename(place)
        manifest.fsync_folder(self._root)
        total = sum(entry.bytes for entry in files.values())
        self._tell(
            Saved(
                self._attempt,
                str(place),
                job.manifest.step,
                total,
                job.blocking_s,
                time.monotonic() - job.began_s,
                job.manifest.final,
            )
        )

    def _mark_of(self, aside: Path, rank: int, number: int) -> bytes:
        until = time.monotonic() + MARK_PATIENCE_S
        while True:
            try:
                return (aside / f"rank{rank}.json").read_bytes()
            except FileNotFoundError:
                pass
            if (failed := self._board.failed_rank(number)) is not None:
                raise OSError(errno.EIO, f"rank {failed} could not write its share")
            if time.monotonic() > until:
                raise OSError(errno.ETIMEDOUT, f"rank {rank} has not written its share for {MARK_PATIENCE_S:.0f} s")
            time.sleep(0.002)


def _write_hashed(path: Path, content: torch.Tensor) -> FileEntry:
    """Stream the image to disk in chunks, hashing on the way; both let the training's thread run."""
    digest, view = xxhash.xxh3_128(), memoryview(content.numpy())  # type: ignore[arg-type]
    with open(path, "xb", buffering=0) as file:
        for start in range(0, len(view), manifest.CHUNK_BYTES):
            chunk = view[start : start + manifest.CHUNK_BYTES]
            digest.update(chunk)
            while chunk:
                chunk = chunk[file.write(chunk) :]
        os.fsync(file.fileno())
    return FileEntry(len(view), digest.hexdigest())
