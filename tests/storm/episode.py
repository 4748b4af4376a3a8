"""One episode from beginning to end: its faults one after another, each followed by what must hold."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
from dataclasses import asdict, dataclass, field
from pathlib import Path

from storm import faults, invariants, reference, schedule
from storm.invariants import Facts, Trace
from storm.machine import Refused
from storm.schedule import Episode, Fault
from storm.world import CALM_S, SLOW_S, World


@dataclass(frozen=True, slots=True)
class Hit:
    """A fault of an episode: injected, or `passed_over` and why. `took_s`: to do it and to train on after it."""

    kind: str
    what: str = ""
    passed_over: str = ""
    took_s: float = 0.0
    recovered: bool = False


@dataclass(frozen=True, slots=True)
class Outcome:
    """`broken`: what did not hold. `not_reached`: faults that were left when the run was over, or the time."""

    episode: Episode
    hits: tuple[Hit, ...] = ()
    broken: tuple[str, ...] = ()
    sessions: int = 0
    not_reached: int = 0
    took_s: float = 0.0
    kept: str = ""


@dataclass
class _Course:
    hits: list[Hit] = field(default_factory=list)
    broken: list[str] = field(default_factory=list)
    sessions: int = 0


def run(episode: Episode, cache: Path, out: Path, until_s: float | None = None) -> Outcome:
    """`until_s`: a reading of the monotonic clock after which no further fault comes. What broke leaves its traces in `out`."""
    began_s, course = time.monotonic(), _Course()
    known = reference.of(episode, cache)
    folder = Path(tempfile.mkdtemp(prefix="storm-"))
    world, kept = World(folder / "w", episode, known), ""
    try:
        _weather(world, course, until_s)
    except Exception:  # the harness's own mistake is told as one, and ends no storm
        course.broken.append(f"harness: {traceback.format_exc()}")
    finally:
        if course.broken:
            kept = str(_keep(world, course, out))
        world.close()
        shutil.rmtree(folder, ignore_errors=True)
    left = len(episode.faults) - len(course.hits)
    return Outcome(
        episode, tuple(course.hits), tuple(course.broken), course.sessions, left, time.monotonic() - began_s, kept
    )


def _weather(world: World, course: _Course, until_s: float | None) -> None:
    world.pace(CALM_S)
    for fault in world.episode.faults:
        if until_s is not None and time.monotonic() > until_s:
            break
        if not world.train_on(fault.after_steps, beyond=world.furthest):  # three attempts in vain are a run's end
            break
        course.broken += _meets(world, fault, course)
        if course.broken:
            return
    world.pace(0)
    world.finish()
    facts = _facts_soon(world, None, over=True)
    course.sessions = len(facts.history)
    course.broken += invariants.broken(facts)


def _meets(world: World, fault: Fault, course: _Course) -> list[str]:
    """One fault and the recovery from it; what is broken then."""
    began_s = time.monotonic()
    world.pace(SLOW_S)
    world.note_step()
    try:
        trace = faults.DEEDS[fault.kind](world, random.Random(fault.chance))
    except Refused as why:
        course.hits.append(Hit(fault.kind, passed_over=str(why)))
        return []
    finally:
        world.weather.calm()
    world.train_on(2)
    broken = invariants.broken(_facts_soon(world, trace))
    world.pace(CALM_S)
    course.hits.append(Hit(fault.kind, trace.what, "", time.monotonic() - began_s, not broken))
    return [f"after {trace.what}: {what}" for what in broken]


def _facts_soon(world: World, trace: Trace | None, *, over: bool = False) -> Facts:
    """As soon as nothing is broken, or after a while."""
    until = time.monotonic() + world.soon_s
    while True:
        facts = world.facts(trace, over=over)
        if not invariants.broken(facts) or time.monotonic() > until or world.stuck:
            return facts
        time.sleep(0.5)


def _keep(world: World, course: _Course, out: Path) -> Path:
    """The schedule, the log and all that the processes said, for who looks for the cause."""
    place = out / f"failed-{world.episode.name}"
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    (place / "episode.json").write_text(schedule.to_json(world.episode, course.broken))
    (place / "hits.json").write_text(json.dumps([asdict(hit) for hit in course.hits], indent=1))
    (place / "events.json").write_text(json.dumps(world.events(), indent=1))
    (place / "history.json").write_text(json.dumps(world.history(), indent=1))
    said = [f"── {item.command} → {item.code}\n{item.text}" for item in (command.said() for command in world.commands)]
    (place / "said.txt").write_text("\n".join(said))
    shutil.copytree(
        world.kgorch.home, place / "home", dirs_exist_ok=True, ignore=shutil.ignore_patterns("*.sock", ".filler")
    )
    return place


def end_with_the_storm() -> None:
    """In an episode's process: when the storm is ended, however, it takes its world down and goes."""
    storm = os.getppid()

    def watch() -> None:
        while os.getppid() == storm:
            time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGTERM)

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    threading.Thread(target=watch, name="storm", daemon=True).start()
