"""Clouds and radar: images made and read back, what is said when they are broken; the network, its figures, its predictions."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import numpy as np
import pytest
import ranks
import rasterio
import torch
from PIL import Image
from rasterio.windows import Window
from safetensors.torch import save_file
from torch.utils.data import default_collate

from kgorch.checkpoint.folder import readable_checkpoints
from kgorch.worker import attach
from kgorch.worker.memory.activation_checkpointing import blocks
from kgorch.workloads import cli
from kgorch.workloads.cloud_removal import data, predict, train
from kgorch.workloads.cloud_removal.data import BANDS, DataError, Sample, Scenes, backscatter
from kgorch.workloads.cloud_removal.make_scenes import COVERS, covers, make_scene, make_table
from kgorch.workloads.cloud_removal.model import CloudRemover, FusionBlock, WindowAttention, scores

SIZE = 32
SMALL = {"width": 12, "growth": 8, "blocks": 2, "layers": 2, "window": 4, "heads": 2, "taps": 3}


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("made") / "scenes"
    make_table(root, scenes=8, size=SIZE, seed=0)
    return root


@pytest.fixture
def root(made: Path, tmp_path: Path) -> Path:
    """A copy to be spoilt."""
    folder = tmp_path / "scenes"
    for path in made.rglob("*.*"):
        (folder / path.relative_to(made)).parent.mkdir(parents=True, exist_ok=True)
        (folder / path.relative_to(made)).write_bytes(path.read_bytes())
    return folder


def rewrite(path: Path, change, **profile) -> None:
    """The image with its figures changed."""
    with rasterio.open(path) as file:
        image_CHW, before = change(file.read()), file.profile
    path.unlink()
    before |= {"count": len(image_CHW), "height": image_CHW.shape[1], "width": image_CHW.shape[2]}
    before |= {"dtype": image_CHW.dtype, "predictor": 1} | profile
    with rasterio.open(path, "w", **before) as file:
        file.write(image_CHW)


def batch_of(dataset: Scenes, count: int = 4) -> Sample:
    torch.manual_seed(0)
    return default_collate([dataset[index] for index in range(count)])


def said(caught: pytest.ExceptionInfo) -> str:
    problem = caught.value
    return " | ".join([str(problem), *problem.facts, problem.next_step or ""])


# What lies on disk


def test_the_same_seed_makes_the_same_files_and_another_number_others(made, tmp_path):
    again = make_scene(tmp_path, SIZE, seed=0, number=0)
    other = make_scene(tmp_path, SIZE, seed=0, number=1)
    for key, path in again.items():
        assert (tmp_path / path).read_bytes() == (made / path).read_bytes()
        assert (tmp_path / other[key]).read_bytes() != (made / path).read_bytes()


def test_the_layout_is_that_of_sen12ms_cr(made):
    lines = list(csv.DictReader((made / "data.csv").open()))
    assert [line["split"] for line in lines] == ["train"] * 6 + ["val", "test"]
    for key, bands in BANDS.items():
        with rasterio.open(made / lines[0][key]) as file:
            assert (file.count, file.shape) == (bands, (SIZE, SIZE))
            assert file.dtypes[0] == ("float32" if key == "s1" else "uint16")
            assert file.crs.to_epsg() == 32632 and file.res == (10, 10)
            figures = file.read()
            assert figures.min() < -10 if key == "s1" else figures.max() <= 10000


def test_every_pixel_is_covered_once_and_radar_sees_what_the_clouds_hide(made):
    assert np.allclose(covers(np.random.default_rng(0), SIZE).sum(0), 1)
    assert COVERS[0] == "water"
    for sample in (Scenes(made, "train")[index] for index in range(6)):
        dark = sample.clear[7] < 0.08  # water swallows near infrared
        if 20 < dark.sum() < dark.numel() - 20:
            assert sample.sar[0][dark].mean() < sample.sar[0][~dark].mean() - 0.15
        assert sample.cloudy[1].mean() > sample.clear[1].mean(), "clouds are brighter than the ground"


def test_figures_are_scaled_as_the_authors_scale_them(root):
    scene = Scenes(root, "train").scenes[0]
    corners = np.array([-40.0, -25.0, -32.5, -12.5, 0.0, 7.0], np.float32)
    rewrite(root / scene.s1, lambda bands: np.broadcast_to(corners, (2, 6)).reshape(2, 1, 6).repeat(6, 1).copy())
    sar = backscatter(root / scene.s1, None)[:, 0]
    assert torch.allclose(sar[0], torch.tensor([0, 0, 0, 0.5, 1, 1]))
    assert torch.allclose(sar[1], torch.tensor([0, 7.5 / 32.5, 0, 20 / 32.5, 1, 1]))
    rewrite(root / scene.s2, lambda bands: np.full_like(bands, 12000))
    assert (data.reflectance(root / scene.s2, None) == 1).all()


def test_holes_in_radar_are_filled_from_what_is_around_them(root):
    scene = Scenes(root, "train").scenes[0]

    def holed(bands):
        bands[:] = -10
        bands[:, :4, :4], bands[:, 5, 5] = np.nan, -np.inf
        return bands

    rewrite(root / scene.s1, holed)
    sar = backscatter(root / scene.s1, None)
    assert sar.isfinite().all() and torch.allclose(sar[0], torch.tensor(0.6))


def test_a_crop_is_the_same_place_in_all_three_and_another_each_time(root):
    def numbered(bands):
        return (np.arange(SIZE * SIZE).reshape(1, SIZE, SIZE) + 0 * bands).astype(bands.dtype)

    scene = Scenes(root, "train").scenes[0]
    rewrite(root / scene.s2, numbered)
    rewrite(root / scene.s2_cloudy, numbered)
    rewrite(root / scene.s1, lambda bands: -numbered(bands) / 100)
    dataset, found = Scenes(root, "train", crop=8), set()
    for seed in range(5):
        torch.manual_seed(seed)
        sample = dataset[0]
        assert sample.clear.shape == (13, 8, 8) and sample.sar.shape == (2, 8, 8)
        assert torch.equal(sample.clear, sample.cloudy)
        assert torch.allclose((1 - sample.sar[0]) * 25, sample.clear[0] * 100, atol=1e-3)
        torch.manual_seed(seed)
        assert torch.equal(dataset[0].clear, sample.clear), "hangs on torch's generator alone"
        found.add(sample.clear[0, 0, 0].item())
    assert len(found) > 2


def test_only_a_window_is_read_and_nothing_before_it_is_asked_for(made, monkeypatch):
    windows = []
    monkeypatch.setattr(data, "reflectance", lambda path, window: windows.append(window) or torch.zeros(13, 8, 8))
    monkeypatch.setattr(data, "backscatter", lambda path, window: windows.append(window) or torch.zeros(2, 8, 8))
    dataset = Scenes(made, "train", crop=8)
    assert not windows
    dataset[0]
    assert len(windows) == 3 and all(isinstance(window, Window) and window.width == 8 for window in windows)


# What is said when it is broken


def test_a_folder_without_a_table_and_a_table_without_a_column_are_told(root, tmp_path):
    with pytest.raises(DataError, match="no images") as caught:
        Scenes(tmp_path / "nothing", "train")
    assert "make_scenes" in said(caught)
    table = root / "data.csv"
    table.write_text(table.read_text().replace("s2_cloudy\n", "clouds\n", 1))
    with pytest.raises(DataError, match="no column 's2_cloudy'"):
        Scenes(root, "train")
    table.write_bytes(b"\xff\xfe\x00 split")
    with pytest.raises(DataError, match="no list"):
        Scenes(root, "train")


@pytest.mark.parametrize(
    ("line", "what"),
    [("training,a.tif,b.tif,c.tif", "'training' is no split"), ("train,a.tif,b.tif", "path is missing")],
)
def test_a_line_of_the_table_that_is_wrong_is_named(root, line, what):
    table = root / "data.csv"
    table.write_text(table.read_text() + line + "\n")
    with pytest.raises(DataError, match=what) as caught:
        Scenes(root, "train")
    assert "data.csv:10" in said(caught)


def test_an_empty_part_is_told(root):
    table = root / "data.csv"
    table.write_text(table.read_text().replace("\nval,", "\ntest,"))
    with pytest.raises(DataError, match="part 'val'"):
        Scenes(root, "val")


def test_a_missing_file_and_files_that_do_not_fit_are_named_before_the_first_step(root):
    def first(**changes):
        return Scenes(root, "train", **changes)

    scenes = first().scenes
    with pytest.raises(DataError, match="smaller than the crop"):
        first(crop=SIZE + 1)
    rewrite(root / scenes[4].s2, lambda bands: bands[:, :-8])
    with pytest.raises(DataError, match="not the size") as caught:
        first()
    assert scenes[4].s2 in said(caught) and f"({SIZE}, {SIZE})" in said(caught)
    rewrite(root / scenes[3].s1, lambda bands: bands[:1])
    with pytest.raises(DataError, match="is no s1 image") as caught:
        first()
    assert "expected 2 bands of float32, found 1" in said(caught)
    rewrite(root / scenes[2].s2_cloudy, lambda bands: (bands / 10000).astype(np.float32))
    with pytest.raises(DataError, match="is no s2_cloudy image"):
        first()
    (root / scenes[1].s2).unlink()
    with pytest.raises(DataError, match="cannot be read") as caught:
        first()
    assert scenes[1].s2 in said(caught) and "skip_broken" in said(caught)


def test_a_broken_body_is_named_when_it_is_read_or_left_out_where_asked(root):
    scene = Scenes(root, "train").scenes[2]
    cloudy = root / scene.s2_cloudy
    cloudy.write_bytes(cloudy.read_bytes()[:-2000])
    with pytest.raises(DataError, match="cannot be read") as caught:
        Scenes(root, "train")[2]
    assert Path(scene.s2_cloudy).name in said(caught)
    kept = Scenes(root, "train", skip_broken=True)
    assert len(kept) == 5 and scene not in kept.scenes and len(kept.left_out) == 1
    assert Path(scene.s2_cloudy).name in kept.left_out[0]


def test_a_part_of_which_nothing_can_be_read_is_told(root):
    for scene in Scenes(root, "val").scenes:
        (root / scene.s1).write_bytes(b"no image")
    with pytest.raises(DataError, match="is empty") as caught:
        Scenes(root, "val", skip_broken=True)
    assert "1 cannot be read" in said(caught)


@pytest.mark.parametrize(("value", "found"), [(0.3, "nothing below 0.3"), (np.nan, "nothing but holes")])
def test_radar_that_is_no_decibels_is_told(root, value, found):
    scene = Scenes(root, "train").scenes[0]
    rewrite(root / scene.s1, lambda bands: np.full_like(bands, value))
    with pytest.raises(DataError, match="no decibels") as caught:
        Scenes(root, "train")[0]
    assert found in said(caught)


# The network


def test_the_published_size_has_the_published_number_of_weights_in_blocks_that_can_be_computed_again():
    net = CloudRemover()
    assert 14.5e6 < sum(weight.numel() for weight in net.parameters()) < 15e6
    again = blocks({"model": net})
    assert [name for name, block in again.items() if isinstance(block, FusionBlock)] == [
        f"model.blocks.{number}" for number in range(6)
    ]


@pytest.mark.parametrize(("height", "width"), [(16, 24), (20, 30)])
def test_an_image_of_any_size_comes_back_in_its_size_and_every_weight_is_used(height, width):
    torch.manual_seed(0)
    net = CloudRemover(**SMALL)
    clear = net(torch.rand(2, 13, height, width), torch.rand(2, 2, height, width))
    assert clear.shape == (2, 13, height, width)
    clear.square().mean().backward()
    assert not [name for name, weight in net.named_parameters() if weight.grad is None], "DDP waits for each"


def test_samples_of_a_batch_do_not_see_each_other():
    torch.manual_seed(0)
    net, cloudy, sar = CloudRemover(**SMALL), torch.rand(3, 13, 16, 16), torch.rand(3, 2, 16, 16)
    assert torch.equal(net(cloudy, sar), cloudy), "it begins with the image as it is"
    torch.nn.init.normal_(net.rise[-1].weight, std=0.1)
    whole = net(cloudy, sar)
    assert torch.allclose(whole[1:2], net(cloudy[1:2], sar[1:2]), atol=1e-5)
    assert not torch.allclose(whole[1:2], net(cloudy[1:2], sar[:1]), atol=1e-3), "radar tells it something"


@pytest.mark.parametrize("shift", [0, 2])
def test_attention_reaches_the_pixels_of_the_window_and_of_no_other(shift):
    torch.manual_seed(0)
    attention, both = WindowAttention(4, 2, 4, shift), torch.randn(1, 2, 4, 8, 12, requires_grad=True)
    for row, column in ((0, 0), (3, 5), (7, 11)):
        (reach,) = torch.autograd.grad(attention(both)[0, 0, :, row, column].sum(), both)
        seen = reach.abs().sum((0, 2)) > 0  # [S, H, W]
        rows, columns = (
            [place for place in range(size) if (place + 4 - shift) // 4 == (at + 4 - shift) // 4]
            for at, size in ((row, 8), (column, 12))
        )
        expected = torch.zeros(8, 12, dtype=torch.bool)
        expected[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1] = True
        assert torch.equal(seen[0], expected), (row, column)
        assert not (seen[1] & ~expected).any() and seen[1].any(), "radar guides within the same window"


def test_it_learns_from_a_batch_to_do_better_than_the_clouds(made):
    batch = batch_of(Scenes(made, "train", crop=16))
    torch.manual_seed(0)
    net = CloudRemover(**SMALL)
    optimizer = torch.optim.Adam(net.parameters(), 5e-3)
    for _ in range(24):
        optimizer.zero_grad()
        torch.nn.functional.l1_loss(net(batch.cloudy, batch.sar), batch.clear).backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
    psnr, _, cloudy_psnr = scores(net(batch.cloudy, batch.sar), batch).mean(0).tolist()
    assert psnr > cloudy_psnr + 4


def test_scores_are_of_each_image_and_bounded():
    truth = torch.full((2, 13, 16, 16), 0.5)
    cloudy = truth.clone()
    cloudy[1] += 0.1
    batch = Sample(cloudy, torch.zeros(2, 2, 16, 16), truth, torch.arange(2))
    found = scores(truth + torch.tensor([0.01, 0.0])[:, None, None, None], batch)
    assert torch.allclose(found[:, 0], torch.tensor([40.0, 100.0]), atol=1e-3)
    assert torch.allclose(found[:, 2], torch.tensor([100.0, 20.0]), atol=1e-3)
    assert found[1, 1] == 1 and found[0, 1] < 1


# Training


@pytest.mark.parametrize(("decay_from", "rates"), [(0, [1e-3, 5e-4, 2.5e-4]), (2, [1e-3, 1e-3, 1e-3])])
def test_the_rate_is_halved_from_the_epoch_that_the_plan_names(made, tmp_path, monkeypatch, decay_from, rates):
    monkeypatch.chdir(tmp_path)
    train.main(
        str(made), limit=2, epochs=3, lr=1e-3, decay_every=1, decay_from=decay_from, global_batch=2, crop=16, **SMALL
    )
    lines = list(csv.DictReader((tmp_path / "outputs" / "metrics.csv").open()))
    assert [float(line["lr"]) for line in lines] == pytest.approx(rates)


# Prediction


def test_two_images_of_one_name_would_overwrite_each_other_and_are_told(root):
    table = root / "data.csv"
    table.write_text(table.read_text() + table.read_text().splitlines()[-1] + "\n")
    with pytest.raises(DataError, match="two images are named"):
        predict.see_that_names_differ(Scenes(root, "test"))


def test_a_prediction_lies_where_the_cloudy_image_lies_and_is_drawn_beside_it(root, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    save_file(CloudRemover(**SMALL).state_dict(), tmp_path / "net.safetensors")
    table = root / "data.csv"
    table.write_text(table.read_text().replace("\nval,", "\ntest,"))
    scenes = Scenes(root, "test").scenes
    (root / scenes[0].s1).write_bytes(b"no image")
    predict.main(str(root), weights="net.safetensors", skip_broken=True, **SMALL)
    printed = capfd.readouterr().out
    assert "left out" in printed and Path(scenes[0].s1).name in printed

    outputs, name = tmp_path / "outputs", scenes[1].name
    assert sorted(path.name for path in (outputs / "predictions").iterdir()) == [f"{name}.png", f"{name}.tif"]
    with (
        rasterio.open(outputs / "predictions" / f"{name}.tif") as found,
        rasterio.open(root / scenes[1].s2_cloudy) as cloudy,
    ):
        assert (found.crs, found.transform, found.count, found.dtypes) == (
            cloudy.crs, cloudy.transform, cloudy.count, cloudy.dtypes
        )  # fmt: skip
        predicted = torch.from_numpy(found.read().astype(np.float32)) / 10000
    with Image.open(outputs / "predictions" / f"{name}.png") as picture:
        assert picture.size == (4 * SIZE + 3 * 2, SIZE) and picture.mode == "RGB"
    figures = json.loads((outputs / "predictions.json").read_text())
    (line,) = csv.DictReader((outputs / "predictions.csv").open())
    expected = scores(predicted[None], default_collate([Scenes(root, "test", skip_broken=True)[0]]))[0]
    assert line["name"] == name and figures["images"] == 1 and Path(scenes[0].s1).name in figures["left_out"][0]
    for value, key in zip(expected.tolist(), ("psnr", "ssim", "cloudy_psnr"), strict=True):
        assert float(line[key]) == pytest.approx(figures[key], abs=1e-3) == pytest.approx(value, abs=0.02)


def test_an_image_that_overflows_in_half_precision_is_predicted_in_single_precision(made, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    net = CloudRemover(**SMALL).eval()
    torch.nn.init.constant_(net.rise[-1].bias, 1e5)  # half precision ends at 65,504
    torch.nn.init.constant_(net.rise[-1].weight, 0.0)
    batch = default_collate([Scenes(made, "test")[0]])
    with attach(seed=0) as session:
        session._state.probe.as_on_cuda = True  # autocast is on, as on CUDA
        with torch.no_grad(), session.autocast():
            assert not net(batch.cloudy, batch.sar).isfinite().all()
        monkeypatch.setattr(net, "forward", lambda *images, forward=net.forward: forward(*images) - 1e5)
        assert torch.allclose(predict.without_clouds(session, net, batch), batch.cloudy, atol=0.02)


@pytest.mark.slow
@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2)])
def test_a_prediction_cut_and_gone_on_with_on_another_number_of_ranks_has_the_scores_of_an_uncut_one(
    root, tmp_path, before, after
):
    torch.manual_seed(0)
    save_file(CloudRemover(**SMALL).state_dict(), tmp_path / "net.safetensors")
    table = root / "data.csv"
    table.write_text(table.read_text().replace("\ntrain,", "\ntest,").replace("\nval,", "\ntest,"))
    wider = Scenes(root, "test").scenes[1]
    for path in (wider.s1, wider.s2, wider.s2_cloudy):
        rewrite(root / path, lambda bands: np.pad(bands, ((0, 0), (0, 0), (0, 8)), "edge"))
    args = {"data": str(root), "weights": str(tmp_path / "net.safetensors"), "global_batch": 3, **SMALL}
    entry = f"{predict.__name__}:main"
    uncut = ranks.run(tmp_path / "uncut", entry, 1, args)
    cut = ranks.run(tmp_path / "cut", entry, before, args, stop_at=2)
    assert uncut.codes == [0] and cut.codes == [0] * before, cut.said()
    folder, _ = next(readable_checkpoints(cut.folder / "checkpoints" / "train"))
    resumed = ranks.run(tmp_path / "resumed", entry, after, args, resume=str(folder))
    assert resumed.codes == [0] * after, resumed.said()
    whole, joined = ((run.folder / "outputs" / "predictions.csv").read_text() for run in (uncut, resumed))
    assert joined == whole and len(whole.splitlines()) == 9


def test_true_and_false_are_flags_and_nothing_else_is(monkeypatch):
    given = []

    def main(data: str, skip_broken: bool = False) -> None:
        given.append(skip_broken)

    for text in ("true", "false"):
        monkeypatch.setattr("sys.argv", ["train", "--data", "scenes", "--skip-broken", text])
        cli.run(main)
    assert given == [True, False]
    monkeypatch.setattr("sys.argv", ["train", "--data", "scenes", "--skip-broken", "no"])
    with pytest.raises(SystemExit):
        cli.run(main)
