"""How a stage begins on this rank: from a snapshot in memory, a checkpoint on disk, given weights, or as the script built it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from kgorch import __version__
from kgorch.core.codes import EventKind
from kgorch.errors import CannotRestore
from kgorch.protocol.launch_spec import LaunchSpec
from kgorch.worker import local_tensors
from kgorch.worker.checkpoint import pretrained, snapshot_buffer, state_codec, trainable_weights
from kgorch.worker.checkpoint.restore_source import RestoreSource
from kgorch.worker.checkpoint.state_codec import StateSizes
from kgorch.worker.data.loader_fast_forward import LoaderState
from kgorch.worker.ranks import process_group, virtual_ranks
from kgorch.worker.session_state import SessionState
from kgorch.worker.supervision import Supervision
from kgorch.worker.telemetry.event_sender import Exactness

DOCUMENT_BYTES = 1 << 18
"""Bytes of a snapshot buffer for what is not a tensor: random states take some 30 kB of it."""

NAME_BYTES = 600
"""Bytes of a snapshot buffer for each tensor's name, type and place."""

COMPARED = {"device": "the device", "torch": "PyTorch", "cuda": "CUDA", "cudnn": "cuDNN"}
"""Versions in a manifest on which the bits of floating-point results depend."""


@dataclass
class ResumePoint:
    """What the step loop needs to continue where a checkpoint was written.

    Attributes:
        rng: random states, to be set before the first step; None where nothing is restored.
        loaders: positions of the loaders that the script iterates itself (session.follow), by name.
        losses: recent ones, by which spikes are told.
        keyed: position of a loader that `session.loader` made, in its epoch; None where there is none, as in a checkpoint of an
            earlier version.
        loader: position of a loader that `session.loader` did not make; None where there was none.
        ranks_before: ranks of the saved run.
        is_trained: the checkpoint closes the stage, and the stage is not extended: no step is left.
    """

    ranks_before: int
    rng: dict[str, Any] | None = None
    losses: Any = None
    keyed: Any = None
    loader: LoaderState | None = None
    loaders: Mapping[str, LoaderState] = field(default_factory=dict)
    is_trained: bool = False


def begin(state: SessionState, supervision: Supervision, sizes: StateSizes) -> ResumePoint:
    """Restore the tracked objects or load their starting weights, and prepare the buffers for snapshots.

    Args:
        sizes: of the state, before anything is restored.

    Raises:
        CannotRestore: the checkpoint holds other names or shapes.
        WeightsRefused: the starting weights do not fit.
    """
    member, things, launch = state.member, state.tracked.things, state.launch
    assert launch
    point = ResumePoint(member.world_size)
    if source := supervision.source:
        is_snapshot = launch.snapshot is not None
        where = "the snapshot in memory" if is_snapshot else str(launch.resume)
        point = restore(state, source, where, extends=launch.extends)
        supervision.loss_guard.restore_losses(point.losses)
        if not is_snapshot:
            supervision.saves.saved_at = state.position.step
        at = state.position
        if supervision.metric_log:  # metrics that are reported before the first step belong to the checkpoint's epoch
            supervision.metric_log.epoch = at.epoch + (at.batch > 0)
        sizes = state.tracked.measure(member.world_size)  # the state may have grown in earlier sessions
    elif launch.weights:
        _load_weights(state, launch, **launch.weights)
    supervision.ladder.set_modules({name: thing for name, thing in things.items() if isinstance(thing, nn.Module)})
    captured = state_codec.capture(things)
    mine = snapshot_buffer.share(captured.tensors, captured.own, member.rank, member.world_size)
    # Tensors that are not finite now are so on purpose (masks), and are not reported later.
    supervision.loss_guard.set_baseline(state.tracked.replicated(mine))
    names = snapshot_buffer.split(sizes.replicated, member.world_size)[member.rank]
    need = sum(sizes.replicated[name] for name in names) + sizes.own + sizes.pieces
    need += DOCUMENT_BYTES + NAME_BYTES * sizes.count
    if not state.probe.as_on_cuda:  # whose optimizer never takes a step, so there is nothing to save
        supervision.writer.prepare(need, member.device)
    supervision.saves.plan_snapshot()
    state.tracked.is_ready = True
    supervision.link.send_hello()
    return point


