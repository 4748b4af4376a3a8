"""torch.distributed.checkpoint.save: the ranks write in parallel, each its share of what all hold alike; its writer flushes."""

from __future__ import annotations

import torch
import torch.distributed.checkpoint as dcp

from peers import Training, emptied


class Saving:
    version = torch.__version__
    setting = "FileSystemWriter (its default: sync_files)"
    lacks = "no hash; writes in place, under the final name from the start; folder not flushed; pickle in its metadata"

    def __init__(self, training: Training) -> None:
        self._training = training

    def save(self, step: int) -> None:
        dcp.save(self._training.state(), checkpoint_id=self._training.folder / str(step))

    def wait(self) -> None:
        pass

    def tidy(self) -> None:
        if self._training.rank == 0:
            emptied(self._training.folder)

    def close(self) -> None:
        pass
