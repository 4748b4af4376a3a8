"""Ends a session whose supervisor died: from the records of its ranks, its checkpoints and the table of the lifecycle.

The user is notified of that end, as the supervisor would have done.
"""

from __future__ import annotations

import os
from datetime import datetime
from pathlib import Path
from typing import Any

from sqlalchemy import Engine

from kgorch.checkpoint import registry
from kgorch.checkpoint.folder import readable_checkpoints
from kgorch.checkpoint.verify import verify_checkpoint
from kgorch.core.codes import CheckpointState, Reason
from kgorch.core.session import events, notification_policy
from kgorch.core.session import lifecycle as core
from kgorch.core.session.lifecycle_state import LifecycleState
from kgorch.db import checkpoints as checkpoint_rows
from kgorch.db import fleet, queue, sessions
from kgorch.db.rows import AttemptInfo, RunInfo, SessionInfo
from kgorch.errors import CheckpointBroken, CheckpointUnreadable
from kgorch.launch import attempts, remedies
from kgorch.limits import late_charges
from kgorch.limits.quota_ledger import Ledger, Terms
from kgorch.plan import Plan
from kgorch.services import notifications
from kgorch.supervisor import ending_files, metric_curves, recorder
from kgorch.system.clock import boottime_s


def recover_session(
    engine: Engine,
    run: RunInfo,
    plan: Plan,
    last: SessionInfo,
    attempt: AttemptInfo | None,
    terms: Terms | None = None,
) -> SessionInfo:
    """End the session `last`. Nothing of it may run any more.

    Args:
        attempt: its last one; None where none was launched.
        terms: of the quota; None where nothing is counted.
    Returns: the row as it is then.
    Raises: SessionTaken: another machine of the fleet has ended it meanwhile.
    """
    late_charges.complete(engine, last, attempt, terms.quota.window if terms else None)
    if attempt:
        metric_curves.import_file(engine, attempt)
    if ending := ending_files.read(Path(run.folder), last.number):
        ending["resume"] = _unless_queued(engine, run, ending.get("resume"))
        sessions.record(engine, run.id, last.id, **ending)
        ending_files.forget(Path(run.folder), last.number)
        if attempt and attempt.stage:
            _take_in(engine, run, attempt.stage, last)
            registry.mark_best(engine, run.id, plan)
        return _row(engine, run)  # its supervisor, which could not reach the database, has sent the notice
    step, end, running = last.step, None, None
    if attempt and attempt.outcome is None:
        step = max(step, _take_in(engine, run, attempt.stage, last))
        registry.mark_best(engine, run.id, plan)
        context = attempts.SessionContext(engine, run, plan, last)
        running = attempts.load_attempt(context, attempt)
        step = running.progress_step(max(step, running.recorded_step()), _newest_saved(engine, run, attempt.stage))
        verified = checkpoint_rows.verified_paths(engine, run.id)
        end = attempts.judge_end(context, running, step, verified)
    before = LifecycleState(phase=last.phase, reason=last.reason, why=last.why)
    by_itself = running is not None and running.failed_by_itself()
    move = core.ended_alone(before, end, boottime_s(), failed_by_itself=by_itself)
    columns = recorder.columns_of(move, running, step)
    columns["facts"] = {"found_by": os.getpid(), "why": move.session.why}
    if running and isinstance(end, events.AttemptDiverged):
        columns["adjustment"] = remedies.columns(run, running.row, end)
    if resume := move.record.resume:
        due_at = None if resume.when_asked else _due_at(engine, last, terms)
        entry = {"reason": resume.reason, "why": resume.why, "due_at": due_at}
        columns["resume"] = _unless_queued(engine, run, entry)
    sessions.record(engine, run.id, last.id, **columns, step=step)
    row = _row(engine, run)
    _notify(engine, run, plan, row, notification_policy.notice_of(move.event, move.session, number=row.number))
    return row


def _notify(
    engine: Engine, run: RunInfo, plan: Plan, row: SessionInfo, notice: notification_policy.Notice | None
) -> None:
    """Tell the user; a target that hangs delays the next session by END_S at most."""
    if notice is None:
        return
    notifier = notifications.Notifier(
        plan.notify,
        run.name,
        Path(run.workdir),
        lambda kind, facts: sessions.add_event(engine, run.id, kind, facts),
    )
    notifier.tell(notice, session=row.number, stage=row.stage, step=row.step, metrics=dict(row.metrics))
    notifier.hurry()
    notifier.finish(notifications.END_S)


def _unless_queued(engine: Engine, run: RunInfo, entry: dict[str, Any] | None) -> dict[str, Any] | None:
    """The next session; None where the user has stopped this one and has queued the run since: that place in the queue stays."""
    waits = queue.pending_resume(engine, run.id)
    is_queued = waits is not None and waits.reason == Reason.QUEUED
    return None if is_queued and entry and entry.get("reason") == Reason.USER else entry


def _newest_saved(engine: Engine, run: RunInfo, stage: str) -> int:
    rows = checkpoint_rows.of_run(engine, run.id, CheckpointState.VERIFIED)
    return max((row.step for row in rows if row.stage == stage), default=0)


def _row(engine: Engine, run: RunInfo) -> SessionInfo:
    row = sessions.last(engine, run.id)
    assert row is not None  # it was just written
    return row


def _due_at(engine: Engine, last: SessionInfo, terms: Terms | None) -> datetime | None:
    """When the next session may begin: now, or when the quota has hours again."""
    now = fleet.server_now(engine)
    return Ledger(engine, terms, now, boottime_s()).resume_at(last.save_lead_s) if terms else now


def _take_in(engine: Engine, run: RunInfo, stage: str, last: SessionInfo) -> int:
    """Write down the stage's checkpoints that no supervisor saw; the highest step among them."""
    known, step = checkpoint_rows.verified_paths(engine, run.id), 0
    for folder, _ in readable_checkpoints(attempts.checkpoint_root(run, stage)):
        if str(folder) in known:
            continue
        try:
            found = verify_checkpoint(folder)
        except (CheckpointBroken, CheckpointUnreadable):
            continue  # for the next launch to deal with
        if found.run_id == run.id:
            registry.record_verified(engine, run.id, last.id, found, folder, save_duration_s=0.0, blocking_s=0.0)
            step = max(step, found.step)
    return step
