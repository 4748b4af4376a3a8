"""What several nodes cost.   python benchmarks/nodes.py [--quick] [--json FILE]

- a step of two gloo ranks that agree as two nodes do, against the same two ranks on one page: in turns within one pair of
  processes, so that both have the same moods of the machine (target ≤ 1.01); the thread time of the agreement in it, as a share of
  a step of 10 ms (target ≤ 0.2%)
- a supervisor's side of 64 nodes, whose agents do not train but speak the real channel: its memory (target ≤ 150 MB) and share of
  a core (target ≤ 5%) while each sends what eight ranks send, and the time until an order has reached all (target ≤ 0.5 s)
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

STEP_MS, NODES, RANKS_A_NODE = 10.0, 64, 8


def main() -> None:
    if sys.argv[1:2] == ["--rank"]:
        rank_of_a_pair(int(sys.argv[2]), Path(sys.argv[3]), int(sys.argv[4]))
        return
    if sys.argv[1:2] == ["--agents"]:
        simulated_agents(Path(sys.argv[2]))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few blocks: some 20 s")
    parser.add_argument("--json", type=Path, help="file for the figures")
    options = parser.parse_args()
    figures = {
        "agreement": agreement(blocks=6 if options.quick else 60),
        "channel": channel(5.0 if options.quick else 30.0),
    }
    print(json.dumps(figures, indent=1))
    if options.json:
        options.json.write_text(json.dumps(figures, indent=1))


# The step


def agreement(blocks: int) -> dict[str, float]:
    """Step times of both ways, in turns."""
    from kgorch.worker.ranks import consensus_board

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for page, ranks in (("both", 2), ("node0", 1), ("node1", 1)):
            (folder / page).write_bytes(bytes(consensus_board.size(ranks)))
        pair = [
            subprocess.Popen(
                [sys.executable, __file__, "--rank", str(rank), name, str(blocks)],
                stdout=subprocess.PIPE,
                text=True,
                env={**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"},
            )
            for rank in (0, 1)
        ]
        told = [json.loads(process.communicate()[0]) for process in pair]
    ratios = [nodes / one for rank in told for one, nodes in zip(rank["one"], rank["nodes"], strict=True)]
    return {
        "step_ms": round(statistics.median(told[0]["one"]) * 1e3, 3),
        "step_ratio": round(statistics.median(ratios), 4),
        "step_ratio_low": round(statistics.quantiles(ratios, n=10)[0], 4),
        "step_ratio_high": round(statistics.quantiles(ratios, n=10)[-1], 4),
        "tick_us_one": round(statistics.median(told[0]["tick_one"]) * 1e6, 1),
        "tick_us_nodes": round(statistics.median(told[0]["tick_nodes"]) * 1e6, 1),
        "agreement_share_of_10_ms": round(statistics.median(told[0]["tick_nodes"]) / (STEP_MS / 1e3), 5),
    }


def rank_of_a_pair(rank: int, folder: Path, blocks: int) -> None:
    import torch
    import torch.distributed as dist

    from kgorch.worker.ranks.consensus_board import Board
    from kgorch.worker.ranks.node_board import LeaderGroup, NodeBoard

    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    boards: dict[str, Board] = {
        "one": Board(str(folder / "both"), rank, 2),
        "nodes": NodeBoard(str(folder / f"node{rank}"), rank, 0, 1, LeaderGroup([0, 1])),
    }
    matrix, gradient = torch.rand(256, 256), torch.zeros(50_000)
    seen: dict[str, list[float]] = {key: [] for key in ("one", "nodes", "tick_one", "tick_nodes")}
    step = {"one": 0, "nodes": 0}

    def work() -> None:
        until_s = time.thread_time() + STEP_MS / 1e3 * 0.8
        while time.thread_time() < until_s:
            matrix @ matrix
        dist.all_reduce(gradient)

    for block in range(2 * blocks + 4):
        name = ("one", "nodes")[block % 2]
        dist.barrier()
        ticks_s, began_s = 0.0, time.perf_counter()
        for _ in range(50):
            work()
            step[name] += 1
            tick_s = time.thread_time()
            boards[name].tick(step[name])
            ticks_s += time.thread_time() - tick_s
        if block >= 4:  # the first ones warm up
            seen[name].append((time.perf_counter() - began_s) / 50)
            seen[f"tick_{name}"].append(ticks_s / 50)
    boards["nodes"].settle()
    print(json.dumps(seen), flush=True)
    dist.barrier()
    os._exit(0)


# The channel


def channel(seconds: float) -> dict[str, float]:
    """A NodeGroup with simulated agents of NODES - 1 other nodes."""
    import psutil

    from kgorch.nodes.node_group import NodeGroup
    from kgorch.plan.nodes import NodesSection
    from kgorch.plan.stages import StageSection
    from kgorch.protocol.messages import DeadlineUpdate

    hosts = [f"node{number}" for number in range(NODES)]
    section = NodesSection(hosts=hosts, start=["true", "{command}"], address="127.0.0.1")
    received = [0]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)

        def count(*_: Any) -> None:
            received[0] += 1

        group = NodeGroup(folder, "0" * 32, section, count, lambda *_: None)
        simulator = subprocess.Popen([sys.executable, __file__, "--agents", name], stdout=subprocess.PIPE, text=True)
        began_s = time.monotonic()
        group.gather(StageSection(name="train", entry="train.py", nodes=NODES, ranks=RANKS_A_NODE), RANKS_A_NODE)
        connected_s = time.monotonic() - began_s
        me = psutil.Process()
        time.sleep(2.0)
        busy_s, now_s, before = sum(me.cpu_times()[:2]), time.monotonic(), received[0]
        time.sleep(seconds)
        share = (sum(me.cpu_times()[:2]) - busy_s) / (time.monotonic() - now_s)
        rate = (received[0] - before) / (time.monotonic() - now_s)
        delays = []
        for number in range(10):
            sent_s = time.monotonic()
            group.broadcast(DeadlineUpdate(float(number)))
            assert simulator.stdout
            delays.append(float(simulator.stdout.readline()) - sent_s)
        memory = me.memory_info().rss
        group.close()
        simulator.kill()
        simulator.wait()
    return {
        "nodes": NODES,
        "connected_s": round(connected_s, 2),
        "supervisor_mb": round(memory / 1e6, 1),
        "core_share": round(share, 4),
        "messages_per_s": round(rate, 1),
        "order_reaches_all_s": round(statistics.median(delays), 4),
        "order_reaches_all_most_s": round(max(delays), 4),
    }


def simulated_agents(folder: Path) -> None:
    """Connects as the agent of each node, sends what eight ranks send, and prints when an order has reached all."""
    from kgorch import __version__
    from kgorch.nodes import channel as node_channel
    from kgorch.nodes import versions
    from kgorch.protocol import codec
    from kgorch.protocol.messages import DeadlineUpdate, RankMetrics, RankProgress, Request
    from kgorch.protocol.node_messages import NodeHello, NodeMetrics

    reached: dict[float, int] = {}
    guard = threading.Lock()

    def play(number: int) -> None:
        path = folder / "nodes" / f"node{number}.json"
        while True:
            try:
                told = json.loads(path.read_text())
                break
            except (OSError, ValueError):
                time.sleep(0.05)
        connection, _ = node_channel.connect_patiently(
            told["address"], told["port"], number, bytes.fromhex(told["secret"])
        )
        (folder / told["probe"]).touch()
        torch, python = versions.installed()
        hello = NodeHello(number, f"node{number}", __version__, torch, python, 8, time.time(), told["probe"])
        connection.sendall(codec.encode(hello))
        threading.Thread(target=talk, args=(connection, number), daemon=True).start()
        lines = codec.LineBuffer()
        while data := connection.recv(65536):
            for line in lines.feed(data):
                message = codec.decode(line)
                if isinstance(message, DeadlineUpdate) and message.at_s is not None:
                    with guard:
                        reached[message.at_s] = reached.get(message.at_s, 0) + 1
                        if reached[message.at_s] == NODES - 1:
                            print(time.monotonic(), flush=True)

    def talk(connection: Any, number: int) -> None:
        second = 0
        of_gpus = {
            f"gpu{gpu}.{name}": 1.0
            for gpu in range(8)
            for name in ("util", "mem_used", "mem_total", "temp_c", "power_w")
        }
        while True:
            for rank in range(number * RANKS_A_NODE, (number + 1) * RANKS_A_NODE):
                place = RankProgress("1.1", rank, "step", 0.1, 0.0, {"step": 0.1})
                values = {f"rank{rank}.{name}": 1.0 for name in ("cpu", "rss", "step", "wait")}
                connection.sendall(codec.encode(place) + codec.encode(RankMetrics("1.1", rank, values)))
            if second % 5 == 0:
                connection.sendall(codec.encode(NodeMetrics(of_gpus | {"host.cpu": 1.0, "host.mem_used": 1.0})))
            if second % 2 == 0:
                connection.sendall(codec.encode(Request("ping")))
            second += 1
            time.sleep(1.0)

    threads = [threading.Thread(target=play, args=(number,), daemon=True) for number in range(1, NODES)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


if __name__ == "__main__":
    main()
