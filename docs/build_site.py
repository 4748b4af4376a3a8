"""Build the documentation site from the Markdown of the repository, by MkDocs with the Material theme.

    python docs/build_site.py                build/site, from build/site-src
    python -m http.server -d build/site      to look at it

The pages stay as they are read on GitHub. They are copied to the same paths below build/site-src, with what MkDocs needs changed:

- Links to files that are not part of the site (tests, sources) become their text; other linked files are copied.
- Python-Markdown wants an empty line before a list or a table, and four spaces for a list in a list; GitHub does not.

A page that no group of GROUPS lists is an error. A page that is listed and missing is left out.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
OUTPUT = ROOT / "build" / "site"

PAGES = ("*.md", "docs/*.md", "docs/reference/*.md", "docs/reports/*.md", "systemd/README.md", "workloads/*/README.md")
"""Patterns of the Markdown files that are pages."""

Entry = str | tuple[str, str]
"""A page, or a pattern of pages; with a title where the page's own heading is too long for the navigation."""

GROUPS: dict[str, list[Entry | dict[str, list[Entry]]]] = {
    "Home": ["README.md"],
    "Tutorial": [("docs/tutorial.md", "Your own script")],
    "How-to": [
        {
            "All in one page": [("docs/guide.md", "Guide")],
            "Your program": [
                ("docs/your-training.md", "Three levels"),
                ("docs/lightning.md", "Lightning"),
                ("docs/transformers.md", "Transformers"),
                ("docs/unmodified.md", "Unmodified programs"),
                ("docs/sharded.md", "Sharded models"),
                ("docs/memory.md", "Out of memory"),
                ("docs/going-bad.md", "NaN, spikes and hangs"),
            ],
            "Where it runs": [
                ("docs/own-server.md", "Your own server"),
                ("docs/kaggle.md", "Kaggle"),
                ("docs/colab.md", "Colab"),
                ("docs/slurm.md", "Slurm"),
                ("docs/nodes.md", "Several nodes"),
                ("docs/fleet.md", "Several machines"),
                ("docs/gpu.md", "GPUs"),
                ("systemd/README.md", "systemd units"),
            ],
            "Watching a run": [
                ("docs/check.md", "Before it runs"),
                ("docs/looking.md", "In a browser"),
                ("docs/terminal-and-report.md", "Terminal and report"),
                ("docs/notebooks.md", "In a notebook"),
                ("docs/notices.md", "Notices"),
                ("docs/trackers.md", "Experiment trackers"),
                ("docs/prometheus.md", "Prometheus"),
            ],
            "When something fails": [("docs/troubleshooting.md", "Errors by code")],
        }
    ],
    "Reference": [
        ("docs/reference/commands.md", "Commands"),
        ("docs/reference/plan.md", "Plan"),
        ("docs/reference/sdk.md", "Python"),
        ("docs/json.md", "JSON fields"),
        ("docs/reference/events.md", "Events"),
        ("docs/reference/exit-codes.md", "Exit codes"),
        ("docs/renamed.md", "Renamed"),
        ("CHANGELOG.md", "Changes"),
        {
            "Reference trainings": [
                ("docs/workloads.md", "All five"),
                "docs/camouflage.md",
                "docs/cloud_removal.md",
                "docs/surface_detection.md",
                "docs/timeseries.md",
                "docs/vqa.md",
                "workloads/*/README.md",
            ],
            "Estimates": [("docs/reports/README.md", "All plans"), "docs/reports/*.md"],
        },
    ],
    "Explanation": [
        ("ARCHITECTURE.md", "Architecture"),
        ("DECISIONS.md", "Decisions"),
        ("docs/checkpoints.md", "Checkpoints"),
        ("docs/guarantees.md", "Guarantees"),
        ("docs/reliability.md", "Reliability"),
        ("docs/compare.md", "Other tools"),
        ("docs/benchmarks.md", "Benchmarks"),
        ("docs/gpu-results.md", "Results from GPUs"),
        ("CONTRIBUTING.md", "Contributing"),
    ],
}
"""The navigation: the four kinds of documentation of https://diataxis.fr, and the README as home."""

LINK = re.compile(r"(!?)\[((?:[^\[\]]|!\[[^\]]*\]\([^)]*\))*)\]\(([^()\s]+)\)")
CODE = re.compile(r"(^```.*?^```\s*?$|``.+?``|`[^`\n]*`)", re.MULTILINE | re.DOTALL)
LIST_OR_TABLE = re.compile(r"(?:[-*] |\d+\. |\|)")


