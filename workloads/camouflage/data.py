"""Pictures of camouflaged animals as COD10K-v3 lays them out, and where in them the animal is.

    <root>/<Train or Test>/Image/NAME.jpg       the picture; the folder may be called Imgs, too
    <root>/<Train or Test>/GT_Object/NAME.png   the animal 255, all else 0; the folder may be called GT, too
    <root>/Train/GT_Edge/NAME.png               its outline 255; read only where the training asks for it

NAME is COD10K-CAM-… where there is an animal that hides, COD10K-NonCAM-… where there is none. COD10K has no validation part:
some pictures of Train become one, by a rule on their names alone. Test is for the prediction.
Axes: B batch, H rows, W columns. Nothing is held in memory but the names.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from fnmatch import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset

from kgorch.workloads.common.files import DataError, picture
from kgorch.workloads.common.listing import fingerprint, headers

if TYPE_CHECKING:
    from kgorch import Session

PARTS = ("Train", "Validation", "Test")
IMAGE_FOLDERS, MASK_FOLDERS, EDGE_FOLDERS = ("Image", "Imgs"), ("GT_Object", "GT"), ("GT_Edge",)
PICTURES, MASKS = (".jpg", ".jpeg", ".png"), (".png", ".jpg")
MEAN, SPREAD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
"""Of ImageNet's colours, with which the published backbone was trained."""

ANIMAL = 128
"""A mask's value from which on it is the animal: edges of some masks are softened."""

LINE = 26
"""A tenth of white. Made smaller, an outline one pixel wide becomes grey; it must not break."""

SPLIT_SEED = 0
"""Of the rule that draws the validation part. Another seed would mix what earlier runs have trained on with it."""

DIVISOR = 32
"""Sides of what the network gets must be multiples of it."""

LEAVE_OUT = "fetch this file again, or leave such samples out: skip_broken = true"


class Sample(NamedTuple):
    """One picture; in a batch every axis list begins with B."""

    image: Tensor  # float32 [3, H, W], normalised
    mask: Tensor  # float32 [1, H, W], 0 or 1
    edge: Tensor  # float32 [1, H, W], 0 or 1; [0] where outlines are not asked for
    index: Tensor  # int64 []: into Pairs.pairs


class Pair(NamedTuple):
    """A picture, its mask and perhaps its outline: paths relative to `root`, which may change to a local copy meanwhile."""

    root: os.PathLike[str]
    in_image: str
    in_mask: str
    in_edge: str | None = None

    @property
    def image(self) -> Path:
        return Path(self.root, self.in_image)

    @property
    def mask(self) -> Path:
        return Path(self.root, self.in_mask)

    @property
    def edge(self) -> Path | None:
        return Path(self.root, self.in_edge) if self.in_edge else None

    @property
    def name(self) -> str:
        return Path(self.in_image).stem


