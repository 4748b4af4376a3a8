"""Deadline, cadence, retention, outcome: the small decisions."""

from __future__ import annotations

import errno
import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kgorch.core.checkpoint import checkpoint_interval, retention, save_deadline
from kgorch.core.checkpoint.retention import RetentionCandidate, RetentionRule, to_drop
from kgorch.core.checkpoint.save_deadline import Save
from kgorch.core.codes import RankError, RankOutcome
from kgorch.core.session.attempt_outcome import (
    AttemptEnd,
    RankRecord,
    exhausted_memory,
    failed_step,
    final_step,
    first_cause,
    is_same_error,
    verdict,
)
from kgorch.core.session.events import (
    AttemptCrashed,
    AttemptSuspended,
    OutOfMemory,
    RetriesExhausted,
    RunFinished,
    StageFinished,
)
from kgorch.platforms.detect import detect
from kgorch.worker.entry import code_of
from kgorch.worker.session_end import SaveLost


def test_before_the_first_save_the_guess_follows_size_and_measured_speed():
    assert save_deadline.first_guess_s(300_000_000, 100e6) == pytest.approx(2 + 9)
    assert save_deadline.first_guess_s(0, 0) == 2.0


def test_a_margin_that_nobody_names_is_a_hundredth_of_the_session_within_bounds():
    hours, minute, short = 9 * 3600.0, 60.0, 20.0
    assert [save_deadline.default_margin_s(wall) for wall in (hours, minute, short)] == [120.0, 0.6, 0.5]


def test_the_lead_counts_on_the_slowest_of_the_runs_saves_and_forgets_those_long_ago():
    assert save_deadline.save_s([Save(10, 60.0)] + [Save(10, 2.0)] * 19, 10, guess_s=99) < 2.5
    assert save_deadline.save_s([Save(10, 60.0)] + [Save(10, 2.0)] * 18, 10, guess_s=99) > 60
    assert save_deadline.save_s([], 10, guess_s=99) == 99


def test_few_saves_tell_little_so_more_is_counted_on():
    leads = [save_deadline.save_s([Save(10, 4.0)] * count, 10, guess_s=99) for count in (1, 4, 16)]
    assert leads == [pytest.approx(8.0), pytest.approx(6.0), pytest.approx(5.0)]


def test_a_state_that_has_grown_is_counted_on_to_take_longer():
    assert save_deadline.save_s([Save(100, 2.0)] * 16, 400, guess_s=99) == pytest.approx(10.0)
    assert save_deadline.save_s([Save(400, 2.0)] * 16, 100, guess_s=99) == pytest.approx(2.5)


def test_the_interval_is_youngs_and_bounded_by_the_plan():
    assert checkpoint_interval.interval_s(0.06, trained_s=0, failures=0) == pytest.approx(
        math.sqrt(2 * 0.06 * 9 * 3600), rel=1e-6
    )
    assert checkpoint_interval.interval_s(0.06, trained_s=0, failures=0, at_most_s=5) == 5
    assert checkpoint_interval.interval_s(1.0, trained_s=3600, failures=20) < checkpoint_interval.interval_s(
        1.0, trained_s=3600, failures=0
    )


kept = st.builds(
    RetentionCandidate,
    key=st.uuids().map(str),
    stage=st.sampled_from(["train", "predict"]),
    step=st.integers(0, 1000),
    bytes=st.integers(0, 10**9),
    order=st.floats(0, 1e6),
    verified=st.booleans(),
    final=st.booleans(),
    metrics=st.dictionaries(st.just("dice"), st.sampled_from([0.1, 0.5, 0.9, math.nan, math.inf, -math.inf])),
    measured=st.dictionaries(st.just("dice"), st.integers(0, 3)),
)
rules = st.builds(
    RetentionRule,
    last=st.integers(1, 5),
    best=st.sampled_from([None, ("dice", True), ("dice", False)]),
    disk_bytes=st.none() | st.integers(0, 10**9),
)


@given(st.lists(kept, max_size=12, unique_by=(lambda item: item.key, lambda item: item.order)), rules)
def test_the_newest_verified_checkpoint_and_the_final_ones_are_never_dropped(checkpoints, rule):
    dropped = set(to_drop(checkpoints, rule))
    verified = [item for item in checkpoints if item.verified]
    if verified:
        assert max(verified, key=lambda item: item.order).key not in dropped
    verified = sorted((item for item in checkpoints if item.verified), key=lambda item: item.order)
    finals = {item.stage: item.key for item in verified if item.final}  # the newest of each stage
    assert not dropped & {*finals.values(), *(item.key for item in checkpoints if not item.verified)}


