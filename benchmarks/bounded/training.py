"""The training that all of them do: network, data, loss; and where it writes down how far it is.

A large table of word vectors that is not trained (most of the state) below two transformer layers that are. So the size of
what must be saved changes and the step does not.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

WORDS = {"1MB": 500, "150MB": 580_000}
"""Size of the state → words in the table; a word is 256 bytes."""

WIDTH, LENGTH, CLASSES = 64, 32, 10
BATCH = 24
"""Samples a step and rank: some 15 ms on one core."""

EPOCH = 500
"""Steps; so many batches of two ranks there are."""

ENDLESS = 100_000
"""Epochs, which no session sees the end of."""

MEASURED = 20
"""Steps of a session behind which those that save by the clock save a first time, to know how long that takes."""

IMPOSSIBLE = 1 << 46
"""Bytes; asking for so many is refused by the system's allocator."""


class Net(nn.Module):
    def __init__(self, size: str) -> None:
        super().__init__()
        self.words = nn.Embedding.from_pretrained(torch.randn(WORDS[size], WIDTH), freeze=True)
        layers = (nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True) for _ in range(2))
        self.layers = nn.ModuleList(layers)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, words_BL: torch.Tensor) -> torch.Tensor:
        x_BLC = self.words(words_BL)
        for layer in self.layers:
            x_BLC = layer(x_BLC)
        return self.head(x_BLC.mean(1))


def network(size: str) -> Net:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    return Net(size)


def samples() -> TensorDataset:
    """Words and their class."""
    source = torch.Generator().manual_seed(0)
    words = torch.randint(min(WORDS.values()), (2 * BATCH * EPOCH, LENGTH), generator=source)
    return TensorDataset(words, words.sum(1) % CLASSES)


def optimizer_of(model: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW((weight for weight in model.parameters() if weight.requires_grad), 1e-3)


def loader_of(data: TensorDataset, rank: int, world: int) -> DataLoader[tuple[torch.Tensor, torch.Tensor]]:
    """As DDP's tutorial has it; the sampler's epoch is set by who loops."""
    return DataLoader(data, BATCH, sampler=DistributedSampler(data, world, rank), drop_last=True)  # type: ignore[arg-type]


def stateful_loader_of(data: TensorDataset, rank: int, world: int) -> DataLoader[tuple[torch.Tensor, torch.Tensor]]:
    """torchdata's; goes on at the exact sample."""
    from torchdata.stateful_dataloader import StatefulDataLoader
    from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

    return StatefulDataLoader(data, BATCH, sampler=StatefulDistributedSampler(data, world, rank), drop_last=True)


def lead_of(save_s: float) -> float:
    """Seconds before a wall at which the last save must begin: two of the measured ones, and ten steps until the clock is read."""
    return 2 * save_s + 0.5


def loss_of(model: nn.Module, words: torch.Tensor, classes: torch.Tensor) -> torch.Tensor:
    trouble = faults.now("oom", "hang", "nan")
    faults.samples = len(words)
    if trouble == "oom" and faults.is_too_much:
        torch.empty(IMPOSSIBLE)
    if trouble == "hang":
        time.sleep(1e6)
    loss = nn.functional.cross_entropy(model(words), classes)
    return loss * float("nan") if trouble == "nan" else loss


def step_of(optimizer: torch.optim.Optimizer) -> None:
    """The optimizer's step, with the gradients dropped after it."""
    if faults.now("oom-outside") and faults.is_too_much:
        torch.empty(IMPOSSIBLE)
    optimizer.step()
    optimizer.zero_grad()


class Marks:
    """Lines of the file $BOUNDED_MARKS, one for each rank: `begin STEP AT PID`, then `STEP AT LOSS` of each step that is done.

    STEP counts the optimizer's steps of all sessions. AT: monotonic clock. Nothing where the variable is not set.
    """

    def __init__(self) -> None:
        self.step = 0
        self._file: int | None = None

    def begin(self, step: int) -> None:
        """At the first step of a process: how far the training was when it was loaded."""
        self.step = step
        if place := os.environ.get("BOUNDED_MARKS"):
            name = f"{place}.{os.environ.get('RANK', '0')}"
            self._file = os.open(name, os.O_CREAT | os.O_APPEND | os.O_WRONLY)
            os.write(self._file, f"begin {step} {time.monotonic():.4f} {os.getpid()}\n".encode())

    def done(self, step: int | None = None, loss: torch.Tensor | float | None = None) -> None:
        """A step is done; `step`: where the peer counts itself."""
        self.step = self.step + 1 if step is None else step
        if self._file is not None:
            said = "" if loss is None else f" {float(loss):.4g}"
            os.write(self._file, f"{self.step} {time.monotonic():.4f}{said}\n".encode())


class Faults:
    """$BOUNDED_FAULT, `KIND:STEP:RANKS:FILE`: what goes wrong from that step on, in the ranks named (`1`, `0,1`).

    oom: computing on more than half the batch does not fit from then on, for good. oom-outside: the same in the optimizer's step.
    nan, hang: once. FILE remembers it, and when it was.
    """

    def __init__(self) -> None:
        kind, step, ranks, file = (os.environ.get("BOUNDED_FAULT") or ":::").split(":")
        rank = os.environ.get("RANK", "0")
        self.kind = kind if rank in ranks.split(",") else ""
        self._step, self._file = int(step or 0), Path(f"{file}.{rank}")
        self._lasts = kind.startswith("oom")
        self.samples = 0

    @property
    def is_too_much(self) -> bool:
        return self.samples > BATCH // 2

    def now(self, *kinds: str) -> str:
        """Which of these it is just now, else ""."""
        if self.kind not in kinds:
            return ""
        if self._file.exists():
            return self.kind if self._lasts else ""
        if marks.step < self._step:
            return ""
        aside = Path(f"{self._file}-part")
        aside.write_text(f"{time.monotonic():.4f}")
        aside.rename(self._file)
        return self.kind


marks, faults = Marks(), Faults()


def options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--size", choices=WORDS, required=True)
    parser.add_argument("--every", type=int, required=True, help="steps between two saves; 0: none but others")
    return parser
