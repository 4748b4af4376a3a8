"""torch.save on rank 0, as PyTorch's DDP tutorial has it; flushed, renamed. The others wait at their next all-reduce."""

from __future__ import annotations

import os

import torch

from peers import Training, emptied


class Saving:
    version = torch.__version__
    setting = "rank 0, written aside, fsync, rename"
    lacks = "no hash; one rank writes for all"

    def __init__(self, training: Training) -> None:
        self._training = training

    def save(self, step: int) -> None:
        if self._training.rank == 0:
            aside = self._training.folder / "aside.pt"
            with open(aside, "wb") as file:
                torch.save(self._training.state(), file)
                file.flush()
                os.fsync(file.fileno())
            aside.rename(self._training.folder / f"{step}.pt")

    def wait(self) -> None:
        pass

    def tidy(self) -> None:
        if self._training.rank == 0:
            emptied(self._training.folder)

    def close(self) -> None:
        pass
