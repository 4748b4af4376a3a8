"""Rank 0 is late twice: with a value that the others wait for, and in an all-reduce."""

import argparse
import time

import no_compiler  # noqa: F401
import torch
import torch.distributed as dist

from kgorch import attach


def main(late: float) -> None:
    with attach() as session:

        def compute() -> str:
            time.sleep(late)
            return "worth it"

        print("found", session.cached("late", compute, key=1), flush=True)
        if session.rank == 0:
            time.sleep(late)
        dist.all_reduce(torch.ones(2, device=session.device))
        print("reduced", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--late", type=float, required=True)
    main(parser.parse_args().late)
