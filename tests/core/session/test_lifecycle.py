"""The lifecycle of a session, told in stories and walked pair by pair."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kgorch.core.checkpoint.save_deadline import Save
from kgorch.core.codes import OVER, REASON_TEXT, EventKind, Outcome, Phase, Reason
from kgorch.core.limits.wall import Wall, has_moved, nearest
from kgorch.core.session import lifecycle as core
from kgorch.core.session import lifecycle_state
from kgorch.core.session.events import (
    Adopted,
    Attached,
    AttemptCrashed,
    AttemptDiverged,
    AttemptSuspended,
    AttemptUnsaved,
    CheckpointDue,
    CheckpointVerified,
    DeadlineReached,
    Diagnosed,
    Event,
    ExitOverdue,
    GraceExpired,
    Hung,
    LastSaveLate,
    OutOfMemory,
    RetriesExhausted,
    RunFinished,
    SaveFailed,
    SaveRequested,
    SessionLost,
    SessionOpened,
    StageFinished,
    StopRequested,
    WallMoved,
)
from kgorch.core.session.lifecycle import (
    TRANSITIONS,
    Effect,
    IllegalTransition,
    NextSession,
    due,
    ended_alone,
    next_due_s,
)
from kgorch.core.session.lifecycle_state import CALIBRATION_S, LifecycleState

EVENTS = [
    SessionOpened(),
    Attached(1000),
    CheckpointDue(),
    SaveRequested(),
    CheckpointVerified(5, 1.0),
    SaveFailed("disk full"),
    DeadlineReached(),
    StopRequested(Reason.USER),
    StopRequested(Reason.SIGTERM, 50.0),
    LastSaveLate(),
    GraceExpired(),
    ExitOverdue(),
    StageFinished(),
    RunFinished(),
    AttemptSuspended(),
    AttemptUnsaved("disk full"),
    AttemptCrashed("boom"),
    OutOfMemory("boom", "microbatch/2"),
    AttemptDiverged("loss is nan", "skip", {"step": 3, "skip": True}),
    RetriesExhausted("boom"),
    Hung(0, "step", 300.0),
    Diagnosed("hung"),
    Adopted(),
    SessionLost("gone"),
    WallMoved(Wall(60.0, Reason.SPOT)),
    WallMoved(None),
]


def advance(
    session: LifecycleState, event: Event, now: float
) -> tuple[LifecycleState, tuple[Effect | NextSession, ...]]:
    """The next state, and what is to be done; the session that is queued comes last."""
    move = core.advance(session, event, now)
    return move.session, (*move.effects, *([move.record.resume] if move.record.resume else []))


def queued(reason: Reason, more: str = "") -> NextSession:
    return NextSession(reason, REASON_TEXT[reason] + more)


@pytest.fixture
def training() -> LifecycleState:
    """A session that trains, its wall 100 s away, saves known to take 4 s."""
    session = LifecycleState(wall_s=100.0, margin_s=2.0, every_s=1000.0, saves=(Save(1000, 4.0),))
    session, _ = advance(session, SessionOpened(), 0.0)
    session, _ = advance(session, Attached(1000), 5.0)
    return session


def test_an_opened_session_launches_its_first_attempt():
    session, actions = advance(LifecycleState(), SessionOpened(), 0.0)
    assert session.phase is Phase.STARTING
    assert actions == (Effect.LAUNCH,)


def test_a_session_at_its_deadline_is_asked_to_stop_once(training):
    assert training.deadline_s is not None
    [event] = due(training, training.deadline_s)
    assert event == DeadlineReached()
    stopping, actions = advance(training, event, training.deadline_s)
    assert stopping.phase is Phase.STOPPING
    assert actions == (Effect.ASK_TO_STOP,)
    assert not list(due(stopping, training.deadline_s + 0.1))  # asked at the edge, not on every tick after it


def test_once_the_final_checkpoint_is_verified_the_script_may_go_on_up_to_the_wall(training):
    """What it does after its training can be done again: nothing is unsaved, so no lead for a save is kept."""
    over, actions = advance(training, CheckpointVerified(50, 4.0, bytes=1000, final=True), 50.0)
    assert over.phase is Phase.TRAINING and actions == () and not list(due(over, 97.9))
    [event] = due(over, 98.0)
    stopping, _ = advance(over, event, 98.0)
    assert not list(due(stopping, 99.4)) and list(due(stopping, 99.5)) == [ExitOverdue()]
    assert advance(stopping, ExitOverdue(), 99.5)[0].phase is Phase.SUSPENDED


def test_a_stop_after_the_final_checkpoint_waits_half_a_minute_for_the_script(training):
    over, _ = advance(replace(training, wall_s=None), CheckpointVerified(50, 4.0, bytes=1000, final=True), 50.0)
    stopping, _ = advance(over, StopRequested(Reason.USER), 60.0)
    assert not list(due(stopping, 89.9)) and list(due(stopping, 90.0)) == [ExitOverdue()]


def test_the_next_stage_saves_again(training):
    over, _ = advance(training, CheckpointVerified(50, 4.0, bytes=1000, final=True), 50.0)
    started, _ = advance(over, StageFinished(), 51.0)
    trains, _ = advance(started, Attached(1000), 52.0)
    assert not trains.is_final and CheckpointDue() in list(due(replace(trains, every_s=1.0), 60.0))


def test_nothing_is_due_a_moment_before_the_deadline(training):
    assert DeadlineReached() not in due(training, training.deadline_s - 0.001)


def test_the_deadline_leaves_room_for_the_save_the_steps_and_the_margin(training):
    slow = training.observing(gap_s=3.0, step_s=0.5)
    # twice the 4 s of the one save seen, 3 s of the longest step, 3 × 0.5 s to agree and a moment, 2 s of margin
    assert slow.save_lead_s == pytest.approx(8.0 + 3.0 + 1.5 + 0.25 + 2.0)


def test_a_lead_that_leaves_nothing_to_train_guards_nothing_and_is_cut():
    """Found by the benchmark of walls: a state that grew made a small one's slow save into a lead longer than every session."""
    slow = LifecycleState(
        wall_s=30.0, margin_s=0.5, saves=(Save(2_000_000, 1.5), Save(2_000_000, 1.0)), state_bytes=32_000_000
    )
    starting, _ = advance(slow, SessionOpened(), 0.0)
    assert slow.save_lead_s > 30.0 and starting.deadline_s == pytest.approx(30.0 - 1.0 - 0.25 - 0.5), (
        "while any save may come"
    )
    assert not list(due(starting, 20.0)) and list(due(starting, 28.25)) == [DeadlineReached()]
    trains, _ = advance(starting, Attached(32_000_000), 14.0)
    assert trains.deadline_s == pytest.approx(14.0 + 16.0 / 4), "a quarter of what is left"
    again, _ = advance(advance(trains, AttemptCrashed("boom"), 15.0)[0], Attached(32_000_000), 17.0)
    assert again.deadline_s == trains.deadline_s, "there is something to lose by now"
    adopted = replace(trains, began_s=-math.inf)
    assert adopted.deadline_s == 30.0 - slow.save_lead_s, "nobody knows how much"
    stopping, _ = advance(trains.observing(gap_s=0.5, step_s=0.5), DeadlineReached(), 18.0)
    assert not list(due(stopping, 20.2)) and list(due(stopping, 20.25)) == [LastSaveLate()], (
        "its own save is begun first"
    )
    late, _ = advance(starting, Attached(32_000_000), 31.0)
    assert list(due(late, 31.0)) == [DeadlineReached()]


