"""What the buttons do. Each calls the function that the verb of its name calls; none has a rule of its own.

A click must not act twice: a second one of the same action on the same run is refused while the first is under way, also from
another browser.
"""

from __future__ import annotations

import contextlib
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from kgorch.admission import background_start, live_requests, queue_entry
from kgorch.admission.requests import Consent, LocalState, StartRequest
from kgorch.admission.resolve_run import NoSession
from kgorch.checkpoint import registry
from kgorch.checkpoint.export import export_foreign, export_safetensors, name_of_export
from kgorch.checkpoint.foreign_contents import is_foreign
from kgorch.checkpoint.verify import verify_checkpoint
from kgorch.core.codes import OVER, REMOTE_OPEN, CheckpointState
from kgorch.core.limits import time_parsing
from kgorch.db import checkpoints, queue, remote, runs, sessions, slurm_jobs
from kgorch.db.rows import CheckpointInfo, RunInfo
from kgorch.errors import KgorchError, NotFound
from kgorch.report import checkpoint_list
from kgorch.scheduler import daemon_api
from kgorch.slurm import jobs
from kgorch.web.state import WebState

SAVE_TIMEOUT_S = 600.0
STOP_TIMEOUT_S = 900.0

Values = Mapping[str, Any]
Say = Callable[[str], None]
"""Takes what an action is doing, for the dialog."""


class Action(NamedTuple):
    """A button.

    Attributes:
        run: does it; returns what came of it, in a sentence.
        verb: the command that does the same.
    """

    run: Callable[[WebState, RunInfo, Values, Say], str]
    verb: str


class Runner:
    """Runs one action of a kind on a run at a time."""

    def __init__(self, state: WebState) -> None:
        self._state, self._lock = state, threading.Lock()
        self._busy: set[tuple[str, str]] = set()

    def run(self, name: str, run: RunInfo, values: Values, say: Say) -> str:
        """Raises: KgorchError; NotFound for an unknown action."""
        action = ACTIONS.get(name)
        if action is None:
            raise NotFound("there is no such action", error_code="KG806")
        with self._alone(name, run):
            return action.run(self._state, run, values, say)

    @contextlib.contextmanager
    def _alone(self, name: str, run: RunInfo) -> Iterator[None]:
        key = (name, run.id)
        with self._lock:
            if key in self._busy:
                raise KgorchError(f"{name} of {run.name} is already under way, from here or another browser")
            self._busy.add(key)
        try:
            yield
        finally:
            with self._lock:
                self._busy.discard(key)


def _save(state: WebState, run: RunInfo, values: Values, say: Say) -> str:
    _refuse_elsewhere(state, run)
    request = live_requests.request_save(state.engine, run)
    say("requested; the ranks save at their next step")
    until_s = time.monotonic() + SAVE_TIMEOUT_S
    while time.monotonic() < until_s:
        if saved := live_requests.saved_checkpoint(state.engine, run, request):
            return f"step {saved.step} is saved and verified"
        time.sleep(0.1)
    raise KgorchError(
        "no checkpoint was verified in time; the save may still succeed",
        next_step=f"kgorch status {run.name}",
        error_code="KG306",
    )


def _stop(state: WebState, run: RunInfo, values: Values, say: Say) -> str:
    _refuse_elsewhere(state, run)
    if job := slurm_jobs.open_job(state.engine, run.id):
        return jobs.stop(state.engine, job)[1]
    if live_requests.request_stop(state.engine, run) is None:
        return "it is not running"
    say("requested; the session saves, then ends")
    until_s = time.monotonic() + STOP_TIMEOUT_S
    while time.monotonic() < until_s:
        last = sessions.last(state.engine, run.id)
        if last is None or last.phase in OVER:
            return f"{str(last.phase).replace('_', ' ')} at step {last.step}" if last else "over"
        time.sleep(0.1)
    raise KgorchError("the session has not ended in time", next_step=f"kgorch status {run.name}", error_code="KG306")


def _resume(state: WebState, run: RunInfo, values: Values, say: Say) -> str:
    _refuse_older(state, run)
    say("starting a session in the background")
    started = background_start.start(["resume", run.name], state.home)
    return (
        f"a session is open, supervised by pid {started.pid}"
        if started.is_open
        else started.output or "nothing was started"
    )


def _enqueue(state: WebState, run: RunInfo, values: Values, say: Say) -> str:
    due_at, priority = _instant(values.get("at")), _priority(values.get("priority"))
    nothing = queue_entry.enqueue_known(state.engine, run, due_at=due_at, priority=priority)
    return _queued(state, nothing)


def _priority_only(state: WebState, run: RunInfo, values: Values, say: Say) -> str:
    priority = _priority(values.get("priority"))
    if priority is None:
        raise KgorchError("priority: expected a whole number from -100 to 100")
    row = queue.pending_resume(state.engine, run.id)
    if row is None:
        raise KgorchError(
            f"{run.name} is not in the queue",
            next_step=f"kgorch queue add {run.name} --priority {priority}",
            error_code="KG109",
        )
    nothing = queue_entry.enqueue_known(state.engine, run, due_at=row.due_at or datetime.now(UTC), priority=priority)
    return _queued(state, nothing)


def _drop_from_queue(state: WebState, run: RunInfo, values: Values, say: Say) -> str:
    _refuse_elsewhere(state, run)
    return (
        "it is out of the queue"
        if queue.unschedule(state.engine, run.id)
        else "it had no scheduled resume; nothing changed"
    )


