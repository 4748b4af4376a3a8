"""Activation checkpointing that is switched on and off between two steps, for models that were not written for it.

A block's `forward` is replaced on the instance. The block is computed again in the backward, so its activations are not kept in
between. Parameters, their names, hooks and DistributedDataParallel are not affected. The results are bit-identical to training
without it: the recomputation starts with the random states (of torch, python, NumPy, and generators that the block holds), buffers
and attributes of the forward, and its changes to them are undone. So BatchNorm counts a batch once, and spectral norm iterates
once.

What a block changes besides its outputs is learned in its first call (per combination of parts in training mode). After that only
this is kept, and BatchNorm's statistics always. A block that changes its input in place, for example one that begins with
ReLU(inplace=True), gets a copy for the recomputation.

Not supported: lists and other objects that a block changes in place (assignments to `self` are detected), files and collectives; a
context around the forward alone that torch's checkpoint does not keep (it keeps autocast and the device), such as `sdpa_kernel`.
Models with a transformers `config.use_cache` train without that cache while it is on, because each layer would append to it twice.
Their own `gradient_checkpointing_enable()` is not used: it keeps neither buffers nor python's random state, and is reentrant in old
versions, which does not work with DistributedDataParallel and find_unused_parameters.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.torch_version import TorchVersion
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.checkpoint import CheckpointError, checkpoint

from kgorch.errors import KgorchError
from kgorch.worker.memory.recompute_state import EntryTable, HostRng, copied
from kgorch.worker.wrappers import unwrapped

COMPILES_BATCHNORM = "2.13"
"""PyTorch 2.6 and 2.8 count a batch twice when a compiled BatchNorm is computed again, 2.13 does not; 2.9 to 2.12 are untested."""

LISTS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
WITHOUT_IT = "take activation_checkpointing out of the plan's memory ladder, or set supports_gradient_checkpointing = False on it"


class CannotRecompute(KgorchError):
    """A block gives another result when it is computed again."""


# Choice of blocks


def blocks(tracked: Mapping[str, Any]) -> dict[str, nn.Module]:
    """The modules to be computed again, by name; none lies inside another. Empty where this would save no memory.

    Chosen are the outermost siblings of one class, in lists and as attributes (the layers of a transformer, the levels of a U-Net
    whatever their width). A *stage*, which is or directly holds a list with most of its weights, is replaced by the blocks in that
    list, because little should be computed again at one time. A module beside such blocks that has two layers or more is a block,
    too; otherwise it would keep all its activations. A single block saves nothing, because its recomputation needs as much memory
    as its forward: a model that is one LSTM, or one flat Sequential, has no blocks.

    `supports_gradient_checkpointing = False`, as in transformers, excludes a module and everything in it. Also excluded are
    multi-layer RNNs with dropout on CUDA, because cuDNN keeps a random state of its own; and modules with a BatchNorm in a compiled
    model, where PyTorch is older than COMPILES_BATCHNORM.
    """
    selection: dict[str, nn.Module] = {}
    for name, thing in tracked.items():
        if isinstance(thing, nn.Module) and _may(thing):
            selection |= _within(unwrapped(thing), name)
    selection = {name: block for block, name in reversed({block: name for name, block in selection.items()}.items())}
    inside = {part for block in selection.values() for part in block.modules() if part is not block}
    selection = {name: block for name, block in reversed(selection.items()) if block not in inside}
    if TorchVersion(torch.__version__) < COMPILES_BATCHNORM:
        modules = (thing for thing in tracked.values() if isinstance(thing, nn.Module))
        compiled = {inner for module in modules for part in module.modules() for inner in _compiled_parts(part)}
        selection = {
            name: block for name, block in selection.items() if block not in compiled or not has_batchnorm([block])
        }
    return selection if len(selection) > 1 else {}


def _compiled_parts(module: nn.Module) -> Iterator[nn.Module]:
    """The modules that the compiler sees of a compiled module: torch.compile wraps it, module.compile() does not."""
    if isinstance(inner := getattr(module, "_orig_mod", None), nn.Module):
        yield from inner.modules()
    elif module._compiled_call_impl:
        yield from module.modules()


def _within(module: nn.Module, name: str) -> dict[str, nn.Module]:
    children = {f"{name}.{key}": child for key, child in module.named_children() if _may(child)}
    children = {
        path: child for path, child in children.items() if _layers(child) > (0 if list(child.children()) else 1)
    }
    kinds = Counter(type(unwrapped(child)) for child in children.values())
    selection: dict[str, nn.Module] = {}
    for path, child in children.items():
        deeper = _within(unwrapped(child), path)
        is_repeated = kinds[type(unwrapped(child))] > 1
        larger = [part for part in deeper.values() if _layers(part) > 1]
        whole = _can_be_computed_again(child) and not _is_stage(child, deeper) and (is_repeated or not larger)
        selection |= {path: child} if whole else deeper
    return selection


def _may(module: nn.Module) -> bool:
    return getattr(module, "supports_gradient_checkpointing", None) is not False


def _layers(module: nn.Module) -> int:
    """Number of layers with a weight matrix; for a class of the script's own, its matrices. A normalised weight counts once."""
    count = 0
    for part in module.modules():
        own = sum(weight.dim() > 1 for weight in part.parameters(recurse=False))
        one = type(part).__module__.startswith("torch.nn.") and not isinstance(part, nn.RNNBase)
        count += min(own, 1) if one else own
    return count


