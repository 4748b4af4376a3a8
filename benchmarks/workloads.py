"""The five demo trainings, measured:   python benchmarks/workloads.py [--no-speed] [--json FILE] [KEY …]

- steps a second of each train.py under kgorch against the same main() with a session of plain PyTorch (workloads_training.py:
  DataLoader with a DistributedSampler, plain loops, plain backward), in turns (target: at most 3% fewer). Of all rounds' steps
  the lower quartile, because what else the machine does only ever adds to a step; the medians stand beside it, and the medians
  of a rank's processor time, which hang less on what else the machine does
- the share of the time in which ranks compute and do not wait for their batches (target ≥ 0.90)
- what `kgorch check` forecasts against what came: a rank's process (target within 10%), an epoch (within 15%); the check's
  own seconds (target < 60)
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import tomllib
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parent))

import page

DATA = {
    "cloud_removal": ("make_scenes", "scenes"),
    "camouflage": ("make_animals", "animals"),
    "vqa": ("make_shapes", "shapes"),
    "surface_detection": ("make_volumes", "volumes"),
    "timeseries": ("make_prices", "prices"),
}
EPOCHS = {
    "cloud_removal": {"train": 60},
    "camouflage": {"stage1": 24, "stage2": 24},
    "vqa": {"train": 6},
    "surface_detection": {"train": 24},
    "timeseries": {"lstm": 9, "transformer": 2, "mlp": 18},
}
"""So that a stage trains for some 20 seconds or more on two cores: the first ten seconds are cold. And two epochs at least: the
check is held against epochs that are no session's first."""

STEPS, ROUNDS = 60, (2, 4, 6)
"""Of each way: this many steps a turn, in so many turns. Even numbers, because each way is the first one in half of the turns."""

START_S, TURN_S, SPEED_S = 10.0, 20.0, 180.0
"""Seconds of a start on two idle cores; those that a turn trains, where an epoch is no longer; those of all turns of both ways.
Six turns each way of two epochs of timeseries' transformer, 31 steps of 0.3 s or more each, are six minutes alone."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("keys", nargs="*", metavar="KEY", help=f"{', '.join(DATA)}  [all]")
    parser.add_argument("--no-speed", action="store_true", help="only what the check forecast, and the waiting")
    parser.add_argument("--json", type=Path, help="where to keep the figures")
    options = parser.parse_args()
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for key in options.keys or DATA:
            found[key] = measured(Path(folder) / key, key, speed=not options.no_speed)
            print(json.dumps({key: found[key]}, indent=1), flush=True)
    print(table(found))
    if options.json:
        options.json.write_text(json.dumps(page.results("workloads", [], found=found), indent=1))


def measured(root: Path, key: str, *, speed: bool) -> dict[str, Any]:
    root.mkdir()
    env = {**os.environ, "KGORCH_HOME": str(root / "home"), "XDG_CONFIG_HOME": str(root / "home")}
    training = root / key
    run(["init", "--from", f"workloads/{key}", str(training)], root, env)
    module, data = DATA[key]
    subprocess.run([sys.executable, "-m", module, data], cwd=training, check=True)
    plan = [str(training / "demo.toml"), "--set", "session.wall=2h"]
    for stage, epochs in EPOCHS[key].items():
        plan += ["--set", f"stage.{stage}.args.epochs={epochs}"]
    began_s = time.monotonic()
    told = json.loads(run(["check", *plan, "--json"], root, env))
    check_s = time.monotonic() - began_s
    run(["start", *plan], root, env)
    return {
        "check_s": round(check_s, 1),
        "held": [line for line in run(["history"], root, env, error=True).splitlines() if line.startswith("check: ")],
        "computes": computing(root, env),
        "speed": compared(training, told, env) if speed else None,
    }


def computing(root: Path, env: dict[str, str]) -> float:
    """Of the seconds in which ranks trained, the share in which they did not wait for a batch."""
    text = """
from pathlib import Path; import os, statistics
from kgorch.db import runs, samples, sessions
from kgorch.db.engine import open_database
engine = open_database(Path(os.environ["KGORCH_HOME"]))
run = runs.all_runs(engine, limit=1)[0]
waits = [value for row in sessions.of_run(engine, run.id) for item in samples.series(engine, row.id, row.started_at, 0)
         for name, value in item.values.items() if name.endswith(".data_wait")]
