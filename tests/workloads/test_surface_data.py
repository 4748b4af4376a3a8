"""Volumes of the surface competition: their layout, patches, tiles, what is read of a file, and what is said when one is broken."""

from __future__ import annotations

import csv
import json
import os
from pathlib import Path

import numpy as np
import pytest
import tifffile
import torch
from PIL import Image

from kgorch.workloads.common.files import DataError
from kgorch.workloads.surface_detection import make_volumes, volumes
from kgorch.workloads.surface_detection.data import Patches, Tiles, bell, coverage, filled, grid
from kgorch.workloads.surface_detection.volumes import Reader, listed, preflight, split, usable

SIZE = 24


@pytest.fixture
def root(tmp_path: Path) -> Path:
    make_volumes.make(tmp_path / "data", train=3, test=1, size=SIZE, seed=0)
    return tmp_path / "data"


@pytest.fixture
def as_on_kaggle(tmp_path: Path) -> Path:
    """Files as the competition has them: names of digits, LZW, a list with the scroll, volumes that are no cubes, and a volume
    in the list that lies in the folders of deprecated ones alone."""
    random, data = np.random.default_rng(0), tmp_path / "vesuvius-challenge-surface-detection"
    for part, ids in (("train", ("26894125", "11460685")), ("test", ("1407735",))):
        for id in ids:
            make_volumes.save(data / f"{part}_images" / f"{id}.tif", random.integers(0, 256, (20, 24, 28), np.uint8))
            if part == "train":
                make_volumes.save(data / "train_labels" / f"{id}.tif", random.integers(0, 3, (20, 24, 28), np.uint8))
        with open(data / f"{part}.csv", "w", newline="") as file:
            withdrawn = ("11630450",) if part == "train" else ()
            csv.writer(file).writerows([("id", "scroll_id"), *((id, "34117") for id in (*withdrawn, *ids))])
    for folder in ("deprecated_train_images", "deprecated_train_labels"):
        make_volumes.save(data / folder / "11630450.tif", random.integers(0, 3, (20, 24, 28), np.uint8))
    return data


def read(root: Path, name: str) -> np.ndarray:
    with Image.open(root / name) as stack:
        return np.stack([np.asarray(stack) for page in range(stack.n_frames) if stack.seek(page) is None])


def test_the_competitions_own_folder_is_read_as_it_is(as_on_kaggle: Path) -> None:
    found, left_out = usable(None, as_on_kaggle, "train")
    assert [(volume.id, volume.scroll, volume.shape) for volume in found] == [
        ("26894125", "34117", (20, 24, 28)), ("11460685", "34117", (20, 24, 28)),
    ]  # fmt: skip
    assert found[0].label == "train_labels/26894125.tif"
    assert left_out == ["11630450.tif lies in deprecated_train_images, not in train_images"]
    assert usable(None, as_on_kaggle, "test")[0][0].label is None
    said = preflight(str(as_on_kaggle))
    assert said.startswith("2 volumes in train_images, 26894125 read: 20 × 24 × 28 voxels, mean 128, labels 0, 1, 2;")
    assert "; 1 more left out, which lie in deprecated_train_images;" in said
    patch = Patches(Reader(as_on_kaggle), found, side=16, train=False)[1]
    assert patch.image.shape == patch.label.shape == (1, 16, 16, 16) and patch.image.dtype == torch.float32


def test_without_a_list_the_folder_is_listed(root: Path) -> None:
    (root / "train.csv").unlink()
    assert [row.id for row in listed(root, "train")] == ["1000", "1001", "1002"]


def test_the_same_seed_makes_the_same_files_and_brightness_alone_tells_a_surface_badly(
    root: Path, tmp_path: Path
) -> None:
    make_volumes.make(tmp_path / "again", train=3, test=1, size=SIZE, seed=0)
    files = [path.relative_to(root) for path in sorted(root.rglob("*")) if path.is_file()]
    assert len(files) == 3 + 3 + 1 + 2
    assert all((root / name).read_bytes() == (tmp_path / "again" / name).read_bytes() for name in files)
    image, label = read(root, "train_images/1000.tif").astype(float), read(root, "train_labels/1000.tif")
    best = max(
        2 * (found & (label == 1)).sum() / ((found & (label != 2)).sum() + (label == 1).sum())
        for found in (image > level for level in range(0, 256, 8))
    )
    assert best < 0.65


