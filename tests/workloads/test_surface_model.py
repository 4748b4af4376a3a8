"""The surface network: its size, its loss and score, and its learning rate."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import pytest
import torch
from torch import nn

import kgorch.workloads.surface_detection
from kgorch.workloads.surface_detection import schedule
from kgorch.workloads.surface_detection.model import SurfaceUNet, dice_parts, loss_of, weights_of

PLANS = Path(kgorch.workloads.surface_detection.__file__).parent


@pytest.mark.parametrize(("width", "depth", "side"), [(4, 2, 16), (2, 3, 24)])
def test_a_volume_gets_one_logit_a_voxel(width: int, depth: int, side: int) -> None:
    logits = SurfaceUNet(width, depth, kernel=3)(torch.rand(2, 1, side, side, 2 * side))
    assert logits.shape == (2, 1, side, side, 2 * side) and logits.dtype == torch.float32


def test_the_plans_network_has_the_22_9_million_weights_of_the_page() -> None:
    with torch.device("meta"):
        assert weights_of(SurfaceUNet()) == 22_934_201


def test_a_patch_that_the_levels_cannot_halve_is_refused_by_size() -> None:
    with pytest.raises(ValueError, match=r"\(6, 8, 8\) .* multiples of 4"):
        SurfaceUNet(4, 2, kernel=3)(torch.rand(1, 1, 6, 8, 8))


def test_training_steps_lower_the_loss_on_the_same_patches() -> None:
    torch.manual_seed(0)
    net, image, label = (
        SurfaceUNet(4, 1, 0.0, kernel=3),
        torch.rand(2, 1, 8, 8, 8),
        torch.randint(0, 3, (2, 1, 8, 8, 8)),
    )
    optimizer = torch.optim.AdamW(net.parameters(), 2e-3)
    losses = []
    for _ in range(8):
        loss = loss_of(net(image), label)
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert losses[-1] < losses[0] - 0.01


def test_the_loss_of_a_batch_is_the_mean_of_its_microbatches() -> None:
    torch.manual_seed(0)
    logits, label = torch.randn(6, 1, 4, 4, 4), torch.randint(0, 3, (6, 1, 4, 4, 4))
    label[0], label[1] = 0, 2  # no surface; nothing labelled
    parts = sum(loss_of(*part) for part in zip(logits.split(2), label.split(2), strict=True)) / 3
    torch.testing.assert_close(parts, loss_of(logits, label))


def test_what_nobody_labelled_changes_neither_loss_nor_gradient_nor_score() -> None:
    torch.manual_seed(0)
    logits, label = torch.randn(1, 1, 4, 4, 4, requires_grad=True), torch.randint(0, 2, (1, 1, 4, 4, 4))
    label[..., :2] = 2
    other = logits.detach().clone()
    other[..., :2] = 9.0
    torch.testing.assert_close(loss_of(logits, label), loss_of(other, label))
    loss_of(logits, label).backward()
    assert not logits.grad[..., :2].any() and logits.grad[..., 2:].all()
    assert dice_parts(logits.sigmoid(), label, [0.5]).tolist() == dice_parts(other.sigmoid(), label, [0.5]).tolist()


def test_the_loss_is_the_documents_by_hand() -> None:
    """One voxel of surface found with 0.8, one of background with 0.3: Dice 0.6, focal 0.2, cross-entropy 0.2."""
    logits = torch.logit(torch.tensor([0.8, 0.3])).reshape(1, 1, 1, 1, 2)
    dice = 1 - (2 * 0.8 + 1) / (0.8 + 0.3 + 1 + 1)
    entropy = torch.tensor([-torch.log(torch.tensor(0.8)), -torch.log(torch.tensor(0.7))])
    focal = (0.25 * 0.2**2 * entropy[0] + 0.75 * 0.3**2 * entropy[1]) / 2
    expected = 0.6 * dice + 0.2 * focal + 0.2 * entropy.mean()
    torch.testing.assert_close(loss_of(logits, torch.tensor([1, 0]).reshape(1, 1, 1, 1, 2)), expected)


def test_dice_parts_count_overlap_and_sizes_at_each_threshold() -> None:
    probability, label = torch.tensor([0.9, 0.6, 0.4, 0.2]), torch.tensor([1, 0, 1, 2])
    assert dice_parts(probability, label, [0.5, 0.3]).tolist() == [2.0, 4.0, 4.0, 5.0]


def rates(plan: schedule.Cycles, steps: int, state: tuple | None = None, growth: int = 2) -> tuple[list[float], tuple]:  # type: ignore[type-arg]
    optimizer = torch.optim.AdamW([nn.Parameter(torch.zeros(1))], lr=2e-3)
    scheduler = schedule.scheduler(optimizer, plan, growth)
    if state:
        optimizer.load_state_dict(state[0])
        scheduler.load_state_dict(json.loads(state[1]))
    found = []
    for _ in range(steps):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return found, (optimizer.state_dict(), json.dumps(scheduler.state_dict()))


def test_the_documents_rate_restarts_twice_and_says_that_it_ends_near_its_highest() -> None:
    plan = schedule.cycles(40 * 3, 2 * 3, 10 * 3, 2, end_low=False)
    found, _ = rates(plan, 120)
    assert [step / 3 for step in range(120) if found[step] == pytest.approx(2e-3)] == [2, 12, 32]
    said = plan.said(2e-3, 3)
    assert (
        "warm-up 2 epochs, cosines of 10, 20, 40;" in said and "90% of the highest" in said and "end_low = true" in said
    )
    assert found[-1] == pytest.approx(0.905 * 2e-3, rel=0.02)


def test_a_rate_that_is_to_end_low_does() -> None:
    plan = schedule.cycles(40 * 3, 2 * 3, 10 * 3, 2, end_low=True)
    found, _ = rates(plan, 120)
    assert plan.left == 0 and len(plan.lengths) == 2 and found[-1] < 2e-5
    assert "ends with the training" in plan.said(2e-3, 3)


@pytest.mark.parametrize("warmup", [0, 2])
def test_the_rate_goes_on_exactly_after_a_resume_at_any_step(warmup: int) -> None:
    plan = schedule.cycles(120, warmup * 3, 30, 2, end_low=False)
    whole, _ = rates(plan, 120)
    for step in range(0, 120, 13):
        first, state = rates(plan, step)
        assert first + rates(plan, 120 - step, state)[0] == whole


def test_the_plans_hold_the_documents_figures() -> None:
    two, one = (tomllib.loads((PLANS / name).read_text()) for name in ("plan.toml", "plan_one_t4.toml"))
    train = {
        name: next(stage["args"] for stage in plan["stage"] if stage["name"] == "train")
        for name, plan in (("two", two), ("one", one))
    }
    assert [train["two"][key] for key in ("epochs", "warmup", "lr", "global_batch", "num_workers", "prefetch")] == [
        40,
        2,
        2e-3,
        64,
        4,
        3,
    ]
    assert train["one"]["lr"] == 1e-3 and (two["session"]["gpus"], one["session"]["gpus"]) == (2, 1)
    assert (
        two["memory"]["microbatch"] == 16
        and two["memory"]["ladder"][0] == "microbatch=12"
        and two["quota"]["hours"] == 45
    )
    assert two["checkpoint"]["every"] == "60m" and two["checkpoint"]["keep"]["best"] == "dice:max"
