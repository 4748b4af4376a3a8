"""Sessions of a run as jobs of a real Slurm, whose nodes are other machines to kgorch (tests/slurm_cluster.py)."""

from __future__ import annotations

import json
import os
import signal
from typing import Any

import psutil
import pytest
from harness import Kgorch, wait_until
from slurm_cluster import Cluster

from kgorch.core.codes import Reason, RunState
from kgorch.errors import ExitCode
from kgorch.system.sockets import control_socket

LONG = {"epochs": 100_000, "sleep": 0.05}
OVERCOMMIT = ("--", "--overcommit")


def submit(kgorch: Kgorch, *words: str, **changes: Any) -> str:
    """Returns: the number of the job."""
    plan = kgorch.plan(args=LONG, margin="15s", **changes)
    told = json.loads(kgorch("slurm", "submit", str(plan), "--json", "--time", "20m", *words, *OVERCOMMIT).stdout)
    job: str = told["job"]
    return job


def training(kgorch: Kgorch, cluster: Cluster, session: int = 1) -> dict[str, Any]:
    """The status, once that session, or one after it, trains."""
    found: dict[str, Any] = wait_until(
        lambda: (
            (view := kgorch.try_status())
            and view["session"]
            and view["session"]["number"] >= session
            and view["phase"] in ("training", "saving")
            and view
        ),
        within_s=180,
        what=lambda: f"session {session}: {kgorch.try_status()} {job_log(kgorch)} {cluster.logs()}",
    )
    return found


def job_log(kgorch: Kgorch) -> str:
    return "\n".join(path.read_text(errors="replace") for path in kgorch.home.glob("runs/*/*/slurm/*.log"))


def suspend(kgorch: Kgorch) -> None:
    """End the session as its wall would: nobody has to wait for the minutes of a time limit."""
    answer = control_socket.ask(kgorch.home / "runs/test/1/control.sock", "suspend", within_s=60)
    assert answer and answer.ok


def ended(kgorch: Kgorch) -> dict[str, Any]:
    """The status, once nothing follows any more."""
    found: dict[str, Any] = wait_until(
        lambda: (view := kgorch.status()) and not view["slurm"]["is_open"] and view, within_s=120, what=job_log(kgorch)
    )
    return found


@pytest.mark.slow
def test_a_session_requeues_its_job_and_the_login_node_stops_what_it_cannot_reach(cluster, kgorch):
    job = submit(kgorch, every="10m")
    view = training(kgorch, cluster)
    assert (view["slurm"]["job"], view["slurm"]["state"]) == (job, "RUNNING") and view["slurm"]["node"] in ("n1", "n2")
    assert view["session"]["supervisor"]["alive"] and view["next"]["what"] == "train"
    [entry] = kgorch.look("queue")
    assert (entry["state"], entry["why"]) == ("slurm", f"job {job}: RUNNING on {view['slurm']['node']}")
    assert "nothing was started" in kgorch("resume", "test").stdout

    before = kgorch.checkpoints()  # none but the session's first one, which may have come by itself
    kgorch("save", "test", timeout_s=120)  # returns when the checkpoint is verified
    assert kgorch.checkpoints() and kgorch.checkpoints() != before
    wait_until(lambda: not (kgorch.home / "runs/test/1/slurm/save").exists(), what="the job takes the request away")
    assert kgorch("rm", "test", "--yes", code=None).returncode != 0 and (kgorch.home / "runs/test/1").exists()

    suspend(kgorch)
    second = training(kgorch, cluster, 2)
    assert (second["slurm"]["job"], second["slurm"]["restarts"]) == (job, 1), "the same job, requeued"
    assert "the job is requeued" in kgorch("logs", "--job", "-n", "0").stdout

    said = kgorch("stop").stdout
    assert f"job {job} on {second['slurm']['node']} was asked to save and end" in said and "suspended at step" in said
    over = ended(kgorch)
    assert (over["reason"], over["slurm"]["why"]) == (Reason.USER, "stopped by the user")
    assert over["checkpoint"]["step"] == over["step"] > 0 and over["next"]["command"] == "kgorch slurm submit PLAN"
    wait_until(lambda: not cluster.ask("squeue", "-h", "-j", job), what="nothing of the job is left")

    cluster.ask("scontrol", "requeue", job)
    wait_until(
        lambda: "does not continue it" in job_log(kgorch),
        within_s=60,
        what=lambda: f"{job_log(kgorch)} {cluster.logs()}",
    )
    assert len(kgorch.history()) == 2 and not kgorch.status()["slurm"]["is_open"], "a requeue does not undo a stop"


