"""Streams of Hugging Face's datasets under Trainers, whose loaders read a batch ahead: no batch is lost, and none comes twice."""

from __future__ import annotations

import pytest
import torch
from small_trainings import OfSession, train_batch, weights_of, whole_and_resumed
from torch import nn
from torch.utils.data import DataLoader

from kgorch.worker.data.followed_loader import FollowedLoader
from kgorch.worker.data.loader_fast_forward import BY_ITS_STATE

datasets = pytest.importorskip("datasets")

pytestmark = [pytest.mark.usefixtures("alone"), pytest.mark.filterwarnings("ignore")]


def rows(first: int, count: int = 11):
    return datasets.IterableDataset.from_generator(_rows, gen_kwargs={"first": first, "count": count})


def _rows(first, count):
    return ({"x": [float(number)]} for number in range(first, first + count))


STREAMS = {
    "plain": lambda: rows(0),
    "mapped": lambda: rows(0).map(lambda row: {"x": [row["x"][0] * 2]}),
    "interleaved": lambda: datasets.interleave_datasets([rows(0, 6), rows(20, 5)], stopping_strategy="all_exhausted"),
    "buffer": lambda: rows(0).shuffle(seed=3, buffer_size=4),
    "interleaved buffer": lambda: datasets.interleave_datasets(
        [rows(0, 6).shuffle(seed=3, buffer_size=4), rows(20, 5)], stopping_strategy="all_exhausted"
    ),
}


class Line(nn.Module):
    def __init__(self):
        super().__init__()
        self.net, self.seen = nn.Linear(1, 1), OfSession()

    def forward(self, x):
        self.seen.append(x.flatten().int().tolist())
        return {"loss": ((self.net(x / 10) - 1) ** 2).mean()}


def is_by_state(run) -> bool:
    return run.session._state.exactness.facts["data"].startswith(BY_ITS_STATE)


@pytest.mark.parametrize("cut_at", [1, 2, 5, 6, 7, 9, 14])
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("stream", STREAMS)
def test_a_stream_under_a_trainer_of_transformers_goes_on_with_its_next_batch(
    transformers, carried, stream, accumulate, cut_at
):
    """The batch that Accelerate had read ahead was lost, and `state.epoch` began anew."""

    class Epochs(transformers.TrainerCallback):
        def __init__(self):
            self.seen = []

        def on_step_end(self, _, state, *__, **___):
            self.seen.append(state.epoch)

    def script():
        model, epochs = Line(), Epochs()
        arguments = transformers.TrainingArguments(
            "out", use_cpu=True, report_to=[], per_device_train_batch_size=2, disable_tqdm=True, save_strategy="no", max_steps=15,
            gradient_accumulation_steps=accumulate,
        )  # fmt: skip
        transformers.Trainer(model, arguments, train_dataset=STREAMS[stream](), callbacks=[epochs]).train()
        return weights_of(model), epochs.seen, list(model.seen)

    (_, whole), (_, resumed) = whole_and_resumed(carried, script, cut_at)
    assert resumed[:2] == whole[:2] and int(whole[1][-1]) == (2 if accumulate == 1 else 4)
    assert resumed[2] == whole[2][len(whole[2]) - len(resumed[2]) :] and len(resumed[2]) < len(whole[2])
    assert is_by_state(carried) is ("buffer" not in stream)


@pytest.mark.parametrize("cut_at", [1, 2, 5, 6, 7, 14])
@pytest.mark.parametrize("stream", ["plain", "interleaved buffer"])
def test_a_stream_in_a_loop_around_accelerate_goes_on_with_its_next_batch(accelerated, stream, cut_at):
    def script(accelerator):
        model, seen = nn.Linear(1, 1), OfSession()
        optimizer = torch.optim.AdamW(model.parameters(), 0.1)
        loader = DataLoader(STREAMS[stream]().with_format("torch"), 2)
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        for _ in range(3):
            for batch in loader:
                seen.append(batch["x"].flatten().tolist())
                train_batch(accelerator, model, optimizer, [batch["x"]])
        return weights_of(model), list(seen)

    (_, whole), (_, resumed) = whole_and_resumed(accelerated, script, cut_at)
    assert resumed[0] == whole[0] and resumed[1][-1] == whole[1][-1]
    assert is_by_state(accelerated) is ("buffer" not in stream)


def test_what_one_rank_reads_for_all_is_read_again_by_all(accelerated):
    """One had a state of the stream and skipped by it, the others read again, and all waited for each other."""

    loader = accelerated(lambda accelerator: accelerator.prepare_data_loader(DataLoader(rows(0), 2)))[1]
    assert type(loader).__name__ == "DataLoaderDispatcher"
    for world_size in (1, 2):
        followed = FollowedLoader(loader, world_size, torch.device("cpu"))
        batches = iter(followed)
        for _ in range(3):
            next(batches)
            followed.at_boundary(is_first=False, open_batches=1)
        assert (followed.place["stream"] is None) is (world_size == 2)
