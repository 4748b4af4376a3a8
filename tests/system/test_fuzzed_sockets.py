"""Any bytes and any messages, in any pieces, from many peers at once, on the sockets of live processes: each of them lives, answers
who asks, and holds a bounded number of descriptors and bytes."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from harness import wait_until
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from saving import Place

from kgorch.protocol import transport
from kgorch.protocol.codec import PROTOCOL_VERSION, LineBuffer
from kgorch.protocol.messages import MESSAGE_KINDS, Request, Response
from kgorch.protocol.run_files import KEEPER_SOCKET
from kgorch.protocol.snapshot_messages import SnapshotInfo
from kgorch.scheduler import daemon_api
from kgorch.snapshots import keeper_client
from kgorch.system.sockets import control_socket
from kgorch.system.sockets.line_server import MAX_CLIENTS

FUZZ = int(os.environ.get("KGORCH_FUZZ", "1"))
SOME = settings(
    max_examples=20 * FUZZ, deadline=None, database=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
ROOM_FOR = 256 << 20
OPEN = 200  # connections that are left open, more than any of them serves

odd = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8)
    | st.sampled_from(["\ud800", "\0", "x" * 3000, 2**63, 10**40, 1e308]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)  # fmt: skip
ATTEMPTS = st.sampled_from(["1.1", "9.9"])
VALUES: dict[str, st.SearchStrategy[Any]] = {
    "str": st.text(max_size=5),
    "int": st.integers(-1, 9),
    "float": st.floats(0, 9),
    "bool": st.booleans(),
    "dict[str, float]": st.dictionaries(st.text(max_size=5), st.floats() | odd, max_size=3),
    "dict[str, str]": st.dictionaries(st.text(max_size=5), st.text(max_size=5), max_size=3),
    "dict[str, Any]": st.dictionaries(st.text(max_size=5), odd, max_size=3),
    "dict[str, list[int]]": st.dictionaries(st.text(max_size=5), st.lists(st.integers(-1, 9000), max_size=3), max_size=3),
}  # fmt: skip


@st.composite
def messages(draw: st.DrawFn, **fixed: st.SearchStrategy[Any]) -> bytes:
    """A line of a kind that there is, most fields as they should be. `fixed`: of these names those values alone."""
    name, kind = draw(st.sampled_from(sorted(MESSAGE_KINDS.items())))
    document: dict[str, Any] = {"v": PROTOCOL_VERSION, "message": name}
    for item in dataclasses.fields(kind):
        right = ATTEMPTS if item.name == "attempt" else VALUES.get(str(item.type), odd)
        right = right if draw(st.integers(0, 19)) else odd
        document[item.name] = draw(fixed.get(item.name, right))
    return json.dumps(document).encode() + b"\n"


def steps(line: st.SearchStrategy[bytes]) -> st.SearchStrategy[list[tuple[str, bytes]]]:
    """What peers do: a new one comes; one sends something whole, half or many times; one leaves; answers are read or not."""
    junk = st.binary(max_size=200) | st.sampled_from(
        [b"\n" * 5000, b"[" * 9000, b"x" * 300_000, b"{}\n" * 2000, b"\xff\n"]
    )
    sent = st.tuples(
        st.sampled_from(["send", "send in pieces", "flood"]), line | line.map(lambda text: text[:-7]) | junk
    )
    return st.lists(sent | st.tuples(st.sampled_from(["come", "leave", "read"]), st.just(b"")), min_size=5, max_size=25)


class Crowd:
    """Peers of one socket, the newest of which acts."""

    def __init__(self, path: Path) -> None:
        self._path, self._peers = path, list[socket.socket]()

    def do(self, what: str, data: bytes) -> None:
        if what == "come" or not self._peers:
            self._peers.append(transport.connect(self._path, timeout_s=30))
            self._peers[-1].setblocking(False)
        peer = self._peers[-1]
        with contextlib.suppress(OSError):  # it was dropped, or does not take it now
            match what:
                case "send":
                    peer.send(data)
                case "send in pieces":
                    for at in range(min(len(data), 300)):
                        peer.send(data[at : at + 1])
                case "flood":
                    for _ in range(200):
                        peer.send(data)
                case "read":
                    peer.recv(65536)
                case "leave":
                    self._peers.pop().close()
        if len(self._peers) > OPEN:
            self._peers.pop(0).close()

    def fill(self) -> None:
        while len(self._peers) < OPEN:
            self.do("come", b"")

    def leave(self) -> None:
        for peer in self._peers:
            peer.close()


@contextlib.contextmanager
def bounded(pid: int, path: Path, answers: Callable[[], Any]) -> Iterator[Callable[[list[tuple[str, bytes]]], None]]:
    """What does all that with a process, and looks at it after each time."""
    process, crowd = psutil.Process(pid), Crowd(path)
    before, held = process.memory_info().rss, process.num_fds()
    crowd.fill()

    def act(done: list[tuple[str, bytes]]) -> None:
        for what, data in done:
            crowd.do(what, data)
        assert process.is_running() and process.status() != psutil.STATUS_ZOMBIE
        assert answers(), "no answer"
        assert process.num_fds() < held + MAX_CLIENTS + 30
        assert process.memory_info().rss < before + ROOM_FOR

    try:
        yield act
    finally:
        crowd.leave()


def test_the_daemon_stands_whatever_is_said_to_it(kgorch):
    process = kgorch.background("daemon")
    wait_until(lambda: daemon_api.ask(kgorch.home, "ping"))
    asked = (st.sampled_from(["ping", "status", "wake", "", "\0"]) | odd).filter(lambda word: word != "stop")
    lines = asked.map(lambda word: json.dumps({"ask": word}).encode() + b"\n")
    path = kgorch.home / daemon_api.SOCKET
    with bounded(process.pid, path, lambda: daemon_api.ask(kgorch.home, "ping", timeout_s=30)) as act:
        SOME(given(steps(lines))(act))()
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=60) == 0


def test_the_supervisor_stands_whatever_is_said_to_it(kgorch):
    supervisor = kgorch.background("start", str(kgorch.plan(ranks=1, args={"epochs": 3000, "sleep": 0.05})))
    kgorch.wait_for_step(2)
    path = next(kgorch.home.glob("runs/*/*/control.sock"))
    lines = messages(what=st.sampled_from(["ping", "save", "", "\0", "down"]))

    def answers() -> bool:
        answer = control_socket.ask(path, "ping", timeout_s=60)
        return answer is not None and answer.ok

    with bounded(supervisor.pid, path, answers) as act:
        SOME(given(steps(lines))(act))()
    assert len(kgorch.history()[0]["attempts"]) == 1, "the training was ended by it"
    kgorch("stop")
    assert supervisor.wait(timeout=90) == 10, supervisor.communicate()[0]


@pytest.fixture
def place(tmp_path):
    place = Place(tmp_path)
    place.start_keeper()
    yield place
    place.kill_keeper()


def test_the_keeper_stands_whatever_is_said_to_it(place):
    lines = messages(
        what=st.sampled_from(["newest", "fetch", "watch", "persist", "forget 1", "forget x", "", "\0"]),
        root=st.sampled_from([str(place.root), "\0", "/dev/null/x"]),
        bytes=st.integers(-1, 1 << 20),
        ranks=st.integers(0, 8),
    )

    def answers() -> bool:
        with transport.connect(place.folder / KEEPER_SOCKET, timeout_s=30) as asking:
            transport.send(asking, Request("newest"))
            found = transport.receive_messages(asking, LineBuffer(), patience_s=30)
        return [type(message) for message in found] in ([Response], [SnapshotInfo])

    with bounded(place.keeper.pid, place.folder / KEEPER_SOCKET, answers) as act:
        SOME(given(steps(lines))(act))()
    assert place.keeper.poll() is None
    keeper_client.end(place.folder, timeout_s=30)
    assert place.keeper.wait(timeout=30) == 0