def _saved(step, **more):
    return RetentionCandidate(
        key=str(step), stage="train", step=step, bytes=100, order=float(step), verified=True, **more
    )


def test_the_last_and_the_best_are_kept():
    saves = [_saved(step, metrics={"dice": dice}) for step, dice in [(1, 0.5), (2, 0.9), (3, 0.6), (4, 0.7), (5, 0.8)]]
    assert to_drop(saves, RetentionRule(last=2, best=("dice", True))) == ("1", "3")
    assert to_drop(saves, RetentionRule(last=2, best=("dice", False))) == ("2", "3")


def test_a_nan_is_never_the_best():
    saves = [_saved(step, metrics={"dice": dice}) for step, dice in [(1, math.nan), (2, 0.9), (3, 0.6), (4, 0.5)]]
    assert to_drop(saves, RetentionRule(last=1, best=("dice", True))) == ("1", "3")
    assert to_drop(saves, RetentionRule(last=1, best=("dice", False))) == ("1", "2", "3")


def test_weights_that_were_trained_on_since_do_not_compete_for_the_best():
    """Evaluated after steps 100, 200 and 300, with 0.9, 0.8 and 0.7; saved by the clock besides."""
    saves = [
        _saved(100, metrics={"accuracy": 0.9}, measured={"accuracy": 100}),
        _saved(104, metrics={"accuracy": 0.9}, measured={"accuracy": 100}),
        _saved(170, metrics={"accuracy": 0.9}, measured={"accuracy": 100}),
        _saved(300, metrics={"accuracy": 0.7}, measured={"accuracy": 300}),
    ]
    assert to_drop(saves, RetentionRule(last=1, best=("accuracy", True))) == ("104", "170")
    assert to_drop(saves[1:], RetentionRule(last=1, best=("accuracy", True))) == ("104", "170")


def test_of_equals_the_first_is_the_best():
    saves = [_saved(step, metrics={"dice": 0.5}, measured={"dice": step}) for step in (1, 2, 3, 4)]
    assert to_drop(saves, RetentionRule(last=1, best=("dice", True))) == ("2", "3")
    assert to_drop(saves, RetentionRule(last=1, best=("dice", False))) == ("2", "3")


def test_a_checkpoint_of_unknown_measurement_competes_only_where_none_is_known():
    old = [_saved(step, metrics={"dice": dice}) for step, dice in [(1, 0.7), (2, 0.99), (3, 0.8)]]
    new = [_saved(step, metrics={"dice": dice}, measured={"dice": step}) for step, dice in [(4, 0.6), (5, 0.5)]]
    assert to_drop(old, RetentionRule(last=1, best=("dice", True))) == ("1",)
    assert to_drop([*old, *new], RetentionRule(last=1, best=("dice", True))) == ("1", "2", "3")


def test_the_best_goes_last_for_a_disk_budget():
    dices = [(1, 0.9), (2, 0.6), (3, 0.7), (4, 0.8)]
    saves = [_saved(step, metrics={"dice": dice}, measured={"dice": step}, number=step) for step, dice in dices]
    rule = RetentionRule(last=2, every=3, best=("dice", True))
    assert to_drop(saves, rule) == ()
    assert to_drop(saves, replace(rule, disk_bytes=300)) == ("2",), "each third, before the best"
    assert to_drop(saves, replace(rule, disk_bytes=200)) == ("2", "3")
    assert to_drop(saves, replace(rule, disk_bytes=100)) == ("1", "2", "3")


saves_of_a_run = st.lists(
    st.tuples(st.sampled_from([0.1, 0.5, 0.9, math.nan, math.inf, None]), st.booleans(), st.booleans()), max_size=12
)


@given(saves_of_a_run, st.booleans(), st.integers(1, 3))
def test_the_kept_best_is_the_first_of_the_best_that_were_measured(told, highest, last):
    """As a run goes: what a save lets go never comes back, and still the best of all stands."""
    standing: list[RetentionCandidate] = []
    for step, (value, is_measured, verified) in enumerate(told):
        metrics = {} if value is None else {"dice": value}
        measured = {} if value is None else {"dice": step if is_measured else step - 1}
        save = RetentionCandidate(
            str(step), "train", step, 10, float(step), verified, metrics=metrics, measured=measured
        )
        standing.append(save)
        gone = to_drop(standing, RetentionRule(last=last, best=("dice", highest)))
        standing = [item for item in standing if item.key not in gone]
    sign = 1 if highest else -1
    measured = [
        (-sign * value, step)
        for step, (value, is_measured, verified) in enumerate(told)
        if verified and is_measured and value is not None and math.isfinite(value)
    ]
    found = retention.best_of([item for item in standing if item.verified], "dice", highest)
    assert (found.step if found else None) == (min(measured)[1] if measured else None)


