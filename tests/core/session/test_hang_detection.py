"""When a rank counts as hung, told in stories."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kgorch.core.session.events import Hung
from kgorch.core.session.hang_detection import ASLEEP_S, PLACES, RULES, STILL_S, HangDetector
from kgorch.launch.stack_dumps import Frame, Stack, culprit, frames_of_dump, frames_of_spy


def with_attempt(longest=None, given=None, *, ranks=2, without_progress=0, at_s=0.0) -> HangDetector:
    return HangDetector(given or {}, longest or {}).with_attempt(ranks, at_s, without_progress=without_progress)


def after(
    watch: HangDetector, rank: int, where: str, for_s: float, now: float, *, still_s: float | None = None
) -> HangDetector:
    return watch.with_report(rank, where, for_s, for_s if still_s is None else still_s, now)


def in_places(longest, *places: str, given=None, at_s=0.0) -> HangDetector:
    """Each rank has just come to its place."""
    watch = with_attempt(longest, given, ranks=len(places), at_s=at_s)
    for rank, where in enumerate(places):
        watch = after(watch, rank, where, 0.0, at_s)
    return watch


def looked_at(watch: HangDetector, until_s: float) -> Hung | None:
    """By a supervisor that looks every four seconds."""
    now = watch.checked_s
    while now < until_s:
        now += 4.0
        watch = watch.at_check(now)
        if first_hung := watch.first_hung(now):
            return first_hung
    return None


def test_a_step_that_stands_for_ten_times_the_longest_is_a_hang():
    watch = in_places({"step": 60.0}, "step", "step", at_s=100.0)
    assert looked_at(watch, 695.0) is None
    assert looked_at(watch, 800.0) == Hung(0, "step", pytest.approx(600.0, abs=4.0))


def test_short_steps_do_not_make_a_short_time_out():
    assert with_attempt({"step": 0.02}).limit_s("step") == RULES["step"].floor_s == 300.0


def test_a_place_never_seen_gets_more_time_than_one_that_was_seen():
    for place, rule in RULES.items():
        assert with_attempt().limit_s(place) == rule.unseen_s > with_attempt({place: 0.1}).limit_s(place)


def test_a_long_validation_is_none_though_steps_are_short():
    watch = after(with_attempt({"step": 0.02}, ranks=1), 0, "evaluation", 0.0, 0.0)
    assert looked_at(watch, 3500.0) is None
    assert looked_at(watch, 4000.0)


def test_what_moves_has_not_hung_however_long_it_takes():
    hours = 20_000.0
    watch = after(with_attempt(ranks=1, at_s=hours), 0, "evaluation", hours, hours, still_s=2.0)
    assert watch.first_hung(hours) is None
    assert watch.first_hung(hours + STILL_S)


@pytest.mark.parametrize("given", [{}, {"step": 4.0, "first_step": 4.0}])
@pytest.mark.parametrize("waits_in", ["step", "first_step"])
@pytest.mark.parametrize("place", ["start", "evaluation", "save"])
def test_who_waits_for_a_rank_that_is_busy_alone_has_not_hung_until_that_one_has(place, waits_in, given):
    watch = in_places({"step": 0.02, "first_step": 1.0}, place, waits_in, given=given)
    assert looked_at(watch, 20_000.0) == Hung(0, place, pytest.approx(watch.limit_s(place), abs=4.0))


def test_whoever_waited_for_another_has_its_whole_time_from_then_on():
    watch = in_places({"step": 0.02}, "evaluation", "step")
    for now in range(1, 1000):
        if now < 500:
            watch = after(watch, 0, "evaluation", now, now, still_s=0.0)
        elif now == 500:  # rank 0 goes on, and that rank 1 does so too is not yet known
            watch = after(watch, 0, "step", 0.0, now)
        watch = watch.at_check(now)
        if first_hung := watch.first_hung(now):
            assert (first_hung, now) == (Hung(1, "step", 799.0), 799)
            return
    raise AssertionError


def test_a_validation_that_moves_excuses_its_waiting_peers_for_as_long_as_it_takes():
    watch = in_places({"step": 0.02, "evaluation": 1.0}, "evaluation", "step", "evaluation")
    for now in range(0, 20_000, 4):
        watch = after(watch, 0, "evaluation", now, now, still_s=0.0).at_check(now)
        assert watch.first_hung(now) is None


def test_two_that_hang_in_a_validation_are_no_excuse_for_each_other():
    first_hung = looked_at(in_places({"evaluation": 1.0}, "evaluation", "evaluation"), 2000.0)
    assert first_hung == Hung(0, "evaluation", pytest.approx(900.0, abs=4.0))


def test_a_step_that_hangs_has_no_more_time_with_all_others_in_one_or_after_the_session():
    for others in ("step", "first_step", "end"):
        first_hung = looked_at(in_places({"step": 0.02, "first_step": 0.1}, "step", others), 400.0)
        assert first_hung == Hung(0, "step", pytest.approx(300.0, abs=4.0))


def test_a_time_out_that_the_plan_names_counts_by_the_clock_alone():
    watch = after(with_attempt(given={"step": 4.0}, ranks=1, without_progress=2), 0, "step", 5.0, 5.0, still_s=0.1)
    assert watch.first_hung(5.0) == Hung(0, "step", 5.0)


def test_a_rank_that_falls_silent_stays_where_it_was():
    watch = in_places({"step": 1.0}, "step", "step", at_s=10.0)
    for now in range(11, 320):  # rank 0 is stopped; rank 1 waits for it, says so, and has been there a moment less
        watch = after(watch.at_check(now), 1, "step", now - 10.5, now)
        if first_hung := watch.first_hung(now):
            assert (first_hung.rank, now) == (0, 310)
            return
    raise AssertionError


def test_time_in_which_nobody_looked_counts_for_nobody():
    watch = after(with_attempt({"step": 1.0}, ranks=1), 0, "step", 0.0, 0.0)
    assert watch.at_check(100_000.0).first_hung(100_000.0) is None, "a laptop that was closed"
    assert ASLEEP_S > 1.0


def test_a_start_begins_with_the_launch_and_is_learned_when_it_is_over():
    watch = after(with_attempt(ranks=1), 0, "start", 0.5, 20.0)
    watch = after(watch, 0, "first_step", 1.0, 31.0)
    assert watch.longest == {"start": 30.0}


def test_what_each_place_took_is_kept_and_only_grows():
    watch = with_attempt({"step": 2.0}).with_durations({"step": 1.0, "save": 3.0, "end": 9.0})
    assert watch.longest == {"step": 2.0, "save": 3.0}


def test_one_long_pause_does_not_make_time_outs_of_many_hours():
    assert with_attempt({"step": 3600.0}).limit_s("step") == 7200.0
    assert with_attempt({"step": 300.0}).limit_s("step") == RULES["step"].unseen_s


def test_each_attempt_without_progress_doubles_the_patience():
    limits = [with_attempt({"step": 1.0}, without_progress=count).limit_s("step") for count in range(3)]
    assert limits == [300.0, 600.0, 1200.0]


def test_after_the_session_a_script_is_on_its_own():
    assert looked_at(after(with_attempt(ranks=1), 0, "end", 0.0, 0.0), 50_000.0) is None


@given(
    st.dictionaries(st.sampled_from(list(RULES)), st.floats(0, 1e5)), st.sampled_from(list(RULES)), st.integers(0, 2)
)
def test_no_time_out_is_shorter_than_what_was_seen(longest, place, without_progress):
    limit_s = with_attempt(longest, without_progress=without_progress).limit_s(place)
    assert limit_s is not None and limit_s > longest.get(place, 0.0) and place in PLACES


def test_a_long_computation_with_progress_is_no_hang_and_one_without_is_the_computing_ranks():
    watch = in_places({}, "data", "wait")
    for now in range(4, 2 * 3600, 4):
        watch = after(after(watch.at_check(now), 0, "data", 1.0, now, still_s=0.0), 1, "wait", float(now), now)
        assert watch.first_hung(now) is None
    assert looked_at(watch, 12 * 3600.0) == Hung(0, "data", pytest.approx(3600.0, abs=10.0))


DUMP = """
── 2026-01-01T00:00:00+00:00 rank 0, pid 7, sleeping
Thread 0x00007f0956ad26c0 (most recent call first):
  File "/usr/lib/python3.11/selectors.py", line 468 in select
  File "/usr/lib/python3.11/threading.py", line 1002 in _bootstrap

