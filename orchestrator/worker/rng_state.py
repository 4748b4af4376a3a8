"""The random states of a rank's libraries (python, numpy, torch, CUDA) as plain JSON, and back.

A checkpoint may come from anywhere, and the generators of Python and NumPy trust the state that they are given: NumPy would read
beyond its table at a wrong position. So every state is validated before it is set.
"""

from __future__ import annotations

import _random
import array
import ctypes
import functools
import random
import sys
from typing import Any, NamedTuple

import torch

from kgorch.errors import CannotRestore
from kgorch.worker import tagged_json

LOOK_BYTES = 64
"""Of a Mersenne Twister: its position and 15 of the numbers of its table, to see whether it has changed."""


SavedStates = tuple[Any, torch.Tensor, Any]
"""Of Python, PyTorch and NumPy, as HostGenerators.save has them; None for NumPy where it was not imported."""


class RandomStates(NamedTuple):
    """The random states in the libraries' own types, as RngCache gives them.

    Attributes:
        torch: of the CPU's generator; shape (bytes,), uint8.
        python, numpy: as their modules take them; numpy None where that is not imported.
        cuda: as `torch`; None on the CPU.
    """

    torch: torch.Tensor
    python: Any
    numpy: Any
    cuda: torch.Tensor | None


def capture(device: torch.device) -> dict[str, Any]:
    """The random states as plain JSON."""
    return encode(shared_cache(device).now())


def encode(states: RandomStates) -> dict[str, Any]:
    """The states as plain JSON."""
    raw: dict[str, Any] = {"python": states.python, "torch": states.torch.numpy().tobytes()}
    if states.numpy is not None:
        raw["numpy"] = states.numpy
    if states.cuda is not None:
        raw["cuda"] = states.cuda.numpy().tobytes()
    tree: dict[str, Any] = tagged_json.encode(raw, "rng")
    return tree


def restore(tree: Any, device: torch.device) -> None:
    """Set the random states that `capture` returned. Raises: CannotRestore."""
    try:
        states = tagged_json.decode(tree, "rng")
        random.setstate(python_state(states["python"]))
        torch.set_rng_state(as_tensor(states["torch"]))
        if "numpy" in states:
            _set_numpy(states["numpy"])
        if "cuda" in states and device.type == "cuda":
            torch.cuda.set_rng_state(as_tensor(states["cuda"]), device)
    except (*tagged_json.MISFITS, RuntimeError) as error:
        raise CannotRestore(
            "the checkpoint's random states cannot be set", f"{type(error).__name__}: {error}"[:300]
        ) from None


def renew_dropout_state(device: torch.device) -> None:
    """Make cuDNN's dropout state for RNNs a function of the CUDA generator again; call it before a step.

    cuDNN draws that state from the generator once a process and advances it by itself, so a resumed process would draw other
    masks, and one number more. Setting the generator's state, even to its current value, makes the next forward draw it again.
    """
    torch.cuda.set_rng_state(torch.cuda.get_rng_state(device), device)


