"""Prices on disk: made, read back, cut into windows, and what is said when they are broken; the networks on them."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import ranks
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from orchestrator import manifest
from orchestrator.errors import KgorchError
from orchestrator.worker.weights import Weights
from workloads.timeseries import predict
from workloads.timeseries.data import COLUMNS, FIGURES, DataError, Prices, read
from workloads.timeseries.make_prices import BASE_S, make_symbol
from workloads.timeseries.model import MODELS, hidden_of

FRAMES, LENGTH, HORIZON = ("5m", "15m", "1h"), 12, 4


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for number in range(2):
        make_symbol(tmp_path / "prices" / f"S{number}", bars=1200, seed=0, number=number)
    return tmp_path / "prices"


def prices(root: Path, part="train", **changes) -> Prices:
    return Prices(root, part, **{"frames": FRAMES, "length": LENGTH, "horizon": HORIZON, **changes})


def test_the_same_seed_makes_the_same_files_and_another_number_others(root, tmp_path):
    make_symbol(tmp_path / "again", bars=1200, seed=0, number=0)
    for path in (root / "S0").iterdir():
        assert (tmp_path / "again" / path.name).read_bytes() == path.read_bytes()
        assert (root / "S1" / path.name).read_bytes() != path.read_bytes()


def test_a_coarser_bar_holds_the_finer_ones(root):
    fine, coarse = (np.loadtxt(root / "S0" / f"{frame}.csv", delimiter=",", skiprows=1) for frame in ("5m", "1h"))
    first = fine[:12]
    assert coarse[0].tolist() == [
        first[0, 0], first[0, 1], first[:, 2].max(), first[:, 3].min(), first[-1, 4], first[:, 5].sum()
    ]  # fmt: skip


def test_a_window_holds_of_each_frame_the_newest_bars_that_were_over_and_none_that_lies_ahead(root):
    data = prices(root)
    for index in (0, 7, len(data) - 1):
        window = data[index]
        assert window.bars.shape == (len(FRAMES), LENGTH, FIGURES) and window.bars.dtype == torch.float32
        number, at_s = window.at.tolist()
        for bars in data.bars[number]:
            newest = bars.newest_closed(at_s)
            closed_s = bars.begins_s[newest] + bars.span_s
            assert closed_s <= at_s < closed_s + bars.span_s, "the next one was not over"


def test_what_comes_later_changes_no_window(root):
    before = prices(root)
    at_s = before[50].at[1].item()
    for path in (root / "S0").glob("*.csv"):
        lines = path.read_text().splitlines()
        kept = [lines[0], *(line for line in lines[1:] if int(line.split(",")[0]) < at_s - HORIZON)]
        later = [line for line in lines[1:] if int(line.split(",")[0]) >= at_s]
        fields = (line.split(",") for line in later)
        doubled = [",".join([f[0], *(f"{2 * float(v):.6f}" for v in f[1:5]), f[5]]) for f in fields]
        path.write_text("\n".join([*kept, *doubled]) + "\n")
    after = prices(root)
    loud = FIGURES - 1  # volume is told beside the whole file's mean, which did not change
    assert torch.equal(after[50].bars[..., :loud], before[50].bars[..., :loud])


def test_the_answer_is_whether_the_price_stands_higher_after_the_horizon(root):
    data = prices(root)
    number, bar = data.places[33]
    close = data.bars[number][0].close
    assert data[33].up.item() == float(close[bar + HORIZON] > close[bar])


def test_no_answer_of_training_reaches_into_what_scores_it(root):
    parts = {part: prices(root, part) for part in ("train", "valid", "test")}
    ends = {part: max(data.places[index][1] for index in range(len(data))) for part, data in parts.items()}
    begins = {part: min(place[1] for place in data.places) for part, data in parts.items()}
    assert ends["train"] + HORIZON <= begins["valid"] and ends["valid"] + HORIZON <= begins["test"]


@pytest.mark.parametrize("name", MODELS)
def test_each_network_answers_a_window_and_learns_from_a_batch(root, name):
    torch.manual_seed(0)
    data = prices(root)
    bars = torch.stack([data[index].bars for index in range(0, 320, 5)])
    up = torch.stack([data[index].up for index in range(0, 320, 5)])
    net = MODELS[name](len(FRAMES), LENGTH, 32)
    optimizer = torch.optim.AdamW(net.parameters(), 5e-3)
    losses = []
    for _ in range(25):
        loss = torch.nn.functional.binary_cross_entropy_with_logits(net(bars), up)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert net(bars).shape == (64,)
    assert losses[-1] < 0.8 * losses[0]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("100,1,2,0.5,nan,3", "a price that is not above 0"),
        ("100,1,2,0.5,-1,3", "a price that is not above 0"),
        ("100,1,2,0.5,1,-3", "a volume below 0"),
        ("100,1,0.5,2,1,3", "a high below its low"),
        ("0,1,2,0.5,1,3", "a time that does not come after the one before"),
        ("100,1,2,0.5,many,3", "cannot be read"),
    ],
)
def test_a_line_that_is_no_bar_is_named(tmp_path, line, said):
    path = tmp_path / "5m.csv"
    path.write_text(f"{','.join(COLUMNS)}\n0,1,2,0.5,1,3\n{line}\n")
    with pytest.raises(DataError) as caught:
        read(path, "5m")
    assert said in str(caught.value) and "5m.csv" in str(caught.value)


def test_columns_are_found_by_name_and_one_that_is_missing_is_told(tmp_path):
    path = tmp_path / "5m.csv"
    path.write_text(f"Volume,close,low,high,open,time\n3,1,0.5,2,1,0\n4,2,1,3,1,{BASE_S}\n")
    assert read(path, "5m").close.tolist() == [1, 2]
    path.write_text("time,open,high,low,close\n0,1,2,0.5,1\n")
    with pytest.raises(DataError, match="no column 'volume'"):
        read(path, "5m")


def test_too_short_a_stretch_and_an_empty_folder_are_told_before_training(root, tmp_path):
    with pytest.raises(DataError, match="no window for the part 'valid'"):
        prices(root, "valid", length=5000)
    with pytest.raises(DataError, match="make_prices"):
        prices(tmp_path / "nothing")
    with pytest.raises(DataError, match="no time frame"):
        prices(root, frames=("5min",))


def test_a_symbol_that_cannot_be_read_is_left_out_where_the_plan_says_so_and_named(root):
    (root / "S0" / "15m.csv").write_text("nothing of use")
    with pytest.raises(DataError, match="skip_broken = true"):
        prices(root)
    data = prices(root, skip_broken=True)
    assert data.symbols == ["S1"] and len(data.left_out) == 1 and "S0" in data.left_out[0]
    (root / "S1" / "5m.csv").unlink()
    with pytest.raises(DataError, match="no window"):
        prices(root, skip_broken=True)


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    """Of three networks of different width that begin from chance."""
    torch.manual_seed(0)
    (tmp_path / "weights").mkdir()
    for hidden, name in zip((8, 16, 24), MODELS, strict=True):
        net = MODELS[name](len(FRAMES), LENGTH, hidden)
        assert hidden_of(net.state_dict()) == hidden
        save_file(net.state_dict(), tmp_path / "weights" / f"{name}.safetensors")
    return tmp_path / "weights"


def test_every_window_of_the_last_part_gets_each_networks_probability_in_order(root, weights, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    predict.main(str(root), length=LENGTH, global_batch=64, weights=str(weights))
    data, outputs = prices(root, "test"), tmp_path / "outputs"
    comparison = json.loads((outputs / "comparison.json").read_text())
    assert [item["test_accuracy"] for item in comparison] == sorted(
        (i["test_accuracy"] for i in comparison), reverse=True
    )
    net = MODELS["lstm"](len(FRAMES), LENGTH, 8).eval()
    net.load_state_dict(load_file(weights / "lstm.safetensors"))
    lines = list(csv.DictReader((outputs / "predictions" / "lstm.csv").open()))
    assert len(lines) == len(data)
    right = 0
    for index, line in enumerate(lines):
        window = data[index]
        number, at_s = window.at.tolist()
        assert (line["symbol"], line["time"], line["up"]) == (data.symbols[number], str(at_s), str(int(window.up)))
        if index % 40 == 0:
            assert float(line["probability"]) == pytest.approx(net(window.bars[None]).sigmoid().item(), abs=1e-3)
        right += (float(line["probability"]) > 0.5) == (line["up"] == "1")
    [lstm] = [item for item in comparison if item["model"] == "lstm"]
    assert lstm["test_accuracy"] == pytest.approx(right / len(lines), abs=0.01)
    assert sum(bucket["windows"] for bucket in lstm["buckets"]) == lstm["windows"] == len(lines)
    with Image.open(outputs / "predictions.png") as picture:
        colours = {colour for _, colour in picture.convert("RGB").getcolors(1 << 20)}
        assert (26, 127, 55) in colours and (180, 35, 24) in colours, "some are right and some wrong"


@pytest.mark.slow
def test_a_prediction_cut_on_two_ranks_and_gone_on_with_by_one_has_the_files_of_an_uncut_one(root, weights, tmp_path):
    args = {"data": str(root), "length": LENGTH, "global_batch": 49, "weights": str(weights)}
    entry = f"{predict.__name__}:main"
    uncut = ranks.run(tmp_path / "uncut", entry, 1, args)
    cut = ranks.run(tmp_path / "cut", entry, 2, args, stop_at=2)
    assert uncut.codes == [0] and cut.codes == [0, 0], cut.said()
    assert not (cut.folder / "outputs" / "comparison.json").exists()
    folder, _ = next(manifest.newest_readable(cut.folder / "checkpoints" / "train"))
    resumed = ranks.run(tmp_path / "resumed", entry, 1, args, resume=str(folder))
    assert resumed.codes == [0], resumed.said()
    for name in MODELS:
        whole, joined = ((a.folder / "outputs" / "predictions" / f"{name}.csv").read_text() for a in (uncut, resumed))
        assert joined == whole


def test_weights_of_another_length_are_refused_with_what_to_do(root, weights, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(KgorchError, match="as they were in training"):
        predict.main(str(root), length=LENGTH + 1, weights=str(weights))


def test_buckets_count_what_was_said_with_how_much_confidence_and_how_often_it_was_right():
    found = predict.buckets(np.array([0.51, 0.49, 0.9, 0.1, 0.95]), np.array([True, True, True, True, False]))
    assert [bucket["windows"] for bucket in found] == [2, 0, 0, 0, 3]
    assert [bucket["accuracy"] for bucket in found] == [0.5, None, None, None, pytest.approx(1 / 3)]


def test_a_quick_test_writes_of_the_windows_that_came(root, tmp_path):
    data, told = prices(root, "test"), {}
    calls = predict.Calls(len(data))
    calls.logits_MN[:, 3:5] = torch.tensor([2.0, -2.0])
    calls.asked_N[3:5] = 1
    session = SimpleNamespace(output=tmp_path, report=lambda **figures: told.update(figures))
    predict.write(session, data, calls, {name: Weights({}, "w", "file") for name in MODELS})
    times = [line["time"] for line in csv.DictReader((tmp_path / "predictions" / "mlp.csv").open())]
    assert times == [str(data[index].at[1].item()) for index in (3, 4)]
    assert set(told) == {f"{name}_accuracy" for name in MODELS} and (tmp_path / "predictions.png").exists()
