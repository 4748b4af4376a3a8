"""Volumes as the surface detection competition lays them out: listed, checked, and read in boxes. Needs no PyTorch.

    <data>/train.csv                 id, scroll_id (the second column may be missing)
    <data>/test.csv                  id
    <data>/train_images/ID.tif       one page a slice, 8 bit grey
    <data>/train_labels/ID.tif       the same shape: 0 background, 1 surface, 2 not labelled
    <data>/test_images/ID.tif
    <data>/deprecated_train_images   what the organisers withdrew; train.csv lists these volumes still

Axes: D pages, H rows, W columns.
"""

from __future__ import annotations

import csv
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias

import numpy as np
import tifffile
from PIL import Image

from kgorch.workloads.common.files import DataError
from kgorch.workloads.common.listing import fingerprint, headers

if TYPE_CHECKING:
    from kgorch import Session

Folder: TypeAlias = str | os.PathLike[str]
Part: TypeAlias = Literal["train", "test"]
Shape: TypeAlias = tuple[int, int, int]
SURFACE = 1
MOST_VOXELS = 1 << 34
"""Of one volume; the competition's largest have 33 million."""
OPEN_FILES = 32
"""Volumes and labels that a process keeps open: a random patch comes from any of them."""

FREE_BYTES = 2 << 30
"""Unpacked copies leave this much of their disk free."""
PROBLEMS = (OSError, ValueError, SyntaxError, EOFError, IndexError, tifffile.TiffFileError)
"""What tifffile and Pillow raise for a file that is cut off or no TIFF."""


class Row(NamedTuple):
    """A line of train.csv or test.csv. `scroll` is "" where the file does not name it."""

    id: str
    scroll: str


@dataclass(frozen=True)
class Volume:
    """One volume: its files below the data folder, and its shape in voxels."""

    id: str
    scroll: str
    image: str
    label: str | None
    shape: Shape


def listed(data: Folder, part: Part) -> list[Row]:
    """The volumes of a part, see `listed_and_deprecated`. Raises: DataError."""
    return listed_and_deprecated(data, part)[0]


def listed_and_deprecated(data: Folder, part: Part) -> tuple[list[Row], list[str]]:
    """The volumes of a part in the order of its list, or by name where there is no list; and the ids that only the folder of
    deprecated images holds.

    Raises: DataError when there is neither, or the list has no column `id`.
    """
    images, table = Path(data, f"{part}_images"), Path(data, f"{part}.csv")
    if not images.is_dir():
        raise DataError(
            f"there is no folder {part}_images in {os.fspath(data)}",
            f"expected multi-page TIFF files {images.absolute()}/ID.tif",
            next_step="correct `data` (on Kaggle: /kaggle/input/vesuvius-challenge-surface-detection), or make some: "
            f"python -m kgorch.workloads.surface_detection.make_volumes {os.fspath(data)}",
        )
    if not table.is_file():
        rows = [Row(path.stem, "") for path in sorted(images.glob("*.tif"))]
    else:
        with open(table, newline="", encoding="utf-8-sig") as file:
            lines = csv.DictReader(file)
            if "id" not in (lines.fieldnames or ()):
                raise DataError(
                    f"{table} has no column 'id'", f"found: {', '.join(lines.fieldnames or ()) or 'an empty file'}",
                    next_step="take the competition's own file, or remove it: the folder is listed then",
                )  # fmt: skip
            rows = [Row(line["id"], line.get("scroll_id") or "") for line in lines if line["id"]]
        if odd := next((row.id for row in rows if Path(row.id).name != row.id), None):
            raise DataError(
                f"{table} lists {odd!r}, which names no file of the folder", next_step="take the competition's own file"
            )
    deprecated = {path.stem for path in Path(data, f"deprecated_{part}_images").glob("*.tif")}
    deprecated = {row.id for row in rows if row.id in deprecated and not (images / f"{row.id}.tif").is_file()}
    kept = [row for row in rows if row.id not in deprecated]
    if not kept:
        raise DataError(
            f"no volumes are listed in {table if table.is_file() else images}", next_step="fetch the data again"
        )
    return kept, [row.id for row in rows if row.id in deprecated]


def names(part: Part, id: str) -> tuple[str, str | None]:
    """Image and label of a volume, below the data folder."""
    return f"{part}_images/{id}.tif", f"train_labels/{id}.tif" if part == "train" else None


def header(path: Path) -> Shape:
    """Pages, rows and columns of a TIFF without its pixels. Raises DataError when it is not a stack of 8-bit pages."""
    try:
        with tifffile.TiffFile(path) as tiff:
            first, pages = tiff.pages[0], len(tiff.pages)
            shape, kind = first.shape, str(first.dtype)
    except PROBLEMS as problem:
        raise unreadable(path, problem) from problem
    if len(shape) == 3 and pages == 1:  # tifffile's own short form: one page that holds the volume
        pages, shape = shape[0], shape[1:]
    if len(shape) != 2 or kind != "uint8":
        raise DataError(
            f"{path.name} is not a volume of 8-bit slices",
            f"{path}: expected uint8 pages of rows and columns, found {kind} {shape}",
            next_step="fetch it again, or leave such volumes out: skip_broken = true",
        )
    return pages, *shape


