"""The plan with every key explained that `kgorch init` writes, and what it says of each key."""

from __future__ import annotations

import re
from functools import lru_cache
from importlib import resources
from typing import NamedTuple


class Explained(NamedTuple):
    """A key as it may be written, and what is said of it; of a table, what its comment says."""

    key: str
    written: str
    text: str


def plan_text() -> str:
    return resources.files("orchestrator.cli").joinpath("template.toml").read_text(encoding="utf-8")


def script_text() -> str:
    """The training that goes with it."""
    return resources.files("orchestrator.worker").joinpath("example.py").read_text(encoding="utf-8")


_TABLE = re.compile(r"(?:# )?\[{1,2}([a-z_.]+)\]{1,2}\s*(?:# (.*))?$")
_KEY = re.compile(r"(?:# )?([a-z_]+) = (.+?)(?:\s+# (.*))?$")
_MORE = re.compile(r"\s{8,}# (.*)$")
_REMARK = re.compile(r"# ([A-Z].*)$")


@lru_cache(maxsize=1)
def explained() -> dict[str, Explained]:
    """Every key of the template, dotted (`session.wall`), and its tables, in their order."""
    found: dict[str, Explained] = {}
    table, remark, last = "", "", ""
    for line in plan_text().splitlines():
        if match := _TABLE.match(line):
            table = last = match[1]
            text = ". ".join(part.rstrip(".") for part in (remark, match[2] or "") if part)
            found.setdefault(table, Explained(table, "", text))
            remark = ""
        elif match := _KEY.match(line):
            last = f"{table}.{match[1]}" if table else match[1]
            found.setdefault(last, Explained(last, f"{match[1]} = {match[2]}", match[3] or ""))
        elif (match := _MORE.match(line)) and last:
            found[last] = found[last]._replace(text=f"{found[last].text} {match[1]}".strip())
        elif match := _REMARK.match(line):
            remark = match[1]
        elif not line.strip():
            remark = ""
    return found


def of(key: str) -> list[Explained]:
    """What explains a key: itself, or the nearest that encloses it, which explains what is in it; a table's keys follow it."""
    known = explained()
    parts = key.split(".")
    for end in range(len(parts), 0, -1):
        name = ".".join(parts[:end])
        if name in known:
            below = [entry for other, entry in known.items() if other.startswith(name + ".")]
            return [known[name], *(below if end == len(parts) else [])]
    return []
