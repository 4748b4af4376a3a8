"""A loader that the script iterates itself, and whose position a checkpoint keeps: what `session.follow` returns."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from kgorch.errors import CannotRestore
from kgorch.worker.data.loader_fast_forward import LoaderFastForward, LoaderState


class FollowedLoader:
    """Iterate it in place of the loader. Each iteration is an epoch; the first one after a resume is the rest of the saved one.

    Other attributes (dataset, batch_size, sampler, …) are those of the loader.

    Attributes:
        running: the running epoch; None before the first.
        epoch: its number, from 0.
        open_batches: batches that it had given, when a step began, of that very step: a checkpoint counts them as not used. None
            until the first boundary in an epoch has shown it.
        on_begin: called before an epoch, or the rest of one, is read, with `begins_again`: the rest is read from the beginning
            on, or its samplers draw from there on.
        on_begun: called when what the epoch had used is read, or left out.
    """

    def __init__(self, loader: Iterable[Any], world_size: int, device: torch.device) -> None:
        self._loader, self._world, self._device = loader, world_size, device
        self.running: LoaderFastForward | None = None
        self._saved: LoaderState | None = None
        self._ranks_before = world_size
        self._skipped = 0  # batches that the first epoch begins after
        self._given = 0  # batches in this epoch and process
        self._samples = 0  # on this rank, in this process
        self._given_in_all = self._given_at_boundary = 0  # batches in this process; of them, before the newest boundary
        self._given_before: int | None = None  # of them, those before the script has called `session.steps`
        self._is_ahead = self._is_read = False
        self.epoch = 0
        self.open_batches: int | None = None
        self.on_begin: Callable[..., None] | None = None
        self.on_begun: Callable[[], None] | None = None

    def resume(self, saved: LoaderState, ranks_before: int) -> None:
        """Continue from this position at the next iteration. Raises: CannotRestore."""
        try:
            self.epoch, batches = int(saved["epoch"]), int(saved["batches"])
            if self.epoch < 0 or batches < 0:
                raise ValueError(f"epoch {self.epoch}, batch {batches}")
        except (KeyError, TypeError, ValueError) as error:
            raise CannotRestore("the checkpoint's place in a followed loader cannot be read", repr(error)) from None
        self._saved, self._ranks_before = saved, ranks_before

    def start_at(self, epoch: int, batches: int) -> None:
        """Begin the first iteration there: another library continues from a checkpoint of its own. A resume goes before it."""
        if self._saved is None and self.running is None:
            self.epoch, self._skipped = epoch, batches

    def begin_anew(self) -> None:
        """The saved epoch is over: a loop that takes a fixed number of batches has not asked for more after its last one."""
        if self._saved and self._saved.get("batches"):
            generators = self._saved.get("stood") or self._saved.get("generators")
            self.epoch += 1
            begun = {"epoch": self.epoch, "batches": 0, "is_begun": False, "generators": generators}
            self._saved = {**self._saved, **begun}

    @property
    def order(self) -> int | None:
        """The epoch that the samplers are given; None for that of the loader. A library that counts epochs itself overrides it."""
        return None

    @property
    def next_batch(self) -> int:
        """Number, in its epoch, of the batch that comes next: 0, but for the rest of an epoch that a resume continues.

        for number, batch in enumerate(loader, loader.next_batch):
        """
        if self._saved is not None:
            return int(self._saved.get("batches", 0))
        return self.running.batches_used if self.running is not None and self._given else 0

    @property
    def epochs_done(self) -> int:
        """Epochs that were read to their end, those of earlier sessions included."""
        running = self.running
        return self.epoch + bool(running is not None and running.is_over and not self._given and not running.back)

    @property
    def has_given_all(self) -> bool:
        """The running epoch has no batch left, whether or not the script has asked for another one."""
        running = self.running
        with contextlib.suppress(TypeError):  # without a length
            return running is not None and running.batches_used >= len(self)
        return False

    @property
    def share(self) -> int:
        """Samples of the newest batch on this rank; 0 before the first."""
        return self.running.share if self.running is not None else 0

    @property
    def samples_used(self) -> int:
        """Samples over all ranks that this process has used, over all epochs."""
        running = self.running
        back = 0 if running is None else running.back * running.share
        return (self._samples - back) * self._world

    def __len__(self) -> int:
        return len(self._loader)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "_loader":
            raise AttributeError(name)
        return getattr(self._loader, name)

    def __iter__(self) -> Iterator[Any]:
        if self.running is not None:
            self.epoch += 1
        saved, self._saved = self._saved, None
        begun = LoaderFastForward(self._loader, self._world, self._device, saved, self._ranks_before, gives_back=True)
        self.running, self._given = begun, 0
        self._is_read = False
        begun.give_back(self.open_batches or 0)
        begun.seek(self.epoch, int(saved.get("batches", 0)) if saved else self._skipped, self.order)
        self._skipped = 0
        is_left_out = begun.leaves_out
        if self.on_begin is not None:
            self.on_begin(begins_again=begun.begins_again or is_left_out)
        begun.before_next = begun.on_drawn = self.on_begun
        batches = iter(begun)  # what the epoch had used is read again here
        if self.on_begun is not None and not is_left_out:
            self.on_begun()
        while True:
            self.before_batch()
            if (batch := next(batches, self)) is self:
                break
            self._given += 1
            self._given_in_all += 1
            self._samples += begun.share
            yield batch
        if self._is_ahead:  # its last batches may be those of the next step
            self._is_read = True
        else:
            self._end()

    def _end(self) -> None:
        assert self.running is not None
        self.running.end()
        self._given, self._is_read = 0, False

    def before_batch(self) -> None:
        """Called before each batch is read. A loop whose steps begin there overrides it."""

    def at_boundary(self, *, is_first: bool, open_batches: int | None) -> None:
        """A step begins.

        Args:
            is_first: it is the first one in this process.
            open_batches: see the attribute; None where the caller does not know: then what was given before the first step; not
                known of a loader that the script has not begun yet.
        """
        self._is_ahead, self._given_at_boundary = bool(open_batches), self._given_in_all
        if self._is_read and not self._is_ahead:
            self._end()
        if open_batches is None and self.running is not None and (self.open_batches is None or is_first):
            open_batches = self._given
        if open_batches is not None:
            self.open_batches = open_batches
        if self.running is not None:
            self.running.give_back(min(self.open_batches or 0, self._given))

    @property
    def has_given(self) -> bool:
        """Whether it has given a batch since the newest boundary."""
        return self._given_in_all > self._given_at_boundary

    def expect_steps(self) -> None:
        """The script calls `session.steps`. What it takes from here until the first of its batches belongs to that step."""
        self._given_before = self._given_in_all

    def begin_steps(self) -> None:
        """`session.steps` is about to give the first batch of an epoch."""
        if self._given_before is not None:
            self.at_boundary(is_first=True, open_batches=self._given_in_all - self._given_before)
            self._given_before = None

    @property
    def place(self) -> dict[str, Any] | None:
        """The position, for a checkpoint; None before the first epoch."""
        running = self.running
        if running is None:
            return dict(self._saved) if self._saved else None
        is_over = self.epochs_done > self.epoch
        place = {"epoch": self.epochs_done, "batches": 0 if is_over else running.batches_used}
        return {**running.place, **place}
