"""A classifier under DistributedDataParallel, with argparse, folders of checkpoints and --resume_from_checkpoint."""

import argparse
import json
import os
import shutil
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from safetensors.torch import load_file, save_file


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--output_dir", default="out")
    parser.add_argument("--max_steps", type=int, default=100)
    parser.add_argument("--save_steps", type=int, default=10)
    parser.add_argument("--learning_rate", type=float, default=0.1)
    parser.add_argument("--pause", type=float, default=0.0)
    parser.add_argument("--layers", type=int, nargs="*", default=[16])
    parser.add_argument("--no_decay", action="store_true")
    parser.add_argument("--resume_from_checkpoint")
    args = parser.parse_args()

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    sizes = [8, *args.layers, 4]
    layers = []
    for one, other in zip(sizes, sizes[1:]):
        layers += [nn.Linear(one, other), nn.Tanh()]
    model = DistributedDataParallel(nn.Sequential(*layers[:-1]))
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=args.learning_rate, weight_decay=0.0 if args.no_decay else 0.01
    )
    step = 0
    if args.resume_from_checkpoint:
        folder = args.resume_from_checkpoint
        model.module.load_state_dict(load_file(os.path.join(folder, "model.safetensors")))
        optimizer.load_state_dict(torch.load(os.path.join(folder, "optimizer.pt"), weights_only=True))
        step = json.load(open(os.path.join(folder, "trainer_state.json")))["global_step"]
        print(f"continues from {folder}", flush=True)
    while step < args.max_steps:
        generator = torch.Generator().manual_seed(step * world + rank)
        inputs = torch.randn(16, 8, generator=generator)
        targets = inputs[:, :4].argmax(dim=1)
        loss = nn.functional.cross_entropy(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        step += 1
        time.sleep(args.pause)
        if rank == 0:
            print(f"step {step}/{args.max_steps} loss {loss.item():.4f}", flush=True)
            if step % args.save_steps == 0 or step == args.max_steps:
                save(args.output_dir, step, model, optimizer)
    dist.destroy_process_group()


def save(out, step, model, optimizer):
    temporary, place = os.path.join(out, f"tmp-checkpoint-{step}"), os.path.join(out, f"checkpoint-{step}")
    os.makedirs(temporary, exist_ok=True)
    save_file(model.module.state_dict(), os.path.join(temporary, "model.safetensors"))
    torch.save(optimizer.state_dict(), os.path.join(temporary, "optimizer.pt"))
    with open(os.path.join(temporary, "trainer_state.json"), "w") as file:
        json.dump({"global_step": step, "log_history": [{"step": step}]}, file)
    os.rename(temporary, place)
    numbers = sorted(int(name.split("-")[1]) for name in os.listdir(out) if name.startswith("checkpoint-"))
    for number in numbers[:-2]:
        shutil.rmtree(os.path.join(out, f"checkpoint-{number}"))


if __name__ == "__main__":
    main()
