"""Every figure in the README and the pages on benchmarks is what the kept JSON says.

benchmarks/claims.toml ties phrases to expressions on benchmarks/results/*.json. A number that is neither tied nor listed
there with a reason is an error, so a new figure needs a source, and a new run needs its prose read again.
"""

from __future__ import annotations

import json
import math
import re
import runpy
import shutil
import statistics
import tomllib
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
CLAIMS = Path("benchmarks", "claims.toml")
RESULTS = Path("benchmarks", "results")
NOT_KEPT = "The JSON of this run was not kept"

DRAWN = re.compile(r"<!-- ([^>:]*): drawn by [^>]*-->(.*?)<!-- end of \1 -->", re.DOTALL)
NUMBER = re.compile(r"(?<![\w.])\d+(?:,\d{3})*(?:\.\d+)?")
FRACTION = re.compile(r"\b(?:hal[fv]|third|quarter|tenth|twentieth|hundredth|twice|double|million|thousand)\w*")


class Row(dict[str, Any]):
    """A row of a benchmark by column: its value, its spread as low and high, its figures."""

    def __init__(self, row: dict[str, Any]) -> None:
        low, high = row.get("spread") or (None, None)
        super().__init__({**row, "low": low, "high": high, **row.get("figures", {})})


def names_in_expressions(results: Path) -> dict[str, Any]:
    """What an expression of claims.toml may use. A row is found by its name and the beginning of its group."""
    data = {
        path.relative_to(results).with_suffix("").as_posix(): json.loads(path.read_text())
        for path in results.rglob("*.json")
        if "quick" not in path.parts
    }

    def row(part: str, name: str, group: str = "") -> Row:
        [found] = [one for one in data[part]["rows"] if one["name"] == name and one["group"].startswith(group)]
        return Row(found)

    def group(part: str, beginning: str, *, peers_only: bool = False) -> list[Row]:
        rows = [Row(one) for one in data[part]["rows"] if one["group"].startswith(beginning)]
        return [one for one in rows if not (peers_only and one["name"] == "kgorch")]

    def place(part: str, name: str, beginning: str, column: str) -> int:
        own = row(part, name, beginning)[column]
        return 1 + sum(one[column] > own for one in group(part, beginning))

    plain = {one.__name__: one for one in (len, min, max, sum, abs, sorted, any, all, round, float, zip)}
    own = {"data": data, "row": row, "group": group, "place": place, "wilson": wilson}
    return {"__builtins__": {}, **plain, **own, "mean": statistics.mean, "median": statistics.median}


def wilson(hits: int, trials: int, z: float = 1.96) -> tuple[float, ...]:
    """95% interval of a share, in percent (Wilson 1927)."""
    share, weight = hits / trials, z * z / trials
    half = z * math.sqrt(share * (1 - share) / trials + weight / (4 * trials))
    return tuple(100 * (share + weight / 2 + sign * half) / (1 + weight) for sign in (-1, 1))


def is_rounded(said: str, value: float) -> bool:
    decimals = len(said.partition(".")[2])
    return abs(value - float(said.replace(",", ""))) <= 0.5 * 10**-decimals + 1e-9


def prose(text: str) -> str:
    """A page without code blocks, drawn parts and the targets of links, on one line."""
    text = re.sub(r"```.*?```", " ", DRAWN.sub(" ", text), flags=re.DOTALL)
    return " ".join(re.sub(r"\]\([^)]*\)", "]", text).split())


def sections(text: str, titles: list[str]) -> str:
    """The sections with these titles; "" is what stands before the first; all of them without titles."""
    parts = re.split(r"^## +(.*)\n", re.sub(r"```.*?```", " ", text, flags=re.DOTALL), flags=re.MULTILINE)
    found = dict(zip(["", *parts[1::2]], parts[::2], strict=True))
    return "\n".join(found[title] for title in titles) if titles else text


