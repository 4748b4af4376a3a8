"""The agent of a node: `python -m kgorch.nodes.agent FILE`, started by the supervisor of a session on each other node than its own.

It runs here what a supervisor runs on its own node: the shim of an attempt, and the Unix socket of the ranks, whose lines it passes
on. FILE lies in the run's folder, on the file system that all nodes share; it names the supervisor's address, and holds the secret
by which both know each other. The sockets lie in a folder of this node, because a socket file works on one machine alone.

The attempt ends with the connection: without a supervisor nobody completes a checkpoint. No PyTorch here.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import select
import shutil
import socket
import stat
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import psutil

from kgorch import __version__
from kgorch.hardware import devices
from kgorch.hardware.gpu_monitor import GpuMonitor
from kgorch.hardware.host_metrics import HostMetrics
from kgorch.launch import launcher, stack_dumps
from kgorch.nodes import channel, versions
from kgorch.protocol import codec
from kgorch.protocol.codec import LineBuffer, ProtocolError
from kgorch.protocol.launch_spec import LaunchSpec, NodePlace
from kgorch.protocol.messages import DeadlineUpdate, DeferredFile, Hello, JournalEntry, Message, Request
from kgorch.protocol.node_messages import (
    MAX_FRAMES,
    MAX_METRICS,
    NodeCommand,
    NodeDone,
    NodeEnded,
    NodeHello,
    NodeMetrics,
    NodeStart,
    RankStack,
)
from kgorch.protocol.run_files import KEEPER_SOCKET
from kgorch.protocol.snapshot_messages import SaveConclusion
from kgorch.snapshots import keeper_client
from kgorch.system import signals
from kgorch.system.attempt_files import EXIT_FILE
from kgorch.system.sockets.control_socket import ControlSocket, Reply
from kgorch.system.sockets.listener import raise_descriptor_limit

PING_S = 2.0
MEASURE_S = 5.0
"""Seconds between two reports of GPUs and host: a first node takes in those of up to 63 others."""

MEASURED = ("util", "mem_used", "mem_total", "temp_c", "power_w", "power_limit_w", "throttle", "ecc", "cpu")
"""What is reported; the rest of a sample's keys are told of the first node alone."""

KEEPER_S = 60.0
"""Seconds to wait for a keeper that writes what it holds."""

REMAINS = "attempt"
"""File in the node's folder: where the attempt's files are that was started here last."""

NOT_SHARED = 3
"""Exit status of an agent that cannot read its file."""


