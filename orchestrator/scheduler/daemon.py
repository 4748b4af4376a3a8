"""`kgorch daemon`: starts the runs that are due, and resumes what a kill or a reboot has interrupted.

The rows of the queue are the truth; APScheduler only wakes the loop at the next due instant. A session is a process of its own
(`kgorch resume RUN --claimed …`) and a session of the kernel's, too (setsid): when the daemon is killed it goes on, and the next
daemon finds it by its row and by the identity of its process. Several daemons may start runs of one database: each claim is one
UPDATE (db/queue.py). The first of them serves the socket.

A daemon that is stopped has the sessions that daemons have started saved, and leaves their runs due.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue as queues
import signal
import subprocess
import time
from collections.abc import Callable
from datetime import datetime
from pathlib import Path

from apscheduler.schedulers.background import BackgroundScheduler
from sqlalchemy import Engine
from sqlalchemy.exc import SQLAlchemyError

from kgorch.core import scheduling as core
from kgorch.db import active_sessions, fleet, queue, queue_claims, remote
from kgorch.db.active_sessions import ActiveSession
from kgorch.db.queue import Claimant, Entry
from kgorch.db.rows import ResumeInfo
from kgorch.errors import KgorchError, StateUnusable
from kgorch.scheduler import claimed_resume, daemon_api, daemon_status, run_selection
from kgorch.scheduler.daemon_api import Reply
from kgorch.scheduler.database_watch import DatabaseWatch
from kgorch.scheduler.fleet_membership import FleetMembership
from kgorch.scheduler.local_devices import LocalDevices
from kgorch.scheduler.remote_visits import RemoteVisits
from kgorch.scheduler.session_processes import has_supervisor, is_training
from kgorch.scheduler.session_starter import SYSTEMD_VARIABLES, SessionStarter
from kgorch.scheduler.session_stop import SessionStop
from kgorch.system import process_identity, sd_notify
from kgorch.system.clock import Clock, SystemClock
from kgorch.system.file_lock import FileLock
from kgorch.system.sockets.control_socket import Job
from kgorch.system.sockets.listener import raise_descriptor_limit

POLL_S = 0.5
"""Seconds between two checks for a commit of another process, a dead session and a due row."""

MAX_IDLE_S = 10.0
"""Seconds after which the queue is looked at though nothing has changed: claims expire, and GPUs become free, without a commit."""

REPAIR_INTERVAL_S = 300.0
"""Seconds between two repairs of timestamps that a wrong clock has written."""

SLICE_S = 0.3
"""Seconds of one kind of work in a turn, before signals, the watchdog and the socket get theirs. 10,000 due rows that cannot be
started take a quarter of an hour."""

STOP_TIMEOUT_S = 600.0

log = logging.getLogger("kgorch.daemon")
Start = Callable[[Entry, str], "subprocess.Popen[bytes]"]


class Daemon:
    """One daemon of one state folder.

    All of it runs on the thread that calls `run` or `turn`; the socket, signals and APScheduler post jobs to it.

    Args:
        at_once: most sessions at the same time; None for one a GPU, or one on a machine without GPUs.
        stop_timeout_s: how long sessions may take to save when the daemon is stopped.
        start: starts the process for a claimed row, given the token of the claim.
    """

    def __init__(
        self,
        engine: Engine,
        home: Path,
        *,
        at_once: int | None = None,
        stop_timeout_s: float = STOP_TIMEOUT_S,
        clock: Clock | None = None,
        start: Start | None = None,
    ) -> None:
        self._home, self._stop_timeout_s = home, stop_timeout_s
        self._clock, self._starter = clock or SystemClock(), SessionStarter()
        self._start = start or self._starter
        self._database = DatabaseWatch(engine, home)
        self._devices = LocalDevices(home, self._clock, at_once)
        self._fleet = FleetMembership(self._clock, home)
        self._remote_visits = RemoteVisits(self._clock, SYSTEMD_VARIABLES)
        self._jobs = queues.SimpleQueue[Job]()  # its put() is reentrant, so signal handlers may call it
        self._children: dict[int, subprocess.Popen[bytes]] = {}  # by the row that each was started for
        self._scheduler = BackgroundScheduler(timezone="UTC", daemon=True)
        self._identity = claimed_resume.own_identity(engine)
        self._live_sessions: list[ActiveSession] = []  # at the last look
        self._repair_at_s: float | None = None
        self._look_at_s = self._watchdog_at_s = float("-inf")
        self._next_due_at: datetime | None = None
        self._is_look_requested = self._has_work_left = self._is_stopping = False
        self._trouble = ""
        self._api: daemon_api.Api | None = None
        self._is_second = False

    def run(self) -> None:
        """Until it is stopped."""
        self._lock = FileLock(self._home / "daemon.lock")
        raise_descriptor_limit()
        self._listen()
        self._database.open()
        self._scheduler.start()
        handlers = {
            signal.SIGTERM: self._request_stop,
            signal.SIGINT: self._request_stop,
            signal.SIGHUP: self._reload,
            signal.SIGCHLD: lambda: None,  # ends the wait alone: a session that has ended is followed at once
        }
        former = {
            number: signal.signal(number, lambda *_, handler=handler: self._on_signal(handler))
            for number, handler in handlers.items()
        }
        try:
            log.info("pid %s starts the due runs of %s", os.getpid(), self._home)
            sd_notify.ready()
            while not self._is_stopping:
                self.turn()
            self._stop_sessions()
        finally:
            for number, handler in former.items():
                signal.signal(number, handler)
            self._scheduler.shutdown(wait=False)
            if self._api:
                self._api.close()
            self._lock.release()
            self._starter.rest()
        log.info("stopped")

    # The loop

    def turn(self) -> None:
        """Wait up to POLL_S for something to happen; look at the queue if there may be something to do."""
        self.run_jobs(0.0 if self._has_work_left else POLL_S)
        self._has_work_left = False
        self.feed_watchdog()
        if self._is_stopping:
            return
        if self._api:
            self._lock.refresh()
        try:
            if self._database.reopen_if_replaced():
                self._forget_rows()
            if self._may_have_work():
                self.tick()
                self._report_recovery()
        except (
            SQLAlchemyError,
            OSError,
            StateUnusable,
        ) as error:  # locked, full, read-only, gone: that may last for a while
            self._fleet.disconnect()
            self.report_trouble(error)
        except Exception:  # our own bug: the row of one run must not keep all others from being started
            log.exception("a look at the queue failed")

    def run_jobs(self, timeout_s: float) -> None:
        """Carry out what was posted, if anything is within that time; for SLICE_S, so that a crowd at the socket stalls no run."""
        until_s = time.monotonic() + timeout_s + SLICE_S
        while time.monotonic() < until_s:
            try:
                self._jobs.get(timeout=timeout_s)()
            except queues.Empty:
                return
            except Exception:  # our own bug: one request gets no answer, and the daemon goes on
                log.exception("a request could not be answered")
            timeout_s = 0.0

    def _on_signal(self, handler: Job) -> None:
        """Called in the signal handler, because a job would wait behind all that was posted before: `handler` only sets flags."""
        handler()
        self._jobs.put(lambda: None)  # ends the wait of `run_jobs`

    def _may_go_on(self, until_s: float) -> bool:
        """Whether a loop over rows may take the next one; else the next turn, which does not wait, continues with it."""
        self.feed_watchdog()
        if time.monotonic() < until_s and not self._is_stopping:
            return True
        self._is_look_requested = self._has_work_left = True
        return False

    def _may_have_work(self) -> bool:
        now_s = self._clock.now_s()
        has_ended = any(child.poll() is not None for child in self._children.values())
        has_ended = (
            has_ended
            or self._remote_visits.has_ended
            or not all(has_supervisor(session) for session in self._live_sessions)
        )
        is_due = self._next_due_at is not None and self._clock.utc() >= self._next_due_at
        is_idle = now_s - self._look_at_s >= MAX_IDLE_S
        return self._database.has_changed() or self._is_look_requested or has_ended or is_due or is_idle

    def tick(self) -> None:
        """Look at the queue: bring its rows and the processes that live together, SLICE_S for each kind of work."""
        self._look_at_s, self._is_look_requested = self._clock.now_s(), False
        now = fleet.server_now(self._engine) if fleet.settings(self._engine) else self._clock.utc()
        reachable = self._fleet.tick(self._engine)
        self._repair(now)
        self._release_claims(now)
        self._queue_orphans(now)
        until_s = time.monotonic() + SLICE_S
        while (
            entry := run_selection.claim_next(self._engine, self._devices, self._identity, now, reachable)
        ) is not None:
            self._resume(entry)
            if not self._may_go_on(until_s):
                break
        dues = queue.next_due_at(self._engine, now), self._remote_visits.tick(self._engine, now)
        self._next_due_at = min((due_at for due_at in dues if due_at), default=None)
        self._set_alarm()
        if not self._children and self._next_due_at is None:
            self._starter.rest()
        if self._is_second and self._api is None:  # until the first daemon has ended
            with contextlib.suppress(OSError, KgorchError):
                self._listen()

    def _repair(self, now: datetime) -> None:
        # Not an interval job of APScheduler: that reads the wall clock, and after it was set back would be late by as much, in
        # just the case that this is for. And `tick` is complete without a scheduler (benchmarks/quarter.py plays three months).
        if self._repair_at_s is None or self._look_at_s - self._repair_at_s >= REPAIR_INTERVAL_S:
            self._repair_at_s = self._look_at_s
            repair = queue.repair_future_timestamps, remote.repair_future_timestamps
            if count := sum(one(self._engine, now) for one in repair):
                log.warning("%s runs were put off by a clock that ran ahead; they are due now", count)

    def _release_claims(self, now: datetime) -> None:
        """Put back the rows whose claimant has died or hangs, or was of another boot."""
        until_s = time.monotonic() + SLICE_S
        for entry in queue_claims.claimed_entries(self._engine):
            row = entry.resume
            claimant = Claimant(
                row.claimant_pid or 0, row.claimant_started_ticks, row.claimant_boot_id, row.claimant_machine
            )
            is_ours = not fleet.is_elsewhere(self._engine, row.claimant_machine)
            child = self._children.get(row.id)
            if is_ours and child and child.poll() is not None and claimant.pid in (self._identity.pid, child.pid):
                error = f"its process ended with {child.returncode}: see {entry.folder}/supervisor.log"
                if claimed_resume.put_back(self._engine, row, claimant, error):
                    log.warning("%s: %s", entry.run, error, extra={"run": entry.run})
            elif self._is_claim_over(row, is_ours, now):
                error = "the process that claimed it died or its lease expired"
                # without a pause: a daemon that was killed, or a reboot, is not the run's fault
                if claimed_resume.put_back(self._engine, row, claimant, error, immediate=True):
                    log.warning("%s is due again: %s", entry.run, error, extra={"run": entry.run})
            else:
                continue
            if not self._may_go_on(until_s):
                break
        for row_id in [row_id for row_id, child in self._children.items() if child.poll() is not None]:
            del self._children[row_id]

    def _is_claim_over(self, row: ResumeInfo, is_ours: bool, now: datetime) -> bool:
        is_leased = row.lease_expires_at is None or row.lease_expires_at >= now
        if not is_ours:
            return self._fleet.is_dead(self._engine, is_leased=is_leased)
        # A fleet's lease may be shorter than a process takes to begin to renew it; whether it lives is seen here.
        hangs = row.lease_expires_at is not None and row.lease_expires_at < now - fleet.extra_lease(self._engine)
        process = row.claimant_pid or 0, row.claimant_started_ticks, row.claimant_boot_id
        return hangs or not process_identity.is_alive(*process)

    def _queue_orphans(self, now: datetime) -> None:
        """Queue the runs whose supervisor has died, due now: their resume adopts what still trains."""
        active = active_sessions.all_of(self._engine)
        self._live_sessions = [session for session in active if has_supervisor(session) and not session.is_elsewhere]
        until_s = time.monotonic() + SLICE_S
        for session in active:
            is_dead = not has_supervisor(session)
            if session.is_elsewhere:
                is_dead = self._fleet.is_dead(self._engine, is_leased=session.is_leased)
            if session.is_active and not session.is_waiting and is_dead:
                if active_sessions.queue_lost(self._engine, session, now):
                    log.info("%s has lost its supervisor", session.run, extra={"run": session.run})
                if not self._may_go_on(until_s):
                    break

    def _resume(self, entry: Entry) -> None:
        """Start the process for a row that this daemon has claimed, or put the row back."""
        failures = entry.resume.failed_starts
        # Training that lives is adopted however often its supervisors have failed.
        if failures >= core.TRIES and not is_training(self._engine, entry.resume.run_id):
            error = f"{failures} consecutive sessions ended without progress"
            claimed_resume.put_back(self._engine, entry.resume, self._identity, error)
            return
        self._fleet.note_try(self._engine, entry)
        try:
            child = self._start(entry, claimed_resume.token(entry.resume.id, self._identity))
        except OSError as error:
            claimed_resume.put_back(
                self._engine, entry.resume, self._identity, f"its process could not be started: {error}"
            )
            return
        self._children[entry.resume.id] = child
        log.info("%s is resumed by pid %s: %s", entry.run, child.pid, entry.resume.why, extra={"run": entry.run})

    @property
    def _engine(self) -> Engine:
        return self._database.engine

    def _forget_rows(self) -> None:
        """The database is another file: the children go on, but rows with the same ids are not theirs."""
        self._children = {-1 - number: child for number, child in enumerate(self._children.values())}
        self._is_look_requested = True
        log.warning("%s was replaced: the rows of the new file count from now on", self._engine.url.database)

    def _set_alarm(self) -> None:
        """Have APScheduler end the wait of the loop at the next due instant, so that no run is late by up to POLL_S.

        Where the wall clock is set and the alarm is late, `_may_have_work` notices the due row.
        """
        if self._next_due_at is None:
            return
        self._scheduler.add_job(
            self._jobs.put,
            "date",
            run_date=self._next_due_at,
            args=[self._request_look],
            id="next",
            replace_existing=True,
            misfire_grace_time=None,  # a late alarm is better than none
        )

    # Requests: signals and the socket

    def _request_stop(self) -> None:
        self._is_stopping = True

    def _request_look(self) -> None:
        self._is_look_requested = True

    def _reload(self) -> None:
        self._request_look()
        self._devices.forget()

    def _listen(self) -> None:
        """Serve the socket, unless another daemon does: then this one starts due runs all the same, and succeeds it."""
        if self._lock.acquire():
            self._api = daemon_api.Api(self._home, self._answer, post=self._jobs.put)
        elif not self._is_second:
            self._is_second = True
            log.info("another daemon answers on %s/%s; this one starts due runs, too", self._home, daemon_api.SOCKET)

    def _answer(self, question: str, reply: Reply) -> None:
        match question:
            case "ping":
                reply({"ok": True, "pid": os.getpid()})
            case "wake":
                self._request_look()
                reply({"ok": True})
            case "stop":
                self._request_stop()
                reply({"ok": True, "pid": os.getpid()})
            case "status":
                reply(daemon_status.describe(self._engine, self._devices, self._clock.utc(), self._trouble))
            case _:
                reply({"ok": False, "error": "expected ping, status, wake or stop"})

    # The end, and what systemd hears

    def _stop_sessions(self) -> None:
        self._remote_visits.stop()
        children = list(self._children.values())
        SessionStop(self, self._engine, self._clock, children, self._live_sessions).run(self._stop_timeout_s)

    def feed_watchdog(self) -> None:
        """Tell systemd that the loop works, twice in the interval that it asks for."""
        interval_s, now_s = sd_notify.watchdog_interval_s(), self._clock.now_s()
        if interval_s is not None and now_s - self._watchdog_at_s >= interval_s / 2:
            self._watchdog_at_s = now_s
            sd_notify.watchdog()

    def report_trouble(self, error: Exception) -> None:
        """Log that the database cannot be used, once for each cause: the loop tries again in each turn."""
        cause = str(getattr(error, "orig", None) or error)
        if cause != self._trouble:
            self._trouble = cause
            log.error("the queue cannot be read [KG602]; the daemon tries again: %s", cause)
            sd_notify.status(f"trouble: {cause}")

    def _report_recovery(self) -> None:
        if self._trouble:
            self._trouble = ""
            sd_notify.status("the queue can be read again")
            log.info("the queue can be read again")
