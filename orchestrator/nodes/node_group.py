"""The other nodes of a session, as its supervisor sees them: their agents, what they run, and whether they are still there."""

from __future__ import annotations

import bisect
import contextlib
import math
import random
import socket
import subprocess
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from kgorch.core.codes import EventKind, Note
from kgorch.errors import KgorchError
from kgorch.launch import launcher
from kgorch.launch.stack_dumps import Frame, Stack
from kgorch.nodes import allocation
from kgorch.nodes.agent import NOT_SHARED, interface_of
from kgorch.nodes.agent_starts import AgentStarts
from kgorch.nodes.channel import AgentListener
from kgorch.plan import StageSection
from kgorch.plan.nodes import NodesSection
from kgorch.protocol import codec
from kgorch.protocol.launch_spec import LaunchSpec, NodePlace
from kgorch.protocol.messages import JournalEntry, Message, Request, Response
from kgorch.protocol.node_messages import NodeCommand, NodeDone, NodeEnded, NodeHello, NodeStart, RankStack
from kgorch.system.sockets.line_server import LineServer, Peer

CONNECT_S = 60.0
"""Seconds that an agent may take from its start until it has connected."""

APART_S = 5.0
"""Difference of the wall clocks of two nodes from which on it is reported. kgorch compares none of them."""

LOST_GRACE_S, FAILED_GRACE_S, END_S = 1.0, 6.0, 20.0
"""Seconds that the other nodes' ranks have to end by themselves: after a node was lost; after one node's ranks have ended, so that
the others can record why. After the last a kill is not waited for any more."""

STORE_PORTS = range(29500, 32768)
"""Ports for torchrun's store: from PyTorch's own default up to where Linux begins to take ports for connections of any program."""

OF_GPUS = frozenset({EventKind.GPU_LOST, EventKind.GPU_XID, EventKind.TELEMETRY_LOST, EventKind.TELEMETRY_BACK})
"""Events that an agent tells of its own node."""


class NodesMissing(KgorchError):
    """Fewer nodes have answered than the stage needs."""


@dataclass
class _Node:
    """One other node.

    Attributes:
        process: the command that started its agent.
        attempt: name of the attempt that it was started for last.
        has_succeeded: its torchrun has ended with 0 in that attempt.
    """

    number: int
    host: str
    secret: bytes = b""
    process: subprocess.Popen[bytes] | None = None
    hello: NodeHello | None = None
    peer: Peer | None = None
    is_checked: bool = False
    attempt: str = ""
    is_running: bool = False
    has_succeeded: bool = False
    done: set[int] = field(default_factory=set)

    @property
    def is_ready(self) -> bool:
        return self.peer is not None and self.hello is not None


class Order:
    """An order that agents carry out."""

    def __init__(self, group: NodeGroup, number: int, asked: list[_Node]) -> None:
        self._group, self._number, self._asked = group, number, asked

    def done_by(self) -> list[int]:
        """The nodes of the attempt, by their numbers, that have carried it out, or are gone."""
        done = [node for node in self._asked if self._number in node.done or not node.is_ready]
        return [number for node in done if (number := self._group.number_of(node)) > 0]

    @property
    def is_for_nobody(self) -> bool:
        return not self._asked

    @property
    def is_done(self) -> bool:
        return all(self._number in node.done or not node.is_ready for node in self._asked)

    def wait(self, timeout_s: float) -> bool:
        """Whether it was carried out within so many seconds."""
        return self._group.wait(lambda: self.is_done, timeout_s)