class Pairs(Dataset[Sample]):
    """The pictures of one part with their masks, all brought to one size.

    Args:
        root: of the data set; session.data(…) of it, so that a local copy is used once there is one.
        size: rows and columns. names: only those that match, like "COD10K-CAM-*".
        valid: which share of Train's pictures is the part Validation. limit: so many of the part at most, drawn by name.
        edges: give outlines, too. augments: cuts, mirrors and brightens at random.
        skip_broken: leave out what cannot be used, else it is an error.
        session: remembers for the run what was looked at: all headers, with `skip_broken` all files.

    Attributes:
        broken: why, of each picture left out.

    Raises:
        DataError: the folder does not hold what it should. What is broken behind a header is found when it is read.
    """

    def __init__(
        self, root: str | os.PathLike[str], part: str, size: int, *, names: str = "*", valid: float = 0.1,
        limit: int | None = None, edges: bool = False, augments: bool = False, skip_broken: bool = False,
        session: Session | None = None,
    ) -> None:  # fmt: skip
        self.size, self.edges, self.augments = size, edges, augments
        found, without = pairs_of(Path(root) if isinstance(root, str) else root, part, names, valid, edges=edges)
        if limit is not None:
            chosen = sorted(found, key=lambda pair: drawn("limit", pair.name))[:limit]
            found = sorted(chosen, key=lambda pair: pair.name)
        if without and not skip_broken:
            raise without[0]
        # With skip_broken whole files are read: a picture that is left out must be so from the first step of the run to the last.
        look = read_all if skip_broken else check_headers
        key = [fingerprint(root, (pair.in_image for pair in found)), edges]
        broken = headers(
            session, f"pictures-{part}", found, lambda pair: bool(look(pair)), key=key, skip_broken=skip_broken
        ).broken
        self.pairs = [pair for number, pair in enumerate(found) if number not in broken]
        self.broken = [*map(str, without), *broken.values()]
        if not self.pairs:
            raise DataError(
                f"no picture is left of {part} in {root}",
                f"expected one that can be read, found {self.broken[0] if self.broken else f'a limit of {limit}'}",
                next_step="fetch the data again" if self.broken else "raise limit",
            )

    def __len__(self) -> int:
        return len(self.pairs)

    def __getitem__(self, index: int) -> Sample:
        pair = self.pairs[index]
        image_HWC, mask_HW = read(pair)
        image, mask = Image.fromarray(image_HWC), Image.fromarray(mask_HW)
        box, mirrored, light = (0.0, 0.0, *map(float, image.size)), False, 1.0
        if self.augments:
            # The SDK seeds torch's RNG for each sample, so the same sample is cut alike by any worker.
            box = cut(*image.size)
            mirrored, light = bool(torch.rand(()) < 0.5), float(torch.empty(()).uniform_(0.8, 1.2))
        sides = (self.size, self.size)
        image_CHW = torch.from_numpy(np.array(image.resize(sides, Image.Resampling.BILINEAR, box))).permute(2, 0, 1)
        mask_1HW = torch.from_numpy(np.array(mask.resize(sides, Image.Resampling.NEAREST, box)))[None]
        edge_1HW = torch.zeros(0)
        if self.edges:
            small = Image.fromarray(read_edge(pair)).resize(sides, Image.Resampling.BOX, box)
            edge_1HW = torch.from_numpy(np.array(small) >= LINE)[None].float()
        image_CHW = ((image_CHW * (light / 255)).clamp(0, 1) - column(MEAN)) / column(SPREAD)
        if mirrored:
            image_CHW, mask_1HW = image_CHW.flip(-1), mask_1HW.flip(-1)
            edge_1HW = edge_1HW.flip(-1)
        return Sample(image_CHW.contiguous(), mask_1HW.float().contiguous(), edge_1HW.contiguous(), torch.tensor(index))


def preflight(
    data: str,
    size: int = DIVISOR,
    names: str = "*",
    valid: float = 0.1,
    edges: str = "mask",
    *,
    skip_broken: bool = False,
) -> str:
    """What the data are, in one line, before a session is spent on them: all parts are listed, the first of each is read.

    Raises: DataError; ValueError for a size that no picture can be brought to.
    """
    if size % DIVISOR:
        raise ValueError(f"size = {size}: expected a multiple of {DIVISOR}, for example {size // DIVISOR * DIVISOR}")
    said = []
    for part in PARTS:
        found, without = pairs_of(Path(data), part, names, valid, edges=edges == "GT_Edge" and part != "Test")
        if without and not skip_broken:
            raise without[0]
        width, height = first_readable(found, without, skip_broken=skip_broken)
        said.append(f"{len(found)} {part} (first: {width}x{height})")
    return f"{', '.join(said)} of {names}"


def first_readable(found: Iterable[Pair], errors: list[DataError], *, skip_broken: bool) -> tuple[int, int]:
    """Width and height of the first sample that can be read whole. Raises DataError."""
    problems = list(errors)
    for pair in found:
        try:
            height, width = read_all(pair)[0].shape[:2]
            return width, height
        except DataError as problem:
            problems.append(problem)
            if not skip_broken:
                break
    raise problems[-1]


def drawn(what: str, name: str) -> float:
    """A number in [0, 1) that hangs on its arguments alone: other pictures, their order and their number change nothing."""
    digest = hashlib.sha256(f"{what}:{SPLIT_SEED}:{name}".encode()).digest()
    return int.from_bytes(digest[:7], "big") / (1 << 56)


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
    check_sizes(pair, pair.mask, image_HWC.shape[1::-1], mask_HW.shape[::-1])
    if 0 < (highest := int(mask_HW.max())) < ANIMAL:
        raise DataError(
            f"{pair.mask.name} is no mask of an animal", f"{pair.mask}: expected 0 and 255, found values up to {highest}",
            next_step="take GT_Object (GT_Instance counts the animals), or leave such samples out: skip_broken = true",
        )  # fmt: skip
    return image_HWC, (mask_HW >= ANIMAL).astype(np.uint8)


def read_edge(pair: Pair) -> np.ndarray:
    """The outline as uint8 [H, W], 0 and 255. Raises DataError when it is broken, or another size."""
    assert pair.edge is not None, "Pairs was made with edges"
    edge_HW = picture(pair.edge, "L")
    check_sizes(pair, pair.edge, size_of(pair.mask), edge_HW.shape[::-1])
    return np.where(edge_HW >= ANIMAL, 255, 0).astype(np.uint8)


