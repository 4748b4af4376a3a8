"""What small trainings in the test's process are made of, and what they give when they are cut (cut_session.py)."""

from __future__ import annotations

import pytest
import torch
from cut_session import Cut
from torch import nn
from torch.utils.data import IterableDataset, TensorDataset


def numbers(count: int) -> TensorDataset:
    return TensorDataset(torch.arange(float(count))[:, None])


class Stream(IterableDataset):
    """Numbers in another order each time, without a length."""

    def __iter__(self):
        return iter(torch.randperm(12)[:, None, None].float())


class OfSession(list):
    """A list in an attribute that begins anew in each session: it is no plain one."""


def weights_of(model: nn.Module) -> list[float]:
    return [value for weight in model.parameters() for value in weight.flatten().tolist()]


def whole_and_resumed(run, script, cut_at: int, **options) -> tuple[object, object]:
    """What an uninterrupted training gives, and the second part of one that was cut."""
    whole = run(script, **options)
    with pytest.raises(Cut) as cut:
        run(script, cut_at, **options)
    return whole, run(script, saved=cut.value.saved, **options)


def goes_on(resumed: tuple, whole: tuple, cut_at: int) -> bool:
    """Whether a loop around an Accelerator, (batches, results, …), is the second part of one that was cut after so many batches.

    What it has seen before is one batch of each epoch that is done.
    """
    rest = whole[0][cut_at:]
    return resumed[0][len(resumed[0]) - len(rest) :] == rest and resumed[1:] == whole[1:]


class Around(torch.optim.Optimizer):
    """Steps by an optimizer within it, whose momentum is in no state of its own, against the worst weights nearby: SAM."""

    def __init__(self, weights):
        super().__init__(weights, {"lr": 0.1})
        self.base = torch.optim.SGD(self.param_groups, lr=0.1, momentum=0.9)
        self.param_groups = self.base.param_groups

    def step(self, closure=None):
        if closure:
            with torch.enable_grad():
                closure()
        weights = [weight for group in self.param_groups for weight in group["params"] if weight.grad is not None]
        norm = torch.stack([weight.grad.norm() for weight in weights]).norm() + 1e-9
        before = [weight.detach().clone() for weight in weights]
        with torch.no_grad():
            for weight in weights:
                weight.add_(weight.grad, alpha=0.01 / norm.item())
        loss = None
        if closure:
            self.zero_grad()
            with torch.enable_grad():
                loss = closure()
        for weight, value in zip(weights, before, strict=True):
            weight.data.copy_(value)
        self.base.step()
        return loss


def lightning_trainer_of(library, **options):
    return library.Trainer(
        accelerator="cpu", enable_progress_bar=False, enable_model_summary=False,
        **{"enable_checkpointing": False, "max_epochs": 3, "logger": False, **options},
    )  # fmt: skip


def lightning_module(library):
    class Module(library.LightningModule):
        def __init__(self):
            super().__init__()
            self.lr, self.net = 0.1, nn.Linear(1, 1)

        def training_step(self, batch, index):
            return ((self.net(batch[0] / 10) - 1) ** 2).mean()

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), self.lr)

    return Module


def train_batch(accelerator, model, optimizer, batch) -> None:
    """A step of a loop around an Accelerator."""
    accelerator.backward(((model(batch[0] / 10) - 1) ** 2).mean())
    optimizer.step()
    optimizer.zero_grad()


class Annealed(nn.Module):
    """A plain attribute changes in `forward`."""

    def __init__(self):
        super().__init__()
        self.net, self.temperature = nn.Linear(1, 1), 1.0
        self.register_buffer("places", torch.arange(3.0), persistent=False)

    def forward(self, x):
        if self.training:
            self.temperature *= 0.9
        return self.net(x / 10) * self.temperature
