"""Patches of volumes to train and score on, and the tiles that cover a volume for its prediction.

Axes: B batch, D pages, H rows, W columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from kgorch.workloads.surface_detection.volumes import SURFACE, Reader, Shape, Volume

NOT_LABELLED = 2
LOOKS = 4
"""Slices of a label in which a surface is looked for before a patch is placed anywhere."""


class Patch(NamedTuple):
    """One sample; in a batch every axis list begins with B."""

    image: Tensor  # float32 [1, D, H, W], 0..1
    label: Tensor  # uint8 [1, D, H, W]: 0, 1 surface, 2 not labelled


class Tile(NamedTuple):
    """A piece of a volume to be predicted; in a batch every axis list begins with B."""

    image: Tensor  # float32 [1, D, H, W], 0..1
    place: (
        Tensor  # int64 [6]: number of the volume, first page, row, column, 1 if it counts, 1 if the volume's last batch
    )


class Patches(Dataset[Patch]):
    """`count` patches of each volume: where, is drawn anew each time in training, and always the same for a score.

    In training 1.5 patches are centred on a surface for each one that may lie anywhere, all are turned and mirrored, and some get
    another brightness or contrast. To centre one, a slice of the label is drawn and a surface voxel in it: one slice is read,
    where a list of all surface voxels would take every label.

    Args:
        side: voxels of a patch along each axis. What lies outside of a smaller volume is 0, and not labelled.
        positive: patches on a surface for each one anywhere.
    """

    def __init__(
        self,
        reader: Reader,
        volumes: Sequence[Volume],
        *,
        side: int = 64,
        count: int = 8,
        positive: float = 1.5,
        train: bool = True,
    ) -> None:
        self._reader, self.volumes, self._side, self._count, self._train = reader, volumes, side, count, train
        self._on_surface = positive / (1 + positive)

    def __len__(self) -> int:
        return len(self.volumes) * self._count

    def __getitem__(self, index: int) -> Patch:
        volume = self.volumes[index // self._count]
        assert volume.label
        # The SDK seeds torch's generator for each sample, so a sample comes out alike in any process.
        generator = None if self._train else torch.Generator().manual_seed(index)
        start = self._placed(volume, generator)
        image = filled(self._reader, volume.image, volume.shape, start, self._side, 0).float() / 255
        label = filled(self._reader, volume.label, volume.shape, start, self._side, NOT_LABELLED)
        if self._train:
            image, label = turned(image, label)
            image = lit(image)
        return Patch(image[None], label[None])

    def _placed(self, volume: Volume, generator: torch.Generator | None) -> list[int]:
        """Where the patch begins."""

        def below(most: int) -> int:
            return int(torch.randint(most, (), generator=generator))

        last = [max(size - self._side, 0) for size in volume.shape]
        if float(torch.rand((), generator=generator)) < self._on_surface:
            depth, height, width = volume.shape
            for _ in range(LOOKS):
                page = below(depth)
                [label_HW] = self._reader.box(str(volume.label), (page, 0, 0), (1, height, width))
                if len(there := np.argwhere(label_HW == SURFACE)):
                    middle = page, *there[below(len(there))].tolist()
                    return [min(max(m - self._side // 2, 0), most) for m, most in zip(middle, last, strict=True)]
        return [below(most + 1) for most in last]


def filled(reader: Reader, name: str, shape: Shape, start: Sequence[int], side: int, outside: int) -> Tensor:
    """uint8 [side, side, side] of a volume, `outside` where the volume ends."""
    inside = [min(side, size - first) for size, first in zip(shape, start, strict=True)]
    box = reader.box(name, start, inside)
    if box.shape != (side,) * 3:
        box = np.pad(box, [(0, side - size) for size in inside], constant_values=outside)
    return torch.from_numpy(box)


def turned(image: Tensor, label: Tensor) -> tuple[Tensor, Tensor]:
    """Mirrored along each axis one time in two, and turned about the first axis one time in two; both alike."""
    axes = [axis for axis in (-3, -2, -1) if torch.rand(()) < 0.5]
    turns = int(torch.randint(4, ())) if torch.rand(()) < 0.5 else 0
    image, label = (torch.rot90(thing.flip(axes), turns, dims=(-2, -1)).contiguous() for thing in (image, label))
    return image, label


def lit(image: Tensor) -> Tensor:
    """Up to 20% brighter or darker three times in ten, and up to 30% more or less contrast as often."""
    if torch.rand(()) < 0.3:
        image = image * (0.8 + 0.4 * torch.rand(()))
    if torch.rand(()) < 0.3:
        mean = image.mean()
        image = (image - mean) * (0.7 + 0.6 * torch.rand(())) + mean
    return image.clamp(0, 1)


class Tiles(Dataset[Tile]):
    """Tiles that cover every volume, one volume after another, each filled up to whole batches with tiles that do not count.

    So a batch belongs to one volume, and all ranks are done with it at the same step.

    Args:
        overlap: of neighbours, as a share of a tile's side.
        together: tiles of one step, over all ranks.
    """

    def __init__(
        self, reader: Reader, volumes: Sequence[Volume], *, side: int = 64, overlap: float = 0.5, together: int
    ) -> None:
        self.reader, self.volumes, self.side, self._together = reader, volumes, side, together
        self.starts = [grid(volume.shape, side, overlap) for volume in volumes]
        batches = [-(-len(starts) // together) for starts in self.starts]
        self._ends = np.cumsum([count * together for count in batches])

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, index: int) -> Tile:
        number = int(np.searchsorted(self._ends, index, side="right"))
        starts, end = self.starts[number], int(self._ends[number])
        first = int(self._ends[number - 1]) if number else 0
        counts = index - first < len(starts)
        place = starts[index - first if counts else 0]
        last = index >= end - self._together
        return Tile(self.image(number, place)[None], torch.tensor([number, *place, counts, last]))

    def image(self, number: int, place: Sequence[int]) -> Tensor:
        """float32 [D, H, W], 0..1: a tile of a volume."""
        volume = self.volumes[number]
        whole = decoded(self.reader, volume)
        inside = whole[tuple(slice(first, first + self.side) for first in place)]
        box = np.pad(inside, [(0, self.side - size) for size in inside.shape])
        return torch.from_numpy(box).float() / 255


@lru_cache(maxsize=1)  # tiles come volume by volume, so a process decodes each once
def decoded(reader: Reader, volume: Volume) -> np.ndarray:
    """A whole volume, uint8 [D, H, W]."""
    return reader.box(volume.image, (0, 0, 0), volume.shape)


def positions(size: int, side: int, overlap: float) -> list[int]:
    """Where tiles begin along an axis; the last one ends with the volume."""
    step = max(round(side * (1 - overlap)), 1)
    return [*range(0, size - side, step), max(size - side, 0)]


def grid(shape: Shape, side: int, overlap: float) -> list[tuple[int, int, int]]:
    """The same of all three axes."""
    depth, height, width = (positions(size, side, overlap) for size in shape)
    return [(page, row, column) for page in depth for row in height for column in width]


def bell(side: int, kind: str) -> Tensor:
    """What a tile counts along one axis, float32 [side], above 0: in the middle most, where the network sees all around.

    `kind`: "gaussian", of a deviation of an eighth of the side, "hann", or "mean", where all voxels count the same.
    """
    at = torch.arange(side) + 0.5
    match kind:
        case "gaussian":
            return torch.exp(-0.5 * ((at - side / 2) / (side / 8)) ** 2)
        case "hann":
            return torch.sin(torch.pi * at / side) ** 2
        case "mean":
            return torch.ones(side)
    raise ValueError(f'blend = {kind!r}: expected "gaussian", "hann" or "mean"')


def coverage(shape: Shape, side: int, overlap: float, kind: str) -> list[Tensor]:
    """For each axis the sum of what all tiles count there, float32; their outer product is that of the volume."""
    found = []
    for size in shape:
        total = torch.zeros(max(size, side))
        for first in positions(size, side, overlap):
            total[first : first + side] += bell(side, kind)
        found.append(total[:size])
    return found
