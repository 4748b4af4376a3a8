"""Values of a state_dict as JSON, with the tensors taken out, and back.

Tensors leave the tree under their dotted path (`model.encoder.0.weight`) and are replaced by `{"$tensor": path}`. A tensor that
is met twice (tied weights) is stored once and named twice. What JSON lacks (tuples, bytes, inf, keys that are not text, NumPy
values, counters) is tagged: `{"$tuple": […]}`. Any other value is refused by name. Nothing is pickled, so decoding runs no code.
"""

from __future__ import annotations

import base64
import collections
import functools
import math
import re
import sys
from collections.abc import Callable, Container
from typing import Any

import torch

from kgorch.checkpoint import safetensors_header
from kgorch.errors import CannotRestore
from kgorch.worker import local_tensors

DTYPES: dict[torch.dtype, str] = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
    torch.uint16: "U16", torch.uint32: "U32", torch.uint64: "U64", torch.complex64: "C64",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
}  # fmt: skip
"""The types that a safetensors file can hold, with the names that its format gives them."""

SCALARS = (str, int, bool, type(None))
NUMPY_DTYPE = re.compile(r"[<>|=]?[biufc]\d{1,2}")
MISFITS = (KeyError, IndexError, ValueError, TypeError, AttributeError, OverflowError)
"""What a load_state_dict raises when it is given values of another structure."""

Fetch = Callable[[str], torch.Tensor]
"""Returns a tensor by its path."""


def kept(fetch: Fetch, copied: Container[str] = ()) -> Fetch:
    """A function that fetches tensors which are kept: aligned, and of one path (tied weights) the same tensor each time.

    A shard has no gaps, and what is fetched from it may be a view of the file.

    Args:
        copied: paths of tensors that are copied into existing memory instead; these need no copy of their own.
    """

    def fetch_kept(path: str) -> torch.Tensor:
        return fetch(path) if path in copied else local_tensors.aligned(fetch(path))

    return functools.cache(fetch_kept)


class TensorTable:
    """The tensors that `extract` has taken out of a tree.

    Attributes:
        tensors: by path, on their devices; not copied.
    """

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self.tensors = tensors
        self._paths: dict[tuple[Any, ...], str] = {}

    def add(self, tensor: torch.Tensor, path: str) -> str:
        """Store the tensor and return its path, which is an earlier one for a tied tensor.

        Raises:
            CannotRestore: a safetensors file cannot hold the tensor, its name or so many tensors.
        """
        if tensor.layout is not torch.strided or tensor.dtype not in DTYPES or tensor.is_meta:
            raise CannotRestore(
                f"{path} is a {tensor.dtype} tensor ({tensor.layout}, {tensor.device}):"
                " only dense tensors of plain types can be saved",
                next_step="keep it as a dense tensor",
                error_code="KG204",
            )
        identity = local_tensors.identity(tensor)
        if identity in self._paths and tensor.numel():
            return self._paths[identity]
        while path in self.tensors:
            path += "~"
        if (wrong := safetensors_header.name_error(path)) or len(self.tensors) >= safetensors_header.MAX_TENSORS:
            wrong = wrong or f"is one of more than {safetensors_header.MAX_TENSORS}"
            raise CannotRestore(
                f"the tensor {path!r:.200} {wrong}, which a shard cannot hold",
                next_step="give the state_dict other keys, or stack small tensors",
                error_code="KG204",
            )
        self.tensors[path] = tensor
        self._paths[identity] = path
        return path


def encode(value: Any, path: str) -> Any:
    """A value without tensors as plain JSON.

    Raises:
        CannotRestore: names the place of a value that a checkpoint cannot hold.
    """
    return extract(value, path, TensorTable({}))


def decode(tree: Any, path: str) -> Any:
    """The value that `encode` was given. Raises: CannotRestore."""

    def no_tensor(name: str) -> torch.Tensor:
        raise ValueError(f"a tensor {name!r:.80} among random states")

    return insert(tree, no_tensor, path)


