"""Carries a run from session to session at a place: one visit does what is due, and commits each step before and after its act.

    row (what is about to be done) ─▶ act at the place ─▶ row (the answer)

A process that is killed in between leaves a row that the next visit begins with: a push that may have been sent is searched for,
everything else is asked again. The decisions are in core/remote/session_states.py. A visit waits for the place, so the daemon has a
process of its own make it. A lock keeps two processes from visiting one run.
"""

from __future__ import annotations

import random
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, TypeVar

from sqlalchemy import Engine

from kgorch.admission import remote_sessions
from kgorch.core.codes import REMOTE_OPEN, EventKind, RemoteState, RunState
from kgorch.core.remote import session_notes, session_plan, session_states
from kgorch.core.remote.place_values import PlaceError, PlaceQuota, Pushed, SessionOrder, Trouble
from kgorch.core.remote.record_values import RecordOutcome, SessionRecord
from kgorch.core.remote.session_states import Moment, Progress, RemoteSession
from kgorch.core.text import in_one_line
from kgorch.db import remote, sessions
from kgorch.db.rows import RemoteSessionInfo, RunInfo
from kgorch.errors import KgorchError
from kgorch.remote import account_hours, session_record
from kgorch.remote.bundle import Bundle
from kgorch.remote.place import RECORD_NAME, Place
from kgorch.remote.run_settings import RunSettings
from kgorch.remote.session_rows import columns_of, session_of
from kgorch.remote.wheels import DownloadFailed
from kgorch.system.file_lock import FileLock

Answer = TypeVar("Answer")
MAX_WHY = 1000
"""Characters of a place's message that are kept."""


@dataclass(frozen=True, slots=True)
class Tools:
    """What the driver uses beside the place.

    Attributes:
        build: makes the bundle of the run, or finds it unchanged. Raises: KgorchError, OSError.
        render: the script that a session runs.
        notify: passes a text to the user's targets.
        now, chance: the clock; uniform in 0 to 1.
    """

    build: Callable[[], Bundle]
    render: Callable[[SessionOrder], str]
    notify: Callable[[str, RunState | None], None] = lambda text, state: None
    now: Callable[[], datetime] = lambda: datetime.now(UTC)
    chance: Callable[[], float] = random.random


@contextmanager
def exclusive(run: RunInfo) -> Iterator[bool]:
    """Whether no other process visits the run; none will while the block runs."""
    lock = FileLock(Path(run.folder) / "remote.lock")
    is_ours = lock.acquire()
    try:
        yield is_ours
    finally:
        if is_ours:
            lock.release()


def new_columns(run: RunInfo, settings: RunSettings, session: RemoteSession) -> dict[str, Any]:
    """The columns of a session that is planned, with its name and a new nonce."""
    return columns_of(session) | {
        "place": settings.place,
        "name": session_plan.session_name(run.name, run.id, session.number),
        "nonce": secrets.token_hex(16),
    }


