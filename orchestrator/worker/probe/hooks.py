"""What a session asks of a probe. This base class is the null object of a session that trains in earnest."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from kgorch.worker.data.keyed_loader import Loader
from kgorch.worker.data.loader_fast_forward import LoaderFastForward
from kgorch.worker.memory.microbatch import MicrobatchRunner

_NO_CONTEXT = contextlib.nullcontext()


class ProbeHooks:
    """Does nothing, so that the session has no branches for probes.

    Attributes:
        is_probe: steps are only measured, and their results thrown away.
        as_on_cuda: scripts are to choose types as they would on a GPU, and the optimizer never takes a step.
    """

    is_probe = False
    as_on_cuda = False

    def learn(self, tracked: Mapping[str, Any], state_bytes: int, runner: MicrobatchRunner) -> None:
        """The script has called session.track(). `state_bytes`: of a checkpoint."""

    def add_loader(self, loader: Loader) -> None:
        """The script has made a loader."""

    def batches(self, source: Loader | LoaderFastForward, epochs: int) -> Iterator[list[Any]] | None:
        """The batches to train on instead of an epoch; None for those of the loader. `source` stands at its beginning."""
        return None

    def own_step(self, share: int, total: int) -> bool:
        """A step begins in a loop that the script owns. Returns whether the quick test, or the probe, has seen enough.

        Args:
            share: samples of this rank's share; 0 where it is not known.
            total: steps of the stage; 0 where they are not known.
        """
        return True

    def forward(self) -> contextlib.AbstractContextManager[Any]:
        """A context around the forward of a microbatch."""
        return _NO_CONTEXT

    def before_backward(self, batch: Any, work: Callable[[Any, float], torch.Tensor]) -> None:
        """Before `session.backward` computes a batch; an estimate is made here, and the script ended."""

    def untracked(self, what: str) -> None:
        """A script takes steps without session.track(). Raises: KgorchError in a probe, which must know the state's size."""

    def epoch_over(self) -> None:
        """The script asks for the next epoch: its evaluation is over."""

    def script_over(self) -> None:
        """The script has left the session without an error."""

    def saved(self, exactness: Mapping[str, str]) -> None:
        """The final checkpoint is on disk, or has failed. `exactness`: what is known of identical results, by topic."""
