"""Prints 400 MB beside its training, in lines of a megabyte.

python floods.py LINES FILE SECONDS: short lines into a file, without any training; a pause of so many seconds every 100.
"""

from __future__ import annotations

import os
import sys
import time

if len(sys.argv) == 4:
    descriptor = os.open(sys.argv[2], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for number in range(int(sys.argv[1])):
        os.write(descriptor, b"line %07d %s\n" % (number, b"x" * 80))
        if number % 100 == 0:
            time.sleep(float(sys.argv[3]))
    raise SystemExit

import no_compiler  # noqa: F401
import torch
from torch import nn

from kgorch import attach


def main() -> None:
    torch.set_num_threads(1)
    with attach(seed=5) as session:
        model = nn.Linear(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        session.track(model=model, optimizer=optimizer)
        for _ in session.steps(session.loader([torch.ones(4)] * 320, 8), 1):
            for _ in range(10):
                print("x" * 1_000_000)
            time.sleep(0.1)
        print("trained to the end")


if __name__ == "__main__":
    main()
