"""How a session ended while no supervisor lived: written down from what its ranks and the disk tell."""

from __future__ import annotations

import os
from datetime import UTC, datetime
from pathlib import Path

from sqlalchemy import Engine

from db import checkpoints as checkpoint_rows
from db import runs, sessions
from db.records import AttemptInfo, RunInfo, SessionInfo
from orchestrator.checkpoint import registry
from orchestrator.checkpoint.folder import readable_checkpoints
from orchestrator.checkpoint.verify import verify_checkpoint
from orchestrator.core import lifecycle as core
from orchestrator.core.codes import REASON_TEXT, EventKind, Outcome, Reason
from orchestrator.core.lifecycle import Event, Session
from orchestrator.errors import CheckpointBroken, CheckpointUnreadable
from orchestrator.launch import attempts, remedies
from orchestrator.limits import quota_ledger
from orchestrator.limits.quota_ledger import Ledger, Terms
from orchestrator.plan import Plan
from orchestrator.supervisor import ending_files, metric_curves
from orchestrator.system.clock import boottime_s


def settle(
    engine: Engine,
    run: RunInfo,
    plan: Plan,
    last: SessionInfo,
    attempt: AttemptInfo | None,
    terms: Terms | None = None,
) -> SessionInfo:
    """End the session `last`, nothing of which runs any more. Returns its row as it is then."""
    quota_ledger.complete(engine, last, attempt, terms)
    if attempt:
        metric_curves.take_in(engine, attempt)
    if ending := ending_files.read(Path(run.folder), last.number):
        sessions.record(engine, run.id, last.id, **ending)
        if attempt and ending["kind"] in (EventKind.STAGE_FINISHED, EventKind.RUN_FINISHED):
            runs.finish_stage(engine, run.id, attempt.stage)
        ending_files.forget(Path(run.folder), last.number)
        if attempt and attempt.stage:
            _take_in(engine, run, attempt.stage, last)
            registry.mark_best(engine, run.id, plan)
        return _row(engine, run)
    step = last.step
    event: Event = core.SessionLost(REASON_TEXT[Reason.LOST])
    if attempt and attempt.outcome is None:
        step = max(step, _take_in(engine, run, attempt.stage, last))
        registry.mark_best(engine, run.id, plan)
        event = _close(engine, run, plan, last, attempt, step)
    before = Session(phase=last.phase, reason=last.reason, why=last.why)
    ended, actions = core.advance(before, event, boottime_s())
    queued = next((action for action in actions if isinstance(action, core.QueueResume)), None)
    due_at = None if queued is None or queued.when_asked else _due_at(engine, last, terms)
    sessions.record(
        engine,
        run.id,
        last.id,
        kind=event.kind,
        phase=ended.phase,
        facts={"found_by": os.getpid(), "why": ended.why},
        resume={"reason": queued.reason, "why": queued.why, "due_at": due_at} if queued else None,
        reason=ended.reason,
        why=ended.why,
        step=step,
    )
    return _row(engine, run)


def _row(engine: Engine, run: RunInfo) -> SessionInfo:
    settled = sessions.last(engine, run.id)
    assert settled is not None
    return settled


def _due_at(engine: Engine, last: SessionInfo, terms: Terms | None) -> datetime | None:
    """At once, or when there are hours again."""
    now = datetime.now(UTC)
    return Ledger(engine, terms, now, boottime_s()).resume_at(last.lead_s) if terms else now


def _close(engine: Engine, run: RunInfo, plan: Plan, last: SessionInfo, attempt: AttemptInfo, step: int) -> Event:
    """Write down how the attempt ended; what that is to a session that nobody supervised."""
    more = attempts.more_after(engine, run, plan, attempt.stage)
    running = attempts.running(engine, run, last, attempt, more_stages=more)
    verified = checkpoint_rows.verified_paths(engine, run.id)
    event, outcome = attempts.ended(engine, run, plan, last.id, running, step, verified), Outcome.LOST
    if isinstance(event, core.StageFinished | core.RunFinished):
        runs.finish_stage(engine, run.id, attempt.stage)
        outcome = Outcome.FINISHED
    elif isinstance(event, core.AttemptSuspended):
        outcome = Outcome.SUSPENDED
    elif isinstance(event, core.OutOfMemory):
        outcome = Outcome.OUT_OF_MEMORY
    elif isinstance(event, core.Unwell | core.AttemptUnsaved):
        outcome = Outcome.DIVERGED if isinstance(event, core.Unwell) else Outcome.UNSAVED
    elif running.failed_by_itself():  # else all was killed, which is no fault of the training
        outcome = Outcome.CRASHED
    cause = getattr(event, "cause", "")
    sessions.close_attempt(
        engine,
        attempt.id,
        outcome=outcome,
        cause=cause,
        last_step=step,
        gained=step > running.furthest or outcome is Outcome.DIVERGED,
    )
    if isinstance(event, core.StageFinished):
        return core.AttemptSuspended()  # the next stage is for the next session
    if isinstance(event, core.Unwell):
        remedies.write(engine, run, last.id, attempt, event)
    if isinstance(event, core.AttemptCrashed | core.OutOfMemory | core.RetriesExhausted | core.Unwell):
        return core.SessionLost(event.cause)
    return event


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
            registry.record_verified(engine, run.id, last.id, found, folder, took_s=0.0, blocking_s=0.0)
            step = max(step, found.step)
    return step
