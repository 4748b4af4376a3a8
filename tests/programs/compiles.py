"""A loop with torch.compile, and what the compiler found in its caches."""

import argparse
import json
import os
import time
from pathlib import Path

import torch
from torch import nn

from kgorch import attach

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--sleep", type=float, default=0.2)
    options = parser.parse_args()
    session = attach(seed=3)
    net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
    optimizer = torch.optim.AdamW(net.parameters(), 1e-2)
    session.track(net=net, optimizer=optimizer)
    session.expect(steps=options.steps)
    compiled = torch.compile(net)
    for step in range(session.step, options.steps):
        session.boundary(samples=4)
        x = torch.rand(4, 8)
        session.backward((x, x.sum(1, keepdim=True)), lambda part: ((compiled(part[0]) - part[1]) ** 2).mean())
        optimizer.step()
        optimizer.zero_grad()
        if step == session.resumed.step:
            from torch._dynamo.utils import counters

            found = {name: count for kind in counters.values() for name, count in kind.items() if "cache" in name}
            found["folder"] = os.environ["TORCHINDUCTOR_CACHE_DIR"]
            Path(session.output, f"from{step}.json").write_text(json.dumps(found))
        time.sleep(options.sleep)
