"""The processor priority of kgorch's own processes that work beside the training."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

AUTOGROUP = Path("/proc/self/autogroup")


def lower(nice: int) -> None:
    """Lower the priority of this process by `nice`, against the processes of other sessions, too. Never fails.

    The kernel may group processes by session, each group with the same share (CONFIG_SCHED_AUTOGROUP; sched(7)). A nice value
    then orders the processes of one session only: of one core a process with nice 19 in a session of its own got 1.0 s where one
    with nice 0 got 1.4 s. So the group gets the value, too, if it is this process's own: otherwise the user's shell is in it.
    """
    with contextlib.suppress(OSError):
        os.nice(nice)
        if os.getsid(0) == os.getpid():
            AUTOGROUP.write_text(str(os.nice(0)))
