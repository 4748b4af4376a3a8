"""A session as the decisions have it (core/remote/session_states.py), and as its row has it."""

from __future__ import annotations

import dataclasses
from typing import Any

from kgorch.core.remote.place_values import RemoteStatus
from kgorch.core.remote.record_values import RecordOutcome
from kgorch.core.remote.session_states import Progress, RemoteSession
from kgorch.db.rows import RemoteSessionInfo

_OTHER_FORM = ("expected", "reached", "status", "outcome")
_SAME = tuple(field.name for field in dataclasses.fields(RemoteSession) if field.name not in _OTHER_FORM)


def session_of(row: RemoteSessionInfo) -> RemoteSession:
    return RemoteSession(
        **{name: getattr(row, name) for name in _SAME},
        expected=Progress(row.expected_position, row.expected_step),
        reached=Progress(row.reached_position, row.reached_step),
        status=RemoteStatus(row.status) if row.status else None,
        outcome=RecordOutcome(row.outcome) if row.outcome else None,
    )


def columns_of(session: RemoteSession) -> dict[str, Any]:
    """The columns that the decisions own."""
    return {name: getattr(session, name) for name in _SAME} | {
        "expected_position": session.expected.position,
        "expected_step": session.expected.step,
        "reached_position": session.reached.position,
        "reached_step": session.reached.step,
        "status": str(session.status or ""),
        "outcome": str(session.outcome or ""),
    }