def test_a_job_that_waits_is_cancelled_and_a_second_one_refused(cluster, kgorch):
    plan = kgorch.plan(args=LONG)
    job = json.loads(kgorch("slurm", "submit", str(plan), "--json", "--", "--hold", "--comment=it's a # b").stdout)[
        "job"
    ]
    assert "Comment=it's a # b" in cluster.ask("scontrol", "show", "job", job)
    view = kgorch.status()
    assert (view["slurm"]["state"], view["slurm"]["reason"], view["next"]["what"]) == (
        "PENDING",
        "JobHeldUser",
        "slurm",
    )
    assert "PENDING (JobHeldUser)" in kgorch("status").stdout
    assert f"job {job}: PENDING" in kgorch("slurm", "submit", str(plan), code=ExitCode.MISTAKE).stderr
    refused = kgorch("resume", "test", code=ExitCode.MISTAKE).stderr
    assert f"is trained by the Slurm job {job}" in refused and "kgorch stop test" in refused
    assert "it is cancelled" in kgorch("stop").stdout
    assert cluster.state(job) == "CANCELLED" and not kgorch.status()["slurm"]["is_open"]
    assert "invalid partition" in kgorch("slurm", "submit", str(plan), "--", "-pnone", code=ExitCode.MISTAKE).stderr
    assert kgorch.status()["slurm"]["job"] == job, "what Slurm refuses leaves no job behind"


@pytest.mark.slow
def test_scancel_is_a_users_stop_and_a_killed_supervisor_gets_a_successor(cluster, kgorch):
    job = submit(kgorch)
    view = training(kgorch, cluster)
    os.kill(view["session"]["supervisor"]["pid"], signal.SIGKILL)
    supervisor = wait_until(
        lambda: (
            (pid := kgorch.status()["session"]["supervisor"]["pid"]) != view["session"]["supervisor"]["pid"] and pid
        ),
        what=job_log(kgorch),
    )
    adopted = training(kgorch, cluster)
    assert len(kgorch.history()[0]["attempts"]) == 1 and adopted["session"]["number"] == 1, "training went on"
    assert psutil.pid_exists(supervisor)

    cluster.ask("scancel", job)
    over = ended(kgorch)
    assert over["slurm"]["why"] == "the job was cancelled with scancel", job_log(kgorch)
    assert over["phase"] == "suspended" and over["checkpoint"]["step"] == over["step"]
    assert over["next"]["at"] is None, "no daemon continues it elsewhere"
    wait_until(lambda: cluster.state(job) == "CANCELLED", what="it is not requeued")


@pytest.mark.slow
def test_a_job_that_slurm_does_not_requeue_is_succeeded_by_another(cluster, kgorch):
    job = submit(kgorch)
    training(kgorch, cluster)
    cluster.ask("scontrol", "update", f"JobId={job}", "Requeue=0")
    suspend(kgorch)
    second = training(kgorch, cluster, 2)
    assert second["slurm"]["job"] != job and second["slurm"]["restarts"] == 0
    assert "a successor is submitted instead" in job_log(kgorch)
    [facts] = [event["facts"] for event in kgorch.events("slurm_submitted") if event["facts"].get("follows")]
    assert facts == {"job": second["slurm"]["job"], "follows": job}
    wait_until(lambda: cluster.state(job) == "COMPLETED")
    kgorch("stop")


