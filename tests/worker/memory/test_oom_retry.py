"""What a step begins from (worker/memory/oom_retry.py): cheap to keep, and whole when it is put back."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest
import torch

from kgorch.worker.rng_state import RngCache


def drawn() -> list[float]:
    return [random.random(), random.gauss(0, 1), float(np.random.rand()), float(torch.rand(()))]


@pytest.mark.parametrize(
    "meanwhile",
    [
        lambda: None,
        random.random,
        lambda: random.gauss(0, 1),  # one of a pair: the other one is drawn without the generator
        lambda: [random.random() for _ in range(624)],  # the whole state once, its index where it was
        lambda: random.seed(9),
        np.random.rand,
        torch.randn,
    ],
)
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


def test_a_python_generator_that_has_not_moved_is_not_copied_again():
    chance = RngCache(torch.device("cpu"))
    assert chance.now()[1] is chance.now()[1]
    kept = chance.now()[1]
    random.random()
    assert chance.now()[1] is not kept
