"""Search for state that changes from step to step and that no checkpoint holds: an optimizer, an average of the weights, a
schedule, a loss scale, a random generator, or the place in a loader, that `session.track()` and `session.follow()` were not given.

It compares two looks at the script's objects, a few steps apart. Only the same object with another content counts: what a step
makes anew, as its batch and its loss, is not state. An object is held by a checkpoint if its tensors are those of the saved state,
or if a tracked object refers to it. In doubt it counts as held: a correct program must not be blamed.
"""

from __future__ import annotations

import sys
import types
import weakref
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from kgorch.errors import CannotRestore
from kgorch.worker import local_tensors
from kgorch.worker.audit import script_objects
from kgorch.worker.checkpoint import state_codec
from kgorch.worker.data import generator_states, loader_search
from kgorch.worker.data.keyed_loader import SampleOrder
from kgorch.worker.object_variables import attributes_of
from kgorch.worker.script_code import is_of_script

MOST_REACHED = 5_000
"""Limit of objects that are visited from the tracked ones."""

COMPARED, SAMPLED = 8, 16
"""Tensors of an object whose values are compared, and their elements: changes through `.data` leave no other trace."""

ARRAY_SAMPLED = 4096
"""The same of a NumPy array, which does not count its changes."""

Fingerprint = tuple[Any, ...]


@dataclass(slots=True)
class HeldState:
    """What the checkpoints of a session hold.

    Attributes:
        storages: addresses of the saved tensors' memory, and of the gradients of saved weights.
        objects: ids of the tracked objects, and of what they refer to.
        with_tensors: of those, the ones whose tensors the tracked object may save as copies.
        is_complete: all that tracked objects refer to was visited.
    """

    storages: set[int] = field(default_factory=set)
    objects: set[int] = field(default_factory=set)
    with_tensors: set[int] = field(default_factory=set)
    is_complete: bool = True

    def has_tensors(self, thing: Any, tensors: Iterable[torch.Tensor]) -> bool:
        """Whether a checkpoint holds tensors of the object."""
        return id(thing) in self.with_tensors or any(storage_of(tensor) in self.storages for tensor in tensors)


def held_state(tracked: Mapping[str, Any]) -> HeldState:
    """What checkpoints of these objects hold."""
    held, captured = HeldState(), state_codec.capture(tracked)
    weights = [weight for thing in tracked.values() for weight in _weights(thing)]
    gradients = [weight.grad for weight in weights if weight.grad is not None]
    held.storages = {storage_of(tensor) for tensor in (*captured.tensors.values(), *weights, *gradients)}
    savers = {name.partition(".")[0] for name in captured.tensors}
    for name, thing in tracked.items():
        reached = _reached_from(thing)
        held.is_complete = held.is_complete and len(reached) < MOST_REACHED
        held.objects |= reached
        if name in savers and not isinstance(thing, nn.Module):
            held.with_tensors |= reached
    return held


