"""Agreement of the ranks of two nodes: real processes, real gloo, a page for each node."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from kgorch.worker.ranks import consensus_board

RANK = """
import json, os, random, sys, time
import torch.distributed as dist
from kgorch.worker.ranks.node_board import LeaderGroup, NodeBoard

rank, ranks_here, path, store, what = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4], sys.argv[5]
size = 2 * ranks_here
dist.init_process_group("gloo", init_method="file://" + store, rank=rank, world_size=size)
board = NodeBoard(path, rank, rank % ranks_here, ranks_here, LeaderGroup([0, ranks_here]))
draw, seen, asked = random.Random(rank), [], []
for step in range(1, 400):
    if what == "orders" and rank == 0 and step % 37 == 0:
        board.ask(1 if step % 2 else 4)
        asked.append(step)
    if what == "sigterm" and rank == ranks_here and step == 50:
        board.ask(3)
    kinds = board.tick(step)
    if kinds:
        seen.append([step, kinds])
    if kinds & 2:
        break
    if what == "votes" and step % 100 == 0:
        seen.append([step, board.vote_everywhere(7 if rank == size - 1 and step == 200 else 0)])
    time.sleep(draw.random() * 0.004)
board.settle()
print(json.dumps({"seen": seen, "asked": asked}), flush=True)
dist.barrier()
os._exit(0)
"""


def run(folder: Path, what: str, ranks_here: int = 2) -> list[dict]:
    """Two nodes; returns what each rank has seen."""
    boards = [folder / "first", folder / "second"]
    for board in boards:
        board.write_bytes(bytes(consensus_board.size(ranks_here)))
    ranks = [
        subprocess.Popen(
            [
                sys.executable,
                "-c",
                RANK,
                str(rank),
                str(ranks_here),
                str(boards[rank // ranks_here]),
                str(folder / "store"),
                what,
            ],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "GLOO_SOCKET_IFNAME": "lo"},
        )
        for rank in range(2 * ranks_here)
    ]
    return [json.loads(process.communicate(timeout=120)[0]) for process in ranks]


def test_an_order_takes_effect_on_the_same_step_on_every_rank_of_both_nodes(tmp_path):
    first, *others = run(tmp_path, "orders")
    assert len(first["seen"]) >= 3 and all(other["seen"] == first["seen"] for other in others)
    # an order that waited for the one before may have been joined by another
    assert {1, 4} <= {bit for _, kinds in first["seen"] for bit in (1, 4) if kinds & bit}
    assert all(any(asked < step for asked in first["asked"]) for step, _ in first["seen"])


def test_a_stop_that_another_node_asks_for_reaches_all(tmp_path):
    [seen] = {json.dumps(told["seen"]) for told in run(tmp_path, "sigterm", ranks_here=1)}
    [[step, kinds]] = json.loads(seen)
    assert kinds & 3 == 3 and 50 < step < 400


def test_a_vote_of_all_nodes_has_one_result(tmp_path):
    for told in run(tmp_path, "votes"):
        assert told["seen"] == [[100, 0], [200, 7], [300, 0]]
