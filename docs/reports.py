"""Estimate each real plan for the machines that its document names: `python docs/reports.py [WORKLOAD…]` (or `make reports`).

Of each plan of docs/reports.toml: made-up samples in the real ones' shape, `kgorch check PLAN --on MACHINE`, a page
docs/reports/PLAN-MACHINE.md, and links to it on the workload's page. docs/reports/README.md has the documents' sums again.
"""

# ruff: noqa: E501  (what it writes are lines of a page)
from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

from kgorch.core.codes import Fit
from kgorch.core.forecast.machines import MACHINES
from kgorch.plan import Plan, parse

ROOT = Path(__file__).parents[1]
PAGES = ROOT / "docs" / "reports"
BEGIN, END = "<!-- reports: drawn by docs/reports.py -->", "<!-- end of reports -->"
GIB = 1 << 30

HOW_A_GPU_REPLACES_IT = (
    "**No GPU has seen this plan.** On the machine itself `kgorch check {plan}` takes real steps in minutes, and its tables take the place of these;"
    " `kgorch history` then holds them against what came. What this page cannot know: cuDNN's workspaces, fragmentation, the memory of an evaluation or"
    " a prediction, how long an epoch waits for a mounted disk."
)


def said() -> dict[str, Any]:
    """By workload; those that are not in this tree are left out."""
    listed = tomllib.loads((ROOT / "docs" / "reports.toml").read_text())
    return {name: entry for name, entry in listed.items() if (ROOT / "workloads" / name).is_dir()}


def plans_of(workload: str) -> Iterator[tuple[Path, Plan]]:
    """The real ones that take a training step."""
    for path in sorted((ROOT / "workloads" / workload).glob("plan*.toml")):
        plan = parse(path.read_text(), str(path))
        if any("epochs" in stage.args for stage in plan.stage):
            yield path, plan


def machines_of(plan: Plan, own: Mapping[str, Any]) -> list[str]:
    fitting = {None: ["t4x2", "t4"], 1: ["t4"], 2: ["t4x2"]}
    return list(own.get("machines", fitting[plan.session.gpus]))


def page_of(workload: str, path: Path, machine: str) -> Path:
    return PAGES / f"{workload}{path.stem.removeprefix('plan')}-{machine}.md"


def pages() -> Iterator[tuple[str, Path, Plan, str, Path]]:
    """Workload, plan's file, plan, machine, page."""
    for workload, entry in said().items():
        for path, plan in plans_of(workload):
            for machine in machines_of(plan, entry.get("plans", {}).get(path.name, {})):
                yield workload, path, plan, machine, page_of(workload, path, machine)


def mark(path: Path, plan: Plan) -> str:
    """By which a page knows the plan that it was drawn from."""
    return f"`{path.relative_to(ROOT).as_posix()}`, plan {plan.hash[:12]}"


# The checks


def assumed(entry: Mapping[str, Any], path: Path, machine: str, plan: Plan) -> list[str]:
    own = entry.get("plans", {}).get(path.name, {})
    given = [*entry.get("assume", ()), *own.get("assume", entry.get("on", {}).get(machine, ()))]
    stages = {stage.name for stage in plan.stage}
    kept = [one for one in given if "." not in (left := one.partition("=")[0]) or left.partition(".")[0] in stages]
    for one in given:
        if one not in kept:
            print(f"  {one}: {path.name} has no such stage, left out")
    return kept


