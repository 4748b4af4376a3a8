"""The file of metrics that rank 0 writes: bounded, and no trouble of a disk reaches the training."""

from __future__ import annotations

import os
import time

import pytest

from kgorch.core.metrics import metric_curve
from kgorch.core.metrics.metric_curve import Record, Value
from kgorch.worker.telemetry.metric_log import WAITING, RecordWriter


def record(step: int, **more: float) -> Record:
    return Record(step, step - 1, 1, 1e9, {"loss": Value(float(step), 1), **{n: Value(v, 1) for n, v in more.items()}})


def steps_in(path) -> list[int]:
    return [item.step for item in metric_curve.decode(path.read_text())]


@pytest.fixture
def place(tmp_path):
    return tmp_path / metric_curve.FILE_NAME


def test_records_are_in_the_file_once_it_is_drained_and_at_the_end(place):
    writer = RecordWriter(place)
    writer.put(record(1))
    assert writer.drain(30.0) and steps_in(place) == [1]
    writer.put(record(2))
    writer.close(30.0)
    assert steps_in(place) == [1, 2] and place.stat().st_mode & 0o777 == 0o600


def test_a_writer_without_records_makes_no_file_and_ends_at_once(place):
    writer = RecordWriter(place)
    assert writer.drain(0.0)
    writer.close(0.0)
    assert not place.exists()


def test_a_file_keeps_within_its_bound_and_holds_the_newest(place):
    writer = RecordWriter(place, most_bytes=20_000)
    for step in range(1, 3001):
        writer.put(record(step))
        if step % 100 == 0:
            assert writer.drain(30.0) and place.stat().st_size <= 20_000
    writer.close(30.0)
    found = metric_curve.decode(place.read_text())
    assert found[-1] == record(3000) and found[0].first == 0
    assert sum(item.values["loss"].reports for item in found) == 3000


def test_what_the_disk_does_not_take_now_is_written_later_whole_and_once(place):
    place.parent.chmod(0o700)
    aside = place.parent.with_name("away")
    place.parent.rename(aside)  # no folder: as a disk that takes nothing
    writer = RecordWriter(place)
    for step in (1, 2):
        writer.put(record(step))
        assert writer.drain(30.0)
    aside.rename(place.parent)
    writer.put(record(3))
    writer.close(30.0)
    assert steps_in(place) == [1, 2, 3]


def test_a_full_disk_is_no_trouble(tmp_path):
    writer = RecordWriter(type(tmp_path)("/dev/full"))
    for step in range(2 * WAITING):
        writer.put(record(step))
    assert writer.drain(30.0)
    writer.close(30.0)


def test_a_line_that_the_disk_took_in_part_is_taken_back(place, monkeypatch):
    writer = RecordWriter(place)
    writer.put(record(1))
    assert writer.drain(30.0)
    written, whole = os.write, []

    def half(descriptor: int, data: bytes) -> int:
        if not whole:
            whole.append(written(descriptor, data[:10]))
            return 10
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "write", half)
    writer.put(record(2))
    assert writer.drain(30.0)
    monkeypatch.undo()
    assert whole == [10] and steps_in(place) == [1] and place.read_text().endswith("}\n")
    writer.put(record(3))
    writer.close(30.0)
    assert steps_in(place) == [1, 2, 3]


def test_a_disk_that_hangs_holds_nobody_up_for_long(place):
    os.mkfifo(place)  # opening it for writing waits for a reader that never comes
    writer, began_s = RecordWriter(place), time.monotonic()
    for step in range(10 * WAITING):
        writer.put(record(step))
    assert not writer.drain(0.05)
    writer.close(0.1)
    assert time.monotonic() - began_s < 10
    with open(place, "rb") as reader:  # let the thread go
        held = metric_curve.decode(reader.read().decode())
    assert len(held) <= 2 * WAITING and held[-1].step == 10 * WAITING - 1


def test_a_link_in_the_files_place_is_not_followed(place, tmp_path):
    other = tmp_path / "other"
    other.write_text("")
    place.symlink_to(other)
    writer = RecordWriter(place)
    writer.put(record(1))
    assert writer.drain(30.0)
    writer.close(30.0)
    assert other.read_text() == ""
