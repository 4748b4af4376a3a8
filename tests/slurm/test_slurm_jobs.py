"""What is made of Slurm's answers, where no cluster gives them: commands that are missing, hang, refuse or forget a job.

The stand-ins answer what Slurm 22.05.8 answered; with a real one: test_slurm_sessions.py.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sqlite3
import threading
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from fleet_machines import TestFleet
from harness import Kgorch, wait_until
from sqlalchemy import Engine

from kgorch.admission import live_requests, removal
from kgorch.cli.commands.remote import slurm_session
from kgorch.core.codes import EventKind, Phase, Reason, RunState
from kgorch.core.slurm import chain
from kgorch.core.slurm.job_state import JobState, JobView
from kgorch.db import engine as db_engine
from kgorch.db import queue, runs, sessions, shared_disk, slurm_jobs
from kgorch.db.postgres import ServerAway
from kgorch.errors import ExitCode, KgorchError, NotFound
from kgorch.limits import slurm_limit
from kgorch.report import run_view
from kgorch.scheduler import slurm_job
from kgorch.slurm import commands, jobs
from kgorch.slurm.commands import SlurmError, SlurmUnavailable
from kgorch.supervisor import ending_files

ABSENT = "echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1"
AWAY = "echo 'slurm_load_jobs error: Unable to contact slurm controller (connect failure)' >&2; exit 1"
RUNNING = "printf '   JobState=RUNNING Reason=None\\n   Requeue=1 Restarts=2\\n   BatchHost=n7\\n'"
NO_REQUEUE = f"""if [ "$1" != requeue ]; then {RUNNING}; else
echo 'Requested operation is presently disabled' >&2; exit 1; fi"""
TIMEOUT = "printf '   JobState=TIMEOUT Reason=TimeLimit\\n   Requeue=1 Restarts=2\\n'"
PROMISE = Path(__file__).parents[1] / "promises" / "slurm.json"


@pytest.fixture
def answers(tmp_path, monkeypatch):
    """Commands of Slurm that answer as their scripts do."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")

    def answer(**scripts: str) -> None:
        for name, script in scripts.items():
            (folder / name).write_text(f"#!/bin/sh\n{script}\n")
            (folder / name).chmod(0o755)

    return answer


@pytest.fixture
def run(engine: Engine, tmp_path):
    folder = tmp_path / "home" / "runs" / "far" / "1"
    (folder / "slurm").mkdir(parents=True)
    (folder / "slurm" / "job.sh").write_text("#!/bin/bash\n")
    return runs.create(
        engine, id="0123456789ab", name="far", number=1, folder=str(folder), workdir=str(tmp_path),
        checkpoints=str(folder / "checkpoints"), plan="", plan_hash="", overrides=(), stages=["train"],
    )  # fmt: skip


def job_of(engine: Engine, run, job: str = "7"):
    row = slurm_jobs.begin(engine, run.id, name="kgorch-far", state=JobState.SUBMITTING, requeue=True)
    return slurm_jobs.save(engine, row.id, job=job, state=JobState.PENDING)


def test_a_machine_without_slurm_is_told_so(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SlurmUnavailable, match="there is no sbatch on this machine"):
        commands.submit(tmp_path / "job.sh")


def test_a_controller_that_hangs_is_not_waited_for(answers, monkeypatch):
    monkeypatch.setattr(commands, "TIMEOUT_S", 0.2)
    answers(scontrol="exec sleep 20")
    with pytest.raises(SlurmUnavailable, match="has not answered"):
        commands.show("7")


@pytest.mark.parametrize(
    "answer",
    [
        "sbatch: error: Batch job submission failed: Socket timed out on send/recv operation",
        "sbatch: error: Batch job submission failed: Unable to contact slurm controller (connect failure)",
        "sbatch: error: Batch job submission failed: Zero Bytes were transmitted or received",
        "sbatch: error: Slurm backup controller in standby mode",
        "sbatch: error: Munge encode failed: Failed to connect to /run/munge/munge.socket.2: Connection refused",
    ],
)
def test_a_command_whose_connection_failed_was_not_refused(answers, tmp_path, answer):
    answers(sbatch=f"echo '{answer}' >&2; exit 1")
    with pytest.raises(SlurmUnavailable):
        commands.submit(tmp_path / "job.sh")


def test_a_command_that_is_killed_was_not_refused(answers):
    """As `scontrol requeue` by the very requeue that it asked for."""
    answers(scontrol="kill $$")
    with pytest.raises(SlurmUnavailable, match="scontrol was ended by signal 15"):
        commands.requeue("7")


