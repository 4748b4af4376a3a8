"""Loaders that keep their place by themselves: cut anywhere they give what would have come, and nothing is read again."""

from __future__ import annotations

import json

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from kgorch.errors import CannotRestore
from kgorch.worker import rng_state
from kgorch.worker.data.followed_loader import FollowedLoader
from kgorch.worker.data.loader_fast_forward import BY_ITS_STATE

CPU = torch.device("cpu")
reads: list[int] = []
"""Samples that were read, in the order of the reads."""


class Numbers(IterableDataset):
    """A stream that knows its place and augments what it gives."""

    def __init__(self) -> None:
        self.at = 0

    def __iter__(self):
        while self.at < 11:
            reads.append(self.at)
            self.at += 1
            yield torch.tensor([self.at + float(torch.rand(()))])
        self.at = 0

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


class OwnLoader:
    """A loader of a script, with a tensor in its state."""

    def __init__(self) -> None:
        self.left = torch.arange(6)

    def __iter__(self):
        while len(self.left):
            first, self.left = self.left[:1], self.left[1:]
            reads.append(int(first))
            yield first.float()
        self.left = torch.arange(6)

    def state_dict(self):
        return {"left": self.left}

    def load_state_dict(self, state):
        self.left = state["left"]


def hugging_face():
    datasets = pytest.importorskip("datasets")

    def doubled(row):  # the library skips the rows before, and maps them no more
        reads.append(int(row["x"]))
        return {"x": row["x"] * 2}

    stream = datasets.IterableDataset.from_generator(lambda: ({"x": float(number)} for number in range(11)))
    return DataLoader(stream.map(doubled), 2)


def torchdata(workers):
    loaders = pytest.importorskip("torchdata.stateful_dataloader")
    return loaders.StatefulDataLoader(TensorDataset(torch.arange(11.0)), 2, shuffle=True, num_workers=workers)


MAKE = {
    "a stream": lambda: DataLoader(Numbers(), 2),
    "a loader": OwnLoader,
    "Hugging Face": hugging_face,
    "torchdata": lambda: torchdata(0),
    "torchdata, processes": lambda: torchdata(2),
}


def flat(batch):
    return (
        (batch["x"] if isinstance(batch, dict) else batch[0] if isinstance(batch, list) else batch).flatten().tolist()
    )


def train(loader, given, *, cut_after=None, rng=None, epochs=3):
    """Batches with what a training draws besides. Returns the place and the random states where it is cut."""
    for _ in range(loader.epoch, epochs):
        for batch in loader:
            if rng is not None:
                rng_state.restore(rng, CPU)  # as the first boundary does
                rng = None
            loader.at_boundary(is_first=not given, open_batches=1)
            if len(given) == cut_after:
                return json.loads(json.dumps([loader.place, rng_state.capture(CPU)]))
            given.append((loader.epoch, flat(batch), float(torch.rand(()))))
    return None


@pytest.mark.parametrize("name", MAKE)
def test_what_follows_a_cut_is_what_would_have_followed_and_little_is_read_again(name):
    make, whole = MAKE[name], []
    torch.manual_seed(1)
    train(FollowedLoader(make(), 1, CPU), whole)
    assert {epoch for epoch, _, _ in whole} == {0, 1, 2} and len(whole) >= 15
    for cut in (1, 3, 7, len(whole) - 1):
        torch.manual_seed(1)
        first = []
        place, rng = train(FollowedLoader(make(), 1, CPU), first, cut_after=cut)
        torch.manual_seed(99)
        resumed, rest = FollowedLoader(make(), 1, CPU), []
        resumed.resume(place, 1)
        reads.clear()
        train(resumed, rest, rng=rng, epochs=whole[cut][0] + 1)
        assert first + rest == [step for step in whole if step[0] <= whole[cut][0]], cut
        assert not reads or len(reads) <= 2 * len(rest), "the batches before are not read again"
        assert resumed.running.exactness.startswith(BY_ITS_STATE)


def test_a_stream_that_shuffles_in_a_buffer_is_read_again(capsys):
    datasets = pytest.importorskip("datasets")

    def make():
        stream = datasets.IterableDataset.from_generator(lambda: ({"x": float(number)} for number in range(11)))
        return DataLoader(stream.shuffle(seed=3, buffer_size=4), 2)

    whole, first, rest = [], [], []
    train(FollowedLoader(make(), 1, CPU), whole, epochs=1)
    place, rng = train(FollowedLoader(make(), 1, CPU), first, cut_after=3)
    assert place["stream"] is None
    resumed = FollowedLoader(make(), 1, CPU)
    resumed.resume(place, 1)
    train(resumed, rest, rng=rng, epochs=1)
    assert [batch for _, batch, _ in first + rest] == [batch for _, batch, _ in whole]
    assert "read again" in capsys.readouterr().out


@pytest.mark.parametrize("stream", [3, {"at": "x"}, {}, {"$tensor": "model.weight"}], ids=str)
def test_a_state_that_the_loader_does_not_take_is_refused(stream):
    loader = FollowedLoader(DataLoader(Numbers(), 2), 1, CPU)
    place, _ = train(loader, [], cut_after=2)
    resumed = FollowedLoader(DataLoader(Checked(), 2), 1, CPU)
    resumed.resume({**place, "stream": stream}, 1)
    with pytest.raises(CannotRestore, match="does not take the state"):
        next(iter(resumed))


class Checked(Numbers):
    def load_state_dict(self, state):
        self.at = int(state["at"])


def test_a_state_that_is_too_large_no_plain_value_an_error_or_no_place_is_not_used():
    class Large(Numbers):
        def state_dict(self):
            return {"at": self.at, "history": "x" * (1 << 17)}

    class Odd(Numbers):
        def state_dict(self):
            return {"at": object()}

    class Broken(Numbers):
        def state_dict(self):
            raise RuntimeError("not before the first batch")

    class Coarse(Numbers):
        def state_dict(self):
            return {"epoch": 0}

    for kind in (Large, Odd, Broken, Coarse):
        loader = FollowedLoader(DataLoader(kind(), 2), 1, CPU)
        place, _ = train(loader, [], cut_after=2)
        assert place["stream"] is None and loader.running.exactness.startswith("replayed")