def read_all(pair: Pair) -> tuple[np.ndarray, np.ndarray]:
    """As `read`, and the outline is looked at, too, where there is one to be read."""
    if pair.edge:
        read_edge(pair)
    return read(pair)


def check_headers(pair: Pair) -> None:
    """Raises DataError when the headers of a pair's files cannot be read, or their sizes differ."""
    size = size_of(pair.image)
    for path in filter(None, (pair.mask, pair.edge)):
        check_sizes(pair, path, size, size_of(path))


def size_of(path: Path) -> tuple[int, int]:
    try:
        with Image.open(path) as found:
            return found.size
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as problem:
        raise DataError(
            f"{path.name} cannot be read", f"{path}: expected a picture, found: {problem}", next_step=LEAVE_OUT
        ) from problem


def check_sizes(pair: Pair, path: Path, image: tuple[int, ...], other: tuple[int, ...]) -> None:
    if image != other:
        raise DataError(
            f"{path.parent.name}/{path.name} is not the size of its picture",
            f"{path}: expected {image[0]}x{image[1]} as {pair.image.name}, found {other[0]}x{other[1]}",
            next_step="fetch both again, or leave such samples out: skip_broken = true",
        )


def pairs_of(
    root: os.PathLike[str], part: str, names: str, valid: float, *, edges: bool = False
) -> tuple[list[Pair], list[DataError]]:
    """The pictures of a part that have what they need, by name; and an error for each of the others. Raises DataError."""
    if part not in PARTS:
        raise DataError(f"there is no part {part!r:.80}", next_step=f"the parts are {', '.join(PARTS)}")
    if not 0 < valid < 1:
        raise DataError(
            f"valid = {valid:g} leaves no part to train on, or none to validate on",
            "expected a share of Train's pictures above 0 and below 1", next_step="for example valid = 0.1",
        )  # fmt: skip
    outer = "Test" if part == "Test" else "Train"
    there = listed(root, outer, IMAGE_FOLDERS, PICTURES)
    needed = {"mask": listed(root, outer, MASK_FOLDERS, MASKS)}
    if edges:
        needed["outline"] = listed(root, outer, EDGE_FOLDERS, MASKS)
    wanted = [name for name in sorted(there) if fnmatch(name, names)]
    if not wanted:
        raise DataError(
            f"there are no pictures {names!r} in {Path(root, outer)}",
            f"expected NAME.jpg, found {len(there)} pictures{f' like {min(there)}' if there else ''}",
            next_step="fetch the data again, or correct names",
        )
    if part != "Test":
        wanted = [name for name in wanted if (drawn("split", name) < valid) == (part == "Validation")]
        if not wanted:
            raise DataError(
                f"no picture of {Path(root, outer)} falls to the part {part}",
                f"valid = {valid:g} draws it by name, and there are only {len(there)}",
                next_step="fetch more data, or give another valid",
            )
    pairs, without = [], []
    for name in wanted:
        lacking = next((kind for kind, found in needed.items() if name not in found), None)
        if lacking:
            folder = MASK_FOLDERS[0] if lacking == "mask" else EDGE_FOLDERS[0]
            without.append(
                DataError(
                    f"{Path(there[name]).name} has no {lacking}",
                    f"expected {Path(root, outer, folder, name)}.png, found no such file",
                    next_step="fetch it again, or leave such samples out: skip_broken = true",
                )
            )
        else:
            pairs.append(Pair(root, there[name], *(found[name] for found in needed.values())))
    return pairs, without


def listed(root: os.PathLike[str], part: str, folders: Iterable[str], ends: tuple[str, ...]) -> dict[str, str]:
    """The files of the first of these folders that is there, by their stem: paths relative to the root. Raises DataError."""
    folder = next((name for name in folders if Path(root, part, name).is_dir()), None)
    if folder is None:
        expected = " or ".join(folders)
        raise DataError(
            f"there is no folder {Path(root, part, next(iter(folders)))}", f"expected {part}/{expected} below {root}",
            next_step='edges = "mask" needs no GT_Edge' if "GT_Edge" in expected
            else f"correct the path, or: python -m kgorch.workloads.camouflage.make_animals {root}",
        )  # fmt: skip
    with os.scandir(Path(root, part, folder)) as entries:
        files = [entry.name for entry in entries if entry.name.lower().endswith(ends)]
    return {Path(file).stem: f"{part}/{folder}/{file}" for file in sorted(files)}
