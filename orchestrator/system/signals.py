"""Signals as callbacks, for as long as a block lasts; handlers only post, they decide nothing."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any


@contextlib.contextmanager
def heard(*, platform: Callable[[], None], person: Callable[[], None]) -> Iterator[None]:
    """SIGTERM calls `platform`, Ctrl-C calls `person`, a closed terminal nobody. Outside the main thread: no change."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    wanted: dict[int, Any] = {
        signal.SIGTERM: lambda *_: platform(),
        signal.SIGINT: lambda *_: person(),
        signal.SIGHUP: signal.SIG_IGN,
    }
    before = {number: signal.signal(number, handler) for number, handler in wanted.items()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
