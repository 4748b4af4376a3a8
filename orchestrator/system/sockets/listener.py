"""A Unix socket file under which a process is reachable for as long as it lives.

Whoever tidies up a folder may delete the file. Existing connections survive that, but nobody new gets through: the ranks of
the next attempt would find no snapshot server while the old one holds its lock. So the file is checked, and created again.

Only the owner is accepted: the socket has mode 0600, and the uid of each peer is compared.
"""

from __future__ import annotations

import contextlib
import os
import resource
import selectors
import socket
import time
from pathlib import Path
from typing import Protocol, TypeAlias

from kgorch.protocol import transport

DESCRIPTORS = 1 << 16


def raise_descriptor_limit() -> None:
    """Raise the soft limit of open files, usually 1024, which a few hundred ranks and clients exhaust.

    Child processes inherit it: the loaders of a training share their tensors by open files.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < limit:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))


Connection: TypeAlias = socket.socket


class Listener(Protocol):
    """What a server takes its connections from.

    Attributes:
        socket: readable when a connection waits; registered with the server's selector.
    """

    socket: Connection

    def check(self) -> None:
        """Called regularly."""

    def accept(self) -> Connection | None:
        """The next connection, non-blocking; None when there is none."""

    def close(self) -> None: ...


class SocketListener:
    """The listening socket of a server.

    Attributes:
        socket: registered with the selector; another one after `check` had to create the file again.
    """

    def __init__(self, path: Path, selector: selectors.BaseSelector) -> None:
        self._path, self._selector = path, selector
        self._spare: int | None = None
        self._open_spare()
        self.socket = self._open()

    def check(self) -> None:
        """Listen again where the file is gone or another's; a path that cannot be written now is left for the next call."""
        with contextlib.suppress(OSError):
            if self._identity() != self._file:
                former, self.socket = self.socket, self._open()
                self._selector.unregister(former)
                former.close()

    def accept(self) -> socket.socket | None:
        """The next connection; None when it is gone again, is another user's, or no descriptor is free for it."""
        try:
            return transport.accept(self.socket)
        except OSError:
            self._reject_one()
            return None

    def close(self) -> None:
        self._selector.unregister(self.socket)
        self.socket.close()
        if self._spare is not None:
            os.close(self._spare)
            self._spare = None

    def _reject_one(self) -> None:
        """Accept one connection on the spare descriptor and close it: left in the queue it would wake every select at once."""
        if self._spare is not None:
            os.close(self._spare)
            self._spare = None
            with contextlib.suppress(OSError):
                if peer := transport.accept(self.socket):
                    peer.close()
        else:
            time.sleep(0.05)
        self._open_spare()

    def _open_spare(self) -> None:
        with contextlib.suppress(OSError):
            self._spare = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)

    def _open(self) -> socket.socket:
        server = transport.listen(self._path)
        server.setblocking(False)
        self._file = self._identity()
        self._selector.register(server, selectors.EVENT_READ)
        return server

    def _identity(self) -> tuple[int, int] | None:
        """Device and inode of the socket file; None without one."""
        try:
            status = self._path.stat()
        except FileNotFoundError:
            return None
        return status.st_dev, status.st_ino
