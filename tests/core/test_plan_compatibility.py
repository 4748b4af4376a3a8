"""Stories of a plan that changed between two sessions."""

from __future__ import annotations

import pytest

from kgorch.core.plan_compatibility import compare_plans
from kgorch.plan import parse

PLAN = """
name = "x"
[[stage]]
name = "prepare"
entry = "prepare.py"
[[stage]]
name = "train"
entry = "train.py"
args = { epochs = 3, model = { width = 8 } }
[[stage]]
name = "predict"
entry = "predict.py"
[notify]
urls = ["https://h/s3cr3t"]
"""
PREPARE, TRAIN, PREDICT = (f"[[stage]]{part}" for part in PLAN.split("[notify]")[0].split("[[stage]]")[1:])
HEAD = 'name = "x"\n'


def judged(text, *overrides, begun=("prepare", "train"), done=("prepare",), old=PLAN):
    before, now = parse(old, "old").model_dump(mode="json"), parse(text, "new", overrides).model_dump(mode="json")
    return compare_plans(before, now, started=begun, finished=done)


def test_the_same_plan_differs_in_nothing():
    found = judged("# another comment\n" + PLAN)
    assert found.differences == found.refusals == found.permanent_refusals == ()


def test_what_may_change_is_taken_and_shown_key_by_key_old_and_new():
    found = judged(PLAN, "stage.train.args.epochs=9", "session.wall=30m", "stage.train.args.model.width=16")
    assert found.refusals == ()
    assert [str(item) for item in found.differences] == [
        "stage.train.args.epochs: 3 → 9",
        "stage.train.args.model.width: 8 → 16",
        "session.wall: nothing → 1800.0",
    ]


def test_another_program_of_a_stage_that_has_begun_is_refused_and_of_one_that_has_not_taken():
    refused = judged(PLAN, "stage.train.entry=other.py")
    assert refused.refusals == ("stage 'train' has begun with another program, train.py",)
    assert judged(PLAN, "stage.predict.entry=other.py", "stage.prepare.entry=other.py").refusals == ()


def test_another_seed_is_refused_while_a_stage_is_under_way():
    assert "the seed of 'train'" in judged(PLAN, "seed=4").refusals[0]
    assert judged(PLAN, "seed=4", begun=("prepare",)).refusals == ()


def test_determinism_and_weights_are_taken_with_a_note():
    found = judged(PLAN, "deterministic=strict", "stage.train.weights=w.pt")
    notes = {item.key: item.note for item in found.differences}
    assert found.refusals == ()
    assert notes["deterministic"] == "weights so far were made without it"
    assert notes["stage.train.weights.file"] == "no effect: the stage has begun"


@pytest.mark.parametrize(
    ("stages", "said"),
    [
        (PREPARE + PREDICT, "'train' has begun and is not in the plan"),
        (PREPARE + TRAIN.replace('"train"', '"learn"') + PREDICT, "'train' has begun and is not in the plan"),
        (TRAIN + PREPARE + PREDICT, "'prepare', 'train' were begun in this order"),
        (PREPARE + PREDICT + TRAIN, "'predict' would come before 'train'"),
    ],
)
def test_stages_may_not_move_around_one_that_has_begun(stages, said):
    assert said in judged(HEAD + stages).refusals[0]


@pytest.mark.parametrize(
    "stages", [TRAIN + PREDICT, PREPARE + TRAIN, PREPARE + TRAIN + PREDICT.replace("predict", "p")]
)
def test_stages_that_are_done_or_have_not_begun_may_go(stages):
    found = judged(HEAD + stages)
    assert found.refusals == () and found.differences[0].key == "stages"


def test_where_checkpoints_lie_is_refused_for_good():
    assert judged(PLAN, "checkpoint.dir=elsewhere").permanent_refusals == (
        "checkpoint.dir: its checkpoints lie in the state folder",
    )


@pytest.mark.parametrize(
    "override",
    [
        "stage.train.args.hf_token=0th3r",
        'notify.urls=["https://h/0th3r"]',
        'checkpoint.mirror_options={key="0th3r"}',
        "notify.urls=[]",
        'stage.train.args.hubs=[{token="0th3r"}]',
    ],
)
def test_what_may_hold_a_token_is_told_to_have_changed_and_not_to_what(override):
    [difference] = judged(PLAN, override).differences
    assert "s3cr3t" not in str(difference) and "0th3r" not in str(difference) and "…" in str(difference)
