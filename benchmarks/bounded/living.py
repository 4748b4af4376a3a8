"""Start a session with all its processes, watch its marks, and end it as a platform does: SIGKILL of everything, memory gone."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import psutil

HERE = Path(__file__).resolve().parents[1]
PR_SET_CHILD_SUBREAPER = 36


class Step(NamedTuple):
    """A step that is done: `at_s`, monotonic; `loss`: 0 where the peer does not tell it."""

    number: int
    at_s: float
    loss: float


@dataclass(frozen=True, slots=True)
class Life:
    """One process of a rank; `began_s`: monotonic, when it knew how far the training was."""

    resumed: int
    began_s: float
    pid: int
    steps: Sequence[Step]


@dataclass
class Session:
    """A started session. `folder`: the peer's own, which outlives sessions; `marks`: of this one. `began_at`: since 1970."""

    folder: Path
    marks: Path
    env: dict[str, str]
    process: subprocess.Popen[bytes]
    began_s: float
    began_at: float
    ended_s: float | None = None
    shared: set[str] = field(default_factory=set)

    def is_over(self) -> bool:
        """Nothing of it runs any more."""
        if self.process.poll() is None or _below():
            return False
        self.ended_s = self.ended_s or time.monotonic()
        return True

    def watch(self, until: Callable[[], bool], wall_s: float) -> bool:
        """Until that is true; False when the session ended or `wall_s` since its beginning have passed before."""
        looked = 0
        while not until():
            left_s = self.began_s + wall_s - time.monotonic()
            looked += 1
            if left_s <= 0 or (looked % 10 == 0 and self.is_over()):
                return False
            time.sleep(min(0.02, left_s))
        return True

    def kill(self) -> None:
        """SIGKILL of everything, those first that would start others again; what only memory held goes, too."""
        while below := _below():
            for process in below:
                with contextlib.suppress(OSError, psutil.Error):
                    self.shared |= {name for name in _mapped(process.pid) if name.startswith("/dev/shm/")}
                    process.send_signal(signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass
        self.process.returncode = self.process.returncode if self.process.returncode is not None else -signal.SIGKILL
        for name in self.shared:
            Path(name).unlink(missing_ok=True)

    def lives(self, rank: int = 0) -> list[Life]:
        return lives(self.marks.with_name(f"{self.marks.name}.{rank}"))

    def said(self) -> str:
        """Last words."""
        logs = [self.marks.with_suffix(".log"), *sorted(self.folder.glob("home/**/rank*.log"))]
        return "\n".join(path.read_text(errors="replace")[-1500:] for path in logs)


@contextlib.contextmanager
def started(command: Sequence[str], folder: Path, marks: Path, **env: str) -> Iterator[Session]:
    """All that runs below this process at the end is killed.

    Raises: RuntimeError where this process has children already: they would be killed, too.
    """
    if others := _below():
        raise RuntimeError(f"{others} would be killed with the session: start it from a process of its own")
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)  # so that all it starts stays below us, whoever dies
    paths = [str(HERE), str(HERE.parent), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    tmp = marks.with_suffix(".tmp")  # a new machine's is empty
    tmp.mkdir(parents=True)
    told = {
        **os.environ, "KGORCH_HOME": str(folder / "home"), "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths),
        "BOUNDED_MARKS": str(marks), "TMPDIR": str(tmp), **env,
    }  # fmt: skip
    with open(marks.with_suffix(".log"), "wb") as log:
        began_s, began_at = time.monotonic(), time.time()
        process = subprocess.Popen(
            command, cwd=folder, env=told, stdout=log, stderr=log, stdin=subprocess.DEVNULL, start_new_session=True
        )
    session = Session(folder, marks, told, process, began_s, began_at)
    try:
        yield session
    finally:
        session.kill()


def lives(path: Path) -> list[Life]:
    """What a file of marks tells; a line that a kill has torn is left out."""
    found: list[Life] = []
    for line in path.read_text().splitlines(keepends=True) if path.exists() else []:
        words = line.split()
        if not line.endswith("\n"):
            continue
        if words[0] == "begin":
            found.append(Life(int(words[1]), float(words[2]), int(words[3]), []))
        else:
            steps = found[-1].steps
            assert isinstance(steps, list)
            steps.append(Step(int(words[0]), float(words[1]), float(words[2]) if len(words) > 2 else 0.0))
    return found


def _below() -> list[psutil.Process]:
    """What runs below this process, parents first."""
    alive = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if process.status() != psutil.STATUS_ZOMBIE:
                alive.append(process)
    return alive


def _mapped(pid: int) -> set[str]:
    lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    return {words[5] for line in lines if len(words := line.split(maxsplit=5)) == 6}
