"""Which event of a session makes which notice to the user, in which words, and how often.

A notice has one kind or several, the most specific first: the end of a session whose quota is exhausted is `quota`, and
`suspended` for a user who has not asked for `quota`. Kinds that come in floods are sent once in a while, with the number of
those that were suppressed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from kgorch.core.codes import NoticeKind, Phase
from kgorch.core.session import events
from kgorch.core.session.events import Event
from kgorch.core.session.lifecycle_state import LifecycleState

K = NoticeKind
KINDS = tuple(kind for kind in NoticeKind if kind is not NoticeKind.TEST)

MIN_INTERVAL_S: Mapping[NoticeKind, float] = {
    K.SAVED: 60.0,
    K.SAVE_FAILED: 600.0,
    K.RUNG: 10.0,
    K.REMEDIED: 10.0,
    K.HUNG: 10.0,
}
"""Seconds between two notices of a kind that may come in floods. All others are always sent."""


@dataclass(frozen=True, slots=True)
class Notice:
    """A message to the user.

    Attributes:
        kinds: the most specific first.
        text: one line.
        facts: further fields of the message (docs/notices.md).
    """

    kinds: tuple[NoticeKind, ...]
    text: str
    facts: Mapping[str, Any] = field(default_factory=dict)


def _saved(event: events.CheckpointVerified, _: LifecycleState) -> Notice:
    return Notice((K.SAVED,), f"step {event.step} is saved and verified", {"step": event.step})


def _save_failed(event: events.SaveFailed, _: LifecycleState) -> Notice:
    what = (
        "a save is late, as one that waits for an evaluation to end"
        if event.overdue
        else "a save failed, training goes on"
    )
    return Notice((K.SAVE_FAILED,), f"{what}: {event.why}", {"why": event.why})


def _rung(event: events.OutOfMemory, _: LifecycleState) -> Notice:
    return Notice((K.RUNG,), f"memory ran out, it goes on with {event.rung}", {"why": event.cause})


def _remedied(event: events.AttemptDiverged, _: LifecycleState) -> Notice:
    return Notice((K.REMEDIED,), f"{event.cause}; remedy: {event.remedy}", {"why": event.cause})


def _hung(event: events.Hung, _: LifecycleState) -> Notice:
    text = f"rank {event.rank} has not moved for {event.for_s:.0f} s ({event.where}); it is launched again"
    return Notice((K.HUNG,), text)


OF_EVENT: Mapping[type[Event], Callable[[Any, LifecycleState], Notice]] = {
    events.CheckpointVerified: _saved,
    events.SaveFailed: _save_failed,
    events.OutOfMemory: _rung,
    events.AttemptDiverged: _remedied,
    events.Hung: _hung,
}

OF_END: Mapping[Phase, tuple[NoticeKind, str]] = {
    Phase.FINISHED: (K.FINISHED, "the run is finished"),
    Phase.FAILED: (K.FAILED, "failed and will not be retried"),
    Phase.SUSPENDED: (K.SUSPENDED, "session suspended, saved in time"),
    Phase.CUT_OFF: (K.CUT_OFF, "session cut off before its last save"),
}


def notice_of(event: Event, session: LifecycleState, *, number: int) -> Notice | None:
    """The notice of an event; None for none.

    Args:
        session: after the event.
        number: of the session in its run, from 1.
    """
    if isinstance(event, events.SessionOpened):
        kind, text = (K.STARTED, "the run begins") if number == 1 else (K.RESUMED, f"session {number} goes on with it")
        return Notice((kind,), text)
    if end := OF_END.get(session.phase):
        kind, text = end
        kinds = (K.QUOTA, kind) if session.ends_on_quota and session.phase is not Phase.FINISHED else (kind,)
        return Notice(kinds, f"{text}: {session.why}" if session.why else text, {"why": session.why})
    make = OF_EVENT.get(type(event))
    return make(event, session) if make else None


def rung_notice(rung: str, why: str, step: int, *, up: bool) -> Notice:
    """A rung that the ranks took by themselves, or undid (`up`)."""
    change = "there is room again, undone" if up else "memory ran out, it goes on with"
    return Notice((K.RUNG,), f"{change}: {rung}", {"why": why, "step": step})


def remedy_notice(remedy: str, why: str, step: int) -> Notice:
    """A remedy that the ranks took by themselves."""
    return Notice((K.REMEDIED,), f"{why}; remedy: {remedy}", {"why": why, "step": step})


def failure_notice(why: str) -> Notice:
    """The daemon gives up a run that it cannot resume."""
    return Notice((K.FAILED,), why, {"why": why})


def remote_notice(text: str) -> Notice:
    """A run at another place waits for a person, or has waited long."""
    return Notice((K.REMOTE,), text, {"why": text})


class NoticeFilter:
    """Passes the kinds of notices that the user has asked for, and of a flood one in a while."""

    def __init__(self, on: Collection[NoticeKind]) -> None:
        self._on = frozenset(on)
        self._last_s: dict[NoticeKind, float] = {}
        self._suppressed: dict[NoticeKind, int] = {}

    def accept(self, notice: Notice, now_s: float) -> tuple[NoticeKind, int] | None:
        """The kind that it is sent as, and how many of that kind were suppressed before it; None for one that is not sent."""
        kind = next((kind for kind in notice.kinds if kind in self._on), None)
        if kind is None:
            return None
        last_s = self._last_s.get(kind)
        if last_s is not None and now_s - last_s < MIN_INTERVAL_S.get(kind, 0.0):
            self._suppressed[kind] = self._suppressed.get(kind, 0) + 1
            return None
        self._last_s[kind] = now_s
        return kind, self._suppressed.pop(kind, 0)


def index_to_drop(waiting: list[NoticeKind]) -> int:
    """Index of the notice that a full queue drops, oldest first: a save, the least important news, before all others."""
    return waiting.index(K.SAVED) if K.SAVED in waiting else 0
