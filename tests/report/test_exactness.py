"""What a run's attempts have told of the promise of the same bits, as long as the result has it."""

from __future__ import annotations

import pytest

from kgorch.db import runs, sessions
from kgorch.report import run_view

WARMUP = "warmup (LinearLR): changes from step to step and is not saved"


@pytest.fixture
def run(engine):
    texts = dict.fromkeys(("folder", "workdir", "checkpoints", "plan_hash", "plan"), "/x/runs/ink/1")
    return runs.create(engine, id="r1", name="ink", number=1, overrides=[], stages=["train", "tune"], **texts)


@pytest.fixture
def attempt(engine, run):
    """Adds an attempt with what its ranks told, one after the other; of a new session unless `same`."""

    def add(first_step, *told, stage="train", same=False):
        session = sessions.last(engine, run.id) if same else sessions.open_session(engine, run.id, boot_id="b")
        made = sessions.open_attempt(engine, session.id, stage=stage, ranks=1, first_step=first_step, folder_of=str)
        for facts in told:
            sessions.add_event(engine, run.id, "exactness", facts, session.id)
        sessions.close_attempt(engine, made.id, outcome="suspended", cause="", last_step=9, made_progress=True)

    return add


@pytest.fixture
def exactness(engine, run):
    return lambda: run_view.of_run(engine, run)["exactness"]


@pytest.mark.parametrize("same", [True, False])
def test_what_was_not_saved_stays_told_when_it_changes_no_more(attempt, exactness, same):
    """As a warm-up that is over: the resume has begun it anew, and the weights have it."""
    attempt(
        0, {"data": "keyed"}, {"data": "keyed", "untracked": f"a, {WARMUP}"}, {"data": "keyed", "untracked": WARMUP}
    )
    attempt(9, {"data": "keyed"}, same=same)
    attempt(20, {"data": "replayed"})
    assert exactness() == {"data": "replayed", "untracked": f"in session 1: {WARMUP}"}
    attempt(30, {"data": "keyed", "untracked": "ema", "resume": "epoch 4: another order"})
    attempt(40, {"data": "keyed", "untracked": "ema", "resume": "epoch 5: another order"})
    assert exactness() == {
        "data": "keyed",
        "untracked": f"ema; in session 1: {WARMUP}",
        "resume": "epoch 5: another order; in session " + ("3" if same else "4") + ": epoch 4: another order",
    }


def test_that_a_script_trains_a_second_time_stays_told_while_the_next_session_runs(attempt, exactness):
    attempt(0, {"data": "replayed"}, {"data": "replayed", "training": "a second one"})
    attempt(9, {"data": "replayed"})
    assert exactness() == {"data": "replayed", "training": "in session 1: a second one"}


def test_before_the_newest_session_tells_anything_the_notes_of_earlier_ones_are_there(attempt, exactness):
    attempt(0, {"data": "keyed", "untracked": WARMUP})
    attempt(9)
    assert exactness() == {"untracked": f"in session 1: {WARMUP}"}


def test_a_session_that_ended_without_a_step_leaves_what_the_one_before_it_told(engine, run, attempt, exactness):
    """`status` knew no more of how many steps, nor how exact they were, after a time limit in the imports."""
    attempt(0, {"data": "keyed", "untracked": WARMUP})
    reached = {"step": 9, "epoch": 2, "steps_total": 20, "epochs_total": 4, "samples": 36, "metrics": {"loss": 0.5}}
    sessions.update_session(engine, sessions.last(engine, run.id).id, phase="suspended", stage="train", **reached)
    attempt(9)
    last = sessions.last(engine, run.id).id
    sessions.update_session(engine, last, stage="train", step=9)
    assert run_view.of_run(engine, run)["steps_total"] is None, "it is starting: the script may have been changed"
    sessions.update_session(engine, last, phase="suspended")
    shown = run_view.of_run(engine, run)
    assert {name: shown[name] for name in reached} == reached
    assert exactness() == {"data": "keyed", "untracked": WARMUP}
    sessions.update_session(engine, last, metrics={"accuracy": 0.9}, step=8)
    shown = run_view.of_run(engine, run)
    assert [shown[name] for name in ("metrics", "step", "steps_total", "samples")] == [{"accuracy": 0.9}, 8, 20, 0], (
        "its own are kept, and what was told at another step is not"
    )
    attempt(0, stage="tune")
    sessions.update_session(engine, sessions.last(engine, run.id).id, phase="suspended", stage="tune")
    assert (
        exactness() == {"untracked": f"in session 1: {WARMUP}"} and run_view.of_run(engine, run)["steps_total"] is None
    )


def test_nothing_is_left_of_a_beginning_that_was_given_up(attempt, exactness):
    """The stage began anew: by a rung, or because nothing of it was saved. What another stage handed on stays."""
    attempt(0, {"untracked": "of train"})
    attempt(5, {"versions": "torch was 2.4"})
    attempt(0, {"untracked": WARMUP}, stage="tune")
    attempt(0, {"data": "keyed"}, stage="tune")
    assert exactness() == {
        "data": "keyed", "untracked": "in session 1: of train", "versions": "in session 2: torch was 2.4",
    }  # fmt: skip


def test_of_many_notes_the_newest_are_shown(attempt, exactness):
    for number in range(6):
        attempt(number, {"resume": f"epoch {number}"})
    said = "; ".join(
        ["epoch 5", *(f"in session {epoch + 1}: epoch {epoch}" for epoch in (2, 3, 4)), "and 2 more before"]
    )
    assert exactness() == {"resume": said}
