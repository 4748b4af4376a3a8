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
    FAILED = "failed"


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
    """Of an entry in a run's journal.

    docs/reference/events.md is written from the comments (make docs).
    """

    # move a session through its phases (core/session/events.py)
    SESSION_OPENED = "session_opened"  # a session of the run has begun
    ATTACHED = "attached"  # a rank tracks its state and is ready to step
    CHECKPOINT_DUE = "checkpoint_due"  # the interval between two checkpoints is over; the ranks are asked to save
    SAVE_REQUESTED = "save_requested"  # a user has asked for a checkpoint
    CHECKPOINT_VERIFIED = "checkpoint_verified"  # a checkpoint was written and read back, and matches its hashes
    SAVE_FAILED = "save_failed"  # a save has failed, and why; the checkpoint before it stays
    DEADLINE_REACHED = "deadline_reached"  # the last moment to begin the final save before the wall
    WALL_MOVED = "wall_moved"  # the session's nearest time limit is another one, or at another time
    STOP_REQUESTED = "stop_requested"  # the user, the daemon or a signal ends the session; the ranks are asked to stop
    LAST_SAVE_LATE = "last_save_late"  # the ranks have not saved, and a later save would not be done before the wall
    GRACE_EXPIRED = "grace_expired"  # the ranks have neither saved nor ended in time, and are killed
    EXIT_OVERDUE = "exit_overdue"  # the ranks have saved and not ended in time, and are killed
    STAGE_FINISHED = "stage_finished"  # all ranks have come to the end of a stage that is not the last
    RUN_FINISHED = "run_finished"  # the last stage is done
    ATTEMPT_SUSPENDED = "attempt_suspended"  # all ranks have saved and ended between two steps
    ATTEMPT_UNSAVED = "attempt_unsaved"  # the same, but the save has failed
    ATTEMPT_CRASHED = "attempt_crashed"  # a rank has failed; the cause is that of the first one
    ATTEMPT_OUT_OF_MEMORY = "attempt_out_of_memory"  # memory ran out; the next attempt takes a rung of the ladder
    ATTEMPT_DIVERGED = "attempt_diverged"  # loss or weights have gone bad; the next attempt makes a change
    RANKS_HUNG = "ranks_hung"  # a rank makes no progress for longer than its work can take
    HANG_DIAGNOSED = "hang_diagnosed"  # the stacks of the ranks that hung are stored; the ranks are killed
    RETRIES_EXHAUSTED = "retries_exhausted"  # the run has failed and is not retried
    ADOPTED = "adopted"  # a new supervisor has taken over ranks that were still running
    SESSION_LOST = "session_lost"  # a new supervisor has found nothing of the session running

    # noted beside the lifecycle by the supervisor and its threads
    BUG = "bug"  # an error of kgorch itself, in the supervisor
    EVENT_IGNORED = "event_ignored"  # an event that has no meaning in the session's phase; nothing has changed
    LAUNCHED = "launched"  # an attempt has started, and from which checkpoint or snapshot
    LAUNCH_FAILED = "launch_failed"  # an attempt could not be started; it is tried again
    NO_STEP = "no_step"  # the wall came before the attempt's first step
    NOT_ATTACHED = "not_attached"  # the script has not called `attach()` yet; until it does, nothing can be saved
    NEVER_ATTACHED = "never_attached"  # the attempt is over, and no rank had called `attach()`
    STACKS = "stacks"  # where each rank of a hang stood, and the folder that has the stacks
    MEMORY_NOT_GONE = "memory_not_gone"  # memory of a GPU is still in use after an attempt's processes have ended
    MEMORY_WATCH = "memory_watch"  # memory is nearly full, or has room again: the ranks are ordered a rung down or up
    READER_FAILED = "reader_failed"  # an unexpected error while a checkpoint was verified; training continues
    CHECKPOINT_QUARANTINED = "checkpoint_quarantined"  # a verified checkpoint is damaged and set aside
    CHECKPOINT_SKIPPED = "checkpoint_skipped"  # a checkpoint that was found was not used, and why
    CHECKPOINT_IMPORTED = "checkpoint_imported"  # state of the run was copied from a source
    STAGE_REOPENED = "stage_reopened"  # a stage that was finished is trained again: its final checkpoint cannot be read
    STAGE_EXTENDED = "stage_extended"  # a finished stage is trained longer (`kgorch start --extend`)
    REMEDIED = "remedied"  # a remedy of `[health]` was used against a loss or weights that have gone bad
    RUNG_TAKEN = "rung_taken"  # a rung of the memory ladder was taken or undone
    EPOCH = "epoch"  # epochs that a session has done, with their metrics
    FORECAST = "forecast"  # when the run is expected to end
    LONGEST_WAITS = "longest_waits"  # the longest times at each place, from which time-outs are computed
    RUN_CHOSEN = "run_chosen"  # one of several runs of this name was chosen (`kgorch start --run`)
    PLAN_CHANGED = "plan_changed"  # the plan differs from that of the session before, and in what
    DATA_CACHED = "data_cached"  # a local copy of data is complete and verified
    DATA_CACHE_STALE = "data_cache_stale"  # the source of a local copy has changed; it is copied again
    DATA_CACHE_FAILED = "data_cache_failed"  # data could not be copied, and why
    MIRRORING = "mirroring"  # checkpoints are copied to the plan's mirror
    MIRRORED = "mirrored"  # a checkpoint is complete at the mirror
    MIRROR_FAILED = "mirror_failed"  # the mirror cannot be written, and why; it is tried again
    TRACKED = "tracked"  # experiment trackers have been sent the metrics up to this step
    TRACKING_FAILED = "tracking_failed"  # a tracker is not sent the metrics, and why; it is tried again
    NOTICES_FAILED = "notices_failed"  # notices do not arrive, and why
    NOTICES_ARRIVE = "notices_arrive"  # notices arrive again
    NOTICES_DROPPED = "notices_dropped"  # a notice was dropped, because too many wait for their target
    TELEMETRY_LOST = "telemetry_lost"  # the NVIDIA driver hangs or fails; there are no figures of GPUs
    TELEMETRY_BACK = "telemetry_back"  # the driver answers again
    GPU_LOST = "gpu_lost"  # the driver has lost a GPU
    GPU_XID = "gpu_xid"  # the driver reports an error of a GPU, by NVIDIA's XID number
    SPOT_NOTICE = "spot_notice"  # the cloud takes the machine away soon
    SPOT_UNREACHABLE = "spot_unreachable"  # the cloud's metadata server does not answer
    SLURM_UNREACHABLE = "slurm_unreachable"  # Slurm's controller does not answer; the time limit known before holds
    NODES_READY = "nodes_ready"  # the other nodes of the session have joined
    NODES_FEWER = "nodes_fewer"  # fewer nodes than the plan asks for have joined, and why
    NODE_LOST = "node_lost"  # the connection to a node has ended
    CLOCKS_APART = "clocks_apart"  # the clock of a node differs from this machine's

    # noted by the driver of a run at another place
    REMOTE_PUSHED = "remote_pushed"  # a session was handed to the place, which has queued it
    REMOTE_PUSHED_TWICE = "remote_pushed_twice"  # the place may run a session more than once
    REMOTE_QUEUED_LONG = "remote_queued_long"  # a session has waited for hours in the place's queue
    REMOTE_WAITING = "remote_waiting"  # a session cannot be started at the place yet, and why
    REMOTE_ENDED = "remote_ended"  # a session at the place is over, and how
    REMOTE_GPU_REPLACED = "remote_gpu_replaced"  # the place gave another accelerator than the plan asks for

    # noted by what submits Slurm jobs, and by the process that runs sessions in them
    SLURM_SUBMITTED = "slurm_submitted"  # a job was submitted
    SLURM_REQUEUED = "slurm_requeued"  # the job was requeued, for the next session
    SLURM_ENDED = "slurm_ended"  # the job is over and no other follows

    # noted by ranks, the guard of an attempt, and the snapshot server
    BEST_NOT_SAVED = "best_not_saved"  # the weights of a best value could not be saved
    EXACTNESS = "exactness"  # what holds of the promise of the same bits (`kgorch status`)
    FOREIGN_NOTE = "foreign_note"  # something about a program of `[stage.foreign]` that its user should know
    FOREIGN_SKIPPED = "foreign_skipped"  # a checkpoint of such a program was not used, and why
    FOREIGN_STOPPED = "foreign_stopped"  # such a program was asked to stop: how long it took, and whether it saved
    GLOO_INSTEAD_OF_NCCL = "gloo_instead_of_nccl"  # ranks share a GPU and communicate by Gloo
    HEALTH_ISSUE = "health_issue"  # a rank has seen a loss or weights that have gone bad: not finite, or a jump
    KEEPER_NOT_STARTED = "keeper_not_started"  # the snapshot server is not running; a crash costs what is not saved
    MEMORY_FACTS = "memory_facts"  # batch size, workers and device of a stage, which the memory ladder computes with
    METRICS_DROPPED = "metrics_dropped"  # metrics that are not kept, because there are too many names or too long ones
    NOT_CACHED = "not_cached"  # a value of `session.cached` could not be stored
    OUT_OF_MEMORY = "out_of_memory"  # memory ran out on a rank within a step
    READING = "reading"  # progress of a computation before the first step (`session.progress`)
    SNAPSHOTS_NOT_PINNED = "snapshots_not_pinned"  # CUDA could not register memory for snapshots; copies are slow
    SNAPSHOTS_OFF = "snapshots_off"  # there is too little host memory for snapshots
    TRACKS_NOTHING = "tracks_nothing"  # the script takes steps without `session.track()`; nothing can be saved
    WEIGHTS_LOADED = "weights_loaded"  # starting weights were loaded
    WEIGHTS_PARTLY_LOADED = "weights_partly_loaded"  # starting weights were loaded, and not all tensors fit


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
