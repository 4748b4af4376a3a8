"""What an episode trains: a small training that counts what it has seen (programs/weathers.py), or one of workloads/ in small."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from storm.schedule import Episode

STAGES = ("train", "tune")
"""By these names, one after another, whatever the program calls its own."""


@dataclass(frozen=True, slots=True)
class Workload:
    """`make`: the module that writes its data, and its words after the folder. `stages`: what is said to each."""

    make: tuple[str, ...]
    stages: tuple[dict[str, Any], ...]


_ANIMALS = {
    "size": 64, "dims": [8, 12, 16, 24], "depths": [1, 1, 1, 1], "heads": 4, "width": 8, "warmup": 1, "global_batch": 8,
}  # fmt: skip
WORKLOADS = {
    "timeseries": Workload(
        ("make_prices", "--symbols", "1", "--bars", "3000"),
        tuple({"model": model, "epochs": 6, "global_batch": 128, "hidden": 24, "length": 24} for model in ("lstm", "transformer")),
    ),
    "camouflage": Workload(
        ("make_animals", "--train", "96", "--test", "8", "--size", "56"),
        (
            _ANIMALS | {"epochs": 8, "lr": 4e-3, "frozen": 4, "table": "1.csv"},
            _ANIMALS | {"epochs": 8, "lr": 3e-3, "frozen": 3, "unfreeze_every": 2, "table": "2.csv", "first_stage": STAGES[0]},
        ),
    ),
    "surface_detection": Workload(
        ("make_volumes", "--train", "6", "--size", "32"),
        ({"epochs": 60, "global_batch": 8, "patch": 16, "patches": 12, "width": 4, "valid_every": 5},),
    ),
    "cloud_removal": Workload(
        ("make_scenes", "--scenes", "60"),
        ({"epochs": 30, "global_batch": 8, "crop": 24, "width": 16, "growth": 8, "blocks": 1, "layers": 2, "window": 4, "heads": 4,
          "taps": 1},),
    ),
    "vqa": Workload(
        ("make_shapes", "--pictures", "60", "--test", "8"),
        ({"epochs": 12, "answer_until": 5, "format_until": 8, "global_batch": 16, "question_length": 12, "answer_length": 28,
          "decoder_checkpointing": False, "dropout": 0.0, "beams": 1, "eval_batch": 32, "valid_limit": 8, "valid_length": 8,
          "lr": 1e-3},),
    ),
}  # fmt: skip
COUNTED_EPOCHS = {1: (60,), 2: (25, 35)}
"""Of weathers.py, by the number of stages. Of eight steps: more than an episode's faults and the recoveries take."""

Stages = dict[str, tuple[str, dict[str, Any]]]
"""Entry and arguments of each, by its name."""


def stages(episode: Episode, data: Path) -> Stages:
    """`data`: where `make_data` has been."""
    if episode.program == "weathers":
        args = {"loader": episode.loader, "workers": episode.workers, "folder": "source" if episode.source else ""}
        told = [{"epochs": epochs, **args, "hungry": episode.hungry} for epochs in COUNTED_EPOCHS[episode.stages]]
        return {name: ("weathers.py", said) for name, said in zip(STAGES, told, strict=False)}
    inner = {
        "inner": f"kgorch.workloads.{episode.program}.train:main",
        "data": str(data),
        "num_workers": episode.workers,
    }
    students = {"data": str(data / "train"), "listing": str(data / "train.csv"), "students": str(data / "students")}
    students = students if episode.program == "vqa" else {}
    return {
        name: ("weathered:main", inner | students | said)
        for name, said in zip(STAGES, WORKLOADS[episode.program].stages, strict=False)
    }


def make_data(program: str, folder: Path) -> None:
    """Once for all episodes of it; they only read."""
    if program == "weathers" or folder.exists():
        return
    module, *words = WORKLOADS[program].make
    aside = folder.with_name(f"{folder.name}.part")
    subprocess.run(
        [sys.executable, "-m", f"kgorch.workloads.{program}.{module}", str(aside), *words],
        check=True,
        capture_output=True,
    )
    aside.rename(folder)
