"""Names of the files of a session's output, which come from the place: foreign text that becomes paths. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from pathlib import PurePosixPath

MAX_PARTS = 40
MAX_PART_BYTES = 255
MAX_NAME_BYTES = 3500
"""Linux allows 4096 for a path; the folder that the file is fetched into comes before it."""


class OutsideError(ValueError):
    """A name that leads out of the folder, or that no file here can have."""


def check(name: str) -> str:
    """The name itself. Raises: OutsideError unless it is a plain relative path below the folder."""
    try:
        size = len(name.encode())
    except UnicodeEncodeError:
        raise OutsideError(f"not a name in UTF-8: {name!r:.200}") from None
    parts = name.split("/")
    if size > MAX_NAME_BYTES or len(parts) > MAX_PARTS or any(len(part.encode()) > MAX_PART_BYTES for part in parts):
        raise OutsideError(f"too long for the name of a file: {name!r:.200}")
    if any(part in ("", ".", "..") for part in parts):  # also an absolute one, and the empty one
        raise OutsideError(f"leads outside of the folder: {name!r:.200}")
    if not name.isprintable() or "\\" in name:
        raise OutsideError(f"has characters that the name of an output cannot have: {name!r:.200}")
    return name


def is_wanted(name: str, patterns: Iterable[str]) -> bool:
    """Whether a pattern fits the whole name or its last part."""
    return any(fnmatchcase(name, pattern) or fnmatchcase(PurePosixPath(name).name, pattern) for pattern in patterns)


def wanted(names: Sequence[str], patterns: Sequence[str]) -> list[str]:
    """Those names that a pattern fits, each once. Raises: OutsideError when one of them leads outside."""
    return list(dict.fromkeys(check(name) for name in names if is_wanted(name, patterns)))
