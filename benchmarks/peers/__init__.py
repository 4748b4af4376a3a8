"""Ways of saving, each in a file of its own: ours, and the peers in the best setting that their documentation names.

All save the same training's state in the same processes. Durable means here, for all of them: flushed to disk, under
the final name, and `wait` returned on every rank. What a peer leaves out by itself (a flush, a rename) its file adds,
beside the training where the peer writes beside it; what it does not do at all stands in `lacks`.
"""

from __future__ import annotations

import importlib
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

NAMES = {
    "kgorch": "ours",
    "torch.save": "torch_save",
    "dcp.save": "dcp_save",
    "dcp.async_save": "dcp_async",
    "Lightning AsyncCheckpointIO": "lightning_async",
    "DLRover flash checkpoint": "dlrover_flash",
}
"""What the tables call it → its module. Each has a class `Saving`, made of a Training."""


@dataclass(frozen=True, slots=True)
class Training:
    """What a way saves: `state()` gives the state_dicts of model and optimizer; `folder` is the way's own."""

    rank: int
    world: int
    session: Any
    state: Callable[[], dict[str, Any]]
    folder: Path


class Way(Protocol):
    """Attributes: version, setting: for the page. lacks: what it does not do that the others do, else ""."""

    version: str
    setting: str
    lacks: str

    def save(self, step: int) -> None:
        """On all ranks, between two steps; the training goes on when it returns. The blocking part."""

    def wait(self) -> None:
        """Until the last save is durable."""

    def tidy(self) -> None:
        """Delete what was saved. Not measured."""

    def close(self) -> None: ...


def module(name: str) -> Any:
    """Raises ImportError where the peer is not installed, or does not fit this PyTorch."""
    return importlib.import_module(f"peers.{NAMES[name]}")


def flushed(path: Path) -> None:
    """Flush a file that its writer has only closed."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def emptied(folder: Path) -> Path:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder
