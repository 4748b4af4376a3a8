"""How long trouble holds a training up, and what it costs.   python benchmarks/recovery.py [--quick] [--json FILE] [--docs]

Two gloo ranks train (benchmarks/bounded/), 1 MB of state; then something goes wrong. Told are the seconds from there to the next
new step, one behind the furthest that was reached, whose loss is a number; and the steps that were lost: done again within these
seconds, or left out. kgorch as `kgorch start` has it without a word in its plan (but for the hang: the same 15 s for all) against
what PyTorch, Lightning, Accelerate, Transformers, nvidia-resiliency-ext and torchft offer, each for what it answers. Medians of the
trials that came to a new step, where at least half did; else the table tells what came instead, as it was seen. In each round
everything is done once, in an order of its own.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

import psutil

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

import page  # noqa: E402
from bounded import Job, Peer, kgorch, living, torchrun, version  # noqa: E402

EVERY, AT, LATER = 50, 310, 13
"""Steps between two saves of the peers; the step at which it goes wrong at first, and how much later in each repetition."""

TIMEOUT_S = 15.0
"""For a hang; a collective's of the peers."""

PATIENCE_S = 30.0
LASTS_S = 2.0
"""New steps must go on for so long: ranks whose torchrun is gone make some more before they are ended."""

BAD_STEPS = 60
RESTARTS = ["--max-restarts=3"]

OWN_STORE = ["env", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"]
"""A new store for each restart of torchrun's ranks, not the agent's with what the last attempt left in it (PyTorch #135712)."""


@dataclass(frozen=True, slots=True)
class Fault:
    """kind: of training.Faults, in `ranks`; or whom a SIGKILL meets."""

    kind: str
    ranks: str = "1"


FAULTS = {
    "SIGKILL of a rank": Fault("kill rank"),
    "SIGKILL of torchrun": Fault("kill torchrun"),
    "SIGKILL of the supervisor": Fault("kill supervisor"),
    "Out of memory in a step, one rank": Fault("oom"),
    "Out of memory in a step, all ranks": Fault("oom", "0,1"),
    "Out of memory in the optimizer's step, one rank": Fault("oom-outside"),
    "A loss that is no number": Fault("nan"),
    "A rank that hangs": Fault("hang"),
}

HANG = f'{{ step = "{TIMEOUT_S:g}s" }}'
TORCHRUN, AS_IT_COMES, GUARDED = "torchrun, torch.save", "torchrun, torch.save, as it comes", "torchrun, guarded script"
LIGHTNING, ACCELERATE = "torchrun, Lightning", "torchrun, Accelerate"
TRANSFORMERS = "torchrun, Transformers auto_find_batch_size"
NVIDIA, TORCHFT = "ft_launcher, torch.save", "torchft"


def restarted(script: str, job: Job, *more: str) -> list[str]:
    return [*OWN_STORE, *torchrun(script, job, *more, options=RESTARTS)]


def plain(job: Job, script: str = "ddp.py") -> list[str]:
    return torchrun(script, job, "--timeout", f"{TIMEOUT_S:g}", options=RESTARTS)


WAYS: dict[str, Peer] = {
    "kgorch": Peer("kgorch", f"`kgorch start`; for the hang {TIMEOUT_S:.0f} s a step", kgorch),
    TORCHRUN: Peer(
        "torch",
        f"--max-restarts=3, every {EVERY} steps, process group's timeout {TIMEOUT_S:.0f} s, TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1",
        lambda job: [*OWN_STORE, *plain(job)],
    ),
    AS_IT_COMES: Peer("torch", "the same without that variable", plain),
    GUARDED: Peer(
        "torch", "the same as with it; the ranks agree to halve the microbatch, or to skip a step",
        lambda job: [*OWN_STORE, *plain(job, "guarded.py")],
    ),
    LIGHTNING: Peer(
        "pytorch-lightning", f"that torchrun, ModelCheckpoint every {EVERY} steps; detect_anomaly for the loss",
        lambda job: restarted("lightning_trainer.py", job),
    ),
    ACCELERATE: Peer(
        "accelerate", f"that torchrun, find_executable_batch_size, halving; from save_state every {EVERY} steps",
        lambda job: restarted("accelerate_oom.py", job),
    ),
    TRANSFORMERS: Peer(
        "transformers", f"that torchrun, auto_find_batch_size=True, save_steps={EVERY}",
        lambda job: restarted("auto_batch.py", job),
    ),
    NVIDIA: Peer(
        "nvidia-resiliency-ext", "ft_launcher with its defaults and --max-restarts=3, otherwise as torchrun, torch.save",
        lambda job: [*OWN_STORE, sys.executable, "-m", "nvidia_resiliency_ext.fault_tolerance.launcher", *plain(job)[1:]],
    ),
    TORCHFT: Peer(
        "torchft", "each rank a replica group, torchrun --max-restarts=3 for each, one lighthouse, heartbeat_timeout_ms=1000",
        lambda job: [sys.executable, *torchrun("torchft_ddp.py", job)[3:]],
    ),
}  # fmt: skip
ANSWERS = {
    "kgorch": list(FAULTS),
    TORCHRUN: ["SIGKILL of a rank", "SIGKILL of torchrun", "A rank that hangs"],
    AS_IT_COMES: ["SIGKILL of a rank"],
    GUARDED: [name for name, fault in FAULTS.items() if fault.kind in ("oom", "oom-outside", "nan")],
    LIGHTNING: ["SIGKILL of a rank", "A loss that is no number"],
    ACCELERATE: [name for name, fault in FAULTS.items() if fault.kind == "oom"],
    TRANSFORMERS: [name for name, fault in FAULTS.items() if fault.kind == "oom"],
    NVIDIA: ["SIGKILL of a rank"],
    TORCHFT: ["SIGKILL of a rank"],
}
"""Where a way differs from the one that it builds on."""

QUICK = ["SIGKILL of a rank", "Out of memory in a step, one rank"]


@dataclass(frozen=True, slots=True)
class Trial:
    """Attributes:
    seconds, steps_lost: None where no new step came.
    outcome: what came instead, or what is to be known besides.
    besides_s: seconds that end the outcome's sentence.
    """

    seconds: float | None
    steps_lost: int | None
    outcome: str = ""
    besides_s: float | None = None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="kgorch alone, two faults, once: half a minute")
    parser.add_argument("--rounds", type=int, default=5, help="repetitions  [5]")
    parser.add_argument("--seed", type=int, default=0, help="of the order in each round  [0]")
    parser.add_argument("--fault", metavar="WORDS", action="append", help="faults whose name holds this")
    parser.add_argument("--only", metavar="WAY", action="append", help="ways whose name holds this")
    page.add_options(parser)
    options = parser.parse_args()

    def measure() -> dict[str, Any]:
        faults = [name for name in FAULTS if not options.fault or any(word in name for word in options.fault)]
        ways = [name for name in WAYS if not options.only or any(word in name for word in options.only)]
        if options.quick:
            faults = faults if options.fault else QUICK
            ways = ways if options.only else ["kgorch"]
        return measured(faults, ways, 1 if options.quick else options.rounds, options.seed)

    page.run(options, measure)


