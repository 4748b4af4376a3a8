"""Files of prices as stock sites, exchanges, brokers and pandas write them, and what is said when they are broken."""

from __future__ import annotations

import zipfile
from pathlib import Path

import numpy as np
import pytest

from kgorch.workloads.timeseries.bars import DataError, bars_of, read
from kgorch.workloads.timeseries.data import Prices, preflight
from kgorch.workloads.timeseries.layout import Layout
from kgorch.workloads.timeseries.make_prices import make_symbol

HEAD = "time,open,high,low,close,volume"


def lines_of(count: int, time, values="{o:.6f},{h:.6f},{l:.6f},{c:.6f},{v}") -> list[str]:
    """Lines of a file; `time` and `values` write what a source writes."""
    random = np.random.default_rng(0)
    close = 100 * np.exp(np.cumsum(random.normal(0, 0.01, count)))
    return [
        time(number) + "," + values.format(o=c, h=1.01 * c, l=0.99 * c, c=1.005 * c, v=1000 + number)
        for number, c in enumerate(close)
    ]


def file(path: Path, *lines: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines) + "\n")
    return path


def day(number: int) -> str:
    return str(np.datetime64("2020-01-01") + number)


# Layouts


def test_stock_files_with_dates_as_text_load_as_they_are_and_weeks_are_made_from_their_days(tmp_path):
    for name in ("AAPL", "MSFT"):
        week_days = [day(n) for n in range(400) if np.is_busday(np.datetime64("2020-01-01") + n)]
        lines = lines_of(len(week_days), week_days.__getitem__, "{o:.2f},{h:.2f},{l:.2f},{c:.2f},{c:.6f},{v}")
        lines[9] = f"{week_days[9]},null,null,null,null,null,null"  # as Yahoo writes a day without trade
        file(tmp_path / "stocks" / f"{name}.csv", "Date,Open,High,Low,Close,Adj Close,Volume", *lines)
    data = Prices(tmp_path / "stocks", "train", frames=["1d", "1w"], length=10, horizon=2, embargo=0)
    assert data.symbols == ["AAPL", "MSFT"]
    days, weeks = data.bars[0]
    assert len(days.close) == len(week_days) - 1 and days.begins_s[0] == 1_577_836_800  # 2020-01-01
    assert {int(at) % (7 * 86400) for at in weeks.begins_s} == {4 * 86400}, "a week begins on Monday"
    friday = int(np.searchsorted(days.begins_s, np.datetime64("2020-03-06").astype(int) * 86400))
    assert weeks.closes_s[weeks.newest_closed(days.closes_s[friday])] <= days.closes_s[friday]
    line = preflight(str(tmp_path / "stocks"), frames=["1d", "1w"], length=10, horizon=2, embargo=0)
    assert line.startswith("2 symbols, 2 read; their windows: ") and f"{len(data):,} train" in line


def test_one_file_with_a_column_of_symbols_holds_them_all(tmp_path):
    lines = [f"{line},{name}" for name in ("AAL", "ZTS") for line in lines_of(300, day)]
    path = file(tmp_path / "all_stocks.csv", "date,open,high,low,close,volume,Name", *lines)
    for data in (tmp_path, path):
        prices = Prices(data, "test", frames=["1d"], length=10, horizon=2)
        assert prices.symbols == ["AAL", "ZTS"]
        assert len(prices.bars[0][0].close) == len(prices.bars[1][0].close) == 300
    lines[3] = f"{day(3)},,,,55.1,10,AAL"
    file(path, "date,open,high,low,close,volume,Name", *lines)
    prices = Prices(path, "test", frames=["1d"], length=10, horizon=2, skip_broken=True)
    assert prices.symbols == ["ZTS"] and "all_stocks.csv:5: a price" in prices.left_out[0]


