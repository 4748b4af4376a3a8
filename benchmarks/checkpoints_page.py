"""The figures of benchmarks/checkpoints.py as the table and the pictures of docs/checkpoints.md."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

from checkpoints import TORCHS, in_ms, spread, targets
from page import DOCS, drawn_into, pyplot

BEGIN, END = "<!-- measured: drawn by benchmarks/checkpoints.py --docs -->", "<!-- end of measured -->"
COLOURS = {"kgorch": "#c0392b", "torch.save": "#7f8c8d", "dcp.save": "#2980b9", "dcp.async_save": "#16a085"}


def draw(results: dict[str, Any], docs: Path = DOCS) -> None:
    page = docs / "checkpoints.md"
    page.write_text(drawn_into(page.read_text(), measured(results), BEGIN, END))
    bars(results["main"], docs / "checkpoints.png")
    if results["cases"]:
        curves(results, docs / "checkpoints-scaling.png")


def measured(results: dict[str, Any]) -> str:
    found, machine = results["main"], results["machine"]
    size = found["state_bytes"]
    lines = [
        f"{size / 1e6:.0f} MB of state on two gloo ranks, {machine['cores']} cores, Python {machine['python']}, PyTorch"
        f" {machine['torch']}. Medians of {len(found['copy_s'])} saves and of {len(next(iter(found['lost_s'].values())))} pairs"
        " of stretches with and without a save, all in turns in one run (quartiles in brackets), in milliseconds. One memory"
        f" copy of a rank's share takes {in_ms(spread(found['copy_s']))}. Load average before {machine['load']:.1f}; commit"
        f" {results['commit']}.",
        "",
        "| | blocks the training | training lost in all | until durable | memory, in states | leaves out |",
        "|---|---|---|---|---|---|",
    ]
    for name, about in found["peers"].items():
        lines.append(
            f"| {name} {about['version']} | {in_ms(spread(found['blocking_s'][name]))} | {in_ms(spread(found['lost_s'][name]))}"
            f" | {in_ms(spread(found['end_to_end_s'][name]))} | {found['memory_bytes'][name] / size:.1f} | {about['lacks']} |"
        )
    lines.append(f"| kgorch, a snapshot in memory | | {in_ms(spread(found['lost_by_snapshot_s']))} | | the same | |")
    lines += [f"\n{name} could not be measured: {why}" for name, why in found["missing"].items()]
    lines += ["", "| promised | found | held |", "|---|---|---|"]
    for name, value, way, bound, why in targets(found):
        held = value <= bound if way == "≤" else value >= bound
        said = f" ({why})" if why else ""
        lines.append(f"| {name} {way} {bound} | {value:.2f}{said} | {'yes' if held else '**no**'} |")
    lines += [
        "",
        f"Reading the files on both ranks at once: {in_ms(spread(found['read_s']))} ms into fresh memory,"
        f" {in_ms(spread(found['stream_s']))} keeping nothing; verify, then load on both: {in_ms(spread(found['load_s']))}.",
        "How each was set: " + "; ".join(f"{name}: {about['setting']}" for name, about in found["peers"].items()) + ".",
        "",
        "![blocking part, training lost and time until durable, beside the peers](checkpoints.png)",
    ]
    if results["cases"]:
        lines.append("![blocking part and time until durable against size and ranks](checkpoints-scaling.png)")
    return "\n".join(lines)


def bars(found: dict[str, Any], path: Path) -> None:
    figure, axes = pyplot().subplots(1, 3, figsize=(11, 3.2), sharey=True, layout="constrained")
    names = list(found["peers"])[::-1]
    for axis, (key, title) in zip(
        axes,
        (("blocking_s", "blocks the training"), ("lost_s", "training lost in all"), ("end_to_end_s", "until durable")),
        strict=True,
    ):
        middles, lows, highs = zip(*(spread(found[key][name]) for name in names), strict=True)
        below = [middle - low for middle, low in zip(middles, lows, strict=True)]
        above = [high - middle for middle, high in zip(middles, highs, strict=True)]
        axis.barh(
            names, middles, xerr=[below, above], color=[COLOURS.get(name, "#bdc3c7") for name in names], capsize=2
        )
        axis.set_title(title, fontsize=10)
        axis.set_xlabel("seconds")
    figure.suptitle(f"One save of {found['state_bytes'] / 1e6:.0f} MB, two ranks: median, quartiles", fontsize=11)
    figure.savefig(path, dpi=110)


def curves(results: dict[str, Any], path: Path) -> None:
    """Against the size on two ranks, and against the ranks at one size."""
    figure, axes = pyplot().subplots(2, 2, figsize=(11, 6), layout="constrained")
    cases = [{"ranks": 2, **results["main"]}, *results["cases"]]
    sizes = sorted((case for case in cases if case["ranks"] == 2), key=lambda case: case["state_bytes"])
    of_ranks = [case for case in cases if case["ranks"] != 2]
    one_size = of_ranks[0]["state_bytes"] if of_ranks else 0
    near = [case for case in cases if abs(case["state_bytes"] - one_size) < 0.05 * one_size]
    for column, (group, of, label) in enumerate((
        (sizes, lambda case: case["state_bytes"] / 1e6, "MB of state, two ranks"),
        (sorted(near, key=lambda case: case["ranks"]), lambda case: case["ranks"], f"ranks, {one_size / 1e6:.0f} MB of state"),
    )):  # fmt: skip
        for row, (key, title) in enumerate(
            (("blocking_s", "blocks the training, s"), ("end_to_end_s", "until durable, s"))
        ):
            axis = axes[row][column]
            for name in TORCHS:
                middles, lows, highs = zip(*(spread(case[key][name]) for case in group), strict=True)
                axis.plot([of(case) for case in group], middles, "o-", label=name, color=COLOURS[name])
                axis.fill_between([of(case) for case in group], lows, highs, color=COLOURS[name], alpha=0.15)
            if key == "blocking_s":
                copies = [statistics.median(case["copy_s"]) for case in group]
                axis.plot([of(case) for case in group], copies, "k:", label="one memory copy of a share")
            axis.set_xlabel(label)
            axis.set_ylabel(title)
            axis.set_ylim(bottom=0)
    axes[0][0].legend(fontsize=8)
    figure.savefig(path, dpi=110)
