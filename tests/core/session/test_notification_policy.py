"""Stories of which event is told, and how often."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kgorch.core.codes import Phase, Reason
from kgorch.core.session import events, notification_policy
from kgorch.core.session.lifecycle_state import LifecycleState
from kgorch.core.session.notification_policy import KINDS, Notice, NoticeFilter
from kgorch.errors import PlanError
from kgorch.plan import parse

PLAN = 'name = "x"\n[[stage]]\nname = "t"\nentry = "t.py"\n[notify]\n'


@pytest.mark.parametrize(
    ("event", "phase", "kinds"),
    [
        (events.SessionOpened(), Phase.STARTING, ("resumed",)),
        (events.CheckpointVerified(7, 1.0), Phase.TRAINING, ("saved",)),
        (events.OutOfMemory("", "microbatch/2"), Phase.RECOVERING, ("rung",)),
        (events.AttemptDiverged("nan", "rollback"), Phase.RECOVERING, ("remedied",)),
        (events.Hung(1, "step", 40.0), Phase.DIAGNOSING, ("hung",)),
        (events.AttemptSuspended(), Phase.SUSPENDED, ("suspended",)),
        (events.GraceExpired(), Phase.CUT_OFF, ("cut_off",)),
        (events.RetriesExhausted("x"), Phase.FAILED, ("failed",)),
        (events.RunFinished(), Phase.FINISHED, ("finished",)),
    ],
)
def test_each_event_is_told_as_the_kind_that_it_is(event, phase, kinds):
    told = notification_policy.notice_of(event, LifecycleState(phase=phase), number=2)
    assert told is not None and told.kinds == kinds and set(kinds) <= set(KINDS)


def test_what_is_no_news_is_not_told():
    assert notification_policy.notice_of(events.Attached(), LifecycleState(phase=Phase.TRAINING), number=1) is None
    assert notification_policy.notice_of(events.Adopted(), LifecycleState(phase=Phase.TRAINING), number=1) is None


def test_a_save_that_waits_for_an_evaluation_is_not_called_failed():
    late, failed = (
        notification_policy.notice_of(events.SaveFailed("no", overdue), LifecycleState(phase=Phase.TRAINING), number=1)
        for overdue in (True, False)
    )
    assert "failed" in failed.text and "failed" not in late.text and "late" in late.text


def test_the_first_session_starts_the_run_and_a_later_one_resumes_it():
    kinds = [
        notification_policy.notice_of(events.SessionOpened(), LifecycleState(phase=Phase.STARTING), number=number).kinds
        for number in (1, 2)
    ]
    assert kinds == [("started",), ("resumed",)]


def test_a_session_whose_hours_are_spent_is_told_as_quota_or_as_its_end_to_who_wants_that_alone():
    ended = LifecycleState(phase=Phase.SUSPENDED, wall_kind=Reason.QUOTA, reason=Reason.QUOTA, why="the quota")
    told = notification_policy.notice_of(events.AttemptSuspended(), ended, number=1)
    assert NoticeFilter(["quota", "suspended"]).accept(told, 0.0) == ("quota", 0)
    assert NoticeFilter(["suspended"]).accept(told, 0.0) == ("suspended", 0)
    assert NoticeFilter(["finished"]).accept(told, 0.0) is None
    finished = notification_policy.notice_of(events.RunFinished(), replace(ended, phase=Phase.FINISHED), number=1)
    assert finished.kinds == ("finished",), "a run that is finished asks for no hours"


def test_saves_are_told_once_a_minute_and_how_many_were_left_unsaid():
    sieve, save = NoticeFilter(["saved", "failed"]), Notice(("saved",), "")
    assert [sieve.accept(save, at_s) for at_s in (0.0, 20.0, 59.0, 60.0, 61.0)] == [
        ("saved", 0),
        None,
        None,
        ("saved", 2),
        None,
    ]
    failed = Notice(("failed",), "")
    assert [sieve.accept(failed, 61.0) for _ in range(2)] == [("failed", 0)] * 2, "an end is never left unsaid"


def test_for_want_of_room_the_oldest_save_goes_first():
    assert notification_policy.index_to_drop(["failed", "rung", "saved", "saved"]) == 2
    assert notification_policy.index_to_drop(["failed", "rung"]) == 0


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('on = ["finnished"]', "did you mean 'finished'?"),
        ('urls = ["hooks.example.org"]', "expected URLs such as"),
        ('urls = ["https://a"' + ', "https://a"' * 8 + "]", "at most 8"),
        ("command = []\nurl = []", "did you mean 'urls'?"),
        ('command = [""]', "expected a program"),
        ('command = ["a\\u0000b"]', "expected a program"),
    ],
)
def test_a_mistake_in_the_plans_notify_part_is_named(line, said):
    with pytest.raises(PlanError) as caught:
        parse(PLAN + line, "plan.toml")
    assert said in str(caught.value)


@pytest.mark.parametrize(
    "line",
    [
        'urls = "https://h/s3cr3t"',
        'urls = ["s3cr3t"]',
        'command = "curl s3cr3t"',
        'command = ["\\u0000s3cr3t"]',
        'urls = [["s3cr3t"]]',
    ],
)
def test_a_mistake_in_a_url_or_a_command_is_told_without_what_was_found(line):
    with pytest.raises(PlanError) as caught:
        parse(PLAN + line, "plan.toml")
    assert "notify" in str(caught.value) and "s3cr3t" not in str(caught.value)
