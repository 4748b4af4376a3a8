"""Ends an attempt soon after one of its ranks has failed, whatever the others are waiting for.

A rank whose peer is gone may wait for it in its GPU's queue, where no signal reaches it: NCCL is asynchronous, and a process that
reads one figure off the device waits for all that was queued. torchrun sends SIGTERM, which such a rank does not see, and SIGKILL
30 seconds later. Ranks that can end do so within seconds and leave a record of why; the others are killed after EXIT_S.

Standard library only: this runs in the shim.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading
import time
from pathlib import Path

from kgorch.core.codes import RankOutcome
from kgorch.system.process_identity import rank_of

EXIT_S = 5.0
"""Seconds that ranks have to end by themselves after the first failure: a rank sees that a peer is gone within 0.2 s
(worker/ranks/consensus_board.py), and ends hard, without unloading PyTorch."""

LOOK_S = 0.5
"""Seconds between two checks of the ranks."""


class FailureWatch:
    """Watches the ranks of one torchrun from a thread of its own, until the process ends.

    Args:
        folder: of the attempt, where ranks write rankK.status.json. ranks: those that this torchrun starts.
    """

    def __init__(self, folder: Path, torchrun: int, ranks: range) -> None:
        self._folder, self._torchrun, self._ranks = folder, torchrun, ranks
        self._pids: dict[int, int] = {}  # by rank
        threading.Thread(target=self._watch, name="failed-attempt", daemon=True).start()

    def _watch(self) -> None:
        while not self._has_failed():
            time.sleep(LOOK_S)
        for _ in range(int(EXIT_S / LOOK_S)):
            time.sleep(LOOK_S)
            if not _children_of(self._torchrun):
                return  # torchrun ends by itself, with its report of what failed
        # the ranks, not torchrun: its log then names the one that failed first
        for pid in _children_of(self._torchrun):
            _kill(pid)
        time.sleep(EXIT_S)
        _kill(self._torchrun)

    def _has_failed(self) -> bool:
        """Whether a rank has failed by its record, or has gone without one."""
        outcomes = {rank: self._outcome(rank) for rank in self._ranks}
        if RankOutcome.FAILED in outcomes.values():
            return True
        alive = _children_of(self._torchrun)
        if len(self._pids) < len(self._ranks):
            self._pids |= {rank: pid for pid in alive if (rank := rank_of(pid)) is not None}
        return any(pid not in alive and not outcomes.get(rank) for rank, pid in self._pids.items())

    def _outcome(self, rank: int) -> str:
        try:
            return str(json.loads((self._folder / f"rank{rank}.status.json").read_text())["outcome"])
        except (OSError, ValueError, KeyError, TypeError):
            return ""


def _children_of(pid: int) -> set[int]:
    """Those that have not been reaped; empty where the kernel does not list them."""
    children: set[int] = set()
    with contextlib.suppress(OSError):
        for thread in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(OSError):
                children |= {int(child) for child in (thread / "children").read_text().split()}
    return children


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