class NodeAgent:
    """The agent of one node.

    Args:
        told: content of the file: `node`, `address`, `port`, `secret`, `run_id`, `folder` (of the run), `probe`.
    """

    def __init__(self, told: dict[str, Any]) -> None:
        self._node, self._run_folder = int(told["node"]), Path(told["folder"])
        self._folder = node_folder(str(told["run_id"]), self._node)
        self._connection, self._ahead_s = channel.connect_patiently(
            told["address"], int(told["port"]), self._node, bytes.fromhex(told["secret"])
        )
        self._sending = threading.Lock()
        self._deadline = DeadlineUpdate(None)
        self._attempt: Path | None = None  # folder of this node's part
        self._is_over = threading.Event()
        self._socket = ControlSocket(self._folder / "control.sock", self._on_rank)
        self._keeper = keeper_client.KeeperListener(self._folder, self._send)
        self._greet(str(told["probe"]))

    def run(self) -> None:
        """Until the supervisor ends this, or is gone. Nothing of an attempt runs then."""
        lines, pinged_s = LineBuffer(), 0.0
        threading.Thread(target=self._measure, name="telemetry", daemon=True).start()
        try:
            while not self._is_over.is_set():
                if time.monotonic() - pinged_s > PING_S:
                    pinged_s = time.monotonic()
                    self._send(Request("ping"))
                if select.select([self._connection], [], [], PING_S)[0]:
                    data = self._connection.recv(65536)
                    if not data:
                        raise ConnectionError("the supervisor is gone")
                    for line in lines.feed(data):
                        self._obey(codec.decode(line))
        except (OSError, ProtocolError) as error:
            print(f"kgorch agent: {error}", flush=True)
        finally:
            if self._attempt:
                launcher.kill(self._attempt)
            self._keeper.close()
            self._socket.close()
            self._connection.close()

    def _greet(self, probe: str) -> None:
        # the supervisor looks for it: a folder that only seems to be shared is found before any training
        (self._run_folder / probe).write_text(str(self._node))
        torch, python = versions.installed()
        gpus = 0
        with contextlib.suppress(Exception):  # a driver that does not answer is the launch's matter
            gpus = devices.visible_gpu_count()
        self._send(
            NodeHello(
                self._node,
                platform.node()[:255],
                __version__,
                torch,
                python,
                gpus,
                time.time(),
                probe,
            )
        )

    def _measure(self) -> None:
        gpus, host = GpuMonitor(self._note), HostMetrics()
        while not self._is_over.wait(MEASURE_S):
            gpus.check()
            measured = [
                item for item in (gpus.values() | host.values()).items() if item[0].partition(".")[2] in MEASURED
            ]
            self._send(NodeMetrics(dict(measured[-MAX_METRICS:])))  # the host's come last
        gpus.stop()

    def _note(self, kind: str, facts: Mapping[str, object]) -> None:
        self._send(JournalEntry("", kind, {name: str(value) for name, value in facts.items()}))

    def _send(self, message: Message) -> None:
        """From any thread. A connection that is gone is noticed by `run`."""
        with contextlib.suppress(OSError), self._sending:
            self._connection.sendall(codec.encode(message))

    def _on_rank(self, message: Message, reply: Reply) -> None:
        """A line of a rank or the shim of this node, in the thread of their socket."""
        match message:
            case Request():
                return  # questions are the supervisor's to answer, and its socket is on its own node
            case DeferredFile(name=name) if name == EXIT_FILE:
                return  # NodeEnded tells that a node's torchrun has ended
            case Hello():
                reply(self._deadline)
        self._send(message)

    def _obey(self, message: Message) -> None:
        match message:
            case DeadlineUpdate(at_s):
                self._deadline = DeadlineUpdate(self._here(at_s))
                self._socket.broadcast(self._deadline)
            case SaveConclusion():
                _in_background(lambda: keeper_client.conclude(self._folder, message))
            case NodeStart():
                _in_background(lambda: self._start(message))
            case NodeCommand("kill"):
                if folder := self._attempt:
                    _in_background(lambda: launcher.kill(folder))
            case NodeCommand("stacks", number):
                _in_background(lambda: self._send_stacks(number))
            case NodeCommand("persist" | "end"):
                _in_background(lambda: self._use_keeper(message))

    def _send_stacks(self, number: int) -> None:
        with contextlib.suppress(Exception):  # a hang that cannot be explained is one all the same
            launch = LaunchSpec.read(self._attempt / "launch.json") if self._attempt else None
            stacks = stack_dumps.collect(Path(launch.folder), launch.ranks_here, launch.own_folder) if launch else []
            for stack in stacks:
                frames = [[frame.path, str(frame.line), frame.function] for frame in stack.frames[:MAX_FRAMES]]
                self._send(RankStack(stack.rank, stack.state, frames))
        self._send(NodeDone(number))

    def _use_keeper(self, command: NodeCommand) -> None:
        is_last = command.what == "end"
        (keeper_client.end if is_last else keeper_client.persist)(self._folder, timeout_s=KEEPER_S)
        if is_last:  # before the answer: the next session's agent creates the folder again
            shutil.rmtree(self._folder, ignore_errors=True)
        self._send(NodeDone(command.number))
        if is_last:
            self._is_over.set()

    def _start(self, order: NodeStart) -> None:
        try:
            self._end_remains()
            launch = self._adapt(order)
            self._attempt = launch.own_folder
            (self._folder / REMAINS).write_text(str(launch.own_folder))
            self._deadline = DeadlineUpdate(launch.deadline_s)
            self._socket.allow_ranks(len(launch.ranks_here))
            process = launcher.start(launch)
        except Exception as error:  # whatever it is: the other nodes must not wait for this one
            self._send(NodeEnded(order.attempt, f"it could not be started: {type(error).__name__}: {error}"[:1000]))
            return
        launcher.wait(launch.own_folder)
        process.wait()
        self._send(NodeEnded(order.attempt, launcher.describe_exit(launch.own_folder)))

    def _adapt(self, order: NodeStart) -> LaunchSpec:
        """The attempt's launch specification as this node's. Its instants are of the first node's clock."""
        launch = LaunchSpec.read(order.launch)
        address = self._connection.getsockname()[0]
        place = NodePlace(order.number, order.ranks, order.address, order.port, interface_of(address))
        return replace(
            launch,
            socket=str(self._folder / "control.sock"),
            keeper=str(self._folder / KEEPER_SOCKET),
            wall_s=self._here(launch.wall_s),
            deadline_s=self._here(launch.deadline_s),
            nodes=asdict(place),
        )

    def _end_remains(self) -> None:
        """Kill what an agent that was killed has left here: its ranks would hold the GPUs of this attempt."""
        with contextlib.suppress(OSError):
            launcher.kill(Path((self._folder / REMAINS).read_text()))

    def _here(self, at_s: float | None) -> float | None:
        """An instant of the supervisor's node on the clock of this one."""
        return None if at_s is None else at_s + self._ahead_s


def node_folder(run_id: str, node: int) -> Path:
    """The folder of a run's sockets on this node, made where there is none. Raises: PermissionError where it is another user's."""
    folder = Path(tempfile.gettempdir(), f"kgorch-{os.getuid()}-{run_id[:16]}-node{node}")
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise PermissionError(f"{folder} is not a folder of this user alone")
    return folder


def interface_of(address: str) -> str:
    """The network interface of this machine that has an address; "" for none."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(item.address == address for item in addresses):
            return str(name)
    return ""


def _in_background(job: Callable[[], object]) -> None:
    threading.Thread(target=job, daemon=True).start()


def main(path: Path) -> int:
    raise_descriptor_limit()
    try:
        told = json.loads(path.read_text())
    except OSError as error:
        print(
            f"{platform.node()} cannot read {path} ({error.strerror}): the state folder must lie on a file system"
            " that all nodes share",
            file=sys.stderr,
        )
        return NOT_SHARED
    # the supervisor saves and ends the ranks; SIGTERM is for them alone
    with signals.handlers(on_terminate=lambda: None, on_interrupt=lambda: None):
        try:
            NodeAgent(told).run()
        except (OSError, socket.gaierror) as error:
            print(f"{platform.node()}: {type(error).__name__}: {error}", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
