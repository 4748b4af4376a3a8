"""A checkpoint's state from anywhere, put into modules, optimizers and generators: taken as it is, or refused by its place."""

from __future__ import annotations

import json
import math
import os
import random
import tracemalloc
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from saving import Place, save
from torch import nn

from kgorch import untrusted_io
from kgorch.checkpoint.folder import read_checkpoint, read_json_file
from kgorch.checkpoint.manifest import FileEntry, Manifest, Position
from kgorch.checkpoint.verify import verify_checkpoint
from kgorch.errors import CannotRestore, CheckpointBroken, KgorchError
from kgorch.worker import rng_state
from kgorch.worker.checkpoint import restore_source, state_codec

FUZZ = int(os.environ.get("KGORCH_FUZZ", "1"))
"""How much longer: `make soak`."""

MANY = settings(max_examples=2500, deadline=None, database=None)

_tags = st.sampled_from(
    ["$tensor", "$float", "$tuple", "$dict", "$counter", "$bytes", "$numpy", "$", "$other", "plain"]
)
_leaves = st.one_of(
    st.none(), st.booleans(), st.integers(-3, 2**70), st.floats(), st.text(max_size=4),
    st.sampled_from(["inf", "nan", "-inf", "1e5", "AAAA", "AA==", "A", "|O", "<f4", "|b1", "<U9", "V8", "f4,i4", "x", "w"]),
)  # fmt: skip
_trees = st.recursive(
    _leaves,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(_tags | st.text(max_size=2), inner, min_size=1, max_size=2)
        | st.tuples(_tags, inner).map(lambda pair: {pair[0]: pair[1]})
        | st.tuples(
            st.sampled_from(["$dict", "$counter"]), st.lists(st.tuples(inner, inner).map(list), max_size=2)
        ).map(lambda pair: {pair[0]: pair[1]})
        | st.tuples(_leaves, st.none() | st.lists(_leaves | st.integers(0, 3), max_size=2), _leaves).map(
            lambda three: {"$numpy": list(three)}
        )
    ),
    max_leaves=6,
)
TENSORS = {"x": torch.zeros(2), "w": torch.ones(3, 3)}


def _fetch(name: str) -> torch.Tensor:
    if name not in TENSORS:
        raise CannotRestore(f"no {name}")
    return TENSORS[name]


class Holder:
    def __init__(self) -> None:
        self.value: object = None

    def state_dict(self):
        return self.value

    def load_state_dict(self, loaded):
        self.value = loaded


@pytest.mark.slow
@settings(MANY, max_examples=5_000 * FUZZ)
@given(_trees)
def test_any_tree_is_values_that_could_have_been_saved_or_is_refused(tree):
    tree = untrusted_io.parse_json(json.dumps(tree).encode())
    holder = Holder()
    try:
        state_codec.restore({"thing": holder}, {"thing": tree}, _fetch)
    except CannotRestore as error:
        assert str(error)
        return
    captured = state_codec.capture({"thing": holder})
    again = Holder()
    state_codec.restore({"thing": again}, captured.own_tree, captured.tensors.__getitem__)
    assert repr(again.value) == repr(holder.value)


@pytest.mark.parametrize(
    "value",
    [
        {"$numpy": ["|O", [1], "AAAAAAAAAAA="]},
        {"$numpy": ["<U2", [1], "AAAAAAAAAAA="]},
        {"$numpy": ["<M8[s]", [1], "AAAAAAAAAAA="]},
        {"$numpy": ["<f4", [2**40], "AAAA"]},
        {"$numpy": ["<f4", [-1], "AAAAAA=="]},
        {"$numpy": ["<f4", [0, 2**62, 2**62], ""]},
        {"$numpy": ["|b1", [1], "Ag=="]},
        {"$numpy": ["<f3", [1], "AAAA"]},
        {"$numpy": ["<f4", None, ""]},
        {"$float": "1e400"},
        {"$float": 5},
        {"$tuple": "abc"},
        {"$tuple": {"a": 1}},
        {"$dict": [["a", 1], ["a", 2]]},
        {"$dict": [[["a"], 1]]},
        {"$dict": [["a"]]},
        {"$counter": [["a", "b"]]},
        {"$bytes": "not base64"},
        {"$bytes": 10**12},
        {"$tensor": ["x"]},
        {"$tensor": "nowhere"},
        {"$tensor": "x", "more": 1},
        {"$unknown": 1},
    ],
)
def test_a_value_that_kgorch_has_not_written_is_refused_by_its_place_and_takes_no_memory(value):
    tracemalloc.start()
    try:
        with pytest.raises(CannotRestore, match=r"thing\.inner\.0|no nowhere"):
            state_codec.restore({"thing": Holder()}, {"thing": {"inner": [value]}}, _fetch)
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()


# Random states


def _rng() -> dict:
    tree: dict = json.loads(json.dumps(rng_state.capture(torch.device("cpu"))))
    return tree


RNG = _rng()


def _altered(tree, at, value):
    """A copy in which one value is another; only what lies on the way is copied."""
    if not at:
        return value
    copied = dict(tree) if isinstance(tree, dict) else list(tree)
    copied[at[0]] = _altered(tree[at[0]], at[1:], value)
    return copied


