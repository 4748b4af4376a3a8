"""Stack dumps of the ranks of an attempt, in the attempt's folder as rankK.stacks.

At SIGUSR2 each rank writes its own stack, from C, which needs no Python lock (worker/entry.py). py-spy adds what it sees from
outside, where it is installed (the extra `diagnose`) and the kernel allows it. It reads memory and does not pause the rank; a
stopped rank it cannot read. Such a rank is woken to write its own, after all others have been dumped, because it is about to be
killed. Each step has a time limit.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import psutil

from kgorch.launch import launcher
from kgorch.system.process_identity import rank_of

DUMP_S, SPY_S, ALL_S = 3.0, 5.0, 12.0
"""Time limits in seconds: for the dumps that ranks write, for py-spy on one rank, and for py-spy on all."""

_FAULTHANDLER = re.compile(r'^  File "(.+)", line (\d+) in (.+)$', re.M)
_PY_SPY = re.compile(r"^    (\S+) \((.+):(\d+)\)$", re.M)
_LIBRARIES = ("/site-packages/", "<frozen", f"{Path(os.__file__).parent}/")
_PACKAGE = f"{Path(__file__).parents[1]}/"
"""The folder of kgorch. Not the word alone: a person's project may lie in a folder named kgorch."""
_WAITS = (
    "/torch/distributed/",
    "/torch/autograd/",
    "/torch/cuda/streams.py",
    "/torch/cuda/__init__.py:synchronize",
    "/torch/amp/grad_scaler.py",
    "/worker/ranks/consensus_board.py",
    "/worker/health/loss_guard.py",
    "/worker/telemetry/host_copy.py",
    "/worker/checkpoint/snapshot_buffer.py",
    "/worker/telemetry/reported_metrics.py",
)
"""Where a rank waits for another one, as parts of path:function.

On CUDA a rank waits wherever it waits for the device, whose stream is in a collective: for an event or a stream, in the
GradScaler's check of gradients, in the copy of a loss, a metric or a snapshot. A bare `.item()` or `.cpu()` in the user's code
waits in the same way and cannot be told from work: then the rank that is named may wait itself.
"""


@dataclass(frozen=True, slots=True)
class Frame:
    """A call in a stack, in the terms of a traceback."""

    path: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{Path(self.path).name}:{self.line} in {self.function}"

    @property
    def is_user_code(self) -> bool:
        """Whether the file is neither ours nor of a library."""
        if any(part in self.path for part in _LIBRARIES):
            return False
        # the reference trainings are in the package, but they are the code that is trained
        return not self.path.startswith(_PACKAGE) or self.path.startswith(f"{_PACKAGE}workloads/")


@dataclass(frozen=True, slots=True)
class Stack:
    """The stack of a rank's main thread.

    Attributes:
        state: of the process, as psutil names it; "gone" when there is none.
        frames: innermost first; empty where neither the rank nor py-spy gave any.
    """

    rank: int
    state: str
    frames: tuple[Frame, ...] = ()

    @property
    def waits_for_others(self) -> bool:
        """Whether a frame is one in which a rank waits for other ranks (`_WAITS`)."""
        # a rank is a fork of torchrun, whose frames stand below those of our entry
        frames = itertools.takewhile(lambda frame: not frame.path.endswith("/worker/entry.py"), self.frames)
        return any(part in f"{frame.path}:{frame.function}" for frame in frames for part in _WAITS)

    def __str__(self) -> str:
        """The innermost frame of the user's own code, and the innermost of all."""
        parts = (
            [f"process is {self.state}"] if self.state not in (psutil.STATUS_SLEEPING, psutil.STATUS_RUNNING) else []
        )
        own = next((frame for frame in self.frames if frame.is_user_code), None)
        parts += [str(frame) for frame in dict.fromkeys((own, *self.frames[:1])) if frame]
        return ", ".join(parts) or "no stack"


def collect(folder: Path, ranks: Iterable[int], own_folder: Path | None = None) -> list[Stack]:
    """Dump the stacks of this machine's ranks. Called on a thread of its own: it takes up to ALL_S and DUMP_S seconds.

    Args:
        folder: of the attempt. own_folder: of this node's shim; None for the same.
    """
    until_s, pids = time.monotonic() + ALL_S, _pids(own_folder or folder)
    states = {rank: _state(pids.get(rank)) for rank in ranks}
    for rank, pid in pids.items():
        _write_heading(_file(folder, rank), f"rank {rank}, pid {pid}, {states[rank]}")
    stopped = {rank for rank, state in states.items() if state in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)}
    texts = _request_dumps(folder, {rank: pid for rank, pid in pids.items() if rank not in stopped})
    spy_texts = {rank: _run_py_spy(_file(folder, rank), pid, until_s) for rank, pid in pids.items()}
    for rank in stopped:
        if not spy_texts.get(rank):
            texts |= _request_dumps(folder, {rank: pids[rank]}, wake=True)
    return [
        Stack(rank, states[rank], frames_of_dump(texts.get(rank, "")) or frames_of_spy(spy_texts.get(rank, "")))
        for rank in states
    ]


