"""Unix stream sockets between processes of one user: connect, listen, accept, and messages with open files beside them."""

from __future__ import annotations

import errno
import os
import socket
import struct
import time
from collections.abc import Sequence
from pathlib import Path

from kgorch.protocol.codec import LineBuffer, decode, encode
from kgorch.protocol.messages import Message

MAX_DESCRIPTORS = 253
"""Of one message: the kernel's SCM_MAX_FD."""

RECEIVE_BYTES = 65536


class WrongOwner(PermissionError):
    """Another user's process listens on a socket where one of this user's is expected."""


def address(path: str | Path) -> tuple[str, int]:
    """A name for a socket file that fits the 108 bytes of `sun_path` however deep its folder lies.

    Returns the name, and the folder's descriptor to close once the call that used the name is done.
    """
    folder = os.open(Path(path).parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    return f"/proc/self/fd/{folder}/{Path(path).name}", folder


def connect(path: str | Path, *, timeout_s: float = 2.0) -> socket.socket:
    """A connection to the process of this user, or root, that listens there.

    Raises: OSError when nobody listens; WrongOwner, one of these, for another user's process.
    """
    name, folder = address(path)
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.settimeout(timeout_s)
        _connect_within(connection, name, timeout_s)
        _, uid = peer_credentials(connection)
        if not _is_trusted(uid):  # whoever may write into the folder may put a socket there
            raise WrongOwner(errno.EACCES, f"a process of uid {uid} listens there", str(path))
    except OSError:
        connection.close()
        raise
    finally:
        os.close(folder)
    return connection


def _connect_within(connection: socket.socket, name: str, timeout_s: float) -> None:
    """Connect, and try again while the server's queue is full: with a timeout set the kernel does not wait for that itself."""
    until_s = time.monotonic() + timeout_s
    while True:
        try:
            connection.connect(name)
            return
        except BlockingIOError:
            if time.monotonic() >= until_s:
                raise
            time.sleep(0.01)


def peer_credentials(connection: socket.socket) -> tuple[int, int]:
    """Pid and uid of the process at the other end, as they were when it called listen() or connect()."""
    pid, uid, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return pid, uid


def _is_trusted(uid: int) -> bool:
    return uid in (os.geteuid(), 0)


def listen(path: Path) -> socket.socket:
    """A socket at `path` that only the owner can open, in the place of a dead process's.

    It is renamed to `path` once it listens: a process that connects as soon as the file exists is not refused.
    """
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    aside.unlink(missing_ok=True)
    server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    name, folder = address(aside)
    try:
        server.bind(name)
        aside.chmod(0o600)
        server.listen(128)
        aside.replace(path)
    except OSError:
        server.close()
        raise
    finally:
        os.close(folder)
    return server


def accept(server: socket.socket) -> socket.socket | None:
    """The next connection, non-blocking; None when it is gone again, or is another user's.

    Raises: OSError when no descriptor is free.
    """
    try:
        peer, _ = server.accept()
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE):
            raise
        return None
    if not _is_trusted(peer_credentials(peer)[1]):
        peer.close()
        return None
    peer.setblocking(False)
    return peer


def send(peer: socket.socket, message: Message, descriptors: Sequence[int] = ()) -> None:
    """Send a message, with open files beside the first byte of its line. Raises: OSError."""
    line = encode(message)
    if descriptors:
        socket.send_fds(peer, [line[:1]], list(descriptors))
        line = line[1:]
    peer.sendall(line)


def receive(peer: socket.socket, lines: LineBuffer, *, patience_s: float) -> tuple[list[Message], list[int]]:
    """The messages that have come, and the open files with them; nothing when nothing comes within `patience_s`.

    The open files are the caller's to close. Raises: OSError when the connection is closed; ProtocolError.
    """
    peer.settimeout(patience_s)
    try:
        data, descriptors, _, _ = socket.recv_fds(peer, RECEIVE_BYTES, MAX_DESCRIPTORS)
    except (TimeoutError, BlockingIOError):
        return [], []
    try:
        if not data:
            raise ConnectionError("closed")
        return [decode(line) for line in lines.feed(data)], descriptors
    except BaseException:
        close_all(descriptors)
        raise


def receive_messages(peer: socket.socket, lines: LineBuffer, *, patience_s: float) -> list[Message]:
    """`receive` for a caller that expects no open files: those that come all the same are closed."""
    received, descriptors = receive(peer, lines, patience_s=patience_s)
    close_all(descriptors)
    return received


def close_all(descriptors: Sequence[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)
