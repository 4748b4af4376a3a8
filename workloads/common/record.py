"""metrics.csv in the output folder: a line an epoch, whole and without doubles however often the run was cut."""

from __future__ import annotations

import csv
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kgorch import Session


class Record:
    """The lines so far; tracked by the session, so that a resume takes back what it will do again.

    record = Record(session)
    session.track(model=model, optimizer=optimizer, record=record)
    record.add(epoch=3, psnr=21.4)
    """

    def __init__(self, session: Session, name: str = "metrics.csv") -> None:
        self._session, self._path = session, session.output / name
        self._lines: list[dict[str, float]] = []

    def add(self, **figures: float) -> None:
        """One more line, written by rank 0, and reported to kgorch."""
        self._session.report(**figures)
        self._lines.append(figures)
        if self._session.rank == 0:
            aside = self._path.with_suffix(".new")
            with open(aside, "w", newline="", encoding="utf-8") as file:
                table = csv.DictWriter(file, list(dict.fromkeys(name for line in self._lines for name in line)))
                table.writeheader()
                table.writerows(self._lines)
            aside.replace(self._path)

    def epochs_since_best(self, name: str) -> int:
        """Lines after the first one with the highest `name`."""
        values = [line[name] for line in self._lines]
        return len(values) - 1 - values.index(max(values))

    def state_dict(self) -> dict[str, Any]:
        return {"lines": [dict(line) for line in self._lines]}

    def load_state_dict(self, kept: dict[str, Any]) -> None:
        self._lines = [dict(line) for line in kept["lines"]]