def test_the_best_of_a_stage_stays_when_the_next_stage_saves():
    saves = [
        _saved(1, metrics={"dice": 0.9}),
        _saved(2, metrics={"dice": 0.5}),
        RetentionCandidate("p", "predict", 1, 100, 9.0, True),
    ]
    assert to_drop(saves, RetentionRule(last=1, best=("dice", True))) == ()


def test_a_disk_budget_takes_the_oldest_first_and_stops_at_the_newest():
    saves = [_saved(step) for step in (1, 2, 3)]
    assert to_drop(saves, RetentionRule(last=3, disk_bytes=250)) == ("1",)
    assert to_drop(saves, RetentionRule(last=3, disk_bytes=10)) == ("1", "2")


def test_nothing_goes_before_something_newer_is_verified():
    assert (
        to_drop([retention.RetentionCandidate("1", "train", 1, 10, 1.0, verified=False)], RetentionRule(last=1)) == ()
    )


def test_a_disk_that_others_fill_costs_neither_the_last_two_nor_the_best():
    saves = [_saved(step, metrics={"dice": 1.0 / step}) for step in (1, 2, 3, 4)]
    assert to_drop(saves, RetentionRule(last=4, best=("dice", True), room_bytes=0)) == ("2",)
    assert to_drop(saves, RetentionRule(last=4, room_bytes=250)) == ("1", "2")


def test_two_checkpoints_that_take_most_of_the_disk_leave_room_for_the_next():
    """7 GB each, as on Kaggle's 20 GB: the next one needs 8.4, so the last alone may stay."""
    saves = [_saved(step, metrics={"dice": 1.0 / step}) for step in (1, 2)]
    assert to_drop(saves, RetentionRule(last=3, room_bytes=166)) == ("1",)
    assert to_drop(saves, RetentionRule(last=3, best=("dice", True), room_bytes=166)) == ()
    assert to_drop(saves, RetentionRule(last=3, room_bytes=99)) == (), "even that would not make enough room"


def test_each_kth_checkpoint_of_a_stage_is_kept_for_good_whatever_was_dropped_between():
    kept = [RetentionCandidate(str(n), "train", n, 10, float(n), verified=True, number=n) for n in (2, 5, 6, 7, 8, 9)]
    assert to_drop(kept, RetentionRule(last=1, every=3)) == (
        "6",
        "7",
    )  # the third, sixth and ninth stay, and the newest


def _ended(*records, ranks=2, made_progress=True, without_progress=0, more=False, **memory):
    return AttemptEnd(ranks, records, "torchrun ended with 1", made_progress, without_progress, more, **memory)


def _record(rank, outcome, at_s=1.0, **more):
    return RankRecord(rank, RankOutcome(outcome), at_s, **more)


def test_ranks_that_all_finish_end_the_stage_or_the_run():
    done = [_record(0, "finished"), _record(1, "finished")]
    assert verdict(_ended(*done, more=True)) == StageFinished()
    assert verdict(_ended(*done)) == RunFinished()


def test_ranks_that_end_without_the_final_checkpoint_that_they_speak_of_have_not_finished():
    done = [_record(0, "finished", final_step=8), _record(1, "finished", final_step=8)]
    lost = replace(_ended(*done), has_final=False)
    assert isinstance(verdict(lost), AttemptCrashed) and final_step(lost.records) == 8
    again = verdict(replace(lost, made_progress=False, without_progress=2))
    assert isinstance(again, RetriesExhausted) and "final checkpoint" in again.cause
    assert verdict(replace(lost, has_final=True)) == RunFinished() and final_step([_record(0, "finished")]) is None


def test_an_error_of_the_script_is_the_cause_though_it_reads_like_a_lost_peer():
    own = _record(0, "failed", 1.0, error_type="ConnectionRefusedError", message="[Errno 111] Connection refused")
    assert first_cause(_ended(own)) == "rank 0: ConnectionRefusedError: [Errno 111] Connection refused"


def test_ranks_that_all_stop_at_a_boundary_are_suspended():
    assert verdict(_ended(_record(0, "suspended"), _record(1, "suspended"))) == AttemptSuspended()