@pytest.fixture
def ended(engine, run, monkeypatch):
    """What a job's process does after a session at a wall; what comes back is waited for, also on a busy machine."""
    monkeypatch.setattr(slurm_job, "CONTROLLER_AWAY_S", 20.0)
    monkeypatch.setattr(slurm_job, "CONTROLLER_POLL_S", 0.05)
    monkeypatch.setattr(slurm_job, "LATER_S", 0.05)
    monkeypatch.setattr(slurm_job, "notify_of_failure", lambda run_id: None)
    row = slurm_jobs.save(engine, job_of(engine, run).id, state=JobState.RUNNING, restarts=2)

    def after_session(code: int = int(ExitCode.SUSPENDED), *former: Any) -> int | None:
        return slurm_job._JobProcess(engine, run, row, *former).after_session(code, 1)

    return after_session


@pytest.fixture
def stays_away(ended, monkeypatch):
    """What stays away is given up after a second."""
    monkeypatch.setattr(slurm_job, "CONTROLLER_AWAY_S", 1.0)


def twice_away(tmp_path: Path, then: str, state: str) -> str:
    """A command that is not answered twice."""
    mark = tmp_path / state
    return f"echo x >> {mark}; if [ $(wc -l < {mark}) -lt 3 ]; then {AWAY}; fi; {then}"


def test_a_controller_that_comes_back_gets_the_requeue_that_it_missed(answers, engine, run, ended, tmp_path):
    requeue = twice_away(tmp_path, "exit 0", "requeue")
    answers(scontrol=f'if [ "$1" = requeue ]; then {requeue}; else {twice_away(tmp_path, RUNNING, "show")}; fi')
    assert ended() == 0 and (tmp_path / "requeue").read_text().count("x") == 3
    row = slurm_jobs.newest(engine, run.id)
    assert (row.job, row.state, row.ended_at) == ("7", JobState.REQUEUED, None)
    assert runs.by_id(engine, run.id).state == RunState.ACTIVE
    assert [event.kind for event in sessions.events(engine, run.id, limit=9)] == [EventKind.SLURM_REQUEUED], (
        "it is noted once"
    )


def test_a_successor_whose_submission_got_no_answer_is_found_or_submitted_again(answers, engine, run, ended, tmp_path):
    answers(scontrol=NO_REQUEUE, sbatch=twice_away(tmp_path, "echo 8", "submit"), squeue="true")
    assert ended() == 0
    row = slurm_jobs.newest(engine, run.id)
    assert (row.job, row.follows, row.ended_at) == ("8", "7", None)
    assert runs.by_id(engine, run.id).state == RunState.ACTIVE


def test_a_controller_that_stays_away_fails_the_run_and_says_what_to_type(answers, engine, run, ended, stays_away):
    answers(scontrol=AWAY, sbatch=AWAY, squeue=AWAY)
    assert ended() == ExitCode.FAILED
    run = runs.by_id(engine, run.id)
    assert run.state == RunState.FAILED and "type kgorch slurm submit PLAN" in run.why
    row = slurm_jobs.newest(engine, run.id)
    assert row.ended_at and row.why == run.why


def test_commands_that_are_not_there_are_not_waited_for(engine, run, ended, monkeypatch, tmp_path):
    monkeypatch.setattr(slurm_job, "CONTROLLER_AWAY_S", 1e6)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert ended() == ExitCode.FAILED
    assert "there is no scontrol on this machine" in runs.by_id(engine, run.id).why


def test_a_stop_while_the_controller_is_away_ends_the_chain(answers, engine, run, ended):
    answers(scontrol=AWAY)
    slurm_jobs.save(engine, slurm_jobs.newest(engine, run.id).id, stop_at=runs.now())  # the signal was not delivered
    assert ended() == ExitCode.SUSPENDED
    assert slurm_jobs.newest(engine, run.id).why == "stopped by the user"
    assert runs.by_id(engine, run.id).state == RunState.ACTIVE


@contextlib.contextmanager
def locked(engine: Engine, kind: str = "IMMEDIATE", for_s: float | None = None):
    """The database's lock is held by another program: during the block, or so many seconds."""
    holder = sqlite3.connect(str(engine.url.database), check_same_thread=False, isolation_level=None)
    holder.execute(f"BEGIN {kind}")
    release = threading.Timer(3600.0 if for_s is None else for_s, holder.rollback)
    release.daemon = True
    release.start()
    try:
        yield holder
    finally:
        release.cancel()
        holder.close()


