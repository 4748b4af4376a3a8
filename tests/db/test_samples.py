"""A year of telemetry stays small, and looking at its newest sample costs the same as on the first day."""

from __future__ import annotations

import contextlib
import json
import random
import statistics
from datetime import UTC, datetime, timedelta

import pytest
from sqlalchemy import event, func, select

from kgorch.db import runs, samples, sessions
from kgorch.db.engine import open_database
from kgorch.db.samples import HOUR, MINUTE, SECOND
from kgorch.db.tables import Sample
from kgorch.report import check_comparison
from kgorch.system.paths import check_result_path

BEGIN = datetime(2026, 1, 1, tzinfo=UTC)
T4S, RANKS = 2, 2


@pytest.fixture
def engine(database, tmp_path):
    made = open_database(tmp_path)
    yield made
    made.dispose()


@pytest.fixture
def open_session(engine):
    run = runs.create(
        engine, id="r", name="ink", number=1, folder="/f", workdir="/w", checkpoints="/c", plan="", overrides=[],
        plan_hash="h", stages=["train"],
    )  # fmt: skip

    def made(*, over: bool = False) -> int:
        session = sessions.open_session(engine, run.id, boot_id="b")
        if over:
            sessions.update_session(engine, session.id, phase="suspended")
        return session.id

    return made


def plausible(chance: random.Random) -> dict[str, float]:
    """Every key that two T4s and two ranks give, with as many digits as real ones have."""
    found = {
        "host.cpu": chance.uniform(20, 90), "host.cores": 4.0, "host.mem_used": chance.randrange(2**33, 2**34),
        "host.mem_total": 2.0**35, "host.swap_used": 0.0, "host.disk_read_bps": chance.uniform(0, 1e8),
        "host.disk_write_bps": chance.uniform(0, 1e8), "host.disk_free": chance.randrange(2**34),
    }  # fmt: skip
    for gpu in range(T4S):
        found |= {
            f"gpu{gpu}.mem_used": chance.randrange(2**33, 2**34), f"gpu{gpu}.mem_total": 16106127360.0,
            f"gpu{gpu}.util": chance.randrange(101), f"gpu{gpu}.temp_c": chance.randrange(60, 90),
            f"gpu{gpu}.power_w": chance.uniform(40, 70), f"gpu{gpu}.power_limit_w": 70.0,
            f"gpu{gpu}.sm_mhz": chance.randrange(900, 1590), f"gpu{gpu}.mem_mhz": 5000.0,
            f"gpu{gpu}.throttle": 4.0, f"gpu{gpu}.ecc": 0.0, f"gpu{gpu}.processes": 1.0,
        }  # fmt: skip
    for rank in range(RANKS):
        found |= {
            f"rank{rank}.{name}": chance.randrange(2**33, 2**34) for name in ("alloc", "reserved", "peak", "rss")
        } | {
            f"rank{rank}.total": 16106127360.0, f"rank{rank}.alloc_retries": 0.0, f"rank{rank}.ooms": 0.0,
            f"rank{rank}.step_s": chance.uniform(0.2, 0.3), f"rank{rank}.data_wait": chance.random(),
            f"rank{rank}.cpu": chance.uniform(80, 100), f"rank{rank}.loaders": chance.uniform(80, 200),
        }  # fmt: skip
    return found


def seconds(begin: datetime, count: int, chance: random.Random) -> list[samples.Measurement]:
    return [(begin + timedelta(seconds=second), plausible(chance)) for second in range(count)]


def spans(engine, session_id: int) -> dict[int, int]:
    with engine.connect() as connection:
        counted = select(Sample.span_s, func.count()).where(Sample.session_id == session_id).group_by(Sample.span_s)
        return dict(map(tuple, connection.execute(counted)))


