"""What a tracker is sent of a run, and what of it is still unsent.

The figures are those of `report`: the merged curve, the history of the sessions, the telemetry by minutes. They are read anew each
time and compared with what was sent, so a failure, a restart or a kill loses nothing: the next comparison sends the rest.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, NamedTuple

from sqlalchemy import Engine

from kgorch.core.codes import Outcome
from kgorch.core.metrics.metric_curve import CurvePoint
from kgorch.db import samples, sessions
from kgorch.db.rows import RunInfo
from kgorch.report import metrics, run_view

SYSTEM = "system"
"""First part of the tags of telemetry; its steps are minutes since the run began."""

SESSION, EPOCH = "kgorch_session", "kgorch_epoch"
"""Tags beside a stage's metrics: the number of the session from the step on at which it began, and the epoch."""

MAX_SESSIONS = 200
"""Newest sessions whose marks are sent."""

MINUTE_SESSIONS = 5
"""Newest sessions whose telemetry is sent by minutes; of older ones that were never sent, by hours."""

COMPLETE_S = 60.0
"""Age of a minute, after its end, from which its mean is final: until then each roll-up replaces it."""


class Scalar(NamedTuple):
    """A value of a curve.

    Attributes:
        tag: `STAGE/METRIC`, or `system/KEY`.
        step: of the stage; of `system` minutes since the run began.
        at_s: Unix time, seconds.
        value: may be NaN.
    """

    tag: str
    step: int
    at_s: float
    value: float


class SessionMark(NamedTuple):
    """A session in words. Its text changes until the session is over."""

    number: int
    step: int
    at_s: float
    text: str


class Feed(NamedTuple):
    """All that a tracker should hold of a run.

    Attributes:
        scalars: of each tag in the order of its steps.
        marks: of the newest sessions, oldest first.
        phase: of the newest session; empty without one.
    """

    scalars: Sequence[Scalar]
    marks: Sequence[SessionMark] = ()
    phase: str = ""


@dataclass(slots=True)
class Cursor:
    """How far a tracker was sent.

    Attributes:
        tags: the last step by tag.
        stages: the last step by stage, for tags that are not among these: it came with a run from another machine.
    """

    tags: dict[str, int] = field(default_factory=dict)
    stages: dict[str, int] = field(default_factory=dict)

    def last(self, tag: str) -> int:
        """The last step of a tag that was sent; -1 for none."""
        return self.tags.get(tag, self.stages.get(tag.partition("/")[0], -1))

    def advance(self, scalars: Iterable[Scalar]) -> None:
        for item in scalars:
            self.tags[item.tag] = max(item.step, self.last(item.tag))

    def sent_steps(self) -> dict[str, int]:
        """The last step by stage."""
        steps = dict(self.stages)
        for tag, step in self.tags.items():
            stage = tag.partition("/")[0]
            if stage != SYSTEM:
                steps[stage] = max(step, steps.get(stage, 0))
        return steps


def unsent(scalars: Iterable[Scalar], cursor: Cursor) -> list[Scalar]:
    """What lies beyond what was sent, by tag.

    A step that was done again after a crash was sent before, so it is sent once: a tracker that only appends keeps the value
    that came first. With exact resume both are equal.
    """
    return [item for item in scalars if item.step > cursor.last(item.tag)]


def feed_of(engine: Engine, run: RunInfo, *, system: bool, now: datetime | None = None) -> Feed:
    """Everything as the database and the attempts' files have it now. Args: system: telemetry, too."""
    now = now or datetime.now(UTC)
    curve = metrics.of_run(engine, run)
    history = run_view.history(engine, run, limit=MAX_SESSIONS)
    scalars = [item for stage, point in curve.points() for item in _of_point(stage, point)]
    scalars += _session_scalars(history)
    if system:
        scalars += _system_scalars(engine, run, now)
    last = sessions.last(engine, run.id)
    return Feed(scalars, [mark for entry in history if (mark := _mark(entry))], last.phase if last else "")


def _of_point(stage: str, point: CurvePoint) -> Iterator[Scalar]:
    if point.epoch:
        yield Scalar(f"{stage}/{EPOCH}", point.step, point.at_s, float(point.epoch))
    for name, value in point.values.items():
        yield Scalar(f"{stage}/{name}", point.step, point.at_s, value)


def _session_scalars(history: Sequence[Mapping[str, Any]]) -> list[Scalar]:
    """The session's number at the step with which each attempt began; none at steps that a later attempt did again."""
    by_stage: dict[str, list[Scalar]] = {}
    for entry in history:
        began_s = datetime.fromisoformat(entry["started_at"]).timestamp()
        for attempt in entry["attempts"]:
            marks = by_stage.setdefault(attempt["stage"], [])
            while marks and marks[-1].step >= attempt["first_step"]:
                marks.pop()
            tag = f"{attempt['stage']}/{SESSION}"
            marks.append(Scalar(tag, attempt["first_step"], began_s, float(entry["number"])))
    return [item for marks in by_stage.values() for item in marks]


def _mark(entry: Mapping[str, Any]) -> SessionMark | None:
    """A session as a line; None before its first attempt, and for one at another place."""
    if not entry["attempts"] or not isinstance(entry["number"], int):
        return None
    stages = ", ".join(f"{item['name']} {item['first_step']} to {item['last_step']}" for item in entry["stages"])
    ended = [
        f"attempt {item['number']} {item['outcome']} at step {item['last_step']}"
        for item in entry["attempts"]
        if item["outcome"] not in (None, Outcome.FINISHED, Outcome.SUSPENDED)
    ]
    why = f" ({entry['why']})" if entry["why"] else ""
    text = "; ".join([f"session {entry['number']}: {entry['phase']}{why}, steps of {stages}", *ended])
    first = entry["attempts"][0]["first_step"]
    return SessionMark(entry["number"], first, datetime.fromisoformat(entry["started_at"]).timestamp(), text)


def _system_scalars(engine: Engine, run: RunInfo, now: datetime) -> Iterator[Scalar]:
    began_s = run.created_at.timestamp() // 60 * 60  # the minute in which it began is minute 0
    rows = sessions.of_run(engine, run.id, limit=MAX_SESSIONS)
    last_minute = -1
    for position, row in enumerate(rows):
        span_s = samples.MINUTE if position >= len(rows) - MINUTE_SESSIONS else samples.HOUR
        first_s = row.started_at.timestamp() // 60 * 60
        for sample in samples.series(engine, row.id, datetime.fromtimestamp(first_s // span_s * span_s, UTC), span_s):
            is_final = sample.at.timestamp() + span_s + COMPLETE_S <= now.timestamp()
            at_s = max(sample.at.timestamp(), first_s)  # a row of an hour lies on the hour, before its session began
            minute = int((at_s - began_s) // 60)
            if span_s == samples.HOUR:  # several sessions may have begun in one minute
                minute = max(minute, last_minute + 1)
            if minute <= last_minute or not is_final:  # two sessions in one minute, or a clock that was set back
                continue
            last_minute = minute
            for key, value in sample.values.items():
                yield Scalar(f"{SYSTEM}/{key}", minute, at_s, float(value))
