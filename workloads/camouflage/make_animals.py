"""Made-up pictures in COD10K's layout: an animal of the colours of its ground, which only the grain of its coat gives away.

Ground and coat are noise of the same two colours, the same mean and the same spread; the coat's grain is somewhat finer.
So no single pixel tells, and a network has to look at the texture. Axes: H rows, W columns.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
from PIL import Image

GROUND_PX, COAT_PX = 11.0, 6.0
"""Typical length of a wave in the ground and in the coat."""


def make_pair(folder: Path, name: str, size: int, seed: int, number: int) -> None:
    """Write one picture and its mask; a function of its arguments alone."""
    random = np.random.default_rng([seed, number])
    mask_HW = blob(random, size)
    grain_HW = np.where(mask_HW, grain(random, size, COAT_PX), grain(random, size, GROUND_PX))
    light_HW = grain(random, size, size / 2)
    low, high = random.uniform(40, 150, 3), random.uniform(110, 220, 3)
    share_HW1 = (0.5 + 0.22 * grain_HW + 0.08 * light_HW).clip(0, 1)[..., None]
    image_HWC = low + (high - low) * share_HW1 + random.normal(0, 4, (size, size, 3))

    for kind in ("Image", "GT_Object", "GT_Edge"):
        (folder / kind).mkdir(parents=True, exist_ok=True)
    Image.fromarray(image_HWC.clip(0, 255).astype(np.uint8)).save(folder / "Image" / f"{name}.jpg", quality=92)
    Image.fromarray(mask_HW.astype(np.uint8) * 255).save(folder / "GT_Object" / f"{name}.png")
    Image.fromarray(outline(mask_HW).astype(np.uint8) * 255).save(folder / "GT_Edge" / f"{name}.png")


def outline(mask_HW: np.ndarray) -> np.ndarray:
    """The animal's outermost pixels [H, W]."""
    around_HW = np.pad(mask_HW, 1, mode="edge")
    inner_HW = around_HW[:-2, 1:-1] & around_HW[2:, 1:-1] & around_HW[1:-1, :-2] & around_HW[1:-1, 2:]
    return mask_HW & ~inner_HW


def grain(random: np.random.Generator, size: int, wave_px: float) -> np.ndarray:
    """Noise of mean 0 and deviation 1 [H, W] whose waves are about so long."""
    down, across = np.fft.fftfreq(size)[:, None], np.fft.rfftfreq(size)[None]
    away = np.hypot(down, across) * wave_px - 1
    noise_HW = np.fft.irfft2(np.fft.rfft2(random.standard_normal((size, size))) * np.exp(-8 * away**2), s=(size, size))
    return (noise_HW - noise_HW.mean()) / noise_HW.std()


def blob(random: np.random.Generator, size: int) -> np.ndarray:
    """A body somewhere in the picture, longer than wide, with an uneven outline [H, W]."""
    middle, turn = random.uniform(0.25, 0.75, 2) * size, random.uniform(0, np.pi)
    rows, columns = np.mgrid[:size, :size]
    down, across = rows - middle[0], columns - middle[1]
    along = down * np.cos(turn) + across * np.sin(turn)
    aside = across * np.cos(turn) - down * np.sin(turn)
    length, width = random.uniform(0.22, 0.34) * size, random.uniform(0.14, 0.22) * size
    angle = np.arctan2(aside / width, along / length)
    uneven = sum(random.uniform(0, 0.12) * np.cos(waves * angle + random.uniform(0, 2 * np.pi)) for waves in (2, 3, 5))
    return np.hypot(along / length, aside / width) < 1 + uneven


def main() -> None:
    """Parse, then write Train and Test."""
    parser = argparse.ArgumentParser(
        description="Write made-up camouflaged animals in the layout of COD10K.",
        epilog="example: python -m kgorch.workloads.camouflage.make_animals animals --train 320 --size 96",
    )
    parser.add_argument("out", type=Path, help="folder to write to")
    parser.add_argument("--train", type=int, default=320, help="pictures to train and validate on (default: 320)")
    parser.add_argument("--test", type=int, default=48, help="pictures to score (default: 48)")
    parser.add_argument("--size", type=int, default=80, help="rows and columns of each (default: 80)")
    parser.add_argument("--seed", type=int, default=0, help="same seed, same files (default: 0)")
    options = parser.parse_args()
    for number in range(options.train + options.test):
        part = "Train" if number < options.train else "Test"
        make_pair(options.out / part, f"COD10K-CAM-5-Other-69-Other-{number + 1}", options.size, options.seed, number)


if __name__ == "__main__":
    main()