def test_memory_that_ran_out_leads_to_another_attempt_and_while_stopping_to_another_session(training):
    recovering, actions = advance(training, OutOfMemory("no room", "set crop=96"), 50.0)
    assert recovering.phase is Phase.RECOVERING and actions == (Effect.LAUNCH,) and recovering.failures == 0
    stopping, _ = advance(training, DeadlineReached(), 90.0)
    over, actions = advance(stopping, OutOfMemory("no room", "set crop=96"), 91.0)
    assert over.phase is Phase.CUT_OFF and actions == (queued(Reason.TIME_LIMIT, "; then: no room"),)


def test_a_verified_save_in_time_ends_in_suspended_with_a_resume_queued(training):
    stopping, _ = advance(training, DeadlineReached(), 90.0)
    saved, _ = advance(stopping, CheckpointVerified(7, 2.0), 93.0)
    over, actions = advance(saved, AttemptSuspended(), 94.0)
    assert over.phase is Phase.SUSPENDED
    assert actions == (queued(Reason.TIME_LIMIT),)


def test_a_save_that_comes_too_late_ends_in_cut_off_and_the_processes_are_killed_before_the_wall(training):
    stopping, _ = advance(training, DeadlineReached(), 90.0)
    assert stopping.kill_s < 100.0
    [event] = due(stopping, stopping.kill_s)
    over, actions = advance(stopping, event, stopping.kill_s)
    assert over.phase is Phase.CUT_OFF
    assert actions[0] == Effect.KILL_ATTEMPT and isinstance(actions[1], NextSession)


