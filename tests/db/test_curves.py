"""Curves of metrics in a real database: written again to no effect, carried to another one, a stranger's checked."""

from __future__ import annotations

import pytest
from sqlalchemy import func, insert, select, text

from kgorch.core.metrics import metric_curve
from kgorch.core.metrics.metric_curve import Record, Value
from kgorch.db import curves as rows
from kgorch.db import import_run, runs, sessions
from kgorch.db.engine import open_database
from kgorch.db.rows import RunInfo
from kgorch.db.tables import Curve
from kgorch.supervisor import metric_curves


def mean(first: int, step: int, loss: float = 0.5, name: str = "loss") -> Record:
    return Record(step, first, 1, 1.8e9, {name: Value(loss, step - first)})


def lines(*records: Record) -> list[str]:
    return [metric_curve.encode(item) for item in records]


def run_in(home) -> tuple:
    """A run with an attempt that began a stage, in a database of its own."""
    engine = open_database(home)
    folder = home / "runs" / "ink" / "1"
    where = {"folder": str(folder), "workdir": "/w", "checkpoints": str(folder / "checkpoints")}
    columns = {"id": "r1", "name": "ink", "number": 1, "plan": "", "overrides": [], "plan_hash": "h"}
    run = runs.create(engine, **where, **columns, stages=["train"])
    return engine, run, attempt_of(engine, run, 0)


def attempt_of(engine, run: RunInfo, first_step: int):
    row = sessions.open_session(engine, run.id, boot_id="b", stage="train")
    return sessions.open_attempt(
        engine, row.id, stage="train", ranks=1, first_step=first_step,
        folder_of=lambda number: f"{run.folder}/attempts/{row.number}.{number}",
    )  # fmt: skip


def brought_to(home, engine, folder=None) -> dict[str, list[Record]]:
    """The curve of the run in another database, to which it was taken."""
    [remembered] = import_run.read_runs(engine, "ink")
    there = open_database(home)
    here = home / "runs" / "ink" / "1"
    columns = remembered.run | {"folder": str(here), "checkpoints": str(here / "checkpoints")}
    found = metric_curves.complete_curves(remembered, folder)
    run = import_run.record_import(there, import_run.RunImport(columns, ["train"], found, lambda row: None))
    try:
        return metric_curves.of_run(there, run)
    finally:
        there.dispose()


@pytest.fixture
def source(tmp_path):
    engine, run, attempt = run_in(tmp_path / "source")
    yield engine, run, attempt
    engine.dispose()


def test_an_import_writes_what_is_new_and_leaves_the_rest(source):
    engine, _, attempt = source
    many = [mean(step, step + 1) for step in range(3000)]
    rows.write(engine, attempt.id, lines(*many))

    def kept():
        with engine.connect() as connection:
            return dict(connection.execute(select(Curve.id, func.length(Curve.lines)).order_by(Curve.id)).all())

    before = kept()
    assert len(before) > 2 and max(before.values()) < rows.PIECE_BYTES + 200
    rows.write(engine, attempt.id, lines(*many))
    assert kept() == before
    rows.write(engine, attempt.id, lines(*many, mean(3000, 3001)))
    assert list(kept()) == list(before), "the last piece has grown"
    assert metric_curve.decode(rows.of_attempt(engine, attempt.id)) == [*many, mean(3000, 3001)]
    rows.write(engine, attempt.id, lines(mean(0, 3001)))
    assert metric_curve.decode(rows.of_attempt(engine, attempt.id)) == [mean(0, 3001)]
    assert rows.attempts_with_curves(engine, "r1") == {attempt.id}


def test_a_curve_goes_along_to_another_database_and_is_gone_with_its_run(source, tmp_path):
    engine, run, attempt = source
    rows.write(engine, attempt.id, lines(mean(0, 4), mean(4, 8)))
    rows.write(engine, attempt_of(engine, run, 4).id, lines(mean(4, 9, 0.25)))
    assert brought_to(tmp_path / "here", engine) == {"train": [mean(0, 4), mean(4, 9, 0.25)]}
    with engine.begin() as connection:
        connection.execute(text("DELETE FROM runs"))
        assert connection.scalar(select(func.count()).select_from(Curve)) == 0


