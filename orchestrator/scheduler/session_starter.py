"""Starts the processes that resume claimed runs, with a standby for all of them."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from pathlib import Path

from kgorch.db.queue import Entry
from kgorch.launch.standby import SOCKET_VARIABLE, Standby
from kgorch.system import process_protection

SYSTEMD_VARIABLES = ("NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID", "LISTEN_FDS", "LISTEN_PID", "LISTEN_FDNAMES")
"""What systemd addresses to the daemon alone: a session that reports "ready" would report it for the daemon."""


class SessionStarter:
    """Of one daemon. The standby imports PyTorch when the first session asks for it, and keeps it for those that follow."""

    def __init__(self) -> None:
        self._standby: Standby | None = None

    def __call__(self, entry: Entry, token: str) -> subprocess.Popen[bytes]:
        """Start the process for a claimed row; it writes to `supervisor.log` of the run's folder. Raises: OSError."""
        folder = Path(entry.folder)
        environ = {name: value for name, value in os.environ.items() if name not in SYSTEMD_VARIABLES}
        environ |= process_protection.child_environment()
        with contextlib.ExitStack() as opened:
            file = opened.enter_context(open(folder / "supervisor.log", "ab"))
            inherited: tuple[int, ...] = ()
            with contextlib.suppress(OSError):  # without a standby the session imports PyTorch itself
                if self._standby is None or not self._standby.is_usable:
                    self._standby = Standby(environ=environ)
                inherited = (opened.enter_context(self._standby.connect_another()).fileno(),)
                environ[SOCKET_VARIABLE] = str(inherited[0])
            return subprocess.Popen(
                [sys.executable, "-m", "kgorch.cli", "resume", entry.run, "--claimed", token, "--progress", "none"],
                start_new_session=True,  # Ctrl-C at the daemon's terminal is not for the sessions
                cwd=folder,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                env=environ,
                pass_fds=inherited,
            )

    def rest(self) -> None:
        """Nothing runs and nothing is due: end the standby, whose memory others may need."""
        if self._standby is not None:
            self._standby.close()
            self._standby = None