def measured(faults: Sequence[str], ways: Sequence[str], rounds: int, seed: int) -> dict[str, Any]:
    missing = [way for way in ways if not version(WAYS[way])]
    pairs = [(fault, way) for fault in faults for way in ways if way not in missing and fault in ANSWERS[way]]
    found: dict[tuple[str, str], list[Trial]] = {pair: [] for pair in pairs}
    chance = random.Random(seed)
    with tempfile.TemporaryDirectory() as place:
        for number in range(rounds):
            for count, (fault, way) in enumerate(chance.sample(pairs, len(pairs))):
                folder = Path(place) / f"{number}-{count}"
                folder.mkdir()
                trial = tried(way, FAULTS[fault], AT + LATER * number, folder)
                found[fault, way].append(trial)
                print(f"{fault}: {way}: {trial}   load {os.getloadavg()[0]:.1f}", file=sys.stderr, flush=True)
    rows = [row(fault, way, trials) for (fault, way), trials in found.items()]
    packages = sorted({WAYS[way].needs for way in ways if way not in missing})
    return page.results(
        "recovery", rows, packages=packages, rounds=rounds, seed=seed, missing=missing,
        settings={way: WAYS[way].setting for way in ways}, title="Seconds from the fault to the next new step",
    )  # fmt: skip


def row(fault: str, way: str, trials: Sequence[Trial]) -> dict[str, Any]:
    """Of the repetitions that came to a new step, if at least half did."""
    came = [trial for trial in trials if trial.seconds is not None]
    told = {"name": way, "group": fault, "unit": "s", "better": "lower", "note": _note(trials) or None}
    told["trials"] = [asdict(trial) for trial in trials]
    if not came or 2 * len(came) < len(trials):
        return {**told, "value": None, "figures": {"steps lost": None}}
    seconds = [trial.seconds for trial in came if trial.seconds is not None]
    spread = (min(seconds), max(seconds)) if len(seconds) > 1 else None
    figures = {"steps lost": _median(trial.steps_lost for trial in came)}
    return {**told, "value": statistics.median(seconds), "spread": spread, "figures": figures}


def _note(trials: Sequence[Trial]) -> str:
    """What came, how often where that differs, and the median of the seconds that belong to it."""
    came = sum(trial.seconds is not None for trial in trials)
    parts = [f"came back {came} of {len(trials)}"] if 0 < came < len(trials) else []
    for outcome in dict.fromkeys(trial.outcome for trial in trials if trial.outcome):
        those = [trial for trial in trials if trial.outcome == outcome]
        besides_s = _median(trial.besides_s for trial in those)
        times = f" {besides_s:.1f} s" if besides_s is not None else ""
        parts.append(f"{outcome}{times}{f': {len(those)} of {len(trials)}' if len(those) < len(trials) else ''}")
    return "; ".join(parts)


def _median(values: Iterable[float | None]) -> float | None:
    there = [value for value in values if value is not None]
    return statistics.median(there) if there else None