def _can_be_computed_again(module: nn.Module) -> bool:
    if type(module).forward is nn.Module.forward and "forward" not in vars(
        module
    ):  # a list of modules, which is never called
        return False
    return not any(
        isinstance(part, DistributedDataParallel | torch.jit.ScriptModule)
        or not _may(part)
        or (has_dropout_state([part]) and next(part.parameters()).is_cuda)
        for part in module.modules()
    )


def _is_stage(module: nn.Module, deeper: Mapping[str, nn.Module]) -> bool:
    inner = unwrapped(module)
    lists = [inner] if isinstance(inner, LISTS) else [child for child in inner.children() if isinstance(child, LISTS)]
    listed = {part for container in lists for part in container.children()}
    members = [part for part in deeper.values() if part in listed and (inner in lists or _layers(part) > 1)]
    return len(members) > 1 and 2 * sum(map(_size, members)) > _size(module)


def _size(module: nn.Module) -> int:
    return sum(weight.numel() for weight in module.parameters())


def has_batchnorm(modules: Iterable[nn.Module]) -> bool:
    """Whether a microbatch would be normalised differently from its batch. A frozen BatchNorm does not count."""
    return any(
        isinstance(part, nn.modules.batchnorm._BatchNorm) and (part.training or part.running_mean is None)
        for module in modules
        for part in module.modules()
    )


def has_dropout_state(modules: Iterable[nn.Module]) -> bool:
    """Whether cuDNN keeps a random state of its own for the modules: RNNs with dropout between their layers."""
    return any(
        isinstance(part, nn.RNNBase) and part.dropout > 0 and part.num_layers > 1
        for module in modules
        for part in module.modules()
    )


def has_sync_batchnorm(modules: Iterable[nn.Module]) -> bool:
    """Whether a forward waits for the other ranks. Computed again, it would wait in the middle of the backward."""
    return any(isinstance(part, nn.SyncBatchNorm) for module in modules for part in module.modules())


# Switching


class ActivationCheckpointing:
    """The activation checkpointing of the tracked modules. Switched between two steps, on all ranks alike.

    Attributes:
        blocks: by name; empty where nothing can be saved.
        is_on: whether the blocks are computed again.
    """

    def __init__(self, tracked: Mapping[str, Any]) -> None:
        self.blocks = blocks(tracked)
        self.is_on = False
        self._modules = [thing for thing in tracked.values() if isinstance(thing, nn.Module)]
        self._caching: list[Any] = []
        self._recomputed: str | None = None

    def switch_on(self) -> None:
        """Compute the blocks again in the backward, from the next step on."""
        if self.is_on:
            return
        for name, block in self.blocks.items():
            vars(block)["forward"] = CheckpointedForward(name, block, vars(block).get("forward"), self._note)
        configs = {id(part.config): part.config for part in self._parts() if hasattr(part, "config")}
        self._caching = [config for config in configs.values() if getattr(config, "use_cache", None) is True]
        self._switched(True)

    def switch_off(self) -> None:
        """Keep all activations again."""
        if not self.is_on:
            return
        for block in self.blocks.values():
            own = vars(block)["forward"].own
            if own is None:
                del vars(block)["forward"]
            else:
                vars(block)["forward"] = own
        self._switched(False)

    @contextmanager
    def explained(self) -> Iterator[None]:
        """A context for a backward. Raises: CannotRecompute, which names the block, instead of torch's CheckpointError."""
        self._recomputed = None
        try:
            yield
        except CheckpointError as error:
            if self._recomputed is None:  # a checkpoint of the script's own
                raise
            raise CannotRecompute(
                f"activation checkpointing: {self._recomputed} gave another result when it was computed again",
                "it depends on something that changes meanwhile, which is no buffer, attribute or random state of it",
                str(error).strip().splitlines()[0],
                next_step=WITHOUT_IT,
            ) from error

    def _note(self, name: str) -> None:
        self._recomputed = name

    def _parts(self) -> Iterator[nn.Module]:
        return (part for module in self._modules for part in module.modules())

    def _switched(self, on: bool) -> None:
        self.is_on = on
        for config in self._caching:
            config.use_cache = not on
        if any(any(_compiled_parts(part)) for part in self._parts()):
            torch.compiler.reset()  # compiled code contains the other forward


