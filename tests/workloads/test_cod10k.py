"""COD10K-v3 as its users have it: the set's own files, best_model.pth of their program, the plans at their document's figures."""

from __future__ import annotations

import inspect
import json
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from kgorch import plan as plans
from kgorch.core.metrics import metric_trend
from kgorch.errors import CannotRestore, KgorchError, WeightsRefused
from kgorch.worker.checkpoint import pretrained
from kgorch.worker.checkpoint.stage_weights import Weights
from kgorch.workloads.camouflage import convert, data, predict, train
from kgorch.workloads.camouflage.data import DataError, Pairs, drawn, pairs_of, preflight
from kgorch.workloads.camouflage.edgenext import EdgeNeXt
from kgorch.workloads.camouflage.make_animals import make_pair, outline
from kgorch.workloads.camouflage.model import CamouflageNet
from kgorch.workloads.camouflage.trained import weights_of
from kgorch.workloads.common import files

FOLDER = Path(train.__file__).parent
PLANS = sorted(FOLDER.glob("plan*.toml"))
NAMES = {
    "Train": [
        "COD10K-CAM-1-Aquatic-13-Pipefish-587", "COD10K-CAM-1-Aquatic-1-BatFish-1", "COD10K-CAM-1-Aquatic-1-BatFish-2",
        "COD10K-CAM-2-Terrestrial-23-Cat-1321", "COD10K-CAM-3-Flying-53-Bird-3024", "COD10K-CAM-4-Amphibian-67-Frog-4500",
        "COD10K-CAM-5-Other-69-Other-5060", "COD10K-CAM-1-Aquatic-15-SeaHorse-1109", "COD10K-CAM-1-Aquatic-1-BatFish-3",
        "COD10K-NonCAM-1-Aquatic-2-Fish-87", "COD10K-NonCAM-6-Background-1",
    ],
    "Test": ["COD10K-CAM-1-Aquatic-1-BatFish-4", "COD10K-CAM-1-Aquatic-10-LeafySeaDragon-419", "COD10K-NonCAM-1-Aquatic-2-Fish-90"],
}  # fmt: skip


@pytest.fixture
def cod10k(tmp_path: Path) -> Path:
    """A few files in the set's layout, with those beside them that are not read."""
    root = tmp_path / "COD10K-v3"
    for part, names in NAMES.items():
        for number, name in enumerate(names):
            make_pair(root / part, name, size=96, seed=0, number=number)
            if "NonCAM" in name:
                for kind in ("GT_Object", "GT_Edge"):
                    Image.fromarray(np.zeros((96, 96), np.uint8)).save(root / part / kind / f"{name}.png")
        shutil.copytree(root / part / "GT_Object", root / part / "GT_Instance")
        (root / part / f"CAM_Instance_{part}.txt").write_text("\n".join(names))
        (root / part / f"CAM-NonCAM_Instance_{part}.txt").write_text("\n".join(names))
    (root / "Info").mkdir()
    (root / "Info" / "CAM_test.txt").write_text("")
    return root


# The set


def test_cod10k_loads_as_it_is_the_camouflaged_alone_or_all(cod10k):
    assert len(Pairs(cod10k, "Test", 64, names="COD10K-CAM-*")) == 2
    everything = [*Pairs(cod10k, "Train", 64, valid=0.3).pairs, *Pairs(cod10k, "Validation", 64, valid=0.3).pairs]
    assert sorted(pair.name for pair in everything) == sorted(NAMES["Train"])
    animals = {pair.name: bool(np.asarray(Image.open(pair.mask)).any()) for pair in everything}
    assert [name for name, has_one in animals.items() if not has_one] == [n for n in animals if "NonCAM" in n]


def test_preflight_says_what_the_set_is_and_what_is_wrong_with_it(cod10k):
    said = preflight(str(cod10k), size=320, names="COD10K-CAM-*", valid=0.3, edges="GT_Edge")
    train_count, valid_count = (
        len(Pairs(cod10k, part, 64, names="COD10K-CAM-*", valid=0.3)) for part in ("Train", "Validation")
    )
    assert (
        said
        == f"{train_count} Train (first: 96x96), {valid_count} Validation (first: 96x96), 2 Test (first: 96x96) of COD10K-CAM-*"
    )
    with pytest.raises(ValueError, match="multiple of 32"):
        preflight(str(cod10k), size=350)
    first = Pairs(cod10k, "Test", 64).pairs[0]
    first.image.write_bytes(b"<html>")
    with pytest.raises(DataError, match=first.name):
        preflight(str(cod10k), valid=0.3)
    assert "3 Test" in preflight(str(cod10k), valid=0.3, skip_broken=True)
    shutil.rmtree(cod10k / "Train" / "GT_Edge")
    with pytest.raises(DataError, match="GT_Edge") as caught:
        preflight(str(cod10k), valid=0.3, edges="GT_Edge")
    assert 'edges = "mask"' in str(caught.value.next_step)
    with pytest.raises(DataError, match="no folder"):
        preflight(str(cod10k / "elsewhere"))


