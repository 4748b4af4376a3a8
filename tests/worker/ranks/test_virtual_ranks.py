"""Another number of processes than the run began with, in the middle of it."""

from __future__ import annotations

import pytest
import torch
from harness import Kgorch
from safetensors.torch import load

EPOCHS = 16
STEPS = EPOCHS * (200 // 32)


def _cut(kgorch: Kgorch, rank_counts: list[int], **args) -> bytes:
    """One run whose sessions are stopped in their midst, each on its number of processes; its final state."""
    extra = f"[memory]\nmicrobatch = {args.pop('microbatch')}" if "microbatch" in args else ""
    plan = kgorch.plan("divides.py", ranks=rank_counts[0], args={"epochs": EPOCHS, **args}, every="600s", extra=extra)
    for number, ranks in enumerate(rank_counts):
        setting = ["--set", f"stage.train.ranks={ranks}", "--set", "stage.train.args.sleep=0.0"]
        if number == len(rank_counts) - 1:
            kgorch("start", str(plan), *setting)
        else:
            supervisor = kgorch.background("start", str(plan), *setting[:2], "--set", "stage.train.args.sleep=0.15")
            kgorch.wait_for_step(8 * (number + 1) + number * 4)
            kgorch("stop")
            assert supervisor.wait(timeout=60) == 10
    assert kgorch.status()["step"] == STEPS
    return kgorch.export()


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """The final state of a run that nothing cuts, by its number of ranks and its arguments."""
    found: dict[str, bytes] = {}

    def of(ranks: int, **args) -> bytes:
        what = f"{ranks} {args}"
        if what not in found:
            folder = tmp_path_factory.mktemp("uninterrupted")
            found[what] = _cut(Kgorch(folder, folder / "home"), [ranks], **args)
        return found[what]

    return of


def _apart(one: bytes, two: bytes) -> float:
    """The largest difference between two states of the same names."""
    left, right = load(one), load(two)
    assert left.keys() == right.keys()
    return max(float((left[name].to(torch.float64) - right[name].to(torch.float64)).abs().max()) for name in left)


@pytest.mark.soak
@pytest.mark.parametrize("microbatch", [None, 6])
def test_two_ranks_then_one_then_two_have_the_bits_of_two(kgorch, uninterrupted, microbatch):
    extra = {} if microbatch is None else {"microbatch": microbatch}
    found = _cut(kgorch, [2, 1, 2], **extra)
    assert found == uninterrupted(2, **extra)


def test_one_process_plays_both_ranks_and_status_says_so(kgorch, uninterrupted):
    found = _cut(kgorch, [2, 1])
    assert found == uninterrupted(2)
    assert kgorch.status()["exactness"]["ranks"] == "2 virtual ranks on 1: the same bits"


@pytest.mark.soak
def test_one_process_plays_both_ranks_under_fp16_autocast_with_their_bits(kgorch, uninterrupted):
    """The gradients are divided by the ranks after the backward, as DDP does: half of a small fp16 gradient is another number."""
    assert _cut(kgorch, [2, 1], half=True) == uninterrupted(2, half=True)


@pytest.mark.soak
def test_four_ranks_on_two_differ_in_the_order_of_sums_alone(kgorch, uninterrupted):
    found, expected = _cut(kgorch, [4, 2]), uninterrupted(4)
    assert 0 < _apart(found, expected) < 1e-4
    assert "4 virtual ranks on 2" in kgorch.status()["exactness"]["ranks"]


@pytest.mark.soak
def test_more_ranks_than_the_run_began_with_keep_order_and_global_batch(kgorch, uninterrupted):
    """Without dropout and BatchNorm nothing is left to differ but the order of sums."""
    found = _cut(kgorch, [1, 2], plain=True)
    assert 0 < _apart(found, uninterrupted(1, plain=True)) < 1e-4
    assert kgorch.status()["exactness"]["ranks"].startswith("2 instead of 1: the same order of samples")
