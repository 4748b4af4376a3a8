"""A session of a program that saves by itself: it is asked for nothing but to stop, as early as its stops have taken."""

from __future__ import annotations

import pytest

from kgorch.core.checkpoint.save_deadline import Save
from kgorch.core.codes import Outcome, Phase, RankOutcome, Reason
from kgorch.core.session import attempt_outcome, lifecycle
from kgorch.core.session.attempt_outcome import AttemptEnd, RankRecord
from kgorch.core.session.events import (
    Attached,
    AttemptSuspended,
    AttemptUnsaved,
    CheckpointVerified,
    DeadlineReached,
    ExitOverdue,
    SaveFailed,
    SaveRequested,
    SessionOpened,
)
from kgorch.core.session.lifecycle import Effect, due, next_due_s
from kgorch.core.session.lifecycle_state import LifecycleState


def after(session: LifecycleState, *events, at: float = 10.0) -> LifecycleState:
    for event in events:
        session = lifecycle.advance(session, event, at).session
    return session


@pytest.fixture
def training() -> LifecycleState:
    """It trains, its wall 1000 s away; its stops are known to take 60 s, its copies 1 s."""
    session = LifecycleState(wall_s=1000.0, margin_s=5.0, every_s=30.0, saves=(Save(1000, 1.0),))
    return after(session, SessionOpened(), Attached(0, 60.0), at=5.0)


def test_it_is_asked_to_stop_as_long_before_the_wall_as_a_stop_takes(training):
    assert training.deadline_s == 1000.0 - 65.0
    assert next_due_s(training, 5.0) == training.deadline_s
    assert list(due(training, 935.0)) == [DeadlineReached()]


def test_it_is_never_asked_for_a_save_between(training):
    assert not list(due(training, 900.0))
    saved = after(training, CheckpointVerified(5, 1.0))
    assert not list(due(saved, 900.0)) and saved.deadline_s == 935.0, "a copy says nothing of how long a stop takes"


def test_a_wall_that_is_near_leaves_a_quarter_of_the_time_to_train():
    session = after(LifecycleState(wall_s=45.0, margin_s=1.0), SessionOpened(), Attached(0, 60.0), at=5.0)
    assert session.deadline_s == 5.0 + 0.25 * 40.0


def test_no_snapshot_is_looked_for_when_it_has_not_saved(training):
    stopping = after(training, DeadlineReached(), at=935.0)
    assert not list(due(stopping, 990.0))
    [event] = due(stopping, 999.6)
    assert type(event).__name__ == "GraceExpired"


def test_a_checkpoint_that_came_after_the_request_puts_its_end_in_order(training):
    stopping = after(training, DeadlineReached(), at=935.0)
    saved = after(stopping, CheckpointVerified(8, 2.0), at=940.0)
    assert list(due(saved, 999.6)) == [ExitOverdue()]
    assert after(saved, AttemptSuspended(), at=941.0).phase is Phase.SUSPENDED


def test_a_stop_without_a_checkpoint_is_a_cut_and_goes_on_in_the_next_session(training):
    asked = after(training, SaveRequested(), SaveFailed("the program takes no requests"))
    assert asked.phase is Phase.TRAINING
    move = lifecycle.advance(after(asked, DeadlineReached(), at=935.0), AttemptUnsaved("killed after SIGTERM"), 940.0)
    assert (move.session.phase, move.record.outcome) == (Phase.CUT_OFF, Outcome.UNSAVED)
    assert move.record.resume is not None and move.record.resume.reason is Reason.TIME_LIMIT
    assert "killed after SIGTERM" in move.session.why and Effect.LAUNCH not in move.effects


def test_a_stage_with_the_sdk_that_follows_is_asked_to_save_again(training):
    assert training.next_save_s > 1e9
    following = after(training, Attached(1000))
    assert following.stop_s is None and following.next_save_s < 1000


def test_why_nothing_was_saved_is_what_the_agent_says():
    record = RankRecord(0, RankOutcome.UNSAVED, 1.0, message="train.py was killed 60 s after SIGTERM")
    end = AttemptEnd(1, [record], "", made_progress=False, without_progress=0, more_stages=False)
    assert attempt_outcome.verdict(end) == AttemptUnsaved("train.py was killed 60 s after SIGTERM")
    silent = AttemptEnd(1, [RankRecord(0, RankOutcome.UNSAVED, 1.0)], "", False, 0, False)
    assert attempt_outcome.verdict(silent) == AttemptUnsaved("the last save failed")