class UntrackedState:
    """Compares looks at the objects of a script.

    Args:
        counts_numbers: a variable that is a tensor of one element is state, and not the sum of an epoch's losses.
    """

    def __init__(self, *, counts_numbers: bool = True) -> None:
        self._counts_numbers = counts_numbers
        self._seen: dict[str, tuple[list[Callable[[], Any]], Fingerprint]] = {}
        self._stepped: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._iterators: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()

    def look(
        self,
        tracked: Mapping[str, Any],
        stepped: Collection[Optimizer],
        generators: Collection[Any],
        *,
        is_resumed: bool,
    ) -> list[str]:
        """What has changed since the first look and is not held, in words.

        Args:
            stepped: optimizers that have stepped since the look before.
            generators: those whose states are saved with the position of a loader.
            is_resumed: the session continues a run: the script may have set a schedule by itself.
        """
        frames = script_objects.frames_of_script()
        held = held_state(tracked)
        if not held.is_complete:
            return []
        held.objects |= {id(item) for item in generators} | loader_search.of_the_process()
        named = list(script_objects.named_objects(frames))
        names = {id(thing): path for path, thing in named}
        return [*self._optimizers(stepped, held, names), *self._changed(named, held, is_resumed=is_resumed)]

    def _optimizers(self, stepped: Collection[Optimizer], held: HeldState, names: Mapping[int, str]) -> Iterator[str]:
        for optimizer in stepped:
            state = [value for values in optimizer.state.values() for value in values.values()]
            tensors = [value for value in state if isinstance(value, torch.Tensor)]
            has_state = bool(tensors) or any("initial_lr" in group for group in optimizer.param_groups)
            is_held = id(optimizer) in held.objects if not tensors else held.has_tensors(optimizer, tensors)
            is_held = (
                is_held or id(optimizer.state) in held.with_tensors
            )  # of an optimizer that shares it with this one
            if optimizer in self._stepped and has_state and not is_held:
                yield _described("optimizer", names.get(id(optimizer), ""), optimizer)
        self._stepped.update(stepped)

    def _changed(self, named: list[tuple[str, Any]], held: HeldState, *, is_resumed: bool) -> Iterator[str]:
        tensors: dict[str, int] = {}  # by the container that they are items of
        for path, thing in named:
            is_number = path.isidentifier() and isinstance(thing, torch.Tensor) and thing.numel() == 1
            unit = None if is_number and not self._counts_numbers else _unit(thing, held)
            if unit is None:
                continue
            parts, now = unit
            parts_then, then = self._seen.setdefault(path, (_references(parts), now))
            is_same = len(parts) == len(parts_then) and all(
                part is reference() for part, reference in zip(parts, parts_then, strict=True)
            )
            if not is_same:
                self._seen[path] = _references(parts), now
            elif now != then and not (is_resumed and isinstance(thing, LRScheduler) and then[0] > 1):
                if isinstance(thing, torch.Tensor):
                    container = path.rpartition("[")[0] if path.endswith("]") else path
                    tensors[container] = tensors.get(container, 0) + 1
                else:
                    yield _described("", path, thing)
        for path, count in tensors.items():
            yield f"`{path}` (tensor)" if count == 1 else f"`{path}` ({count} tensors)"

    def reads_unknown_loader(self) -> bool:
        """Whether a DataLoader's iterator has advanced in mid-epoch since the look before, and the SDK does not keep its place."""
        found = False
        for iterator in script_objects.loader_iterators():
            given = int(iterator._num_yielded)
            is_ours = hasattr(iterator, "_kgorch_watch") or isinstance(iterator._index_sampler, SampleOrder)
            before = self._iterators.setdefault(iterator, given)
            found = found or (not is_ours and given > before > 0)
        return found


def _unit(thing: Any, held: HeldState) -> tuple[list[Any], Fingerprint] | None:
    """The parts by which an object that is not held is known again, and its content; None for any other object."""
    if isinstance(thing, nn.Module | torch.Tensor):
        tensors = list(_weights(thing)) if isinstance(thing, nn.Module) else [thing]
        tensors = [tensor for tensor in tensors if tensor.numel() and tensor.device.type != "meta"]
        if not tensors or held.has_tensors(thing, tensors) or _is_gradient(thing):
            return None
        return tensors, content_of(tensors)
    if id(thing) in held.objects:
        return None
    if (sample := array_sample(thing)) is not None:
        return [thing], sample
    if isinstance(thing, LRScheduler):
        return [thing], (thing.last_epoch, getattr(thing, "best", None))
    if isinstance(thing, torch.amp.GradScaler):
        return ([thing], (thing.get_scale(), thing._get_growth_tracker())) if thing.is_enabled() else None
    if isinstance(thing, loader_search.generator_types()):
        try:
            return [thing], (repr(generator_states.raw_state_of(thing)),)
        except CannotRestore:  # random.SystemRandom has no state
            return None
    return None


