"""What saving and loading cost, beside the peers: one run, ratios, medians.   python benchmarks/checkpoints.py [--quick] [--docs]

Two gloo ranks under a real `kgorch start` train in steps of about 10 ms; every way of saving saves their state (532 MB)
in turns, in the same processes. Targets: the blocking part ≤ 1.05 × one memory copy of the rank's share; training time
lost per save ≤ a quarter of dcp.async_save's; end to end ≤ 0.9 × dcp.save; verify and load ≥ 0.8 × the speed of reading the
files; host memory at most two snapshots; snapshots at ≤ 0.5% of the training's time. Then the same saves for other
sizes of the state and numbers of ranks.

`--json FILE` keeps every figure; `--docs` draws docs/checkpoints.md's table and pictures; `--from FILE` draws from kept
figures. Peers that are not installed are left out: `pip install '.[bench]'`.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

from page import commit, machine  # noqa: E402
from peers import NAMES  # noqa: E402

WORK = 40  # products of 192 × 192 beside the small network: a step of about 10 ms
TORCHS = ["kgorch", "torch.save", "dcp.save", "dcp.async_save"]


@dataclass(frozen=True, slots=True)
class Case:
    """A training to measure in. `steps`: of one stretch; 0 leaves out what needs stretches."""

    groups: int = 15
    width: int = 768
    ranks: int = 2
    ways: Sequence[str] = tuple(NAMES)
    rounds: int = 7
    steps: int = 250
    work: int = WORK


QUICK = Case(groups=4, rounds=2, steps=60)
SIZES = [Case(groups=groups, ways=TORCHS, rounds=3, steps=0) for groups in (2, 4, 8, 30)]
RANKS = [Case(groups=8, ranks=ranks, ways=TORCHS, rounds=3, steps=0) for ranks in (1, 4)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a small state, few repetitions: about a minute")
    parser.add_argument("--docs", action="store_true", help="draw the table and the pictures of docs/checkpoints.md")
    parser.add_argument("--json", type=Path, help="where to keep every figure")
    parser.add_argument("--from", dest="kept", type=Path, help="figures kept before, instead of measuring")
    options = parser.parse_args()
    if options.kept:
        results = json.loads(options.kept.read_text())
    else:
        results = {
            "machine": machine(),
            "commit": commit(),
            "main": run(QUICK if options.quick else Case()),
            "cases": [],
        }
        for case in [] if options.quick else SIZES + RANKS:
            print(f"{case.groups} layers on {case.ranks} ranks …", file=sys.stderr, flush=True)
            found = run(case)
            results["cases"].append({"ranks": case.ranks, **found})
    if options.json:
        options.json.write_text(json.dumps(results, indent=1))
    print(table(results))
    if options.docs:
        import checkpoints_page

        checkpoints_page.draw(results)


def run(case: Case) -> dict[str, Any]:
    """The figures of one training. Raises: SystemExit with the rank's last words."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        args = {
            "out": str(folder / "out"), "groups": case.groups, "width": case.width, "ways": list(case.ways),
            "rounds": case.rounds, "steps": case.steps, "work": case.work,
        }  # fmt: skip
        (folder / "plan.toml").write_text(
            'name = "bench"\n[[stage]]\nname = "train"\nentry = "saving_training:main"\n'
            f"ranks = {case.ranks}\nargs = {{ {', '.join(f'{key} = {json.dumps(value)}' for key, value in args.items())} }}\n"
            '[checkpoint]\nevery = "24h"\nsnapshot = "off"\nkeep = { last = 1 }\n'
        )
        paths = [str(HERE.parent), str(HERE), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
        env = {
            **os.environ, "KGORCH_HOME": str(folder / "home"), "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join(path for path in paths if path),
        }  # fmt: skip
        done = subprocess.run(
            [sys.executable, "-m", "kgorch.cli", "start", "plan.toml"],
            cwd=folder, env=env, capture_output=True, text=True,
        )  # fmt: skip
        if done.returncode:
            logs = "".join(path.read_text()[-3000:] for path in sorted(folder.glob("home/**/rank*.log")))
            raise SystemExit(f"{done.stderr[-2000:]}\n{logs}")
        return dict(json.loads((folder / "out").read_text()))


def spread(values: Sequence[float]) -> tuple[float, float, float]:
    """Median, and the quartiles around it."""
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else [values[0]] * 3
    return middle, low, high


def targets(found: dict[str, Any]) -> list[tuple[str, float, str, float, str]]:
    """What was promised: its name, the figure, which way, the bound, and from what it was computed. Peers may be missing."""

    def middle(name: str, way: str | None = None) -> float:
        return statistics.median(found[name] if way is None else found[name][way])

    def paired(ours: Sequence[float], other: Sequence[float]) -> float:
        return statistics.median(one / two for one, two in zip(ours, other, strict=True))

    size = found["state_bytes"]
    blocked, took = found["blocking_s"], found["end_to_end_s"]
    rows = [("blocking part / one memory copy", paired(blocked["kgorch"], found["copy_s"]), "≤", 1.05, "")]
    if "lost_s" in found and "dcp.async_save" in found["lost_s"]:
        ours, theirs = middle("lost_s", "kgorch"), middle("lost_s", "dcp.async_save")
        rows.append(("training lost / dcp.async_save's", ours / theirs, "≤", 0.25, f"{ours:.2f} s / {theirs:.2f} s"))
    if "dcp.save" in took:
        rows.append(("end to end / dcp.save", paired(took["kgorch"], took["dcp.save"]), "≤", 0.9, ""))
    rows += [
        ("verify and load: speed / reading", paired(found["read_s"], found["load_s"]), "≥", 0.8, ""),
        ("host memory of two snapshots / state", found["images_bytes"] / size, "≤", 2.01, ""),
    ]
    if "lost_s" in found:
        interval_s = max(1.0, middle("blocking_s", "kgorch") / found["overhead"])
        cost = 100 * middle("lost_by_snapshot_s") / interval_s
        rows.append(("snapshots: % of training", cost, "≤", 0.5, f"one every {interval_s:.1f} s"))
    return rows


def table(results: dict[str, Any]) -> str:
    found = results["main"]
    peers = found["peers"]
    size = found["state_bytes"]
    copy = spread(found["copy_s"])
    lines = [f"{size / 1e6:.0f} MB, 2 ranks; one memory copy of a rank's share: {in_ms(copy)} ms", ""]
    heads = ("blocking", "training lost", "end to end")
    lines.append(
        f"{'ms: median (quartiles)':<30}" + "".join(f"{head:>22}" for head in heads) + f"{'memory / state':>16}"
    )
    for name, about in peers.items():
        lost = in_ms(spread(found["lost_s"][name])) if "lost_s" in found else "–"
        lines.append(
            f"{name + ' ' + about['version']:<38.38}{in_ms(spread(found['blocking_s'][name])):>14}{lost:>22}"
            f"{in_ms(spread(found['end_to_end_s'][name])):>22}{found['memory_bytes'][name] / size:>14.2f}"
        )
    lines += [f"{name}: not here ({why})" for name, why in found["missing"].items()]
    if "lost_s" in found:
        lines += [f"{'kgorch, a snapshot in memory':<52}{in_ms(spread(found['lost_by_snapshot_s'])):>22}"]
        lines += [f"a step: {1e3 * statistics.median(found['plain_s']) / found['steps']:.2f} ms"]
    times = [in_ms(spread(found[key])) for key in ("read_s", "stream_s", "load_s")]
    lines += ["", "read {} ms (keeping nothing {}), verify and load {} ms".format(*times), ""]
    for name, value, way, bound, why in targets(found):
        held = "" if (value <= bound if way == "≤" else value >= bound) else "   MISSED"
        lines.append(f"{name:<36}{value:>8.2f}   target {way} {bound}{'   (' + why + ')' if why else ''}{held}")
    return "\n".join(lines)


def in_ms(values: tuple[float, float, float]) -> str:
    middle, low, high = (1e3 * value for value in values)
    return f"{middle:.0f} ({low:.0f}–{high:.0f})"


if __name__ == "__main__":
    main()
