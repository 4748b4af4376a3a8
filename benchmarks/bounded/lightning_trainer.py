"""Lightning's Trainer with its Timer and ModelCheckpoint, in the setting that one has to know.

Timer counts what earlier sessions took (Lightning #10226), counts from the first step and not from the session's beginning, and
stops without saving; so it forgets the earlier ones, is told what is left, and `fit` is followed by a save. What that save needs is
taken from one behind the first steps. --every N: ModelCheckpoint, written by AsyncCheckpointIO. With one checkpoint kept, the one
before would be removed while the new one is still being written: two are kept, and the newest file is loaded (each is renamed).
"""

from __future__ import annotations

import logging
import os
import time
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import pytorch_lightning as lightning
import torch
from pytorch_lightning.callbacks import Callback, ModelCheckpoint, Timer
from pytorch_lightning.plugins.io import AsyncCheckpointIO

from bounded import training
from bounded.training import lead_of, marks

MORE_S = 0.5
"""Of the lead, for what `fit` does at its end."""


class Module(lightning.LightningModule):
    def __init__(self, size: str) -> None:
        super().__init__()
        self.net = training.network(size)

    def training_step(self, batch: Any, number: int) -> torch.Tensor:
        return training.loss_of(self.net, *batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return training.optimizer_of(self.net)


class Told(Callback):
    def on_train_start(self, trainer: lightning.Trainer, module: lightning.LightningModule) -> None:
        marks.begin(trainer.global_step)

    def on_train_batch_end(
        self, trainer: lightning.Trainer, module: lightning.LightningModule, outputs: Any, *_: Any
    ) -> None:
        marks.done(trainer.global_step, outputs["loss"])


class TimerOfASession(Timer):
    """Ends in time for a last save before `end_at`, seconds since 1970, by the seconds of a save into `place`."""

    def __init__(self, end_at: float, place: Path) -> None:
        super().__init__(timedelta(days=365))
        self._place, self._end_at, self._steps = place, end_at, 0

    def on_train_batch_end(self, trainer: lightning.Trainer, *more: Any, **named: Any) -> None:
        self._steps += 1
        if self._steps == training.MEASURED:
            at_s = time.monotonic()
            trainer.save_checkpoint(self._place)
            lead_s = lead_of(time.monotonic() - at_s) + MORE_S
            self._duration = self.time_elapsed() + self._end_at - time.time() - lead_s
        super().on_train_batch_end(trainer, *more, **named)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


def main() -> None:
    parser = training.options()
    parser.add_argument(
        "--timer", type=float, help="seconds until the wall, from torchrun's beginning; without --every"
    )
    parser.add_argument("--detect-anomaly", action="store_true")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
    last = options.folder / "last.ckpt"
    callbacks: list[Callback] = [Told()]
    plugins: list[Any] = []
    if options.timer and not options.every:
        callbacks.append(TimerOfASession(psutil.Process(os.getppid()).create_time() + options.timer, last))
    if options.every:
        callbacks.append(
            ModelCheckpoint(options.folder, monitor="step", mode="max", save_top_k=2, every_n_train_steps=options.every)
        )
        plugins.append(AsyncCheckpointIO())
    trainer = lightning.Trainer(
        accelerator="cpu", devices=2, strategy="ddp", max_epochs=-1, callbacks=callbacks, plugins=plugins,
        enable_checkpointing=bool(options.every), logger=False, enable_progress_bar=False, enable_model_summary=False,
        num_sanity_val_steps=0, detect_anomaly=options.detect_anomaly,
    )  # fmt: skip
    data = training.samples()
    loader = torch.utils.data.DataLoader(data, training.BATCH, shuffle=True, drop_last=True)  # it puts the sampler in
    newest = max(options.folder.glob("*.ckpt"), key=lambda path: path.stat().st_mtime, default=None)
    trainer.fit(Module(options.size), loader, ckpt_path=newest, weights_only=False)
    if not options.every:
        trainer.save_checkpoint(last)


if __name__ == "__main__":
    main()