def test_processes_that_saved_but_do_not_end_are_killed_and_nothing_is_lost(training):
    stopping, _ = advance(training, DeadlineReached(), 90.0)
    saved, _ = advance(stopping, CheckpointVerified(7, 2.0), 93.0)
    [event] = due(saved, saved.kill_s)
    over, actions = advance(saved, event, saved.kill_s)
    assert over.phase is Phase.SUSPENDED
    assert Effect.KILL_ATTEMPT in actions


def test_the_first_save_comes_early_so_that_the_lead_is_measured():
    session = LifecycleState(every_s=600.0)
    for event in (SessionOpened(), Attached(1000)):
        session, _ = advance(session, event, 100.0)
    [event] = due(session, 100.0 + CALIBRATION_S)
    saving, _ = advance(session, event, 105.0)
    measured, _ = advance(saving, CheckpointVerified(5, 3.0, 0.1, 1000), 108.0)
    assert measured.saves == (Save(1000, 3.0),)
    assert measured.next_save_s > 108.0 + CALIBRATION_S


def test_a_session_measures_its_own_disk_whatever_earlier_ones_have_found(training):
    assert training.saves and training.next_save_s == training.saved_s + CALIBRATION_S


def test_a_last_save_that_would_come_too_late_has_the_newest_snapshot_written_once(training):
    stopping, _ = advance(training, DeadlineReached(), 82.0)
    assert stopping.rescue_s == pytest.approx(100.0 - 8.0 - 2.0)
    assert not list(due(stopping, 89.9))
    [event] = due(stopping, 90.0)
    rescued, actions = advance(stopping, event, 90.0)
    assert rescued.phase is Phase.STOPPING and actions == (Effect.PERSIST_SNAPSHOT,)
    assert not list(due(rescued, 90.1))
    rescued, _ = advance(rescued, CheckpointVerified(7, 0.0, rescued=True), 92.0)  # it is no last save
    [event] = due(rescued, rescued.kill_s)
    assert advance(rescued, event, rescued.kill_s)[0].phase is Phase.CUT_OFF


def test_a_save_that_was_asked_for_before_the_stop_is_not_the_last_one(training):
    saving, _ = advance(training, SaveRequested(), 80.0)
    stopping, _ = advance(saving, DeadlineReached(), 82.0)
    verified, _ = advance(stopping, CheckpointVerified(7, 3.0), 83.0)  # taken at 80
    [event] = due(verified, verified.kill_s)
    assert isinstance(event, LastSaveLate | GraceExpired)
    last, _ = advance(verified, CheckpointVerified(9, 1.0), 85.0)
    assert isinstance(next(due(last, last.kill_s)), ExitOverdue)


def test_an_old_checkpoint_that_is_found_at_a_stop_is_not_the_last_save(training):
    stopping, _ = advance(replace(training, step=5000), DeadlineReached(), 82.0)
    old, _ = advance(stopping, CheckpointVerified(1000, 0.0), 83.0)
    last, _ = advance(stopping, CheckpointVerified(5001, 0.0), 83.0)  # the ranks had not told of that step yet
    assert [next(due(session, session.kill_s)) for session in (old, last)] == [GraceExpired(), ExitOverdue()]
    cut = core.advance(replace(old, saved_step=1000), GraceExpired(), 99.5)
    assert cut.session.phase is Phase.CUT_OFF and cut.record.facts["lost_steps"] == 4000


def test_no_periodic_save_is_begun_that_the_last_one_would_have_to_wait_for():
    session = LifecycleState(wall_s=100.0, margin_s=2.0, every_s=10.0, saves=(Save(1000, 4.0),) * 4, is_measured=True)
    for event in (SessionOpened(), Attached(1000)):
        session, _ = advance(session, event, 70.0)
    assert session.next_save_s == 80.0 and session.save_s == pytest.approx(6.0)
    assert list(due(session, 80.0)) == [CheckpointDue()]
    late = replace(session, saved_s=77.0)
    assert late.deadline_s is not None and late.next_save_s < late.deadline_s < late.next_save_s + late.save_s
    assert not list(due(late, 87.5))
    assert next_due_s(late, 77.0) == late.deadline_s
    # The deadline has come nearer to a save that was due, and no time is left for it: nothing is due until then.
    passed = replace(session, saved_s=75.0)
    assert passed.next_save_s + passed.save_s <= passed.deadline_s and not list(due(passed, 87.5))
    assert next_due_s(passed, 87.5) == passed.deadline_s


