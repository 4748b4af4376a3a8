"""What each tracker offers to the process that feeds it, and what it is opened with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from kgorch.db.rows import RunInfo
from kgorch.trackers.feed import Cursor, Feed, Scalar


class TrackerSettings(NamedTuple):
    """The plan's `[track]`, for one tracker; the values are those of plan/track.py."""

    project: str | None = None
    entity: str | None = None
    folder: str | None = None
    uri: str | None = None
    system: bool = True


class TrackedRun(NamedTuple):
    """The run that a tracker is opened for.

    Attributes:
        arguments: of its stages, by `STAGE.NAME`; secret ones are left out.
        state: folder that the tracker may keep files in.
        reference: by which the tracker knew the run before; empty at first.
    """

    info: RunInfo
    settings: TrackerSettings
    arguments: Mapping[str, Any]
    state: Path
    reference: str = ""

    @property
    def project(self) -> str:
        return self.settings.project or self.info.name


class Tracker(Protocol):
    """An open connection to a tracker. All methods raise what its library raises.

    Attributes:
        reference: by which the tracker knows the run; stored, and given back when it is opened again.
        url: where a user finds it; empty if there is no such place. It holds no secret.
    """

    reference: str
    url: str

    def bring_up(self, cursor: Cursor, scalars: Sequence[Scalar]) -> Cursor:
        """How far the tracker was really sent, asked once after it was opened.

        Args:
            cursor: how far it was, as far as is known here.
            scalars: all there is to send.
        """

    def send(self, feed: Feed, unsent: Sequence[Scalar]) -> None:
        """Send what is missing. Args: unsent: the scalars beyond what was sent; `feed` has all."""

    def close(self, phase: str) -> None:
        """The session is over. Args: phase: that it ended in."""
