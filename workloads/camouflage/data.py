"""Pictures of camouflaged animals as COD10K lays them out, and where in them the animal is.

    <root>/<Train or Test>/Image/NAME.jpg       the picture
    <root>/<Train or Test>/GT_Object/NAME.png   the animal 255, all else 0; the folder may be called GT, too

NAME is COD10K-CAM-… where there is an animal that hides, COD10K-NonCAM-… where there is none.
Axes: B batch, H rows, W columns. Nothing is held in memory but the names.
"""

from __future__ import annotations

from collections.abc import Iterable
from fnmatch import fnmatch
from functools import partial
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset

from workloads.common.files import DataError, picture, readable

Part = Literal["Train", "Test"]
MASK_FOLDERS = ("GT_Object", "GT")
PICTURES, MASKS = (".jpg", ".jpeg", ".png"), (".png", ".jpg")
MEAN, SPREAD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
"""Of ImageNet's colours, with which the published backbone was trained."""

ANIMAL = 128
"""A mask's value from which on it is the animal: edges of some masks are softened."""


class Sample(NamedTuple):
    """One picture; in a batch every axis list begins with B."""

    image: Tensor  # float32 [3, H, W], normalised
    mask: Tensor  # float32 [1, H, W], 0 or 1
    index: Tensor  # int64 []: into Pairs.pairs


class Pair(NamedTuple):
    """A picture and its mask on disk."""

    image: Path
    mask: Path

    @property
    def name(self) -> str:
        return self.image.stem


class Pairs(Dataset[Sample]):
    """The pictures of one part with their masks, all brought to one size.

    Args:
        size: rows and columns. names: only those that match, like "COD10K-CAM-*".
        augments: cuts, mirrors and brightens as chance has it. skip_broken: leave out what cannot be used, else it is an error.

    Attributes:
        broken: of the pictures left out, why.

    Raises:
        DataError: the folder does not hold what it should. Headers are read here; what is broken behind them is told when read.
    """

    def __init__(
        self, root: str | Path, part: Part, size: int, *, names: str = "*", augments: bool = False, skip_broken: bool = False
    ) -> None:  # fmt: skip
        self.size, self.augments = size, augments
        found, without = pairs_of(Path(root), part, names)
        if without and not skip_broken:
            raise without[0]
        self.pairs, broken = readable(found, read, skip_broken=skip_broken)
        self.broken = [str(problem) for problem in without] + broken
        if not self.pairs:
            raise DataError(
                f"no picture is left of {Path(root) / part}", f"expected one that can be read, found {self.broken[0]}",
                next_step="fetch the data again",
            )  # fmt: skip
        if not skip_broken:
            for pair in self.pairs:
                see_that_they_fit(pair)

    def __len__(self) -> int:
        return len(self.pairs)

    def __getitem__(self, index: int) -> Sample:
        image_HWC, mask_HW = read(self.pairs[index])
        image, mask = Image.fromarray(image_HWC), Image.fromarray(mask_HW)
        box, mirrored, light = (0.0, 0.0, *map(float, image.size)), False, 1.0
        if self.augments:
            # The SDK seeds torch's RNG for each sample, so the same sample is cut alike by any worker.
            box = cut(*image.size)
            mirrored, light = bool(torch.rand(()) < 0.5), float(torch.empty(()).uniform_(0.8, 1.2))
        sides = (self.size, self.size)
        image_CHW = torch.from_numpy(np.array(image.resize(sides, Image.Resampling.BILINEAR, box))).permute(2, 0, 1)
        mask_1HW = torch.from_numpy(np.array(mask.resize(sides, Image.Resampling.NEAREST, box)))[None]
        image_CHW = ((image_CHW * (light / 255)).clamp(0, 1) - column(MEAN)) / column(SPREAD)
        if mirrored:
            image_CHW, mask_1HW = image_CHW.flip(-1), mask_1HW.flip(-1)
        return Sample(image_CHW.contiguous(), mask_1HW.float().contiguous(), torch.tensor(index))


