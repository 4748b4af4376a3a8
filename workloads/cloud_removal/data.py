"""Sentinel images as SEN12MS-CR has them: radar, cloud-free and cloudy optical of one place.

    s1                GeoTIFF, 2 bands (VV, VH), float32, decibels           ROIs1158_spring_s1_1_p30.tif
    s2, s2_cloudy     GeoTIFF, 13 bands, uint16, reflectance times 10000     ROIs1158_spring_s2_cloudy_1_p30.tif

Which belong together: places.py. Clipped and scaled as the authors of GLF-CR do. Training reads random windows of `crop` pixels
and nothing around them but the rows they lie in; the other parts are read whole. Axes: B batch, C bands, H rows, W columns.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import rasterio
import torch
from rasterio.errors import RasterioError
from rasterio.windows import Window
from torch import Tensor
from torch.utils.data import Dataset

from kgorch.workloads.cloud_removal.places import PARTS, Part, Scene, find_places
from kgorch.workloads.common.files import DataError
from kgorch.workloads.common.listing import fingerprint, headers

if TYPE_CHECKING:
    from kgorch import Session

BANDS = {"s1": 2, "s2": 13, "s2_cloudy": 13}
DTYPES = {"s1": "f", "s2": "ui", "s2_cloudy": "ui"}
"""Of numpy's types: decibels are fractions, reflectance times 10000 is whole."""

SAR_FROM = np.array([-25.0, -32.5], np.float32)
"""Decibels of VV and VH that become 0; 0 dB becomes 1."""

FULL = 10000.0

PREFLIGHT_PLACES = 8


class Sample(NamedTuple):
    """One place; in a batch every axis list begins with B."""

    cloudy: Tensor  # float32 [13, H, W], 0..1
    sar: Tensor  # float32 [2, H, W], 0..1
    clear: Tensor  # float32 [13, H, W], 0..1
    index: Tensor  # int64 []: which of Scenes.scenes


