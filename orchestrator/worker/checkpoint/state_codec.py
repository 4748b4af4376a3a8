"""Everything that a training must remember, cut into named tensors and plain JSON, and put together again.

`capture` walks the state_dicts of what the script tracks. Tensors leave the tree under their dotted path
(`model.encoder.0.weight`, `optimizer.state.0.exp_avg`) and stand in it as `{"$tensor": path}`; a tensor met twice
(tied weights) is kept once and named twice. All else must be plain values: what JSON lacks (tuples, bytes, inf, keys
that are no text, numpy values) is tagged, and what does not fit is refused by name. Nothing is ever pickled.
"""

from __future__ import annotations

import base64
import collections
import math
import random
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from orchestrator import foreign, manifest, shard
from orchestrator.errors import CannotRestore, CheckpointBroken, nearest
from orchestrator.manifest import Manifest

DTYPES: dict[torch.dtype, str] = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
    torch.uint16: "U16", torch.uint32: "U32", torch.uint64: "U64", torch.complex64: "C64",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
}  # fmt: skip
"""What a safetensors file can hold, by the names of its format."""

SCALARS = (str, int, bool, type(None))
NUMPY_DTYPE = re.compile(r"[<>|=]?[biufc]\d{1,2}")
MISFITS = (KeyError, IndexError, ValueError, TypeError, AttributeError, OverflowError)
"""What a load_state_dict raises that was given values of another form."""


@dataclass(slots=True)
class Captured:
    """Attributes:
    tree: JSON of what is tracked, the tensors cut out; of modules and optimizers, which are the same on every rank.
    own_tree: the same of all else (schedulers, scalers, samplers, generators), which each rank keeps for itself.
    tensors: by path, as they lie on the device; not copied.
    own: paths of the tensors that each rank keeps for itself: those of own_tree, and buffers of modules (BatchNorm's
        differ between ranks).
    """

    tree: dict[str, Any] = field(default_factory=dict)
    own_tree: dict[str, Any] = field(default_factory=dict)
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    own: set[str] = field(default_factory=set)


def unwrapped(value: Any) -> Any:
    """The person's module under DistributedDataParallel and torch.compile, so that names do not depend on them."""
    while isinstance(value, nn.Module):
        inner = getattr(value, "_orig_mod", None) or (
            value.module if isinstance(value, nn.parallel.DistributedDataParallel) else None
        )
        if inner is None:
            return value
        value = inner
    return value


def capture(tracked: Mapping[str, Any]) -> Captured:
    """Raises: CannotRestore, naming the first value that is neither a tensor nor plain."""
    captured = Captured()
    shared = {name: unwrapped(thing) for name, thing in tracked.items() if is_replicated(thing)}
    seen: dict[tuple[Any, ...], str] = {}
    for name, thing in shared.items():
        captured.tree[name] = _cut(thing.state_dict(), name, captured.tensors, seen)
        if isinstance(thing, nn.Module):
            captured.own.update(f"{name}.{buffer}" for buffer, _ in thing.named_buffers())
    captured.own &= captured.tensors.keys()
    seen, replicated = {}, set(captured.tensors)
    for name in tracked.keys() - shared.keys():
        captured.own_tree[name] = _cut(tracked[name].state_dict(), name, captured.tensors, seen)
    captured.own |= captured.tensors.keys() - replicated
    return captured


def tensors_in(tree: Any) -> Iterator[str]:
    """Paths of the tensors that were cut out of a captured tree."""
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
    """Modules and optimizers are the same on every rank of DistributedDataParallel; of anything else nobody can know."""
    return isinstance(thing, nn.Module | torch.optim.Optimizer)


def expected_sizes(tracked: Mapping[str, Any]) -> tuple[dict[str, int], int]:
    """Bytes of the state once training has begun: those of each replicated tensor by path, and all that are a rank's own.

    An optimizer without a state yet is taken to keep two values a parameter; plain SGD keeps one or none.
    """
    captured = capture(tracked)
    sizes = {name: tensor.nbytes for name, tensor in captured.tensors.items() if name not in captured.own}
    for name, thing in tracked.items():
        if isinstance(thing, torch.optim.Optimizer) and not thing.state:
            for group in thing.param_groups:
                kept = 2 if not isinstance(thing, torch.optim.SGD) else int(bool(group["momentum"]))
                for number, weight in enumerate(group["params"] * kept):
                    sizes[f"{name}.{id(group)}.{number}"] = weight.nbytes
    return sizes, sum(captured.tensors[name].nbytes for name in captured.own)


