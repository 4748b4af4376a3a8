"""What the memory ladder costs, and what it saves: ratios within one run, medians.   python benchmarks/ladder.py [--docs]

- Its bookkeeping in a step in which nothing happens: two gloo ranks, steps of about 10 ms (target ≤ 0.3%).
- What a rung costs when memory runs out, for real, on one of two ranks (target ≤ 2 step times).
- The same job, whose memory shrinks in its midst, under kgorch, under Accelerate's find_executable_batch_size, and started again
  by a shell with half the batch: seconds lost, steps done again, and whether an optimizer step still takes as many samples.
- A step under activation checkpointing against PyTorch's own (activation.py; target 1.0).

`--json FILE` keeps every figure; `--docs` draws docs/memory.md's tables; `--from FILE` draws from kept figures. `--only NAME`
measures a part. Accelerate comes with `pip install '.[bench]'`.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent), str(HERE.parent / "tests")]

import activation  # noqa: E402
import ladder_job  # noqa: E402
import ladder_training  # noqa: E402
import ranks  # noqa: E402
from checkpoints import spread  # noqa: E402
from page import drawn_into, machine  # noqa: E402

PAGE = HERE.parent / "docs" / "memory.md"
BEGIN, END = "<!-- measured: drawn by benchmarks/ladder.py --docs -->", "<!-- end of measured -->"
LADDER = ["microbatch/2", "activation_checkpointing"]
CASES = [("forward", 1), ("backward", 1), ("backward", 2)]
WAYS = {
    "kgorch": "`kgorch start`",
    "accelerate": "find_executable_batch_size as documented",
    "accelerate_helped": "the same, halving, and from its last save",
    "restart": "a shell that starts it again with half the batch",
}
WAITS_S = 20.0


def bookkeeping(folder: Path, rounds: int = 40, steps: int = 16) -> dict[str, Any]:
    return _of_each_model(folder, "bookkeeping", {"rounds": rounds, "steps": steps})


def recovery(
    folder: Path, cycles: int = 5, batches: Sequence[int] = (ladder_training.BATCH, 6 * ladder_training.BATCH)
) -> dict[str, Any]:
    """With steps of about 10 ms, and of some 60 ms."""
    found = {}
    for batch in batches:
        args = {"batch": batch, "cycles": cycles, "cases": CASES}
        for model, figures in _of_each_model(folder / str(batch), "recovery", args).items():
            found |= {f"{model}, {batch} samples": figures}
    return found


def _of_each_model(folder: Path, training: str, args: dict[str, Any]) -> dict[str, Any]:
    found = {}
    for number, model in enumerate(ladder_training.MODELS):
        place = folder / str(number)
        told = args | {"out": str(place / "out"), "model": model}
        ended = ranks.run(
            place, f"ladder_training:{training}", 2, told, ladder=LADDER, health={"nan": ["skip"]}, timeout_s=600
        )
        if any(ended.codes):
            raise SystemExit(ended.said())
        found[model] = json.loads((place / "out").read_text())
    return found


def compared(folder: Path, rounds: int = 3) -> dict[str, Any]:
    """Of each way: seconds until training was further than before the trouble, and lost in all against a run of its own without;
    steps done again; samples of a last step."""
    ways = [way for way in WAYS if "accelerate" not in way or importlib.util.find_spec("accelerate")]
    found: dict[str, Any] = {
        way: {"calm_s": [], "stands_s": [], "lost_s": [], "again": [], "batch": []} for way in ways
    }
    for turn in range(rounds):
        for way in ways:
            took_s = {}
            for trouble in (False, True):
                place = folder / f"{turn}-{way}-{trouble}"
                place.mkdir(parents=True)
                _go(way, place, ladder_job.SHRINKS_AT if trouble else ladder_job.STEPS + 1)
                marks = _marks(place / "steps")
                took_s[trouble] = marks[-1][0] - marks[0][0]
            samples = [taken for _, taken, _ in marks if taken]
            before = ladder_job.SHRINKS_AT * ladder_job.BATCH
            reached_s, further_s = (next(at for at, _, done in marks if done >= goal) for goal in (before, before + 1))
            found[way]["stands_s"].append(further_s - reached_s)
            found[way]["calm_s"].append(took_s[False])
            found[way]["lost_s"].append(took_s[True] - took_s[False])
            found[way]["again"].append((sum(samples) - ladder_job.SAMPLES) / ladder_job.BATCH)
            found[way]["batch"].append(statistics.mode(samples[-20:]))
    if "accelerate" in ways:
        found["ddp"] = _deadlock(folder / "ddp")
    return found


def _go(way: str, folder: Path, shrinks_at: int) -> None:
    here = [sys.executable, str(HERE / "ladder_job.py"), way, str(folder), str(shrinks_at)]
    if way == "kgorch":
        (folder / "plan.toml").write_text(
            f'name = "bench"\n[[stage]]\nname = "train"\nentry = "ladder_job:kgorch"\nranks = 1\n'
            f'args = {{ folder = "{folder}", shrinks_at = {shrinks_at} }}\n[checkpoint]\nevery = "1s"\n'
        )
        here = [sys.executable, "-m", "kgorch.cli", "start", "plan.toml"]
    elif way == "restart":
        again = 'batch=$1; shift; until "$@" $batch; do batch=$((batch / 2)); done'
        here = ["bash", "-c", again, "-", str(ladder_job.BATCH), *here]
    done = subprocess.run(here, cwd=folder, env=_env(KGORCH_HOME=str(folder / "home")), capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{way}: {done.stdout[-2000:]}\n{done.stderr[-3000:]}")


def _deadlock(folder: Path) -> dict[str, Any]:
    """Accelerate's way on two ranks of DDP, of which one runs out of memory: how its processes ended, if they did."""
    folder.mkdir()
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    started = [
        subprocess.Popen(
            [sys.executable, str(HERE / "ladder_job.py"), "accelerate_ddp", str(folder), "20"],
            env=_env(MASTER_ADDR="127.0.0.1", MASTER_PORT=port, WORLD_SIZE="2", RANK=str(rank)),
            stdout=subprocess.DEVNULL,
            stderr=open(folder / f"rank{rank}.log", "w"),
        )
        for rank in range(2)
    ]
    try:
        still_s = 0.0
        while still_s < WAITS_S and any(process.poll() is None for process in started):
            time.sleep(0.5)
            files = list(folder.glob("steps*"))
            still_s = time.time() - max(file.stat().st_mtime for file in files) if files else 0.0
        codes = [process.poll() for process in started]
    finally:
        for process in started:
            process.kill()
            process.wait()
    said = [(folder / f"rank{rank}.log").read_text().strip().splitlines()[-1:] for rank in range(2)]
    return {"codes": codes, "said": said, "waited_s": still_s, "steps": len(_marks(folder / "steps"))}


