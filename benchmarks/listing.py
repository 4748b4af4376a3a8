"""The first step on a list of many pictures: in a run's first session, which reads all headers, and in its second.

    python benchmarks/listing.py --pictures 100000 --delay-ms 10

Real are the pictures (PNG, 16 by 16 pixels), two gloo ranks, `kgorch start`, a stop and `kgorch start` again. The delay stands in
for a network mount: each file that is opened for its header takes so much longer.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from PIL import Image

PER_FOLDER = 1000
PLAN = """
name = "listing"
[[stage]]
name = "train"
entry = "listing_training:main"
ranks = 2
args = {{ root = "{root}", delay_s = {delay_s} }}
"""


def make(root: Path, count: int) -> None:
    """`count` files of a folder's thousand each, and list.txt."""
    Image.new("RGB", (16, 16), (10, 200, 30)).save(root / "one.png")
    content, names = (root / "one.png").read_bytes(), [f"{n // PER_FOLDER:04d}/{n:06d}.png" for n in range(count)]
    for name in names:
        path = root / name
        if name.endswith("000.png"):
            path.parent.mkdir()
        path.write_bytes(content)
    (root / "list.txt").write_text("\n".join(names))


def session(folder: Path) -> dict[str, float]:
    """Seconds until the first step is done, and what of them was what; the session is stopped then."""
    env = {**os.environ, "KGORCH_HOME": str(folder / "home"), "OMP_NUM_THREADS": "1"}
    kgorch = [sys.executable, "-m", "kgorch.cli"]
    for old in folder.glob("home/runs/*/*/outputs/first.json"):
        old.unlink()
    began_at = time.time()
    supervisor = subprocess.Popen([*kgorch, "start", str(folder / "plan.toml"), "--progress", "none"], env=env)
    while not (found := list(folder.glob("home/runs/*/*/outputs/first.json"))):
        if supervisor.poll() is not None:
            sys.exit(f"kgorch start ended with {supervisor.returncode} before the first step")
        time.sleep(0.05)
    time.sleep(0.2)  # it is written whole by then
    told: dict[str, float] = json.loads(found[0].read_text())
    subprocess.run([*kgorch, "stop", "listing"], env=env, check=True, capture_output=True)
    supervisor.wait()
    return {"all_s": told.pop("at") - began_at} | told


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pictures", type=int, default=100_000)
    parser.add_argument("--delay-ms", type=float, default=0.0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "pictures").mkdir()
        make(folder / "pictures", options.pictures)
        shutil.copy(Path(__file__).with_name("listing_training.py"), folder)
        plan = PLAN.format(root=folder / "pictures", delay_s=options.delay_ms / 1000)
        (folder / "plan.toml").write_text(plan)
        for number in (1, 2):
            told = {key: round(value, 2) for key, value in session(folder).items()}
            print(json.dumps({"session": number, "pictures": options.pictures, "delay_ms": options.delay_ms, **told}))
        [kept] = folder.glob("home/runs/*/*/cached/headers.json")
        print(json.dumps({"cached_bytes": kept.stat().st_size}))


if __name__ == "__main__":
    main()
