"""Any training, for a storm that comes over it (tests/storm): it goes as fast as it is told, and no rank of it trains twice unseen.

Its folder tells it how fast to go (`pace`: seconds a step; without it as fast as it can). A rank holds a lock in that folder while
it trains; one that finds it held writes so into `doubles.txt`. Each has a helper in a session of its own, as clients of trackers
start them, which is to end with its attempt.
"""

from __future__ import annotations

import fcntl
import importlib
import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from kgorch.worker.entry import function_of
from kgorch.worker.session import Session

HELPER = ["sleep", "98765"]
"""By these words a storm knows it (tests/storm/looking.py)."""


def hold(rank: int) -> IO[str]:
    """A lock that the kernel lets go of when this process dies, however it dies."""
    silent = subprocess.DEVNULL
    subprocess.Popen(HELPER, start_new_session=True, stdin=silent, stdout=silent, stderr=silent)
    lock = open(f"rank{rank}.lock", "a")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        with open("doubles.txt", "a") as told:
            told.write(f"rank {rank} trains twice\n")
    return lock


def wait_as_told() -> None:
    try:
        time.sleep(float(Path("pace").read_text() or 0))
    except OSError:
        pass


def main(inner: str, **args: Any) -> None:
    """`inner`: the entry that is meant, given `args`."""
    if not inner.startswith("kgorch.workloads.vqa."):  # transformers asks the compiler for more than a stand-in has
        importlib.import_module("no_compiler")
    steps = Session.steps

    def slowed(self: Session, loader: Any) -> Iterator[Any]:
        for batch in steps(self, loader):
            yield batch
            wait_as_told()

    Session.steps = slowed
    with hold(int(os.environ["RANK"])):
        function_of(inner)(**args)
