"""Which remedy follows a trouble, told in stories; and what a spike is."""

from __future__ import annotations

import random

import pytest

from kgorch.core.codes import RankOutcome
from kgorch.core.health import training_health
from kgorch.core.health.training_health import (
    LOSS,
    QUIET,
    SOON,
    SPIKE,
    WARM_UP,
    WEIGHTS,
    HealthIssue,
    PastRemedy,
    SpikeDetector,
    change_of,
    next_remedy,
)
from kgorch.core.session.attempt_outcome import AttemptEnd, RankRecord, verdict
from kgorch.core.session.events import AttemptDiverged, RetriesExhausted

ISSUE = HealthIssue(WEIGHTS, 0, 300, "w is no number", since=100)
POLICY = [training_health.parse_remedy(name) for name in ("skip", "rollback", "reset_scaler", "lr/2")]


def _taken(step, remedy="skip", seen=None):
    """Args: seen: where weights were bad; then the remedy has only gone back, unless it is another one."""
    went_back = seen is not None and remedy in ("skip", "rollback")
    return PastRemedy(step, remedy, f"rank 0: loss is nan at step {step}", step if seen is None else seen, went_back)


def _next(*past, step, kind=LOSS):
    found = next_remedy(POLICY, past, kind, step)
    return found and found.name


def test_a_trouble_soon_after_another_takes_the_next_remedy_and_after_long_quiet_the_first():
    assert _next(step=10) == "skip"
    assert _next(_taken(10), step=10 + SOON) == "rollback"
    assert _next(_taken(10), _taken(20, "rollback"), step=30) == "reset_scaler"
    assert _next(_taken(10), _taken(20, "rollback"), step=20 + SOON + 1) == "rollback", "it did help, for a while"
    assert _next(_taken(10), _taken(20, "rollback"), step=20 + QUIET + 1) == "skip"


def test_when_all_are_taken_nothing_is_left_and_the_cause_is_the_first_by_time():
    past = [_taken(step, remedy.name) for step, remedy in zip(range(10, 50, 10), POLICY, strict=True)]
    assert _next(*past, step=50) is None
    said = training_health.exhaustion_cause(past, HealthIssue(LOSS, 1, 50, "loss is inf at step 50"))
    assert said.startswith("rank 0: loss is nan at step 10") and "skip, rollback, reset_scaler, lr/2" in said


def test_bad_weights_found_again_after_a_rollback_are_the_same_trouble_however_late_they_are_found():
    past = [_taken(ISSUE.begins, seen=ISSUE.step)]
    again = HealthIssue(WEIGHTS, 0, 390, "w is no number", since=100)
    assert _next(*past, step=again.begins, kind=WEIGHTS) == "reset_scaler"


def test_bad_weights_go_back_once_before_something_is_changed():
    """Each skip and the rollback took another attempt with the same bits, in a loop that kgorch does not see the batches of."""
    policy = [training_health.parse_remedy(name) for name in training_health.DEFAULT]
    past = list[PastRemedy]()
    while remedy := next_remedy(policy, past, WEIGHTS, 100):
        past.append(_taken(100, training_health.name_of(remedy.name, change_of(remedy, ISSUE)), seen=ISSUE.step))
    assert [item.remedy for item in past] == ["rollback", "lr/2"]
    assert next_remedy(policy, [_taken(10), _taken(11)], WEIGHTS, 12).name == "skip", (
        "batches were left out: it goes back once"
    )
    past = [_taken(10), _taken(11), _taken(12, "rollback", seen=12)]
    assert next_remedy(policy, past, WEIGHTS, 12).name == "lr/2"
    later = [_taken(90, "rollback", seen=100), _taken(130)]
    assert next_remedy(policy, later, WEIGHTS, 160).name == "skip", (
        "going back has helped, and nobody has gone back to 160"
    )
    assert next_remedy(policy, [_taken(9, "rollback", seen=10)], LOSS, 11).name == "skip"
    rollbacks = [training_health.parse_remedy("rollback")] * 2
    assert next_remedy(rollbacks, [_taken(100, "rollback", seen=300)], WEIGHTS, 100), "the plan asks for two"
    assert not next_remedy(rollbacks[:1], [_taken(100, "rollback", seen=300)], WEIGHTS, 100)


