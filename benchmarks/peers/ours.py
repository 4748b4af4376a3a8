"""kgorch itself, under its supervisor: what `session.steps` does at the step on which the ranks have agreed."""

from __future__ import annotations

import time
from pathlib import Path

from kgorch import __version__
from kgorch.checkpoint.folder import list_checkpoints
from peers import Training

PATIENCE_S = 60.0


class Saving:
    version = __version__
    setting = "under `kgorch start`; read back and hashed by the supervisor as always"
    lacks = ""

    def __init__(self, training: Training) -> None:
        self._training, self._session = training, training.session

    def save(self, step: int) -> None:
        saves, writer = self._session._supervision.saves, self._session._supervision.writer
        assert saves.save(writer.next_slot(), saves.capture(), persist=True), writer.error

    def put_aside(self) -> None:
        """A snapshot between saves, which stays in memory."""
        saves, writer = self._session._supervision.saves, self._session._supervision.writer
        assert saves.save(writer.next_slot(), saves.capture(), persist=False)

    def wait(self) -> None:
        writer = self._session._supervision.writer
        assert writer.wait(), writer.error

    def tidy(self) -> None:
        """Until the supervisor has read it back and dropped the one before, so that others are measured alone."""
        root = Path(self._session._state.launch.checkpoints)
        until = time.monotonic() + PATIENCE_S
        while self._training.rank == 0 and len(list_checkpoints(root)) > 1:
            if time.monotonic() > until:
                raise TimeoutError("the supervisor does not verify")
            time.sleep(0.005)

    def close(self) -> None:
        pass
