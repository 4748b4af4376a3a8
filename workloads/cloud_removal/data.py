"""Sentinel images as SEN12MS-CR has them, listed in a table: radar, cloud-free and cloudy optical of one place.

    <root>/data.csv   split,s1,s2,s2_cloudy   a line a place; paths relative to the root; split: train, val or test
    s1                GeoTIFF, 2 bands (VV, VH), float32, decibels           ROIs1158_spring_s1_1_p30.tif
    s2, s2_cloudy     GeoTIFF, 13 bands, uint16, reflectance times 10000     ROIs1158_spring_s2_cloudy_1_p30.tif

Clipped and scaled as the authors of GLF-CR do. Training reads random windows of `crop` pixels and nothing around them but the
rows they lie in; the other parts are read whole. Axes: B batch, C bands, H rows, W columns.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import rasterio
import torch
from rasterio.errors import RasterioError
from rasterio.windows import Window
from torch import Tensor
from torch.utils.data import Dataset

from workloads.common.files import DataError, readable

Part = Literal["train", "val", "test"]
PARTS = ("train", "val", "test")
BANDS = {"s1": 2, "s2": 13, "s2_cloudy": 13}
KINDS = {"s1": "f", "s2": "ui", "s2_cloudy": "ui"}
"""Of numpy's types: decibels are fractions, reflectance times 10000 is whole."""

SAR_FROM = np.array([-25.0, -32.5], np.float32)
"""Decibels of VV and VH that become 0; 0 dB becomes 1."""

FULL = 10000.0


class Sample(NamedTuple):
    """One place; in a batch every axis list begins with B."""

    cloudy: Tensor  # float32 [13, H, W], 0..1
    sar: Tensor  # float32 [2, H, W], 0..1
    clear: Tensor  # float32 [13, H, W], 0..1
    index: Tensor  # int64 []: which of Scenes.scenes


@dataclass(frozen=True)
class Scene:
    """The three files of one place."""

    s1: Path
    s2: Path
    s2_cloudy: Path

    @property
    def name(self) -> str:
        return self.s2_cloudy.stem


class Scenes(Dataset[Sample]):
    """The places of one part of the table.

    Args:
        crop: rows and columns of a random window; None reads images whole.
        skip_broken: leave out places whose files cannot be read; all files are read once to know. Without it their
            headers are, and a broken body ends the training, named, when it is its turn.
    Attributes:
        left_out: what was said of each place left out.

    Raises:
        DataError: the table or the files are not what they should be.
    """

    def __init__(self, root: str | Path, part: Part, *, crop: int | None = None, skip_broken: bool = False) -> None:
        self.crop = crop
        listed = [scene for split, scene in places(Path(root)) if split == part]

        def read_all(scene: Scene) -> None:
            self.size_of(scene)
            self.read(scene, None)

        self.scenes, self.left_out = readable(listed, read_all, skip_broken=skip_broken)
        if not self.scenes:
            raise DataError(
                f"the part '{part}' of {root} is empty",
                f"{Path(root) / 'data.csv'}: expected lines that begin with {part}, found {len(listed)}, "
                f"of which {len(self.left_out)} cannot be read",
                next_step=f"list some with the split {part}",
            )
        self.sizes = [self.size_of(scene) for scene in self.scenes]

    def __len__(self) -> int:
        return len(self.scenes)

    def __getitem__(self, index: int) -> Sample:
        window = None
        if self.crop is not None:
            # The SDK seeds torch's RNG for each sample, so the same sample is cut alike by any worker.
            top, left = (int(torch.randint(size - self.crop + 1, ())) for size in self.sizes[index])
            window = Window(left, top, self.crop, self.crop)
        cloudy, sar, clear = self.read(self.scenes[index], window)
        return Sample(cloudy, sar, clear, torch.tensor(index))

    def read(self, scene: Scene, window: Window | None) -> tuple[Tensor, Tensor, Tensor]:
        """Cloudy, SAR and clear [C, H, W] of a window, scaled to 0..1."""
        return reflectance(scene.s2_cloudy, window), backscatter(scene.s1, window), reflectance(scene.s2, window)

    def size_of(self, scene: Scene) -> tuple[int, int]:
        """Rows and columns, once the headers of all three files fit each other and the crop."""
        size: tuple[int, int] | None = None
        for key, bands in BANDS.items():
            path: Path = getattr(scene, key)
            with opened(path) as file:
                found, kind = (file.count, file.dtypes[0]), np.dtype(file.dtypes[0]).kind
                if file.count != bands or kind not in KINDS[key]:
                    raise DataError(
                        f"{path.name} is no {key} image",
                        f"{path}: expected {bands} bands of {'float32' if key == 's1' else 'uint16'}, "
                        f"found {found[0]} of {found[1]}",
                        next_step="correct its line in data.csv, or fetch it again",
                    )
                if size is not None and file.shape != size:
                    raise DataError(
                        f"{path.name} is not the size of {scene.s1.name}",
                        f"{path}: expected {size} rows and columns, found {file.shape}",
                        next_step="the three images of a line belong to one place: correct its line in data.csv",
                    )
                size = file.shape
        assert size is not None
        if self.crop is not None and min(size) < self.crop:
            raise DataError(
                f"{scene.s1.name} is smaller than the crop",
                f"{scene.s1}: expected {self.crop} rows and columns, found {size}",
                next_step=f"lower crop to {min(size)}, or leave it out",
            )
        return size


