"""What tests of several Trainers need."""

from __future__ import annotations

import importlib

import pytest

from kgorch.worker.integrations import lightning_trainer


@pytest.fixture
def lightning(monkeypatch):
    """Lightning, adapted for one test."""
    pytest.importorskip("lightning.pytorch")
    from lightning.pytorch.loops import evaluation_loop, fit_loop
    from lightning.pytorch.loops.optimization.automatic import _AutomaticOptimization
    from lightning.pytorch.trainer import trainer
    from lightning.pytorch.trainer.connectors.signal_connector import _SignalConnector

    for owner, name in (
        (_AutomaticOptimization, "_make_closure"),
        (fit_loop._FitLoop, "_load_combined_loader_states"),
        (fit_loop._FitLoop, "run"),
        (fit_loop._FitLoop, "on_advance_start"),
        (evaluation_loop._EvaluationLoop, "run"),
        (_SignalConnector, "register_signal_handlers"),
        (trainer.Trainer, "fit"),
    ):
        monkeypatch.setattr(owner, name, getattr(owner, name))
    lightning_trainer.adapt(trainer)
    return importlib.import_module("lightning.pytorch")