def checked(entry: Mapping[str, Any], path: Path, plan: Plan, machine: str, data: Path) -> dict[str, Any]:
    """Raises: subprocess.CalledProcessError with the check's own words on stderr."""
    command = [sys.executable, "-m", "kgorch.cli", "check", str(path), "--on", machine, "--json"]
    for stage in plan.stage:
        for name, value in entry.get("args", {}).items():
            if name in stage.args:
                filled = value.format(data=data) if isinstance(value, str) else value
                command += ["--set", f"stage.{stage.name}.args.{name}={json.dumps(filled)}"]
    for one in assumed(entry, path, machine, plan):
        command += ["--assume", one]
    home = {"KGORCH_HOME": str(data.parent / "home"), "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(command, capture_output=True, text=True, env=os.environ | home, cwd=ROOT)
    if ended.returncode not in (0, 20) or not ended.stdout:
        sys.exit(f"{shlex.join(command)}\n{ended.stdout}{ended.stderr}")
    found: dict[str, Any] = json.loads(ended.stdout)
    if found["verdict"] == Fit.DOES_NOT_RUN:
        sys.exit(f"{path}: {found['why']}")
    return found


def made(entry: Mapping[str, Any], data: Path) -> None:
    for command in entry["data"]:
        words = [
            word.format(python=sys.executable, data=data, here=Path(__file__).parent) for word in shlex.split(command)
        ]
        subprocess.run(words, check=True, cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True)


# The pages


def drawn(entry: Mapping[str, Any], path: Path, plan: Plan, machine: str, found: Mapping[str, Any]) -> str:
    what, shown = MACHINES[machine], path.relative_to(ROOT).as_posix()
    said_of = " ".join(f"--assume {one}" for one in assumed(entry, path, machine, plan))
    measured = any(stage["estimate"]["told_epoch"] for stage in found["stages"])
    parts = [
        f"# `{shown}` on {what.gpus} × {what.gpu}: an estimate",
        f"Of {mark(path, plan)}. Made by `make reports`, with PyTorch's tensors without data on a CPU: nothing was computed, nothing measured.",
        HOW_A_GPU_REPLACES_IT.format(plan=shown),
        f"**{found['verdict'].replace('_', ' ').capitalize()}**: {found['why']}.",
        "## Memory of a rank",
        table(["stage", "as planned", "of", "largest microbatch", *PARTS], memory(found["stages"], what.reserved_bytes)),
        f"“Of” is what PyTorch sees less {what.reserved_bytes / GIB:.2f} GiB kept for CUDA, workspaces and NCCL. Parts are those of the peak's step and need not add up to it.",
        "What other settings would hold, GiB, and seconds a step by the model:",
        table(["stage", "microbatch", "activations", "GiB", "s"], trials(found["stages"])),
        "## Time",
        table(
            ["stage", "weights trained", "samples", "GFLOP a sample", "in half precision", "epoch by the model", "epoch by the document",
             "use of the peak in that", "evaluation"],
            times(found["stages"]),
        ),
        "By the model an epoch is its steps at the assumed share of the data sheet, or the reading of its samples on the machine's cores, whichever takes longer."
        + (" The document's minutes stand in its place below, where it has them: what lies between is loading, another network, or a GPU that waits." if measured else ""),
        "## Sessions, quota, disk",
        table(["", *(["by the document's minutes"] if measured else []), "by the model"], ahead(found, plan, measured)),
        *warnings(found),
        "## What is assumed",
        table(["what", "value", "from"], [[row["what"], row["value"], row["source"]] for row in found["assumptions"]]),
        f"Data: {entry['source']}.",
        f"```sh\nkgorch check {shown} --on {machine} {said_of}".rstrip() + "\n```",
    ]  # fmt: skip
    return "\n\n".join(parts) + "\n"


PARTS = ("weights", "gradients", "optimizer", "buckets", "batch", "activations")


def memory(stages: Sequence[Mapping[str, Any]], reserved: int) -> Iterator[list[str]]:
    for stage in stages:
        held = stage["memory"]
        yield [
            stage["name"], f"**{held['held'] / GIB:.2f} GiB**", f"{(held['limit'] - reserved) / GIB:.2f} GiB",
            f"{held['largest_microbatch']} of {held['share']}", *(f"{held['parts'][part] / GIB:.2f}" for part in PARTS),
        ]  # fmt: skip


def trials(stages: Sequence[Mapping[str, Any]]) -> Iterator[list[str]]:
    for stage in stages:
        for trial in sorted(stage["memory"]["trials"], key=lambda one: (one["checkpointing"], -one["microbatch"])):
            kept = "computed again" if trial["checkpointing"] else "kept"
            yield [stage["name"], str(trial["microbatch"]), kept, f"{trial['held'] / GIB:.2f}", f"{trial['step_s']:.2f}"]  # fmt: skip


def times(stages: Sequence[Mapping[str, Any]]) -> Iterator[list[str]]:
    for stage in stages:
        seen = stage["estimate"]
        told = span(seen["epoch_s"]) if seen["told_epoch"] else "–"
        yield [
            stage["name"], f"{seen['weights']:,}", f"{seen['samples']:,}", f"{seen['flops_a_sample'] / 1e9:.2f}", f"{seen['half_share']:.0%}",
            span(seen["model_epoch_s"]), told, f"{seen['utilisation']:.1%}", span(stage["time"]["evaluation_s"]),
        ]  # fmt: skip


def ahead(found: Mapping[str, Any], plan: Plan, measured: bool) -> Iterator[list[str]]:
    columns = [found["forecast"]] if measured else []
    columns.append(found["forecast_by_model"])
    week_s = (plan.quota.hours or 30) * 3600
    lines = {
        "training with its evaluations": lambda one: f"{one['training_s'] / 3600:.1f} h",
        f"sessions of {span(columns[0]['wall_s'])}": lambda one: str(one["sessions"] or "never done"),
        "epochs a session, of the longest stage": lambda one: (
            f"{one['epochs_a_session']:.1f}" if one["epochs_a_session"] else "–"  # a stage without epochs takes longest
        ),
        "hours of quota": lambda one: f"{one['quota_s'] / 3600:.1f}" if one["quota_s"] else "–",
        f"weeks of {plan.quota.hours or 30:g} hours": lambda one: (
            f"{one['quota_s'] / week_s:.1f}" if one["quota_s"] else "–"
        ),
        "checkpoints on the disk at most": lambda one: f"{one['disk_bytes'] / GIB:.1f} GiB",
    }
    for name, value in lines.items():
        yield [name, *(value(one) for one in columns)]


def warnings(found: Mapping[str, Any]) -> Iterator[str]:
    lines = [line for line in found["preflight"] if line["verdict"] != "pass"]
    if lines:
        yield table(["", "what the check says", "what to do"], [[line["name"], line["said"], line["do"]] for line in lines])  # fmt: skip


def table(head: Sequence[str], rows: Iterator[list[str]] | Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(str(cell).replace("|", "\\|") for cell in line) + " |" for line in lines)


def span(duration_s: float) -> str:
    if duration_s < 60:
        return f"{duration_s:.1f} s"
    whole = str(timedelta(seconds=round(duration_s)))
    return f"{whole} h"


# What leads to them


def index() -> str:
    """docs/reports/README.md: the pages, and the documents' sums with their results."""
    parts = [
        "# Reports and worked examples",
        "Each plan, estimated for the machines that its document names by `kgorch check PLAN --on MACHINE`, before any GPU has seen it. `make reports` draws"
        " these pages again, in some ten minutes on two cores; a plan that has changed since fails a test.",
        table(
            ["plan", "machine", "report"],
            [[f"`{path.relative_to(ROOT).as_posix()}`", machine, f"[{page.stem}]({page.name})"] for _, path, _, machine, page in pages() if page.exists()],
        ),
        "## The documents' sums again",
        "What the users' documents say of memory and time, computed again. The sums are computed by `make reports`, as they stand here.",
    ]  # fmt: skip
    for workload, entry in said().items():
        rows = [[one["says"], "<br>".join(map(computed, one["sums"])), one["so"]] for one in entry["examples"]]
        parts += [f"### [{workload}](../{workload}.md)", table(["the document", "the sum", "so"], rows)]
    return "\n\n".join(parts) + "\n"


def computed(sum_: str) -> str:
    value = eval(sum_, {"__builtins__": {}})
    return f"{sum_.replace('*', '×')} = **{value:,.4g}**" if abs(value) < 1e4 else f"{sum_.replace('*', '×')} = **{value:,.0f}**"  # fmt: skip


def linked(workload: str, text: str) -> str:
    """The workload's page with links to its reports."""
    links = ", ".join(
        f"[{page.stem}](reports/{page.name})" for name, _, _, _, page in pages() if name == workload and page.exists()
    )
    if not links:
        return text
    block = (
        f"{BEGIN}\n## Reports\nMemory, time and sessions of each plan, estimated for a machine that was not here: {links}."
        f" [The document's sums again](reports/README.md).\n{END}"
    )
    if BEGIN in text:
        before, _, rest = text.partition(BEGIN)
        return before + block + rest.partition(END)[2]
    return text.rstrip("\n") + f"\n\n{block}\n"


def main() -> None:
    """Draw all, or those of the workloads that are named."""
    wanted = sys.argv[1:] or list(said())
    PAGES.mkdir(exist_ok=True)
    for workload in wanted:
        entry = said()[workload]
        with tempfile.TemporaryDirectory() as folder:
            data = Path(folder, "data")
            print(f"{workload}: its data", flush=True)
            made(entry, data)
            for name, path, plan, machine, page in pages():
                if name == workload:
                    print(f"  {page.name}", flush=True)
                    page.write_text(drawn(entry, path, plan, machine, checked(entry, path, plan, machine, data)))
        text = ROOT / "docs" / f"{workload}.md"
        text.write_text(linked(workload, text.read_text()))
    current = {page for *_, page in pages()} | {PAGES / "README.md"}
    for page in PAGES.glob("*.md"):
        if page not in current:
            page.unlink()
    (PAGES / "README.md").write_text(index())


if __name__ == "__main__":
    main()
