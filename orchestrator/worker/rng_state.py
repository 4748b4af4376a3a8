"""The random states of a rank's libraries (python, numpy, torch, CUDA) as plain JSON, and back.

A checkpoint may come from anywhere, and the generators of Python and NumPy trust the state that they are given: NumPy would read
beyond its table at a wrong position. So every state is validated before it is set.
"""

from __future__ import annotations

import random
import sys
from typing import Any

import torch

from kgorch.errors import CannotRestore
from kgorch.worker import tagged_json


def capture(device: torch.device) -> dict[str, Any]:
    """The random states as plain JSON."""
    tree: dict[str, Any] = tagged_json.encode(capture_raw(device), "rng")
    return tree


def capture_raw(device: torch.device) -> dict[str, Any]:
    """The random states in the libraries' own types: some 50 µs."""
    states: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state().numpy().tobytes()}
    if numpy := sys.modules.get("numpy"):
        states["numpy"] = numpy.random.get_state()
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device).numpy().tobytes()
    return states


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
