"""Codes: every state, reason and kind that is stored, sent between processes, or branched on.

A code is a stable value; the text that a person reads about it may change at any time and is never compared. The database
(db/tables.py), events, rank records, `--json` and the plan's `[notify] on` hold these values. A value is never renamed without a
migration (db/migrations) that maps what is stored.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import StrEnum
from typing import Any


class Phase(StrEnum):
    """Of a session (core/session/lifecycle.py)."""

    QUEUED = "queued"
    STARTING = "starting"
    TRAINING = "training"
    SAVING = "saving"
    STOPPING = "stopping"
    RECOVERING = "recovering"
    DIAGNOSING = "diagnosing"
    FINISHED = "finished"
    SUSPENDED = "suspended"
    CUT_OFF = "cut_off"
    FAILED = "failed"

    @property
    def is_over(self) -> bool:
        return self in OVER

    @property
    def is_launching(self) -> bool:
        """An attempt is on its way, and trains nothing yet."""
        return self in (Phase.STARTING, Phase.RECOVERING)


OVER = frozenset({Phase.FINISHED, Phase.SUSPENDED, Phase.CUT_OFF, Phase.FAILED})
LIVE = tuple(phase for phase in Phase if phase not in OVER)
"""Phases of a session that is not over, one by one: a query that names them uses the index on the phase."""


class Reason(StrEnum):
    """Why a session ends or has ended, and why a run waits in the queue. The first five are kinds of walls
    (core/limits/wall.py)."""

    NONE = ""
    TIME_LIMIT = "time_limit"
    UNTIL = "until"
    QUOTA = "quota"
    SLURM = "slurm"
    SPOT = "spot"
    USER = "user"
    DAEMON = "daemon"
    SIGTERM = "sigterm"
    ERROR = "error"
    LOST = "lost"
    QUEUED = "queued"
    REMOVED = "removed"


REASON_TEXT: Mapping[Reason, str] = {
    Reason.NONE: "",
    Reason.TIME_LIMIT: "the session's time limit",
    Reason.UNTIL: "the time given with --until",
    Reason.QUOTA: "the quota",
    Reason.SLURM: "the end of the Slurm job",
    Reason.SPOT: "a notice that the machine is reclaimed",
    Reason.USER: "stopped by the user",
    Reason.DAEMON: "the daemon was stopped",
    Reason.SIGTERM: "SIGTERM",
    Reason.ERROR: "an error",
    Reason.LOST: "nothing of the session was running any more",
    Reason.QUEUED: "queued by the user",
    Reason.REMOVED: "removed from the queue by the user",
}


class RunState(StrEnum):
    ACTIVE = "active"
    FINISHED = "finished"
    FAILED = "failed"
    SUPERSEDED = "superseded"


class CheckpointState(StrEnum):
    VERIFIED = "verified"
    BROKEN = "broken"
    DROPPED = "dropped"
    SUPERSEDED = "superseded"


class ResumeState(StrEnum):
    """Of an entry of the queue."""

    DUE = "due"
    CLAIMED = "claimed"
    DONE = "done"
    FAILED = "failed"


class RemoteState(StrEnum):
    """Of a session at another place (core/remote/session_states.py)."""

    PLANNED = "planned"
    BUNDLING = "bundling"
    PUSHING = "pushing"
    ASKING = "asking"
    QUEUED = "queued"
    RUNNING = "running"
    ENDED = "ended"
    COLLECTED = "collected"
    DONE = "done"
    LOST = "lost"
    STOPPED = "stopped"
    FAILED = "failed"


REMOTE_OPEN = (
    RemoteState.PLANNED,
    RemoteState.BUNDLING,
    RemoteState.PUSHING,
    RemoteState.ASKING,
    RemoteState.QUEUED,
    RemoteState.RUNNING,
    RemoteState.ENDED,
)
"""States of a session that is not over; a run has at most one."""


class RemoteWait(StrEnum):
    """What a session at another place waits for, beside the next look."""

    NONE = ""
    LOGIN = "login"
    CLIENT = "client"
    SLOTS = "slots"
    QUOTA = "quota"
    NETWORK = "network"


class Outcome(StrEnum):
    """How an attempt ended."""

    FINISHED = "finished"
    SUSPENDED = "suspended"
    STOPPED = "stopped"
    TIME_LIMIT = "time_limit"
    UNSAVED = "unsaved"
    CRASHED = "crashed"
    OUT_OF_MEMORY = "out_of_memory"
    DIVERGED = "diverged"
    HUNG = "hung"
    LOST = "lost"


class RankOutcome(StrEnum):
    """How one rank ended, by its own record. `UNSAVED`: it stopped as asked, and its last save failed."""

    FINISHED = "finished"
    SUSPENDED = "suspended"
    UNSAVED = "unsaved"
    FAILED = "failed"


class RankError(StrEnum):
    """What kind of error ended a rank; the rank itself decides, where it has the exception at hand."""

    OTHER = ""
    USAGE = "usage"
    """The script, the plan or their files are wrong; it would fail again."""
    CHECKPOINT = "checkpoint"
    """A checkpoint could not be read or does not fit."""
    LADDER_EXHAUSTED = "ladder_exhausted"
    """Memory ran out, and no rung is left that helps."""
    LOADER_KILLED = "loader_killed"
    """A loading process was killed."""
    DISK_FULL = "disk_full"
    """The script met a full disk or an exhausted disk quota, or the stage's last save a failing disk: there may be room the next
    time."""


class Fit(StrEnum):
    """Whether a plan, or a stage, fits the machine (core/memory/memory_fit.py). `FITS_WITH`: other settings than the plan's."""

    FITS = "fits"
    FITS_WITH = "fits_with"
    DOES_NOT_FIT = "does_not_fit"
    DOES_NOT_RUN = "does_not_run"


