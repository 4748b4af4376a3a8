"""What is aimed at, and what was found: the first table and picture of docs/benchmarks.md.   python benchmarks/goals.py [--docs]

Everything comes from the kept JSON in benchmarks/results; nothing is measured here.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import checkpoints
import page

RESULTS = Path(__file__).resolve().parent / "results"
PICTURE = "benchmark-curves.png"
Parts = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Goal:
    work: str
    bound: float
    unit: str
    part: str
    found: Callable[[Any], float]
    """From the JSON of that part."""
    missed: str = ""
    """Why, where it is."""
    at_least: bool = False

    def is_reached(self, value: float) -> bool:
        return value >= self.bound if self.at_least else value <= self.bound


def row(results: Any, group: str, name: str = "kgorch") -> dict[str, Any]:
    """The row of that name in the group that begins like this."""
    [found] = [one for one in results["rows"] if one["name"] == name and one["group"].startswith(group)]
    return dict(found)


def of_step(size: str, column: str) -> Callable[[Any], float]:
    return lambda results: float(row(results, f"steps of {size} ms")["figures"][column])


def value(group: str, name: str = "kgorch") -> Callable[[Any], float]:
    return lambda results: float(row(results, group, name)["value"])


def promised(name: str) -> Callable[[Any], float]:
    """One of checkpoints.py's figures, by the beginning of its name."""
    return lambda results: next(
        found for what, found, *_ in checkpoints.targets(results["main"]) if what.startswith(name)
    )


def lead(results: Any) -> float:
    """Points between kgorch and the best peer, by the shares of the wall; below 0 where a peer is ahead."""
    own = row(results, "150MB of state, a wall")
    others = [one["value"] for one in results["rows"] if one["group"] == own["group"] and one["name"] != "kgorch"]
    return float(own["value"] - max(others))


def after_start_up(results: Any) -> float:
    """Percent of the time after start-up that became lasting steps, at the session's own speed."""
    told = row(results, "150MB of state, a wall")["figures"]
    rest_s = results["wall_s"] - told["start-up, s"]
    return float(100 * (1 - (told["saves, s"] + told["unused, s"] + told["lost, s"]) / rest_s))


GOALS = (
    Goal("main thread in a step of some 3 ms, more than a plain loop's", 40, "µs", "overhead", of_step("2", "main thread, µs"),
         "what a step can be repeated from and the ranks' vote are kept in Python; a compiled part is not there"),
    Goal("all other threads and processes of a run, steps of some 10 ms", 0.5, "% of a core", "overhead",
         lambda results: row(results, "besides", "kgorch: all but the ranks' main threads")["figures"]["found"],
         "the supervisor alone takes more: it listens, samples and writes each second"),
    Goal("a step of some 10 ms, over the same alone", 1.005, "×", "overhead", value("steps of 10 ms"),
         "3 % are the main thread's; the ranks keep both cores busy, so what one does more the other waits for"),
    Goal("a step of some 50 ms, over the same alone", 1.005, "×", "overhead", value("steps of 50 ms"),
         "not resolved: the interval contains 1"),
    Goal("first step after the command, more than torchrun", -1.0, "s", "starts",
         lambda results: row(results, "from the command")["figures"]["more than torchrun, s"],
         "the standby imports PyTorch as torchrun's ranks do; what is saved is their second import and torchrun's own"),
    Goal("next session's first step under a daemon, after the end of the last", 0.8, "s", "starts", value("daemon:"),
         "a new process imports kgorch for each session, so that an upgrade counts at once"),
    Goal("a killed rank, until the next new step", 1.0, "s", "recovery", value("SIGKILL of a rank"),
         "all ranks are launched anew and repeat the steps since the last snapshot"),
    Goal("killed torchrun", 1.5, "s", "recovery", value("SIGKILL of torchrun")),
    Goal("out of memory in the optimizer's step", 2.0, "s", "recovery", value("Out of memory in the optimizer"),
         "steps since the last snapshot are done again, in smaller parts than before"),
    Goal("goodput after start-up, sessions of 60 s, 150 MB", 97.5, "%", "goodput", after_start_up,
         "the save before the wall begins with a margin, and saves between cost what they guard against", at_least=True),
    Goal("goodput, ahead of the best peer", 4.0, "points", "goodput", lead,
         "a tuned script saves as late as kgorch", at_least=True),
    Goal("blocking part of a save ÷ memory copy", 1.05, "×", "checkpoints", promised("blocking part"),
         "the state is looked through for what is no number, which reads it once more"),
    Goal("training lost per save ÷ DCP's async_save", 0.25, "×", "checkpoints", promised("training lost"),
         "not resolved: pairs differ by more than either, and what is read back takes cores that train"),
    Goal("`kgorch status`", 0.20, "s", "starts", value("until a command answers", "kgorch status"),
         "SQLAlchemy's import alone takes longer"),
    Goal("`kgorch --help`", 0.12, "s", "starts", value("until a command answers", "kgorch --help")),
    Goal("supervisor's memory after nine simulated hours", 45, "MB", "scale", value("supervisor's memory", "kgorch: after 9 h"),
         "SQLAlchemy, APScheduler and pydantic stay loaded"),
)  # fmt: skip


