"""Values that a run computes once (`session.cached`): one JSON file per name in the run's folder, `cached/NAME.json`.

The next session reads the file instead of computing the value. On a new machine it is imported with the run's other results
(admission/import_files.py). So it may have been written by anybody: it is bounded JSON, it runs no code and names no path, and it
counts only under the very key that is asked for. The script has to check what it says.

A file is a line of JSON (format, key, bytes and hash of the rest) and then the value. Without kgorch nothing is stored.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import xxhash

from kgorch import untrusted_io
from kgorch.checkpoint.manifest import FILE_PATTERN
from kgorch.core.codes import EventKind
from kgorch.errors import KgorchError
from kgorch.protocol.launch_spec import LaunchSpec
from kgorch.protocol.run_files import MAX_CACHED_BYTES
from kgorch.system import files
from kgorch.worker.ranks.consensus_board import PeersLost
from kgorch.worker.ranks.process_group import UNLIMITED, RankInfo
from kgorch.worker.telemetry.event_sender import EventSender
from kgorch.worker.telemetry.progress_marker import ProgressMarker

FORMAT, VERSION = "kgorch-cached", 1
HEAD_BYTES = MAX_CACHED_BYTES - untrusted_io.MAX_JSON_BYTES
SAID_S, TOLD_S = 10.0, 60.0
"""Seconds between two lines of progress in the log, and between two entries in the journal."""


class ProgressLog:
    """Reports the progress of a long computation.

    Args:
        marker: the computation is shown to be no hang there.
        tell: sends a kind of event and its facts to the supervisor.
    """

    def __init__(self, marker: ProgressMarker, tell: Callable[[str, dict[str, str]], None]) -> None:
        self._marker, self._tell = marker, tell
        self._what = ""
        self._began_s = self._said_s = self._told_s = 0.0

    def to(self, what: str, done: int, total: int | None) -> None:
        """See Session.progress. Most calls print and send nothing."""
        if self._marker.where in ("data", "evaluation"):
            self._marker.enter(self._marker.where)
        now_s = time.monotonic()
        if what != self._what:
            self._what, self._began_s, self._said_s, self._told_s = what, now_s, now_s, now_s - TOLD_S + SAID_S
        is_over = done == total
        if now_s - self._said_s < SAID_S and not is_over:
            return
        self._said_s, passed_s = now_s, now_s - self._began_s
        left_s = f"{passed_s * (total - done) / done:.0f}" if total and done else ""
        left = f", {left_s} s left" if left_s and not is_over else ""
        print(f"{what}: {done}{f' of {total}' if total else ''} in {passed_s:.0f} s{left}", flush=True)
        if now_s - self._told_s >= TOLD_S or is_over:
            self._told_s = now_s
            self._tell(
                EventKind.READING, {"what": what, "done": str(done), "total": str(total or ""), "left_s": left_s}
            )


class ValueCache:
    """`session.cached`: values that a run computes once, the same on all ranks.

    Args:
        launch: None when the script runs alone; then nothing is stored.
    """

    def __init__(
        self, launch: LaunchSpec | None, member: RankInfo, marker: ProgressMarker, events: EventSender
    ) -> None:
        self._rank, self._marker, self._events = member.rank, marker, events
        self._store = ValueStore(Path(launch.cached) if launch and launch.cached else None)
        self._shared = ValueBroadcast(member.rank, member.world_size)

    def get(self, name: str, compute: Callable[[], Any], key: Any) -> Any:
        """See Session.cached."""
        check_name(name)
        hashed, before = key_of(key), self._marker.where
        self._marker.enter("data" if self._rank == 0 else "wait")
        content = self._shared.of_first(lambda: self._stored_or_computed(name, compute, hashed))
        self._marker.enter(before)
        return json.loads(content)

    def _stored_or_computed(self, name: str, compute: Callable[[], Any], key: str) -> bytes:
        if (stored := self._store.read(name, key)) is not None:
            return stored
        value = value_of(name, compute())
        try:
            self._store.write(name, key, value)
        except OSError as error:  # a full disk: the next session computes it again
            print(f"kgorch: session.cached({name!r}) is not kept: {error}", flush=True)
            self._events.send(EventKind.NOT_CACHED, {"name": name, "why": str(error)[:500]})
        return value


class ValueStore:
    """The files of values.

    Args:
        folder: None where nothing is stored.
    """

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder

    def read(self, name: str, key: str) -> bytes | None:
        """The value as valid JSON; None where there is none under this key, or it is broken."""
        if self._folder is None:
            return None
        try:
            content = untrusted_io.read_all(self._folder, f"{name}.json", MAX_CACHED_BYTES)
            head, _, value = content.partition(b"\n")
            if len(head) > HEAD_BYTES or untrusted_io.parse_json(head) != _head(key, value):
                return None
            untrusted_io.parse_json(value)
        except (OSError, ValueError, RecursionError):
            return None
        return value

    def write(self, name: str, key: str, value: bytes) -> None:
        """Write the value atomically. Raises: OSError."""
        if self._folder is not None:
            self._folder.mkdir(parents=True, exist_ok=True)
            content = json.dumps(_head(key, value)).encode() + b"\n" + value
            files.write(self._folder / f"{name}.json", content, durable=True)


def _head(key: str, value: bytes) -> dict[str, Any]:
    digest = xxhash.xxh3_128(value).hexdigest()
    return {"format": FORMAT, "version": VERSION, "key": key, "bytes": len(value), "xxh3_128": digest}


def check_name(name: str) -> None:
    """Raises: KgorchError for a name that is not a plain file name."""
    if not FILE_PATTERN.fullmatch(f"{name}.json"):
        raise KgorchError(f"session.cached({name!r:.120}): expected letters, digits, '.', '_' and '-', at most 120")


def key_of(key: Any) -> str:
    """The hash of a key. Raises: KgorchError for a key that JSON cannot hold."""
    return xxhash.xxh3_128(_as_json("the key", key, sort_keys=True)).hexdigest()


def value_of(name: str, value: Any) -> bytes:
    """The value as JSON. Raises: KgorchError for a value that JSON cannot hold, or that is too large to be read again."""
    content = _as_json(f"session.cached({name!r}): the value", value)
    try:
        untrusted_io.check_json(content)
    except ValueError as error:
        raise KgorchError(
            f"session.cached({name!r}): the value cannot be stored", str(error),
            next_step="keep less of each item, or keep it under several names",
        ) from None  # fmt: skip
    return content


def _as_json(what: str, value: Any, *, sort_keys: bool = False) -> bytes:
    try:
        return json.dumps(value, separators=(",", ":"), allow_nan=False, sort_keys=sort_keys).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise KgorchError(
            f"{what} cannot be stored as JSON", str(error)[:300],
            next_step="give text, finite numbers, true, false, None, lists and tables of these",
        ) from None  # fmt: skip


class ValueBroadcast:
    """Sends bytes from rank 0 to all ranks, in a gloo group of its own: the default group may have a time-out, and rank 0 may
    take an hour."""

    def __init__(self, rank: int, world_size: int) -> None:
        self._rank, self._world_size = rank, world_size
        self._group: Any = None

    def of_first(self, make: Callable[[], bytes]) -> bytes:
        """The result of `make`, which is called on rank 0 alone. All ranks call this together.

        Raises:
            PeersLost: on the other ranks, when `make` raises on rank 0.
        """
        if self._world_size == 1:
            return make()
        if self._group is None:  # never destroyed here: a peer may still be reading from it
            self._group = dist.new_group(backend="gloo", timeout=UNLIMITED)
        made, problem = b"", None
        if self._rank == 0:
            try:
                made = make()
            except BaseException as error:  # the other ranks must not be left waiting
                problem = error
        size = torch.tensor([-1 if problem else len(made)])  # -1: rank 0 has failed
        dist.broadcast(size, 0, group=self._group)
        if problem is not None:
            raise problem
        if size < 0:
            raise PeersLost("rank 0 could not compute what all ranks were to have")
        content = (
            torch.frombuffer(bytearray(made), dtype=torch.uint8) if made else torch.empty(int(size), dtype=torch.uint8)
        )
        dist.broadcast(content, 0, group=self._group)
        return content.numpy().tobytes()