class Driver:
    """Drives one run; the caller is within `exclusive`."""

    def __init__(self, engine: Engine, run: RunInfo, settings: RunSettings, place: Place, tools: Tools) -> None:
        self._engine, self._run, self._settings, self._place, self._tools = engine, run, settings, place, tools
        self._requests = 0
        self._row: RemoteSessionInfo
        self._session: RemoteSession

    def visit(self) -> RemoteSessionInfo | None:
        """Do what is due, up to the next wait.

        Several requests may follow each other, for the next session is not to wait; the next visit is later by as many polls.

        Returns: the newest session; None where the run has none.
        """
        self._requests = 0
        steps = {
            RemoteState.PLANNED: self._plan,
            RemoteState.BUNDLING: self._bundle_and_push,
            RemoteState.PUSHING: lambda: self._save(session_states.in_doubt(self._session, self._moment())),
            RemoteState.ASKING: self._search,
            RemoteState.QUEUED: self._look,
            RemoteState.RUNNING: self._look,
            RemoteState.ENDED: self._collect,
        }
        while (row := remote.newest(self._engine, self._run.id)) and row.state in steps:
            self._row, self._session = row, session_of(row)
            if row.due_at > self._tools.now():
                break
            try:
                steps[row.state]()
            except PlaceError as error:
                cleaned = PlaceError(error.trouble, in_one_line(error.message)[:MAX_WHY], error.retry_after_s)
                self._end_or_save(session_states.after_trouble(self._session, cleaned, self._moment()), None)
        requests = self._requests + (self._settings.profile.login_requests if self._requests else 0)
        if row and row.state in steps and requests > 1:
            rested_at = self._tools.now() + timedelta(seconds=requests * self._settings.poll_s)
            if row.due_at < rested_at:
                row = remote.save(self._engine, row.id, {"due_at": rested_at})
        return row

    def _ask(self, call: Callable[[], Answer]) -> Answer:
        self._requests += 1
        return call()

    def _ask_of_session(self, call: Callable[[], Answer]) -> Answer:
        """Of one that was pushed. Places answer for another account's as for one that is not there."""
        try:
            return self._ask(call)
        except PlaceError as error:
            if error.trouble is Trouble.ABSENT:
                self._require_account(self._row.account)
            raise

    def _require_account(self, expected: str) -> str:
        """Returns: whose login it is. Raises: PlaceError, LOGIN where it is not the expected one's; empty for any."""
        account = self._ask(self._place.account).name
        if expected not in ("", account):
            text = f"logged in as {account!r}; the sessions of this run belong to {expected!r}"
            raise PlaceError(Trouble.LOGIN, text)
        return account

    def _moment(self) -> Moment:
        return Moment(self._tools.now(), self._tools.chance(), self._settings.poll_s)

    def _save(self, session: RemoteSession, **columns: Any) -> None:
        """Write the session, then the notes of the change."""
        before = self._session
        self._row = remote.save(self._engine, self._row.id, columns_of(session) | columns)
        self._session = session
        self._note(before, session)

    # One method for each state

    def _plan(self) -> None:
        """Whose account it is, and what it has left."""
        account = self._require_account(remote.account_of_run(self._engine, self._run.id))
        quota = self._ask(self._place.quota) if self._settings.has_accelerator else None
        history = remote.of_run(self._engine, self._run.id)
        if quota:
            account_hours.record(self._engine, self._settings.place, quota, history)
        factor = account_hours.factor(history, self._settings.accelerator)
        wanted_s = self._settings.session_s
        planned = session_plan.after_quota(self._session, quota, wanted_s, factor, self._moment())
        self._save(planned, account=account, quota_used_s=_used_s(quota))

    def _bundle_and_push(self) -> None:
        try:
            bundle = self._tools.build()
        except DownloadFailed as error:  # the index of the wheels does not answer: no definite no
            raise PlaceError(Trouble.UNANSWERED, str(error)) from None
        except (KgorchError, OSError) as error:
            raise PlaceError(Trouble.REFUSED, f"the bundle cannot be made: {error}") from None
        key = (self._settings.place, self._row.account, bundle.name)
        known = remote.bundle(self._engine, *key)
        if known is None or known.ready_at is None:
            reference = self._ask(lambda: self._place.store_bundle(bundle.folder, bundle.name))
            is_ready = self._ask(lambda: self._place.is_bundle_ready(reference))
            remote.save_bundle(self._engine, key, reference, bundle.bytes, is_ready=is_ready)
            if not is_ready:
                tries, moment = self._session.tries + 1, self._moment()
                why = "the place has not finished storing the bundle"
                self._save(replace(self._session, tries=tries, due_at=moment.back_off(tries), why=why))
                return
        else:
            reference = known.reference
        self._push(reference)

    def _push(self, bundle: str) -> None:
        order = self._order(bundle)
        script = self._tools.render(order)
        pushing = session_states.begin_push(self._session, self._moment())
        if not remote.save_unless_last(self._engine, self._row.id, columns_of(pushing) | {"bundle": bundle}):
            self._end_or_save(session_states.stop(self._session, self._moment()), None)
            return
        self._session = pushing
        pushed = self._ask(lambda: self._place.push(order, script))
        self._save_push(session_states.after_push(self._session, pushed, self._moment()), pushed)

    def _search(self) -> None:
        order = self._order(self._row.bundle)
        pushed = self._ask_of_session(lambda: self._place.find_push(order))
        if pushed is None:
            self._require_account(self._row.account)
            self._end_or_save(session_states.after_search(self._session, None, self._moment()), None)
        else:
            self._save_push(session_states.after_search(self._session, pushed, self._moment()), pushed)

    def _save_push(self, session: RemoteSession, pushed: Pushed) -> None:
        self._save(session, reference=pushed.reference, url=pushed.url)

    def _look(self) -> None:
        sighting = self._ask_of_session(lambda: self._place.look(self._row.name))
        sighting = replace(sighting, message=in_one_line(sighting.message)[:MAX_WHY])
        self._save(session_states.after_look(self._session, sighting, self._moment()))

    def _collect(self) -> None:
        folder = Path(self._run.folder) / "remote" / f"{self._row.number:03d}"
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._ask_of_session(lambda: self._place.collect(self._row.name, folder, (RECORD_NAME,)))
        record, why = self._own_record(folder / RECORD_NAME)
        reached = session_states.NO_PROGRESS
        if record and record.stage in self._settings.stages and record.step >= 0:
            reached = Progress(self._settings.stages.index(record.stage), record.step)
        judged = session_states.after_collect(self._session, record, reached, why, self._moment())
        self._end_or_save(judged, record)

    # The order, the record, the end

    def _order(self, bundle: str) -> SessionOrder:
        """The same for the same session, however often it is pushed."""
        row, settings, run = self._row, self._settings, self._run
        source = session_plan.session_name(run.name, run.id, row.source) if row.source else ""
        return SessionOrder(
            name=row.name,
            nonce=row.nonce,
            run=run.name,
            run_id=run.id,
            number=row.number,
            bundle=bundle,
            source=source,
            expected_step=row.expected_step,
            session_s=row.session_s,
            timeout_s=row.timeout_s,
            accelerator=settings.accelerator,
            internet=settings.internet,
            datasets=settings.datasets,
            competitions=settings.competitions,
        )

    def _own_record(self, path: Path) -> tuple[SessionRecord | None, str]:
        """The record that was fetched, if it is this session's; else why not."""
        try:
            record = session_record.read(path)
        except FileNotFoundError:
            return None, "it left no record: it was killed, or its output was not kept"
        except (ValueError, OSError) as error:
            return None, f"its record cannot be read: {in_one_line(str(error))[:MAX_WHY]}"
        if (record.nonce, record.run_id, record.number) != (self._row.nonce, self._run.id, self._row.number):
            return None, "the record in its output is another session's"
        return replace(record, message=in_one_line(record.message)[:MAX_WHY]), ""

    def _end_or_save(self, session: RemoteSession, record: SessionRecord | None) -> None:
        if session.is_open:
            self._save(session)
            return
        before, moment = self._session, self._moment()
        history = [session_of(row) for row in remote.of_run(self._engine, self._run.id)]
        history = [session if item.number == session.number else item for item in history]
        following = session_plan.next_session(history, moment, session_s=self._settings.session_s)
        columns = columns_of(session)
        if record:
            columns |= {"stage": record.stage, "record": asdict(record)}
        if session.outcome is RecordOutcome.NO_BUNDLE:
            remote.forget_bundle(self._engine, self._settings.place, self._row.bundle)
        next_columns = new_columns(self._run, self._settings, following) if following else None
        self._row = remote.close(self._engine, self._row.id, columns, next_columns, _run_columns(session, moment.now))
        self._session = session
        if self._row.state != session.state:  # it was closed meanwhile: another run has taken the place of this one
            return
        self._note(before, session)
        self._note_accelerator(record)
        if session.state in (RemoteState.COLLECTED, RemoteState.DONE):
            self._delete_old()

    def _delete_old(self) -> None:
        """Remove what no session goes on from any more; one that cannot be removed now is tried after the next session."""
        rows = [row for row in remote.of_run(self._engine, self._run.id) if row.state not in REMOTE_OPEN]
        good = [row.number for row in remote_sessions.sources(rows)]
        oldest = min(good[-self._settings.keep :])
        for row in rows:
            if row.number < oldest and row.pushed_at and not row.deleted_at:
                try:
                    self._ask(lambda name=row.name: self._place.delete(name))  # type: ignore[misc]
                except PlaceError:
                    return
                remote.save(self._engine, row.id, {"deleted_at": self._tools.now()})

    # What the user is told

    def _note(self, before: RemoteSession, after: RemoteSession) -> None:
        for note in session_notes.notes(before, after, self._row.name):
            sessions.add_event(self._engine, self._run.id, note.kind, note.facts)
            if note.notice:
                self._tools.notify(note.notice, None)
        if after.state is RemoteState.DONE:
            self._tools.notify(f"the run is finished, at {self._settings.place}", RunState.FINISHED)
        elif after.state is RemoteState.FAILED:
            self._tools.notify(after.why, RunState.FAILED)

    def _note_accelerator(self, record: SessionRecord | None) -> None:
        if record is None or record.outcome.is_unprepared:
            return
        if text := session_notes.replaced_accelerator(self._settings.accelerator, record.gpus):
            facts = {"number": self._row.number, "name": self._row.name, "why": text}
            sessions.add_event(self._engine, self._run.id, EventKind.REMOTE_GPU_REPLACED, facts)
            self._tools.notify(f"session {self._row.number}: {text}", None)


def _used_s(quota: PlaceQuota | None) -> float | None:
    return quota.used_s if quota else None


def _run_columns(session: RemoteSession, now: datetime) -> dict[str, Any] | None:
    """What of the run changes with the end of a session."""
    if session.state is RemoteState.DONE:
        return {"state": RunState.FINISHED, "why": "", "finished_at": now}
    if session.state is RemoteState.FAILED:
        return {"state": RunState.FAILED, "why": session.why}
    return None
