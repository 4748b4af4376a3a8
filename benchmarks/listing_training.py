"""The training of benchmarks/listing.py: a list of pictures, their headers, and a few steps. Writes down when it took its first."""

from __future__ import annotations

import json
import time
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from kgorch import attach
from kgorch.workloads.common.listing import fingerprint, headers


class Pictures(torch.utils.data.Dataset[Tensor]):
    def __init__(self, root: Path, names: list[str]) -> None:
        self.root, self.names = root, names

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, index: int) -> Tensor:
        with Image.open(self.root / self.names[index]) as picture:
            return torch.from_numpy(np.asarray(picture.convert("RGB")).mean((0, 1)) / 255).float()


def main(root: str, delay_s: float) -> None:
    """delay_s: of a network mount, for each file that is opened for its header."""
    began_s = time.monotonic()
    with attach() as session:
        attached_s = time.monotonic()
        names = Path(root, "list.txt").read_text().splitlines()

        def look(name: str) -> list[int]:
            time.sleep(delay_s)
            with Image.open(Path(root, name)) as picture:
                return list(picture.size)

        sizes = headers(session, "headers", names, look, key=fingerprint(root, names)).found
        assert sizes == [[16, 16]] * len(names)
        read_s = time.monotonic()
        model = DistributedDataParallel(torch.nn.Linear(3, 1).to(session.device))
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        session.track(model=model, optimizer=optimizer)
        loader = session.loader(Pictures(Path(root), names), 32, num_workers=2)
        for number, batch in enumerate(session.steps(loader, 1)):
            session.backward(batch, lambda part: model(part).square().mean())
            optimizer.step()
            optimizer.zero_grad()
            time.sleep(0.05)  # else a short list is over before the stop
            if session.rank == 0 and number == 0:
                now_s = time.monotonic()
                told = {
                    "attach_s": attached_s - began_s,
                    "headers_s": read_s - attached_s,
                    "first_step_s": now_s - read_s,
                }
                Path(session.output, "first.json").write_text(json.dumps(told | {"at": time.time()}))
