"""A short training whose ranks write down what they have got from the process that started them."""

import argparse
import atexit
import ctypes
import json
import multiprocessing
import os
import random
import signal
import sys
from pathlib import Path

IMPORTED = "torch" in sys.modules

import no_compiler  # noqa: E402, F401
import numpy as np  # noqa: E402
import torch  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402

from kgorch import attach  # noqa: E402

FACTS = {
    "imported": IMPORTED,
    "leads_session": os.getsid(0) == os.getpid(),
    "descriptors": sorted(int(path.name) for path in Path("/proc/self/fd").iterdir())[:4],
    "sigterm": signal.getsignal(signal.SIGTERM) == signal.SIG_DFL,
    "sigint": signal.getsignal(signal.SIGINT) == signal.default_int_handler,
    "process": multiprocessing.current_process().name,
    "draws": [random.random(), float(np.random.rand())],
    "variables": {name: os.environ.get(name) for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "TORCHELASTIC_RUN_ID")},
    "errors": "TORCHELASTIC_ERROR_FILE" in os.environ,
}


def main(draws: int) -> None:
    with attach(seed=3) as session:
        net = DistributedDataParallel(torch.nn.Linear(8, 1).to(session.device))
        optimizer = torch.optim.AdamW(net.parameters(), 1e-2)
        session.track(net=net, optimizer=optimizer)
        data = torch.utils.data.TensorDataset(torch.randn(64, 8), torch.randn(64, 1))
        for batch in session.steps(session.loader(data, 16), 2):
            session.backward(batch, lambda part: (net(part[0]) - part[1]).square().mean())
            optimizer.step()
            optimizer.zero_grad()
        output = Path(session.output)
    loader = torch.utils.data.DataLoader(range(draws), num_workers=1, multiprocessing_context="spawn")
    FACTS["spawned"] = [int(item) for item in loader]
    ctypes.CDLL(None).printf(b"printed by C\n")
    print("without a new line", end="")
    (output / f"facts{FACTS['variables']['RANK']}.json").write_text(json.dumps(FACTS))
    atexit.register((output / f"exit{FACTS['variables']['RANK']}").touch)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--draws", type=int, default=3)
    main(parser.parse_args().draws)
