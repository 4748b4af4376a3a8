"""`nodes` in a stage, the table [nodes], and what they mean on a machine."""

from __future__ import annotations

import pytest

from kgorch.errors import KgorchError, PlanError
from kgorch.nodes import allocation
from kgorch.plan import plan_file

PLAN = 'name = "test"\n[[stage]]\nname = "train"\nentry = "train.py"\nnodes = {nodes}\n{rest}'


def plan_of(tmp_path, nodes: str, rest: str = ""):
    path = tmp_path / "plan.toml"
    path.write_text(PLAN.format(nodes=nodes, rest=rest))
    (tmp_path / "train.py").touch()
    return plan_file.load(path)[0]


@pytest.mark.parametrize("nodes", ["1", "4", '"auto"', '"1..4"', '"2..2"'])
def test_a_number_a_range_and_auto_are_nodes(tmp_path, nodes):
    assert plan_of(tmp_path, nodes).stage[0].nodes == (int(nodes) if nodes.isdecimal() else nodes.strip('"'))


@pytest.mark.parametrize(
    "nodes", ["0", "-1", "5000", "true", '""', '"2..1"', '"0..2"', '"1.."', '"many"', "1.5", "[2]"]
)
def test_anything_else_is_refused_by_name(tmp_path, nodes):
    with pytest.raises(PlanError, match="nodes"):
        plan_of(tmp_path, nodes)


@pytest.mark.parametrize(
    "table",
    [
        "hosts = []",
        'hosts = ["a", "a"]',
        'hosts = ["a; rm -rf /"]',
        'hosts = ["-oProxyCommand=x"]',
        'start = ["ssh", "{host}"]',
        'address = "0.0.0.0"',
        'address = "::"',
        'address = "node1"',
    ],
)
def test_a_table_of_nodes_that_cannot_be_is_refused(tmp_path, table):
    with pytest.raises(PlanError, match="nodes"):
        plan_of(tmp_path, "2", f"[nodes]\n{table}\n")


def test_a_foreign_program_runs_on_one_machine(tmp_path):
    with pytest.raises(PlanError, match="one machine"):
        plan_of(tmp_path, "2", '[stage.foreign]\ncheckpoint = "out/*.pt"\n')


def test_nodes_are_no_part_of_what_is_trained(tmp_path):
    assert plan_of(tmp_path, "1").hash == plan_of(tmp_path, "4").hash


def test_a_stage_gets_the_first_machines_of_the_allocation_or_is_refused(tmp_path):
    hosts = ["a", "b", "c"]
    assert allocation.choose(plan_of(tmp_path, "2").stage[0], hosts) == (2, ["a", "b"])
    assert allocation.choose(plan_of(tmp_path, '"1..8"').stage[0], hosts) == (1, hosts)
    assert allocation.choose(plan_of(tmp_path, '"auto"').stage[0], hosts) == (1, hosts)
    with pytest.raises(KgorchError, match="needs 4 nodes") as refused:
        allocation.choose(plan_of(tmp_path, "4").stage[0], hosts)
    assert "the allocation has 3" in refused.value.facts[0]
    with pytest.raises(KgorchError, match="needs 2 nodes"):
        allocation.choose(plan_of(tmp_path, "2").stage[0], [])


@pytest.mark.parametrize(
    ("start", "command"),
    [
        (["ssh", "{host}", "{command}"], ["ssh", "n2", "run 'a b'"]),
        (["srun", "-w", "{host}", "{words}"], ["srun", "-w", "n2", "run", "a b"]),
        (["sh", "-c", "exec {command}"], ["sh", "-c", "exec run 'a b'"]),
    ],
)
def test_a_command_runs_on_a_machine_by_the_template_of_the_plan(start, command):
    assert allocation.command_on("n2", ["run", "a b"], start) == command


def test_within_slurm_the_nodes_of_the_allocation_are_listed_this_one_first(tmp_path, monkeypatch):
    tool = tmp_path / "scontrol"
    tool.write_text('#!/bin/sh\n[ "$3" = "n[1-3]" ] && printf "n1\\nn2\\nn3\\n"\n')
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    section = plan_of(tmp_path, '"auto"').nodes
    assert allocation.hosts_of(section, {"SLURM_JOB_NODELIST": "n[1-3]", "SLURMD_NODENAME": "n2"}) == ["n2", "n1", "n3"]
    assert allocation.hosts_of(section, {}) == []
