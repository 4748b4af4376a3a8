"""The process of a Slurm job that runs the sessions of a run: the supervisor is its child, and it decides what follows a session.

A process of its own, so that it outlives a supervisor that is killed: another one then adopts the training, as anywhere else. What
it decides is core/slurm/chain.py. Slurm signals: USR1, the warning before the time limit, and TERM go on to the supervisor; USR2
(commands.STOP_SIGNAL) is `kgorch stop` from another node, which cannot reach the supervisor's socket.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from sqlalchemy import Engine
from sqlalchemy.exc import SQLAlchemyError

from kgorch.core.codes import EventKind, Reason, RunState
from kgorch.core.slurm import chain
from kgorch.core.slurm.chain import Follow, SessionEnd, Step
from kgorch.core.slurm.job_state import JobState, JobView, job_event
from kgorch.db import queue, runs, sessions, slurm_jobs
from kgorch.db.engine import MAY_PASS
from kgorch.db.rows import RunInfo, SlurmJobInfo
from kgorch.db.runs import now
from kgorch.errors import DatabaseUnusable, ExitCode, KgorchError
from kgorch.scheduler.claimed_resume import notify_of_failure
from kgorch.slurm import commands, jobs
from kgorch.slurm.batch_script import job_name
from kgorch.slurm.commands import SlurmError, SlurmUnavailable
from kgorch.supervisor import ending_files
from kgorch.system.sockets import control_socket

ASK_S = 0.5
"""Seconds between two requests to stop, until the supervisor listens."""

SAVE_POLL_S = 2.0
"""Seconds between two looks for a request of `kgorch save`: one stat of a file on a shared disk."""

CONTROLLER_AWAY_S, CONTROLLER_POLL_S = 1800.0, 5.0
"""How long an answer of Slurm's controller is waited for after a session, and seconds between two questions.

A restart or a failover of a controller takes minutes. Meanwhile nobody ends this job at its time limit, for the controller does
that; once it is back, it leaves a job KillWait (30 s by default) after its SIGTERM, which is enough for several questions.
"""

LATER_S = 10.0
"""Seconds until what follows is decided again where another supervisor would fail at once. Less than KillWait: a job that its time
limit ends meanwhile is still requeued."""

IGNORING = ("/bin/sh", "-c", "trap '' USR1 USR2; exec \"$@\"", "sh")
"""Starts a program that ignores these signals until it has handlers for them: by default they would end it."""

FORWARDED = (signal.SIGTERM, signal.SIGUSR1)

Result = TypeVar("Result")


def when_database_answers(action: Callable[[], Result]) -> Result:
    """What the action returns. It is tried again while the database cannot be used: a job that ended then is started again by
    nobody.

    Raises: what the action raises otherwise, or after CONTROLLER_AWAY_S.
    """
    until_s = time.monotonic() + CONTROLLER_AWAY_S
    while True:
        try:
            return action()
        except (DatabaseUnusable, *MAY_PASS) as error:
            if time.monotonic() >= until_s:
                raise
            told = _cause(error) if isinstance(error, SQLAlchemyError) else "; ".join((error.what, *error.facts))
            say(f"{told}; it is tried again")
        time.sleep(CONTROLLER_POLL_S)


def run_sessions(engine: Engine, run: RunInfo, environ: Mapping[str, str] = os.environ) -> int:
    """Run sessions of a run in this Slurm job. Returns: the exit code of the job. Raises: KgorchError."""
    job = environ.get("SLURM_JOB_ID", "")
    if not job.isdecimal():
        raise KgorchError("this is not a Slurm job: SLURM_JOB_ID is not set", next_step=f"kgorch resume {run.name}")
    if "SLURM_ARRAY_TASK_ID" in environ:
        raise KgorchError(
            f"job {job} is a task of an array: all its tasks would train {run.name}",
            next_step="submit one plan for each task, with a name of its own: kgorch slurm submit PLAN",
        )
    text = environ.get("SLURM_RESTART_COUNT", "0")
    restarts = int(text) if text.isdecimal() else 0
    if restarts and when_database_answers(lambda: _was_stopped(engine, run, job)):
        say(f"{run.name} was stopped by the user, and job {job} does not continue it; next: kgorch slurm submit PLAN")
        return int(ExitCode.SUSPENDED)
    former = when_database_answers(lambda: _last_reason(engine, run))
    row = when_database_answers(lambda: _enter(engine, run, job, restarts, environ.get("SLURMD_NODENAME", "")))
    return _JobProcess(engine, run, row, former).run()


def _last_reason(engine: Engine, run: RunInfo) -> tuple[int, Reason]:
    """Number of the run's newest session, and what ends or has ended it."""
    last = sessions.last(engine, run.id)
    if last is None:
        return 0, Reason.NONE
    ending = ending_files.read(Path(run.folder), last.number)
    return last.number, _reason_in(ending) if ending else last.reason


