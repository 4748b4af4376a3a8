"""Every epoch's values are kept, whoever is killed and wherever the run goes on."""

from __future__ import annotations

import csv
import io
import os
import signal
from dataclasses import replace

import pytest
from harness import Kgorch, processes_of, wait_until

STEPS = 6
"""Of an epoch of learns.py."""


def exact(kgorch: Kgorch, name: str = "epoch_draw") -> dict[int, float]:
    """A metric that is reported between epochs, by step."""
    points = kgorch.look("metrics")["points"]
    assert len({point["step"] for point in points}) == len(points)
    return {point["step"]: point["values"][name] for point in points if name in point["values"]}


def losses(kgorch: Kgorch) -> tuple[int, float]:
    """Of how many steps the means of the loss are, and their sum."""
    points = [point for point in kgorch.look("metrics")["points"] if "loss" in point["values"]]
    return sum(point["steps"] for point in points), sum(point["steps"] * point["values"]["loss"] for point in points)


def supervisor_of(kgorch: Kgorch) -> int:
    return int(kgorch.status()["session"]["supervisor"]["pid"])


@pytest.fixture
def alone(kgorch, tmp_path):
    """The same training, uninterrupted."""

    def train(**training) -> Kgorch:
        made = replace(kgorch, home=tmp_path / "alone", folder=tmp_path / "alone-work", started=[])
        made.folder.mkdir()
        made("start", str(made.plan(args=training, every="600s")))
        return made

    return train


def test_every_epoch_is_there_though_the_supervisor_was_dead_for_most_of_them(kgorch, alone):
    plan = kgorch.plan(args={"epochs": 40, "sleep": 0.05}, every="600s")
    first = kgorch.background("start", str(plan))
    kgorch.wait_for_step(1)
    os.kill(supervisor_of(kgorch), signal.SIGKILL)
    first.wait(timeout=60)
    until = min(max(exact(kgorch), default=0) + 10 * STEPS, 40 * STEPS)
    wait_until(lambda: max(exact(kgorch), default=0) >= until)  # while nobody supervises
    kgorch("resume", "test")
    found = exact(kgorch)
    assert list(found) == [STEPS * epoch for epoch in range(1, 41)]
    undisturbed = alone(epochs=40, sleep=0.0)
    assert found == exact(undisturbed)
    assert losses(kgorch) == (240, pytest.approx(losses(undisturbed)[1], rel=1e-6))


def test_a_curve_has_each_step_once_after_everything_was_killed_and_steps_were_done_again(kgorch, alone):
    plan = kgorch.plan(args={"epochs": 12, "sleep": 0.4}, every="1s", extra="[checkpoint.keep]\nlast = 2")
    for _ in range(2):
        supervisor = kgorch.background("start", str(plan))
        seen = len(kgorch.checkpoints())
        newest = kgorch.checkpoints()[-1:]
        wait_until(lambda newest=newest: kgorch.checkpoints()[-1:] != newest, what=f"{seen} checkpoints")
        step = kgorch.status()["step"]
        kgorch.wait_for_step(step + 3)
        kgorch.kill_everything()
        supervisor.wait(timeout=60)
        wait_until(lambda: not processes_of(kgorch.home))
    kgorch("start", str(plan), "--set", "stage.train.args.sleep=0.0")
    assert len(kgorch.history()) == 3
    points = kgorch.look("metrics")["points"]  # also those at which a resumed training reported before its epochs
    assert [point["epoch"] for point in points] == [-(-point["step"] // STEPS) or None for point in points]
    undisturbed = alone(epochs=12, sleep=0.0)
    assert exact(kgorch) == exact(undisturbed)
    assert losses(kgorch) == (72, pytest.approx(losses(undisturbed)[1], rel=1e-6))
    rows = list(csv.DictReader(io.StringIO(kgorch("metrics", "--csv").stdout)))
    assert [int(row["step"]) for row in rows] == sorted({int(row["step"]) for row in rows})
    assert {int(row["step"]): float(row["epoch_draw"]) for row in rows if row["epoch_draw"]} == pytest.approx(
        exact(undisturbed), rel=1e-9
    )


@pytest.mark.parametrize(
    "supervised",
    [True, pytest.param(False, marks=pytest.mark.soak)],
    ids=["suspended by the wall", "killed without a supervisor"],
)
def test_the_curve_comes_along_to_a_new_machine(kgorch, alone, tmp_path, supervised):
    training = {"epochs": 16, "sleep": 0.3}  # it is to be cut long before its end
    first = replace(kgorch, home=tmp_path / "input" / "state", started=[])
    plan = first.plan(args=training, every="1s", extra=f'[resume]\nsources = ["{tmp_path}/input/**"]')
    running = first.background("start", str(plan))
    first.wait_for_step(8)
    if supervised:
        first("stop")
    else:
        os.kill(supervisor_of(first), signal.SIGKILL)
        known = max(exact(first), default=0)
        wait_until(lambda: max(exact(first), default=0) >= known + 2 * STEPS)
        newest = first.checkpoints()[-1:]
        wait_until(lambda: first.checkpoints()[-1:] != newest)
        first.kill_everything()
    running.wait(timeout=60)
    wait_until(lambda: not processes_of(first.home))

    kgorch("start", str(plan), "--set", "stage.train.args.sleep=0.0")
    undisturbed = alone(epochs=16, sleep=0.0)
    assert exact(kgorch) == exact(undisturbed)
    assert losses(kgorch) == (96, pytest.approx(losses(undisturbed)[1], rel=1e-6))
