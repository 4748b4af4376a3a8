"""Ink fragments as the Vesuvius Challenge lays them out, and the tiles cut from them.

    <root>/<fragment>/surface_volume/NN.tif   one uint16 image a layer, 00..64 in the real data
    <root>/<fragment>/mask.png                8 bit, not 0 where there is papyrus
    <root>/<fragment>/inklabels.png           8 bit, not 0 where there is ink; absent where ink is sought

Axes: B batch, D layers, H rows, W columns. The ink lies near the middle of the layers, and a layer of a real
fragment is up to 280 MB, so only the middle ones are opened, and mapped instead of read where the file
allows it (uncompressed, as the real ones are): a tile then costs the pages it touches.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import tifffile
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset

from workloads.common.files import DataError, readable

Part = Literal["train", "valid", "all"]
VALID_SHARE = 0.25  # of the width, when there is only one fragment
Image.MAX_IMAGE_PIXELS = 2**29  # Pillow takes the 141 million pixels of the real fragment 2 for an attack


class Tile(NamedTuple):
    """One sample and where it was cut; in a batch every axis list begins with B."""

    volume: Tensor  # float32 [1, D, H, W], 0..1
    ink: Tensor  # float32 [1, H, W], 0 or 1; all 0 for a fragment without labels
    place: Tensor  # int64 [3]: index into Fragments.fragments, top, left


@dataclass(frozen=True)
class Fragment:
    """One fragment: the layers wanted of it (opened when used), where it is papyrus, where it is ink."""

    name: str
    layers: tuple[Path, ...]
    mask_HW: np.ndarray
    ink_HW: np.ndarray

    def volume_DHW(self, top: int, left: int, tile: int) -> np.ndarray:
        """A square column through all layers, float32, 0..1."""
        cut = np.s_[top : top + tile, left : left + tile]
        return np.stack([open_layer(path)[cut] for path in self.layers]).astype(np.float32) / 65535


class Fragments(Dataset[Tile]):
    """Every tile of one part of the data that touches papyrus.

    Args:
        part: "train" turns and mirrors its tiles; "valid" and "all" do not, and "all" does without labels.
        layers: how many of the middle layers; None takes all.
        stride: step of the grid in pixels; a last row and column of tiles end flush with the edge.
        validation: name of the fragment held out; None takes the last, or the right-hand quarter of the only one.
        skip_broken: leave out fragments of which a file cannot be used, before one is held out; `left_out` says why.

    Raises:
        DataError: the folder does not hold what it should.
    """

    def __init__(
        self, root: str | Path, part: Part = "all", *, layers: int | None = None, tile: int = 64,
        stride: int = 32, validation: str | None = None, skip_broken: bool = False,
    ) -> None:  # fmt: skip
        self.tile, self.turns = tile, part == "train"
        self.fragments: list[Fragment] = []
        self.tiles: list[tuple[int, int, int]] = []  # fragment, top, left
        labelled = part != "all"
        folders, self.left_out = readable(
            folders_in(Path(root)),
            lambda folder: read_fragment(folder, layers, labelled=labelled),
            skip_broken=skip_broken,
        )
        for folder, start, end in folders_of(folders, part, validation):
            fragment = read_fragment(folder, layers, labelled=labelled)
            rows, columns = fragment.mask_HW.shape
            self.tiles += [
                (len(self.fragments), top, left)
                for top in positions(0, rows, tile, stride)
                for left in positions(int(start * columns), int(end * columns), tile, stride)
                if fragment.mask_HW[top : top + tile, left : left + tile].any()
            ]
            self.fragments.append(fragment)
        if not self.tiles:
            raise DataError(
                f"no tile to cut for the part '{part}' of {root}",
                f"expected room for {tile}x{tile} pixels that touch the mask, found none",
                next_step="lower tile, or look at the size of the fragments and their masks",
            )

    def __len__(self) -> int:
        return len(self.tiles)

    def __getitem__(self, index: int) -> Tile:
        number, top, left = self.tiles[index]
        fragment = self.fragments[number]
        volume = torch.from_numpy(fragment.volume_DHW(top, left, self.tile))
        ink = torch.from_numpy(fragment.ink_HW[top : top + self.tile, left : left + self.tile]).float()
        if self.turns:
            # The SDK seeds torch's RNG for each sample, so the same sample is turned alike by any worker.
            turn = int(torch.randint(8, ()))
            volume, ink = (turned(image, turn) for image in (volume, ink))
        return Tile(volume[None], ink[None], torch.tensor(self.tiles[index]))


def turned(image: Tensor, turn: int) -> Tensor:
    """One of the eight ways to lay down a square: quarter turns, mirrored from 4 on; over the last two axes."""
    image = torch.rot90(image, turn % 4, dims=(-2, -1))
    return (image.flip(-1) if turn >= 4 else image).contiguous()


def positions(start: int, end: int, tile: int, stride: int) -> Sequence[int]:
    """Where tiles begin between start and end, the last one flush with the end; none if none fits."""
    last = end - tile
    return [*range(start, last, stride), last] if last >= start else []


def folders_in(root: Path) -> list[Path]:
    """The fragments' folders, by name."""
    if not root.is_dir():
        raise DataError(
            f"there is no data folder {root}", f"expected a folder of fragments, found nothing at {root.absolute()}",
            next_step=f"correct the path, or: python -m workloads.ink_detection.make_fragments {root}",
        )  # fmt: skip
    folders = sorted(folder for folder in root.iterdir() if (folder / "surface_volume").is_dir())
    if not folders:
        raise DataError(
            f"there are no fragments in {root}", "expected folders that hold surface_volume/, found none",
            next_step="point at the folder above the fragments (train/ in the real data)",
        )  # fmt: skip
    return folders


