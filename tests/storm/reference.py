"""What an uninterrupted run of an episode's kind ends with, and how long this machine takes for it; trained once for each kind."""

from __future__ import annotations

import dataclasses
import fcntl
import hashlib
import json
import re
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from harness import Kgorch

from storm import looking, programs
from storm.programs import Stages
from storm.schedule import Episode


@dataclass(frozen=True, slots=True)
class Reference:
    """`digests`: of each stage's last state, by its name. `metrics`: as looking.metrics. `data`: what a workload reads."""

    digests: dict[str, str]
    took_s: float
    data: str
    metrics: dict[str, float] = field(default_factory=dict)


def of(episode: Episode, cache: Path) -> Reference:
    """Where samples are read from makes no difference, nor do loading workers to what our own loader gives; a foreign one's do."""
    calm = dataclasses.replace(episode, source=False, hungry=False)
    if episode.loader == "ours":
        calm = dataclasses.replace(calm, workers=0)
    data = cache / f"data-{episode.program}"
    stages = programs.stages(calm, data)
    place = cache / hashlib.sha256(json.dumps([episode.ranks, stages]).encode()).hexdigest()[:16]
    with _alone(data):
        programs.make_data(episode.program, data)
    with _alone(place):
        if not place.with_suffix(".json").exists():
            place.with_suffix(".json").write_text(json.dumps(_trained(episode.ranks, stages, place)))
    return Reference(**json.loads(place.with_suffix(".json").read_text()), data=str(data))


@contextmanager
def _alone(place: Path) -> Iterator[None]:
    """Another episode of the kind waits for it."""
    place.parent.mkdir(parents=True, exist_ok=True)
    with open(place.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _trained(ranks: int, stages: Stages, place: Path) -> dict[str, Any]:
    shutil.rmtree(place, ignore_errors=True)
    (place / "work").mkdir(parents=True)
    alone = Kgorch(place / "work", place / "home")
    plan, began_s = write_plan(alone, ranks, stages, every="600s"), time.monotonic()
    alone("start", str(plan), timeout_s=400)
    took_s = time.monotonic() - began_s
    digests = {stage: hashlib.sha256(alone.export(stage=stage)).hexdigest() for stage in stages}
    metrics = looking.metrics(alone.look("metrics"))
    shutil.rmtree(place, ignore_errors=True)
    return {"digests": digests, "took_s": took_s, "metrics": metrics}


def write_plan(kgorch: Kgorch, ranks: int | str, stages: Stages, **more: Any) -> Path:
    """With all the episode's stages. `ranks`: as the plan has it."""
    plan = kgorch.plan(**more)
    head, _, rest = re.split(r"(?=\[\[stage\]\])|(?=\[checkpoint\])", plan.read_text(), maxsplit=2)
    blocks = [
        f'[[stage]]\nname = "{name}"\nentry = "{entry}"\nranks = {ranks}\n'
        f"args = {{ {', '.join(f'{key} = {json.dumps(value)}' for key, value in args.items())} }}\n"
        for name, (entry, args) in stages.items()
    ]
    if any(entry == "weathers.py" for entry, _ in stages.values()):
        rest = rest.replace("[checkpoint]", f'[checkpoint]\nkeep = {{ last = 3, best = "{looking.FIGURE}:max" }}')
    plan.write_text("".join([head, *blocks, rest]))
    return plan


def write_source(folder: Path) -> None:
    """A file a sample, of as many bytes as weathers.py adds by itself where it reads none."""
    folder.mkdir(parents=True)
    for index in range(96):
        (folder / f"{index}.txt").write_bytes(b"x" * (index % 17))
