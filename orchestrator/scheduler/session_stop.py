"""The end of the daemon: the sessions that daemons have started save and end, and those that take too long are killed."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from sqlalchemy import Engine
from sqlalchemy.exc import SQLAlchemyError

from kgorch.db import active_sessions
from kgorch.db.active_sessions import ActiveSession
from kgorch.errors import KgorchError
from kgorch.launch import launcher
from kgorch.scheduler.claimed_resume import BY_DAEMON
from kgorch.scheduler.session_processes import attempt_folder, has_supervisor
from kgorch.system import sd_notify
from kgorch.system.clock import Clock
from kgorch.system.sockets import control_socket

POLL_S = 0.1
ANSWER_S = 1.0
"""Seconds that a supervisor has to answer the request; the others wait for theirs meanwhile."""

KILL_RESERVE_S = 10.0
"""Seconds before the daemon's own limit at which a session has to be over, or a quarter of what is left where that is less."""

log = logging.getLogger("kgorch.daemon")
Process = tuple[int | None, int | None]
"""Pid and start time in clock ticks of a supervisor."""


class StoppingLoop(Protocol):
    """What the daemon's loop still does while it stops: requests are answered, systemd's watchdog is fed."""

    def run_jobs(self, timeout_s: float) -> None: ...
    def feed_watchdog(self) -> None: ...
    def report_trouble(self, error: Exception) -> None: ...


class SessionStop:
    """Has sessions save and end.

    Args:
        children: the processes that this daemon has started.
        recent: active sessions when the database was last read, for the case that it cannot be read now.
    """

    def __init__(
        self,
        loop: StoppingLoop,
        engine: Engine,
        clock: Clock,
        children: Sequence[subprocess.Popen[bytes]],
        recent: Sequence[ActiveSession],
    ) -> None:
        self._loop, self._engine, self._clock = loop, engine, clock
        self._children, self._recent = children, recent

    def run(self, timeout_s: float) -> None:
        """Ask every session of a daemon to save and end, wait until it has, and kill what has not after `timeout_s`."""
        sd_notify.stopping()
        until_s = self._clock.now_s() + timeout_s
        requests: set[str] = set()  # ids of runs
        # Only processes that live now, and our own: another daemon may resume what we have let go, and that is not ours to stop.
        processes = {_process(session) for session in self._sessions_of_daemons()}
        while True:
            sessions, left_s = self._sessions_of_daemons(processes), until_s - self._clock.now_s()
            # a child without a session is waited for, too: it may open one yet, which is asked then
            children = [child for child in self._children if child.poll() is None]
            if not sessions and not children:
                return
            if left_s <= 0:
                break
            sd_notify.status(f"saving {len(sessions)} sessions")
            for session in sessions:
                if session.run_id not in requests:
                    self._loop.feed_watchdog()  # a supervisor that does not answer takes ANSWER_S
                    if self._request_suspend(session, left_s - min(KILL_RESERVE_S, left_s / 4)):
                        requests.add(session.run_id)
                        log.info("%s is asked to save and end", session.run, extra={"run": session.run})
            self._loop.feed_watchdog()
            self._loop.run_jobs(POLL_S)
        self._kill(self._sessions_of_daemons(processes))

    def _request_suspend(self, session: ActiveSession, within_s: float) -> bool:
        """Whether its supervisor has accepted the request to save and end."""
        path = Path(session.folder) / "control.sock"
        try:
            answer = control_socket.ask(path, "suspend", within_s=within_s, timeout_s=ANSWER_S)
        except KgorchError as error:
            log.error("%s: %s", session.run, error.headline, extra={"run": session.run})
            return False
        return answer is not None and answer.ok

    def _sessions_of_daemons(self, processes: set[Process] | None = None) -> list[ActiveSession]:
        """Supervised sessions that this or another daemon has started.

        Args:
            processes: limits those of other daemons to these supervisors.
        """
        try:
            active: Sequence[ActiveSession] = active_sessions.all_of(self._engine)
        except SQLAlchemyError as error:  # sessions are saved all the same
            self._loop.report_trouble(error)
            active = self._recent
        pids = {child.pid for child in self._children}
        return [
            session
            for session in active
            if not session.is_elsewhere
            and (
                session.pid in pids
                or (session.started_by == BY_DAEMON and (processes is None or _process(session) in processes))
            )
            and has_supervisor(session)
        ]

    def _kill(self, late: Sequence[ActiveSession]) -> None:
        for session in late:
            log.error("%s has not ended in time and is killed", session.run, extra={"run": session.run})
            with contextlib.suppress(ProcessLookupError):
                os.kill(session.pid or 0, signal.SIGKILL)
            # the training outlives its supervisor, so it is killed besides
            with contextlib.suppress(SQLAlchemyError):
                if folder := attempt_folder(self._engine, session.run_id):
                    launcher.kill(folder)
        for child in self._children:
            if child.poll() is None:
                child.kill()


def _process(session: ActiveSession) -> Process:
    return session.pid, session.ticks
