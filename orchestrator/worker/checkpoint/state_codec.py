"""The state of all tracked objects as named tensors and plain JSON, and back.

`capture` walks the state_dicts of what the script tracks (tagged_json.py). State that is the same on every rank (modules,
optimizers) is separated from state that each rank keeps for itself (schedulers, samplers, module buffers).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from kgorch.errors import CannotRestore, nearest
from kgorch.worker import local_tensors, tagged_json
from kgorch.worker.checkpoint import sharded_tensors
from kgorch.worker.checkpoint.pruned_weights import prune_as
from kgorch.worker.checkpoint.sharded_tensors import Layout, TensorReader
from kgorch.worker.checkpoint.trainable_weights import TrainableWeights
from kgorch.worker.tagged_json import Fetch, TensorTable
from kgorch.worker.wrappers import unwrapped


@dataclass(slots=True)
class CapturedState:
    """The state of the tracked objects at one moment.

    Attributes:
        tree: JSON of the modules and optimizers, which are the same on every rank, without their tensors.
        own_tree: JSON of all else (schedulers, scalers, samplers, generators), which each rank keeps for itself.
        tensors: by path, on their devices; not copied. DTensors stay DTensors.
        own: paths of the tensors that each rank keeps for itself: those of own_tree, and buffers of modules (BatchNorm's
            differ between ranks). No DTensor, whose pieces make one tensor wherever it was tracked.
    """

    tree: dict[str, Any] = field(default_factory=dict)
    own_tree: dict[str, Any] = field(default_factory=dict)
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    own: set[str] = field(default_factory=set)


def capture(tracked: Mapping[str, Any]) -> CapturedState:
    """The state of the tracked objects; tensors are referenced, not copied.

    Raises:
        CannotRestore: names the first value that is neither a tensor nor plain.
    """
    captured = CapturedState()
    shared = {name: unwrapped(thing) for name, thing in tracked.items() if is_replicated(thing)}
    table = TensorTable(captured.tensors)
    for name, thing in shared.items():
        captured.tree[name] = tagged_json.extract(thing.state_dict(), name, table)
        if isinstance(thing, nn.Module):
            captured.own.update(f"{name}.{buffer}" for buffer, _ in thing.named_buffers())
    captured.own &= captured.tensors.keys()
    # A new table: a tensor that a rank keeps for itself is stored even where a module has the same one.
    table, replicated = TensorTable(captured.tensors), set(captured.tensors)
    for name in tracked.keys() - shared.keys():
        captured.own_tree[name] = tagged_json.extract(tracked[name].state_dict(), name, table)
    captured.own |= captured.tensors.keys() - replicated
    captured.own -= {path for path, tensor in captured.tensors.items() if local_tensors.is_sharded(tensor)}
    return captured


def tensors_in(tree: Any) -> Iterator[str]:
    """Paths of the tensors that a captured tree refers to."""
    if isinstance(tree, dict):
        if tree.keys() == {"$tensor"}:
            yield tree["$tensor"]
        else:
            for item in tree.values():
                yield from tensors_in(item)
    elif isinstance(tree, list):
        for item in tree:
            yield from tensors_in(item)


def is_replicated(thing: Any) -> bool:
    """Whether the object is the same on every rank: DistributedDataParallel ensures it for modules and optimizers alone."""
    return isinstance(thing, nn.Module | torch.optim.Optimizer)


@dataclass(frozen=True, slots=True)
class StateSizes:
    """Bytes of the state once training has begun.

    Attributes:
        replicated: of each tensor that is the same on every rank, by path.
        own: what each rank keeps for itself.
        pieces: at most what this rank saves of sharded tensors: its pieces of all of them, replicas included.
        sharded: sharded tensors, over all ranks.
        count: of tensors.
    """

    replicated: Mapping[str, int] = field(default_factory=dict)
    own: int = 0
    pieces: int = 0
    sharded: int = 0
    count: int = 0

    def total(self, world_size: int) -> int:
        """Of a checkpoint, over all ranks."""
        return sum(self.replicated.values()) + self.own * world_size + self.sharded


def expected_sizes(tracked: Mapping[str, Any]) -> StateSizes:
    """Bytes of the state once training has begun.

    An optimizer that has no state yet is assumed to keep two values per parameter; plain SGD keeps one or none.
    """
    captured = capture(tracked)
    tensors = {name: tensor for name, tensor in captured.tensors.items() if name not in captured.own}
    for name, thing in tracked.items():
        if isinstance(thing, torch.optim.Optimizer) and not thing.state:
            for group in thing.param_groups:
                kept = 2 if not isinstance(thing, torch.optim.SGD) else int(bool(group["momentum"]))
                for number, weight in enumerate(group["params"] * kept):
                    tensors[f"{name}.{id(group)}.{number}"] = weight
    sharded = [tensor for tensor in tensors.values() if local_tensors.is_sharded(tensor)]
    return StateSizes(
        replicated={name: item.nbytes for name, item in tensors.items() if not local_tensors.is_sharded(item)},
        own=sum(captured.tensors[name].nbytes for name in captured.own),
        pieces=sum(local_tensors.local(tensor).nbytes for tensor in sharded),
        sharded=sum(tensor.numel() * tensor.element_size() for tensor in sharded),
        count=len(tensors),
    )


def fetch_for(tracked: Mapping[str, Any], tree: Mapping[str, Any], reader: TensorReader) -> Fetch:
    """A function that fetches a saved state's tensors as the tracked objects have theirs: sharded, or whole.

    A rank reads what its own layout needs of each tensor, however many ranks have saved it in whichever pieces.

    Args:
        tree: of the saved state, from anywhere.
    """
    captured = capture(tracked)
    layouts = {
        path: sharded_tensors.layout_of(tensor)
        for path, tensor in captured.tensors.items()
        if local_tensors.is_sharded(tensor)
    }
    for name, thing in tracked.items():
        if isinstance(thing, torch.optim.Optimizer):
            layouts |= _optimizer_layouts(thing, tree.get(name))
    return sharded_tensors.fetch_for(layouts, reader) if layouts else reader.fetch


def _optimizer_layouts(optimizer: torch.optim.Optimizer, tree: Any) -> dict[str, Layout]:
    """Layouts of an optimizer's tensors by path: those of their parameters. It has no state before its first step, and the
    tree names parameters by their numbers, as Optimizer.load_state_dict assigns them."""
    weights = [weight for group in optimizer.param_groups for weight in group["params"]]
    if not local_tensors.is_any_sharded(weights):
        return {}
    try:
        numbers = [number for group in tree["param_groups"] for number in group["params"]]
        weight_of = dict(zip(numbers, weights, strict=True))
        return {
            path: sharded_tensors.layout_of(weight)._replace(is_exact=False)
            for number, values in tree["state"]["$dict"]
            if local_tensors.is_sharded(weight := weight_of[number])
            for path in tensors_in(values)
        }
    except tagged_json.MISFITS:
        return {}  # the optimizer refuses the state, and says why


def restore(tracked: Mapping[str, Any], tree: Mapping[str, Any], fetch: Fetch) -> None:
    """Load a captured tree into the tracked objects.

    Raises:
        CannotRestore: the checkpoint holds other names or shapes than the script tracks.
    """
    if tree.keys() != tracked.keys():
        raise CannotRestore(
            "the script tracks other things than the checkpoint holds",
            f"checkpoint: {', '.join(sorted(tree))}",
            f"script:     {', '.join(sorted(tracked))}",
            next_step="give session.track() the same names, or begin a new run with `kgorch start PLAN --fresh`",
        )
    things = {name: unwrapped(thing) for name, thing in tracked.items()}
    cast: set[tuple[Any, ...]] = set()
    for name, thing in sorted(things.items(), key=lambda item: not isinstance(item[1], nn.Module)):
        state = tagged_json.insert(tree[name], _fetch_kept(name, thing, fetch), name)
        try:
            if isinstance(thing, nn.Module):
                cast |= _fill(name, thing, state)
            elif isinstance(thing, torch.optim.Optimizer):
                _load_optimizer(thing, state, cast)
            else:
                # Elsewhere nothing is to be moved, and a Trainer's state_dict calls hooks of the script.
                is_moved = torch.cuda.is_initialized() and not getattr(thing, "calls_hooks", False)  # type: ignore[no-untyped-call]
                thing.load_state_dict(_placed(state, thing.state_dict()) if is_moved else state)
        except tagged_json.MISFITS as error:
            raise CannotRestore(
                f"{name} does not take what the checkpoint holds", f"{type(error).__name__}: {error}"[:300]
            ) from error


def _fetch_kept(name: str, thing: Any, fetch: Fetch) -> Fetch:
    """A function that fetches the thing's tensors so that it may keep them, without copies of those that it does not keep."""
    if isinstance(thing, nn.Module):
        return tagged_json.kept(fetch, {f"{name}.{path}" for path, _ in thing.named_parameters(remove_duplicate=False)})
    if isinstance(thing, torch.optim.Optimizer) and not any(
        weight.is_cpu for group in thing.param_groups for weight in group["params"]
    ):
        return fetch  # load_state_dict moves the tensors to the GPU
    return tagged_json.kept(fetch)