def _reason_in(ending: Mapping[str, Any]) -> Reason:
    """What ended a session whose end is not in the database; only whether a user has stopped it counts."""
    return Reason.USER if ending.get("reason") == Reason.USER else Reason.NONE


def _was_stopped(engine: Engine, run: RunInfo, job: str) -> bool:
    """Whether a user stopped the run in an earlier start of this job, whose row is then closed.

    Slurm may requeue a job whose session saves for a stop: the job is preempted, or its node fails.
    """
    row, last = slurm_jobs.of_number(engine, run.id, job), sessions.last(engine, run.id)
    if row is None:
        return False
    # the control socket on the job's own node leaves its mark in the session alone
    reason = _last_reason(engine, run)[1]
    is_by_socket = last is not None and reason is Reason.USER and last.started_at >= row.submitted_at
    if row.stop_at is None and not is_by_socket:
        return False
    if row.ended_at is None:
        slurm_jobs.close(engine, row, "stopped by the user", seen_at=now())
    return True


def _enter(engine: Engine, run: RunInfo, job: str, restarts: int, node: str) -> SlurmJobInfo:
    """The row of this job, which the submission may not have written yet, or which was closed before a user requeued the job
    (one of a run that was stopped does not come here).

    Raises: KgorchError.
    """
    if run.state == RunState.SUPERSEDED:
        raise KgorchError(f"another run has taken the place of {run.name}/{run.number}: {run.why}")
    columns: dict[str, Any] = {"state": JobState.RUNNING, "reason": "", "restarts": restarts, "node": node[:255]}
    row = slurm_jobs.newest(engine, run.id)
    if row and row.ended_at is None and row.job not in ("", job):
        raise KgorchError(
            f"{run.name} is trained by the Slurm job {row.job}: {jobs.described(row)}",
            next_step=f"kgorch status {run.name}",
        )
    if row is None or row.ended_at:
        row = slurm_jobs.begin(
            engine, run.id, name=job_name(run.name, run.id), state=JobState.RUNNING, requeue=row is None or row.requeue
        )
    if row is None:
        raise KgorchError(f"another Slurm job trains {run.name}", next_step=f"kgorch status {run.name}")
    return slurm_jobs.save(engine, row.id, job=job, seen_at=now(), **columns)


