"""The five systems as their users have them: copied by `kgorch init`, trained by their demo plans, cut and short of memory."""

from __future__ import annotations

import csv
import json
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from harness import PROGRAMS, Kgorch

# In CI the storm cuts their training, their parts have tests of their own, and `make demo` runs surface_detection.
pytestmark = [pytest.mark.slow, pytest.mark.soak]


@dataclass(frozen=True)
class Demo:
    """A demo plan, shortened where its metric is above chance sooner.

    Attributes:
        make: the program that makes its data, and its arguments; the first one is the folder.
        epochs: of each stage that trains.
        microbatch: of the plan; half of it fits.
        metric: its last value in `table` is to lie above `above`, which is well above `chance`.
        more: settings of the plan that make it quicker here.
    """

    name: str
    make: tuple[str, ...]
    epochs: dict[str, int]
    microbatch: int
    table: str
    metric: str
    chance: float
    above: float
    more: dict[str, str] = field(default_factory=dict)


DEMOS = {
    "cloud_removal": Demo("cloud-removal-demo", ("make_scenes", "scenes"), {"train": 12}, 4, "metrics.csv", "psnr", 13, 18),
    "camouflage": Demo(
        "camouflage-demo", ("make_animals", "animals"), {"stage1": 4, "stage2": 6}, 8, "stage2.csv", "iou", 0.32, 0.5
    ),
    "vqa": Demo(
        "vqa-demo", ("make_shapes", "shapes"), {"train": 4}, 16, "metrics.csv", "accuracy", 0.26, 0.45,
        more={"stage.train.args.num_workers": "0", "stage.train.args.beams": "1", "stage.predict.args.beams": "1"},
    ),
    "surface_detection": Demo(
        "surface-demo", ("make_volumes", "volumes"), {"train": 14}, 8, "metrics.csv", "dice", 0.25, 0.5
    ),
    "timeseries": Demo(
        "timeseries-demo", ("make_prices", "prices"), {"lstm": 1, "transformer": 1, "mlp": 2}, 128, "mlp.csv", "accuracy",
        0.5, 0.55,
    ),
}  # fmt: skip


def begun(root: Path, key: str, made: Path | None = None) -> tuple[Kgorch, Path]:
    """A copy of the training with its data, and its demo plan."""
    root.mkdir()
    kgorch = Kgorch(root, root / "home")
    folder = root / key
    kgorch("init", "--from", f"workloads/{key}", key)
    shutil.copy(PROGRAMS / "limited.py", folder)
    module, data = DEMOS[key].make
    if made is None:
        subprocess.run([sys.executable, "-m", module, data], cwd=folder, check=True, timeout=200)
    else:
        shutil.copytree(made / data, folder / data)
    return kgorch, folder


def options(demo: Demo, folder: Path, *, limited: bool) -> list[str]:
    said = {"session.wall": "2h", "checkpoint.every": "600s"}
    said |= {f"stage.{stage}.args.epochs": str(epochs) for stage, epochs in demo.epochs.items()}
    said |= demo.more
    if limited:
        for stage in demo.epochs:
            said[f"stage.{stage}.entry"] = "limited:main"
            said[f"stage.{stage}.args.inner"] = "train:main"
            said[f"stage.{stage}.args.fits"] = str(demo.microbatch // 2)
    else:
        said["memory.microbatch"] = str(demo.microbatch // 2)
    return [str(folder / "demo.toml"), *(word for key, value in said.items() for word in ("--set", f"{key}={value}"))]


def last_shards(kgorch: Kgorch) -> dict[str, bytes]:
    """The newest checkpoint of each stage, by stage and shard."""
    found = {}
    for stage in sorted(kgorch.home.glob("runs/*/*/checkpoints/*")):
        newest = max((path for path in stage.glob("step-*") if "." not in path.name), default=None)
        if newest:
            found |= {f"{stage.name}/{shard.name}": shard.read_bytes() for shard in newest.glob("*.safetensors")}
    return found


def outputs(kgorch: Kgorch) -> dict[str, bytes]:
    folder = next(kgorch.home.glob("runs/*/*/outputs"))
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("key", DEMOS)
def test_a_demo_cut_into_three_sessions_and_short_of_memory_ends_with_the_bits_of_one_that_was_neither(key, tmp_path):
    demo = DEMOS[key]
    alone, folder = begun(tmp_path / "alone", key)
    alone("start", *options(demo, folder, limited=False), timeout_s=900)
    assert not [event for event in alone.events("exactness") if "untracked" in event["facts"]], "it tracks all it needs"

    cut, cut_folder = begun(tmp_path / "cut", key, made=folder)
    how = options(demo, cut_folder, limited=True)
    cut("start", *how, "--detach")
    cut.wait_for_step(3, within_s=180)
    cut("stop", timeout_s=200)
    stopped_at = cut.status()["step"]
    cut("start", *how, "--detach")
    cut.wait_for_step(stopped_at + 3, within_s=180)
    cut.kill_everything()
    cut("start", *how, timeout_s=900)

    assert cut.status()["state"] == "finished"
    sessions = cut.history()
    assert [entry["phase"] for entry in sessions] == ["suspended", "cut_off", "finished"], cut.events()[-60:]
    taken = {(rung["stage"], rung["rung"]) for entry in sessions for rung in entry["rungs"]}
    assert {stage for stage, rung in taken if rung.startswith("microbatch")} == set(demo.epochs), taken

    assert last_shards(cut) == last_shards(alone)
    expected, found = outputs(alone), outputs(cut)
    assert found.keys() == expected.keys() and {name for name in found if found[name] != expected[name]} == set()

    lines = list(csv.DictReader(expected[demo.table].decode().splitlines()))
    reached = float(lines[-1][demo.metric])
    print(json.dumps({"workload": key, demo.metric: reached, "chance": demo.chance}))
    assert reached > demo.above > demo.chance
    assert any(name.endswith((".png", ".json", ".zip", ".csv")) and "metrics" not in name for name in found)
