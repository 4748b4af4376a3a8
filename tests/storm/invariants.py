"""What must hold whatever comes. Each invariant takes plain facts of a world and says in words what is broken; nothing: it holds.

The facts are gathered by world.py after each fault, once the run trains on, and once more when it is over. An invariant that
cannot be told from them (a clock that was stepped, a run that is not over) says nothing.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

CHARGED_EVERY_S = 2.0
"""What a session's end may miss of its hours (limits/quota_ledger.py)."""

PERSONS = ("the wall came before the first step", "nothing of this session could be saved", "no room for a checkpoint")
"""Ends after which a person has to look: of sessions that are too short here, and of a disk that was full until the wall."""

SLACK_S = 6.0
"""Of a charge: opening and ending of a session, on a machine that does much else."""


@dataclass(frozen=True, slots=True)
class Trace:
    """A fault that was injected, and where the run stood.

    Attributes:
        what: it was done to, in words.
        expects: where the log must tell of it (`attempt`, `session`, or `event KIND`), and a pattern of what it says there;
            one of them suffices.
        attempts, sessions, events: how many there were before; with none of the log left afterwards, 0.
        promised: the newest step that was verified and not damaged since.
        may_fail: whether the run may end as failed of it.
    """

    kind: str
    what: str
    expects: tuple[tuple[str, str], ...] = ()
    attempts: int = 0
    sessions: int = 0
    events: int = 0
    promised: int = 0
    may_fail: bool = False


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """As its row and its folder tell. `why`: it is not whole. Of its own account of samples: what its position says, what was
    counted in it (None: its program does not count), the most that one sample was seen in an epoch. `figure`: that its weights were
    measured at, as its manifest says; `measures`: what they come to (None: not measured); `stage`: among whose it competes."""

    path: str
    step: int
    state: str
    whole: bool = True
    final: bool = False
    why: str = ""
    samples: int = 0
    counted: int | None = 0
    most: int = 0
    stage: str = ""
    figure: float | None = None
    measures: float | None = None


@dataclass(frozen=True, slots=True)
class Process:
    pid: int
    role: str
    rank: str = ""


@dataclass(frozen=True, slots=True)
class Charged:
    """A session's hours: rows of charges, seconds in them, seconds that it lasted, and how many attempts it launched."""

    session: int
    rows: int
    used_s: float
    lasted_s: float
    launches: int = 1


@dataclass(frozen=True, slots=True)
class Said:
    """What a command of kgorch said, and how it ended. `killed`: by us."""

    command: str
    code: int | None
    text: str
    killed: bool = False


@dataclass(frozen=True, slots=True)
class Facts:
    """`promised`: path → step of all that was ever seen verified; `damaged`: those that a fault has broken since.
    `over`: the run is finished and nothing is to live any more. `bits`: hashes of a stage's last state and an uninterrupted run's,
    by its name. `metrics`: by stage, name and epoch, ours and an uninterrupted run's. `foreign`: what a stranger's database has
    had done here. A step counts those of the stages before it, too (`looking.FURTHER`)."""

    history: tuple[Mapping[str, Any], ...] = ()
    events: tuple[Mapping[str, Any], ...] = ()
    checkpoints: tuple[Checkpoint, ...] = ()
    promised: Mapping[str, int] = field(default_factory=dict)
    damaged: frozenset[str] = frozenset()
    processes: tuple[Process, ...] = ()
    doubles: str = ""
    charges: tuple[Charged, ...] = ()
    strays: tuple[str, ...] = ()
    foreign: tuple[str, ...] = ()
    said: tuple[Said, ...] = ()
    stuck: str = ""
    trace: Trace | None = None
    over: bool = False
    bits: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    metrics: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    inexact: tuple[str, ...] = ()
    clock_moved: bool = False


def same_bits(facts: Facts) -> list[str]:
    apart = {} if facts.inexact else {stage: pair for stage, pair in facts.bits.items() if pair[0] != pair[1]}
    return [
        f"{stage}'s state {ours[:16]} is not the uninterrupted run's {aim[:16]}" for stage, (ours, aim) in apart.items()
    ]