@pytest.fixture
def impatient(engine, monkeypatch):
    """A lock of the database is an error at once."""
    monkeypatch.setattr(db_engine, "BUSY_MS", 20)
    engine.dispose()


def test_a_database_that_is_away_at_a_sessions_end_does_not_keep_the_job_from_its_requeue(
    answers, engine, run, ended, impatient, tmp_path
):
    answers(scontrol=f'if [ "$1" = requeue ]; then echo x >> {tmp_path}/requeue; else {RUNNING}; fi')
    with locked(engine):
        assert ended() == 0
    assert (tmp_path / "requeue").read_text().count("x") == 1
    row = slurm_jobs.newest(engine, run.id)
    assert (row.job, row.state, row.ended_at) == ("7", JobState.RUNNING, None)
    assert slurm_job._enter(engine, run, "7", 3, "n8").restarts == 3, "the next start has the same row"


def test_a_database_that_is_away_while_slurm_requeues_the_job_does_not_end_the_chain(answers, engine, ended, impatient):
    answers(scontrol=RUNNING.replace("Restarts=2", "Restarts=3"))
    with locked(engine):
        assert ended() == 0


def test_a_database_that_comes_back_gets_the_successor_and_the_end_of_a_stopped_run(
    answers, engine, run, ended, impatient
):
    answers(scontrol=NO_REQUEUE, sbatch="echo 8", squeue="true")
    with locked(engine, for_s=0.4):
        assert ended() == 0
    assert (slurm_jobs.newest(engine, run.id).job, runs.by_id(engine, run.id).state) == ("8", RunState.ACTIVE)
    row = slurm_jobs.save(engine, slurm_jobs.newest(engine, run.id).id, stop_at=runs.now())
    with locked(engine, for_s=0.4):
        assert slurm_job._JobProcess(engine, run, row).after_session(int(ExitCode.SUSPENDED), 1) == ExitCode.SUSPENDED
    assert slurm_jobs.newest(engine, run.id).why == "stopped by the user"


def test_a_database_that_stays_away_is_given_up_and_fails_no_run_that_has_ended(
    answers, engine, run, ended, stays_away, impatient
):
    answers(scontrol=NO_REQUEUE)
    with locked(engine):
        assert ended() == ExitCode.FAILED
    assert runs.by_id(engine, run.id).state == RunState.ACTIVE
    runs.set_state(engine, run.id, RunState.FINISHED)
    with locked(engine):
        assert ended(int(ExitCode.DONE)) == ExitCode.DONE
    assert runs.by_id(engine, run.id).state == RunState.FINISHED


@pytest.fixture
def on_network_disk(monkeypatch):
    """A writer of the database keeps readers out, as with the rollback journal of a shared disk. To be named before `engine`."""
    monkeypatch.setattr(shared_disk, "is_on_network", lambda path: True)


def test_a_quotas_renewal_that_could_not_be_read_at_first_is_read_again(
    on_network_disk, answers, engine, run, ended, impatient
):
    answers(scontrol=RUNNING, sbatch="echo 8", squeue="true")
    queue.put(engine, run.id, reason=Reason.QUOTA, due_at=runs.now() + timedelta(hours=1))
    with locked(engine, "EXCLUSIVE", for_s=0.4):
        assert ended(int(ExitCode.QUOTA_SPENT)) == 0
    row = slurm_jobs.newest(engine, run.id)
    assert (row.job, row.follows, row.ended_at) == ("8", "7", None)


def test_a_quotas_renewal_that_is_never_read_is_not_told_as_none(
    on_network_disk, answers, engine, run, ended, stays_away, impatient, capfd
):
    answers(scontrol=RUNNING)
    with locked(engine, "EXCLUSIVE"):
        assert ended(int(ExitCode.QUOTA_SPENT)) == ExitCode.FAILED
    said = capfd.readouterr().out
    assert "not renewed" not in said and "type kgorch slurm submit PLAN" in said


def leave_ending(run, engine: Engine, **entry: Any) -> None:
    """What a supervisor leaves that could not write the end of its session into the database."""
    session = sessions.open_session(engine, run.id, site="local", boot_id="another machine's")
    over = {"kind": EventKind.ATTEMPT_SUSPENDED, "phase": Phase.SUSPENDED, "facts": {}}
    ending_files.write(Path(run.folder), session.number, over | entry)


