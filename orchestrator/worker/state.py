"""Everything that a training must remember, cut into named tensors and plain JSON, and put together again.

`capture` walks the state_dicts of what the script tracks. Tensors leave the tree under their dotted path
(`model.encoder.0.weight`, `optimizer.state.0.exp_avg`) and stand in it as `{"$tensor": path}`; a tensor met twice
(tied weights) is kept once and named twice. All else must be plain values: what JSON lacks (tuples, bytes, inf, keys
that are no text, numpy values) is tagged, and what does not fit is refused by name. Nothing is ever pickled.
"""

from __future__ import annotations

import base64
import collections
import json
import math
import random
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import nn

from orchestrator import manifest
from orchestrator.errors import CannotRestore, nearest
from orchestrator.manifest import Manifest

DTYPES: dict[torch.dtype, str] = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
    torch.uint16: "U16", torch.uint32: "U32", torch.uint64: "U64", torch.complex64: "C64",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
}  # fmt: skip
"""What a safetensors file can hold, by the names of its format."""

SCALARS = (str, int, bool, type(None))


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
        thing, state = unwrapped(thing), _join(tree[name], fetch)
        if isinstance(thing, nn.Module):
            _fill(name, thing, state)
        else:
            thing.load_state_dict(state)


def _fill(name: str, module: nn.Module, state: dict[str, Any]) -> None:
    """Into the module's own state_dict, which keeps the version metadata that load_state_dict reads."""
    own = module.state_dict()
    if own.keys() != state.keys():
        strange = sorted(own.keys() ^ state.keys())[0]
        raise CannotRestore(
            f"{name} is another model than the one in the checkpoint",
            f"only in the script: {len(own.keys() - state.keys())} names; only in the checkpoint: {len(state.keys() - own.keys())}",
            f"the first: {strange}{nearest(strange, state.keys() if strange in own else own.keys())}",
        )
    for key, value in own.items():
        if isinstance(value, torch.Tensor) and value.shape != state[key].shape:
            raise CannotRestore(
                f"{name}.{key} has another shape than in the checkpoint",
                f"script {tuple(value.shape)}, checkpoint {tuple(state[key].shape)}",
            )
        own[key] = state[key]
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
    identity = (tensor.device, tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride())
    if tensor.numel() and identity in seen:
        return seen[identity]
    while path in tensors:
        path += "~"
    tensors[path] = tensor
    seen[identity] = path
    return path


def _join(value: Any, fetch: Callable[[str], torch.Tensor]) -> Any:
    if isinstance(value, list):
        return [_join(item, fetch) for item in value]
    if not isinstance(value, dict):
        return value
    match tuple(value.items()):
        case (("$tensor", name),):
            return fetch(name)
        case (("$float", text),):
            return float(text)
        case (("$tuple", items),):
            return tuple(_join(item, fetch) for item in items)
        case (("$counter", items),):
            return collections.Counter({_join(key, fetch): count for key, count in items})
        case (("$dict", items),):
            return {_join(key, fetch): _join(item, fetch) for key, item in items}
        case (("$bytes", text),):
            return base64.b64decode(text)
        case (("$numpy", [dtype, shape, text]),):
            import numpy

            flat = numpy.frombuffer(base64.b64decode(text), dtype=numpy.dtype(str(dtype)))
            return flat[0] if shape is None else flat.reshape(shape).copy()
    return {key: _join(item, fetch) for key, item in value.items()}


class Shards:
    """The tensors of a checkpoint folder, as one rank sees them: its own where it has them, else rank 0's."""

    def __init__(self, folder: Path, described: Manifest, rank: int) -> None:
        self._files: dict[str, Any] = {}
        order = manifest.shards(described)
        mine = [name for name in order if name == f"rank{rank}.safetensors"]
        for path in (folder / name for name in mine + order):
            file: Any = safe_open(path, framework="pt")
            for name in file.keys():  # noqa: SIM118  (no dict)
                self._files.setdefault(name, file)

    def fetch(self, name: str) -> torch.Tensor:
        if name not in self._files:
            raise CannotRestore(f"the checkpoint's shards lack the tensor {name}")
        tensor: torch.Tensor = self._files[name].get_tensor(name)
        return tensor


def rng_state(device: torch.device) -> dict[str, Any]:
    """The random states of this rank's libraries, as plain JSON."""
    states: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state().numpy().tobytes()}
    if numpy := sys.modules.get("numpy"):
        states["numpy"] = numpy.random.get_state()
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device).numpy().tobytes()
    tree: dict[str, Any] = _cut(states, "rng", {}, {})
    return tree


def set_rng_state(tree: Mapping[str, Any], device: torch.device) -> None:
    states = _join(dict(tree), lambda name: torch.empty(0))
    random.setstate(states["python"])
    torch.set_rng_state(torch.frombuffer(bytearray(states["torch"]), dtype=torch.uint8))
    if "numpy" in states:
        import numpy

        numpy.random.set_state(states["numpy"])
    if "cuda" in states and device.type == "cuda":
        torch.cuda.set_rng_state(torch.frombuffer(bytearray(states["cuda"]), dtype=torch.uint8), device)


def read_json(path: Path) -> Any:
    return json.loads(path.read_bytes())