def test_the_steps_in_which_the_ranks_agree_on_a_periodic_save_count_as_well():
    """The ranks take one request after another: the last save waited for one that was asked for a step before."""
    session = LifecycleState(wall_s=100.0, margin_s=2.0, every_s=10.0, saves=(Save(1000, 1.0),) * 4, is_measured=True)
    for event in (SessionOpened(), Attached(1000)):
        session, _ = advance(session, event, 50.0)
    session = session.observing(gap_s=4.0, step_s=4.0)
    deadline_s = session.deadline_s
    assert deadline_s is not None and list(due(session, deadline_s - 18.0)) == [CheckpointDue()]
    assert deadline_s - 14.0 + session.save_s < deadline_s
    assert not list(due(session, deadline_s - 14.0)) and next_due_s(session, deadline_s - 14.0) == deadline_s


def test_a_last_save_in_time_leaves_the_snapshot_alone(training):
    stopping, _ = advance(training, DeadlineReached(), 82.0)
    saved, _ = advance(stopping, CheckpointVerified(7, 2.0), 85.0)
    assert not list(due(saved, 90.0))


def test_a_slow_disk_of_this_session_lengthens_the_lead_that_earlier_sessions_taught():
    fast = LifecycleState(wall_s=100.0, saves=(Save(1000, 4.0),), state_bytes=1000, write_bytes_per_s=1e6)
    slow = LifecycleState(wall_s=100.0, saves=(Save(1000, 4.0),), state_bytes=1000, write_bytes_per_s=50.0)
    assert fast.save_s == pytest.approx(8.0) and slow.save_s == pytest.approx(20.0)


def test_a_periodic_save_is_asked_for_once_and_training_goes_on_after_it():
    session = LifecycleState(every_s=10.0, saves=(Save(10, 1.0),), is_measured=True)
    session, _ = advance(session, SessionOpened(), 0.0)
    session, _ = advance(session, Attached(), 5.0)
    assert not list(due(session, 14.9))
    saving, actions = advance(session, next(due(session, 15.0)), 15.0)
    assert actions == (Effect.ASK_TO_SAVE,)
    assert not list(due(saving, 16.0))
    merged, actions = advance(saving, SaveRequested(), 16.0)  # a person asks meanwhile: the one under way serves
    assert merged.phase is Phase.SAVING and actions == ()
    trains, _ = advance(merged, CheckpointVerified(9, 1.0, blocking_s=0.1), 17.0)
    assert trains.phase is Phase.TRAINING
    assert trains.next_save_s == pytest.approx(27.0)


def test_a_failed_save_leaves_the_training_and_the_next_try_waits_an_interval(training):
    saving, _ = advance(replace(training, every_s=10.0, is_measured=True), CheckpointDue(), 20.0)
    trains, actions = advance(saving, SaveFailed("disk full"), 21.0)
    assert trains.phase is Phase.TRAINING and actions == ()
    assert trains.next_save_s == pytest.approx(31.0)


def test_a_line_that_is_made_anew_while_a_save_is_awaited_asks_for_it_again(training):
    saving, asked = advance(training, CheckpointDue(), 20.0)
    again, asked_again = advance(saving, Attached(1000), 21.0)
    assert asked == asked_again == (Effect.ASK_TO_SAVE,)
    assert again.phase is Phase.SAVING and again.overdue_s == saving.overdue_s


def test_a_save_that_never_comes_is_given_up(training):
    saving, _ = advance(replace(training, wall_s=None), CheckpointDue(), 20.0)
    [event] = due(saving, saving.overdue_s)
    assert isinstance(event, SaveFailed)


def test_a_stop_after_a_save_that_was_overdue_is_no_failure(training):
    """Ranks that prepare for long after track() come to no step, so no save can come; nothing says that none ever would."""
    saving, _ = advance(replace(training, wall_s=None), CheckpointDue(), 20.0)
    [late] = due(saving, saving.overdue_s)
    trains, _ = advance(saving, late, saving.overdue_s)
    stopping, _ = advance(trains, StopRequested(Reason.USER), 400.0)
    ended, actions = advance(stopping, GraceExpired(), stopping.kill_s)
    assert ended.phase is Phase.CUT_OFF and any(isinstance(action, NextSession) for action in actions)


