"""Which step's values are those of a save, for programs that print and save in any order."""

from __future__ import annotations

import pytest

from kgorch.core.checkpoint.log_order import LogLength, LogLine, LogOrder, SaveOrder

S = 1_000_000_000
LOOK_NS, TICK_NS, READ_NS = 50_000_000, 4_000_000, 200_000_000
LINE_BYTES = 10
START_NS = 1000 * S


def following(at_ns: int, every_ns: int) -> int:
    return (at_ns // every_ns + 1) * every_ns


class Program:
    """Its clock, what it prints, and its saves by their time, each with the step whose values are those of its weights."""

    def __init__(self) -> None:
        self.now_ns = START_NS
        self.step: int | None = None
        self.saves: dict[int, int | None] = {}
        self.printed: list[tuple[int, int | None, bool]] = []

    def wait(self, seconds: float) -> None:
        self.now_ns += round(seconds * S)

    def save(self, own: int | None, seconds: float = 0.001) -> None:
        self.wait(seconds)
        self.saves[self.now_ns // TICK_NS * TICK_NS] = own

    def say(self, step: int | None = None, *, value: bool = False) -> None:
        self.step = self.step if step is None else step
        self.printed.append((self.now_ns, self.step, value))
        self.wait(0.0001)

    def order(self, now_ns: int) -> LogOrder:
        """What is known of the log then: from looks at its length, and from lines that were read since."""
        lengths, lines = [LogLength(0, START_NS, START_NS)], []
        for number, (at_ns, step, has_value) in enumerate(self.printed, start=1):
            look_ns, read_ns = following(at_ns, LOOK_NS), following(at_ns, READ_NS)
            if look_ns > now_ns:
                break
            lengths[-1] = lengths[-1]._replace(last_ns=max(look_ns - LOOK_NS, lengths[-1].last_ns))
            if lengths[-1].first_ns == look_ns:
                lengths.pop()
            lengths.append(LogLength(number * LINE_BYTES, look_ns, look_ns))
            if read_ns <= now_ns:
                lines.append(LogLine(number * LINE_BYTES, step, frozenset({"dice"} if has_value else ()), read_ns))
        lengths[-1] = lengths[-1]._replace(last_ns=now_ns)
        return LogOrder(lengths, lines, metrics=frozenset({"dice"}))

    def values(self, now_ns: int) -> dict[int, dict[str, float]]:
        lines = self.order(now_ns).lines
        return {line.step: dict.fromkeys(line.metrics, 0.5) for line in lines if line.metrics and line.step is not None}

    def found(self) -> dict[int | None, int | None]:
        """By the step that is right; each save is asked about a second later, and again at the end."""
        saves, told = SaveOrder(), []
        for at_ns, own in self.saves.items():
            order = self.order(at_ns + S)
            place = saves.note(at_ns, order)
            assert place
            told.append((own, place, saves.step_of(place, "dice", order, self.values(at_ns + S))))
        end_ns = self.now_ns + S
        order, values = self.order(end_ns), self.values(end_ns)
        found = {own: saves.step_of(place, "dice", order, values) for own, place, _ in told}
        assert all(first in (None, found[own]) for own, _, first in told), (
            "what was written into a manifest stays there"
        )
        return found


def values_then_saves(program: Program, epoch: int, evaluation_s: float, training_s: float) -> None:
    program.wait(training_s + evaluation_s)
    program.say(epoch, value=True)
    program.save(epoch)


def begins_values_saves(program: Program, epoch: int, evaluation_s: float, training_s: float) -> None:
    """PyTorch's examples/imagenet/main.py: the next epoch begins at once after the save."""
    program.say(epoch)
    program.wait(training_s + evaluation_s)
    program.say(value=True)
    program.save(epoch)


def begins_saves_values(program: Program, epoch: int, evaluation_s: float, training_s: float) -> None:
    program.say(epoch)
    program.wait(training_s)
    program.save(epoch)
    program.wait(evaluation_s)
    program.say(value=True)


def saves_then_values(program: Program, epoch: int, evaluation_s: float, training_s: float) -> None:
    program.wait(training_s)
    program.save(epoch)
    program.wait(evaluation_s)
    program.say(epoch, value=True)


def begins_saves_and_values_again_and_again(
    program: Program, epoch: int, evaluation_s: float, training_s: float
) -> None:
    program.say(epoch)
    program.wait(training_s)
    program.save(epoch)
    for _ in range(4):
        program.wait(evaluation_s / 4)
        program.say(value=True)


ORDERS = (
    values_then_saves,
    begins_values_saves,
    begins_saves_values,
    saves_then_values,
    begins_saves_and_values_again_and_again,
)


def three_epochs(order) -> Program:
    program = Program()
    for epoch in range(3):
        order(program, epoch, 1, 9)
    return program


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(
    ("evaluation_s", "training_s"), [(0.2, 10), (7.3, 60), (300.4, 3600), (1.1, 5.7), (90, 20), (0.5, 1.1), (0.3, 0.4)]
)
@pytest.mark.parametrize("first", [0, 1, 17])
def test_a_checkpoint_has_the_values_of_its_own_epoch(order, evaluation_s, training_s, first):
    program = Program()
    epochs = range(first, first + 5)
    for epoch in epochs:
        order(program, epoch, evaluation_s, training_s)
    assert program.found() == {epoch: epoch for epoch in epochs}


@pytest.mark.parametrize("order", [begins_values_saves, begins_saves_values])
def test_a_large_save_of_seconds_is_where_it_ends(order):
    program = Program()
    save = program.save
    program.save = lambda own: save(own, 7.0)
    for epoch in range(4):
        order(program, epoch, 9.0, 30.0)
    assert program.found() == {epoch: epoch for epoch in range(4)}


@pytest.mark.parametrize("saves_first", [True, False])
def test_between_values_every_step_is_printed(saves_first):
    program = Program()
    for step in range(1, 401):
        program.say(step)
        program.wait(0.02)
        if step % 100 == 0:
            if saves_first:
                program.save(step)
            program.wait(4)
            program.say(value=True)
            if not saves_first:
                program.save(step)
    assert program.found() == {step: step for step in (100, 200, 300, 400)}


def test_a_checkpoint_between_two_evaluations_is_at_a_step_without_values():
    program = Program()
    for step in range(1, 401):
        program.say(step)
        program.wait(0.05)
        if step % 100 == 50:
            program.save(step)
        if step % 100 == 0:
            program.say(value=True)
    assert program.found() == dict.fromkeys((50, 150, 250, 350))


@pytest.mark.parametrize(("evaluation_s", "training_s"), [(1, 60), (0.5, 4)])
def test_the_weights_that_a_program_begins_with_are_none_of_an_epoch(evaluation_s, training_s):
    for order in (begins_values_saves, values_then_saves):
        program = Program()
        program.save(None)
        for epoch in range(3):
            order(program, epoch, evaluation_s, training_s)
        assert program.found() == {None: None} | {epoch: epoch for epoch in range(3)}


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("saves_first", [True, False])
def test_a_value_is_of_one_save_where_there_are_more_of_these(saves_first, first):
    program = Program()
    own: list[int | None] = []
    for epoch in range(first, first + 20):
        program.wait(30)
        is_measured = epoch % 5 == 0
        if saves_first:
            program.save(epoch, 0.4)
        if is_measured:
            program.wait(4)
            program.say(epoch, value=True)
        if not saves_first:
            program.save(epoch, 0.4)
        own.append(epoch if is_measured else None)
    found = program.found()
    assert [found[epoch] for epoch in range(first, first + 20)] == own


@pytest.mark.parametrize("has_value", [True, False])
def test_values_follow_their_saves_also_where_something_is_printed_before_the_first_one(has_value):
    """The weights that it begins with are measured, or the epoch is told from which it goes on."""
    program = Program()
    program.wait(20)
    program.say(5, value=has_value)
    for epoch in range(6, 10):
        saves_then_values(program, epoch, 3, 60)
    assert program.found() == {epoch: epoch for epoch in range(6, 10)}


def test_a_save_is_between_two_steps_that_are_printed_of_which_the_second_has_its_values():
    program = Program()
    for step in range(1, 301):
        program.wait(0.1)
        if step % 100 == 99:
            program.save(step + 1)
            program.wait(0.6)
            program.say(step + 1, value=True)
        elif step % 10 == 0:
            program.say(step)
    assert program.found() == {step: step for step in (100, 200, 300)}


def test_an_order_that_is_not_known_is_told():
    program = three_epochs(begins_values_saves)
    saved_ns = next(iter(program.saves))
    order = program.order(program.now_ns)
    assert order.place_of(saved_ns).since.step == 0
    for unknown in (
        LogOrder(),
        order._replace(lengths=order.lengths[-1:]),
        order._replace(lines=order.lines[-1:], is_cut=True),
    ):
        assert unknown.place_of(saved_ns) is None


def test_of_a_place_before_what_is_remembered_nothing_follows():
    program = three_epochs(saves_then_values)
    first_ns = next(iter(program.saves))
    order = program.order(program.now_ns)
    place = order.place_of(first_ns)
    assert order.after(place) == order.lines
    assert order._replace(lines=order.lines[1:], is_cut=True).after(place) == []
