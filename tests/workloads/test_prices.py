"""Windows of prices: nothing in them lies ahead, the parts of the time lie apart; the networks on them, and predictions."""

from __future__ import annotations

import csv
import json
import tempfile
import tomllib
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import ranks
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from PIL import Image
from safetensors.torch import load_file, save_file

from kgorch.checkpoint.folder import readable_checkpoints
from kgorch.errors import KgorchError
from kgorch.worker.checkpoint.stage_weights import Weights
from kgorch.workloads.timeseries import predict, train
from kgorch.workloads.timeseries.bars import FIGURES, Bars, Rows, bars_of, span_of
from kgorch.workloads.timeseries.data import ANSWERS, DataError, Prices, newest_closed
from kgorch.workloads.timeseries.layout import Layout
from kgorch.workloads.timeseries.make_prices import BASE_S, make_symbol
from kgorch.workloads.timeseries.model import MODELS, options_of

ROOT = Path(__file__).parents[2]

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
            assert bars.closes_s[newest] == bars.begins_s[newest] + bars.span_s
            assert bars.closes_s[newest] <= at_s < bars.closes_s[newest + 1], "the next one was not over"


def test_the_answer_is_whether_the_price_stands_higher_after_the_horizon(root):
    data = prices(root)
    number, bar = data.places[33]
    close = data.bars[number][0].close
    assert data[33].answer.item() == int(close[bar + HORIZON] > close[bar])


