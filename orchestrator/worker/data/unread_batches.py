"""What leaves out the batches that an epoch of a DataLoader has used, when a resume goes on behind them.

The samplers' indices of these batches are drawn and not read. Then what reads depend on is set as it was: the random states of the
rank, and of each loading process (worker_states.py). So it is for loaders that read what their samplers say, a batch for each that
they give, and for datasets that do not change as they are read (dataset_changes.py).
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _DatasetKind

from kgorch.errors import CannotRestore
from kgorch.worker import rng_state
from kgorch.worker.data.dataset_changes import DatasetChanges
from kgorch.worker.data.loader_reads import ReadWatch
from kgorch.worker.data.loader_search import LoaderParts
from kgorch.worker.data.worker_states import WorkerStates

ACCELERATES = "accelerate.data_loader", "DataLoaderShard"
"""Accelerate's loader, which reads the batches of a DataLoader one ahead, and gives them as they are."""

CHANGES = "the dataset changes as it is read ({}), so a resume reads again what the epoch has used"

_kept: weakref.WeakKeyDictionary[DataLoader[Any], WorkerStates] = weakref.WeakKeyDictionary()
"""Of the loading processes that stay from one epoch to the next."""

_are_unchanged: weakref.WeakSet[DataLoader[Any]] = weakref.WeakSet()
"""Those whose datasets were found unchanged, in this or an earlier epoch."""


class Unread(NamedTuple):
    """A place to go on from, of a checkpoint.

    Attributes:
        reads: batches that the loader had read, with those that it had read ahead.
        processes: random states with which each loading process goes on; empty where there are none.
        at_end: the loader had found its samplers' end.
    """

    reads: int
    processes: list[dict[str, Any]]
    at_end: bool


class UnreadBatches:
    """What a resume needs to leave out the used batches of the running epoch, as far as this process knows it.

    Args:
        loader: as `indexed` has found it.
        unread: what the epoch goes on from; None where it begins, or what was used is read again.
        begins_at: epochs that the loading processes will have begun before this one.

    Attributes:
        states: of the loading processes; None where there are none, or they are not known.
    """

    def __init__(self, loader: DataLoader[Any], unread: Unread | None, *, begins_at: int = 0) -> None:
        self._loader, self.states = loader, None
        self._changes: DatasetChanges | None = None
        is_known = unread is not None or loader in _are_unchanged
        if not loader.num_workers:
            self._changes = DatasetChanges(loader.dataset, loader.collate_fn, is_known=is_known)
        elif are_started(loader):
            self.states = _kept.get(loader)
        else:
            begins = unread.processes if unread else []
            prefetch = loader.prefetch_factor or 2
            self.states = WorkerStates.of(loader.num_workers, prefetch, begins, begins_at, is_known=is_known)
            if loader.persistent_workers and self.states:
                _kept[loader] = self.states

    def begin(self) -> None:
        """The epoch begins."""
        if self.states and are_started(self._loader):  # the processes stay
            self.states.epoch += 1

    def count_batch(self) -> None:
        """A batch was given."""
        if self._changes:
            self._changes.count_batch()

    @property
    def note(self) -> str:
        """What keeps a resume from leaving them out, in words; empty where nothing is known to."""
        changed = self._changes.changed if self._changes else self.states.changed if self.states else ""
        return CHANGES.format(changed) if changed else ""

    def place(self, watch: ReadWatch, used: int) -> dict[str, Any] | None:
        """An `Unread` as plain JSON; None where the used batches have to be read again. Args: used: batches of the epoch."""
        if self.note:
            _are_unchanged.discard(self._loader)
        elif self._changes.is_unchanged if self._changes else self.states and self.states.are_unchanged:
            _are_unchanged.add(self._loader)
        if not used or watch.order is None or watch.in_threads:
            return None
        processes: list[Any] | None = None
        if self.states:
            processes = self.states.before(used, watch.skipped)
        elif self._changes and self._changes.is_unchanged:
            has_all = {number for number, _ in watch.states} >= set(range(used + 1, watch.reads + 1))
            processes = [] if has_all else None
        if processes is None:
            return None
        return {"reads": watch.reads, "processes": processes, "at_end": watch.is_exhausted}


def indexed(loader: Any, parts: LoaderParts) -> DataLoader[Any] | None:
    """The one DataLoader of a loader that reads what its samplers say, and gives each batch as it is; None where there is none."""
    outer, own = loader, ("__iter__", "_get_iterator")
    if _is_accelerates(loader):
        loader = getattr(loader, "base_dataloader", None)
    if not isinstance(loader, DataLoader) or any(
        getattr(type(loader), name) is not getattr(DataLoader, name) for name in own
    ):
        return None
    if loader._dataset_kind != _DatasetKind.Map or not getattr(loader, "in_order", True):
        return None
    return None if any(item is not loader and item is not outer for item in parts.loaders.values()) else loader


def _is_accelerates(loader: Any) -> bool:
    return (type(loader).__module__, type(loader).__name__) == ACCELERATES


def end_epoch(loader: Any) -> None:
    """All batches of an epoch were left out. Accelerate's loader counts only epochs of which it has given a batch."""
    if _is_accelerates(loader) and hasattr(loader, "iteration"):
        loader.iteration += 1


def are_started(loader: DataLoader[Any]) -> bool:
    """Whether its loading processes stay from an earlier epoch."""
    return vars(loader).get("_iterator") is not None


def unread_of(saved: Any, loader: DataLoader[Any], used: int) -> Unread | None:
    """What a checkpoint says, for a loader that can go on from it; else None. Raises: CannotRestore. Args: used: batches."""
    if saved is None:
        return None
    before = rng_state.host_generators().save()
    try:
        unread = Unread(saved["reads"], [dict(state) for state in saved["processes"]], bool(saved["at_end"]))
        if type(unread.reads) is not int or unread.reads < used:
            raise ValueError(f"{unread.reads!r} batches read")
        for state in unread.processes:  # here, for an error in a loading process ends it
            rng_state.restore(state["rng"], torch.device("cpu"))
            if not isinstance(state["generators"], Mapping):
                raise TypeError(f"generators: {state['generators']!r:.80}")
    except (TypeError, ValueError, LookupError) as error:
        raise CannotRestore("the checkpoint's place in a loader cannot be read", repr(error)[:300]) from None
    finally:
        rng_state.host_generators().restore(before)
    return unread if len(unread.processes) == loader.num_workers and not are_started(loader) else None