def test_binances_archives_load_as_they_are_in_milli_and_in_microseconds(tmp_path):
    begin = 1_735_603_200  # 2024-12-31, the last day in milliseconds
    values = "{o:.8f},{h:.8f},{l:.8f},{c:.8f},{v}.0"
    for month, unit, first in (("2024-12", 10**3, 0), ("2025-01", 10**6, 288)):
        lines = [
            f"{line},{(begin + (first + n + 1) * 300) * unit - 1},1000.5,120,500.25,500.5,0"
            for n, line in enumerate(
                lines_of(288, lambda n, unit=unit, first=first: str((begin + (first + n) * 300) * unit), values)
            )
        ]
        folder = tmp_path / "spot" / "monthly" / "klines" / "BTCUSDT" / "5m"
        folder.mkdir(parents=True, exist_ok=True)
        with zipfile.ZipFile(folder / f"BTCUSDT-5m-{month}.zip", "w") as archive:
            archive.writestr(f"BTCUSDT-5m-{month}.csv", "\n".join(lines) + "\n")
    layout = Layout(tmp_path, ["5m", "1h"])
    fine, coarse = layout.bars("BTCUSDT")
    assert list(layout.files) == ["BTCUSDT"] and len(fine.close) == 576 and len(coarse.close) == 48
    assert fine.begins_s[0] == begin and (np.diff(fine.begins_s) == 300).all()
    (tmp_path / "BTCUSDT-5m-2025-01b.csv").write_text("\n".join(lines[10:]) + "\n")
    with pytest.raises(DataError, match=r"begins before .* ends"):
        Layout(tmp_path, ["5m"]).bars("BTCUSDT")


def test_what_ccxt_returns_written_by_pandas_loads_in_milliseconds(tmp_path):
    lines = [f"{n},{line}" for n, line in enumerate(lines_of(50, lambda n: str(1_700_000_100_000 + n * 900_000)))]
    file(tmp_path / "BTC_USDT-15m.csv", ",timestamp,open,high,low,close,volume", *lines)
    [bars] = Layout(tmp_path, ["15m"]).bars("BTC_USDT")
    assert bars.begins_s[:2].tolist() == [1_700_000_100, 1_700_001_000]


@pytest.mark.parametrize(
    ("head", "time"),
    [
        (",open,high,low,close,volume", lambda n: f"{day(0)} {n // 4:02}:{15 * (n % 4):02}:00"),
        ("timestamp,open,high,low,close,volume", lambda n: f"{day(0)} {n // 4:02}:{15 * (n % 4):02}:00+00:00"),
        ("Datetime,Open,High,Low,Close,Volume", lambda n: f"2019-12-31T{19 + n // 4:02}:{15 * (n % 4):02}:00-05:00"),
        ("time,open,high,low,close,tick_volume", lambda n: f"2020.01.01 {n // 4:02}:{15 * (n % 4):02}"),
        ("open_time,open,high,low,close,volume", lambda n: str((1_577_836_800 + 900 * n) * 10**9)),
    ],
)
def test_times_as_pandas_yahoo_and_metatrader_write_them_are_the_same_instants(tmp_path, head, time):
    path = file(tmp_path / "EURUSD_15m.csv", head, *lines_of(16, time))
    bars = bars_of(read(path)[""], path, "15m")
    assert bars.begins_s.tolist() == [1_577_836_800 + 900 * n for n in range(16)]


def minutes(number: int, between: str = " ") -> str:
    return f"2020.01.01{between}{number // 4:02}:{15 * (number % 4):02}:00"