def test_the_file_beside_a_database_goes_before_rows_that_know_less(source, tmp_path):
    engine, _, attempt = source
    rows.write(engine, attempt.id, lines(mean(0, 4)))
    folder = tmp_path / "source" / "runs" / "ink" / "1" / "attempts"
    (folder / "1.1").mkdir(parents=True)
    (folder / "1.1" / metric_curve.FILE_NAME).write_text("\n".join(lines(mean(0, 4), mean(4, 8))) + '\n{"s":9,')
    assert brought_to(tmp_path / "here", engine, folder) == {"train": [mean(0, 4), mean(4, 8)]}
    (folder / "1.1" / metric_curve.FILE_NAME).write_text("")
    assert brought_to(tmp_path / "there", engine, folder) == {"train": [mean(0, 4)]}


def test_of_very_many_files_of_a_stranger_the_newest_are_read(source, tmp_path, monkeypatch):
    engine, run, _ = source
    folder = tmp_path / "source" / "runs" / "ink" / "1" / "attempts"
    for number in range(1, 6):
        if number > 1:
            attempt_of(engine, run, 4 * number)
        (folder / f"{number}.1").mkdir(parents=True)
        (folder / f"{number}.1" / metric_curve.FILE_NAME).write_text("\n".join(lines(mean(4 * number, 4 * number + 4))))
    size = (folder / "5.1" / metric_curve.FILE_NAME).stat().st_size
    monkeypatch.setattr(metric_curves, "CURVE_BYTES", 2 * size)
    assert brought_to(tmp_path / "here", engine, folder) == {"train": [mean(16, 20), mean(20, 24)]}


def test_a_link_in_the_place_of_a_file_or_of_its_folder_is_not_followed(source, tmp_path):
    engine, _, _ = source
    secret = tmp_path / "secret"
    secret.mkdir()
    (secret / metric_curve.FILE_NAME).write_text("\n".join(lines(mean(0, 4))))
    folder = tmp_path / "source" / "runs" / "ink" / "1" / "attempts"
    folder.mkdir(parents=True)
    (folder / "1.1").symlink_to(secret)
    assert brought_to(tmp_path / "here", engine, folder) == {"train": []}
    (folder / "1.1").unlink()
    (folder / "1.1").mkdir()
    (folder / "1.1" / metric_curve.FILE_NAME).symlink_to(secret / metric_curve.FILE_NAME)
    assert brought_to(tmp_path / "there", engine, folder) == {"train": []}


def test_what_a_strangers_database_says_is_checked_and_bounded(source, tmp_path, monkeypatch):
    engine, _, attempt = source
    monkeypatch.setattr(metric_curve, "MOST_BYTES", 20_000)
    hostile = ["no record", '{"s":-1,"e":1,"t":1,"v":{"a":1}}', "\x1b[2J", *lines(mean(0, 1, name="a\x1b[2Jb"))]
    with engine.begin() as connection:
        for number, piece in enumerate([hostile, lines(*(mean(step, step + 1) for step in range(1, 2000)))]):
            values = {"attempt_id": attempt.id, "number": number, "lines": "\n".join(piece)}
            connection.execute(insert(Curve).values(values))
    found = brought_to(tmp_path / "here", engine)["train"]
    assert sum(len(metric_curve.encode(item)) + 1 for item in found) <= 20_000
    assert {name for item in found for name in item.values} == {"a?[2Jb", "loss"}
    assert sum(value.reports for item in found for value in item.values.values()) == 2000


@pytest.mark.parametrize("value", [5, None, b"\xff\xfe"], ids=repr)
def test_a_piece_that_is_no_text_is_left_out_and_the_rest_comes_along(source, value):
    engine, _, attempt = source
    rows.write(engine, attempt.id, lines(mean(0, 1)))
    with engine.begin() as connection:
        connection.exec_driver_sql("PRAGMA writable_schema=ON")
        connection.exec_driver_sql("UPDATE sqlite_master SET sql = replace(sql, 'lines TEXT NOT NULL', 'lines BLOB')")
    engine.dispose()
    with engine.begin() as connection:
        connection.exec_driver_sql("UPDATE curves SET lines = ?", (value,))
    [found] = import_run.read_runs(engine, "ink")
    assert found.curves == [] and found.skipped == {"curves": 1} and len(found.attempts) == 1


def test_the_newest_of_a_huge_file_is_read_and_what_is_no_plain_file_is_not(tmp_path, monkeypatch):
    monkeypatch.setattr(metric_curves, "READ_BYTES", 1000)
    assert metric_curves.read(tmp_path) == []
    place = tmp_path / metric_curve.FILE_NAME
    place.write_text("\n".join(lines(*(mean(step, step + 1) for step in range(1000)))))
    found = metric_curves.read(tmp_path)
    assert 5 < len(found) < 30 and found[-1] == mean(999, 1000)
    place.unlink()
    place.mkdir()
    assert metric_curves.read(tmp_path) == []