def test_a_minute_holds_means_peaks_the_highest_counts_and_all_reasons(engine, open_session):
    session = open_session()
    told = [
        {"gpu0.mem_used": 10.0, "gpu0.util": 50.0, "gpu0.throttle": 4.0, "rank0.ooms": 1.0},
        {"gpu0.mem_used": 20.0, "gpu0.throttle": 32.0, "rank0.ooms": 3.0, "rank0.step_s": 0.123456789},
    ]
    samples.write(engine, session, [(BEGIN + timedelta(seconds=second), row) for second, row in enumerate(told)])
    samples.roll_up(engine, session)
    minute = {
        "gpu0.mem_used": 15,
        "gpu0.mem_used.max": 20,
        "gpu0.util": 50,
        "gpu0.throttle": 36,
        "rank0.ooms": 3,
        "rank0.step_s": 0.123457,
        "rank0.step_s.max": 0.123457,
    }
    for span_s in (MINUTE, HOUR):
        [row] = samples.series(engine, session, BEGIN, span_s)
        assert (row.at, row.span_s, row.values) == (BEGIN, span_s, minute)


def test_rolling_up_goes_on_where_it_left_off_and_twice_is_as_once(engine, open_session):
    session, chance = open_session(), random.Random(0)
    measured = seconds(BEGIN, 150, chance)
    for piece in (measured[:50], measured[50:130], measured[130:]):
        samples.write(engine, session, piece)
        samples.roll_up(engine, session)
        samples.roll_up(engine, session)
    rows = samples.series(engine, session, BEGIN, MINUTE)
    assert [row.at for row in rows] == [BEGIN + timedelta(minutes=minute) for minute in range(3)]
    for number, row in enumerate(rows):
        cpu = [values["host.cpu"] for _, values in measured[60 * number : 60 * (number + 1)]]
        assert row.values["host.cpu"] == pytest.approx(statistics.mean(cpu), rel=1e-4)
    assert spans(engine, session) == {SECOND: 150, MINUTE: 3, HOUR: 1}


def test_a_living_session_keeps_an_hour_of_seconds_and_one_that_is_over_none(engine, open_session):
    now = datetime.now(UTC)
    over, living = open_session(over=True), open_session()
    for session in (living, over):
        samples.write(engine, session, [(now - timedelta(minutes=age), {"host.cpu": 5.0}) for age in (100, 61, 59, 1)])
    samples.roll_up(engine, living)
    samples.prune(engine, living)
    samples.prune_ended_sessions(engine)
    assert spans(engine, living)[SECOND] == 2
    assert SECOND not in spans(engine, over)
    assert spans(engine, over)[MINUTE] == 4, "rolled up first"
    assert samples.newest(engine, over).span_s == MINUTE
    samples.roll_up(engine, over)
    assert spans(engine, over)[MINUTE] == 4, "what was rolled up outlives its seconds"


def test_the_oldest_minutes_go_first_and_hours_stay(engine, open_session):
    ids = [open_session(over=True) for _ in range(4)]
    for session in ids:
        samples.write(engine, session, seconds(BEGIN, 120, random.Random(session)))
    samples.prune_ended_sessions(engine)
    with engine.connect() as connection:
        length = float(connection.scalar(select(func.avg(func.length(Sample.values))).where(Sample.span_s == MINUTE)))
    samples.prune_ended_sessions(engine, minutes_bytes=int(2 * 2 * 1.1 * (length + samples.ROW_BYTES)))
    assert [MINUTE in spans(engine, session) for session in ids] == [False, False, True, True]
    assert all(spans(engine, session)[HOUR] == 1 for session in ids)


@contextlib.contextmanager
def asked(engine):
    """The statements that are asked of the database meanwhile."""
    found: list[str] = []

    def note(connection, cursor, statement, *_):
        found.append(statement)

    event.listen(engine, "before_cursor_execute", note)
    yield found
    event.remove(engine, "before_cursor_execute", note)


def test_what_is_too_much_is_looked_for_up_to_the_bound(engine, open_session):
    ids = [open_session(over=True) for _ in range(30)]
    for session in ids:
        samples.write(engine, session, seconds(BEGIN, 60, random.Random(session)))
    samples.prune_ended_sessions(engine)
    with asked(engine) as statements:
        samples.prune_ended_sessions(engine, minutes_bytes=1)
    of_a_session = [statement for statement in statements if "length" in statement]
    assert len(of_a_session) == 1, "the newest is beyond it already; the others are not weighed"
    assert not any(MINUTE in spans(engine, session) for session in ids)