def test_metatraders_exports_load_as_they_are(tmp_path):
    values = "{o:.5f},{h:.5f},{l:.5f},{c:.5f},{v},0,5"  # the real volume of forex is 0
    head = "<DATE>,<TIME>,<OPEN>,<HIGH>,<LOW>,<CLOSE>,<TICKVOL>,<VOL>,<SPREAD>"
    lines = lines_of(16, lambda n: minutes(n, ","), values)
    file(tmp_path / "EURUSD_M15.csv", *(line.replace(",", "\t") for line in (head, *lines)))
    file(
        tmp_path / "EURUSD_H1_202001010000_202001010300.csv", head, *lines_of(4, lambda n: minutes(4 * n, ","), values)
    )
    file(tmp_path / "EURUSD_MN1.csv", head.replace("<TIME>,", ""), *lines_of(2, lambda n: f"2020.0{n + 1}.01", values))
    layout = Layout(tmp_path, ["15m", "1h"])
    fine, coarse = layout.bars("EURUSD")
    assert list(layout.files) == ["EURUSD"]
    assert fine.begins_s.tolist() == [1_577_836_800 + 900 * n for n in range(16)]
    assert coarse.begins_s.tolist() == [1_577_836_800 + 3600 * n for n in range(4)]
    assert fine.values_NV[:2, 4].tolist() == [1000, 1001]


@pytest.mark.parametrize("name", ["merged.csv", "merged_M15.csv", "forex-15m.csv"])
def test_a_file_of_several_symbols_loads_also_where_its_name_tells_the_time_frame(tmp_path, name):
    lines = [
        f"{line},3"
        for symbol in ("EURUSD", "GBPUSD")
        for line in lines_of(16, lambda n, of=symbol: f"{minutes(n)},{of}")
    ]
    path = file(tmp_path / name, "time,symbol,open,high,low,close,tick_volume,spread", *lines)
    for data in (tmp_path, path):
        layout = Layout(data, ["15m", "1h"])
        assert list(layout.files) == ["EURUSD", "GBPUSD"]
        assert [len(bars.close) for bars in layout.bars("GBPUSD")] == [16, 4]


def test_numbers_are_the_time_where_a_column_beside_them_says_it_in_words(tmp_path):
    lines = lines_of(16, lambda n: f"{day(0)} {n // 4:02}:{15 * (n % 4):02},{1_577_836_800 + 900 * n}")
    path = file(tmp_path / "EURUSD_15m.csv", "date,time,open,high,low,close,volume", *lines)
    assert bars_of(read(path)[""], path, "15m").begins_s[1] == 1_577_837_700


def test_a_day_of_local_time_with_25_hours_is_not_known_before_it_is_over(tmp_path):
    days = [f"2023-11-{n:02} 00:00:00-0{4 if n <= 5 else 5}:00" for n in range(1, 12)]  # New York, 5 November
    path = file(tmp_path / "SPY.csv", "Date,Open,High,Low,Close,Volume", *lines_of(11, days.__getitem__))
    bars = bars_of(read(path)[""], path, "1d")
    assert bars.closes_s[4] - bars.begins_s[4] == 25 * 3600
    assert (bars.closes_s[:-1] <= bars.begins_s[1:]).all()


def test_a_file_with_the_newest_line_first_is_turned_round(tmp_path):
    lines = lines_of(20, day)
    forwards, backwards = file(tmp_path / "A.csv", HEAD, *lines), file(tmp_path / "B.csv", HEAD, *lines[::-1])
    one, other = (bars_of(read(path)[""], path, "1d") for path in (forwards, backwards))
    assert np.array_equal(one.figures_NC, other.figures_NC) and np.array_equal(one.begins_s, other.begins_s)


def test_longer_frames_made_from_the_traded_one_are_those_that_an_exchange_gives(tmp_path):
    make_symbol(tmp_path / "S", bars=600, seed=0, number=0)
    exact = Layout(tmp_path, ["5m", "15m", "1h"]).bars("S")
    (tmp_path / "S" / "15m.csv").unlink()
    (tmp_path / "S" / "1h.csv").unlink()
    for made, theirs in zip(Layout(tmp_path, ["5m", "15m", "1h"]).bars("S"), exact, strict=True):
        assert np.allclose(made.values_NV, theirs.values_NV) and np.array_equal(made.closes_s, theirs.closes_s)
    with pytest.raises(DataError, match="7m bars cannot be made from bars of 300 s"):
        Layout(tmp_path, ["5m", "7m"]).bars("S")


