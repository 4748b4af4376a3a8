"""A rank's connection to the supervisor: a thread that sends its status once a second, receives orders and watches the deadline.

Because the rank watches the deadline itself, a save begins in time even when no supervisor lives. A lost connection is retried
every second: a new supervisor that adopts this attempt listens on the same socket.
"""

from __future__ import annotations

import collections
import selectors
import socket
import threading
import time
import traceback
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Protocol

from kgorch.protocol import codec, transport
from kgorch.protocol.codec import MAX_LINE_BYTES, LineBuffer, ProtocolError
from kgorch.protocol.launch_spec import LaunchSpec
from kgorch.protocol.messages import Command, DeadlineUpdate, Hello, Message
from kgorch.system.clock import boottime_s
from kgorch.worker.ranks.consensus_board import DOWN, SAVE, STOP, UP

BEAT_S = 1.0
"""Seconds between two status messages."""

OUTBOX = 1000
"""Messages that are kept while nobody listens; the oldest are dropped first."""


class RequestBoard(Protocol):
    """Where orders become requests: the ranks' board, or the agent of a foreign program."""

    def ask(self, request: int) -> None:
        """Args: request: bits of consensus_board.py."""


class SupervisorLink:
    """The connection of one rank.

    Args:
        board: where orders become requests to all ranks.
        hello: makes the first message of a connection.
        status: makes the messages of each beat. Called by the link's thread.

    Attributes:
        deadline_s: boot-time reading at which the session's last save is requested; None where it has no end.
    """

    def __init__(
        self,
        launch: LaunchSpec,
        board: RequestBoard,
        hello: Callable[[], Hello],
        status: Callable[[], Iterable[Message]],
    ) -> None:
        self._launch, self._board, self._hello, self._status = launch, board, hello, status
        self.deadline_s = launch.deadline_s
        self._stop_asked = False
        self._connection: socket.socket | None = None
        self._lines = LineBuffer()
        self._outbox: collections.deque[Message] = collections.deque(maxlen=OUTBOX)
        self._greeting: Hello | None = None  # the last Hello that was sent on this connection
        self._wake_receiver, self._wake_sender = socket.socketpair()
        self._wake_sender.setblocking(False)
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kgorch-link", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def send(self, message: Message) -> None:
        """Queue a message, from any thread."""
        self._outbox.append(message)
        self._wake()

    def close(self) -> None:
        """Send the status and what is queued, for at most two seconds, and end the thread."""
        self.send_beat()
        self._closing.set()  # after the last message: the thread ends as soon as it is closing and the queue is empty
        self._wake()
        self._thread.join(timeout=2.0)

    def send_hello(self) -> None:
        """Send a Hello again: this rank is ready to save."""
        self.send(self._hello())

    def send_beat(self) -> None:
        """Send the status once, now."""
        for message in self._status():
            self.send(message)

    def ask_stop(self) -> None:
        """Request a save and a stop of all ranks. Also called by the SIGTERM handler."""
        self._stop_asked = True
        self._board.ask(SAVE | STOP)

    def _wake(self) -> None:
        try:
            self._wake_sender.send(b"!")
        except OSError:
            pass  # the buffer is full, so a wake-up is pending already

    def _run(self) -> None:
        while not self._closing.is_set():
            try:
                self._talk()
                return
            except Exception:  # without this thread the rank would miss its deadline: report the error and start again
                traceback.print_exc()
                self._connection = None
                time.sleep(BEAT_S)

    def _talk(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._wake_receiver, selectors.EVENT_READ)
            next_beat_s = 0.0
            # After close() the loop continues until the queue is empty, or the connection is gone.
            while not (self._closing.is_set() and not self._outbox):
                now_s = boottime_s()
                if now_s >= next_beat_s:
                    next_beat_s = now_s + BEAT_S
                    self._watch_deadline(now_s)
                    if self._connection is None:
                        self._connect(selector)
                    if self._connection is not None:
                        self._outbox.extend(self._status())
                self._flush(selector)
                # Checked before it sleeps: the wake-up of close() may have been read together with an earlier one.
                if self._closing.is_set() and not (self._connection and self._outbox):
                    return
                for key, _ in selector.select(timeout=max(0.0, next_beat_s - boottime_s())):
                    if key.fileobj is self._wake_receiver:
                        self._wake_receiver.recv(4096)
                    else:
                        self._receive(selector)

    def _watch_deadline(self, now_s: float) -> None:
        if self.deadline_s is not None and now_s >= self.deadline_s and not self._stop_asked:
            self.ask_stop()

    def _connect(self, selector: selectors.BaseSelector) -> None:
        try:
            self._connection = transport.connect(self._launch.socket)
        except OSError:
            return
        self._lines, self._greeting = LineBuffer(), None
        selector.register(self._connection, selectors.EVENT_READ)
        # Before what is queued: the supervisor needs to know who sends it.
        self._outbox.appendleft(self._hello())

    def _flush(self, selector: selectors.BaseSelector) -> None:
        while self._connection is not None and self._outbox:
            message = self._outbox[0]
            if isinstance(message, Hello) and self._has_greeted(message):
                self._outbox.popleft()
                continue
            line = codec.encode(message)
            # The supervisor would close the connection, and the message would be sent again on the next one.
            if len(line) > MAX_LINE_BYTES:
                print(f"kgorch: a {type(self._outbox.popleft()).__name__} of {len(line)} bytes is not sent", flush=True)
                continue
            try:
                self._connection.sendall(line)
                self._greeting = message if isinstance(message, Hello) else self._greeting
                self._outbox.popleft()  # only now: a message that was not sent goes out on the next connection
            except OSError:
                self._drop(selector)

    def _has_greeted(self, hello: Hello) -> bool:
        """Whether this connection has sent the same Hello: one that was made late begins with those that were queued."""
        return self._greeting is not None and hello == replace(self._greeting, step=hello.step)

    def _receive(self, selector: selectors.BaseSelector) -> None:
        assert self._connection is not None
        try:
            data = self._connection.recv(65536)
            if not data:
                raise ConnectionError("closed")
            for line in self._lines.feed(data):
                self._obey(codec.decode(line))
        except (OSError, ProtocolError):
            self._drop(selector)

    def _obey(self, message: Message) -> None:
        if isinstance(message, Command) and message.what == "save":
            self._board.ask(SAVE)
        elif isinstance(message, Command) and message.what == "stop":
            self.ask_stop()
        elif isinstance(message, Command) and message.what in ("down", "up"):
            self._board.ask(DOWN if message.what == "down" else UP)
        elif isinstance(message, DeadlineUpdate):
            self.deadline_s = message.at_s

    def _drop(self, selector: selectors.BaseSelector) -> None:
        if self._connection is not None:
            selector.unregister(self._connection)
            self._connection.close()
            self._connection = None
