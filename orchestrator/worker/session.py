"""A training script's side of a session: where to go on, when to save, when to stop.

All that happens to the training happens in `steps()`, between two optimizer steps, at a step on which all ranks have
agreed (board.py): never in a signal handler, never in an `except`. Between those moments the script owns the process.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import json
import math
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from orchestrator import __version__
from orchestrator.checkpoint.manifest import Manifest, Position
from orchestrator.core.codes import EventKind
from orchestrator.core.metric_curve import Mark
from orchestrator.errors import CannotRestore, KgorchError
from orchestrator.protocol.launch_spec import BOARD_VARIABLE, LaunchSpec
from orchestrator.protocol.messages import Heartbeat, Hello, JournalEntry, Message, RankMetrics
from orchestrator.system.clock import boottime_s
from orchestrator.worker import (
    activation,
    batches,
    cached,
    collector,
    group,
    image,
    oom,
    output_folder,
    starting,
    state,
    stored,
    virtual,
    weights,
)
from orchestrator.worker.backward import Backward, Guard, Work
from orchestrator.worker.best import Best
from orchestrator.worker.board import DOWN, SAVE, SLOT, SNAPSHOT, STOP, UP, Board
from orchestrator.worker.curve import Curve
from orchestrator.worker.data import Data
from orchestrator.worker.determinism import Determinism
from orchestrator.worker.health import Health
from orchestrator.worker.ladder import Ladder, plain_of
from orchestrator.worker.link import Link
from orchestrator.worker.loader import Loader
from orchestrator.worker.metrics import Metrics
from orchestrator.worker.probe import Probe
from orchestrator.worker.probe_estimate import EstimateProbe
from orchestrator.worker.replay import Began, Replay
from orchestrator.worker.save import Saver, is_on_disk
from orchestrator.worker.vitals import Gauges
from orchestrator.worker.weights import Weights
from orchestrator.worker.whereabouts import Whereabouts

AFTER_A_MISS = 5.0
"""So many intervals pass before a snapshot is tried again that could not be taken: trying may have cost half a second."""

DOCUMENT_BYTES = 1 << 18
"""Room in an image for what is no tensor: random states are some 30 kB of it."""


QUICK_BATCHES = 2
"""Of a loader that is not trained on, in a quick test: the first one of a kind takes longer."""

NO_GPU = ("", "cpu", "unknown")
"""What a launch calls its device where the driver shows no GPU, or does not answer."""

COMPARED = {"device": "the device", "torch": "PyTorch", "cuda": "CUDA", "cudnn": "cuDNN"}
"""Versions of a manifest that the bits of floating point hang on."""

WITH_WORKERS = ("prefetch_factor", "persistent_workers", "timeout", "multiprocessing_context")


final_step: int | None = None
"""Of the stage's last save, once it is on disk: for the record of how this process ended (entry.py)."""


class SessionOver(SystemExit):
    """Ends the script at a step boundary. Exit status 0; let it pass. `saved`: whether its last save is in place."""

    def __init__(self, *, saved: bool) -> None:
        super().__init__(0)
        self.saved = saved


class Seen(NamedTuple):
    """The state at a boundary: all of it, this rank's share of the tensors, and when looking at it began."""

    captured: state.Captured
    mine: dict[str, torch.Tensor]
    began_s: float


class SaveLost(RuntimeError):
    """A save that must not fail has failed."""


