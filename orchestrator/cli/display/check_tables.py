"""The result of `kgorch check` as tables, on the terminal and as a web page."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from kgorch.cli.display import render
from kgorch.errors import KgorchError

_PARTS = ("weights", "gradients", "optimizer", "buckets", "batch", "activations", "rest", "peak")


class CheckTable(NamedTuple):
    title: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]


def tables(result: dict[str, Any]) -> Iterator[CheckTable]:
    """The tables of a result of `plan_check`, in the order in which they are printed."""
    yield CheckTable(
        "Machine", ["", "what", "found", "to do"],
        [[line["verdict"], line["name"], line["said"], line["do"]] for line in result["preflight"]],
    )  # fmt: skip
    with_memory = [stage for stage in result["stages"] if stage["memory"]]
    if with_memory:
        yield CheckTable(
            "Memory of a rank",
            ["stage", "as planned", "limit", "verdict", "with", "largest microbatch"],
            list(_memory(with_memory)),
        )
        yield CheckTable(
            "Memory by use", ["stage", *_PARTS], [[stage["name"], *_parts(stage)] for stage in with_memory]
        )
        yield CheckTable(
            "Trial steps", ["stage", "microbatch", "activations", "used", "a step"], list(_trials(with_memory))
        )
        yield CheckTable(
            "Time",
            ["stage", "epochs", "first step", "an epoch", "first epoch", "waiting for data", "samples/s", "total"],
            list(_times(with_memory)),
        )
    if result.get("on"):
        yield CheckTable(
            "Estimate",
            [
                "stage",
                "weights",
                "samples",
                "GFLOP each",
                "an epoch by the model",
                "an epoch as assumed",
                "share of the GPUs' peak",
            ],
            list(_estimates(result["stages"])),
        )
    if result["forecast"]:
        yield CheckTable("Forecast", ["", ""], list(_forecast(result["forecast"])))
    if result.get("forecast_by_model") and any(stage["estimate"]["told_epoch"] for stage in result["stages"]):
        yield CheckTable("Forecast by the model alone", ["", ""], list(_forecast(result["forecast_by_model"])))
    if result.get("on"):
        yield CheckTable(
            f"Assumptions about {result['on']}", ["what", "value", "from"], _assumptions(result["assumptions"])
        )


def _memory(stages: Iterable[dict[str, Any]]) -> Iterator[list[str]]:
    for stage in stages:
        memory = stage["memory"]
        largest = f"{memory['largest_microbatch']} of {memory['share']}"
        yield [
            stage["name"], render.size(memory["held"]), render.size(memory["limit"]), render.words(memory["verdict"]),
            ", ".join(memory["settings"]) or "–", largest,
        ]  # fmt: skip


def _parts(stage: dict[str, Any]) -> list[str]:
    return [render.size(stage["memory"]["parts"].get(name)) for name in _PARTS]


def _trials(stages: Iterable[dict[str, Any]]) -> Iterator[list[str]]:
    for stage in stages:
        for trial in sorted(stage["memory"]["trials"], key=lambda trial: (trial["checkpointing"], trial["microbatch"])):
            used = "out of memory" if trial["ran_out"] else render.size(trial["held"])
            activations = "recomputed" if trial["checkpointing"] else "stored"
            yield [stage["name"], str(trial["microbatch"]), activations, used, render.duration(trial["step_s"])]


def _times(stages: Iterable[dict[str, Any]]) -> Iterator[list[str]]:
    for stage in stages:
        time = stage["time"]
        yield [
            stage["name"], str(time["epochs"]), render.duration(time["startup_s"]), render.duration(time["epoch_s"]),
            render.duration(time["first_epoch_s"]), f"{time['wait_share']:.0%}", f"{time['samples_per_s']:.1f}",
            render.duration(time["training_s"]),
        ]  # fmt: skip


def _estimates(stages: Iterable[dict[str, Any]]) -> Iterator[list[str]]:
    for stage in stages:
        estimate = stage["estimate"]
        assumed = render.duration(estimate["epoch_s"]) if estimate["told_epoch"] else "–"
        yield [
            stage["name"], f"{estimate['weights']:,}", f"{estimate['samples']:,}", f"{estimate['flops_a_sample'] / 1e9:.1f}",
            render.duration(estimate["model_epoch_s"]), assumed, f"{estimate['utilisation']:.1%}",
        ]  # fmt: skip


def _forecast(forecast: dict[str, Any]) -> Iterator[list[str]]:
    if at := forecast["goes_on_from"]:
        yield ["continues from", f"stage {at['stage']}, step {at['step']}"]
    yield ["training", render.duration(forecast["training_s"])]
    wall = f" of {render.duration(forecast['wall_s'])}" if forecast["wall_s"] else ""
    if forecast["sessions"] is not None:
        yield ["sessions", f"{forecast['sessions']}{wall}"]
    if forecast["epochs_a_session"] is not None:
        yield ["epochs a session", f"{forecast['epochs_a_session']:.1f}"]
    if forecast["quota_s"] is not None:
        yield ["quota used", render.duration(forecast["quota_s"])]
    if forecast["end_at"]:
        yield ["started now, done", render.span(forecast)]
    yield ["checkpoints", render.size(forecast["disk_bytes"])]


def _assumptions(rows: Iterable[dict[str, str]]) -> list[list[str]]:
    return [[row["what"], row["value"], row["source"]] for row in rows]


def check_writable(path: Path) -> None:
    """Test whether the file can be written, before minutes are spent on the check. Raises: KgorchError."""
    was_there = path.exists()
    try:
        path.open("a").close()
    except OSError as error:
        raise KgorchError(f"{path} cannot be written", str(error), next_step="name another file for --html") from None
    if not was_there:
        path.unlink()


def write_html(path: Path, result: dict[str, Any]) -> None:
    """Write the report as a web page. Raises: KgorchError."""
    import io

    from rich import box
    from rich.console import Console
    from rich.table import Table

    console = Console(record=True, file=io.StringIO(), width=140)
    console.print(f"kgorch check: {result['plan']}, {result['at']}", style="bold")
    console.print(f"{render.words(result['verdict'])}: {result['why']}", style="bold", markup=False)
    for table in tables(result):
        page_table = Table(
            *table.head, title=table.title, box=box.SIMPLE_HEAD, title_justify="left", header_style="bold"
        )
        for row in table.rows:
            page_table.add_row(*(cell.replace("[", r"\[") for cell in row))
        console.print(page_table)
    try:
        path.write_text(console.export_html(), encoding="utf-8")
    except OSError as error:
        raise KgorchError(f"{path} cannot be written", str(error), next_step="name another file for --html") from None
