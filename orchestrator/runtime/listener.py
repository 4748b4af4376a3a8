"""A socket file under which a process is found, for as long as the process lives.

Whoever tidies up a folder may take the file away. What is connected already goes on then, and nobody new gets through: ranks
of the next attempt would find no keeper while the old one holds its lock. So the file is looked at, and made again.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
from pathlib import Path

from orchestrator import wire

LOOK_S = 2.0
"""Who selects waits no longer than that, and then looks."""


class Listener:
    """Attributes:
    socket: registered with the selector.
    """

    def __init__(self, path: Path, selector: selectors.BaseSelector) -> None:
        self._path, self._selector = path, selector
        self.socket = self._open()

    def look(self) -> None:
        """Listen anew where the file is gone or another's; a path that nobody can write just now is for the next time."""
        with contextlib.suppress(OSError):
            if self._found() != self._file:
                before, self.socket = self.socket, self._open()
                self._selector.unregister(before)
                before.close()

    def accept(self) -> socket.socket | None:
        """The next who connects; None when it is gone again, or is another user's."""
        return wire.accept(self.socket)

    def _open(self) -> socket.socket:
        opened = wire.listen(self._path)
        self._file = self._found()
        self._selector.register(opened, selectors.EVENT_READ)
        return opened

    def _found(self) -> tuple[int, int] | None:
        try:
            found = self._path.stat()
        except FileNotFoundError:
            return None
        return found.st_dev, found.st_ino
