"""kgorch itself, under its supervisor: what `session.steps` does at the step on which the ranks have agreed."""

from __future__ import annotations

import time
from pathlib import Path

from orchestrator import __version__
from orchestrator.checkpoint.folder import list_checkpoints
from peers import Training

PATIENCE_S = 60.0


class Saving:
    version = __version__
    setting = "under `kgorch start`; read back and hashed by the supervisor as always"
    lacks = ""

    def __init__(self, training: Training) -> None:
        self._training, self._session = training, training.session

    def save(self, step: int) -> None:
        saver = self._session._saver
        assert self._session._save(saver.next_slot(), self._session._seen(), persist=True), saver.error

    def put_aside(self) -> None:
        """A snapshot between saves, which stays in memory."""
        assert self._session._save(self._session._saver.next_slot(), self._session._seen(), persist=False)

    def wait(self) -> None:
        saver = self._session._saver
        assert saver.wait(), saver.error

    def tidy(self) -> None:
        """Until the supervisor has read it back and dropped the one before, so that others are measured alone."""
        root = Path(self._session._launch.checkpoints)
        until = time.monotonic() + PATIENCE_S
        while self._training.rank == 0 and len(list_checkpoints(root)) > 1:
            if time.monotonic() > until:
                raise TimeoutError("the supervisor does not verify")
            time.sleep(0.005)

    def close(self) -> None:
        pass
