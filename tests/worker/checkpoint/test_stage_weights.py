"""session.weights: which checkpoint of another stage is read, what its label says, and what it refuses."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import ranks
import torch

from kgorch.checkpoint.folder import read_checkpoint
from kgorch.errors import CannotRestore, CheckpointBroken
from kgorch.protocol.launch_spec import LaunchSpec
from kgorch.worker.checkpoint import stage_weights

BEST = {"metric": "accuracy", "highest": True, "value": None}


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> LaunchSpec:
    """The launch of a stage after one whose evaluations said 0.5, 0.9 and 0.8, after steps 6, 12 and 18."""
    folder = tmp_path_factory.mktemp("trained")
    found = ranks.run(folder, "evaluates.py", 1, {"accuracies": "0.5_0.9_0.8"}, best=BEST)
    assert found.codes == [0], found.said()
    told = LaunchSpec.read(folder / "launch.json")
    return replace(told, stage="predict", checkpoints=str(folder / "checkpoints" / "predict"))


def norm(tensors: dict[str, torch.Tensor]) -> float:
    return float(torch.cat([tensor.double().flatten() for tensor in tensors.values()]).norm())


def stage_folder(launch: LaunchSpec) -> Path:
    return Path(launch.checkpoints).parent / "train"


def copied(launch: LaunchSpec, folder: Path) -> LaunchSpec:
    """The same over a copy of its checkpoints that may be damaged."""
    shutil.copytree(Path(launch.checkpoints).parent, folder / "checkpoints")
    return replace(launch, checkpoints=str(folder / "checkpoints" / "predict"))


def test_the_best_is_the_default_where_the_plan_keeps_one_and_holds_what_was_measured(trained):
    found = stage_weights.read(trained, "train", "model", None)
    described = read_checkpoint(stage_folder(trained) / "step-00000012")
    assert norm(found) == pytest.approx(described.metrics["weights_norm"], rel=1e-6)
    assert (found.checkpoint, found.step, found.which) == ("train/step-00000012", 12, "best")
    assert found.label == "checkpoint train/step-00000012, best accuracy 0.9"
    assert found.facts == {
        "checkpoint": "train/step-00000012", "which": "best", "step": 12, "metric": "accuracy", "value": 0.9,
    }  # fmt: skip
    torch.nn.Linear(8, 4).load_state_dict(found)


def test_the_lowest_is_the_best_where_the_plan_says_so(trained):
    lowest = replace(trained, best=BEST | {"highest": False})
    assert stage_weights.read(lowest, "train", "model", "best").step == 6


@pytest.mark.parametrize(("best", "which"), [(BEST, "final"), (None, None), (None, "final")])
def test_the_final_one_is_taken_where_it_is_asked_for_or_no_best_is_kept(trained, best, which):
    found = stage_weights.read(replace(trained, best=best), "train", "model", which)
    assert found.label == "checkpoint train/step-00000018-final, the last weights"
    assert found.facts == {"checkpoint": "train/step-00000018-final", "which": "final", "step": 18}
    assert norm(found) != pytest.approx(norm(stage_weights.read(trained, "train", "model", "best")), rel=1e-6)


def test_where_the_metric_was_never_measured_the_default_is_the_final_one_and_its_label_says_so(trained):
    found = stage_weights.read(replace(trained, best=BEST | {"metric": "dice"}), "train", "model", None)
    assert found.which == "final" and found.label.endswith("the last weights: dice was measured on none")


@pytest.mark.parametrize(
    ("best", "text"), [(BEST | {"metric": "dice"}, "dice was measured on none"), (None, "the plan keeps no best one")]
)
def test_a_best_one_that_is_asked_for_and_not_there_is_an_error_except_in_a_quick_test(trained, best, text):
    launch = replace(trained, best=best)
    with pytest.raises(CannotRestore, match=text) as refused:
        stage_weights.read(launch, "train", "model", "best")
    assert 'which="final"' in str(refused.value)
    assert stage_weights.read(replace(launch, quick=True), "train", "model", "best").which == "final"


def test_a_stage_that_is_not_done_gives_its_best_only_when_that_is_asked_for(trained, tmp_path):
    launch = copied(trained, tmp_path)
    shutil.rmtree(stage_folder(launch) / "step-00000018-final")
    assert stage_weights.read(launch, "train", "model", "best").step == 12
    for which in (None, "final"):
        with pytest.raises(CannotRestore, match="has left no final checkpoint"):
            stage_weights.read(launch, "train", "model", which)


def test_a_changed_byte_of_the_best_is_found_before_it_is_used(trained, tmp_path):
    launch = copied(trained, tmp_path)
    [shard] = (stage_folder(launch) / "step-00000012").glob("*.safetensors")
    shard.write_bytes(shard.read_bytes()[:-1] + b"!")
    with pytest.raises(CheckpointBroken, match="step-00000012"):
        stage_weights.read(launch, "train", "model", None)


def test_checkpoints_of_another_run_do_not_count(trained):
    with pytest.raises(CannotRestore, match="no final checkpoint"):
        stage_weights.read(replace(trained, run_id="another"), "train", "model", None)
