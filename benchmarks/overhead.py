"""What kgorch costs: ratios within one run, medians, printed as a table and kept as JSON.   python benchmarks/overhead.py

- bookkeeping of `session.steps` a step, one rank, against the same loop over the same loader (target ≤ 5 µs)
- a training step of two gloo ranks (about 10 ms) with the supervisor at work against the same with it stopped, and the
  ranks' own bookkeeping added (target ≤ 1.005)
- the supervisor's resident memory and share of a core while it supervises (targets ≤ 80 MB, ≤ 1%)
- telemetry's part of that: one second's samples of the host, two ranks and, where a C compiler can build the tests' driver,
  two GPUs (target ≤ 1% of a core)
- `kgorch status` against importing click, sqlalchemy.orm and rich (target ≤ 1.3)
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

STEP_PROGRAM = """
import json, os, sys, time
import torch
from torch.nn.parallel import DistributedDataParallel
from orchestrator.worker import attach

out, steps, work = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
torch.set_num_threads(1)
square = torch.randn(192, 192)
with attach(seed=0) as session:
    model = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 1)))
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    session.track(model=model, optimizer=optimizer)
    data = torch.utils.data.TensorDataset(torch.randn(64 * steps, 64))
    loader = session.loader(data, 64)
    file = open(out, "w") if session.rank == 0 else None
    for batch in session.steps(loader, 1):
        session.backward(batch, lambda part: model(part[0]).square().mean())
        optimizer.step()
        optimizer.zero_grad()
        for _ in range(work):  # what a larger model would compute
            square @ square
        if file:
            print(time.monotonic(), file=file)
"""

LOOP_PROGRAM = """
import json, os, sys, time, torch
from orchestrator.worker import attach
with attach(seed=0) as session:
    model = torch.nn.Linear(1, 1)
    session.track(model=model)
    n = 20000
    data = torch.utils.data.TensorDataset(torch.zeros(n, 1))
    loader = session.loader(data, 1)
    batches = [(torch.zeros(1, 1),)] * n  # already read: what is measured is the loop around them
    class Ready:
        def __len__(self): return n
        def __iter__(self): return iter(batches)
        def seek(self, epoch, batch): pass
        def samples_in(self, batch): return 1
        def share_of(self, batch): return 1
    results = []
    for _ in range(5):
        began = time.perf_counter()
        for batch in Ready(): pass
        plain = time.perf_counter() - began
        session._epoch = session._batch = 0
        session._epochs_total, session._epoch_is_open = 1, True
        began = time.perf_counter()
        for batch in session.steps(Ready()): pass
        results.append((time.perf_counter() - began - plain) / n)
    open(sys.argv[1], "w").write(json.dumps(results))
"""

TELEMETRY_PROGRAM = """
import json, sys, time
from pathlib import Path
from db import runs, sessions
from db.engine import open_database
from orchestrator.runtime.telemetry import VITALS, Sampler
from orchestrator.wire import Vitals

engine = open_database(Path(sys.argv[1]))
run = runs.create(engine, id="r", name="bench", number=1, folder="", workdir="", checkpoints="", plan="", overrides=[],
                  plan_hash="", stages=[])
session = sessions.open_session(engine, run.id, boot_id="b")
sampler = Sampler(engine, session.id, Path(sys.argv[1]))

def live(seconds):
    for _ in range(seconds):
        for rank in range(2):
            sampler.hear(Vitals("1.1", rank, {name: 12345.678 for name in VITALS}))
        time.sleep(1)

