"""The command line and the environment of this process as /proc shows them.

A forked process is shown with those of its parent. `ps`, and whoever looks for the processes of an attempt by a variable of
their environment (launch/attempt_processes.py), would take it for its parent. So it writes over the memory that the kernel shows,
as setproctitle does. A library that has kept a pointer from getenv() instead of the value reads what is written there. That memory
cannot grow: a process that is to fork others is started with ROOM_VARIABLE, which makes room.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterable, Mapping, Sequence

from kgorch.system.process_identity import stat_fields

ROOM_VARIABLE = "KGORCH_ROOM"
"""Filler in the environment. It is left out of what `replace` writes."""

ROOM_BYTES = 16384


def room() -> dict[str, str]:
    """The variable for a process whose children replace their command line and environment."""
    return {ROOM_VARIABLE: "-" * ROOM_BYTES}


def fits(environ: Mapping[str, str]) -> bool:
    """Whether `replace` can show an environment in this process or a child of it."""
    _, _, start, end = _memory()
    return len(_variables(environ)) < end - start


def replace(command: Sequence[str], environ: Mapping[str, str]) -> None:
    """Make `environ`, which `fits`, the environment of this process, and show it and `command` in /proc.

    A command line that is longer than the former one is cut.
    """
    command_start, command_end, start, end = _memory()
    os.environ.clear()  # the C library lets go of the memory that is written over, before it is
    os.environ.update(environ)
    _write(command_start, command_end, _joined(command))
    _write(start, end, _variables(environ))


def _memory() -> tuple[int, int, int, int]:
    """Addresses of the first byte and behind the last one: of the command line, and of the environment."""
    # fields 48 to 51 in proc(5)
    command_start, command_end, start, end = (int(text) for text in stat_fields("self")[45:49])
    return command_start, command_end, start, end


def _variables(environ: Mapping[str, str]) -> bytes:
    return _joined(f"{name}={value}" for name, value in environ.items())


def _joined(words: Iterable[str]) -> bytes:
    return b"".join(os.fsencode(word) + b"\0" for word in words)


def _write(start: int, end: int, content: bytes) -> None:
    content = content[: end - start - 1]
    ctypes.memmove(start, content.ljust(end - start, b"\0"), end - start)
