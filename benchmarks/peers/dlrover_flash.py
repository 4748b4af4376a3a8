"""DLRover's flash checkpoint: rank 0 copies the state into shared memory, a process of DLRover's writes it.

That process is the one which DLRover starts itself outside of `dlrover-run`. The flush is ours, after it has told of the save.
"""

from __future__ import annotations

import importlib.metadata
import logging
import signal
import time

import torch.distributed as dist

logging.disable(logging.WARNING)
from dlrover.python.common.constants import CheckpointConstant  # noqa: E402
from dlrover.trainer.torch.flash_checkpoint.checkpointer import StorageType  # noqa: E402
from dlrover.trainer.torch.flash_checkpoint.ddp import DdpCheckpointer  # noqa: E402

from peers import Training, emptied, flushed  # noqa: E402

PATIENCE_S = 60.0


class Saving:
    version = importlib.metadata.version("dlrover")
    setting = "DdpCheckpointer, StorageType.DISK"
    lacks = "no hash; one rank writes for all; no flush of its own; pickle"

    def __init__(self, training: Training) -> None:
        self._training, self._step = training, 0
        self._told = training.folder / CheckpointConstant.TRACER_FILE_NAME
        ours = signal.signal(signal.SIGTERM, signal.SIG_DFL)  # its process is forked here and ended by SIGTERM
        try:
            self._checkpointer = DdpCheckpointer(str(training.folder), comm_backend="gloo")
        finally:
            signal.signal(signal.SIGTERM, ours)

    def save(self, step: int) -> None:
        self._step = step
        self._checkpointer.save_checkpoint(step, self._training.state(), storage_type=StorageType.DISK)

    def wait(self) -> None:
        if self._training.rank == 0:
            until = time.monotonic() + PATIENCE_S
            while not self._is_told():
                if time.monotonic() > until:
                    raise TimeoutError(f"DLRover has not told of step {self._step}")
                time.sleep(0.005)
            flushed(self._training.folder / str(self._step) / "rank_0.pt")
        dist.barrier()

    def _is_told(self) -> bool:
        try:
            return self._told.read_text() == str(self._step)
        except FileNotFoundError:
            return False

    def tidy(self) -> None:
        if self._training.rank == 0:
            for entry in self._training.folder.iterdir():
                if entry.is_dir():
                    emptied(entry).rmdir()

    def close(self) -> None:
        self._checkpointer._engine.close()
