"""The topics of error codes (error_codes.toml): what `kgorch explain KG203` prints and docs/troubleshooting.md holds."""

from __future__ import annotations

import tomllib
from functools import lru_cache
from importlib import resources
from typing import NamedTuple

AREAS = {
    "1": "Plan and command line",
    "2": "Checkpoints and resume",
    "3": "Sessions and their limits",
    "4": "Training program",
    "5": "Memory and disk",
    "6": "State folder and database",
    "7": "Other places, Slurm and nodes",
    "8": "Daemon and services",
    "9": "Installation and bugs",
}
"""By the first digit of a code."""


class ErrorTopic(NamedTuple):
    """What a code means.

    Attributes:
        title (str): one line.
        text (str): paragraphs, lists and indented commands, which are Markdown as well.
    """

    title: str
    text: str


@lru_cache(maxsize=1)
def topics() -> dict[str, ErrorTopic]:
    """The topics by their codes, in ascending order."""
    text = resources.files("kgorch.cli").joinpath("error_codes.toml").read_text(encoding="utf-8")
    return {code: ErrorTopic(item["title"], item["text"].strip()) for code, item in sorted(tomllib.loads(text).items())}