# Validation is cut from Train


def test_a_picture_is_validation_by_its_name_alone_and_never_both(cod10k):
    def names(part: str) -> set[str]:
        return {pair.name for pair in pairs_of(cod10k, part, "*", 0.3)[0]}

    training, validation, test = names("Train"), names("Validation"), names("Test")
    assert training and validation and not training & validation
    assert training | validation == set(NAMES["Train"]) and test == set(NAMES["Test"])
    for gone in list(validation)[:1] + list(training)[:2]:
        (cod10k / "Train" / "Image" / f"{gone}.jpg").unlink()
    make_pair(cod10k / "Train", "COD10K-CAM-2-Terrestrial-23-Cat-1400", size=96, seed=0, number=50)
    assert names("Train") - training <= {"COD10K-CAM-2-Terrestrial-23-Cat-1400"} and names(
        "Validation"
    ) - validation <= {"COD10K-CAM-2-Terrestrial-23-Cat-1400"}, "who goes or comes moves nobody"


def test_the_share_of_the_validation_part_is_the_one_asked_for():
    drawn_for = [drawn("split", f"COD10K-CAM-1-Aquatic-1-BatFish-{number}") for number in range(3040)]
    assert sum(value < 0.1 for value in drawn_for) == pytest.approx(304, abs=50)  # three deviations of a fair draw


@pytest.mark.parametrize("valid", [0.0, 1.0])
def test_a_share_that_leaves_a_part_empty_is_refused(cod10k, valid):
    with pytest.raises(DataError, match=f"valid = {valid:g}"):
        Pairs(cod10k, "Train", 64, valid=valid)


def test_a_limit_takes_the_same_pictures_again_and_a_larger_one_those_and_more(cod10k):
    small, large = (
        {pair.name for pair in Pairs(cod10k, "Train", 64, valid=0.2, limit=count).pairs} for count in (3, 5)
    )
    assert len(small) == 3 and len(large) == 5 and small < large


class Remembers:
    """A session, as far as Pairs asks one: what was computed is kept by name and key, as JSON."""

    def __init__(self) -> None:
        self.kept: dict[str, str] = {}

    def cached(self, name: str, compute: Callable[[], Any], *, key: Any) -> Any:
        place = f"{name} {json.dumps(key)}"
        if place not in self.kept:
            self.kept[place] = json.dumps(compute())
        return json.loads(self.kept[place])

    def progress(self, what: str, done: int, total: int) -> None:
        assert what == "pictures-Train" and done <= total


def test_headers_are_read_once_in_a_run_and_again_for_other_pictures(cod10k, monkeypatch):
    opened: list[Path] = []
    monkeypatch.setattr(data, "size_of", lambda path: opened.append(path) or Image.open(path).size)
    session, counts = Remembers(), []
    for names in ("COD10K-CAM-*", "COD10K-CAM-*", "*"):
        opened.clear()
        pairs = Pairs(cod10k, "Train", 64, names=names, valid=0.2, session=session)
        counts.append(len(opened))
    assert counts[0] > 0 and counts[1] == 0 and counts[2] == 2 * len(pairs)


def test_what_was_broken_is_left_out_to_the_end_of_the_run_without_being_read_again(cod10k, monkeypatch):
    first = Pairs(cod10k, "Train", 64, valid=0.2).pairs[0]
    first.mask.write_bytes(first.mask.read_bytes()[:60])
    session, opened = Remembers(), []
    expected = {"valid": 0.2, "skip_broken": True, "session": session}
    before = Pairs(cod10k, "Train", 64, **expected)
    monkeypatch.setattr(data, "picture", lambda *args: opened.append(args[0]) or files.picture(*args))
    again = Pairs(cod10k, "Train", 64, **expected)
    assert again.pairs == before.pairs and first not in again.pairs and not opened
    assert first.mask.name in again.broken[0]


# GT_Edge


def test_an_outline_lies_on_the_masks_border_also_when_cut_mirrored_and_made_small(cod10k):
    pairs = Pairs(cod10k, "Train", 32, names="COD10K-CAM-*", valid=0.2, edges=True, augments=True)
    torch.manual_seed(0)
    for index in range(len(pairs)):
        sample = pairs[index]
        assert sample.edge.shape == sample.mask.shape == (1, 32, 32)
        border = torch.from_numpy(outline(sample.mask[0].numpy() > 0))
        near = torch.nn.functional.max_pool2d(border[None, None].float(), 5, 1, 2)[0, 0] > 0
        assert sample.edge.sum() > 0.7 * border.sum(), "made three times smaller, a line of one pixel does not break"
        assert (near[sample.edge[0] > 0]).float().mean() > 0.95
    assert Pairs(cod10k, "Train", 32, valid=0.2)[0].edge.shape == (0,), "it is read only where it is asked for"


