"""Camouflaged animals: pictures made and read back, what is said when they are broken, the network, what freezes and thaws."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
import ranks
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from torch.nn.parallel import DistributedDataParallel
from torchmetrics.functional.classification import binary_jaccard_index

from kgorch.checkpoint.folder import readable_checkpoints
from kgorch.errors import KgorchError
from kgorch.worker.checkpoint import pretrained
from kgorch.worker.memory.activation_checkpointing import blocks
from kgorch.workloads.camouflage import predict, train
from kgorch.workloads.camouflage.data import DataError, Pairs, drawn, read
from kgorch.workloads.camouflage.edgenext import EdgeNeXt
from kgorch.workloads.camouflage.loss import (
    LOSS_LIMIT,
    Loss,
    mask_loss,
    outline_loss,
    outline_weight,
    steepness,
    structure_loss,
)
from kgorch.workloads.camouflage.make_animals import make_pair
from kgorch.workloads.camouflage.model import CamouflageNet, experts_of, frozen_at, iou_parts

SIZE, TINY = 64, {"dims": [8, 16, 16, 16], "depths": [1, 1, 2, 1], "heads": 2, "width": 16}
LISTING = Path(__file__).parents[1] / "promises" / "edgenext_base.txt"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """8 pictures to train on, 2 to validate, 4 to test."""
    names = [f"COD10K-CAM-5-Other-69-Other-{number}" for number in range(99)]
    validation = [name for name in names if drawn("split", name) < 0.1]
    others = [name for name in names if name not in validation]
    for number, name in enumerate([*others[:8], *validation[:2], *others[8:12]]):
        make_pair(tmp_path / "animals" / ("Train" if number < 10 else "Test"), name, size=72, seed=0, number=number)
    return tmp_path / "animals"


@pytest.fixture
def net() -> CamouflageNet:
    torch.manual_seed(0)
    return CamouflageNet(**TINY)


def batch_of(root: Path, count: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
    samples = [Pairs(root, "Train", SIZE)[index] for index in range(count)]
    return torch.stack([sample.image for sample in samples]), torch.stack([sample.mask for sample in samples])


# Pictures


def test_the_same_seed_makes_the_same_files_and_another_number_others(root, tmp_path):
    make_pair(tmp_path / "again", "a", size=72, seed=0, number=0)
    first, second = Pairs(root, "Train", SIZE).pairs[:2]
    for kind, end in (("Image", "jpg"), ("GT_Object", "png"), ("GT_Edge", "png")):
        made = (tmp_path / "again" / kind / f"a.{end}").read_bytes()
        own, other = (root / "Train" / kind / f"{pair.name}.{end}" for pair in (first, second))
        assert made == own.read_bytes() != other.read_bytes()


def test_neither_colour_nor_light_gives_the_animal_away_but_its_grain_does(root):
    inside, outside, finer = [], [], []
    for pair in Pairs(root, "Train", SIZE).pairs:
        image_HWC, mask_HW = read(pair)
        grey_HW, animal = image_HWC.mean(2), mask_HW > 0
        inside.append(grey_HW[animal].mean())
        outside.append(grey_HW[~animal].mean())
        steps_HW = np.abs(np.diff(grey_HW, axis=1))
        finer.append(steps_HW[animal[:, 1:]].mean() > 1.2 * steps_HW[~animal[:, 1:]].mean())
    assert abs(np.mean(inside) - np.mean(outside)) < 6, "of 255"
    assert all(finer)


def test_a_sample_is_the_picture_in_the_size_asked_for_with_a_mask_of_noughts_and_ones(root):
    pairs = Pairs(root, "Train", SIZE)
    sample = pairs[3]
    assert len(pairs) == 8 and len(Pairs(root, "Test", SIZE)) == 4
    assert sample.image.shape == (3, SIZE, SIZE) and sample.image.dtype == torch.float32
    assert sample.mask.shape == (1, SIZE, SIZE) and set(sample.mask.unique().tolist()) == {0.0, 1.0}
    assert sample.index == 3 and abs(sample.image.mean()) < 2, "normalised"
    truth = np.asarray(Image.open(pairs.pairs[3].mask)) > 0
    assert sample.mask.mean().item() == pytest.approx(truth.mean(), abs=0.01)


def test_a_picture_and_its_mask_are_cut_and_mirrored_alike_as_torchs_chance_has_it(root):
    for pair in Pairs(root, "Train", SIZE).pairs:  # the picture becomes its mask, so each sample shows both
        Image.open(pair.mask).save(pair.image.with_suffix(".png"))
        pair.image.unlink()
    pairs = Pairs(root, "Train", SIZE, augments=True)
    seen = []
    for seed in (0, 1, 2, 0):
        torch.manual_seed(seed)
        sample = pairs[0]
        unlike = (sample.image.mean(0) > 0) != (sample.mask[0] > 0)
        assert unlike.float().mean() < 0.05, "but at the outline, where the one is smoothed"
        seen.append(sample.mask)
    assert torch.equal(seen[0], seen[3]) and not torch.equal(seen[0], seen[1]) and not torch.equal(seen[1], seen[2])


def test_nothing_is_read_before_its_turn(root):
    pairs = Pairs(root, "Train", SIZE)
    whole = pairs.pairs[0].image.read_bytes()
    pairs.pairs[0].image.write_bytes(whole[: len(whole) // 2])
    assert len(Pairs(root, "Train", SIZE)) == 8, "its header is whole"
    with pytest.raises(DataError, match=re.escape(pairs.pairs[0].image.name)):
        pairs[0]
    assert pairs[1].mask.any()


def test_masks_may_lie_in_gt_and_names_choose_which_pictures(root):
    (root / "Train" / "GT_Object").rename(root / "Train" / "GT")
    (root / "Train" / "Image").rename(root / "Train" / "Imgs")
    first = root / "Train" / "Imgs" / f"{Pairs(root, 'Train', SIZE).pairs[0].name}.jpg"
    first.rename(
        first.with_name("COD10K-NonCAM-3-Terrestrial-0-Background-1.jpg")
    )  # it has no mask, and is not asked for
    assert len(Pairs(root, "Train", SIZE, names="COD10K-CAM-*")) == 7


def _loses_its_mask(pair):
    pair.mask.unlink()


def _is_no_picture(pair):
    pair.image.write_bytes(b"<html>not found</html>")


def _is_empty(pair):
    pair.mask.write_bytes(b"")


def _gets_another_size(pair):
    Image.open(pair.mask).resize((40, 72)).save(pair.mask)


@pytest.mark.parametrize(
    ("breaks", "said"),
    [
        (_loses_its_mask, "has no mask"),
        (_is_no_picture, "cannot be read"),
        (_is_empty, "cannot be read"),
        (_gets_another_size, "not the size of its picture"),
    ],
)
def test_a_broken_pair_is_named_before_training_or_left_out_where_the_plan_says_so(root, breaks, said):
    pair = Pairs(root, "Train", SIZE).pairs[2]
    breaks(pair)
    with pytest.raises(DataError, match=said) as caught:
        Pairs(root, "Train", SIZE)
    assert pair.name in str(caught.value) and "skip_broken" in str(caught.value.next_step)
    kept = Pairs(root, "Train", SIZE, skip_broken=True)
    assert len(kept) == 7 and pair not in kept.pairs
    assert len(kept.broken) == 1 and pair.name in kept.broken[0]


def test_a_mask_that_counts_animals_is_not_taken_for_one_without_any(root):
    pairs = Pairs(root, "Train", SIZE)
    mask = pairs.pairs[4].mask
    counted = (np.asarray(Image.open(mask)) > 0).astype(np.uint8) * 2
    Image.fromarray(counted).save(mask)
    with pytest.raises(DataError, match="no mask of an animal") as caught:
        pairs[4]
    assert "values up to 2" in str(caught.value)
    assert len(Pairs(root, "Train", SIZE, skip_broken=True)) == 7
    Image.fromarray(counted * 0).save(mask)
    assert not pairs[4].mask.any(), "a picture without an animal is none the worse"


def test_a_missing_folder_and_an_empty_part_are_told_before_training(root, tmp_path):
    with pytest.raises(DataError, match="there is no folder") as caught:
        Pairs(tmp_path / "nothing", "Train", SIZE)
    assert "make_animals" in str(caught.value.next_step)
    with pytest.raises(DataError, match="there are no pictures 'CAMO-\\*'"):
        Pairs(root, "Train", SIZE, names="CAMO-*")
    for path in (root / "Test" / "Image").iterdir():
        path.write_bytes(b"")
    with pytest.raises(DataError, match="no picture is left"):
        Pairs(root, "Test", SIZE, skip_broken=True)


# The network


def listed() -> dict[str, tuple[int, ...]]:
    """The published names and shapes."""
    found = {}
    for line in LISTING.read_text().splitlines():
        if line and not line.startswith("#"):
            name, *shape = line.split()
            many = re.search(r"\{(\d+)\.\.(\d+)\}", name)
            for number in range(int(many[1]), int(many[2]) + 1) if many else [0]:
                found[name.replace(many[0], str(number)) if many else name] = tuple(map(int, shape))
    return found


def test_the_backbone_has_the_names_and_shapes_of_the_published_weights():
    published = listed()
    assert sum(int(np.prod(shape)) for shape in published.values()) == 18_511_292
    with torch.device("meta"):
        own = {name: tuple(value.shape) for name, value in EdgeNeXt().state_dict().items()}
    assert own == {name: shape for name, shape in published.items() if not name.startswith("head.")}


def test_the_weights_of_a_plan_fill_the_backbone_from_a_file_of_the_published_names(tmp_path):
    file, model = tmp_path / "edgenext_base.safetensors", CamouflageNet()
    save_file({name: torch.full(shape, 0.5, dtype=torch.float16) for name, shape in listed().items()}, file)
    facts = pretrained.load({"model": model}, file, into="model.backbone", prefix="", strict=False)
    count = len(model.backbone.state_dict())
    assert facts["loaded"] == f"{count} of {count} tensors" and facts["unexpected"].startswith("4: head.")
    assert all((weight == 0.5).all() for weight in model.backbone.parameters())
    assert not (model.levels[0].side.weight == 0.5).any()


def test_the_backbone_gives_features_at_four_strides_and_the_network_a_mask_and_four_sides(net):
    image = torch.randn(2, 3, 96, 64)
    assert [tuple(found.shape[1:]) for found in net.backbone(image)] == [
        (8, 24, 16), (16, 12, 8), (16, 6, 4), (16, 3, 2)
    ]  # fmt: skip
    answer = net(image)
    assert answer.mask.shape == (2, 1, 96, 64) and answer.balance.shape == (2,)
    assert [tuple(side.shape[2:]) for side in answer.sides] == [(3, 2), (6, 4), (12, 8), (24, 16)]
    with pytest.raises(ValueError, match="multiples of 32"):
        net(torch.randn(1, 3, 80, 64))


def test_seven_experts_look_each_in_its_own_way(net):
    experts = experts_of(16)
    assert len(experts) == len(net.mixture.experts) == 7
    dot = torch.zeros(1, 16, 33, 33)
    dot[..., 16, 16] = 1.0
    reached = []
    for expert in experts:
        with torch.no_grad():
            seen = expert.look(dot) - expert.look(dot * 0)
        rows = seen.abs().sum((0, 1, 3)).nonzero().flatten()
        reached.append((int(rows.max() - rows.min()) + 1, len(rows)))
    assert reached == [(1, 1), (3, 3), (7, 7), (5, 3), (9, 3), (5, 5), (33, 33)]


def test_the_number_of_experts_is_an_argument():
    assert [len(CamouflageNet(**TINY, experts=count).mixture.experts) for count in (1, 3, 7)] == [1, 3, 7]
    with pytest.raises(KgorchError, match="experts = 8") as caught:
        CamouflageNet(**TINY, experts=8)
    assert "1 to 7" in caught.value.facts[0]


def test_the_router_weights_the_experts_at_each_place_and_pays_for_using_one_alone(net):
    x = torch.randn(2, 16, 8, 8)
    with torch.no_grad():
        for layer in (net.mixture.near, net.mixture.scene):
            layer.weight.zero_()
            layer.bias.zero_()
        assert net.mixture(x)[1].abs().max() < 1e-5, "asked equally"
        net.mixture.near.bias[2] = 50.0
        mask, balance = net.mixture(x)
        assert balance.tolist() == pytest.approx([6.0, 6.0], abs=1e-3)
        assert torch.allclose(mask, net.mixture.mask(x + net.mixture.experts[2](x)), atol=1e-5), "the third alone"


def test_the_bulk_of_the_network_is_in_blocks_that_can_be_computed_again():
    with torch.device("meta"):
        model = CamouflageNet()
    found = blocks({"model": model})
    inside = sum(weight.numel() for block in found.values() for weight in block.parameters())
    assert inside > 0.95 * sum(weight.numel() for weight in model.parameters())
    assert {"model.backbone.stages.2.blocks.0", "model.levels.0", "model.mixture.experts.6"} <= found.keys()
    assert not {"model.backbone", "model.backbone.stages"} & found.keys(), "they are not called as a whole"


def test_it_learns_a_batch(net, root):
    image, mask = batch_of(root, 4)
    optimizer = torch.optim.AdamW(net.parameters(), 5e-3)
    first = iou_parts(net(image).mask, mask)[0] / 4
    losses = []
    for _ in range(20):
        loss = Loss()(net(image), mask)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    last = iou_parts(net(image).mask, mask)[0] / 4
    assert losses[-1] < 0.75 * losses[0]
    assert last > 0.5 > first


# Loss and score


@pytest.mark.parametrize("kind", ["bce_iou_edge", "structure"])
def test_every_output_takes_part_in_the_loss(net, root, kind):
    answer = net(batch_of(root, 2)[0])
    for part in (answer.mask, *answer.sides, answer.balance):
        part.retain_grad()
    Loss(kind)(answer, batch_of(root, 2)[1]).backward()
    assert all(part.grad.abs().sum() > 0 for part in (answer.mask, *answer.sides, answer.balance))


def test_the_loss_is_small_for_the_truth_large_for_its_opposite_and_clamped_at_both_ends(root):
    _, mask = batch_of(root, 2)
    weight, surely = outline_weight(mask), (mask * 2 - 1) * 1e4
    right, wrong = structure_loss(surely, mask, weight), structure_loss(-surely, mask, weight)
    assert right.max() < 1e-2
    assert wrong.tolist() == [LOSS_LIMIT] * 2
    infinite = structure_loss(surely * float("inf"), mask, weight)
    assert torch.isfinite(infinite).all(), "what overflowed is clamped"
    lost = surely.clone()
    lost[0, 0, 0, 0] = float("nan")
    assert structure_loss(lost, mask, weight).isnan().tolist() == [True, False], "what is no number is left to be seen"


def test_the_users_loss_is_five_entropies_three_ious_two_edges_and_the_sides_mean(net, root):
    image, mask = batch_of(root, 2)
    answer = net(image)
    found = answer.mask.sigmoid()
    entropy = torch.nn.functional.binary_cross_entropy(found, mask)
    ious = [(f * m).sum() / (f + m - f * m).sum() for f, m in zip(found, mask, strict=True)]
    edge = (steepness(found) - steepness(mask)).square().mean()
    sides = [
        torch.nn.functional.binary_cross_entropy(
            side.sigmoid(), torch.nn.functional.adaptive_avg_pool2d(mask, side.shape[2:])
        )
        for side in answer.sides
    ]
    expected = 5 * entropy + 3 * (1 - sum(ious) / 2) + 2 * edge + 0.4 * sum(sides) / 4
    assert Loss(balance=0.0)(answer, mask).item() == pytest.approx(expected.item(), rel=1e-4)
    assert Loss(balance=0.0, deep=0.0)(answer, mask).item() == pytest.approx(
        (expected - 0.1 * sum(sides)).item(), rel=1e-4
    )
    with pytest.raises(KgorchError, match="did you mean 'structure'"):
        Loss("structur").check()


def test_the_users_loss_knows_the_truth_and_neither_overflow_nor_nan_is_hidden_or_spread(root):
    _, mask = batch_of(root, 2)
    surely = (mask * 2 - 1) * 1e4
    assert mask_loss(surely, mask, edges=True).max() < 1e-2 and mask_loss(-surely, mask, edges=True).min() > 70
    assert torch.isfinite(mask_loss(surely * float("inf"), mask, edges=True)).all()
    surely[0, 0, 0, 0] = float("nan")
    assert mask_loss(surely, mask, edges=True).isnan().tolist() == [True, False]
    step = torch.zeros(1, 1, 8, 8)
    step[..., 4:] = 1
    assert steepness(step)[0, 0, 3].tolist() == pytest.approx([0, 0, 4, 4, 0, 0], abs=4e-3)


def test_the_output_for_outlines_learns_those_of_gt_edge_and_takes_the_edge_terms_place(root):
    edges = torch.stack([Pairs(root, "Train", SIZE, edges=True)[index].edge for index in range(2)])
    _, mask = batch_of(root, 2)
    net = CamouflageNet(**TINY, edge=True)
    answer = net(batch_of(root, 2)[0])
    answer.edge.retain_grad()
    plain = (
        Loss()(answer._replace(edge=None), mask)
        - 2 * (steepness(answer.mask.sigmoid()) - steepness(mask)).square().mean()
    )
    loss = Loss()(answer, mask, edges)
    assert loss.item() == pytest.approx((plain + 2 * outline_loss(answer.edge, edges).mean()).item(), rel=1e-5)
    loss.backward()
    assert answer.edge.grad.abs().sum() > 0
    assert outline_loss((edges * 2 - 1) * 20, edges).max() < 0.01
    assert outline_loss((1 - edges * 2) * 20, edges).min() > 0.9


def test_the_outline_weighs_more_and_summing_along_the_axes_is_the_mean_around(root):
    _, mask = batch_of(root, 2)
    weight = outline_weight(mask)
    around = torch.nn.functional.avg_pool2d(mask, 31, 1, 15)
    assert torch.allclose(weight, 1 + 5 * (around - mask).abs(), atol=1e-5)
    assert weight.min() >= 1 and weight.max() <= 6


@pytest.mark.parametrize("kind", ["bce_iou_edge", "structure"])
def test_parts_of_a_batch_weighted_by_their_size_give_the_loss_of_the_whole(net, root, kind):
    image, mask = batch_of(root, 6)
    with torch.no_grad():
        whole = Loss(kind)(net(image), mask)
        parts = [
            Loss(kind)(net(image[first:end]), mask[first:end]) * (end - first) / 6 for first, end in ((0, 4), (4, 6))
        ]
    assert whole.item() == pytest.approx(sum(parts).item(), rel=1e-5)


def test_iou_is_each_pictures_own_and_one_where_there_is_nothing_to_find(root):
    _, mask = batch_of(root, 5)
    mask[4] = 0
    logits = torch.randn(mask.shape, generator=torch.Generator().manual_seed(0)) + mask
    logits[4] = -1
    total, count = iou_parts(logits, mask).tolist()
    each = [binary_jaccard_index((logits[index] > 0).int(), mask[index].int()).item() for index in range(4)]
    assert count == 5 and total == pytest.approx(sum(each) + 1)
    logits[4, 0, 0, 0] = 1
    assert iou_parts(logits, mask)[0].item() == pytest.approx(sum(each)), "found where there is none"


# Freezing and thawing


def test_one_more_part_thaws_each_so_many_epochs_the_last_stage_first():
    assert [frozen_at(epoch, 3, 10) for epoch in (0, 9, 10, 20, 29, 30, 109)] == [3, 3, 2, 1, 1, 0, 0]
    assert [frozen_at(epoch, 4, 0) for epoch in (0, 29)] == [4, 4]
    with pytest.raises(ValueError, match="4 parts"):
        frozen_at(0, 5, 0)


def test_a_frozen_part_is_moved_by_neither_gradient_nor_weight_decay_and_a_thawed_one_is(net, root):
    image, mask = batch_of(root, 4)
    optimizer = torch.optim.AdamW(net.parameters(), 1e-2, weight_decay=0.5)

    def weights() -> list[torch.Tensor]:
        parts = [[*net.backbone.part(number)] for number in range(4)]
        return [torch.cat([w.detach().flatten() for module in part for w in module.parameters()]) for part in parts]

    def moved(frozen: int) -> list[bool]:
        before = weights()
        net.freeze(frozen)
        Loss()(net(image), mask).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return [not torch.equal(old, new) for old, new in zip(before, weights(), strict=True)]

    assert moved(frozen=3) == [False, False, False, True]
    assert moved(frozen=1) == [False, True, True, True]
    assert moved(frozen=4) == [False] * 4


def saved(attempt: ranks.Attempt) -> tuple[Path, dict[str, torch.Tensor]]:
    """The newest checkpoint's folder, and its tensors by name."""
    folder, _ = next(readable_checkpoints(attempt.folder / "checkpoints" / "train"))
    return folder, {name: tensor for shard in folder.glob("*.safetensors") for name, tensor in load_file(shard).items()}


