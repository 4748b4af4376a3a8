"""Small fragments in the real layout, whose ink can be learnt but not be seen in one layer alone.

Fibres and the brightness of the papyrus are common to all layers, and strong; ink only bends the course of
brightness through the depth (above the mean at the surface, below it underneath), and the surface lies a
little higher here and deeper there. So in one layer ink drowns in the fibres, while a network that compares
layers cancels them. Axes: D layers, H rows, W columns.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import tifffile
from PIL import Image, ImageDraw

FIBRES, INK, NOISE = 0.12, 0.03, 0.08
MIDDLE = 0.45


def make_fragment(folder: Path, size: int, layers: int, seed: int, number: int) -> None:
    """Write one fragment; a function of its arguments alone."""
    random = np.random.default_rng([seed, number])
    mask_HW = smooth(random, size, 24, 24) + 2.2 * (1 - distance_from_middle(size) ** 4) > 0
    ink_HW = letters(random, size) & mask_HW
    fibres_HW = smooth(random, size, 1.5, 14) + smooth(random, size, 14, 1.5) + smooth(random, size, 5, 5)
    surface_HW = layers / 2 + 0.08 * layers * smooth(random, size, 40, 40)

    below_surface_DHW = np.arange(layers)[:, None, None] + 0.5 - surface_HW
    depth = below_surface_DHW / (layers / 4)
    bend_DHW = -depth * np.exp(0.5 - depth**2 / 2)  # odd: it adds nothing to the sum over depth; peaks are 1
    volume_DHW = MIDDLE + FIBRES / np.sqrt(3) * fibres_HW + INK * ink_HW * bend_DHW
    volume_DHW = (volume_DHW + NOISE * random.standard_normal(volume_DHW.shape)) * mask_HW

    (folder / "surface_volume").mkdir(parents=True, exist_ok=True)
    for index, layer_HW in enumerate((volume_DHW.clip(0, 1) * 65535).astype(np.uint16)):
        tifffile.imwrite(folder / "surface_volume" / f"{index:02}.tif", layer_HW)
    Image.fromarray(mask_HW.astype(np.uint8) * 255).save(folder / "mask.png")
    Image.fromarray(ink_HW.astype(np.uint8) * 255).save(folder / "inklabels.png")


def smooth(random: np.random.Generator, size: int, rows: float, columns: float) -> np.ndarray:
    """Noise of mean 0 and deviation 1 [H, W], blurred by so many pixels along each axis."""
    down, across = np.fft.fftfreq(size)[:, None], np.fft.rfftfreq(size)[None]
    blur = np.exp(-2 * np.pi**2 * ((down * rows) ** 2 + (across * columns) ** 2))
    noise_HW = np.fft.irfft2(np.fft.rfft2(random.standard_normal((size, size))) * blur, s=(size, size))
    return (noise_HW - noise_HW.mean()) / noise_HW.std()


def distance_from_middle(size: int) -> np.ndarray:
    """0 in the middle, 1 at the middle of an edge [H, W]."""
    axis = np.linspace(-1, 1, size)
    return np.hypot(axis[:, None], axis[None])


def letters(random: np.random.Generator, size: int) -> np.ndarray:
    """Lines of made-up letters [H, W]: three strokes each, between the corners of a small grid."""
    page = Image.new("1", (size, size))
    draw = ImageDraw.Draw(page)
    height, width, thick = 26, 20, 5
    for top in range(8, size - height, height + 10):
        for left in range(8, size - width, width + 8):
            corners = random.integers(0, 3, (3, 2, 2)) * (width // 2, height // 2) + (left, top)
            for start, end in corners:
                draw.line([*start.tolist(), *end.tolist()], fill=1, width=thick)
    return np.asarray(page)


def main() -> None:
    """Parse, then write one folder a fragment."""
    parser = argparse.ArgumentParser(
        description="Write small ink fragments in the layout of the Vesuvius Challenge.",
        epilog="example: python -m workloads.ink_detection.make_fragments fragments --fragments 3 --size 256",
    )
    parser.add_argument("out", type=Path, help="folder to write to")
    parser.add_argument("--fragments", type=int, default=2, help="how many (default: 2)")
    parser.add_argument("--size", type=int, default=192, help="rows and columns of each (default: 192)")
    parser.add_argument("--layers", type=int, default=8, help="layers of each (default: 8)")
    parser.add_argument("--seed", type=int, default=0, help="same seed, same files (default: 0)")
    options = parser.parse_args()
    for number in range(1, options.fragments + 1):
        make_fragment(options.out / str(number), options.size, options.layers, options.seed, number)


if __name__ == "__main__":
    main()
