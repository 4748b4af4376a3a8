"""What activation checkpointing switched on at run time costs, against torch's own written into the model by hand.

python benchmarks/activation.py: forward and backward on one core, in turns within one run; medians, and the bytes that
autograd keeps between forward and backward. Target: 1.0 of torch's own time (ratio `ours`), the same bytes.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from kgorch.worker.memory.activation_checkpointing import ActivationCheckpointing

ROUNDS = 30


class Layers(nn.Module):
    """Blocks in a row; `by_hand` as a person would write it."""

    def __init__(self, layers: list[nn.Module]) -> None:
        super().__init__()
        self.layers, self.by_hand = nn.ModuleList(layers), False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.by_hand else layer(x)
        return x


def convolutions() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(inplace=True), nn.Conv2d(16, 16, 3, padding=1)
    )


def transformer_layer(width: int) -> nn.Module:
    return nn.TransformerEncoderLayer(width, 4, 4 * width, batch_first=True)


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "12 tiny layers": (lambda: Layers([transformer_layer(32) for _ in range(12)]), (4, 16, 32)),
    "6 transformer layers": (lambda: Layers([transformer_layer(128) for _ in range(6)]), (8, 64, 128)),
    "8 conv blocks with BatchNorm": (lambda: Layers([convolutions() for _ in range(8)]), (8, 16, 32, 32)),
}


def step_s(model: nn.Module, x: torch.Tensor) -> float:
    began_s = time.perf_counter()
    model(x).square().mean().backward()
    return time.perf_counter() - began_s


def kept_bytes(model: nn.Module, x: torch.Tensor) -> int:
    """What autograd keeps besides the parameters."""
    storages: dict[int, int] = {}
    weights = {weight.untyped_storage().data_ptr() for weight in model.parameters()}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        out = model(x)
    del out
    return sum(storages.values())


def measured(make: Callable[[], nn.Module], shape: tuple[int, ...]) -> dict[str, float]:
    torch.manual_seed(0)
    model, x = make(), torch.randn(shape)
    activations = ActivationCheckpointing({"model": model})
    assert len(activations.blocks) == len(model.layers)  # type: ignore[arg-type]

    def be(way: str) -> None:
        (activations.switch_on if way == "ours" else activations.switch_off)()
        model.by_hand = way == "by hand"  # type: ignore[assignment]
        step_s(model, x)  # ours learns in it what its blocks change

    ways = ("none", "by hand", "ours")
    found: dict[str, float] = {}
    times: dict[str, list[float]] = {way: [] for way in ways}
    for way in ways:
        be(way)
        found[f"{way}, MB"] = kept_bytes(model, x) / 1e6
    for _ in range(ROUNDS):
        for way in ways:
            be(way)
            times[way].append(min(step_s(model, x) for _ in range(3)))
    found |= {f"{way}, ms": 1e3 * statistics.median(times[way]) for way in ways}
    ratios = [ours / theirs for ours, theirs in zip(times["ours"], times["by hand"], strict=True)]
    return found | {"ours": statistics.median(ratios)}


def main() -> None:
    torch.set_num_threads(1)
    results = {name: measured(*what) for name, what in MODELS.items()}
    for name, found in results.items():
        print(name)
        for key, value in found.items():
            print(f"  {key:<12} {value:>9.3f}")
    print(json.dumps(results))


if __name__ == "__main__":
    main()
