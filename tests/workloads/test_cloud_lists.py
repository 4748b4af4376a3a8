"""Cloud removal's lists and folders as their owners have them: GLF-CR's data.csv, its longer form, SEN12MS-CR as unpacked."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import rasterio
import torch
from rasterio.transform import from_origin

from kgorch.workloads.cloud_removal import data
from kgorch.workloads.cloud_removal.data import DataError, Scenes, preflight
from kgorch.workloads.cloud_removal.places import HELD_OUT, find_places

SIZE = 32
KAGGLE = "ROIs2017_winter_{0}/ROIs2017_winter_{0}/ROIs2017_winter_{0}/{0}_{1}/ROIs2017_winter_{0}_{1}_p{2}.tif"
"""Below /kaggle/input/sen12ms-cr-winter; {0} is s1, s2 or s2_cloudy."""


def write_image(path: Path, bands: int, seed: int = 0, size: int = SIZE) -> None:
    """A GeoTIFF as SEN12MS-CR has them: float32 decibels where it has 2 bands, else uint16 reflectance."""
    random, radar = np.random.default_rng(seed), bands == 2
    image_CHW = random.uniform(-25, -5, (2, size, size)) if radar else random.integers(0, 4000, (bands, size, size))
    path.parent.mkdir(parents=True, exist_ok=True)
    with rasterio.open(
        path, "w", driver="GTiff", width=size, height=size, count=bands, dtype="float32" if radar else "uint16",
        crs="EPSG:32632", transform=from_origin(0, 0, 10, 10),
    ) as file:  # fmt: skip
        file.write(image_CHW.astype("float32" if radar else "uint16"))


def write_place(root: Path, pattern: str, *at: object) -> None:
    for kind, bands in data.BANDS.items():
        write_image(root / pattern.format(kind, *at), bands)


def said(caught: pytest.ExceptionInfo) -> str:
    return " | ".join([str(caught.value), *caught.value.facts])


# GLF-CR's lists


@pytest.fixture
def image1(tmp_path: Path) -> Path:
    """The folders of the authors' repository: three, and in each the same name."""
    for name in ("ROIs2017_winter_112_p797.tif", "ROIs1158_spring_17_p30.tif", "ROIs1970_fall_139_p839.tif"):
        for folder, bands in (("s1", 2), ("s2_cloudfree", 13), ("s2_cloudy", 13)):
            write_image(tmp_path / "image1" / folder / name, bands)
    return tmp_path / "image1"


def test_glf_crs_list_without_a_first_line_lies_in_another_folder_than_its_images(image1, tmp_path):
    table = tmp_path / "image2" / "data.csv"
    table.parent.mkdir()
    table.write_text(  # no line end at the end, as in the authors' repository
        "1,s1,s2_cloudfree,s2_cloudy,ROIs2017_winter_112_p797.tif\n"
        "2,s1,s2_cloudfree,s2_cloudy,ROIs1158_spring_17_p30.tif\n"
        "3,s1,s2_cloudfree,s2_cloudy,ROIs1970_fall_139_p839.tif"
    )
    for part, name in (
        ("train", "ROIs2017_winter_112_p797"),
        ("val", "ROIs1158_spring_17_p30"),
        ("test", "ROIs1970_fall_139_p839"),
    ):
        scenes = Scenes(image1, part, table=str(table))
        assert [scene.name for scene in scenes.scenes] == [name]
        assert scenes[0].cloudy.shape == (13, SIZE, SIZE) and scenes[0].sar.shape == (2, SIZE, SIZE)
    assert preflight(str(image1), str(table), crop=16) == "1 places of train, 1 places of val; the first of each read"