def _marks(path: Path) -> list[tuple[float, int, int]]:
    lines = (line.split() for line in path.read_text().splitlines())
    return [(float(at), int(samples), int(done)) for at, samples, done in lines]


def _env(**more: str) -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", **more}


def activations(folder: Path) -> dict[str, Any]:
    import torch

    torch.set_num_threads(1)
    return {name: activation.measured(*what) for name, what in activation.MODELS.items()}


PARTS: dict[str, Callable[[Path], dict[str, Any]]] = {
    "bookkeeping": bookkeeping, "recovery": recovery, "compared": compared, "activations": activations,
}  # fmt: skip


def page(results: dict[str, Any]) -> str:
    """Markdown; as readable in a terminal."""
    about = results["machine"]
    loads = ", ".join(f"{name} {load:.1f}" for name, load in results["load"].items())
    lines = [
        f"{about['cores']} cores, Python {about['python']}, PyTorch {about['torch']}; load average at the end of each part:"
        f" {loads}. Medians, quartiles in brackets."
    ]
    for name in results["load"]:
        lines += ["", *TABLES[name](results[name])]
    return "\n".join(lines)


def _bookkeeping_table(found: dict[str, Any]) -> list[str]:
    lines = [
        "**A step in which nothing happens**, two gloo ranks, the ways in turn within one run:",
        "",
        "| model | step, ms | with the ladder / plain (target ≤ 1.003) | … / session.backward without one | own work, µs |"
        " the same in a row, µs | both / 10 ms (target ≤ 0.3%) |",
        "|---|---|---|---|---|---|---|",
    ]
    for model, figures in found.items():
        plain, without, ladder = (figures["stretch_s"][way] for way in ladder_training.WAYS)
        own_us, warm_us = 1e6 * figures["own_s"], 1e6 * figures["warm_s"]
        lines.append(
            f"| {model} | {1e3 * statistics.median(plain):.1f} | {_ratio(ladder, plain)} | {_ratio(ladder, without)}"
            f" | {own_us:.0f} | {warm_us:.0f} | {own_us / 100:.2f}%, {warm_us / 100:.2f}% |"
        )
    return [
        *lines, "",
        f"{len(plain)} stretches a way. Own work: processor time of a rank, without waiting for the other: within the training,"
        " where each step's computing has emptied the processor's caches, and in a row, with nothing in between.",
    ]  # fmt: skip


