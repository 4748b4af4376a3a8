"""The driver over real rows and real local sessions, whose script is a stand-in (tests/driven.py)."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta

import pytest
from driven import Driven
from sources import Told
from sqlalchemy.exc import IntegrityError

from kgorch.admission import remote_sessions
from kgorch.admission.requests import Consent, LocalState
from kgorch.core.codes import EventKind, RemoteState, RemoteWait, RunState
from kgorch.core.remote.place_values import Account, PlaceError, PlaceQuota, RemoteStatus, Sighting, Trouble
from kgorch.core.remote.session_plan import next_session
from kgorch.core.remote.session_states import Moment
from kgorch.db import charges, remote, runs, sessions
from kgorch.db.engine import open_database
from kgorch.errors import KgorchError, NotFound
from kgorch.remote import fetch
from kgorch.remote.driver import new_columns
from kgorch.remote.place import RECORD_NAME
from kgorch.remote.places.local.place import LocalPlace
from kgorch.remote.remote_run import RemoteRun
from kgorch.remote.session_rows import session_of
from kgorch.report import remote_view


@pytest.fixture
def driven(tmp_path):
    made = Driven(tmp_path)
    made.begin()
    return made


class Around:
    """The local place, but for what a test answers in its stead."""

    def __init__(self, place, **answers):
        self._place, self._answers = place, answers

    def __getattr__(self, name):
        return self._answers.get(name) or getattr(self._place, name)


def states(rows) -> list[tuple[str, int]]:
    return [(str(row.state), row.reached_step) for row in rows]


def events(driven, kind) -> list[dict]:
    engine = open_database(driven.home)
    try:
        return sessions.facts_of_kind(engine, "0123456789ab", kind)
    finally:
        engine.dispose()


def test_a_run_is_carried_to_its_end_and_only_what_is_needed_stays_at_the_place(driven):
    rows = driven.carry()
    assert states(rows) == [("collected", 9), ("collected", 19), ("done", 29)]
    assert [(row.source, row.expected_step) for row in rows] == [(0, -1), (1, 9), (2, 19)]
    assert [bool(row.deleted_at) for row in rows] == [True, False, False], "keep is two"
    engine = open_database(driven.home)
    assert runs.newest(engine, "ink").state == RunState.FINISHED
    assert len(events(driven, EventKind.REMOTE_PUSHED)) == 3 == len(events(driven, EventKind.REMOTE_ENDED))
    assert driven.told == ["the run is finished, at local"]


def test_a_session_after_a_lost_one_goes_on_from_the_last_good_one(driven):
    driven.outcomes = {2: ("error", 1)}  # the place attaches no output of it, although it has saved
    rows = driven.carry()
    assert states(rows) == [("collected", 9), ("lost", 19), ("collected", 19), ("done", 29)]
    assert [row.source for row in rows] == [0, 1, 1, 3]


def test_a_training_that_fails_loses_none_of_the_steps_that_its_session_has_verified(driven):
    driven.outcomes = {2: ("failed", 0)}
    assert states(driven.carry()) == [("collected", 9), ("failed", 19)]
    engine = open_database(driven.home)
    run = driven.run(engine)
    assert remote_sessions.remote_best(engine, run).number == 2
    assert remote_view.of_run(engine, run)["checkpoint"] == {"stage": "train", "step": 19, "session": 2}
    history = [session_of(row) for row in driven.rows()]
    again = next_session(history, Moment(datetime.now(UTC)), session_s=60, anew=True)
    runs.set_state(engine, run.id, RunState.ACTIVE)
    remote.plan(engine, run.id, new_columns(run, driven.settings, again))
    rows = driven.carry()
    assert states(rows)[2:] == [("done", 29)] and rows[2].source == 2
    assert [bool(row.deleted_at) for row in rows] == [True, False, False], "keep is two"


def test_sessions_without_a_record_end_the_run_after_three(driven):
    driven.outcomes = dict.fromkeys(range(1, 9), ("none", 1))
    rows = driven.carry()
    assert states(rows) == [("lost", -1), ("lost", -1), ("failed", -1)]
    engine = open_database(driven.home)
    run = runs.newest(engine, "ink")
    assert run.state == RunState.FAILED and "left no record" in run.why


def test_a_record_of_another_nonce_is_none(driven):
    def forge(place):
        def collect(name, folder, patterns):
            files = place.collect(name, folder, patterns)
            record = json.loads(files[0].read_text())
            files[0].write_text(json.dumps(record | {"nonce": "ab" * 16}))
            return files

        return Around(place, collect=collect)

    driven.wrap, driven.poll_s = forge, 0.002
    rows = driven.carry()
    assert rows[-1].state == RemoteState.FAILED and "another session" in rows[-1].why


def test_a_listing_that_lags_behind_the_end_of_a_session_loses_no_state(driven):
    looks: list[str] = []

    def lag(place):
        def collect(name, folder, patterns):
            looks.append(name)
            return place.collect(name, folder, patterns) if looks.count(name) > 4 else []

        return Around(place, collect=collect)

    driven.wrap = lag
    assert states(driven.carry()) == [("collected", 9), ("collected", 19), ("done", 29)]


def test_an_answer_that_is_lost_leads_to_no_second_push(driven):
    def lose(place):
        def push(order, script):
            place.push(order, script)
            raise PlaceError(Trouble.UNANSWERED, "the connection was cut")

        return Around(place, push=push)

    driven.wrap = lose
    rows = driven.carry()
    assert states(rows) == [("collected", 9), ("collected", 19), ("done", 29)]
    assert [line["number"] for line in driven.diary_lines() if line["what"] == "begin"] == [1, 2, 3]


def test_another_account_than_the_first_sessions_waits_for_a_login(driven):
    driven.poll_s = 60.0
    row = driven.visit()
    engine = open_database(driven.home)
    planned = {"state": RemoteState.PLANNED, "due_at": row.created_at}
    remote.save(engine, row.id, planned)
    driven.wrap = lambda place: Around(place, account=lambda: Account("somebody", "token"))
    row = driven.visit()
    assert (row.state, row.wait) == (RemoteState.PLANNED, RemoteWait.LOGIN) and "'somebody'" in row.why
    assert [text for text in driven.told if "waits for a person" in text]
    remote.save(engine, row.id, {"due_at": row.created_at})
    driven.visit()
    assert len(driven.told) == 1, "told once"


@pytest.mark.parametrize("state", [RemoteState.ASKING, RemoteState.QUEUED, RemoteState.RUNNING, RemoteState.ENDED])
def test_a_session_that_another_account_does_not_see_waits_for_a_login(driven, state):
    driven.poll_s = 60.0
    row = driven.visit()
    engine = open_database(driven.home)

    def absent(*args):
        raise PlaceError(Trouble.ABSENT, "HTTP 403")

    def visit(account):
        answers = {"look": absent, "collect": absent, "find_push": lambda order: None}
        driven.wrap = lambda place: Around(place, account=account, **answers)
        remote.save(engine, row.id, {"state": state, "due_at": row.created_at})
        return driven.visit()

    seen = visit(lambda: Account("somebody", "token"))
    assert (seen.state, seen.wait, seen.absences) == (state, RemoteWait.LOGIN, 0) and "'somebody'" in seen.why
    assert len([text for text in driven.told if "waits for a person" in text]) == 1
    assert visit(absent).wait != RemoteWait.LOGIN, "whose login it is, is not known"
    assert len(driven.rows()) == 1 or state == RemoteState.ENDED


def test_a_session_waits_until_the_account_has_hours_which_the_ledger_shows(driven):
    driven.accelerator, driven.poll_s = "NvidiaTeslaT4", 60.0
    driven.wrap = lambda place: Around(place, quota=lambda: PlaceQuota(30 * 3600, 0, 30 * 3600, ""))
    row = driven.visit()
    assert (row.state, row.wait) == (RemoteState.PLANNED, RemoteWait.QUOTA)
    engine = open_database(driven.home)
    assert charges.used_s(engine, "local", datetime.now(UTC) - timedelta(hours=1)) == pytest.approx(30 * 3600)
    remote.save(engine, row.id, {"due_at": datetime.now(UTC)})
    driven.wrap = lambda place: Around(place, quota=lambda: PlaceQuota(30 * 3600 - 100, 0, 30 * 3600, ""))
    assert driven.visit().wait == RemoteWait.QUOTA, "100 s at a cost of two are not the minute of this plan"
    remote.save(engine, row.id, {"due_at": datetime.now(UTC)})
    driven.wrap = lambda place: Around(place, quota=lambda: PlaceQuota(0, 0, 30 * 3600, ""))
    assert driven.visit().state == RemoteState.QUEUED


def test_after_a_stop_nothing_is_pushed_any_more(driven):
    engine = open_database(driven.home)
    remote.mark_last(engine, "0123456789ab")
    assert driven.carry()[-1].state == RemoteState.STOPPED
    assert not driven.diary_lines()


def test_a_stop_in_the_midst_of_a_session_lets_it_end_and_none_follow(driven):
    driven.poll_s = 60.0
    driven.visit()
    driven.poll_s = 0.02
    engine = open_database(driven.home)
    remote.mark_last(engine, "0123456789ab")
    remote.save(engine, driven.rows()[0].id, {"due_at": datetime.now(UTC)})
    assert states(driven.carry()) == [("collected", 9)]


def test_a_run_cannot_have_two_open_sessions(driven):
    engine = open_database(driven.home)
    [row] = driven.rows()
    second = session_of(row)
    with pytest.raises(IntegrityError):
        columns = new_columns(driven.run(engine), driven.settings, second) | {"number": 2, "name": "kgorch-other-002"}
        remote.plan(engine, "0123456789ab", columns)


@pytest.mark.parametrize("login", [0, 1])
def test_a_place_that_is_asked_often_in_one_visit_is_left_alone_for_as_many_polls(driven, login):
    driven.poll_s, driven.login_requests = 60.0, login
    row = driven.visit()  # account, bundle, whether it is ready, push
    assert row.state == RemoteState.QUEUED
    left_s = (row.due_at - datetime.now(UTC)).total_seconds()
    assert (3.9 + login) * 60 < left_s <= (4 + login) * 60
    engine = open_database(driven.home)
    remote.save(engine, row.id, {"due_at": datetime.now(UTC)})
    engine.dispose()
    driven.wrap = lambda place: Around(place, look=lambda name: Sighting(RemoteStatus.RUNNING, "running"))
    left_s = (driven.visit().due_at - datetime.now(UTC)).total_seconds()
    assert (0.9 + login) * 60 < left_s <= (1 + login) * 60


def test_a_place_that_does_not_answer_ends_nothing(driven):
    driven.poll_s = 60.0
    driven.visit()
    driven.wrap = lambda place: Around(place, look=lambda name: Sighting(RemoteStatus.UNKNOWN, "?"))
    engine = open_database(driven.home)
    for _ in range(5):
        row = driven.rows()[-1]
        remote.save(engine, row.id, {"due_at": datetime.now(UTC)})
        row = driven.visit()
    assert row.number == 1 and row.state == RemoteState.QUEUED and row.tries >= 5


def test_a_fetch_shows_its_progress_and_is_refused_before_it_begins_where_the_disk_is_too_small(driven):
    row = driven.carry()[-1]
    place, engine, told = LocalPlace(driven.home / "places" / "local"), open_database(driven.home), Told()
    [path] = driven.home.glob(f"places/local/**/{row.name}/output/{RECORD_NAME}")
    (path.parent / "part0").write_text("x")

    def collect(name, folder, patterns, on_bytes):
        on_bytes(3, 5)
        return place.collect(name, folder, patterns)

    def fetch_all():
        state, found = LocalState(engine, driven.home, None), RemoteRun(driven.run(engine), None, driven.settings)
        fetch.fetch(state, found, Around(place, collect=collect), told, Consent(), everything=True)

    folder = driven.home / "runs" / "ink" / "1" / "remote" / f"{row.number:03d}"
    record = json.loads(path.read_text())
    path.write_text(json.dumps(record | {"bytes": 1 << 50}))
    with pytest.raises(KgorchError, match="there is no room") as refused:
        fetch_all()
    assert refused.value.error_code == "KG501" and "bytes are to be fetched" in str(refused.value)
    assert told.bytes == 3 and not (folder / "part0").exists()
    path.write_text(json.dumps(record))
    with pytest.raises(NotFound, match="holds no state"):  # the stand-in has trained nothing
        fetch_all()
    assert (folder / "part0").exists()
    engine.dispose()
