"""A TOML file that a user wrote, read within bounds: whatever the path names, the answer comes at once.

Two kinds of files are read, plans and user configurations. Their errors differ in the noun, the exception and the next
step; `DocumentKind` holds these three, so that one reader serves both.
"""

from __future__ import annotations

import errno
import os
import re
import stat
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kgorch.core.text import in_one_line
from kgorch.errors import KgorchError

MAX_BYTES = 1 << 20
"""Largest file that is read. A plan of a hundred stages takes 30 kB; what is larger is another file."""

Key = str | int
KeyPath = tuple[Key, ...]
"""Where a value is in a document: names of tables and keys, and positions in lists; `("stage", 0, "args", "lr")`."""


@dataclass(frozen=True, slots=True)
class DocumentKind:
    """A kind of file, as its errors need it.

    Attributes:
        noun (str): what the file should be: "plan", "configuration".
        error (type[KgorchError]): what is raised for a file that cannot be used.
        if_unreadable (str): next step where the file itself cannot be mended.
        if_invalid (str): next step for a wrong key; `{key}` in it becomes the first known one, dotted.
    """

    noun: str
    error: type[KgorchError]
    if_unreadable: str
    if_invalid: str


@dataclass(frozen=True, slots=True)
class TomlDocument:
    """The values of a file, and what an error needs to say where each of them came from.

    Attributes:
        values (dict): what tomllib read, with overrides applied.
        text (str): the file's text, for line numbers; empty for none.
        name (str): the file as errors name it, usually its path.
        overrides (Mapping[KeyPath, str]): values that come from --set, and the option's argument as it was typed.
    """

    values: dict[str, Any]
    text: str
    name: str
    overrides: Mapping[KeyPath, str] = field(default_factory=dict)


def read_text(path: Path, kind: DocumentKind) -> str:
    """Read the text of a file that a user named.

    It is opened without blocking, so that a FIFO or a device is refused instead of waited for, and at most `MAX_BYTES` are
    read, also of a file that grows meanwhile.

    Raises: `kind.error`; FileNotFoundError where nothing has that name.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
    except FileNotFoundError:  # what a missing file means depends on the caller: a configuration is optional
        raise
    except (OSError, ValueError) as error:  # ValueError: a null byte in the path
        reason = error.strerror if isinstance(error, OSError) else str(error)
        number = error.errno if isinstance(error, OSError) else None
        hints = {
            errno.EACCES: "let your account read it: chmod u+r",
            errno.ENXIO: f"give the {kind.noun}'s file itself",  # a socket
        }
        raise kind.error(
            f"the {kind.noun} {path} cannot be read", str(reason), next_step=hints.get(number or 0, kind.if_unreadable)
        ) from None
    try:
        content = _bounded_content(descriptor, path, kind)
    except OSError as error:
        raise kind.error(
            f"the {kind.noun} {path} cannot be read", str(error.strerror), next_step=kind.if_unreadable
        ) from None
    finally:
        os.close(descriptor)
    return _decoded(content, path, kind)


def _bounded_content(descriptor: int, path: Path, kind: DocumentKind) -> bytes:
    """The bytes of an open regular file. Raises: `kind.error`, OSError."""
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
        plan_inside = path / "plan.toml"
        next_step = f"name the file in it: {plan_inside}" if plan_inside.is_file() else kind.if_unreadable
        raise kind.error(f"the {kind.noun} {path} is {_file_type(status.st_mode)}, not a file", next_step=next_step)
    content = b""
    if status.st_size <= MAX_BYTES:
        while len(content) <= MAX_BYTES and (block := os.read(descriptor, MAX_BYTES + 1 - len(content))):
            content += block
    if status.st_size > MAX_BYTES or len(content) > MAX_BYTES:
        raise kind.error(
            f"{path} is too large for a {kind.noun}",
            f"expected at most {MAX_BYTES >> 20} MiB of text, found {max(status.st_size, len(content))} bytes",
            next_step=kind.if_unreadable,
        )
    return content


def _decoded(content: bytes, path: Path, kind: DocumentKind) -> str:
    """Decode UTF-8, with or without the byte order mark that Windows editors write. Raises: `kind.error`."""
    if content[:2] in (b"\xff\xfe", b"\xfe\xff"):
        raise kind.error(f"{path} is UTF-16, expected UTF-8", next_step="save it as UTF-8 in your editor")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise kind.error(
            f"{path}:{line}: byte 0x{content[error.start]:02x} is not UTF-8, which TOML files are",
            next_step="save it as UTF-8 in your editor (it looks like Latin-1 or Windows-1252)",
        ) from None


def _file_type(mode: int) -> str:
    types = (
        (stat.S_ISDIR, "a folder"),
        (stat.S_ISFIFO, "a pipe (FIFO)"),
        (stat.S_ISCHR, "a device"),
        (stat.S_ISBLK, "a device"),
        (stat.S_ISSOCK, "a socket"),
    )
    return next((name for has_type, name in types if has_type(mode)), "something else")


def parse_toml(text: str, name: str, kind: DocumentKind) -> dict[str, Any]:
    """Parse TOML; an error shows the line where tomllib stopped.

    Args:
        name: the file as errors name it.
    Raises: `kind.error`.
    """
    try:
        return tomllib.loads(text)
    except RecursionError:
        message = "nested too deeply"
    except tomllib.TOMLDecodeError as error:
        message = str(error)
    except ValueError:  # Python converts no more than 4300 digits (CVE-2020-10735)
        message = "an integer has too many digits"
    lines = text.splitlines()
    # the position is in tomllib's message alone: its attributes lineno and colno are there from Python 3.14 on
    position = re.search(r" \(at (?:line (\d+), column (\d+)|end of document)\)$", message)
    facts = [message]
    if position:
        line = int(position[1] or max(len(lines), 1))
        column = f", column {position[2]}" if position[2] else ", at the end"
        facts = [f"{name}:{line}: {message[: position.start()]}{column}"]
        facts += [f"  {in_one_line(lines[line - 1].strip())[:100]}"] if line <= len(lines) else []
    raise kind.error(
        f"{name} is not TOML",
        *facts,
        next_step="correct that line: strings need quotes, names of tables need brackets (https://toml.io)",
    ) from None
