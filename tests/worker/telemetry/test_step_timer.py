"""How long a step usually takes, as the deadline of the last save counts it."""

from __future__ import annotations

import pytest

from kgorch.worker.telemetry import step_timer
from kgorch.worker.telemetry.progress_marker import ProgressMarker
from kgorch.worker.telemetry.step_timer import StepTimer


@pytest.fixture
def clock(monkeypatch):
    """Sets the time."""
    now = [100.0]
    monkeypatch.setattr(step_timer.time, "monotonic", lambda: now[0])

    def pass_s(seconds: float) -> None:
        now[0] += seconds

    return pass_s


def test_an_evaluation_inside_of_a_step_is_the_longest_gap_and_no_usual_step(clock):
    """It counted as one: the lead of the last save was three times as long as the evaluation."""
    timer = StepTimer(ProgressMarker())
    assert timer.usual_s == 0.0
    timer.tick()
    for seconds in (2.0, 2.0, 1200.0):
        clock(seconds)
        timer.end_step()
    assert timer.step_s == pytest.approx(1200.0) and timer.usual_s == pytest.approx(2.0)
    assert timer.take_gap_s() == pytest.approx(1200.0)
    for _ in range(3):  # steps that take longer for good are usual after a few
        clock(30.0)
        timer.end_step()
    assert timer.usual_s == pytest.approx(30.0)


def test_the_compilation_in_the_first_step_is_forgotten_with_the_second(clock):
    timer = StepTimer(ProgressMarker())
    timer.tick()
    for seconds, usual in ((300.0, 300.0), (2.0, 2.0)):
        clock(seconds)
        timer.end_step()
        assert timer.usual_s == pytest.approx(usual)
