"""Which value was measured on which checkpoint, for programs that print and save in any order."""

from __future__ import annotations

import math

import pytest

from kgorch.core.checkpoint.measured_value import Printed, measured_on

S = 1_000_000_000
LOOK_NS = S


class Program:
    """Its clock, its log as looks of a second find it, and its saves, each with the step whose weights it holds."""

    def __init__(self) -> None:
        self.now_ns, self.step = 1000 * S, None
        self.saves: list[tuple[int, int, int | None]] = []
        self.stepped_ns = 0
        self.printed: list[Printed] = []

    def wait(self, seconds: float) -> None:
        self.now_ns += round(seconds * S)

    def save(self, of: int) -> None:
        is_sure = self.now_ns - self.stepped_ns > 2 * LOOK_NS
        self.saves.append((self.now_ns, of, self.step if is_sure else None))

    def say(self, step: int | None = None, value: float | None = None) -> None:
        if step is not None:
            self.step, self.stepped_ns = step, self.now_ns
        since_ns = self.now_ns // LOOK_NS * LOOK_NS - 1
        if value is None:
            return
        if self.printed and self.printed[-1].step == self.step:
            self.printed[-1] = self.printed[-1]._replace(until_ns=since_ns + 1 + LOOK_NS, value=value)
        else:
            self.printed.append(Printed(self.step, since_ns, since_ns + 1 + LOOK_NS, value))

    def found(self, now_ns: float = math.inf) -> dict[int, float | None]:
        times = [at_ns for at_ns, *_ in self.saves]
        found = {of: measured_on(at_ns, times, self.printed, logged, now_ns) for at_ns, of, logged in self.saves}
        return {of: item and item.value for of, item in found.items()}


def prints_and_saves(program: Program, epoch: int, evaluation_s: float, training_s: float) -> None:
    program.wait(training_s + evaluation_s)
    program.say(epoch, epoch / 10)
    program.wait(0.05)
    program.save(epoch)


def prints_saves_and_begins_the_next(program: Program, epoch: int, evaluation_s: float, training_s: float) -> None:
    program.say(epoch)
    program.wait(training_s + evaluation_s)
    program.say(value=epoch / 10)
    program.save(epoch)


def saves_and_prints_in_the_epoch(program: Program, epoch: int, evaluation_s: float, training_s: float) -> None:
    program.say(epoch)
    program.wait(training_s)
    program.save(epoch)
    program.wait(evaluation_s)
    program.say(value=epoch / 10)


def saves_and_prints_with_the_epoch(program: Program, epoch: int, evaluation_s: float, training_s: float) -> None:
    program.wait(training_s)
    program.save(epoch)
    program.wait(evaluation_s)
    program.say(epoch, epoch / 10)


def prints_again_and_again(program: Program, epoch: int, evaluation_s: float, training_s: float) -> None:
    program.say(epoch)
    program.wait(training_s)
    program.save(epoch)
    for part in range(4):
        program.wait(evaluation_s / 4)
        program.say(value=epoch / 10 if part == 3 else 99.0)


ORDERS = (
    prints_and_saves,
    prints_saves_and_begins_the_next,
    saves_and_prints_in_the_epoch,
    saves_and_prints_with_the_epoch,
    prints_again_and_again,
)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(("evaluation_s", "training_s"), [(0.2, 10), (7.3, 60), (300.4, 3600), (1.1, 5.7)])
@pytest.mark.parametrize("first", [0, 1, 17])
def test_a_checkpoint_has_the_value_of_its_own_epoch(order, evaluation_s, training_s, first):
    program = Program()
    for epoch in range(first, first + 5):
        order(program, epoch, evaluation_s, training_s)
    assert program.found() == {epoch: epoch / 10 for epoch in range(first, first + 5)}


def test_an_evaluation_that_is_longer_than_the_training_is_told_by_the_epoch_that_the_log_began_with():
    program = Program()
    for epoch in range(5):
        saves_and_prints_in_the_epoch(program, epoch, 90, 20)
    assert program.found() == {epoch: epoch / 10 for epoch in range(5)}


