"""What a plan costs, from what was measured of its stages: the reference systems' own sums come out."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from kgorch.core.forecast.cost_estimate import (
    Loop,
    ResumePosition,
    StageMeasurement,
    disk_bytes,
    estimate_cost,
    remaining_stages,
)
from kgorch.core.forecast.eta import SessionModel

NOON = datetime(2026, 11, 21, 12, tzinfo=UTC)
HOUR = 3600.0


def stage(name="train", epochs=10, batches=250, step_s=0.0, evaluation_s=0.0, cold_wait_s=0.0, startup_s=0.0, **more):
    base = {"wait_s": 0.0, "cold_step_s": step_s, "end_s": 0.0, "save_s": 0.0, "state_bytes": 150 << 20}
    return StageMeasurement(
        name, (Loop(epochs, batches),), step_s=step_s, evaluation_s=evaluation_s, cold_wait_s=cold_wait_s, startup_s=startup_s,
        **base | more,
    )  # fmt: skip


@pytest.mark.parametrize(("validation_min", "total_min"), [(5, 560), (10, 610)])
def test_cloud_removal_ten_epochs_of_50_minutes_are_510_without_their_validation_and_with_it_more_than_nine_hours(
    validation_min, total_min
):
    """The document adds 60 + 9 x 50 = 510 minutes up, and names 5 to 10 minutes of validation an epoch beside that."""
    train = stage(step_s=3000 / 250, evaluation_s=60 * validation_min, cold_wait_s=600 / 250)
    assert train.first_epoch_s - train.epoch_s == pytest.approx(600)
    for wall_h, sessions in ((9, 2), (12, 1)):
        found = estimate_cost([train], NOON, SessionModel(length_s=wall_h * HOUR, ending_s=60))
        assert found.training_s == pytest.approx(60 * total_min)
        assert found.sessions == sessions
        assert disk_bytes([train], 4) == 4 * 150 << 20


@pytest.mark.parametrize(("validation_min", "sessions"), [(0, 2), (5, 3), (10, 3)])
def test_cloud_removal_twenty_epochs_need_two_sessions_without_validation_and_three_with_it(validation_min, sessions):
    train = stage(epochs=20, step_s=3000 / 250, evaluation_s=60 * validation_min, cold_wait_s=600 / 250)
    assert estimate_cost([train], NOON, SessionModel(length_s=9 * HOUR, ending_s=60)).sessions == sessions


@pytest.mark.parametrize(("hours", "sessions"), [(5, 12), (6, 10)])
def test_vqa_a_hundred_epochs_of_35_minutes_are_58_hours_in_10_to_12_sessions(hours, sessions):
    train = stage(epochs=100, batches=700, step_s=3.0)
    found = estimate_cost([train], NOON, SessionModel(length_s=hours * HOUR, ending_s=60))
    assert found.training_s == pytest.approx(58.33 * HOUR, rel=0.001)
    assert found.sessions == sessions
    assert found.epochs_a_session == pytest.approx((hours * HOUR - 60) / 2100, rel=0.001)


def test_ink_twelve_of_45_hours_of_quota():
    """Nine hours of training and three of inference on two GPUs that are counted once."""
    train = stage(epochs=40, batches=100, step_s=9 * HOUR / 4000)
    predict = stage("predict", epochs=1, batches=100, step_s=3 * HOUR / 100)
    found = estimate_cost([train, predict], NOON, SessionModel(length_s=None, ending_s=60))
    assert found.quota_s == pytest.approx(12 * HOUR, rel=0.01)
    assert found.epochs_a_session is None, "no wall bounds it"


def test_each_session_pays_its_start_and_reads_cold_data_again():
    train = stage(epochs=10, batches=100, step_s=1.0, startup_s=50, cold_wait_s=0.5)
    alone = estimate_cost([train], NOON, SessionModel(length_s=None, ending_s=10))
    cut = estimate_cost([train], NOON, SessionModel(length_s=300, ending_s=10))
    assert alone.sessions == 1 and cut.sessions >= 5
    assert cut.quota_s - alone.quota_s == pytest.approx((cut.sessions - 1) * (50 + 50 + 10), rel=0.01)
    assert cut.end.usual.end_at - alone.end.usual.end_at > timedelta(seconds=(cut.sessions - 1) * 100)


def test_the_first_sessions_cold_data_and_start_are_paid_for_once():
    short = stage("first", epochs=1, batches=100, step_s=1.0, startup_s=5)
    long = stage(epochs=10, batches=100, step_s=1.0, startup_s=50, cold_wait_s=0.5)
    found = estimate_cost([short, long], NOON, SessionModel(length_s=None, ending_s=10))
    assert found.end.usual.end_at - NOON == timedelta(seconds=5 + 100 + 50 + 1000 + 50)
    assert found.quota_s == pytest.approx(5 + 100 + 50 + 1000 + 50)


def test_where_no_session_is_long_enough_no_end_is_promised():
    train = stage(step_s=1.0, startup_s=50)
    found = estimate_cost([train], NOON, SessionModel(length_s=55, ending_s=10))
    assert found.sessions is None and found.end.usual is None


def test_a_stage_without_steps_costs_its_own_time():
    package = StageMeasurement(
        "package", (), 0, 0, 0, 0, startup_s=5, evaluation_s=0, end_s=20, save_s=0, state_bytes=0
    )
    assert estimate_cost([package], NOON, SessionModel(length_s=None, ending_s=0)).training_s == pytest.approx(20)


def test_of_a_hundred_epochs_those_that_a_checkpoint_has_done_cost_no_more_sessions():
    """The VQA document's third session: 100 epochs of 35 minutes, begun at epoch 20 in the middle of an epoch."""
    train = stage(epochs=100, batches=700, step_s=3.0)
    reached = ResumePosition("train", epoch=20, batch=350, step=20 * 700 + 350)
    found = estimate_cost([train], NOON, SessionModel(length_s=5 * HOUR, ending_s=60), position=reached)
    assert found.training_s == pytest.approx(79.5 * 2100)
    assert found.sessions == 10, "79.5 epochs, 8.5 a session"
    assert disk_bytes([train], 4) == 4 * 150 << 20, "the checkpoints of what is done stay"


def test_what_is_left_of_a_run_is_the_rest_of_its_stage_and_the_stages_behind():
    loops = (Loop(3, 100), Loop(5, 100))
    stages = [stage("first"), stage("train")._replace(loops=loops), stage("predict", epochs=1)]
    rest, predict = remaining_stages(stages, ResumePosition("train", 1, 2, 50, 550, frozenset({"first"})))
    assert rest.loops == (Loop(2.5, 100),) and predict == stages[2]
    over, _ = remaining_stages(stages, ResumePosition("train", 2, 0, 0, 800, frozenset({"first"})))
    assert over.loops == () and over.training_s == over.end_s, "what the script does behind its last step"
    fewer, _ = remaining_stages(stages, ResumePosition("train", 1, 7, 0, 1000, frozenset({"first"})))
    assert fewer.loops == (), "the plan has fewer epochs now"
    assert remaining_stages(stages, ResumePosition(finished=frozenset({"first", "train"}))) == [stages[2]]
