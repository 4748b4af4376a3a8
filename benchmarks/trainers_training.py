"""What trainers.py starts: one training of an unmodified Trainer, of Transformers or Lightning, and when each step began.

Under kgorch the steps are taken in turns as they are under it and, in blocks, without it: the integration is switched off, the
loader is read without its place being kept, no snapshots are taken, and the supervisor stands still. So both have the same
process, memory and moment. All ranks follow one list of blocks. `start` alone: the program ends when its first step begins.
"""

from __future__ import annotations

import itertools
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import nn

ALL, ALONE = "kgorch", "alone"
SETTLES = 5
"""Steps of a block that are not counted: the first ones after a change find cold caches."""

TRIES = 40
"""Steps from which the length of a step is learned, half of them with matrices to multiply."""

WORK = 40
ENDLESS = 1 << 20
TOLD: dict[str, Any] = json.loads(os.environ["TRAINERS"])


class Points(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    def __len__(self) -> int:
        return ENDLESS

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"x": torch.full((64,), float(index % 7)), "labels": torch.ones(1)}


class Net(nn.Module):
    """Its step is made as long as asked by multiplying matrices."""

    work = 0

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.BatchNorm1d(256), nn.Linear(256, 1))
        self.square = torch.randn(192, 192)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        for _ in range(Net.work):
            self.square @ self.square
        return {"loss": (self.layers(x) - labels).square().mean()}


class Both:
    """The loader as kgorch gives it, and as it was; each has an iterator of its own."""

    def __init__(self, followed: Any, plain: Any, blocks: Blocks) -> None:
        self._followed, self._plain, self._blocks = followed, plain, blocks

    def __getattr__(self, name: str) -> Any:
        return getattr(self._followed, name)

    def __len__(self) -> int:
        return len(self._plain)

    def __iter__(self) -> Iterator[Any]:
        iterators = {ALL: iter(self._followed), ALONE: iter(self._plain)}
        while True:
            yield next(iterators[self._blocks.way])


