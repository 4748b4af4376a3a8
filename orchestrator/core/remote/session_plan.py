"""What the next session of a run is: from which one it goes on, how long it may last, when the account has hours for it; names."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta

from kgorch.core.codes import RemoteState, RemoteWait
from kgorch.core.remote.place_values import PlaceQuota, RemoteStatus
from kgorch.core.remote.record_values import RecordOutcome
from kgorch.core.remote.session_states import NO_PROGRESS, Moment, RemoteSession

NAME_LENGTH = 50
USEFUL_S = 4200.0
"""Shortest session that is worth its start: ten minutes of preparation, and an hour of training."""

KILL_AFTER_S = 1200
"""Seconds from the end of a session by itself to the place's own limit: it saves, prunes and writes its record in them."""

AFTER_REFRESH_S = 600.0
FACTORS = {"NvidiaTeslaT4": 2.0}
"""Hours of the account for an hour of a session, until one was measured. T4: it is two of them (platforms/kaggle.py)."""

MEASURABLE_S = 600.0
"""Least seconds of a session by which its cost is measured: accounts are charged by the minute, and with a delay."""


def session_name(run: str, run_id: str, number: int) -> str:
    """Name of a session at a place: letters, digits, `-`; the same for the same session whenever it is made."""
    cleaned = re.sub(r"[^a-z0-9]+", "-", run.lower()).strip("-") or "run"
    ending = f"-{run_id[:6]}-{number:03d}"
    return f"kgorch-{cleaned[: NAME_LENGTH - len('kgorch-') - len(ending)].strip('-') or 'run'}{ending}"


def is_source(state: RemoteState, status: str | None, *, is_further: bool) -> bool:
    """Whether the next session can go on from the output of this one. That of a training that failed holds the steps that it
    had verified before.

    Args:
        is_further: whether the session has verified a step beyond those of its own source.
    """
    if state == RemoteState.FAILED:
        return is_further and status != RemoteStatus.ERROR  # of an error the place attaches no output
    return state in (RemoteState.COLLECTED, RemoteState.DONE)


def best_source(history: Sequence[RemoteSession]) -> RemoteSession | None:
    """The session whose output the next one goes on from: the furthest verified one that the place attaches.

    One whose place had called it cancelled is taken because of its record; where a session did not find it, it is not
    taken again.
    """
    by_number = {session.number: session for session in history}
    unattached = {
        session.source
        for session in history
        if session.outcome is RecordOutcome.NO_STATE
        and (source := by_number.get(session.source))
        and source.status is not RemoteStatus.COMPLETE
    }
    sources = [item for item in history if is_source(item.state, item.status, is_further=item.reached > item.expected)]
    # where there is no other, it is tried again, and the run stops if that fails, too: it never begins anew
    good = [item for item in sources if item.number not in unattached] or sources
    return max(good, key=lambda item: (item.reached, item.number), default=None)


def next_session(
    history: Sequence[RemoteSession], moment: Moment, *, session_s: int, anew: bool = False
) -> RemoteSession | None:
    """The session to plan after these; None where none is due: one is open, the run is done, failed or stopped.

    Args:
        history: all sessions of the run, by number.
        session_s: the plan's.
        anew: a user starts the run again after it has failed or was stopped.
    """
    last = history[-1] if history else None
    if last and (last.is_open or last.state is RemoteState.DONE):
        return None
    if last and not anew and (last.is_last or last.state in (RemoteState.STOPPED, RemoteState.FAILED)):
        return None
    source = best_source(history)
    planned = RemoteSession(
        number=last.number + 1 if last else 1,
        state=RemoteState.PLANNED,
        due_at=moment.now,
        source=source.number if source else 0,
        expected=source.reached if source else NO_PROGRESS,
        session_s=session_s,
        timeout_s=session_s + KILL_AFTER_S,
    )
    if last is None or last.state is not RemoteState.LOST or anew:
        return planned
    unprepared = last.outcome is not None and last.outcome.is_unprepared
    return replace(
        planned,
        fruitless=last.fruitless + (not unprepared),
        unprepared=last.unprepared + 1 if unprepared else 0,
        first_cause=last.first_cause,
    )


def after_quota(
    session: RemoteSession, quota: PlaceQuota | None, wanted_s: int, factor: float, moment: Moment
) -> RemoteSession:
    """Shorten the session to what the account has left, or have it wait for its renewal.

    Args:
        wanted_s: the plan's length of a session.
        factor: hours of the account for an hour of a session.
    """
    affordable_s = wanted_s if quota is None else min(wanted_s, int(quota.left_s / factor))
    if affordable_s < min(wanted_s, USEFUL_S):
        assert quota is not None
        left_min, factor_text = quota.left_s / 60, f"{factor:g}"
        why = f"{left_min:.0f} min are left of the account's hours, at {factor_text} for an hour of a session"
        return session.moved(RemoteState.PLANNED, _renewal(quota, moment), wait=RemoteWait.QUOTA, why=why)
    length = {"session_s": affordable_s, "timeout_s": affordable_s + KILL_AFTER_S}
    return session.moved(RemoteState.BUNDLING, moment.now, **length)


def _renewal(quota: PlaceQuota, moment: Moment) -> datetime:
    """When to read the quota again: after the renewal; after half an hour where that is unknown or past."""
    try:
        renewed_at = datetime.fromisoformat(quota.refreshes_at)
    except ValueError:
        return moment.after(30)
    # the client reads the place's times without a zone; they are UTC
    renewed_at = renewed_at if renewed_at.tzinfo else renewed_at.replace(tzinfo=UTC)
    due_at = renewed_at + timedelta(seconds=AFTER_REFRESH_S)
    return due_at if due_at > moment.now else moment.after(30)


def measured_factor(before_s: float, after_s: float, lasted_s: float) -> float | None:
    """Hours of the account that an hour of a session has cost; None where that cannot be told.

    Args:
        before_s, after_s: used of the account, of which nothing else was used meanwhile.
    """
    used_s = after_s - before_s
    if lasted_s < MEASURABLE_S or used_s <= 0:  # the account was renewed in between, or is charged later
        return None
    return min(4.0, max(0.25, used_s / lasted_s))
