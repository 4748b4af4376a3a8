"""Attributes of the script's own callbacks, which change while a Trainer trains and which its library does not save.

Plain values and tensors are compared with what they were when the training had begun, so that a session's own (an output folder, a
start time) stay the session's. Modules, as an average of the weights, are saved with all they hold. A callback that has also made
something that no checkpoint holds, as a file that it has opened, is left alone as a whole: half of its state would be worse than
none.
"""

from __future__ import annotations

import copy
import datetime
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from kgorch.worker import tagged_json
from kgorch.worker.audit.script_objects import is_own_class
from kgorch.worker.data import batches
from kgorch.worker.integrations import carrier

NEAR_S = datetime.timedelta(days=3650).total_seconds()
"""A float that is so near to the clock's is an instant, which is the session's."""


class CallbackAttributes:
    """Of those callbacks whose class the script defines.

    Args:
        model: that is trained: its weights are saved elsewhere.
        note: is given what is not saved, in words; "" where nothing is left out any more.
    """

    def __init__(self, callbacks: Iterable[Any], model: nn.Module, note: Callable[[str], None]) -> None:
        self._callbacks = [item for item in callbacks if is_own_class(type(item))]
        self._weights = {id(weight) for weight in model.parameters()}
        self._begun = [{name: _kept(value) for name, value in vars(item).items()} for item in self._callbacks]
        self._note, self._left = note, list[str]()

    def state(self) -> list[dict[str, Any]]:
        """What has changed since the training began, of each callback."""
        states, left = [], []
        for callback, begun in zip(self._callbacks, self._begun, strict=True):
            name, own = type(callback).__name__, vars(callback)
            values = {
                key: value
                for key, value in own.items()
                if (key not in begun or _differs(value, begun[key])) and not self._has_weights(value)
            }
            modules = {key: value for key, value in own.items() if self._is_its_own(value)}
            others = [key for key in values.keys() - modules.keys() if not tagged_json.is_savable(values[key])]
            if others:
                left.append(f"{name} ({', '.join(sorted(others)[:3])})")
                values, modules = {}, {}
            kept = {key: item for key, item in values.items() if key not in modules and not _is_instant(item)}
            states.append({
                "class": name,
                "values": kept,
                "on_device": [key for key, item in kept.items() if any(one.device.type != "cpu" for one in _tensors(item))],
                "modules": {key: dict(module.state_dict()) for key, module in modules.items()},
            })  # fmt: skip
        if left != self._left:
            self._left = left
            self._note(
                f"begin anew in each session, with attributes that a checkpoint cannot hold: {', '.join(left)}"
                if left
                else ""
            )
        return states

    def put_back(self, saved: Sequence[dict[str, Any]], folder: str, device: torch.device) -> None:
        """Set what `state` has returned.

        Args:
            folder: the Trainer's. What names files elsewhere is not set.
            device: of tensors that were not on the CPU.
        """
        left = list(saved)
        for callback in self._callbacks:
            state = next((item for item in left if item["class"] == type(callback).__name__), None)
            if state is None:
                continue
            left.remove(state)
            for name, value in state["values"].items():
                if name.isidentifier() and not name.startswith("__") and carrier.stays_in(value, folder):
                    setattr(callback, name, batches.moved(value, device) if name in state["on_device"] else value)
            for name, weights in state["modules"].items():
                if isinstance(module := vars(callback).get(name), nn.Module):
                    module.load_state_dict(weights)

    def _is_its_own(self, value: Any) -> bool:
        return isinstance(value, nn.Module) and not any(id(weight) in self._weights for weight in value.parameters())

    def _has_weights(self, value: Any) -> bool:
        """Whether it holds weights of the model themselves, which are no state of the callback."""
        return any(id(tensor) in self._weights for tensor in _tensors(value))


def _kept(value: Any) -> Any:
    """A copy of what can change in place; tensors count as changed at any time, and are not copied."""
    return copy.deepcopy(value) if not _tensors(value) and tagged_json.is_savable(value) else value


def _tensors(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def _differs(value: Any, begun: Any) -> bool:
    if _tensors(value):
        return True
    try:
        return value is not begun and bool(value != begun)
    except (ValueError, TypeError, RuntimeError):  # arrays, which are compared by element
        return True


def _is_instant(value: Any) -> bool:
    return type(value) is float and abs(value - time.time()) < NEAR_S
