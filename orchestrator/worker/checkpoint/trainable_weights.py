"""The trained part of a model whose other weights are frozen, as in LoRA: only that part is saved."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from kgorch.worker.checkpoint.state_codec import unwrapped


class TrainableWeights(nn.Module):
    """Track it in place of the model: `session.track(model=trainable(model))`.

    Its state holds the weights that require a gradient, and the buffers. A resume leaves the others as the script has built
    them, from the same pretrained file.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.module = model

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        model = unwrapped(self.module)
        frozen = {name for name, weight in model.named_parameters(remove_duplicate=False) if not weight.requires_grad}
        state = model.state_dict(*args, **kwargs)
        return {name: value for name, value in state.items() if name not in frozen}

    def load_state_dict(self, state: Any, strict: bool = True, assign: bool = False) -> Any:
        return unwrapped(self.module).load_state_dict(state, strict=False, assign=assign)

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, torch.Tensor]]:
        yield from unwrapped(self.module).named_buffers(*args, **kwargs)


def trainable(model: nn.Module) -> TrainableWeights:
    """The trained part of a model, for `session.track(model=trainable(model))`: LoRA, adapters, a frozen backbone.

    Args:
        model: the module, also in DistributedDataParallel. A weight is trained if it requires a gradient when it is saved.
    """
    return TrainableWeights(model)