def pages() -> list[str]:
    """Paths of all pages, with slashes, relative to the repository."""
    return sorted({path.relative_to(ROOT).as_posix() for pattern in PAGES for path in ROOT.glob(pattern)})


def stage(source: Path) -> None:
    """Write pages and what they link to into an empty folder."""
    shutil.rmtree(source, ignore_errors=True)
    listed = pages()
    linked: set[str] = set()
    for page in listed:
        target = source / page
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(for_mkdocs((ROOT / page).read_text(), page, listed, linked))
    for path in sorted(linked):
        (source / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / path, source / path)
    shutil.copy(ROOT / "docs" / "site.css", source)
    shutil.copy(ROOT / "docs" / "favicon.svg", source)


def for_mkdocs(text: str, page: str, listed: list[str], linked: set[str]) -> str:
    """A page as MkDocs wants it. Args: linked: takes up the files other than pages that it links to."""

    def replaced(match: re.Match[str]) -> str:
        is_picture, label, address = match.groups()
        path, _, anchor = address.partition("#")
        if not path or re.match(r"[a-z]+:", address):
            return match[0]
        label = LINK.sub(replaced, label)
        target = os.path.normpath(Path(page).parent / path)
        if f"{target}/README.md" in listed:
            target += "/README.md"
        if target in listed:
            relative = os.path.relpath(target, Path(page).parent)
            return f"[{label}]({relative}{'#' + anchor if anchor else ''})"
        if (ROOT / target).is_file() and not target.endswith((".py", ".toml")):
            linked.add(target)
            return f"{is_picture}[{label}]({address})"
        return label

    code = CODE.findall(text)
    text = LINK.sub(replaced, CODE.sub("\0", text))
    text = re.sub("\0", lambda _: code.pop(0), text)
    return "\n".join(_separated(text.splitlines())) + "\n"


def _separated(lines: list[str]) -> Iterator[str]:
    """Lines with an empty one before each list and table, and lists in lists indented by four spaces."""
    is_code, before = False, ""
    for line in lines:
        if line.lstrip().startswith("```"):
            is_code = not is_code
        elif not is_code:
            begins = LIST_OR_TABLE.match(line)
            if begins and before and not LIST_OR_TABLE.match(before) and not before.startswith((" ", "#")):
                yield ""
            line = re.sub(r"^((?:  )+)(?=[-*] )", r"\1\1", line)
        yield line
        before = line


def navigation(listed: list[str]) -> list[object]:
    """GROUPS as MkDocs has it, of the pages that exist. Raises: SystemExit for a page that is in no group."""
    left = dict.fromkeys(listed)

    def entries(items: list[Entry | dict[str, list[Entry]]]) -> Iterator[object]:
        for item in items:
            if isinstance(item, dict):
                for title, below in item.items():
                    if found := list(entries(list(below))):
                        yield {title: found}
                continue
            pattern, title = item if isinstance(item, tuple) else (item, "")
            for page in [page for page in left if Path(page).match(pattern) and page.count("/") == pattern.count("/")]:
                del left[page]
                if "*" in pattern:  # the headings are long
                    title = (
                        page.removeprefix("docs/").removesuffix(".md").removesuffix("/README").removeprefix("reports/")
                    )
                yield {title: page} if title else page

    nav: list[object] = []
    for group, items in GROUPS.items():
        found = list(entries(items))
        nav += [{group: found[0] if group == "Home" else found}] if found else []
    if left:
        raise SystemExit(f"in no group of docs/build_site.py: {', '.join(left)}")
    return nav


def build(output: Path = OUTPUT, run: Callable[..., object] = subprocess.run) -> None:
    """Build the site; warnings are errors. Raises: CalledProcessError, SystemExit."""
    source = output.parent / f"{output.name}-src"
    stage(source)
    settings = {
        "INHERIT": str(ROOT / "docs" / "mkdocs.yml"),
        "docs_dir": str(source),
        "site_dir": str(output),
        "nav": navigation(pages()),
    }
    (configuration := output.parent / f"{output.name}.yml").write_text(json.dumps(settings))  # JSON is YAML
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--config-file", str(configuration)]
    # the theme's advertisement for another generator is no warning of this build
    run(command, check=True, env={**os.environ, "NO_MKDOCS_2_WARNING": "1", "DISABLE_MKDOCS_2_WARNING": "true"})


if __name__ == "__main__":
    build()
