"""The public API of a training script under kgorch: what `kgorch.attach()` returns.

Everything that happens to the training happens inside `steps()` and `epochs()`, between two optimizer steps, at a step on which all
ranks have agreed (ranks/consensus_board.py): never in a signal handler, never in an `except`. Between those moments the script
owns the process.

What a script calls within a step is inherited (step_computation.py). The work is done by the parts: step_loop.py and own_loop.py
(epochs, steps, boundaries), restore.py (how a stage begins), session_end.py (how it ends), save_coordinator.py (when the state is
saved), supervision.py (connections to the supervisor, the keeper and the ranks).
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterable, Iterator
from types import TracebackType
from typing import Any

import torch

from kgorch.protocol.launch_spec import LaunchSpec
from kgorch.worker import output_folder, restore, session_end
from kgorch.worker.checkpoint import sharded_tensors, stage_weights
from kgorch.worker.checkpoint.resumed_state import ResumedState
from kgorch.worker.checkpoint.stage_weights import Weights
from kgorch.worker.data import loader_reads
from kgorch.worker.data.cached_path import CachedPaths
from kgorch.worker.data.followed_loader import FollowedLoader
from kgorch.worker.data.generator_states import TrackedGenerator
from kgorch.worker.data.keyed_loader import Loader
from kgorch.worker.data.loader_search import generator_types
from kgorch.worker.data.value_cache import ProgressLog, ValueCache
from kgorch.worker.determinism import Determinism
from kgorch.worker.memory import activation_checkpointing
from kgorch.worker.own_loop import OwnLoop
from kgorch.worker.ranks import data_ranks, process_group
from kgorch.worker.ranks.virtual_ranks import VirtualRanks
from kgorch.worker.session_end import SaveLost, SessionOver
from kgorch.worker.session_state import SessionState
from kgorch.worker.step_computation import StepComputation
from kgorch.worker.step_loop import StepLoop
from kgorch.worker.supervision import Supervision

__all__ = ["SaveLost", "Session", "SessionOver"]


class Session(StepComputation):
    """A rank's part in a run. Use it as a context manager around the whole training.

    Attributes:
        rank: of this process in this attempt, from 0; another session may have other ranks.
        world_size: number of ranks of this attempt.
        device: the torch.device on which this rank computes.
        supervised: False when the script runs alone.
        output: folder for results; it outlives the session and is shared by the stages.
        quick: this is a quick test or a probe: loaders give a few batches only, so results are not complete.

    Args:
        is_guest: another library owns the process: it has seeded the random generators, and uses the process group afterwards.
    """

    def __init__(
        self, launch: LaunchSpec | None, seed: int | None, deterministic: str | None = None, *, is_guest: bool = False
    ) -> None:
        self.supervised = launch is not None
        if launch:
            process_group.require_ranks(launch.ranks)
        level = deterministic or (launch.deterministic if launch else "off")
        determinism = Determinism(level, on_cuda=torch.cuda.is_available())  # before CUDA starts
        gpus, timeout_s = (launch.device, launch.collective_timeout_s) if launch else ("", None)
        member = process_group.join(supervised=self.supervised, gpus=gpus, timeout_s=timeout_s)
        self.rank, self.world_size, self.output = member.rank, member.world_size, output_folder()
        self._seed = seed if seed is not None else (launch.seed if launch else 0)
        if not is_guest:
            process_group.seed_all(self._seed + self.rank)
        state = SessionState.create(launch, member, determinism)
        self.quick = state.quick
        supervision = self._supervision = Supervision(state, launch) if launch else None
        super().__init__(state, supervision.guards if supervision else None)
        loader_reads.wrap_starts()
        self._paths = CachedPaths(launch, self.rank)
        self._values = ValueCache(launch, member, state.marker, state.events)
        self._progress = ProgressLog(state.marker, state.events.send)
        self._loop = StepLoop(state, self._runner, self._paths, supervision, is_guest=is_guest)
        self._own_loop = own_loop = OwnLoop(state, self._loop)
        self._check_end: Callable[[], None] = lambda: None

        def end(error: BaseException | None) -> None:
            if isinstance(error, Exception):
                self._runner.report_use()  # if memory has run out: before its second step nobody has told
            try:
                session_end.close(error, state, own_loop, supervision, leaves_group=not is_guest, check=self._check_end)
            finally:
                self._loop.close()

        session_end.opened(end)
        if supervision:
            supervision.link.start()

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        session_end.end(error)

    def end(self) -> None:
        """The training is over: save the stage's last state. The rest of the script may use it.

        Called by itself where the `with` block ends, else at the end of the script. Call it where much work follows the training:
        a session that is stopped in it then repeats this work alone.

        Raises:
            SaveLost: the save has failed.
            Unwell: the final state is not finite.
        """
        session_end.end(None)

    # State

    def track(self, **things: Any) -> None:
        """Name what a checkpoint must hold: modules, random generators, and anything with state_dict() and load_state_dict().

        Call it once, when all of it is built. A run that continues is restored here, and a stage that begins is given its
        starting weights, if the plan names some.

        Raises:
            KgorchError: a second call, or an object without a state_dict().
            CannotRestore: the checkpoint holds other names or shapes.
            WeightsRefused: the starting weights do not fit.
        """
        state, tracked = self._state, self._state.tracked
        for name, thing in things.items():
            if isinstance(thing, generator_types()):
                things[name] = TrackedGenerator(thing)
        tracked.set(things)
        self._runner.set_modules(tracked.modules())
        # Before a restore, so that one process then takes the whole batch, which is right.
        if activation_checkpointing.has_sync_batchnorm(tracked.modules()):
            state.division.refuse("SyncBatchNorm normalises over all ranks of a step")
        if sharding := sharded_tensors.describe(tracked.tensors()):
            state.division.refuse("ranks of a sharded model hold different pieces, and one process cannot play two")
            how = "each rank saves the pieces that it holds; where memory runs out in a step, a rung starts the ranks again"
            state.exactness.update(sharding=f"mesh {sharding}: {how}")
        sizes = tracked.measure(self.world_size)
        state.probe.learn(things, tracked.state_bytes, self._runner)
        if self._supervision:
            _ = self.resumed  # read now: what it is read from does not last
            self._loop.resume(restore.begin(state, self._supervision, sizes))

    def untrack(self) -> None:
        """Undo `track`, before a step was taken: the script builds its objects anew, and tracks those."""
        state = self._state
        state.tracked.clear()
        self._runner.set_modules([])
        if self._supervision:
            self._supervision.ladder.set_modules({})
        self._own_loop.undo_begin()

    @functools.cached_property
    def resumed(self) -> ResumedState:
        """What this session continues from, readable before `track()`: false where the stage begins.

            best = session.resumed.get("best", 0.0)     # from session.remember(best=…) of an earlier session

        Raises:
            CheckpointBroken: the checkpoint cannot be read.
        """
        member, launch = self._state.member, self._state.launch
        source = self._supervision.source if self._supervision else None
        rank = member.rank if source and source.manifest.world_size == member.world_size else 0
        return ResumedState(source, rank, extends=bool(launch and launch.extends))

    @property
    def step(self) -> int:
        """Optimizer steps of the stage that are done, those of earlier sessions included."""
        return self._state.position.step if self._state.tracked else self.resumed.step

    @property
    def epoch(self) -> int:
        """Epochs that are done, those of earlier sessions included."""
        return self._state.position.epoch if self._state.tracked else self.resumed.epoch

    def remember(self, **values: Any) -> None:
        """Have every later checkpoint hold plain values: the best score so far, a history, an index.

        `session.resumed[name]` gives them back. They are copied now: call it again when one has changed. A value that is the
        same on every rank is enough; each rank has its own.

        Raises:
            KgorchError: a tensor or an object, which `track` takes; or more than 64 KiB in all.
        """
        self._state.remembered.update(values)

    def weights(self, stage: str, name: str = "model", *, which: str | None = None) -> Weights:
        """The state_dict of the module `name` of another stage of this run (checkpoint/stage_weights.py).

        Args:
            which: "best" for the stage's best checkpoint by the plan's `keep.best`, "final" for its last one. None takes the best
                where the plan keeps one and it was measured, else the final one; `.label` of the result says which it is.

        Raises:
            CannotRestore: that stage has left no such checkpoint.
            CheckpointBroken: its bytes differ from its manifest; every byte is compared first.
        """
        return stage_weights.read(self._state.launch, stage, name, which)

    def cached(self, name: str, compute: Callable[[], Any], *, key: Any) -> Any:
        """The result of `compute`, computed once in a run: headers of many files, for example. All ranks call this together.

        Rank 0 calls `compute` unless an earlier session has stored the value under this name and key. The other ranks wait for
        it, without a time-out, and all ranks get the same value. A computation of many minutes should call `session.progress`.

        A value that came with the state of another machine may have been written by anybody: check it before you rely on it, as
        you would check a downloaded file.

        Args:
            name: of the file in the run's folder: letters, digits, '.', '_' and '-'.
            compute: returns what JSON can hold, at most 64 MiB of it. Tuples come back as lists, keys of dicts as text.
            key: what the value depends on, as JSON: a list's size and time, options. Another key has it computed again.

        Raises:
            KgorchError: a value or key that is not JSON, or is too large.
            PeersLost: `compute` failed on rank 0, where its own exception is raised.
        """
        return self._values.get(name, compute, key)

    def progress(self, what: str, done: int, total: int | None = None) -> None:
        """Report the progress of something that takes long without steps, in `session.cached` or an evaluation.

        It goes to the log and to `status`, and keeps the rank from being counted as hung. Calls are cheap and rate-limited.
        """
        self._progress.to(what, done, total)

    # Loops

    def loader(
        self, dataset: Any, global_batch: int, *, shuffle: bool = True, drop_last: bool = True, is_random: bool = True,
        mesh: Any = None, **options: Any,
    ) -> Loader:  # fmt: skip
        """A DataLoader over this rank's share whose order is the same on any number of ranks and workers (data/keyed_loader.py).

        Args:
            global_batch: samples of one optimizer step, over all ranks.
            is_random: a sample may draw random numbers, for augmentation: the generators are seeded for each one. False saves
                the time of that, some 15 µs a sample, and reads a batch by the dataset's `__getitems__` where it has one. A
                `collate_fn` may draw in any case.
            mesh: the data-parallel DeviceMesh, `mesh["dp"]`, over whose ranks samples are divided: ranks beside each other in
                another dimension get the same ones. None takes it from the meshes of the tracked model by the dimensions' names
                (ranks/data_ranks.py): those of "tp" and "cp" get the same samples, of all others their own.
            options: further arguments of torch's DataLoader (num_workers, collate_fn, prefetch_factor, …). With workers,
                persistent_workers is true unless it is given; they start anew with an epoch before which dataset or `collate_fn`
                was changed.

        Raises:
            KgorchError: the dataset has no length or index, or too few samples; more ranks than samples of a global batch; a
                sharded model whose meshes do not say how to divide. While samples are read: one drew random numbers in spite of
                `is_random=False`.
        """
        if self._supervision:
            options = self._supervision.ladder.loader_options(options)
        state = self._state
        loader = Loader(
            dataset, global_batch, seed=self._seed, shuffle=shuffle, drop_last=drop_last, is_random=is_random,
            ranks=self._ranks_of_loader(mesh),
            most=state.most_batches, **options,
        )  # fmt: skip
        state.probe.add_loader(loader)
        return loader

    def _ranks_of_loader(self, mesh: Any) -> Callable[[], VirtualRanks]:
        """Returns the ranks whose samples a loader reads. It is asked again and again: session.track() may come after it."""
        state = self._state
        if mesh is not None:
            state.division.refuse("session.loader() was given a mesh")
            of_mesh = data_ranks.of_mesh(mesh)
            return lambda: of_mesh
        of_modules = functools.cache(lambda: data_ranks.of_modules(state.tracked.modules(), self.world_size))
        return lambda: (of_modules() if state.tracked else None) or state.division.ranks

    def data(self, path: str | os.PathLike[str]) -> os.PathLike[str]:
        """`path`, or its place in the local copy of the plan's `[data] cache`.

        The local copy is used from the end of the epoch in which it was complete and verified. Which of the two is used is
        decided at each access, also in loading processes: keep the returned object and open `os.path.join(it, name)` or
        `it / name`. The bytes are the same; the order of a folder's entries may differ.
        """
        return self._paths.path(path)

    def boundary(
        self, *, samples: int | None = None, epoch: int | None = None, open_batches: int | None = None
    ) -> None:
        """A step begins here: for loops that do not take their batches from `steps()`.

            for step in range(session.step, 5000):
                session.boundary()
                x, y = random_batch()
                …
                optimizer.step()

        Call it once a step on all ranks, after what belongs to the step before it (its evaluation, its report) and before the
        first random number of this one. It counts the step before, saves or stops when it is time, and at its first call after
        a resume it sets the random states. Between two backwards of the same optimizer step it does nothing.

        Args:
            samples: of this step over all ranks, for the throughput; counted by the followed loaders when None.
            epoch: number of the running epoch from 0; that of `epochs()` or of the first followed loader when None.
            open_batches: batches of this very step that followed loaders have given before this call. None where it is as many
                at each step, as in the body of a `for` loop.

        Raises:
            KgorchError: the stage's training is over (`session.resumed.is_finished`).
            PeersLost: a rank has died.
        """
        self._own_loop.boundary(samples=samples, epoch=epoch, open_batches=open_batches)

    def follow(self, loader: Iterable[Any], *, name: str | None = None) -> FollowedLoader:
        """A loader for a loop that does not use `steps()`, or a further loader of one that does: iterate the result instead.

        A checkpoint holds its position. The first iteration after a resume gives the rest of the epoch, by reading again what
        the epoch had used (data/loader_fast_forward.py).

        Args:
            name: in the checkpoint; `loader0`, `loader1`, … in the order of the calls when None.

        Raises:
            KgorchError: the name is taken.
        """
        return self._own_loop.follow(loader, name)

    def add_followed(self, loader: FollowedLoader, name: str) -> None:
        """`follow` for a loader of a class of its own, which is iterated by itself."""
        self._own_loop.add(loader, name)

    @property
    def generators_of_loaders(self) -> list[Any]:
        """The random generators that are saved with the places of the followed loaders."""
        running = (loader.running for loader in self._state.followed.values())
        return [item for epoch in running if epoch is not None for item in epoch.generators]

    def restore_random_states(self) -> None:
        """Set the random states of the save now, and not at the first boundary: an epoch begins before it."""
        self._loop.restore_random_states()

    def drop_followed(self, name: str) -> None:
        """Later checkpoints do not hold the loader of that name."""
        self._own_loop.drop(name)

    def at_end(self, check: Callable[[], None]) -> None:
        """Call `check` where the script has ended without an error, before the last save: a KgorchError of it fails the session."""
        self._check_end = check

    def name_untracked(self, tracks_by: str) -> None:
        """Have `exactness` name state of the script that no checkpoint holds, also where the session is a guest.

        Args:
            tracks_by: what the script is to give it to.
        """
        self._loop.audit.name_untracked(tracks_by)

    def note_exactness(self, **facts: str) -> None:
        """Add to what `status` and `exactness` say of identical results, by topic."""
        self._state.exactness.update(**facts)

    @property
    def is_step_done(self) -> bool:
        """An optimizer has stepped since the newest boundary."""
        return self._loop.is_after_step

    def expect(self, *, steps: int | None = None, epochs: int | None = None) -> None:
        """Tell `status` how many steps or epochs the stage has, where `session.steps` cannot know it."""
        self._loop.expect(steps, epochs)

    def evaluation(self) -> contextlib.AbstractContextManager[None]:
        """What is done in the block is an evaluation: it has the time-out of one, and each value that is reported counts."""
        return self._state.marker.evaluation()

    def epochs(self, count: int) -> Iterator[int]:
        """The epochs of this loop that are still to do, as numbers from 0.

        A second loop in the same script begins when the first one is over. A stage that continues from its final checkpoint
        gets no epochs: its training is over, and only the rest of its script runs.
        """
        return self._loop.epochs(count)

    def steps(self, loader: Iterable[Any], epochs: int | None = None) -> Iterator[Any]:
        """The batches that are still to do, of this epoch or, given `epochs`, of all of them; each is one optimizer step.

        The length of what it returns is that of the whole epoch, or of all of them; an `enumerate` around it that begins
        with 0 or 1 counts on after a resume.

        `loader` is session.loader()'s or any other iterable. For another one a resume in the middle of an epoch reads again what
        the epoch had used (data/loader_fast_forward.py), and `exactness` says how far that carries.

        Between two batches all ranks save or stop together when it is time.

        Raises:
            SessionOver: the session stops here; let it pass.
            KgorchError: called outside of an epoch, or twice in one.
        """
        return self._loop.steps(loader, epochs)

    # Results

    def report(self, **metrics: Any) -> None:
        """Report metrics for `status`, the checkpoint and `keep.best`: numbers, or tensors of one element.

        Each counts as measured on the current weights; within a step, on those after its optimizer's step. A value that beats
        the plan's `keep.best` has the weights saved before they change: report it between epochs, on rank 0 or on all ranks, or
        right after the optimizer's step, on all ranks.

        At most 1,000 names of at most 200 characters are kept, those that came first. A tensor on a GPU is copied as it is now,
        without waiting for it.

        Raises:
            KgorchError: a value is neither a number nor a tensor of one element.
        """
        state, mark = self._state, self._loop.mark
        for name, value in metrics.items():
            state.metrics.report(name, value, mark)
        best = self._supervision.best if self._supervision else None
        if best and best.metric in metrics and self._loop.is_after_step:
            best.note_report(mark.step)
        if state.marker.where == "evaluation":  # no step waits here, and the next look at copies may be far away
            state.metrics.collect(wait=True)

    @property
    def exactness(self) -> dict[str, str]:
        """What is known of identical results, in words by topic: `data` (the loader), `deterministic`, `ranks`, …"""
        return dict(self._state.exactness.facts)
