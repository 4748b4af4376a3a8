"""One training, written for kgorch and for its peers: each in a file of its own, in the best setting that its documentation names.

All train the same network on the same data (training.py), two gloo ranks, the same batches a step, without a logger or a progress
bar. All but kgorch are started by torchrun; what else a peer is started with stands here, with its setting in words.
benchmarks/goodput.py cuts them at walls, benchmarks/recovery.py breaks them.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

RANKS = 2


@dataclass(frozen=True, slots=True)
class Job:
    """What a session of a peer is told.

    Attributes:
        folder: its own; what lies in it outlives sessions.
        every: steps between two saves, where the peer asks for a number.
        wall_s: seconds until the session is killed; None without a wall.
    """

    folder: Path
    size: str
    every: int
    wall_s: float | None = None


def torchrun(script: str, job: Job, *more: str, options: Sequence[str] = (), runner: str = "torchrun") -> list[str]:
    command = [str(Path(sys.executable).with_name(runner)), "--standalone", f"--nproc-per-node={RANKS}", *options]
    words = ["--folder", str(job.folder), "--size", job.size, "--every", str(job.every), *more]
    return [*command, str(Path(__file__).with_name(script)), *words]


def kgorch(job: Job, **health: str) -> list[str]:
    """What the plan leaves out is the default. health: keys of that part, as TOML."""
    plan = job.folder / "plan.toml"
    lines = [
        'name = "bounded"', "[[stage]]", 'name = "train"', 'entry = "bounded.ours:main"', f"ranks = {RANKS}",
        f'args = {{ size = "{job.size}" }}',
    ]  # fmt: skip
    if job.wall_s:
        lines += ["[session]", f'wall = "{job.wall_s:g}s"']
    if health:
        lines += ["[health]", *(f"{key} = {value}" for key, value in health.items())]
    plan.write_text("\n".join(lines) + "\n")
    return [sys.executable, "-m", "kgorch.cli", "start", str(plan)]


@dataclass(frozen=True, slots=True)
class Peer:
    """Attributes:
    needs: the package that must be there, and whose version is told.
    setting: for the page.
    """

    needs: str
    setting: str
    command: Callable[[Job], list[str]]


JIT_LEAD_S = 7.0
"""Before the wall: Transformers waits 3 s after the signal, then saves; torchrun takes its time to end."""


def _warned(job: Job) -> list[str]:
    """A platform that sends SIGTERM before it kills, as the just-in-time checkpoint needs."""
    command = torchrun("transformers_trainer.py", job, "--jit")
    return ["timeout", "--signal=TERM", f"{job.wall_s - JIT_LEAD_S:g}s", *command] if job.wall_s else command


def _lightning_timed(job: Job) -> list[str]:
    return torchrun("lightning_trainer.py", job, "--timer", f"{job.wall_s or 1e6:g}")


def _lightning_tuned(job: Job) -> list[str]:
    return torchrun("lightning_trainer.py", job, "--timer", f"{job.wall_s or 1e6:g}", "--tuned")


PEERS: dict[str, Peer] = {
    "kgorch": Peer("kgorch", "`kgorch start`, the plan tells the wall and nothing else", kgorch),
    "DDP, torch.save each epoch": Peer(
        "torch", "rank 0, written aside, renamed", lambda job: torchrun("ddp.py", job, "--each-epoch")
    ),
    "DDP, torch.save every N steps": Peer(
        "torch", "rank 0, written aside, renamed", lambda job: torchrun("ddp.py", job)
    ),
    "DDP, torch.save by the clock": Peer(
        "torch",
        "every N, and a last save 2 s before the wall that the script is told",
        lambda job: torchrun("ddp.py", job, *(["--wall", f"{job.wall_s:g}"] if job.wall_s else [])),
    ),
    "Lightning, Timer": Peer(
        "pytorch-lightning", "Timer(duration=wall), ModelCheckpoint(train_time_interval=15 s), ckpt_path", _lightning_timed
    ),
    "Lightning, tuned": Peer(
        "pytorch-lightning",
        "ModelCheckpoint every N steps; a Timer that forgets earlier sessions ends 3 s before the wall; save_checkpoint after fit",
        _lightning_tuned,
    ),
    "Transformers, save_steps": Peer(
        "transformers",
        "save_steps=N, resume_from_checkpoint=True",
        lambda job: torchrun("transformers_trainer.py", job),
    ),
    "Transformers, just in time": Peer(
        "transformers", f"the same and enable_jit_checkpoint; SIGTERM {JIT_LEAD_S:.0f} s before the wall", _warned
    ),
    "DCP, async_save every N steps": Peer(
        "torch", "DefaultStager kept, gloo group of its own, thread", lambda job: torchrun("dcp.py", job)
    ),
    "DLRover flash checkpoint": Peer(
        "dlrover", "DdpCheckpointer, StorageType.DISK every N steps", lambda job: torchrun("dlrover_flash.py", job)
    ),
}  # fmt: skip


def version(peer: Peer) -> str | None:
    """None where it is not installed."""
    try:
        return importlib.metadata.version(peer.needs)
    except importlib.metadata.PackageNotFoundError:
        return None
