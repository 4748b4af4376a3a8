"""Sessions elsewhere: what answers mean, in stories; and worlds of random answers, in which no run has two sessions."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kgorch.core.codes import RemoteState as State
from kgorch.core.codes import RemoteWait as Wait
from kgorch.core.remote import session_plan, session_states
from kgorch.core.remote.place_values import PlaceError, PlaceQuota, Pushed, RemoteStatus, Sighting, Trouble
from kgorch.core.remote.record_values import RecordOutcome, SessionRecord
from kgorch.core.remote.session_states import MAX_COLLECTS, NO_PROGRESS, Moment, Progress, RemoteSession

START = datetime(2026, 11, 23, 12, tzinfo=UTC)
HOUR = 3600


def moment(hours: float = 0.0, chance: float = 0.5) -> Moment:
    return Moment(START + timedelta(hours=hours), chance)


def session(state: State = State.PLANNED, **changes) -> RemoteSession:
    return replace(RemoteSession(1, state, START, session_s=11 * HOUR, timeout_s=12 * HOUR), **changes)


def record(outcome: RecordOutcome = RecordOutcome.SUSPENDED, step: int = 10) -> SessionRecord:
    folder = f"kgorch/runs/ink/1/checkpoints/train/step-{step:08}" if step >= 0 else ""
    stage = "train" if step >= 0 else ""
    at = "2026-11-23T12:00:00+00:00"
    return SessionRecord("aa", "ink", "r1", 1, outcome, 10, stage, step, folder, 5, (), at, at, "")


def judged(outcome: RecordOutcome, step: int, *, status=RemoteStatus.COMPLETE, **changes) -> RemoteSession:
    ended = session(State.ENDED, status=status, **changes)
    return session_states.after_collect(ended, record(outcome, step), Progress(0, step), "", moment())


def no(trouble: Trouble, retry_after_s: float | None = None) -> PlaceError:
    return PlaceError(trouble, "it says no", retry_after_s)


def minutes(one: RemoteSession) -> float:
    return (one.due_at - START).total_seconds() / 60


# A push


def test_an_accepted_push_is_queued_and_looked_at_in_a_minute():
    pushed = session_states.after_push(session(State.PUSHING), Pushed(1, "me/s", "https://k/s"), moment())
    assert (pushed.state, pushed.version, pushed.pushed_at, minutes(pushed)) == (State.QUEUED, 1, START, 1)


def test_after_an_unanswered_push_the_place_is_asked_twice_before_it_is_pushed_again():
    asking = session_states.after_trouble(session(State.PUSHING), no(Trouble.UNANSWERED), moment())
    assert (asking.state, minutes(asking)) == (State.ASKING, 1)
    once = session_states.after_search(asking, None, moment())
    assert once.state is State.ASKING and session_states.after_search(once, None, moment()).state is State.PLANNED


def test_a_push_that_is_found_is_not_made_again():
    found = session_states.after_search(session(State.ASKING, absences=1), Pushed(1, "", ""), moment())
    assert found.state is State.QUEUED and found.absences == 0


def test_another_nonce_under_the_name_stops_the_run():
    assert session_states.after_trouble(session(State.ASKING), no(Trouble.REFUSED), moment()).state is State.FAILED


def test_a_session_that_runs_without_an_input_is_awaited_and_not_pushed_beside():
    after = session_states.after_trouble(session(State.PUSHING), no(Trouble.UNATTACHED), moment())
    assert after.state is State.QUEUED and after.why


@pytest.mark.parametrize(
    ("trouble", "wait", "after_min"),
    [
        (Trouble.SLOTS, Wait.SLOTS, 10),
        (Trouble.QUOTA, Wait.QUOTA, 30),
        (Trouble.LOGIN, Wait.LOGIN, 30),
        (Trouble.NO_CLIENT, Wait.CLIENT, 30),
    ],
)
def test_a_refused_push_waits_and_is_planned_still(trouble, wait, after_min):
    after = session_states.after_trouble(session(State.PUSHING), no(trouble), moment())
    assert (after.state, after.wait, minutes(after)) == (State.PLANNED, wait, after_min)


def test_a_plain_refusal_is_tried_once_more_and_then_fails():
    once = session_states.after_trouble(session(State.PUSHING), no(Trouble.REFUSED), moment())
    assert once.state is State.PLANNED
    assert session_states.after_trouble(replace(once, state=State.PUSHING), no(Trouble.REFUSED), moment()).state is (
        State.FAILED
    )


# A look


def test_an_unknown_status_ends_nothing_and_is_asked_ever_more_rarely():
    one, pauses = session(State.RUNNING, status=RemoteStatus.RUNNING, status_at=START), []
    for _ in range(12):
        one = session_states.after_look(one, Sighting(RemoteStatus.UNKNOWN, "?"), moment(chance=1.0))
        pauses.append(minutes(one))
    assert one.state is State.RUNNING and one.status_at == START
    assert pauses[:6] == [1, 2, 4, 8, 16, 30] and pauses[-1] == 30


@pytest.mark.parametrize("chance", [0.0, 0.3, 1.0])
def test_a_pause_is_never_shorter_than_a_minute_nor_than_the_place_asks(chance):
    busy = session_states.after_trouble(session(State.RUNNING, tries=9), no(Trouble.BUSY, 2400.0), moment(0, chance))
    assert minutes(busy) == 40 and busy.wait is Wait.NETWORK and busy.state is State.RUNNING
    soon = session_states.after_trouble(session(State.RUNNING, tries=9), no(Trouble.BUSY), moment(0, chance))
    assert 1 <= minutes(soon) <= 30


def test_a_running_session_that_needs_a_login_is_still_running():
    after = session_states.after_trouble(session(State.RUNNING), no(Trouble.LOGIN), moment())
    assert (after.state, after.wait) == (State.RUNNING, Wait.LOGIN)


def test_running_does_not_go_back_to_queued():
    after = session_states.after_look(session(State.RUNNING), Sighting(RemoteStatus.QUEUED, "{}"), moment())
    assert after.state is State.RUNNING


def test_hours_in_the_queue_are_told_twice_and_end_nothing():
    one = session(State.QUEUED, pushed_at=START)
    told = []
    for hours in (0.5, 1.0, 3.0, 6.0, 200.0):
        one = session_states.after_look(one, Sighting(RemoteStatus.QUEUED, "QUEUED"), moment(hours))
        told.append(one.queue_told)
    assert told == [0, 1, 1, 2, 2] and one.state is State.QUEUED


def test_an_absent_session_is_over_only_after_longer_than_it_may_last():
    one, hours = session(State.RUNNING), 0.0
    for hours in range(13):
        one = session_states.after_trouble(one, no(Trouble.ABSENT), moment(hours))
        assert one.state is State.RUNNING
    assert session_states.after_trouble(one, no(Trouble.ABSENT), moment(hours + 1.1)).state is State.ENDED


# A record


def test_the_record_outranks_the_status():
    assert judged(RecordOutcome.SUSPENDED, 10, status=RemoteStatus.CANCELLED).state is State.COLLECTED
    assert judged(RecordOutcome.FINISHED, 10, status=RemoteStatus.ERROR).state is State.DONE
    assert judged(RecordOutcome.FAILED, 10).state is State.FAILED


def test_a_session_that_the_place_calls_failed_is_no_source_since_its_output_is_not_attached():
    assert judged(RecordOutcome.SUSPENDED, 10, status=RemoteStatus.ERROR).state is State.LOST


def test_a_session_that_did_not_get_further_is_no_source():
    expected = Progress(0, 10)
    assert judged(RecordOutcome.SUSPENDED, 10, expected=expected).state is State.LOST
    assert judged(RecordOutcome.SUSPENDED, 9, expected=expected).state is State.LOST
    assert judged(RecordOutcome.SUSPENDED, -1).state is State.LOST
    assert judged(RecordOutcome.ERROR, 11, expected=expected).state is State.COLLECTED


def test_a_later_stage_is_further_whatever_its_step():
    ended = session(State.ENDED, status=RemoteStatus.COMPLETE, expected=Progress(0, 500))
    after = session_states.after_collect(ended, record(step=3), Progress(1, 3), "", moment())
    assert after.state is State.COLLECTED


def test_a_completed_session_is_asked_for_its_record_during_hours_because_a_listing_may_lag():
    one, now = session(State.ENDED, status=RemoteStatus.COMPLETE), moment()
    for tries in range(1, MAX_COLLECTS):
        one = session_states.after_collect(one, None, NO_PROGRESS, "no record", now)
        assert (one.state, one.tries, one.why) == (State.ENDED, tries, "no record")
        now = Moment(one.due_at)
    assert (one.due_at - START).total_seconds() > 3 * HOUR
    lost = session_states.after_collect(one, None, NO_PROGRESS, "no record", now)
    assert (lost.state, lost.why) == (State.LOST, "no record")
    assert session_states.after_collect(one, record(), Progress(0, 10), "", now).state is State.COLLECTED


@pytest.mark.parametrize("trouble", [Trouble.ABSENT, Trouble.REFUSED])
def test_the_output_of_a_completed_session_is_asked_for_during_hours_although_the_place_says_no(trouble):
    one, now = session(State.ENDED, status=RemoteStatus.COMPLETE), moment()
    for _ in range(MAX_COLLECTS - 1):
        one = session_states.after_trouble(one, no(trouble), now)
        assert one.state is State.ENDED and one.why == "it says no"
        now = Moment(one.due_at)
    assert (one.due_at - START).total_seconds() > 3 * HOUR
    assert session_states.after_trouble(one, no(trouble), now).state is State.LOST
    back = session_states.after_collect(one, record(), Progress(0, 10), "", now)
    assert back.state is State.COLLECTED
    cancelled = session(State.ENDED, status=RemoteStatus.CANCELLED)
    assert session_states.after_trouble(cancelled, no(trouble), moment()).state is State.LOST, "it has no output"


@pytest.mark.parametrize("trouble", [Trouble.UNANSWERED, Trouble.BUSY])
@pytest.mark.parametrize("status", [RemoteStatus.COMPLETE, RemoteStatus.CANCELLED])
def test_days_without_an_answer_lose_no_session(status, trouble):
    one, now = session(State.ENDED, status=status), moment()
    for _ in range(200):
        one = session_states.after_trouble(one, no(trouble), now)
        assert one.state is State.ENDED and one.wait is Wait.NETWORK
        now = Moment(one.due_at)
    assert (one.due_at - START).total_seconds() > 48 * HOUR
    once = session_states.after_collect(one, None, NO_PROGRESS, "no record", now)
    assert once.state is (State.ENDED if status is RemoteStatus.COMPLETE else State.LOST), (
        "what came before is no answer"
    )
    assert session_states.after_collect(one, record(), Progress(0, 10), "", now).state is State.COLLECTED


def test_three_sessions_without_a_new_step_stop_the_run_and_tell_the_first_cause():
    history = []
    for cause in ("out of disk", "killed", "killed"):
        planned = session_plan.next_session(history, moment(), session_s=HOUR)
        ended = replace(planned, state=State.ENDED, status=RemoteStatus.ERROR)
        history.append(session_states.after_collect(ended, None, NO_PROGRESS, cause, moment()))
    assert [one.state for one in history] == [State.LOST, State.LOST, State.FAILED]
    assert "out of disk" in history[-1].why
    assert session_plan.next_session(history, moment(), session_s=HOUR) is None
    again = session_plan.next_session(history, moment(), session_s=HOUR, anew=True)
    assert (again.number, again.fruitless) == (4, 0)


@pytest.mark.parametrize("outcome", [RecordOutcome.NO_STATE, RecordOutcome.NO_BUNDLE])
def test_a_missing_input_is_tried_once_more(outcome):
    first = judged(outcome, -1)
    assert first.state is State.LOST
    second = session_plan.next_session([first], moment(), session_s=HOUR)
    ended = replace(second, state=State.ENDED, status=RemoteStatus.COMPLETE)
    assert session_states.after_collect(ended, record(outcome, -1), NO_PROGRESS, "", moment()).state is State.FAILED


# What comes next


def collected(number: int, step: int, status=RemoteStatus.COMPLETE) -> RemoteSession:
    return session(State.COLLECTED, number=number, reached=Progress(0, step), status=status)


def test_the_next_session_goes_on_from_the_furthest_good_one():
    lost = session(State.LOST, number=3, reached=Progress(0, 99))
    following = session_plan.next_session([collected(1, 10), collected(2, 20), lost], moment(), session_s=HOUR)
    assert (following.number, following.source, following.expected) == (4, 2, Progress(0, 20))
    assert following.fruitless == 1


@pytest.mark.parametrize(
    ("step", "status", "source"),
    [(90, RemoteStatus.COMPLETE, 2), (10, RemoteStatus.COMPLETE, 1), (90, RemoteStatus.ERROR, 1)],
)
def test_a_failed_session_is_gone_on_from_where_it_has_verified_further_steps(step, status, source):
    failed = judged(RecordOutcome.FAILED, step, status=status, number=2, source=1, expected=Progress(0, 10))
    history = [collected(1, 10), failed]
    assert session_plan.next_session(history, moment(), session_s=HOUR) is None, "until a user starts it again"
    following = session_plan.next_session(history, moment(), session_s=HOUR, anew=True)
    assert (following.source, following.expected.step) == (source, step if source == 2 else 10)


def test_a_cancelled_source_that_was_not_attached_is_not_taken_again():
    lost = session(State.LOST, number=3, source=2, outcome=RecordOutcome.NO_STATE)
    history = [collected(1, 10), collected(2, 20, RemoteStatus.CANCELLED), lost]
    assert session_plan.best_source(history).number == 1
    assert session_plan.best_source(history[:2]).number == 2
    assert session_plan.best_source(history[1:]).number == 2, "rather than from scratch"


def test_after_a_stop_nothing_follows():
    stopped = session_states.stop(session(State.PLANNED), moment())
    assert stopped.state is State.STOPPED
    running = session_states.stop(session(State.RUNNING), moment())
    assert running.state is State.RUNNING and running.is_last
    assert session_plan.next_session([replace(collected(1, 10), is_last=True)], moment(), session_s=HOUR) is None
    assert session_states.after_search(session(State.ASKING, absences=1, is_last=True), None, moment()).state is (
        State.STOPPED
    )


# Hours of the account


def quota(left_h: float, refreshes_at: str = "2026-11-28T00:00:00Z") -> PlaceQuota:
    return PlaceQuota((30 - left_h) * HOUR, 0.0, 30 * HOUR, refreshes_at)


def test_a_session_is_shortened_to_the_hours_that_are_left():
    after = session_plan.after_quota(session(), quota(10), 11 * HOUR, 2.0, moment())
    assert (after.state, after.session_s, after.timeout_s) == (State.BUNDLING, 5 * HOUR, 5 * HOUR + 1200)
    assert session_plan.after_quota(session(), None, 11 * HOUR, 2.0, moment()).session_s == 11 * HOUR


def test_with_too_little_left_it_waits_until_ten_minutes_after_the_renewal():
    after = session_plan.after_quota(session(), quota(2), 11 * HOUR, 2.0, moment())
    assert (after.state, after.wait) == (State.PLANNED, Wait.QUOTA)
    assert after.due_at == datetime(2026, 11, 28, 0, 10, tzinfo=UTC)


@pytest.mark.parametrize("at", ["", "soon", "2026-11-01T00:00:00Z", "2026-11-01T00:00:00"])
def test_an_unknown_or_past_renewal_is_asked_for_again(at):
    assert minutes(session_plan.after_quota(session(), quota(0, at), HOUR, 2.0, moment())) == 30


def test_the_cost_of_a_session_is_measured():
    assert session_plan.measured_factor(0.0, 2 * HOUR, HOUR) == 2.0
    assert session_plan.measured_factor(20 * HOUR, 1 * HOUR, HOUR) is None, "the week began anew in between"
    assert session_plan.measured_factor(0.0, 60, 60) is None


@given(st.text(max_size=64), st.text("0123456789abcdef", min_size=6, max_size=12), st.integers(1, 999))
def test_names_fit_the_rules_of_places_and_are_the_same_each_time(run, run_id, number):
    name = session_plan.session_name(run, run_id, number)
    assert 5 <= len(name) <= 50 and name == session_plan.session_name(run, run_id, number)
    assert set(name) <= set("abcdefghijklmnopqrstuvwxyz0123456789-") and "--" not in name and name[-1] != "-"
    assert name.startswith("kgorch-") and name.endswith(f"-{run_id[:6]}-{number:03d}")


# Worlds


@dataclass
class World:
    """A place as it is, and what it answers: the truth, or a trouble. It judges: nothing twice, nothing at once."""

    chance: random.Random
    pushes: dict[int, int] = field(default_factory=dict)
    runs: dict[int, int] = field(default_factory=dict)  # looks that it takes until it is over
    troubles: int = 12

    def trouble(self, *kinds: Trouble) -> PlaceError | None:
        if self.troubles and self.chance.random() < 0.5:
            self.troubles -= 1
            return PlaceError(self.chance.choice(kinds), "no")
        return None

    def push(self, one: RemoteSession, history: list[RemoteSession]) -> None:
        if error := self.trouble(
            Trouble.BUSY, Trouble.LOGIN, Trouble.SLOTS, Trouble.QUOTA, Trouble.REFUSED, Trouble.UNANSWERED
        ):
            if error.trouble is not Trouble.UNANSWERED or self.chance.random() < 0.5:
                raise error
            self._accept(one, history)
            raise error
        self._accept(one, history)

    def _accept(self, one: RemoteSession, history: list[RemoteSession]) -> None:
        assert not [number for number, looks in self.runs.items() if looks > 0], "two sessions at once"
        assert one.number not in self.pushes, "pushed twice"
        if one.source:
            [source] = [item for item in history if item.number == one.source]
            assert source.state is State.COLLECTED and source.reached == one.expected > source.expected
        else:
            assert not [item for item in history if item.state is State.COLLECTED], "from scratch by mistake"
        self.pushes[one.number] = 1
        self.runs[one.number] = self.chance.randint(1, 3)

    def look(self, one: RemoteSession) -> Sighting:
        if error := self.trouble(Trouble.UNANSWERED, Trouble.BUSY, Trouble.LOGIN, Trouble.ABSENT, Trouble.REFUSED):
            raise error
        if self.troubles and self.chance.random() < 0.5:
            self.troubles -= 1
            return Sighting(RemoteStatus.UNKNOWN, "?")
        self.runs[one.number] -= 1
        if self.runs[one.number] > 0:
            return Sighting(self.chance.choice([RemoteStatus.QUEUED, RemoteStatus.RUNNING]), "")
        over = [RemoteStatus.COMPLETE, RemoteStatus.ERROR, RemoteStatus.CANCELLED]
        return Sighting(self.chance.choice(over), "")


def visit(one: RemoteSession, history: list[RemoteSession], world: World, now: Moment) -> RemoteSession:
    """What the driver does in a visit; a kill may come before or after each commit."""
    chance = world.chance
    try:
        match one.state:
            case State.PLANNED:
                left_h = chance.choice([30.0, 12.0]) if world.troubles else 30.0
                return session_plan.after_quota(one, quota(left_h), 11 * HOUR, 2.0, now)
            case State.BUNDLING:
                one = session_states.begin_push(one, now)
                if world.troubles and chance.random() < 0.5:  # killed before the push
                    world.troubles -= 1
                    return one
                world.push(one, history)
                if world.troubles and chance.random() < 0.5:  # killed after it
                    world.troubles -= 1
                    return one
                return session_states.after_push(one, Pushed(1, "", ""), now)
            case State.PUSHING:
                return session_states.in_doubt(one, now)
            case State.ASKING:
                if error := world.trouble(Trouble.UNANSWERED, Trouble.BUSY, Trouble.LOGIN):
                    raise error
                return session_states.after_search(one, Pushed(1, "", "") if one.number in world.pushes else None, now)
            case State.QUEUED | State.RUNNING:
                return session_states.after_look(one, world.look(one), now)
        if error := world.trouble(Trouble.UNANSWERED, Trouble.BUSY, Trouble.ABSENT):
            raise error
        outcome = chance.choice(list(RecordOutcome))
        step = -1 if outcome.is_unprepared else chance.randint(-1, 60)
        has_record = chance.random() < 0.5
        its = record(outcome, step) if has_record else None
        return session_states.after_collect(one, its, Progress(0, step) if step >= 0 else NO_PROGRESS, "none", now)
    except PlaceError as error:
        return session_states.after_trouble(one, error, now)


@settings(max_examples=250)
@given(st.integers(0, 2**32))
def test_in_no_world_a_run_has_two_sessions_at_once_or_goes_on_from_what_was_not_verified(seed):
    world, history, now = World(random.Random(seed)), [], START
    for _ in range(400):
        last = history[-1] if history else None
        if last is None or not last.is_open:
            following = session_plan.next_session(history, Moment(now), session_s=11 * HOUR)
            if following is None:
                assert last.state in (State.DONE, State.FAILED)
                return
            history.append(following)
            continue
        now = max(now, last.due_at)
        after = visit(last, history[:-1], world, Moment(now, world.chance.choice([0.0, 0.5, 1.0])))
        assert after.state is not last.state or after.due_at > now, "a busy loop"
        if not after.is_open and after.state is not State.FAILED:
            assert last.state is State.ENDED, "only what is over at the place is over here"
        history[-1] = after
        if len(history) > 12:
            return  # it makes progress in each session; the steps of this world are endless
    raise AssertionError("neither progress nor a stop")