def restore(tracked: Mapping[str, Any], tree: Mapping[str, Any], fetch: Callable[[str], torch.Tensor]) -> None:
    """Put a captured tree back into the tracked objects; `fetch` gives a tensor by its path.

    Raises: CannotRestore when the checkpoint holds other names or shapes than the script tracks.
    """
    if tree.keys() != tracked.keys():
        raise CannotRestore(
            "the script tracks other things than the checkpoint holds",
            f"checkpoint: {', '.join(sorted(tree))}",
            f"script:     {', '.join(sorted(tracked))}",
            next_step="give session.track() the same names, or begin anew with `kgorch start PLAN --fresh`",
        )
    for name, thing in tracked.items():
        thing, state = unwrapped(thing), _join(tree[name], fetch, name)
        try:
            if isinstance(thing, nn.Module):
                _fill(name, thing, state)
            else:
                thing.load_state_dict(state)
        except MISFITS as error:
            raise CannotRestore(
                f"{name} does not take what the checkpoint holds", f"{type(error).__name__}: {error}"[:300]
            ) from error


def put_back(tracked: Mapping[str, Any], before: Captured, copies: Mapping[str, torch.Tensor]) -> None:
    """Undo what was done to the tracked objects since `before` was captured.

    Into the tensors that are there, where nothing else has changed: an optimizer that loads a state has it twice on its device
    for a moment.

    Args:
        copies: of the tensors at that time, by path.
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
    for name in only_groups:  # a schedule has changed the rate
        groups = _join(trees[name]["param_groups"], now.tensors.__getitem__, name)
        for group, values in zip(tracked[name].param_groups, groups, strict=True):
            group.update({key: value for key, value in values.items() if key != "params"})
    for name in reload - only_groups:
        restore({name: tracked[name]}, {name: trees[name]}, copies.__getitem__)


def _fill(name: str, module: nn.Module, state: dict[str, Any]) -> None:
    """Into the module's own state_dict, which keeps the version metadata that load_state_dict reads."""
    own = module.state_dict()
    if not isinstance(state, dict):
        raise CannotRestore(f"{name} is no table in the checkpoint")
    if own.keys() != state.keys():
        strange = sorted(own.keys() ^ state.keys())[0]
        raise CannotRestore(
            f"{name} is another model than the one in the checkpoint",
            f"only in the script: {len(own.keys() - state.keys())} names; only in the checkpoint: {len(state.keys() - own.keys())}",
            f"the first: {strange!r:.200}{nearest(strange, state.keys() if strange in own else own.keys())}",
        )
    tensors = {key: value for key, value in own.items() if isinstance(value, torch.Tensor)}
    if strays := [key for key in tensors if not isinstance(state[key], torch.Tensor)]:
        raise CannotRestore(f"{name}.{strays[0]} is no tensor in the checkpoint")
    if other := [key for key, value in tensors.items() if value.shape != state[key].shape]:
        shapes = ", ".join(f"{key}: {tuple(state[key].shape)} → {tuple(own[key].shape)}" for key in other[:3])
        raise CannotRestore(
            f"{len(other)} of {len(tensors)} tensors of {name} have another shape than in the checkpoint: {shapes}",
            next_step="put back the arguments that it was trained with, or begin anew with `kgorch start PLAN --fresh`",
        )
    own.update({key: state[key] for key in own})
    module.load_state_dict(own)


def _cut(value: Any, path: str, tensors: dict[str, torch.Tensor], seen: dict[tuple[Any, ...], str]) -> Any:
    def deeper(item: Any, key: Any) -> Any:
        return _cut(item, f"{path}.{key}", tensors, seen)

    if isinstance(value, torch.Tensor):
        return {"$tensor": _keep(value.detach(), path, tensors, seen)}
    if type(value) in SCALARS:
        return value
    if type(value) is float:
        return value if math.isfinite(value) else {"$float": repr(value)}
    if type(value) is list:
        return [deeper(item, index) for index, item in enumerate(value)]
    if type(value) is tuple:
        return {"$tuple": [deeper(item, index) for index, item in enumerate(value)]}
    if type(value) is collections.Counter:
        return {"$counter": [[_cut(key, path, tensors, seen), count] for key, count in value.items()]}
    if isinstance(value, dict):
        if all(type(key) is str and not key.startswith("$") for key in value):
            return {key: deeper(item, key) for key, item in value.items()}
        return {"$dict": [[_cut(key, path, tensors, seen), deeper(item, key)] for key, item in value.items()]}
    if type(value) is bytes:
        return {"$bytes": base64.b64encode(value).decode()}
    numpy = sys.modules.get("numpy")
    if numpy and isinstance(value, numpy.ndarray | numpy.generic) and value.dtype.kind in "biufc":
        shape = list(value.shape) if isinstance(value, numpy.ndarray) else None
        return {"$numpy": [value.dtype.str, shape, base64.b64encode(value.tobytes()).decode()]}
    raise CannotRestore(
        f"{path} is a {type(value).__module__}.{type(value).__qualname__}, which a checkpoint cannot hold",
        "a state_dict may hold tensors, numbers, text, bytes, lists, tuples, dicts and numpy arrays",
        next_step=f"leave it out of the state_dict, or give it as plain values: {value!r:.80}",
    )


