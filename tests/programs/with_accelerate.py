"""An unmodified program in the manner of Accelerate's examples: prepare, accumulate, a scheduler, evaluation in each epoch.

It counts its steps, ends at a number of them, and keeps its best score, all in variables.
"""

import argparse
import os
import time
from pathlib import Path

import torch
import troubled
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Points(Dataset):
    def __init__(self, count: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.x = torch.randn(count, 16, generator=generator)
        self.y = self.x[:, :1] * 2 - self.x[:, 1:2]

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int):
        return self.x[index] + 0.05 * torch.randn(16), self.y[index]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--max-steps", "--max_steps", type=int, default=0)
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--out", default="out")
    options = parser.parse_args()
    accelerator = Accelerator(cpu=os.environ.get("DEVICE") != "cuda", gradient_accumulation_steps=options.accumulate)
    set_seed(9)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 1))
    troubled.befall(model)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    train = DataLoader(Points(203, 1), 8, shuffle=True, num_workers=options.workers)
    check = DataLoader(Points(32, 2), 8)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 200)
    model, optimizer, train, check, scheduler = accelerator.prepare(model, optimizer, train, check, scheduler)
    completed_steps, best = 0, None
    for epoch in range(options.epochs):
        model.train()
        for x, y in train:
            with accelerator.accumulate(model):
                loss = nn.functional.mse_loss(model(x), y)
                accelerator.backward(loss)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
                time.sleep(float(os.environ.get("SPREAD_S", "0")))
            completed_steps += accelerator.sync_gradients
            if completed_steps == options.max_steps:
                break
        model.eval()
        with torch.no_grad():
            losses = [accelerator.gather_for_metrics(nn.functional.mse_loss(model(x), y)).mean() for x, y in check]
        score = torch.stack(losses).mean().item()
        best = score if best is None else min(best, score)
        accelerator.print(f"epoch {epoch}: {score:.4f}, best {best:.4f}")
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        Path(options.out).mkdir(parents=True, exist_ok=True)
        Path(options.out, "after.txt").write_text(
            f"{scheduler.get_last_lr()[0]:.9f} {score:.9f} {best:.9f} {completed_steps} {accelerator.device.type}\n"
        )


if __name__ == "__main__":
    main()