def extract(value: Any, path: str, table: TensorTable) -> Any:
    """JSON of a value; its tensors are moved to `table`.

    Raises:
        CannotRestore: names the first value that is neither a tensor nor plain.
    """

    def deeper(item: Any, key: Any) -> Any:
        return extract(item, f"{path}.{key}", table)

    if isinstance(value, torch.Tensor):
        # An optimizer's DTensor as it is: detach() takes 50 µs there.
        is_plain = value.requires_grad or not local_tensors.is_sharded(value)
        return {"$tensor": table.add(value.detach() if is_plain else value, path)}
    if type(value) in SCALARS:
        return value
    if type(value) is float:
        return value if math.isfinite(value) else {"$float": repr(value)}
    if type(value) is list:
        return [deeper(item, index) for index, item in enumerate(value)]
    if type(value) is tuple:
        return {"$tuple": [deeper(item, index) for index, item in enumerate(value)]}
    if type(value) is collections.Counter:
        return {"$counter": [[extract(key, path, table), count] for key, count in value.items()]}
    if isinstance(value, dict):
        if all(type(key) is str and not key.startswith("$") for key in value):
            return {key: deeper(item, key) for key, item in value.items()}
        return {"$dict": [[extract(key, path, table), deeper(item, key)] for key, item in value.items()]}
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
        error_code="KG204",
    )


def is_savable(value: Any) -> bool:
    """Whether a checkpoint can hold the value."""
    try:
        extract(value, "value", TensorTable({}))
    except CannotRestore:
        return False
    return True


def insert(value: Any, fetch: Fetch, path: str) -> Any:
    """The value of a JSON tree, with the tensors put back.

    The JSON may come from anywhere; `untrusted_io.parse_json` has bounded its depth.

    Raises:
        CannotRestore: names the place of a tag that is malformed.
    """
    if isinstance(value, list):
        return [insert(item, fetch, f"{path}.{index}") for index, item in enumerate(value)]
    if not isinstance(value, dict):
        return value
    if not any(key.startswith("$") for key in value):
        return {key: insert(item, fetch, f"{path}.{key}") for key, item in value.items()}
    try:
        return _untagged(value, fetch, path)
    except (ValueError, TypeError) as error:
        raise CannotRestore(
            f"{path!r:.200} is not a value that kgorch has written",
            f"{error} in {value!r:.80}",
            next_step="use another checkpoint",
        ) from None


def _untagged(value: dict[str, Any], fetch: Fetch, path: str) -> Any:
    match tuple(value.items()):
        case (("$tensor", str(name)),):
            return fetch(name)
        case (("$float", "inf" | "-inf" | "nan" as text),):
            return float(text)
        case (("$tuple", list(items)),):
            return tuple(insert(items, fetch, path))
        case (("$counter", list(items)),):
            if strange := [count for _, count in items if type(count) not in (int, float)]:
                raise ValueError(f"a count is {strange[0]!r:.80}")
            return collections.Counter(_table(items, lambda count: count, fetch, path))
        case (("$dict", list(items)),):
            return _table(items, lambda item: insert(item, fetch, path), fetch, path)
        case (("$bytes", str(text)),):
            return base64.b64decode(text, validate=True)
        case (("$numpy", [str(dtype), shape, str(text)]),):
            return _numpy(dtype, shape, base64.b64decode(text, validate=True))
    raise ValueError("no such form")


def _table(items: list[Any], value_of: Callable[[Any], Any], fetch: Fetch, path: str) -> dict[Any, Any]:
    table = {insert(key, fetch, path): value_of(item) for key, item in items}
    if len(table) != len(items):
        raise ValueError("a key stands twice")
    return table


def _numpy(dtype: str, shape: Any, content: bytes) -> Any:
    import numpy

    if not NUMPY_DTYPE.fullmatch(dtype):
        raise ValueError(f"no plain numbers: {dtype!r:.80}")
    plain = numpy.dtype(dtype)
    if shape is not None and not safetensors_header.is_shape(shape):
        raise ValueError(f"not a shape: {shape!r:.80}")
    if math.prod(shape or []) * plain.itemsize != len(content) or (plain.kind == "b" and max(content, default=0) > 1):
        raise ValueError(f"{dtype} {shape!r:.80} in {len(content)} bytes")
    array = numpy.ndarray(shape or (), plain, bytearray(content))
    return array[()] if shape is None else array
