"""Resume of a foreign loader in the middle of an epoch.

A foreign loader is one that `session.loader()` has not made; that one needs none of this. Just before an epoch's `iter(loader)` the
random states of all libraries, and of all generators inside the loader (loader_search.py), are kept. A resume sets them and begins
the epoch once more.

Of a DataLoader of PyTorch, by itself or inside Accelerate's, only the samplers' indices of the batches that the epoch has used are
drawn (unread_batches.py). If they come out otherwise, the batches are read after all.

Of any other loader as many batches as the epoch had used are read and discarded, before the random states of the save are set.
Loading processes are seeded by a draw in `iter()`, so they repeat their draws. In the rank's own process the training has drawn
random numbers between the batches: the discarded batches may be augmented differently, but not those after them, nor those that the
loader had read ahead (loader_reads.py).

The result is compared with the original: the state of each generator, the samplers' indices, or the newest batch where there are
none. A difference is reported, and so is what cannot be known in advance (`exactness`, `lost`).

Not covered: generators that only a module refers to, and other state that a dataset or sampler in the rank's own process keeps from
one epoch to the next.
"""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch.utils.data import DataLoader

from kgorch.errors import CannotRestore, KgorchError
from kgorch.worker import rng_state
from kgorch.worker.data import batches, generator_states, unread_batches
from kgorch.worker.data.keyed_loader import WorkerInit, keeping_states, start_iterator, without_sigterm
from kgorch.worker.data.loader_reads import MOST_AHEAD, ReadWatch, SampledBatch
from kgorch.worker.data.loader_search import parts_of, set_epoch
from kgorch.worker.data.random_states import LoaderRandomStates, plain
from kgorch.worker.data.stream_state import StreamState, is_of_accelerate
from kgorch.worker.data.unread_batches import Unread, UnreadBatches

PROGRESS_S = 10.0
"""Seconds between two lines of progress in the log."""

MOST_NAMED = 3
"""Limit of sentences about one topic, because they are part of every status."""

LoaderState = Mapping[str, Any]
"""The position of a loader in a checkpoint, as plain JSON; see LoaderFastForward.place."""

BY_ITS_STATE = "by the loader's own state_dict"
ANOTHER = "the samples read again are not those it had used: some may come twice in it, others never"
PERHAPS_ANOTHER = "the newest batch came out otherwise: exact if only its augmentation differs"