def test_a_sigterm_brings_the_wall_nearer_and_is_the_same_path(training):
    stopping, actions = advance(training, StopRequested(Reason.SIGTERM, 40.0), 15.0)
    assert stopping.phase is Phase.STOPPING and stopping.wall_s == 40.0
    assert actions == (Effect.ASK_TO_STOP,) and stopping.why == "SIGTERM"
    assert stopping.kill_s < 40.0


def test_a_stop_by_a_person_waits_for_the_save_and_queues_a_resume_for_when_asked(training):
    stopping, _ = advance(replace(training, wall_s=None), StopRequested(Reason.USER), 15.0)
    assert stopping.kill_s >= 15.0 + lifecycle_state.STOP_GRACE_S
    _, actions = advance(stopping, AttemptSuspended(), 16.0)
    assert actions == (queued(Reason.USER),)


def test_a_person_who_stops_and_is_then_hurried_still_says_when_it_goes_on(training):
    stopping, _ = advance(replace(training, wall_s=None), StopRequested(Reason.USER), 15.0)
    hurried, _ = advance(stopping, StopRequested(Reason.SIGTERM, 20.0), 16.0)
    _, actions = advance(hurried, AttemptSuspended(), 17.0)
    assert actions == (queued(Reason.USER),)
    assert hurried.reason is Reason.USER, "all that is left of it for who settles it after a kill"


def test_an_evaluation_is_remembered_until_the_next_one(training):
    after = training.observing(gap_s=60.0, step_s=0.5)
    for _ in range(1800):  # half an hour of ordinary steps
        after = after.observing(gap_s=0.5, step_s=0.5)
    assert after.gap_s > 40


def test_a_stop_whose_save_failed_is_no_suspension(training):
    stopping, _ = advance(training, DeadlineReached(), 90.0)
    over, actions = advance(stopping, AttemptUnsaved("the last save failed"), 93.0)
    assert over.phase is Phase.CUT_OFF and "the last save failed" in over.why
    assert [type(action) for action in actions] == [NextSession]


def test_a_checkpoint_found_on_disk_teaches_nothing_about_how_long_saves_take(training):
    assert advance(training, CheckpointVerified(5, 0.0), 20.0)[0].saves == (Save(1000, 4.0),)


def test_a_wall_before_the_first_step_costs_nothing_and_ends_at_once():
    session, _ = advance(LifecycleState(wall_s=10.0), SessionOpened(), 0.0)
    over, actions = advance(session, DeadlineReached(), 8.0)
    assert over.phase is Phase.SUSPENDED
    assert actions == (Effect.KILL_ATTEMPT, queued(Reason.TIME_LIMIT))


def test_a_crash_in_training_launches_again_and_counts_as_a_failure(training):
    recovering, actions = advance(training, AttemptCrashed("rank 1: boom"), 30.0)
    assert recovering.phase is Phase.RECOVERING and actions == (Effect.LAUNCH,)
    assert recovering.failures == 1
    again, _ = advance(recovering, Attached(1000), 36.0)
    assert again.phase is Phase.TRAINING


def test_a_hang_is_diagnosed_before_it_is_killed_and_launched_again(training):
    diagnosing, actions = advance(training.observing(gap_s=30.0, step_s=0.5), Hung(1, "step", 30.0), 40.0)
    assert diagnosing.phase is Phase.DIAGNOSING and actions == (Effect.COLLECT_STACKS,)
    recovering, actions = advance(diagnosing, Diagnosed("rank 1 is stopped"), 42.0)
    assert recovering.phase is Phase.RECOVERING and actions == (Effect.KILL_ATTEMPT, Effect.LAUNCH)
    assert recovering.failures == 1
    assert recovering.gap_s == 0.5, "the hang is no gap to keep before the wall"


def test_a_diagnosis_that_does_not_come_is_not_waited_for(training):
    diagnosing, _ = advance(replace(training, wall_s=None), Hung(1, "step", 30.0), 40.0)
    assert not list(due(diagnosing, diagnosing.diagnosed_s - 0.1))
    [event] = due(diagnosing, diagnosing.diagnosed_s)
    assert isinstance(event, Diagnosed)


