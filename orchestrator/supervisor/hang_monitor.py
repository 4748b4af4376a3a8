"""The supervisor's eye on ranks that do not move: what it hears of them, what it remembers, and what it finds out."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from sqlalchemy import Engine

from db import sessions
from orchestrator.core.codes import EventKind
from orchestrator.core.hang_detection import Watch
from orchestrator.core.lifecycle import Hung
from orchestrator.launch import launcher, stack_dumps
from orchestrator.launch.attempts import Running
from orchestrator.protocol.messages import RankProgress

LONGEST = EventKind.LONGEST_WAITS
REMEMBER_S = 300.0
WORDS = {
    "start": "its start",
    "first_step": "its first step",
    "step": "a step",
    "evaluation": "an evaluation",
    "save": "a save",
    "data": "what session.cached computes",
}

Note = Callable[[str, dict[str, Any]], None]


class Hangs:
    """Of one session.

    Args:
        given: the plan's time-outs by place; None where it wants no such watch.
        note: writes an event into the journal.
    """

    def __init__(self, engine: Engine, run_id: str, given: Mapping[str, float] | None, note: Note) -> None:
        self._engine, self._run_id, self._is_off, self._note = engine, run_id, given is None, note
        self._watch = Watch(given or {})
        self._attempt: Running | None = None
        self._remembered: Mapping[str, float] = {}
        self._next_s = 0.0

    def launched(self, attempt: Running, now_s: float) -> None:
        """A new attempt, or one that was adopted."""
        self._attempt = attempt
        watch = replace(self._watch, longest={})
        for facts in sessions.told(self._engine, self._run_id, LONGEST):
            if facts.get("stage") == attempt.row.stage:
                watch = watch.learning(_seconds(facts.get("longest_s")))
        self._remembered, self._next_s = watch.longest, now_s + REMEMBER_S
        self._watch = watch.launched(attempt.row.ranks, now_s, without_progress=attempt.without_progress)

    def heard(self, place: RankProgress, now_s: float) -> None:
        watch = self._watch.learning(_seconds(place.longest))
        self._watch = watch.heard(place.rank, place.where, place.for_s, place.still_s, now_s)

    def look(self, now_s: float) -> Hung | None:
        self._watch = self._watch.looking(now_s)
        if now_s >= self._next_s:
            self._next_s = now_s + REMEMBER_S
            self.remember()
        hung = None if self._is_off else self._watch.hung(now_s)
        return hung if hung and self._attempt and launcher.is_running(self._attempt.folder) else None

    def remember(self) -> None:
        """What each place takes at most, for the sessions to come."""
        if self._attempt and self._watch.longest != self._remembered:
            self._remembered = self._watch.longest
            longest = {place: round(seconds, 3) for place, seconds in sorted(self._remembered.items())}
            self._note(LONGEST, {"stage": self._attempt.row.stage, "longest_s": longest})

    def diagnose(self, attempt: Running, hung: Hung, then: Callable[[str, dict[str, Any]], None]) -> None:
        """Beside the loop: `then` is called from a thread with the cause in words, and facts for the journal."""

        def look() -> None:
            cause = f"hung for {hung.for_s:.0f} s in {WORDS.get(hung.where, hung.where)}"
            facts: dict[str, Any] = {"attempt": attempt.name, "folder": str(attempt.folder)}
            try:
                found = stack_dumps.collect(attempt.folder, attempt.row.ranks)
            except Exception as error:  # a hang that cannot be explained is one all the same
                facts["why"] = f"{type(error).__name__}: {error}"
            else:
                facts |= {f"rank{stack.rank}": str(stack) for stack in found}
                if first := stack_dumps.culprit(found):
                    cause += f"; rank {first.rank}: {first}"
            then(cause, facts)

        threading.Thread(target=look, name=f"stacks-{attempt.name}", daemon=True).start()


def _seconds(told: Any) -> dict[str, float]:
    """What was told by a rank, or kept in a journal that may come from elsewhere, as far as it is durations."""
    items = told.items() if isinstance(told, Mapping) else ()
    return {place: seconds for place, seconds in items if isinstance(seconds, int | float) and math.isfinite(seconds)}
