"""A keeper, and ranks that save through it, without a supervisor around them."""

from __future__ import annotations

import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from harness import wait_until

from kgorch.checkpoint.manifest import Manifest, Position
from kgorch.protocol.launch_spec import LaunchSpec
from kgorch.protocol.snapshot_messages import SnapshotInfo
from kgorch.snapshots import keeper_client
from kgorch.worker import rng_state
from kgorch.worker.checkpoint import sharded_tensors, state_codec
from kgorch.worker.checkpoint.snapshot_buffer import share
from kgorch.worker.checkpoint.snapshot_writer import RankSnapshot, SnapshotWriter
from kgorch.worker.ranks.consensus_board import Board, size


class Place:
    """A run's folder with a keeper, and ranks that save there."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.root = folder, folder / "checkpoints" / "train"
        self.page = folder / "board"
        self.page.write_bytes(b"\0" * size(4))
        self.keeper: subprocess.Popen[bytes] | None = None
        self.told: list[object] = []

    def start_keeper(self, *how: str) -> None:
        """`how`: what Python runs."""
        (self.folder / "keeper.sock").unlink(missing_ok=True)
        how = how or ("-m", "kgorch.snapshots.keeper")
        self.keeper = subprocess.Popen([sys.executable, *how, str(self.folder)])
        wait_until((self.folder / "keeper.sock").exists)

    def kill_keeper(self) -> None:
        assert self.keeper
        self.keeper.kill()
        self.keeper.wait()

    def saver(self, rank=0, world=1, attempt="1.1", **options) -> SnapshotWriter:
        launch = LaunchSpec(
            run="r", run_id="id", stage="train", attempt=attempt, folder=str(self.folder), entry="x.py", workdir="/",
            ranks=world, socket="", checkpoints=str(self.root), output="", plan_hash="", snapshot_s=1.0,
            keeper=str(self.folder / "keeper.sock"), **options,
        )  # fmt: skip
        return SnapshotWriter(launch, rank, world, Board(str(self.page), rank, world), self.told.append)

    def newest(self) -> SnapshotInfo | None:
        return keeper_client.newest(self.folder)


def described(step, final=False, ranks=1):
    return Manifest("r", "id", "train", Position(step=step), ranks, "2026-11-20T00:00:00+00:00", final=final)


def save(
    saver: SnapshotWriter, tracked: dict[str, Any], step: int, *, persist=True, slot=None, final=False, ranks=1, rank=0
):
    captured = state_codec.capture(tracked)
    rng = rng_state.capture(torch.device("cpu"))
    mine = share(captured.tensors, captured.own, rank, ranks)
    pieces = sharded_tensors.rank_entry(captured.tensors)
    docs = {f"rank{rank}.json": {"rng": rng, "own": captured.own_tree, "tensors": sorted(mine), **pieces}}
    slot = saver.next_slot() if slot is None else slot
    sharded = bool(sharded_tensors.document_of(captured.tensors))
    manifest = replace(described(step, final, ranks), sharded=sharded)
    snapshot = RankSnapshot(captured, mine, docs, manifest, time.monotonic())
    return saver.save(snapshot, slot=slot, persist=persist)