def problems(root: Path) -> list[str]:
    """Where the documents and the kept JSON differ, one line each."""
    names = names_in_expressions(root / RESULTS)
    found = []
    for page, rules in tomllib.loads((root / CLAIMS).read_text()).items():
        whole = (root / page).read_text()
        text = prose(sections(whole, rules.get("sections", [])))
        claims, orders, others = (rules.get(key, {}) for key in ("measured", "true", "unmeasured"))
        quotes = rules.get("drawn", {})
        lines = [line for match in DRAWN.finditer(whole) for line in match[2].splitlines()]
        for phrase, starts in quotes.items():
            rows = [NUMBER.findall(line) for start in starts for line in lines if line.startswith(start)]
            found += [
                f"{page}: {phrase!r} says {number}, the page's table does not"
                for number, row in zip(NUMBER.findall(phrase), rows, strict=True)
                if number not in row
            ]
        for phrase, expressions in claims.items():
            said = NUMBER.findall(phrase)
            if len(said) != len(expressions):
                found.append(f"{page}: {phrase!r} has {len(said)} numbers, claims.toml {len(expressions)} expressions")
            for number, expression in zip(said, expressions, strict=False):
                value = eval(expression, names)
                if not is_rounded(number, value):
                    found.append(f"{page}: {phrase!r} says {number}, the JSON {value:.6g} ({expression})")
        found += [f"{page}: {phrase!r} is not so: {said}" for phrase, said in orders.items() if not eval(said, names)]
        phrases = sorted(
            [*claims, *quotes, *orders, *others], key=len, reverse=True
        )  # the longest first: phrases may nest
        found += [f"{page}: {phrase!r} of claims.toml does not stand there" for phrase in phrases if phrase not in text]
        for phrase in phrases:
            text = re.sub(rf"(?<![\d.]){re.escape(phrase)}(?!\.?\d)", " … ", text)
        text = re.sub(r"`[^`]*`", " ", text)
        if (kept := rules.get("json")) and (root / RESULTS / kept).exists() == (NOT_KEPT in text):
            found.append(f"{page}: {NOT_KEPT!r} must stand there as long as {kept} is missing, and no longer")
        loose = NUMBER.findall(text) + FRACTION.findall(text)
        found += [f"{page}: {number} has no source in claims.toml" for number in loose]
    return found


@pytest.fixture
def copy(tmp_path):
    shutil.copytree(ROOT / RESULTS, tmp_path / RESULTS)
    for page in [CLAIMS, *map(Path, tomllib.loads((ROOT / CLAIMS).read_text()))]:
        (tmp_path / page).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / page, tmp_path / page)
    return tmp_path


def test_every_figure_in_the_prose_is_what_the_kept_json_says():
    assert problems(ROOT) == []


def test_the_tables_are_those_of_the_kept_json(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    page = runpy.run_path(str(ROOT / "benchmarks" / "page.py"))
    text = (ROOT / "docs" / "benchmarks.md").read_text()
    kept = {path.stem: json.loads(path.read_text()) for path in sorted((ROOT / RESULTS).glob("*.json"))}
    for part, found in kept.items():
        if part not in ("checkpoints", "ladder", "workloads"):  # have pages and tables of their own
            begin, end = page["marks"](part)
            assert f"{begin}\n{page['table'](found)}\n\n![" in text and end in text, part


@pytest.mark.parametrize(
    ("page", "old", "new"),
    [
        ("README.md", "149 of 150 sessions", "150 of 150 sessions"),
        ("docs/guarantees.md", "`status` 1.15, one", "`status` 1.05, one"),
        ("docs/benchmarks.md", "It has 91.3%;", "It has 91.4%;"),
        ("docs/benchmarks.md", "came back in 2 of 3", "came back in 1 of 3"),
        ("docs/checkpoints.md", "A save blocks the training for 64 ms", "A save blocks the training for 54 ms"),
        ("docs/memory.md", "against kgorch's 5.32 s", "against kgorch's 0.32 s"),
    ],
)
def test_a_number_that_is_changed_in_the_prose_is_found(copy, page, old, new):
    text = (copy / page).read_text()
    assert text.count(old) == 1
    (copy / page).write_text(text.replace(old, new))
    assert any(problem.startswith(f"{page}: ") for problem in problems(copy))


@pytest.mark.parametrize("sentence", ["It is 12% faster.", "It takes half the time.", "Over 40 runs."])
def test_a_figure_without_a_source_is_found(copy, sentence):
    page = copy / "docs" / "benchmarks.md"
    page.write_text(f"{page.read_text()}\n{sentence}\n")
    assert len(problems(copy)) == 1


@pytest.mark.parametrize(
    ("part", "row", "column", "factor"),
    [("goodput", 0, "value", 0.98), ("overhead", 0, "value", 1.02), ("recovery", 0, "value", 1.1), ("scale", 29, "value", 1.1)],
)  # fmt: skip
def test_a_number_that_is_changed_in_the_json_is_found(copy, part, row, column, factor):
    path = copy / RESULTS / f"{part}.json"
    found = json.loads(path.read_text())
    found["rows"][row][column] *= factor
    path.write_text(json.dumps(found))
    assert problems(copy)


def test_a_session_that_misses_its_save_is_found_in_the_prose(copy):
    path = copy / RESULTS / "walls.json"
    found = json.loads(path.read_text())
    found["sessions"][3]["saved"] -= 1
    path.write_text(json.dumps(found))
    assert any("150" in problem for problem in problems(copy))


def test_a_page_says_that_its_json_was_not_kept_until_it_is(copy):
    (copy / RESULTS / "ladder.json").write_text('{"rows": []}')
    assert any(NOT_KEPT in problem for problem in problems(copy))
