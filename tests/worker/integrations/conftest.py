"""What tests of several Trainers need."""

from __future__ import annotations

import contextlib
import importlib
import os
import shutil
from types import SimpleNamespace

import pytest
import torch
from cut_session import CutSession

from kgorch.worker import session_end
from kgorch.worker.integrations import accelerate_loop, carrier, lightning_trainer, transformers_trainer


@pytest.fixture
def lightning(monkeypatch):
    """Lightning, adapted for one test."""
    pytest.importorskip("lightning.pytorch")
    from lightning.pytorch import LightningModule
    from lightning.pytorch.loops import evaluation_loop, fit_loop, training_epoch_loop
    from lightning.pytorch.loops.optimization.automatic import _AutomaticOptimization
    from lightning.pytorch.trainer import trainer
    from lightning.pytorch.trainer.connectors.checkpoint_connector import _CheckpointConnector
    from lightning.pytorch.trainer.connectors.signal_connector import _SignalConnector

    for owner, name in (
        (_AutomaticOptimization, "_make_closure"),
        (training_epoch_loop._TrainingEpochLoop, "advance"),
        (LightningModule, "_on_before_batch_transfer"),
        (fit_loop._FitLoop, "_load_combined_loader_states"),
        (fit_loop._FitLoop, "run"),
        (fit_loop._FitLoop, "on_advance_start"),
        (evaluation_loop._EvaluationLoop, "run"),
        (_CheckpointConnector, "restore_callbacks"),
        (_SignalConnector, "register_signal_handlers"),
        (trainer.Trainer, "fit"),
    ):
        monkeypatch.setattr(owner, name, getattr(owner, name))
    lightning_trainer.adapt(trainer)
    return importlib.import_module("lightning.pytorch")


@pytest.fixture
def carried(monkeypatch):
    """Runs a script that builds a Trainer, cut or as a continuation. Returns the session's steps and what the script returns."""

    def run(script, cut_at=None, saved=None):
        made, told = [], []

        @contextlib.contextmanager
        def training(_):
            if made:
                yield None
                return
            made.append(CutSession(cut_at, saved))
            told.append({"training": "told"})
            yield made[0]
            made[0].end()
            run.finished = made[0].saved(is_final=True)

        monkeypatch.setattr(carrier, "carried_training", training)
        monkeypatch.setattr(carrier, "_carried", told)
        torch.manual_seed(3)
        returned = script()
        run.session = made[0]
        return made[0].step, returned

    return run


@pytest.fixture
def accelerated(monkeypatch):
    """Runs a script around an Accelerator, cut at a step or as a continuation. Returns the session's steps and what the script
    returns."""
    library = pytest.importorskip("accelerate.accelerator")
    from accelerate.state import GradientState

    for name in (*accelerate_loop.PREPARES, "load_state", "free_memory", *accelerate_loop.WRITES):
        monkeypatch.setattr(library.Accelerator, name, getattr(library.Accelerator, name))
    for module, name in ((torch, "save"), (os, "rename"), (os, "replace"), (shutil, "copyfile")):
        monkeypatch.setattr(module, name, getattr(module, name))  # a script that fails leaves them replaced
    for name in accelerate_loop.SKIPPING:
        monkeypatch.setattr(f"{name}.skip_first_batches", library.skip_first_batches)
    accelerate_loop.adapt(library)
    monkeypatch.setattr(accelerate_loop, "worker", SimpleNamespace(launch=SimpleNamespace))

    def run(script, cut_at=None, saved=None, **options):
        made = []
        session_end.end(SystemExit(1))  # of a script that has failed
        GradientState._reset_state()
        monkeypatch.setattr(
            accelerate_loop, "Session", lambda *_, **__: made.append(CutSession(cut_at, saved)) or made[-1]
        )
        torch.manual_seed(3)
        returned = script(library.Accelerator(cpu=True, **options))
        run.session = made[0] if made else None
        session_end.end(None)
        return made[0].step if made else 0, returned

    return run


@pytest.fixture
def transformers(monkeypatch):
    """Transformers, adapted for one test."""
    module = pytest.importorskip("transformers.trainer")
    for name in ("train", "_run_epoch", "get_batch_samples", "training_step", "evaluate"):
        if hasattr(module.Trainer, name):
            monkeypatch.setattr(module.Trainer, name, getattr(module.Trainer, name))
    monkeypatch.setattr(module, "skip_first_batches", module.skip_first_batches)
    transformers_trainer.adapt(module)
    return importlib.import_module("transformers")