@pytest.mark.slow
def test_a_controller_that_is_restarted_while_a_session_ends_does_not_end_the_chain(cluster, kgorch):
    job = submit(kgorch)
    training(kgorch, cluster)
    cluster.stop_controller()
    try:
        suspend(kgorch)
        wait_until(lambda: "it is asked again" in job_log(kgorch), within_s=120, what=job_log(kgorch))
    finally:
        cluster.start_controller()
    second = training(kgorch, cluster, 2)
    assert (second["slurm"]["job"], second["slurm"]["restarts"]) == (job, 1), job_log(kgorch)
    kgorch("stop")


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_three_time_limits_and_a_preemption_later_the_run_is_finished_with_the_same_bits(cluster, kgorch, tmp_path):
    epochs = {"epochs": 120}  # of 6 steps
    calm = Kgorch(tmp_path / "calm", tmp_path / "calm-home")
    calm.folder.mkdir()
    calm("start", str(calm.plan(args=epochs)))

    plan = kgorch.plan(args=epochs | {"sleep": 0.2}, margin="8s")
    told = json.loads(kgorch("slurm", "submit", str(plan), "--json", "--time", "1m", *OVERCOMMIT).stdout)
    first = training(kgorch, cluster)
    assert first["session"]["left_s"] <= 60 and first["slurm"]["job"] == told["job"]
    training(kgorch, cluster, 2)
    training(kgorch, cluster, 3)
    preempted = training(kgorch, cluster, 4)
    urgent = cluster.submit("sleep 2", "--partition=urgent", "--nodes=2", "--exclusive", "--time=1")
    number, restarts = preempted["session"]["number"], preempted["slurm"]["restarts"]
    after = training(kgorch, cluster, number + 1)
    assert cluster.state(urgent) == "COMPLETED"
    # further time limits may come on a slow machine; a longer one is allowed while the job runs
    cluster.ask("scontrol", "update", f"JobId={told['job']}", "TimeLimit=15")
    wait_until(lambda: kgorch.status()["state"] == RunState.FINISHED, within_s=400, what=job_log(kgorch))

    reasons = [entry["reason"] for entry in kgorch.history()]
    assert reasons[:3] == [Reason.SLURM] * 3, reasons
    assert kgorch.history()[number - 1]["reason"] == Reason.SIGTERM, "the preempted one"
    assert after["slurm"]["job"] == told["job"] and after["slurm"]["restarts"] > restarts >= 3
    assert kgorch.export() == calm.export(), "the same bits as one session that nothing has cut"
    over = ended(kgorch)
    assert over["slurm"]["why"] == "there is nothing left to train"
    wait_until(lambda: cluster.state(told["job"]) == "COMPLETED")


@pytest.mark.slow
def test_a_job_of_two_nodes_has_an_agent_by_srun_on_the_second_one_and_is_requeued_with_the_same_bits(
    cluster, kgorch, tmp_path
):
    epochs = {"epochs": 30}
    calm = Kgorch(tmp_path / "calm", tmp_path / "calm-home")
    calm.folder.mkdir()
    calm("start", str(calm.plan(ranks=2, args=epochs)))

    nodes = '[nodes]\naddress = "127.0.0.1"\n'  # the names n1 and n2 are known to this Slurm alone
    plan = kgorch.plan(ranks="1\nnodes = 2", args=epochs | {"sleep": 0.3}, margin="15s", extra=nodes)
    words = ("slurm", "submit", str(plan), "--json", "--time", "20m", "--nodes", "2", *OVERCOMMIT)
    told = json.loads(kgorch(*words).stdout)
    training(kgorch, cluster)
    kgorch.wait_for_step(10)
    [step] = [line for line in cluster.ask("squeue", "-h", "-s", "-o", "%i %N").splitlines() if ".batch" not in line]
    assert step.startswith(f"{told['job']}.") and step.split()[1] in ("n1", "n2"), step
    launched = json.loads((kgorch.attempt() / "launch.json").read_text())
    assert launched["nodes"]["ranks"] == [1, 1], launched
    suspend(kgorch)
    training(kgorch, cluster, 2)
    wait_until(lambda: kgorch.status()["state"] == RunState.FINISHED, within_s=200, what=job_log(kgorch))
    assert kgorch.export() == calm.export(), "the bits of one machine with two ranks"
    wait_until(lambda: cluster.state(told["job"]) == "COMPLETED")
