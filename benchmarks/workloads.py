"""The five demo trainings, measured:   python benchmarks/workloads.py [--no-speed] [KEY …]

- samples a second of each train.py under kgorch against the same main() whose session is bare PyTorch (DataLoader with a
  DistributedSampler, plain loops, plain backward): in turns, of all rounds' steps the lower quartile, because what else the
  machine does only ever adds to a step; the medians are told beside it (target: at most 3% fewer)
- the share of the time in which ranks compute and do not wait for their batches (target ≥ 0.90)
- what `kgorch check` foretells against what comes: a rank's process (target within 10%), an epoch (within 15%); the check's
  own seconds (target < 60)
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
import tomllib
from pathlib import Path
from typing import Any

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
    "timeseries": {"lstm": 9, "transformer": 3, "mlp": 18},
}
"""So that a stage trains for half a minute or more on two cores: the first ten seconds are cold."""

STEPS, ROUNDS = 60, 6
"""Of each way: this many steps at least in so many turns."""

# main() of a stage, in every rank, with a session that does what a person would write without kgorch
PROGRAM = """
import json, os, sys, time
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler
import orchestrator.worker as worker
from orchestrator.worker import batches, entry

target, args, microbatch, out = sys.argv[1], json.loads(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
times = []

class BareLoader:
    def __init__(self, data, global_batch, shuffle=True, drop_last=True, **options):
        ranks = dist.get_world_size()
        self.sampler = DistributedSampler(data, shuffle=shuffle, drop_last=drop_last)
        self.inner = DataLoader(data, global_batch // ranks, sampler=self.sampler, drop_last=drop_last, **options)
        self.global_batch = global_batch
    def __len__(self): return len(self.inner)
    def __iter__(self): return iter(self.inner)
    def share_of(self, number): return 1

class Bare:
    supervised, quick, weight = True, False, 1.0
    def __init__(self, seed):
        dist.init_process_group("gloo")
        torch.manual_seed((seed or 0) + dist.get_rank())
        self.rank, self.world_size, self.device = dist.get_rank(), dist.get_world_size(), torch.device("cpu")
        self.output = worker.output_folder()
        self.microbatch = microbatch
    def __enter__(self): return self
    def __exit__(self, *error):
        time.sleep(0.2)  # gloo's thread lets go of the last reduction, else PyTorch waits for ever: it joins it under the GIL
        dist.destroy_process_group()
    def track(self, **things): pass
    def data(self, path): return path
    def cached(self, name, compute, key): return compute()
    def progress(self, *place): pass
    def loader(self, *args, **options): return BareLoader(*args, **options)
    def epochs(self, count):
        for self.epoch in range(count): yield self.epoch
    def steps(self, loader, epochs=None):
        loader.sampler.set_epoch(self.epoch)
        for batch in loader:
            yield batch
            times.append(time.perf_counter())
    def backward(self, batch, loss_of, scaler=None):
        size = batches.length(batch)
        total = torch.zeros(())
        parts = batches.split(batch, self.microbatch)
        for number, part in enumerate(parts):
            share = batches.length(part) / size
            import contextlib
            with model_of(loss_of).no_sync() if number < len(parts) - 1 else contextlib.nullcontext():
                loss = loss_of(part)
                (loss * share).backward()
            total += loss.detach() * share
        return total
    def to_device(self, batch): return batch
    def autocast(self, dtype=torch.float16, enabled=True): return torch.autocast("cpu", dtype, enabled=enabled)
    def report(self, **metrics): pass

def model_of(loss_of):
    from torch.nn.parallel import DistributedDataParallel
    return next(cell.cell_contents for cell in loss_of.__closure__ if isinstance(cell.cell_contents, DistributedDataParallel))

function = entry.function_of(target)
sys.modules[function.__module__].attach = lambda seed=None, **more: Bare(seed)
function(**args)
if int(os.environ["RANK"]) == 0:
    json.dump(times, open(out, "w"))
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("keys", nargs="*", metavar="KEY", help=f"{', '.join(DATA)}  [all]")
    parser.add_argument("--no-speed", action="store_true", help="only what the check foretold, and the waiting")
    options = parser.parse_args()
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for key in options.keys or DATA:
            found[key] = measured(Path(folder) / key, key, speed=not options.no_speed)
            print(json.dumps({key: found[key]}, indent=1), flush=True)
    print(table(found))


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
        "held": [line for line in run(["history"], root, env, error=True).splitlines() if line.startswith("checked")],
        "computes": computing(root, env),
        "speed": compared(training, told, env) if speed else None,
    }


def computing(root: Path, env: dict[str, str]) -> float:
    """Of the seconds in which ranks trained, the share in which they did not wait for a batch."""
    text = """
from pathlib import Path; import os, statistics
from db import runs, samples, sessions
from db.engine import open_database
engine = open_database(Path(os.environ["KGORCH_HOME"]))
run = runs.everyone(engine, limit=1)[0]
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
    args = {**stage["args"], "epochs": math.ceil(STEPS / most["time"]["batches"])}
    args.pop("first_stage", None)
    microbatch = document["memory"]["microbatch"]
    (training / "program.py").write_text(PROGRAM)
    out = training / "times.json"
    steps: dict[str, list[float]] = {"bare": [], "kgorch": []}
    for number in range(ROUNDS):
        for how in sorted(steps, reverse=number % 2 == 1):
            if how == "bare":
                bare(training, stage["entry"], args, microbatch, out, env)
            else:
                supervised(training, stage["entry"], args, microbatch, out, env)
            times = json.loads(out.read_text())
            steps[how] += [later - sooner for sooner, later in itertools.pairwise(times)]
    quarters = {how: statistics.quantiles(steps[how], n=4) for how in steps}
    return {
        "stage": most["name"],
        "steps": {how: len(steps[how]) for how in steps},
        **{f"{how}_ms": [round(1000 * value, 2) for value in quarters[how]] for how in steps},
        "ratio": round(quarters["bare"][0] / quarters["kgorch"][0], 3),
        "of_medians": round(quarters["bare"][1] / quarters["kgorch"][1], 3),
    }


def bare(training: Path, entry: str, args: dict[str, Any], microbatch: int, out: Path, env: dict[str, str]) -> None:
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "program.py",
        entry, json.dumps(args), str(microbatch), str(out),
    ]  # fmt: skip
    env = {**env, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{training}:{os.environ.get('PYTHONPATH', '')}"}
    subprocess.run(command, cwd=training, env=env, check=True, capture_output=True)


def supervised(
    training: Path, entry: str, args: dict[str, Any], microbatch: int, out: Path, env: dict[str, str]
) -> None:
    """The same main() in a run of its own, its steps' times written down."""
    (training / "timed.py").write_text(
        "import sys, time, json, os\n"
        "def main(inner, out, **args):\n"
        "    from orchestrator.worker import entry\n"
        "    from orchestrator.worker.step_loop import StepLoop\n"
        "    times, boundary = [], StepLoop._boundary\n"
        "    def timed(self):\n"
        "        boundary(self)\n"
        "        times.append(time.perf_counter())\n"
        "    StepLoop._boundary = timed\n"
        "    entry.function_of(inner)(**args)\n"
        "    if int(os.environ['RANK']) == 0:\n"
        "        json.dump(times, open(out, 'w'))\n"
    )
    stage = {"name": "speed", "entry": "timed:main", "ranks": 2, "args": {"inner": entry, "out": str(out), **args}}
    lines = ['name = "speed"', "[[stage]]", *(f"{key} = {toml(value)}" for key, value in stage.items())]
    lines += ["[memory]", f"microbatch = {microbatch}", "[checkpoint]", 'every = "600s"']
    (training / "speed.toml").write_text("\n".join(lines) + "\n")
    run(["start", "speed.toml", "--fresh"], training, env)


def toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{key} = {toml(item)}" for key, item in value.items()) + " }"
    return json.dumps(value)


def run(args: list[str], cwd: Path, env: dict[str, str], *, error: bool = False) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "orchestrator.cli", *args], cwd=cwd, env=env, capture_output=True, text=True
    )
    if done.returncode:
        raise SystemExit(f"kgorch {' '.join(args)} ended with {done.returncode}\n{done.stdout}\n{done.stderr}")
    return done.stderr if error else done.stdout


def table(found: dict[str, Any]) -> str:
    lines = [
        "| workload | samples/s against bare PyTorch | (medians) | computes | check | foretold and came |",
        "|---|---|---|---|---|---|",
    ]
    for key, item in found.items():
        held = "; ".join(line.removeprefix("checked: ") for line in item["held"])
        of = item["speed"] or {"ratio": math.nan, "of_medians": math.nan}
        speed = f"{of['ratio']:.3f} | {of['of_medians']:.3f}"
        lines.append(f"| {key} | {speed} | {item['computes']:.3f} | {item['check_s']:.0f} s | {held} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
