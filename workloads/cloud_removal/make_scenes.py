"""Made-up places in the real layout: a river, fields, forest and towns, seen by radar and, under clouds, by eye.

What covers the ground decides both images: radar tells water, soil, leaves and roofs apart through any cloud, drowned in
speckle; how green a field is shows in VH. So a network can do better under a thick cloud than to guess from what is around it.
Clouds are of all thicknesses, brighter in blue where thin, and throw shadows. Axes: C bands, K covers, H rows, W columns.
"""

from __future__ import annotations

import argparse
import csv
from pathlib import Path

import numpy as np
import rasterio
from rasterio.transform import from_origin

COVERS = ("water", "soil", "crops", "forest", "town")
SPECTRA = np.array(  # reflectance in the 13 bands, B1 to B12
    [
        [0.12, 0.10, 0.08, 0.05, 0.04, 0.03, 0.03, 0.02, 0.02, 0.02, 0.002, 0.01, 0.01],
        [0.13, 0.13, 0.15, 0.19, 0.21, 0.22, 0.24, 0.25, 0.26, 0.10, 0.003, 0.34, 0.29],
        [0.11, 0.08, 0.10, 0.06, 0.13, 0.34, 0.43, 0.45, 0.47, 0.14, 0.003, 0.22, 0.12],
        [0.10, 0.06, 0.06, 0.04, 0.08, 0.19, 0.24, 0.25, 0.27, 0.08, 0.002, 0.13, 0.06],
        [0.16, 0.16, 0.18, 0.19, 0.20, 0.21, 0.23, 0.24, 0.25, 0.11, 0.004, 0.26, 0.25],
    ],
    np.float32,
)
DECIBELS = np.array([[-21, -29], [-13, -21], [-10.5, -16], [-8.5, -13.5], [-3.5, -10]], np.float32)  # VV, VH of each
CLOUD = np.array([0.80, 0.78, 0.75, 0.73, 0.72, 0.71, 0.70, 0.69, 0.68, 0.40, 0.05, 0.45, 0.35], np.float32)
OPACITY = np.linspace(1.8, 0.8, 13, dtype=np.float32)
"""How many times a cloud's thickness each band sees."""

LOOKS, PIXEL_M, FIELD = 10, 10, 12


