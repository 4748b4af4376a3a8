"""The five demo trainings, measured:   python benchmarks/workloads.py [KEY …]

- samples a second of each train.py under kgorch against the same main() whose session is bare PyTorch (DataLoader with a
  DistributedSampler, plain loops, plain backward): alternately, medians (target: at most 3% fewer)
- the share of the time in which ranks compute and do not wait for their batches (target ≥ 0.90)
- what `kgorch check` foretells against what comes: a rank's process (target within 10%), an epoch (within 15%); the check's
  own seconds (target < 60)
"""

from __future__ import annotations

import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

DATA = {
    "cloud_removal": ("make_scenes", "scenes"),
    "camouflage": ("make_animals", "animals"),
    "vqa": ("make_shapes", "shapes"),
    "ink_detection": ("make_fragments", "fragments"),
    "timeseries": ("make_prices", "prices"),
}
EPOCHS = {
    "cloud_removal": {"train": 12},
    "camouflage": {"stage1": 6, "stage2": 6},
    "vqa": {"train": 4},
    "ink_detection": {"train": 10},
    "timeseries": {"lstm": 3, "transformer": 1, "mlp": 6},
}
"""So that a stage trains for half a minute or so on two cores."""

SPEED_EPOCHS, ROUNDS = 2, 4

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
    def __exit__(self, *error): dist.destroy_process_group()
    def track(self, **things): pass
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
    keys = sys.argv[1:] or list(DATA)
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for key in keys:
            found[key] = measured(Path(folder) / key, key)
            print(json.dumps({key: found[key]}, indent=1), flush=True)
    print(table(found))


def measured(root: Path, key: str) -> dict[str, Any]:
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
        "speed": speed(training, told, env),
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


def speed(training: Path, told: dict[str, Any], env: dict[str, str]) -> dict[str, Any]:
    """Steps a second under kgorch as a share of those without it, of the stage whose steps are most."""
    import tomllib

    document = tomllib.loads((training / "demo.toml").read_text())
    name = max((stage for stage in told["stages"] if stage["time"]), key=lambda stage: stage["time"]["training_s"])[
        "name"
    ]
    stage = next(item for item in document["stage"] if item["name"] == name)
    args = {**stage["args"], "epochs": SPEED_EPOCHS}
    args.pop("first_stage", None)
    microbatch = document["memory"]["microbatch"]
    (training / "program.py").write_text(PROGRAM)
    medians: dict[str, list[float]] = {"bare": [], "kgorch": []}
    for _ in range(ROUNDS):
        for how in medians:
            out = training / "times.json"
            if how == "bare":
                command = [
                    sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "program.py",
                    stage["entry"], json.dumps(args), str(microbatch), str(out),
                ]  # fmt: skip
                subprocess.run(
                    command,
                    cwd=training,
                    env={**env, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{training}:{os.environ.get('PYTHONPATH', '')}"},
                    check=True,
                    capture_output=True,
                )
            else:
                supervised(training, stage["entry"], args, microbatch, out, env)
            times = json.loads(out.read_text())
            medians[how].append(statistics.median(b - a for a, b in itertools.pairwise(times)))
    bare, ours = (statistics.median(medians[how]) for how in ("bare", "kgorch"))
    ratios = [one / other for one, other in zip(medians["bare"], medians["kgorch"], strict=True)]
    return {
        "stage": name,
        "bare_ms": round(1000 * bare, 2),
        "kgorch_ms": round(1000 * ours, 2),
        "ratio": round(statistics.median(ratios), 3),
        "of": [round(ratio, 3) for ratio in ratios],
    }


def supervised(
    training: Path, entry: str, args: dict[str, Any], microbatch: int, out: Path, env: dict[str, str]
) -> None:
    """The same main() in a run of its own, its steps' times written down."""
    (training / "timed.py").write_text(
        "import sys, time, json, os\n"
        "def main(inner, out, **args):\n"
        "    from orchestrator.worker import entry\n"
        "    from orchestrator.worker.session import Session\n"
        "    times, boundary = [], Session._boundary\n"
        "    def timed(self):\n"
        "        boundary(self)\n"
        "        times.append(time.perf_counter())\n"
        "    Session._boundary = timed\n"
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
        "| workload | samples/s against bare PyTorch | computes | check | foretold and came |",
        "|---|---|---|---|---|",
    ]
    for key, item in found.items():
        held = "; ".join(line.removeprefix("checked: ") for line in item["held"])
        lines.append(
            f"| {key} | {item['speed']['ratio']:.3f} | {item['computes']:.3f} | {item['check_s']:.0f} s | {held} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
