"""Where the ranks of an attempt stand: their stacks, written into the attempt's folder, rankK.stacks.

Each rank writes its own from C at SIGUSR2 (worker/entry.py); py-spy adds what it sees from outside, where it is installed (the
extra `diagnose`) and the kernel allows it. It reads memory and does not pause the rank: of a stopped one it cannot. A stopped
rank that nobody can read is woken once all others have been seen; it is about to be killed. All of it is bounded.
"""

from __future__ import annotations

import contextlib
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

from orchestrator.launch import launcher

DUMP_S, SPY_S, ALL_S = 3.0, 5.0, 12.0
_FAULTHANDLER = re.compile(r'^  File "(.+)", line (\d+) in (.+)$', re.M)
_PY_SPY = re.compile(r"^    (\S+) \((.+):(\d+)\)$", re.M)
_OURS_OR_LIBRARIES = ("/site-packages/", "/orchestrator/", "<frozen", f"{Path(os.__file__).parent}/")
_WAITS = (
    "/torch/distributed/",
    "/torch/autograd/",
    "/torch/cuda/streams.py",
    "/torch/cuda/__init__.py:synchronize",
    "/torch/amp/grad_scaler.py",
    "/worker/board.py",
    "/worker/health.py",
    "/worker/host_copy.py",
    "/worker/image.py",
    "/worker/metrics.py",
)
"""Where a rank waits for another one, as path:function. On CUDA it does so in whatever waits for the device, whose stream stands
in a collective: an event or a stream, the GradScaler's look at its gradients, the copy of a loss, a figure or a snapshot. A bare
`.item()` or `.cpu()` in a person's code waits in the same way, and its stack is that of work: the rank that is named may be a
victim."""


@dataclass(frozen=True, slots=True)
class Frame:
    path: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{Path(self.path).name}:{self.line} in {self.function}"

    @property
    def is_persons(self) -> bool:
        return not any(part in self.path for part in _OURS_OR_LIBRARIES)


@dataclass(frozen=True, slots=True)
class Stack:
    """Of a rank's main thread, innermost first; without frames, nobody could tell. `state`: of the process, as psutil names it."""

    rank: int
    state: str
    frames: tuple[Frame, ...] = ()

    @property
    def waits_for_others(self) -> bool:
        return any(part in f"{frame.path}:{frame.function}" for frame in self.frames for part in _WAITS)

    def __str__(self) -> str:
        """The innermost frame of the person's own code, and what it calls."""
        said = [f"process is {self.state}"] if self.state not in (psutil.STATUS_SLEEPING, psutil.STATUS_RUNNING) else []
        own = next((frame for frame in self.frames if frame.is_persons), None)
        said += [str(frame) for frame in dict.fromkeys((own, *self.frames[:1])) if frame]
        return ", ".join(said) or "no stack"


def collect(folder: Path, ranks: int) -> list[Stack]:
    """In a thread of its own: it takes up to ALL_S and a little."""
    until_s, pids = time.monotonic() + ALL_S, _pids(folder)
    states = {rank: _state(pids.get(rank)) for rank in range(ranks)}
    for rank, pid in pids.items():
        _head(_file(folder, rank), f"rank {rank}, pid {pid}, {states[rank]}")
    stopped = {rank for rank, state in states.items() if state in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)}
    texts = _dumped(folder, {rank: pid for rank, pid in pids.items() if rank not in stopped})
    spied = {rank: _spied(_file(folder, rank), pid, until_s) for rank, pid in pids.items()}
    for rank in stopped:
        if not spied.get(rank):
            texts |= _dumped(folder, {rank: pids[rank]}, wake=True)
    return [
        Stack(rank, states[rank], frames_of_dump(texts.get(rank, "")) or frames_of_spy(spied.get(rank, "")))
        for rank in range(ranks)
    ]


def dumped(folder: Path, ranks: int, timeout_s: float) -> list[Stack]:
    """Where ranks stand that can tell it themselves within so long; those that have not come so far say nothing."""
    pids = {rank: pid for rank, pid in _pids(folder).items() if rank < ranks and _file(folder, rank).exists()}
    texts = _dumped(folder, pids, timeout_s=min(timeout_s, DUMP_S)) if pids else {}
    return [Stack(rank, _state(pids[rank]), frames_of_dump(text)) for rank, text in sorted(texts.items())]