def metrics_are_complete(facts: Facts) -> list[str]:
    """Every epoch's mean, or value, is there, and is the uninterrupted run's: no step is missing or counted twice."""
    apart = {} if facts.inexact else facts.metrics
    return [
        f"{what} is {ours}, and {aim} in the uninterrupted run"
        for what, (ours, aim) in apart.items()
        if not math.isclose(ours, aim, rel_tol=1e-6, abs_tol=1e-9) and not (math.isnan(ours) and math.isnan(aim))
    ][:10]


def samples_once(facts: Facts) -> list[str]:
    """Of what kept steps saw: no sample twice in an epoch, none left out."""
    broken = []
    for item in facts.checkpoints:
        if item.whole and item.state == "verified" and item.counted not in (None, item.samples):
            broken.append(f"step {item.step} stands at {item.samples} samples and has seen {item.counted}")
        if item.whole and item.state == "verified" and item.most > 1:
            broken.append(f"step {item.step} has seen a sample {item.most} times in an epoch")
    return broken


def best_is_what_was_measured(facts: Facts) -> list[str]:
    """A figure that is told of a checkpoint's own weights is theirs, and none was let go that beats all that stand."""
    broken = [
        f"step {item.step} says {item.figure} of its weights, and they come to {item.measures}"
        for item in facts.checkpoints
        if item.figure is not None and item.measures is not None and abs(item.figure - item.measures) > 1e-6
    ]
    for stage in {item.stage for item in facts.checkpoints} if not facts.damaged else ():
        known = [item for item in facts.checkpoints if item.stage == stage and item.figure is not None]
        best = max((item.figure or 0.0 for item in known if item.state == "verified"), default=-math.inf)
        broken += [
            f"step {item.step} was dropped with {item.figure}, and the best that stands has {best}"
            for item in known
            if item.state == "dropped" and item.figure is not None and item.figure > best
        ]
    return broken


def nothing_verified_lost(facts: Facts) -> list[str]:
    """What was verified stands, or gave way to a newer one that does; a launch goes on from no older one."""
    now = {item.path: item for item in facts.checkpoints}
    newest = max((item.step for item in facts.checkpoints if item.whole and item.state == "verified"), default=0)
    broken = []
    for path, step in facts.promised.items():
        item = now.get(path)
        if path in facts.damaged or (item and item.whole and item.state == "verified"):
            continue
        if item is None or item.state != "dropped":
            how = f"is {item.state}: {item.why}" if item else "is known to nobody"
            broken.append(f"step {step}, which was verified, {how}")
        elif newest <= step:
            broken.append(f"step {step} was dropped, and the newest that is whole is {newest}")
    trace = facts.trace
    for event in facts.events[trace.events :] if trace else ():
        if trace and event["kind"] == "launched" and int(event["facts"].get("step", 0)) < trace.promised:
            broken.append(f"launched at step {event['facts'].get('step')} though step {trace.promised} was verified")
    return broken


def finished_means_verified(facts: Facts) -> list[str]:
    """Each stage of a finished run has left a final checkpoint that can be read, unless a fault has damaged it since."""
    if not facts.over:
        return []
    finals = {str(Path(item.path).parent) for item in facts.checkpoints if item.final and _stands(item)}
    finals |= {str(Path(path).parent) for path in facts.damaged}
    missing = len(facts.bits) - len(finals)
    return [f"{missing} of {len(facts.bits)} stages have no final checkpoint that is verified"] if missing > 0 else []


def _stands(item: Checkpoint) -> bool:
    return item.whole and item.state == "verified"


def no_orphans(facts: Facts) -> list[str]:
    if not facts.over:
        return []
    return [f"{item.role} {item.rank} lives after the end (pid {item.pid})" for item in facts.processes]


def no_double_run(facts: Facts) -> list[str]:
    broken = [line for line in facts.doubles.splitlines() if line]
    alone = Counter(
        (item.role, item.rank)
        for item in facts.processes
        if item.role in ("rank", "shim", "agent", "supervisor", "helper")
    )
    return broken + [f"{count} times {role} {rank}" for (role, rank), count in alone.items() if count > 1]


