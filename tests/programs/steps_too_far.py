"""Has room for the weights and gradients of a wide net, and not for what AdamW keeps of them: it fails in its first step."""

import argparse
import pathlib
import resource

import no_compiler  # noqa: F401
import torch
from torch import nn

from kgorch import attach

MIB = 1 << 20
parser = argparse.ArgumentParser()
parser.add_argument("--hidden", type=int, default=4096)
options = parser.parse_args()

with attach(seed=0) as session:
    model = nn.Linear(options.hidden, options.hidden)  # 4096: 64 MiB
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    session.track(model=model, optimizer=optimizer)
    data = torch.utils.data.TensorDataset(torch.ones(8, options.hidden))
    for [x] in session.steps(session.loader(data, 4), 2):
        session.backward([x], lambda part: model(part[0]).square().mean())
        status = dict(line.split(":", 1) for line in pathlib.Path("/proc/self/status").read_text().splitlines())
        taken = int(status["VmData"].split()[0]) << 10
        if not optimizer.state:
            resource.setrlimit(resource.RLIMIT_DATA, (taken + 48 * MIB, resource.RLIM_INFINITY))
        optimizer.step()
        resource.setrlimit(resource.RLIMIT_DATA, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        optimizer.zero_grad()