class NodeGroup:
    """Of one session; it does nothing for stages on one machine. Methods may be called from any thread.

    Args:
        folder: of the run.
        on_message: takes what ranks and keepers of other nodes say, and the node's number; called in the channel's thread.
        note: writes an event into the journal.
    Attributes:
        on_lost: called when a node is lost.
    """

    def __init__(
        self,
        folder: Path,
        run_id: str,
        section: NodesSection,
        on_message: Callable[[Message, int], None],
        note: Note,
    ) -> None:
        self.on_lost: Callable[[], None] = lambda: None
        self._starts = AgentStarts(folder, run_id, section)
        self._section, self._on_message, self._note = section, on_message, note
        self._nodes: dict[int, _Node] = {}
        self._by_peer: dict[Peer, _Node] = {}
        self._changed = threading.Condition()
        self._server: LineServer | None = None
        self._listener: AgentListener | None = None
        self._address, self._orders = "", 0
        self._place: NodePlace | None = None
        self._members: list[_Node] = []  # of the attempt, without this node, in the order of their ranks
        self._hosts: list[str] = []
        self._stacks: dict[int, RankStack] = {}

    def names(self) -> list[str]:
        """Names of the machines of the attempt, the first one first; [] for one machine."""
        return list(self._hosts)

    def ranks_here(self, ranks: int) -> range:
        """The ranks of the attempt on this node. Args: ranks: of all nodes."""
        return range(self._place.ranks[0] if self._place else ranks)

    def node_of(self, rank: int) -> int:
        """The node of a rank in the attempt, by its number; 0 for this one."""
        return bisect.bisect_right(self._place.leaders, rank) - 1 if self._place and len(self._hosts) > 1 else 0

    def host_of(self, rank: int) -> str:
        """The machine of a rank; "" where there is only one."""
        return self._hosts[self.node_of(rank)] if len(self._hosts) > 1 else ""

    def take_stacks(self) -> list[Stack]:
        """The stacks that other nodes have sent since the last call."""
        with self._changed:
            taken, self._stacks = self._stacks, {}
        return [
            Stack(item.rank, item.state, tuple(Frame(path, int(line), name) for path, line, name in item.frames))
            for _, item in sorted(taken.items())
        ]

    def are_all_here(self) -> bool:
        """Whether every node of the attempt that was started last is connected."""
        with self._changed:
            return self._place is not None and all(node.is_ready for node in self._members)

    def gather(self, stage: StageSection, ranks: int) -> NodePlace | None:
        """Start the agents that a stage needs and that do not live, and wait for them. Slow.

        Args:
            ranks: of this node.
        Returns: this node's place among those that have answered; None where the stage runs on this machine alone.
        Raises: NodesMissing; KgorchError for what only a person can change.
        """
        least, hosts = allocation.choose(stage, allocation.hosts_of(self._section) if stage.nodes != 1 else [])
        if len(hosts) < 2:
            self._leave_alone()
            return None
        self._listen(allocation.address_of(self._section, hosts[0]))
        wanted = [self._prepared(number, host) for number, host in enumerate(hosts[1:], start=1)]
        self.wait(lambda: all(node.is_ready or _has_failed(node) for node in wanted), CONNECT_S)
        for node in wanted:
            if node.process and node.process.poll() == NOT_SHARED:
                raise KgorchError(self._failure(node), next_step="set KGORCH_HOME to a folder that all nodes share")
        ready = [node for node in wanted if node.is_ready]
        for node in ready:
            if not node.is_checked and node.hello:
                self._starts.check(node.hello, node.host)
                node.is_checked = True
        if 1 + len(ready) < least:
            raise NodesMissing(
                f"{1 + len(ready)} of {len(hosts)} nodes answer, and the stage needs {least}",
                *(self._failure(node) for node in wanted if not node.is_ready),
                next_step=f"see {self._starts.folder}",
            )
        if len(ready) < len(wanted):
            facts = {"nodes": 1 + len(ready), "of": len(hosts)}
            missing = {node.host: self._failure(node) for node in wanted if not node.is_ready}
            self._note(EventKind.NODES_FEWER, facts | missing)
        if not ready:
            self._leave_alone()
            return None
        counts = [ranks, *(_ranks_on(node, stage) for node in ready)]
        port = _free_port(self._address)
        self._members, self._hosts = ready, [hosts[0], *(node.host for node in ready)]
        self._place = NodePlace(0, counts, self._address, port, interface_of(self._address))
        self._note(EventKind.NODES_READY, {"hosts": self._hosts, "ranks": counts})
        return self._place

    def start(self, launch: LaunchSpec) -> None:
        """Start the other nodes' part of an attempt, whose own part was started here. Its end is waited for by `finish`."""
        place = self._place
        if place is None or launch.nodes is None:
            return
        path = str(Path(launch.folder) / "launch.json")
        with self._changed:
            for number, node in enumerate(self._members, start=1):
                node.attempt, node.is_running, node.has_succeeded = launch.attempt, node.is_ready, False
                self._send(node, NodeStart(launch.attempt, path, number, place.address, place.port, place.ranks))
        threading.Thread(target=self._watch, args=(Path(launch.folder),), name="nodes", daemon=True).start()

    def finish(self, attempt: str, folder: Path) -> None:
        """The attempt's processes on this node are gone: wait until they are on all nodes; kill them where they stay.

        Where they have succeeded here, ranks of other nodes may still work: after its training, a rank takes the time it needs.
        """
        has_succeeded = launcher.describe_exit(folder) == launcher.SUCCESS
        if not self.wait(lambda: not self._running(attempt), math.inf if has_succeeded else FAILED_GRACE_S):
            with self._changed:  # the next attempt may start at any time
                for node in self._running(attempt):
                    self._send(node, NodeCommand("kill"))
            self.wait(lambda: not self._running(attempt), END_S)
        with self._changed:
            for node in self._running(attempt):
                node.is_running = False

    def kill(self) -> None:
        """Have the attempt killed on all other nodes."""
        self.broadcast(NodeCommand("kill"))

    def broadcast(self, message: Message) -> None:
        """Send to every agent that is there."""
        with self._changed:
            for node in self._nodes.values():
                self._send(node, message)

    def tell(self, number: int, message: Message) -> None:
        """Send to the agent of one node of the attempt. Args: number: of the node in it, from 1."""
        with self._changed:
            if 0 < number <= len(self._members):
                self._send(self._members[number - 1], message)

    def order(self, what: str) -> Order:
        """Give an order to the agents of all nodes of the attempt, and to others that are there."""
        with self._changed:
            self._orders += 1
            asked = [node for node in self._nodes.values() if node.is_ready]
            for node in asked:
                self._send(node, NodeCommand(what, self._orders))
            return Order(self, self._orders, asked)

    def number_of(self, node: _Node) -> int:
        """The number of a node in the attempt; -1 if it is in none."""
        return self._members.index(node) + 1 if node in self._members else -1

    def close(self) -> None:
        """Let the agents go: each ends when its connection does."""
        if self._server:
            self._server.close()
        for node in self._nodes.values():
            self._starts.end(node.number, node.process)

    # The agents

    def _listen(self, address: str) -> None:
        if self._server is not None:
            return
        self._address = address

        def listen(selector: object) -> AgentListener:
            self._listener = AgentListener(address, self._secret_of, selector)  # type: ignore[arg-type]
            return self._listener

        try:
            self._server = LineServer(listen, self._on_line, on_close=self._on_close, clients=4096)
        except OSError as error:
            raise KgorchError(
                f"this node cannot listen on {address}: {error.strerror}",
                next_step='give an address of this node in the plan: [nodes] address = "10.0.0.1"',
            ) from None

    def _secret_of(self, number: int) -> bytes | None:
        with self._changed:
            node = self._nodes.get(number)
            return node.secret if node and node.secret else None

    def _prepared(self, number: int, host: str) -> _Node:
        """The node with its agent started, unless it lives."""
        with self._changed:
            node = next((node for node in self._nodes.values() if node.host == host and node.is_ready), None)
            stale = self._nodes.get(number)
        if node:
            return node
        if stale and stale.process and stale.process.poll() is None:
            stale.process.kill()
        assert self._listener
        node = _Node(number, host)
        with self._changed:  # the agent may connect before its secret is known here
            node.secret, node.process = self._starts.start(number, host, self._address, self._listener.port)
            self._nodes[number] = node
        return node

    def _failure(self, node: _Node) -> str:
        return self._starts.failure(node.number, node.host)

    # The channel

    def _on_line(self, line: bytes, peer: Peer, complete: Callable[[], None]) -> None:
        try:
            message = codec.decode(line)
            with self._changed:
                node = self._by_peer.get(peer)
                match message:
                    case NodeHello() if (new := self._nodes.get(message.node)) and new.peer is None:
                        new.hello, new.peer, peer.is_attached = message, peer, True
                        self._by_peer[peer] = new
                        self._changed.notify_all()
                        self._note_clock(new)
                        return
                    case Request("ping"):
                        self._reply(peer, Response(True))
                        return
                    case RankStack() if node and message.rank in self._ranks_of(node):
                        self._stacks[message.rank] = message
                        return
                    case JournalEntry(attempt="") if node:
                        if message.kind in OF_GPUS:
                            self._note(message.kind, {**message.facts, "host": node.host})
                        return
                    case NodeDone() if node:
                        node.done.add(message.number)
                        self._changed.notify_all()
                        return
                    case NodeEnded(attempt, how) if node:
                        if attempt == node.attempt:  # that of an earlier one says nothing of this one
                            node.is_running, node.has_succeeded = False, how == launcher.SUCCESS
                            self._changed.notify_all()
                        return
            if node:
                self._on_message(message, self.number_of(node))
        finally:
            complete()

    def _note_clock(self, node: _Node) -> None:
        assert node.hello
        if abs(apart_s := node.hello.at - time.time()) > APART_S:
            self._note(EventKind.CLOCKS_APART, {"host": node.host, "ahead_s": round(apart_s, 1)})

    def _on_close(self, peer: Peer) -> None:
        with self._changed:
            node = self._by_peer.pop(peer, None)
            if node:
                if node.is_running:
                    self._note(EventKind.NODE_LOST, {"host": node.host, "node": node.number})
                node.peer, node.hello, node.is_running, node.is_checked = None, None, False, False
            self._changed.notify_all()
        if node:
            self.on_lost()

    def _send(self, node: _Node, message: Message) -> None:
        if node.peer is not None:
            self._reply(node.peer, message)

    def _reply(self, peer: Peer, message: Message) -> None:
        if self._server:
            self._server.peers.send(peer, codec.encode(message))

    # The attempt

    def _ranks_of(self, node: _Node) -> range:
        """The ranks that a node has in the attempt."""
        place, number = self._place, self.number_of(node)
        return (
            range(place.leaders[number], place.leaders[number] + place.ranks[number])
            if place and number > 0
            else range(0)
        )

    def _leave_alone(self) -> None:
        """The next attempt runs on this machine alone."""
        self._place, self._members, self._hosts = None, [], []

    def _running(self, attempt: str) -> list[_Node]:
        return [node for node in self._nodes.values() if node.is_running and node.attempt == attempt]

    def _watch(self, folder: Path) -> None:
        """End the attempt on this node, too, once it has failed on another one, or that is lost."""
        while all(node.is_running or node.has_succeeded for node in self._members):
            if not launcher.is_running(folder):
                return  # `finish` sees to the others
            with self._changed:
                self._changed.wait(0.5)
        is_lost = not self.are_all_here()
        until_s = time.monotonic() + (LOST_GRACE_S if is_lost else FAILED_GRACE_S)
        while launcher.is_running(folder) and time.monotonic() < until_s:
            time.sleep(0.1)
        if launcher.is_running(folder):
            self.kill()
            launcher.kill(folder)

    def wait(self, is_so: Callable[[], bool], timeout_s: float) -> bool:
        """Whether that came true within so many seconds; asked again when an agent has said something, or is gone."""
        until_s = time.monotonic() + timeout_s
        with self._changed:
            while not is_so():
                left_s = until_s - time.monotonic()
                if left_s <= 0:
                    return False
                self._changed.wait(min(left_s, 0.5))  # a process that has ended notifies nobody
            return True


def _has_failed(node: _Node) -> bool:
    return node.process is not None and node.process.poll() not in (None, 0)


def _ranks_on(node: _Node, stage: StageSection) -> int:
    return stage.ranks if isinstance(stage.ranks, int) else max(1, node.hello.gpus if node.hello else 1)


def _free_port(address: str) -> int:
    """A port for torchrun's store. Another process may take it before; then the attempt fails, and the next one has another."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    for port in random.sample(STORE_PORTS, len(STORE_PORTS)):
        with contextlib.suppress(OSError), socket.create_server((address, port), family=family):
            return port
    with socket.create_server((address, 0), family=family) as server:
        return int(server.getsockname()[1])
