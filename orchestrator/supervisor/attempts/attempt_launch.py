"""Starts attempts beside the loop: finding a stage's state reads gigabytes, and each step may wait for a disk or the database."""

from __future__ import annotations

import functools
import math
import threading
from collections.abc import Callable

from kgorch.checkpoint.verifier import Verifier
from kgorch.core.codes import EventKind
from kgorch.core.session.events import RunFinished
from kgorch.db import checkpoints as checkpoint_rows
from kgorch.db import sessions
from kgorch.errors import UNWRITABLE, CheckpointUnreadable, KgorchError
from kgorch.hardware import devices
from kgorch.hardware.gpu_locks import GpuLocks
from kgorch.launch import attempts, launcher, rungs, standby
from kgorch.nodes.node_group import NodesMissing
from kgorch.plan import StageSection
from kgorch.protocol.launch_spec import NodePlace
from kgorch.services.data_cache import DataCache
from kgorch.snapshots.checkpoint_writer import clear_leftovers
from kgorch.supervisor.attempts.hang_monitor import HangMonitor
from kgorch.supervisor.attempts.memory_monitor import MemoryMonitor
from kgorch.supervisor.live_session import AttemptStarted, Input, LaunchFailed, LiveSession, NodesLost
from kgorch.supervisor.node_saves import NodeSaves
from kgorch.supervisor.recorder import DATABASE_OUTAGES, Journal

PERSIST_S = 60.0
"""Seconds that keepers of several nodes may take to write what a crashed attempt has left in memory."""

LAUNCH_TRIES = 5
"""A launch is tried again for a minute, unless it is known that it cannot succeed."""

FLUSH_S = 1.0
"""Seconds to wait for the journal: what it has yet to write decides which stage comes next, and on what settings."""


class AttemptLauncher:
    """Of one session.

    Args:
        saves: the thread of the verifier does the work, so that a launch finds verified what was saved before it; and the keepers.
        claim: the locks of the GPUs that the attempt gets.
        post: hands an input to the loop.
    """

    def __init__(
        self,
        live: LiveSession,
        journal: Journal,
        saves: tuple[Verifier, NodeSaves],
        claim: GpuLocks,
        post: Callable[[Input], None],
    ) -> None:
        self._live, self._journal, self._claim, self._post = live, journal, claim, post
        self._verifier, self._saves = saves
        self._memory = devices.GpuMemoryBaseline(claim.environ)
        self._starting = threading.Lock()
        self._is_over = False

    def request(self, data: DataCache, *monitors: HangMonitor | MemoryMonitor) -> None:
        """Have the next attempt started. AttemptStarted, LaunchFailed or RunFinished follows.

        Args:
            data: knows which data sets have a local copy.
            monitors: begin anew with the attempt.
        """
        recorded = frozenset(self._live.recorded)
        self._verifier.submit(lambda: self._launch(recorded, data, monitors))

    def end(self) -> None:
        """Start nothing from here on, and kill what was started."""
        with self._starting:
            self._is_over = True
        if self._live.processes:
            launcher.kill(self._live.processes)

    def _launch(
        self, recorded: frozenset[str], data: DataCache, monitors: tuple[HangMonitor | MemoryMonitor, ...]
    ) -> None:
        live = self._live
        if not self._journal.flush(FLUSH_S):
            self._post(LaunchFailed("the database cannot be written", math.inf))
            return
        try:
            stages = attempts.open_stages(live.engine, live.run, live.plan)
            if not stages:
                self._post(RunFinished())
                return
            self._free_devices()
            place = self._gather_nodes(stages[0])
            found = attempts.find_restore_point(live.engine, live.run, stages[0].name, self._verifier.skipped)
            if restart := rungs.last_restart(live.engine, live.run.id, stages[0].name):
                root = attempts.checkpoint_root(live.run, restart.stage)
                move = functools.partial(rungs.move_superseded, live.engine, live.run, restart.stage, root)
                self._verifier.note_restart(restart.stage, restart.at, move)
        except NodesMissing as error:
            self._post(NodesLost("; ".join((error.what, *error.facts))))
            return
        except Exception as error:
            self._post(LaunchFailed(str(error), _tries(error)))
            return
        try:
            self._start(stages[0], (found, place), recorded, data, monitors)
        except Exception as error:  # whatever it is: a session that waits for nothing would be worse
            session_id = live.row.id
            self._journal.write(lambda: sessions.delete_open_attempts(live.engine, session_id))
            why = f"an attempt could not be started: {type(error).__name__}: {error}"
            self._post(LaunchFailed(why, _tries(error)))

    def _gather_nodes(self, stage: StageSection) -> NodePlace | None:
        """The other nodes of the stage, with what their keepers hold on disk. Raises: NodesMissing, KgorchError, OSError."""
        live = self._live
        place = live.nodes.gather(stage, devices.rank_count(stage.ranks, self._claim.environ))
        if place is not None:
            self._saves.persist(live.left_s(PERSIST_S))
            # nobody writes now; keepers of several nodes leave this to us
            clear_leftovers(attempts.checkpoint_root(live.run, stage.name))
        return place

    def _free_devices(self) -> None:
        """Wait for what an attempt before this one may have left. Raises: OSError where its processes do not end."""
        processes = self._live.processes
        if processes and not launcher.kill(processes):  # helpers that it started may have outlived it
            raise OSError(f"processes of {processes} do not end")
        if holder := self._memory.wait_until_released():
            self._journal.note(EventKind.MEMORY_NOT_GONE, {"what": holder})

    def _start(
        self,
        stage: StageSection,
        beginning: tuple[attempts.RestorePoint, NodePlace | None],
        recorded: frozenset[str],
        data: DataCache,
        monitors: tuple[HangMonitor | MemoryMonitor, ...],
    ) -> None:
        live, (found, place) = self._live, beginning
        self._claim.check()
        gone = recorded - checkpoint_rows.verified_paths(live.engine, live.run.id)
        context = attempts.SessionContext(live.engine, live.run, live.plan, live.row, self._claim.environ)
        attempt, launch = attempts.prepare(context, stage, found, live.state, data, place)
        for monitor in monitors:
            monitor.begin(attempt)
        with self._starting:
            if self._is_over or not live.state.phase.is_launching:  # stopped meanwhile
                session_id = live.row.id
                self._journal.write(lambda: sessions.delete_open_attempts(live.engine, session_id))
                return
            live.processes = attempt.folder
            process = launcher.start(launch, self._claim)
            live.nodes.start(launch)
        standby.renew()
        self._post(AttemptStarted(attempt, process, found, gone))


def _tries(error: Exception) -> float:
    """How often a launch that ended with this error is tried: as long as the session lasts where database or disk is in trouble, as
    a training that runs goes on then, too."""
    if isinstance(error, DATABASE_OUTAGES) or (isinstance(error, OSError) and error.errno in UNWRITABLE):
        return math.inf
    return 1 if isinstance(error, KgorchError) and not isinstance(error, CheckpointUnreadable) else LAUNCH_TRIES
