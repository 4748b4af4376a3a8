"""Records of metrics: what a recorder makes of reports, what is read back of a file, and one curve of many attempts."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kgorch.core.metrics import metric_curve
from kgorch.core.metrics.metric_curve import AttemptRecords, CurvePoint, Mark, MetricRecorder, Record, Value

EPOCHS, BATCHES = 4, 5


def loss_at(step: int) -> float:
    return 8.0 / step + step % 3


def accuracy_after(step: int) -> float:
    return step / 100


@dataclass
class Training:
    """An attempt of a small training: goes on from a saved step, reports a loss a step and an accuracy an epoch. A file takes its
    records as lines."""

    lines: list[str] = field(default_factory=list)

    def run(self, from_step: int, until_step: int, saves: set[int], waits: list[float]) -> None:
        recorder = MetricRecorder(lambda record: self.lines.append(metric_curve.encode(record)))
        step, now_s = from_step, 1e9
        position = max(0, from_step - 1) // BATCHES  # a step that ends an epoch is saved before its evaluation
        for epoch in range(position, EPOCHS):
            while step < BATCHES * (epoch + 1):
                if step == until_step:
                    return
                step += 1
                now_s += waits[step % len(waits)]
                recorder.add("loss", loss_at(step), Mark(step, epoch + 1, False), now_s)
                recorder.add("rate", step / 2, Mark(step, epoch + 1, False), now_s)
                if step in saves:
                    recorder.flush(now_s)
            if step == until_step:
                return
            recorder.add("accuracy", accuracy_after(step), Mark(step, epoch + 1, True), now_s)
        recorder.flush(now_s)


ALL = EPOCHS * BATCHES
WAITS = st.lists(st.sampled_from([0.01, 1.0, 2.6, 7.0, -50.0]), min_size=1, max_size=7)


@given(
    cuts=st.lists(st.tuples(st.integers(1, ALL), st.sets(st.integers(1, ALL)), WAITS, st.booleans()), max_size=6),
    last=WAITS,
)
def test_the_curve_of_a_run_that_was_cut_is_that_of_an_uninterrupted_one(cuts, last):
    alone = Training()
    alone.run(0, ALL + 1, set(), [0.01])
    stretches, begins = [], 0
    for until, saves, waits, is_torn in [*cuts, (ALL + 1, set(), last, False)]:
        attempt = Training()
        attempt.run(begins, max(until, begins), saves, waits)
        text = "".join(f"{line}\n" for line in attempt.lines)
        saved = [step for step in saves if begins < step <= max(until, begins)]
        if is_torn:  # killed in the midst of a line, behind the newest save
            text += metric_curve.encode(Record(until, until - 1, 1, 1e9, {"loss": Value(9.0, 1)}))[:-3]
        stretches.append(AttemptRecords(begins, metric_curve.decode(text)))
        begins = max(saved, default=begins)

    merged, expected = metric_curve.merge(stretches), metric_curve.decode("\n".join(alone.lines))
    means = [record for record in merged if not record.is_exact]
    assert [record.first for record in means] == [0, *(record.step for record in means[:-1])] and means[-1].step == ALL
    assert sum(record.values["loss"].reports for record in means) == ALL
    assert [record.values for record in merged if record.is_exact] == [
        item.values for item in expected if item.is_exact
    ]
    for (epoch, values), (same, aim) in zip(
        metric_curve.by_epoch(merged), metric_curve.by_epoch(expected), strict=True
    ):
        assert epoch == same and values == pytest.approx(aim, rel=1e-6)


def test_a_mean_ends_after_some_seconds_at_the_end_of_an_epoch_and_at_a_save():
    made: list[Record] = []
    recorder = MetricRecorder(made.append)
    for step, epoch, now_s in [(1, 1, 0.0), (2, 1, 4.9), (3, 1, 5.0), (4, 2, 5.1), (5, 2, 5.2)]:
        recorder.add("loss", float(step), Mark(step, epoch, False), now_s)
    recorder.flush(5.3)
    assert [(item.first, item.step, item.epoch, item.values["loss"]) for item in made] == [
        (0, 2, 1, Value(1.5, 2)),
        (2, 3, 1, Value(3.0, 1)),
        (3, 5, 2, Value(4.5, 2)),
    ]


def test_all_reports_of_one_step_are_in_one_record_however_slow_they_come():
    made: list[Record] = []
    recorder = MetricRecorder(made.append)
    recorder.add("loss", 1.0, Mark(1, 1, False), 0.0)
    recorder.add("rate", 2.0, Mark(1, 1, False), 60.0)
    recorder.add("loss", 1.0, Mark(2, 1, False), 61.0)
    assert [item.values.keys() for item in made] == [{"loss", "rate"}]


def test_what_a_step_reports_before_any_step_is_done_is_kept_and_is_no_value_of_the_whole_epoch():
    lines: list[str] = []
    recorder = MetricRecorder(lambda record: lines.append(metric_curve.encode(record)))
    for step, loss, now_s in [(0, 11.0, 0.0), (1, 3.0, 60.0), (2, 1.0, 61.0)]:
        recorder.add("loss", loss, Mark(step, 1, False), now_s)
    recorder.flush(62.0)
    records = metric_curve.decode("\n".join(lines))
    assert [(item.first, item.step, item.values["loss"]) for item in records] == [
        (0, 0, Value(11.0, 1)),
        (0, 2, Value(2.0, 2)),
    ]
    assert [(point.step, point.values["loss"]) for point in metric_curve.points(records)] == [(0, 11.0), (2, 2.0)]
    assert metric_curve.by_epoch(records) == [(1, {"loss": 5.0})]


def test_exact_values_keep_all_their_digits_and_what_is_no_number_is_nan():
    values = {"dice": Value(0.1 + 0.2, 1), "bad": Value(math.inf, 1)}
    line = metric_curve.encode(Record(7, 7, 2, 1.0, values))
    assert "NaN" not in line and "Infinity" not in line
    [read] = metric_curve.decode(line)
    assert read.values["dice"].mean == 0.1 + 0.2 and math.isnan(read.values["bad"].mean)
    assert (read.step, read.epoch, read.is_exact) == (7, 2, True)


@pytest.mark.parametrize(
    "line",
    [
        "",
        "no json",
        "[1]",
        "[" * 10_000,
        '{"s":1,"e":1,"t":1,"v":{}}',
        '{"s":-1,"e":1,"t":1,"v":{"a":1}}',
        '{"s":true,"e":1,"t":1,"v":{"a":1}}',
        '{"s":1e9,"e":1,"t":1,"v":{"a":1}}',
        '{"s":99999999999999999999,"e":1,"t":1,"v":{"a":1}}',
        '{"s":1,"e":1,"t":1e300,"v":{"a":1}}',
        '{"s":1,"e":1,"t":NaN,"v":{"a":1}}',
        '{"s":1,"e":1,"t":1,"v":{"a":"1"}}',
        '{"s":1,"e":1,"t":1,"v":{"a":true}}',
        '{"s":2,"f":3,"e":1,"t":1,"v":{"a":[1,1]}}',
        '{"s":2,"f":1,"e":1,"t":1,"v":{"a":[1,0]}}',
        '{"s":2,"f":1,"e":1,"t":1,"v":{"a":[1,-1]}}',
        '{"s":2,"f":1,"e":1,"t":1,"v":{"a":1}}',
        json.dumps({"s": 1, "e": 1, "t": 1, "v": {str(n): n for n in range(metric_curve.MOST_NAMES + 1)}}),
        json.dumps({"s": 1, "e": 1, "t": 1, "v": {"x" * metric_curve.LINE_BYTES: 1}}),
    ],
    ids=range(19),
)
def test_a_line_that_is_no_record_is_passed_over(line):
    whole = '{"s":1,"e":1,"t":1,"v":{"a":1}}'
    assert [item.step for item in metric_curve.decode(f"{whole}\n{line}\n{whole}")] == [1, 1]


def test_a_name_moves_no_cursor_and_is_bounded():
    [read] = metric_curve.decode(json.dumps({"s": 1, "e": 1, "t": 1, "v": {"a\x1b[2J\n" + "x" * 500: 1}}))
    [name] = read.values
    assert name.startswith("a?[2J?xx") and len(name) == metric_curve.NAME_LENGTH


def test_a_number_beyond_any_is_none():
    [read] = metric_curve.decode('{"s":1,"e":1,"t":1,"v":{"a":1' + "0" * 400 + "}}")
    assert math.isnan(read.values["a"].mean)


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 9)), max_size=300), st.integers(100, 20_000))
def test_thinned_records_keep_within_their_bytes_and_every_report_while_there_are_means_to_merge(kinds, most_bytes):
    step, records = 0, []
    for is_exact, epoch in kinds:
        first, step = (step, step) if is_exact else (step, step + 3)
        records.append(
            Record(step, first, epoch, 1e9, {"dice" if is_exact else "loss": Value(0.5, 1 if is_exact else 3)})
        )
    kept = metric_curve.thin(records, most_bytes)
    assert sum(len(metric_curve.encode(item)) + 1 for item in kept) <= most_bytes
    assert kept[-1:] == records[-1:] or not kept
    exact = [item for item in records if item.is_exact]
    if [item for item in kept if item.is_exact] == exact and kept and kept[0].first == 0:
        assert sum(item.values["loss"].reports for item in kept if not item.is_exact) == step


def test_what_an_attempt_did_beyond_the_step_that_the_next_one_went_on_from_is_not_shown():
    def mean(first: int, step: int, value: float) -> Record:
        return Record(step, first, 1, 0.0, {"loss": Value(value, step - first)})

    first = AttemptRecords(0, [mean(0, 4, 1.0), mean(4, 8, 2.0), mean(8, 9, 3.0)])
    in_vain, again = AttemptRecords(4, []), AttemptRecords(4, [mean(4, 9, 5.0)])
    assert metric_curve.merge([first, in_vain]) == [mean(0, 4, 1.0)]
    assert metric_curve.merge([first, in_vain, again]) == [mean(0, 4, 1.0), mean(4, 9, 5.0)]
    assert metric_curve.merge([first, AttemptRecords(0, [])]) == []  # begun anew


def test_a_step_is_one_point_and_an_exact_value_goes_before_a_mean_of_the_name():
    records = [
        Record(4, 0, 1, 5.0, {"loss": Value(1.0, 4), "dice": Value(0.1, 4)}),
        Record(4, 4, 1, 6.0, {"dice": Value(0.5, 1)}),
    ]
    assert metric_curve.points(records) == [CurvePoint(4, 1, 6.0, 4, {"loss": 1.0, "dice": 0.5})]


def test_the_best_is_by_the_plan_or_by_the_name_and_the_first_of_equals():
    points = [
        CurvePoint(step, 1, 0.0, 1, {"val_loss": loss, "dice": dice, "chance": math.nan})
        for step, loss, dice in [(1, 0.5, 0.1), (2, 0.2, 0.7), (3, 0.2, 0.7), (4, 0.3, math.nan)]
    ]
    found = {item.name: item for item in metric_curve.summaries(points, {})}
    assert (found["val_loss"].mode, found["val_loss"].best, found["val_loss"].best_step) == ("min", 0.2, 2)
    assert (found["dice"].mode, found["dice"].best, found["dice"].best_step) == ("max", 0.7, 2)
    assert found["val_loss"].last == 0.3 and math.isnan(found["dice"].last) and found["dice"].values == 4
    assert math.isnan(found["chance"].best)
    assert {item.name: item.best for item in metric_curve.summaries(points, {"val_loss": "max"})}["val_loss"] == 0.5


@pytest.mark.parametrize("name", ["grad_norm", "lr", "runtime", "epoch", "samples_per_second"])
def test_the_best_of_a_metric_of_which_nobody_knows_what_is_better_is_not_judged(name):
    """The highest norm of a gradient, and the longest time, were its best."""
    points = [CurvePoint(step, 1, 0.0, 1, {name: float(step)}) for step in (1, 2)]
    assert [item.is_judged for item in metric_curve.summaries(points, {})] == [False]
    [found] = metric_curve.summaries(points, {name: "min"})
    assert found.is_judged and (found.best, found.best_step) == (1.0, 1)
