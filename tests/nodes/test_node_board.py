"""Agreement of the ranks of two nodes: real processes, real gloo, a page for each node."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from kgorch.worker.ranks import consensus_board

RANK = """
import json, os, random, sys, time
import torch.distributed as dist
from kgorch.worker.ranks.node_board import LeaderGroup, NodeBoard

rank, ranks_here, path, store = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]
size = 2 * ranks_here
dist.init_process_group("gloo", init_method="file://" + store, rank=rank, world_size=size)
board = NodeBoard(path, rank, rank % ranks_here, ranks_here, LeaderGroup([0, ranks_here]))
draw, seen, asked, votes = random.Random(rank), [], [], []
for step in range(1, 900):
    if rank == 0 and step % 37 == 0 and step < 400:
        board.ask(1 if step % 2 else 4)
        asked.append(step)
    if rank == ranks_here and step == 450:
        board.ask(3)
    kinds = board.tick(step)
    if kinds:
        seen.append([step, kinds])
    if kinds & 2:
        break
    if step % 100 == 0:
        votes.append([step, board.vote_everywhere(7 if rank == size - 1 and step == 200 else 0)])
    time.sleep(draw.random() * 0.004)
board.settle()
print(json.dumps({"seen": seen, "asked": asked, "votes": votes}), flush=True)
dist.barrier()
os._exit(0)
"""


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> list[dict]:
    """What each rank of two nodes with two ranks each has seen."""
    folder = tmp_path_factory.mktemp("boards")
    boards = [folder / "first", folder / "second"]
    for board in boards:
        board.write_bytes(bytes(consensus_board.size(2)))
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, str(rank), "2", str(boards[rank // 2]), str(folder / "store")],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "GLOO_SOCKET_IFNAME": "lo"},
        )
        for rank in range(4)
    ]
    return [json.loads(process.communicate(timeout=200)[0]) for process in ranks]


def test_an_order_takes_effect_on_the_same_step_on_every_rank_of_both_nodes(told):
    first, *others = told
    assert all(other["seen"] == first["seen"] for other in others)
    orders = [(step, kinds) for step, kinds in first["seen"] if not kinds & 2]
    # an order that waited for the one before may have been joined by another
    assert len(orders) >= 2 and {1, 4} <= {bit for _, kinds in orders for bit in (1, 4) if kinds & bit}
    assert all(any(asked < step for asked in first["asked"]) for step, _ in orders)


def test_a_stop_that_another_node_asks_for_reaches_all(told):
    step, kinds = told[0]["seen"][-1]
    assert kinds & 3 == 3 and 450 < step < 900


def test_a_vote_of_all_nodes_has_one_result(told):
    assert all(item["votes"][:4] == [[100, 0], [200, 7], [300, 0], [400, 0]] for item in told)