def cut(width: int, height: int) -> tuple[float, float, float, float]:
    """Where a random part lies, at least three quarters of each side: left, top, right, bottom."""
    share = 0.75 + 0.25 * torch.rand(2)
    left, top = ((1 - share) * torch.rand(2)).tolist()
    return left * width, top * height, (left + float(share[0])) * width, (top + float(share[1])) * height


def column(values: Iterable[float]) -> Tensor:
    return torch.tensor(list(values))[:, None, None]


def read(pair: Pair) -> tuple[np.ndarray, np.ndarray]:
    """The picture as uint8 [H, W, 3], the mask as uint8 [H, W], 0 and 1. Raises DataError when one is broken."""
    image_HWC, mask_HW = picture(pair.image), picture(pair.mask, "L")
    see_sizes(pair, image_HWC.shape[1::-1], mask_HW.shape[::-1])
    if 0 < (highest := int(mask_HW.max())) < ANIMAL:
        raise DataError(
            f"{pair.mask.name} is no mask of an animal", f"{pair.mask}: expected 0 and 255, found values up to {highest}",
            next_step="take GT_Object (GT_Instance counts the animals), or leave such samples out: skip_broken = true",
        )  # fmt: skip
    return image_HWC, (mask_HW >= ANIMAL).astype(np.uint8)


def see_that_they_fit(pair: Pair) -> None:
    """By their headers alone."""
    see_sizes(pair, *map(partial(size_of), pair))


def size_of(path: Path) -> tuple[int, int]:
    try:
        with Image.open(path) as found:
            return found.size
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as problem:
        raise DataError(
            f"{path.name} cannot be read", f"{path}: expected a picture, found: {problem}",
            next_step="fetch this file again, or leave such samples out: skip_broken = true",
        ) from problem  # fmt: skip


def see_sizes(pair: Pair, image: tuple[int, ...], mask: tuple[int, ...]) -> None:
    if image != mask:
        raise DataError(
            f"{pair.mask.name} is not the size of its picture",
            f"{pair.mask}: expected {image[0]}x{image[1]} as {pair.image.name}, found {mask[0]}x{mask[1]}",
            next_step="fetch both again, or leave such samples out: skip_broken = true",
        )


def pairs_of(root: Path, part: str, names: str) -> tuple[list[Pair], list[DataError]]:
    """The pictures that have a mask, by name; and what is to be said of those without one."""
    folder = root / part
    images = folder / "Image"
    masks = next((folder / name for name in MASK_FOLDERS if (folder / name).is_dir()), None)
    if not images.is_dir() or masks is None:
        missing = images if not images.is_dir() else folder / MASK_FOLDERS[0]
        raise DataError(
            f"there is no folder {missing}", f"expected {part}/Image and {part}/{' or '.join(MASK_FOLDERS)} below {root}",
            next_step=f"correct the path, or: python -m workloads.camouflage.make_animals {root}",
        )  # fmt: skip
    of = {path.stem: path for path in masks.iterdir() if path.suffix.lower() in MASKS}
    there = sorted(path for path in images.iterdir() if path.suffix.lower() in PICTURES)
    wanted = [path for path in there if fnmatch(path.stem, names)]
    if not wanted:
        raise DataError(
            f"there are no pictures {names!r} in {images}",
            f"expected NAME.jpg, found {len(there)} pictures{f' like {there[0].name}' if there else ''}",
            next_step="fetch the data again, or correct names",
        )
    without = [
        DataError(
            f"{path.name} has no mask", f"expected {masks / path.stem}.png, found no such file",
            next_step="fetch it again, or leave such samples out: skip_broken = true",
        )
        for path in wanted if path.stem not in of
    ]  # fmt: skip
    return [Pair(path, of[path.stem]) for path in wanted if path.stem in of], without
