"""`kgorch check` runs a foreign program for a moment, leaves nothing for a run to find, and says what a wall would lose."""

from __future__ import annotations

import json

from foreign import counts, shell_plan


def checked(kgorch, plan, code: int = 0):
    done = kgorch("check", str(plan.write(kgorch)), "--json", code=code)
    view = json.loads(done.stdout)
    return view, [line["said"] for line in view["preflight"] if line["name"] == "stage train"]


def test_steps_checkpoints_the_stop_and_the_loss_at_a_wall_are_told(kgorch):
    view, said = checked(kgorch, counts(4000))
    figures = view["stages"][0]["foreign"]
    assert figures["step"] > 5 and 0.05 < figures["step_s"] < 2 and figures["metrics"]["loss"] > 0
    assert len(figures["checkpoints"]) >= 2 and figures["checkpoints"][-1]["path"] == "state/state.json"
    assert not figures["ended"] and not figures["killed"] and figures["by"] == "SIGTERM" and figures["stop_s"] < 5
    assert (
        said[0].startswith(f"it came to step {figures['step']}")
        and "checkpoints, the newest state/state.json" in said[1]
    )
    assert "after SIGTERM and saved" in said[2] and "a wall loses" in said[2]
    assert view["verdict"] == "fits" and view["forecast"] is None
    # it was "no stage takes steps"
    assert (
        view["why"]
        == f"stage train: {said[0]}; how much memory it needs is not measured for a program that saves by itself"
    )
    assert not (kgorch.folder / "state").exists(), "a run would find what the check has saved"


def test_a_program_that_ends_is_said_to_have_ended_and_one_that_saves_nothing_is_warned_of(kgorch):
    _, said = checked(kgorch, shell_plan("echo step 1; mkdir -p state; echo 1 > state/state.json"))
    assert said[0].startswith("it ran to its end in") and len(said) == 2
    without = shell_plan("mkdir -p state; echo 1 > state/state.json")
    without.extra = "[checkpoint]\nkeep = { best = 'loss:min' }"
    del without.foreign["step"]
    _, said = checked(kgorch, without)
    assert said[-1].startswith("keep.best: no checkpoint can be the best by loss:min")
    view, said = checked(kgorch, shell_plan("exit 0"), code=20)
    assert view["verdict"] == "does_not_run" and "left no complete checkpoint" in view["why"] and said == []


def test_a_program_that_saves_at_its_end_alone_is_warned_of(kgorch):
    """It was passed as one whose checkpoint is copied, and each session before the end lost all."""
    script = "for step in $(seq 110); do echo step $step; sleep 0.1; done; mkdir -p state; echo {} > state/state.json"
    _, said = checked(kgorch, shell_plan(script))
    assert said[1] == "it completed state/state.json only at its end: each session before that loses all"


def test_what_a_wall_loses_is_told_by_the_times_of_the_saves(kgorch):
    """Not by those of the copies: a folder is copied when the next one is begun."""
    script = "for n in 1 2 3 4 5; do mkdir -p out/$n; echo step $n; echo {} > out/$n/a.json; sleep 6; done"
    _, said = checked(kgorch, shell_plan(script, checkpoint="out/*", incomplete=[]))
    assert float(said[-1].rpartition("up to ")[2].removesuffix(" s")) > 5.9, said


def test_a_file_that_names_the_newest_checkpoint_in_other_words_than_the_plan_is_told_and_the_runs_own_is_left_alone(
    kgorch,
):
    """Else the first resume would write words that the program cannot read."""
    script = "mkdir -p out/step-007; echo 1 > out/step-007/state.json; printf 7 > newest"
    (kgorch.folder / "newest").write_text("3")
    for latest, wrong in ("newest", True), ({"file": "newest", "text": "{number}"}, False):
        _, said = checked(kgorch, shell_plan(script, checkpoint="out/step-*", latest=latest))
        assert [line for line in said if "newest holds" in line] == (
            ["newest holds '7', expected 'step-007': a resume would write words there that the program may not read"]
            if wrong
            else []
        )
    assert (kgorch.folder / "newest").read_text() == "3"
