"""The memory ladder as stories: which rung follows, what helps against what, and the way back."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kgorch.core.memory.memory_ladder import (
    DEFAULT,
    EVALUATION,
    HOST,
    OPTIMIZER,
    MemoryFacts,
    Settings,
    in_order,
    levels,
    next_rung,
    parse_rung,
)
from kgorch.errors import PlanError
from kgorch.plan import parse

FACTS = MemoryFacts(batch=16, num_workers=4, blocks=3)
BASE = Settings(microbatch=16)
CROP = {"set": {"crop": 96}, "changes_result": True}


def _names(ladder, facts=FACTS, base=BASE, **where):
    """The rungs that follow one after another until none is left."""
    rungs, now, names = [parse_rung(item) for item in ladder], base, []
    while found := next_rung(rungs, now, base, facts, **where):
        names.append(found[0].name)
        now = found[1]
        assert len(names) < 200
    return names


def test_the_microbatch_is_halved_to_one_then_activations_go_and_it_is_whole_again():
    names = _names(["microbatch/2", "activation_checkpointing", CROP])
    assert names == ["microbatch/2"] * 4 + ["activation_checkpointing"] + ["microbatch/2"] * 4 + ["set crop=96"]


def test_with_batchnorm_activations_go_first_and_a_smaller_microbatch_changes_the_result():
    facts = MemoryFacts(batch=16, blocks=3, batchnorm=True)
    assert (
        _names(["microbatch/2", "activation_checkpointing"], facts)
        == ["activation_checkpointing"] + ["microbatch/2"] * 3
    )
    rungs = in_order([parse_rung("microbatch/2"), parse_rung("activation_checkpointing")], facts)
    assert [rung.changes_result for rung in rungs] == [False, True]


def test_without_repeated_blocks_there_is_nothing_to_checkpoint():
    assert _names(["activation_checkpointing"], MemoryFacts(batch=16)) == []


def test_what_helps_the_host_is_not_tried_for_the_device_nor_the_other_way_round():
    assert set(_names(DEFAULT, where=HOST)) == {"num_workers/2", "pin_memory=false"}
    assert not {"num_workers/2", "pin_memory=false"} & set(_names(DEFAULT))
    assert _names(["microbatch/2", CROP], where=OPTIMIZER) == ["set crop=96"]
    assert _names(["microbatch/2", "activation_checkpointing", "expandable_segments", CROP], where=EVALUATION) == [
        "expandable_segments",
        "set crop=96",
    ]


def test_on_the_cpu_both_memories_are_one():
    facts = MemoryFacts(batch=2, num_workers=2, device="cpu")
    assert _names(["num_workers/2", "microbatch/2"], facts) == ["num_workers/2", "num_workers/2", "microbatch/2"]


def test_a_fixed_microbatch_and_fixed_workers_are_taken_once():
    assert _names(["microbatch=12"]) == ["microbatch=12"]
    facts = MemoryFacts(batch=16, num_workers=4, device="cpu")
    assert _names(["num_workers=2", "num_workers=1"], facts) == ["num_workers=2", "num_workers=1"]
    assert Settings(workers_at_most=2).workers(4) == 2 and Settings(workers_divided=2).workers(1) == 0


def test_several_values_of_one_argument_follow_each_other():
    ladder = [{"set": {"crop": 96}}, {"set": {"crop": 64}}]
    assert _names(ladder) == ["set crop=96", "set crop=64"]


def test_what_changes_the_result_is_not_carried_into_another_run():
    rungs, now = [parse_rung("microbatch/2"), parse_rung(CROP)], BASE
    while found := next_rung(rungs, now, BASE, FACTS):
        now = found[1]
    assert now.arguments == {"crop": 96}
    assert now.without_result_changes == Settings(microbatch=1)


rungs_of_all_kinds = st.lists(
    st.sampled_from([*DEFAULT, "microbatch=12", "microbatch/3", "num_workers=1", "empty_cache/9"]),
    unique=True,
    max_size=8,
)
any_facts = st.builds(
    MemoryFacts, batch=st.integers(0, 64), num_workers=st.integers(0, 16), batchnorm=st.booleans(), blocks=st.integers(0, 3),
    device=st.sampled_from(["cpu", "cuda"]),
)  # fmt: skip


@given(rungs_of_all_kinds, any_facts, st.none() | st.integers(1, 64), st.data())
def test_every_ladder_ends_and_every_level_in_process_leads_back_one_by_one(ladder, facts, microbatch, data):
    base = Settings(microbatch=microbatch)
    rungs = in_order([parse_rung(item) for item in ladder], facts)
    seen, now = [base], base
    while found := next_rung(rungs, now, base, facts):
        now = found[1]
        assert now not in seen and Settings.from_dict(now.as_dict()) == now
        seen.append(now)
        assert len(seen) < 100
    in_process = [rung for rung in rungs if rung.is_in_process]
    way, now = [base], base
    while found := next_rung(in_process, now, base, facts):
        now = found[1]
        way.append(now)
    assert levels(rungs, now, base, facts) == way


@pytest.mark.parametrize(
    ("written", "said"),
    [
        ("microbatch/0", "expected one like"),
        ("batch/2", "expected one like"),
        ({"set": {}}, "expected { set = "),
        ({"crop": 96}, "expected { set = "),
        ({"set": {"crop": 96}, "change_result": True}, "expected { set = "),
        ({"set": {"crop": 96}, "changes_result": "yes"}, "expected true or false"),
    ],
)
def test_a_rung_that_is_none_is_refused_with_what_would_be_one(written, said):
    with pytest.raises(ValueError, match="expected") as refused:
        parse_rung(written)
    assert said in str(refused.value)


def test_a_plan_names_the_line_of_a_wrong_rung():
    plan = 'name = "x"\n[[stage]]\nname = "a"\nentry = "a.py"\n[memory]\nladder = ["microbatch/2", "crop=96"]\n'
    with pytest.raises(PlanError) as refused:
        parse(plan, "plan.toml")
    assert "plan.toml:6: memory.ladder" in str(refused.value) and "crop=96" in str(refused.value)
    with pytest.raises(PlanError, match="twice"):
        parse(plan.replace("crop=96", "microbatch / 2"), "plan.toml")
