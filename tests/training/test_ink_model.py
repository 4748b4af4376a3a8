"""The ink network: its shapes, its loss and score, its learning rate, and the canvas that it paints."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from orchestrator.errors import KgorchError
from workloads.ink_detection.data import Fragment, Fragments, Tile
from workloads.ink_detection.model import InkUNet, dice_loss, dice_parts
from workloads.ink_detection.predict import Canvas, coverage, write
from workloads.ink_detection.train import schedule


@pytest.mark.parametrize(("channels", "shape"), [((8, 16, 32), (2, 1, 8, 32, 48)), ((4, 8, 8, 8), (1, 1, 16, 64, 64))])
def test_a_volume_collapses_to_one_logit_a_pixel(channels: tuple[int, ...], shape: tuple[int, ...]) -> None:
    logits = InkUNet(channels)(torch.rand(shape))
    assert logits.shape == (shape[0], 1, *shape[3:])
    assert logits.dtype == torch.float32


def test_a_volume_that_the_levels_cannot_halve_is_refused_by_size() -> None:
    with pytest.raises(ValueError, match=r"\(6, 32, 32\) .* multiples of 4"):
        InkUNet((8, 16, 32))(torch.rand(1, 1, 6, 32, 32))


def test_one_training_step_lowers_the_loss_on_the_same_tiles() -> None:
    torch.manual_seed(0)
    model, loss_of = InkUNet((8, 16)), dice_loss()
    volume, ink = torch.rand(2, 1, 4, 16, 16), (torch.rand(2, 1, 16, 16) > 0.7).float()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    before = loss_of(model(volume), ink)
    before.backward()
    optimizer.step()
    assert loss_of(model(volume), ink) < before


def test_the_loss_of_a_batch_is_the_mean_of_its_microbatches() -> None:
    torch.manual_seed(0)
    logits, ink = torch.randn(6, 1, 8, 8), (torch.rand(6, 1, 8, 8) > 0.8).float()
    ink[0] = 0  # a tile without ink
    loss_of = dice_loss()
    parts = sum(loss_of(*part) for part in zip(logits.split(2), ink.split(2), strict=True)) / 3
    torch.testing.assert_close(parts, loss_of(logits, ink))


def test_dice_parts_count_overlap_and_areas() -> None:
    logits = torch.tensor([[[[3.0, 1.0, -1.0, -2.0]]]])
    ink = torch.tensor([[[[1.0, 0.0, 1.0, 1.0]]]])
    assert dice_parts(logits, ink).tolist() == [2.0, 5.0]


def optimizer_and_schedule(warmup: int = 2):  # type: ignore[no-untyped-def]
    optimizer = torch.optim.AdamW([nn.Parameter(torch.zeros(1))], lr=2e-3)
    return optimizer, schedule(optimizer, steps_per_epoch=3, warmup=warmup)


def rates(optimizer: torch.optim.Optimizer, scheduler, steps: int) -> list[float]:  # type: ignore[no-untyped-def]
    found = []
    for _ in range(steps):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return found


def test_the_rate_warms_up_for_two_epochs_and_restarts_after_ten_and_twenty_more() -> None:
    found = rates(*optimizer_and_schedule(), 40 * 3)
    assert found[:6] == sorted(found[:6]) and found[0] == pytest.approx(2e-5)
    assert [step / 3 for step in range(120) if found[step] == pytest.approx(2e-3)] == [2, 12, 32]
    assert min(found[6:]) < 2e-5


@pytest.mark.parametrize("warmup", [0, 2])
def test_the_rate_goes_on_exactly_after_a_resume_at_any_step(warmup: int) -> None:
    uninterrupted = rates(*optimizer_and_schedule(warmup), 40 * 3)
    for step in range(0, 120, 7):
        optimizer, scheduler = optimizer_and_schedule(warmup)
        first = rates(optimizer, scheduler, step)
        kept = json.loads(json.dumps(scheduler.state_dict()))
        resumed_optimizer, resumed = optimizer_and_schedule(warmup)
        resumed_optimizer.load_state_dict(optimizer.state_dict())
        resumed.load_state_dict(kept)
        assert first + rates(resumed_optimizer, resumed, 120 - step) == uninterrupted


@pytest.fixture
def dataset() -> Fragments:
    """One fragment of 12 x 12 under four tiles of 8, as if read from disk."""
    dataset = object.__new__(Fragments)
    dataset.tile = 8
    dataset.fragments = [Fragment("1", (), np.ones((12, 12), bool), np.zeros((12, 12), bool))]
    dataset.tiles = [(0, top, left) for top in (0, 4) for left in (0, 4)]
    return dataset


def painted(canvas: Canvas, dataset: Fragments, indices: list[int], value: float) -> None:
    tiles = Tile(torch.empty(0), torch.empty(0), torch.tensor([dataset.tiles[index] for index in indices]))
    canvas.paint(tiles, torch.full((len(indices), 8, 8), value))


def test_a_canvas_sums_overlapping_tiles_and_counts_them(dataset: Fragments) -> None:
    canvas = Canvas(dataset)
    painted(canvas, dataset, [0, 1], 0.25)
    painted(canvas, dataset, [2, 3], 0.75)
    assert canvas.get_buffer("sum_0")[6, 6] == 2.0
    assert canvas.get_buffer("sum_0")[0, 0] == 0.25
    np.testing.assert_array_equal(canvas.get_buffer("count_0"), coverage(dataset, 0))


def test_a_canvas_put_aside_and_restored_ends_as_one_painted_at_once(dataset: Fragments) -> None:
    whole, first, resumed = Canvas(dataset), Canvas(dataset), Canvas(dataset)
    for canvas in (whole, first):
        painted(canvas, dataset, [0, 1], 0.3)
    resumed.load_state_dict(first.state_dict())
    for canvas in (whole, resumed):
        painted(canvas, dataset, [2, 3], 0.6)
    assert all(torch.equal(value, resumed.state_dict()[name]) for name, value in whole.state_dict().items())


def test_holes_are_refused_but_in_a_quick_test_which_sees_a_few_tiles_alone(
    dataset: Fragments, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.distributed.all_reduce", lambda tensor: None)
    canvas = Canvas(dataset)
    painted(canvas, dataset, [0], 0.75)
    session = SimpleNamespace(quick=False, rank=0, output=tmp_path)
    with pytest.raises(KgorchError, match="holes or doubles"):
        write(session, dataset, canvas, 0.5)  # type: ignore[arg-type]
    session.quick = True
    write(session, dataset, canvas, 0.5)  # type: ignore[arg-type]
    ink = np.asarray(Image.open(tmp_path / "predictions" / "binary" / "1.png"))
    assert ink[:8, :8].all() and ink.sum() == 64 * 255
