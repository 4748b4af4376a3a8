"""The results page. It has a section for each kind of machine.

A run replaces the rows of its own steps in the section of its machine. All other rows are read from the page and written again.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from gpu.runner import Result
from gpu.step import OK
from gpu.steps import STEPS

HEAD = """# GPU test results

`make gpu` runs the checks that need a GPU and writes this page. It needs no internet, and takes at most 50 minutes on one GPU.
`make gpu STEPS="basics memory"` runs two steps, `make gpu STEPS=two-gpus` those for two GPUs. `make gpu STEPS=--list` lists all
steps, `make gpu STEPS=--cpu` rehearses them on a CPU as far as a CPU can go.

Each kind of machine has a section: for each step how many results were as expected, then every check. A check with an empty last
column was as expected; a *note* is a measurement without an expectation; *skipped* names the reason in the column "found".
"""

NOT_RUN_YET = """
**No GPU has run these checks so far.** The programs have been rehearsed on a CPU only. As long as this page has no section, no
statement of this repository about CUDA or NCCL has been measured.
"""

_SECTION = re.compile(r"^## ", re.MULTILINE)
_STEPS, _CHECKS = ("step", "result", "seconds", "run on"), ("step", "check", "expected", "found", "")


def update(text: str, machine: Mapping[str, Any], results: Sequence[Result]) -> str:
    """The page with these results in the section of this kind of machine; all other sections remain."""
    sections = sections_of(text)
    title = title_of(machine)
    sections[title] = _section(machine, [result for result in results if not result.skipped], sections.get(title, ""))
    return HEAD + "".join(f"\n## {name}\n{body.rstrip()}\n" for name, body in sorted(sections.items()))


def empty() -> str:
    """The page before any GPU has run the checks."""
    return HEAD + NOT_RUN_YET


def sections_of(text: str) -> dict[str, str]:
    """The sections by title, without the head of the page."""
    result = {}
    for part in _SECTION.split(text)[1:]:
        title, _, body = part.partition("\n")
        result[title.strip()] = body
    return result


def title_of(machine: Mapping[str, Any]) -> str:
    """As "2 × Tesla T4"; GPUs of several models are all named."""
    names = [gpu["name"] for gpu in machine["gpus"]]
    return ", ".join(f"{names.count(name)} × {name}" for name in dict.fromkeys(names)) or "no GPU"


def _section(machine: Mapping[str, Any], results: Sequence[Result], before: str) -> str:
    names = {result.step.name for result in results}
    old_steps, old_checks = _rows(before, len(_STEPS), names), _rows(before, len(_CHECKS), names)
    steps = [
        (
            result.step.name,
            verdict_of(result),
            f"{result.took_s:.0f}",
            f"{result.at}, torch {machine.get('torch', '?')}",
        )
        for result in results
    ]
    checks = [
        (
            check.step,
            f"{check.probe}: {check.check}",
            check.expected,
            check.found,
            "" if check.verdict == OK else check.verdict,
        )
        for result in results
        for check in result.checks
    ]
    return "\n".join(
        [
            "",
            facts_of(machine),
            "",
            *_table(_STEPS, sorted([*old_steps, *steps], key=_order)),
            "",
            *_table(_CHECKS, sorted([*old_checks, *checks], key=_order)),
        ]
    )


def _order(row: Sequence[str]) -> int:
    """Rows by the order of their steps; steps that no longer exist come last."""
    names = [step.name for step in STEPS]
    return names.index(row[0]) if row[0] in names else len(names)


def verdict_of(result: Result) -> str:
    """As "12 checks as expected, 1 differs, 2 not looked at"."""
    right = [check for check in result.checks if check.verdict == OK]
    parts = [
        f"{len(right)} as expected",
        f"**{len(result.differing)} differ**" if result.differing else "none differs",
    ]
    if result.not_looked_at:
        parts.append(f"{len(result.not_looked_at)} not looked at")
    return ", ".join(parts)


def facts_of(machine: Mapping[str, Any]) -> str:
    """Device, driver and versions, in one line."""
    gpu = machine["gpus"][0] if machine["gpus"] else {"memory": 0, "capability": "?"}
    parts = [
        f"{gpu['memory'] / 2**30:.0f} GiB a GPU, compute capability {gpu['capability']}",
        f"driver {machine.get('driver') or 'unknown'}",
        f"CUDA {machine.get('cuda') or '?'}",
        f"cuDNN {machine.get('cudnn') or '?'}",
        f"NCCL {machine.get('nccl') or '?'}",
        f"PyTorch {machine.get('torch') or '?'}",
        f"Python {machine.get('python')}",
        f"Linux {machine.get('kernel')}",
        f"{machine.get('cores')} cores",
        f"{machine.get('date')}",
    ]
    return ", ".join(parts) + "."


def _rows(section: str, columns: int, exclude: set[str]) -> list[tuple[str, ...]]:
    """The rows of a section's table of so many columns, except those of the steps in `exclude`."""
    result = []
    for line in section.splitlines():
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        is_head = cells[:2] in ([*_STEPS[:2]], [*_CHECKS[:2]]) or all(set(cell) <= {"-"} for cell in cells)
        if len(cells) == columns and not is_head and cells[0] not in exclude:
            result.append(tuple(cells))
    return result


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return [
        f"| {' | '.join(head)} |",
        f"|{'---|' * len(head)}",
        *(f"| {' | '.join(map(_cell, row))} |" for row in rows),
    ]


def _cell(text: str) -> str:
    """One line, with bars escaped."""
    return re.sub(r"(?<!\\)\|", r"\\|", " ".join(text.split()))