@pytest.mark.parametrize("is_locked", [True, False], ids=["locked", "not locked any more"])
def test_a_stop_whose_record_is_a_file_alone_ends_the_chain(
    on_network_disk, answers, engine, run, ended, impatient, is_locked
):
    answers(scontrol=RUNNING)
    leave_ending(run, engine, reason=Reason.USER)
    with locked(engine, "EXCLUSIVE", for_s=0.4) if is_locked else contextlib.nullcontext():
        assert ended() == ExitCode.SUSPENDED
    assert slurm_jobs.newest(engine, run.id).why == "stopped by the user"
    requeued = {"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "3"}
    assert slurm_job.run_sessions(engine, run, requeued) == ExitCode.SUSPENDED, "nor does a requeue undo it"


def test_a_quotas_renewal_whose_record_is_a_file_alone_is_followed_by_a_successor(answers, engine, run, ended):
    answers(scontrol=RUNNING, sbatch="echo 8", squeue="true")
    resume = {"reason": Reason.QUOTA, "why": "", "due_at": runs.now() + timedelta(hours=1)}
    leave_ending(run, engine, reason=Reason.QUOTA, resume=resume)
    assert ended(int(ExitCode.QUOTA_SPENT)) == 0 and slurm_jobs.newest(engine, run.id).job == "8"


def test_a_job_that_starts_while_the_databases_server_is_away_waits_for_it(postgres, tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("KGORCH_HOME", str(tmp_path))
    monkeypatch.setenv("KGORCH_DATABASE", postgres.new_database())
    monkeypatch.setattr(slurm_job, "CONTROLLER_POLL_S", 0.05)
    postgres.stop()
    release = threading.Timer(1.0, postgres.start)
    release.start()
    try:
        with pytest.raises(NotFound, match="no run named 'far'"):
            slurm_session.command.callback("far")
    finally:
        release.join()
    assert "it is tried again" in capfd.readouterr().out
    monkeypatch.setattr(slurm_job, "CONTROLLER_AWAY_S", 0.2)
    monkeypatch.setenv("KGORCH_DATABASE", "postgresql+psycopg://me@127.0.0.1:1/kgorch")
    with pytest.raises(ServerAway):
        slurm_session.command.callback("far")


@pytest.mark.parametrize("restarts", ["0", "1"])
def test_a_job_that_starts_while_the_database_is_locked_waits_for_it(
    engine, run, ended, impatient, monkeypatch, restarts
):
    monkeypatch.setattr(slurm_job._JobProcess, "run", lambda self: 77)
    with locked(engine, for_s=0.4):
        assert slurm_job.run_sessions(engine, run, {"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": restarts}) == 77
    slurm_jobs.save(engine, slurm_jobs.newest(engine, run.id).id, stop_at=runs.now())
    with locked(engine, for_s=0.4):
        assert slurm_job.run_sessions(engine, run, {"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "2"}) == 10


def test_a_supervisor_that_finds_the_database_locked_is_followed_by_another_one(answers, engine, kgorch, monkeypatch):
    """The whole process of a job; only the lock ends when the first supervisor has failed."""
    answers(scontrol=RUNNING)
    monkeypatch.setattr(slurm_job, "LATER_S", 0.05)
    kgorch("queue", "add", str(kgorch.plan()))
    for name in ("KGORCH_HOME", "XDG_CONFIG_HOME"):
        monkeypatch.setenv(name, str(kgorch.home))
    run = runs.newest(engine, "test")
    row = slurm_jobs.save(engine, job_of(engine, run).id, state=JobState.RUNNING, restarts=2)
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    process, codes = slurm_job._JobProcess(engine, run, row), list[int]()
    former = {number: signal.getsignal(number) for number in (*slurm_job.FORWARDED, signal.SIGUSR2, signal.SIGINT)}
    with locked(engine) as holder:

        def run_session() -> int:
            codes.append(slurm_job._JobProcess._run_session(process))
            if holder.in_transaction:
                holder.rollback()
            return codes[-1]

        monkeypatch.setattr(process, "_run_session", run_session)
        try:
            assert process.run() == ExitCode.DONE
        finally:
            for number, handler in former.items():
                signal.signal(number, handler)
    assert codes == [ExitCode.NO_DATABASE, ExitCode.DONE]
    assert runs.by_id(engine, run.id).state == RunState.FINISHED


def test_a_database_that_no_supervisor_can_use_fails_the_run(answers, engine, run, ended, monkeypatch):
    answers(scontrol=RUNNING)
    row = slurm_jobs.newest(engine, run.id)
    process = slurm_job._JobProcess(engine, run, row)
    monkeypatch.setattr(process, "_without_database", chain.DATABASE_TRIES)
    assert process.after_session(int(ExitCode.NO_DATABASE), 1) == ExitCode.FAILED
    run = runs.by_id(engine, run.id)
    assert run.state == RunState.FAILED and "type kgorch slurm submit PLAN" in run.why


def test_a_run_that_no_supervisor_can_train_is_told_though_the_database_takes_nothing(
    answers, engine, run, ended, monkeypatch
):
    answers(scontrol=RUNNING)
    process, told = slurm_job._JobProcess(engine, run, slurm_jobs.newest(engine, run.id)), []
    monkeypatch.setattr(process, "_without_database", chain.DATABASE_TRIES)
    monkeypatch.setattr(slurm_job, "notify_of_failure", told.append)
    with engine.begin() as connection:
        connection.exec_driver_sql(
            "CREATE TRIGGER full BEFORE UPDATE ON runs BEGIN SELECT RAISE(FAIL, 'disk is full'); END"
        )
    assert process.after_session(int(ExitCode.NO_DATABASE), 1) == ExitCode.FAILED
    assert told == [run.id]


@pytest.mark.parametrize("code", [ExitCode.MISTAKE, -signal.SIGKILL], ids=["refused", "killed"])
def test_a_run_whose_supervisors_end_at_once_fails_and_a_user_is_told(
    answers, engine, run, ended, stays_away, monkeypatch, code
):
    answers(scontrol=RUNNING)
    monkeypatch.setattr(slurm_job, "LATER_S", 0.01)
    process, told = slurm_job._JobProcess(engine, run, slurm_jobs.newest(engine, run.id)), []
    monkeypatch.setattr(slurm_job, "notify_of_failure", told.append)
    with engine.begin() as connection:
        connection.exec_driver_sql(
            "CREATE TRIGGER full BEFORE UPDATE ON slurm_jobs BEGIN SELECT RAISE(FAIL, 'disk is full'); END"
        )
    assert [process.after_session(int(code), count) for count in (1, 2)] == [None, None]
    assert process.after_session(int(code), 3)
    assert told == [run.id] and runs.by_id(engine, run.id).state == RunState.FAILED


def test_supervisors_that_lived_long_are_not_counted(engine, run, monkeypatch):
    job_of(engine, run)
    process, counts = slurm_job._JobProcess(engine, run, slurm_jobs.newest(engine, run.id)), []
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setattr(process, "_run_session", lambda: -signal.SIGKILL)
    monkeypatch.setattr(
        process, "after_session", lambda _, count: counts.append(count) or (77 if len(counts) > 4 else None)
    )
    assert process.run() == 77 and counts == [1, 2, 3, 4, 5]
    counts.clear()
    monkeypatch.setattr(chain, "SOON_S", -1.0)
    assert process.run() == 77 and counts == [1] * 5


def test_a_stopped_run_that_is_submitted_again_while_the_quota_is_spent_has_a_successor(answers, engine, run, ended):
    answers(scontrol=RUNNING, sbatch="echo 8", squeue="true")
    session = sessions.open_session(engine, run.id, site="local", boot_id="another machine's")
    over = {"kind": EventKind.ATTEMPT_SUSPENDED, "phase": Phase.SUSPENDED, "facts": {}, "reason": Reason.USER}
    sessions.record(engine, run.id, session.id, **over)
    queue.put(engine, run.id, reason=Reason.QUOTA, due_at=runs.now() + timedelta(hours=1))
    assert ended(int(ExitCode.QUOTA_SPENT), (session.number, Reason.USER)) == 0
    assert slurm_jobs.newest(engine, run.id).job == "8"


@pytest.mark.parametrize("is_closed", [True, False], ids=["closed", "killed before it was closed"])
@pytest.mark.parametrize("by", ["signal", "socket"])
def test_a_job_of_a_stopped_run_that_slurm_requeues_ends_without_training(engine, run, monkeypatch, by, is_closed):
    monkeypatch.setattr(slurm_job._JobProcess, "run", lambda self: 77)
    row = job_of(engine, run)
    assert slurm_job.run_sessions(engine, run, {"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "1"}) == 77
    session = sessions.open_session(engine, run.id, site="local", boot_id="another machine's")
    if by == "signal":
        slurm_jobs.save(engine, row.id, stop_at=runs.now())
    else:
        over = {"kind": EventKind.ATTEMPT_SUSPENDED, "phase": Phase.SUSPENDED, "facts": {}, "reason": Reason.USER}
        sessions.record(engine, run.id, session.id, **over)
    if is_closed:
        slurm_jobs.close(engine, row, "stopped by the user")
    requeued = {"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "2"}
    assert slurm_job.run_sessions(engine, run, requeued) == ExitCode.SUSPENDED
    assert slurm_jobs.newest(engine, run.id).id == row.id and slurm_jobs.newest(engine, run.id).ended_at
    assert slurm_job.run_sessions(engine, run, {"SLURM_JOB_ID": "8"}) == 77, "a job that is submitted afterwards trains"
    assert slurm_job.run_sessions(engine, run, {"SLURM_JOB_ID": "8", "SLURM_RESTART_COUNT": "1"}) == 77
    slurm_jobs.close(engine, slurm_jobs.newest(engine, run.id), "there is nothing left to train")
    assert slurm_job.run_sessions(engine, run, requeued) == ExitCode.SUSPENDED, "whatever was submitted meanwhile"


def test_a_submission_that_is_refused_leaves_no_job(answers, engine, run):
    answers(sbatch="echo 'sbatch: error: Batch job submission failed: Invalid qos' >&2; exit 1")
    with pytest.raises(SlurmError, match="Invalid qos"):
        jobs.submit(engine, run, "kgorch-far", requeue=True)
    assert slurm_jobs.newest(engine, run.id) is None


def test_a_submission_on_a_machine_without_sbatch_leaves_no_job_and_blocks_no_other(
    answers, engine, run, tmp_path, monkeypatch
):
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    with pytest.raises(SlurmUnavailable, match="there is no sbatch on this machine"):
        jobs.submit(engine, run, "kgorch-far", requeue=True)
    assert slurm_jobs.newest(engine, run.id) is None
    answers(sbatch="echo 8")
    assert jobs.submit(engine, run, "kgorch-far", requeue=True).job == "8"


def test_a_stop_before_a_submission_was_answered_looks_for_the_job_and_cancels_no_other(answers, engine, run, tmp_path):
    answers(scontrol=ABSENT, squeue=f"cat {tmp_path}/jobs", scancel=f'echo "$@" >> {tmp_path}/cancelled')
    row = slurm_jobs.begin(engine, run.id, name="kgorch-far", state=JobState.SUBMITTING, requeue=True)
    (tmp_path / "jobs").touch()
    with pytest.raises(KgorchError, match="has not answered yet") as waits:
        jobs.stop(engine, row)
    assert waits.value.next_step and not (tmp_path / "cancelled").exists()
    assert slurm_jobs.newest(engine, run.id).stop_at, "the job ends as soon as it starts"
    (tmp_path / "jobs").write_text("12\n")
    answers(scontrol="printf '   JobState=CANCELLED Reason=None\\n   Requeue=1 Restarts=0\\n'")
    row, text = jobs.stop(engine, row)
    assert row.ended_at and "job 12" in text
    answers(scontrol=RUNNING)
    row = slurm_jobs.begin(engine, run.id, name="kgorch-far", state=JobState.SUBMITTING, requeue=True)
    assert "job 12 on n7 was asked to save and end" in jobs.stop(engine, row)[1]
    assert (tmp_path / "cancelled").read_text() == "--batch --signal=USR2 12\n"


@pytest.mark.parametrize("answer", ["", "hello", "7;rm -rf"])
def test_the_answer_of_sbatch_is_a_number_or_an_error(answers, tmp_path, answer):
    answers(sbatch=f"echo '{answer}'")
    if answer.startswith("7"):
        assert commands.submit(tmp_path / "job.sh") == "7", "a number and the cluster's name"
    else:
        with pytest.raises(SlurmError, match="expected the number of a job"):
            commands.submit(tmp_path / "job.sh")


def test_a_job_does_not_hand_its_own_limits_to_its_successor(answers, tmp_path, monkeypatch):
    answers(sbatch=f"env > {tmp_path}/seen; echo 8")
    monkeypatch.setenv("SLURM_CPUS_PER_TASK", "3")
    monkeypatch.setenv("SBATCH_TIMELIMIT", "1")
    monkeypatch.setenv("SLURM_CONF", "/etc/slurm.conf")
    commands.submit(tmp_path / "job.sh")
    seen = (tmp_path / "seen").read_text()
    assert "SLURM_CPUS_PER_TASK" not in seen and "SBATCH_TIMELIMIT" not in seen and "SLURM_CONF=" in seen


def test_a_job_that_ended_before_it_could_decide_is_closed_and_says_so(answers, engine, run):
    job_of(engine, run)
    answers(scontrol=RUNNING)
    row, trouble = jobs.newest(engine, run.id)
    assert (row.state, row.node, row.restarts, trouble) == ("RUNNING", "n7", 2, "")
    answers(scontrol=TIMEOUT)
    row, _ = jobs.newest(engine, run.id)
    assert row.ended_at and "TIMEOUT, TimeLimit" in row.why
    answers(scontrol="exit 1")
    assert jobs.newest(engine, run.id) == (row, ""), "Slurm is not asked about it any more"


def test_a_job_that_slurm_has_forgotten_is_over(answers, engine, run):
    job_of(engine, run)
    answers(scontrol=ABSENT)
    row, _ = jobs.newest(engine, run.id)
    assert row.state == JobState.ABSENT and row.ended_at
    jobs.refuse_here(engine, run, {})


def test_while_slurm_does_not_answer_nothing_changes_and_nothing_starts_here(answers, engine, run):
    row = job_of(engine, run)
    answers(scontrol=AWAY)
    assert jobs.newest(engine, run.id)[0] == row
    with pytest.raises(KgorchError, match="is trained by the Slurm job 7") as refused:
        jobs.refuse_here(engine, run, {})
    assert "Slurm does not answer" in str(refused.value)
    jobs.refuse_here(engine, run, {"SLURM_JOB_ID": "7"})
    view = run_view.of_run(engine, run)
    assert view["slurm"]["trouble"] and view["next"]["what"] == "slurm"


@pytest.mark.parametrize("is_session_over", [True, False])
def test_a_status_that_is_read_while_the_job_ends_tells_of_its_whole_end(engine, run, monkeypatch, is_session_over):
    """Slurm takes a while to answer on a busy machine, and the process in the job writes what follows meanwhile."""
    session = sessions.open_session(engine, run.id, site="local", boot_id="another machine's")
    row = job_of(engine, run)

    def end_session() -> None:
        resume = {"reason": Reason.SIGTERM, "why": "SIGTERM", "due_at": runs.now()}
        over = {"kind": EventKind.ATTEMPT_SUSPENDED, "phase": Phase.SUSPENDED, "facts": {}, "resume": resume}
        sessions.record(engine, run.id, session.id, **over)

    def show(job: str) -> JobView:
        if not is_session_over:
            end_session()
            runs.set_state(engine, run.id, RunState.FAILED, "consecutive sessions ended without progress")
        slurm_jobs.close(engine, row, "the job was cancelled with scancel")
        return JobView(job, JobState.COMPLETING if is_session_over else JobState.CANCELLED)

    if is_session_over:
        end_session()
    monkeypatch.setattr(commands, "show", show)
    view = run_view.of_run(engine, run)
    assert not view["slurm"]["is_open"] and view["phase"] == Phase.SUSPENDED
    assert view["slurm"]["why"] == "the job was cancelled with scancel", "whoever looks from outside knows less"
    assert view["next"]["at"] is None, "no daemon continues it elsewhere"
    assert (view["state"], view["next"]["what"]) == (("active", "resume") if is_session_over else ("failed", "mend"))


def test_a_run_whose_job_waits_or_runs_is_not_removed(answers, engine, run, tmp_path):
    answers(scontrol=RUNNING)
    job_of(engine, run)
    locks = removal.hold_locks(engine, tmp_path / "home", [run])
    with pytest.raises(KgorchError, match="trained by the Slurm job 7: RUNNING on n7") as refused, locks:
        pass
    assert refused.value.next_step == "kgorch stop far, then remove it"
    answers(scontrol=TIMEOUT)
    with removal.hold_locks(engine, tmp_path / "home", [run]):
        pass


@pytest.mark.parametrize("verb", [["start"], ["remote", "start", "--on", "local"], ["slurm", "submit"]])
def test_a_run_whose_job_waits_or_runs_is_not_replaced(answers, engine, kgorch, verb):
    plan = str(kgorch.plan())
    kgorch("queue", "add", plan)
    job_of(engine, runs.newest(engine, "test"))
    answers(scontrol=RUNNING)
    said = kgorch(*verb, plan, "--fresh", code=ExitCode.MISTAKE).stderr
    assert "trained by the Slurm job 7: RUNNING on n7" in said and "kgorch stop test" in said
    assert [run.number for run in runs.all_runs(engine, limit=9)] == [1]


def test_a_save_is_asked_of_the_job_by_a_file_and_not_of_one_that_waits(answers, engine, run):
    answers(scontrol=RUNNING.replace("RUNNING", "PENDING").replace("BatchHost=n7", ""))
    job_of(engine, run)
    with pytest.raises(KgorchError, match="job 7 is PENDING"):
        live_requests.request_save(engine, run)
    assert not jobs.save_request(run).exists()
    answers(scontrol=RUNNING)
    live_requests.request_save(engine, run)
    assert jobs.save_request(run).exists()


def test_a_job_whose_number_was_not_recorded_is_found_by_its_name(answers, engine, run, monkeypatch):
    slurm_jobs.begin(engine, run.id, name="kgorch-far", state=JobState.SUBMITTING, requeue=True)
    answers(squeue="echo 3; echo 12", scontrol=RUNNING)
    assert jobs.newest(engine, run.id)[0].job == "", "its submission may still be under way"
    monkeypatch.setattr(jobs, "SUBMITTING", jobs.SUBMITTING * 0)
    assert jobs.newest(engine, run.id)[0].job == "12"


def test_the_fields_of_a_job_are_those_that_were_promised(answers, engine, run):
    job_of(engine, run)
    answers(scontrol=RUNNING)
    found = json.loads(json.dumps(run_view.of_run(engine, run)["slurm"]))
    shape = {name: "null" if value is None else type(value).__name__ for name, value in sorted(found.items())}
    assert shape == json.loads(PROMISE.read_text()), "a new field is written into tests/promises and docs/json.md"


def test_a_job_whose_node_died_waits_for_the_lease_of_its_session_and_finishes_the_run(answers, postgres, tmp_path):
    """Of two machines that share a state folder: Slurm starts the job on the second one before the first one's lease is over."""
    answers(scontrol=RUNNING.replace("Restarts=2", "Restarts=1"))
    fleet = TestFleet(postgres, postgres.new_database(), tmp_path)
    first = fleet.machine("a", tmp_path)
    supervisor = first.background("start", str(first.plan(args={"epochs": 60, "sleep": 0.05})))
    first.wait_for_step(5)
    first.die()
    supervisor.wait()
    second = Kgorch(tmp_path, first.home, extra_env=first.extra_env | {"KGORCH_MACHINE": "b"})
    second.extra_env |= {"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "1", "PATH": os.environ["PATH"]}
    try:
        done = second("slurm", "session", "test")
        assert done.returncode == 0, done.stdout
        assert [entry["phase"] for entry in second.history()] == [Phase.CUT_OFF, Phase.FINISHED]
        assert second.status()["slurm"]["why"] == "there is nothing left to train"
    finally:
        fleet.end()
        second.kill_everything()


def test_a_run_that_was_stopped_before_its_job_was_submitted_is_waited_for_all_the_same(answers, engine, run, ended):
    session = sessions.open_session(engine, run.id, site="local", boot_id="another machine's")
    over = {"kind": EventKind.ATTEMPT_SUSPENDED, "phase": Phase.SUSPENDED, "facts": {}, "reason": Reason.USER}
    sessions.record(engine, run.id, session.id, **over)
    answers(scontrol=RUNNING)
    former = slurm_job._last_reason(engine, run)
    assert ended(int(ExitCode.DONE), former) is None and ended(-9, former) is None, "another supervisor follows"
    assert ended(int(ExitCode.SUSPENDED), former) == ExitCode.SUSPENDED, "its own session was stopped"


def test_the_sessions_of_an_array_and_those_outside_a_job_are_refused(kgorch):
    plan = kgorch.plan()
    kgorch("queue", "add", str(plan))
    assert "this is not a Slurm job" in kgorch("slurm", "session", "test", code=ExitCode.MISTAKE).stderr
    kgorch.extra_env |= {"SLURM_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "3"}
    assert "a name of its own" in kgorch("slurm", "session", "test", code=ExitCode.MISTAKE).stderr


def test_slurms_warning_has_the_end_of_the_job_looked_up_at_once(answers, tmp_path):
    answers(squeue=f"echo x >> {tmp_path}/asked; date -d '+10 minutes' +%Y-%m-%dT%H:%M:%S")
    former = signal.getsignal(signal.SIGUSR1)
    try:
        job = slurm_limit.JobEnd({**os.environ, "SLURM_JOB_ID": "7"}, every_s=3600)
        os.kill(os.getpid(), signal.SIGUSR1)
        wait_until(lambda: (tmp_path / "asked").read_text().count("x") == 2)
        job.stop()
    finally:
        signal.signal(signal.SIGUSR1, former)
