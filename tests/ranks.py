"""Real ranks of one attempt with a keeper, and no supervisor around them: what they print, and what they saved last."""

from __future__ import annotations

import contextlib
import os
import random
import socket
from pathlib import Path
from typing import Any

import forked_ranks
from harness import PROGRAMS
from safetensors.numpy import load_file
from saving import Place

from kgorch.checkpoint.folder import readable_checkpoints
from kgorch.core.memory.memory_ladder import Settings
from kgorch.protocol import transport
from kgorch.protocol.launch_spec import BOARD_VARIABLE, LAUNCH_VARIABLE, LaunchSpec
from kgorch.worker.ranks.consensus_board import size


def free_port() -> int:
    """A port that nobody listens at, below those that Linux gives to connections: one of those may be taken a moment later."""
    while True:
        port = random.SystemRandom().randint(10_000, 32_000)
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port


class Attempt:
    """`lines`: of a rank's log. `weights`: bytes by name, of the final checkpoint."""

    def __init__(self, folder: Path, codes: list[int]) -> None:
        self.folder, self.codes = folder, codes

    def lines(self, rank: int = 0, *, starting: str = "") -> list[str]:
        return [
            line for line in (self.folder / f"rank{rank}.log").read_text().splitlines() if line.startswith(starting)
        ]

    @property
    def weights(self) -> dict[str, bytes]:
        newest = next(readable_checkpoints(self.folder / "checkpoints" / "train"))
        assert newest[1].final
        found = {}
        for shard in sorted(newest[0].glob("*.safetensors")):
            found |= {name: array.tobytes() for name, array in load_file(shard).items()}
        return found

    def said(self) -> str:
        return "\n".join(f"── rank {rank}\n" + "\n".join(self.lines(rank)[-30:]) for rank in range(len(self.codes)))


def run(
    folder: Path,
    program: str,
    ranks: int = 2,
    args: dict[str, Any] | None = None,
    *,
    settings: Settings | None = None,
    timeout_s: float = 140,  # two of them are less than half of a test's 600 s
    **launched: Any,
) -> Attempt:
    """A program of tests/programs under ranks of torch.distributed, to its end."""
    folder.mkdir(parents=True, exist_ok=True)
    place = Place(folder)
    place.page.write_bytes(b"\0" * size(ranks))
    place.start_keeper()
    launch = LaunchSpec(
        run="r", run_id="id", stage="train", attempt="1.1", folder=str(folder), entry=program, args=args or {},
        workdir=str(PROGRAMS), ranks=ranks, socket=str(folder / "nobody.sock"), checkpoints=str(place.root),
        output=str(folder / "outputs"), plan_hash="", keeper=str(folder / "keeper.sock"),
        settings=(settings or Settings()).as_dict(), **launched,
    )  # fmt: skip
    told = {LAUNCH_VARIABLE: str(launch.write()), BOARD_VARIABLE: str(place.page), **forked_ranks.THREADS}
    told |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(ranks)}
    held = transport.connect(
        folder / "keeper.sock"
    )  # a keeper that nobody has come to for 20 s ends: ranks may start as slowly
    started = [
        forked_ranks.popen({**os.environ, **told, "RANK": str(rank), "LOCAL_RANK": str(rank)}) for rank in range(ranks)
    ]
    try:
        codes = [process.wait(timeout_s) for process in started]
    finally:
        for process in started:
            process.kill()
        held.close()
        place.kill_keeper()
    return Attempt(folder, codes)