class _JobProcess:
    """See the head of this file.

    Args:
        former: of `_last_reason`, when the process began: a user may have submitted the job to continue what was stopped.
    """

    def __init__(
        self, engine: Engine, run: RunInfo, row: SlurmJobInfo, former: tuple[int, Reason] = (0, Reason.NONE)
    ) -> None:
        self._engine, self._run, self._row, self._former = engine, run, row, former
        self._child: subprocess.Popen[bytes] | None = None
        self._stop = threading.Event()
        self._is_requeue_noted = self._is_failure_told = False
        self._without_database = 0

    def run(self) -> int:
        for number in FORWARDED:
            signal.signal(number, lambda number, _: self._forward(number))
        for number in (signal.SIGUSR2, signal.SIGINT):
            signal.signal(number, lambda *_: self._stop.set())
        # a request that came before there was a handler is in the row
        newest = when_database_answers(lambda: slurm_jobs.newest(self._engine, self._run.id))
        if newest and newest.stop_at and self._is_this_start(newest):
            self._stop.set()
        threading.Thread(target=self._pass_stop_on, name="stop", daemon=True).start()
        jobs.save_request(self._run).unlink(missing_ok=True)  # it was for an earlier start
        threading.Thread(target=self._pass_saves_on, name="save", daemon=True).start()
        supervisors = 0
        while True:
            if self._stop.is_set():  # before anything was started
                return when_database_answers(
                    lambda: self._conclude(Step(Follow.NOTHING, "stopped by the user"), int(ExitCode.SUSPENDED), None)
                )
            began_s = time.monotonic()
            code = self._run_session()
            if time.monotonic() - began_s > chain.SOON_S:
                supervisors = 0
            supervisors += code not in (chain.FINISHED, chain.NO_DATABASE)
            self._without_database = self._without_database + 1 if code == chain.NO_DATABASE else 0
            if (job_code := self.after_session(code, supervisors)) is not None:
                return job_code

    def after_session(self, code: int, supervisors: int) -> int | None:
        """Have follow what is to follow. Where that takes Slurm or the database, wait for it, and decide by what Slurm says then.

        Returns: the exit code of the job; None where another supervisor follows in it.
        """
        until_s, has_waited, step = time.monotonic() + CONTROLLER_AWAY_S, False, None
        while True:
            view, trouble = self._look()
            event = job_event(view, self._row.restarts)
            try:
                end = self._session_end(code, supervisors)
                step = chain.next_step(end, event, chains=self._row.requeue)
                if step.follow is Follow.SUPERVISOR and has_waited:
                    return None
                say(f"the session ended with {code}, the job is {event.value}; {_FOLLOWS[step.follow]}: {step.why}")
                if step.follow is Follow.SUPERVISOR:
                    if not step.is_later:
                        return None
                    time.sleep(LATER_S)
                    has_waited = True
                    continue
                if trouble and step.follow is not Follow.NOTHING:
                    raise trouble
                return self._conclude(step, code, view)
            except SlurmUnavailable as error:
                if time.monotonic() >= until_s or not commands.are_installed():
                    return self._give_up(
                        f"Slurm was not reached after a session ({error.what}), and nothing continues the run:"
                        " type kgorch slurm submit PLAN"
                    )
                say(f"{error.headline}; it is asked again")
            except SQLAlchemyError as error:
                if time.monotonic() >= until_s or self._without_database >= chain.DATABASE_TRIES:
                    say(f"the end of the session could not be recorded: {_cause(error)}")
                    if step and step.gives_up:
                        return self._give_up(step.why)
                    if code == chain.FINISHED or (step and step.follow is Follow.NOTHING):
                        return code if code >= 0 else int(ExitCode.BUG)
                    return self._give_up(
                        "the database was not reached after a session, and nothing continues the run:"
                        " type kgorch slurm submit PLAN"
                    )
                say(f"the database cannot be used: {_cause(error)}; it is tried again")
            time.sleep(CONTROLLER_POLL_S)

    def _is_stop_requested(self) -> bool:
        """By a signal; or by the row alone, where the controller was away and could not deliver one."""
        if self._stop.is_set():
            return True
        try:
            newest = slurm_jobs.newest(self._engine, self._run.id)
        except SQLAlchemyError:
            return False
        return newest is not None and newest.stop_at is not None and newest.job in ("", self._row.job)

    def _is_this_start(self, row: SlurmJobInfo) -> bool:
        return row.id == self._row.id and row.ended_at is None

    def _run_session(self) -> int:
        command: Sequence[str] = [
            *IGNORING, sys.executable, "-m", "kgorch.cli", "resume", self._run.name, "--progress", "none"
        ]  # fmt: skip
        self._child = subprocess.Popen(command)
        return self._child.wait()

    def _forward(self, number: int) -> None:
        """Slurm signals this process alone, or all of the job: then the supervisor gets it twice, which does no harm."""
        child = self._child
        if child and child.poll() is None:
            child.send_signal(number)

    def _pass_stop_on(self) -> None:
        """Ask the supervisor to stop, once it listens."""
        self._stop.wait()
        pause = threading.Event()
        while True:
            try:
                answer = control_socket.ask(Path(self._run.folder) / "control.sock", "stop")
            except KgorchError as error:
                say(error.headline)
                answer = None
            if answer and answer.ok:
                return
            pause.wait(ASK_S)

    def _pass_saves_on(self) -> None:
        """Ask the supervisor for a checkpoint whenever `kgorch save` on another node wants one."""
        request, pause, said = jobs.save_request(self._run), threading.Event(), ""
        while True:
            pause.wait(SAVE_POLL_S)
            try:
                if request.exists() and control_socket.ask(Path(self._run.folder) / "control.sock", "save"):
                    request.unlink(missing_ok=True)
            except KgorchError as error:
                if str(error) != said:
                    say(said := str(error))
            except OSError as error:  # a request that cannot be taken away would save for ever
                say(f"requests of kgorch save are no longer looked for: {error}")
                return

    def _look(self) -> tuple[JobView | None, SlurmUnavailable | None]:
        try:
            return commands.show(self._row.job), None
        except SlurmUnavailable as error:
            return None, error

    def _session_end(self, code: int, supervisors: int) -> SessionEnd:
        """Raises: SQLAlchemyError, where what follows depends on the database."""
        folder = Path(self._run.folder)
        try:
            newest = _last_reason(self._engine, self._run)
            ending = ending_files.read(folder, newest[0])
            found = runs.by_id(self._engine, self._run.id)
            waits = queue.pending_resume(self._engine, self._run.id)
        except SQLAlchemyError as error:
            if code in (chain.FINISHED, chain.QUOTA_SPENT):
                raise
            say(f"the database cannot be read: {_cause(error)}")
            number, ending = ending_files.newest(folder)
            newest, found, waits = (number, _reason_in(ending or {})), None, None
        resume = (ending or {}).get("resume") or {}
        is_own = newest != self._former or code == chain.SUSPENDED
        return SessionEnd(
            code,
            newest[1] if is_own else Reason.NONE,
            is_stop_requested=self._is_stop_requested(),
            is_active=found is not None and found.state == RunState.ACTIVE,
            supervisors=supervisors,
            without_database=self._without_database,
            fruitless=waits.failed_starts if waits else 0,
            resume_at=resume.get("due_at") or (waits.due_at if waits else None),
        )

    # What follows

    def _conclude(self, step: Step, code: int, view: JobView | None) -> int:
        match step.follow:
            case Follow.SLURM:
                self._record_requeue(step.why, jobs.columns_of(view) if view else {})
                return 0
            case Follow.REQUEUE:
                return self._requeue(step)
            case Follow.SUCCESSOR:
                return self._submit_successor(step)
        if step.gives_up:
            self._fail(step.why)
            code = int(ExitCode.FAILED)
        state: dict[str, Any] = {}
        if view and not view.state.is_running:
            state = {"state": view.state, "reason": view.reason}
        slurm_jobs.close(self._engine, self._row, step.why, **state)
        return code if code >= 0 else int(ExitCode.BUG)

    def _requeue(self, step: Step) -> int:
        # Recorded first: Slurm ends this process as soon as it has accepted.
        self._record_requeue(step.why, {"state": JobState.REQUEUED, "reason": "", "node": "", "seen_at": now()})
        try:
            commands.requeue(self._row.job)
            return 0
        except SlurmUnavailable:
            raise
        except SlurmError as error:  # its partition, or the site, does not allow it
            say(f"{error.headline}; a successor is submitted instead")
            return self._submit_successor(step)

    def _submit_successor(self, step: Step) -> int:
        options = [f"--dependency=afterany:{self._row.job}"]
        if step.begins_at:
            options.append(commands.time_option(step.begins_at))
        try:
            row = jobs.submit(
                self._engine, self._run, self._row.name, *options, requeue=self._row.requeue, follows=self._row
            )
        except SlurmUnavailable:
            raise
        except KgorchError as error:
            return self._give_up(f"no Slurm job could be submitted that continues it: {error.what}")
        say(f"job {row.job} follows")
        return 0

    def _give_up(self, why: str) -> int:
        say(why)
        try:
            self._fail(why)
            newest = slurm_jobs.newest(self._engine, self._run.id)
            if newest and newest.ended_at is None:
                slurm_jobs.close(self._engine, newest, why)
        except SQLAlchemyError as error:
            say(f"that could not be recorded: {_cause(error)}")
        return int(ExitCode.FAILED)

    def _fail(self, why: str) -> None:
        """The run waits for a user, who is notified: nothing else would tell of it."""
        try:
            runs.set_state(self._engine, self._run.id, RunState.FAILED, why)
        finally:  # where the database can be read and not written, too
            if not self._is_failure_told:
                self._is_failure_told = True
                notify_of_failure(self._run.id)

    def _record_requeue(self, why: str, columns: Mapping[str, Any]) -> None:
        """Record that the job runs again, unless the database is away: Slurm does not wait for it, and the next start, or
        whoever looks at the job, brings its row up to date."""
        facts = {"job": self._row.job, "restarts": self._row.restarts + 1, "why": why}
        try:
            if not self._is_requeue_noted:  # else Slurm had not answered the first time
                sessions.add_event(self._engine, self._run.id, EventKind.SLURM_REQUEUED, facts)
                self._is_requeue_noted = True
            slurm_jobs.save(self._engine, self._row.id, **columns)
        except SQLAlchemyError as error:
            say(f"the requeue is not recorded, the database cannot be used: {_cause(error)}")


_FOLLOWS = {
    Follow.NOTHING: "nothing follows",
    Follow.SUPERVISOR: "another supervisor follows",
    Follow.SLURM: "the job runs again",
    Follow.REQUEUE: "the job is requeued",
    Follow.SUCCESSOR: "another job follows later",
}


def say(text: str) -> None:
    """A line in the job's output."""
    print(f"kgorch: {text}", flush=True)


def _cause(error: SQLAlchemyError) -> str:
    """Without the statement, and the address of a page about the error."""
    return str(error).partition("\n")[0]
