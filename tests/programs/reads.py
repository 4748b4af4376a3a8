"""A training that reads a file a sample, as slowly as it is told: from mounted data, or their copy."""

import argparse
import os
import time
from pathlib import Path

import no_compiler  # noqa: F401
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from kgorch import attach, output_folder


class Files(torch.utils.data.Dataset):
    def __init__(self, folder: os.PathLike, slow: float) -> None:
        self.folder, self.slow = folder, slow
        self.names = sorted(path.name for path in Path(folder).iterdir())

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, index: int):
        path = os.path.join(self.folder, self.names[index])
        with open(path, "rb") as file:
            content = file.read()
        with open(output_folder() / "read.txt", "a") as log:
            log.write(f"{path}\n")
        time.sleep(self.slow)
        return torch.tensor([float(len(content)), float(content[0])]) / 100


def main(data: str, epochs: int, workers: int, slow: float, foreign: bool) -> None:
    with attach() as session:
        net = nn.Linear(2, 1).to(session.device)
        model = DistributedDataParallel(net)
        optimizer = torch.optim.SGD(model.parameters(), 1e-3)
        session.track(model=model, optimizer=optimizer)
        dataset = Files(session.data(data), slow)
        if foreign:
            loader = torch.utils.data.DataLoader(dataset, 4, num_workers=workers, persistent_workers=workers > 0)
        else:
            loader = session.loader(dataset, 4 * session.world_size, num_workers=workers)
        for batch in session.steps(loader, epochs):
            loss = session.backward(batch, lambda part: model(part).square().mean())
            optimizer.step()
            optimizer.zero_grad()
            session.report(loss=loss)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", default="mounted")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--slow", type=float, default=0.0)
    parser.add_argument("--foreign", action="store_true")
    options = parser.parse_args()
    main(options.data, options.epochs, options.workers, options.slow, options.foreign)
