"""What the metrics of a LightningModule (torchmetrics) have collected in the running epoch: a `state_dict` holds none of it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn


def states_of(module: nn.Module) -> dict[str, dict[str, Any]]:
    """By path: what each metric that was updated since its last reset has collected on this rank."""
    for part in module.modules():
        if _is_a(part, "torchmetrics.collections", "MetricCollection"):
            part.items()  # type: ignore[operator]  # gives metrics that collect the same what the first one has
    return {
        path: {"updates": metric._update_count, "values": {name: getattr(metric, name) for name in metric._defaults}}
        for path, metric in _metrics_in(module)
        if metric._update_count
    }


def put_back(module: nn.Module, saved: Any) -> None:
    """Set what `states_of` has returned: tensors alone, whoever has written them. Leaves out a metric that is another one."""
    metrics = dict(_metrics_in(module))
    for path, state in saved.items() if isinstance(saved, dict) else ():
        if path not in metrics or not isinstance(state, dict):
            continue
        metric, values, updates = metrics[path], state.get("values"), state.get("updates")
        defaults = metric._defaults
        if not isinstance(values, dict) or values.keys() != defaults.keys() or type(updates) is not int:
            continue
        if all(_fits(values[name], default) for name, default in defaults.items()):
            for name, value in values.items():
                tensors = value if isinstance(value, list) else [value]
                moved = [item.to(metric.device) for item in tensors]
                setattr(metric, name, moved if isinstance(value, list) else moved[0])
            metric._update_count, metric._computed = updates, None


def _fits(value: Any, default: Any) -> bool:
    """Whether a metric may hold this value, as it may hold its default."""
    if isinstance(default, list):
        return isinstance(value, list) and all(isinstance(item, torch.Tensor) for item in value)
    return isinstance(value, torch.Tensor) and value.dtype == default.dtype


def _metrics_in(module: nn.Module) -> Iterator[tuple[str, Any]]:
    return ((path, part) for path, part in module.named_modules() if _is_a(part, "torchmetrics.metric", "Metric"))


def _is_a(part: nn.Module, module: str, name: str) -> bool:
    return any((kind.__module__, kind.__name__) == (module, name) for kind in type(part).__mro__)
