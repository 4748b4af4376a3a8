"""What systemd is told over $NOTIFY_SOCKET: that we are ready, what we do, that we live. Without it, nothing happens.

The protocol is a datagram of `KEY=value` lines (sd_notify(3)), stable by systemd's own promise; the libraries for it add
a dependency and no word to it. That nobody hears us is never an error: training does not hang on it.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping


def ready() -> None:
    """Start-up is over; what `systemctl start` waits for."""
    _tell("READY=1")


def stopping() -> None:
    """The end has begun; the last save may take as long as the unit's TimeoutStopSec."""
    _tell("STOPPING=1")


def status(text: str) -> None:
    """One line for `systemctl status`."""
    _tell("STATUS=" + " ".join(text.split()))


def watchdog() -> None:
    """We live. Told by the loop that does the work, never by a thread that would outlive its hanging."""
    _tell("WATCHDOG=1")


def watchdog_interval_s(environ: Mapping[str, str] = os.environ) -> float | None:
    """How often to tell `watchdog()`, seconds: half of what systemd allows; None when it does not watch this process."""
    told, pid = environ.get("WATCHDOG_USEC", ""), environ.get("WATCHDOG_PID")
    if not told.isdecimal() or int(told) == 0 or pid not in (None, str(os.getpid())):
        return None
    return int(told) / 1e6 / 2


def _tell(line: str) -> None:
    address = os.environ.get("NOTIFY_SOCKET", "")
    if address[:1] not in ("/", "@"):  # vsock: and others are for whole machines
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as line_to_systemd:
        line_to_systemd.settimeout(1)  # a full queue must not hold up the loop
        try:
            line_to_systemd.sendto(line.encode(), "\0" + address[1:] if address[0] == "@" else address)
        except OSError:
            pass
