"""The whole screen of a terminal, redrawn at an interval: for `kgorch status --watch` and `kgorch top`.

What is shown is decided elsewhere, as lines for a size. Here the alternate screen is taken, keys are read one by one, and both
are given back, whatever ends the program.
"""

from __future__ import annotations

import contextlib
import os
import re
import select
import signal
import sys
import termios
import time
import tty
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from kgorch.cli.display import render

SIZE_S = 0.1
"""Between two looks at the terminal's size. No handler of SIGWINCH: it could interrupt the very code that it wakes."""

KEYS = {
    "\x1b[A": "up",
    "\x1b[B": "down",
    "\x1bOA": "up",
    "\x1bOB": "down",
    "\x1b[5~": "page up",
    "\x1b[6~": "page down",
    "\n": "enter",
    "\r": "enter",
}


class ScreenLine(NamedTuple):
    """A line of the screen.

    Attributes:
        label: in bold, INDENT columns wide; None for a line without that column.
        bar: in green: a bar, or a sparkline.
        text: the rest.
        kind: what the label is about, for its priority; empty for the label itself. Also a style: `failed`, `log`, `head`.
    """

    label: str | None
    bar: str
    text: str
    kind: str = ""


STYLES = {"failed": "red", "log": "dim", "head": "bold", "chosen": "reverse"}

Frame = Callable[[int, int], list[ScreenLine]]
"""Columns and lines of the terminal → what is shown."""


class Screen:
    """The alternate screen of stdout, and the keys of stdin if that is the same terminal's.

    Raises: OSError: from `show`, once the terminal is closed.
    """

    def __init__(self) -> None:
        from rich.console import Console
        from rich.live import Live

        self._console = Console()
        self._live = Live(console=self._console, screen=True, auto_refresh=False)
        self._stack = contextlib.ExitStack()
        self._has_keys = False
        self._typed: deque[str] = deque()
        self._is_interrupted = False

    def __enter__(self) -> Screen:
        before = signal.signal(signal.SIGINT, self._interrupt)
        self._stack.callback(signal.signal, signal.SIGINT, before)
        self._has_keys = self._stack.enter_context(_single_keys())
        self._stack.enter_context(self._live)
        return self

    def __exit__(self, *error: Any) -> None:
        self._stack.close()

    def _interrupt(self, *_: object) -> None:
        """Ctrl-C. It is remembered: an exception that is raised inside a callback, of a weak reference say, goes no further."""
        self._is_interrupted = True
        raise KeyboardInterrupt

    def show(self, frame: Frame, seconds: float) -> str:
        """Show a frame for so long, drawn again when the terminal's size changes; returns at once with a key that is typed.

        Returns: the key: a letter, or a value of KEYS; empty when the time is over.
        Raises: KeyboardInterrupt.
        """
        until_s = time.monotonic() + seconds
        size = None
        while True:
            if self._is_interrupted:
                raise KeyboardInterrupt
            if self._console.size != size:
                size = self._console.size
                self._draw(frame(size.width, size.height))
            left_s = until_s - time.monotonic()
            if left_s <= 0:
                return ""
            if key := self._key(min(left_s, SIZE_S)):
                return key

    def _draw(self, lines: list[ScreenLine]) -> None:
        from rich.text import Text

        self._live.update(Text("\n").join(_styled(line) for line in lines), refresh=True)

    def _key(self, seconds: float) -> str:
        if not self._has_keys:
            time.sleep(seconds)
            return ""
        if not self._typed:
            if not select.select([sys.stdin.fileno()], [], [], seconds)[0]:
                return ""
            content = os.read(sys.stdin.fileno(), 1024).decode(errors="replace")
            if not content:  # the terminal is gone, and would be readable for ever
                self._has_keys = False
                return ""
            self._typed.extend(keys_in(content))
        return self._typed.popleft() if self._typed else ""


def keys_in(content: str) -> list[str]:
    """The keys of what was read at once: who types fast, or holds a key down, is read several at a time."""
    found = re.findall(r"\x1b(?:\[[0-9;]*[@-~]|O.)|.", content, re.DOTALL)
    return [KEYS.get(key, key) for key in found if key in KEYS or key.isprintable()]


@contextlib.contextmanager
def _single_keys() -> Iterator[bool]:
    """stdin gives each key at once, without an echo; Ctrl-C stays a signal. False where stdin is no terminal."""
    if not render.is_terminal(sys.stdin):
        yield False
        return
    try:
        before = termios.tcgetattr(sys.stdin)
        tty.setcbreak(sys.stdin, termios.TCSADRAIN)
    except termios.error:  # in the background of a shell
        yield False
        return
    try:
        yield True
    finally:
        with contextlib.suppress(termios.error):
            termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)


def _styled(line: ScreenLine) -> Any:
    from rich.text import Text

    style = STYLES.get(line.kind, "")
    text = Text(no_wrap=True, overflow="crop", style=style)
    if line.label is not None:
        text.append(f"{line.label:<{render.INDENT}}", style="bold")
    text.append(line.bar, style="green")
    text.append(line.text)
    return text
