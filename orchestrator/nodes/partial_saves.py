"""Checkpoints that the keepers of several nodes write together: collects what each has written, and completes the checkpoint."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from kgorch.protocol.snapshot_messages import CheckpointWritten, PartWritten, SaveConclusion, SaveFailure
from kgorch.snapshots import checkpoint_parts
from kgorch.snapshots.checkpoint_parts import CheckpointTarget

MAX_OPEN = 16
"""Saves whose parts are remembered; of more, which a hostile keeper may name, the oldest is forgotten."""


class _Key(NamedTuple):
    attempt: str
    step: int
    final: bool


class PartialSaves:
    """Of one session. Methods may be called from any thread; the disk is used in a thread of its own.

    Args:
        conclude: tells the keeper of a node what became of its part.
        report: takes a checkpoint that is complete, or why there is none.
        are_all_here: whether every node of the attempt is connected: without one no checkpoint can be complete.
    """

    def __init__(
        self,
        conclude: Callable[[int, SaveConclusion], None],
        report: Callable[[CheckpointWritten | SaveFailure], None],
        are_all_here: Callable[[], bool],
    ) -> None:
        self._conclude, self._report, self._are_all_here = conclude, report, are_all_here
        self._parts: dict[_Key, dict[int, PartWritten]] = {}
        self._failed: dict[tuple[str, int], set[int]] = {}  # nodes that have been told of, or reported, a failure
        self._guard = threading.Lock()
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="partial-saves")

    def on_part(self, part: PartWritten) -> None:
        key = _Key(part.attempt, part.step, part.final)
        with self._guard:
            told = self._failed.get((part.attempt, part.step))
            is_late = told is not None and part.node not in told
            if told is not None and is_late:
                told.add(part.node)
            parts = self._parts.setdefault(key, {})
            if not is_late:
                parts[part.node] = part
            while len(self._parts) > MAX_OPEN:
                self._parts.pop(next(iter(self._parts)))
            is_whole = sum(item.ranks for item in parts.values()) == part.all_ranks
            if is_whole:
                del self._parts[key]
        if is_late or not self._are_all_here():
            self._conclude(part.node, SaveConclusion(part.attempt, part.step, part.final, "another node has no part"))
        elif is_whole:
            self._pool.submit(self._complete, list(parts.values()))

    def on_failure(self, failure: SaveFailure, node: int) -> None:
        """One node's part has failed: the others need not wait for it."""
        with self._guard:
            told = self._failed.setdefault((failure.attempt, failure.step), set())
            told.add(node)
            open_parts = [
                (key, self._parts.pop(key))
                for key in list(self._parts)
                if (key.attempt, key.step) == (failure.attempt, failure.step)
            ]
            told |= {part for _, parts in open_parts for part in parts}
            while len(self._failed) > MAX_OPEN:
                self._failed.pop(next(iter(self._failed)))
        for key, parts in open_parts:
            for number in parts:
                self._conclude(number, SaveConclusion(key.attempt, key.step, key.final, failure.error))

    def give_up(self, without: int | None = None) -> None:
        """Fail the saves that are not complete. Args: without: only those without a part of this node; None for all."""
        with self._guard:
            given_up = {key: parts for key, parts in self._parts.items() if without is None or without not in parts}
            for key in given_up:
                del self._parts[key]
        for key, parts in given_up.items():
            for number in parts:
                self._conclude(number, SaveConclusion(key.attempt, key.step, key.final, "another node has no part"))

    def close(self) -> None:
        self._pool.shutdown(wait=True)

    def _complete(self, parts: list[PartWritten]) -> None:
        first = min(parts, key=lambda part: part.node)
        target = CheckpointTarget(Path(first.root), first.attempt, first.step, first.final)
        error, number = "", 0
        place, size = target.place, 0
        try:
            place, size = checkpoint_parts.complete(target, sorted(part.node for part in parts))
        except Exception as problem:  # whatever it is, keepers and ranks must not wait for it
            error, number = f"{type(problem).__name__}: {problem}", getattr(problem, "errno", None) or 0
        for part in parts:
            self._conclude(part.node, SaveConclusion(first.attempt, first.step, first.final, error, number))
        if error:
            self._report(SaveFailure(first.attempt, -1, first.step, error))
        else:
            blocking_s, took_s = max(part.blocking_s for part in parts), max(part.took_s for part in parts)
            is_rescued = any(part.rescued for part in parts)
            self._report(
                CheckpointWritten(
                    first.attempt, str(place), first.step, size, blocking_s, took_s, first.final, is_rescued
                )
            )