def _placed(state: Any, now: Any) -> Any:
    """The state with its tensors on the devices of those that are there now: an average of weights may keep what it is given."""
    if isinstance(state, torch.Tensor):
        return state.to(now.device) if isinstance(now, torch.Tensor) and not now.is_meta else state
    if type(state) is dict and isinstance(now, dict):
        return {key: _placed(value, now.get(key)) for key, value in state.items()}
    if type(state) in (list, tuple) and isinstance(now, list | tuple) and len(state) == len(now):
        return type(state)(_placed(value, there) for value, there in zip(state, now, strict=True))
    return state


def _load_optimizer(optimizer: torch.optim.Optimizer, state: Any, cast: Set[tuple[Any, ...]]) -> None:
    """Load into the optimizer, with the types that its tensors were saved with.

    Optimizer.load_state_dict casts every tensor but `step` to the type of its parameter: float32 moments of bfloat16 weights
    would be rounded at each resume, and masks and counters would become numbers.

    Args:
        cast: identities of weights that have another type than in the checkpoint. The script has changed it, and moments of the
            former type may not fit the new gradients, so PyTorch's cast stays.
    """
    optimizer.load_state_dict(state)
    weights = [weight for group in optimizer.param_groups for weight in group["params"]]
    numbers = [number for group in state["param_groups"] for number in group["params"]]
    for number, weight in zip(numbers, weights, strict=True):
        own, saved = optimizer.state.get(weight), state["state"].get(number)
        if isinstance(own, dict) and isinstance(saved, dict) and local_tensors.identity(weight) not in cast:
            _keep_types(own, saved)