def test_the_longer_list_of_the_users_program_names_each_file_in_their_order(tmp_path):
    """Folders of s1, s2 and s2_cloudy, then the files of s2, s1 and s2_cloudy: generate_kaggle_data_csv.py writes them so."""
    root = tmp_path / "sen12ms-cr-winter"
    write_place(root, KAGGLE, 102, 100)
    files = {kind: Path(KAGGLE.format(kind, 102, 100)) for kind in data.BANDS}
    folders = [files[kind].parent.as_posix() for kind in ("s1", "s2", "s2_cloudy")]
    (tmp_path / "data.csv").write_text(
        ",".join(["1", *folders, *(files[kind].name for kind in ("s2", "s1", "s2_cloudy"))]) + "\n"
    )
    scenes = Scenes(root, "train", table=str(tmp_path / "data.csv"), crop=8)
    (scene,) = scenes.scenes
    assert (scene.s1, scene.s2, scene.s2_cloudy) == tuple(files[kind].as_posix() for kind in ("s1", "s2", "s2_cloudy"))
    assert scenes[0].sar.shape == (2, 8, 8)


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ("2,s1,s2_cloudfree,s2_cloudy", "no line of GLF-CR's list"),
        ("4,s1,s2_cloudfree,s2_cloudy,a.tif", "no line of GLF-CR's list"),
        ("1,s1,s2_cloudfree,s2_cloudy,", "no line of GLF-CR's list"),
    ],
)
def test_a_wrong_line_of_glf_crs_list_is_named(image1, tmp_path, line, what):
    table = tmp_path / "data.csv"
    table.write_text("1,s1,s2_cloudfree,s2_cloudy,ROIs2017_winter_112_p797.tif\n" + line + "\n")
    with pytest.raises(DataError, match=what) as caught:
        Scenes(image1, "train", table=str(table))
    assert "data.csv:2" in said(caught) and line in said(caught)


def test_a_list_that_is_not_there_or_of_another_kind_is_told_with_the_forms_that_are_read(image1, tmp_path):
    with pytest.raises(DataError, match="no list of images") as caught:
        Scenes(image1, "train", table=str(tmp_path / "no.csv"))
    assert "data_list" in said(caught)
    (tmp_path / "other.csv").write_text("cloudy,clear\na.tif,b.tif\n")
    with pytest.raises(DataError, match="no column 'split'") as caught:
        Scenes(image1, "train", table=str(tmp_path / "other.csv"))
    assert "1 train" in said(caught) or "begins with 1, 2 or 3" in said(caught)
    (tmp_path / "empty.csv").write_text("\n")
    with pytest.raises(DataError, match="is empty"):
        Scenes(image1, "train", table=str(tmp_path / "empty.csv"))


# SEN12MS-CR's folders


def test_the_folders_of_kaggles_data_set_are_found_without_a_list_and_divided_by_region(tmp_path):
    for region, patch in ((102, 100), (102, 9), (107, 1), (63, 30)):
        write_place(tmp_path, KAGGLE, region, patch)
    found = {part: Scenes(tmp_path, part) for part in ("train", "val", "test")}
    names = {part: [scene.name for scene in scenes.scenes] for part, scenes in found.items()}
    assert names == {
        "train": ["ROIs2017_winter_s2_cloudy_102_p9", "ROIs2017_winter_s2_cloudy_102_p100"],
        "val": ["ROIs2017_winter_s2_cloudy_107_p1"],
        "test": ["ROIs2017_winter_s2_cloudy_63_p30"],
    }
    assert found["train"][0].clear.shape == (13, SIZE, SIZE)


def test_the_folders_as_the_authors_archives_unpack_are_found_too_and_a_missing_image_is_told(tmp_path):
    own = "ROIs1158_spring_{0}/{0}_{1}/ROIs1158_spring_{0}_{1}_p{2}.tif"
    write_place(tmp_path, own, 1, 30)
    write_place(tmp_path, own, 1, 31)
    (tmp_path / own.format("s2", 1, 31)).unlink()
    scenes = Scenes(tmp_path, "train")
    assert [scene.name for scene in scenes.scenes] == ["ROIs1158_spring_s2_cloudy_1_p30"]
    assert scenes.left_out == ["ROIs1158_spring_1_p31 has no image of s2"]


def test_the_regions_held_out_are_ten_for_each_part_and_of_every_season():
    for part in ("val", "test"):
        regions = [region for region, held in HELD_OUT.items() if held == part]
        assert len(regions) == 10
        assert {region.split("_")[1] for region in regions} == {"spring", "summer", "fall", "winter"}


def test_a_folder_without_list_and_regions_is_told_with_what_lies_there(tmp_path):
    write_image(tmp_path / "pictures" / "a.tif", 13)
    with pytest.raises(DataError, match="no images") as caught:
        find_places(tmp_path)
    assert "pictures" in said(caught) and "s2_cloudy_102" in said(caught)


