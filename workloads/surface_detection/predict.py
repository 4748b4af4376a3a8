"""Find the surface in every volume from overlapping tiles; goes on where it was cut.

    alone:  python -m kgorch.workloads.surface_detection.predict --data volumes --weights outputs/surface.safetensors

Axes: B batch, D pages, H rows, W columns.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.distributed as dist
from PIL import Image
from torch import Tensor, nn

from kgorch import KgorchError, attach
from kgorch.workloads import cli
from kgorch.workloads.common.files import tell_left_out
from kgorch.workloads.common.precision import finite
from kgorch.workloads.common.trained import trained
from kgorch.workloads.surface_detection import volumes as files
from kgorch.workloads.surface_detection.data import Tile, Tiles, bell, coverage
from kgorch.workloads.surface_detection.model import SurfaceUNet, dice_parts

if TYPE_CHECKING:
    from kgorch import Session

MIRRORED: tuple[tuple[int, ...], ...] = ((), (-1,), (-2,), (-3,))
"""Along which axes: the ways to look at a tile, in this order."""


class Canvas(nn.Module):
    """What this rank has found of the volume that is under way: sums of weighted probabilities, and how many tiles.

    A module of buffers, because kgorch keeps the buffers of every rank, and each rank has other tiles. It is as large as the
    largest volume along each axis, so that its shape stays.
    """

    def __init__(self, tiles: Tiles, blend: str) -> None:
        super().__init__()
        side = tiles.side
        shape = [max(side, *sizes) for sizes in zip(*(volume.shape for volume in tiles.volumes), strict=True)]
        self.register_buffer("total", torch.zeros(shape))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        one = bell(side, blend)
        self.register_buffer("weight", one[:, None, None] * one[:, None] * one, persistent=False)

    def add(self, place: Sequence[int], probability_DHW: Tensor) -> None:
        """One tile that begins at `place`."""
        cut = tuple(slice(first, first + size) for first, size in zip(place, probability_DHW.shape, strict=True))
        self.get_buffer("total")[cut] += self.get_buffer("weight") * probability_DHW
        self.get_buffer("count").add_(1)

    def clear(self) -> None:
        self.get_buffer("total").zero_()
        self.get_buffer("count").zero_()

    def joined(self) -> tuple[Tensor, int]:
        """Sum and count over all ranks; the canvas stays as it is, for it may be saved once more."""
        total, count = self.get_buffer("total").clone(), self.get_buffer("count").clone()
        for each in (total, count):
            dist.all_reduce(each)
        return total, int(count)


class Predictor:
    """Takes tiles in their order, and writes a volume's mask when its last one was seen."""

    def __init__(
        self,
        session: Session,
        net: nn.Module,
        tiles: Tiles,
        canvas: Canvas,
        *,
        overlap: float,
        blend: str,
        mirrored: int,
    ) -> None:
        self.threshold = 0.5
        self._session, self._net, self._tiles, self._canvas = session, net, tiles, canvas
        self._overlap, self._blend, self._ways = overlap, blend, MIRRORED[:mirrored]
        self._folder = session.output / "predictions"
        self._folder.mkdir(parents=True, exist_ok=True)

    def take(self, batch: Tile) -> None:
        """One batch of one volume."""
        counts = [place for place in batch.place.tolist() if place[4]]
        if counts:
            self._add([place[1:4] for place in counts], batch.image[: len(counts)])
        number, *_, last = batch.place[0].tolist()
        if last:
            self._finish(number)
            self._canvas.clear()

    @torch.no_grad()
    def _add(self, places: Sequence[Sequence[int]], images_BDHW: Tensor) -> None:
        """In as many pieces as a training step is cut into."""
        parts = images_BDHW.split(self._session.microbatch or len(images_BDHW))
        found = torch.cat([self._probability(part.to(self._session.device)) for part in parts])
        for place, probability_DHW in zip(places, found, strict=True):
            self._canvas.add(place, probability_DHW)

    def _probability(self, images_BCDHW: Tensor) -> Tensor:
        """[B, D, H, W]: the mean over the tile and its mirror images, each turned back."""
        total = torch.zeros_like(images_BCDHW[:, 0])
        for axes in self._ways:
            logits = finite(self._session, lambda axes=axes: self._net(images_BCDHW.flip(axes)))
            total += logits.sigmoid().flip(axes)[:, 0]
        return total / len(self._ways)

    def _finish(self, number: int) -> None:
        """Join what the ranks found, and let rank 0 write the mask. All ranks."""
        total_DHW, count = self._canvas.joined()
        if count != len(self._tiles.starts[number]) and not self._session.quick:
            # Some rank's share is not there: the number of ranks has changed in the midst of this volume.
            self._canvas.clear()
            mine = self._tiles.starts[number][self._session.rank :: self._session.world_size]
            for place in mine:
                self._add([place], self._tiles.image(number, place)[None, None])
            total_DHW, count = self._canvas.joined()
        if self._session.rank == 0:
            volume = self._tiles.volumes[number]
            depth, height, width = volume.shape
            covered = coverage(volume.shape, self._tiles.side, self._overlap, self._blend)
            down, along, across = (each.to(total_DHW.device) for each in covered)
            probability_DHW = (total_DHW[:depth, :height, :width] / down[:, None, None] / along[:, None] / across).cpu()
            files.write(self._folder / f"{volume.id}.tif", (probability_DHW > self.threshold).numpy())
            picture(self._folder / f"{volume.id}.png", self._tiles, number, probability_DHW, self.threshold)
            self._score(volume, probability_DHW)

    def _score(self, volume: files.Volume, probability_DHW: Tensor) -> None:
        """Where there is a label: its Dice, into a file of its own."""
        if volume.label:
            label_DHW = torch.from_numpy(self._tiles.reader.box(volume.label, (0, 0, 0), volume.shape))
            overlap, areas = dice_parts(probability_DHW, label_DHW, [self.threshold]).tolist()
            (self._folder / f"{volume.id}.json").write_text(json.dumps({"dice": overlap / max(areas, 1)}) + "\n")


