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
        every: steps between two saves, where the peer asks for a number; 0: none by steps.
        wall_s: seconds until the session is killed; None where nobody is told.
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


JIT_LEAD_S, JIT_WAIT_S = 3.0, 0.2
"""SIGTERM so long before the wall: 2 s were enough for 150 MB each time, 1 s was not; and how long Transformers waits then."""


def _by_the_clock(script: str, *more: str) -> Callable[[Job], list[str]]:
    return lambda job: torchrun(script, job, *more, *(["--wall", f"{job.wall_s:g}"] if job.wall_s else []))


def _lightning(job: Job) -> list[str]:
    return torchrun("lightning_trainer.py", job, *(["--timer", f"{job.wall_s:g}"] if job.wall_s else []))


def _warned(job: Job) -> list[str]:
    """A platform that sends SIGTERM before it kills, as the just-in-time checkpoint needs."""
    command = torchrun("transformers_trainer.py", job, "--jit", f"{JIT_WAIT_S:g}")
    return ["timeout", "--signal=TERM", f"{job.wall_s - JIT_LEAD_S:g}s", *command] if job.wall_s else command


PLAIN = Peer(
    "torch", "plain DDP under torchrun; it neither saves nor resumes", lambda job: torchrun("ddp.py", job, "--never")
)
"""The yardstick."""

DDP_ADVICE = "https://docs.pytorch.org/tutorials/beginner/ddp_series_fault_tolerance.html"
DCP_ADVICE = "https://docs.pytorch.org/tutorials/recipes/distributed_async_checkpoint_recipe.html"
LOADER_ADVICE = "https://pytorch.org/data/0.11/stateful_dataloader_tutorial.html"
DLROVER_ADVICE = "https://github.com/intelligent-machine-learning/dlrover/blob/master/docs/blogs/flash_checkpoint.md"
TIMER_ADVICE = "https://github.com/Lightning-AI/pytorch-lightning/issues/10226"
LIGHTNING_ADVICE = "https://lightning.ai/docs/pytorch/stable/api/lightning.pytorch.plugins.io.AsyncCheckpointIO.html"
TRANSFORMERS_ADVICE = "https://huggingface.co/docs/transformers/main_classes/trainer"

CLOCK = "none by steps; one after 20 steps is timed, and a last one begins twice its seconds + 0.5 s before the wall"
"""Saves of those that the script itself ends in time."""

AT_A_WALL: dict[str, Peer] = {
    "kgorch": Peer("kgorch", "`kgorch start`, the plan tells the wall and nothing else", kgorch),
    "torch.save by the clock": Peer(
        "torch", f"rank 0, written aside, renamed; {CLOCK} ({DDP_ADVICE})", _by_the_clock("ddp.py")
    ),
    "torch.save + StatefulDataLoader by the clock": Peer(
        "torchdata", f"the same, and each rank's loader goes on at the exact sample ({LOADER_ADVICE})",
        _by_the_clock("ddp.py", "--stateful"),
    ),
    "DCP async_save by the clock": Peer(
        "torch", f"DefaultStager kept, gloo group of its own, thread, plans cached; {CLOCK} ({DCP_ADVICE})", _by_the_clock("dcp.py")
    ),
    "Lightning": Peer(
        "pytorch-lightning",
        f"a Timer that forgets earlier sessions, then save_checkpoint; {CLOCK}, 0.5 s more for the end of fit ({TIMER_ADVICE})",
        _lightning,
    ),
    "Transformers, just in time": Peer(
        "transformers",
        f"enable_jit_checkpoint, kill_wait {JIT_WAIT_S:g} s, SIGTERM {JIT_LEAD_S:g} s before the wall; newest whole folder loaded "
        f"({TRANSFORMERS_ADVICE})",
        _warned,
    ),
}  # fmt: skip
"""For sessions whose end all are told."""

AT_A_DEATH: dict[str, Peer] = {
    "kgorch": Peer("kgorch", "`kgorch start`, the plan tells nothing of an end", kgorch),
    "torch.save every N": Peer(
        "torch", f"rank 0, written aside, renamed ({DDP_ADVICE})", lambda job: torchrun("ddp.py", job)
    ),
    "DCP async_save every N": Peer(
        "torch", f"DefaultStager kept, gloo group of its own, thread, plans cached ({DCP_ADVICE})",
        lambda job: torchrun("dcp.py", job),
    ),
    "DLRover flash checkpoint every N": Peer(
        "dlrover", f"DdpCheckpointer, StorageType.DISK ({DLROVER_ADVICE})", lambda job: torchrun("dlrover_flash.py", job)
    ),
    "Lightning every N": Peer(
        "pytorch-lightning",
        f"ModelCheckpoint(every_n_train_steps=N, save_top_k=2), AsyncCheckpointIO, newest file loaded ({LIGHTNING_ADVICE})",
        _lightning,
    ),
    "Transformers every N": Peer(
        "transformers", f"save_steps=N, save_total_limit=2, newest whole folder loaded ({TRANSFORMERS_ADVICE})",
        lambda job: torchrun("transformers_trainer.py", job),
    ),
}  # fmt: skip
"""For sessions whose end nobody is told."""


def version(peer: Peer) -> str | None:
    """None where it is not installed."""
    try:
        return importlib.metadata.version(peer.needs)
    except importlib.metadata.PackageNotFoundError:
        return None
