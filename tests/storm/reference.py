"""What an uninterrupted run of an episode's kind ends with, and how long this machine takes for it; trained once for each kind."""

from __future__ import annotations

import fcntl
import hashlib
import json
import re
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness import Kgorch

from storm.schedule import Episode


@dataclass(frozen=True, slots=True)
class Reference:
    """`digests`: of each stage's last state, by its name."""

    digests: dict[str, str]
    took_s: float


def of(episode: Episode, cache: Path) -> Reference:
    """Where samples are read from makes no difference, nor do loading workers to what our own loader gives; a foreign one's do."""
    args = {**episode.args, "folder": "", "hungry": False}
    args["workers"] = episode.workers if episode.loader == "torch" else 0
    told = [episode.ranks, episode.epochs, args]
    place = cache / hashlib.sha256(json.dumps(told).encode()).hexdigest()[:16]
    cache.mkdir(parents=True, exist_ok=True)
    with open(place.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # another episode of the kind waits for it
        if not place.with_suffix(".json").exists():
            place.with_suffix(".json").write_text(json.dumps(_trained(episode, args, place)))
    return Reference(**json.loads(place.with_suffix(".json").read_text()))


def _trained(episode: Episode, args: dict[str, Any], place: Path) -> dict[str, Any]:
    shutil.rmtree(place, ignore_errors=True)
    (place / "work").mkdir(parents=True)
    alone = Kgorch(place / "work", place / "home")
    plan, began_s = write_plan(alone, episode, args, every="600s"), time.monotonic()
    alone("start", str(plan), timeout_s=400)
    took_s = time.monotonic() - began_s
    digests = {stage: hashlib.sha256(alone.export(stage=stage)).hexdigest() for stage in episode.epochs}
    shutil.rmtree(place, ignore_errors=True)
    return {"digests": digests, "took_s": took_s}


def write_plan(kgorch: Kgorch, episode: Episode, args: dict[str, Any], **more: Any) -> Path:
    """With all the episode's stages."""
    plan = kgorch.plan("weathers.py", ranks=episode.ranks, args=args, **more)
    head, block, rest = re.split(r"(?=\[\[stage\]\])|(?=\[checkpoint\])", plan.read_text(), maxsplit=2)
    stages = [
        block.replace('"train"', f'"{name}"').replace("args = { ", f"args = {{ epochs = {epochs}, ")
        for name, epochs in episode.epochs.items()
    ]
    plan.write_text("".join([head, *stages, rest]))
    return plan


def write_source(folder: Path) -> None:
    """A file a sample, of as many bytes as weathers.py adds by itself where it reads none."""
    folder.mkdir(parents=True)
    for index in range(96):
        (folder / f"{index}.txt").write_bytes(b"x" * (index % 17))