def _recovery_table(found: dict[str, Any]) -> list[str]:
    heads = " | ".join(f"end of {where}, {rungs} rung{'s' * (rungs > 1)}" for where, rungs in CASES)
    lines = [
        "**A rung, when memory runs out on one of two ranks**: time lost a rung, in times of a step before (target ≤ 2):",
        "",
        f"| model | step, ms | {heads} |",
        f"|---|---|{'---|' * len(CASES)}",
    ]
    for model, figures in found.items():
        step_s = statistics.median(value for values in figures["step_s"].values() for value in values)
        cells = " | ".join(_of(spread(values)) for values in figures["lost_steps"].values())
        lines.append(f"| {model} | {1e3 * step_s:.0f} | {cells} |")
    return lines


def _compared_table(found: dict[str, Any]) -> list[str]:
    lines = [
        f"**The same job, memory shrinking in its midst**: {ladder_job.STEPS} steps of {ladder_job.BATCH} samples on one process,"
        f" of which {ladder_job.FITS} fit from step {ladder_job.SHRINKS_AT} on; saved every {ladder_job.SAVE_EVERY} steps (kgorch:"
        " every second).",
        "",
        "| | without trouble, s | until a step further, s | lost in all, s | steps done again | samples of a step afterwards |",
        "|---|---|---|---|---|---|",
    ]
    for way, said in WAYS.items():
        if way not in found:
            lines.append(f"| {said} | not installed | | | | |")
            continue
        figures = found[way]
        version = f" ({importlib.metadata.version('accelerate')})" if way == "accelerate" else ""
        times = " | ".join(_of(spread(figures[name])) for name in ("calm_s", "stands_s", "lost_s"))
        lines.append(
            f"| {said}{version} | {times}"
            f" | {statistics.median(figures['again']):.0f} | {statistics.median(figures['batch']):.0f} |"
        )
    lines += ["", "*Lost in all* is a difference of two runs: on a busy machine it scatters more than the ways differ."]
    if "ddp" in found:
        codes, waited_s = found["ddp"]["codes"], found["ddp"]["waited_s"]
        ended = (
            f"nothing had moved for {waited_s:.0f} s when they were killed"
            if None in codes
            else f"they ended with {codes}"
        )
        lines += ["", f"find_executable_batch_size on two ranks of DDP, memory running out on one: {ended}."]
    return lines


def _activations_table(found: dict[str, Any]) -> list[str]:
    lines = [
        "**A step under activation checkpointing**, one core:",
        "",
        "| model | none: ms, MB kept | torch.utils.checkpoint by hand | switched on by kgorch | ours / by hand (target 1.0) |",
        "|---|---|---|---|---|",
    ]
    for model, figures in found.items():
        cells = " | ".join(
            f"{figures[f'{way}, ms']:.1f}, {figures[f'{way}, MB']:.2f}" for way in ("none", "by hand", "ours")
        )
        lines.append(f"| {model} | {cells} | {figures['ours']:.3f} |")
    return lines


TABLES: dict[str, Callable[[dict[str, Any]], list[str]]] = {
    "bookkeeping": _bookkeeping_table, "recovery": _recovery_table, "compared": _compared_table, "activations": _activations_table,
}  # fmt: skip


def _ratio(one: Sequence[float], other: Sequence[float]) -> str:
    return _of(spread([ours / theirs for ours, theirs in zip(one, other, strict=True)]), digits=4)


def _of(values: tuple[float, float, float], digits: int = 2) -> str:
    middle, low, high = values
    return f"{middle:.{digits}f} ({low:.{digits}f}–{high:.{digits}f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=PARTS, action="append", help="this part alone; may be given again")
    parser.add_argument("--docs", action="store_true", help="draw the tables of docs/memory.md")
    parser.add_argument("--json", type=Path, help="where to keep every figure")
    parser.add_argument("--from", dest="kept", type=Path, help="figures kept before, instead of measuring")
    options = parser.parse_args()
    if options.kept:
        results = json.loads(options.kept.read_text())
    else:
        os.environ["PYTHONPATH"] = os.pathsep.join([*sys.path[:3], os.environ.get("PYTHONPATH", "")])
        results = {"machine": machine(), "load": {}}
        with tempfile.TemporaryDirectory() as name:
            for part in options.only or PARTS:
                print(f"{part} …", file=sys.stderr, flush=True)
                results[part] = PARTS[part](Path(name, part))
                results["load"][part] = os.getloadavg()[0]
    if options.json:
        options.json.write_text(json.dumps(results, indent=1))
    print(page(results))
    if options.docs:
        PAGE.write_text(drawn_into(PAGE.read_text(), page(results), BEGIN, END))


if __name__ == "__main__":
    main()
