"""Evaluation over all ranks: every rank takes its share of the samples, and all get the same figures."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

if TYPE_CHECKING:
    from kgorch import Loader, Session


@torch.no_grad()
def summed(session: Session, net: nn.Module, scored: Loader, figures: Callable[[Any], Tensor]) -> list[float]:
    """What `figures` ([K], additive over samples: counts, sums) gives, summed over all batches and ranks.

    Args:
        net: put into evaluation mode meanwhile. The bare network: forward through DDP may call collectives, and the ranks'
            shares may differ.
        scored: made by `session.loader(…, shuffle=False, drop_last=False)`.
        figures: gets a batch on this rank's device.
    """
    net.eval()
    total: Tensor | None = None
    borrowed: Any = None
    for number, batch in enumerate(scored):
        if not scored.share_of(number):  # of a batch with fewer samples than ranks: another rank computes it
            borrowed = batch
            continue
        found = figures(session.to_device(batch)).double()
        total = found if total is None else total + found
    if total is None:  # this rank has no sample of its own, and the sum needs figures of the same shape
        total = torch.zeros_like(figures(session.to_device(borrowed)).double())
    net.train()
    dist.all_reduce(total)
    return total.tolist()
