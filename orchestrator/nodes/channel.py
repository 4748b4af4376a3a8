"""The TCP connection between a supervisor and the agent of another node: listen, connect, and prove to know the secret.

Each side proves by an HMAC over the other's nonce that it knows the secret of this agent, which goes to the node by a file that
only the user can read, never by the network or a command line. Until then a connection is a stranger's: it has a thread of its own,
TIMEOUT_S, and lines of at most MAX_GREETING_BYTES. What follows is not encrypted, as the ranks' own traffic is not.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import queue
import random
import secrets
import selectors
import socket
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from kgorch.system.clock import boottime_s

TIMEOUT_S, PATIENCE_S = 5.0, 30.0
MAX_GREETING_BYTES = 512
MAX_STRANGERS = 64
"""Connections that have not proved anything yet; further ones are closed."""

SILENT_S, KEEPALIVE_S = 30.0, 5
"""Seconds without an acknowledgement after which the kernel gives a connection up, and between two probes of a silent one."""


class NotAuthentic(ConnectionError):
    """The other side does not know the secret, or does not speak this protocol."""


class AgentListener:
    """Listens on one address, and hands on the connections of agents that have proved to know their secrets.

    Args:
        secret_of: the secret of a node; None for a node that is not expected.
    """

    def __init__(
        self, address: str, secret_of: Callable[[int], bytes | None], selector: selectors.BaseSelector
    ) -> None:
        self._secret_of, self._ready = secret_of, queue.SimpleQueue[socket.socket]()
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._server = socket.create_server((address, 0), family=family, backlog=128)
        self.port: int = self._server.getsockname()[1]
        self._strangers = threading.BoundedSemaphore(MAX_STRANGERS)
        self.socket, self._wake = socket.socketpair()
        for end in (self.socket, self._wake):
            end.setblocking(False)
        selector.register(self.socket, selectors.EVENT_READ)
        self._selector = selector
        threading.Thread(target=self._listen, name="agent-listener", daemon=True).start()

    def check(self) -> None:
        """Nothing: an address does not go away as a file does."""

    def accept(self) -> socket.socket | None:
        with contextlib.suppress(BlockingIOError):
            self.socket.recv(4096)
        try:
            return self._ready.get_nowait()
        except queue.Empty:
            return None

    def close(self) -> None:
        self._selector.unregister(self.socket)
        for end in (self._server, self.socket, self._wake):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)  # ends the thread's accept
            end.close()

    def _listen(self) -> None:
        while True:
            try:
                connection, _ = self._server.accept()
            except OSError:
                return
            if not self._strangers.acquire(blocking=False):
                connection.close()
                continue
            threading.Thread(target=self._greet, args=(connection,), name="agent-greeting", daemon=True).start()

    def _greet(self, connection: socket.socket) -> None:
        try:
            _answer_greeting(connection, self._secret_of)
            tune(connection)
            connection.setblocking(False)
            self._ready.put(connection)
            self._wake.send(b"!")
        except (OSError, ValueError, KeyError, TypeError):
            connection.close()
        finally:
            self._strangers.release()


def connect(address: str, port: int, node: int, secret: bytes) -> tuple[socket.socket, float]:
    """Connect to the supervisor as a node's agent.

    Returns: the connection, and the seconds by which CLOCK_BOOTTIME here is ahead of that of the supervisor's node.
    Raises: OSError; NotAuthentic, one of these.
    """
    connection = socket.create_connection((address, port), timeout=TIMEOUT_S)
    try:
        theirs = str(_receive(connection)["nonce"])
        ours = secrets.token_hex(16)
        sent_s = boottime_s()
        _send(connection, {"node": node, "nonce": ours, "proof": _proof(secret, "agent", node, theirs, ours)})
        answer = _receive(connection)
        received_s = boottime_s()
        if not hmac.compare_digest(str(answer["proof"]), _proof(secret, "supervisor", node, ours, theirs)):
            raise NotAuthentic("the supervisor does not know the secret")
        ahead_s = (sent_s + received_s) / 2 - float(answer["boottime_s"])
        tune(connection)
        connection.settimeout(None)
        return connection, ahead_s
    except (ValueError, KeyError, TypeError) as error:
        connection.close()
        raise NotAuthentic(f"not a supervisor: {error}") from None
    except OSError:
        connection.close()
        raise


def connect_patiently(address: str, port: int, node: int, secret: bytes) -> tuple[socket.socket, float]:
    """As `connect`, tried again for PATIENCE_S: where hundreds of agents come at once some are closed as strangers."""
    until_s, pause_s = time.monotonic() + PATIENCE_S, 0.1
    while True:
        try:
            return connect(address, port, node, secret)
        except OSError:
            if time.monotonic() > until_s:
                raise
            time.sleep(pause_s * random.uniform(0.5, 1.0))
            pause_s = min(pause_s * 2, 2.0)


def tune(connection: socket.socket) -> None:
    """Send small lines at once, and notice a network that is cut."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    # for a side that sends nothing just now: without unacknowledged bytes there is nothing that could time out
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEPALIVE_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, KEEPALIVE_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(SILENT_S * 1000))


def _answer_greeting(connection: socket.socket, secret_of: Callable[[int], bytes | None]) -> None:
    """Raises: OSError, and ValueError, KeyError or TypeError for what is no greeting."""
    connection.settimeout(TIMEOUT_S)
    ours = secrets.token_hex(16)
    _send(connection, {"nonce": ours})
    greeting = _receive(connection)
    node, theirs = int(greeting["node"]), str(greeting["nonce"])
    secret = secret_of(node)
    expected = _proof(secret or secrets.token_bytes(32), "agent", node, ours, theirs)
    if not hmac.compare_digest(str(greeting["proof"]), expected) or secret is None:
        raise NotAuthentic("a stranger")
    _send(connection, {"proof": _proof(secret, "supervisor", node, theirs, ours), "boottime_s": boottime_s()})


def _proof(secret: bytes, side: str, node: int, theirs: str, ours: str) -> str:
    return hmac.digest(secret, f"kgorch {side} {node} {theirs} {ours}".encode(), "sha256").hex()


def _send(connection: socket.socket, document: Mapping[str, Any]) -> None:
    connection.sendall(json.dumps(document).encode() + b"\n")


def _receive(connection: socket.socket) -> dict[str, Any]:
    """One line, byte by byte: what follows it belongs to the next reader."""
    line = bytearray()
    while not line.endswith(b"\n"):
        if len(line) >= MAX_GREETING_BYTES or not (byte := connection.recv(1)):
            raise NotAuthentic("no greeting")
        line += byte
    document = json.loads(line)
    if not isinstance(document, dict):
        raise NotAuthentic("no greeting")
    return document