@pytest.mark.parametrize("order", ORDERS)
def test_what_is_found_while_it_runs_is_what_is_found_at_its_end(order):
    """A value that is written into a manifest stays there."""
    program, told = Program(), dict[int, float]()
    for epoch in range(6):
        before_ns = program.now_ns
        order(program, epoch, 4.0, 30.0)
        for now_ns in range(before_ns, program.now_ns, S):
            seen = Program()
            seen.saves = [save for save in program.saves if save[0] <= now_ns]
            seen.printed = [item for item in program.printed if item.until_ns <= now_ns]
            found = {of: value for of, value in seen.found(now_ns).items() if value not in (None, 99.0)}
            assert all(told.get(of, value) == value for of, value in found.items())
            told |= found
    assert len(told) >= 5 and all(program.found()[of] == value for of, value in told.items())


def test_a_checkpoint_between_two_evaluations_has_none():
    program = Program()
    for epoch in range(4):
        program.wait(100)
        program.save(100 + epoch)  # in the middle of an epoch
        program.wait(100)
        program.say(epoch, epoch / 10)
        program.save(epoch)
    assert program.found() == {100 + epoch: None for epoch in range(4)} | {epoch: epoch / 10 for epoch in range(4)}


def test_a_checkpoint_in_the_middle_of_an_epoch_has_none_where_the_log_began_with_it():
    program = Program()
    for epoch in range(4):
        program.say(epoch)
        program.wait(100)
        program.save(100 + epoch)
        program.wait(100)
        program.save(epoch)
        program.wait(10)
        program.say(value=epoch / 10)
    assert program.found() == {100 + epoch: None for epoch in range(4)} | {epoch: epoch / 10 for epoch in range(4)}


def test_the_weights_that_a_program_begins_with_have_none():
    program = Program()
    program.save(-1)
    for epoch in range(3):
        prints_and_saves(program, epoch, 5, 60)
    assert program.found() == {-1: None, 0: 0.0, 1: 0.1, 2: 0.2}


def test_of_values_that_are_printed_every_few_seconds_it_is_the_last_one_before():
    program = Program()
    for step in range(40):
        program.wait(5)
        program.say(step, step / 10)
        if step % 10 == 9:
            program.wait(3)
            program.save(step)
    assert program.found() == {step: step / 10 for step in (9, 19, 29, 39)}


@pytest.mark.parametrize("begins_with_epoch", [True, False])
def test_of_a_loss_that_is_printed_all_the_time_it_is_that_of_the_epoch_before_the_save(begins_with_epoch):
    program = Program()
    for epoch in range(4):
        for part in range(20):
            if part or begins_with_epoch:
                program.say(epoch, 50 - epoch - part / 100)
            program.wait(0.7)
        program.save(epoch)
    assert program.found() == {epoch: 50 - epoch - 0.19 for epoch in range(4)}


def test_two_files_of_one_save_have_one_value():
    program = Program()
    for epoch in range(4):
        program.wait(60)
        program.save(epoch)
        program.wait(0.4)
        program.save(100 + epoch)
        program.wait(9)
        program.say(epoch, epoch / 10)
    assert program.found() == {number + epoch: epoch / 10 for number in (0, 100) for epoch in range(4)}


@pytest.mark.parametrize("order", ORDERS[:4])
@pytest.mark.parametrize("training_s", [0.2, 0.7, 1.1, 1.6, 2.3])
def test_epochs_that_are_hardly_longer_than_a_look_are_told_apart_or_have_no_value(order, training_s):
    for share in (0.1, 0.3):
        program = Program()
        for epoch in range(30):
            order(program, epoch, training_s * share, training_s)
        assert all(value in (None, epoch / 10) for epoch, value in program.found().items()), share


def test_nothing_is_found_where_nothing_is_printed():
    assert measured_on(5, (), ()) is None
