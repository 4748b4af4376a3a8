"""Values that a run computes once: `session.cached`. A file of JSON for each name in the run's folder, `cached/NAME.json`.

The next session reads it instead of computing; on a new machine it comes along from the source, like what the run has made
(admission/import_files.py). Anybody may have written it: it is JSON within bounds, it runs nothing and names no path, and
it counts only under the very key that it is asked for. What it says is the script's to check.

A file is a line of JSON (format, key, bytes and hash of the rest), then the value. Without kgorch nothing is stored.
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

from orchestrator import untrusted_io
from orchestrator.checkpoint.manifest import FILE_PATTERN
from orchestrator.core.codes import EventKind
from orchestrator.errors import KgorchError
from orchestrator.protocol.run_files import MAX_CACHED_BYTES
from orchestrator.system import files
from orchestrator.worker.board import PeersLost
from orchestrator.worker.group import UNLIMITED

FORMAT, VERSION = "kgorch-cached", 1
HEAD_BYTES = MAX_CACHED_BYTES - untrusted_io.MAX_JSON_BYTES
SAID_S, TOLD_S = 10.0, 60.0
"""How often progress goes to the log, and to the journal."""


class Progress:
    """How far a long computation is. Args: tell: sends a kind of event and its facts to the supervisor."""

    def __init__(self, tell: Callable[[str, dict[str, str]], None]) -> None:
        self._tell = tell
        self._what = ""
        self._began_s = self._said_s = self._told_s = 0.0

    def to(self, what: str, done: int, total: int | None) -> None:
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


class Store:
    """Args: folder: None where nothing is stored."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder

    def read(self, name: str, key: str) -> bytes | None:
        """The value as JSON, which can be parsed; None where there is none under this key, or it is broken."""
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
        """Whole or not at all. Raises: OSError."""
        if self._folder is not None:
            self._folder.mkdir(parents=True, exist_ok=True)
            content = json.dumps(_head(key, value)).encode() + b"\n" + value
            files.write(self._folder / f"{name}.json", content, durable=True)


def _head(key: str, value: bytes) -> dict[str, Any]:
    digest = xxhash.xxh3_128(value).hexdigest()
    return {"format": FORMAT, "version": VERSION, "key": key, "bytes": len(value), "xxh3_128": digest}


def check_name(name: str) -> None:
    """Raises: KgorchError for what is no plain file name."""
    if not FILE_PATTERN.fullmatch(f"{name}.json"):
        raise KgorchError(f"session.cached({name!r:.120}): expected letters, digits, '.', '_' and '-', at most 120")


def key_of(key: Any) -> str:
    """Raises: KgorchError for what JSON cannot hold."""
    return xxhash.xxh3_128(_as_json("the key", key, sort_keys=True)).hexdigest()


def value_of(name: str, value: Any) -> bytes:
    """Raises: KgorchError for what JSON cannot hold, or what is too large to be read again."""
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
            f"{what} is no JSON", str(error)[:300],
            next_step="give text, finite numbers, true, false, None, lists and tables of these",
        ) from None  # fmt: skip


class Shared:
    """Bytes that rank 0 has and all ranks need, over a gloo group of their own: the ranks' usual one may have a time-out, and
    rank 0 may take an hour."""

    def __init__(self, rank: int, world_size: int) -> None:
        self._rank, self._world_size = rank, world_size
        self._group: Any = None

    def of_first(self, make: Callable[[], bytes]) -> bytes:
        """What `make` gives on rank 0, where alone it is called; all ranks call this together.

        Raises: what `make` does, on rank 0; PeersLost on the others.
        """
        if self._world_size == 1:
            return make()
        if self._group is None:  # never destroyed alone: a peer may still be reading from it
            self._group = dist.new_group(backend="gloo", timeout=UNLIMITED)
        made, problem = b"", None
        if self._rank == 0:
            try:
                made = make()
            except BaseException as error:  # the others are told, and not left to wait
                problem = error
        size = torch.tensor([-1 if problem else len(made)])
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
