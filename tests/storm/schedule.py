"""What comes when: episodes and their faults, a function of a seed alone. Pure, and written as JSON.

A fault comes after so many steps of training, not seconds: on a slower machine it meets the run in the same place of its course,
as far as real processes allow. What a fault still has to choose (which rank, which byte) it draws from its own `chance`, so it
chooses the same when others of the schedule are left out.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from storm.programs import WORKLOADS

FAULTS_AN_EPISODE = 9
OF_WEATHERS = ("source", "hungry")
"""What only the small training can do."""

LOADERS = ("ours", "ours", "torch", "nested", "followed")
"""Of weathers.py: session.loader's, PyTorch's own, one of nested samplers that reads a batch ahead, as Accelerate's do, or one that
the script reads in a loop of its own."""

PROGRAMS = {"weathers": 6.0, **dict.fromkeys(WORKLOADS, 0.4)}
"""What is trained (programs.py), and how often."""


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of fault.

    Attributes:
        weight: how often it comes.
        needs: what must be true of its episode, by name.
        once: not twice in an episode.
        without: what must be false of its episode.
    """

    weight: float = 1.0
    needs: tuple[str, ...] = ()
    once: bool = False
    without: tuple[str, ...] = ()


KINDS: dict[str, Kind] = {
    # processes
    "kill_rank": Kind(3),
    "kill_torchrun": Kind(2),
    "kill_shim": Kind(2),
    "kill_keeper": Kind(2),
    "kill_standby": Kind(1),
    "kill_supervisor": Kind(3),
    "kill_supervisor_and_rank": Kind(2),
    "kill_everything": Kind(3),
    "kill_all_but_keeper": Kind(2),
    "kill_in_a_save": Kind(2),
    "kill_while_starting": Kind(2),
    "kill_loading_process": Kind(2, ("workers",)),
    "kill_daemon": Kind(3, ("daemon",)),
    "terminate_rank": Kind(1),
    "terminate_torchrun": Kind(1),
    "terminate_supervisor": Kind(2),
    "freeze_one": Kind(2),
    "freeze_everything": Kind(2),
    "reboot": Kind(2),
    # a person
    "stop_by_person": Kind(1),
    "stop_and_kill": Kind(1),
    # disks
    "disk_full": Kind(2),
    "disk_full_at_start": Kind(1),
    "disk_goes_read_only": Kind(2),
    "disk_read_only_at_start": Kind(1),
    "disk_slow": Kind(1),
    # what lies on them
    "flip_checkpoint": Kind(2),
    "truncate_checkpoint": Kind(2),
    "delete_checkpoint_file": Kind(2),
    "delete_manifest": Kind(1),
    "socket_removed": Kind(1),
    "keepers_socket_removed": Kind(1),
    "database_locked": Kind(2, without=("fleet",)),
    "database_log_deleted": Kind(1, without=("fleet",)),
    "database_deleted": Kind(0.7, without=("fleet",)),
    "database_damaged": Kind(0.5, without=("fleet",)),
    "database_restarted": Kind(3, ("fleet",)),
    "database_away": Kind(2, ("fleet",)),
    # the second node
    "kill_node": Kind(3, ("nodes",)),
    "kill_agent": Kind(3, ("nodes",)),
    "freeze_node": Kind(2, ("nodes",)),
    # the rest of the machine
    "clock_forward": Kind(1),
    "clock_back": Kind(1),
    "driver_lost": Kind(2, ("driver",)),
    "driver_hangs": Kind(2, ("driver",)),
    "memory_limited": Kind(2, ("hungry",), once=True),
    "source_fails": Kind(3, ("source",)),
}


@dataclass(frozen=True, slots=True)
class Fault:
    """`after_steps`: of training since the run last went on well. `chance`: seeds what it has to choose."""

    kind: str
    after_steps: int
    chance: int


@dataclass(frozen=True, slots=True)
class Episode:
    """One run, and what meets it.

    Attributes:
        loader: whose, one of LOADERS. workers: loading processes.
        source: samples are read from files, as of a network. daemon: nobody types anything. driver: NVML with two GPUs.
        hungry: its steps ask for memory. quota: its hours are counted. apart: its checkpoints lie outside of the state folder.
        wall: of each session, in what a whole uninterrupted run takes on this machine; None for none.
        every_ms: the most between two saves.
        stages: one after another. program: what is trained.
        stranger: what lies in its source was doctored (stranger.py).
        nodes: its two ranks are on a node each. fleet: its database is a PostgreSQL of its own.
    """

    seed: int
    number: int
    ranks: int
    loader: str
    workers: int
    source: bool
    daemon: bool
    driver: bool
    hungry: bool
    quota: bool
    apart: bool
    wall: float | None
    every_ms: int
    faults: tuple[Fault, ...]
    stages: int = 1
    program: str = "weathers"
    stranger: bool = False
    nodes: bool = False
    fleet: bool = False

    @property
    def name(self) -> str:
        return f"{self.seed}.{self.number}"

    def with_faults(self, faults: Sequence[Fault]) -> Episode:
        return dataclasses.replace(self, faults=tuple(faults))

    def bears(self, kind: str) -> bool:
        """Whether a fault of this kind means anything to it."""
        how = KINDS[kind]
        return all(getattr(self, need) for need in how.needs) and not any(getattr(self, what) for what in how.without)