class RngCache:
    """The process's random states, captured at every step at little cost."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._host = device, host_generators()
        self._is_on_cuda, self._torch_now = device.type == "cuda", torch.default_generator.get_state

    def now(self) -> RandomStates:
        """The current states."""
        cuda = torch.cuda.get_rng_state(self._device) if self._is_on_cuda else None
        return RandomStates(self._torch_now(), *self._host.now(), cuda)

    def back_to(self, saved: RandomStates) -> None:
        """Set states of `now`."""
        torch.set_rng_state(saved.torch)
        random.setstate(saved.python)
        if saved.numpy is not None:
            sys.modules["numpy"].random.set_state(saved.numpy)
        if saved.cuda is not None:
            torch.cuda.set_rng_state(saved.cuda, self._device)


class HostGenerators:
    """The generators of Python, NumPy and PyTorch on the CPU: their states, copied only when they have changed, and put back.

    A state of Python is a tuple of 625 numbers, and one of NumPy a new table: in the middle of a training each takes some 40 µs.
    What tells a change: the position in the table, which each draw moves, and 15 of its 624 numbers. All of them are new after 624
    draws, or with another seed, so the chance that these are the same is 1 in 2**480. The whole table would be read from memory
    each time, because the steps between two looks fill the caches.
    """

    def __init__(self) -> None:
        self._generator: Any = vars(random)["_inst"]
        # In its object the position and the table follow the reference count and the type.
        self._table = self._memory = _memory_of(self._generator, _random.Random)
        *words, position = random.getstate()[1]
        self._is_known = self._table.raw[: 625 * 4] == array.array("I", [position, *words]).tobytes()
        if self._is_known:
            self._memory = (ctypes.c_char * LOOK_BYTES).from_buffer(self._table)
        self._python: tuple[Any, Any] = None, None
        self._numpy: NumpyCache | None = None

    def now(self) -> tuple[Any, Any]:
        """The states of Python and NumPy, as their modules take them; None for NumPy where it is not imported."""
        # Normal values are drawn in pairs: the second one waits in an attribute.
        key = self._memory.raw, self._generator.gauss_next
        known, state = self._python
        if key != known:
            state = random.getstate()
            self._python = key, state
        if self._numpy is None:
            if "numpy" not in sys.modules:
                return state, None
            self._numpy = NumpyCache(sys.modules["numpy"])
        return state, self._numpy.now()

    def save(self) -> SavedStates:
        """The states, for `restore` in this process: tables as bytes, 10 µs in place of 100."""
        python = (self._table.raw, self._generator.gauss_next) if self._is_known else random.getstate()
        _, numpy_state = self.now()
        return python, torch.get_rng_state(), None if numpy_state is None else self._numpy.save()  # type: ignore[union-attr]

    def restore(self, saved: SavedStates) -> None:
        """Set states of `save`. One of NumPy stays as it is where NumPy has been imported since."""
        python, torch_state, numpy_state = saved
        torch.set_rng_state(torch_state)
        if not self._is_known:
            random.setstate(python)
        else:
            self._table.raw, self._generator.gauss_next = python
        if numpy_state is not None and self._numpy is not None:
            self._numpy.restore(numpy_state)


class NumpyCache:
    """The state of NumPy's global generator. It holds what it looks at, so that the memory is not another object's."""

    def __init__(self, numpy: Any) -> None:
        self._random, self._generator = numpy.random, numpy.random.mtrand._rand
        # Among its fields: the second normal value of a pair, and which bit generator it uses (numpy.random.set_bit_generator).
        self._fields = _memory_of(self._generator, type(self._generator))
        self._bits: Any = None
        self._table: Any = None  # the end of _whole, its table and the position
        self._whole: Any = None
        self._state: tuple[Any, Any, Any] = None, None, None

    def now(self) -> Any:
        """The state, as numpy.random.set_state takes it."""
        fields, table, state = self._state
        if self._table is None or self._fields.raw != fields or self._table.raw != table:
            state = self._renew()
        return state

    def save(self) -> Any:
        """The state, for `restore`."""
        state = self.now()
        return state, self._fields.raw, self._whole.raw if self._whole else None

    def restore(self, saved: Any) -> None:
        state, fields, table = saved
        if table is not None and self._whole is not None and self._fields.raw == fields:
            self._whole.raw = table
        else:  # a normal value waits, or another generator is used
            self._random.set_state(state)

    def _renew(self) -> Any:
        bits = self._generator._bit_generator
        if bits is not self._bits:
            self._bits, self._table, self._whole = bits, None, None
            if type(bits).__name__ == "MT19937":  # its table, and the position behind it
                self._whole = (ctypes.c_char * (625 * 4)).from_address(bits.ctypes.state_address)
                self._table = (ctypes.c_char * LOOK_BYTES).from_buffer(self._whole, 625 * 4 - LOOK_BYTES)
        state = self._random.get_state()
        self._state = self._fields.raw, self._table.raw if self._table else None, state
        return state


def _memory_of(thing: Any, kind: type) -> Any:
    """The memory of an object's fields that `kind` defines, without the reference count, which changes as it is looked at."""
    header = object.__basicsize__
    return (ctypes.c_char * (kind.__basicsize__ - header)).from_address(id(thing) + header)


@functools.cache
def host_generators() -> HostGenerators:
    """Those of this process."""
    return HostGenerators()


@functools.cache
def shared_cache(device: torch.device) -> RngCache:
    """The process's cache: reads and steps look at the same generators, so what one has copied serves the other."""
    return RngCache(device)


def as_tensor(state: Any) -> torch.Tensor:
    """The state of a torch.Generator from its bytes. Raises: TypeError."""
    if type(state) is not bytes or not state:
        raise TypeError(f"expected bytes, found {state!r:.80}")
    return torch.frombuffer(bytearray(state), dtype=torch.uint8)


def python_state(state: Any) -> tuple[Any, ...]:
    """A validated state for random.setstate, which checks little itself. Raises: ValueError, TypeError."""
    version, words, gauss = state
    if version != 3 or type(words) is not tuple or not all(type(word) is int and 0 <= word < 1 << 32 for word in words):
        raise ValueError("not a state of python's generator")
    if gauss is not None and type(gauss) is not float:
        raise TypeError(f"expected a number, found {gauss!r:.80}")
    return version, words, gauss


def _set_numpy(state: Any) -> None:
    """Set NumPy's global generator. It reads at the position that it is given, so the state is validated first."""
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
