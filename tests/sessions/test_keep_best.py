"""keep.best under real supervisors: what is exported as the best holds the weights that its figure was measured on."""

from __future__ import annotations

import json

import numpy as np
import pytest
from harness import QUOTA, Kgorch, processes_of, wait_until
from safetensors.numpy import load_file

BEST = ("--set", "checkpoint.keep.last=1", "--set", "checkpoint.keep.best=accuracy:max")


def exported_norm(kgorch: Kgorch, *options: str) -> tuple[float, str]:
    """Norm of the weights that are exported, and what the command says."""
    said = kgorch("checkpoints", "export", "test", "best.safetensors", *options).stderr
    weights = load_file(kgorch.folder / "best.safetensors").values()
    return float(np.sqrt(sum((weight.astype(np.float64) ** 2).sum() for weight in weights))), said


def told(kgorch: Kgorch) -> dict[float, float]:
    """The norm of the weights on which each accuracy was measured first, as the script itself wrote it down."""
    [path] = kgorch.home.glob("runs/*/*/outputs/told.jsonl")
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return {item["accuracy"]: item["weights_norm"] for item in reversed(lines)}


def standing(kgorch: Kgorch) -> list[tuple[int, bool, str | None]]:
    return [(row["step"], row["final"], row["best"]) for row in kgorch.look("checkpoints", "list", "test")]


@pytest.mark.parametrize(("ranks", "who"), [pytest.param(1, "all", marks=pytest.mark.soak), (2, "first")])
def test_the_best_of_a_finished_run_is_what_was_measured_and_is_marked(kgorch, ranks, who):
    """Saves by the clock besides, as many as there can be."""
    args = {"accuracies": "0.9_0.8_0.7_0.9", "who": who, "sleep": 0.3}
    ended = kgorch("start", str(kgorch.plan("evaluates.py", ranks=ranks, args=args, every="1s")), *BEST)
    norm, said = exported_norm(kgorch, "--best")
    assert norm == pytest.approx(told(kgorch)[0.9], rel=1e-6) and "step 6 of train (accuracy 0.9)" in said
    assert standing(kgorch) == [(6, False, "accuracy:max"), (24, True, None)]
    best = kgorch.status()["best"]
    assert best["step"] == 6 and best["value"] == 0.9 and best["by"] == "accuracy:max" and best["stage"] == "train"
    assert any(
        " ".join(line.split()) == "best step 6 of train: accuracy 0.9" for line in kgorch("status").stdout.splitlines()
    )
    assert "next: kgorch checkpoints export test model.safetensors --best" in ended.stderr
    assert [item["measured"]["accuracy"] for item in kgorch.look("checkpoints", "list", "test")] == [6, 24]
    _, said = exported_norm(kgorch, "--best", "accuracy:min")
    assert "step 6" in said, "of those that are left and were measured: the last one's accuracy is the same"


def test_an_evaluation_while_gradients_wait_for_their_optimizer_is_told_to_save_nothing(kgorch):
    args = {"accuracies": "0.8_0.9_0.7", "every": 4}
    kgorch("start", str(kgorch.plan("evaluates.py", ranks=1, args=args)), *BEST)
    [told] = kgorch.events("best_not_saved")
    assert told["facts"]["step"] == "1" and "gradients of the epoch's last batches" in told["facts"]["why"]
    assert any("step the optimizer after the last batch, too" in notice for notice in kgorch.status()["notices"])
    assert [row["step"] for row in kgorch.look("checkpoints", "list", "test") if row["best"]] == [3]


@pytest.mark.soak  # the storm does it at any moment
def test_a_kill_of_everything_between_evaluations_leaves_the_best(kgorch):
    args = {"accuracies": "0.8_0.9_0.7_0.6_0.9", "who": "first", "sleep": 0.25}
    plan = kgorch.plan("evaluates.py", ranks=2, args=args, every="1s")
    kgorch.background("start", str(plan), *BEST)
    kgorch.wait_for_step(14)
    kgorch.kill_everything()
    wait_until(lambda: not processes_of(kgorch.home))
    kgorch("resume")
    norm, said = exported_norm(kgorch, "--best")
    assert norm == pytest.approx(told(kgorch)[0.9], rel=1e-6) and "step 12" in said
    assert standing(kgorch) == [(12, False, "accuracy:max"), (30, True, None)]


