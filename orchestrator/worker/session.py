"""A training script's side of a session: where to go on, when to save, when to stop.

All that happens to the training happens in `steps()`, between two optimizer steps, at a step on which all ranks have
agreed (board.py): never in a signal handler, never in an `except`. Between those moments the script owns the process.
"""

from __future__ import annotations

import contextlib
import copy
import os
import signal
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from orchestrator import __version__, manifest
from orchestrator.errors import CannotRestore, KgorchError
from orchestrator.manifest import Manifest, Position
from orchestrator.wire import BOARD_VARIABLE, Beat, Hello, Launch, Note
from orchestrator.worker import batches, group, output_folder, starting, state
from orchestrator.worker.board import STOP, Board
from orchestrator.worker.link import Link
from orchestrator.worker.loader import Loader
from orchestrator.worker.save import Saver


class SessionOver(SystemExit):
    """Ends the script at a step boundary. Exit status 0; let it pass. `saved`: whether its last save is in place."""

    def __init__(self, *, saved: bool) -> None:
        super().__init__(0)
        self.saved = saved


class SaveLost(RuntimeError):
    """A save that must not fail has failed."""


class Session:
    """Attributes:
    device: where this rank computes. rank, world_size: of this attempt; another session may have other ones.
    supervised: False when the script runs alone.
    microbatch: samples of one forward and backward, None for a rank's whole share.
    output: folder for results; outlives the session, shared by the stages.
    weight: 0.0 when this rank's batch is borrowed (a last batch smaller than the number of ranks), else above 0.
    """

    def __init__(self, launch: Launch | None, seed: int | None) -> None:
        self.supervised = launch is not None
        self.rank, self.world_size, self.device, self._made_group = group.join()
        self.microbatch = launch.microbatch if launch else None
        self.output = output_folder()
        self.weight = 1.0
        self._seed = seed if seed is not None else (launch.seed if launch else 0)
        group.seed_all(self._seed + self.rank)
        self._launch, self._tracked, self._metrics = launch, dict[str, Any](), dict[str, Any]()
        self._loop = self._epoch = self._batch = self._step = self._samples = self._loops_seen = 0
        self._steps_total = self._epochs_total = self._epochs_done = 0
        self._rng: dict[str, Any] | None = None  # to be set before the first step, when resumed
        self._rehearse = self._rehearsing = self._epoch_is_open = False
        self._saved_at: int | None = None
        self._state_bytes = 0
        self._ticked_s = self._gap_s = self._step_s = 0.0
        self._board: Board | None = None
        if launch:
            self._supervise(launch)

    def _supervise(self, launch: Launch) -> None:
        self._board = Board(os.environ[BOARD_VARIABLE], self.rank, self.world_size)
        self._link = Link(launch, self._board, self._hello, self._beat)
        self._saver = Saver(
            Path(launch.checkpoints), launch.attempt, self.rank, self.world_size, self._board, self._link.send
        )
        signal.signal(signal.SIGTERM, lambda *_: self._link.ask_stop())  # the wall has come nearer; only a request here

    def __enter__(self) -> Session:
        if self._board:
            self._link.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        over = isinstance(error, SessionOver)
        finished = error is None or (isinstance(error, SystemExit) and error.code in (None, 0) and not over)
        if self._board:
            if finished:
                self._save(final=True)
                self._board.leave()
            self._saver.wait()
            self._link.close()
            if finished and not self._saver.succeeded:
                raise SaveLost("the stage is done, but its last save failed (kgorch history --events tells why)")
        if self._made_group and (finished or over):
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
        self._state_bytes = state.expected_bytes(things)
        if self._launch:
            if self._launch.resume:
                self._restore(Path(self._launch.resume))
                # DDP orders its buckets anew after its first backward; sums of three terms and more depend on that order.
                # The script may have tracked the module inside its DDP, so any module will do.
                self._rehearse = self.world_size > 2 and any(isinstance(thing, nn.Module) for thing in things.values())
            elif self._launch.weights:
                self._begin_with(self._launch, **self._launch.weights)
            self._link.send(self._hello())

    def _restore(self, folder: Path) -> None:
        described = manifest.read(folder)
        own = state.read_json(folder / f"rank{self.rank if self.rank < described.world_size else 0}.json")
        tree = state.read_json(folder / "state.json") | own["own"]
        try:
            state.restore(self._tracked, tree, state.Shards(folder, described, self.rank).fetch)
        except CannotRestore as error:
            raise CannotRestore(error.what, *error.facts, f"checkpoint: {folder}", next_step=error.next_step) from None
        self._rng = own["rng"]
        at = described.position
        self._loop, self._epoch, self._batch, self._step, self._samples = (
            at.loop,
            at.epoch,
            at.batch,
            at.step,
            at.samples,
        )
        self._saved_at = at.step
        self._metrics = dict(described.metrics)

    def _begin_with(self, launch: Launch, *, file: str, **how: Any) -> None:
        """The plan's starting weights, on every rank the same."""
        facts = starting.load(self._tracked, Path(launch.workdir, file), **how)
        if self.rank == 0:
            kind = "weights_partly_loaded" if facts.keys() > {"file", "into", "loaded"} else "weights_loaded"
            self._link.send(Note(launch.attempt, kind, facts))

    def weights(self, stage: str, name: str = "model") -> dict[str, torch.Tensor]:
        """What the module `name` held at the end of another stage of this run, by the names of its state_dict.

        Every byte is read back and compared with the manifest first.

        Raises: CannotRestore when that stage has left no final checkpoint; CheckpointBroken.
        """
        if not self._launch:
            raise CannotRestore("there are no stages without kgorch", next_step="give the script a file of weights")
        root = Path(self._launch.checkpoints).parent / stage
        for folder, described in manifest.newest_readable(root):
            if not described.final or described.run_id != self._launch.run_id:
                continue
            manifest.verify(folder)
            tree = state.read_json(folder / "state.json")
            if name not in tree:
                raise CannotRestore(f"{folder} holds no {name!r}", f"it holds: {', '.join(tree)}")
            shards = state.Shards(folder, described, 0)
            return {
                key: shards.fetch(item["$tensor"])
                for key, item in tree[name].items()
                if isinstance(item, dict) and "$tensor" in item
            }
        raise CannotRestore(f"stage {stage!r} has left no final checkpoint in {root}")

    # Loops

    def loader(
        self, dataset: Any, global_batch: int, *, shuffle: bool = True, drop_last: bool = True, **options: Any
    ) -> Loader:
        """A DataLoader over this rank's share whose order is the same on any number of ranks and workers (loader.py).

        Args:
            global_batch: samples of one optimizer step, over all ranks.
            options: what torch's DataLoader takes besides (num_workers, collate_fn, prefetch_factor, …).
        """
        return Loader(
            dataset,
            global_batch,
            rank=self.rank,
            world_size=self.world_size,
            seed=self._seed,
            shuffle=shuffle,
            drop_last=drop_last,
            **options,
        )

    def epochs(self, count: int) -> Iterator[int]:
        """The epochs still to do of this loop; a second loop in the same script begins when the first one is over."""
        number, self._loops_seen = self._loops_seen, self._loops_seen + 1
        if number < self._loop:
            return
        if number > self._loop:  # the script has left the loop before it early
            self._loop, self._epoch, self._batch = number, 0, 0
        self._epochs_total = count = int(count)
        while self._epoch < count:
            self._epoch_is_open = True
            yield self._epoch
            self._epoch, self._batch = self._epoch + 1, 0
        self._loop, self._epoch, self._batch, self._epochs_done = self._loop + 1, 0, 0, count

    def steps(self, loader: Loader, epochs: int | None = None) -> Iterator[Any]:
        """Batches still to do, of this epoch or, given `epochs`, of them all; one is one optimizer step.

        Between two of them all ranks save or stop together when it is time; a stop raises SessionOver.
        With more than two ranks of DistributedDataParallel the first batch after a resume comes twice: what its
        first time does to tracked things is undone.
        """
        if epochs is None:
            return self._steps_of_epoch(loader)
        return (batch for _ in self.epochs(epochs) for batch in self._steps_of_epoch(loader))

    def _steps_of_epoch(self, loader: Loader) -> Iterator[Any]:
        if not self._epoch_is_open:
            raise KgorchError(
                "session.steps(loader) was called outside of an epoch, or twice in one",
                next_step="write `for epoch in session.epochs(n): for batch in session.steps(loader):`, or steps(loader, n)",
            )
        self._epoch_is_open = False
        self._steps_total = self._step - self._batch + len(loader) * (self._epochs_total - self._epoch)
        loader.seek(self._epoch, self._batch)
        if self._rng:
            state.set_rng_state(self._rng, self.device)
            self._rng = None
        self._tick()  # what came since the last step, an evaluation perhaps
        for batch in loader:
            self._samples_now = loader.samples_in(self._batch)
            self.weight = loader.share_of(self._batch) * self.world_size / self._samples_now
            if self._rehearse:
                yield from self._rehearsal(batch)
            yield batch
            self._step += 1
            self._batch += 1
            self._samples += self._samples_now
            self._boundary()

    def _rehearsal(self, batch: Any) -> Iterator[Any]:
        """The batch once to no effect: whatever the script does with it to tracked things is undone."""
        kept, rng = state.capture(self._tracked), state.rng_state(self.device)
        copies = {name: tensor.to("cpu", copy=True) for name, tensor in kept.tensors.items()}
        self._rehearse, self._rehearsing = False, True
        yield copy.deepcopy(batch)
        self._rehearsing = False
        for thing in self._tracked.values():
            if isinstance(thing, nn.Module):
                thing.zero_grad(set_to_none=True)
        state.restore(self._tracked, kept.tree | kept.own_tree, copies.__getitem__)
        state.set_rng_state(rng, self.device)

    def _tick(self) -> float:
        """Seconds since this was called last; the longest of them is told."""
        now_s = time.monotonic()
        passed_s = now_s - self._ticked_s if self._ticked_s else 0.0
        if passed_s > self._gap_s:
            self._gap_s = passed_s
        self._ticked_s = now_s
        return passed_s

    def _boundary(self) -> None:
        self._step_s = self._tick()
        if self._board and (act := self._board.tick(self._step)):
            self._save()
            if act & STOP:
                self._saver.wait()
                raise SessionOver(saved=self._saver.succeeded)

    def _save(self, *, final: bool = False) -> None:
        """Copy the state aside; a step that is saved already is not saved twice, except as a stage's last."""
        assert self._launch
        if not self._tracked or (self._saved_at == self._step and not final):
            return
        captured = state.capture(self._tracked)
        described = Manifest(
            run=self._launch.run,
            run_id=self._launch.run_id,
            stage=self._launch.stage,
            final=final,
            position=Position(self._loop, self._epoch, self._batch, self._step, self._samples),
            world_size=self.world_size,
            created_at=datetime.now(UTC).isoformat(),
            plan_hash=self._launch.plan_hash,
            metrics=self._plain_metrics(),
            versions=group.versions(__version__, self.device),
        )
        self._saver.save(captured, state.rng_state(self.device), described)
        self._saved_at = self._step

    # One step

    def backward(self, batch: Any, loss_of: Callable[[Any], torch.Tensor], *, scaler: Any = None) -> torch.Tensor:
        """Forward and backward of this rank's batch in microbatches: the same gradient, in less memory.

        Each part is moved to the device, weighted by its share of the global batch, and all but the last run without
        DDP's all-reduce.

        Args:
            loss_of: takes a part (of the batch's own structure), returns its mean loss, a scalar.
            scaler: a GradScaler, if one is used.
        Returns:
            The mean loss over this rank's batch, detached, not waited for. Scalar.
        """
        samples = batches.length(batch)
        parts = batches.split(batch, self.microbatch or samples)
        total = torch.zeros((), device=self.device)
        for number, part in enumerate(parts):
            fraction = batches.length(part) / samples
            with contextlib.ExitStack() as without_sync:
                if number < len(parts) - 1:
                    for thing in self._tracked.values():
                        if isinstance(thing, DistributedDataParallel):
                            without_sync.enter_context(thing.no_sync())
                loss = loss_of(self.to_device(part))
                weighted = loss * (fraction * self.weight)
                (scaler.scale(weighted) if scaler else weighted).backward()
            total += loss.detach() * fraction
        return total

    def to_device(self, batch: Any) -> Any:
        """The batch's tensors on this rank's device; the copy does not wait where memory is pinned."""
        return batches.moved(batch, self.device)

    def report(self, **metrics: Any) -> None:
        """Figures for `status`, the checkpoint and `keep.best`: numbers, or scalar tensors, which are not waited for."""
        if not self._rehearsing:
            for name, value in metrics.items():
                if isinstance(value, torch.Tensor) and value.numel() == 1:
                    self._metrics[name] = value.detach()
                else:
                    self._metrics[name] = _number(name, value)

    # What is told

    def _plain_metrics(self) -> dict[str, float]:
        return {name: float(value) for name, value in list(self._metrics.items())}

    def _hello(self) -> Hello:
        assert self._launch
        return Hello(self._launch.attempt, self.rank, os.getpid(), self._step, self._state_bytes, bool(self._tracked))

    def _beat(self) -> Beat | None:
        if not self._launch or self.rank != 0:
            return None
        gap_s, self._gap_s = self._gap_s, 0.0
        if self._ticked_s:
            gap_s = max(gap_s, time.monotonic() - self._ticked_s)
        return Beat(
            self._launch.attempt,
            self._epoch or self._epochs_done,
            self._step,
            self._samples,
            gap_s=gap_s,
            step_s=self._step_s,
            steps_total=self._steps_total,
            epochs_total=self._epochs_total,
            metrics=self._plain_metrics(),
        )


def _number(name: str, value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError):
        raise KgorchError(
            f"session.report({name}=…): expected a number or a tensor of one element, found {_described(value)}",
            next_step=f"report {name} as one figure, its mean perhaps",
        ) from None


def _described(value: Any) -> str:
    return f"a tensor of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__