@pytest.mark.parametrize("count", [1, pytest.param(2, marks=pytest.mark.soak)])
def test_a_run_cut_while_a_part_is_frozen_thaws_it_all_the_same_with_the_bits_of_an_uncut_one(root, tmp_path, count):
    args = {**TINY, "data": str(root), "size": SIZE, "global_batch": 4, "epochs": 2, "warmup": 0, "lr": 1e-2,
            "weight_decay": 0.5, "frozen": 3, "unfreeze_every": 1, "ema": 0.9, "edges": "GT_Edge", "experts": 3}  # fmt: skip
    entry = f"{train.__name__}:main"
    uncut = ranks.run(tmp_path / "uncut", entry, count, args)
    cut = ranks.run(tmp_path / "cut", entry, count, args, stop_at=1)
    assert uncut.codes == cut.codes == [0] * count, cut.said()
    folder, frozen = saved(cut)
    resumed = ranks.run(tmp_path / "resumed", entry, count, args, resume=str(folder))
    assert resumed.codes == [0] * count, resumed.said()
    _, thawed = saved(resumed)
    assert resumed.weights == uncut.weights
    assert (resumed.folder / "outputs" / "metrics.csv").read_text() == (
        uncut.folder / "outputs" / "metrics.csv"
    ).read_text()

    averaged = {name.removeprefix("ema.module."): tensor for name, tensor in thawed.items() if "ema.module." in name}
    assert resumed.weights.keys() > {"ema.n_averaged"} and averaged.keys() > {"edge.weight", "trained_size"}
    assert not torch.equal(averaged["edge.weight"], thawed["model.edge.weight"])
    if count == 1:
        smaller = ranks.run(tmp_path / "smaller", entry, count, args | {"size": 32}, resume=str(folder))
        assert smaller.codes == [0] * count, smaller.said()
        sizes = [int(saved(attempt)[1]["model.trained_size"]) for attempt in (resumed, smaller)]
        assert sizes == [SIZE, 32], "what a rung of the memory ladder sets, not what was restored"

    def moved(*parts: str) -> set[bool]:
        names = [name for name in frozen if name.startswith(tuple(f"model.backbone.{part}." for part in parts))]
        return {not torch.equal(frozen[name], thawed[name]) for name in names}

    assert moved("stem", "stages.0", "stages.1") == {False}, "they are frozen to the end"
    assert True in moved("stages.2"), "it thaws in the second epoch"
    assert True in moved("stages.3")


