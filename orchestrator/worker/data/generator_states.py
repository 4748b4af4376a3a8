"""States of the random generators that a loader holds (PyTorch's, NumPy's and Python's) as plain JSON, and back.

NumPy trusts the state that it is given, and reads beyond its table at a wrong position. A checkpoint may come from anywhere. So a
state is set only if it has the structure of the generator's current one, with every number in its range.
"""

from __future__ import annotations

import random
import sys
from typing import Any

import torch

from kgorch.errors import CannotRestore
from kgorch.worker import rng_state, tagged_json

BIT_GENERATORS = frozenset({"MT19937", "PCG64", "PCG64DXSM", "SFC64", "Philox"})

MOST = {"pos": 624, "buffer_pos": 4, "has_uint32": 1, "uinteger": (1 << 32) - 1, "has_gauss": 1}
"""Largest values of the numbers in their states; 128 bits for all others."""


def state_of(generator: Any) -> Any:
    """The state as plain JSON. Raises: CannotRestore for a generator whose state cannot be read."""
    return tagged_json.encode(raw_state_of(generator), "generator")


def set_state(generator: Any, saved: Any) -> None:
    """Set a state of `state_of`. Raises: CannotRestore for anything else; the generator is then unchanged."""
    try:
        state = tagged_json.decode(saved, "generator")
        if isinstance(generator, torch.Generator):
            generator.set_state(rng_state.as_tensor(state))
        elif isinstance(generator, random.Random):
            generator.setstate(rng_state.python_state(state))
        else:
            _compare(state, _read_numpy(generator))
            if isinstance(generator, sys.modules["numpy"].random.RandomState):
                generator.set_state(state)
            else:
                _bits(generator).state = state
    except (*tagged_json.MISFITS, RuntimeError) as error:
        raise CannotRestore(
            f"a random state of the loader does not fit a {type(generator).__name__}",
            f"{type(error).__name__}: {error}"[:300],
        ) from None


class TrackedGenerator:
    """A random generator of Python, NumPy or PyTorch."""

    def __init__(self, generator: Any) -> None:
        self._generator = generator

    def state_dict(self) -> dict[str, Any]:
        """Raises: CannotRestore for one whose state cannot be read."""
        return {"state": state_of(self._generator)}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Raises: CannotRestore for a state of another kind."""
        set_state(self._generator, saved.get("state"))


def encode(raw: Any) -> Any:
    """A state of `quick_state_of` as plain JSON."""
    return tagged_json.encode(raw.numpy().tobytes() if isinstance(raw, torch.Tensor) else raw, "generator")


def quick_state_of(generator: Any) -> Any:
    """The state in the form that is quickest to get, a tensor of a torch.Generator. Raises: CannotRestore."""
    return generator.get_state() if type(generator) is torch.Generator else raw_state_of(generator)


def raw_state_of(generator: Any) -> Any:
    """The state in the library's own types. Raises: CannotRestore."""
    try:
        if isinstance(generator, torch.Generator):
            return generator.get_state().numpy().tobytes()
        if isinstance(generator, random.Random):
            return generator.getstate()
        return _read_numpy(generator)
    except Exception as error:  # a subclass may raise anything
        raise CannotRestore(
            f"the state of a {type(generator).__name__} cannot be read", str(error), error_code="KG204"
        ) from None


def seed(generator: Any, value: int) -> None:
    """Begin anew from a seed of 63 bits."""
    if isinstance(generator, torch.Generator):
        generator.manual_seed(value)
    elif isinstance(generator, random.Random):
        generator.seed(value)
    else:
        numpy = sys.modules["numpy"]
        has_gauss = isinstance(generator, numpy.random.RandomState)
        kind = getattr(numpy.random, _read_numpy(generator)["bit_generator"])
        put_back(generator, kind(value).state | ({"has_gauss": 0, "gauss": 0.0} if has_gauss else {}))


def put_back(generator: Any, raw: Any) -> None:
    """Set a state of `quick_state_of` of this process."""
    if isinstance(generator, torch.Generator):
        generator.set_state(raw if isinstance(raw, torch.Tensor) else rng_state.as_tensor(raw))
    elif isinstance(generator, random.Random):
        generator.setstate(raw)
    elif isinstance(generator, sys.modules["numpy"].random.RandomState):
        generator.set_state(raw)
    else:
        _bits(generator).state = raw


def _read_numpy(generator: Any) -> dict[str, Any]:
    has_gauss = isinstance(generator, sys.modules["numpy"].random.RandomState)
    current: dict[str, Any] = generator.get_state(legacy=False) if has_gauss else _bits(generator).state
    if current["bit_generator"] not in BIT_GENERATORS:
        raise ValueError(f"{current['bit_generator']} is not a bit generator of NumPy itself")
    return current


def _bits(generator: Any) -> Any:
    return getattr(generator, "bit_generator", generator)


def _compare(saved: Any, own: Any, name: str = "") -> None:
    """Raises: ValueError where the two differ in structure, or a number is out of range."""
    numpy = sys.modules["numpy"]
    if isinstance(own, dict):
        if not isinstance(saved, dict) or saved.keys() != own.keys():
            raise ValueError(f"expected {', '.join(own)}")
        for key, value in own.items():
            _compare(saved[key], value, key)
    elif isinstance(own, numpy.ndarray):
        if not isinstance(saved, numpy.ndarray) or (saved.dtype, saved.shape) != (own.dtype, own.shape):
            raise ValueError(f"{name} is no table of {own.shape} {own.dtype}")
    elif isinstance(own, str):
        if saved != own:
            raise ValueError(f"expected a {own}, found {saved!r:.80}")
    elif isinstance(own, float):
        if type(saved) is not float:
            raise ValueError(f"{name} is {saved!r:.80}")
    elif type(saved) is not int or not 0 <= saved <= MOST.get(name, (1 << 128) - 1):
        raise ValueError(f"{name} is {saved!r:.80}")
