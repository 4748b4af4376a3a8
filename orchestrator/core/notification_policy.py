"""What a person is told of, out of all that happens: which event of a session is which kind of notice, in which words.

A notice has one kind or several, the closest first: the end of a session whose hours are spent is `quota`, and `suspended`
to whom `quota` was not asked for. What comes in floods is told once in a while, and says how often it was left unsaid.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from orchestrator.core import lifecycle as core
from orchestrator.core.codes import NoticeKind, Phase
from orchestrator.core.lifecycle import Event, Session

K = NoticeKind
KINDS = tuple(kind for kind in NoticeKind if kind is not NoticeKind.TEST)

APART_S: Mapping[NoticeKind, float] = {
    K.SAVED: 60.0,
    K.SAVE_FAILED: 600.0,
    K.RUNG: 10.0,
    K.REMEDIED: 10.0,
    K.HUNG: 10.0,
}
"""Between two notices of a kind that may come in floods."""


@dataclass(frozen=True, slots=True)
class Notice:
    """`kinds`: what it is, the closest first; `facts`: further fields of what is sent (docs/notices.md)."""

    kinds: tuple[NoticeKind, ...]
    text: str
    facts: Mapping[str, Any] = field(default_factory=dict)


def _saved(event: core.CheckpointVerified, _: Session) -> Notice:
    return Notice((K.SAVED,), f"step {event.step} is saved and verified", {"step": event.step})


def _save_failed(event: core.SaveFailed, _: Session) -> Notice:
    return Notice((K.SAVE_FAILED,), f"a save failed, training goes on: {event.why}", {"why": event.why})


def _rung(event: core.OutOfMemory, _: Session) -> Notice:
    return Notice((K.RUNG,), f"memory ran out, it goes on with {event.rung}", {"why": event.cause})


def _remedied(event: core.Unwell, _: Session) -> Notice:
    return Notice((K.REMEDIED,), f"{event.cause}; remedy: {event.remedy}", {"why": event.cause})


def _hung(event: core.Hung, _: Session) -> Notice:
    text = f"rank {event.rank} has not moved for {event.for_s:.0f} s ({event.where}); it is launched again"
    return Notice((K.HUNG,), text)


OF_EVENT: Mapping[type[Event], Callable[[Any, Session], Notice]] = {
    core.CheckpointVerified: _saved,
    core.SaveFailed: _save_failed,
    core.OutOfMemory: _rung,
    core.Unwell: _remedied,
    core.Hung: _hung,
}

OF_END: Mapping[Phase, tuple[NoticeKind, str]] = {
    Phase.FINISHED: (K.FINISHED, "the run is finished"),
    Phase.FAILED: (K.FAILED, "failed and will not be retried"),
    Phase.SUSPENDED: (K.SUSPENDED, "session suspended, saved in time"),
    Phase.CUT_OFF: (K.CUT_OFF, "session cut off before its last save"),
}


def of(event: Event, session: Session, *, number: int) -> Notice | None:
    """What a person is told when this event has led to this session, the run's `number`-th; None for nothing."""
    if isinstance(event, core.SessionOpened):
        kind, text = (K.STARTED, "the run begins") if number == 1 else (K.RESUMED, f"session {number} goes on with it")
        return Notice((kind,), text)
    if ended := OF_END.get(session.phase):
        kind, text = ended
        kinds = (K.QUOTA, kind) if session.ends_on_quota and session.phase is not Phase.FINISHED else (kind,)
        return Notice(kinds, f"{text}: {session.why}" if session.why else text, {"why": session.why})
    told = OF_EVENT.get(type(event))
    return told(event, session) if told else None


def rung_taken(rung: str, why: str, step: int, *, up: bool) -> Notice:
    """A rung that the ranks took by themselves."""
    deed = "there is room again, undone" if up else "memory ran out, it goes on with"
    return Notice((K.RUNG,), f"{deed}: {rung}", {"why": why, "step": step})


def remedied(remedy: str, why: str, step: int) -> Notice:
    """A remedy that the ranks took by themselves."""
    return Notice((K.REMEDIED,), f"{why}; remedy: {remedy}", {"why": why, "step": step})


def given_up(why: str) -> Notice:
    """What is told when the daemon gives a run up that it cannot resume."""
    return Notice((K.FAILED,), why, {"why": why})


class Sieve:
    """What of all notices is told: the kinds that were asked for, and of floods one in a while."""

    def __init__(self, on: Collection[NoticeKind]) -> None:
        self._on = frozenset(on)
        self._told_s: dict[NoticeKind, float] = {}
        self._unsaid: dict[NoticeKind, int] = {}

    def lets_through(self, notice: Notice, now_s: float) -> tuple[NoticeKind, int] | None:
        """The kind it is told as, and how many of that kind were left unsaid before it; None for one that is not told."""
        kind = next((kind for kind in notice.kinds if kind in self._on), None)
        if kind is None:
            return None
        last_s = self._told_s.get(kind)
        if last_s is not None and now_s - last_s < APART_S.get(kind, 0.0):
            self._unsaid[kind] = self._unsaid.get(kind, 0) + 1
            return None
        self._told_s[kind] = now_s
        return kind, self._unsaid.pop(kind, 0)


def to_give_up(waiting: list[NoticeKind]) -> int:
    """Which of the kinds that wait, oldest first, is dropped for want of room: a save is the least of news."""
    return waiting.index(K.SAVED) if K.SAVED in waiting else 0