def test_a_rung_begins_with_the_step_of_the_rank_that_is_furthest_behind():
    ahead, behind = _record(0, "failed", step=101), _record(1, "failed", step=100)
    assert failed_step(_ended(ahead, behind), 101) == 100
    assert failed_step(_ended(ahead, _record(1, "failed")), 101) == 101, "who failed before it attached says nothing"
    assert failed_step(_ended(), 101) == 100, "of ranks that were killed the last word may be a step ahead"


def test_the_earliest_failure_is_the_cause_and_broken_connections_are_collateral():
    peer = _record(
        0, "failed", 1.0, error_type="RuntimeError", message="[gloo] Connection closed by peer", is_collateral=True
    )
    cause = _record(1, "failed", 1.1, error_type="ValueError", message="bad pixel\nmore")
    assert first_cause(_ended(peer, cause)) == "rank 1: ValueError: bad pixel"


def test_the_cause_of_an_error_in_a_loading_process_is_its_own_not_that_there_was_one():
    """As PyTorch raises it anew in the rank; found by the storm, seed 8, source_fails."""
    said = """Caught OSError in DataLoader worker process 0.
Original Traceback (most recent call last):
  File "train.py", line 9, in __getitem__
    return path.read_bytes()
OSError: [Errno 5] Input/output error: 'source/20.txt'
"""
    told = "rank 0: OSError: Caught OSError in DataLoader worker process 0: OSError: [Errno 5] Input/output error: 'source/20.txt'"
    assert first_cause(_ended(_record(0, "failed", 1.0, error_type="OSError", message=said))) == told
    cut = said[: said.index("OSError: [Errno")]
    short = "rank 0: OSError: Caught OSError in DataLoader worker process 0."
    assert first_cause(_ended(_record(0, "failed", 1.0, error_type="OSError", message=cut))) == short


def test_memory_that_ran_out_first_leads_to_the_next_rung_and_what_its_peers_say_is_collateral():
    peer = _record(0, "failed", 1.0, error_type="RuntimeError", message="Connection closed by peer", is_collateral=True)
    out = _record(
        1, "failed", 1.1, error_type="torch.OutOfMemoryError", message="CUDA out of memory", memory="optimizer"
    )
    assert exhausted_memory(_ended(peer, out)) == "optimizer"
    assert verdict(_ended(peer, out, rung="set crop=96", made_progress=False, without_progress=9)) == OutOfMemory(
        "rank 1: torch.OutOfMemoryError: CUDA out of memory", "set crop=96"
    )


def test_memory_that_runs_out_in_an_evaluation_is_no_matter_of_the_training_batch():
    error = {"error_type": "torch.OutOfMemoryError", "message": "CUDA out of memory", "memory": "device", "step": 40}
    out = RankRecord(0, RankOutcome.FAILED, 1.0, place="evaluation", **error)
    assert exhausted_memory(_ended(out, ranks=1)) == "evaluation"
    assert verdict(_ended(out, ranks=1, rung="expandable_segments")) == OutOfMemory(
        "rank 0 in an evaluation: torch.OutOfMemoryError: CUDA out of memory", "expandable_segments"
    )
    failed = verdict(_ended(out, ranks=1, made_progress=False))
    assert isinstance(failed, RetriesExhausted) and "give the evaluation smaller batches" in failed.cause
    in_a_step = RankRecord(0, RankOutcome.FAILED, 1.0, place="step", **error)
    assert exhausted_memory(_ended(in_a_step, ranks=1)) == "device"
    frozen = error | {"code": RankError.LADDER_EXHAUSTED}  # a model that trains in eval()
    assert (
        exhausted_memory(_ended(RankRecord(0, RankOutcome.FAILED, 1.0, place="evaluation", **frozen), ranks=1))
        == "device"
    )


def test_ranks_that_find_no_rung_together_name_the_one_that_ran_out():
    ladder = {"code": RankError.LADDER_EXHAUSTED, "memory": "device"}
    peer = _record(0, "failed", 1.0, message="another rank ran out of memory", is_collateral=True, **ladder)
    out = _record(1, "failed", 1.1, message="rank 1: OutOfMemoryError: CUDA out of memory", **ladder)
    assert first_cause(_ended(peer, out)) == "rank 1: OutOfMemoryError: CUDA out of memory"


def test_an_error_before_the_memory_ran_out_is_the_cause():
    wrong = _record(0, "failed", 1.0, error_type="ValueError", message="bad pixel")
    out = _record(1, "failed", 1.1, error_type="MemoryError", memory="device")
    assert exhausted_memory(_ended(wrong, out)) == "" and isinstance(verdict(_ended(wrong, out)), AttemptCrashed)