PLACES = [
    (), ("python",), ("python", "$tuple"), ("python", "$tuple", 0), ("python", "$tuple", 1), ("python", "$tuple", 1, "$tuple"),
    ("python", "$tuple", 1, "$tuple", 0), ("python", "$tuple", 1, "$tuple", 624), ("python", "$tuple", 2),
    ("torch",), ("torch", "$bytes"), ("numpy",),
    ("numpy", "$tuple", 0), ("numpy", "$tuple", 1), ("numpy", "$tuple", 1, "$numpy", 0),
    ("numpy", "$tuple", 1, "$numpy", 1), ("numpy", "$tuple", 2), ("numpy", "$tuple", 3), ("numpy", "$tuple", 4),
]  # fmt: skip


@settings(MANY, max_examples=500)
@given(_trees)
def test_any_value_in_any_place_of_the_random_states_is_set_or_refused(value):
    for at in PLACES:
        try:
            rng_state.restore(_altered(RNG, at, value), torch.device("cpu"))
        except CannotRestore as error:
            assert str(error)
        assert math.isfinite(random.random() + float(np.random.rand()) + float(torch.rand(())))
    rng_state.restore(RNG, torch.device("cpu"))


@pytest.mark.parametrize(
    ("at", "value"),
    [
        (("numpy", "$tuple", 2), 625),  # numpy would read behind its own memory
        (("numpy", "$tuple", 2), -5),
        (("numpy", "$tuple", 2), 10**7),
        (("torch",), 10**12),  # so many bytes, were it taken for a size
        (("torch",), {"$bytes": "AAAA"}),
        (("python", "$tuple", 1, "$tuple", 624), 10**6),
        (("python", "$tuple", 2), "3"),
        (("python",), None),
        (("torch",), {"$tensor": "x"}),
    ],
)
def test_random_states_that_lead_out_of_memory_are_refused(at, value):
    tracemalloc.start()
    try:
        with pytest.raises(CannotRestore, match="random states"):
            rng_state.restore(_altered(RNG, at, value), torch.device("cpu"))
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()


# A whole checkpoint


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A checkpoint of a module, an optimizer and an object of its own, and what it was made of."""
    place = Place(tmp_path_factory.mktemp("saved"))
    place.start_keeper()
    tracked = _tracked()
    tracked["model"](torch.ones(2, 3)).sum().backward()
    tracked["optimizer"].step()
    saver = place.saver()
    assert save(saver, tracked, 1) and saver.wait()
    place.kill_keeper()
    return place.root / "step-00000001"


def _tracked():
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    optimizer = torch.optim.AdamW(model.parameters())
    return {"model": model, "optimizer": optimizer, "scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 5)}


def _places(value, at=()):
    yield at
    if isinstance(value, dict | list):
        for key in value if isinstance(value, dict) else range(len(value)):
            yield from _places(value[key], (*at, key))


@settings(MANY, max_examples=120)
@given(value=_trees, data=st.data())
def test_any_value_in_any_place_of_a_state_is_restored_or_refused(saved, value, data):
    described = read_checkpoint(saved)
    shards = restore_source.ShardReader(saved, described, 0)
    tree = read_json_file(saved, described, "state.json") | read_json_file(saved, described, "rank0.json")["own"]
    for at in [at for at in _places(tree) if at]:
        try:
            state_codec.restore(_tracked(), _altered(tree, at, value), shards.fetch)
        except KgorchError as error:
            assert str(error)


@pytest.mark.parametrize("name", ["state.json", "rank0.json", "rank0.safetensors"])
@pytest.mark.parametrize("change", ["one byte", "longer", "unlisted"])
def test_a_file_that_has_changed_since_it_was_verified_is_refused(saved, tmp_path, name, change):
    folder = tmp_path / "step-00000001"
    folder.mkdir()
    for path in saved.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    described = verify_checkpoint(folder)
    content = bytearray((folder / name).read_bytes())
    if change == "unlisted":
        described = replace(described, files={})
    else:
        content = content + b" " if change == "longer" else bytearray([content[0] ^ 1]) + content[1:]
    (folder / name).write_bytes(content)
    with pytest.raises((CheckpointBroken, CannotRestore)):
        if name.endswith(".json"):
            read_json_file(folder, described, name)
        else:
            restore_source.ShardReader(folder, described, 0).fetch("model.0.weight")


def test_a_truth_value_that_is_neither_is_refused(tmp_path):
    path = tmp_path / "rank0.safetensors"
    save_file({"mask": torch.ones(2, dtype=torch.bool), "x": torch.ones(2, dtype=torch.int64)}, path)
    content = path.read_bytes()
    path.write_bytes(content[:-1] + b"\2")
    listed = {path.name: FileEntry(len(content), "0" * 32)}
    shards = restore_source.ShardReader(tmp_path, Manifest("run", "id", "train", Position(), 1, "", files=listed), 0)
    assert shards.fetch("x").tolist() == [1, 1]
    with pytest.raises(CheckpointBroken, match="neither true nor false"):
        shards.fetch("mask")


@pytest.mark.parametrize("key", ["\ud800", "x" * 2000])
def test_a_tensor_whose_name_no_shard_can_hold_is_refused_before_it_is_saved(key):
    holder = Holder()
    holder.value = {key: torch.ones(1)}
    with pytest.raises(CannotRestore, match="a shard cannot hold"):
        state_codec.capture({"thing": holder})