# Broken files


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("300,1,2,0.5,-1,3", "5m.csv:3: a price that is not above 0"),
        ("300,1,2,,1,3", "5m.csv:3: a price that is not above 0"),
        ("300,1,2,0.5,inf,3", "5m.csv:3: a price that is not above 0"),
        ("300,1,2,0.5,1,-3", "5m.csv:3: a volume that is not 0 or more"),
        ("300,1,0.5,2,1,3", "5m.csv:3: a high below its low"),
        ("0,1,2,0.5,1,3", "5m.csv:3: the same time as the line before"),
        ("300,1,2,0.5,1,3\n900,1,2,0.5,1,3\n600,1,2,0.5,1,3", "5m.csv:5: a time before that of the line before"),
        ("nan,1,2,0.5,1,3", "5m.csv:3: a time that is not a number"),
        ("1700000100000,1,2,0.5,1,3", "5m.csv:3: a time in another unit"),
        ("200,1,2,0.5,1,3", "5m.csv:3: 200 s after the bar before"),
        ("3600,1,2,0.5,1,3\n7200,1,2,0.5,1,3", "most bars are 3600 s apart"),
        ("300,1,2,0.5,many,3", "cannot be read"),
    ],
)
def test_a_line_that_is_no_bar_is_named(tmp_path, line, said):
    path = file(tmp_path / "S" / "5m.csv", HEAD, "0,1,2,0.5,1,3", line)
    with pytest.raises(DataError) as caught:
        Layout(tmp_path, ["5m"]).bars("S")
    assert said in str(caught.value) and str(path) in str(caught.value) and caught.value.next_step


@pytest.mark.parametrize(
    "text", ["", HEAD + "\n", "just words\n", "time,open,high,low,close\n0,1,2,0.5,1\n", "01/02/2024,1\n"]
)
def test_a_file_without_bars_is_named(tmp_path, text):
    (tmp_path / "A.csv").write_text(text)
    with pytest.raises(DataError, match=r"A\.csv"):
        Layout(tmp_path, ["1d"]).bars("A")


def test_a_date_that_may_be_read_in_two_ways_is_refused(tmp_path):
    file(tmp_path / "A.csv", "Date,Open,High,Low,Close,Volume", "01/02/2024,1,2,0.5,1,3")
    with pytest.raises(DataError, match="expected a time such as 2024-01-31"):
        Layout(tmp_path, ["1d"]).bars("A")


def test_gaps_a_line_without_prices_and_a_volume_of_0_are_taken_as_they_are(tmp_path):
    lines = [f"{n * 300},1,2,0.5,{1 + n / 100},0" for n in range(120) if n not in (40, 41, 42)]
    lines[50] = lines[50].partition(",")[0] + ",,,,,"
    file(tmp_path / "S" / "5m.csv", HEAD, *lines)
    data = Prices(tmp_path, "train", frames=["5m"], length=8, horizon=2)
    assert len(data.bars[0][0].close) == 116
    assert all(np.isfinite(data[index].bars.numpy()).all() for index in range(len(data)))


def test_two_files_of_one_symbol_and_a_symbol_without_the_traded_frame_are_told(tmp_path):
    file(tmp_path / "A.csv", HEAD, *lines_of(20, day))
    file(tmp_path / "A.txt", HEAD, *lines_of(20, day))
    with pytest.raises(DataError, match="A is in two files"):
        Layout(tmp_path, ["1d"])
    file(tmp_path / "B" / "1d.csv", HEAD, *lines_of(20, day))
    file(tmp_path / "C" / "1h.csv", HEAD, *lines_of(20, day))
    with pytest.raises(DataError, match="C has no file of 1d, the traded time frame"):
        Layout(tmp_path, ["1d", "1h"]).bars("C")
