"""The supervisor's side of the keeper: requests, and a thread that receives its reports."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path

from kgorch.protocol import transport
from kgorch.protocol.codec import LineBuffer, ProtocolError
from kgorch.protocol.messages import Message, Request, Response
from kgorch.protocol.run_files import KEEPER_SOCKET
from kgorch.protocol.snapshot_messages import SaveConclusion, SnapshotInfo
from kgorch.system.process_identity import start_ticks

AGAIN_S = 0.5
"""Seconds between two tries to connect, and between two checks whether the listener is closed."""


def newest(folder: Path, *, timeout_s: float = 5.0) -> SnapshotInfo | None:
    """The newest whole snapshot of the run in `folder`; None when no keeper lives or it holds none."""
    answer = _ask(folder, "newest", timeout_s)
    return answer if isinstance(answer, SnapshotInfo) else None


def persist(folder: Path, *, timeout_s: float, again: bool = False) -> None:
    """Have the newest snapshot written; return once it is on disk, or after `timeout_s`.

    Args:
        again: also one that was written already, because it was read back broken.
    """
    _ask(folder, "persist again" if again else "persist", timeout_s)


def forget(folder: Path, number: int) -> None:
    """Have a snapshot dropped with which a training fails."""
    _ask(folder, f"forget {number}", 5.0)


def conclude(folder: Path, conclusion: SaveConclusion) -> None:
    """Say what became of a checkpoint of which the keeper has written a part."""
    with contextlib.suppress(OSError), transport.connect(folder / KEEPER_SOCKET) as connection:
        transport.send(connection, conclusion)


def end(folder: Path, *, timeout_s: float) -> None:
    """Have the newest snapshot written, and the keeper end where the disk takes it; return when it has, or after `timeout_s`."""
    _ask(folder, "end", timeout_s)


def _ask(folder: Path, what: str, timeout_s: float) -> Message | None:
    until = time.monotonic() + timeout_s
    try:
        with transport.connect(folder / KEEPER_SOCKET) as connection:
            pid = transport.peer_credentials(connection)[0]
            started, lines = start_ticks(pid), LineBuffer()
            transport.send(connection, Request(what))
            while (left_s := until - time.monotonic()) > 0:
                for message in transport.receive_messages(connection, lines, patience_s=left_s):
                    if isinstance(message, SnapshotInfo | Response):
                        if what == "end" and isinstance(message, Response) and message.ok:
                            _await_exit(pid, started, until)
                        return message
    except (OSError, ProtocolError):  # no keeper, or it was killed meanwhile: the disk still has its checkpoints
        pass
    return None


def _await_exit(pid: int, started: int | None, until: float) -> None:
    """Wait for a process to end: its folder may be removed next, or another keeper started there."""
    while started is not None and start_ticks(pid) == started and time.monotonic() < until:
        time.sleep(0.005)


class KeeperListener:
    """Receives CheckpointWritten, SaveFailure and JournalEntry from the keeper that lives, on a thread of its own.

    Args:
        post: takes each message, on that thread.
    """

    def __init__(self, folder: Path, post: Callable[[Message], None]) -> None:
        self._folder, self._post, self._is_over = folder, post, threading.Event()
        self._thread = threading.Thread(target=self._run, name="keeper-listener", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop the thread; waits two seconds for it at most."""
        self._is_over.set()
        self._thread.join(timeout=2.0)

    def _run(self) -> None:
        while not self._is_over.is_set():
            try:
                with transport.connect(self._folder / KEEPER_SOCKET) as connection:
                    self._listen(connection)
            except (OSError, ProtocolError):
                self._is_over.wait(AGAIN_S)

    def _listen(self, connection: socket.socket) -> None:
        transport.send(connection, Request("watch"))
        lines = LineBuffer()
        while not self._is_over.is_set():
            for message in transport.receive_messages(connection, lines, patience_s=AGAIN_S):
                self._post(message)