def test_a_deadline_in_a_diagnosis_stops_in_time_and_rescues_the_snapshot(training):
    diagnosing, _ = advance(training, Hung(1, "step", 30.0), 80.0)
    assert diagnosing.deadline_s is not None and 80.0 < diagnosing.deadline_s < 90.0
    [event] = due(diagnosing, diagnosing.deadline_s)
    stopping, actions = advance(diagnosing, event, diagnosing.deadline_s)
    assert stopping.phase is Phase.STOPPING and actions == (Effect.ASK_TO_STOP,)  # it may have been none
    [event] = due(stopping, 90.0)
    assert event == LastSaveLate() and advance(stopping, event, 90.0)[1] == (Effect.PERSIST_SNAPSHOT,)
    rescued, _ = advance(stopping, event, 90.0)
    over, actions = advance(rescued, next(due(rescued, rescued.kill_s)), rescued.kill_s)
    assert over.phase is Phase.CUT_OFF and Effect.KILL_ATTEMPT in actions and rescued.kill_s < 100.0


def test_a_supervisor_that_takes_over_a_diagnosis_watches_anew(training):
    diagnosing, _ = advance(training, Hung(1, "step", 30.0), 40.0)
    assert advance(diagnosing, Adopted(), 41.0)[0].phase is Phase.TRAINING


def test_a_crash_while_stopping_does_not_launch_again(training):
    stopping, _ = advance(training, DeadlineReached(), 90.0)
    over, actions = advance(stopping, AttemptCrashed("boom"), 91.0)
    assert over.phase is Phase.CUT_OFF
    assert [type(action) for action in actions] == [NextSession]


def test_a_finished_stage_launches_the_next_one_but_not_while_stopping(training):
    assert advance(training, StageFinished(), 30.0)[1] == (Effect.LAUNCH,)
    stopping, _ = advance(training, StopRequested(Reason.USER), 30.0)
    over, actions = advance(stopping, StageFinished(), 31.0)
    assert over.phase is Phase.SUSPENDED and Effect.LAUNCH not in actions


def test_a_supervisor_that_takes_over_a_stopping_session_asks_again(training):
    stopping, _ = advance(training, DeadlineReached(), 90.0)
    assert advance(stopping, Adopted(), 91.0)[1] == (Effect.ASK_TO_STOP,)


def test_a_supervisor_that_takes_over_a_save_lets_the_training_go_on(training):
    saving, _ = advance(training, CheckpointDue(), 20.0)
    assert advance(saving, Adopted(), 21.0)[0].phase is Phase.TRAINING


@pytest.mark.parametrize("phase", list(Phase))
@pytest.mark.parametrize("event", EVENTS, ids=lambda event: repr(event))
def test_every_pair_is_in_the_table_or_changes_nothing(phase, event):
    session = LifecycleState(phase=phase, wall_s=100.0)
    if (phase, type(event)) in TRANSITIONS:
        moved, _ = advance(session, event, 10.0)
        assert moved.phase is TRANSITIONS[phase, type(event)].to
    else:
        with pytest.raises(IllegalTransition):
            advance(session, event, 10.0)


def test_there_is_no_way_out_of_an_end():
    assert not [phase for phase, _ in TRANSITIONS if phase in OVER]


def test_every_phase_can_be_reached_and_every_living_one_can_end():
    reached = {Phase.QUEUED} | {row.to for row in TRANSITIONS.values()}
    assert reached == set(Phase)
    for phase in set(Phase) - OVER:
        frontier, seen = {phase}, set()
        while frontier:
            seen |= frontier
            frontier = {row.to for (at, _), row in TRANSITIONS.items() if at in frontier} - seen
        assert seen & OVER, phase


@given(st.lists(st.sampled_from(EVENTS), max_size=40), st.floats(0.1, 50))
def test_whatever_happens_an_end_queues_a_resume_unless_it_is_finished_or_failed(events, step_s):
    session, now, queued = LifecycleState(wall_s=500.0, every_s=20.0), 0.0, 0
    for event in [SessionOpened(), *events]:
        now += step_s
        try:
            session, actions = advance(session, event, now)
        except IllegalTransition:
            continue
        queued += sum(isinstance(action, NextSession) for action in actions)
        at = next_due_s(session, now)
        assert at is None or list(due(session, at)), "what is announced as due is due then"
    assert queued == (session.phase in (Phase.SUSPENDED, Phase.CUT_OFF))


RUNNING = [phase for phase in Phase if phase not in OVER and phase is not Phase.QUEUED]


def test_a_row_says_what_is_recorded_and_what_is_done():
    for (phase, event), row in TRANSITIONS.items():
        where = f"{phase}, {event.__name__}"
        assert row.queues == (row.to in (Phase.SUSPENDED, Phase.CUT_OFF)), where
        assert row.to not in OVER or row.outcome, f"{where}: an attempt does not outlive its session"
        assert (Effect.LAUNCH in row.effects) <= (row.to in (Phase.STARTING, Phase.RECOVERING)), where
        assert not row.finishes_stage or row.outcome is Outcome.FINISHED, where