def test_a_remedy_that_was_passed_over_or_is_new_in_the_list_is_not_used_up():
    policy = [training_health.parse_remedy(name) for name in ("amp=bf16", "lr/2")]
    assert next_remedy(policy, [_taken(100, "lr/2")], LOSS, 120).name == "amp=bf16", "a spike took the other one"
    assert next_remedy(policy, [_taken(10), _taken(12)], LOSS, 14).name == "amp=bf16", "the plan has another list now"
    policy = [training_health.parse_remedy(name) for name in ("skip", "reset_scaler", "skip")]
    assert next_remedy(policy, [_taken(10), _taken(12)], LOSS, 14).name == "reset_scaler", (
        "two ranks have noted one each"
    )


def test_a_spike_takes_no_remedy_against_overflow():
    assert _next(_taken(10), _taken(11, "rollback"), step=12, kind=SPIKE) == "lr/2"


@pytest.mark.parametrize(
    ("written", "change"),
    [
        ("skip", {"step": 7, "skip": True}),
        ("lr / 4", {"step": 7, "skip": True, "lr": 0.25}),
        ("amp=bf16", {"step": 7, "skip": True, "amp": "bf16"}),
        ({"set": {"amp": False}}, {"step": 7, "skip": True, "arguments": {"amp": False}}),
    ],
)
def test_a_remedy_becomes_an_entry_of_the_schedule(written, change):
    assert change_of(training_health.parse_remedy(written), HealthIssue(LOSS, 0, 7, "")) == change


def test_with_bad_weights_no_batch_is_to_blame_and_the_change_begins_at_the_last_good_state():
    change = change_of(training_health.parse_remedy("lr/2"), HealthIssue(WEIGHTS, 0, 300, "", since=100))
    assert change == {"step": 100, "seen": 300, "lr": 0.5}


def test_a_skip_that_leaves_nothing_out_is_told_as_a_rollback():
    """`status` said that the result was another one, of a run with the bits of an undisturbed one."""
    records = [
        RankRecord(0, RankOutcome.FAILED, 6.0, message="w", trouble=HealthIssue(WEIGHTS, 0, 300, "w", since=100))
    ]
    ended = AttemptEnd(1, records, "exit 1", False, 0, more_stages=False, remedies=POLICY)
    assert verdict(ended) == AttemptDiverged("rank 0: w", "rollback", {"step": 100, "seen": 300})


@pytest.mark.parametrize(
    "written", ["jump", "lr/1", "lr/x", "amp=fp8", {}, {"set": {}}, {"set": {"a": 1}, "more": 2}, {"set": 3}]
)
def test_what_is_no_remedy_is_told_with_examples(written):
    with pytest.raises(ValueError, match="expected one like skip"):
        training_health.parse_remedy(written)


def test_the_first_record_with_a_trouble_decides_and_the_others_are_collateral():
    records = [
        RankRecord(
            0,
            RankOutcome.FAILED,
            5.0,
            error_type="RuntimeError",
            message="Connection closed by peer",
            is_collateral=True,
        ),
        RankRecord(1, RankOutcome.FAILED, 6.0, message="w", trouble=HealthIssue(LOSS, 1, 41, "loss is nan at step 41")),
    ]
    ended = AttemptEnd(
        2, records, "exit 1", made_progress=False, without_progress=2, more_stages=False, remedies=POLICY
    )
    event = verdict(ended)
    assert event == AttemptDiverged("rank 1: loss is nan at step 41", "skip", {"step": 41, "skip": True})
    assert isinstance(verdict(AttemptEnd(2, records, "", False, 0, False)), RetriesExhausted), "without a policy"


def _spike(factor=8.0, seed=1):
    spike, chance = SpikeDetector(factor), random.Random(seed)
    for step in range(300):
        loss = 2.0 - step / 300 + chance.gauss(0, 0.1)
        assert not spike.check(loss)
        spike.learn(loss)
    return spike


def test_a_loss_far_above_the_last_ones_is_a_spike_and_one_far_below_is_none():
    spike = _spike()
    assert "deviations above the last 200" in spike.check(9.0)
    assert not spike.check(1.4) and not spike.check(-9.0)


def test_a_new_spike_rule_warms_up_and_a_flat_loss_may_move_a_little():
    spike = SpikeDetector(8.0)
    for _ in range(WARM_UP):
        assert not spike.check(1000.0)
        spike.learn(1.0)
    assert not spike.check(1.05) and spike.check(1.2)


def test_without_a_factor_nothing_is_a_spike():
    assert not _spike(None).check(1e9)
