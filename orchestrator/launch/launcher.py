"""The processes of one attempt: start them, find them again, wait for their end, kill them, read how they ended.

The attempt's folder has a file `lock`. It is locked before the shim is started, and the shim inherits the open descriptor. The
kernel so answers whether the shim lives, from its start to its end. A pid in a file would leave a gap between the start and the
write, and could be another process's by now.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from kgorch.core.codes import RankError, RankOutcome
from kgorch.core.health.training_health import HealthIssue
from kgorch.core.program_command import Launcher
from kgorch.core.session.attempt_outcome import RankRecord
from kgorch.errors import UNWRITABLE
from kgorch.hardware.gpu_locks import GpuLocks
from kgorch.launch import attempt_processes, standby
from kgorch.launch.standby import ForkedShim, StandbyUnavailable
from kgorch.protocol.codec import ProtocolError, from_dict
from kgorch.protocol.launch_spec import LAUNCH_VARIABLE, LaunchSpec
from kgorch.system import process_protection
from kgorch.system.attempt_files import write_json
from kgorch.system.file_lock import is_locked
from kgorch.system.process_identity import has_open_file, start_ticks

DeferredFiles = Mapping[str, dict[str, Any]]
"""Content by file name that the attempt's processes sent to the supervisor because the disk did not accept the file."""

NO_FILES: DeferredFiles = MappingProxyType({})

SUCCESS = "torchrun ended with 0"
"""As `describe_exit` tells it."""


class DiskUnwritable(Exception):
    """A file could not be written now; a later try may succeed."""


