"""Small trainings of Trainer libraries that are cut at a step: what follows must be what an uninterrupted training does."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from cut_session import Cut, CutSession
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from kgorch.worker import session_end
from kgorch.worker.integrations import accelerate_loop


@pytest.fixture(autouse=True)
def alone(monkeypatch, tmp_path):
    for name in ("KGORCH_LAUNCH", "MASTER_ADDR", "RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    yield
    session_end.end(SystemExit(1))


def numbers(count: int) -> TensorDataset:
    return TensorDataset(torch.arange(float(count))[:, None])


@pytest.fixture
def accelerated(monkeypatch):
    """Runs a script around an Accelerator, cut at a step or as a continuation. Returns the session and what the script returns."""
    library = pytest.importorskip("accelerate.accelerator")
    monkeypatch.setattr(library.Accelerator, "prepare", library.Accelerator.prepare)
    accelerate_loop.adapt(library)
    monkeypatch.setattr(accelerate_loop, "worker", SimpleNamespace(launch=SimpleNamespace))

    def run(script, cut_at=None, saved=None):
        made = []
        monkeypatch.setattr(
            accelerate_loop, "Session", lambda *_, **__: made.append(CutSession(cut_at, saved)) or made[-1]
        )
        torch.manual_seed(3)
        returned = script(library.Accelerator(cpu=True))
        session_end.end(None)
        return made[0].step, returned

    return run


def whole_and_resumed(run, script, cut_at: int) -> tuple[object, object]:
    """What an uninterrupted training gives, and the second part of one that was cut."""
    whole = run(script)
    with pytest.raises(Cut) as cut:
        run(script, cut_at)
    return whole, run(script, saved=cut.value.saved)


def train_batch(accelerator, model, optimizer, batch) -> None:
    accelerator.backward(((model(batch[0] / 10) - 1) ** 2).mean())
    optimizer.step()
    optimizer.zero_grad()


def weights_of(model: nn.Module) -> list[float]:
    return [value for weight in model.parameters() for value in weight.flatten().tolist()]


@pytest.mark.parametrize("order", ["model, optimizer and loader", "loader, model, optimizer", "all but the optimizer"])
def test_what_accelerate_has_prepared_before_the_optimizer_is_restored_and_followed(accelerated, order):
    def script(accelerator):
        model = nn.Linear(1, 1)
        loader = DataLoader(numbers(12), 2, shuffle=True)
        if order == "model, optimizer and loader":
            model = accelerator.prepare(model)
            optimizer, loader = accelerator.prepare(torch.optim.AdamW(model.parameters(), 0.1), loader)
        elif order == "loader, model, optimizer":
            loader = accelerator.prepare(loader)
            model = accelerator.prepare(model)
            optimizer = accelerator.prepare(torch.optim.AdamW(model.parameters(), 0.1))
        else:
            model, loader = accelerator.prepare(model, loader)
            optimizer = accelerator.prepare(torch.optim.AdamW(model.parameters(), 0.1))
        for _ in range(3):
            for batch in loader:
                train_batch(accelerator, model, optimizer, batch)
        return weights_of(model)

    whole, resumed = whole_and_resumed(accelerated, script, cut_at=8)
    assert resumed == whole and whole[0] == 18


@pytest.mark.parametrize("kind", ["evaluates within an epoch", "two loaders at once", "evaluates first"])
def test_the_loader_whose_epochs_accelerate_counts_is_the_training_one(accelerated, kind):
    def script(accelerator):
        model = nn.Linear(1, 1)
        optimizer = torch.optim.AdamW(model.parameters(), 0.1)
        train, other = DataLoader(numbers(12), 2, shuffle=True), DataLoader(numbers(12), 2)
        model, optimizer, train, other = accelerator.prepare(model, optimizer, train, other)
        if kind == "evaluates first":
            len(list(other))
        for _ in range(3):
            batches = zip(train, other, strict=False) if kind == "two loaders at once" else train
            for batch in batches:
                batch = (batch[0][0] + batch[1][0],) if kind == "two loaders at once" else batch
                train_batch(accelerator, model, optimizer, batch)
                if kind == "evaluates within an epoch":
                    len(list(other))
        return weights_of(model)

    whole, resumed = whole_and_resumed(accelerated, script, cut_at=8)
    assert resumed == whole and whole[0] == 18
