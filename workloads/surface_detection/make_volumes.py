"""Small volumes in the real layout, whose surfaces can be learnt and are not found well by brightness alone.

A volume is a stack of sheets, as rolled papyrus is: each bends, and is bright over a few voxels. Its surface, which is to be
found, is the thin layer on the side where brightness rises fast; on the other side it fades out. Fibres and noise lie over
it. The best threshold of brightness has a Dice of 0.61; to do better a network has to see which way the sheet fades. Part of
each label is 2, not labelled, as in the real ones. Axes: D pages, H rows, W columns.
"""

from __future__ import annotations

import argparse
import csv
from pathlib import Path

import numpy as np
from PIL import Image

PERIOD, SHEET, THICK = 14.0, 7.0, 2.0
"""Voxels: from sheet to sheet, through a sheet until it has faded, and through the layer that counts as its surface."""
NOISE, FIBRES = 0.10, 0.06
NOT_LABELLED = 2


def make_volume(size: int, seed: int, number: int) -> tuple[np.ndarray, np.ndarray]:
    """Image and label, uint8 [D, H, W] with `size` voxels a side; a function of the arguments alone."""
    random = np.random.default_rng([seed, number])
    bend_HW = 5 * smooth(random, (size, size), size / 4)
    tilt_D = random.normal(0, 0.25) * np.arange(size)
    depth_DHW = np.arange(size)[None, :, None] + bend_HW[:, None, :] + tilt_D[:, None, None] + random.uniform(0, PERIOD)
    into_DHW = depth_DHW % PERIOD  # voxels behind the surface of the sheet before
    bright_DHW = np.where(into_DHW < SHEET, 0.65 - 0.35 * into_DHW / SHEET, 0.3)
    fibres_DHW = smooth(random, (size,) * 3, 2.0)
    image_DHW = bright_DHW + FIBRES * fibres_DHW + NOISE * random.standard_normal(bright_DHW.shape)
    label_DHW = (into_DHW < THICK).astype(np.uint8)
    label_DHW[:, :, : size // 8] = NOT_LABELLED
    return (image_DHW.clip(0, 1) * 255).astype(np.uint8), label_DHW


def smooth(random: np.random.Generator, shape: tuple[int, ...], blur: float) -> np.ndarray:
    """Noise of mean 0 and deviation 1, blurred by so many voxels along each axis."""
    spectrum = np.fft.fftn(random.standard_normal(shape))
    for axis, length in enumerate(shape):
        bell = np.exp(-2 * (np.pi * blur * np.fft.fftfreq(length)) ** 2)
        spectrum *= bell.reshape([-1 if other == axis else 1 for other in range(len(shape))])
    noise = np.fft.ifftn(spectrum).real
    return (noise - noise.mean()) / noise.std()


def save(path: Path, volume_DHW: np.ndarray) -> None:
    """A multi-page TIFF, compressed by LZW as the real files are."""
    path.parent.mkdir(parents=True, exist_ok=True)
    first, *others = (Image.fromarray(page_HW) for page_HW in volume_DHW)
    first.save(path, save_all=True, append_images=others, compression="tiff_lzw")


def make(out: Path, train: int, test: int, size: int, seed: int) -> None:
    """Write the whole folder."""
    for part, count, first in (("train", train, 0), ("test", test, train)):
        ids = [str(1000 + number) for number in range(first, first + count)]
        for number, id in enumerate(ids, first):
            image_DHW, label_DHW = make_volume(size, seed, number)
            save(out / f"{part}_images" / f"{id}.tif", image_DHW)
            if part == "train":
                save(out / "train_labels" / f"{id}.tif", label_DHW)
        out.mkdir(parents=True, exist_ok=True)
        with open(out / f"{part}.csv", "w", newline="", encoding="utf-8") as file:
            csv.writer(file).writerows([("id", "scroll_id"), *((id, 1 + int(id) % 3) for id in ids)])


def main() -> None:
    """Parse, then write the folder."""
    parser = argparse.ArgumentParser(
        description="Write small volumes in the layout of the Vesuvius Challenge's surface detection.",
        epilog="example: python -m kgorch.workloads.surface_detection.make_volumes volumes --train 20 --size 96",
    )
    parser.add_argument("out", type=Path, help="folder to write to")
    parser.add_argument("--train", type=int, default=10, help="volumes with labels (default: 10)")
    parser.add_argument("--test", type=int, default=2, help="volumes without (default: 2)")
    parser.add_argument("--size", type=int, default=48, help="voxels a side (default: 48)")
    parser.add_argument("--seed", type=int, default=0, help="same seed, same files (default: 0)")
    options = parser.parse_args()
    make(options.out, options.train, options.test, options.size, options.seed)


if __name__ == "__main__":
    main()
