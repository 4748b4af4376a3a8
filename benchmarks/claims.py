"""The figures in the prose of the pages, and the kept JSON that they come from.   python benchmarks/claims.py [--rewrite]

benchmarks/claims.toml ties phrases to expressions on benchmarks/results/*.json. Each difference is a line, and then the exit
status is 1. With --rewrite the numbers of phrases get the values of the JSON first, in the pages and in claims.toml; the sentences
around them are printed, for what they say in words may not be so any more.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import statistics
import sys
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
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


def evaluated(expression: str, names: dict[str, Any]) -> Any:
    """None where the JSON does not have it, as the loss of the worst session where none has lost anything."""
    try:
        return eval(expression, names)
    except (LookupError, TypeError, ValueError, statistics.StatisticsError):
        return None


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
                value = evaluated(expression, names)
                if value is None or not is_rounded(number, value):
                    of_json = "has nothing" if value is None else f"{value:.6g}"
                    found.append(f"{page}: {phrase!r} says {number}, the JSON {of_json} ({expression})")
        found += [
            f"{page}: {phrase!r} is not so: {said}" for phrase, said in orders.items() if not evaluated(said, names)
        ]
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


def rewritten(phrase: str, expressions: list[str], names: dict[str, Any]) -> str:
    """The phrase with the numbers of the JSON, as exact as they were. One that is below 0 or missing stays."""
    left = list(expressions)

    def now(match: re.Match[str]) -> str:
        said, value = match[0], evaluated(left.pop(0), names)
        if value is None or value < 0 or is_rounded(said, value):
            return said
        comma = "," if "," in said or value >= 10_000 else ""
        return f"{value:{comma}.{len(said.partition('.')[2])}f}"

    return NUMBER.sub(now, phrase)


def rewrite(root: Path) -> list[str]:
    """Give the phrases of all pages the numbers of the JSON. Returns: the phrases that have changed, as they are now."""
    names, rules_text, changed = names_in_expressions(root / RESULTS), (root / CLAIMS).read_text(), []
    for page, rules in tomllib.loads(rules_text).items():
        text = (root / page).read_text()
        for phrase, expressions in rules.get("measured", {}).items():
            if len(NUMBER.findall(phrase)) != len(expressions):
                continue
            new = rewritten(phrase, expressions, names)
            where = re.compile(r"\s+".join(map(re.escape, phrase.split())))
            if new == phrase or len(where.findall(text)) != 1:
                continue
            numbers = iter(NUMBER.findall(new))
            text = where.sub(lambda match, left=numbers: NUMBER.sub(lambda _: next(left), match[0]), text)  # type: ignore[misc]
            rules_text = rules_text.replace(_key(phrase), _key(new), 1)
            changed.append(f"{page}: {new}")
        (root / page).write_text(text)
    (root / CLAIMS).write_text(rules_text)
    return changed


def _key(phrase: str) -> str:
    """As claims.toml has it."""
    escaped = phrase.replace("\\", "\\\\").replace('"', '\\"')
    return f'\n"{escaped}" = ['


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--rewrite", action="store_true", help="put the numbers of the JSON into the pages and claims.toml"
    )
    if parser.parse_args().rewrite:
        print("\n".join(["Read these again, with what stands around them:", *rewrite(ROOT)]))
    left = problems(ROOT)
    sys.exit("\n".join(left) if left else 0)


if __name__ == "__main__":
    main()
