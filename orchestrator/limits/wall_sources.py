"""The walls of a session as they are now: the fixed one, and those of the sources that can change."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping, Sequence

from sqlalchemy import Engine

from kgorch.core.codes import Note
from kgorch.core.limits.wall import Wall, has_moved, nearest
from kgorch.core.session.events import WallMoved
from kgorch.db.rows import SessionInfo
from kgorch.limits import spot_notice
from kgorch.limits.quota_ledger import Ledger
from kgorch.limits.slurm_limit import JobEnd
from kgorch.limits.source import Source
from kgorch.plan import Plan
from kgorch.platforms.profile import Profile
from kgorch.system.clock import Clock


class Walls:
    """The walls of one session.

    Attributes:
        fixed: the nearest of those that do not change; None without any.
        sources: of those that can change.
    """

    def __init__(self, fixed: Wall | None = None, sources: Sequence[Source] = ()) -> None:
        self.fixed, self.sources = fixed, tuple(sources)
        self._guard = threading.Lock()

    def nearest(self, now_s: float) -> Wall | None:
        return nearest([self.fixed, *(source.wall(now_s) for source in self.sources)])

    @property
    def ledger(self) -> Ledger | None:
        """The quota's ledger; None where no quota is counted."""
        return next((source for source in self.sources if isinstance(source, Ledger)), None)

    def watch(self, wall: Wall | None, clock: Clock, note: Note, post: Callable[[WallMoved], None]) -> None:
        """From here on post WallMoved whenever the nearest wall is another one, from the sources' threads.

        Args:
            wall: the nearest one that the session knows.
        """
        newest = wall

        def compare() -> None:
            nonlocal newest
            with self._guard:  # two sources may report at once; the events must come in the order of the walls
                now = self.nearest(clock.now_s())
                if has_moved(newest, now):
                    newest = now
                    post(WallMoved(now))

        for source in self.sources:
            source.news.deliver(note, compare)

    def stop(self) -> None:
        for source in self.sources:
            source.stop()


def moving_walls(
    engine: Engine, plan: Plan, profile: Profile, environ: Mapping[str, str], last: SessionInfo | None = None
) -> list[Source]:
    """The sources of a session's walls, at work already.

    Args:
        environ: of the session's processes, in which its GPUs are the visible ones.
        last: the session to adopt; None for one that is about to be opened.
    """
    ledger = Ledger.adopt(engine, plan, profile, last, environ) if last else Ledger.open(engine, plan, profile, environ)
    sources: list[Source] = []
    if ledger:
        ledger.look()  # the session is opened with its nearest wall, so the quota's must be known by then
        sources.append(ledger)
    if profile.notice == "slurm" and "SLURM_JOB_ID" in os.environ:
        sources.append(JobEnd())
    elif profile.notice in spot_notice.PROTOCOLS and profile.metadata:
        sources.append(spot_notice.SpotNoticeSource(profile.notice, profile.metadata))
    return sources
