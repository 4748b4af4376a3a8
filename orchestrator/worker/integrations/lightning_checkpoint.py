"""A dict like a checkpoint of Lightning's, for the script's `on_save_checkpoint` and `on_load_checkpoint`."""

from __future__ import annotations

import sys
from typing import Any

import torch

METRICS = ("_callback_metrics", "_logged_metrics", "_progress_bar_metrics")


def like_its_own(trainer: Any, parts: dict[str, Any]) -> dict[str, Any]:
    """What Lightning's `dump_checkpoint` would give the hooks. Weights and optimizers are those of this moment.

    Args:
        parts: the state of LightningParts. Earlier versions of kgorch did not save the progress and the DataModule.
    """
    module, datamodule, precision = trainer.lightning_module, trainer.datamodule, trainer.precision_plugin
    library = type(trainer._checkpoint_connector).__module__.partition(".trainer.")[0]
    now = {"epoch": trainer.current_epoch, "global_step": trainer.global_step}
    checkpoint = {
        **parts.get("progress", now),
        "pytorch-lightning_version": sys.modules[library].__version__,
        "state_dict": module.state_dict(),
        "loops": {"fit_loop": parts["loops"]},
        "callbacks": parts["callbacks"],
        "optimizer_states": [optimizer.state_dict() for optimizer in trainer.optimizers],
        "lr_schedulers": parts["schedulers"],
    }
    if parts["precision"]:
        checkpoint[type(precision).__qualname__] = parts["precision"]
    for owner in (module, datamodule):
        if owner and owner.hparams:
            checkpoint[owner.CHECKPOINT_HYPER_PARAMS_KEY] = dict(owner.hparams)
    if parts.get("datamodule"):
        checkpoint[type(datamodule).__qualname__] = parts["datamodule"]
    return checkpoint


def logged_by(trainer: Any) -> dict[str, dict[str, tuple[int | float, bool]]]:
    """The metrics that were logged, by the name of the Trainer's dict of them: each as a number, and whether it is a tensor.

    Numbers, because a metric that is not finite is no damage to the training, as a tensor of its state would be.
    """
    connector = trainer._logger_connector
    return {
        kind: {
            name: (value.item(), True) if isinstance(value, torch.Tensor) else (value, False)
            for name, value in getattr(connector, kind, {}).items()
            if isinstance(value, int | float) or (isinstance(value, torch.Tensor) and value.numel() == 1)
        }
        for kind in METRICS
    }


def put_back_logged(trainer: Any, saved: dict[str, dict[str, tuple[int | float, bool]]]) -> None:
    """Set what `logged_by` has returned: callbacks and schedulers monitor it, and the script reads it after the training."""
    device = trainer.strategy.root_device
    for kind in METRICS:
        metrics = getattr(trainer._logger_connector, kind, {})
        for name, (value, is_tensor) in saved.get(kind, {}).items():
            metrics[name] = torch.tensor(value, device=device) if is_tensor else value


def is_same(one: Any, other: Any) -> bool:
    """Whether they are one object, or tensors with the same memory."""
    if one is other:
        return True
    return isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor) and one.data_ptr() == other.data_ptr()


def difference(before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    """What was added or replaced."""
    return {name: value for name, value in after.items() if name not in before or value is not before[name]}
