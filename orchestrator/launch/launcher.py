"""One attempt's processes: start them, find them again, wait for their end, end them, read how they ended.

The folder's `lock` is taken before the shim is started and handed to it, open and locked. So from the first moment to
the last, "does it live" is a question to the kernel: no pid that may be another's, no gap between starting it and its
writing down who it is.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from orchestrator.core.attempt_outcome import RankRecord
from orchestrator.core.codes import RankError, RankOutcome
from orchestrator.core.training_health import Trouble
from orchestrator.protocol.codec import ProtocolError, from_dict
from orchestrator.protocol.launch_spec import LAUNCH_VARIABLE, LaunchSpec
from orchestrator.system import attempt_processes, process_protection
from orchestrator.system.attempt_files import write_json
from orchestrator.system.file_lock import is_locked
from orchestrator.system.process_identity import has_open_file, start_ticks

Unwritten = Mapping[str, dict[str, Any]]
"""What an attempt's processes have told, for the disk did not take it: files of its folder, by name."""

NOTHING: Unwritten = MappingProxyType({})
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO)


class NoRoom(Exception):
    """A file could not be written: its disk takes nothing now."""


def start(launch: LaunchSpec, held: Sequence[int] = ()) -> subprocess.Popen[bytes]:
    """`held`: open files that the shim is to hold as long as it lives (hardware/gpu_locks.py). Raises OSError."""
    if not Path(launch.workdir).is_dir():  # else the shim's end would be all there is to tell
        raise FileNotFoundError(f"the plan's folder {launch.workdir} is gone")
    folder = Path(launch.folder)
    folder.mkdir(parents=True, exist_ok=True)
    launch.write()
    lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        for stale in (*folder.glob("*.status.json"), folder / "exit.json", folder / "shim.json"):
            stale.unlink(missing_ok=True)  # an attempt of that name in a database that is no more
        with open(folder / "shim.log", "ab") as log:
            return subprocess.Popen(
                [sys.executable, "-m", "orchestrator.launch.shim", str(folder)],
                pass_fds=(lock, *held),
                start_new_session=True,
                cwd="/",
                env={
                    **os.environ,
                    **process_protection.child_environment(),
                    LAUNCH_VARIABLE: str(folder / "launch.json"),
                },
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
    finally:
        os.close(lock)


def written_shim(folder: Path) -> int:
    """The pid of the shim of which the folder tells, while it lives: also where the folder is a copy. 0 before that is written."""
    told = _numbers(folder / "shim.json")
    pid = told.get("pid", 0)
    return pid if pid > 1 and start_ticks(pid) == told.get("started_ticks", 0) else 0


def _shim_of(folder: Path) -> int:
    """The same, for this very folder: it has that folder's lock open, also when the file was deleted since."""
    pid = written_shim(folder)
    return pid if pid and has_open_file(pid, folder / "lock") else 0


def torchrun_of(folder: Path) -> int:
    """Its pid, as the shim wrote it down; 0 before it has."""
    return _numbers(folder / "shim.json").get("torchrun", 0)


def environment(folder: Path) -> dict[str, str]:
    """That its shim was started with; {} where it cannot be read."""
    try:
        told = Path(f"/proc/{_shim_of(folder)}/environ").read_bytes()
    except OSError:
        return {}
    items = (item.partition("=") for item in told.decode(errors="surrogateescape").split("\0") if item)
    return {name: value for name, _, value in items}


def is_running(folder: Path) -> bool:
    """Whether its shim lives; also when somebody has deleted the file of its lock."""
    return is_locked(folder / "lock") or _shim_of(folder) != 0


def wait(folder: Path) -> None:
    """Return when the shim is gone: at once when it ends, whoever started it."""
    with contextlib.suppress(FileNotFoundError):
        lock = os.open(folder / "lock", os.O_RDONLY | os.O_CLOEXEC)
        try:
            fcntl.flock(lock, fcntl.LOCK_SH)
        finally:
            os.close(lock)
    while is_running(folder):  # the lock's file was deleted, and perhaps made anew
        time.sleep(0.1)


def kill(folder: Path, *, patience_s: float = 10.0) -> bool:
    """End all processes of an attempt, now, and what they have started. True when they are gone; safe to repeat."""
    until = time.monotonic() + patience_s
    sent: set[int] = set()
    while is_running(folder):
        wanted = signal.SIGUSR1 if time.monotonic() < until - patience_s / 2 else signal.SIGKILL
        if wanted not in sent and (shim := _shim_of(folder)):
            with contextlib.suppress(ProcessLookupError):
                os.kill(shim, wanted)
            sent.add(wanted)
        if time.monotonic() > until:
            return False
        time.sleep(0.02)
    return attempt_processes.terminate_attempt(folder)


def records(folder: Path, ranks: int, unwritten: Unwritten = NOTHING) -> list[RankRecord]:
    """What the ranks wrote down of their ends; a rank that was killed has written nothing."""
    told = ((rank, _read(folder / f"rank{rank}.status.json", unwritten)) for rank in range(ranks))
    found = (_record(rank, content) for rank, content in told if content)
    return [record for record in found if record]


def _record(rank: int, content: Mapping[str, Any]) -> RankRecord | None:
    """None for what no rank of ours has written."""
    error = content.get("error", {})
    try:
        told = {**error, **content, "rank": rank, "error_type": error.get("type", "")}
        trouble = told.pop("trouble", None)
        record = from_dict(RankRecord, told)
        return replace(
            record,
            outcome=RankOutcome(record.outcome),
            code=RankError(record.code) if record.code in set(RankError) else RankError.OTHER,  # of another version
            trouble=from_dict(Trouble, trouble) if trouble else None,
        )
    except (ProtocolError, TypeError, AttributeError, ValueError):
        return None


def ending(folder: Path, unwritten: Unwritten = NOTHING) -> str:
    """How torchrun ended, in words."""
    status = _numbers(folder / "exit.json", unwritten).get("status")
    if status is None:
        return "the shim was killed"
    if status < 0:
        known = {number.value: number.name for number in signal.Signals}
        return f"torchrun was ended by {known.get(-status, f'signal {-status}')}"
    return f"torchrun ended with {status}"


def kernel_kills(folder: Path, unwritten: Unwritten = NOTHING) -> int:
    """Processes of the attempt's control group that the kernel has killed meanwhile, for want of memory."""
    return _numbers(folder / "exit.json", unwritten).get("kernel_kills", 0)


def was_sigkilled(folder: Path, unwritten: Unwritten = NOTHING) -> bool:
    """Whether torchrun, or a rank by its word, was ended by SIGKILL."""
    if _numbers(folder / "exit.json", unwritten).get("status") == -signal.SIGKILL:
        return True
    try:
        return bool(re.search(r"exitcode\s*: -9\b|Signal 9 ", (folder / "torchrun.log").read_text(errors="replace")))
    except OSError:
        return False


def _numbers(path: Path, unwritten: Unwritten = NOTHING) -> dict[str, int]:
    """What the shim left: of itself, or of torchrun's end (`status`, `kernel_kills`)."""
    content = _read(path, unwritten) or {}
    return {name: value for name, value in content.items() if isinstance(value, int)}


def write_late(folder: Path, name: str, content: dict[str, Any]) -> None:
    """What could not be written, once the disk takes it; let go where it never will. Raises: NoRoom while it does not."""
    try:
        write_json(folder / name, content)
    except OSError as error:
        if error.errno in NO_ROOM:
            raise NoRoom(str(error)) from None


def _read(path: Path, unwritten: Unwritten = NOTHING) -> dict[str, Any] | None:
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError):
        return unwritten.get(path.name)
    return content if isinstance(content, dict) else None
