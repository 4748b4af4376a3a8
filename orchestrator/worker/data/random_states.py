"""The random states that reads of a loader depend on: those of the libraries, and of the generators that the loader holds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from kgorch.errors import CannotRestore
from kgorch.worker import rng_state
from kgorch.worker.data import generator_states
from kgorch.worker.rng_state import RandomStates

QuickStates = tuple[RandomStates, dict[str, Any]]
"""Of the libraries, and of the generators by path, in their own types."""


class LoaderRandomStates:
    """The random states of this process's libraries, and of the generators inside a loader.

    Apart from LoaderFastForward, so that the watch of an epoch does not refer to it, which refers to the watch: see there.

    Attributes:
        generators: by path.
        lost: sentences about generators whose state could not be set.
    """

    def __init__(self, device: torch.device, held: Mapping[str, Any]) -> None:
        self._device, self.generators = device, held
        self._cache = rng_state.shared_cache(device)
        self.lost: list[str] = []

    def quick(self) -> QuickStates:
        """The states of the libraries and of the generators, in their own types."""
        held = {path: generator_states.quick_state_of(item) for path, item in self.generators.items()}
        return self._cache.now(), held

    def held(self) -> dict[str, Any]:
        """The states of the generators, as plain JSON."""
        return {path: generator_states.state_of(item) for path, item in self.generators.items()}

    def now(self) -> dict[str, Any]:
        """All states, as plain JSON."""
        return plain(*self.quick())

    def set(self, saved: Mapping[str, Any]) -> None:
        """Set the states of the libraries and of the generators. Raises: CannotRestore."""
        self.set_held(saved)
        rng_state.restore(saved.get("rng"), self._device)

    def set_held(self, saved: Mapping[str, Any]) -> None:
        """Set the states of the generators alone. Raises: CannotRestore."""
        if not isinstance(saved.get("generators"), dict):
            raise CannotRestore("the checkpoint's random states of a loader cannot be read")
        for path in self.generators.keys() & saved["generators"].keys():
            self.set_one(path, saved["generators"][path])

    def set_one(self, path: str, saved: Any) -> None:
        try:
            generator_states.set_state(self.generators[path], saved)
        except CannotRestore:
            self.lost.append(f"{path} is another kind of generator than it was")


def plain(libraries: RandomStates, held: Mapping[str, Any]) -> dict[str, Any]:
    """States of `LoaderRandomStates.quick` as plain JSON."""
    return {
        "rng": rng_state.encode(libraries),
        "generators": {path: generator_states.encode(saved) for path, saved in held.items()},
    }