def make_scene(root: Path, size: int, seed: int, number: int) -> dict[str, Path]:
    """Write the three images of one place, a function of the arguments alone; returns their paths below the root."""
    random = np.random.default_rng([seed, number])
    share_KHW = covers(random, size)
    light_HW = 1 + 0.06 * smooth(random, size, 3) + 0.03 * random.standard_normal((size, size))
    clear_CHW = np.tensordot(SPECTRA.T, share_KHW, 1) * light_HW

    power_CHW = 10 ** (np.tensordot(DECIBELS.T, share_KHW, 1) / 10)
    speckled_CHW = power_CHW * random.gamma(LOOKS, 1 / LOOKS, power_CHW.shape)

    billows_HW = smooth(random, size, size / 8) + 0.15 * smooth(random, size, 3)
    thickness_HW = ((billows_HW + random.uniform(-0.6, 1.0)) / random.uniform(1.0, 3.5)).clip(0, 1)
    hidden_CHW = 1 - (1 - thickness_HW) ** OPACITY[:, None, None]
    shadow_HW = np.roll(thickness_HW, (size // 10, size // 16), (0, 1))
    cloudy_CHW = clear_CHW * (1 - 0.5 * shadow_HW) * (1 - hidden_CHW) + CLOUD[:, None, None] * hidden_CHW
    cloudy_CHW *= 1 + 0.03 * random.standard_normal()  # another day

    paths = {}
    for key, image_CHW in (("s1", 10 * np.log10(speckled_CHW)), ("s2", clear_CHW), ("s2_cloudy", cloudy_CHW)):
        paths[key] = Path(f"ROIs0_made_{key}", f"ROIs0_made_{key}_{seed}_p{number}.tif")
        values_CHW = image_CHW.astype(np.float32)
        if key != "s1":
            values_CHW = (image_CHW.clip(0, 1) * 10000).round().astype(np.uint16)
        (root / paths[key]).parent.mkdir(parents=True, exist_ok=True)
        with rasterio.open(
            root / paths[key], "w", driver="GTiff", width=size, height=size, count=len(values_CHW),
            dtype=values_CHW.dtype, compress="deflate", predictor=3 if key == "s1" else 2, crs="EPSG:32632",
            transform=from_origin(500000 + number * size * PIXEL_M, 5400000, PIXEL_M, PIXEL_M),
        ) as file:  # fmt: skip
            file.write(values_CHW)
    return paths


def covers(random: np.random.Generator, size: int) -> np.ndarray:
    """[K, H, W]: of each pixel the share of every cover; they sum to 1."""
    axis = np.arange(size, dtype=np.float32)
    corner_P2 = random.uniform(-FIELD, size + FIELD, (max(4, (size // FIELD + 2) ** 2), 2)).astype(np.float32)
    field_HW = ((axis[:, None, None] - corner_P2[:, 0]) ** 2 + (axis[None, :, None] - corner_P2[:, 1]) ** 2).argmin(2)
    green_HW = random.beta(0.7, 0.7, len(corner_P2))[field_HW]
    forest_HW = edge(smooth(random, size, 7) - 0.9)
    street_HW = (axis[:, None] % 6 < 1.5) | (axis[None] % 8 < 1.5)
    town_HW = edge(smooth(random, size, 6) - 1.2) * np.where(street_HW, 0.4, 1.0)
    river_HW = edge(0.15 - np.abs(smooth(random, size, size / 6) - 0.2))

    share_KHW = np.stack([0 * green_HW, 1 - green_HW, green_HW, 0 * green_HW, 0 * green_HW])
    for cover, over_HW in (("forest", forest_HW), ("town", town_HW), ("water", river_HW)):
        share_KHW *= 1 - over_HW
        share_KHW[COVERS.index(cover)] += over_HW
    return share_KHW


def edge(height_HW: np.ndarray) -> np.ndarray:
    """0 below, 1 above, within a narrow rise."""
    return (height_HW / 0.15 + 0.5).clip(0, 1)


def smooth(random: np.random.Generator, size: int, blur: float) -> np.ndarray:
    """Noise of mean 0 and deviation 1 [H, W], blurred by so many pixels."""
    down, across = np.fft.fftfreq(size)[:, None], np.fft.rfftfreq(size)[None]
    keep = np.exp(-2 * (np.pi * blur) ** 2 * (down**2 + across**2))
    noise_HW = np.fft.irfft2(np.fft.rfft2(random.standard_normal((size, size))) * keep, s=(size, size))
    return (noise_HW - noise_HW.mean()) / noise_HW.std()


def main() -> None:
    """Parse, then write the places and the table that lists them."""
    parser = argparse.ArgumentParser(
        description="Write made-up Sentinel-1 and Sentinel-2 images in the layout of SEN12MS-CR.",
        epilog="example: python -m kgorch.workloads.cloud_removal.make_scenes scenes --scenes 200 --size 256",
    )
    parser.add_argument("out", type=Path, help="folder to write to")
    parser.add_argument("--scenes", type=int, default=60, help="how many; a tenth each is val and test (default: 60)")
    parser.add_argument("--size", type=int, default=64, help="rows and columns of each (default: 64)")
    parser.add_argument("--seed", type=int, default=0, help="same seed, same files (default: 0)")
    options = parser.parse_args()
    make_table(options.out, options.scenes, options.size, options.seed)


def make_table(root: Path, scenes: int, size: int, seed: int) -> None:
    """All places and data.csv."""
    made = [make_scene(root, size, seed, number) for number in range(scenes)]
    tenth = max(1, scenes // 10)
    with open(root / "data.csv", "w", newline="", encoding="utf-8") as file:
        table = csv.writer(file, lineterminator="\n")
        table.writerow(["split", "s1", "s2", "s2_cloudy"])
        for number, paths in enumerate(made):
            split = "train" if number < scenes - 2 * tenth else "val" if number < scenes - tenth else "test"
            table.writerow([split, *(paths[key].as_posix() for key in ("s1", "s2", "s2_cloudy"))])


if __name__ == "__main__":
    main()