def test_a_check_is_held_against_the_hours_of_the_newest_sessions(engine, open_session, tmp_path):
    for number in range(check_comparison.MAX_SESSIONS + 20):
        session = open_session(over=True)
        row = sessions.of_run(engine, "r", limit=1)[0]
        peak = 9e9 if number < 20 else 2e9
        samples.write(engine, session, [(row.started_at + timedelta(seconds=1), {"rank0.rss_peak": peak})])
        samples.roll_up(engine, session)
    run = runs.by_id(engine, "r")
    kept = check_result_path(tmp_path, run.plan_hash, run.name, run.workdir)
    kept.parent.mkdir()
    kept.write_text(json.dumps({"stages": [{"name": "train", "time": None, "memory": {"process": 1e9}}]}))
    with asked(engine) as statements:
        [held] = check_comparison.compare_with_run(engine, run, tmp_path)
    assert (held.what, held.predicted, held.measured) == ("a rank's process", 1e9, 2e9)
    assert len(statements) <= check_comparison.MAX_SESSIONS + 5
    for other in (run._replace(name="other"), run._replace(workdir="/other")):
        assert not check_comparison.compare_with_run(engine, other, tmp_path), "another project's check"


@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
def test_a_hundred_sessions_of_nine_hours_stay_below_200_mb_and_status_is_as_quick_as_at_first(engine, open_session):
    """One session through the verbs, second by second; its rows again for the other ninety-nine."""
    chance, first = random.Random(0), open_session(over=True)
    pool = [plausible(chance) for _ in range(1000)]
    work = []
    for begin_s in range(0, 9 * 3600, 600):
        batch = [(BEGIN + timedelta(seconds=begin_s + second), chance.choice(pool)) for second in range(600)]
        samples.write(engine, first, batch)
        samples.roll_up(engine, first)
        if begin_s == 3000:
            hour_bytes = _used_bytes(engine)
            work.append(_work_of_a_look(engine, first))
    samples.prune_ended_sessions(engine)
    assert spans(engine, first) == {MINUTE: 540, HOUR: 9}
    session_bytes = _used_bytes(engine)

    again = (
        'INSERT INTO samples (session_id, at, span_s, "values") SELECT ?, at, span_s, "values" FROM samples'
        " WHERE session_id = ?"
    )
    for _ in range(99):
        with engine.begin() as connection:
            connection.exec_driver_sql(again, (open_session(over=True), first))
    samples.prune_ended_sessions(engine)
    assert spans(engine, first)[MINUTE] == 540, "a hundred sessions keep their minutes"
    living = open_session()
    samples.write(engine, living, seconds(datetime.now(UTC), 3600, chance))
    total_bytes = _used_bytes(engine)
    print(
        f"{total_bytes / 1e6:.1f} MB, a session {session_bytes / 1e6:.2f} MB, an hour of seconds {hour_bytes / 1e6:.1f} MB"
    )
    assert 50 * session_bytes < total_bytes < 200e6

    work += [_work_of_a_look(engine, living), _work_of_a_look(engine, first)]
    print("newest sample:", *work, "instructions of SQLite's virtual machine")
    assert 0 < max(work[1:]) < 5 * work[0]


def _used_bytes(engine) -> int:
    with engine.connect() as connection:
        pages, free, size = (
            connection.exec_driver_sql(f"PRAGMA {name}").scalar() for name in ("page_count", "freelist_count", "page_size")
        )  # fmt: skip
    return (pages - free) * size


def _work_of_a_look(engine, session: int) -> int:
    """Instructions of SQLite's virtual machine: they tell what a look costs, whatever else the machine does."""
    done = []

    def counted(connection, *_) -> None:
        connection.set_progress_handler(lambda: done.append(1), 1)

    event.listen(engine, "checkout", counted)
    try:
        assert samples.newest(engine, session)
    finally:
        event.remove(engine, "checkout", counted)
        with engine.connect() as connection:
            connection.connection.driver_connection.set_progress_handler(None, 0)
    return len(done)


@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
def test_looking_for_samples_reads_a_range_of_the_index(engine, open_session):
    session = open_session()
    looked = samples.newest_row(session, SECOND), samples._rows(session, MINUTE).where(Sample.at >= BEGIN)
    for statement in looked:
        compiled = statement.compile(engine, compile_kwargs={"literal_binds": True})
        with engine.connect() as connection:
            [step] = connection.exec_driver_sql(f"EXPLAIN QUERY PLAN {compiled}").all()
        assert "SEARCH samples USING INDEX ix_samples_session_span_at (session_id=? AND span_s=?" in step[-1], step