def test_with_ema_the_average_is_scored_and_written_and_not_what_the_optimizer_moves(root, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    moved, judged = [], []

    def wrapped(net: CamouflageNet, **options: object) -> DistributedDataParallel:
        moved.append(net)
        return DistributedDataParallel(net, **options)

    monkeypatch.setattr(train, "DistributedDataParallel", wrapped)
    monkeypatch.setattr(train, "iou", lambda session, net, *rest: judged.append(net) or 0.5)
    train.main(
        str(root), **TINY, size=SIZE, global_batch=4, epochs=1, warmup=0, lr=1e-2, weight_decay=0.0, ema=0.75, seed=0
    )
    [own], [average] = moved, judged
    written = load_file("outputs/camouflage.safetensors")
    assert all(torch.equal(written[name], value) for name, value in average.state_dict().items())
    assert int(average.trained_size) == SIZE
    away = [not torch.equal(old, new) for old, new in zip(average.parameters(), own.parameters(), strict=True)]
    assert average is not own and sum(away) > len(away) / 2


def test_what_was_found_is_shown_beside_the_truth_and_in_red_over_the_picture():
    image, truth, found = np.full((40, 30, 3), 100, np.uint8), np.zeros((40, 30), bool), np.zeros((40, 30), bool)
    truth[:20], found[:, :15] = True, True
    row = np.asarray(predict.side_by_side(image, truth, found))
    assert row.shape == (40, 120, 3)
    assert row[5, 35].tolist() == [255] * 3 and row[30, 35].tolist() == [0] * 3, "the truth"
    assert row[30, 65].tolist() == [255] * 3 and row[30, 80].tolist() == [0] * 3, "what was found"
    assert row[5, 95].tolist() == [177, 70, 70] and row[5, 115].tolist() == [100] * 3, "red where it was found"


def test_trained_and_painted_alone_with_a_broken_picture_left_out_and_named(root, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for name in ("KGORCH_LAUNCH", "MASTER_ADDR", "RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for part in ("Train", "Test"):
        broken = Pairs(root, part, SIZE).pairs[0].image
        broken.write_bytes(broken.read_bytes()[:500])
    args = {**TINY, "data": str(root), "size": SIZE, "global_batch": 4, "skip_broken": True}
    train.main(**args, epochs=1, warmup=0, seed=0)
    said = capsys.readouterr().out
    assert "left out: COD10K" in said and broken.name not in said, "Test is not looked at"
    table = (tmp_path / "outputs" / "metrics.csv").read_text().splitlines()
    assert table[0] == "epoch,frozen,size,iou" and len(table) == 2

    predict.main(str(root), global_batch=4, weights="outputs/camouflage.safetensors", skip_broken=True)
    scores = json.loads((tmp_path / "outputs" / "scores.json").read_text())
    assert scores["pictures"] == 3 and 0 <= scores["iou"] <= 1
    assert scores["part"] == "Test" and scores["size"] == SIZE, "read off the weights, as the network is"
    assert scores["weights"]["which"] == "file"
    masks = sorted((tmp_path / "outputs" / "masks").iterdir())
    assert len(masks) == 3 and all(Image.open(path).size == (72, 72) for path in masks)
    assert Image.open(tmp_path / "outputs" / "overview.png").size == (4 * 72, 3 * 72)

    predict.main(str(root), part="Validation", valid=0.6, weights="outputs/camouflage.safetensors", skip_broken=True)
    scores = json.loads((tmp_path / "outputs" / "scores.json").read_text())
    held, few = (len(Pairs(root, "Validation", SIZE, valid=valid, skip_broken=True).pairs) for valid in (0.6, 0.1))
    assert scores["pictures"] == held > few, "the part that a training with this share has held out"
