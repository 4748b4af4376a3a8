"""codes where sentences and class names stood (core/codes.py): they are what decisions hang on"""

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"

REASONS = {
    "the wall": "time_limit",
    "the time that was given": "until",
    "the quota": "quota",
    "the end of the Slurm job": "slurm",
    "a notice that the machine is taken back": "spot",
    "a person's stop": "user",
    "the daemon was stopped": "daemon",
    "SIGTERM": "sigterm",
    "nothing of it was": "lost",
    "its supervisor was gone": "lost",
    "a person asked": "queued",
    "a person took it out of the queue": "removed",
}
"""A text began with one of these; what came after was for people."""

OUTCOMES = {"wall": "time_limit", "out of memory": "out_of_memory", "unwell": "diverged"}

KINDS = {
    "SessionOpened": "session_opened",
    "Attached": "attached",
    "CheckpointDue": "checkpoint_due",
    "SaveRequested": "save_requested",
    "CheckpointVerified": "checkpoint_verified",
    "SaveFailed": "save_failed",
    "DeadlineReached": "deadline_reached",
    "WallMoved": "wall_moved",
    "StopRequested": "stop_requested",
    "LastSaveLate": "last_save_late",
    "GraceExpired": "grace_expired",
    "ExitOverdue": "exit_overdue",
    "StageFinished": "stage_finished",
    "RunFinished": "run_finished",
    "AttemptSuspended": "attempt_suspended",
    "AttemptUnsaved": "attempt_unsaved",
    "AttemptCrashed": "attempt_crashed",
    "OutOfMemory": "attempt_out_of_memory",
    "Unwell": "attempt_diverged",
    "Hung": "ranks_hung",
    "Diagnosed": "hang_diagnosed",
    "RetriesExhausted": "retries_exhausted",
    "Adopted": "adopted",
    "SessionLost": "session_lost",
    "ignored": "event_ignored",
    "set_aside": "checkpoint_quarantined",
    "passed_over": "checkpoint_skipped",
    "found": "checkpoint_imported",
    "stage_opened_again": "stage_reopened",
    "extended": "stage_extended",
    "longest_seen": "longest_waits",
    "chosen": "run_chosen",
    "unwell": "health_issue",
}


def upgrade() -> None:
    for table in ("sessions", "resumes"):
        op.add_column(table, sa.Column("reason", sa.String(16), nullable=False, server_default=""))
    for name in ("wall", "fixed_wall"):
        op.execute(f"ALTER TABLE sessions RENAME COLUMN {name}_why TO {name}_kind")
    for text, code in REASONS.items():
        for column in ("wall_kind", "fixed_wall_kind"):
            _set("sessions", column, code, f"{column} = :is", text)
        for table in ("sessions", "resumes"):
            _set(table, "reason", code, "substr(why, 1, length(CAST(:is AS TEXT))) = :is", text)
    _set("sessions", "reason", "error", "phase = :is", "failed")  # "the wall came before the first step" among them
    op.execute("UPDATE sessions SET reason = 'lost' WHERE reason = '' AND phase = 'cut off'")
    for table in ("sessions", "events"):
        _set(table, "phase", "cut_off", "phase = :is", "cut off")
    for before, code in OUTCOMES.items():
        _set("attempts", "outcome", code, "outcome = :is", before)
    _facts()
    for before, code in KINDS.items():
        _set("events", "kind", code, "kind = :is", before)


def _set(table: str, column: str, code: str, where: str, text: str) -> None:
    op.get_bind().execute(sa.text(f"UPDATE {table} SET {column} = :code WHERE {where}"), {"code": code, "is": text})


def _facts() -> None:
    """Of the events whose facts held a text that is a code now."""
    events = sa.table("events", sa.column("id"), sa.column("kind"), sa.column("facts", sa.JSON()))
    held = sa.select(events.c.id, events.c.kind, events.c.facts).where(
        events.c.kind.in_(("WallMoved", "StopRequested", "ignored"))
    )
    for row_id, kind, facts in op.get_bind().execute(held).all():
        if kind == "ignored":
            facts["event"] = KINDS.get(facts.get("event"), facts.get("event"))
        elif "why" in facts:
            why = str(facts.pop("why"))
            name = "wall" if kind == "WallMoved" else "reason"
            facts[name] = next((code for before, code in REASONS.items() if why.startswith(before)), "")
        op.get_bind().execute(events.update().where(events.c.id == row_id).values(facts=facts))
