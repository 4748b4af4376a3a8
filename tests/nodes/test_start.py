"""What is found before any training, when the agents of other nodes have connected."""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from harness import Notes, command_lines, wait_until

from kgorch.errors import KgorchError
from kgorch.launch import launcher
from kgorch.nodes import node_group
from kgorch.nodes.node_group import NodeGroup, NodesMissing
from kgorch.plan.nodes import NodesSection
from kgorch.plan.stages import StageSection
from kgorch.protocol import codec
from kgorch.protocol.node_messages import NodeEnded

AGENT = """
import json, sys, time
from kgorch.nodes import agent
%s
sys.exit(agent.main(agent.Path(sys.argv[1])))
"""


class Machine:
    """A NodeGroup whose agents are `kgorch.nodes.agent` with one thing changed: by `change`, statements of Python."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.notes, self.groups = folder, Notes(), list[NodeGroup]()

    def gather(self, change: str = "", nodes: int | str = 2, start: list[str] | None = None, ranks: int | str = 1):
        stage = StageSection(name="train", entry="train.py", nodes=nodes, ranks=ranks)
        program = self.folder / "agent.py"
        program.write_text(AGENT % change)
        # the last word of the command is the agent's file
        start = start or ["sh", "-c", f'set -- {{command}}; shift 3; exec {sys.executable} {program} "$@"']
        section = NodesSection(hosts=["here", "there"], start=start, address="127.0.0.1")
        run_folder = self.folder / "run"
        run_folder.mkdir(exist_ok=True)
        group = NodeGroup(run_folder, "test" + os.urandom(8).hex(), section, lambda *_: None, self.notes)
        self.groups.append(group)
        return group.gather(stage, 1)


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    made = Machine(tmp_path)
    yield made
    for group in made.groups:
        group.close()


def test_a_node_that_answers_has_its_place_and_no_secret_or_probe_is_left(machine):
    place = machine.gather()
    assert place.ranks == [1, 1] and place.leaders == [0, 1] and place.interface == "lo"
    assert machine.notes.get(timeout=1) == ("nodes_ready", {"hosts": ["here", "there"], "ranks": [1, 1]})
    file = machine.folder / "run/nodes/node1.json"
    assert file.stat().st_mode & 0o777 == 0o600
    secret = json.loads(file.read_text())["secret"]
    assert not any(secret.encode() in line for line in command_lines())
    machine.groups[0].close()
    assert not file.exists() and not list((machine.folder / "run").glob(".probe*"))


def test_another_version_of_kgorch_or_pytorch_is_named(machine):
    with pytest.raises(KgorchError, match="there has other versions") as refused:
        machine.gather(
            "agent.__version__ = '0.0.1'; agent.versions.installed = lambda: ('1.13', agent.platform.python_version())"
        )
    assert len(refused.value.facts) == 2 and "PyTorch" in refused.value.facts[1]


def test_clocks_that_are_minutes_apart_are_reported_and_nothing_depends_on_them(machine):
    assert machine.gather("now = time.time; agent.time.time = lambda: now() + 300")
    kind, facts = machine.notes.get(timeout=1)
    assert kind == "clocks_apart" and 290 < facts["ahead_s"] < 310


def test_an_agent_that_cannot_read_its_file_says_that_the_folder_is_not_shared(machine):
    with pytest.raises(KgorchError, match="file system that all nodes share"):
        machine.gather("sys.argv[1] = '/nowhere' + sys.argv[1]")


def test_a_folder_in_which_the_other_nodes_files_are_not_seen_is_not_shared(machine, monkeypatch):
    monkeypatch.setattr("kgorch.nodes.agent_starts.SHARED_S", 1.0)
    with pytest.raises(KgorchError, match="are not visible on this node"):
        machine.gather(
            "read = json.loads; folder = agent.tempfile.mkdtemp(); agent.json.loads = lambda text:"
            " {**read(text), 'folder': folder} if isinstance(text, str) and 'folder' in text else read(text)"
        )


def test_a_node_that_does_not_answer_is_missing_unless_the_plan_allows_fewer(machine):
    dead = ["sh", "-c", "echo no route to {host}; false {command}"]
    with pytest.raises(NodesMissing, match="1 of 2 nodes") as missing:
        machine.gather(start=dead)
    assert missing.value.facts == ("there: no route to there",)
    assert machine.gather(start=dead, nodes="1..2") is None
    kind, facts = machine.notes.get(timeout=1)
    assert kind == "nodes_fewer" and facts["there"] == "there: no route to there"


def test_a_command_that_does_not_exist_is_named(machine):
    with pytest.raises(KgorchError, match="cannot be run"):
        machine.gather(start=["/nowhere/srun", "{words}"])


def test_an_agent_ends_when_its_supervisor_is_gone(machine):
    machine.gather()
    process = machine.groups[0]._nodes[1].process
    machine.groups[0]._server.close()
    assert wait_until(lambda: process.poll() is not None, within_s=30)


RECORDS = """
def start(self, order):
    self._attempt = agent.Path(order.attempt)