def test_an_attempt_that_ends_is_closed_in_the_same_move(training):
    crashed = core.advance(training, AttemptCrashed("rank 1: boom"), 30.0)
    assert (crashed.record.outcome, crashed.record.cause) == (Outcome.CRASHED, "rank 1: boom")
    assert crashed.record.facts == {"cause": "rank 1: boom"} and crashed.record.resume is None
    done = core.advance(training, StageFinished(), 30.0)
    assert done.record.outcome is Outcome.FINISHED and done.record.finishes_stage


def test_what_a_user_stops_is_stopped_and_not_ended_by_a_time_limit(training):
    stopping = core.advance(training, StopRequested(Reason.USER), 30.0).session
    assert core.advance(stopping, AttemptSuspended(), 31.0).record.outcome is Outcome.STOPPED
    assert core.advance(stopping, GraceExpired(), 99.5).record.outcome is Outcome.STOPPED
    assert core.advance(stopping, AttemptCrashed("boom"), 31.0).record.outcome is Outcome.CRASHED


def test_a_session_that_is_cut_off_says_how_many_steps_are_lost(training):
    trained = replace(training, step=120, saved_step=100, step_s=0.5)
    stopping = core.advance(trained, DeadlineReached(), 90.0).session
    cut = core.advance(stopping, GraceExpired(), 99.5)
    assert cut.session.why.endswith("; 20 steps since step 100 are lost")
    assert cut.record.facts == {"lost_steps": 20, "lost_s": 10.0, "saved_step": 100}
    said = [core.why_after(cut.session, step).rpartition("; ")[2] for step in (100, 110, 120)]
    assert said == [
        "20 steps since step 100 are lost", "10 steps since step 110 are lost", "nothing is lost: it was done after all",
    ]  # fmt: skip
    assert core.why_after(stopping, 120) == stopping.why, "it has not ended"


@pytest.mark.parametrize(
    ("end", "by_itself", "phase", "kind", "outcome"),
    [
        (None, False, Phase.CUT_OFF, EventKind.SESSION_LOST, Outcome.LOST),
        (StageFinished(), False, Phase.SUSPENDED, EventKind.STAGE_FINISHED, Outcome.FINISHED),
        (RunFinished(), False, Phase.FINISHED, EventKind.RUN_FINISHED, Outcome.FINISHED),
        (AttemptSuspended(), False, Phase.SUSPENDED, EventKind.ATTEMPT_SUSPENDED, Outcome.SUSPENDED),
        (AttemptUnsaved("disk full"), False, Phase.CUT_OFF, EventKind.ATTEMPT_UNSAVED, Outcome.UNSAVED),
        (AttemptCrashed("boom"), True, Phase.CUT_OFF, EventKind.SESSION_LOST, Outcome.CRASHED),
        (AttemptCrashed("killed"), False, Phase.CUT_OFF, EventKind.SESSION_LOST, Outcome.LOST),
        (RetriesExhausted("boom"), True, Phase.CUT_OFF, EventKind.SESSION_LOST, Outcome.CRASHED),
        (OutOfMemory("no room", "microbatch/2"), False, Phase.CUT_OFF, EventKind.SESSION_LOST, Outcome.OUT_OF_MEMORY),
        (AttemptDiverged("nan", "skip"), False, Phase.CUT_OFF, EventKind.SESSION_LOST, Outcome.DIVERGED),
    ],
)
def test_a_session_without_a_supervisor_ends_by_the_same_table(training, end, by_itself, phase, kind, outcome):
    move = ended_alone(training, end, 50.0, failed_by_itself=by_itself)
    assert (move.session.phase, move.record.kind, move.record.outcome) == (phase, kind, outcome)
    assert not move.effects, "nothing is launched where nobody supervises"
    assert (move.record.resume is not None) == (phase is not Phase.FINISHED)


def test_a_users_stop_stays_one_where_the_supervisor_died_too(training):
    stopping = core.advance(training, StopRequested(Reason.USER), 30.0).session
    move = ended_alone(stopping, AttemptCrashed("killed"), 50.0)
    assert move.record.resume and move.record.resume.when_asked


