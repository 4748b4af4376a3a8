"""`kgorch daemon`: carries out what is due, goes on with what a kill or a reboot has cut off.

The rows of the queue are the truth; the scheduler only wakes the loop at the next due instant. A session is a process of its own
(`kgorch resume RUN --claimed …`), in a session of its own: when the daemon is killed sessions go on, and its successor finds
them by what they have written down and by who lives. Several daemons may take rows of one database: each claim is one UPDATE
(db/queue.py). The socket is the first one's.

Stopping the daemon has every session saved that a daemon has begun, and leaves it due.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue as queues
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from apscheduler.schedulers.background import BackgroundScheduler
from sqlalchemy import Engine
from sqlalchemy.exc import DBAPIError

from db import queue, sessions
from db.engine import files, open_url
from db.queue import Claimant, Entry, OpenSession, Seen
from db.records import ResumeInfo
from orchestrator.core import scheduling as core
from orchestrator.core.codes import Reason
from orchestrator.core.scheduling import Machine, Waiting
from orchestrator.errors import KgorchError, StateUnusable
from orchestrator.hardware import gpu_locks
from orchestrator.launch import launcher
from orchestrator.scheduler import claimed_resume, daemon_api
from orchestrator.scheduler.claimed_resume import BY_DAEMON
from orchestrator.scheduler.daemon_api import Answer, Reply
from orchestrator.system import process_identity, process_protection, sd_notify
from orchestrator.system.clock import Clock, SystemClock
from orchestrator.system.file_lock import FileLock
from orchestrator.system.sockets import control_socket
from orchestrator.system.sockets.listener import raise_descriptor_limit

LOOK_S = 0.5
"""How often the loop sees whether anybody has written into the database."""

ANYWAY_S = 10.0
"""How often it looks at all that may be, though nothing seems to have happened."""

DRIVER_AGAIN_S = 300.0
MEND_S = 300.0
"""How often it looks for entries that a wrong clock has made."""

LOOK_AT = 64
"""Due rows that are considered at once: with more, those after them would not be next anyway."""

BREATH_S = 0.3
"""How long the loop does one kind of work before it looks at signals, the watchdog and the socket again. A table of 10,000 due rows
that cannot begin takes a quarter of an hour to go through."""

STOP_TIMEOUT_S = 600.0
OURS = ("NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID", "LISTEN_FDS", "LISTEN_PID", "LISTEN_FDNAMES")
"""What systemd says to us alone: a session that tells it "ready" would speak for the daemon."""

log = logging.getLogger("kgorch.daemon")
Job = Callable[[], None]
Process = tuple[int | None, int | None]
Start = Callable[[Entry, str], "subprocess.Popen[bytes]"]


def start_session(entry: Entry, token: str) -> subprocess.Popen[bytes]:
    """A session for a claimed row; its words go into the run's folder. Raises OSError."""
    folder = Path(entry.folder)
    with open(folder / "supervisor.log", "ab") as file:
        return subprocess.Popen(
            [sys.executable, "-m", "orchestrator.cli", "resume", entry.run, "--claimed", token, "--progress", "none"],
            start_new_session=True,
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            env={name: value for name, value in os.environ.items() if name not in OURS}
            | process_protection.child_environment(),
        )


