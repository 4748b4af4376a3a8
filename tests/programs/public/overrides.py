"""A regression with key=value on the command line, a checkpoint an epoch, and one more when SIGTERM comes."""

import glob
import os
import signal
import sys
import time

import torch
from torch import nn

config = {"epochs": 20, "lr": 0.05, "amp": False, "dir": "ckpts", "hidden": [8], "resume": "", "pause": 0.0}
for item in sys.argv[1:]:
    key, value = item.split("=", 1)
    if key not in config:
        raise SystemExit(f"Key '{key}' is not in struct")
    kind = type(config[key])
    if kind is bool:
        config[key] = {"true": True, "false": False}[value]
    elif kind is list:
        config[key] = [int(part) for part in value.strip("[]").split(",") if part]
    else:
        config[key] = kind(value)

stopping = False


def on_signal(number, frame):
    global stopping
    stopping = True


signal.signal(signal.SIGTERM, on_signal)
os.makedirs(config["dir"], exist_ok=True)
torch.manual_seed(3)
sizes = [4, *config["hidden"], 1]
model = nn.Sequential(*(layer for a, b in zip(sizes, sizes[1:]) for layer in (nn.Linear(a, b), nn.ReLU())))
optimizer = torch.optim.SGD(model.parameters(), lr=config["lr"], momentum=0.9)
epoch = batch = 0
if config["resume"]:
    state = torch.load(config["resume"], weights_only=True)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    epoch, batch = state["epoch"], state["batch"]
    print(f"resumed {config['resume']} at epoch {epoch}, batch {batch}", flush=True)


def save():
    path = os.path.join(config["dir"], f"epoch_{epoch}.pt")
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch, "batch": batch}
    torch.save(state, path + ".tmp")
    os.replace(path + ".tmp", path)


while epoch < config["epochs"]:
    while batch < 20:
        generator = torch.Generator().manual_seed(1000 * epoch + batch)
        inputs = torch.randn(8, 4, generator=generator)
        loss = ((model(inputs) - inputs.sum(1, keepdim=True)) ** 2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        batch += 1
        time.sleep(config["pause"])
        print(f"[epoch {epoch}] {batch}/20 loss={loss.item():.5f} global_step={20 * epoch + batch}", flush=True)
        if stopping:
            save()
            print("saved, as SIGTERM came", flush=True)
            sys.exit(0)
    epoch, batch = epoch + 1, 0
    save()
    for path in sorted(glob.glob(os.path.join(config["dir"], "epoch_*.pt")), key=os.path.getmtime)[:-3]:
        os.remove(path)
