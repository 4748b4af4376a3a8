"""Two of the reference trainings on one GPU, each stopped twice and compared with a run without a stop.

Stops replace time limits: the demo data are so small that a GPU may be done before a limit of 40 s.
"""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
import time
from pathlib import Path

from harness import Kgorch, wait_until

from gpu.runner import ROOT
from gpu.step import Probes, Report
from kgorch.plan import parse

probes = Probes()
STOPS = 2
MAKE = re.compile(r"python -m kgorch\.workloads\.\w+\.(make_\w+) \S+/(\w+)")


def demos() -> list[Path]:
    """The folders with a demo plan: timeseries first, then the one with volumes, then the others."""
    order = ("timeseries", "surface")
    folders = [path.parent for path in (ROOT / "workloads").glob("*/demo.toml")]
    places = {
        folder: next((n for n, name in enumerate(order) if folder.name.startswith(name)), len(order))
        for folder in folders
    }
    return sorted(folders, key=lambda folder: (places[folder], folder.name))


def one_gpu(text: str) -> str:
    """A demo plan reduced to its first training stage, on one rank."""
    head, *blocks = re.split(r"(?m)^\[\[stage\]\]\n", text)
    stages, rest = [], ""
    for block in blocks:
        end = re.search(r"(?m)^\[(?!stage\.)", block)
        stage, after = (block[: end.start()], block[end.start() :]) if end else (block, "")
        rest += after
        if not stages and re.search(r'^entry = "(?:[\w.]+\.)?train:main"', stage, re.MULTILINE):
            stages.append("[[stage]]\n" + re.sub(r"(?m)^ranks = \d+", "ranks = 1", stage))
    return head + "".join(stages) + rest


def copy_workload(report: Report, source: Path, name: str) -> tuple[Kgorch, Path]:
    """A copy of the training with its data, as `kgorch init` makes it, and its plan for one GPU."""
    root = report.folder / name
    root.mkdir()
    kgorch = Kgorch(root, root / "home")
    kgorch("init", "--from", str(source), source.name)
    folder = root / source.name
    text = (folder / "demo.toml").read_text()
    match = MAKE.search((source / "demo.toml").read_text())
    assert match, f"{source}/demo.toml does not say how its data are made"
    subprocess.run([sys.executable, "-m", match[1], match[2]], cwd=folder, check=True, timeout=120, env=kgorch.env())
    plan = folder / "one-gpu.toml"
    plan.write_text(one_gpu(text))
    return kgorch, plan


def missing(source: Path) -> list[str]:
    """Packages that the training imports and that are not installed."""
    texts = [path.read_text() for folder in (source, source.parent / "common") for path in folder.glob("*.py")]
    names = {name for text in texts for name in re.findall(r"(?m)^(?:from|import) (\w+)", text)}
    return sorted(name for name in names - {"kgorch"} if importlib.util.find_spec(name) is None)


def final_states(kgorch: Kgorch) -> dict[str, bytes]:
    """The shards of each stage's newest checkpoint, by stage and file."""
    states = {}
    for stage in sorted(kgorch.home.glob("runs/*/*/checkpoints/*")):
        newest = max((path for path in stage.glob("step-*") if "." not in path.name), default=None)
        if newest:
            states |= {f"{stage.name}/{shard.name}": shard.read_bytes() for shard in newest.glob("*.safetensors")}
    return states


def train_with_stops(kgorch: Kgorch, plan: Path, options: list[str], left_s: float, most: int) -> int:
    """Stop the run `most` times, each time after three steps, then let it finish. Returns the number of stops."""
    stops, until = 0, time.monotonic() + left_s
    for _ in range(most):
        before = _where(kgorch)
        supervisor = kgorch.background("start", str(plan), *options)
        wait_until(
            lambda supervisor=supervisor, before=before: supervisor.poll() is not None or _has_trained(kgorch, before),
            within_s=until - time.monotonic(),
            what="three more steps",
        )
        if supervisor.poll() is None:
            kgorch("stop", code=None, timeout_s=60)
        if supervisor.wait(60) == 0:
            return stops
        stops += 1
    kgorch("start", str(plan), *options, timeout_s=max(until - time.monotonic(), 1.0))
    return stops


def _where(kgorch: Kgorch) -> tuple[str, int]:
    status = kgorch.try_status()
    return (status.get("stage", ""), status.get("step", 0)) if status else ("", 0)


def _has_trained(kgorch: Kgorch, before: tuple[str, int]) -> bool:
    status = kgorch.try_status()
    if not status or not status.get("session") or status["phase"] not in ("training", "saving"):
        return False
    return bool(status["step"] >= (before[1] if status["stage"] == before[0] else 0) + 3)


def compare(report: Report, source: Path) -> None:
    name = source.name
    if missing_packages := missing(source):
        report.skip(f"{name}: bits", f"needs packages that are not installed: {', '.join(missing_packages)}")
        return
    options = ["--set", "deterministic=warn", "--set", "session.wall=2h", "--set", "checkpoint.every=600s"]
    whole_run, plan = copy_workload(report, source, f"{name}-alone")
    if not report.is_on_gpu:
        [stage] = parse(plan.read_text(), str(plan)).stage
        options = [*options[2:], "--set", f"stage.{stage.name}.args.epochs=1"]
    began_s = time.monotonic()
    whole_run("start", str(plan), *options, timeout_s=report.left_s * 0.5)
    report.note(f"{name}: seconds without a stop", f"{time.monotonic() - began_s:.0f}")
    stopping_run, stopping_plan = copy_workload(report, source, f"{name}-cut")
    most = STOPS if report.is_on_gpu else 1
    stops = train_with_stops(
        stopping_run, stopping_plan, options, report.left_s - (time.monotonic() - began_s) - 5, most
    )
    report.check(f"{name}: stops", stops, f"at least 1 of {most}", ok=stops > 0)
    expected, states = final_states(whole_run), final_states(stopping_run)
    differing = sorted(key for key in expected if expected[key] != states.get(key))
    report.check(
        f"{name}: final states that differ", differing if expected.keys() == states.keys() else sorted(states), []
    )
    for key, text in whole_run.status()["exactness"].items():
        report.note(f"{name}: exactness, {key}", text)


@probes(limit_s=140, quick=False)
def first_workload(report: Report) -> None:
    compare(report, demos()[0])


@probes(limit_s=160, quick=False)
def second_workload(report: Report) -> None:
    source = demos()[1]
    if report.is_on_gpu:
        compare(report, source)
        return
    plan = one_gpu((source / "demo.toml").read_text())
    report.check(f"{source.name}: a plan for one GPU", [stage.ranks for stage in parse(plan, "demo").stage], [1])
    report.on_gpu(f"{source.name}: bits")