class Scenes(Dataset[Sample]):
    """The places of one part of a list, or of the folders.

    Args:
        root: folder of the images. table: the list; see places.find_places.
        crop: rows and columns of a random window; None reads images whole.
        limit: at most so many places, evenly spread over the list.
        skip_broken: leave out places whose files cannot be read; all files are read once to know. Without it their
            headers are, and a broken body ends the training, named, when it is its turn.
        session: remembers for the run what was looked at, so that later sessions open no header; what was left out stays left out.
    Attributes:
        left_out: what was said of each place left out.

    Raises:
        DataError: the list or the files are not what they should be.
    """

    def __init__(
        self, root: str | os.PathLike[str], part: Part, *, table: str | None = None, crop: int | None = None,
        limit: int | None = None, skip_broken: bool = False, session: Session | None = None,
    ) -> None:  # fmt: skip
        self.root, self.crop = root, crop
        found = find_places(root, table)
        listed = [scene for split, scene in found.scenes if split == part]
        if limit is not None and limit < len(listed):
            listed = [listed[number * len(listed) // limit] for number in range(limit)]
        known = headers(
            session, f"images-{part}", listed, self._whole if skip_broken else self.size_of,
            key=fingerprint(root, (scene.s2_cloudy for scene in listed)), skip_broken=skip_broken,
        )  # fmt: skip
        said, sizes = dict(known.broken), list[tuple[int, int]]()
        for index, (scene, size) in enumerate(zip(listed, known.found, strict=True)):
            rows, columns = size or (0, 0)
            sizes.append((rows, columns))
            if size and crop is not None and min(sizes[-1]) < crop:
                problem = self._too_small(scene, sizes[-1], crop)
                if not skip_broken:
                    raise problem
                said[index] = str(problem)
        self.left_out = [problem for split, problem in found.incomplete if split == part] + list(said.values())
        self.scenes = [scene for index, scene in enumerate(listed) if index not in said]
        self.sizes = [size for index, size in enumerate(sizes) if index not in said]
        if not self.scenes:
            raise DataError(
                f"the part '{part}' is empty",
                f"{found.where}: expected places of it, found {len(listed)}, of which {len(said)} cannot be read",
                next_step=f"list some of the part {part} (in a list of GLF-CR 1 is train, 2 val, 3 test)",
            )

    def __len__(self) -> int:
        return len(self.scenes)

    def __getitem__(self, index: int) -> Sample:
        window = None
        if self.crop is not None:
            # The SDK seeds torch's RNG for each sample, so the same sample is cut alike by any worker.
            top, left = (int(torch.randint(size - self.crop + 1, ())) for size in self.sizes[index])
            window = Window(left, top, self.crop, self.crop)
        images = self.read(self.scenes[index], window)
        expected = self.sizes[index] if self.crop is None else (self.crop, self.crop)
        if any(image.shape[1:] != expected for image in images):
            raise DataError(
                f"the images of {self.scenes[index].name} are not of the size that they had",
                f"expected {expected} rows and columns, found {', '.join(str(tuple(image.shape[1:])) for image in images)}",
                next_step="the files have changed since this run read their headers: begin a new one with --fresh",
            )
        cloudy, sar, clear = images
        return Sample(cloudy, sar, clear, torch.tensor(index))

    def path(self, name: str) -> Path:
        """Of a file of a Scene. Asked for anew at each use: `session.data` changes to the local copy once that is whole."""
        return Path(os.fspath(self.root), name)

    def read(self, scene: Scene, window: Window | None) -> tuple[Tensor, Tensor, Tensor]:
        """Cloudy, SAR and clear [C, H, W] of a window, scaled to 0..1."""
        return (
            reflectance(self.path(scene.s2_cloudy), window),
            backscatter(self.path(scene.s1), window),
            reflectance(self.path(scene.s2), window),
        )

    def _whole(self, scene: Scene) -> list[int]:
        """Rows and columns, once all of it was read. Raises DataError."""
        size = self.size_of(scene)
        self.read(scene, None)
        return size

    def size_of(self, scene: Scene) -> list[int]:
        """Rows and columns, once the headers of all three files fit each other."""
        size: tuple[int, int] | None = None
        for kind, bands in BANDS.items():
            path = self.path(getattr(scene, kind))
            with opened(path) as file:
                if file.count != bands or np.dtype(file.dtypes[0]).kind not in DTYPES[kind]:
                    raise DataError(
                        f"{path.name} is no {kind} image",
                        f"{path}: expected {bands} bands of {'float32' if kind == 's1' else 'uint16'}, "
                        f"found {file.count} of {file.dtypes[0]}",
                        next_step="correct its line in the list, or fetch it again",
                    )
                if size is not None and file.shape != size:
                    raise DataError(
                        f"{path.name} is not the size of {Path(scene.s1).name}",
                        f"{path}: expected {size} rows and columns, found {file.shape}",
                        next_step="the three images of a line belong to one place: correct its line in the list",
                    )
                size = file.shape
        assert size is not None
        return list(size)

    def _too_small(self, scene: Scene, size: tuple[int, int], crop: int) -> DataError:
        return DataError(
            f"{Path(scene.s1).name} is smaller than the crop",
            f"{self.path(scene.s1)}: expected {crop} rows and columns, found {size}",
            next_step=f"lower crop to {min(size)}, or leave it out",
        )


def preflight(
    data: str, data_list: str | None = None, part: Part | None = None, limit: int | None = None, crop: int | None = None,
    skip_broken: bool = False,
) -> str:  # fmt: skip
    """Count the places that a stage will use, and read one of each part; takes the stage's arguments.

    Raises:
        DataError: as Scenes does.
    """
    parts = (part,) if part else PARTS[:2]
    counts = Counter(split for split, _ in find_places(data, data_list).scenes)
    for which in parts:
        few = Scenes(
            data, which, table=data_list, crop=None if part else crop, limit=PREFLIGHT_PLACES, skip_broken=skip_broken
        )
        few[0]
    said = [f"{min(counts[which], limit or counts[which])} places of {which}" for which in parts]
    return f"{', '.join(said)}; the first of each read"


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
    """A Sentinel-1 image, float32 [2, H, W], 0..1. Holes are filled with the mean of the whole image, as the authors do.

    What is no radar image is judged by the whole of it, too: a window may lie in a hole, or on roofs that are all above 0 dB.
    """
    with opened(path) as file:
        bands_CHW = file.read(window=window)
        sound_CHW = np.isfinite(bands_CHW)
        if not sound_CHW.all() or bands_CHW.min() >= 0:
            whole_CHW = bands_CHW if window is None else file.read()
            bands_CHW = np.where(sound_CHW, bands_CHW, mean_decibels(path, whole_CHW))
    from_C11 = SAR_FROM[:, None, None]
    return torch.from_numpy((bands_CHW.clip(from_C11, 0) / -from_C11 + 1).astype(np.float32))


def mean_decibels(path: Path, image_CHW: np.ndarray) -> np.floating[Any]:
    """Of what is no hole. Raises DataError where that cannot be decibels."""
    sound = image_CHW[np.isfinite(image_CHW)]
    if not sound.size or sound.min() >= 0:
        found = f"nothing below {sound.min():g}" if sound.size else "nothing but holes"
        raise DataError(
            f"{path.name} holds no decibels", f"{path}: expected figures from about -35 to 5, found {found}",
            next_step="convert it: 10 * log10 of the backscatter, or leave it out: skip_broken = true",
        )  # fmt: skip
    return sound.mean()