def places(root: Path) -> Iterator[tuple[str, Scene]]:
    """The lines of data.csv: split and files. Raises DataError naming the first line that is wrong."""
    table = root / "data.csv"
    try:
        with open(table, encoding="utf-8-sig", newline="") as file:
            reader = csv.DictReader(file)
            head, lines = reader.fieldnames or [], list(reader)
    except (OSError, ValueError, csv.Error) as problem:
        raise DataError(
            f"there is no table of images in {root}", f"{table}: expected a CSV, found: {problem}",
            next_step=f"correct the path, or: python -m workloads.cloud_removal.make_scenes {root}",
        ) from problem  # fmt: skip
    if missing := [name for name in ("split", *BANDS) if name not in head]:
        raise DataError(
            f"{table} has no column {missing[0]!r}", f"found {', '.join(head) or 'no line'}",
            next_step="its first line names the columns: split,s1,s2,s2_cloudy",
        )  # fmt: skip
    for number, line in enumerate(lines, 2):
        if line["split"] not in PARTS or not all(line[name] for name in BANDS):
            raise DataError(
                f"{table}:{number}: {line['split']!r} is no split" if line["split"] not in PARTS
                else f"{table}:{number}: a path is missing",
                f"expected {', '.join(PARTS)} and three paths, found {','.join(str(line[name]) for name in line)}",
                next_step="correct this line, or leave it out",
            )  # fmt: skip
        yield line["split"], Scene(*(root / line[name] for name in BANDS))


@contextmanager
def opened(path: Path) -> Iterator[rasterio.DatasetReader]:
    """An open GeoTIFF; what goes wrong with it meanwhile is said with its name."""
    try:
        with rasterio.open(path, driver="GTiff") as file:
            yield file
    except (RasterioError, OSError, ValueError) as problem:
        raise DataError(
            f"{path.name} cannot be read", f"{path}: expected a GeoTIFF, found: {problem}",
            next_step="fetch this file again, or leave such places out: skip_broken = true",
        ) from problem  # fmt: skip


def reflectance(path: Path, window: Window | None) -> Tensor:
    """A Sentinel-2 image, float32 [13, H, W], 0..1."""
    with opened(path) as file:
        bands_CHW = file.read(window=window).astype(np.float32)
    return torch.from_numpy(bands_CHW.clip(0, FULL) / FULL)


def backscatter(path: Path, window: Window | None) -> Tensor:
    """A Sentinel-1 image, float32 [2, H, W], 0..1. Holes are filled with the mean of what is around them."""
    with opened(path) as file:
        bands_CHW = file.read(window=window)
    sound_CHW = np.isfinite(bands_CHW)
    if not sound_CHW.any() or bands_CHW[sound_CHW].min() >= 0:
        found = "nothing but holes" if not sound_CHW.any() else f"nothing below {bands_CHW[sound_CHW].min():g}"
        raise DataError(
            f"{path.name} holds no decibels", f"{path}: expected figures from about -35 to 5, found {found}",
            next_step="convert it: 10 * log10 of the backscatter, or leave it out: skip_broken = true",
        )  # fmt: skip
    bands_CHW = np.where(sound_CHW, bands_CHW, bands_CHW[sound_CHW].mean())
    from_C11 = SAR_FROM[:, None, None]
    return torch.from_numpy((bands_CHW.clip(from_C11, 0) / -from_C11 + 1).astype(np.float32))
