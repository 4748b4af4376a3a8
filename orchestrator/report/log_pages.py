"""Pages of a rank's log, and a search in it. Every read is bounded: a log may have gigabytes, and a line megabytes.

A page is given by offsets into the file, so that going back and following need no count of lines.
"""

from __future__ import annotations

from pathlib import Path

from sqlalchemy import Engine

from kgorch.core import text as texts
from kgorch.db import sessions
from kgorch.db.rows import AttemptInfo, RunInfo
from kgorch.errors import NotFound
from kgorch.report.json_fields import View

PAGE_BYTES = 128 << 10
SEARCH_BYTES = 64 << 20
"""Searched by one request; the answer says where the next one goes on."""

BLOCK_BYTES = 1 << 20
MAX_HITS = 200
LINE_CHARACTERS = 2000
"""Shown of one line."""

MAX_NEEDLE = 200
MAX_ATTEMPTS = 200
"""Newest attempts that are offered."""


def sources(engine: Engine, run: RunInfo) -> list[View]:
    """The attempts of a run that have logs, newest first: `attempt` (SESSION.NUMBER), `stage`, `files`."""
    found = []
    for item in reversed(sessions.attempts(engine, run.id, newest=MAX_ATTEMPTS)):
        if files := _files(item):
            found.append(
                {"attempt": Path(item.folder).name, "stage": item.stage, "outcome": item.outcome, "files": files}
            )
    return found[:MAX_ATTEMPTS]


def _files(attempt: AttemptInfo) -> list[str]:
    folder = Path(attempt.folder)
    names = [f"rank{rank}.log" for rank in range(attempt.ranks)] + ["torchrun.log"]
    return [name for name in names if (folder / name).is_file()]


def find(engine: Engine, run: RunInfo, attempt: str, name: str) -> Path:
    """The log of that name. Names are compared with those that exist, so none leads elsewhere. Raises: NotFound."""
    for item in sessions.attempts(engine, run.id, newest=MAX_ATTEMPTS):
        if Path(item.folder).name == attempt and name in _files(item):
            return Path(item.folder, name)
    raise NotFound("there is no such log", next_step=f"kgorch logs {run.name}")


def page(path: Path, *, before: int | None = None) -> View:
    """The lines that end before that offset; the last ones of the file without one."""
    with open(path, "rb") as file:
        size = file.seek(0, 2)
        end = size if before is None else min(max(before, 0), size)
        begin = max(0, end - PAGE_BYTES)
        file.seek(begin)
        content = file.read(end - begin)
    if begin:  # not a part of a line, unless the page is one
        cut = content.find(b"\n") + 1
        if 0 < cut < len(content):
            begin, content = begin + cut, content[cut:]
    return {"begin": begin, "end": end, "size": size, "lines": _lines(content)}


def following(path: Path, at: int) -> View:
    """What was written since that offset; a file that has become shorter was rotated and is read from its beginning."""
    with open(path, "rb") as file:
        size = file.seek(0, 2)
        rotated = size < at
        at = 0 if rotated else max(at, 0)
        skipped = size - at > 4 * PAGE_BYTES  # the reader is far behind: it sees the newest
        if skipped:
            at = size - PAGE_BYTES
        file.seek(at)
        content = file.read(PAGE_BYTES)
    if len(content) < PAGE_BYTES:
        content = content[: content.rfind(b"\n") + 1]  # the rest of a line that is being written comes with it
    return {
        "begin": at,
        "end": at + len(content),
        "size": size,
        "rotated": rotated,
        "skipped": skipped,
        "lines": _lines(content),
    }


def search(path: Path, needle: str, *, before: int | None = None) -> View:
    """Lines that hold a text, upper and lower case alike, newest first. `next` is where to go on; None at the file's beginning."""
    wanted = needle[:MAX_NEEDLE].encode().lower()
    hits: list[View] = []
    with open(path, "rb") as file:
        size = file.seek(0, 2)
        end = size if before is None else min(max(before, 0), size)
        stop = max(0, end - SEARCH_BYTES)
        while end > stop and wanted and len(hits) < MAX_HITS:
            begin = max(0, end - BLOCK_BYTES)
            file.seek(begin)
            content = file.read(end - begin)
            cut = content.find(b"\n") + 1 if begin else 0
            if begin and not 0 < cut < len(content):
                cut = 0
            begin, content = begin + cut, content[cut:]
            hits += reversed(_hits(content, wanted, begin))
            end = begin
    if len(hits) > MAX_HITS:
        hits = hits[:MAX_HITS]
        end = hits[-1]["at"]
    return {
        "hits": hits,
        "next": end if end > 0 and wanted else None,
        "searched": (size if before is None else before) - end,
        "size": size,
    }


def _hits(content: bytes, wanted: bytes, begin: int) -> list[View]:
    lower, at, found = content.lower(), 0, []
    while (at := lower.find(wanted, at)) >= 0:
        start = content.rfind(b"\n", 0, at) + 1
        end = content.find(b"\n", at)
        end = len(content) if end < 0 else end
        found.append({"at": begin + start, "text": _shown(content[start : min(end, start + 4 * LINE_CHARACTERS)])})
        at = end + 1
    return found


def _lines(content: bytes) -> list[str]:
    return [_shown(line[: 4 * LINE_CHARACTERS]) for line in content.removesuffix(b"\n").split(b"\n")] if content else []


def _shown(line: bytes) -> str:
    """As a terminal would show it: a progress bar by its last state, no escape sequences, no control characters."""
    text = line.decode(errors="replace").rstrip("\r").rpartition("\r")[2]
    text = texts.printable(texts.SEQUENCE.sub("", text))
    return text if len(text) <= LINE_CHARACTERS else f"{text[:LINE_CHARACTERS]} … (cut)"
