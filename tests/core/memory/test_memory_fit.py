"""Whether it fits: lines through what was weighed, the plan's own ladder walked down until there is room."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kgorch.core.codes import Fit
from kgorch.core.memory import memory_fit
from kgorch.core.memory.memory_fit import Trial
from kgorch.core.memory.memory_ladder import DEFAULT, MemoryFacts, Settings, parse_rung

GB = 10**9
FACTS = MemoryFacts(batch=16, blocks=4)


def trials(foot=2.0, each=1.0, dropped=0.25, sizes=(1, 8, 16), step_s=1.0):
    """Weighed in GB: activations kept, and dropped."""
    kept = [Trial(size, False, int((foot + each * size) * GB), step_s) for size in sizes]
    return kept + [Trial(size, True, int((foot + dropped * size) * GB), 1.3 * step_s) for size in sizes]


def judged(limit, found=None, ladder=DEFAULT, base=None, facts=FACTS):
    rungs = [parse_rung(rung) for rung in ladder]
    return memory_fit.judge(
        found or trials(), share=16, base=base or Settings(), ladder=rungs, facts=facts, limit=int(limit * GB), where="16 GB"
    )  # fmt: skip


def test_what_fits_as_planned_takes_no_rung():
    found = judged(limit=20)
    assert (found.word, found.rungs, found.largest) == (Fit.FITS, (), 16)
    assert found.need.held == 18 * GB and found.need.is_measured


def test_what_does_not_fit_walks_the_plans_own_ladder_and_says_with_what_it_does():
    found = judged(limit=11)  # 2 + 8 fit, 2 + 16 do not
    assert found.word == Fit.FITS_WITH and found.settings.microbatch == 8
    assert found.rungs == ("microbatch/2",)
    assert found.need.held == 10 * GB
    assert found.largest == 8


def test_the_order_of_the_plan_counts():
    found = judged(limit=11, ladder=("activation_checkpointing", "microbatch/2"))
    assert found.settings.activation_checkpointing and found.settings.microbatch is None
    assert found.need.step_s == pytest.approx(1.3)


def test_what_was_not_weighed_is_read_off_the_line():
    found = judged(limit=6.5, found=trials(sizes=(1, 16)))
    assert found.settings.microbatch == 4 and not found.need.is_measured
    assert found.need.held == pytest.approx(6 * GB, rel=0.01)


def test_where_no_rung_makes_enough_room_it_does_not_fit():
    found = judged(limit=2)
    assert found.word == Fit.DOES_NOT_FIT and found.settings is None
    assert "no rung" in found.why


def test_a_rung_that_sets_an_argument_is_named_and_not_guessed():
    found = judged(limit=2.5, ladder=("microbatch/2", {"set": {"crop": 96}, "changes_result": True}))
    assert found.word == Fit.DOES_NOT_FIT and "crop" in found.why


def test_what_ran_out_of_memory_does_not_fit_whatever_the_line_says():
    ran_out = [Trial(1, False, 3 * GB, 1.0), Trial(4, False, 6 * GB, 1.0), Trial(8, False, 7 * GB, 1.0, ran_out=True)]
    found = judged(limit=100, found=ran_out)
    assert found.word == Fit.FITS_WITH and found.settings.microbatch == 4 and found.largest == 7


def test_activations_go_first_where_batchnorm_would_notice_a_smaller_microbatch():
    found = judged(limit=11, facts=MemoryFacts(batch=16, blocks=4, batchnorm=True))
    assert found.settings.activation_checkpointing and found.settings.microbatch is None


def test_of_a_single_trial_what_stands_does_not_shrink_with_the_microbatch():
    alone = [Trial(16, False, 18 * GB, 1.0)]  # 15 of them weights, gradients and optimizer
    rungs = [parse_rung(rung) for rung in DEFAULT]
    found = memory_fit.judge(
        alone, share=16, base=Settings(), ladder=rungs, facts=FACTS, limit=14 * GB, where="14 GB", fixed_bytes=15 * GB
    )
    assert found.word == Fit.DOES_NOT_FIT and found.largest == 0


def test_the_last_of_memory_is_not_counted_on():
    assert judged(limit=18.2).word == Fit.FITS_WITH, "18 of 18.2 GB are more than 96%"


@given(st.floats(1, 50), st.floats(0.01, 5), st.floats(0.0, 1.0), st.floats(1, 200))
def test_what_is_said_to_fit_fits_by_its_own_figures(foot, each, dropped, limit):
    found = judged(limit=limit, found=trials(foot, each, dropped * each))
    if found.need is not None:
        assert found.need.held <= memory_fit.MAX_SHARE * limit * GB
    if found.word == Fit.DOES_NOT_FIT:
        assert foot + min(each, dropped * each) > memory_fit.MAX_SHARE * limit * 0.999, (
            "one sample with activations dropped had no room"
        )


@given(st.integers(1, 300), st.integers(0, 300))
def test_auto_takes_as_few_parts_as_fit_and_makes_them_alike(share, largest):
    size = memory_fit.even_microbatch(share, largest, MemoryFacts(batch=share))
    if not largest or largest >= share:
        assert size == largest
        return
    parts = -(-share // size)
    assert 0 < size <= largest and parts == -(-share // largest)
    assert size - 1 == 0 or -(-share // (size - 1)) > parts, "smaller ones would be more"
    assert memory_fit.even_microbatch(share, largest, MemoryFacts(batch=share, batchnorm=True)) == 0, (
        "its statistics would change"
    )
    assert memory_fit.even_microbatch(share, largest, MemoryFacts()) == 0, "nobody can split it"
