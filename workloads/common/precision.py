"""A forward pass in half precision, repeated in single precision where that overflows."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from kgorch import Session


def finite(session: Session, forward: Callable[[], Tensor], *, output_of: nn.Module | None = None) -> Tensor:
    """What `forward` gives under the session's autocast on CUDA; in single precision where a value of that is not finite.

    The remedy `amp=off` of a training is kept for its stage alone, so a prediction begins in half precision with weights that may
    overflow in it.

    Args:
        output_of: a module whose outputs are to be finite, too, where the result does not show it: tokens are whole numbers.
    """
    sound = list[Tensor]()
    hook = output_of and output_of.register_forward_hook(
        lambda _module, _args, output: sound.append(output.isfinite().all())
    )
    try:
        with session.autocast(torch.float16, enabled=session.device.type == "cuda"):
            found = forward()
            is_half = torch.is_autocast_enabled(session.device.type)
    finally:
        if hook:
            hook.remove()
    return found if not is_half or torch.stack([*sound, found.isfinite().all()]).all() else forward()
