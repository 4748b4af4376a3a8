"""What holds of the promise of the same bits, as the ranks of a run have told it: the field `exactness` of `kgorch status`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from sqlalchemy import Engine

from kgorch.core.codes import OVER, EventKind
from kgorch.db import sessions
from kgorch.db.rows import AttemptInfo, EventInfo, RunInfo, SessionInfo
from kgorch.report.json_fields import View

LASTING = ("untracked", "weights", "resume", "reduction", "ranks", "versions", "memory", "training")
"""Topics of what a resume has not brought back, or has computed otherwise: the result has it, however the run goes on."""

MAX_EVENTS, MAX_NAMED = 500, 3
"""Newest reports that are read, and earlier notes of a topic that are shown."""


def of_run(engine: Engine, run: RunInfo, row: SessionInfo) -> View:
    """By topic: what the newest session has told last, and what of `LASTING` earlier attempts have told otherwise.

    Where it has ended without a word, as by a time limit before its first step, the one of its stage before it counts.

    Without those a note would be gone with the object: a warm-up that no checkpoint held has nothing to change any more after it.
    """
    kinds = (EventKind.EXACTNESS,)
    newest = sessions.newest_event(engine, run.id, kinds, session_id=row.id)
    if newest is None and row.phase in OVER:
        before = sessions.newest_event(engine, run.id, kinds)
        attempt = _attempt_of(before, sessions.attempts(engine, run.id)) if before else None
        newest = before if attempt and attempt.stage == row.stage else None
    facts = dict(newest.facts) if newest else {}
    told = sessions.events_of_kind(engine, run.id, EventKind.EXACTNESS, limit=MAX_EVENTS)
    if all(event.facts.get(topic) in (None, facts.get(topic)) for event in told for topic in LASTING):
        return facts  # most runs
    numbers: dict[int | None, int] = {item.id: item.number for item in sessions.of_run(engine, run.id)}
    for topic, notes in _earlier(told, sessions.attempts(engine, run.id)).items():
        earlier = {text: numbers.get(session) for text, session in notes.items() if text != facts.get(topic)}
        words = [f"in session {number}: {text}" for text, number in [*earlier.items()][-MAX_NAMED:]]
        more = [f"and {len(earlier) - MAX_NAMED} more before"] if len(earlier) > MAX_NAMED else []
        facts[topic] = "; ".join([*([facts[topic]] if topic in facts else []), *words, *more])
    return facts


def _earlier(told: Iterable[EventInfo], attempts: Sequence[AttemptInfo]) -> dict[str, dict[str, int | None]]:
    """By topic: what each attempt of the result but the newest one has told last, and in which session."""
    of_result = list[AttemptInfo]()
    for attempt in attempts:
        if attempt.first_step == 0:  # the stage has begun anew: nothing is left of the attempts before
            of_result = [item for item in of_result if item.stage != attempt.stage]
        of_result.append(attempt)
    last: dict[tuple[str, int], tuple[str, int | None]] = {}  # by topic and attempt
    for event in told:
        teller = _attempt_of(event, attempts)
        if teller and teller in of_result[:-1]:
            texts = {topic: text for topic in LASTING if isinstance(text := event.facts.get(topic), str)}
            last |= {(topic, teller.id): (text, event.session_id) for topic, text in texts.items()}
    found: dict[str, dict[str, int | None]] = {}
    for (topic, _), (text, session) in last.items():
        found.setdefault(topic, {})[text] = session
    return found


def _attempt_of(event: EventInfo, attempts: Iterable[AttemptInfo]) -> AttemptInfo | None:
    """The attempt whose ranks have told it."""
    begun = [item for item in attempts if item.session_id == event.session_id and item.started_at <= event.at]
    return begun[-1] if begun else None