class TrendVerdict(StrEnum):
    """Whether and when a metric reaches its target (core/metrics/metric_trend.py); a field of `--json`."""

    REACHED = "reached"
    FORESEEABLE = "foreseeable"
    FLAT = "flat"
    AWAY = "away"
    """It moves away from the target."""
    LEVELS_OFF = "levels off"
    """It approaches a limit before the target."""
    TOO_FEW_POINTS = "too few points"


class NotStarted(StrEnum):
    """Why a start or a resume opened no session."""

    LIVE = "live"
    FINISHED = "finished"
    QUOTA = "quota"
    STOPPED = "stopped"


class NoticeKind(StrEnum):
    """What a notice is about; the values of `[notify] on`, but for `TEST`."""

    STARTED = "started"
    RESUMED = "resumed"
    SAVED = "saved"
    SAVE_FAILED = "save_failed"
    RUNG = "rung"
    REMEDIED = "remedied"
    HUNG = "hung"
    SUSPENDED = "suspended"
    CUT_OFF = "cut_off"
    QUOTA = "quota"
    FAILED = "failed"
    FINISHED = "finished"
    REMOTE = "remote"
    """A run at another place waits for a person, or has waited long."""
    TEST = "test"


class EventKind(StrEnum):
    """Of an entry in a run's journal. The first part are the events of core/session/events.py, which move a session."""

    SESSION_OPENED = "session_opened"
    ATTACHED = "attached"
    CHECKPOINT_DUE = "checkpoint_due"
    SAVE_REQUESTED = "save_requested"
    CHECKPOINT_VERIFIED = "checkpoint_verified"
    SAVE_FAILED = "save_failed"
    DEADLINE_REACHED = "deadline_reached"
    WALL_MOVED = "wall_moved"
    STOP_REQUESTED = "stop_requested"
    LAST_SAVE_LATE = "last_save_late"
    GRACE_EXPIRED = "grace_expired"
    EXIT_OVERDUE = "exit_overdue"
    STAGE_FINISHED = "stage_finished"
    RUN_FINISHED = "run_finished"
    ATTEMPT_SUSPENDED = "attempt_suspended"
    ATTEMPT_UNSAVED = "attempt_unsaved"
    ATTEMPT_CRASHED = "attempt_crashed"
    ATTEMPT_OUT_OF_MEMORY = "attempt_out_of_memory"
    ATTEMPT_DIVERGED = "attempt_diverged"
    RANKS_HUNG = "ranks_hung"
    HANG_DIAGNOSED = "hang_diagnosed"
    RETRIES_EXHAUSTED = "retries_exhausted"
    ADOPTED = "adopted"
    SESSION_LOST = "session_lost"

    # noted beside the lifecycle by the supervisor and its threads
    BUG = "bug"
    EVENT_IGNORED = "event_ignored"
    LAUNCHED = "launched"
    LAUNCH_FAILED = "launch_failed"
    NO_STEP = "no_step"
    NOT_ATTACHED = "not_attached"
    NEVER_ATTACHED = "never_attached"
    STACKS = "stacks"
    MEMORY_NOT_GONE = "memory_not_gone"
    MEMORY_WATCH = "memory_watch"
    READER_FAILED = "reader_failed"
    CHECKPOINT_QUARANTINED = "checkpoint_quarantined"
    CHECKPOINT_SKIPPED = "checkpoint_skipped"
    CHECKPOINT_IMPORTED = "checkpoint_imported"
    STAGE_REOPENED = "stage_reopened"
    STAGE_EXTENDED = "stage_extended"
    REMEDIED = "remedied"
    RUNG_TAKEN = "rung_taken"
    EPOCH = "epoch"
    FORECAST = "forecast"
    LONGEST_WAITS = "longest_waits"
    RUN_CHOSEN = "run_chosen"
    PLAN_CHANGED = "plan_changed"
    DATA_CACHED = "data_cached"
    DATA_CACHE_STALE = "data_cache_stale"
    DATA_CACHE_FAILED = "data_cache_failed"
    MIRRORING = "mirroring"
    MIRRORED = "mirrored"
    MIRROR_FAILED = "mirror_failed"
    TRACKED = "tracked"
    TRACKING_FAILED = "tracking_failed"
    NOTICES_FAILED = "notices_failed"
    NOTICES_ARRIVE = "notices_arrive"
    NOTICES_DROPPED = "notices_dropped"
    TELEMETRY_LOST = "telemetry_lost"
    TELEMETRY_BACK = "telemetry_back"
    GPU_LOST = "gpu_lost"
    GPU_XID = "gpu_xid"
    SPOT_NOTICE = "spot_notice"
    SPOT_UNREACHABLE = "spot_unreachable"
    SLURM_UNREACHABLE = "slurm_unreachable"
    NODES_READY = "nodes_ready"
    NODES_FEWER = "nodes_fewer"
    NODE_LOST = "node_lost"
    CLOCKS_APART = "clocks_apart"

    # noted by the driver of a run at another place
    REMOTE_PUSHED = "remote_pushed"
    REMOTE_PUSHED_TWICE = "remote_pushed_twice"
    REMOTE_QUEUED_LONG = "remote_queued_long"
    REMOTE_WAITING = "remote_waiting"
    REMOTE_ENDED = "remote_ended"
    REMOTE_GPU_REPLACED = "remote_gpu_replaced"

    # noted by what submits Slurm jobs, and by the process that runs sessions in them
    SLURM_SUBMITTED = "slurm_submitted"
    SLURM_REQUEUED = "slurm_requeued"
    SLURM_ENDED = "slurm_ended"

    # noted by ranks, the guard of an attempt, and the snapshot server
    BEST_NOT_SAVED = "best_not_saved"
    EXACTNESS = "exactness"
    FOREIGN_NOTE = "foreign_note"
    FOREIGN_SKIPPED = "foreign_skipped"
    FOREIGN_STOPPED = "foreign_stopped"
    GLOO_INSTEAD_OF_NCCL = "gloo_instead_of_nccl"
    HEALTH_ISSUE = "health_issue"
    KEEPER_NOT_STARTED = "keeper_not_started"
    MEMORY_FACTS = "memory_facts"
    METRICS_DROPPED = "metrics_dropped"
    NOT_CACHED = "not_cached"
    OUT_OF_MEMORY = "out_of_memory"
    READING = "reading"
    SNAPSHOTS_NOT_PINNED = "snapshots_not_pinned"
    SNAPSHOTS_OFF = "snapshots_off"
    TRACKS_NOTHING = "tracks_nothing"
    WEIGHTS_LOADED = "weights_loaded"
    WEIGHTS_PARTLY_LOADED = "weights_partly_loaded"


NOTED_BY_RANKS = frozenset(
    {
        EventKind.BEST_NOT_SAVED,
        EventKind.EXACTNESS,
        EventKind.FOREIGN_NOTE,
        EventKind.FOREIGN_SKIPPED,
        EventKind.FOREIGN_STOPPED,
        EventKind.GLOO_INSTEAD_OF_NCCL,
        EventKind.HEALTH_ISSUE,
        EventKind.KEEPER_NOT_STARTED,
        EventKind.MEMORY_FACTS,
        EventKind.METRICS_DROPPED,
        EventKind.NOT_CACHED,
        EventKind.OUT_OF_MEMORY,
        EventKind.READING,
        EventKind.SNAPSHOTS_NOT_PINNED,
        EventKind.SNAPSHOTS_OFF,
        EventKind.TRACKS_NOTHING,
        EventKind.WEIGHTS_LOADED,
        EventKind.WEIGHTS_PARTLY_LOADED,
    }
)
"""What the supervisor takes into the journal from a socket. No process but itself writes events that move a session."""


Note = Callable[[str, dict[str, Any]], None]
"""Takes an entry for a run's journal: its kind, and facts that JSON can hold. From any thread, and without waiting."""