def shape_of(data: Folder, part: Part, row: Row) -> list[int]:
    """Pages, rows and columns of a volume, by headers alone.

    Raises: DataError when it cannot be read, or its label is another size.
    """
    image, label = (Path(data, name) if name else None for name in names(part, row.id))
    assert image
    shape = header(image)
    if label and (found := header(label)) != shape:
        raise DataError(
            f"the label of volume {row.id} is not the size of its image",
            f"{label}: expected {shape} pages, rows and columns, found {found}",
            next_step="fetch both files again, or leave such volumes out: skip_broken = true",
        )
    return list(shape)


def usable(
    session: Session | None, data: Folder, part: Part, *, skip_broken: bool = False
) -> tuple[list[Volume], list[str]]:
    """The volumes of a part, and why others are left out. Headers are read by one rank, in one session.

    Raises: DataError for the first that is broken, unless `skip_broken`, or when none can be used.
    """
    rows, deprecated = listed_and_deprecated(data, part)
    key = fingerprint(data, [names(part, row.id)[0] for row in rows])
    read = headers(
        session, f"volumes-{part}", rows, lambda row: shape_of(data, part, row), key=key, skip_broken=skip_broken
    )
    volumes = [
        Volume(row.id, row.scroll, *names(part, row.id), shape)
        for row, found in zip(rows, read.found, strict=True)
        if (shape := as_shape(found))
    ]
    if not volumes:
        raise DataError(
            f"none of the {len(rows)} volumes in {part}_images can be used", *list(read.broken.values())[:3],
            next_step="fetch the data again",
        )  # fmt: skip
    withdrawn = [f"{id}.tif lies in deprecated_{part}_images, not in {part}_images" for id in deprecated]
    return volumes, [*withdrawn, *read.broken.values()]


def as_shape(found: object) -> Shape | None:
    """Three sizes, or None for what was left out; what is remembered may have been written by anybody."""
    match found:
        case [int(depth), int(height), int(width)] if (
            0 < depth * height * width <= MOST_VOXELS and min(depth, height, width) > 0
        ):
            return depth, height, width
    return None