def test_an_exhausted_ladder_ends_the_run_unless_the_attempt_came_further_than_any_before():
    out = _record(1, "failed", 1.1, error_type="MemoryError", message="no room", memory="device")
    ended = verdict(_ended(out, ranks=1, made_progress=False))
    assert isinstance(ended, RetriesExhausted) and "the ladder is exhausted" in ended.cause
    assert isinstance(verdict(_ended(out, ranks=1, made_progress=True)), AttemptCrashed), (
        "it may go on like that for long"
    )


@pytest.mark.parametrize("kills", [0, 2])
def test_a_kill_is_the_hosts_memory_only_when_the_kernel_says_so(kills):
    peer = _record(0, "failed", 1.0, error_type="RuntimeError", message="Connection closed by peer", is_collateral=True)
    worker = _record(
        1,
        "failed",
        1.0,
        code=RankError.LOADER_KILLED,
        error_type="RuntimeError",
        message="DataLoader worker (pid 7) is killed by signal: Killed. ",
    )
    assert exhausted_memory(_ended(peer, kernel_kills=kills)) == "", "nothing says that the rank was killed"
    for ended in (_ended(peer, kernel_kills=kills, was_sigkilled=True), _ended(worker, ranks=1, kernel_kills=kills)):
        assert exhausted_memory(ended) == ("host" if kills else "")
        assert ("OOM killer" in first_cause(ended)) == bool(kills)
    wrong = _record(0, "failed", 1.0, error_type="ValueError", message="bad pixel")
    assert exhausted_memory(_ended(wrong, kernel_kills=kills)) == "", "what was killed came after it"


def test_a_killed_rank_is_the_cause_when_its_peer_only_lost_the_connection():
    peer = _record(0, "failed", 1.0, error_type="RuntimeError", message="Connection closed by peer", is_collateral=True)
    assert first_cause(_ended(peer)) == "rank 1 was killed (torchrun ended with 1)"


def test_the_third_attempt_without_a_step_more_is_the_last():
    boom = _record(0, "failed", error_type="ValueError", message="boom")
    assert isinstance(verdict(_ended(boom, made_progress=False, without_progress=1)), AttemptCrashed)
    assert isinstance(verdict(_ended(boom, made_progress=True, without_progress=5)), AttemptCrashed)
    last = verdict(_ended(boom, made_progress=False, without_progress=2))
    assert isinstance(last, RetriesExhausted) and "ValueError: boom" in last.cause


def test_what_fails_before_the_first_line_of_the_script_is_not_tried_again():
    missing = _record(0, "failed", began=False, code=RankError.USAGE, message="No module named 'nets'")
    assert isinstance(verdict(_ended(missing)), RetriesExhausted)


@pytest.mark.parametrize(
    ("environ", "name", "wall_h"),
    [
        ({"KAGGLE_KERNEL_RUN_TYPE": "Batch"}, "kaggle", 9),
        ({"COLAB_RELEASE_TAG": "x"}, "colab", 12),
        ({}, "generic", None),
    ],
)
def test_a_platform_is_known_by_its_environment(environ, name, wall_h, tmp_path):
    profile = detect(environ, tmp_path)
    assert profile.name == name
    assert profile.wall_s == (wall_h * 3600 if wall_h else None)
    assert profile.began == ("start" if name == "generic" else "container")


def test_a_checkpoint_that_cannot_be_read_ends_the_run_unless_its_stage_is_trained_to_its_end_again_first():
    unread = _record(0, "failed", code=RankError.CHECKPOINT, message="step-8-final …")
    assert isinstance(verdict(_ended(unread, ranks=1)), RetriesExhausted)
    assert isinstance(verdict(_ended(unread, ranks=1, can_read_another=True)), AttemptCrashed)
    over = verdict(_ended(unread, ranks=1, can_read_another=True, made_progress=False, without_progress=2))
    assert isinstance(over, RetriesExhausted), "not for ever"


def test_a_full_disk_is_no_error_that_must_come_again():
    """A script that fills the disk at the same line and step twice may find room the next time."""
    bug = [RankRecord(0, RankOutcome.FAILED, 1.0, error_type="OSError", line="train.py:42", step=7)]
    full = [replace(bug[0], code=code_of(OSError(errno.ENOSPC, "No space left on device")))]
    assert is_same_error(bug, bug) and not is_same_error(full, full)
    assert code_of(OSError(errno.ENOENT, "no such file")) is RankError.OTHER
    assert code_of(SaveLost("the last save failed", errno.EROFS)) is RankError.DISK_FULL
    assert code_of(SaveLost("the last save failed", 0)) is RankError.OTHER
