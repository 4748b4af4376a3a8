"""Peers that ask and never read, that flood, and that come in crowds: supervisor, daemon and keeper go on serving the others."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch
from harness import wait_until
from saving import Place, save
from torch import nn

from kgorch.protocol import codec, transport
from kgorch.protocol.messages import Request, Response
from kgorch.scheduler import daemon_api
from kgorch.system.sockets import control_socket

PING = codec.encode(Request("ping"))
NEWEST = codec.encode(Request("newest"))


@contextlib.contextmanager
def crowd(path: Path, count: int) -> Iterator[list[socket.socket]]:
    """Connections that nobody reads from. Their server may close any of them."""
    peers = []
    try:
        for _ in range(count):
            peer = transport.connect(path, timeout_s=10)
            peer.setblocking(False)
            peers.append(peer)
        yield peers
    finally:
        for peer in peers:
            peer.close()


def stuff(peers: list[socket.socket], line: bytes, *, bytes_each: int = 4 << 20) -> None:
    """Send as much as each server takes just now, up to a bound."""
    for peer in peers:
        with contextlib.suppress(OSError):
            for _ in range(bytes_each // (len(line) * 500)):
                peer.send(line * 500)


def limit_descriptors(pid: int, count: int) -> None:
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (count, count))


def descriptors(pid: int) -> int:
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


def test_who_never_reads_does_not_stop_the_supervisor_and_a_crowd_does_not_stop_a_relaunch(kgorch):
    supervisor = kgorch.background("start", str(kgorch.plan(ranks=1, args={"epochs": 2000, "sleep": 0.05})))
    kgorch.wait_for_step(2)
    path = next(kgorch.home.glob("runs/*/*/control.sock"))
    limit_descriptors(supervisor.pid, 300)
    with crowd(path, 8) as silent, crowd(path, 500):
        stuff(silent, PING)
        step = kgorch.status()["step"]
        for _ in range(20):
            assert control_socket.ask(path, "ping") in (Response(True, "training"), Response(True, "saving"))
        kgorch.wait_for_step(step + 20, within_s=30)
        assert descriptors(supervisor.pid) < 200
        os.kill(kgorch.pids()["rank0"], signal.SIGKILL)
        wait_until(lambda: len(kgorch.history()[0]["attempts"]) == 2, within_s=60)
        assert not kgorch.events("launch_failed")
        kgorch.wait_for_step(step + 30)
    kgorch("stop")
    assert supervisor.wait(timeout=60) == 10


def test_a_client_that_floods_the_daemon_and_never_reads_stops_neither_it_nor_its_end(kgorch):
    process = kgorch.background("daemon")
    path = kgorch.home / daemon_api.SOCKET
    wait_until(lambda: daemon_api.ask(kgorch.home, "ping"))
    with crowd(path, 8) as silent:
        line = json.dumps({"ask": "status"}).encode() + b"\n"
        stuff(silent, line)
        for _ in range(5):
            assert daemon_api.ask(kgorch.home, "status")["pid"] == process.pid
            stuff(silent, line)
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=30) == 0


@pytest.fixture
def place(tmp_path):
    place = Place(tmp_path)
    place.start_keeper()
    yield place
    place.kill_keeper()


def test_crowds_that_never_read_do_not_stop_the_keeper_or_cost_it_more_than_a_bounded_share(place):
    limit_descriptors(place.keeper.pid, 200)
    saver, net = place.saver(), nn.Linear(4, 4)
    saver.prepare(1 << 16, torch.device("cpu"))  # waits for the keeper, for which a snapshot has no patience
    assert save(saver, {"model": net}, 1, persist=False)
    before = psutil.Process(place.keeper.pid).memory_info().rss
    with crowd(place.folder / "keeper.sock", 8) as silent, crowd(place.folder / "keeper.sock", 300):
        stuff(silent, NEWEST)
        stuff(silent, codec.encode(Request("fetch")))
        for step in range(2, 6):
            assert save(saver, {"model": net}, step) and saver.wait(), saver.error
            assert place.newest().step == step
        assert descriptors(place.keeper.pid) < 150
        assert psutil.Process(place.keeper.pid).memory_info().rss - before < 64 << 20
    assert place.keeper.poll() is None
