"""Sharded tensors on disk: pieces that cover them, and the export that puts them together in bounded memory."""

from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
import pytest
import sharded
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file

from kgorch.checkpoint import assembly, manifest
from kgorch.checkpoint.export import export_safetensors, name_of_export
from kgorch.checkpoint.folder import read_checkpoint
from kgorch.checkpoint.sharding import Region, check_cover, read_sharding, whole
from kgorch.checkpoint.verify import verify_checkpoint
from kgorch.errors import CheckpointBroken, CheckpointUnreadable

SHAPES = st.lists(st.integers(1, 7), min_size=1, max_size=3)


@settings(max_examples=300, deadline=None, database=None)
@given(SHAPES, st.data())
def test_any_grid_covers_its_tensor_and_without_a_piece_or_with_one_twice_it_does_not(shape, data):
    cuts = data.draw(st.lists(st.integers(1, 4), min_size=len(shape), max_size=len(shape)))
    regions = data.draw(st.permutations(sharded.grid(shape, cuts)))
    check_cover(shape, regions)
    with pytest.raises(ValueError, match="no piece"):
        check_cover(shape, regions[1:])
    with pytest.raises(ValueError, match="overlap"):
        check_cover(shape, [*regions, regions[0]])


@settings(max_examples=300, deadline=None, database=None)
@given(SHAPES, st.data())
def test_boxes_are_taken_exactly_if_each_element_is_in_one_of_them(shape, data):
    """Boxes of any kind, also such that no mesh makes: those are refused at least where they are wrong."""
    boxes = data.draw(
        st.lists(st.tuples(*[st.tuples(st.integers(0, 3), st.integers(0, 4)) for _ in shape]), max_size=4)
    )
    regions = [Region(tuple(pair[0] for pair in box), tuple(pair[1] for pair in box)) for box in boxes]
    counts = np.zeros([extent + 8 for extent in shape], dtype=int)
    for region in regions:
        counts[region.slices] += 1
    try:
        check_cover(shape, regions)
    except ValueError:
        return
    inside = counts[whole(shape).slices]
    assert (inside == 1).all() and counts.sum() == inside.sum()


@pytest.mark.parametrize(
    ("shape", "regions", "said"),
    [
        ([4], [Region((0,), (2,)), Region((2,), (3,))], "exceeds the shape"),
        ([4], [Region((0,), (4,)), Region((4,), (0,))], "is empty"),
        ([4, 2], [Region((0,), (4,))], "exceeds the shape"),
        ([4, 2], [], "it has no piece"),
        ([4, 2], [Region((0, 0), (4, 1))], "no piece covers index 1 of dimension 1"),
        ([4, 2], [Region((0, 0), (3, 2)), Region((2, 0), (2, 2))], "overlap"),
        ([3, 3], [Region((0, 0), (1, 2)), Region((0, 2), (2, 1)), Region((2, 1), (1, 2)), Region((1, 0), (2, 1)),
                  Region((1, 1), (1, 1))], "overlap"),
    ],
)  # fmt: skip
def test_pieces_that_do_not_fit_are_refused_with_the_reason(shape, regions, said):
    with pytest.raises(ValueError, match=said):
        check_cover(shape, regions)


def test_many_thousand_pieces_are_compared_in_less_than_a_pair_by_pair_comparison_would_take():
    check_cover([1 << 16, 4], [Region((row, 0), (1, 4)) for row in range(1 << 16)])


def test_nothing_is_cut_of_a_tensor_without_dimensions_or_without_elements():
    check_cover([], [Region((), ())])
    check_cover([0, 4], [])
    with pytest.raises(ValueError, match="it has no piece"):
        check_cover([], [])


# Folders

ARRAYS = {
    "model.rows": sharded.array((10, 3)),
    "model.columns": sharded.array((4, 5, 6), "float64"),
    "model.bytes": sharded.array((9,), "uint8"),
    "model.both": sharded.array((6, 8), "int16"),
    "model.plain": sharded.array((3, 3)),
    "model.scalar": np.float32(5).reshape(()),
    "model.none": np.zeros((0, 4), dtype=np.float32),
}
CUTS = {
    "model.rows": (4, 1), "model.columns": (1, 2, 4), "model.bytes": (4,), "model.both": (2, 2), "model.scalar": (),
    "model.none": (1, 1),
}  # fmt: skip


