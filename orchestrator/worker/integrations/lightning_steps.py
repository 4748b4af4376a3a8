"""Lightning's forward and backward of a batch, in as many parts as the memory settings ask for.

Only where Lightning does the backward (automatic optimization): with manual optimization the script does it in its
`training_step`, as often as it likes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from kgorch.errors import KgorchError
from kgorch.worker.data import batches
from kgorch.worker.session import Session

NO_LADDER = "none: the script does the backward itself (manual optimization)"


class ClosureInParts:
    """Takes the place of the `closure` of Lightning's Closure: forward, zero_grad, backward.

    Gradients of the step before are cleared first, and not after the forward: otherwise they would be kept for a retry.

    Args:
        closure: Lightning's. It is not kept: it refers to this, and a cycle would hold the batch until Python's next collection.
        step_of: `training_step` of a batch, with what Lightning does around it.
        result_of: makes Lightning's result of a loss.
    """

    def __init__(
        self,
        session: Session,
        closure: Any,
        step_of: Callable[[Any], Any],
        result_of: Callable[[Any], Any],
        scaler: Any,
    ) -> None:
        self._session, self._step_of, self._result_of, self._scaler = session, step_of, result_of, scaler
        self._zero_grad, self._backward = closure._zero_grad_fn, closure._backward_fn
        self._result: Any = None

    @torch.enable_grad()
    def run(self, batch: Any) -> Any:
        """The result of the batch; of several parts, the loss alone."""
        if self._zero_grad is not None:
            self._zero_grad()
        self._result = None
        loss = self._session.accumulate(batch, functools.partial(self._work, batch), scaler=self._scaler)
        return self._result or self._result_of(loss)

    def _work(self, batch: Any, part: Any, weight: float) -> torch.Tensor:
        # A step may leave something in the batch that the hooks after it read: an undivided one is Lightning's own.
        result = self._step_of(batch if weight == 1 else part)
        if result.closure_loss is None:  # the script leaves this batch out
            self._result = result
            return torch.zeros(())
        if self._backward is not None:
            self._backward(result.closure_loss if weight == 1 else result.closure_loss * weight)
        self._result = result if weight == 1 else None
        loss: torch.Tensor = result.loss
        return loss


def in_parts(original: Callable[..., Any], carrier_of: Callable[[Any], Any]) -> Callable[..., Any]:
    """`_AutomaticOptimization._make_closure`, of a training that is carried.

    Args:
        carrier_of: of a Trainer; None where its loop is not carried.
    """

    @functools.wraps(original)
    def make_closure(self: Any, kwargs: Any, *args: Any) -> Any:
        closure, carried = original(self, kwargs, *args), carrier_of(self.trainer)
        if not carried or not _can_be_divided(kwargs):
            return closure

        parts = ClosureInParts(
            carried.session,
            closure,
            lambda part: self._make_step_fn(type(kwargs)(kwargs, batch=part))(),
            self.output_result_cls,
            getattr(self.trainer.precision_plugin, "scaler", None),
        )
        closure.closure = lambda *_, **__: parts.run(kwargs["batch"])
        return closure

    return make_closure


def _can_be_divided(kwargs: Any) -> bool:
    if "batch" not in kwargs:
        return False
    batch = kwargs["batch"]
    items = batch.values() if type(batch) is dict else batch if type(batch) in (list, tuple) else ()
    for item in items:  # nearly always its first one tells
        if type(item) is torch.Tensor and item.ndim:
            return item.size(0) > 0
    try:
        return batches.length(batch) > 0
    except KgorchError:  # a graph, a list of texts
        return False
