"""A loader that is not ours, taken up again in the middle of an epoch: the batches used already are read once more.

Just before an epoch's `iter(loader)` the random states of all libraries, and of generators that the loader's parts hold,
are kept. A resume sets them, reads as many batches as the epoch had used and throws them away, then sets the random
states of the save. Loading processes are seeded from a draw in `iter()`, so what they drew they draw again. In the
rank's own process training drew between the batches: those thrown away may be augmented otherwise, those after them not.

Out of reach: what a dataset or sampler of the rank's own process remembers from one epoch to the next, and draws that a
sampler makes in the middle of an epoch from the generator which the training uses. `session.loader()` needs none of this.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from orchestrator.errors import CannotRestore, KgorchError
from orchestrator.worker import batches, state
from orchestrator.worker.loader import WorkerStart, begun

PROGRESS_S = 10.0
Began = Mapping[str, Any]


class Replay:
    """One epoch of a foreign loader, with what `session.steps` asks of a Loader.

    Holds no iterator: one of a DataLoader in a reference cycle would leave its processes to the garbage collector.

    Args:
        began: of the checkpoint that the epoch goes on from; None when it begins.
        ranks_before: of that checkpoint.
    Attributes:
        batch: batches of the epoch that were read again, once it is iterated: with another number of ranks those that
            hold no more samples than were used.
    """

    def __init__(
        self, loader: Iterable[Any], world_size: int, device: torch.device, began: Began | None, ranks_before: int
    ) -> None:
        self._loader, self._world, self._device = loader, world_size, device
        self._began, self._ranks_before = began, ranks_before
        self.batch = self._epoch = self._share = self._used = 0
        if isinstance(loader, DataLoader) and loader.num_workers and not isinstance(loader.worker_init_fn, WorkerStart):
            loader.worker_init_fn = WorkerStart(loader.worker_init_fn)

    def __len__(self) -> int:
        """Batches of an epoch; 0 when that is not known."""
        try:
            return len(self._loader)  # type: ignore[arg-type]
        except TypeError:
            return 0

    def samples_in(self, batch: int) -> int:
        """Samples of the newest batch over all ranks, who are taken to hold as many as this one."""
        return self._share * self._world

    def share_of_rank(self, batch: int, rank: int) -> int:
        return self._share

    def seek(self, epoch: int, batch: int) -> None:
        self._epoch, self.batch = epoch, batch
        for part in self._parts():
            if callable(set_epoch := getattr(part, "set_epoch", None)):
                set_epoch(epoch)

    def parts(self) -> Iterator[list[Any]]:
        """As a Loader gives them: one rank's batch a step."""
        given = iter(self)
        return ([batch] for batch in given)

    def __iter__(self) -> Iterator[Any]:
        """The epoch's batches from where `seek` said; what lies before is read at once, before the first is asked for."""
        now = self._states()
        if self.batch and self._began:
            self._set(self._began)
        else:
            self._began = now
        iterator = begun(self._loader)
        if self.batch:
            iterator = self._without_used(iterator)
            state.set_rng_state(now["rng"], self._device)
        return self._counted(iterator)

    @property
    def place(self) -> Began:
        """What a checkpoint keeps of it: the random states at the epoch's beginning, and samples used over all ranks."""
        return {**(self._began or {}), "used": self._used}

    def refuse(self, tracked: Mapping[str, Any]) -> None:
        """Raises KgorchError when the loader, or what orders it, is tracked too: a resume would skip twice."""
        ordering = [part for part in self._parts() if part is not self._dataset() or isinstance(part, IterableDataset)]
        for name, thing in tracked.items():
            if any(thing is part for part in ordering):
                raise KgorchError(
                    f"session.track({name}=…): session.steps() brings a loader back to its place by itself",
                    "restored besides, it would skip its batches twice",
                    next_step=f"leave {name} out of session.track()",
                )

    @property
    def exactness(self) -> str:
        """How exact a resume is, as far as it can be told from outside."""
        said, loader = ["replayed"], self._loader
        if not isinstance(loader, DataLoader):
            said.append(f"a {type(loader).__name__}, exact if it gives the same each time")
        elif loader.num_workers and loader.persistent_workers:
            said.append("persistent_workers: exact unless they draw from generators of their own process")
        if not getattr(loader, "in_order", True):
            said.append("in_order=False: the order hangs on time")
        if self._ranks_before != self._world:
            said.append(f"{self._ranks_before} ranks before, {self._world} now: another order and effective batch")
        return "; ".join(said)

    def _counted(self, iterator: Iterator[Any]) -> Iterator[Any]:
        for batch in iterator:
            self._share = self._size(batch)
            self._used += self._share * self._world
            yield batch

    def _size(self, batch: Any) -> int:
        try:
            return max(1, batches.length(batch))
        except KgorchError:  # no tensor in it
            return getattr(self._loader, "batch_size", None) or 1

    def _without_used(self, iterator: Iterator[Any]) -> Iterator[Any]:
        as_before = self._ranks_before == self._world
        batches_used, samples_used = self.batch, (self._began or {}).get("used", 0)
        what = f"kgorch: epoch {self._epoch} has used {batches_used} batches, which are read again"
        print(what, flush=True)
        self.batch, told_s = 0, time.monotonic()
        while self.batch < batches_used if as_before else self._used < samples_used:
            if (batch := next(iterator, self)) is self:
                raise CannotRestore(
                    f"the loader gave {self.batch} batches, and the checkpoint has used {batches_used} of epoch {self._epoch}",
                    next_step="give it the data it had, or begin anew with `kgorch start PLAN --fresh`",
                )
            samples = self._size(batch) * self._world
            if not as_before and self._used + samples > samples_used:
                return itertools.chain([batch], iterator)  # rather some samples twice than any never
            self.batch, self._used = self.batch + 1, self._used + samples
            if time.monotonic() - told_s > PROGRESS_S:
                told_s = time.monotonic()
                print(f"{what}: {self.batch} so far", flush=True)
        return iterator

    def _dataset(self) -> Any:
        return getattr(self._loader, "dataset", None)

    def _parts(self) -> list[Any]:
        """The loader and what gives it its order."""
        batch_sampler = getattr(self._loader, "batch_sampler", None)
        sampler = getattr(self._loader, "sampler", None), batch_sampler, getattr(batch_sampler, "sampler", None)
        found = {id(part): part for part in (self._loader, self._dataset(), *sampler) if part is not None}
        return list(found.values())

    def _generators(self) -> list[torch.Generator]:
        held = (getattr(part, "generator", None) for part in self._parts())
        return list({id(item): item for item in held if isinstance(item, torch.Generator)}.values())

    def _states(self) -> dict[str, Any]:
        generators = [item.get_state().numpy().tobytes().hex() for item in self._generators()]
        return {"rng": state.rng_state(self._device), "generators": generators}

    def _set(self, began: Began) -> None:
        state.set_rng_state(began["rng"], self._device)
        for generator, kept in zip(self._generators(), began["generators"], strict=False):
            generator.set_state(torch.frombuffer(bytearray.fromhex(kept), dtype=torch.uint8))