def restore(state: SessionState, source: RestoreSource, where: str, *, extends: bool = False) -> ResumePoint:
    """Load a saved state into the tracked objects, and set the position, the division of ranks and the metrics.

    Args:
        where: names the source in errors.
        extends: a finished stage is to be trained further.

    Raises:
        CannotRestore: the source holds other names or shapes, or lacks a document.
    """
    manifest, member, division = source.manifest, state.member, state.division
    is_divisible = manifest.divisible and division.is_divisible
    count = manifest.world_size if is_divisible else member.world_size
    if count >= member.world_size:
        division.ranks = virtual_ranks.ranks_of(count, member.rank, member.world_size)
    # Otherwise there are more processes than ranks were, or the run cannot be divided: each process plays one rank of its own.
    ranks = division.ranks
    own = source.own(ranks.first)
    try:
        if not isinstance(own.get("own"), dict) or "rng" not in own:
            raise CannotRestore(f"rank{ranks.first}.json lacks `own` or `rng`")
        tree = source.tree | own["own"]
        state.tracked.thaw_and_freeze(own.get("requires_grad"))
        fetch = state_codec.fetch_for(state.tracked.things, tree, source.reader(ranks.first))
        state_codec.restore(state.tracked.things, tree, fetch)
        _compare_frozen(own.get("frozen"), trainable_weights.fingerprints(state.tracked.things))
    except CannotRestore as error:
        raise CannotRestore(error.what, *error.facts, f"checkpoint: {where}", next_step=error.next_step) from None
    point = ResumePoint(
        manifest.world_size, rng=own["rng"], keyed=own.get("keyed"), loader=own["rng"].pop("loader", None)
    )
    if isinstance(loaders := own.get("loaders", {}), dict):
        point.loaders = loaders
    if isinstance(remembered := own.get("remembered", {}), dict):
        state.remembered.values = remembered | state.remembered.values
    point.losses = own.get("losses")
    state.bucket_order.resume(own.get("buckets"))
    ranks.random_states = {rank: source.own(rank)["rng"] for rank in ranks.mine[1:]}
    division.is_divisible = is_divisible
    report_other_versions(state.exactness, member.device, manifest.versions)
    if ranks.count != manifest.world_size:
        sharded = manifest.sharded or local_tensors.is_any_sharded(state.tracked.tensors())
        _report_other_ranks(state.exactness, member.world_size, manifest.world_size, sharded=sharded)
    elif ranks.are_split:
        note = (
            "" if _have_equal_state(source, ranks) else ", but what each rank keeps for itself is the first one's now"
        )
        state.exactness.update(ranks=ranks.describe() + note)
    point.is_trained = manifest.final and not extends
    state.position.restore(manifest.position)
    state.metrics.restore(manifest.metrics, manifest.measured)
    return point


def _compare_frozen(saved: Any, here: Mapping[str, str]) -> None:
    """Compare the fingerprints of frozen weights, by the names of their models. Earlier versions of kgorch saved none.

    Raises: CannotRestore.
    """
    saved = saved if isinstance(saved, dict) else {}
    if other := [name for name in here if saved.get(name, here[name]) != here[name]]:
        raise CannotRestore(
            f"the frozen weights of {other[0]!r} are not those that this run began with",
            "a checkpoint holds the trained weights alone, and they fit the frozen ones that they were trained with",
            next_step="load the same file or build them from the same seed, or begin a new run with `kgorch start PLAN --fresh`",
        )


def report_other_versions(exactness: Exactness, device: torch.device, before: Mapping[str, str]) -> None:
    """Report a device or library that differs from the one that wrote the checkpoint: floating-point results differ.

    Args:
        device: of this rank.
        before: `versions` of the manifest.
    """
    now = process_group.versions(__version__, device)
    changed = [
        f"{name} was {before[key]} and is {now.get(key, 'none')}"
        for key, name in COMPARED.items()
        if key in before and before[key] != now.get(key)
    ]
    if changed:
        exactness.update(versions=f"{'; '.join(changed)}: other bits from here on")


def _have_equal_state(source: RestoreSource, ranks: virtual_ranks.VirtualRanks) -> bool:
    """Whether the ranks that this process plays keep equal state for themselves: schedulers do, samplers' generators do not."""
    mine = source.own(ranks.first)["own"]
    return all(
        source.own(rank)["own"] == mine
        and all(
            torch.equal(source.reader(rank).fetch(name), source.reader(ranks.first).fetch(name))
            for name in state_codec.tensors_in(mine)
        )
        for rank in ranks.mine[1:]
    )


def _report_other_ranks(exactness: Exactness, now: int, before: int, *, sharded: bool) -> None:
    """Report that this number of ranks cannot play those of the saved run, and what differs for it."""
    why = "" if now > before else "; not all its steps went through session.backward"
    if sharded:
        why = ", each with other pieces of the same values, because the model is sharded"
    exactness.update(
        ranks=f"{now} instead of {before}{why}: the same order of samples and global batch;"
        " dropout and BatchNorm statistics differ"
    )


def _load_weights(state: SessionState, launch: LaunchSpec, *, file: str, **how: Any) -> None:
    """Load the plan's starting weights; every rank reads the same file."""
    facts = pretrained.load(state.tracked.things, Path(launch.workdir, file), **how)
    if state.member.rank == 0:
        is_partial = facts.keys() > {"file", "into", "loaded"}
        state.events.send(EventKind.WEIGHTS_PARTLY_LOADED if is_partial else EventKind.WEIGHTS_LOADED, facts)