def folders_of(folders: Sequence[Path], part: Part, validation: str | None) -> Iterator[tuple[Path, float, float]]:
    """The folders of a part, each with the stretch of its width, as shares of 1, that belongs to the part."""
    names = [folder.name for folder in folders]
    if validation is not None and validation not in names:
        raise DataError(
            f"there is no fragment '{validation}' to validate on", f"found {', '.join(names)}",
            next_step="name one of these as validation",
        )  # fmt: skip
    if part == "all":
        yield from ((folder, 0.0, 1.0) for folder in folders)
    elif len(folders) == 1:
        border = 1 - VALID_SHARE
        yield (folders[0], 0.0, border) if part == "train" else (folders[0], border, 1.0)
    else:
        held_out = validation or names[-1]
        yield from ((folder, 0.0, 1.0) for folder in folders if (folder.name == held_out) == (part == "valid"))


def read_fragment(folder: Path, layers: int | None, *, labelled: bool) -> Fragment:
    """Open one fragment, and see that its layers, mask and (if need be) labels are there and of one size."""
    paths = middle_layers(folder / "surface_volume", layers)
    shape = open_layer(paths[0]).shape
    for path in paths:
        layer = open_layer(path)
        if layer.shape != shape or layer.dtype.kind != "u" or layer.dtype.itemsize != 2:
            raise DataError(
                f"a layer of fragment {folder.name} does not fit the others",
                f"{path}: expected uint16 {shape} as in {paths[0].name}, found {layer.dtype} {layer.shape}",
                next_step="fetch this layer again, or leave such fragments out: skip_broken = true",
            )
    mask_HW = read_picture(folder / "mask.png", shape)
    labels = folder / "inklabels.png"
    ink_HW = read_picture(labels, shape) if labelled or labels.exists() else np.zeros(shape, bool)
    return Fragment(folder.name, tuple(paths), mask_HW, ink_HW)


def middle_layers(folder: Path, layers: int | None) -> list[Path]:
    """The wanted layers around the middle of the numbers that are there."""
    found = {int(path.stem): path for path in folder.glob("*.tif") if path.stem.isdigit()}
    there = max(found) - min(found) + 1 if found else 0
    wanted = there if layers is None else layers
    if not 0 < wanted <= there:
        raise DataError(
            f"layers are missing in {folder}", f"expected {wanted or 'some'} files NN.tif, found {len(found)}",
            next_step="fetch the missing layers, or ask for fewer (layers = …)",
        )  # fmt: skip
    first = min(found) + (there - wanted) // 2
    if missing := [number for number in range(first, first + wanted) if number not in found]:
        raise DataError(
            f"layers are missing in {folder}",
            f"expected {first:02}.tif to {first + wanted - 1:02}.tif, found no {missing[0]:02}.tif",
            next_step="fetch the missing layers, or ask for fewer (layers = …)",
        )
    return [found[number] for number in range(first, first + wanted)]


@cache  # a process keeps its maps; unlike attributes they are not copied into loader workers
def open_layer(path: Path) -> np.ndarray:
    """One layer [H, W]: mapped where the file is uncompressed, else read once."""
    try:
        return tifffile.memmap(path, mode="r")
    except (OSError, ValueError):
        pass  # compressed, or broken: reading tells which
    try:
        return tifffile.imread(path)
    except (OSError, ValueError, RuntimeError, zlib.error) as problem:
        raise DataError(
            f"the layer {path.name} of fragment {path.parents[1].name} cannot be read",
            f"{path}: expected a TIFF, found: {problem}",
            next_step="fetch it again (if compressed: pip install imagecodecs), or leave such fragments out: skip_broken = true",
        ) from problem


def read_picture(path: Path, shape: tuple[int, ...]) -> np.ndarray:
    """A mask or labels [H, W] as bool, not 0 being true."""
    try:
        with Image.open(path) as picture:
            picture_HW = np.asarray(picture.convert("L")) > 0
    except (OSError, SyntaxError) as problem:  # Pillow's PNG reader calls a broken chunk a SyntaxError
        raise DataError(
            f"{path.name} of fragment {path.parent.name} cannot be read", f"{path}: expected a PNG, found: {problem}",
            next_step="fetch this file again, or leave such fragments out: skip_broken = true",
        ) from problem  # fmt: skip
    if picture_HW.shape != shape:
        raise DataError(
            f"{path.name} of fragment {path.parent.name} is not the size of its layers",
            f"{path}: expected {shape} rows and columns, found {picture_HW.shape}",
            next_step="fetch the fragment again (mask, labels and layers belong together), or leave it out: skip_broken = true",
        )
    return picture_HW
