"""What the script has given to `session.track()`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from kgorch.errors import CannotRestore, KgorchError
from kgorch.worker.checkpoint import state_codec
from kgorch.worker.checkpoint.state_codec import StateSizes
from kgorch.worker.wrappers import unwrapped


class TrackedObjects:
    """The objects whose state is saved; false before `set`.

    Attributes:
        things: by the names that the script gave them.
        state_bytes: bytes of a checkpoint of them, over all ranks.
        is_ready: they hold the state that the session begins with, and can be saved.
    """

    def __init__(self) -> None:
        self.things: dict[str, Any] = {}
        self._built: dict[str, bool] = {}  # whether a weight required a gradient at `set`, by path
        self.state_bytes = 0
        self.is_ready = False

    def __bool__(self) -> bool:
        return bool(self.things)

    def set(self, things: dict[str, Any]) -> None:
        """Raises: KgorchError for a second call, and for an object without a state_dict()."""
        if self.things:
            raise KgorchError("session.track() was called twice", next_step="give all names in one call")
        for name, thing in things.items():
            if not hasattr(thing, "state_dict"):
                raise KgorchError(
                    f"session.track({name}=…): a {type(thing).__name__} has no state_dict()",
                    next_step="hold it in an object that has one (`Carried` in docs/guide.md)",
                )
        self.things = things
        if lazy := next((path for path, weight in self._weights() if nn.parameter.is_lazy(weight)), None):
            self.things = {}
            raise KgorchError(
                f"{lazy} has no shape yet (nn.LazyLinear and the like): nothing of it can be saved or restored",
                next_step="pass one batch through the model before the training begins, as in its `__init__`; optimizers and DDP"
                " want that, too",
            )
        self._built = {path: weight.requires_grad for path, weight in self._weights()}

    def clear(self) -> None:
        """Track nothing again. Other parts may hold the same dict: it is emptied, so that the objects are freed."""
        self.things.clear()
        self.is_ready = False

    def modules(self) -> Iterator[nn.Module]:
        """The tracked modules."""
        return (thing for thing in self.things.values() if isinstance(thing, nn.Module))

    def tensors(self) -> Iterator[torch.Tensor]:
        """The parameters of the tracked modules and optimizers."""
        for thing in self.things.values():
            if isinstance(thing, nn.Module):
                yield from thing.parameters()
            elif isinstance(thing, torch.optim.Optimizer):
                yield from (weight for group in thing.param_groups for weight in group["params"])

    def thawed_or_frozen(self) -> dict[str, bool]:
        """Of the weights that the script has thawed or frozen since `set`: whether they require a gradient now, by path."""
        now = {path: weight.requires_grad for path, weight in self._weights()}
        return {path: is_trained for path, is_trained in now.items() if is_trained != self._built.get(path, is_trained)}

    def thaw_and_freeze(self, saved: Any) -> None:
        """Do so as an earlier session has. Raises: CannotRestore for a weight of a type that has no gradients."""
        saved = saved if isinstance(saved, dict) else {}
        for path, weight in self._weights():
            if type(is_trained := saved.get(path)) is bool:
                try:
                    weight.requires_grad_(is_trained)
                except RuntimeError as error:
                    raise CannotRestore(f"{path} was trained, and cannot be now", str(error)[:300]) from None

    def _weights(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Those of the modules, by paths that do not depend on the wrappers of PyTorch; a tied one has several."""
        for name, thing in self.things.items():
            if isinstance(thing, nn.Module):
                for path, weight in unwrapped(thing).named_parameters(remove_duplicate=False):
                    yield f"{name}.{path}", weight

    def measure(self, world_size: int) -> StateSizes:
        """Set `state_bytes`."""
        sizes = state_codec.expected_sizes(self.things)
        self.state_bytes = sizes.total(world_size)
        return sizes

    def replicated(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Those of the tensors that belong to modules and optimizers: other objects may hold NaN on purpose."""
        return {
            name: tensor
            for name, tensor in tensors.items()
            if state_codec.is_replicated(self.things[name.partition(".")[0]])
        }