@pytest.fixture
def folder(tmp_path):
    return sharded.write(tmp_path / "step-00000001", sharded.documents(ARRAYS, CUTS))


@pytest.mark.parametrize("band", [1, 7, 64, 1 << 20])
def test_an_export_has_the_whole_tensors_under_their_names_whatever_its_bands_are(folder, tmp_path, monkeypatch, band):
    monkeypatch.setattr(assembly, "BAND_BYTES", band)
    assert export_safetensors(folder, tmp_path / "out.safetensors", "model") == len(ARRAYS)
    found = load_file(tmp_path / "out.safetensors")
    assert found.keys() == {path.removeprefix("model.") for path in ARRAYS}
    for path, expected in ARRAYS.items():
        np.testing.assert_array_equal(found[path.removeprefix("model.")], expected)


def test_the_same_state_in_other_pieces_gives_the_same_bytes(folder, tmp_path):
    other = sharded.write(tmp_path / "other", sharded.documents(ARRAYS, {"model.rows": (2, 3), "model.both": (1, 5)}))
    for name, place in (("one", folder), ("two", other)):
        export_safetensors(place, tmp_path / name, None)
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()


def test_the_memory_of_an_export_does_not_grow_with_the_tensor(tmp_path):
    """96 MB in columns, so that every row is put together of four pieces."""
    place = sharded.write(tmp_path / "big", sharded.documents({"w": sharded.array((3000, 8000))}, {"w": (1, 4)}))
    program = """
import resource, sys
from pathlib import Path
from kgorch.checkpoint import export
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
export.export_safetensors(Path(sys.argv[1]), Path(sys.argv[2]), None)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before, "torch" in sys.modules, "numpy" in sys.modules)
"""
    command = [sys.executable, "-c", program, str(place), str(tmp_path / "out")]
    grown_kb, has_torch, has_numpy = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    assert int(grown_kb) < 24 << 10 and (has_torch, has_numpy) == ("False", "False")
    np.testing.assert_array_equal(load_file(tmp_path / "out")["w"], sharded.array((3000, 8000)))


def test_a_manifest_has_the_lower_version_unless_something_is_sharded(folder):
    document = json.loads((folder / "manifest.json").read_text())
    assert document["version"] == 2 and "sharded" not in document
    plain = manifest.parse_manifest(json.dumps(document | {"version": 1}).encode())
    assert not plain.sharded and manifest.manifest_document(plain)["version"] == 1
    with pytest.raises(CheckpointUnreadable, match="newer kgorch, in format 3"):
        manifest.parse_manifest(json.dumps(document | {"version": 3}).encode())


def test_a_name_for_an_export_is_proposed_also_of_a_checkpoint_that_cannot_be_read(folder):
    path = folder / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"version": 3}))
    assert name_of_export(folder) == "model.safetensors"


def test_what_was_saved_of_meshes_and_layouts_can_be_read_without_pytorch(folder):
    found = read_sharding(folder, read_checkpoint(folder))
    assert found.describe() == "6 (dp)"
    assert found.tensors["model.rows"].shape == (10, 3) and found.tensors["model.rows"].placements == ("S(0)",)
    assert sorted(piece.region.offset for piece in found.pieces["model.rows"]) == [(0, 0), (3, 0), (6, 0), (9, 0)]


def test_a_checkpoint_whose_pieces_do_not_fit_is_broken_though_its_hashes_are_right(tmp_path):
    contents = sharded.documents(ARRAYS, CUTS)
    rank = next(rank for rank in range(6) if "model.rows" in contents[f"rank{rank}.json"]["pieces"])
    contents[f"rank{rank}.json"]["pieces"]["model.rows"][0] = [1, 0]
    place = sharded.write(tmp_path / "broken", contents)
    for deed in (verify_checkpoint, lambda place: export_safetensors(place, tmp_path / "out", None)):
        with pytest.raises(CheckpointBroken, match=r"invalid sharding(.|\n)*model\.rows"):
            deed(place)
    assert not (tmp_path / "out").exists()
