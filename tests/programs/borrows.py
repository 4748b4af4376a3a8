"""Trains with a loader that is not kgorch's, whose augmentation draws from whatever generator its process has.

With `--once FILE` it stops by itself the first time, in the middle of its second epoch.
"""

import argparse
import os
import pathlib
import random
import subprocess

import no_compiler  # noqa: F401
import numpy as np
import torch
from nested_loader import nested_loader
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, get_worker_info

from kgorch import attach


def sample(index: int) -> torch.Tensor:
    values = torch.arange(8.0) * 0.1 + index * 0.01
    return values + torch.randn(8) * 0.1 + float(np.random.rand()) + random.random()


class Points(Dataset):
    def __len__(self) -> int:
        return 160

    def __getitem__(self, index: int) -> torch.Tensor:
        return sample(index)


class Stream(IterableDataset):
    def __iter__(self):
        worker = get_worker_info()
        for index in range(worker.id if worker else 0, 160, worker.num_workers if worker else 1):
            yield sample(index)


def main(loader: str, workers: int, once: str) -> None:
    with attach(seed=3) as session:
        net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 1))
        model = DistributedDataParallel(net.to(session.device))
        optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
        session.track(model=model, optimizer=optimizer)
        data = Stream() if loader == "stream" else Points()
        order = {"shuffle": True} if loader == "shuffled" else {}
        if loader == "distributed":
            order = {"sampler": DistributedSampler(data, session.world_size, session.rank)}
        share = 8 // session.world_size
        if loader == "nested":
            given = nested_loader(data, share, rank=session.rank, ranks=session.world_size, workers=workers)
        else:
            given = DataLoader(data, share, num_workers=workers, **order)
        for step, batch in enumerate(session.steps(given, 4)):
            if once and step == 27 and session.rank == 0 and not pathlib.Path(once).exists():
                pathlib.Path(once).touch()
                # as torchrun hands on a SIGTERM: from outside, and to loading processes too
                subprocess.run(["kill", "-TERM", "--", f"-{os.getpgrp()}"], start_new_session=True)
            loss = session.backward(batch, lambda part: model(part).square().mean())
            optimizer.step()
            optimizer.zero_grad()
            session.report(loss=loss)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--loader", choices=["shuffled", "distributed", "stream", "nested"], default="shuffled")
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--once", default="")
    main(**vars(parser.parse_args()))