def split(volumes: Sequence[Volume], valid: int, valid_scroll: str | None = None) -> tuple[list[Volume], list[Volume]]:
    """Those to train on and those held out: the volumes of one scroll, or `valid` of them, evenly spread over the list.

    Raises: DataError when a part would be empty.
    """
    if valid_scroll is not None:
        held = {number for number, volume in enumerate(volumes) if volume.scroll == valid_scroll}
    else:
        held = {number * len(volumes) // valid for number in range(min(valid, len(volumes)))}
    parts = (
        [volume for number, volume in enumerate(volumes) if number not in held],
        [volumes[number] for number in sorted(held)],
    )
    if not all(parts):
        asked = f"valid = {valid}" if valid_scroll is None else f'valid_scroll = "{valid_scroll}"'
        raise DataError(
            f"{len(volumes)} volumes cannot be divided into training and validation", f"{asked} leaves one part empty",
            f"scrolls listed: {', '.join(sorted({volume.scroll for volume in volumes} - {''})) or 'none'}",
            next_step="hold out fewer volumes (valid = …), or one of these scrolls",
        )  # fmt: skip
    return parts


def preflight(data: str) -> str:
    """One line on the data to train and to predict on, after the first volume of each was read whole. Raises: DataError."""
    return f"{_looked_at(data, 'train')}; {_looked_at(data, 'test')}"


def preflight_test(data: str) -> str:
    """The same for a prediction alone."""
    return _looked_at(data, "test")


def _looked_at(data: str, part: Part) -> str:
    rows, deprecated = listed_and_deprecated(data, part)
    image, label = names(part, rows[0].id)
    shape, reader = tuple(shape_of(data, part, rows[0])), Reader(data)
    mean = reader.box(image, (0, 0, 0), shape).mean()
    text = f"{len(rows)} volumes in {part}_images, {rows[0].id} read: {' × '.join(map(str, shape))} voxels, mean {mean:.0f}"
    if label:
        found = np.unique(reader.box(label, (0, 0, 0), shape)).tolist()
        if not {SURFACE} <= set(found) <= {0, SURFACE, 2}:
            raise DataError(
                f"the label of volume {rows[0].id} is none",
                f"{Path(data, label)}: expected 0, 1 (surface) and 2 (not labelled), found {found[:9]}",
                next_step="take train_labels as the competition has it",
            )
        text += f", labels {', '.join(map(str, found))}"
    if deprecated:
        text += f"; {len(deprecated)} more left out, which lie in deprecated_{part}_images"
    return text


def unreadable(path: Path, problem: object) -> DataError:
    return DataError(
        f"{path.name} cannot be read", f"{path}: expected a multi-page TIFF, found: {problem}",
        next_step="fetch it again, or leave such volumes out: skip_broken = true",
    )  # fmt: skip


class Reader:
    """Reads boxes of volumes, of each file only what a box needs.

    An uncompressed file is mapped. Of a compressed one the pages that the box touches are decoded: a patch of 64 pages is a fifth
    of a volume of 320, which still takes 0.2 s. So with `unpacked` the first box of a volume decodes all of it, once, into a file
    in that folder which later boxes map; the folder is filled up to its limit, and volumes that find no room stay as they are.
    It may be shared by all ranks and loading processes of a machine, and be lost at any time.

    Args:
        data: the data folder; a path that `session.data` returned goes over to the local copy by itself.
        unpacked: folder for decoded volumes, on a local disk. None: none.
        gib: how much of that disk they may take.
    """

    def __init__(self, data: Folder, unpacked: str | None = None, gib: float = 0.0) -> None:
        self._data, self._room = data, gib * 2**30
        self._unpacked = Path(unpacked) if unpacked and gib > 0 else None
        self._full = False

    def box(self, name: str, start: Sequence[int], shape: Sequence[int]) -> np.ndarray:
        """uint8 [D, H, W] of a file below the data folder: so many voxels from `start` on. Raises: DataError."""
        path = Path(self._data, name)
        cut = tuple(slice(first, first + size) for first, size in zip(start, shape, strict=True))
        try:
            volume = self._mapped(path)
            if volume is None:
                found = np.stack(stack_of(path).pages(range(cut[0].start, cut[0].stop)))[:, cut[1], cut[2]]
            else:
                found = np.array(volume[cut])
        except PROBLEMS as problem:
            raise unreadable(path, problem) from problem
        if found.shape != tuple(shape):
            raise unreadable(
                path, f"{found.shape} voxels from {tuple(start)} on, where its header told of {tuple(shape)}"
            )
        return found

    def _mapped(self, path: Path) -> np.ndarray | None:
        """The whole volume as a map of a file, or None: it is compressed, and there is no unpacked copy of it."""
        if self._unpacked is None:
            return stack_of(path).plain
        state = path.stat()
        copy = self._unpacked / f"{path.parent.name}-{path.stem}-{state.st_size}-{state.st_mtime_ns}.npy"
        try:
            return np.load(copy, mmap_mode="r")
        except (OSError, ValueError):
            pass  # not there, or cut off by a full disk
        if (volume := stack_of(path).plain) is not None or self._full:
            return volume
        volume = np.stack(stack_of(path).pages())
        try:
            self._unpacked.mkdir(parents=True, exist_ok=True)
            taken = sum(entry.stat().st_size for entry in os.scandir(self._unpacked))
            left = min(self._room - taken, shutil.disk_usage(self._unpacked).free - FREE_BYTES)
            self._full = volume.nbytes > left
            if not self._full:
                aside = copy.with_suffix(f".{os.getpid()}")
                with open(aside, "wb") as file:
                    np.save(file, volume)
                aside.replace(copy)
        except OSError:  # the disk is full, or another process took the folder away: it is a cache
            self._full = True
        return volume


class Stack:
    """An open file of pages. Where its pages lie is read once: to find that anew for each box took ten times as long as the box."""

    def __init__(self, path: Path) -> None:
        try:
            found = tifffile.memmap(path, mode="r")
        except ValueError:  # compressed, or its pages do not lie one after another
            self.plain = None
            self._image = Image.open(path)
        else:
            self.plain = found if found.ndim == 3 else found[None]

    def pages(self, numbers: Sequence[int] | None = None) -> list[np.ndarray]:
        """Slices [H, W] of a compressed volume, uint8. Pillow decodes LZW, which tifffile cannot without imagecodecs."""
        found = []
        for number in range(getattr(self._image, "n_frames", 1)) if numbers is None else numbers:
            self._image.seek(number)
            found.append(np.asarray(self._image))
        return found


def stack_of(path: Path) -> Stack:
    """Of this process: an open file's position is shared with a process that was forked from it."""
    state = path.stat()
    return _stack(path, state.st_size, state.st_mtime_ns, os.getpid())


@lru_cache(maxsize=OPEN_FILES)
def _stack(path: Path, size: int, mtime_ns: int, pid: int) -> Stack:
    return Stack(path)


def write(path: Path, mask_DHW: np.ndarray) -> None:
    """A mask as a multi-page TIFF of 8 bits, deflated; whole or not at all, and the same bytes for the same mask."""
    aside = path.with_suffix(".part")
    tifffile.imwrite(aside, mask_DHW.astype(np.uint8), photometric="minisblack", compression="zlib", metadata=None)
    aside.replace(path)