def main(
    data: str,
    part: str = "test",
    global_batch: int = 16,
    patch: int = 32,
    overlap: float = 0.5,
    blend: str = "gaussian",
    mirrored: int = 4,
    threshold: float = 0.5,
    best_threshold: bool = False,
    width: int = 8,
    depth: int = 2,
    kernel: int = 3,
    weights: str | None = None,
    which: str | None = None,
    valid: int = 2,
    valid_scroll: str | None = None,
    unpacked: str | None = None,
    unpacked_gib: float = 0.0,
    limit: int | None = None,
    skip_broken: bool = False,
    num_workers: int = 0,
    prefetch: int = 3,
) -> None:
    """Write predictions/ID.tif (a mask of 0 and 1), predictions/ID.png (a slice of it) and predictions.json to the output folder.

    --part is test, or valid: the volumes that training held out (--valid, --valid-scroll as there), which are scored, too. --patch,
    --width, --depth and --kernel as in training. Tiles overlap by that share of their side, and count by --blend: gaussian, hann
    or mean.
    --mirrored is how many looks at each tile are averaged, up to 4. --best-threshold takes the one that training found best
    instead of --threshold. --which is best or final, where not the best that the plan keeps; --weights is a safetensors file,
    needed when run without kgorch.
    """
    with attach() as session:
        if part not in ("test", "valid") or not 1 <= mirrored <= len(MIRRORED) or not 0 <= overlap < 1:
            raise KgorchError(
                "an argument of predict is out of its range",
                f'part = "{part}" (test, valid), mirrored = {mirrored} (1 to {len(MIRRORED)}), overlap = {overlap} (0 to below 1)',
                next_step="correct it in the plan",
            )
        folder = session.data(data)
        volumes, left_out = files.usable(
            session, folder, "test" if part == "test" else "train", skip_broken=skip_broken
        )
        if part == "valid":
            volumes = files.split(volumes, valid, valid_scroll)[1]
        tiles = Tiles(
            files.Reader(folder, unpacked, unpacked_gib),
            volumes[:limit],
            side=patch,
            overlap=overlap,
            together=global_batch,
        )
        net = SurfaceUNet(width, depth, kernel=kernel)
        found = trained(session, "train", file=weights, which=which)
        net.load_state_dict(found)
        net.to(session.device).eval()
        canvas = Canvas(tiles, blend).to(session.device)
        session.track(canvas=canvas)
        tell_left_out(session, left_out)
        predictor = Predictor(session, net, tiles, canvas, overlap=overlap, blend=blend, mirrored=mirrored)
        predictor.threshold = best_of(session.output / "metrics.csv") if best_threshold else threshold
        loader = session.loader(
            tiles, global_batch, shuffle=False, drop_last=False, num_workers=num_workers,
            prefetch_factor=prefetch if num_workers else None,
        )  # fmt: skip
        for batch in session.steps(loader, 1):
            predictor.take(batch)
        if session.rank == 0 and not session.quick:
            made = {
                "weights": found.facts, "threshold": predictor.threshold, "mirrored": mirrored, "overlap": overlap, "blend": blend,
                "volumes": [described(session.output / "predictions", volume) for volume in tiles.volumes], "left_out": left_out,
            }  # fmt: skip
            (session.output / "predictions.json").write_text(json.dumps(made, indent=1) + "\n")


def described(folder: Path, volume: files.Volume) -> dict[str, object]:
    scored = folder / f"{volume.id}.json"
    return {"id": volume.id, "shape": volume.shape} | (json.loads(scored.read_text()) if volume.label else {})


def best_of(metrics: Path) -> float:
    """The threshold that validation found best, at the epoch with the highest Dice. Raises KgorchError: there is none."""
    try:
        with open(metrics, newline="", encoding="utf-8") as file:
            lines = [line for line in csv.DictReader(file) if line["dice"]]
        return float(max(lines, key=lambda line: float(line["dice"]))["threshold"])
    except (OSError, ValueError, KeyError) as problem:
        raise KgorchError(
            "training has left no threshold", f"{metrics}: expected columns dice and threshold, found: {problem}",
            next_step="give one: threshold = 0.5, best_threshold = false",
        ) from problem  # fmt: skip


def picture(path: Path, tiles: Tiles, number: int, probability_DHW: Tensor, threshold: float) -> None:
    """The middle slice side by side: the image, the label where there is one, the probability, the mask."""
    volume = tiles.volumes[number]
    page, height, width = volume.shape[0] // 2, *volume.shape[1:]
    [slice_HW] = tiles.reader.box(volume.image, (page, 0, 0), (1, height, width))
    found_HW = probability_DHW[page].numpy()
    panels = [slice_HW, found_HW * 255, (found_HW > threshold) * 255]
    if volume.label:
        [label_HW] = tiles.reader.box(volume.label, (page, 0, 0), (1, height, width))
        panels.insert(1, np.array([0, 255, 90])[label_HW.clip(0, 2)])  # grey: not labelled
    gap = np.full((height, max(width // 40, 1)), 255)
    row = [each for panel in panels for each in (gap, panel)][1:]
    Image.fromarray(np.concatenate(row, 1).round().astype(np.uint8)).save(path, optimize=True)


if __name__ == "__main__":
    cli.run(main)