def test_one_instant_for_all_symbols_divides_the_time_and_no_traded_bar_is_in_two_parts(tmp_path):
    make_symbol(tmp_path / "prices" / "LONG", bars=3000, seed=0, number=0)
    make_symbol(tmp_path / "prices" / "NEW", bars=3000, seed=0, number=1)
    for path in (tmp_path / "prices" / "NEW").iterdir():  # listed later than the other
        head, *lines = path.read_text().splitlines()
        path.write_text("\n".join([head, *lines[len(lines) // 2 :]]) + "\n")
    parts = {part: prices(tmp_path / "prices", part) for part in ("train", "valid", "test")}
    train = parts["train"]
    divides = [train.valid_from_s, train.test_from_s]
    assert all([data.valid_from_s, data.test_from_s] == divides for data in parts.values())
    for part, (start, end) in {"train": (0, divides[0]), "valid": divides, "test": (divides[1], 1 << 40)}.items():
        data = parts[part]
        assert {number for number, _ in data.places} == {0, 1}
        for number, bar in data.places:
            traded = data.bars[number][0]
            assert traded.closes_s[bar + HORIZON] <= end, "its answer is known before the next part begins"
            assert traded.begins_s[bar - LENGTH + 1] >= start, "its oldest bar is none that an earlier part has seen"


def test_the_dates_of_the_parts_and_the_embargo_can_be_given(root):
    dates = ["2023-11-16", "2023-11-17 12:00+00:00"]
    data = prices(root, "valid", split=dates, embargo=0)
    assert data.valid_from_s == 1_700_092_800 and data.test_from_s == 1_700_222_400
    at_s = [data[index].at[1].item() for index in range(len(data))]
    assert min(at_s) == data.valid_from_s + BASE_S and max(at_s) == data.test_from_s - HORIZON * BASE_S
    apart = prices(root, "valid", split=dates, embargo=7)
    assert min(apart[index].at[1].item() for index in range(len(apart))) == data.valid_from_s + 7 * BASE_S
    for wrong in (["2024-01-01"], ["2024-01-01", "2023-01-01"], ["2024-01-01", "soon"]):
        with pytest.raises(DataError, match="give two dates"):
            prices(root, split=wrong)


def test_three_classes_leave_small_changes_flat_and_a_limit_takes_windows_from_the_whole_part(root):
    data = prices(root, classes=3, threshold=0.001, limit=50)
    assert len(data) == 50 and data.places[0].tolist() == prices(root).places[0].tolist()
    assert data.places[-1].tolist() == prices(root).places[-1].tolist()
    for index in range(50):
        number, bar = data.places[index]
        close = data.bars[number][0].close
        change = close[bar + HORIZON] / close[bar] - 1
        assert ANSWERS[3][data[index].answer] == ("up" if change > 0.001 else "down" if change < -0.001 else "flat")
    assert {int(data[index].answer) for index in range(50)} == {0, 1, 2}
    with pytest.raises(DataError, match="give 2"):
        prices(root, classes=4)


def test_a_window_is_left_out_when_a_longer_frame_ended_more_than_a_week_before(root):
    path = root / "S0" / "1h.csv"
    lines = path.read_text().splitlines()
    path.write_text("\n".join(lines[:20]) + "\n")
    ended_s = int(lines[19].split(",")[0]) + 3600
    for name in ("5m", "15m"):  # a gap of eight days, then bars again
        head, *lines = (root / "S0" / f"{name}.csv").read_text().splitlines()
        times = [int(line.split(",")[0]) for line in lines]
        later = [
            ",".join([str(at if at < ended_s else at + 8 * 86400), line.partition(",")[2]])
            for at, line in zip(times, lines, strict=True)
        ]
        (root / "S0" / f"{name}.csv").write_text("\n".join([head, *later]) + "\n")
    data = prices(root)
    closes_s = data.bars[0][0].closes_s[data.usable[0]]
    assert len(closes_s) and closes_s.max() <= ended_s, "what spans the gap, and what comes after it, is no window"


# No leak: a window is a function of what was known when its bar closed


@st.composite
def markets(draw):
    """Small files of two frames with gaps, as {frame: rows of time, values}, and a number to choose a window by."""
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    files = {}
    for frame, span, count in (("5m", 300, 160), ("15m", 900, 54)):
        kept = random.random(count) > draw(st.sampled_from([0.0, 0.1, 0.3]))
        times = 1_700_000_100 // 900 * 900 + np.arange(count)[kept] * span
        assume(np.bincount(np.diff(times) // span).argmax() == 1)  # with more gaps than bars it is another frame's file
        files[frame] = np.column_stack([times, some_values(random, len(times))])
    return files, draw(st.integers(0, 10**6)), random


def some_values(random: np.random.Generator, count: int) -> np.ndarray:
    low, *between, high = np.sort(random.uniform(1, 9, (4, count)), axis=0)
    volume = random.integers(0, 100, count) * (random.random(count) > 0.2)
    return np.stack([between[0], high, low, between[1], volume], 1)


def written(folder: Path, files: dict[str, np.ndarray], unit: int = 1) -> Path:
    for frame, rows in files.items():
        (folder / "SYMBOL").mkdir(parents=True, exist_ok=True)
        lines = [",".join([str(int(row[0]) * unit), *(repr(float(value)) for value in row[1:])]) for row in rows]
        (folder / "SYMBOL" / f"{frame}.csv").write_text("\n".join(["time,open,high,low,close,volume", *lines]) + "\n")
    return folder


SMALL = {"frames": ("5m", "15m"), "length": 4, "horizon": 2}


@settings(max_examples=25, deadline=None, database=None)
@given(markets(), st.sampled_from([1, 1000, 10**6]))
def test_a_window_does_not_change_when_everything_after_its_decision_does(market, unit):
    files, choice, random = market
    with tempfile.TemporaryDirectory() as folder:
        data = Prices(written(Path(folder, "before"), files, unit), "train", **SMALL)
        bars, usable = data.bars[0], data.usable[0]
        for bar in usable[choice % 4 :: 4]:
            at_s, known = bars[0].closes_s[bar], data.window(0, bar)
            replace_bars(data, [with_another_future(random, rows, frame, at_s) for frame, rows in files.items()])
            assert np.array_equal(data.window(0, bar), known)
            replace_bars(data, bars)
        past = {
            frame: rows[rows[:, 0] + span_of(frame) <= at_s] for frame, rows in files.items()
        }  # the rest never came
        replace_bars(data, Layout(written(Path(folder, "past"), past, unit), SMALL["frames"]).bars("SYMBOL"))
        assert np.array_equal(data.window(0, bar), known)


def replace_bars(data: Prices, bars: list[Bars]) -> None:
    data.bars[0], data._newest_FN[0] = bars, newest_closed(bars)


def with_another_future(random: np.random.Generator, rows: np.ndarray, frame: str, at_s: int) -> Bars:
    """Bars whose every value differs that was not known at that instant."""
    rows, later = rows.copy(), rows[:, 0] + span_of(frame) > at_s
    rows[later, 1:] = 3 * some_values(random, int(later.sum()))
    return bars_of(Rows(rows[:, 0].astype(np.int64), rows[:, 1:], np.arange(len(rows))), Path(f"{frame}.csv"), frame)


@settings(max_examples=25, deadline=None, database=None)
@given(markets())
def test_training_and_validation_do_not_change_when_the_test_part_does(market):
    files, _, random = market
    with tempfile.TemporaryDirectory() as folder:
        root = written(Path(folder, "before"), files)
        before = {part: Prices(root, part, embargo=2, **SMALL) for part in ("train", "valid")}
        test_s = before["train"].test_from_s
        for rows in files.values():
            later = rows[:, 0] >= test_s
            rows[later, 1:] = some_values(random, int(later.sum())) * 3
        root = written(Path(folder, "after"), files)
        for part, data in before.items():
            after = Prices(root, part, embargo=2, **SMALL)
            assert after.places.tolist() == data.places.tolist()
            for index in range(len(data)):
                assert torch.equal(after[index].bars, data[index].bars)
                assert after[index].answer == data[index].answer


# The networks


OPTIONS = [
    ("lstm", {}),
    ("lstm", {"bidirectional": True, "attention": True, "classes": 3}),
    ("lstm", {"bidirectional": True}),
    ("transformer", {}),
    ("transformer", {"heads": 8, "layers": 2, "feedforward": 4, "classes": 3}),
    ("mlp", {}),
]


@pytest.mark.parametrize(("name", "options"), OPTIONS)
def test_each_network_answers_a_window_and_learns_from_a_batch(root, name, options):
    torch.manual_seed(0)
    data = prices(root, classes=options.get("classes", 2), threshold=0.001)
    windows = [data[index] for index in range(0, 320, 10)]
    bars, answer = torch.stack([window.bars for window in windows]), torch.stack([window.answer for window in windows])
    net = MODELS[name](len(FRAMES), LENGTH, hidden=32, **options)
    optimizer = torch.optim.AdamW(net.parameters(), 5e-3)
    losses = []
    for _ in range(20):
        loss = torch.nn.functional.cross_entropy(net(bars), answer)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert net(bars).shape == (32, data.classes)
    assert min(losses[-5:]) < 0.95 * losses[0]


@pytest.mark.parametrize(("name", "options"), OPTIONS)
def test_a_networks_options_are_read_off_its_weights(name, options):
    net = MODELS[name](len(FRAMES), LENGTH, hidden=24, **options)
    again = MODELS[name](len(FRAMES), LENGTH, **options_of(net.state_dict()))
    again.load_state_dict(net.state_dict())
    bars = torch.randn(3, len(FRAMES), LENGTH, FIGURES)
    assert torch.equal(again.eval()(bars), net.eval()(bars))
    assert options_of(net.state_dict()).items() >= ({"hidden": 24, "classes": 2} | options).items()


def test_the_real_plans_networks_have_as_many_weights_as_the_page_says():
    counts = {}
    for path in (ROOT / "workloads" / "timeseries").glob("plan*.toml"):
        for stage in tomllib.loads(path.read_text())["stage"]:
            args = stage.get("args", {})
            if "model" in args:
                known = {
                    name: args[name]
                    for name in ("bidirectional", "attention", "layers", "heads", "feedforward")
                    if name in args
                }
                net = MODELS[args["model"]](3, args["length"], hidden=args["hidden"], **known)
                counts.setdefault(args["model"], set()).add(sum(weight.numel() for weight in net.parameters()))
    page = (ROOT / "docs" / "timeseries.md").read_text()
    assert counts.keys() == MODELS.keys()
    for name, [count] in counts.items():
        assert f"{count:,}" in page, f"{name} has {count:,} weights"


def test_training_ends_early_where_the_accuracy_no_longer_rises(root, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    train.main(str(root), "mlp", epochs=9, lr=0.0, length=LENGTH, limit=64, global_batch=32, hidden=8, patience=2)
    lines = list(csv.DictReader((tmp_path / "outputs" / "mlp.csv").open()))
    assert [line["epoch"] for line in lines] == ["0", "1", "2"]
    with pytest.raises(KgorchError, match="cannot be divided by heads = 4"):
        train.main(str(root), "transformer", hidden=6)


def test_too_short_a_stretch_and_an_empty_folder_are_told_before_training(root, tmp_path):
    with pytest.raises(DataError, match="no window for the part 'valid'"):
        prices(root, "valid", length=5000)
    with pytest.raises(DataError, match="make_prices"):
        prices(tmp_path / "nothing")
    with pytest.raises(DataError, match="is not a time frame"):
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
        net = MODELS[name](len(FRAMES), LENGTH, hidden=hidden)
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
    net = MODELS["lstm"](len(FRAMES), LENGTH, hidden=8).eval()
    net.load_state_dict(load_file(weights / "lstm.safetensors"))
    lines = list(csv.DictReader((outputs / "predictions" / "lstm.csv").open()))
    assert len(lines) == len(data)
    right = 0
    for index, line in enumerate(lines):
        window = data[index]
        number, at_s = window.at.tolist()
        assert (line["symbol"], line["time"]) == (data.symbols[number], str(at_s))
        assert line["answer"] == ANSWERS[2][window.answer]
        if index % 40 == 0:
            assert float(line["up"]) == pytest.approx(net(window.bars[None]).softmax(1)[0, 1].item(), abs=1e-3)
        right += (float(line["up"]) > 0.5) == (line["answer"] == "up")
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
    folder, _ = next(readable_checkpoints(cut.folder / "checkpoints" / "train"))
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
    up = np.array([0.51, 0.49, 0.9, 0.1, 0.95])
    found = predict.buckets(np.stack([1 - up, up], 1), np.array([1, 1, 1, 1, 0]))
    assert [bucket["windows"] for bucket in found] == [2, 0, 0, 0, 3]
    assert [bucket["accuracy"] for bucket in found] == [0.5, None, None, None, pytest.approx(1 / 3)]


def test_a_quick_test_writes_of_the_windows_that_came(root, tmp_path):
    data, told = prices(root, "test"), {}
    calls = predict.Calls(len(data), 2)
    calls.logits_MNK[:, 3:5, 1] = torch.tensor([2.0, -2.0])
    calls.asked_N[3:5] = 1
    session = SimpleNamespace(output=tmp_path, report=lambda **figures: told.update(figures))
    predict.write(session, data, calls, {name: Weights({}, "w", "file") for name in MODELS})
    times = [line["time"] for line in csv.DictReader((tmp_path / "predictions" / "mlp.csv").open())]
    assert times == [str(data[index].at[1].item()) for index in (3, 4)]
    assert set(told) == {f"{name}_accuracy" for name in MODELS} and (tmp_path / "predictions.png").exists()


def test_a_batch_holds_what_its_windows_hold_one_by_one(root):
    data = prices(root)
    one_by_one = [data[index] for index in range(len(data))]
    for sample, alone in zip(data.__getitems__(range(len(data))), one_by_one, strict=True):
        assert all(torch.equal(*pair) and pair[0].dtype == pair[1].dtype for pair in zip(sample, alone, strict=True))
