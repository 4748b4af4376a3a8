"""The trained part of a model whose other weights are frozen, as in LoRA: only that part is saved.

A checkpoint refers to the frozen weights by a fingerprint, so that a resume with another pretrained file is refused. A weight
that requires no gradient and changes nevertheless (a teacher that follows its student) is not frozen, and is saved.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from kgorch.worker import local_tensors
from kgorch.worker.wrappers import unwrapped

SAMPLE = 64
"""Values of a weight that are compared at each save: a moving average changes nearly all of them in one step."""

INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""By the bytes of a value."""


class TrainableWeights(nn.Module):
    """Track it in place of the model: `session.track(model=trainable(model))`.

    Its state holds the weights that require a gradient, the buffers, and all weights once one of those without a gradient has
    changed or was trained before. A resume leaves the others as the script has built them, from the same pretrained file.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.module = model
        self._first: dict[str, bytes] | None = None
        self._kept: set[str] = set()  # without a gradient, but in the state
        self._sums: dict[str, int] = {}

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        frozen = self._frozen()
        samples = dict.fromkeys(frozen, b"") | _samples(frozen)
        if self._first is None:
            self._first = samples
        if any(self._first.get(name) != sample for name, sample in samples.items()):
            self._kept |= frozen.keys()
        state = unwrapped(self.module).state_dict(*args, **kwargs)
        return {name: value for name, value in state.items() if name not in frozen or name in self._kept}

    def load_state_dict(self, state: Any, strict: bool = True, assign: bool = False) -> Any:
        self._first = None  # what is loaded is no change
        return unwrapped(self.module).load_state_dict(state, strict=False, assign=assign)

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        yield from unwrapped(self.module).named_parameters(*args, **kwargs)

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, torch.Tensor]]:
        yield from unwrapped(self.module).named_buffers(*args, **kwargs)

    def expect(self, names: Collection[str]) -> None:
        """Hold the same frozen weights in the state as a saved one, whose `names` are given."""
        self._kept = {name for name in self._frozen() if name in names}

    def fingerprint(self) -> str:
        """Of the weights that the state leaves out; empty where it leaves out none that can be compared.

        It is the SHA-256 of their names, types, shapes, sums and samples, of those that are plain tensors.
        """
        digest = hashlib.sha256()
        weights = {name: weight for name, weight in self._frozen().items() if name not in self._kept}
        samples = _samples(weights)
        for name, sample in sorted(samples.items()):
            weight = weights[name]
            if name not in self._sums:
                self._sums[name] = _sum(weight)
            digest.update(f"{name} {weight.dtype} {tuple(weight.shape)} {self._sums[name]} ".encode() + sample)
        return digest.hexdigest() if samples else ""

    def _frozen(self) -> dict[str, nn.Parameter]:
        weights = unwrapped(self.module).named_parameters(remove_duplicate=False)
        return {name: weight for name, weight in weights if not weight.requires_grad}


def _is_plain(weight: torch.Tensor) -> bool:
    """Whether it is values in memory. Wrappers, as quantised weights and DTensors are, need not know the operations used here."""
    if weight.is_meta or local_tensors.is_sharded(weight):
        return False
    return type(weight.data) is torch.Tensor and weight.layout is torch.strided and weight.element_size() in INTEGERS


def _integers(weight: torch.Tensor) -> torch.Tensor:
    return weight.detach().reshape(-1).view(INTEGERS[weight.element_size()])


def _sum(weight: torch.Tensor) -> int:
    """Of its bytes, eight at a time: integers have the same sum in any order, so on any device."""
    content = weight.detach().reshape(-1).view(torch.uint8)
    if content.storage_offset() % 8:
        content = content.clone()
    whole = content.numel() // 8 * 8
    return int(content[:whole].view(torch.int64).sum()) + int(content[whole:].sum())


def _samples(weights: Mapping[str, torch.Tensor]) -> dict[str, bytes]:
    """Values of each plain weight, evenly spread over it; in one transfer of each device and type."""
    groups: dict[tuple[torch.device, torch.dtype], dict[str, torch.Tensor]] = {}
    for name, weight in weights.items():
        if _is_plain(weight):
            values = _integers(weight)[:: max(1, weight.numel() // SAMPLE)]
            groups.setdefault((values.device, values.dtype), {})[name] = values
    found: dict[str, bytes] = {}
    for group in groups.values():
        together = torch.cat(list(group.values())).cpu()
        parts = torch.split(together, [values.numel() for values in group.values()])
        found |= {name: part.numpy().tobytes() for name, part in zip(group, parts, strict=True)}
    return found


def fingerprints(tracked: Mapping[str, Any]) -> dict[str, str]:
    """Those of the tracked objects that leave out frozen weights, by name."""
    found = {name: thing.fingerprint() for name, thing in tracked.items() if isinstance(thing, TrainableWeights)}
    return {name: value for name, value in found.items() if value}


def trainable(model: nn.Module) -> TrainableWeights:
    """The trained part of a model, for `session.track(model=trainable(model))`: LoRA, adapters, a frozen backbone.

    A checkpoint refers to the frozen weights by a fingerprint, and a resume with others is refused.

    Args:
        model: the module, also in DistributedDataParallel. A weight is trained if it requires a gradient when it is saved, or has
            changed since the model was tracked.
    """
    return TrainableWeights(model)