live(3)
used, began = time.process_time(), time.monotonic()
live(int(sys.argv[2]))
print(json.dumps([100 * (time.process_time() - used) / (time.monotonic() - began), len(sampler.latest())]))
sampler.stop()
"""


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        results = {
            "machine": machine(),
            "targets": {
                "bookkeeping_us": 5,
                "step_ratio": 1.005,
                "rss_mb": 80,
                "core_percent": 1,
                "telemetry_core_percent": 1,
                "status_ratio": 1.3,
            },
        }
        results["bookkeeping_us"] = bookkeeping_us(folder / "loop")
        results |= steps(folder / "steps")
        results["step_ratio"] += results["bookkeeping_us"] / 1e3 / results["step_ms"]
        results |= telemetry(folder / "telemetry")
        results |= status(folder / "steps")
    for key, target in results["targets"].items():
        print(f"{key:<16} {results[key]:>9.3f}   target ≤ {target}")
    print(json.dumps(results, indent=1))


def machine() -> dict[str, object]:
    return {"cores": os.cpu_count(), "load": os.getloadavg()[0], "python": sys.version.split()[0]}


def kgorch(folder: Path, *words: str) -> subprocess.Popen[bytes]:
    env = {**os.environ, "KGORCH_HOME": str(folder / "home"), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, "-m", "orchestrator.cli", *words],
        cwd=folder,
        env=env,
        stderr=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
    )


def plan(folder: Path, program: str, words: list[str], ranks: int) -> None:
    folder.mkdir(exist_ok=True)
    (folder / "bench.py").write_text(program)
    (folder / "wrapped.py").write_text(
        f"import runpy, sys\nsys.argv = {['bench.py', *words]!r}\nrunpy.run_path('bench.py', run_name='__main__')\n"
    )
    (folder / "plan.toml").write_text(
        f'name = "bench"\n[[stage]]\nname = "train"\nentry = "wrapped.py"\nranks = {ranks}\n[checkpoint]\nevery = "10m"\n'
    )


def bookkeeping_us(folder: Path) -> float:
    plan(folder, LOOP_PROGRAM, [str(folder / "out")], ranks=1)
    assert kgorch(folder, "start", "plan.toml").wait() == 0
    return 1e6 * statistics.median(json.loads((folder / "out").read_text()))


def steps(folder: Path, pairs: int = 25, window_s: float = 1.5) -> dict[str, float]:
    """Steps while the supervisor runs against steps while it is stopped (SIGSTOP), in turns within one training.

    Whole runs cannot be compared on a shared machine: their step times differ by half from one to the next. What
    kgorch does inside the ranks is measured by itself (bookkeeping) and added.
    """
    out = folder / "out"
    plan(folder, STEP_PROGRAM, [str(out), str(int(2.2 * pairs * window_s / 0.008)), "40"], ranks=2)
    process = kgorch(folder, "start", "plan.toml")
    supervisor, windows, largest = psutil.Process(process.pid), [], 0.0
    while not out.exists():
        time.sleep(0.1)
    used_s, began_s = sum(supervisor.cpu_times()[:2]), time.monotonic()
    for _ in range(pairs):
        for stopped in (False, True):
            (supervisor.suspend if stopped else supervisor.resume)()
            time.sleep(0.1)
            windows.append((time.monotonic(), time.monotonic() + window_s))
            time.sleep(window_s)
        largest = max(largest, supervisor.memory_info().rss / 1e6)
    share = 100 * (sum(supervisor.cpu_times()[:2]) - used_s) / ((time.monotonic() - began_s) / 2)
    supervisor.resume()
    assert process.wait() == 0
    marks = [json.loads(line) for line in out.read_text().splitlines()]

    def mean_step(first_s: float, end_s: float) -> float:
        inside = [at for at in marks if first_s <= at < end_s]
        return (inside[-1] - inside[0]) / (len(inside) - 1)

    means = [mean_step(*window) for window in windows if window[1] < marks[-1]]
    ratios = [running / stopped for running, stopped in zip(means[::2], means[1::2], strict=False)]
    spread = statistics.quantiles(ratios, n=4)
    return {
        "step_ms": 1e3 * statistics.median(means),
        "step_ratio": statistics.median(ratios),
        "step_ratio_quartiles": [spread[0], spread[2]],
        "pairs": len(ratios),
        "core_percent": share,
        "rss_mb": largest,
    }


def telemetry(folder: Path, seconds: int = 75) -> dict[str, float]:
    """A sampler alone in a process, for longer than from one roll-up to the next."""
    folder.mkdir()
    env = dict(os.environ)
    if shutil.which("cc"):
        sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
        from driver import build

        env |= build(folder).env
    command = [sys.executable, "-c", TELEMETRY_PROGRAM, str(folder), str(seconds)]
    share, figures = json.loads(subprocess.run(command, env=env, check=True, capture_output=True).stdout)
    return {"telemetry_core_percent": share, "figures_in_a_sample": figures}


def status(folder: Path, rounds: int = 15) -> dict[str, float]:
    env = {**os.environ, "KGORCH_HOME": str(folder / "home")}
    ratios = []
    for _ in range(rounds):
        spent = []
        for command in (["-m", "orchestrator.cli", "status"], ["-c", "import click, sqlalchemy.orm, rich"]):
            began = time.perf_counter()
            subprocess.run([sys.executable, *command], env=env, check=True, capture_output=True)
            spent.append(time.perf_counter() - began)
        ratios.append(spent[0] / spent[1])
    return {"status_ratio": statistics.median(ratios)}


if __name__ == "__main__":
    main()