@pytest.mark.parametrize("compression", ["tiff_lzw", None])
def test_a_box_holds_what_the_file_holds_whether_it_is_mapped_decoded_or_unpacked(
    root: Path, tmp_path: Path, compression
) -> None:
    whole = read(root, "train_images/1000.tif")
    if compression is None:
        tifffile.imwrite(root / "train_images" / "1000.tif", whole, photometric="minisblack")
    cut = np.s_[3:10, 5:24, 0:7]
    for reader in (Reader(root), Reader(root, str(tmp_path / "unpacked"), 1.0)):
        for _ in range(2):
            np.testing.assert_array_equal(reader.box("train_images/1000.tif", (3, 5, 0), (7, 19, 7)), whole[cut])
    assert len(list(tmp_path.glob("unpacked/*.npy"))) == (compression is not None), "a plain file is mapped where it is"


@pytest.mark.parametrize("compression", ["zlib", None])
def test_a_file_that_was_replaced_is_read_anew_though_the_one_before_is_kept_open(root: Path, compression) -> None:
    path, reader = root / "train_images" / "1000.tif", Reader(root)
    for value in (1, 2):
        aside = path.with_suffix(".part")
        tifffile.imwrite(
            aside, np.full((SIZE,) * 3, value, np.uint8), photometric="minisblack", compression=compression
        )
        os.utime(aside, ns=(value, value))
        aside.replace(path)
        assert (reader.box("train_images/1000.tif", (1, 2, 3), (4, 5, 6)) == value).all()


def test_unpacked_volumes_stay_below_their_limit(root: Path, tmp_path: Path) -> None:
    reader = Reader(root, str(tmp_path / "unpacked"), 1.5 * SIZE**3 / 2**30)
    boxes = [reader.box(f"train_images/{id}.tif", (0, 0, 0), (SIZE,) * 3) for id in (1000, 1001)]
    assert len(list((tmp_path / "unpacked").iterdir())) == 1, "the second does not fit, and is decoded each time"
    np.testing.assert_array_equal(boxes[1], read(root, "train_images/1001.tif"))


def test_patches_show_a_surface_more_often_than_chance_and_score_patches_never_change(root: Path) -> None:
    found, _ = usable(None, root, "train")
    train, held = (Patches(Reader(root), found, side=8, count=20, train=train) for train in (True, False))
    assert len(train) == 60
    torch.manual_seed(0)
    labels = [train[number].label for number in range(60)]
    assert sum(bool((label == 1).any()) for label in labels) > 36, "six of ten are centred on one"
    once = held[7]
    torch.manual_seed(1)
    assert torch.equal(once.image, held[7].image) and torch.equal(once.label, held[7].label)
    torch.manual_seed(5)
    first = train[3]
    torch.manual_seed(5)
    assert torch.equal(first.image, train[3].image), "a function of the generator, in any process"


def test_outside_of_a_small_volume_nothing_is_labelled(root: Path) -> None:
    found = filled(Reader(root), "train_labels/1000.tif", (SIZE,) * 3, (0, 0, 0), 32, 2)
    assert found.shape == (32, 32, 32) and (found[SIZE:] == 2).all()


def test_tiles_cover_each_voxel_and_a_batch_belongs_to_one_volume(root: Path) -> None:
    found, _ = usable(None, root, "train")
    tiles = Tiles(Reader(root), found, side=16, overlap=0.5, together=3)
    assert len(tiles) == 3 * 9, "eight tiles and one that fills the last batch"
    seen = [tiles[number].place.tolist() for number in range(len(tiles))]
    assert [place[4] for place in seen[:9]] == [1] * 8 + [0] and [place[5] for place in seen[:9]] == [0] * 6 + [1] * 3
    covered = np.zeros((SIZE,) * 3, bool)
    for _, page, row, column, _, _ in seen[:8]:
        covered[page : page + 16, row : row + 16, column : column + 16] = True
    assert covered.all()
    np.testing.assert_allclose(tiles[8 - 1].image[0], read(root, "train_images/1000.tif")[8:, 8:, 8:] / 255, atol=1e-6)


