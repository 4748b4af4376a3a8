"""Paint the ink probability of every fragment from overlapping tiles; goes on where it was cut.

    alone:  python -m workloads.ink_detection.predict --data fragments --weights outputs/ink.safetensors

Axes: H rows, W columns.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.distributed as dist
from PIL import Image
from torch import Tensor, nn

from orchestrator.errors import KgorchError
from orchestrator.worker import attach
from workloads import cli
from workloads.common.files import tell_left_out
from workloads.common.trained import trained
from workloads.ink_detection.data import Fragments, Tile
from workloads.ink_detection.model import InkUNet

if TYPE_CHECKING:
    from orchestrator.worker.session import Session


class Canvas(nn.Module):
    """What this rank has painted of each fragment: the sum of probabilities, and how often it was here.

    A module of buffers, because kgorch keeps the buffers of every rank, and each rank paints other tiles.
    """

    def __init__(self, dataset: Fragments) -> None:
        super().__init__()
        for number, fragment in enumerate(dataset.fragments):
            self.register_buffer(f"sum_{number}", torch.zeros(fragment.mask_HW.shape))
            self.register_buffer(f"count_{number}", torch.zeros(fragment.mask_HW.shape, dtype=torch.uint8))

    def paint(self, tiles: Tile, probability_BHW: Tensor) -> None:
        """Add one batch of tiles."""
        for (number, top, left), probability_HW in zip(tiles.place.tolist(), probability_BHW, strict=True):
            height, width = probability_HW.shape
            place = np.s_[top : top + height, left : left + width]
            self.get_buffer(f"sum_{number}")[place] += probability_HW
            self.get_buffer(f"count_{number}")[place] += 1

    def joined(self, number: int) -> tuple[Tensor, Tensor]:
        """Sum and count [H, W] over all ranks; the canvas stays as it is, for it may be saved once more."""
        both = self.get_buffer(f"sum_{number}").clone(), self.get_buffer(f"count_{number}").clone()
        for image_HW in both:
            dist.all_reduce(image_HW)
        return both


def main(
    data: str,
    global_batch: int = 16,
    layers: int = 8,
    tile: int = 64,
    stride: int = 16,
    channels: list[int] = [16, 32, 64],  # noqa: B006  (read only)
    threshold: float = 0.5,
    weights: str | None = None,
    which: str | None = None,
    num_workers: int = 0,
    prefetch: int = 3,
    skip_broken: bool = False,
) -> None:
    """Write predictions/FRAGMENT.png (probability), predictions/binary/FRAGMENT.png and predictions.json to the output folder.

    --layers, --tile and --channels as they were in training; --stride is the step between tiles, which
    overlap and are averaged (at most 255 times a pixel); --which is best or final, where not
    the best that the plan keeps; --weights is a safetensors file, needed when run without kgorch.
    """
    with attach() as session:
        dataset = Fragments(data, "all", layers=layers, tile=tile, stride=stride, skip_broken=skip_broken)
        model = InkUNet(channels)
        found = trained(session, "train", file=weights, which=which)
        model.load_state_dict(found)
        model.to(session.device).eval()
        canvas = Canvas(dataset).to(session.device)
        session.track(canvas=canvas)
        tell_left_out(session, dataset.left_out)
        loader = session.loader(
            dataset, global_batch, shuffle=False, drop_last=False, num_workers=num_workers,
            prefetch_factor=prefetch if num_workers else None,
        )  # fmt: skip
        for batch in session.steps(loader, 1):
            if session.weight:  # else this rank has no tile left, and was lent another rank's
                canvas.paint(batch, ink_probability(session, model, batch))
        write(session, dataset, canvas, threshold)
        if session.rank == 0:
            made = {"fragments": [fragment.name for fragment in dataset.fragments], "weights": found.facts}
            (session.output / "predictions.json").write_text(json.dumps(made, indent=1) + "\n")


@torch.no_grad()
def ink_probability(session: Session, model: InkUNet, batch: Tile) -> Tensor:
    """[B, H, W] on the session's device, in as many pieces as a training step is cut into."""
    pieces = batch.volume.split(session.microbatch or len(batch.volume))
    with torch.autocast(session.device.type, torch.float16, enabled=session.device.type == "cuda"):
        return torch.cat([model(piece.to(session.device)).sigmoid()[:, 0] for piece in pieces])


def write(session: Session, dataset: Fragments, canvas: Canvas, threshold: float) -> None:
    """Average what the ranks painted, blank what is no papyrus, and let rank 0 write the pictures."""
    folder = session.output / "predictions"
    (folder / "binary").mkdir(parents=True, exist_ok=True)
    for number, fragment in enumerate(dataset.fragments):
        sum_HW, count_HW = (image_HW.cpu().numpy() for image_HW in canvas.joined(number))
        expected_HW = coverage(dataset, number)
        if not session.quick and (count_HW != expected_HW).any():
            raise KgorchError(
                f"the prediction of fragment {fragment.name} has holes or doubles",
                f"expected {expected_HW.sum()} painted pixels, found {count_HW.sum()}",
                next_step="start this stage anew; it cannot go on with another number of ranks",
            )
        probability_HW = np.where(fragment.mask_HW, sum_HW / count_HW.clip(1), 0)
        if session.rank == 0:
            for image_HW, path in (
                ((probability_HW * 255).round(), folder / f"{fragment.name}.png"),
                ((probability_HW > threshold) * 255, folder / "binary" / f"{fragment.name}.png"),
            ):
                Image.fromarray(image_HW.astype(np.uint8)).save(path)


def coverage(dataset: Fragments, number: int) -> np.ndarray:
    """How many tiles lie over each pixel of a fragment, uint8 [H, W]."""
    count_HW = np.zeros(dataset.fragments[number].mask_HW.shape, np.uint8)
    for fragment, top, left in dataset.tiles:
        if fragment == number:
            count_HW[top : top + dataset.tile, left : left + dataset.tile] += 1
    return count_HW


if __name__ == "__main__":
    cli.run(main)
