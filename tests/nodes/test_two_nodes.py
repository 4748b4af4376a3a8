"""A training over two nodes, both of them this machine: an agent with shim, torchrun, keeper and sockets is the second one."""

from __future__ import annotations

import json

import psutil
import pytest
from driver import build
from harness import QUOTA, Kgorch, processes_of, wait_until
from two_nodes import plan_of, processes_on

from kgorch.system.sockets import control_socket

PROBLEM = {"epochs": 8, "pad": 3}


@pytest.fixture(scope="module")
def uncut(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The weights of the training, uncut, over two nodes."""
    place = tmp_path_factory.mktemp("uncut")
    (place / "work").mkdir()
    made = Kgorch(place / "work", place / "home")
    made("start", str(plan_of(made, args=PROBLEM)))
    assert made.status()["state"] == "finished", made.logs()
    return made.export()


def test_a_training_runs_over_two_nodes_to_its_end(kgorch, uncut):
    assert uncut
    # the same training on one node of two ranks has the same bits: both add two ranks' gradients
    kgorch("start", str(kgorch.plan(ranks=2, args=PROBLEM)))
    assert kgorch.export() == uncut


def test_the_folder_of_a_nodes_sockets_is_removed_at_the_sessions_end(kgorch, tmp_path):
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    kgorch.extra_env["TMPDIR"] = str(temporary)
    supervisor = kgorch.background("start", str(plan_of(kgorch, args={"epochs": 2, "sleep": 0.1})))
    wait_until(lambda: list(temporary.glob("kgorch-*-node1/control.sock")), what="the second node's folder")
    assert supervisor.wait(timeout=120) == 0, supervisor.communicate()
    assert not list(temporary.glob("kgorch-*"))


def test_what_the_second_node_measures_is_in_status_and_what_its_driver_tells_in_the_journal(kgorch, tmp_path):
    driver = build(tmp_path)
    kgorch.extra_env |= driver.env
    driver.set(0, util=87, xid=79)
    kgorch.background("start", str(plan_of(kgorch, args={"epochs": 1000, "sleep": 0.05})))

    def whole() -> dict[str, float] | None:
        values = ((kgorch.try_status() or {}).get("telemetry") or {"values": {}})["values"]
        return values if {"gpu0.util", "node1.gpu0.util", "node1.host.mem_total"} <= values.keys() else None

    values = wait_until(whole, within_s=120, what="the second node's figures")
    assert values["node1.gpu0.util"] == values["gpu0.util"] == 87
    assert values["node1.host.mem_total"] == values["host.mem_total"], "both nodes are this machine"
    assert not {"node1.host.cores", "node1.gpu0.sm_mhz"} & values.keys()
    shown = kgorch("status").stdout.splitlines()
    assert any(line.startswith("host 1 ") for line in shown), shown
    assert any(line.startswith("gpu 1:0 ") and "87% util" in line for line in shown), shown
    told = wait_until(lambda: len(kgorch.events("gpu_xid")) == 2 and kgorch.events("gpu_xid"))
    assert sorted(str(event["facts"].get("host")) for event in told) == ["None", "second"]


@pytest.mark.slow
def test_a_stop_and_a_second_session_have_the_bits_of_an_uncut_training(kgorch, uncut):
    slow = PROBLEM | {"sleep": 0.3}
    supervisor = kgorch.background("start", str(plan_of(kgorch, args=slow)))
    kgorch.wait_for_step(10)
    # not by `kgorch stop`: on a busy machine Python's start takes longer than the steps that are left
    assert (answer := control_socket.ask(kgorch.home / "runs/test/1/control.sock", "stop")) and answer.ok
    assert supervisor.wait(timeout=60) == 10
    wait_until(lambda: not processes_of(kgorch.home), what="all processes of both nodes end")
    stopped_at = kgorch.status()["step"]
    [newest] = [path for path in kgorch.checkpoints() if int(path.name.split("-")[1]) == stopped_at]
    assert sorted(path.name for path in newest.glob("rank*.safetensors")) == ["rank0.safetensors", "rank1.safetensors"]
    kgorch("start", str(kgorch.folder / "plan.toml"), "--set", "stage.train.args.sleep=0.0")
    assert kgorch.export() == uncut


@pytest.mark.slow
def test_a_wall_is_met_by_a_save_of_both_nodes_and_the_next_session_has_the_same_bits(kgorch, uncut):
    slow = PROBLEM | {"sleep": 1.2}
    supervisor = kgorch.background("start", str(plan_of(kgorch, args=slow, margin="5s", extra=QUOTA)))
    kgorch.wait_for_step(1, within_s=90)
    kgorch.move_wall(15)
    assert supervisor.wait(timeout=60) == 11
    [session] = kgorch.history()
    assert session["phase"] == "suspended" and 0 < kgorch.status()["step"] < 48, kgorch.logs()
    kgorch.move_wall(3600)
    kgorch("start", str(kgorch.folder / "plan.toml"), "--set", "stage.train.args.sleep=0.0")
    assert kgorch.export() == uncut


@pytest.mark.slow
def test_sigkill_of_everything_on_one_node_ends_the_attempt_everywhere_and_the_next_one_has_the_same_bits(
    kgorch, uncut
):
    supervisor = kgorch.background("start", str(plan_of(kgorch, args=PROBLEM | {"sleep": 0.5})))
    kgorch.wait_for_step(12)
    for process in processes_on(kgorch, "second"):
        process.kill()
    wait_until(lambda: kgorch.attempt().name == "1.2", within_s=90, what="another attempt")
    assert [event["facts"]["host"] for event in kgorch.events("node_lost")] == ["second"]
    assert supervisor.wait(timeout=90) == 0
    assert kgorch.export() == uncut


@pytest.mark.slow
def test_a_crash_of_a_rank_costs_no_step_that_all_nodes_hold_in_memory(kgorch, uncut):
    supervisor = kgorch.background("start", str(plan_of(kgorch, args=PROBLEM | {"sleep": 0.25}, every="10m")))
    kgorch.wait_for_step(20)
    wait_until(lambda: kgorch.pids().get("rank0"))
    psutil.Process(kgorch.pids()["rank0"]).kill()
    assert supervisor.wait(timeout=120) == 0
    again = kgorch.events("launched")[-1]["facts"]
    assert again["from"] == "disk" and again["step"] > 0 and again["lost_steps"] < 20, again
    assert json.loads((kgorch.attempt() / "launch.json").read_text())["resume"]
    assert kgorch.export() == uncut
