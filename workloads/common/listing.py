"""Headers of many files, read once in a run: in threads by rank 0, with progress, and remembered for later sessions.

On a cold network mount each file costs some 10 ms, which 122,218 places of three images make an hour of, were it done by every rank
in every session. What is remembered is what the script's own reader said of each file. It comes out of a file that may have been
brought from elsewhere: it tells sizes and what to leave out, and each sample is still checked when it is read.
"""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from kgorch.workloads.common.files import DataError

if TYPE_CHECKING:
    from kgorch import Session

Item = TypeVar("Item")

THREADS = 16
"""They wait for a disk or a network most of the time: some 10 ms a file there."""

PORTION = 64
"""Files that a thread reads before it asks for more: 100,000 tasks of one file each would cost more than they do."""

PROBES = 64
"""Files whose sizes are part of a fingerprint. All of them would cost as much as the headers."""


class Headers(NamedTuple):
    """Attributes:
    found: what `look` gave of each item, in order; None of a broken one.
    broken: what was said of each broken one, by its place in the order.
    """

    found: list[Any]
    broken: dict[int, str]


def headers(
    session: Session | None, name: str, items: Sequence[Item], look: Callable[[Item], Any], *, key: Any,
    skip_broken: bool = False, threads: int = THREADS,
) -> Headers:  # fmt: skip
    """What `look` tells of each item, computed once in a run. All ranks call it together and get the same.

    Args:
        session: None remembers nothing.
        name: of the file in the run's folder, and in what is said of progress: "headers-train".
        look: opens the item's files; called in threads. Gives what JSON can hold, so lists for tuples; raises DataError for what is
            broken.
        key: what the answer hangs on besides `look` itself: `fingerprint` of the files, and options.
        skip_broken: note what is broken and go on; else the first error in the order of the items is raised.
    Raises: DataError.
    """

    def compute() -> dict[str, Any]:
        read = read_all(items, look, skip_broken=skip_broken, threads=threads, told=told)
        return {"found": read.found, "broken": {str(at): said for at, said in read.broken.items()}}

    def told(done: int) -> None:
        if session is not None:
            session.progress(name, done, len(items))

    if session is None:
        return checked(compute(), len(items), name)
    return checked(session.cached(name, compute, key=[key, len(items), skip_broken]), len(items), name)


def read_all(
    items: Sequence[Item], look: Callable[[Item], Any], *, skip_broken: bool, threads: int, told: Callable[[int], None]
) -> Headers:
    """Args: told: hears how many are done, about once a second at least. Raises: DataError."""
    found, broken, done = [None] * len(items), dict[int, DataError](), 0
    end, lock = len(items), threading.Lock()  # where reading ends: at the first broken item, unless it may be left out

    def portion(first: int) -> int:
        nonlocal end
        last = min(first + PORTION, len(items))
        for at in range(first, last):
            if at >= end:
                break
            try:
                found[at] = look(items[at])
            except DataError as problem:
                broken[at] = problem
                if not skip_broken:
                    with lock:
                        end = min(end, at)
        return last - first

    with ThreadPoolExecutor(threads, thread_name_prefix="headers") as pool:
        pending: set[Future[int]] = {pool.submit(portion, first) for first in range(0, len(items), PORTION)}
        try:
            while pending:
                over, pending = wait(pending, timeout=1.0, return_when=FIRST_COMPLETED)
                done += sum(one.result() for one in over)
                told(done)
        except BaseException:
            end = 0
            raise
    if broken and not skip_broken:
        raise broken[min(broken)]
    return Headers(found, {at: str(broken[at]) for at in sorted(broken)})


def checked(told: Any, count: int, name: str) -> Headers:
    """Raises: DataError for what no session of this program can have left."""
    if isinstance(told, dict) and isinstance(told.get("found"), list) and isinstance(told.get("broken"), dict):
        broken = {int(at): str(said) for at, said in told["broken"].items() if at.isdecimal() and int(at) < count}
        if len(told["found"]) == count and len(broken) == len(told["broken"]):
            return Headers(told["found"], broken)
    raise DataError(
        f"what an earlier session has left of {name!r} is not what was read",
        f"expected the headers of {count} files",
        next_step=f"delete {name}.json in the folder `cached` of the run's folder (kgorch status --json names it)",
    )


def fingerprint(root: str | os.PathLike[str], names: Iterable[str | os.PathLike[str]]) -> str:
    """Of files below `root`, relative to it: their names, and the sizes of some of them, spread over the list.

    No times: a platform may mount the same data set anew for each session. A list of 100,000 takes a quarter of a second.
    """
    texts = [os.fspath(name) for name in names]
    digest = hashlib.blake2b("\0".join(texts).encode("utf-8", "surrogateescape"), digest_size=16)
    for number in range(min(PROBES, len(texts))):
        path = Path(root, texts[number * len(texts) // PROBES if len(texts) > PROBES else number])
        try:
            size = path.stat().st_size
        except OSError:
            size = -1  # the reader says which file is missing
        digest.update(f"\0{size}".encode())
    return digest.hexdigest()
