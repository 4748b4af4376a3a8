"""Signals as callbacks for the duration of a block.

A handler interrupts the main thread anywhere, so callbacks only post to a queue; the loop decides.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

_interrupts = 0


def interrupt_count() -> int:
    """How often SIGINT arrived while `handlers` were installed: it tells Ctrl-C from a `kgorch stop`, which asks for the same."""
    return _interrupts


def _interrupted(on_interrupt: Callable[[], None]) -> None:
    global _interrupts
    _interrupts += 1
    on_interrupt()


@contextlib.contextmanager
def handlers(*, on_terminate: Callable[[], None], on_interrupt: Callable[[], None]) -> Iterator[None]:
    """Install handlers, and put the former ones back when the block ends.

    Outside the main thread nothing is installed: Python allows handlers there alone.

    Args:
        on_terminate: called on SIGTERM, which the platform sends.
        on_interrupt: called on SIGINT, which a person sends with Ctrl-C. SIGHUP is ignored: a session outlives its terminal.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    new: dict[int, Any] = {
        signal.SIGTERM: lambda *_: on_terminate(),
        signal.SIGINT: lambda *_: _interrupted(on_interrupt),
        signal.SIGHUP: signal.SIG_IGN,
    }
    former = {number: signal.signal(number, handler) for number, handler in new.items()}
    try:
        yield
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)
