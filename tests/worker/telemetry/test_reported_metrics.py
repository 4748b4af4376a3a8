"""Whatever names a script reports: they are told, saved and read again, within bounds; the rest is told of once."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from saving import described

from kgorch.checkpoint.folder import MAX_MANIFEST_BYTES, read_checkpoint, read_manifest, write_manifest
from kgorch.checkpoint.manifest import MANIFEST_NAME, FileEntry
from kgorch.core.codes import EventKind
from kgorch.protocol import codec
from kgorch.protocol.codec import MAX_LINE_BYTES
from kgorch.protocol.messages import MAX_METRIC_NAME, MAX_METRICS, Heartbeat, JournalEntry
from kgorch.worker.telemetry.event_sender import EventSender
from kgorch.worker.telemetry.reported_metrics import ReportedMetrics

names = st.text(max_size=230) | st.text(
    st.characters(min_codepoint=0x1F300, max_codepoint=0x1F9FF), min_size=150, max_size=200
)


@given(st.lists(names, max_size=12), st.sampled_from([1, 40, 300]), st.floats() | st.integers())
@settings(max_examples=60, deadline=None)
def test_what_a_script_reports_fits_a_line_and_a_manifest_and_is_the_same_behind_both(
    tmp_path_factory, found, times, value
):
    reported = ReportedMetrics()
    for number in range(times):
        for name in found:
            reported.report(f"{name}{number}" if times > 1 else name, value)
    told = reported.values
    assert len(told) <= MAX_METRICS
    assert all(len(name) <= MAX_METRIC_NAME and name.isprintable() for name in told)
    line = codec.encode(Heartbeat("1.1", 2**40, 2**60, 2**60, 1e15, 1e-300, 2**60, 2**60, told))
    assert len(line) <= MAX_LINE_BYTES
    back = codec.decode(line)
    assert isinstance(back, Heartbeat) and back.metrics.keys() == told.keys()
    assert all(new == old or math.isnan(old) for new, old in zip(back.metrics.values(), told.values(), strict=True))
    folder = tmp_path_factory.mktemp("checkpoint")
    write_manifest(folder, replace(described(3), metrics=told))
    assert read_manifest(folder).metrics.keys() == told.keys()


def test_more_names_than_are_kept_are_told_of_once_and_those_that_came_first_stay(capsys):
    sent, events = [], EventSender()
    events.connect("1.1", sent.append)
    reported = ReportedMetrics(events)
    for number in range(1500):
        reported.report(f"loss/{number}", number)
    reported.report("loss/3", -1.0)
    assert list(reported.values) == [f"loss/{number}" for number in range(MAX_METRICS)]
    assert reported.values["loss/3"] == -1.0
    assert reported.dropped == "loss/1000 and later ones are more than 1000 names"
    assert sent == [JournalEntry("1.1", EventKind.METRICS_DROPPED, {"why": reported.dropped})]
    assert capsys.readouterr().out == f"kgorch: session.report(): not kept: {reported.dropped}\n"


@pytest.mark.parametrize(
    ("name", "kept"), [("a\x1b]0;x\x07b", "a�]0;x�b"), ("x" * 200, "x" * 200), ("x" * 201, None), ("", "")]
)
def test_a_name_is_kept_without_what_a_terminal_would_obey_or_not_at_all(name, kept):
    reported = ReportedMetrics()
    for _ in range(3):
        reported.report(name, 1)
    assert reported.values == ({} if kept is None else {kept: 1.0})
    assert bool(reported.dropped) == (kept is None)


@pytest.mark.parametrize(("value", "figure"), [(10**400, math.inf), (-(10**400), -math.inf), (10**300, 1e300)])
def test_a_whole_number_beyond_all_floats_is_infinite(value, figure):
    reported = ReportedMetrics()
    reported.report("a", value)
    assert reported.values == {"a": figure}


def test_metrics_of_an_older_checkpoint_that_are_too_many_are_cut_when_it_is_gone_on_from():
    reported = ReportedMetrics()
    reported.restore({f"loss/{number}": 1.0 for number in range(25_000)}, {})
    assert len(reported.values) == MAX_METRICS and reported.dropped


def test_a_manifest_that_its_metrics_make_too_large_is_written_without_them(tmp_path):
    found = replace(described(3), metrics={f"{'x' * 200}/{number}": 0.5 for number in range(25_000)})
    write_manifest(tmp_path, found)
    assert (tmp_path / MANIFEST_NAME).stat().st_size <= MAX_MANIFEST_BYTES
    assert read_checkpoint(tmp_path) == replace(found, metrics={})


def test_a_manifest_that_nobody_would_read_again_is_not_written(tmp_path):
    files = {f"{'x' * 90}{number:06}": FileEntry(1, "0" * 32) for number in range(30_000)}
    with pytest.raises(OSError, match="more than is read again"):
        write_manifest(tmp_path, replace(described(3), files=files))
    assert not list(tmp_path.iterdir())


def test_of_the_metrics_that_another_version_sends_those_that_can_be_kept_are():
    told = {"good": 1.0, "x" * 300: 1.0, "\x1b[2J": 1.0, "text": "x", "huge": 10**400, "none": None}
    assert codec.decode(codec.encode(Heartbeat("1.1", 0, 0, 0, 0.0, 0.0, 0, 0, told))).metrics == {"good": 1.0}
    many = {str(number): 1.0 for number in range(3000)}
    assert len(codec.decode(codec.encode(Heartbeat("1.1", 0, 0, 0, 0.0, 0.0, 0, 0, many))).metrics) == MAX_METRICS
