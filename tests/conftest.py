"""The situations that tests begin in."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from harness import Kgorch


@pytest.fixture
def kgorch(tmp_path: Path) -> Iterator[Kgorch]:
    folder = tmp_path / "work"
    folder.mkdir()
    made = Kgorch(folder, tmp_path / "home")
    yield made
    for process in made.started:
        if process.poll() is None:
            process.send_signal(signal.SIGKILL)
    made.kill_everything()
    for process in made.started:
        if process.stdout and not process.stdout.closed:
            process.communicate()
