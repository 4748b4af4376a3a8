"""The network between two nodes is cut: the nodes are network namespaces, joined by a virtual cable."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("ip"), reason="needs root and iproute2, for namespaces"),
]

PROGRAM = """
import json, subprocess, sys, time
from pathlib import Path
from kgorch.nodes.node_group import NodeGroup
from kgorch.plan.nodes import NodesSection
from kgorch.plan.stages import StageSection

def ip(*words):
    subprocess.run(["ip", *words], check=True)

other = subprocess.Popen(["unshare", "--net", "sleep", "600"])
time.sleep(1.0)
inside = ["nsenter", "-t", str(other.pid), "-n"]
ip("link", "set", "lo", "up")
ip("link", "add", "cable0", "type", "veth", "peer", "name", "cable1", "netns", str(other.pid))
ip("addr", "add", "10.99.0.1/24", "dev", "cable0")
ip("link", "set", "cable0", "up")
for words in (["addr", "add", "10.99.0.2/24", "dev", "cable1"], ["link", "set", "cable1", "up"], ["link", "set", "lo", "up"]):
    subprocess.run([*inside, "ip", *words], check=True)
notes = []
group = NodeGroup(
    Path(sys.argv[1]), "test" + str(other.pid), NodesSection(hosts=["a", "b"], start=[*inside, "{words}"], address="10.99.0.1"),
    lambda *_: None, lambda kind, facts: notes.append(kind),
)
place = group.gather(StageSection(name="train", entry="train.py", nodes=2, ranks=1), 1)
told = {"interface": place.interface}
ip("link", "set", "cable0", "down")
time.sleep(5.0)
told["silent"] = group.are_all_here()
ip("link", "set", "cable0", "up")
told["after_5_s"] = group.order("persist").wait(30.0) and group.are_all_here()
ip("link", "set", "cable0", "down")
began_s = time.monotonic()
while group.are_all_here() and time.monotonic() < began_s + 120:
    time.sleep(0.2)
told["lost_after_s"] = time.monotonic() - began_s
agent = group._nodes[1].process
try:
    agent.wait(timeout=90)
    told["agent_ended"] = True
except subprocess.TimeoutExpired:
    told["agent_ended"] = False
ip("link", "set", "cable0", "up")
again = group.gather(StageSection(name="train", entry="train.py", nodes=2, ranks=1), 1)
told["again"] = again.ranks
group.close()
other.kill()
print(json.dumps(told))
"""


@pytest.mark.timeout(400)
def test_a_cut_of_seconds_is_survived_and_a_longer_one_is_a_lost_node_on_both_sides_until_it_is_back(tmp_path: Path):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    done = subprocess.run(
        ["unshare", "--net", sys.executable, str(program), str(tmp_path)], capture_output=True, text=True, timeout=380
    )
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["interface"] == "cable0" and told["silent"] and told["after_5_s"]
    assert 20 < told["lost_after_s"] < 60
    assert told["agent_ended"] and told["again"] == [1, 1]