def _keep(tensor: torch.Tensor, path: str, tensors: dict[str, torch.Tensor], seen: dict[tuple[Any, ...], str]) -> str:
    if tensor.layout is not torch.strided or tensor.dtype not in DTYPES or tensor.is_meta:
        raise CannotRestore(
            f"{path} is a {tensor.dtype} tensor ({tensor.layout}, {tensor.device}): only dense tensors of plain types can be saved",
            next_step="keep it as a dense tensor",
        )
    identity = (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride(), tensor.device.index)
    if identity in seen and tensor.numel():
        return seen[identity]
    while path in tensors:
        path += "~"
    if (wrong := shard.misnamed(path)) or len(tensors) >= shard.MAX_TENSORS:
        raise CannotRestore(
            f"the tensor {path!r:.200} {wrong or f'is one of more than {shard.MAX_TENSORS}'}, which a shard cannot hold",
            next_step="give the state_dict other keys, or stack small tensors",
        )
    tensors[path] = tensor
    seen[identity] = path
    return path


def _join(value: Any, fetch: Callable[[str], torch.Tensor], path: str) -> Any:
    """Values out of JSON that may come from anywhere, nested no deeper than foreign.parse lets pass.

    Raises: CannotRestore, naming the place.
    """
    if isinstance(value, list):
        return [_join(item, fetch, f"{path}.{index}") for index, item in enumerate(value)]
    if not isinstance(value, dict):
        return value
    if not any(key.startswith("$") for key in value):
        return {key: _join(item, fetch, f"{path}.{key}") for key, item in value.items()}
    try:
        return _untagged(value, fetch, path)
    except (ValueError, TypeError) as error:
        raise CannotRestore(
            f"{path!r:.200} is no value that kgorch has written",
            f"{error} in {value!r:.80}",
            next_step="use another checkpoint",
        ) from None


def _untagged(value: dict[str, Any], fetch: Callable[[str], torch.Tensor], path: str) -> Any:
    match tuple(value.items()):
        case (("$tensor", str(name)),):
            return fetch(name)
        case (("$float", "inf" | "-inf" | "nan" as text),):
            return float(text)
        case (("$tuple", list(items)),):
            return tuple(_join(items, fetch, path))
        case (("$counter", list(items)),):
            if strange := [count for _, count in items if type(count) not in (int, float)]:
                raise ValueError(f"a count is {strange[0]!r:.80}")
            return collections.Counter(_table(items, lambda count: count, fetch, path))
        case (("$dict", list(items)),):
            return _table(items, lambda item: _join(item, fetch, path), fetch, path)
        case (("$bytes", str(text)),):
            return base64.b64decode(text, validate=True)
        case (("$numpy", [str(dtype), shape, str(text)]),):
            return _numpy(dtype, shape, base64.b64decode(text, validate=True))
    raise ValueError("no such form")


def _table(
    items: list[Any], value_of: Callable[[Any], Any], fetch: Callable[[str], torch.Tensor], path: str
) -> dict[Any, Any]:
    found = {_join(key, fetch, path): value_of(item) for key, item in items}
    if len(found) != len(items):
        raise ValueError("a key stands twice")
    return found


def _numpy(dtype: str, shape: Any, content: bytes) -> Any:
    import numpy

    if not NUMPY_DTYPE.fullmatch(dtype):
        raise ValueError(f"no plain numbers: {dtype!r:.80}")
    plain = numpy.dtype(dtype)
    if shape is not None and not shard.is_shape(shape):
        raise ValueError(f"not a shape: {shape!r:.80}")
    if math.prod(shape or []) * plain.itemsize != len(content) or (plain.kind == "b" and max(content, default=0) > 1):
        raise ValueError(f"{dtype} {shape!r:.80} in {len(content)} bytes")
    array = numpy.ndarray(shape or (), plain, bytearray(content))
    return array[()] if shape is None else array


