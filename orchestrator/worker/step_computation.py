"""One optimizer step as a script computes it: the part of a session's public API that is called between two boundaries."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from kgorch.worker.data import batches
from kgorch.worker.memory.microbatch import MicrobatchRunner, Work
from kgorch.worker.memory.oom_retry import StepGuards
from kgorch.worker.session_state import SessionState


class StepComputation:
    """Computes the steps of a script. `Session` inherits it.

    Args:
        guards: None when the script runs alone.

    Attributes:
        device: see Session.
    """

    def __init__(self, state: SessionState, guards: StepGuards | None) -> None:
        self.device = state.member.device
        self._state, self._guards = state, guards
        self._runner = MicrobatchRunner(
            self.device, lambda: state.division.ranks, state.exactness.update, guards, state.bucket_order.learn_again
        )

    @property
    def weight(self) -> float:
        """0.0 when this rank's batch is borrowed (a last batch smaller than the number of ranks), else above 0."""
        return self._runner.weight

    @property
    def microbatch(self) -> int | None:
        """Samples of one forward and backward under the current memory settings; None for a rank's whole share."""
        return self._runner.microbatch

    def backward(self, batch: Any, loss_of: Callable[[Any], torch.Tensor], *, scaler: Any = None) -> torch.Tensor:
        """Forward and backward of this rank's batch in microbatches: the same gradient, in less memory.

        Each part is moved to the device and weighted by its share of the global batch, and all but the last run without DDP's
        all-reduce. When memory runs out on any rank, all ranks do the batch again, one rung further down the plan's ladder.

        Args:
            batch: as `session.steps` gave it. Its tensors have the samples along their first axis, or it has lists of one item a
                sample; any other batch is computed whole.
            loss_of: takes a part (of the batch's own structure) and returns its mean loss, a scalar tensor.
            scaler: the GradScaler, if one is used.

        Returns:
            The mean loss over this rank's batch: a detached scalar tensor, possibly still being computed. NaN where all ranks
            dropped the batch.
        """
        probe = self._state.probe

        def work(part: Any, weight: float) -> torch.Tensor:
            with probe.forward():
                loss = loss_of(part)
            weighted = loss if weight == 1 else loss * weight
            (scaler.scale(weighted) if scaler else weighted).backward()
            return loss.detach()

        return self.accumulate(batch, work, scaler=scaler)

    def accumulate(self, batch: Any, work: Work, *, scaler: Any = None) -> torch.Tensor:
        """`backward` for loops that call backward() themselves.

        Args:
            work: called as `work(part, weight)`; does the forward of a part of the batch and the backward of its loss times
                `weight`, and returns that mean loss, detached. It may be called again for the same part, so it must leave
                nothing behind but gradients.
            scaler: the GradScaler that `work` uses, if any.

        Returns:
            See `backward`.
        """
        self._state.probe.before_backward(batch, work)
        scaled = scaler is not None and scaler.is_enabled()
        return self._runner.run(self._state.position.step, batch, work, scaled=scaled)

    def autocast(self, dtype: torch.dtype = torch.float16, *, enabled: bool = True) -> torch.autocast:
        """torch.autocast on this rank's device, until a NaN has the plan's remedies switch it to bfloat16 or off."""
        enabled = enabled or self._state.probe.as_on_cuda
        if self._guards:
            dtype, allowed = self._guards.ladder.autocast(dtype)
            enabled = enabled and allowed
        return torch.autocast(self.device.type, dtype, enabled=enabled)

    def to_device(self, batch: Any) -> Any:
        """The batch with its tensors on this rank's device. The copy does not block where memory is pinned."""
        return batches.moved(batch, self.device)
