"""What the benchmarks share: the form of their figures, and docs/benchmarks.md drawn from it.

    python benchmarks/page.py FILE.json… [--docs]             the tables; --docs: and the pictures, into docs/
    python benchmarks/page.py --compare OLD.json NEW.json     ratios; exit 1 when something got a quarter worse

Figures are {"what", "title", "machine", "versions", "commit", "rows": [{"name", "group", "value", "unit", "better", …}], …}:
`better` is "higher" or "lower"; `group` is the picture's panel; `value` is None where there is none, and `note` says why;
`spread` is the low and the high end of what was found; `figures` are more columns of the table.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import math
import os
import platform
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

DOCS = Path(__file__).resolve().parents[1] / "docs"
PAGE = DOCS / "benchmarks.md"
OURS, OTHERS = "#c0392b", "#95a5a6"
WORSE = 1.25


def machine() -> dict[str, Any]:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    return {
        "cores": os.cpu_count(),
        "processor": next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), ""),
        "memory_gb": round(psutil.virtual_memory().total / 1e9),
        "load": round(os.getloadavg()[0], 2),
        "system": platform.system(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "torch": importlib.metadata.version("torch"),
    }


def commit() -> str:
    """Its name; with `-dirty` where anything but figures and pages was changed since."""

    def told(*words: str) -> str:
        return subprocess.run(["git", *words], cwd=DOCS.parent, capture_output=True, text=True).stdout.strip()

    changed = told("status", "--porcelain", "--untracked-files=no", "--", ".", ":!benchmarks/results", ":!docs")
    return told("rev-parse", "--short=10", "HEAD") + ("-dirty" if changed else "")


def results(
    what: str, rows: Sequence[Mapping[str, Any]], *, packages: Iterable[str] = (), **more: Any
) -> dict[str, Any]:
    """Figures in the form that all of them have; `machine` is as it is now, at the end."""
    versions = {name: importlib.metadata.version(name) for name in packages}
    return {"what": what, "machine": machine(), "versions": versions, "commit": commit(), **more, "rows": list(rows)}


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--json", type=Path, help="where to keep every figure; a file that is there is compared with first"
    )
    parser.add_argument("--docs", action="store_true", help="draw table and picture of docs/benchmarks.md")
    parser.add_argument("--from", dest="kept", type=Path, help="figures kept before, instead of measuring")


def run(options: argparse.Namespace, measure: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What every benchmark does with its options."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # what was started is ended on the way out
    if options.docs and not options.kept and commit().endswith("-dirty"):
        sys.exit("figures for the page are measured of a commit: commit the changes first, or leave --docs out")
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # each start would compile what it imports
    began = os.getloadavg()[0]
    found = json.loads(options.kept.read_text()) if options.kept else measure()
    if not options.kept:
        found["machine"]["load_before"] = round(began, 2)
    print(table(found))
    if options.json:
        if options.json.exists():
            print("\n" + "\n".join(compare(json.loads(options.json.read_text()), found)[0]))
        options.json.write_text(json.dumps(found, indent=1))
    if options.docs:
        into_docs(found)
    return found


# ── the table ──


def table(found: Mapping[str, Any]) -> str:
    """Markdown, as readable in a terminal: a part for each group, best first."""
    about, lines = found["machine"], []
    versions = ", ".join(f"{name} {version}" for name, version in found["versions"].items())
    kind = f" ({about['processor']}, {about['memory_gb']} GB)" if about.get("processor") else ""
    load = f"{about['load']:.1f}" + (f" (before: {about['load_before']:.1f})" if "load_before" in about else "")
    lines.append(
        f"{about['cores']} cores{kind}, Python {about['python']}, PyTorch {about['torch']}; load average at the end {load};"
        f" commit {found['commit']}.{f' {versions}.' if versions else ''}"
    )
    for group, rows in groups(found["rows"]).items():
        columns = list(dict.fromkeys(key for row in rows for key in row.get("figures", {})))
        cells = [["", f"{group}, {rows[0]['unit']}", *columns]]
        for row in ranked(rows):
            figures = row.get("figures", {})
            name = f"**{row['name']}**" if is_ours(row) else row["name"]
            cells.append([name, said(row), *(figure_of(figures.get(column)) for column in columns)])
        lines += ["", *aligned(cells)]
    if missing := found.get("missing"):
        lines += ["", f"Not installed here: {', '.join(missing)}."]
    if settings := found.get("settings"):
        lines += [
            "",
            "How each was set: " + "; ".join(f"{name}: {setting}" for name, setting in settings.items()) + ".",
        ]
    return "\n".join(lines)


def groups(rows: Iterable[Mapping[str, Any]]) -> dict[str, list[Mapping[str, Any]]]:
    found: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        found.setdefault(row.get("group", ""), []).append(row)
    return found


def ranked(rows: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Best first; those without a value last."""

    def place(row: Mapping[str, Any]) -> tuple[bool, float]:
        value = row["value"]
        return value is None, 0.0 if value is None else -value if row["better"] == "higher" else value

    return sorted(rows, key=place)


