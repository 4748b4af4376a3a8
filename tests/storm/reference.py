"""What an uninterrupted run of an episode's kind ends with, and how long this machine takes for it; trained once for each kind."""

from __future__ import annotations

import fcntl
import hashlib
import json
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness import Kgorch

from storm.schedule import Episode


@dataclass(frozen=True, slots=True)
class Reference:
    digest: str
    took_s: float


def of(episode: Episode, cache: Path) -> Reference:
    """Where samples are read from makes no difference, nor do loading workers to what our own loader gives; a foreign one's do."""
    args = {**episode.args, "folder": "", "hungry": False}
    args["workers"] = episode.workers if episode.loader == "torch" else 0
    told = [episode.ranks, args]
    place = cache / hashlib.sha256(json.dumps(told).encode()).hexdigest()[:16]
    cache.mkdir(parents=True, exist_ok=True)
    with open(place.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # another episode of the kind waits for it
        if not place.with_suffix(".json").exists():
            place.with_suffix(".json").write_text(json.dumps(_trained(episode.ranks, args, place)))
    return Reference(**json.loads(place.with_suffix(".json").read_text()))


def _trained(ranks: int, args: dict[str, Any], place: Path) -> dict[str, str | float]:
    shutil.rmtree(place, ignore_errors=True)
    (place / "work").mkdir(parents=True)
    alone = Kgorch(place / "work", place / "home")
    plan, began_s = alone.plan("weathers.py", ranks=ranks, args=args, every="600s"), time.monotonic()
    alone("start", str(plan), timeout_s=400)
    took_s = time.monotonic() - began_s
    digest = hashlib.sha256(alone.export()).hexdigest()
    shutil.rmtree(place, ignore_errors=True)
    return {"digest": digest, "took_s": took_s}


def write_source(folder: Path) -> None:
    """A file a sample, of as many bytes as weathers.py adds by itself where it reads none."""
    folder.mkdir(parents=True)
    for index in range(96):
        (folder / f"{index}.txt").write_bytes(b"x" * (index % 17))
