"""Lightning's Trainer with its Timer and ModelCheckpoint.

As its documentation has them: the Timer is given the session's length, ModelCheckpoint an interval. --tuned: what one has to know
besides. Timer counts what earlier sessions took (Lightning #10226), counts from the first step and not from the session's
beginning, and stops without saving; so it is told what is left, forgets the earlier ones, and `fit` is followed by a save.
"""

from __future__ import annotations

import logging
import os
import time
import warnings
from datetime import timedelta
from typing import Any

import psutil
import pytorch_lightning as lightning
import torch
from pytorch_lightning.callbacks import Callback, ModelCheckpoint, Timer

from bounded import training
from bounded.training import marks

LEAD_S = 3.0


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
    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


def main() -> None:
    parser = training.options()
    parser.add_argument("--timer", type=float, required=True)
    parser.add_argument("--tuned", action="store_true")
    parser.add_argument("--detect-anomaly", action="store_true")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
    if options.tuned:
        took_s = time.time() - psutil.Process(os.getppid()).create_time()
        timer: Timer = TimerOfASession(timedelta(seconds=options.timer - took_s - LEAD_S))
        saving = ModelCheckpoint(options.folder, save_last=True, every_n_train_steps=options.every)
    else:
        timer = Timer(timedelta(seconds=options.timer))
        saving = ModelCheckpoint(options.folder, save_last=True, train_time_interval=timedelta(seconds=15))
    trainer = lightning.Trainer(
        accelerator="cpu", devices=2, strategy="ddp", max_epochs=-1, callbacks=[timer, saving, Told()],
        logger=False, enable_progress_bar=False, enable_model_summary=False, num_sanity_val_steps=0,
        detect_anomaly=options.detect_anomaly,
    )  # fmt: skip
    data = training.samples()
    loader = torch.utils.data.DataLoader(data, training.BATCH, shuffle=True, drop_last=True)  # it puts the sampler in
    last = options.folder / "last.ckpt"
    trainer.fit(Module(options.size), loader, ckpt_path=last if last.exists() else None, weights_only=False)
    if options.tuned:
        trainer.save_checkpoint(last)


if __name__ == "__main__":
    main()