def is_ours(row: Mapping[str, Any]) -> bool:
    return str(row["name"]).startswith("kgorch")


def said(row: Mapping[str, Any]) -> str:
    if row["value"] is None:
        return str(row.get("note") or "–")
    low, high = row.get("spread") or (None, None)
    between = f" ({figure_of(low)}–{figure_of(high)})" if low is not None and high is not None else ""
    note = f"; {row['note']}" if row.get("note") else ""
    return f"{figure_of(row['value'])}{between}{note}"


def figure_of(value: Any) -> str:
    if value is None or isinstance(value, str):
        return value or "–"
    digits = 0 if abs(value) >= 1000 or value == int(value) else 1 if abs(value) >= 10 else 2
    return f"{value:.{digits}f}"


def aligned(cells: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[column]) for row in cells) for column in range(len(cells[0]))]
    lines = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |" for row in cells
    ]
    return [lines[0], "|" + "|".join("-" * (width + 2) for width in widths) + "|", *lines[1:]]


# ── the picture ──


def pyplot() -> Any:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def draw(found: Mapping[str, Any], path: Path) -> None:
    """Horizontal bars with their spread, a panel for each group, best above, the figure behind; kgorch in a colour of its own.

    One scale for all panels of one unit, so that lengths can be compared.
    """
    panels = groups(found["rows"])
    heights = [0.9 + len(rows) for rows in panels.values()]
    figure, axes = pyplot().subplots(
        len(panels), 1, figsize=(9.5, 0.5 + 0.3 * sum(heights)), squeeze=False, layout="constrained",
        gridspec_kw={"height_ratios": heights},
    )  # fmt: skip
    for axis, (group, rows) in zip(axes[:, 0], panels.items(), strict=True):
        shown = ranked(rows)[::-1]
        values = [row["value"] or 0.0 for row in shown]
        of_unit = [row for row in found["rows"] if row["unit"] == rows[0]["unit"]]
        most = max(1e-9, *(_ends(row)[1] for row in of_unit))
        sides = [  # no line where there is no spread
            (value - low, high - value) if low < high else (math.nan, math.nan)
            for value, (low, high) in zip(values, map(_ends, shown), strict=True)
        ]
        axis.barh(
            range(len(shown)), values, 0.75, color=[OURS if is_ours(row) else OTHERS for row in shown],
            xerr=list(zip(*sides, strict=True)), error_kw={"elinewidth": 1, "capsize": 2, "ecolor": "#34495e"},
        )  # fmt: skip
        for place, row in enumerate(shown):
            text = _note(row) if row["value"] is None else f"{figure_of(row['value'])} {row['unit']}{_note(row, ': ')}"
            axis.text(_ends(row)[1] + 0.008 * most, place, text, va="center", fontsize=8.5)
        axis.set_yticks(range(len(shown)), [row["name"] for row in shown], fontsize=9)
        for label, row in zip(axis.get_yticklabels(), shown, strict=True):
            label.set_fontweight("bold" if is_ours(row) else "normal")
        axis.set_xlim(0, 1.4 * most)
        axis.set_ylim(-0.5, len(shown) - 0.5)
        axis.set_title(group, fontsize=10, loc="left")
        axis.spines[["top", "right", "bottom"]].set_visible(False)
        axis.tick_params(left=False, bottom=False, labelbottom=False)
    ways = {row["better"] for row in found["rows"]}
    title = f"{found.get('title', found['what'])}{f' ({ways.pop()} is better)' if len(ways) == 1 else ''}"
    figure.suptitle(title, fontsize=11.5, x=0.01, ha="left", fontweight="bold")
    figure.savefig(path, dpi=110)
    pyplot().close(figure)