agent.NodeAgent._start = start
agent.launcher.kill = lambda folder: agent.Path(sys.argv[1]).with_name("killed").open("a").write(f"{folder} ")
"""


def _started(machine: Machine, attempt: str) -> Path:
    """The folder of an attempt that was started on the other node, without processes."""
    group, folder = machine.groups[0], machine.folder / "run" / attempt
    folder.mkdir()
    launch = SimpleNamespace(attempt=attempt, nodes={}, folder=str(folder))
    group.start(launch)
    return folder


def _say(group: NodeGroup, attempt: str, how: str) -> None:
    """What the agent says when an attempt has ended there."""
    [peer] = group._by_peer
    group._on_line(codec.encode(NodeEnded(attempt, how)).strip(), peer, lambda: None)


def test_the_end_of_an_earlier_attempt_neither_ends_nor_kills_the_next(machine):
    """Found by a training that hung: the attempt after it crashed now and then."""
    machine.gather(RECORDS)
    group, killed = machine.groups[0], machine.folder / "run/nodes/killed"
    first = _started(machine, "1.1")
    second = _started(machine, "1.2")
    _say(group, "1.1", "torchrun was ended by SIGKILL")
    began_s = time.monotonic()
    group.finish("1.1", first)
    assert time.monotonic() - began_s < 3 and not killed.exists()
    [node] = group._members
    assert node.is_running and node.attempt == "1.2"
    _say(group, "1.2", launcher.SUCCESS)
    group.finish("1.2", second)
    assert not node.is_running and not killed.exists()


@pytest.mark.parametrize("status", [0, 1])
def test_ranks_of_another_node_may_go_on_after_a_success_here_and_not_after_a_failure(machine, monkeypatch, status):
    monkeypatch.setattr(node_group, "FAILED_GRACE_S", 0.5)
    monkeypatch.setattr(node_group, "END_S", 0.5)
    machine.gather(RECORDS)
    folder, killed = _started(machine, "1.1"), machine.folder / "run/nodes/killed"
    (folder / "exit.json").write_text(json.dumps({"status": status}))
    ends = threading.Thread(target=machine.groups[0].finish, args=("1.1", folder))
    ends.start()
    ends.join(4)
    assert ends.is_alive() == (status == 0)
    _say(machine.groups[0], "1.1", launcher.SUCCESS)
    ends.join(5)
    assert not ends.is_alive()
    wait_until(killed.exists) if status else time.sleep(0.5)
    assert killed.exists() == (status != 0)


@pytest.mark.parametrize("how", [launcher.SUCCESS, "torchrun ended with 1"])
def test_ranks_here_may_go_on_after_a_success_on_another_node_and_not_after_a_failure(machine, monkeypatch, how):
    monkeypatch.setattr(node_group, "FAILED_GRACE_S", 0.5)
    killed = list[Path]()
    monkeypatch.setattr(node_group.launcher, "is_running", lambda folder: not killed)
    monkeypatch.setattr(node_group.launcher, "kill", killed.append)
    machine.gather(RECORDS)
    folder = _started(machine, "1.1")
    _say(machine.groups[0], "1.1", how)
    wait_until(lambda: killed) if how != launcher.SUCCESS else time.sleep(2)
    assert killed == ([] if how == launcher.SUCCESS else [folder])
    killed.append(folder)  # ends the thread that watches


def test_the_port_of_torchruns_store_is_none_that_linux_gives_to_connections(monkeypatch):
    assert all(node_group._free_port("127.0.0.1") in node_group.STORE_PORTS for _ in range(10))
    with socket.create_server(("127.0.0.1", 0)) as taken, socket.create_server(("127.0.0.1", 0)) as freed:
        ports = [server.getsockname()[1] for server in (taken, freed)]
        monkeypatch.setattr(node_group, "STORE_PORTS", ports)
        freed.close()
        assert {node_group._free_port("127.0.0.1") for _ in range(10)} == {ports[1]}


def test_a_store_on_an_ipv6_address_has_a_port():
    assert node_group._free_port("::1") in node_group.STORE_PORTS