Current thread 0x00007f0977bc9b80 (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 327 in wait
  File "/home/me/train.py", line 39 in loss_of
  File "<frozen runpy>", line 198 in _run_module_as_main
"""

SPIED = """
Process 7: python -m kgorch.worker.entry
Thread 8 (idle): "kgorch-link"
    select (/usr/lib/python3.11/selectors.py:468)
Thread 7 (idle): "MainThread"
    Condition.wait (/usr/lib/python3.11/threading.py:327)
    loss_of (/home/me/train.py:39)
"""


def test_the_main_threads_frames_are_read_from_either_tool():
    dump, spied = frames_of_dump(DUMP), frames_of_spy(SPIED)
    assert dump[:2] == (
        Frame("/usr/lib/python3.11/threading.py", 327, "wait"),
        Frame("/home/me/train.py", 39, "loss_of"),
    )
    assert [frame.line for frame in spied] == [327, 39]
    assert frames_of_dump("") == frames_of_spy("nothing") == ()


def test_the_rank_for_which_the_others_wait_is_named():
    waiting = Stack(
        0,
        "sleeping",
        (Frame("/x/site-packages/torch/autograd/graph.py", 1, "run"), Frame("/home/me/train.py", 4, "main")),
    )
    deadlocked = Stack(1, "sleeping", (Frame("/home/me/train.py", 39, "loss_of"),))
    stopped = Stack(2, "stopped", waiting.frames)
    assert culprit([waiting, deadlocked]) == deadlocked
    assert culprit([waiting, deadlocked, stopped]) == stopped
    assert culprit([]) is None
    assert str(stopped) == "process is stopped, train.py:4 in main, graph.py:1 in run"