@pytest.mark.parametrize("phase", RUNNING)
def test_a_wall_that_comes_nearer_counts_in_every_phase_and_moves_none(phase):
    session = LifecycleState(phase=phase, wall_s=100.0)
    moved, actions = advance(session, WallMoved(Wall(60.0, Reason.SPOT)), 10.0)
    assert (moved.phase, moved.wall_s, moved.wall_kind, actions) == (phase, 60.0, Reason.SPOT, ())
    assert moved.deadline_s == 60.0 - moved.save_lead_s


@pytest.mark.parametrize("phase", [phase for phase in RUNNING if phase is not Phase.STOPPING])
@pytest.mark.parametrize("wall", [Wall(500.0, Reason.SLURM), None])
def test_a_wall_that_moves_away_or_goes_gives_its_time_back(phase, wall):
    moved, actions = advance(LifecycleState(phase=phase, wall_s=100.0, wall_kind=Reason.QUOTA), WallMoved(wall), 10.0)
    assert (moved.wall_s, moved.wall_kind) == (wall or (None, Reason.TIME_LIMIT))
    assert not actions and not [event for event in due(moved, 99.0) if event == DeadlineReached()]


@pytest.mark.parametrize("wall", [Wall(500.0, Reason.SLURM), None])
def test_while_stopping_a_wall_only_comes_nearer(training, wall):
    stopping, _ = advance(training, DeadlineReached(), 80.0)
    later, actions = advance(stopping, WallMoved(wall), 81.0)
    assert (later.wall_s, later.wall_kind, actions) == (100.0, Reason.TIME_LIMIT, ())
    nearer, _ = advance(stopping, WallMoved(Wall(90.0, Reason.SPOT)), 81.0)
    assert nearer.wall_s == 90.0 and nearer.kill_s < stopping.kill_s


def test_a_session_that_stops_without_a_wall_takes_the_first_that_comes(training):
    stopping, _ = advance(replace(training, wall_s=None), StopRequested(Reason.USER), 15.0)
    warned, _ = advance(stopping, WallMoved(Wall(40.0, Reason.SPOT)), 16.0)
    assert warned.wall_s == 40.0 and warned.reason is Reason.USER, (
        "what it was stopped for stays what it is told to end by"
    )


@pytest.mark.parametrize("at_s", [5.0, 51.0])
def test_a_wall_in_the_past_or_within_the_lead_stops_training_at_once_and_is_what_ended_it(training, at_s):
    moved, _ = advance(training, WallMoved(Wall(at_s, Reason.SPOT)), 50.0)
    [event] = due(moved, 50.0)
    stopping, actions = advance(moved, event, 50.0)
    assert (
        stopping.phase is Phase.STOPPING
        and actions == (Effect.ASK_TO_STOP,)
        and stopping.why == REASON_TEXT[Reason.SPOT]
    )
    assert advance(stopping, AttemptSuspended(), 50.5)[1] == (queued(Reason.SPOT),)


def test_a_wall_that_moves_while_coming_up_ends_the_session_before_it_began_to_train():
    starting, _ = advance(LifecycleState(), SessionOpened(), 0.0)
    warned, _ = advance(starting, WallMoved(Wall(3.0, Reason.SLURM)), 1.0)
    [event] = due(warned, 1.0)
    over, actions = advance(warned, event, 1.0)
    assert over.phase is Phase.SUSPENDED and actions == (Effect.KILL_ATTEMPT, queued(Reason.SLURM))


def test_a_quota_that_ends_a_session_says_so_to_the_queue_unless_a_person_was_first(training):
    moved, _ = advance(training, WallMoved(Wall(51.0, Reason.QUOTA)), 50.0)
    stopping, _ = advance(moved, DeadlineReached(), 50.0)
    assert advance(stopping, AttemptSuspended(), 50.5)[1] == (queued(Reason.QUOTA),)
    asked, _ = advance(moved, StopRequested(Reason.USER), 50.0)
    assert advance(asked, AttemptSuspended(), 50.5)[1] == (queued(Reason.USER),)


def test_of_all_walls_the_nearest_counts_and_a_tremble_is_no_move():
    near, far = Wall(10.0, Reason.SPOT), Wall(20.0, Reason.TIME_LIMIT)
    assert nearest([far, None, near]) == near and nearest([None]) is None
    assert not has_moved(near, Wall(10.4, Reason.SPOT)) and not has_moved(None, None)
    assert (
        has_moved(near, Wall(10.6, Reason.SPOT)) and has_moved(near, Wall(10.0, Reason.SLURM)) and has_moved(near, None)
    )