def start(launch: LaunchSpec, gpus: GpuLocks | None = None) -> subprocess.Popen[bytes] | ForkedShim:
    """Start the shim of an attempt, from the standby if there is one.

    Args:
        gpus: visible to its processes. The shim keeps their locks open while it lives, so they stay locked if the supervisor
            dies. None for all GPUs of this process.
    Raises: OSError.
    """
    gpus = gpus or GpuLocks()
    if not Path(launch.workdir).is_dir():  # checked here: the shim could only fail, without this message
        raise FileNotFoundError(f"the plan's folder {launch.workdir} is gone")
    folder = launch.own_folder
    folder.mkdir(parents=True, exist_ok=True)
    launch.write()
    lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        for stale in (*folder.glob("*.status.json"), folder / "exit.json", folder / "shim.json"):
            # from an attempt of the same name, whose database was deleted: its records would count as this attempt's
            stale.unlink(missing_ok=True)
        environ = {
            **gpus.environ,
            **process_protection.child_environment(),
            LAUNCH_VARIABLE: str(folder / "launch.json"),
        }
        held = (lock, *gpus.descriptors)
        with open(folder / "shim.log", "ab") as log:
            if launch.launcher == Launcher.TORCHRUN and launch.foreign is None and (ready := standby.current()):
                with contextlib.suppress(StandbyUnavailable):
                    return ready.launch(folder, environ, (log.fileno(), *held))
            return subprocess.Popen(
                [sys.executable, "-m", "kgorch.launch.shim", str(folder)],
                pass_fds=held,
                start_new_session=True,
                cwd="/",
                env=environ,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
    finally:
        os.close(lock)


def shim_pid(folder: Path) -> int:
    """The pid in the folder's shim.json, if that process lives; else 0.

    The folder may be a copy: then it is the shim of the original.
    """
    content = _numbers(folder / "shim.json")
    pid = content.get("pid", 0)
    # The start time tells the shim from a later process with the same pid.
    return pid if pid > 1 and start_ticks(pid) == content.get("started_ticks", 0) else 0


def _own_shim_pid(folder: Path) -> int:
    """The pid of the shim of this folder, if it lives; else 0. It has this folder's lock open, even if the file was deleted."""
    pid = shim_pid(folder)
    return pid if pid and has_open_file(pid, folder / "lock") else 0


def torchrun_pid(folder: Path) -> int:
    """The pid of torchrun in the folder's shim.json; 0 before the shim has written it."""
    return _numbers(folder / "shim.json").get("torchrun", 0)


def shim_environment(folder: Path) -> dict[str, str]:
    """The environment variables of the attempt's shim; {} if they cannot be read."""
    try:
        content = Path(f"/proc/{_own_shim_pid(folder)}/environ").read_bytes()
    except OSError:
        return {}
    items = (item.partition("=") for item in content.decode(errors="surrogateescape").split("\0") if item)
    return {name: value for name, _, value in items}


def is_running(folder: Path) -> bool:
    """Whether the attempt's shim lives; also if its lock file was deleted."""
    return is_locked(folder / "lock") or _own_shim_pid(folder) != 0


def wait(folder: Path) -> None:
    """Wait until the shim has ended. Works for a child and for a shim that another supervisor started, which waitpid does not."""
    with contextlib.suppress(FileNotFoundError):
        lock = os.open(folder / "lock", os.O_RDONLY | os.O_CLOEXEC)
        try:
            fcntl.flock(lock, fcntl.LOCK_SH)
        finally:
            os.close(lock)
    while is_running(folder):  # the lock file was deleted, so the lock above was another one
        time.sleep(0.1)


def kill(folder: Path, *, patience_s: float = 10.0) -> bool:
    """Kill all processes of an attempt and their descendants. Safe to repeat.

    Returns: whether they have ended within `patience_s` seconds.
    """
    deadline_s = time.monotonic() + patience_s
    used: set[int] = set()
    while is_running(folder):
        # SIGUSR1 first: the shim then kills its children itself and writes exit.json. A shim that hangs gets SIGKILL.
        number = signal.SIGUSR1 if time.monotonic() < deadline_s - patience_s / 2 else signal.SIGKILL
        if number not in used and (shim := _own_shim_pid(folder)):
            with contextlib.suppress(ProcessLookupError):
                os.kill(shim, number)
            used.add(number)  # once each, although this loop turns every 20 ms
        if time.monotonic() > deadline_s:
            return False
        time.sleep(0.02)
    return attempt_processes.terminate_attempt(folder)


def records(folder: Path, ranks: int, deferred_files: DeferredFiles = NO_FILES) -> list[RankRecord]:
    """The records that the ranks left at their ends; a rank that was killed has left none."""
    contents = ((rank, _read(folder / f"rank{rank}.status.json", deferred_files)) for rank in range(ranks))
    records = (_record(rank, content) for rank, content in contents if content)
    return [record for record in records if record]


def _record(rank: int, content: Mapping[str, Any]) -> RankRecord | None:
    """The record in a status file; None if the content is not one. The script can write to this folder, too."""
    error = content.get("error", {})
    try:
        fields = {**error, **content, "rank": rank, "error_type": error.get("type", "")}
        trouble = fields.pop("trouble", None)
        record = from_dict(RankRecord, fields)
        return replace(
            record,
            outcome=RankOutcome(record.outcome),
            code=RankError(record.code) if record.code in set(RankError) else RankError.OTHER,  # another version's
            trouble=from_dict(HealthIssue, trouble) if trouble else None,
        )
    except (ProtocolError, TypeError, AttributeError, ValueError):
        return None


def describe_exit(folder: Path, deferred_files: DeferredFiles = NO_FILES) -> str:
    """How torchrun ended, as text for the user."""
    status = _numbers(folder / "exit.json", deferred_files).get("status")
    if status is None:
        return "the shim was killed"
    if status < 0:
        names = {number.value: number.name for number in signal.Signals}  # real-time signals have none
        return f"torchrun was ended by {names.get(-status, f'signal {-status}')}"
    return SUCCESS if status == 0 else f"torchrun ended with {status}"


def kernel_kills(folder: Path, deferred_files: DeferredFiles = NO_FILES) -> int:
    """Number of processes in the attempt's control group that the kernel's OOM killer has killed during the attempt."""
    return _numbers(folder / "exit.json", deferred_files).get("kernel_kills", 0)


def was_sigkilled(folder: Path, deferred_files: DeferredFiles = NO_FILES) -> bool:
    """Whether SIGKILL ended torchrun, or a rank according to torchrun's log."""
    if _numbers(folder / "exit.json", deferred_files).get("status") == -signal.SIGKILL:
        return True
    # A rank's signal is only in torchrun's log, as `exitcode : -9` or `Signal 9 (SIGKILL)`: torchrun itself exits with 1 then.
    try:
        return bool(re.search(r"exitcode\s*: -9\b|Signal 9 ", (folder / "torchrun.log").read_text(errors="replace")))
    except OSError:
        return False


def _numbers(path: Path, deferred_files: DeferredFiles = NO_FILES) -> dict[str, int]:
    """The integers in a file of the shim: shim.json, or exit.json (`status`, `kernel_kills`). Anything else is ignored."""
    content = _read(path, deferred_files) or {}
    return {name: value for name, value in content.items() if isinstance(value, int)}


def write_deferred_file(folder: Path, name: str, content: dict[str, Any]) -> None:
    """Write a file that an attempt's process could not write. Dropped if it never can be, as when the folder was deleted.

    Raises: DiskUnwritable to try again later.
    """
    try:
        write_json(folder / name, content)
    except OSError as error:
        if error.errno in UNWRITABLE:
            raise DiskUnwritable(str(error)) from None


def _read(path: Path, deferred_files: DeferredFiles = NO_FILES) -> dict[str, Any] | None:
    """The JSON object in a file, or what was deferred in its place; None without one."""
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError):
        return deferred_files.get(path.name)
    return content if isinstance(content, dict) else None