class Daemon:
    """One daemon over one state folder.

    Args:
        at_once: sessions beside one another; None for one a GPU, or one in all.
        stop_timeout_s: how long sessions may take to save when the daemon is stopped.
    """

    def __init__(
        self,
        engine: Engine,
        home: Path,
        *,
        at_once: int | None = None,
        stop_timeout_s: float = STOP_TIMEOUT_S,
        clock: Clock | None = None,
        start: Start = start_session,
    ) -> None:
        self._engine, self._home, self._at_once, self._stop_timeout_s = engine, home, at_once, stop_timeout_s
        self._clock, self._start = clock or SystemClock(), start
        self._jobs: queues.SimpleQueue[Job] = queues.SimpleQueue()
        self._children: dict[int, subprocess.Popen[bytes]] = {}  # by the row that each was started for
        self._scheduler = BackgroundScheduler(timezone="UTC", daemon=True)
        self._us = claimed_resume.us()
        self._supervised: list[OpenSession] = []  # at the last look
        self._gpus: list[gpu_locks.LockableGpu] = []
        self._driver_asked_s: float | None = None
        self._mended_s: float | None = None
        self._looked_s = self._fed_s = float("-inf")
        self._next_due_at: datetime | None = None
        self._is_poked = self._has_more = self._is_stopping = False
        self._version: Any = None
        self._files: tuple[tuple[int, int] | None, ...] = ()
        self._trouble = ""
        self._api: daemon_api.Api | None = None
        self._is_second = False

    def run(self) -> None:
        """Until it is stopped."""
        self._lock = FileLock(self._home / "daemon.lock")
        raise_descriptor_limit()
        self._listen()
        self._watch_database()
        self._scheduler.start()
        handlers = {signal.SIGTERM: self._stop, signal.SIGINT: self._stop, signal.SIGHUP: self._reread}
        before = {
            number: signal.signal(number, lambda *_, do=do: self._signalled(do)) for number, do in handlers.items()
        }
        try:
            log.info("pid %s takes what is due in %s", os.getpid(), self._home)
            sd_notify.ready()
            while not self._is_stopping:
                self.turn()
            self._stop_sessions()
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
            self._scheduler.shutdown(wait=False)
            if self._api:
                self._api.close()
            self._lock.release()
        log.info("stopped")

    def turn(self) -> None:
        """Wait for something to happen, for no longer than LOOK_S; look when there may be something to do."""
        self._do_jobs(0.0 if self._has_more else LOOK_S)
        self._has_more = False
        self._feed_watchdog()
        if self._is_stopping:
            return
        if self._api:
            self._lock.refresh()
        try:
            self._follow_the_database()
            if self._may_find_something():
                self.tick()
                self._all_is_well()
        except (DBAPIError, OSError, StateUnusable) as error:  # locked, full, read-only: it may be so for a while
            self._in_trouble(error)
        except Exception:  # our own bug: one run's row must not end what takes the others'
            log.exception("a look at the queue failed")

    def _do_jobs(self, timeout_s: float) -> None:
        """What the socket has asked for, if anything comes within that time; for a breath, then it is the queue's turn."""
        until_s = time.monotonic() + timeout_s + BREATH_S
        while time.monotonic() < until_s:
            try:
                self._jobs.get(timeout=timeout_s)()
            except queues.Empty:
                return
            except Exception:  # our own bug; who asked gets no answer, the runs get theirs
                log.exception("what was asked could not be answered")
            timeout_s = 0.0

    def _signalled(self, do: Job) -> None:
        """In the handler, and not behind all that was asked for before: each only sets a mark."""
        do()
        self._jobs.put(lambda: None)

    def _has_breath(self, until_s: float) -> bool:
        """Whether a loop over rows may go on; else the next turn goes on where it stopped, at once."""
        self._feed_watchdog()
        if time.monotonic() < until_s and not self._is_stopping:
            return True
        self._is_poked = self._has_more = True
        return False

    def tick(self) -> None:
        """Bring what is written down and what runs together: for a breath each, and on in the next turn where more is left."""
        now, self._looked_s, self._is_poked = self._clock.utc(), self._clock.now_s(), False
        if self._mended_s is None or self._looked_s - self._mended_s >= MEND_S:
            self._mended_s = self._looked_s
            if count := queue.mend_clock(self._engine, now):
                log.warning("%s resumes were queued by a clock that ran ahead; they are due now", count)
        self._release(now)
        self._take_up_what_was_lost(now)
        until_s = time.monotonic() + BREATH_S
        while (entry := self._next(now)) is not None:
            self._begin(entry)
            if not self._has_breath(until_s):
                break
        self._next_due_at = queue.next_due_at(self._engine, now)
        self._set_alarm(now)
        if self._is_second and self._api is None:
            with contextlib.suppress(OSError, KgorchError):
                self._listen()

    # What is looked at

    def _may_find_something(self) -> bool:
        now_s = self._clock.now_s()
        ended = any(child.poll() is not None for child in self._children.values())
        ended = ended or not all(self._is_live(one) for one in self._supervised)
        is_due = self._next_due_at is not None and self._clock.utc() >= self._next_due_at
        return self._has_changed() or self._is_poked or ended or is_due or now_s - self._looked_s >= ANYWAY_S

    def _has_changed(self) -> bool:
        """Whether anybody has written into the database since; True where that cannot be told."""
        if self._engine.dialect.name != "sqlite":
            return True
        try:
            cursor = self._watcher.cursor()
            cursor.execute("PRAGMA data_version")
            found: Any = cursor.fetchone()
            cursor.close()
        except Exception:
            return True
        before, self._version = self._version, found
        return bool(found != before)

    def _follow_the_database(self) -> None:
        """What a person has put in its place, or what was made anew there, is the truth from now on.

        Raises: FileNotFoundError while there is none; as open_url.
        """
        if self._engine.dialect.name != "sqlite" or not self._files or (found := files(self._engine)) == self._files:
            return
        if found[0] is None:
            raise FileNotFoundError(f"{self._engine.url.database} is gone; kgorch start PLAN makes it anew")
        self._watcher.close()
        self._engine.dispose()
        self._engine = open_url(self._engine.url.render_as_string(hide_password=False), self._home)
        self._watch_database()
        self._children = {-1 - number: child for number, child in enumerate(self._children.values())}  # not its rows'
        self._is_poked = True
        log.warning("%s is another file than before: its rows count from now on", self._engine.url.database)

    def _watch_database(self) -> None:
        """By a connection that stays open: so no log is taken away under us but by a person."""
        self._watcher = self._engine.raw_connection()
        self._has_changed()
        self._files = files(self._engine) if self._engine.dialect.name == "sqlite" else ()

    def _machine(self, live: list[OpenSession], pending: list[ResumeInfo]) -> Machine:
        """`pending`: claimed rows whose sessions are coming up, and hold no lock yet."""
        self._ask_driver()
        free, shared = gpu_locks.count_free_and_shared(self._home, self._gpus) if self._gpus else (0, 0)
        alone = [row for row in pending if not row.share]
        taken = sum(len(self._gpus) if row.ranks is None else row.ranks for row in alone)
        return Machine(
            gpus=len(self._gpus),
            free=max(free - taken, 0),
            shared=shared,
            at_once=self._at_once,
            running=sum(not one.share for one in live) + len(alone),
            sharing=sum(one.share for one in live) + len(pending) - len(alone),
        )

    def _ask_driver(self) -> None:
        now_s = self._clock.now_s()
        if self._driver_asked_s is None or now_s - self._driver_asked_s >= DRIVER_AGAIN_S:
            self._driver_asked_s, self._gpus = now_s, gpu_locks.visible_gpus()

    # What is done

    def _release(self, now: datetime) -> None:
        """Claims that lead to nothing any more: of the dead, of those who hang, of a boot that is over."""
        until_s = time.monotonic() + BREATH_S
        for entry in queue.claimed(self._engine):
            row = entry.resume
            claimant = Claimant(row.claimed_pid or 0, row.claimed_ticks, row.claimed_boot)
            child = self._children.get(row.id)
            if child and child.poll() is not None and claimant.pid in (self._us.pid, child.pid):
                ended = f"what was to resume it ended with {child.returncode}: see {entry.folder}/supervisor.log"
                if claimed_resume.put_back(self._engine, row, claimant, ended):
                    log.warning("%s: %s", entry.run, ended, extra={"run": entry.run})
            elif not process_identity.is_alive(*claimant) or (
                row.lease_until_at is not None and row.lease_until_at < now
            ):
                error = "who had claimed it is gone or hangs"
                if claimed_resume.put_back(self._engine, row, claimant, error, at_once=True):
                    log.warning("%s is due again: %s", entry.run, error, extra={"run": entry.run})
            else:
                continue
            if not self._has_breath(until_s):
                break
        for row_id in [row_id for row_id, child in self._children.items() if child.poll() is not None]:
            del self._children[row_id]

    def _take_up_what_was_lost(self, now: datetime) -> None:
        """Sessions that nobody supervises any more: gone on with at once, which takes over what still trains."""
        found = queue.open_sessions(self._engine)
        self._supervised = [one for one in found if self._is_live(one)]
        until_s = time.monotonic() + BREATH_S
        for one in found:
            if one.is_active and not one.waits and not self._is_live(one):
                queue.put(self._engine, one.run_id, reason=Reason.LOST, due_at=now)
                log.info("%s has lost its supervisor", one.run, extra={"run": one.run})
                if not self._has_breath(until_s):
                    break

    def _next(self, now: datetime) -> Entry | None:
        """The next that fits, claimed for us."""
        seen_session = queue.newest_session(self._engine)
        pending = [entry.resume for entry in queue.claimed(self._engine)]
        open_now = queue.open_sessions(self._engine)
        live = [one for one in open_now if self._is_live(one)]
        orphans = [one for one in open_now if one not in live and self._trains(one.run_id)]
        entry = next((entry for one in orphans if (entry := queue.entry_of(self._engine, one.run_id, now))), None)
        if entry is None:
            entry = self._chosen(now, self._machine([*live, *orphans], pending))
        if entry is None or not queue.claim(
            self._engine, entry.resume.id, self._us, by=BY_DAEMON, seen=Seen(len(pending), seen_session)
        ):
            return None
        return entry

    def _chosen(self, now: datetime, machine: Machine) -> Entry | None:
        share, alone = (core.has_room(machine, share=share) for share in (True, False))
        if not share and not alone:
            return None
        found = queue.due(self._engine, now, limit=LOOK_AT, only_sharing=not alone)
        due = {entry.resume.id: entry for entry in found if self._is_time(entry.resume, now)}
        chosen = core.choose([_waiting(entry.resume, now) for entry in due.values()], machine)
        return None if chosen is None else due[chosen]

    def _trains(self, run_id: str) -> bool:
        """Whether training has outlived its supervisor: it has its devices, and is taken over whatever else runs."""
        last = sessions.last(self._engine, run_id)
        attempt = sessions.last_attempt(self._engine, last.id) if last else None
        return attempt is not None and launcher.is_running(Path(attempt.folder))

    def _begin(self, entry: Entry) -> None:
        if entry.resume.tries >= core.TRIES and not self._trains(entry.resume.run_id):
            why = "as many sessions ended before they came a step further"
            claimed_resume.put_back(self._engine, entry.resume, self._us, why)
            return
        try:
            child = self._start(entry, claimed_resume.token(entry.resume.id, self._us))
        except OSError as error:
            claimed_resume.put_back(self._engine, entry.resume, self._us, f"it could not be started: {error}")
            return
        self._children[entry.resume.id] = child
        log.info("%s goes on as pid %s: %s", entry.run, child.pid, entry.resume.why, extra={"run": entry.run})

    def _is_time(self, row: ResumeInfo, now: datetime) -> bool:
        """One whose sessions end without a step, again and again, is begun ever more seldom."""
        if row.tries < 2 or row.last_error or row.due_at is None:  # after an error `due_at` says it already
            return True
        return now >= row.due_at + timedelta(seconds=core.back_off_s(row.tries - 1, 0.5))

    def _is_live(self, one: OpenSession) -> bool:
        return process_identity.is_alive(one.pid, one.ticks, one.boot)

    # The end

    def _stop(self) -> None:
        self._is_stopping = True

    def _stop_sessions(self) -> None:
        """Have all that daemons have begun saved, and wait for it."""
        sd_notify.stopping()
        until_s = self._clock.now_s() + self._stop_timeout_s
        asked: set[str] = set()
        known = {_process(one) for one in self._begun_by_daemons()}
        while True:
            ours, left_s = self._begun_by_daemons(known), until_s - self._clock.now_s()
            coming_up = [child for child in self._children.values() if child.poll() is None]
            if not ours and not coming_up:
                return
            if left_s <= 0:
                break
            sd_notify.status(f"saving {len(ours)} sessions")
            for one in ours:
                if one.run_id not in asked:
                    self._feed_watchdog()  # one that does not answer takes a second
                    if self._has_suspended(one, left_s - min(10.0, left_s / 4)):
                        asked.add(one.run_id)
                        log.info("%s is asked to save and end", one.run, extra={"run": one.run})
            self._feed_watchdog()
            self._do_jobs(0.1)
        self._kill(self._begun_by_daemons(known))

    def _has_suspended(self, one: OpenSession, within_s: float) -> bool:
        """Whether its supervisor has taken the request to save and end."""
        try:
            answer = control_socket.ask(Path(one.folder) / "control.sock", "suspend", within_s=within_s, timeout_s=1.0)
        except KgorchError as error:
            log.error("%s: %s", one.run, error.what, extra={"run": one.run})
            return False
        return answer is not None and answer.ok

    def _begun_by_daemons(self, known: set[Process] | None = None) -> list[OpenSession]:
        """Those that live; with `known` of those alone, and our own: what we have let go another daemon begins again."""
        try:
            found = queue.open_sessions(self._engine)
        except DBAPIError as error:
            self._in_trouble(error)
            found = self._supervised
        mine = {child.pid for child in self._children.values()}
        return [
            one
            for one in found
            if (one.pid in mine or (one.begun_by == BY_DAEMON and (known is None or _process(one) in known)))
            and self._is_live(one)
        ]

    def _kill(self, late: list[OpenSession]) -> None:
        for one in late:
            log.error("%s has not ended in time and is killed", one.run, extra={"run": one.run})
            with contextlib.suppress(ProcessLookupError):
                os.kill(one.pid or 0, signal.SIGKILL)
            with contextlib.suppress(DBAPIError):
                last = sessions.last(self._engine, one.run_id)
                attempt = sessions.last_attempt(self._engine, last.id) if last else None
                if attempt:
                    launcher.kill(Path(attempt.folder))
        for child in self._children.values():
            if child.poll() is None:
                child.kill()

    # Small hands

    def _listen(self) -> None:
        """The socket is the first daemon's, and the next one's when that has ended; another takes what is due all the same."""
        if self._lock.acquire():
            self._api = daemon_api.Api(self._home, self._hear, post=self._jobs.put)
        elif not self._is_second:
            self._is_second = True
            log.info("another daemon answers on %s/%s; this one takes what is due, too", self._home, daemon_api.SOCKET)

    def _hear(self, what: str, reply: Reply) -> None:
        match what:
            case "ping":
                reply({"ok": True, "pid": os.getpid()})
            case "wake":
                self._is_poked = True
                reply({"ok": True})
            case "stop":
                self._is_stopping = True
                reply({"ok": True, "pid": os.getpid()})
            case "status":
                reply(self._described())
            case _:
                reply({"ok": False, "error": "expected ping, status, wake or stop"})

    def _described(self) -> Answer:
        try:
            due, waiting, next_due_at = queue.counts(self._engine, self._clock.utc())
            live = [one.run for one in queue.open_sessions(self._engine) if self._is_live(one)]
        except DBAPIError as error:
            return {"ok": False, "error": str(getattr(error, "orig", error))}
        self._ask_driver()
        return {
            "ok": True,
            "pid": os.getpid(),
            "at_once": self._at_once or max(len(self._gpus), 1),
            "gpus": [device.visible for device in self._gpus],
            "running": sorted(live),
            "due": due,
            "waiting": waiting,
            "next_due_at": next_due_at.astimezone(UTC).isoformat() if next_due_at else None,
            "trouble": self._trouble or None,
        }

    def _reread(self) -> None:
        self._is_poked, self._driver_asked_s = True, None

    def _feed_watchdog(self) -> None:
        every_s, now_s = sd_notify.watchdog_interval_s(), self._clock.now_s()
        if every_s is not None and now_s - self._fed_s >= every_s / 2:
            self._fed_s = now_s
            sd_notify.watchdog()

    def _set_alarm(self, now: datetime) -> None:
        if self._next_due_at is None:
            return
        self._scheduler.add_job(
            self._jobs.put,
            "date",
            run_date=self._next_due_at,
            args=[lambda: None],
            id="next",
            replace_existing=True,
            misfire_grace_time=None,
        )

    def _in_trouble(self, error: Exception) -> None:
        cause = str(getattr(error, "orig", None) or error)
        if cause != self._trouble:
            self._trouble = cause
            log.error("the queue cannot be looked at, and is again later: %s", cause)
            sd_notify.status(f"trouble: {cause}")

    def _all_is_well(self) -> None:
        if self._trouble:
            self._trouble = ""
            sd_notify.status("the queue can be looked at again")
            log.info("the queue can be looked at again")


def _process(one: OpenSession) -> Process:
    return one.pid, one.ticks


def _waiting(row: ResumeInfo, now: datetime) -> Waiting:
    waits_s = (now - row.due_at).total_seconds() if row.due_at else 0.0
    return Waiting(row.id, row.ranks, row.share, waits_s)
