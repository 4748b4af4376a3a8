"""Watches for ranks that do not move: what they report of their progress, what earlier sessions took, and where they hang."""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from sqlalchemy.exc import SQLAlchemyError

from kgorch.core.codes import EventKind, Note
from kgorch.core.session.events import Event, Hung
from kgorch.core.session.hang_detection import HangDetector
from kgorch.core.session.lifecycle import CAN_HANG
from kgorch.db import sessions
from kgorch.launch import launcher, stack_dumps
from kgorch.launch.attempts import LaunchedAttempt
from kgorch.nodes.node_group import NodeGroup
from kgorch.protocol.messages import RankProgress
from kgorch.supervisor.live_session import LiveSession, StacksCollected

LONGEST = EventKind.LONGEST_WAITS
REMEMBER_S = 300.0
STACKS_S = 5.0
"""Seconds to wait for the stacks of other nodes, after this node's: they are collected at the same time."""

WORDS = {
    "start": "its start",
    "first_step": "its first step",
    "step": "a step",
    "evaluation": "an evaluation",
    "save": "a save",
    "data": "what session.cached computes",
}


class HangMonitor:
    """Of one session. Its methods may be called from any thread.

    Args:
        live: the session; `given` by its plan are time-outs by place, None where it wants no such watch.
        note: writes an event into the journal.
    """

    def __init__(self, live: LiveSession, note: Note) -> None:
        self._live, self._note = live, note
        given = live.plan.health.hang_s
        self._is_off, self._detector = given is None, HangDetector(given or {})
        self._guard = threading.Lock()
        self._attempt: LaunchedAttempt | None = None
        self._remembered: Mapping[str, float] = {}
        self._next_s = 0.0

    def begin(self, attempt: LaunchedAttempt) -> None:
        """Watch a new attempt, or one that was adopted. Asks the database."""
        live, now_s = self._live, self._live.clock.now_s()
        history: list[Mapping[str, Any]] | None = None
        with contextlib.suppress(SQLAlchemyError):  # an outage: what this session has seen holds
            history = sessions.facts_of_kind(live.engine, live.run.id, LONGEST)
        with self._guard:
            detector = self._detector if history is None else replace(self._detector, longest={})
            for facts in history or ():
                if facts.get("stage") == attempt.row.stage:
                    detector = detector.with_durations(_seconds(facts.get("longest_s")))
            self._attempt, self._remembered, self._next_s = attempt, detector.longest, now_s + REMEMBER_S
            self._detector = detector.with_attempt(attempt.row.ranks, now_s, without_progress=attempt.without_progress)

    def on_progress(self, place: RankProgress) -> None:
        now_s = self._live.clock.now_s()
        with self._guard:
            detector = self._detector.with_durations(_seconds(place.longest))
            self._detector = detector.with_report(place.rank, place.where, place.for_s, place.still_s, now_s)

    def look(self, post: Callable[[Event], None]) -> None:
        """A periodic duty, beside the loop: post Hung where a rank hangs."""
        now_s = self._live.clock.now_s()
        with self._guard:
            self._detector = self._detector.at_check(now_s)
            hung = None if self._is_off else self._detector.first_hung(now_s)
            attempt = self._attempt
        if now_s >= self._next_s:
            self.remember()
        if hung and attempt and self._live.state.phase in CAN_HANG and launcher.is_running(attempt.folder):
            post(hung)

    def remember(self) -> None:
        """Note what each place takes at most, for the sessions to come."""
        with self._guard:
            self._next_s = self._live.clock.now_s() + REMEMBER_S
            attempt, longest = self._attempt, self._detector.longest
            has_news, self._remembered = longest != self._remembered, longest
        if attempt and has_news:
            rounded = {place: round(seconds, 3) for place, seconds in sorted(longest.items())}
            self._note(LONGEST, {"stage": attempt.row.stage, "longest_s": rounded})


def collect_stacks(attempt: LaunchedAttempt, hung: Hung, nodes: NodeGroup) -> StacksCollected:
    """Where the ranks of an attempt stand that hangs. Takes seconds; not for the loop."""
    others = nodes.order("stacks")
    cause = f"hung for {hung.for_s:.0f} s in {WORDS.get(hung.where, hung.where)}"
    facts: dict[str, Any] = {"attempt": attempt.name, "folder": str(attempt.folder)}
    try:
        stacks = stack_dumps.collect(attempt.folder, nodes.ranks_here(attempt.row.ranks))
        others.wait(STACKS_S)
        stacks += nodes.take_stacks()
    except Exception as error:  # a hang that cannot be explained is one all the same
        facts["why"] = f"{type(error).__name__}: {error}"
    else:
        facts |= {f"rank{stack.rank}": str(stack) for stack in stacks}
        if first := stack_dumps.culprit(stacks):
            host = nodes.host_of(first.rank)
            cause += f"; rank {first.rank}{f' on {host}' if host else ''}: {first}"
    return StacksCollected(attempt, cause, facts)


def _seconds(told: Any) -> dict[str, float]:
    """What was told by a rank, or kept in a journal that may come from elsewhere, as far as it is durations."""
    items = told.items() if isinstance(told, Mapping) else ()
    return {place: seconds for place, seconds in items if isinstance(seconds, int | float) and math.isfinite(seconds)}