# A part of the data, and headers that are read once


def test_a_limit_takes_places_of_the_whole_list_and_no_header_of_another(tmp_path):
    for region in (102, 104):
        for patch in range(4):
            write_place(tmp_path, KAGGLE, region, patch)
    (tmp_path / KAGGLE.format("s2", 102, 1)).write_bytes(b"no image")
    few = Scenes(tmp_path, "train", limit=2)
    assert [scene.name[-6:] for scene in few.scenes] == ["102_p0", "104_p0"]
    assert len(Scenes(tmp_path, "train", limit=100, skip_broken=True)) == 7
    with pytest.raises(DataError, match=r"p1\.tif cannot be read"):
        Scenes(tmp_path, "train")


class Remembers:
    """What of a session the listing uses."""

    def __init__(self) -> None:
        self.kept: dict[str, object] = {}

    def cached(self, name, compute, *, key):
        kept = self.kept.get(f"{name} {key}")
        if kept is None:
            kept = self.kept[f"{name} {key}"] = compute()
        return kept

    def progress(self, what, done, total):
        pass


def test_a_later_session_opens_no_header_and_a_changed_file_is_told_when_it_is_read(tmp_path, monkeypatch):
    for patch in range(3):
        write_place(tmp_path, KAGGLE, 102, patch)
    session, opens = Remembers(), []
    monkeypatch.setattr(data, "opened", lambda path, real=data.opened: opens.append(path) or real(path))
    first = Scenes(tmp_path, "train", crop=16, session=session)
    assert len(opens) == 9
    again = Scenes(tmp_path, "train", crop=8, session=session)
    assert len(opens) == 9 and again.sizes == first.sizes == [(SIZE, SIZE)] * 3
    write_place(tmp_path, KAGGLE, 102, 0)
    write_image(tmp_path / KAGGLE.format("s2", 102, 0), 13, size=6)
    with pytest.raises(DataError, match="not of the size that they had"):
        again[0]


# What is left out is what cannot be loaded


def test_a_place_of_which_radar_saw_one_third_is_neither_left_out_nor_ends_the_training(tmp_path):
    write_place(tmp_path, KAGGLE, 102, 0)
    with rasterio.open(tmp_path / KAGGLE.format("s1", 102, 0), "r+") as file:
        bands_CHW = file.read()
        bands_CHW[:, :, SIZE // 3 :] = np.nan
        file.write(bands_CHW)
    mean = float(np.nanmean(bands_CHW))
    train = Scenes(tmp_path, "train", crop=8, skip_broken=True)
    assert not train.left_out
    seen_hole = False
    for seed in range(30):
        torch.manual_seed(seed)
        sar_CHW = train[0].sar
        assert sar_CHW.isfinite().all()
        if (sar_CHW[0] == sar_CHW[0, 0, 0]).all():
            seen_hole = True
            assert sar_CHW[0, 0, 0].item() == pytest.approx((mean + 25) / 25, abs=1e-5), "the mean of the whole image"
    assert seen_hole


def test_radar_that_is_no_decibels_is_refused_alike_as_a_window_and_as_a_whole(tmp_path):
    write_place(tmp_path, KAGGLE, 102, 0)
    write_place(tmp_path, KAGGLE, 102, 1)
    with rasterio.open(tmp_path / KAGGLE.format("s1", 102, 0), "r+") as file:
        file.write(10 ** (file.read() / 10))
    assert len(Scenes(tmp_path, "train", skip_broken=True)) == 1
    for crop in (None, 8):
        with pytest.raises(DataError, match="no decibels"):
            Scenes(tmp_path, "train", crop=crop)[0]
    with rasterio.open(tmp_path / KAGGLE.format("s1", 102, 1), "r+") as file:
        bands_CHW = file.read()
        bands_CHW[:, 2:] = 3  # roofs: above 0 dB wherever most windows lie
        file.write(bands_CHW)
    bright = Scenes(tmp_path, "train", crop=8, skip_broken=True)
    for seed in range(8):
        torch.manual_seed(seed)
        assert bright[0].sar.max() == 1