def tried(way: str, fault: Fault, at: int, folder: Path) -> Trial:
    job = Job(folder / "own", "1MB", EVERY)
    job.folder.mkdir()
    marks, told = folder / "marks", folder / "fault"
    command = WAYS[way].command(job)
    if way == "kgorch" and fault.kind == "hang":
        command = kgorch(job, hang=HANG)
    if way == LIGHTNING and fault.kind == "nan":
        command.append("--detect-anomaly")
    env = {} if fault.kind.startswith("kill") else {"BOUNDED_FAULT": f"{fault.kind}:{at}:{fault.ranks}:{told}"}
    with living.started(command, job.folder, marks, **env) as it:
        if not it.watch(lambda: _furthest(it.lives()) >= at, 120.0):
            return Trial(None, None, f"never came to the fault: {it.said()[-300:]}")
        if env:
            it.watch(lambda: bool(list(folder.glob("fault.[01]"))), 130.0)
            at_s = min(float(path.read_text()) for path in folder.glob("fault.[01]"))
            return _outcome(it, at, at_s)
        rank = psutil.Process(it.lives(1)[-1].pid)
        whom = {"kill rank": rank.pid, "kill torchrun": rank.ppid(), "kill supervisor": it.process.pid}[fault.kind]
        if way == "kgorch" and fault.kind == "kill torchrun":
            assert whom != it.process.pid  # its torchrun is forked, and not by the supervisor
        os.kill(whom, signal.SIGKILL)
        at_s = time.monotonic()
        found = _outcome(it, at, at_s)
        if fault.kind == "kill torchrun" and found.seconds is not None and len(it.lives()) == 1:
            return Trial(None, None, "its ranks train on, and nobody is left to start them again")
        if fault.kind == "kill supervisor":
            besides_s = _adopted_s(it, command)
            found = replace(found, outcome="trains on; the next `kgorch start` has it after", besides_s=besides_s)
        if way == TORCHFT and found.seconds is not None and len(it.lives()) == 1:
            it.watch(lambda: it.lives(1)[-1].began_s > at_s, at_s - it.began_s + PATIENCE_S)
            besides_s = it.lives(1)[-1].began_s - at_s
            words = (
                "one rank trains on with half the batch, both after"
                if besides_s > 0
                else "one rank trains on alone, with half the batch"
            )
            found = replace(found, outcome=words, besides_s=besides_s if besides_s > 0 else None)
        return found


def _outcome(it: living.Session, at: int, at_s: float) -> Trial:
    """What came after the fault behind step `at`, at `at_s` on the monotonic clock."""

    def after() -> tuple[Sequence[living.Step], int, int]:
        """New steps whose loss is a number, of the process that lives last; steps that were lost; losses that are none."""
        lives = it.lives()
        old = [life for life in lives if life.began_s <= at_s]
        again = len(lives) > len(old)
        steps = (step for life in old for step in life.steps if again or step.at_s <= at_s)
        reached = max(
            [at, *(step.number for step in steps)]
        )  # rank 0 may write down the last one after rank 1 has failed
        bad = sum(not math.isfinite(step.loss) for life in lives for step in life.steps if step.at_s > at_s)
        new = [step for step in lives[-1].steps if step.number > reached and math.isfinite(step.loss)]
        return new, (max(0, reached - lives[-1].resumed) if again else 0) + bad, bad

    def lasts() -> bool:
        new, _, bad = after()
        return bad >= BAD_STEPS or (len(new) > 1 and new[-1].at_s - new[0].at_s > LASTS_S)

    it.watch(lasts, at_s - it.began_s + PATIENCE_S)
    new, lost, bad = after()
    if bad >= BAD_STEPS:
        return Trial(None, None, "goes on, and every loss is NaN")
    if lasts():
        return Trial(new[0].at_s - at_s, lost)
    if it.is_over():
        print(it.said()[-1500:], file=sys.stderr)
        return Trial(None, None, f"the run ends (exit code {it.process.returncode})")
    return Trial(None, None, f"stands still ({PATIENCE_S:.0f} s waited)")


def _adopted_s(it: living.Session, command: Sequence[str]) -> float:
    """Seconds from typing `kgorch start` again until what trains has a supervisor again; NaN when it was not seen."""
    quiet: Any = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    began_at = time.time()
    with subprocess.Popen(command, cwd=it.folder, env=it.env, **quiet) as again:
        found = math.nan
        while math.isnan(found) and time.time() < began_at + PATIENCE_S:
            time.sleep(0.5)
            told = subprocess.run(
                [sys.executable, "-m", "kgorch.cli", "history", "--events", "--json"],
                env=it.env, cwd=HERE.parent, capture_output=True, text=True,
            )  # fmt: skip
            stamps = [item["at"] for item in json.loads(told.stdout or "[]") if item["kind"].lower() == "adopted"]
            if stamps:
                found = datetime.fromisoformat(stamps[-1]).timestamp() - began_at
        again.kill()
    return found


def _furthest(lives: Sequence[living.Life]) -> int:
    return max((life.steps[-1].number for life in lives if life.steps), default=-1)


if __name__ == "__main__":
    main()