def table(parts: Parts) -> str:
    cells = [["what", "goal", "found", "reached", "why not"]]
    for goal in GOALS:
        if goal.part not in parts:
            cells.append([goal.work, _said(goal), "not measured", "", ""])
            continue
        found = goal.found(parts[goal.part])
        reached = goal.is_reached(found)
        cells.append(
            [
                goal.work,
                _said(goal),
                page.figure_of(found),
                "yes" if reached else "**no**",
                "" if reached else goal.missed,
            ]
        )
    return "\n".join(page.aligned(cells))


def _said(goal: Goal) -> str:
    return f"{'≥' if goal.at_least else '≤'} {goal.bound:g} {goal.unit}"


def draw(parts: Parts, path: Path) -> None:
    """Cost against the length of a step, the size of the state and the number of ranks, with the ideal as a dashed line."""
    figure, axes = page.pyplot().subplots(1, 3, figsize=(12, 3.6), layout="constrained")
    steps, sizes, ranks = axes
    if overhead := parts.get("overhead"):
        rows = [one for one in overhead["rows"] if one["name"] == "kgorch" and one["group"].startswith("steps of")]
        lengths_ms = [one["figures"]["step alone, ms"] for one in rows]
        lows, highs = zip(*(_sides(one) for one in rows), strict=True)
        more = [100 * (one["value"] - 1) for one in rows]
        steps.errorbar(lengths_ms, more, yerr=[lows, highs], fmt="o-", capsize=3, color=page.OURS)
        steps.set_xscale("log")
        steps.set_xticks(lengths_ms, [f"{length:.1f}" for length in lengths_ms])
        steps.minorticks_off()
    steps.axhline(0, color="k", linestyle="--", label="ideal")
    steps.axhline(0.5, color=page.OTHERS, linestyle=":", label="goal")
    steps.set(xlabel="a step alone, ms", ylabel="longer under kgorch, %")
    if found := parts.get("checkpoints"):
        cases = [case for case in [{"ranks": 2, **found["main"]}, *found["cases"]] if case["ranks"] == 2]
        cases.sort(key=lambda case: case["state_bytes"])
        mega = [case["state_bytes"] / 1e6 for case in cases]
        for way, colour in (("kgorch", page.OURS), ("dcp.async_save", page.OTHERS)):
            middles, lows, highs = zip(*(checkpoints.spread(case["blocking_s"][way]) for case in cases), strict=True)
            sizes.plot(mega, middles, "o-", color=colour, label=way)
            sizes.fill_between(mega, lows, highs, color=colour, alpha=0.2)
        copies = [checkpoints.spread(case["copy_s"])[0] for case in cases]
        sizes.plot(mega, copies, "k--", label="ideal: a memory copy")
    sizes.set(xlabel="MB of state, two ranks", ylabel="a save holds the training up, s", ylim=(0, None))
    if scale := parts.get("scale"):
        told = row(scale, "1 → ", "kgorch: supervisor, each telling once a second, % of a core")["figures"]
        counts = sorted(int(count) for count in told if count.isdigit())
        ranks.plot(counts, [told[str(count)] for count in counts], "o-", color=page.OURS)
        ranks.set_xscale("log", base=2)
        ranks.set_xticks(counts, [str(count) for count in counts])
        ranks.axhline(told[str(counts[0])], color="k", linestyle="--", label="ideal: as with one")
    ranks.set(xlabel="ranks (simulated)", ylabel="supervisor, % of a core", ylim=(0, None))
    for axis in axes:
        axis.spines[["top", "right"]].set_visible(False)
        axis.legend(fontsize=8)
    figure.savefig(path, dpi=110)
    page.pyplot().close(figure)


def _sides(one: Mapping[str, Any]) -> tuple[float, float]:
    low, high = one["spread"]
    return 100 * (one["value"] - low), 100 * (high - one["value"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--docs", action="store_true", help="draw them into docs/")
    options = parser.parse_args()
    parts = {path.stem: json.loads(path.read_text()) for path in RESULTS.glob("*.json")}
    print(table(parts))
    if options.docs:
        draw(parts, page.DOCS / PICTURE)
        drawn = f"{table(parts)}\n\n![Cost against the length of a step, the size of the state, the number of ranks]({PICTURE})"
        page.PAGE.write_text(page.drawn_into(page.PAGE.read_text(), drawn, *page.marks("goals")))


if __name__ == "__main__":
    main()