@pytest.mark.parametrize(("breaks", "said"), [("unlink", "has no outline"), ("truncate", "cannot be read")])
def test_an_outline_that_is_missing_or_broken_is_named(cod10k, breaks, said):
    edge = Pairs(cod10k, "Train", 64, valid=0.2, edges=True).pairs[0].edge
    edge.unlink() if breaks == "unlink" else os.truncate(edge, 0)
    with pytest.raises(DataError, match=said) as caught:
        Pairs(cod10k, "Train", 64, valid=0.2, edges=True)
    assert edge.stem in str(caught.value)
    Pairs(cod10k, "Train", 64, valid=0.2)
    assert len(Pairs(cod10k, "Train", 64, valid=0.2, edges=True, skip_broken=True).broken) == 1


# The rate


def test_the_rate_warms_up_falls_as_a_cosine_to_its_end_and_goes_on_where_epochs_before_it_left_it():
    def rates(before: int, count: int) -> list[float]:
        optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], 1.5e-4)
        scheduler = train.schedule(optimizer, 4, warmup=10, epochs=110, before=before, final=1e-5 / 1.5e-4)
        found = []
        for _ in range(count):
            found.append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            scheduler.step()
        return found

    whole = rates(0, 441)
    assert whole[0] == pytest.approx(1.5e-6) and whole[40] == max(whole) == pytest.approx(1.5e-4)
    assert whole[440] == min(whole[40:]) == pytest.approx(1e-5)
    assert whole[40 + 200] == pytest.approx(1e-5 + 1.4e-4 * (1 + math.cos(math.pi / 2)) / 2)
    assert rates(54, 20) == whole[54 * 4 : 54 * 4 + 20], "as the document's run at epoch 84 of 140"


# best_model.pth


def theirs(path: Path, dims: tuple[int, ...] = (80, 160, 288, 584), *, averaged: bool) -> dict[str, torch.Tensor]:
    """A checkpoint as CamoXpert's train_ultimate.py writes it: timm's features_only names, other parts, a NumPy score."""
    with torch.device("meta"):
        shapes = {name: value.shape for name, value in EdgeNeXt(dims).state_dict().items()}
    flat = {
        f"backbone.{name.replace('stem.', 'stem_').replace('stages.', 'stages_')}": shape
        for name, shape in shapes.items()
    }
    values = {name: torch.full((), float(number)).expand(shape) for number, (name, shape) in enumerate(flat.items())}
    rest = {
        f"{part}.0.weight": torch.zeros(3) for part in ("sdta_blocks", "moe_layers", "decoder_blocks", "final_conv")
    }
    average = {name: torch.full((), 0.5).expand(value.shape) for name, value in values.items()} if averaged else None
    torch.save(
        {"epoch": 83, "model_state_dict": values | rest, "ema_state_dict": average, "best_iou": np.mean([0.63, 0.6446]),
         "args": {"backbone": "edgenext_base", "num_experts": 7, "resume_from": None}},
        path,
    )  # fmt: skip
    return values


@pytest.mark.parametrize("averaged", [False, True])
def test_the_backbone_of_the_users_best_model_is_taken_and_the_rest_said(tmp_path, averaged, monkeypatch, capsys):
    values = theirs(tmp_path / "best_model.pth", averaged=averaged)
    out = tmp_path / "best_model.safetensors"
    monkeypatch.setattr(sys, "argv", ["convert", str(tmp_path / "best_model.pth"), str(out)])
    convert.main()
    said = capsys.readouterr().out
    assert (
        "1 of sdta_blocks" in said
        and 'weights = { file = "best_model.safetensors", into = "model", strict = false }' in said
    )
    with torch.device("meta"):
        net = CamouflageNet()
    net.to_empty(device="cpu")
    facts = pretrained.load({"model": net}, out, into="model", prefix="", strict=False)
    assert facts["loaded"].startswith(f"{len(values)} of ")
    last = net.backbone.stages[3].blocks[2].norm.weight
    expected = 0.5 if averaged else values["backbone.stages_3.blocks.2.norm.weight"].flatten()[0]
    assert (last == expected).all(), "the weights whose IoU was measured"