class Shards:
    """The tensors of a checkpoint folder, as one rank sees them: its own where it has them, else rank 0's.

    Raises: CheckpointBroken, CheckpointUnreadable.
    """

    def __init__(self, folder: Path, described: Manifest, rank: int) -> None:
        self._folder = folder
        self._files: dict[str, Any] = {}
        order = manifest.shards(described)
        for name in [name for name in order if name == f"rank{rank}.safetensors"] + order:
            try:
                with foreign.open_file(folder, name) as file:
                    shard.header(file, folder / name)
                    opened: Any = safe_open(f"/proc/self/fd/{file.fileno()}", framework="pt")  # the very file looked at
            except OSError as error:
                raise foreign.verdict(error, f"{folder / name} cannot be read", str(error)) from None
            except SafetensorError as error:
                raise CheckpointBroken(f"{folder / name} is not a shard", str(error)[:300]) from None
            for tensor in opened.keys():  # noqa: SIM118  (no dict)
                self._files.setdefault(tensor, opened)

    def fetch(self, name: str) -> torch.Tensor:
        if name not in self._files:
            raise CannotRestore(f"the checkpoint's shards lack the tensor {name!r:.200}")
        tensor: torch.Tensor = self._files[name].get_tensor(name)
        if tensor.dtype is torch.bool and tensor.numel() and int(tensor.view(torch.uint8).max()) > 1:
            raise CheckpointBroken(f"{name!r:.200} in {self._folder} holds bytes that are neither true nor false")
        return tensor


def rng_state(device: torch.device) -> dict[str, Any]:
    """The random states of this rank's libraries, as plain JSON."""
    tree: dict[str, Any] = plain(quick_rng_state(device), "rng")
    return tree


def quick_rng_state(device: torch.device) -> dict[str, Any]:
    """The same as the libraries give it: some 50 µs."""
    states: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state().numpy().tobytes()}
    if numpy := sys.modules.get("numpy"):
        states["numpy"] = numpy.random.get_state()
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device).numpy().tobytes()
    return states


def plain(value: Any, path: str) -> Any:
    """A value without tensors as plain JSON. Raises: CannotRestore, naming the place, for what a checkpoint cannot hold."""
    return _cut(value, path, {}, {})


def from_plain(tree: Any, path: str) -> Any:
    """What `plain` was given. Raises: CannotRestore."""

    def no_tensor(name: str) -> torch.Tensor:
        raise ValueError(f"a tensor {name!r:.80} among random states")

    return _join(tree, no_tensor, path)


def set_rng_state(tree: Any, device: torch.device) -> None:
    """Raises: CannotRestore."""
    try:
        states = from_plain(tree, "rng")
        random.setstate(python_state(states["python"]))
        torch.set_rng_state(as_tensor(states["torch"]))
        if "numpy" in states:
            _set_numpy(states["numpy"])
        if "cuda" in states and device.type == "cuda":
            torch.cuda.set_rng_state(as_tensor(states["cuda"]), device)
    except (*MISFITS, RuntimeError) as error:
        raise CannotRestore(
            "the checkpoint's random states cannot be set", f"{type(error).__name__}: {error}"[:300]
        ) from None


def renew_dropout_state(device: torch.device) -> None:
    """Make the dropout state that cuDNN keeps for RNNs a function of the CUDA generator again, before a step.

    cuDNN draws that state from the generator once a process and goes on from it by itself, so a resumed process would draw other
    masks, and one number more. Setting the generator's state, even to what it is, has the next forward draw it anew.
    """
    torch.cuda.set_rng_state(torch.cuda.get_rng_state(device), device)


def as_tensor(state: Any) -> torch.Tensor:
    """The state of a generator of PyTorch out of its bytes."""
    if type(state) is not bytes or not state:
        raise TypeError(f"expected bytes, found {state!r:.80}")
    return torch.frombuffer(bytearray(state), dtype=torch.uint8)


def python_state(state: Any) -> tuple[Any, ...]:
    """The same, looked at: Python's generator believes what it is told."""
    version, words, gauss = state
    if version != 3 or type(words) is not tuple or not all(type(word) is int and 0 <= word < 1 << 32 for word in words):
        raise ValueError("not a state of python's generator")
    if gauss is not None and type(gauss) is not float:
        raise TypeError(f"expected a number, found {gauss!r:.80}")
    return version, words, gauss


def _set_numpy(state: Any) -> None:
    """numpy believes the position that it is told and reads there, so it is looked at first."""
    import numpy

    name, words, position, has_gauss, gauss = state
    if (
        name != "MT19937"
        or not (isinstance(words, numpy.ndarray) and words.dtype == numpy.uint32 and words.shape == (624,))
        or type(position) is not int
        or not 0 <= position <= 624
        or has_gauss not in (0, 1)
        or type(gauss) is not float
    ):
        raise ValueError("not a state of numpy's generator")
    numpy.random.set_state((name, words, position, has_gauss, gauss))