class LoaderFastForward:
    """One epoch of a foreign loader, with the interface that `session.steps` needs of a Loader.

    It holds no iterator: a DataLoader's iterator in a reference cycle would leave its processes to the garbage collector.

    Args:
        world_size: number of ranks.
        began: position in the checkpoint that the epoch continues from; None when it begins.
        ranks_before: number of ranks of that checkpoint.
        gives_back: a checkpoint may count the newest batches as not used.

    Attributes:
        batch: batches of the epoch that were left out or read again, once it is iterated. With another number of ranks, those that
            hold no more samples than were used.
        back: of the newest batches that were given, those that a checkpoint counts as not used: a resume gives them again.
        is_over: the epoch was read to its end.
        share: samples of the newest batch on this rank; before the epoch's first one, those that the loader declares.
        on_drawn: called when the indices of batches that are left out are drawn (`leaves_out`), and loading processes have started.
        before_next: called where used batches are read again, and a loader reads ahead: before the one behind them is read, with
            the last of them. Of any other loader the caller does it, when it is iterated.
    """

    def __init__(
        self, loader: Iterable[Any], world_size: int, device: torch.device, began: LoaderState | None, ranks_before: int,
        *, gives_back: bool = False,
    ) -> None:  # fmt: skip
        self._loader, self._world, self._device = loader, world_size, device
        self._began, self._ranks_before = began, ranks_before
        self.batch = self.back = self._epoch = self._used = 0
        self.is_over = False
        self.before_next: Callable[[], None] | None = None
        self.on_drawn: Callable[[], None] | None = None
        self._set_parts()
        self.share = self._declared_share
        self._states = LoaderRandomStates(device, self._parts.generators)
        self._stream = StreamState(loader, world_size, records=gives_back)
        self._watch: ReadWatch | None = None
        self._left_out: UnreadBatches | None = None
        self._is_to_begin = False  # the first batch behind those that are left out was not asked for
        self._newest: SampledBatch | None = None  # where no sampler tells the order
        self._lost: list[str] = []
        for inner in self._parts.loaders.values():
            if inner.num_workers and not isinstance(inner.worker_init_fn, WorkerInit):
                inner.worker_init_fn = WorkerInit(inner.worker_init_fn)

    def __len__(self) -> int:
        """Batches of an epoch; 0 where the loader has no length."""
        try:
            return len(self._loader)  # type: ignore[arg-type]
        except TypeError:
            return 0

    @property
    def _declared_share(self) -> int:
        """The `batch_size` of the loader, or of its batch sampler; 0 where none is known."""
        loaders = [self._loader, *self._parts.loaders.values()]
        holders = [*loaders, *(getattr(loader, "batch_sampler", None) for loader in loaders)]
        sizes = (getattr(holder, "batch_size", None) for holder in holders)
        return next((size for size in sizes if type(size) is int and size > 0), 0)

    def samples_in(self, batch: int) -> int:
        """Samples of the newest batch over all ranks, which are assumed to have as many as this one."""
        return self.share * self._world

    def share_of_rank(self, batch: int, rank: int) -> int:
        return self.share

    def seek(self, epoch: int, batch: int, order: int | None = None) -> None:
        """Start the next iteration there, and set the epoch of the samplers.

        Args:
            order: their epoch, where it is another one.
        """
        self._epoch, self.batch = epoch, batch
        set_epoch(list(self._parts.with_epochs.values()), epoch if order is None else order)

    def parts(self) -> Iterator[list[Any]]:
        """The batches as a Loader gives them: one rank's batch per step. Random states are those of the first one's read."""
        resumed, unread = self._place_to_begin()
        return ([batch] for batch in self._following(resumed, unread))

    def __iter__(self) -> Iterator[Any]:
        """The epoch's batches from the position of `seek` on.

        Those before it are read by this call, or left out when the first one is asked for: until then the script may restore its
        random states.
        """
        resumed, unread = self._place_to_begin()
        if unread is None:
            return self._following(resumed, None)
        self._is_to_begin = True
        return self._followed_later(resumed, unread)

    @property
    def begins_again(self) -> bool:
        """Before it is iterated: whether a running epoch is read from its beginning on, for nothing else leads to its place."""
        resumed, unread = self._place_to_begin()
        return bool(resumed and unread is None and not self._goes_on_by_state(resumed))

    @property
    def leaves_out(self) -> bool:
        """Before it is iterated: whether the used batches of a running epoch are left out. When its next one is asked for, samplers
        draw and loading processes start as they did at its beginning, when nothing had changed of what the epoch changes."""
        return self._place_to_begin()[1] is not None

    def _followed_later(self, resumed: LoaderState | None, unread: Unread) -> Iterator[Any]:
        yield from self._following(resumed, unread)

    def _place_to_begin(self) -> tuple[LoaderState | None, Unread | None]:
        """The place in an epoch that goes on, and what its used batches are left out by; None where there is none."""
        resumed = self._began if self._began and (self.batch or self._began.get("is_begun")) else None
        loader = self._indexed
        if not resumed or loader is None or not self.batch or self._ranks_before != self._world:
            return resumed, None
        return resumed, unread_batches.unread_of(resumed.get("unread"), loader, self.batch)

    def _following(self, resumed: LoaderState | None, unread: Unread | None) -> Iterator[Any]:
        """The batches from the place on."""
        lost = [*self._lost]
        if unread and (batches := self._begun(resumed, unread)) is not None:
            return batches
        if unread:
            self._lost, self._used = lost, 0
        batches = self._begun(resumed, None)
        assert batches is not None
        return batches

    def _begun(self, resumed: LoaderState | None, unread: Unread | None) -> Iterator[Any] | None:
        """The batches of an epoch that begins, or goes on.

        Args:
            resumed: where it goes on.
            unread: what the batches before are left out by; None: they are read again.

        Returns:
            None where they could not be left out: the order is another one, for the samplers draw from a generator of reads.
        """
        loader, left_out, self._is_to_begin = self._indexed, None, False
        if loader is not None:
            left_out = UnreadBatches(loader, unread, begins_at=len(self._lacking(self._began or {})))
        self._left_out = left_out
        if self._began:
            self._start_kept(self._began)
        if self._began and not resumed:  # saved between two epochs: set the generators to their states of then
            self._set_generators(self._began)
        now = self._now()
        watch = self._watch = self._watch_over(resumed)
        watch.back, watch.processes = self.back, left_out.states if left_out else None
        has_state = bool(resumed and self._skip(resumed, watch))
        if resumed:
            self._set(resumed, {"generators": resumed.get("stood")} if has_state else resumed)
        else:
            self._began = now
        watch.begin(self._parts.loaders.values())
        if left_out:
            left_out.begin()
        if unread:
            arrive = functools.partial(self._arrive, resumed, now)
            drawn = self.on_drawn or (lambda: None)
            watch.skip_indices(self.batch, unread.reads, at_end=unread.at_end, drawn=drawn, arrive=arrive)
        iterator = self._pulled(watch.active(start_iterator, self._loader))
        if unread:
            if (following := self._without_unread(iterator)) is None:
                vars(loader)["_iterator"] = None  # of processes that would be kept
                if loader is not self._loader:
                    self._loader.end()  # type: ignore[attr-defined]  # Accelerate's has begun
                rng_state.restore(now["rng"], self._device)
                return None
            self._used = int((resumed or {}).get("used", 0))
            self._tell_lost()
            if unread.processes:
                rng_state.restore(now["rng"], self._device)
            return self._counted(following)
        if self.batch and not has_state:
            iterator = self._without_used(iterator)
            self._compare(resumed)
            self._tell_lost()
        elif resumed and not self.batch:  # some loaders begin at their first batch
            iterator = itertools.chain(list(itertools.islice(iterator, 1)), iterator)
        if resumed:
            rng_state.restore(now["rng"], self._device)
        return self._counted(iterator)

    @property
    def _indexed(self) -> DataLoader[Any] | None:
        return None if self._stream.is_known else unread_batches.indexed(self._loader, self._parts)

    def _without_unread(self, iterator: Iterator[Any]) -> Iterator[Any] | None:
        """The batches after those that are left out; None where the indices come out otherwise than they were."""
        watch = self._watch
        assert watch
        try:
            first = list(itertools.islice(iterator, 1))
        except Exception:
            if watch.same_order is not False:
                raise
        finally:
            watch.end_skip()
        if watch.lacking or watch.same_order is False:
            return None
        if not first:
            unread_batches.end_epoch(self._loader)
        print(f"kgorch: epoch {self._epoch} goes on after {self.batch} batches, which are not read again", flush=True)
        return itertools.chain(first, iterator)

    def _arrive(self, resumed: LoaderState | None, now: LoaderState) -> None:
        """The loader has read as much as when its place was kept."""
        self._compare(resumed)
        rng_state.restore(now["rng"], self._device)

    @property
    def place(self) -> LoaderState:
        """The position, for a checkpoint, `back` batches before the newest.

        Holds the random states at the epoch's beginning (`rng`, `generators`), the loaders that kept their processes from the epoch
        before (`kept`; absent where there are none), the samples `used` over all ranks, and the random
        states before the reads that a resume must repeat under them, by number (`ahead`); the loader's own state, if it has one
        (`stream`); what the used batches are left out by (`unread`; None where they have to be read again). For comparison: the
        states of the generators now (`stood`), and checksums of the `order` and of the `newest` batch.
        """
        watch, back = self._watch, self.back
        if self._is_to_begin:
            return dict(self._began or {})
        return {
            **(self._began or {}),
            "is_begun": back > 0,
            "stream": self._stream.after(self.batches_used, watch.given) if watch else None,
            "used": max(0, self._used - back * self.share * self._world),
            "stood": None if back else self._states.held(),
            "order": list(watch.order) if watch and watch.order else None,
            "newest": self._newest.checksum() if self._newest and watch and watch.repeats_newest and not back else None,
            "unread": self._left_out.place(watch, self.batches_used) if watch and self._left_out else None,
            "ahead": [[number, plain(*states)] for number, states in (watch.states if watch else [])],
        }

    @property
    def generators(self) -> Iterable[Any]:
        """The random generators of the loader, whose states are saved with its position."""
        return self._parts.generators.values()

    def give_back(self, batches: int) -> None:
        """Set `back`."""
        self.back = batches
        if self._watch:
            self._watch.back = batches

    @property
    def batches_used(self) -> int:
        """Batches of the epoch that a checkpoint counts as used."""
        if self._is_to_begin:
            return self.batch
        return self._watch.given - self.back if self._watch else 0

    def end(self) -> None:
        """The epoch is over: a checkpoint before the next one begins holds the current states of the generators."""
        self._is_to_begin = False
        self._began, self._used, self._watch, self._newest, self.is_over = self._now(), 0, None, None, True

    def check_untracked(self, tracked: Mapping[str, Any]) -> None:
        """Raises: KgorchError when the loader, or a part that orders it, is tracked as well: a resume would skip twice."""
        ordering = list(self._parts.ordering.values())
        for name, thing in tracked.items():
            if any(thing is part for part in ordering):
                raise KgorchError(
                    f"session.track({name}=…): session.steps() brings a loader back to its place by itself",
                    "restored besides, it would skip its batches twice",
                    next_step=f"leave {name} out of session.track()",
                )

    @property
    def exactness(self) -> str:
        """How exact a resume is, as far as it can be known from outside, in words."""
        notes, loader, watch = ["replayed"], self._loader, self._watch
        if self._stream.is_known:
            in_processes = any(inner.num_workers for inner in self._parts.loaders.values())
            return BY_ITS_STATE + (", exact unless its loading processes draw random numbers" if in_processes else "")
        if not isinstance(loader, DataLoader):
            notes.append(f"a {type(loader).__name__}, exact if it gives the same each time")
        notes += self._parts.unknown[:MOST_NAMED]
        for inner in self._parts.loaders.values():
            if inner.num_workers and inner.persistent_workers:
                notes.append(
                    "persistent_workers: exact unless they draw from generators of their own process, or the dataset is changed"
                    " between epochs"
                )
            if not getattr(inner, "in_order", True):
                notes.append("in_order=False: the order hangs on time")
        if self._left_out and self._left_out.note:
            notes.append(self._left_out.note)
        if watch and self._parts.loaders and watch.given and not watch.reads:
            notes.append(f"what a {type(loader).__name__} reads ahead is not seen: exact unless that is random")
        if watch and watch.in_threads:
            notes.append("batches are read in a thread: the random numbers that one gets hang on time")
        elif watch and not watch.is_exact:
            notes.append(
                f"{watch.needed} batches are read ahead, of which the newest {MOST_AHEAD} come again as they were:"
                " exact if the others are not augmented in the rank's own process"
            )
        if self._ranks_before != self._world:
            notes.append(f"{self._ranks_before} ranks before, {self._world} now: another order and effective batch")
        return "; ".join(dict.fromkeys(notes))

    @property
    def lost(self) -> str:
        """What the newest resume could not reproduce, in words; empty when nothing differs."""
        if self._watch and self._watch.same_order is False:
            self._lost.append(ANOTHER)
        sentences = list(dict.fromkeys([*self._lost, *self._states.lost]))
        return f"epoch {self._epoch}: {'; '.join(sentences[:MOST_NAMED])}" if sentences else ""

    def _pulled(self, iterator: Iterator[Any]) -> Iterator[Any]:
        """The same batches. Only their reads are watched, not those of an evaluation between them."""
        watch = self._watch
        assert watch
        self._stream.before_batch(watch.given)
        while (batch := watch.active(next, iterator, watch)) is not watch:
            yield batch
            self._stream.before_batch(watch.given)

    def _counted(self, iterator: Iterator[Any]) -> Iterator[Any]:
        for batch in iterator:
            self.share = self._size(batch)
            self._take(batch)
            self._used += self.share * self._world
            yield batch

    def _take(self, batch: Any) -> None:
        """Count a batch of the loader."""
        assert self._watch
        self._watch.count_batch()
        if self._watch.order is None:
            self._newest = SampledBatch(batch)
        if self._left_out:
            self._left_out.count_batch()
        if self._watch.given == self._watch.skipped + 1:  # some loaders make their generators at their first batch
            self._search()

    def _search(self) -> None:
        self._set_parts()
        self._states.generators = self._parts.generators
        if self._indexed is None:
            self._left_out = None

    def _set_parts(self) -> None:
        loader, self._parts = self._loader, parts_of(self._loader)
        # Only a DataLoader that gives its batches in the order of their indices, and counts them from the epoch's beginning on.
        is_plain = isinstance(loader, DataLoader) and len(self._parts.loaders) == 1
        self._is_in_order = is_plain and getattr(loader, "in_order", True)

    def _size(self, batch: Any) -> int:
        """Samples of the batch that the loader gives next."""
        watch, known = self._watch, 0
        if self._is_in_order and watch and watch.sizes and not self._stream.is_known:
            known = watch.sizes[0]
        try:
            return max(1, batches.length(batch, known))
        except KgorchError:  # it holds no tensor
            return known or self._declared_share or 1

    def _without_used(self, iterator: Iterator[Any]) -> Iterator[Any]:
        as_before = self._ranks_before == self._world
        batches_used, samples_used = self.batch, (self._began or {}).get("used", 0)
        what = f"kgorch: epoch {self._epoch} has used {batches_used} batches, which are read again"
        print(what, flush=True)
        self.batch, told_s = 0, time.monotonic()
        while self.batch < batches_used if as_before else self._used < samples_used:
            if self.before_next and 0 < self.batch == batches_used - 1 and is_of_accelerate(self._loader):
                self.before_next()
            if (batch := next(iterator, self)) is self:
                raise self._too_few(self.batch, batches_used)
            samples = self._size(batch) * self._world
            if not as_before and self._used + samples > samples_used:
                return itertools.chain([batch], iterator)  # better to use some samples twice than to skip any
            self._take(batch)
            self.batch, self._used = self.batch + 1, self._used + samples
            if time.monotonic() - told_s > PROGRESS_S:
                told_s = time.monotonic()
                print(f"{what}: {self.batch} so far", flush=True)
        return iterator

    def _too_few(self, batches: int, used: int) -> CannotRestore:
        return CannotRestore(
            f"the loader gave {batches} batches, and the checkpoint has used {used} of epoch {self._epoch}",
            next_step="give it the data it had, or begin a new run with `kgorch start PLAN --fresh`",
        )

    def _watch_over(self, resumed: LoaderState | None) -> ReadWatch:
        """A watch of the epoch's reads, which compares them with those of the process that is resumed."""
        order, ahead = None, {}
        if resumed and self._ranks_before == self._world:
            try:
                ahead = {int(number): dict(states) for number, states in resumed.get("ahead", ())}
                order = (int(resumed["order"][0]), int(resumed["order"][1])) if resumed.get("order") else None
            except (TypeError, ValueError, LookupError) as error:
                raise CannotRestore("the checkpoint's place in a loader cannot be read", str(error)) from None
        in_processes = isinstance(loader := self._loader, DataLoader) and loader.num_workers > 0
        draws = not in_processes or type(loader).__iter__ is not DataLoader.__iter__
        return ReadWatch(self._states.quick, self._states.set, ahead, order, records=draws)

    def _skip(self, resumed: LoaderState, watch: ReadWatch) -> bool:
        """Continue by the loader's own state, if the checkpoint holds one. Returns whether it does."""
        if not self._goes_on_by_state(resumed):
            return False
        self._stream.load(resumed["stream"])
        self._used = int(resumed.get("used", 0))
        watch.skip(self.batch)
        return True

    def _goes_on_by_state(self, resumed: LoaderState) -> bool:
        is_known = resumed.get("stream") is not None and self._stream.is_known
        return bool(is_known and self.batch and self._ranks_before == self._world)

    def _now(self) -> LoaderState:
        """What a resume needs of the moment before an epoch: random states, and the loaders that have kept their processes."""
        kept = [path for path, inner in self._parts.loaders.items() if vars(inner).get("_iterator") is not None]
        return {**self._states.now(), **({"kept": kept} if kept else {})}

    def _lacking(self, began: LoaderState) -> list[DataLoader[Any]]:
        """The DataLoaders whose loading processes the saved epoch had from the one before, and that have none."""
        kept = began.get("kept", [])
        if not isinstance(kept, list):
            raise CannotRestore("the checkpoint's place in a loader cannot be read", f"kept: {kept!r}"[:300])
        if self._stream.is_known:  # whose own state starts them anew
            return []
        return [
            inner
            for path, inner in self._parts.loaders.items()
            if path in kept and inner.persistent_workers and vars(inner).get("_iterator", self) is None
        ]

    def _start_kept(self, began: LoaderState) -> None:
        """Start the loading processes that the saved epoch had from the one before.

        Their start draws a seed from the generator that then gives the order. The saved epoch drew none.
        """
        if not (lacking := self._lacking(began)):
            return
        before = self._states.now()
        for inner in lacking:
            with without_sigterm(inner), keeping_states(inner, self._left_out.states if self._left_out else None):
                DataLoader.__iter__(inner)  # that of a subclass may do more
        self._states.set(before)

    def _set(self, began: LoaderState, generators: LoaderState) -> None:
        rng_state.restore(began.get("rng"), self._device)
        if generators.get("generators") is not None:
            self._set_generators(generators)

    def _set_generators(self, began: LoaderState) -> None:
        if not isinstance(began.get("generators"), list):
            self._states.set_held(began)
            return
        # A checkpoint of an earlier version, which did not search the whole loader: it has the generators of these parts.
        batch_sampler = getattr(self._loader, "batch_sampler", None)
        sampler = getattr(self._loader, "sampler", None), batch_sampler, getattr(batch_sampler, "sampler", None)
        parts = [self._loader, getattr(self._loader, "dataset", None), *sampler]
        candidates = [getattr(part, "generator", None) for part in parts]
        known = list({id(item): item for item in candidates if isinstance(item, torch.Generator)}.values())
        try:
            for generator, saved in zip(known, began["generators"], strict=False):
                generator.set_state(rng_state.as_tensor(bytes.fromhex(saved)))
        except (TypeError, ValueError, RuntimeError) as error:
            raise CannotRestore("the checkpoint's random states of a loader cannot be read", str(error)[:300]) from None
        for path, item in self._parts.generators.items():
            if not any(item is one for one in known[: len(began["generators"])]):
                self._lost.append(f"the checkpoint was written by an earlier version, which did not keep {path}")

    def _compare(self, resumed: LoaderState | None) -> None:
        """After the batches were read again: record what differs."""
        watch = self._watch
        if not resumed or not watch or self._ranks_before != self._world:
            return
        self._search()
        if isinstance(stood := resumed.get("stood"), dict):
            self._compare_generators(stood, watch)
        if watch.order is None and self._newest and resumed.get("newest") not in (None, self._newest.checksum()):
            self._lost.append(ANOTHER if watch.reads and not watch.in_threads else PERHAPS_ANOTHER)

    def _tell_lost(self) -> None:
        if self.lost:
            print(f"kgorch: {self.lost}", flush=True)

    def _compare_generators(self, stood: Mapping[str, Any], watch: ReadWatch) -> None:
        now = self._parts.generators
        self._lost += [f"{path}, whose state was kept, is not in the loader" for path in stood if path not in now]
        self._lost += [f"{path} is new: the checkpoint has no state of it" for path in now if path not in stood]
        for path, generator in now.items():
            if path in stood and generator_states.state_of(generator) != stood[path]:
                self._states.set_one(path, stood[path])  # so that later draws are as they would have been
                if watch.same_order is None and ".dataset" not in path:
                    self._lost.append(f"{path} stood elsewhere after the batches were read again")
