"""The ink fragments on disk: made, read back, cut into tiles, and what is said when they are broken."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import tifffile
import torch
from PIL import Image

from workloads.ink_detection.data import DataError, Fragments, positions, turned
from workloads.ink_detection.make_fragments import make_fragment

SIZE, LAYERS = 96, 8


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for number in (1, 2):
        make_fragment(tmp_path / "data" / str(number), SIZE, LAYERS, seed=0, number=number)
    return tmp_path / "data"


def files(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}


def volume_of(root: Path, name: str) -> np.ndarray:
    return np.stack([tifffile.imread(path) for path in sorted((root / name / "surface_volume").glob("*.tif"))])


def test_the_generator_writes_the_layout_of_the_challenge(root: Path) -> None:
    expected = {f"surface_volume/{index:02}.tif" for index in range(LAYERS)} | {"mask.png", "inklabels.png"}
    assert files(root / "1").keys() == expected
    volume = volume_of(root, "1")
    assert volume.dtype == np.uint16 and volume.shape == (LAYERS, SIZE, SIZE)
    labels = Image.open(root / "1" / "inklabels.png")
    assert labels.mode == "L" and labels.size == (SIZE, SIZE)


def test_the_same_seed_makes_the_same_files_and_another_seed_others(root: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "workloads.ink_detection.make_fragments"]
    again = tmp_path / "again"
    subprocess.run([*command, again, "--size", str(SIZE), "--layers", str(LAYERS)], check=True)
    assert files(again) == files(root)
    make_fragment(again / "1", SIZE, LAYERS, seed=1, number=1)
    assert all(files(again / "1")[name] != content for name, content in files(root / "1").items())


def test_ink_shows_in_the_course_over_depth_and_hardly_in_any_one_layer(root: Path) -> None:
    volume = volume_of(root, "1").astype(float)
    ink, mask = (np.asarray(Image.open(root / "1" / name)) > 0 for name in ("inklabels.png", "mask.png"))

    def visibility(image: np.ndarray) -> float:
        there, elsewhere = image[ink], image[mask & ~ink]
        return float(abs(there.mean() - elsewhere.mean()) / np.sqrt((there.var() + elsewhere.var()) / 2))

    assert max(visibility(layer) for layer in volume) < 0.35
    assert visibility(volume[:4].mean(0) - volume[4:].mean(0)) > 0.6


def test_tiles_hold_what_the_files_hold(root: Path) -> None:
    dataset = Fragments(root, "all", tile=32, stride=16)
    volume, labels = volume_of(root, "2"), np.asarray(Image.open(root / "2" / "inklabels.png"))
    tile = dataset[len(dataset) - 1]
    number, top, left = tile.place.tolist()
    place = np.s_[top : top + 32, left : left + 32]
    assert number == 1
    assert tile.volume.dtype == torch.float32 and tile.volume.shape == (1, LAYERS, 32, 32)
    np.testing.assert_allclose(tile.volume[0], volume[:, *place] / 65535, atol=1e-6)
    np.testing.assert_array_equal(tile.ink[0], labels[place] > 0)


def test_only_the_wanted_middle_layers_are_opened(root: Path) -> None:
    (root / "1" / "surface_volume" / "00.tif").write_bytes(b"broken")
    (root / "1" / "surface_volume" / "07.tif").write_bytes(b"broken")
    fragment = Fragments(root, "all", layers=4, tile=32).fragments[0]
    assert [path.name for path in fragment.layers] == ["02.tif", "03.tif", "04.tif", "05.tif"]


def test_compressed_layers_are_read_like_mapped_ones(root: Path, tmp_path: Path) -> None:
    plain = Fragments(root, "all", tile=32)[0]
    for path in (root / "1" / "surface_volume").glob("*.tif"):
        packed = tmp_path / "packed" / "1" / "surface_volume" / path.name
        packed.parent.mkdir(parents=True, exist_ok=True)
        tifffile.imwrite(packed, tifffile.imread(path), compression="zlib")
    for name in ("mask.png", "inklabels.png"):
        (tmp_path / "packed" / "1" / name).write_bytes((root / "1" / name).read_bytes())
    assert torch.equal(Fragments(tmp_path / "packed", "all", tile=32)[0].volume, plain.volume)


def test_a_fragment_without_labels_can_be_read_for_prediction(root: Path) -> None:
    (root / "1" / "inklabels.png").unlink()
    dataset = Fragments(root, "all", tile=64, stride=64)
    assert dataset.fragments[0].name == "1" and not dataset[0].ink.any()


def test_every_papyrus_pixel_lies_in_a_tile_and_every_tile_on_papyrus(root: Path) -> None:
    dataset = Fragments(root, "all", tile=40, stride=24)
    covered = [np.zeros((SIZE, SIZE), bool) for _ in dataset.fragments]
    for number, top, left in dataset.tiles:
        place = np.s_[top : top + 40, left : left + 40]
        assert dataset.fragments[number].mask_HW[place].any()
        covered[number][place] = True
    for fragment, there in zip(dataset.fragments, covered, strict=True):
        assert there[fragment.mask_HW].all()


@pytest.mark.parametrize(("span", "expected"), [(10, []), (32, [0]), (40, [0, 8]), (64, [0, 16, 32])])
def test_the_last_tile_ends_flush_with_the_edge(span: int, expected: list[int]) -> None:
    assert list(positions(0, span, tile=32, stride=16)) == expected


def test_the_last_fragment_is_held_out_unless_one_is_named(root: Path) -> None:
    def names(part: str, validation: str | None = None) -> list[str]:
        return [fragment.name for fragment in Fragments(root, part, tile=32, validation=validation).fragments]  # type: ignore[arg-type]

    assert (names("train"), names("valid"), names("all")) == (["1"], ["2"], ["1", "2"])
    assert (names("train", "1"), names("valid", "1")) == (["2"], ["1"])


def test_an_only_fragment_is_split_by_area_without_overlap(tmp_path: Path) -> None:
    make_fragment(tmp_path / "1", 128, LAYERS, seed=0, number=1)
    train, valid = (Fragments(tmp_path, part, tile=32, stride=16) for part in ("train", "valid"))
    assert max(left for _, _, left in train.tiles) + 32 <= 96
    assert min(left for _, _, left in valid.tiles) == 96


def test_training_tiles_are_turned_by_the_global_generator_volume_and_ink_alike(root: Path) -> None:
    still, moving = Fragments(root, "all", tile=32), Fragments(root, "train", tile=32)
    seen = set()
    for seed in range(40):
        torch.manual_seed(seed)
        turn = int(torch.randint(8, ()))
        seen.add(turn)
        torch.manual_seed(seed)
        tile = moving[3]
        assert torch.equal(tile.volume, turned(still[3].volume, turn))
        assert torch.equal(tile.ink, turned(still[3].ink, turn))
    assert seen == set(range(8))


def breaks_root(root: Path) -> None:
    root.rename(root.with_name("elsewhere"))


def breaks_fragments(root: Path) -> None:
    for name in "12":
        (root / name / "surface_volume").rename(root / name / "volume")


def breaks_layer(root: Path) -> None:
    (root / "1" / "surface_volume" / "04.tif").unlink()


def breaks_tiff(root: Path) -> None:
    path = root / "1" / "surface_volume" / "04.tif"
    path.write_bytes(path.read_bytes()[:900])


def breaks_layer_size(root: Path) -> None:
    tifffile.imwrite(root / "1" / "surface_volume" / "04.tif", np.zeros((SIZE, SIZE + 1), np.uint16))


def breaks_layer_depth(root: Path) -> None:
    tifffile.imwrite(root / "1" / "surface_volume" / "04.tif", np.zeros((SIZE, SIZE), np.uint8))


def breaks_mask(root: Path) -> None:
    (root / "1" / "mask.png").unlink()


def breaks_labels(root: Path) -> None:
    path = root / "1" / "inklabels.png"
    path.write_bytes(path.read_bytes()[:80])


def breaks_labelling(root: Path) -> None:
    (root / "1" / "inklabels.png").unlink()


def breaks_label_size(root: Path) -> None:
    Image.new("L", (SIZE, SIZE - 1)).save(root / "1" / "inklabels.png")


def breaks_papyrus(root: Path) -> None:
    for name in "12":
        Image.new("L", (SIZE, SIZE)).save(root / name / "mask.png")


@pytest.mark.parametrize(
    ("breaks", "what", "where"),
    [
        (breaks_root, "there is no data folder", "data"),
        (breaks_fragments, "there are no fragments", "surface_volume"),
        (breaks_layer, "layers are missing", "found no 04.tif"),
        (breaks_tiff, "04.tif of fragment 1 cannot be read", "expected a TIFF"),
        (breaks_layer_size, "does not fit the others", "uint16 (96, 96) as in 00.tif, found uint16 (96, 97)"),
        (breaks_layer_depth, "does not fit the others", "found uint8 (96, 96)"),
        (breaks_mask, "mask.png of fragment 1 cannot be read", "No such file"),
        (breaks_labels, "inklabels.png of fragment 1 cannot be read", "expected a PNG"),
        (breaks_labelling, "inklabels.png of fragment 1 cannot be read", "No such file"),
        (breaks_label_size, "not the size of its layers", "expected (96, 96) rows and columns, found (95, 96)"),
        (breaks_papyrus, "no tile to cut", "that touch the mask"),
    ],
)
def test_broken_data_is_named_with_its_place_and_the_next_step(root: Path, breaks, what: str, where: str) -> None:  # type: ignore[no-untyped-def]
    breaks(root)
    with pytest.raises(DataError) as caught:
        Fragments(root, "train", tile=32)
    message = str(caught.value)
    assert what in message and where in message
    assert "\nnext: " in message


def test_a_validation_fragment_that_is_not_there_is_answered_with_those_that_are(root: Path) -> None:
    with pytest.raises(DataError, match="found 1, 2"):
        Fragments(root, "train", validation="3")


def test_more_layers_than_there_are_is_an_error(root: Path) -> None:
    with pytest.raises(DataError, match=r"expected 65 files NN\.tif, found 8"):
        Fragments(root, "all", layers=65)


def test_a_fragment_that_cannot_be_used_is_left_out_before_one_is_held_out_where_the_plan_says_so(root: Path) -> None:
    make_fragment(root / "3", SIZE, LAYERS, seed=0, number=3)
    (root / "3" / "inklabels.png").unlink()
    with pytest.raises(DataError, match="skip_broken = true"):
        Fragments(root, "valid")
    held_out = Fragments(root, "valid", skip_broken=True)
    assert [fragment.name for fragment in held_out.fragments] == ["2"]
    assert len(held_out.left_out) == 1 and "fragment 3" in held_out.left_out[0]
    assert [fragment.name for fragment in Fragments(root, "train", skip_broken=True).fragments] == ["1"]
    assert len(Fragments(root, "all", skip_broken=True).fragments) == 3, "a prediction needs no labels"
