"""A training with helpers, as the clients of trackers, video encoders and data servers start them: processes in sessions of their
own, one of which nobody is a parent of and none of which heeds SIGTERM when `--stubborn`. The kernel cuts their names at 15 bytes,
within a letter when they are `--vietnamese`.

Each adds its pid to `helpers.txt` beside the plan.
"""

import argparse
import os
import subprocess
import sys
import time

import no_compiler  # noqa: F401
import torch

from kgorch import attach

STUBBORN = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(100_000)"

NAMED = "import ctypes, time; ctypes.CDLL(None).prctl(15, 'tải_dữ_liệu_ảnh'.encode()); time.sleep(100_000)"


def helper(program: str) -> int:
    words = [sys.executable, "-c", program] if program else ["sleep", "100000"]
    return subprocess.Popen(words, start_new_session=True, stdin=subprocess.DEVNULL).pid


def without_parent(program: str) -> None:
    if (child := os.fork()) == 0:
        os.setsid()
        note(helper(program))
        os._exit(0)
    os.waitpid(child, 0)


def note(pid: int) -> None:
    with open("helpers.txt", "a") as file:
        file.write(f"{pid}\n")


def main(epochs: int, program: str) -> None:
    with attach(seed=0) as session:
        if session.rank == 0:
            note(helper(program))
            without_parent(program)
        model = torch.nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        session.track(model=model, optimizer=optimizer)
        data = torch.utils.data.TensorDataset(torch.ones(32, 2), torch.ones(32, 1))
        for batch in session.steps(session.loader(data, 4), epochs):
            session.backward(batch, lambda part: (model(part[0]) - part[1]).square().mean())
            optimizer.step()
            optimizer.zero_grad()
            time.sleep(0.05)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=100_000)
    parser.add_argument("--stubborn", action="store_true")
    parser.add_argument("--vietnamese", action="store_true")
    options = parser.parse_args()
    main(options.epochs, STUBBORN if options.stubborn else NAMED if options.vietnamese else "")
