"""The plan that `kgorch init` writes (template.toml), and the help on each key that its comments give.

The template is the only place where keys are explained to users: `kgorch explain`, completion and the hint at --set read it
here. It is parsed as text, line by line, because its comments are what matters; no pydantic is loaded.
"""

from __future__ import annotations

import re
from functools import lru_cache
from importlib import resources
from typing import NamedTuple


class KeyHelp(NamedTuple):
    """Help on a key or a table of the plan.

    Attributes:
        key (str): dotted, `session.wall`.
        example (str): the key with a value, as TOML; empty for a table.
        text (str): the comment, on one line.
    """

    key: str
    example: str
    text: str


def plan_text() -> str:
    """The plan with every key explained."""
    return resources.files("kgorch.cli").joinpath("template.toml").read_text(encoding="utf-8")


def script_text() -> str:
    """The training that this plan runs."""
    return resources.files("kgorch.worker").joinpath("example.py").read_text(encoding="utf-8")


# a key or a table that is commented out starts with "# " and a lower-case letter or a bracket, a remark with a capital
_TABLE = re.compile(r"(?:# )?\[{1,2}([a-z_.]+)\]{1,2}\s*(?:# (.*))?$")
_KEY = re.compile(r"(?:# )?([a-z_]+) = (.+?)(?:\s+# (.*))?$")
_CONTINUATION = re.compile(r"\s{8,}# (.*)$")
_REMARK = re.compile(r"# ([A-Z].*)$")


@lru_cache(maxsize=1)
def key_help() -> dict[str, KeyHelp]:
    """Help on every key and table of the template, by its dotted name, in the template's order."""
    entries: dict[str, KeyHelp] = {}
    table, remark, last = "", "", ""
    for line in plan_text().splitlines():
        if match := _TABLE.match(line):
            table = last = match[1]
            text = ". ".join(part.rstrip(".") for part in (remark, match[2] or "") if part)
            entries.setdefault(table, KeyHelp(table, "", text))
            remark = ""
        elif match := _KEY.match(line):
            last = f"{table}.{match[1]}" if table else match[1]
            entries.setdefault(last, KeyHelp(last, f"{match[1]} = {match[2]}", match[3] or ""))
        elif (match := _CONTINUATION.match(line)) and last:
            entries[last] = entries[last]._replace(text=f"{entries[last].text} {match[1]}".strip())
        elif match := _REMARK.match(line):
            remark = match[1]
        elif not line.strip():
            remark = ""
    return entries


def help_for(key: str) -> list[KeyHelp]:
    """Help on a key, followed by the keys of a table.

    A key without an entry of its own (`checkpoint.keep.best`) is explained where the nearest key around it is. Empty for an
    unknown key.
    """
    entries = key_help()
    parts = key.split(".")
    for end in range(len(parts), 0, -1):
        name = ".".join(parts[:end])
        if name in entries:
            below = [entry for other, entry in entries.items() if other.startswith(name + ".")]
            return [entries[name], *(below if end == len(parts) else [])]
    return []
