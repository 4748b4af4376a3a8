"""What callbacks of Lightning, and a module's hooks, change at the beginning of an epoch.

BaseFinetuning thaws weights in the course of the training, and adds parameter groups. Its own restart adds the groups in
`on_fit_start`, where its state must be loaded already. It thaws no weights: they would not be trained any more.

StochasticWeightAveraging replaces the scheduler.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterable
from typing import Any

from torch import nn

CHANGING = (".callbacks.finetuning", ".callbacks.stochastic_weight_avg")
"""Modules of Lightning's callbacks whose `on_train_epoch_start` changes what is saved."""


def trained_weights(module: nn.Module) -> list[str]:
    """Names of the weights that require a gradient: a module's own hook may thaw and freeze some as well as a callback."""
    return [name for name, weight in module.named_parameters(remove_duplicate=False) if weight.requires_grad]


def set_trained(module: nn.Module, names: Iterable[str]) -> list[nn.Module]:
    """Have the weights of these names require a gradient, and no others.

    A tied weight has several names, of which earlier versions of kgorch saved one.

    Returns: the modules of which a weight was changed.
    """
    names = set(names)
    trained = {id(weight) for name, weight in module.named_parameters(remove_duplicate=False) if name in names}
    changed = []
    for part in module.modules():
        for weight in part.parameters(recurse=False):
            if weight.requires_grad != (id(weight) in trained):
                weight.requires_grad_(id(weight) in trained)
                changed.append(part)
    return changed


def large_frozen_weights(module: nn.Module) -> set[str]:
    """Names of the frozen weights but for the smallest ones, which have up to twice the bytes of the trained ones.

    A hook may set a teacher, which is as large as the weights that it follows. The base of adapters is larger: a copy of it on
    each rank may not fit into the memory.
    """
    weights = list(module.named_parameters(remove_duplicate=False))
    most = 2 * sum(weight.nbytes for _, weight in weights if weight.requires_grad)
    frozen = sorted((weight.nbytes, name) for name, weight in weights if not weight.requires_grad)
    sums = itertools.accumulate(size for size, _ in frozen)
    return {name for (_, name), size in zip(frozen, sums, strict=True) if size > most}


def changing(owners: Iterable[Any], root: str) -> list[Any]:
    """Of the module and callbacks, those whose `on_train_epoch_start` may change what is saved.

    Args:
        root: import name of the library, whose own hooks change nothing but for CHANGING.
    """

    def is_harmless(module: str) -> bool:
        return module.startswith(f"{root}.") and not module.endswith(CHANGING)

    return [owner for owner in owners if not is_harmless(str(getattr(owner.on_train_epoch_start, "__module__", "")))]


def is_averaging(trainer: Any, states: dict[str, Any]) -> bool:
    """Whether a StochasticWeightAveraging has put its own scheduler in the place of the others.

    Args:
        states: saved ones of the callbacks.
    """
    averaging = [
        item
        for item in trainer.callbacks
        if any(cls.__module__.endswith(".callbacks.stochastic_weight_avg") for cls in type(item).__mro__)
    ]
    return any(states.get(item.state_key, {}).get("latest_update_epoch", -1) >= 0 for item in averaging)


def put_back(trainer: Any, base: Any, saved: dict[str, Any]) -> None:
    """Thaw and freeze as it was, and add the parameter groups, before the optimizers are restored.

    Args:
        saved: the state of LightningParts.
    """
    module, trained = trainer.lightning_module, saved.get("trained_weights")
    now = {name for name, _ in module.named_parameters(remove_duplicate=False)}
    if trained is None or not now.issuperset(trained):
        return  # of an earlier version of kgorch, or of a strategy that gives the weights other names
    changed = set_trained(module, trained)
    callbacks = [callback for callback in trainer.callbacks if isinstance(callback, base)]
    for part in changed:
        if callbacks and isinstance(part, nn.modules.batchnorm._BatchNorm):
            part.track_running_stats = part.weight.requires_grad  # as BaseFinetuning does
    for callback in callbacks:
        if callback.state_key in saved["callbacks"]:
            callback.load_state_dict(saved["callbacks"][callback.state_key])
            base.on_fit_start(callback, trainer, module)


def let_overwrite(callbacks: Iterable[Any], root: str) -> None:
    """Let LightningCLI write its config file again: it refuses where a run has written one, which was an earlier session."""
    cli: Any = sys.modules.get(f"{root}.cli")
    for callback in callbacks:
        if cli and isinstance(callback, cli.SaveConfigCallback):
            callback.overwrite = True