def culprit(stacks: Iterable[Stack]) -> Stack | None:
    """The rank for which the others wait, as far as stacks tell: one that is stopped or gone, else one that waits for none."""
    usual = (psutil.STATUS_SLEEPING, psutil.STATUS_RUNNING)
    return min(stacks, key=lambda stack: (stack.state in usual, stack.waits_for_others, stack.rank), default=None)


def frames_of_dump(text: str) -> tuple[Frame, ...]:
    """The main thread's frames out of what faulthandler wrote; it is the one that ran the entry."""
    for thread in re.split(r"\n\s*\n|^(?=Thread |Current thread )", text, flags=re.M):
        frames = tuple(Frame(path, int(line), function) for path, line, function in _FAULTHANDLER.findall(thread))
        if frames and frames[-1].function == "_run_module_as_main":
            return frames
    return ()


def frames_of_spy(text: str) -> tuple[Frame, ...]:
    """The same out of py-spy's words."""
    for thread in re.split(r"^(?=Thread )", text, flags=re.M):
        if '"MainThread"' in thread.partition("\n")[0]:
            return tuple(Frame(path, int(line), function) for function, path, line in _PY_SPY.findall(thread))
    return ()


def _pids(folder: Path) -> dict[int, int]:
    """The ranks' processes, as far as they live."""
    found = {}
    with contextlib.suppress(psutil.Error):
        for child in psutil.Process(launcher.torchrun_of(folder)).children():
            with contextlib.suppress(psutil.Error, ValueError):
                found[int(child.environ().get("RANK", ""))] = child.pid
    return found


def _state(pid: int | None) -> str:
    try:
        return str(psutil.Process(pid).status()) if pid else "gone"
    except psutil.Error:
        return "gone"


def _dumped(folder: Path, pids: Mapping[int, int], *, wake: bool = False, timeout_s: float = DUMP_S) -> dict[int, str]:
    """Have the ranks write their stacks, and wait for them."""
    begins = {rank: _file(folder, rank).stat().st_size for rank in pids}
    for pid in pids.values():
        if _catches(pid, signal.SIGUSR2):  # else it would die of it
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGUSR2)
                if wake:
                    os.kill(pid, signal.SIGCONT)
    until_s, texts = time.monotonic() + timeout_s, dict[int, str]()
    while time.monotonic() < until_s:
        time.sleep(0.05)
        before, texts = texts, {rank: _text(_file(folder, rank), begins[rank]) for rank in pids}
        if texts == before and all(map(frames_of_dump, texts.values())):
            break
    return texts


def _catches(pid: int, number: int) -> bool:
    try:
        caught = re.search(r"^SigCgt:\s*([0-9a-f]+)", Path(f"/proc/{pid}/status").read_text(), re.M)
    except OSError:
        return False
    return caught is not None and bool(int(caught[1], 16) >> (number - 1) & 1)


def _spied(path: Path, pid: int, until_s: float) -> str:
    spy = shutil.which("py-spy", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]))
    left_s = min(SPY_S, until_s - time.monotonic())
    if spy is None or left_s <= 0:
        return ""
    try:
        done = subprocess.run(
            [spy, "dump", "--nonblocking", "--full-filenames", "--pid", str(pid)],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=left_s,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        _head(path, f"py-spy: {error}")
        return ""
    _head(path, "py-spy")
    with open(path, "a") as file:
        file.write(done.stdout if done.returncode == 0 else done.stderr)
    return done.stdout if done.returncode == 0 else ""


def _file(folder: Path, rank: int) -> Path:
    return folder / f"rank{rank}.stacks"


def _head(path: Path, what: str) -> None:
    with open(path, "a") as file:
        file.write(f"\n── {datetime.now(UTC).isoformat(timespec='seconds')} {what}\n")


def _text(path: Path, begin: int) -> str:
    with open(path, errors="replace") as file:
        file.seek(begin)
        return file.read()