@pytest.mark.parametrize("kind", ["gaussian", "hann", "mean"])
def test_weights_of_overlapping_tiles_divide_out(kind: str) -> None:
    shape, side = (24, 19, 16), 16
    total = torch.zeros(shape)
    one = bell(side, kind)
    for page, row, column in grid(shape, side, 0.5):
        total[page : page + side, row : row + side, column : column + side] += one[:, None, None] * one[:, None] * one
    down, along, across = coverage(shape, side, 0.5, kind)
    torch.testing.assert_close(total / down[:, None, None] / along[:, None] / across, torch.ones(shape))
    assert total.min() > 0


def test_volumes_are_held_out_by_number_or_by_scroll(root: Path) -> None:
    found, _ = usable(None, root, "train")
    assert [[v.id for v in part] for part in split(found, 1)] == [["1001", "1002"], ["1000"]]
    assert [[v.id for v in part] for part in split(found, 0, "3")] == [["1000", "1002"], ["1001"]]
    with pytest.raises(DataError, match="cannot be divided"):
        split(found, 3)


def cut_off(root: Path) -> None:
    path = root / "train_images" / "1001.tif"
    path.write_bytes(path.read_bytes()[:700])


def deeper(root: Path) -> None:
    tifffile.imwrite(root / "train_images" / "1001.tif", np.zeros((SIZE,) * 3, np.uint16), photometric="minisblack")


def another_size(root: Path) -> None:
    make_volumes.save(root / "train_labels" / "1001.tif", np.zeros((SIZE, SIZE, SIZE - 1), np.uint8))


def unlabelled(root: Path) -> None:
    (root / "train_labels" / "1001.tif").unlink()


def renamed(root: Path) -> None:
    (root / "train_images").rename(root / "images")


def another_list(root: Path) -> None:
    (root / "train.csv").write_text("name\n1000\n")


def a_path(root: Path) -> None:
    (root / "train.csv").write_text("id\n../../../etc/passwd\n")


@pytest.mark.parametrize(
    ("breaks", "what", "where"),
    [
        (cut_off, "1001.tif cannot be read", "expected a multi-page TIFF"),
        (deeper, "is not a volume of 8-bit slices", "found uint16"),
        (another_size, "the label of volume 1001 is not the size of its image", "found (24, 24, 23)"),
        (unlabelled, "1001.tif cannot be read", "No such file"),
        (renamed, "there is no folder train_images", "/kaggle/input/vesuvius-challenge-surface-detection"),
        (another_list, "has no column 'id'", "found: name"),
        (a_path, "names no file of the folder", "etc/passwd"),
    ],
)
def test_broken_data_is_named_with_its_place_and_the_next_step(root: Path, breaks, what: str, where: str) -> None:
    breaks(root)
    with pytest.raises(DataError) as caught:
        usable(None, root, "train")
    assert what in str(caught.value) and where in str(caught.value) and "\nnext: " in str(caught.value)


def test_a_volume_that_cannot_be_used_is_left_out_where_the_plan_says_so(root: Path) -> None:
    cut_off(root)
    found, left_out = usable(None, root, "train", skip_broken=True)
    assert [volume.id for volume in found] == ["1000", "1002"] and "1001.tif" in left_out[0]


def test_a_label_that_is_a_picture_of_grey_fails_preflight(root: Path) -> None:
    (root / "train_labels" / "1000.tif").write_bytes((root / "train_images" / "1000.tif").read_bytes())
    with pytest.raises(DataError, match="the label of volume 1000 is none"):
        preflight(str(root))


@pytest.mark.parametrize("shape", [[24, 24], [24, 24, -24], ["24"] * 3, [1 << 40, 1, 1], "../x", None])
def test_what_a_stranger_left_as_sizes_is_no_volume(root: Path, shape: object) -> None:
    assert volumes.as_shape(json.loads(json.dumps(shape))) is None


def test_a_file_that_is_smaller_than_its_header_told_is_named(root: Path) -> None:
    with pytest.raises(DataError, match=r"1000.tif cannot be read"):
        Reader(root).box("train_images/1000.tif", (0, 0, 0), (SIZE, SIZE, SIZE + 1))