class CheckpointedForward:
    """A block's forward while checkpointing is on. A copy or pickle of it is the plain forward, which does not need kgorch.

    Attributes:
        name: of the block, for errors.
        own: the `forward` that the instance had; None where the class's is used.
        changeable: all state that a call may change.
        statistics: of BatchNorms, which are kept always.
        habits: by the parts that are in training mode: whether a call changes its inputs in place, and what else it changes.
    """

    def __init__(
        self, name: str, block: nn.Module, own: Callable[..., Any] | None, note: Callable[[str], None]
    ) -> None:
        self.name, self.block, self.own, self.note = name, block, own, note
        tables = [EntryTable(table) for part in block.modules() for table in (vars(part), part._buffers)]
        self.changeable: list[EntryTable | HostRng] = [*tables, HostRng()]
        self.parts = list(block.modules())
        norms = [part for part in self.parts if isinstance(part, nn.modules.batchnorm._NormBase)]
        self.statistics = [EntryTable(part._buffers) for part in norms]
        self.habits: dict[tuple[bool, ...], tuple[bool, list[EntryTable | HostRng]]] = {}

    def mode(self) -> tuple[bool, ...]:
        """Which parts are in training mode."""
        return tuple(part.training for part in self.parts)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return (getattr, (self.block, "forward")) if self.own is None else (functools.partial, (self.own,))

    def plain(self, *args: Any, **kwargs: Any) -> Any:
        """The block's own forward."""
        if self.own is not None:
            return self.own(*args, **kwargs)
        return type(self.block).forward(self.block, *args, **kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self.plain(*args, **kwargs)
        if torch.compiler.is_compiling():  # the compiler keeps random states and buffers by itself
            return checkpoint(self.plain, *args, use_reentrant=False, **kwargs)
        leaves, form = tree_flatten((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        if not tensors or any(tensor.is_inference() for tensor in tensors):
            return self.plain(*args, **kwargs)
        run = _RecomputedForward(self, leaves, form, tensors)
        return checkpoint(run, *run.to_keep(tensors), use_reentrant=False)


class _RecomputedForward:
    """One forward of a block and its recomputation: `checkpoint` calls it twice."""

    def __init__(self, of: CheckpointedForward, leaves: list[Any], form: Any, tensors: list[torch.Tensor]) -> None:
        self._of, self._form = of, form
        self._rest = [None if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        self._places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
        self._live: list[torch.Tensor] | None = tensors
        self._instead: list[torch.Tensor] | None = None
        self._before: list[tuple[EntryTable | HostRng, Any]] = []
        self._mode = of.mode()
        self._habits = of.habits.get(self._mode)

    def to_keep(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        """The inputs for `checkpoint` to keep. It refuses tensors that are changed after it has kept them."""
        if self._habits is None:  # `data` has its own version counter
            return [tensor.data.requires_grad_(tensor.requires_grad) for tensor in tensors]
        return [copied(tensor) for tensor in tensors] if self._habits[0] else tensors

    def __call__(self, *inputs: torch.Tensor) -> Any:
        if self._live is None:
            return self._recompute(inputs)
        tensors, self._live = self._live, None
        return self._forward(tensors)

    def _forward(self, tensors: list[torch.Tensor]) -> Any:
        is_learning = self._habits is None
        changes_inputs, changeable = self._habits or (True, self._of.changeable)
        aside = [copied(tensor) for tensor in tensors] if is_learning else None
        versions = [tensor._version for tensor in tensors]
        self._before = [(what, what.take()) for what in changeable]
        output = self._plain(tensors)
        has_changed = versions != [tensor._version for tensor in tensors]
        if is_learning:
            changed = [(what, what.changed_since(old)) for what, old in self._before]
            self._before = [(what.only(old), old) for what, old in changed if old]
            known = [what for what, _ in self._before]
            # A BatchNorm may leave its statistics alone in the first call alone, so they are always kept.
            self._of.habits[self._mode] = (has_changed, [*known, *self._of.statistics])
            self._instead = aside if has_changed else None
        elif has_changed and not changes_inputs:
            raise CannotRecompute(
                f"activation checkpointing: {self._of.name} changed its input in place, as it did not in its first call",
                "what the input was is lost, and the backward needs it",
                next_step=WITHOUT_IT,
            )
        return output

    def _recompute(self, inputs: Iterable[torch.Tensor]) -> Any:
        self._of.note(self._of.name)
        if self._instead or (self._habits and self._habits[0]):
            inputs = [tensor.clone() for tensor in self._instead or inputs]  # the recomputation changes it again
        with ExitStack() as as_before:
            for what, old in self._before:
                as_before.enter_context(what.restored(old))
            return self._plain(inputs)

    def _plain(self, tensors: Iterable[torch.Tensor]) -> Any:
        leaves = self._rest.copy()
        for place, tensor in zip(self._places, tensors, strict=True):
            leaves[place] = tensor
        args, kwargs = tree_unflatten(leaves, self._form)
        return self._of.plain(*args, **kwargs)
