"""A probe of a program of [stage.foreign]: it runs for a moment in a folder of its own, and is stopped as before a wall.

The folder stands for the plan's: its entries are links to those of the plan's folder, but for the one that the checkpoints are in,
which is new. So a check leaves no checkpoint that a run would find, and overwrites none. What the program writes elsewhere is
written as in a run.
"""

from __future__ import annotations

import fnmatch
import itertools
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from kgorch.core.checkpoint import foreign_checkpoint
from kgorch.plan import StageSection
from kgorch.protocol.run_files import FOREIGN_FOLDER

LEAST_S, LONGEST_S = 10.0, 60.0
"""Seconds that the program runs: at least, and at most while it has not completed a checkpoint."""


def stand_in_folder(workdir: Path, folder: Path, places: Iterable[str]) -> Path:
    """Fill `folder` with links to the entries of `workdir`, without those that `places` are in. Raises: OSError."""
    places = list(places)
    folder.mkdir(parents=True, exist_ok=True)
    for entry in workdir.iterdir():
        if not any(_holds(entry, place) for place in places) and not (folder / entry.name).is_symlink():
            (folder / entry.name).symlink_to(entry)
    return folder


def _holds(entry: Path, place: str) -> bool:
    """Whether checkpoints at that place would lie in the entry. A first part that names no folder (`*`) is that of one that has
    some: otherwise all of them would be, the program as well."""
    first, _, rest = place.partition("/")
    if not fnmatch.fnmatchcase(entry.name, first):
        return False
    return bool(first.strip("*")) or (bool(rest) and next(entry.glob(rest), None) is not None)


def launch_fields(stage: StageSection, root: Path, workdir: Path, processes: int) -> dict[str, Any]:
    """The fields of LaunchSpec in which the probe of a foreign stage differs from that of another one. Raises: OSError."""
    if stage.foreign is None:
        return {}
    section = stage.foreign.as_launch()
    lead_s = foreign_checkpoint.stop_lead_s([], grace_s=section["stop"].get("grace_s", 0.0), copy_s=0.0)
    section |= {"processes": processes, "lead_s": lead_s, "claims": str(root / FOREIGN_FOLDER)}
    places = [stage.foreign.checkpoint or "", *([stage.foreign.latest.place] if stage.foreign.latest else [])]
    return {
        "workdir": str(stand_in_folder(workdir, root / f"work-{stage.name}", places)),
        "foreign": section,
        "probe": {"seconds": LEAST_S, "longest_s": LONGEST_S},
    }


def describe(figures: Mapping[str, Any]) -> list[tuple[bool, str, str]]:
    """What was measured, as sentences: (is it in order, the sentence, what to do).

    Args:
        figures: `foreign` of the probe's measurements (worker/foreign/probe_record.py).
    """
    lines = [_steps(figures), _checkpoints(figures)]
    if wrong := figures.get("latest"):
        said = f"{wrong}: a resume would write words there that the program may not read"
        lines.append((False, said, "correct stage.foreign.latest"))
    if not figures["ended"]:
        lines.append(_stop(figures))
    return lines


def _steps(figures: Mapping[str, Any]) -> tuple[bool, str, str]:
    if figures["ended"]:
        return True, f"it ran to its end in {figures['ran_s']:.1f} s", ""
    if not figures["reads_steps"]:
        do = "name where its step is printed: stage.foreign.step"
        return False, f"it ran for {figures['ran_s']:.1f} s; its steps are not read", do
    if figures["step"] is None:
        do = "correct stage.foreign.step; the output is shown by --json"
        return False, f"it ran for {figures['ran_s']:.1f} s, and no step was found in what it printed", do
    each = f", {figures['step_s']:.3g} s each" if figures["step_s"] else ""
    metrics = ", ".join(f"{name} {value:.4g}" for name, value in figures["metrics"].items())
    return True, f"it came to step {figures['step']}{each}" + (f"; {metrics}" if metrics else ""), ""


def _checkpoints(figures: Mapping[str, Any]) -> tuple[bool, str, str]:
    found, place = figures["checkpoints"], figures["place"]
    if not place:
        return False, "it has no stage.foreign.checkpoint: nothing of it is kept, and a wall begins it anew", ""
    if not found:
        do = "correct stage.foreign.checkpoint, or have the program save more often"
        return False, f"no complete checkpoint at {place} within {figures['ran_s']:.0f} s; {figures['lies_there']}", do
    size = found[-1]["bytes"] / (1 << 20)
    if figures["ended"] and figures["ran_s"] > LEAST_S and all(item["is_at_end"] for item in found):
        said = f"it completed {found[-1]['path']} only at its end: each session before that loses all"
        return False, said, "have it save more often, or, if it does, correct stage.foreign.checkpoint"
    return True, f"{len(found)} checkpoints, the newest {found[-1]['path']} with {size:.1f} MiB, copied and hashed", ""


def _stop(figures: Mapping[str, Any]) -> tuple[bool, str, str]:
    times = [item["written_s"] for item in figures["checkpoints"]]
    interval_s = max((later - earlier for earlier, later in itertools.pairwise(times)), default=None)
    if figures["saved"]:
        loses = "saved: a wall loses nothing"
    elif interval_s is not None:
        loses = f"saved nothing: a wall loses what it trains between two checkpoints, here up to {interval_s:.1f} s"
    else:
        loses = "saved nothing: a wall loses what it has trained since its last checkpoint"
    if figures["killed"] and figures["by"] != "SIGKILL":
        do = 'give it a longer grace, another signal, or stop = "kill" if it knows none'
        return False, f"it went on for {figures['stop_s']:.1f} s after {figures['by']} and was killed; it {loses}", do
    return True, f"it stopped {figures['stop_s']:.1f} s after {figures['by']} and {loses}", ""
