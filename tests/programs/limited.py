"""Any training, in which memory runs out for real as long as a microbatch is larger than allowed."""

from __future__ import annotations

from typing import Any

import torch

from kgorch.worker.data import batches
from kgorch.worker.entry import function_of
from kgorch.worker.session import Session

IMPOSSIBLE = 1 << 46


def main(inner: str, fits: int, **args: Any) -> None:
    """`inner`: the entry that is meant, given `args`; `fits`: samples of a forward that there is room for."""
    backward = Session.backward

    def hungry(self: Session, batch: Any, loss_of: Any, **more: Any) -> torch.Tensor:
        def asking(part: Any) -> torch.Tensor:
            if batches.length(part) > fits:
                torch.empty(IMPOSSIBLE)
            return loss_of(part)

        return backward(self, batch, asking, **more)

    Session.backward = hungry
    function_of(inner)(**args)