print(1 - statistics.fmean(waits))
"""
    return round(
        float(subprocess.run([sys.executable, "-c", text], env=env, capture_output=True, text=True, check=True).stdout),
        3,
    )


def compared(training: Path, told: dict[str, Any], env: dict[str, str]) -> dict[str, Any]:
    """Steps a second under kgorch as a share of those without it, of the stage that takes longest."""
    document = tomllib.loads((training / "demo.toml").read_text())
    timed = [stage for stage in told["stages"] if stage["time"]]
    most = max(timed, key=lambda stage: stage["time"]["training_s"])
    stage = next(item for item in document["stage"] if item["name"] == most["name"])
    epochs, rounds = turns(most["time"]["batches"], most["time"]["epoch_s"])
    args = {**stage["args"], "epochs": epochs}
    args.pop("first_stage", None)
    turn = Turn(training, stage["entry"], args, document["memory"]["microbatch"], env)
    shutil.copy(Path(__file__).with_name("workloads_training.py"), training)
    steps: dict[str, list[tuple[float, float]]] = {"plain": [], "kgorch": []}
    for number in range(rounds):
        for how in sorted(steps, reverse=number % 2 == 1):
            readings = turn.plain() if how == "plain" else turn.supervised()
            steps[how] += [
                (later[0] - sooner[0], later[1] - sooner[1]) for sooner, later in itertools.pairwise(readings)
            ]
    quarters = {how: statistics.quantiles([wall_s for wall_s, _ in steps[how]], n=4) for how in steps}
    processor_s = {how: statistics.median(cpu_s for _, cpu_s in steps[how]) for how in steps}
    return {
        "stage": most["name"],
        "steps": {how: len(steps[how]) for how in steps},
        **{f"{how}_ms": [round(1000 * value, 2) for value in quarters[how]] for how in steps},
        "processor_ms": {how: round(1000 * processor_s[how], 2) for how in steps},
        "ratio": round(quarters["plain"][0] / quarters["kgorch"][0], 3),
        "of_medians": round(quarters["plain"][1] / quarters["kgorch"][1], 3),
        "of_processor_time": round(processor_s["plain"] / processor_s["kgorch"], 3),
    }


def turns(batches: int, epoch_s: float) -> tuple[int, int]:
    """Epochs of a turn, and turns of each way: fewer of both where the machine or the workload is slow.

    Args:
        batches, epoch_s: steps and seconds of an epoch, by the check.
    """
    epochs = max(1, min(math.ceil(STEPS / batches), int(TURN_S / epoch_s)))
    both_s = 2 * (START_S + epochs * epoch_s)
    return epochs, max((rounds for rounds in ROUNDS if rounds * both_s <= SPEED_S), default=min(ROUNDS))


class Turn(NamedTuple):
    """One training of a stage, either way. Both return a reading of wall and processor seconds for each step.

    Attributes:
        training: folder of the script, its data and workloads_training.py.
        entry, args: of the stage.
        microbatch: of the plan.
    """

    training: Path
    entry: str
    args: dict[str, Any]
    microbatch: int
    env: dict[str, str]

    def plain(self) -> list[tuple[float, float]]:
        out = self.training / "times.json"
        command = [
            sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "workloads_training.py",
            self.entry, json.dumps(self.args), str(self.microbatch), str(out),
        ]  # fmt: skip
        path = f"{self.training}:{os.environ.get('PYTHONPATH', '')}"
        env = {**self.env, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
        done = subprocess.run(command, cwd=self.training, env=env, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"{self.entry} in plain PyTorch ended with {done.returncode}\n{done.stderr}")
        return readings_of(out)

    def supervised(self) -> list[tuple[float, float]]:
        """In a run of its own. One save, at its end."""
        out = self.training / "times.json"
        args = {"inner": self.entry, "out": str(out), **self.args}
        stage = {"name": "speed", "entry": "workloads_training:main", "ranks": 2, "args": args}
        lines = ['name = "speed"', "[[stage]]", *(f"{key} = {toml(value)}" for key, value in stage.items())]
        lines += ["[memory]", f"microbatch = {self.microbatch}", "[checkpoint]", 'every = "600s"']
        (self.training / "speed.toml").write_text("\n".join(lines) + "\n")
        run(["start", "speed.toml", "--fresh"], self.training, self.env)
        return readings_of(out)


def readings_of(out: Path) -> list[tuple[float, float]]:
    readings = [(wall_s, cpu_s) for wall_s, cpu_s in json.loads(out.read_text())]
    out.unlink()  # so that the next turn cannot be taken for this one
    return readings


def toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{key} = {toml(item)}" for key, item in value.items()) + " }"
    return json.dumps(value)


def run(args: list[str], cwd: Path, env: dict[str, str], *, error: bool = False) -> str:
    done = subprocess.run([sys.executable, "-m", "kgorch.cli", *args], cwd=cwd, env=env, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"kgorch {' '.join(args)} ended with {done.returncode}\n{done.stdout}\n{done.stderr}")
    return done.stderr if error else done.stdout


def table(found: dict[str, Any]) -> str:
    lines = [
        "| workload | steps/s against plain PyTorch | (medians) | (processor time) | computes | check | forecast and came |",
        "|---|---|---|---|---|---|---|",
    ]
    for key, item in found.items():
        held = "; ".join(line.removeprefix("check: ") for line in item["held"])
        of = item["speed"] or dict.fromkeys(("ratio", "of_medians", "of_processor_time"), math.nan)
        speed = f"{of['ratio']:.3f} | {of['of_medians']:.3f} | {of['of_processor_time']:.3f}"
        lines.append(f"| {key} | {speed} | {item['computes']:.3f} | {item['check_s']:.0f} s | {held} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