def test_another_backbone_and_a_file_that_runs_code_are_refused(tmp_path):
    small = tmp_path / "small.pth"
    theirs(small, (48, 96, 160, 304), averaged=False)
    with pytest.raises(WeightsRefused, match="does not hold an edgenext_base"):
        convert.converted(convert.tensors_of(small), small)
    torch.save({"model_state_dict": {}, "args": subprocess.Popen}, tmp_path / "evil.pth")
    with pytest.raises(WeightsRefused, match="no file of weights") as caught:
        convert.tensors_of(tmp_path / "evil.pth")
    assert "Popen" in str(caught.value)


def test_what_this_training_wrote_is_taken_whole_and_says_its_network_and_size(tmp_path):
    net = CamouflageNet([8, 16, 16, 16], [1, 1, 2, 1], 2, 16, experts=3, edge=True)
    net.trained_size.fill_(288)
    torch.save(torch.optim.swa_utils.AveragedModel(net).state_dict(), tmp_path / "own.pth")  # export --only ema
    found, left = convert.converted(convert.tensors_of(tmp_path / "own.pth"), tmp_path / "own.pth")
    again = CamouflageNet.of(found)
    assert not left and int(again.trained_size) == 288 and len(again.mixture.experts) == 3 and again.edge is not None
    with pytest.raises(KgorchError, match="not of this network"):
        CamouflageNet.of({"conv.weight": torch.zeros(1)})


class Left:
    """A session whose stages have left these modules."""

    rank = 0

    def __init__(self, **modules: dict[str, torch.Tensor]) -> None:
        self._modules = modules

    def weights(self, stage: str, name: str = "model", *, which: str | None = None) -> Weights:
        if name not in self._modules:
            raise CannotRestore(f"{stage} holds no {name!r}")
        return Weights(self._modules[name], f"{stage}/step-1", "best", label=f"{which} of {stage}")


def test_a_stage_that_kept_an_average_hands_that_on_and_one_that_kept_none_its_own(capsys):
    own = {"edge.weight": torch.zeros(1)}
    average = {"n_averaged": torch.tensor(3), "module.edge.weight": torch.ones(1)}
    assert weights_of(Left(model=own), "stage1") == own
    assert weights_of(Left(model=own, ema=average), "stage2", "best") == {"edge.weight": torch.ones(1)}
    assert "best of stage2, averaged" in capsys.readouterr().out
    with pytest.raises(CannotRestore, match="no 'model'"):
        weights_of(Left(), "stage1")


# The plans


@pytest.mark.parametrize("path", PLANS, ids=lambda path: path.stem)
def test_every_argument_of_a_plan_is_one_of_its_function(path):
    plan, _ = plans.load(path)
    functions = {"train": train.main, "predict": predict.main}
    for stage in plan.stage:
        function = functions[stage.entry.rpartition(".")[2].partition(":")[0]]
        inspect.signature(function).bind(**stage.args)
    assert plan.stage[0].quick_test_of == plan.stage[1].name, "a minute of a quick test comes first"
    assert plan.session.gpus and plan.forecast.target == "iou >= 0.72" and plan.checkpoint.keep.best == "iou:max"


def test_the_plans_have_the_documents_figures():
    def figures(name: str) -> list[tuple[object, ...]]:
        plan, _ = plans.load(FOLDER / name)
        stages = {stage.name: stage.args for stage in plan.stage if "epochs" in stage.args and stage.name != "quick"}
        return [
            (plan.session.gpus, a["size"], a["global_batch"], a["epochs"], a["lr"], a["warmup"], a["num_workers"])
            for a in stages.values()
        ]

    assert figures("plan.toml") == [(2, 320, 32, 30, 6.5e-4, 0, 8), (2, 320, 16, 110, 1.5e-4, 10, 8)]
    assert figures("plan_one_gpu.toml") == [(1, 320, 16, 30, 6.5e-4, 0, 12), (1, 320, 12, 110, 1.5e-4, 10, 12)]
    assert figures("plan_352.toml") == [(1, 352, 16, 30, 6.5e-4, 0, 12), (1, 352, 8, 110, 1.5e-4, 10, 12)]
    assert figures("plan_stage2.toml") == [(1, 320, 12, 110, 1.5e-4, 10, 12)]


def test_the_documents_progress_is_foretold_as_the_page_says():
    """Epoch 75 to 84: IoU 0.6221 to 0.6373. The document: 53 more epochs to 0.72; by its own 0.0015 an epoch they are 55."""
    points = [metric_trend.TrendPoint(epoch, 0.6221 + (epoch - 75) * 0.0152 / 9) for epoch in range(75, 85)]
    assert metric_trend.outlook(points, metric_trend.parse_target("iou >= 0.72")).steps == 49
    assert pytest.approx(55.1, abs=0.05) == (0.72 - 0.6373) / 0.0015