class Blocks:
    """Says at each step which way the next one is taken, and writes down what the steps of each block took.

    Args:
        switch: takes the integration away; a context.
    """

    def __init__(self, switch: Callable[[], ExitStack], stop: Callable[[], None]) -> None:
        self._switch, self._stop, self.way = switch, stop, ALL
        self._off: ExitStack | None = None
        self._began: list[float] = []
        self._tries: list[float] = []
        self._cpu_s = 0.0
        self.found: list[dict[str, Any]] = []
        self._turns = itertools.cycle((ALONE, ALL))
        self._left = 0

    def step(self) -> None:
        """A step begins."""
        now_s = time.perf_counter()
        if len(self._tries) <= TRIES:
            self._calibrate(now_s)
            return
        if self._left == self._steps:
            self._cpu_s, self._began = time.process_time(), []
        self._began.append(now_s)
        self._left -= 1
        if self._left < 0:
            self._end_block()

    def _calibrate(self, now_s: float) -> None:
        self._tries.append(now_s)
        Net.work = WORK if len(self._tries) > TRIES // 2 else 0
        if len(self._tries) > TRIES:
            each_s = [later - sooner for sooner, later in itertools.pairwise(self._tries)]
            bare_s = statistics.median(each_s[5 : TRIES // 2 - 2])
            loaded_s = statistics.median(each_s[TRIES // 2 + 2 :])
            work = torch.tensor(max(0.0, (TOLD["step_s"] - bare_s) * WORK / max(loaded_s - bare_s, 1e-6)))
            if torch.distributed.is_initialized():
                torch.distributed.broadcast(work, 0)
            Net.work, self._steps = int(work), max(10, int(TOLD["block_s"] / TOLD["step_s"]))
            self._left = self._steps + SETTLES

    def _end_block(self) -> None:
        steps = len(self._began) - 1
        each_s = [later - sooner for sooner, later in itertools.pairwise(self._began)]
        told = {"way": self.way, "median_s": statistics.median(each_s), "step_s": statistics.fmean(each_s)}
        self.found.append(told | {"cpu_s": (time.process_time() - self._cpu_s) / steps})
        if len(self.found) > 2 * TOLD["rounds"]:
            self._stop()
        if self._off is not None:
            self._off.close()
        self.way = next(self._turns)
        self._off = self._switch() if self.way == ALONE else None
        self._left = self._steps + SETTLES

    def close(self) -> None:
        if self._off is not None:
            self._off.close()
        if int(os.environ.get("RANK", 0)) == 0:
            Path(TOLD["out"]).write_text(json.dumps({"blocks": self.found, "work": Net.work}))


def start() -> None:
    """The first step begins: the start is over."""
    Path(TOLD["out"]).write_text(json.dumps({"at": time.time(), "cpu_s": time.process_time()}))
    sys.exit(0)


def switch_of(trainer: Any) -> Callable[[], ExitStack]:
    """Without kgorch, whose carrier is the Trainer's `_kgorch`."""
    from overhead_training import Switches

    carried = trainer._kgorch
    switches = Switches(carried.session, trainer_model(trainer))
    holder = getattr(trainer, "callback_handler", trainer)
    scripts = [item for item in holder.callbacks if not type(item).__module__.startswith("kgorch.")]
    assert len(scripts) < len(holder.callbacks)

    def off() -> ExitStack:
        stack = ExitStack()
        stack.enter_context(switches.of(ALONE))
        stack.enter_context(mock.patch.object(holder, "callbacks", scripts))
        stack.enter_context(mock.patch.object(trainer, "_kgorch", None))
        return stack

    return off


def trainer_model(trainer: Any) -> Any:
    return trainer.model_wrapped if hasattr(trainer, "model_wrapped") else trainer.strategy.model


def both_loaders(carried: Any, blocks: Blocks) -> None:
    follow = carried.session.follow
    carried.session.follow = lambda loader, name: Both(follow(loader, name=name), loader, blocks)


def transformers() -> None:
    from transformers import Trainer, TrainerCallback, TrainingArguments

    class Measure(TrainerCallback):
        blocks: Blocks

        def on_train_begin(self, *_: Any, **__: Any) -> None:
            if not TOLD["start"]:
                self.blocks._switch = switch_of(trainer)

        def on_step_begin(self, *_: Any, **__: Any) -> None:
            start() if TOLD["start"] else self.blocks.step()

    class Measured(Trainer):
        def get_train_dataloader(self) -> Any:
            if (carried := getattr(self, "_kgorch", None)) and not TOLD["start"]:
                both_loaders(carried, measure.blocks)
            return super().get_train_dataloader()

    measure = Measure()
    trainer = Measured(
        model=Net(),
        args=TrainingArguments(
            TOLD["folder"], max_steps=ENDLESS, per_device_train_batch_size=16, logging_steps=20, save_strategy="no",
            report_to=[], disable_tqdm=True, use_cpu=True,
        ),
        train_dataset=Points(),
        callbacks=[measure],
    )  # fmt: skip

    def stop() -> None:
        trainer.control.should_training_stop = trainer.control.should_epoch_stop = True

    measure.blocks = Blocks(ExitStack, stop)
    trainer.train()
    measure.blocks.close()


def lightning() -> None:
    import lightning.pytorch as pl

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = Net()

        def training_step(self, batch: dict[str, torch.Tensor], number: int) -> torch.Tensor:
            loss: torch.Tensor = self.net(**batch)["loss"]
            self.log("loss", loss)
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), 1e-4)

    class Measure(pl.Callback):
        blocks: Blocks

        def on_train_start(self, trainer: Any, _: Any) -> None:
            if TOLD["start"]:
                start()
            self.blocks._switch = switch_of(trainer)

        def on_train_batch_end(self, *_: Any) -> None:
            self.blocks.step()

    measure = Measure()
    ranks = int(os.environ.get("WORLD_SIZE", 1))
    trainer = pl.Trainer(
        max_epochs=1, accelerator="cpu", devices=ranks, strategy="ddp" if ranks > 1 else "auto", logger=False,
        enable_progress_bar=False, enable_checkpointing=False, default_root_dir=TOLD["folder"],
        enable_model_summary=False, callbacks=[measure], log_every_n_steps=20,
    )  # fmt: skip

    def stop() -> None:
        trainer.should_stop = True

    measure.blocks = Blocks(ExitStack, stop)
    fit_loop = type(trainer.fit_loop)
    load = fit_loop._load_combined_loader_states

    def load_states(self: Any) -> None:
        if (carried := getattr(trainer, "_kgorch", None)) and not TOLD["start"]:
            both_loaders(carried, measure.blocks)
        load(self)

    fit_loop._load_combined_loader_states = load_states
    trainer.fit(Module(), torch.utils.data.DataLoader(Points(), 16))
    measure.blocks.close()


if __name__ == "__main__":
    torch.set_num_threads(1)
    {"transformers": transformers, "lightning": lightning}[TOLD["library"]]()
