"""What a session continues from, readable before `session.track()`; and the plain values that a script has remembered."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from kgorch.checkpoint.manifest import Position
from kgorch.errors import CannotRestore, KgorchError
from kgorch.worker import tagged_json
from kgorch.worker.checkpoint.restore_source import RestoreSource
from kgorch.worker.tagged_json import TensorTable

MOST_BYTES = 1 << 16
"""Limit of the remembered values as JSON: every rank writes them into every checkpoint and snapshot."""


class RememberedValues:
    """Plain values that a checkpoint holds besides what is tracked.

    Attributes:
        values: by name, as tagged JSON (tagged_json.py).
    """

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}

    def update(self, values: Mapping[str, Any]) -> None:
        """Keep copies of the values. Raises: KgorchError for a tensor or an object, and for more than MOST_BYTES."""
        advice = "it takes numbers, texts, lists and dicts; give tensors and objects to session.track()"
        tensors: dict[str, torch.Tensor] = {}
        try:
            encoded = {name: tagged_json.extract(value, name, TensorTable(tensors)) for name, value in values.items()}
        except CannotRestore as error:
            raise KgorchError(
                f"session.remember({', '.join(values)}): {error}", next_step=advice, error_code="KG204"
            ) from None
        if tensors:
            raise KgorchError(f"session.remember(): {min(tensors)} is a tensor", next_step=advice, error_code="KG204")
        if (size := len(json.dumps(self.values | encoded))) > MOST_BYTES:
            raise KgorchError(
                f"session.remember(): {size:,} bytes of values; it keeps at most {MOST_BYTES:,}", error_code="KG204"
            )
        self.values |= encoded


class ResumedState(Mapping[str, Any]):
    """What the session continues from: the remembered values by name.

    False where the stage begins in this session; true where it continues, even if nothing was remembered.

    Attributes:
        step: optimizer steps that are done.
        epoch: epochs that are done.
        is_finished: the stage's last checkpoint is the source, so no step is left.
    """

    def __init__(self, source: RestoreSource | None, rank: int, *, extends: bool = False) -> None:
        self._source, self._rank = source, rank
        self._own = source.own(rank) if source else {}
        at = source.manifest.position if source else Position()
        self.step, self.epoch = at.step, at.epoch
        self.is_finished = bool(source and source.manifest.final and not extends)
        remembered = self._own.get("remembered", {})
        self._values = remembered if isinstance(remembered, dict) else {}

    @property
    def names(self) -> set[str]:
        """Names of what was tracked; empty where the stage begins."""
        return {*self._source.tree, *self._own.get("own", {})} if self._source else set()

    def state(self, name: str) -> Any:
        """The state_dict of the tracked object of that name, as it was saved.

        For objects that need it to be built. Modules and optimizers are the same on every rank; other objects have a state on
        each. Tensors come whole, also those that were sharded. Call it before the first step: the checkpoint may be deleted
        once there are newer ones, and the buffer of a snapshot is filled again.

        Raises:
            KeyError: nothing of that name was tracked, or the stage begins.
            KgorchError: it cannot be read any more.
        """
        source = self._source
        if source is None:
            raise KeyError(name)
        own = self._own.get("own", {})
        tree = own[name] if name in own else source.tree[name]
        try:
            value = tagged_json.insert(tree, tagged_json.kept(source.reader(self._rank).fetch), name)
        except Exception:
            if source.is_readable():
                raise
        else:
            if source.is_readable():
                return value
        raise KgorchError(
            f"session.resumed.state({name!r:.200}): what this session has continued from is not there any more",
            next_step="call it before the first step, and keep what it returns",
        )

    def place_of(self, loader: str) -> tuple[int, int]:
        """(epochs that are done, batches of the next one) of the followed loader of that name; zeros where it was not followed."""
        try:
            place = self._own["loaders"][loader]
            return int(place["epoch"]), int(place["batches"])
        except (KeyError, TypeError, ValueError):
            return 0, 0

    def __bool__(self) -> bool:
        return self._source is not None

    def __getitem__(self, name: str) -> Any:
        return tagged_json.decode(self._values[name], name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)
