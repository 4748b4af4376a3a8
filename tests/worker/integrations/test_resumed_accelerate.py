"""Small loops around Accelerate that are cut at a step: the rest must be as in an uninterrupted training, or fail."""

from __future__ import annotations

import pytest
import torch
from small_trainings import numbers, train_batch, weights_of, whole_and_resumed
from torch import nn
from torch.utils.data import DataLoader

pytestmark = pytest.mark.usefixtures("alone")


def samples(batch) -> list[int]:
    return batch[0].flatten().int().tolist()


def shuffled(count: int = 12) -> DataLoader:
    return DataLoader(numbers(count), 2, shuffle=True)


@pytest.mark.parametrize("cut_at", [5, 6, 8, 14])
def test_a_model_that_is_prepared_again_in_each_epoch_is_the_same_one(accelerated, cut_at):
    def script(accelerator):
        model, loader, seen = nn.Linear(1, 1), shuffled(), []
        optimizer = torch.optim.AdamW(model.parameters(), 0.1)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 4, 0.9)
        for _ in range(3):
            model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
            for batch in loader:
                seen.append(samples(batch))
                train_batch(accelerator, model, optimizer, batch)
                schedule.step()
        return seen, weights_of(model), schedule.get_last_lr()

    (steps, whole), (_, resumed) = whole_and_resumed(accelerated, script, cut_at)
    assert steps == 18 and resumed == (whole[0][cut_at:], *whole[1:])
