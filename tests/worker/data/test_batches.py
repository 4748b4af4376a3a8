"""Division of a batch into microbatches: along the samples, whatever holds them, and not at all where it is not known how."""

from __future__ import annotations

import pytest
import ranks
import torch

from kgorch.core.memory.memory_ladder import Settings
from kgorch.worker.data import batches


def images(count, channels=3):
    return tuple(torch.randn(channels, 5 + number, 6) for number in range(count))


def targets(*boxes):
    return tuple({"boxes": torch.randn(count, 4), "size": (5, 6), "image": torch.tensor(count)} for count in boxes)


def sequences(*lengths):
    return [torch.randn(length, 8) for length in lengths]


def pieces(value, size):
    return [value[start : start + size] for start in range(0, len(value), size)]


BY_SAMPLES = {
    "sequences and labels": (sequences(7, 4, 2, 9), torch.arange(4)),
    "a sequence as long as the batch": (sequences(4, 7, 2, 9), torch.arange(4)),
    "sequences alone": sequences(7, 4 + 1, 2, 9),
    "sequences of one length": sequences(6, 6, 6, 6),
    "images and targets": (images(4), targets(1, 0, 4, 2)),
    "as many images as channels": (images(3), targets(1, 0, 2)),
    "two of each": (images(2), targets(3, 1)),
    "two of each with two boxes each": (images(2), targets(2, 2)),
    "as many targets as boxes": (images(4), targets(4, 4, 4, 4)),
    "a batch of images and a list of targets": {"x": torch.randn(4, 3, 5, 5), "y": [*targets(1, 0, 4, 2)]},
    "single values": (torch.randn(4, 3), tuple(torch.arange(4)), ("a", "b", "c", "d")),
    "lists without tensors": (torch.randn(4, 3), [[{"box": [1, 2]}], [], [{"box": [3, 4]}] * 2, []]),
}


@pytest.mark.parametrize("batch", BY_SAMPLES.values(), ids=BY_SAMPLES.keys())
@pytest.mark.parametrize("size", [1, 2])
def test_what_holds_one_item_a_sample_is_divided_by_items(batch, size):
    is_alone = isinstance(batch, list)
    fields = [batch] if is_alone else list(batch.values()) if isinstance(batch, dict) else list(batch)
    samples = len(fields[0])
    parts = batches.split(batch, size, samples)
    assert len(parts) == -(-samples // size)
    for number, field in enumerate(fields):
        expected = pieces(field, size)
        key = list(batch)[number] if isinstance(batch, dict) else number
        actual = parts if is_alone else [part[key] for part in parts]
        assert repr(actual) == repr(expected)
        assert all(type(one) is type(field) for one in actual)
    assert batches.length(batch, samples) == samples


ALONG_THE_AXIS = {
    "two fields of two samples": ([torch.randn(2, 3), torch.randn(2, 3)], 2),
    "three fields of three": ((torch.randn(3, 3), torch.zeros(3, 3), torch.arange(3)), 3),
    "two views of two samples, concatenated": ([torch.randn(4, 3), torch.arange(4)], 2),
    "crops": ([torch.randn(8, 3, size, size) for size in (5, 5, 3, 3)], 8),
    "crops of a loader that is not known": ([torch.randn(8, 3, size, size) for size in (5, 5, 3, 3)], 0),
    "a batch that the script has divided itself": ((torch.randn(4, 3), torch.arange(4)), 8),
}


@pytest.mark.parametrize(("batch", "declared"), ALONG_THE_AXIS.values(), ids=ALONG_THE_AXIS.keys())
def test_fields_are_divided_along_their_first_axis(batch, declared):
    parts = batches.split(batch, 1, declared)
    assert len(parts) == len(batch[0]) == batches.length(batch, declared)
    for number, part in enumerate(parts):
        assert len(part) == len(batch)
        for field, piece in zip(batch, part, strict=True):
            assert torch.equal(piece, field[number : number + 1])


UNKNOWN = {
    "boxes of all images in one tensor": ((torch.randn(4, 3, 5, 5), torch.randn(9, 6)), 4),
    "as many fields as samples": ((torch.randn(2, 8), torch.randn(5, 8)), 2),
    "packed tokens": ((torch.arange(17), torch.tensor([0, 5, 9, 12])), 4),
    "a packed sequence": (torch.nn.utils.rnn.pack_sequence(sequences(9, 7, 4, 2)), 4),
    "pairs of which two are in the batch": (
        [[torch.arange(5), torch.arange(7)], [torch.arange(6), torch.arange(3)]],
        2,
    ),
    "sequences of a loader that is not known": ((sequences(7, 4, 2, 9), torch.arange(4)), 0),
    "fewer items than samples": ((images(3), targets(1, 0, 4)), 4),
}


@pytest.mark.parametrize(("batch", "declared"), UNKNOWN.values(), ids=UNKNOWN.keys())
def test_where_the_samples_of_a_batch_are_is_not_guessed(batch, declared):
    assert batches.split(batch, 1, declared) == [batch]


@pytest.mark.parametrize("loader", ["kgorch", "own", "batches"])
def test_a_list_of_sequences_has_the_same_gradient_in_microbatches(tmp_path, loader):
    """Of kgorch's loader, of a DataLoader, and of one whose batches are of different sizes."""
    args = {"loader": loader}
    whole = ranks.run(tmp_path / "whole", "sequences.py", 1, args)
    parts = ranks.run(tmp_path / "parts", "sequences.py", 1, args, settings=Settings(microbatch=4))
    assert whole.codes == parts.codes == [0], whole.said() + parts.said()
    assert whole.lines(starting="samples ") == parts.lines(starting="samples ") == ["samples 48"]
    largest = max(line.split()[1] for line in parts.lines(starting="part "))
    assert largest == "4" and not parts.lines(starting="exactness ")
    losses = [[float(line.split()[1]) for line in run.lines(starting="loss ")] for run in (whole, parts)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_a_batch_that_cannot_be_divided_is_computed_whole_and_told(tmp_path):
    args = {"loader": "kgorch", "packed": True}
    whole = ranks.run(tmp_path / "whole", "sequences.py", 1, args)
    parts = ranks.run(tmp_path / "parts", "sequences.py", 1, args, settings=Settings(microbatch=4))
    assert parts.codes == [0], parts.said()
    assert whole.weights == parts.weights
    [told] = parts.lines(starting="exactness ")
    assert "ladder: none: a batch cannot be divided, for its tensors neither share a first axis" in told


def test_out_of_memory_in_a_batch_that_cannot_be_divided_takes_no_microbatch(tmp_path):
    args = {"loader": "kgorch", "packed": True, "fits": 8}
    ended = ranks.run(tmp_path, "sequences.py", 1, args, ladder=["microbatch/2"])
    assert ended.codes == [1]
    assert [line.split()[1] for line in ended.lines(starting="part ")] == ["16"]  # not tried again as it was
