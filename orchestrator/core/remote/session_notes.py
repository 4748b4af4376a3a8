"""What of a change of a session is worth an entry in the run's journal, or a notice to its user."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, NamedTuple

from kgorch.core.codes import EventKind, RemoteState, RemoteWait
from kgorch.core.remote.session_states import QUEUED_NOTICE_S, QUEUED_TOLD_S, RemoteSession


class Note(NamedTuple):
    """An entry of the journal.

    Attributes:
        notice: for the user; empty for none.
    """

    kind: EventKind
    facts: dict[str, Any]
    notice: str = ""


def notes(before: RemoteSession, after: RemoteSession, name: str) -> Iterator[Note]:
    """The notes of one change. Args: name: of the session at the place."""
    facts: dict[str, Any] = {"number": after.number, "name": name}
    if after.state is RemoteState.QUEUED and before.state in (RemoteState.PUSHING, RemoteState.ASKING):
        yield Note(EventKind.REMOTE_PUSHED, facts | {"version": after.version})
    if after.version > max(1, before.version):
        text = (
            f"session {after.number} was pushed {after.version} times: {name} uses the account's hours more than once"
        )
        yield Note(EventKind.REMOTE_PUSHED_TWICE, facts | {"version": after.version}, text)
    if after.queue_told > before.queue_told:
        hours = (QUEUED_TOLD_S, QUEUED_NOTICE_S)[after.queue_told - 1] / 3600
        text = f"session {after.number} has waited for {hours:g} h in the place's queue"
        yield Note(EventKind.REMOTE_QUEUED_LONG, facts | {"hours": hours}, text if after.queue_told > 1 else "")
    if after.wait is not before.wait and after.wait not in (RemoteWait.NONE, RemoteWait.NETWORK):
        needs_person = after.wait in (RemoteWait.LOGIN, RemoteWait.CLIENT)
        text = f"session {after.number} waits for a person ({after.wait}): {after.why}"
        waiting = {"wait": after.wait, "why": after.why, "until": after.due_at.isoformat()}
        yield Note(EventKind.REMOTE_WAITING, facts | waiting, text if needs_person else "")
    if before.is_open and not after.is_open:
        step = after.reached.step
        yield Note(
            EventKind.REMOTE_ENDED,
            facts | {"state": after.state, "outcome": after.outcome, "step": step, "why": after.why},
        )


def replaced_accelerator(wanted: str, gpus: tuple[str, ...]) -> str:
    """What to tell where a place gave another accelerator than the plan asks for; empty where it did not.

    Args:
        wanted: in the place's own words: `NvidiaTeslaT4`.
        gpus: names by the driver: `Tesla T4`.
    """
    model = re.sub(r"^nvidia(tesla)?", "", wanted.lower())
    if not wanted.lower().startswith("nvidia") or not model:
        return ""
    if any(model in re.sub(r"\W", "", gpu.lower()) for gpu in gpus):
        return ""
    return f"the plan asks for {wanted}, and the session had {', '.join(gpus) or 'no GPU'}"
