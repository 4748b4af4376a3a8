"""What metrics of torchmetrics have collected since they were reset: a `state_dict` holds none of it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

MOST_METRICS = 1_000
"""Of a tracker, which adds one in each epoch; of a list or dict as many items."""

OWN = {
    ("torchmetrics.wrappers.running", "Running"): ("_num_vals_seen",),
    ("torchmetrics.wrappers.minmax", "MinMaxMetric"): ("min_val", "max_val"),
}
"""What metrics around others collect in attributes that are no states of theirs."""

METRIC = "torchmetrics.metric", "Metric"
COLLECTION = "torchmetrics.collections", "MetricCollection"
TRACKER = "torchmetrics.wrappers.tracker", "MetricTracker"


def is_metric(thing: Any) -> bool:
    """Whether it is a metric, a collection or a tracker of some, or a list or dict of nothing else."""
    if "torchmetrics" not in sys.modules:
        return False
    items = (
        list(thing.values() if isinstance(thing, dict) else thing) if type(thing) in (list, tuple, dict) else [thing]
    )
    return 0 < len(items) <= MOST_METRICS and all(
        isinstance(item, nn.Module) and any(_is_a(item, kind) for kind in (METRIC, COLLECTION, TRACKER))
        for item in items
    )


def states_of(thing: Any) -> dict[str, dict[str, Any]]:
    """By path: what each metric that was updated since its last reset has collected on this rank, and how many a tracker has."""
    found = dict[str, dict[str, Any]]()
    for path, part in _modules_in(thing):
        if _is_a(part, COLLECTION):
            part.items()  # type: ignore[operator]  # gives metrics that collect the same what the first one has
        elif _is_a(part, TRACKER) and len(part):  # type: ignore[arg-type]
            found[path] = {"length": len(part)}  # type: ignore[arg-type]
    for path, metric in _metrics_in(thing):
        own = {name: getattr(metric, name) for name in _own_names(metric)}
        if metric._update_count or own:
            values = {name: getattr(metric, name) for name in metric._defaults}
            found[path] = {"updates": metric._update_count, "values": values} | ({"own": own} if own else {})
    return found


def put_back(thing: Any, saved: Any) -> None:
    """Set what `states_of` has returned: numbers and tensors alone, whoever has written them.

    A metric that is another one is left out.
    """
    given = saved.items() if isinstance(saved, dict) else ()
    states = {path: state for path, state in given if isinstance(state, dict)}
    for path, tracker in list(_modules_in(thing)):
        length: Any = states.get(path, {}).get("length")
        if _is_a(tracker, TRACKER) and type(length) is int and 0 < length <= MOST_METRICS:
            _resize(tracker, length)
    for path, metric in _metrics_in(thing):
        if path not in states and metric._update_count:  # it had just been reset
            metric.reset()
        state = states.get(path, {})
        values, updates, own = state.get("values"), state.get("updates"), state.get("own", {})
        defaults, now = metric._defaults, {name: getattr(metric, name) for name in _own_names(metric)}
        if not isinstance(values, dict) or values.keys() != defaults.keys() or type(updates) is not int:
            continue
        if not isinstance(own, dict) or own.keys() != now.keys():
            continue
        both = values | own
        if all(_fits(both[name], value) for name, value in (defaults | now).items()):
            for name, value in both.items():
                setattr(metric, name, _moved(value, metric.device))
            metric._update_count, metric._computed = updates, None


def _resize(tracker: Any, length: int) -> None:
    """Give a tracker as many metrics, the first of which it copies: the hook that adds one has run again in a continued epoch."""
    while len(tracker) < length:
        tracker.increment()
    while len(tracker) > length:
        tracker._modules.popitem()


def _moved(value: Any, device: torch.device) -> Any:
    if isinstance(value, list):
        return [item.to(device) for item in value]
    return value.to(device) if isinstance(value, torch.Tensor) else value


def _fits(value: Any, default: Any) -> bool:
    """Whether a metric may hold this value, as it may hold its default."""
    if isinstance(default, list):
        return isinstance(value, list) and all(isinstance(item, torch.Tensor) for item in value)
    if not isinstance(default, torch.Tensor):
        return type(value) is type(default) is int
    return isinstance(value, torch.Tensor) and value.dtype == default.dtype


def _own_names(metric: Any) -> tuple[str, ...]:
    return next((names for kind, names in OWN.items() if _is_a(metric, kind)), ())


def _metrics_in(thing: Any) -> Iterator[tuple[str, Any]]:
    return (item for item in list(_modules_in(thing)) if _is_a(item[1], METRIC))


def _modules_in(thing: Any) -> Iterator[tuple[str, nn.Module]]:
    """By path: a module and those in it, or those in a list or dict."""
    if isinstance(thing, nn.Module):
        yield from thing.named_modules()
    else:
        for key, item in thing.items() if isinstance(thing, dict) else enumerate(thing):
            if isinstance(item, nn.Module):
                yield from item.named_modules(prefix=str(key))


def _is_a(part: nn.Module, kind: tuple[str, str]) -> bool:
    return any((base.__module__, base.__name__) == kind for base in type(part).__mro__)