def test_a_stop_during_an_evaluation_ends_with_the_state_that_was_evaluated(kgorch):
    (kgorch.folder / "hold").touch()
    args = {"accuracies": "0.9_0.8_0.7", "who": "first"}
    plan = kgorch.plan("evaluates.py", ranks=2, args=args, every="60s")
    supervisor = kgorch.background("start", str(plan), *BEST)
    kgorch.wait_for_step(6)
    stop = kgorch.background("stop", "test")
    wait_until(lambda: kgorch.status()["phase"] == "stopping")
    (kgorch.folder / "hold").unlink()
    assert stop.wait(timeout=90) == 0 and supervisor.wait(timeout=90) == 10
    found = kgorch.status()
    assert found["best"]["step"] == 6 <= found["checkpoint"]["step"] <= 8, (
        "at once, unless the order was long on its way"
    )
    kgorch("resume")
    norm, said = exported_norm(kgorch, "--best")
    assert norm == pytest.approx(told(kgorch)[0.9], rel=1e-6) and "step 6" in said


def test_the_wall_during_an_evaluation_saves_in_time_and_the_best_stays(kgorch):
    args = {"accuracies": "0.5_0.9_0.6_0.7_0.8_0.6_0.5_0.6_0.5_0.6", "who": "first", "sleep": 0.5}  # 45 s
    plan = kgorch.plan("evaluates.py", ranks=2, args=args, every="60s", margin="3s", extra=QUOTA)
    supervisor = kgorch.background("start", str(plan), *BEST)
    kgorch.wait_for_step(1)
    kgorch.move_wall(15)
    assert supervisor.wait(timeout=60) == 11
    done = kgorch.status()
    assert done["phase"] == "suspended" and done["session"]["ended_at"] < done["session"]["wall_at"]
    assert done["best"]["value"] == max(told(kgorch))
    kgorch.move_wall(3600)
    kgorch("start", str(plan), *BEST, "--set", "stage.train.args.sleep=0.0")
    norm, _ = exported_norm(kgorch, "--best")
    assert norm == pytest.approx(told(kgorch)[0.9], rel=1e-6)


def test_export_says_what_it_lacks_to_choose_the_best(kgorch):
    kgorch("start", str(kgorch.plan("evaluates.py", args={"accuracies": "0.9_0.8"})))
    for options, text in (
        (("--best",), "which metric decides the best"),
        (("--best", "accuracy"), "whether the lowest or the highest accuracy is the best"),
        (("--best", "dice:max"), "no checkpoint of test holds weights that were evaluated by dice"),
        (("--best", "accuracy:max", "--step", "12"), "--best and --step each select a checkpoint"),
    ):
        assert text in kgorch("checkpoints", "export", "test", "out.safetensors", *options, code=2).stderr
    assert kgorch.status()["best"] is None


AFTER_TRAINING = """
[[stage]]
name = "predict"
entry = "predicts.py"
args = { out = "predictions.json" }
[[stage]]
name = "again"
entry = "predicts.py"
args = { out = "again.json", hold = "wait" }
"""


def test_a_later_stage_has_the_best_weights_and_the_next_best_where_those_broke(kgorch):
    (kgorch.folder / "wait").touch()
    plan = kgorch.plan(
        "evaluates.py", args={"accuracies": "0.5_0.95_0.9", "sleep": 0.02}, every="60s", extra=AFTER_TRAINING
    )
    supervisor = kgorch.background("start", str(plan), *BEST)
    wait_until(lambda: list(kgorch.home.glob("runs/*/*/attempts/1.3/rank0.log")), within_s=90)
    [outputs], norms = kgorch.home.glob("runs/*/*/outputs"), told(kgorch)
    made = json.loads((outputs / "predictions.json").read_text())
    assert made["weights"] == {
        "checkpoint": "train/step-00000012", "which": "best", "step": 12, "metric": "accuracy", "value": 0.95,
    }  # fmt: skip
    assert made["norm"] == pytest.approx(norms[0.95], rel=1e-6) and made["last_norm"] == pytest.approx(norms[0.9])
    assert made["norm"] != pytest.approx(made["last_norm"], rel=1e-6)

    [shard] = kgorch.home.glob("runs/*/*/checkpoints/train/step-00000012/*.safetensors")
    shard.write_bytes(shard.read_bytes()[:-1] + b"!")
    (kgorch.folder / "wait").unlink()
    assert supervisor.wait(timeout=120) == 0, supervisor.communicate()[0]
    made = json.loads((outputs / "again.json").read_text())
    assert made["weights"]["checkpoint"] == "train/step-00000018-final" and made["weights"]["value"] == 0.9
    assert made["norm"] == made["last_norm"]
    assert made["first"] == "predictions.json", "computed once in the run, and kept in its folder"
    assert [event["facts"]["checkpoint"] for event in kgorch.events("checkpoint_quarantined")] == [
        "step-00000012.broken"
    ]
    assert not kgorch.events("stage_reopened")
