"""Notifications to systemd over $NOTIFY_SOCKET: ready, status, watchdog. Without that variable, every call does nothing.

The protocol is a datagram of `KEY=value` lines (sd_notify(3)), stable by systemd's own promise; the libraries for it add
a dependency and no function. A failure to send is never an error: training does not depend on it.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping


def ready() -> None:
    """Report that start-up is finished; `systemctl start` waits for this."""
    _send("READY=1")


def stopping() -> None:
    """Report that shutdown has begun; the last save may take as long as the unit's TimeoutStopSec."""
    _send("STOPPING=1")


def status(text: str) -> None:
    """Set the line that `systemctl status` shows."""
    _send("STATUS=" + " ".join(text.split()))


def extend_start(seconds: float) -> None:
    """Ask for so much more time before start-up counts as failed (TimeoutStartSec)."""
    _send(f"EXTEND_TIMEOUT_USEC={seconds * 1e6:.0f}")


def watchdog() -> None:
    """Report that this process works. Called by the main loop, never by a thread that would go on if the loop hangs."""
    _send("WATCHDOG=1")


def watchdog_interval_s(environ: Mapping[str, str] = os.environ) -> float | None:
    """Seconds between calls of `watchdog`: half of what systemd allows; None when it does not watch this process."""
    limit_us, pid = environ.get("WATCHDOG_USEC", ""), environ.get("WATCHDOG_PID")
    if not limit_us.isdecimal() or int(limit_us) == 0 or pid not in (None, str(os.getpid())):
        return None
    return int(limit_us) / 1e6 / 2


def _send(line: str) -> None:
    address = os.environ.get("NOTIFY_SOCKET", "")
    if address[:1] not in ("/", "@"):  # vsock: and others are for virtual machines
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as connection:
        connection.settimeout(1)  # a full queue must not hold up the loop
        try:
            connection.sendto(line.encode(), "\0" + address[1:] if address[0] == "@" else address)
        except OSError:
            pass