def _keep_types(own: dict[Any, Any], saved: Mapping[Any, Any]) -> None:
    """Put the saved tensors in place of those that were cast. `step` stays as PyTorch wants it, which depends on the group."""
    for key, value in saved.items():
        there = own.get(key)
        if isinstance(value, dict) and isinstance(there, dict):
            _keep_types(there, value)
        elif key != "step" and isinstance(value, torch.Tensor) and isinstance(there, torch.Tensor):
            own[key] = there if value.dtype == there.dtype else value.to(there.device)


def put_back(tracked: Mapping[str, Any], before: CapturedState, copies: Mapping[str, torch.Tensor]) -> None:
    """Undo all changes to the tracked objects since `before` was captured.

    Values are copied into the existing tensors where nothing but values has changed: an optimizer that loads a state holds it
    twice on its device for a moment.

    Args:
        copies: the tensors' values at that time, by path.
    """
    now = capture(tracked)
    same_tensors = now.tensors.keys() == before.tensors.keys() and all(
        now.tensors[name].shape == tensor.shape for name, tensor in copies.items()
    )
    trees, now_trees = before.tree | before.own_tree, now.tree | now.own_tree
    reload = {name for name in tracked if not same_tensors or trees[name] != now_trees[name]}
    only_groups = {
        name
        for name in reload
        if same_tensors
        and isinstance(tracked[name], torch.optim.Optimizer)
        and trees[name]["state"] == now_trees[name]["state"]
    }
    with torch.no_grad():
        for name, tensor in copies.items():
            if name.partition(".")[0] not in reload - only_groups:
                now.tensors[name].copy_(tensor)
    for name in only_groups:  # a scheduler has changed the learning rate
        groups = tagged_json.insert(trees[name]["param_groups"], now.tensors.__getitem__, name)
        for group, values in zip(tracked[name].param_groups, groups, strict=True):
            group.update({key: value for key, value in values.items() if key != "params"})
    for name in reload - only_groups:
        restore({name: tracked[name]}, {name: trees[name]}, copies.__getitem__)


def _fill(name: str, module: nn.Module, state: dict[str, Any]) -> set[tuple[Any, ...]]:
    """Load into the module by way of its own state_dict, which has the version metadata that load_state_dict reads.

    Returns: identities of the tensors that have another type than in the state.
    """
    if not isinstance(state, dict):
        raise CannotRestore(f"{name} is not a table in the checkpoint")
    if isinstance(module, TrainableWeights):
        module.expect(state.keys())
    prune_as(module, state.keys())
    own = module.state_dict()
    if own.keys() != state.keys():
        strange = sorted(own.keys() ^ state.keys())[0]
        raise CannotRestore(
            f"{name} is another model than the one in the checkpoint",
            f"only in the script: {len(own.keys() - state.keys())} names; only in the checkpoint: {len(state.keys() - own.keys())}",
            f"the first: {strange!r:.200}{nearest(strange, state.keys() if strange in own else own.keys())}",
            next_step="put back the model that was trained, or begin a new run with `kgorch start PLAN --fresh`",
        )
    tensors = {key: value for key, value in own.items() if isinstance(value, torch.Tensor)}
    if strays := [key for key in tensors if not isinstance(state[key], torch.Tensor)]:
        raise CannotRestore(f"{name}.{strays[0]} is not a tensor in the checkpoint")
    if other := [key for key, value in tensors.items() if value.shape != state[key].shape]:
        shapes = ", ".join(f"{key}: {tuple(state[key].shape)} → {tuple(own[key].shape)}" for key in other[:3])
        raise CannotRestore(
            f"{len(other)} of {len(tensors)} tensors of {name} have another shape than in the checkpoint: {shapes}",
            next_step="put back the arguments that it was trained with, or begin a new run with `kgorch start PLAN --fresh`",
        )
    cast = {local_tensors.identity(value) for key, value in tensors.items() if value.dtype != state[key].dtype}
    own.update({key: state[key] for key in own})
    module.load_state_dict(own)
    return cast