def _ends(row: Mapping[str, Any]) -> tuple[float, float]:
    """Of the line for its spread, around the end of its bar."""
    value, (low, high) = row["value"] or 0.0, row.get("spread") or (None, None)
    return (value, value) if low is None or high is None else (min(low, value), max(high, value))


def _note(row: Mapping[str, Any], before: str = "") -> str:
    return textwrap.shorten(f"{before}{row['note']}", 70) if row.get("note") else ""


# ── the page ──


def marks(what: str) -> tuple[str, str]:
    return f"<!-- {what}: drawn by benchmarks/page.py -->", f"<!-- end of {what} -->"


def drawn_into(text: str, drawn: str, begin: str, end: str) -> str:
    """The text between two marks replaced; where the marks are missing they come at its end."""
    before, found, rest = text.partition(begin)
    _, _, after = rest.partition(end)
    if not found:
        before, after = f"{before.rstrip()}\n\n", "\n"
    return f"{before}{begin}\n{drawn}\n{end}{after}"


def into_docs(found: Mapping[str, Any], docs: Path = DOCS) -> None:
    what, page = found["what"], docs / PAGE.name
    draw(found, docs / f"benchmark-{what}.png")
    drawn = f"{table(found)}\n\n![{found.get('title', what)}](benchmark-{what}.png)"
    page.write_text(drawn_into(page.read_text() if page.exists() else "# Benchmarks\n", drawn, *marks(what)))


# ── then and now ──


def compare(old: Mapping[str, Any], new: Mapping[str, Any], worse: float = WORSE) -> tuple[list[str], list[str]]:
    """Each row as a ratio of now to then, above 1 for better; and of which of ours it fell below 1 / `worse`.

    Peers are shown and not judged: where they move with us, it was the machine.
    """
    before = {_key(row): row for row in old["rows"]}
    lines, fell = [f"against commit {old['commit']} (load {old['machine']['load']}):"], []
    for row in new["rows"]:
        then = before.get(_key(row))
        if not then or row["value"] is None or not row["value"] or not then["value"]:
            was, now = (said(one) if one else "not measured" for one in (then, row))
            if was != now:
                lines.append(f"  {' '.join(_key(row)):<52} {was} → {now}")
            continue
        ratio = row["value"] / then["value"] if row["better"] == "higher" else then["value"] / row["value"]
        lost = is_ours(row) and ratio < 1 / worse
        lines.append(
            f"  {' '.join(_key(row)):<52} {figure_of(then['value']):>8} → {figure_of(row['value']):>8} {row['unit']:<4}"
            f" ×{ratio:.2f}{'   WORSE' if lost else ''}"
        )
        if lost:
            fell.append(" ".join(_key(row)))
    return lines, fell


def _key(row: Mapping[str, Any]) -> tuple[str, str]:
    return str(row.get("group", "")), str(row["name"])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--docs", action="store_true")
    parser.add_argument("--compare", action="store_true")
    options = parser.parse_args()
    found = [json.loads(path.read_text()) for path in options.files]
    if options.compare:
        lines, fell = compare(*found)
        print("\n".join(lines))
        return 1 if fell else 0
    for one in found:
        print(table(one))
        if options.docs:
            into_docs(one)
    return 0


if __name__ == "__main__":
    sys.exit(main())
