"""What a step begins from (worker/memory/oom_retry.py): cheap to keep, and whole when it is put back."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest
import torch

from kgorch.worker.rng_state import HostGenerators, RngCache


def drawn() -> list[float]:
    return [random.random(), random.gauss(0, 1), float(np.random.rand()), float(torch.rand(()))]


MEANWHILE = pytest.mark.parametrize(
    "meanwhile",
    [
        lambda: None,
        random.random,
        lambda: random.gauss(0, 1),  # one of a pair: the other one is drawn without the generator
        lambda: [random.random() for _ in range(624)],  # the whole state once, its index where it was
        lambda: random.seed(9),
        np.random.rand,
        np.random.randn,  # one of a pair, too
        lambda: np.random.seed(9),
        torch.randn,
    ],
)


@MEANWHILE
@pytest.mark.parametrize("before", [lambda: None, lambda: random.gauss(0, 1), lambda: random.seed(3)])
def test_random_states_are_put_back_whatever_was_drawn_since_and_before(before: Callable, meanwhile: Callable):
    chance = RngCache(torch.device("cpu"))
    chance.now()  # of an earlier step
    before()
    kept = chance.now()
    expected = drawn()
    chance.back_to(kept)
    meanwhile(*([()] if meanwhile is torch.randn else []))
    chance.now()  # of a later one
    chance.back_to(kept)
    assert drawn() == expected


@MEANWHILE
@pytest.mark.parametrize(
    "before", [lambda: None, lambda: random.gauss(0, 1), lambda: random.seed(3), np.random.randn, np.random.rand]
)
@pytest.mark.parametrize("is_known", [True, False])
def test_generators_that_a_dataset_draws_from_are_put_back_as_they_were(before, meanwhile, is_known):
    """By their memory, or by their libraries' functions where Python's generator looks otherwise than expected."""
    generators = HostGenerators()
    assert generators._is_known, "this Python's generator is known"
    generators._is_known = is_known
    before()
    saved, state = generators.save(), (random.getstate(), np.random.get_state())
    expected = drawn() + drawn()
    generators.restore(saved)
    meanwhile(*([()] if meanwhile is torch.randn else []))
    generators.restore(saved)
    assert random.getstate() == state[0]
    assert all(map(np.array_equal, np.random.get_state(), state[1]))
    assert drawn() + drawn() == expected


def test_a_generator_of_numpy_that_is_replaced_meanwhile_is_put_back_too():
    generators, bits = HostGenerators(), np.random.mtrand._rand._bit_generator
    np.random.seed(5)
    saved, expected = generators.save(), np.random.rand()
    try:
        np.random.set_bit_generator(np.random.MT19937(1))
        np.random.rand()
        generators.restore(saved)
        assert np.random.rand() == expected
    finally:
        np.random.set_bit_generator(bits)


def test_a_python_generator_that_has_not_moved_is_not_copied_again():
    chance = RngCache(torch.device("cpu"))
    assert chance.now()[1] is chance.now()[1]
    kept = chance.now()[1]
    random.random()
    assert chance.now()[1] is not kept


def test_the_second_normal_value_of_a_pair_is_a_state_of_its_own():
    chance = RngCache(torch.device("cpu"))
    np.random.seed(4)
    np.random.normal()
    assert chance.now().numpy[3] == 1  # the second one waits, and drawing it leaves the table as it is
    np.random.normal()
    kept = chance.now()
    assert kept.numpy[3] == 0
    expected = drawn()
    chance.back_to(kept)
    assert drawn() == expected


@pytest.mark.parametrize("draws", [1, 2, 623, 624, 625, 1248])
def test_states_are_the_current_ones_after_any_number_of_draws(draws: int):
    chance = RngCache(torch.device("cpu"))
    random.seed(draws)
    np.random.seed(draws)
    for _ in range(5):
        chance.now()
        for _ in range(draws):
            random.getrandbits(32)
            np.random.randint(0, 1 << 32, dtype=np.uint32)
        kept = chance.now()
        assert kept.python == random.getstate()
        assert all(np.array_equal(mine, now) for mine, now in zip(kept.numpy, np.random.get_state(), strict=True))


def test_a_seed_or_a_state_that_is_set_is_noticed():
    chance, other = RngCache(torch.device("cpu")), random.Random(5).getstate()
    for seed in (1, 2, 1, 3):
        random.seed(seed)
        np.random.seed(seed)
        kept = chance.now()
        assert kept.python == random.getstate() and np.array_equal(kept.numpy[1], np.random.get_state()[1])
    random.setstate(other)
    assert chance.now().python == other