def episodes(seed: int, only: Sequence[str] = (), first: int = 0) -> Iterator[Episode]:
    """Without end. Each is drawn from the seed and its number alone, and from what it is restricted to."""
    return (episode(seed, number, only) for number in itertools.count(first))


def episode(seed: int, number: int, only: Sequence[str] = (), faults: int = FAULTS_AN_EPISODE) -> Episode:
    """`only`: the kinds of faults that may come, all if none; it is made so that it bears them."""
    chance = random.Random(f"{seed}.{number}")
    ranks = chance.choices([1, 2, 3, 4], [8, 8, 1, 1])[0]
    drawn = Episode(
        seed=seed,
        number=number,
        ranks=ranks,
        loader=chance.choice(LOADERS),
        workers=chance.choice([0, 0, 2]) if ranks < 3 else 0,
        source=chance.random() < 0.3,
        daemon=chance.random() < 0.35,
        driver=chance.random() < 0.3 and ranks <= 2,  # as many GPUs as it has
        hungry=chance.random() < 0.15,
        quota=chance.random() < 0.5,
        apart=chance.random() < 0.25,
        wall=round(chance.uniform(2.5, 5.0), 2) if chance.random() < 0.4 else None,
        every_ms=chance.choice([700, 1500, 3000, 20_000]),
        faults=(),
        stages=chance.choice([1, 1, 2]),
        # on their own: what else is drawn stays
        stranger=random.Random(f"{seed}.{number}.stranger").random() < 0.3,
        nodes=random.Random(f"{seed}.{number}.nodes").random() < 0.2,
        fleet=random.Random(f"{seed}.{number}.fleet").random() < 0.15,
    )
    [program] = chance.choices(list(PROGRAMS), list(PROGRAMS.values()))
    needed: dict[str, Any] = {need: True for kind in only for need in KINDS[kind].needs}
    if program in WORKLOADS and needed.keys().isdisjoint(OF_WEATHERS):
        stages, without = len(WORKLOADS[program].stages), dict.fromkeys(OF_WEATHERS, False)
        drawn = dataclasses.replace(
            drawn, program=program, stages=stages, loader="ours", ranks=min(drawn.ranks, 2), **without
        )
    if only:
        needed |= {"workers": 2} if "workers" in needed else {}
        drawn = dataclasses.replace(drawn, ranks=min(drawn.ranks, 2), **needed)
    drawn = _on_nodes(drawn, must="nodes" in needed)
    return drawn.with_faults(list(_faults(drawn, chance, only or list(KINDS), faults)))


def _on_nodes(drawn: Episode, *, must: bool) -> Episode:
    """Two nodes where two ranks are drawn, and nothing that one machine alone has."""
    if must:
        drawn = dataclasses.replace(drawn, ranks=2)
    if not drawn.nodes or drawn.ranks != 2 or drawn.program in WORKLOADS:
        return dataclasses.replace(drawn, nodes=False)
    return dataclasses.replace(drawn, driver=False, hungry=False, daemon=False)


def _faults(drawn: Episode, chance: random.Random, kinds: Sequence[str], count: int) -> Iterator[Fault]:
    open_kinds = {name: KINDS[name].weight for name in kinds if drawn.bears(name)}
    for _ in range(count):
        [name] = chance.choices(list(open_kinds), list(open_kinds.values()))
        yield Fault(name, after_steps=chance.choice([1, 2, 3, 5, 8, 13]), chance=chance.randrange(1 << 30))
        if KINDS[name].once:
            del open_kinds[name]
        if not open_kinds:
            return


def to_json(drawn: Episode, why: Sequence[str] = ()) -> str:
    """`why`: what it broke, for who reads the file."""
    return json.dumps({"storm": 1, "broke": list(why), **dataclasses.asdict(drawn)}, indent=1) + "\n"


def from_json(text: str) -> Episode:
    """Raises: ValueError for what is no episode, or has a fault that there is not any more."""
    told = json.loads(text)
    if not isinstance(told, dict) or told.pop("storm", None) != 1:
        raise ValueError("not an episode of a storm")
    told.pop("broke", None)
    try:
        faults = tuple(Fault(**fault) for fault in told.pop("faults"))
        found = Episode(**told, faults=faults)
    except (KeyError, TypeError) as error:
        raise ValueError(f"not an episode of this storm: {error}") from None
    if strange := sorted({fault.kind for fault in faults} - KINDS.keys()):
        raise ValueError(f"there is no such fault: {', '.join(strange)}")
    return found
