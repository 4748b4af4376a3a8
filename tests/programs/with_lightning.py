"""An unmodified program in the manner of Lightning's examples: module, callbacks, validation, test after fit."""

import argparse
import importlib
import os
import time

import torch
import troubled
from torch import nn
from torch.utils.data import DataLoader, Dataset

pl = importlib.import_module(os.environ.get("LIGHTNING", "lightning.pytorch"))


class Points(Dataset):
    def __init__(self, count: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.x = torch.randn(count, 16, generator=generator)
        self.y = self.x[:, :1] * 2 - self.x[:, 1:2]

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int):
        return self.x[index] + 0.05 * torch.randn(16), self.y[index]


class Regression(pl.LightningModule):
    def __init__(self, sleep: float, plateau: bool) -> None:
        super().__init__()
        self.sleep, self.plateau = sleep, plateau
        self.net = nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 1))
        troubled.befall(self.net)

    def training_step(self, batch, batch_idx):
        loss = ((self.net(batch[0]) - batch[1]) ** 2).mean()
        self.log("loss", loss)
        time.sleep(self.sleep)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", ((self.net(batch[0]) - batch[1]) ** 2).mean(), sync_dist=True)

    def test_step(self, batch, batch_idx):
        self.log("test_loss", ((self.net(batch[0]) - batch[1]) ** 2).mean(), sync_dist=True)

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), 1e-2)
        if self.plateau:
            plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=0.5)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": plateau, "monitor": "val_loss"}}
        return [optimizer], [torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 6)]


def callbacks(options: argparse.Namespace) -> list:
    made = [pl.callbacks.EarlyStopping("val_loss", patience=50)]
    if options.save_steps:
        made.append(pl.callbacks.ModelCheckpoint(every_n_train_steps=options.save_steps, save_top_k=-1))
        made.append(pl.callbacks.ModelCheckpoint(monitor="val_loss", filename="best"))
    return made


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--plateau", action="store_true")
    parser.add_argument("--save_steps", type=int, default=0)
    parser.add_argument("--out", default="out")
    options = parser.parse_args()
    pl.seed_everything(5)
    trainer = pl.Trainer(
        accelerator=os.environ.get("DEVICE", "cpu"), max_epochs=options.epochs,
        devices=int(os.environ.get("WORLD_SIZE", 1)), strategy="ddp",
        accumulate_grad_batches=options.accumulate, default_root_dir=options.out, logger=False, enable_progress_bar=False,
        callbacks=callbacks(options), enable_checkpointing=bool(options.save_steps), num_sanity_val_steps=1,
    )  # fmt: skip
    model = Regression(float(os.environ.get("SPREAD_S", "0")), options.plateau)
    train = DataLoader(Points(203, 1), 8, shuffle=True, num_workers=options.workers)
    check = DataLoader(Points(32, 2), 8)
    trainer.fit(model, train, check)
    (tested,) = trainer.test(model, check, verbose=False)
    if trainer.is_global_zero:
        os.makedirs(options.out, exist_ok=True)  # noqa: PTH103
        with open(os.path.join(options.out, "after.txt"), "w") as file:
            print(trainer.global_step, f"{tested['test_loss']:.9f}", trainer.strategy.root_device.type, file=file)


if __name__ == "__main__":
    main()
