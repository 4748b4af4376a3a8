"""What an estimate without data counts: bytes, operations, and the types that CUDA's autocast would choose."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from kgorch.worker.probe.cuda_autocast import rules_of_cuda
from kgorch.worker.probe.step_estimate import Rates, StepEstimate

RATES = Rates(half=1e12, full=1e11, bytes=1e11, launch_s=0.0)
MIB = 1 << 20


def estimate_of(model: nn.Module) -> StepEstimate:
    return StepEstimate({"model": model, "optimizer": torch.optim.AdamW(model.parameters())}, [], RATES, 0)


def test_a_linear_layers_weights_moments_and_operations_are_counted_and_nothing_of_it_is_touched():
    model = nn.Linear(512, 512, bias=False)
    before = model.weight.detach().clone()
    found = estimate_of(model)
    made = found.trial([torch.zeros(256, 512)], lambda part, weight: model(part).sum().backward())
    assert found.weight_bytes == MIB
    assert found.optimizer_bytes == pytest.approx(2 * MIB, rel=0.001)
    assert (
        made.step.flops["full"] == 2 * 2 * 256 * 512 * 512
    )  # forward, and the weights' gradient; the batch needs none
    # the batch, its gradients of the weights, and the output or what flows back to it; no weight a second time
    assert 1.5 * MIB <= made.peak - found.standing <= 2.01 * MIB
    assert torch.equal(model.weight, before) and model.weight.grad is None


def test_a_microbatch_of_half_the_samples_holds_half_the_activations_and_costs_the_same_operations():
    model = nn.Sequential(nn.Linear(64, 4096), nn.GELU(), nn.Linear(4096, 1))
    found = estimate_of(model)

    def work(part, weight):
        with found.forward():
            loss = model(part).mean()
        (loss * weight).backward()
        return loss.detach()

    whole, half = (found.trial(torch.zeros(128, 64).split(size), work) for size in (128, 64))
    assert half.forward == pytest.approx(whole.forward / 2, rel=0.05)
    assert half.step.flops == whole.step.flops
    assert half.peak < whole.peak


def test_within_cudas_rules_layer_norm_leaves_half_precision_as_it_does_not_on_a_cpu():
    norm, linear, batch = nn.LayerNorm(8), nn.Linear(8, 8), torch.zeros(2, 8)
    with torch.autocast("cpu", torch.float16):
        assert norm(linear(batch)).dtype == torch.float16
        with rules_of_cuda():
            assert linear(batch).dtype == torch.float16
            assert norm(linear(batch)).dtype == torch.float32
            assert torch.softmax(linear(batch), -1).dtype == torch.float32
        assert norm(linear(batch)).dtype == torch.float16
