"""In the manner of Accelerate's own examples: `--checkpointing_steps`, `--resume_from_checkpoint`, accelerator.save_state()."""

import argparse
import os
import time

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--checkpointing_steps", type=int, default=10)
    parser.add_argument("--output_dir", default="out")
    parser.add_argument("--resume_from_checkpoint", default=None)
    args = parser.parse_args()
    accelerator = Accelerator()
    set_seed(3)
    model = torch.nn.Linear(8, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer = accelerator.prepare(model, optimizer)
    begin = 0
    if args.resume_from_checkpoint:
        accelerator.load_state(args.resume_from_checkpoint)
        begin = int(os.path.basename(args.resume_from_checkpoint).split("_")[1])
        accelerator.print(f"resumed from {args.resume_from_checkpoint} with {accelerator.num_processes} processes")
    for step in range(begin + 1, args.steps + 1):
        x = torch.randn(16, 8, generator=torch.Generator().manual_seed(step * 10 + accelerator.process_index))
        loss = torch.nn.functional.mse_loss(model(x), x.sum(1, keepdim=True))
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        accelerator.print(f"step {step}/{args.steps} loss {loss.item():.4f}", flush=True)
        if step % args.checkpointing_steps == 0:
            accelerator.save_state(os.path.join(args.output_dir, f"step_{step}"))
        time.sleep(float(os.environ.get("PAUSE_S", "0")))


if __name__ == "__main__":
    main()
