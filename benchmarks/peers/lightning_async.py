"""Lightning's AsyncCheckpointIO, the plugin called as its Trainer calls it on rank 0; it clones the state, then a thread saves it.

The flush is ours, in its thread.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytorch_lightning
from pytorch_lightning.plugins.io import AsyncCheckpointIO, TorchCheckpointIO

from peers import Training, emptied, flushed


class _Flushed(TorchCheckpointIO):
    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        super().save_checkpoint(checkpoint, path, storage_options)
        flushed(Path(path))


class Saving:
    version = pytorch_lightning.__version__
    setting = "AsyncCheckpointIO(TorchCheckpointIO()), rank 0"
    lacks = "no hash; one rank writes for all; no flush of its own; fresh host memory at each save"

    def __init__(self, training: Training) -> None:
        self._training = training
        self._io = AsyncCheckpointIO(_Flushed())

    def save(self, step: int) -> None:
        if self._training.rank == 0:
            self._io.save_checkpoint(self._training.state(), str(self._training.folder / f"{step}.ckpt"))

    def wait(self) -> None:
        if self._io._executor:
            self._io._executor.submit(lambda: None).result()  # its one thread has done what came before
        if self._io._error:
            raise self._io._error

    def tidy(self) -> None:
        if self._training.rank == 0:
            emptied(self._training.folder)

    def close(self) -> None:
        self._io.teardown()