def quota_charged_once(facts: Facts) -> list[str]:
    """Each session that is over: by one row, and by as much as it lasted. One that could not launch anything need cost nothing."""
    if facts.clock_moved:
        return []
    broken = []
    for item in facts.charges:
        if not item.launches and not item.rows:
            continue
        if item.rows != 1:
            broken.append(f"session {item.session} is charged by {item.rows} rows")
        if item.used_s > item.lasted_s + SLACK_S:
            broken.append(f"session {item.session} lasted {item.lasted_s:.1f} s and is charged {item.used_s:.1f}")
        if item.launches and item.used_s < item.lasted_s - CHARGED_EVERY_S - SLACK_S:
            broken.append(f"session {item.session} lasted {item.lasted_s:.1f} s and is charged only {item.used_s:.1f}")
    return broken


def log_tells_the_cause(facts: Facts) -> list[str]:
    trace = facts.trace
    if trace is None or not trace.expects:
        return []
    told = list(_told_since(facts, trace))
    if told and told[0] == ("attempt", "finished: "):
        return []  # it met ranks whose stage was done
    if any(where == place and re.search(pattern, text) for place, pattern in trace.expects for where, text in told):
        return []
    wanted = " or ".join(f"{place}: /{pattern}/" for place, pattern in trace.expects)
    heard = "; ".join(f"{where}: {text}"[:160] for where, text in told) or "nothing"
    return [f"{trace.what}: the log should say {wanted}, and says {heard}"[:1500]]


def _told_since(facts: Facts, trace: Trace) -> list[tuple[str, str]]:
    """What the log says of how things ended since the fault, as (where, text)."""
    attempts = [item for session in facts.history for item in session["attempts"]]
    found = [("attempt", f"{item['outcome']}: {item['cause']}") for item in attempts[max(trace.attempts - 1, 0) :]]
    found += [("session", f"{item['phase']}: {item['why']}") for item in facts.history[max(trace.sessions - 1, 0) :]]
    return found + [
        (f"event {event['kind']}", json.dumps(event["facts"], sort_keys=True)) for event in facts.events[trace.events :]
    ]


def nothing_outside(facts: Facts) -> list[str]:
    return [f"{path} lies outside of the state folder" for path in facts.strays]


def nothing_foreign_runs(facts: Facts) -> list[str]:
    """What lies in a source decides nothing: no command of its, no argument, no path."""
    return [f"of a stranger's database: {what}" for what in facts.foreign]


def no_bug(facts: Facts) -> list[str]:
    """Nothing that we call our own fault: no exit code 1, no traceback, no event that says so."""
    broken = [f"event bug: {event['facts']}" for event in facts.events if event["kind"] == "bug"]
    for said in facts.said:
        if said.code == 1 or "Traceback (most recent call last)" in said.text:
            broken.append(f"{said.command} ended with {said.code}: …{said.text.strip()[-600:]}")
        elif said.code is not None and said.code < 0 and not said.killed:
            broken.append(f"{said.command} was ended by signal {-said.code}: …{said.text.strip()[-300:]}")
    return broken


def comes_back(facts: Facts) -> list[str]:
    """It trains on, by itself or when a person starts it again, and does not give up for what passes."""
    broken = [facts.stuck] if facts.stuck else []
    if facts.trace and not facts.trace.may_fail:
        broken += [
            f"it gave up: {session['why']}"
            for session in facts.history[max(facts.trace.sessions - 1, 0) :]
            if session["phase"] == "failed" and not any(end in session["why"] for end in PERSONS)
        ]
    return broken


INVARIANTS: dict[str, Callable[[Facts], list[str]]] = {
    function.__name__: function
    for function in (
        same_bits,
        metrics_are_complete,
        samples_once,
        best_is_what_was_measured,
        nothing_verified_lost,
        finished_means_verified,
        no_orphans,
        no_double_run,
        quota_charged_once,
        log_tells_the_cause,
        nothing_outside,
        nothing_foreign_runs,
        no_bug,
        comes_back,
    )
}


def broken(facts: Facts) -> list[str]:
    """All that is broken, each with the invariant's name before it."""
    return [f"{name}: {what}" for name, check in INVARIANTS.items() for what in check(facts)]
