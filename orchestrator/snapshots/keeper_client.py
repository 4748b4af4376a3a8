"""A supervisor's side of the keeper: ask what it holds, have it write, and listen for what it has written."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path

from orchestrator.protocol import transport
from orchestrator.protocol.codec import LineBuffer, ProtocolError
from orchestrator.protocol.messages import Message, Request, Response
from orchestrator.protocol.run_files import KEEPER_SOCKET
from orchestrator.protocol.snapshot_messages import SnapshotInfo

AGAIN_S = 0.5


def newest(folder: Path, *, timeout_s: float = 5.0) -> SnapshotInfo | None:
    """The newest whole snapshot of the run in `folder`; None when no keeper lives or it holds none."""
    answer = _ask(folder, "newest", timeout_s)
    return answer if isinstance(answer, SnapshotInfo) else None


def persist(folder: Path, *, timeout_s: float, again: bool = False) -> None:
    """Return once the newest snapshot is on disk, or `timeout_s` are over. `again`: also one that was written already."""
    _ask(folder, "persist again" if again else "persist", timeout_s)


def forget(folder: Path, number: int) -> None:
    """Have a snapshot dropped with which a training fails."""
    _ask(folder, f"forget {number}", 5.0)


def end(folder: Path, *, timeout_s: float) -> None:
    """The same, and the keeper is gone then."""
    _ask(folder, "end", timeout_s)


def _ask(folder: Path, what: str, timeout_s: float) -> Message | None:
    until = time.monotonic() + timeout_s
    try:
        with transport.connect(folder / KEEPER_SOCKET) as connection:
            transport.send(connection, Request(what))
            lines = LineBuffer()
            while (left_s := until - time.monotonic()) > 0:
                for message in transport.receive_messages(connection, lines, patience_s=left_s):
                    if isinstance(message, SnapshotInfo | Response):
                        return message
    except (OSError, ProtocolError):
        pass
    return None


class Watcher:
    """Receives CheckpointWritten, SaveFailure and JournalEntry from whichever keeper lives, in a thread of its own."""

    def __init__(self, folder: Path, post: Callable[[Message], None]) -> None:
        self._folder, self._post, self._is_over = folder, post, threading.Event()
        self._thread = threading.Thread(target=self._run, name="watcher", daemon=True)
        self._thread.start()

    def close(self) -> None:
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