def content_of(tensors: list[torch.Tensor]) -> Fingerprint:
    step = max(1, len(tensors) // COMPARED)
    return tuple(version_of(tensor) for tensor in tensors), [_sample(tensor) for tensor in tensors[::step][:COMPARED]]


def is_array(thing: Any) -> bool:
    """Whether it is a NumPy array of numbers in memory; in none, as a file that is mapped, a look would read from a disk."""
    numpy = sys.modules.get("numpy")
    if (
        numpy is None
        or not isinstance(thing, numpy.ndarray)
        or thing.dtype.kind not in "biufc"
        or not thing.flags.writeable
    ):
        return False
    base = thing
    while isinstance(base.base, numpy.ndarray):
        base = base.base
    return base.base is None and not isinstance(base, numpy.memmap)


def array_sample(thing: Any) -> Fingerprint | None:
    """What tells the content of an array of `is_array` from another; None for anything else."""
    if not is_array(thing):
        return None
    step = thing.size // ARRAY_SAMPLED | 1  # odd: an even one would see few columns of a table
    return thing.shape, thing.dtype.str, zlib.crc32(thing.flat[::step].tobytes())


def version_of(tensor: torch.Tensor) -> int:
    """PyTorch's count of the writes to it; 0 for one of `torch.inference_mode`, which has none."""
    return 0 if tensor.is_inference() else tensor._version


def _sample(tensor: torch.Tensor) -> str:
    try:
        flat = local_tensors.local(tensor).detach().reshape(-1)
        return repr(flat[:: max(1, flat.numel() // SAMPLED)].tolist())
    except (RuntimeError, NotImplementedError, ValueError):  # sparse, quantized, without a shape yet
        return ""


def _weights(thing: Any) -> Iterator[torch.Tensor]:
    """The tensors of a module's state_dict, without its code, which may be the script's."""
    if isinstance(thing, nn.Module):
        yield from thing.parameters()
        for module in thing.modules():
            temporary = module._non_persistent_buffers_set
            yield from (item for name, item in module._buffers.items() if item is not None and name not in temporary)
    elif isinstance(thing, Optimizer):
        yield from (weight for group in thing.param_groups for weight in group["params"])


def _is_gradient(thing: Any) -> bool:
    """Whether it is a result of a graph: a view or an output that a step has kept, which the next backward overwrites."""
    return isinstance(thing, torch.Tensor) and thing.grad_fn is not None


def storage_of(tensor: torch.Tensor) -> int:
    try:
        return local_tensors.local(tensor).untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError, ValueError):  # sparse, or without a shape yet: it has none of its own
        return id(tensor)


def _reached_from(thing: Any) -> set[int]:
    """Ids of what the object refers to: by attributes, containers, and the functions of its class; of one that saves what others
    hold (own_attributes.py) those of these."""
    visited: dict[int, Any] = {}
    besides = set[int]()
    waiting = [thing]
    while waiting and len(visited) < MOST_REACHED:
        item = waiting.pop()
        if id(item) in visited or isinstance(item, str | bytes | int | float | types.ModuleType | None):
            continue
        visited[id(item)] = item
        if isinstance(getattr(type(item), "looked_at", None), property):
            besides |= item.looked_at
        else:
            waiting.extend(_references_of(item))
    return besides.union(visited)


def _references_of(thing: Any) -> Iterator[Any]:
    if isinstance(thing, dict):
        yield from thing.values()
    elif isinstance(thing, list | tuple | set | frozenset):
        yield from thing
    elif isinstance(thing, types.MethodType):
        yield from (thing.__self__, thing.__func__)
    elif isinstance(thing, types.FunctionType):
        yield from (cell.cell_contents for cell in thing.__closure__ or () if _is_filled(cell))
        if is_of_script(thing.__code__.co_filename, thing.__module__ or ""):
            yield from (thing.__globals__[name] for name in thing.__code__.co_names if name in thing.__globals__)
    elif isinstance(thing, LRScheduler):  # it refers to its optimizer and does not save it
        yield from (value for value in vars(thing).values() if not isinstance(value, Optimizer | types.MethodType))
    elif isinstance(thing, Optimizer):
        yield from (thing.state, thing.param_groups)
    elif isinstance(thing, nn.Module):
        yield from _weights(thing)
    elif not isinstance(thing, torch.Tensor | type):
        yield from attributes_of(thing).values()
        for kind in type(thing).__mro__[:-1]:
            yield from (value for value in vars(kind).values() if isinstance(value, types.FunctionType))


def _is_filled(cell: types.CellType) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True


def _references(parts: list[Any]) -> list[Callable[[], Any]]:
    return [_reference(part) for part in parts]


def _reference(part: Any) -> Callable[[], Any]:
    try:
        return weakref.ref(part)
    except TypeError:  # a random generator: small enough to be kept
        return lambda: part


def _described(kind: str, path: str, thing: Any) -> str:
    own = type(thing).__name__
    return f"{kind} `{path}` ({own})".strip() if path else f"an {kind} ({own})"
