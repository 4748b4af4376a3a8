"""Takes the pictures of docs/looking.md: each page at two widths, in both schemes, of made-up runs; that of the README and of
`kgorch compare`, of real ones.

    python docs/screenshots.py [--real]      the latter alone

Needs chromium and chromium-driver, and `kgorch[dev]`. The runs are those of tests/lived_in.py.
"""

from __future__ import annotations

import io
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests/web")]

import lived_in  # noqa: E402
import test_browser  # noqa: E402
from harness import Kgorch, wait_until  # noqa: E402
from PIL import Image  # noqa: E402

OUT = ROOT / "docs" / "images" / "web"
RUN = "/runs/surface-unet3d/1"
PAGES = {
    "runs": "/",
    "overview": RUN,
    "metrics": f"{RUN}/metrics",
    "system": f"{RUN}/system",
    "checkpoints": f"{RUN}/checkpoints",
    "logs": f"{RUN}/logs",
    "plan": f"{RUN}/plan",
}
SIZES = {"wide": (1280, 860), "narrow": (360, 740)}
COLOURS = 255
"""Of a palette: a third of the bytes, and no difference to be seen."""


def main() -> None:
    take_real()
    take_comparison()
    if "--real" in sys.argv:
        return
    OUT.mkdir(parents=True, exist_ok=True)
    home = Path(tempfile.mkdtemp(prefix="kgorch-pictures-")) / "home"
    lived_in.furnish(home)  # its live session is this process
    with test_browser.serving(home, dict(os.environ)) as url:
        for size, (width, height) in SIZES.items():
            for dark in (False, True):
                take_all(url, size, width, height, dark=dark)


def take_all(url: str, size: str, width: int, height: int, *, dark: bool) -> None:
    with test_browser.chromium(width, height, dark=dark) as driver:
        driver.get(url)
        for name, path in PAGES.items():
            driver.get(url.split("/login")[0] + path)
            wait_until(lambda: test_browser.shown(driver, "#link") == "live")
            if name in ("overview", "metrics", "system"):
                wait_until(lambda: driver.find_elements("css selector", "canvas"))
                wait_until(
                    lambda: driver.execute_script("return new Promise((done) => setTimeout(() => done(true), 600))")
                )
            save(driver, OUT / f"{name}-{size}-{'dark' if dark else 'light'}.png")


def save(driver: Any, path: Path) -> None:
    picture = Image.open(io.BytesIO(driver.get_screenshot_as_png())).convert("RGB")
    picture.quantize(COLOURS, dither=Image.Dither.NONE).save(path, optimize=True)
    print(f"{path.relative_to(ROOT)}: {path.stat().st_size // 1024} KiB")


def take_real() -> None:
    """The example of `kgorch init`, trained in five sessions: four end at their time limit, the last one finishes it."""
    folder = Path(tempfile.mkdtemp(prefix="kgorch-real-"))
    kgorch = Kgorch(folder, folder / "home")
    kgorch("init")
    slow = ("--set", "stage.train.args.epochs=900", "--set", "stage.train.args.lr=2e-5")
    kgorch("start", *slow, "--set", "session.wall=25s", code=10)
    for _ in range(3):
        kgorch("start", code=10)
    kgorch("start", "--set", "session.wall=1h")
    with test_browser.serving(kgorch.home, dict(os.environ)) as url, test_browser.chromium(1000, 760) as driver:
        driver.get(url)
        driver.get(url.split("/login")[0] + "/runs/my-run/1")
        wait_until(lambda: driver.find_elements("css selector", "canvas"))
        wait_until(lambda: driver.execute_script("return new Promise((done) => setTimeout(() => done(true), 600))"))
        save(driver, OUT.parent / "five-sessions.png")


def take_comparison() -> None:
    """The same example twice, with two learning rates."""
    folder = Path(tempfile.mkdtemp(prefix="kgorch-compared-"))
    kgorch = Kgorch(folder, folder / "home")
    kgorch("init")
    for lr in ("1e-3", "1e-4"):
        kgorch("start", "--fresh", "--set", f"stage.train.args.lr={lr}")
    kgorch("compare", "my-run/1", "my-run/2", "-o", "comparison.html")
    with test_browser.chromium(1100, 1150) as driver:
        driver.get((folder / "comparison.html").as_uri())
        save(driver, ROOT / "docs" / "compare.png")


if __name__ == "__main__":
    main()
