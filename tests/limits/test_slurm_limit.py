"""A real Slurm (Debian: apt-get install slurm-wlm munge) on this machine: a job's end is the session's wall."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from harness import Kgorch, wait_until
from slurm_cluster import Cluster, running_cluster

from kgorch.core.codes import Reason
from kgorch.limits import slurm_limit
from kgorch.system.clock import boottime_s


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    with running_cluster() as made:
        yield made


def _squeue(folder: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    """A squeue that answers as `script` does."""
    path = folder / "squeue"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")


@pytest.mark.parametrize("said", ["NONE", "N/A", "Unknown"])
def test_a_job_without_an_end_has_no_wall(said, tmp_path, monkeypatch):
    _squeue(tmp_path, monkeypatch, f"echo {said}")
    job = slurm_limit.JobEnd({**os.environ, "SLURM_JOB_ID": "7", "SLURM_JOB_END_TIME": str(time.time() + 60)})
    assert job.wall(boottime_s()) is None and not job.news.undelivered
    job.stop()


@pytest.mark.parametrize(
    ("task", "asked"), [({"SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "3"}, "7_3"), ({}, "7")]
)
def test_a_task_of_an_array_asks_for_its_own_end(task, asked, tmp_path, monkeypatch):
    _squeue(tmp_path, monkeypatch, f'echo "$3" > {tmp_path}/asked; date -d "+10 minutes" +%Y-%m-%dT%H:%M:%S')
    job = slurm_limit.JobEnd({**os.environ, "SLURM_JOB_ID": "7", **task})
    wall = job.wall(boottime_s())
    job.stop()
    assert (tmp_path / "asked").read_text().strip() == asked, "the number alone names all tasks of the array"
    assert wall and wall.at_s - boottime_s() == pytest.approx(600, abs=60)


def test_an_end_in_the_hour_that_comes_twice_is_that_hour(tmp_path, monkeypatch):
    began_at, second_half_past_two = 1792890000, 1792891800  # 01:00 and 01:30 in UTC, as summer time ends in Berlin
    _squeue(tmp_path, monkeypatch, f"date -d @{second_half_past_two} +%Y-%m-%dT%H:%M:%S")
    monkeypatch.setattr(slurm_limit.time, "time", lambda: began_at)
    job = slurm_limit.JobEnd({**os.environ, "SLURM_JOB_ID": "7", "TZ": "Europe/Berlin"})
    wall = job.wall(boottime_s())
    job.stop()
    assert wall and wall.at_s - boottime_s() == pytest.approx(1800, abs=60)


def test_of_a_heterogeneous_job_the_first_end_counts(tmp_path, monkeypatch):
    told = 'date -d "+%d minutes" +%%Y-%%m-%%dT%%H:%%M:%%S'
    _squeue(tmp_path, monkeypatch, f"echo N/A; {told % 20}; {told % 10}")
    job = slurm_limit.JobEnd({**os.environ, "SLURM_JOB_ID": "7"})
    wall = job.wall(boottime_s())
    job.stop()
    assert wall and wall.at_s - boottime_s() == pytest.approx(600, abs=60)


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("exit 1", "exit status 1"),
        ("true", "no such job"),
        ("echo tomorrow", "tomorrow"),
        ("echo boom >&2; exit 1", "boom"),
    ],
)
def test_where_squeue_does_not_answer_the_end_told_at_launch_holds_and_the_cause_is_noted_once(
    script, said, tmp_path, monkeypatch
):
    _squeue(tmp_path, monkeypatch, f"echo x >> {tmp_path}/asked; {script}")
    environ = {**os.environ, "SLURM_JOB_ID": "7", "SLURM_JOB_END_TIME": str(int(time.time()) + 600)}
    job = slurm_limit.JobEnd(environ, every_s=0.05)
    wait_until(lambda: (tmp_path / "asked").read_text().count("x") > 3)
    wall = job.wall(boottime_s())
    assert wall and wall.kind == Reason.SLURM and wall.at_s - boottime_s() == pytest.approx(600, abs=60)
    kind, facts = job.news.undelivered.pop(0)
    assert kind == "slurm_unreachable" and said in facts["why"] and not job.news.undelivered
    job.stop()


def test_a_controller_that_hangs_holds_the_opening_up_for_a_moment_only(tmp_path, monkeypatch):
    monkeypatch.setattr(slurm_limit, "FIRST_S", 0.2)
    _squeue(tmp_path, monkeypatch, "exec sleep 20")
    began = time.monotonic()
    job = slurm_limit.JobEnd({**os.environ, "SLURM_JOB_ID": "7"})
    assert job.wall(boottime_s()) is None
    assert time.monotonic() - began < 10
    job.stop()


@pytest.mark.slow
def test_a_real_jobs_end_is_the_wall_it_moves_and_a_session_in_it_saves_before(
    cluster, kgorch: Kgorch, tmp_path, monkeypatch
):
    job = cluster.submit("exec sleep 600", "--time=2", "--cpus-per-task=1")
    wait_until(lambda: cluster.ask("squeue", "-h", "-j", job, "-o", "%T") == "RUNNING", what=cluster.logs())
    environ = {**cluster.env, "SLURM_JOB_ID": job}
    end = slurm_limit.JobEnd(environ, every_s=0.2)
    first = end.wall(boottime_s())
    assert first and first.kind == Reason.SLURM and 60 < first.at_s - boottime_s() <= 125
    began_s = slurm_limit.job_began_s(environ)
    assert began_s is not None and first.at_s - began_s == pytest.approx(120, abs=2)

    cluster.ask("scontrol", "update", f"JobId={job}", "TimeLimit=5")
    moved = wait_until(lambda: (now := end.wall(boottime_s())) and now.at_s > first.at_s + 60 and now)
    assert moved.at_s - first.at_s == pytest.approx(180, abs=2)
    cluster.ask("scancel", job)
    wait_until(lambda: not cluster.ask("squeue", "-h", "-j", job), what="the job to be gone")
    end.stop()

    # by default a minute's session ends some two seconds before its wall: too few for a busy machine to end the job, too
    plan = kgorch.plan(args={"epochs": 100_000, "sleep": 0.05}, margin="15s")
    variables = {"KGORCH_HOME": kgorch.home, "PYTHONPATH": os.environ.get("PYTHONPATH", "")}
    exports = "".join(f"export {name}='{value}'\n" for name, value in variables.items())
    command = f"cd '{kgorch.folder}' && '{sys.executable}' -m kgorch.cli start '{plan}'; echo $? > ended"
    job = cluster.submit(exports + command, "--time=1")
    ended = kgorch.folder / "ended"
    wait_until(ended.exists, within_s=150, what=cluster.logs())
    assert ended.read_text().strip() == "10", cluster.logs()
    over = kgorch.status()
    assert (over["phase"], over["reason"]) == ("suspended", Reason.SLURM)
    assert over["checkpoint"]["verified"] and over["checkpoint"]["step"] == over["step"] > 0
    is_over = {"COMPLETED", "TIMEOUT", "FAILED", "CANCELLED", "NODE_FAIL"}
    ends = wait_until(lambda: (state := cluster.state(job)) in is_over and state, what="the job's end")
    assert ends == "COMPLETED", "it ended at its limit, not before"