def _extend(state: WebState, run: RunInfo, values: Values, say: Say) -> str:
    """Queue a finished run with more to do, as `kgorch start PLAN --extend --set … --queue`, by the plan that it stores."""
    words = [word for word in str(values.get("set") or "").split() if word]
    if not words or any("=" not in word for word in words):
        raise KgorchError(
            "extend: expected KEY=VALUE that gives a stage more to do, such as stage.train.args.epochs=20"
        )
    _refuse_older(state, run)
    request = StartRequest(run.plan, Path(run.workdir) / "plan.toml", tuple(words), consent=Consent(extend=True))
    result = queue_entry.enqueue(LocalState(state.engine, state.home, state.profile), request, due_at=datetime.now(UTC))
    return _queued(state, result if isinstance(result, NoSession) else None)


def _pin(state: WebState, run: RunInfo, values: Values, say: Say) -> str:
    row = find_checkpoint(state, run, values)
    checkpoints.set_pinned(state.engine, row.path, True)
    return f"step {row.step} stays until it is unpinned"


def _unpin(state: WebState, run: RunInfo, values: Values, say: Say) -> str:
    row = find_checkpoint(state, run, values)
    checkpoints.set_pinned(state.engine, row.path, False)
    return f"step {row.step} stays as long as the plan keeps it"


def _drop(state: WebState, run: RunInfo, values: Values, say: Say) -> str:
    row = find_checkpoint(state, run, values)
    registry.drop(state.engine, run.id, row, Path(run.checkpoints))
    return f"step {row.step} is deleted"


ACTIONS: Mapping[str, Action] = {
    "save": Action(_save, "kgorch save RUN"),
    "stop": Action(_stop, "kgorch stop RUN"),
    "resume": Action(_resume, "kgorch resume RUN"),
    "queue": Action(_enqueue, "kgorch queue add RUN"),
    "priority": Action(_priority_only, "kgorch queue add RUN --priority N"),
    "unqueue": Action(_drop_from_queue, "kgorch queue drop RUN"),
    "extend": Action(_extend, "kgorch start PLAN --extend --set KEY=VALUE --queue"),
    "pin": Action(_pin, "kgorch checkpoints pin RUN --step N"),
    "unpin": Action(_unpin, "kgorch checkpoints unpin RUN --step N"),
    "drop": Action(_drop, "kgorch checkpoints drop RUN --step N"),
}


def find_checkpoint(state: WebState, run: RunInfo, values: Values) -> CheckpointInfo:
    """The verified checkpoint of that stage and step, compared with the rows: no part of a path comes from the request.

    Raises: NotFound.
    """
    rows = checkpoints.of_run(state.engine, run.id, CheckpointState.VERIFIED)
    wanted = (str(values.get("stage")), str(values.get("step")))
    found = [row for row in checkpoint_list.on_disk(rows) if (row.stage, str(row.step)) == wanted]
    if not found:
        raise NotFound("there is no such checkpoint", next_step=f"kgorch checkpoints list {run.name}")
    return found[-1]


def export(state: WebState, run: RunInfo, values: Values) -> tuple[Path, str]:
    """Write a checkpoint into one file, as `kgorch checkpoints export` does. Returns: the file, which the caller deletes with its
    folder, and a name for it. Raises: NotFound, KgorchError."""
    row = find_checkpoint(state, run, values)
    folder = Path(tempfile.mkdtemp(prefix="export-", dir=state.home))
    out = folder / name_of_export(Path(row.path))
    try:
        if is_foreign(verify_checkpoint(Path(row.path))):
            export_foreign(Path(row.path), out)
            if out.is_dir():
                raise KgorchError(
                    "this checkpoint is a folder",
                    next_step=f"kgorch checkpoints export {run.name} FOLDER --step {row.step}",
                    error_code="KG210",
                )
        else:
            export_safetensors(Path(row.path), out, "model")
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    return out, f"{run.name}-{row.stage}-{row.step}{out.suffix}"


def _queued(state: WebState, nothing: NoSession | None) -> str:
    if nothing:
        return f"it is {nothing.why}; nothing was queued"
    return (
        "queued" if daemon_api.wake(state.home) else "queued; no daemon is running that would start it (kgorch daemon)"
    )


def _instant(text: object) -> datetime:
    try:
        return time_parsing.parse_future_time(str(text), datetime.now(UTC)) if text else datetime.now(UTC)
    except ValueError as error:
        raise KgorchError(str(error)) from None


def _priority(value: object) -> int | None:
    if value in (None, ""):
        return None
    try:
        number = int(str(value))
    except ValueError:
        number = 1000
    if not -100 <= number <= 100:
        raise KgorchError("priority: expected a whole number from -100 to 100")
    return number


def _refuse_elsewhere(state: WebState, run: RunInfo) -> None:
    newest = remote.newest(state.engine, run.id)
    if newest and newest.state in REMOTE_OPEN:
        raise KgorchError(
            f"{run.name} continues at {newest.place}", next_step=f"kgorch stop {run.name}", error_code="KG702"
        )


def _refuse_older(state: WebState, run: RunInfo) -> None:
    """Verbs that take a name act on the newest run of it."""
    newest = runs.newest(state.engine, run.name)
    if newest and newest.id != run.id:
        raise KgorchError(f"a newer run of this name continues instead: number {newest.number}", error_code="KG303")