def collect_own(folder: Path, ranks: int, timeout_s: float) -> list[Stack]:
    """The stacks of the ranks that write their own within `timeout_s`; without those that do not catch the signal yet."""
    pids = {rank: pid for rank, pid in _pids(folder).items() if rank < ranks and _file(folder, rank).exists()}
    texts = _request_dumps(folder, pids, timeout_s=min(timeout_s, DUMP_S)) if pids else {}
    return [Stack(rank, _state(pids[rank]), frames_of_dump(text)) for rank, text in sorted(texts.items())]


def culprit(stacks: Iterable[Stack]) -> Stack | None:
    """The rank for which the others wait, by its stack: one that is stopped or gone, else one that waits for none."""
    usual = (psutil.STATUS_SLEEPING, psutil.STATUS_RUNNING)
    return min(stacks, key=lambda stack: (stack.state in usual, stack.waits_for_others, stack.rank), default=None)


def frames_of_dump(text: str) -> tuple[Frame, ...]:
    """Frames of the main thread, the one that ran the entry, in a dump of faulthandler."""
    for thread in re.split(r"\n\s*\n|^(?=Thread |Current thread )", text, flags=re.M):
        frames = tuple(Frame(path, int(line), function) for path, line, function in _FAULTHANDLER.findall(thread))
        if frames and frames[-1].function == "_run_module_as_main":
            return frames
    return ()


def frames_of_spy(text: str) -> tuple[Frame, ...]:
    """Frames of the main thread in the output of py-spy."""
    for thread in re.split(r"^(?=Thread )", text, flags=re.M):
        if '"MainThread"' in thread.partition("\n")[0]:
            return tuple(Frame(path, int(line), function) for function, path, line in _PY_SPY.findall(thread))
    return ()


def _pids(folder: Path) -> dict[int, int]:
    """Pids of the ranks that live, by rank."""
    pids = {}
    with contextlib.suppress(psutil.Error):
        for child in psutil.Process(launcher.torchrun_pid(folder)).children():
            if (rank := rank_of(child.pid)) is not None:
                pids[rank] = child.pid
    return pids


def _state(pid: int | None) -> str:
    try:
        return str(psutil.Process(pid).status()) if pid else "gone"
    except psutil.Error:
        return "gone"


def _request_dumps(
    folder: Path, pids: Mapping[int, int], *, wake: bool = False, timeout_s: float = DUMP_S
) -> dict[int, str]:
    """Have the ranks write their stacks, and wait for them. Returns the texts by rank; `wake`: stopped ones go on first."""
    begins = {rank: _file(folder, rank).stat().st_size for rank in pids}
    for pid in pids.values():
        if _catches(pid, signal.SIGUSR2):  # the signal kills a process without a handler
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGUSR2)
                if wake:
                    os.kill(pid, signal.SIGCONT)
    until_s, texts = time.monotonic() + timeout_s, dict[int, str]()
    while time.monotonic() < until_s:
        time.sleep(0.05)
        # a dump is complete when it has frames and does not grow any more
        before, texts = texts, {rank: _text(_file(folder, rank), begins[rank]) for rank in pids}
        if texts == before and all(map(frames_of_dump, texts.values())):
            break
    return texts


def _catches(pid: int, number: int) -> bool:
    try:
        mask = re.search(rb"^SigCgt:\s*([0-9a-f]+)", Path(f"/proc/{pid}/status").read_bytes(), re.M)
    except OSError:
        return False
    return mask is not None and bool(int(mask[1], 16) >> (number - 1) & 1)


def _run_py_spy(path: Path, pid: int, until_s: float) -> str:
    """The output of py-spy, which is appended to the file, too; empty where there is none."""
    spy = shutil.which("py-spy", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]))
    left_s = min(SPY_S, until_s - time.monotonic())
    if spy is None or left_s <= 0:
        return ""
    try:
        result = subprocess.run(
            [spy, "dump", "--nonblocking", "--full-filenames", "--pid", str(pid)],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=left_s,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        _write_heading(path, f"py-spy: {error}")
        return ""
    _write_heading(path, "py-spy")
    with open(path, "a") as file:
        file.write(result.stdout if result.returncode == 0 else result.stderr)
    return result.stdout if result.returncode == 0 else ""


def _file(folder: Path, rank: int) -> Path:
    return folder / f"rank{rank}.stacks"


def _write_heading(path: Path, what: str) -> None:
    with open(path, "a") as file:
        file.write(f"\n── {datetime.now(UTC).isoformat(timespec='seconds')} {what}\n")


def _text(path: Path, begin: int) -> str:
    with open(path, errors="replace") as file:
        file.seek(begin)
        return file.read()