class Session:
    """Attributes:
    device: where this rank computes. rank, world_size: of this attempt; another session may have other ones.
    supervised: False when the script runs alone.
    output: folder for results; outlives the session, shared by the stages.
    quick: a quick test or a probe: loaders give a few batches only, so what is made is not whole.
    """

    def __init__(self, launch: LaunchSpec | None, seed: int | None, deterministic: str | None = None) -> None:
        self.supervised = launch is not None
        self.quick = launch is not None and (launch.quick or launch.probe is not None)
        self._exactness: dict[str, str] = {}
        gpus = launch.device if launch and launch.device not in NO_GPU else ""
        level = deterministic or (launch.deterministic if launch else "off")
        self._determinism = Determinism(level, on_cuda=torch.cuda.is_available())  # before CUDA starts
        self._member = group.join(
            supervised=self.supervised, gpus=gpus, timeout_s=launch.collective_timeout_s if launch else None
        )
        self.rank, self.world_size, self.device = self._member.rank, self._member.world_size, self._member.device
        self.output = output_folder()
        self._seed = seed if seed is not None else (launch.seed if launch else 0)
        group.seed_all(self._seed + self.rank)
        self._launch, self._tracked, self._metrics = launch, dict[str, Any](), Metrics()
        self._loop = self._epoch = self._batch = self._step = self._samples = self._loops_seen = 0
        self._steps_total = self._epochs_total = self._epochs_wanted = self._epochs_done = 0
        self._rng: dict[str, Any] | None = None  # to be set before the first step, when resumed
        self._replay: Replay | None = None  # of the epoch that runs, when its loader is not ours
        self._began: Began | None = None  # where that epoch's loader began, when resumed
        self._ranks_before = self.world_size
        self._rehearse = self._epoch_is_open = self._is_trained = False
        self._in_step = False  # while the script has a step's batch: its boundary is still to come
        self._ranks = virtual.ranks_of(self.world_size, self.rank, self.world_size)
        self._divisible, self._refused = True, 0
        self._next_snapshot_s = math.inf
        self._saved_at: int | None = None
        self._stop_at = launch.stop_at if launch else None
        self._state_bytes = 0
        self._metrics_dropped_told = False
        self._ticked_s = self._gap_s = self._step_s = 0.0
        self._gauges = Gauges(self.device)
        self._place = Whereabouts()
        self._data = Data(launch, self.rank)
        self._store = cached.Store(Path(launch.cached) if launch and launch.cached else None)
        self._shared = cached.Shared(self.rank, self.world_size)
        self._progress = cached.Progress(self._note)
        self._board: Board | None = None
        self._ladder: Ladder | None = None
        self._health: Health | None = None
        self._probe: Probe | None = None
        self._curve: Curve | None = None
        self._best: Best | None = None
        guard = self._supervise(launch) if launch else None
        self._backward = Backward(self.device, lambda: self._ranks, self._tell_exactness, guard)

    def _supervise(self, launch: LaunchSpec) -> Guard:
        self._board = Board(os.environ[BOARD_VARIABLE], self.rank, self.world_size)
        self._link = Link(launch, self._board, self._hello, self._told)
        self._saver = Saver(launch, self.rank, self.world_size, self._board, self._link.send)
        self._board.admit = self._saver.admit
        if launch.best:
            self._best = Best(launch, self.rank, self._board, self._saver, self._metrics, self._link.send)
        if self._member.shares_gpu and self.rank == 0:
            why = f"{self.world_size} ranks share {torch.cuda.device_count()} GPUs; NCCL takes one rank a GPU"
            self._link.send(JournalEntry(launch.attempt, EventKind.GLOO_INSTEAD_OF_NCCL, {"why": why}))
        self._ladder = Ladder(launch, self.device, self._link.send)
        self._health = Health(launch, self.rank, self._ladder, self._link.send, late=self.device.type == "cuda")
        if launch.probe is not None:
            kind = EstimateProbe if launch.probe.get("gpu") else Probe
            self._probe = kind(launch, self.rank, self.device, self._ladder)
        elif self.rank == 0:
            self._curve = Curve(launch)
            self._metrics.on_arrival = self._curve.add
        signal.signal(signal.SIGTERM, lambda *_: self._link.ask_stop())  # the wall has come nearer; only a request here
        return Guard(self._ladder, self._health, self._board, self.rank)

    @property
    def weight(self) -> float:
        """0.0 when this rank's batch is borrowed (a last batch smaller than the number of ranks), else above 0."""
        return self._backward.weight

    @property
    def microbatch(self) -> int | None:
        """Samples of one forward and backward as memory allows now; None for a rank's whole share."""
        return self._backward.microbatch

    def __enter__(self) -> Session:
        if self._board:
            self._link.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        over, place = isinstance(error, SessionOver), self._place.at_failure(self._modules())
        finished = error is None or (isinstance(error, SystemExit) and error.code in (None, 0) and not over)
        if self._board:
            saved = True
            try:
                if finished or over:  # the device answers: figures of the last step may be waited for
                    self._metrics.collect(wait=True)
                if finished:
                    if self._probe:
                        self._probe.script_over()
                    saved = self._save_final()
                    if self._probe:
                        self._probe.saved()
                    self._board.leave()
            finally:
                self._place.enter("end")
                if self._curve:
                    self._curve.close()
                self._link.close()
            if not saved:
                raise SaveLost(f"the stage is done, but its last save failed: {self._saver.error}")
        if isinstance(error, Exception):  # for the record of how this rank ended
            error.at_step = self._step  # type: ignore[attr-defined]
            error.at_place = place  # type: ignore[attr-defined]
        if self._member.owns_group and (finished or over):
            dist.destroy_process_group()

    # What is to be remembered

    def track(self, **things: Any) -> None:
        """Name what a checkpoint must hold: modules, and anything with state_dict() and load_state_dict().

        Call it once, when all of it is built; a run that goes on is restored here, and a stage that begins is given
        its starting weights, if the plan names some.

        Raises: CannotRestore when the checkpoint holds other names or shapes; WeightsRefused.
        """
        if self._tracked:
            raise KgorchError("session.track() was called twice", next_step="give all names in one call")
        for name, thing in things.items():
            if not hasattr(thing, "state_dict"):
                raise KgorchError(
                    f"session.track({name}=…): a {type(thing).__name__} has no state_dict()",
                    next_step="wrap it in a class that has one",
                )
        self._tracked = things
        self._backward.learn(self._modules())
        # Before a restore, so that one process takes the whole batch, which is right.
        if activation.has_sync_batchnorm(self._modules()):
            self._refuse_to_divide("SyncBatchNorm normalises over all ranks of a step")
        sizes, own_bytes = self._measure()
        if self._probe:
            self._probe.know(things, self._state_bytes, self._backward)
        if self._launch:
            if self._launch.snapshot is not None:
                self._restore(self._snapshot(self._launch.snapshot), "the snapshot in memory")
            elif self._launch.resume:
                self._restore(stored.Folder(Path(self._launch.resume)), self._launch.resume)
                self._saved_at = self._step
            if self._goes_on:
                sizes, own_bytes = self._measure()  # what it keeps may have grown in earlier sessions
                # DDP orders its buckets anew after its first backward; sums of three terms and more depend on that order.
                # The script may have tracked the module inside its DDP, so any module will do.
                self._rehearse = self.world_size > 2 and any(isinstance(thing, nn.Module) for thing in things.values())
            elif self._launch.weights:
                self._begin_with(self._launch, **self._launch.weights)
            if self._ladder:
                self._ladder.learn({name: thing for name, thing in things.items() if isinstance(thing, nn.Module)})
            if self._health:
                captured = state.capture(things)
                self._health.know(
                    _alike(things, image.share(captured.tensors, captured.own, self.rank, self.world_size))
                )
            names = image.split(sizes, self.world_size)[self.rank]
            need = sum(sizes[name] for name in names) + own_bytes + DOCUMENT_BYTES + 600 * len(sizes)
            if self._probe is None or not self._probe.as_on_cuda:  # whose optimizer never takes a step
                self._saver.prepare(need, self.device)
            self._plan_snapshot()
            self._link.send(self._hello())

    def _measure(self) -> tuple[dict[str, int], int]:
        """What is to be saved: see state.expected_sizes. Told are the bytes of all ranks, as a checkpoint's are."""
        sizes, own_bytes = state.expected_sizes(self._tracked)
        self._state_bytes = sum(sizes.values()) + own_bytes * self.world_size
        return sizes, own_bytes

    @property
    def _goes_on(self) -> bool:
        return self._launch is not None and (self._launch.resume is not None or self._launch.snapshot is not None)

    def _snapshot(self, number: int) -> stored.InMemory:
        try:
            held, descriptors = self._saver.fetch()
        except OSError as error:
            raise stored.SnapshotGone(f"the keeper cannot be asked: {error}") from None
        if held.number != number:
            raise stored.SnapshotGone(f"expected snapshot {number}, found {held.number}")
        return stored.InMemory(held, descriptors)

    def _restore(self, found: stored.Stored, where: str) -> None:
        described = found.described
        divisible = described.divisible and self._divisible
        count = described.world_size if divisible else self.world_size
        if count >= self.world_size:
            self._ranks = virtual.ranks_of(count, self.rank, self.world_size)
        first = self._ranks.first
        own = found.own(first)
        try:
            if not isinstance(own.get("own"), dict) or "rng" not in own:
                raise CannotRestore(f"rank{first}.json lacks `own` or `rng`")
            state.restore(self._tracked, found.tree | own["own"], found.fetcher(first))
        except CannotRestore as error:
            raise CannotRestore(error.what, *error.facts, f"checkpoint: {where}", next_step=error.next_step) from None
        self._rng = own["rng"]
        self._began = own["rng"].pop("loader", None)
        self._ranks_before = described.world_size
        self._ranks.random_states = {rank: found.own(rank)["rng"] for rank in self._ranks.mine[1:]}
        self._divisible = divisible
        self._tell_other_versions(described.versions)
        if self._ranks.count != described.world_size:
            self._tell_other_ranks(described.world_size)
        elif self._ranks.are_split:
            kept = "" if self._keep_alike(found) else ", but what each rank keeps for itself is the first one's now"
            self._tell_exactness(ranks=self._ranks.said() + kept)
        self._is_trained = described.final and self._launch is not None and not self._launch.extends
        at = described.position
        self._loop, self._epoch, self._batch, self._step, self._samples = (
            at.loop,
            at.epoch,
            at.batch,
            at.step,
            at.samples,
        )
        if self._curve:  # what the script reports before it goes on is of the epoch that the checkpoint stands in
            self._curve.epoch = at.epoch + (at.batch > 0)
        self._metrics.restore(described.metrics, described.measured)

    def _keep_alike(self, found: stored.Stored) -> bool:
        """Whether the ranks played here keep the same for themselves: schedulers do, generators of their own do not."""
        mine = found.own(self._ranks.first)["own"]
        return all(
            found.own(rank)["own"] == mine
            and all(
                torch.equal(found.fetcher(rank)(name), found.fetcher(self._ranks.first)(name))
                for name in state.tensors_in(mine)
            )
            for rank in self._ranks.mine[1:]
        )

    def _tell_other_ranks(self, before: int) -> None:
        """A number of ranks that cannot play those of the run: what stays the same, and what does not."""
        why = "" if self.world_size > before else "; not all its steps went through session.backward"
        self._tell_exactness(
            ranks=f"{self.world_size} instead of {before}{why}: the same order of samples and global batch;"
            " dropout and BatchNorm statistics differ"
        )

    def _tell_other_versions(self, before: Mapping[str, str]) -> None:
        """What the checkpoint was written with, where this is another device or library: floating point differs."""
        now = group.versions(__version__, self.device)
        changed = [
            f"{name} was {before[key]} and is {now.get(key, 'none')}"
            for key, name in COMPARED.items()
            if key in before and before[key] != now.get(key)
        ]
        if changed:
            self._tell_exactness(versions=f"{'; '.join(changed)}: other bits from here on")

    def _begin_with(self, launch: LaunchSpec, *, file: str, **how: Any) -> None:
        """The plan's starting weights, on every rank the same."""
        facts = starting.load(self._tracked, Path(launch.workdir, file), **how)
        if self.rank == 0:
            kind = "weights_partly_loaded" if facts.keys() > {"file", "into", "loaded"} else "weights_loaded"
            self._link.send(JournalEntry(launch.attempt, kind, facts))

    def weights(self, stage: str, name: str = "model", *, which: str | None = None) -> Weights:
        """What the module `name` of another stage of this run held, by the names of its state_dict (weights.py).

        Args:
            which: "best", of the stage's best checkpoint by the plan's `keep.best`; "final", at its end. None is the best where the
                plan keeps one and it was measured, else the final one. `.label` of what is returned says which it is.
        Raises: CannotRestore when that stage has left no such checkpoint; CheckpointBroken: every byte is compared first.
        """
        if which not in (None, "best", "final"):
            raise KgorchError(f"session.weights(which={which!r:.80})", next_step='give "best", "final" or None')
        if not self._launch:
            raise CannotRestore("there are no stages without kgorch", next_step="give the script a file of weights")
        return weights.read(self._launch, stage, name, which)

    def cached(self, name: str, compute: Callable[[], Any], *, key: Any) -> Any:
        """What `compute` gives, computed once in a run: headers of many files, say. All ranks call this together.

        Rank 0 calls `compute` where no earlier session has left the value under this name and key; the other ranks wait for it,
        however long that takes, and all get the same. A computation of many minutes should call `session.progress` now and then.

        A value that came with the state of another machine may have been written by anybody: check what it says before you rely
        on it, as you would with a file that you downloaded.

        Args:
            name: plain letters; of the file in the run's folder.
            compute: gives what JSON can hold, at most 64 MiB of it. Tuples come back as lists, keys of tables as text.
            key: what the value hangs on, as JSON: a list's size and time, options. Another key has it computed again.
        Raises: KgorchError for a value or key that is no JSON, or too large; what `compute` raises, on rank 0.
        """
        cached.check_name(name)
        hashed, before = cached.key_of(key), self._place.where
        self._place.enter("data" if self.rank == 0 else "wait")
        content = self._shared.of_first(lambda: self._cached(name, compute, hashed))
        self._place.enter(before)
        return json.loads(content)

    def _cached(self, name: str, compute: Callable[[], Any], key: str) -> bytes:
        if (found := self._store.read(name, key)) is not None:
            return found
        value = cached.value_of(name, compute())
        try:
            self._store.write(name, key, value)
        except OSError as error:  # a full disk: the next session computes it again
            print(f"kgorch: session.cached({name!r}) is not kept: {error}", flush=True)
            self._note(EventKind.NOT_CACHED, {"name": name, "why": str(error)[:500]})
        return value

    def progress(self, what: str, done: int, total: int | None = None) -> None:
        """How far something is that takes long without steps, in `session.cached` or an evaluation: for the log, for `status`, and
        so that the rank does not count as hung. It may be called as often as one likes."""
        if self._place.where in ("data", "evaluation"):
            self._place.enter(self._place.where)
        self._progress.to(what, done, total)

    def _note(self, kind: str, facts: dict[str, str]) -> None:
        if self._launch:
            self._link.send(JournalEntry(self._launch.attempt, kind, facts))

    # Loops

    def loader(
        self, dataset: Any, global_batch: int, *, shuffle: bool = True, drop_last: bool = True, **options: Any
    ) -> Loader:
        """A DataLoader over this rank's share whose order is the same on any number of ranks and workers (loader.py).

        Args:
            global_batch: samples of one optimizer step, over all ranks.
            options: what torch's DataLoader takes besides (num_workers, collate_fn, prefetch_factor, …). With workers
                persistent_workers is true unless it is given.
        """
        if self._ladder:
            options["num_workers"] = self._ladder.asked_workers(options.get("num_workers", 0))
            if not options["num_workers"]:  # DataLoader takes these with workers alone
                options = {name: value for name, value in options.items() if name not in WITH_WORKERS}
            if self._ladder.settings.pin_memory is False:
                options["pin_memory"] = False
        made = Loader(
            dataset,
            global_batch,
            ranks=lambda: self._ranks,
            seed=self._seed,
            shuffle=shuffle,
            drop_last=drop_last,
            most=(0 if self._probe and self._probe.as_on_cuda else QUICK_BATCHES) if self.quick else None,
            **options,
        )
        if self._probe:
            self._probe.loaders.append(made)
        return made

    def data(self, path: str | os.PathLike[str]) -> os.PathLike[str]:
        """`path`, or what lies at it in the local copy of the plan's `[data] cache`: from the end of the epoch in which
        that copy was whole and verified. Which of them is found out at each use, in loading processes, too: keep what
        this returns and open `os.path.join(it, name)` or `it / name`. The bytes are the same; a folder's order may differ.
        """
        return self._data.path(path)

    def epochs(self, count: int) -> Iterator[int]:
        """The epochs still to do of this loop; a second loop in the same script begins when the first one is over.

        None in a stage that goes on from its final checkpoint: its training is over, what its script does besides is not.
        """
        number, self._loops_seen = self._loops_seen, self._loops_seen + 1
        if number < self._loop or self._is_trained:
            return
        if number > self._loop:  # the script has left the loop before it early
            self._loop, self._epoch, self._batch = number, 0, 0
        self._epochs_wanted = int(count)
        self._epochs_total = count = min(int(count), 1) if self.quick else int(count)
        while self._epoch < count:
            self._epoch_is_open = True
            if self._curve:
                self._curve.epoch = self._epoch + 1
            yield self._epoch
            if self._probe:
                self._probe.epoch_over()
            self._epoch, self._batch = self._epoch + 1, 0
            if self._replay is not None:
                self._replay.end()
            self._save_best_between_epochs()  # of what an evaluation has reported, also after the last epoch
            self._data.look()
        self._batch, self._epochs_done = 0, count  # loop and epoch stay: a longer loop goes on from there (`--extend`)

    def steps(self, loader: Iterable[Any], epochs: int | None = None) -> Iterator[Any]:
        """Batches still to do, of this epoch or, given `epochs`, of them all; one is one optimizer step.

        `loader` is session.loader()'s, or any other: a resume in the middle of an epoch then reads again what the
        epoch had used (replay.py), and `exactness` says how far that carries.

        Between two of them all ranks save or stop together when it is time; a stop raises SessionOver.
        With more than two ranks of DistributedDataParallel the first batch after a resume comes twice: what its
        first time does to tracked things is undone.
        """
        if epochs is None:
            return self._steps_of_epoch(loader)
        return (batch for _ in self.epochs(epochs) for batch in self._steps_of_epoch(loader))

    def _steps_of_epoch(self, loader: Iterable[Any]) -> Iterator[Any]:
        if not self._epoch_is_open:
            raise KgorchError(
                "session.steps(loader) was called outside of an epoch, or twice in one",
                next_step="write `for epoch in session.epochs(n): for batch in session.steps(loader):`, or steps(loader, n)",
            )
        self._epoch_is_open = False
        source = self._source(loader)
        source.seek(self._epoch, self._batch)
        if self._rng:
            state.set_rng_state(self._rng, self.device)
            self._rng = None
        given = source.parts()  # a replay happens here, and counts as no step's time
        if self._replay is not None:
            self._batch = self._replay.batch
            self._tell_of_replay(self._replay)
        left = self._epochs_total - self._epoch
        self._steps_total = self._step - self._batch + len(source) * left if len(source) else 0
        if self._probe:
            given = self._probe.batches(source, self._epochs_wanted)
        elif self.quick:
            self._steps_total, given = self._step - self._batch + 1, itertools.islice(given, max(0, 1 - self._batch))
        self._warn_of_nothing_tracked()
        self._tick(
            "step" if "first_step" in self._place.longest else "first_step"
        )  # since the last step; an evaluation perhaps
        self._climb_in(source)
        self._save_best_between_epochs()  # an evaluation before the epoch's first step, or after a resume
        for parts in self._gauges.fetched(given):
            if self._probe:
                self._batch = 0  # it has gone back to the first ones perhaps
            self._samples_now = source.samples_in(self._batch)
            shares = [source.share_of_rank(self._batch, rank) for rank in self._ranks.mine]
            divided_by = self._ranks.count if self.world_size == 1 else self.world_size  # after the backward
            weights = [share * divided_by / self._samples_now for share in shares]
            if self._rehearse:
                yield from self._rehearsal(parts, weights)
            self._backward.give(parts, weights)
            if self._backward.has_dropout_state:
                state.renew_dropout_state(self.device)
            self._in_step = True
            try:
                yield parts[0]
            finally:  # also where the script leaves the loop early: then this step does not count
                self._in_step = False
            self._check_way_back()
            self._step += 1
            self._batch += 1
            self._samples += self._samples_now
            self._boundary()
        self._place.enter("evaluation")

    def _warn_of_nothing_tracked(self) -> None:
        """Before the first step, while nothing is lost yet."""
        if self._launch and not self._tracked and self.rank == 0 and self._step == 0 and self._batch == 0:
            what = "it takes steps and has not called session.track(): nothing of it can be saved"
            if self._probe:
                raise KgorchError(
                    what, next_step="name what a checkpoint must hold: session.track(model=…, optimizer=…)"
                )
            print(f"kgorch: {what}", file=sys.stderr, flush=True)
            self._link.send(
                JournalEntry(
                    self._launch.attempt, EventKind.TRACKS_NOTHING, {"stage": self._launch.stage, "what": what}
                )
            )

    def _climb_in(self, source: Loader | Replay) -> None:
        """Onto the rung that was in force at this step."""
        if self._ladder and self._tracked:
            self._ladder.begin(
                self._step,
                max((source.share_of_rank(self._batch, rank) for rank in range(self._ranks.count)), default=0),
            )
            self._ladder.tell(self.rank)
        if self._health and self._tracked:
            self._health.begin(self._tracked, self._step)

    def _check_way_back(self) -> None:
        """A script whose every batch goes through `backward` as it came can be played by fewer processes."""
        if not self._backward.came:
            self._refuse_to_divide("each batch must go to session.backward() as session.steps() gave it")
        elif self._backward.communicates:
            self._refuse_to_divide("the ranks communicate in the forward or backward of a step")

    def _refuse_to_divide(self, why: str) -> None:
        """Fewer processes cannot play this run's ranks from here on; they must not be doing so."""
        self._divisible = False
        if self._ranks.are_split:
            raise KgorchError(f"{self._ranks.said()}: {why}", next_step=f"run on {self._ranks.count} ranks again")

    def _source(self, loader: Iterable[Any]) -> Loader | Replay:
        source: Loader | Replay
        if isinstance(loader, Loader):
            source, self._replay, data = loader, None, "keyed"
        else:
            source = self._replay = Replay(loader, self.world_size, self.device, self._began, self._ranks_before)
            source.refuse(self._tracked)
            self._refuse_to_divide("a loader that is not session.loader()'s cannot be divided")
            self._began, data = None, source.exactness
        self._tell_exactness(data=data, deterministic=self._determinism.verdict)
        return source

    def _tell_of_replay(self, replay: Replay) -> None:
        """What is known of a foreign loader by now: some of it shows as it is read."""
        lost = {"resume": replay.lost} if replay.lost else {}
        self._tell_exactness(data=replay.exactness, **lost)

    def _rehearsal(self, parts: list[Any], weights: list[float]) -> Iterator[Any]:
        """The batch once to no effect: whatever the script does with it to tracked things is undone."""
        kept, rng = state.capture(self._tracked), state.rng_state(self.device)
        copies = {name: tensor.to("cpu", copy=True) for name, tensor in kept.tensors.items()}
        played = dict(self._ranks.random_states)
        self._rehearse, self._backward.rehearses = False, True
        self._backward.give(copy.deepcopy(parts), weights)
        yield self._backward.parts[0][0]
        self._backward.rehearses = False
        self._ranks.random_states = played
        for module in self._modules():
            module.zero_grad(set_to_none=True)
        state.put_back(self._tracked, kept, copies)
        state.set_rng_state(rng, self.device)

    def _tick(self, place: str = "step") -> float:
        """Seconds since this was called last; the longest of them is told. What begins is a `place` of core/hang_detection.py."""
        now_s = time.monotonic()
        self._place.enter(place, now_s)
        passed_s = now_s - self._ticked_s if self._ticked_s else 0.0
        if passed_s > self._gap_s:
            self._gap_s = passed_s
        self._ticked_s = now_s
        return passed_s

    def _boundary(self) -> None:
        self._step_s = self._tick()
        if self._gauges.sample(self._ticked_s):
            self._look_at_refusals()
        if self._metrics.pending:
            self._metrics.collect()
        self._tell_exactness(deterministic=self._determinism.verdict)
        act = 0
        if self._board:
            if self._ticked_s >= self._next_snapshot_s:
                self._next_snapshot_s = math.inf  # until it is taken
                self._board.ask(SNAPSHOT)
            act = self._board.tick(self._step)
        if self._step == self._stop_at:
            raise SessionOver(saved=self._save_and_wait())
        if act:
            self._act(act)
        if self._best and self._tracked and (act := self._best.after_step(self._step, self._saved_at)):
            began_s = time.monotonic()
            self._save_best(act)
            self._best.spent(time.monotonic() - began_s)
        if self._ladder:
            self._ladder.tidy(self._step)
            if self._step == self._ladder.next_change:
                self._ladder.change(self._step)
        if self._health:
            self._health.boundary(self._step)

    def _look_at_refusals(self) -> None:
        """Allocations that were refused in steps that came through: cuDNN then takes an algorithm that needs less."""
        if refused := oom.refusals.look():
            self._refused += refused
            self._tell_exactness(
                memory=f"{self._refused} allocations were refused in steps that came through: near the memory limit another"
                " algorithm may have been used, whose bits differ"
            )

    def _act(self, act: int) -> None:
        slot = 1 if act & SLOT else 0
        if act & STOP:
            raise SessionOver(saved=self._save_and_wait(slot=slot))
        if self._ladder and act & DOWN:
            self._ladder.down(self._step, "memory is nearly full", tells=self.rank == 0, must=False)
        if self._ladder and act & UP:
            self._ladder.up(self._step, tells=self.rank == 0)
        if not act & (SAVE | SNAPSHOT):
            return
        self._place.enter("save")
        if act & SAVE:
            self._saver.wait()  # one of a new best may have come between the request and this step
        taken = self._save(slot, self._seen(), persist=bool(act & SAVE))
        self._place.enter("step")
        self._plan_snapshot(later=1.0 if taken else AFTER_A_MISS)

    def _save_best_between_epochs(self) -> None:
        if self._best and self._tracked and (act := self._best.between_epochs(self._step, self._saved_at)):
            self._save_best(act)

    def _save_best(self, act: int) -> None:
        """All ranks, at the step whose weights rank 0's best figure was measured on. A stop that waits for its step comes now."""
        if act & STOP:
            raise SessionOver(saved=self._save_and_wait(slot=1 if act & SLOT else 0))
        where = self._place.where
        self._place.enter("save")
        self._saver.wait()
        self._saved_at = None  # a save of this step that is not on disk
        self._save(1 if act & SLOT else 0, self._seen(), persist=True)
        self._place.enter(where)

    def _plan_snapshot(self, later: float = 1.0) -> None:
        interval_s = self._saver.interval_s if self._tracked and self.rank == 0 else None
        self._next_snapshot_s = math.inf if interval_s is None else time.monotonic() + interval_s * later

    def _save_and_wait(self, *, slot: int | None = None, final: bool = False) -> bool:
        """Save, and see it on disk; once more should the keeper be lost meanwhile, for training stands still."""
        assert self._launch
        if not self._tracked:
            return True
        self._place.enter("save")
        seen = self._seen()
        for _ in range(2):
            if slot is None:  # nobody has chosen one that is not being written
                self._saver.wait()
                slot = self._saver.next_slot()
            if self._save(slot, seen, persist=True, final=final) and self._saver.wait():
                return True
            if is_on_disk(self._launch, self._step, final=final):
                return True
            self._saved_at = slot = None
        return False

    def _save_final(self) -> bool:
        global final_step
        saved = self._save_and_wait(final=True)
        if saved and self._tracked and self._probe is None:
            final_step = self._step
        return saved

    def _seen(self) -> Seen | None:
        """The state as it is now, once all ranks have seen that it is numbers. Raises: Unwell."""
        if not self._tracked:
            return None
        # What is queued has to be computed in any case: waiting for it is no part of what a save costs.
        if self.device.type == "cuda":
            torch.cuda.current_stream().synchronize()
        began_s, looked_s = boottime_s(), 0.0
        with collector.paused():  # its turn may come in the midst of all these small things, and cost more than they
            captured = state.capture(self._tracked)
        mine = image.share(captured.tensors, captured.own, self.rank, self.world_size)
        busy_s = boottime_s() - began_s
        if self._health and self._board and self._probe is None:  # whose state nobody goes on from
            looked_s = self._health.look(_alike(self._tracked, mine), self._step, self._board.vote)
        return Seen(captured, mine, boottime_s() - busy_s - looked_s)  # waiting for the others is no part of it

    def _save(self, slot: int, seen: Seen | None, *, persist: bool, final: bool = False) -> bool:
        """Copy the state aside; a step that is saved already is not saved twice, except as a stage's last."""
        if seen is None or (self._saved_at == self._step and not final):
            return True
        self._determinism.probe()
        self._tell_exactness(deterministic=self._determinism.verdict)
        if self._replay is not None:
            self._tell_of_replay(self._replay)
        with collector.paused():
            saved = self._save_now(slot, seen, persist=persist, final=final)
        if saved and persist:
            self._saved_at = self._step
            if self._best and not final:
                self._best.saved(self._step)
        return saved

    def _save_now(self, slot: int, seen: Seen, *, persist: bool, final: bool) -> bool:
        assert self._launch
        self._metrics.collect(wait=True)
        if self._curve:
            self._curve.cut()
        described = Manifest(
            run=self._launch.run,
            run_id=self._launch.run_id,
            stage=self._launch.stage,
            final=final,
            position=Position(self._loop, self._epoch, self._batch, self._step, self._samples),
            world_size=self._ranks.count,
            divisible=self._divisible,
            created_at=datetime.now(UTC).isoformat(),
            plan_hash=self._launch.plan_hash,
            metrics=self._metrics.values,
            measured=self._metrics.measured,
            versions=group.versions(__version__, self.device)
            | {"deterministic": self._determinism.level}
            | (plain_of(self._ladder.settings) if self._ladder else {}),
            changes=tuple(self._ladder.changes.taken) if self._ladder else (),
        )
        docs = self._rank_documents(seen.captured, seen.mine)
        return self._saver.save(
            seen.captured, seen.mine, docs, described, slot=slot, persist=persist, began_s=seen.began_s
        )

    def _rank_documents(self, captured: state.Captured, mine: Iterable[str]) -> dict[str, dict[str, Any]]:
        """rankK.json of this process's ranks: the first one's holds the names of the tensors that the process writes."""
        random_states = {self._ranks.first: state.rng_state(self.device), **self._ranks.random_states}
        if self._replay is not None:
            random_states[self._ranks.first]["loader"] = self._replay.place
        return {
            f"rank{rank}.json": {
                "rng": random_states[rank],
                "own": captured.own_tree,
                "tensors": sorted(mine) if rank == self._ranks.first else [],
            }
            for rank in self._ranks.mine
        }

    # One step

    def backward(self, batch: Any, loss_of: Callable[[Any], torch.Tensor], *, scaler: Any = None) -> torch.Tensor:
        """Forward and backward of this rank's batch in microbatches: the same gradient, in less memory.

        Each part is moved to the device, weighted by its share of the global batch, and all but the last run without
        DDP's all-reduce. When memory runs out on any rank, all do the batch again, a rung further down the plan's ladder.

        Args:
            loss_of: takes a part (of the batch's own structure), returns its mean loss, a scalar.
            scaler: a GradScaler, if one is used.
        Returns:
            The mean loss over this rank's batch, detached, not waited for. Scalar.
        """

        def work(part: Any, weight: float) -> torch.Tensor:
            with self._probe.forward() if self._probe else contextlib.nullcontext():
                loss = loss_of(part)
            weighted = loss if weight == 1 else loss * weight
            (scaler.scale(weighted) if scaler else weighted).backward()
            return loss.detach()

        return self.accumulate(batch, work, scaler=scaler)

    def accumulate(self, batch: Any, work: Work, *, scaler: Any = None) -> torch.Tensor:
        """`backward` for loops that do their own: `work(part, weight)` does the forward of a part of the batch and the
        backward of its loss times `weight`, and returns that mean loss, detached. It may be called again for the same part,
        so it must leave nothing behind but gradients. `scaler`: the GradScaler that `work` uses, if any.
        """
        if self._probe:
            self._probe.instead(batch, work)
        return self._backward.run(self._step, batch, work, scaled=scaler is not None and scaler.is_enabled())

    def autocast(self, dtype: torch.dtype = torch.float16, *, enabled: bool = True) -> torch.autocast:
        """torch.autocast on this rank's device, until a NaN has the plan's remedies turn it to bfloat16 or off."""
        amp = self._ladder.settings.amp if self._ladder else ""
        if amp == "bf16":
            dtype = torch.bfloat16
            amp = (
                "off" if self.device.type == "cuda" and torch.cuda.get_device_capability(self.device) < (8, 0) else amp
            )
        enabled = enabled or (self._probe is not None and self._probe.as_on_cuda)
        return torch.autocast(self.device.type, dtype, enabled=enabled and amp != "off")

    def to_device(self, batch: Any) -> Any:
        """The batch's tensors on this rank's device; the copy does not wait where memory is pinned."""
        return batches.moved(batch, self.device)

    def report(self, **metrics: Any) -> None:
        """Figures for `status`, the checkpoint and `keep.best`: numbers, or tensors of one element.

        Each counts as measured on the weights as they are now; within a step, on those after its optimizer's step. One that
        beats the plan's `keep.best` so far has them saved before they change: report it between epochs, on rank 0 or on
        all ranks, or right after the optimizer's step, on all ranks.

        At most 1,000 names of at most 200 letters are kept, those that came first. A tensor on a GPU is copied as it is
        now, and not waited for.

        Raises: KgorchError for anything else.
        """
        if not self._backward.rehearses:
            epoch = self._curve.epoch if self._curve else 0
            mark = Mark(self._step + self._in_step, epoch, not self._in_step)
            for name, value in metrics.items():
                self._metrics.report(name, value, mark)
            self._tell_dropped_metrics()
            if self._best and self._in_step and self._best.metric in metrics:
                self._best.hear(mark.step)
            if self._place.where == "evaluation":  # between two epochs: no step waits, and the next look may be far
                self._metrics.collect(wait=True)

    # What is told

    def _tell_dropped_metrics(self) -> None:
        """Once."""
        if self._metrics.dropped and not self._metrics_dropped_told:
            self._metrics_dropped_told = True
            print(f"kgorch: session.report(): not kept: {self._metrics.dropped}", flush=True)
            if self._launch and self.rank == 0:
                self._link.send(
                    JournalEntry(self._launch.attempt, EventKind.METRICS_DROPPED, {"why": self._metrics.dropped})
                )

    @property
    def exactness(self) -> dict[str, str]:
        """What holds of the promise of the same bits, in words: of `data` (the loader), of `deterministic`."""
        return dict(self._exactness)

    def _modules(self) -> Iterator[nn.Module]:
        return (thing for thing in self._tracked.values() if isinstance(thing, nn.Module))

    def _tell_exactness(self, **facts: str) -> None:
        """What holds of the same bits, to the supervisor when it has changed."""
        if not facts.items() <= self._exactness.items():
            self._exactness |= facts
            if self._launch and self.rank == 0:
                self._link.send(JournalEntry(self._launch.attempt, EventKind.EXACTNESS, self.exactness))

    def _hello(self) -> Hello:
        assert self._launch
        return Hello(self._launch.attempt, self.rank, os.getpid(), self._step, self._state_bytes, bool(self._tracked))

    def _told(self) -> Iterator[Message]:
        assert self._launch
        yield self._place.told(self._launch.attempt, self.rank, self._modules())
        if self._probe is None:  # which reads the same marks of the most that was taken, and puts them back
            yield RankMetrics(self._launch.attempt, self.rank, self._gauges.read(self._step_s))
        if self.rank == 0:
            yield self._beat(self._launch.attempt)

    def _beat(self, attempt: str) -> Heartbeat:
        gap_s, self._gap_s = self._gap_s, 0.0
        if self._ticked_s:
            gap_s = max(gap_s, time.monotonic() - self._ticked_s)
        return Heartbeat(
            attempt,
            self._epoch or self._epochs_done,
            self._step,
            self._samples,
            gap_s=gap_s,
            step_s=self._step_s,
            steps_total=self._steps_total,
            epochs_total=self._epochs_total,
            metrics=self._metrics.values,
        )


def _alike(tracked: Mapping[str, Any], mine: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Of a rank's share the modules' and optimizers' tensors: other things may well hold what is no number."""
    return {name: tensor for name, tensor in mine.items() if state.is_replicated(tracked[name.partition(".")[0]])}
