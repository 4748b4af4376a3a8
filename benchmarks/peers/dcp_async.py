"""torch.distributed.checkpoint.async_save: staged into buffers that are kept from save to save, written by a thread.

With a gloo group of its own, without which it meets the training's all-reduces and breaks. Writing in a process of its own
took no less of the training's time. Nor did staging beside the training (`use_async_staging`): the state must not change
until it is staged, so on the same processor the next optimizer step waits as long.
"""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

from peers import Training, emptied


class Saving:
    version = torch.__version__
    setting = "DefaultStager kept for all saves (its buffers are used again), thread, gloo group of its own"
    lacks = "no hash; writes in place, under the final name from the start; folder not flushed; pickle in its metadata"

    def __init__(self, training: Training) -> None:
        self._training = training
        self._group = dist.new_group(backend="gloo")
        cuda = torch.cuda.is_available()
        self._stager = DefaultStager(
            StagingOptions(use_pinned_memory=cuda, use_shared_memory=False, use_async_staging=False, use_non_blocking_copy=cuda)
        )  # fmt: skip
        self._saved: Future[Any] | None = None

    def save(self, step: int) -> None:
        self.wait()
        saved = dcp.async_save(
            self._training.state(),
            checkpoint_id=self._training.folder / str(step),
            process_group=self._group,
            async_stager=self._stager,
        )
        assert isinstance(saved, Future)
        self._saved = saved

    def wait(self) -> None:
        if self._saved:
            self._saved.result()
            dist.barrier(self._group)  # the coordinator writes the metadata last
            self._saved = None

    def tidy(self) -> None:
        if self._training.rank == 0:
            emptied(self._training.folder)

    def close(self) -> None:
        self._stager.close()
