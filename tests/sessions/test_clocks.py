"""Clocks that jump, the end that a person gives, and a configuration, on real processes."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from harness import Kgorch, wait_until

from kgorch.core.codes import Reason

YEAR_S = 365 * 86400


PROGRAM = """\
import datetime, pathlib, sys
import kgorch.db.runs, kgorch.db.sessions
from kgorch.system.clock import SystemClock
told = pathlib.Path(sys.argv.pop(1))
now = lambda *_: datetime.datetime.now(datetime.UTC) + datetime.timedelta(seconds=int(told.read_text()))
kgorch.db.runs.now = kgorch.db.sessions.now = SystemClock.utc = now
from kgorch.cli import main
main()
"""
"""kgorch with a wall clock that a file puts forward and back. Not by libfaketime: with its monotonic clocks left alone, time.sleep
of PyTorch's launcher fails with EINVAL."""


class WallClock:
    """Supervisors whose wall clock (system/clock.py, and what the database stamps) can be put forward and back."""

    def __init__(self, kgorch: Kgorch, told: Path) -> None:
        self._kgorch, self._told = kgorch, told
        self.put(0)

    def put(self, offset_s: int) -> None:
        new = self._told.with_suffix(".new")
        new.write_text(f"{offset_s:+d}\n")
        new.rename(self._told)

    def background(self, *args: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(self._told), *args],
            cwd=self._kgorch.folder,
            env=self._kgorch.env(),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self._kgorch.started.append(process)
        return process


@pytest.fixture
def wall_clock(kgorch: Kgorch, tmp_path: Path) -> WallClock:
    return WallClock(kgorch, tmp_path / "offset")


def _left_s(kgorch: Kgorch) -> tuple[float, float, float]:
    """What status says is left, and readings of a clock before and after it was asked."""
    before_s = time.monotonic()
    left_s = kgorch.status()["session"]["left_s"]
    return left_s, before_s, time.monotonic()


@pytest.mark.soak  # the storm puts it by weeks
def test_a_wall_clock_that_jumps_by_years_moves_no_deadline_and_strands_no_run(kgorch, wall_clock):
    plan = kgorch.plan(args={"epochs": 100_000, "sleep": 0.05}, wall="80s")
    began_s = time.monotonic()
    supervisor = wall_clock.background("start", str(plan))
    kgorch.wait_for_step(3)
    left_s, earliest_s, latest_s = _left_s(kgorch)
    for offset_s in (YEAR_S, -YEAR_S):  # it stays back, so that no timer of the wall clock fires before the deadline
        wall_clock.put(offset_s)
        wait_until(lambda years=offset_s / YEAR_S: _years_heard(kgorch) == years, what="the clock to have jumped")
        now_s, before_s, after_s = _left_s(kgorch)
        assert before_s - latest_s - 0.1 <= left_s - now_s <= after_s - earliest_s + 0.1
    assert supervisor.wait(timeout=180) == 10
    assert time.monotonic() - began_s < 80 + 8, "ended by its wall"
    [first] = kgorch.history()
    assert (first["phase"], first["why"]) == ("suspended", Reason.TIME_LIMIT)
    assert first["lasted_s"] == 0.0, "it ended before it began, as the wall clock has it"
    assert first["checkpoint"]["verified"]

    wall_clock.put(YEAR_S)  # a machine that comes up with a wrong clock
    again = wall_clock.background("resume")
    step = kgorch.wait_for_step(first["checkpoint"]["step"] + 2)["step"]
    again.send_signal(signal.SIGTERM)
    assert again.wait(timeout=90) == 10
    waiting = kgorch.status()["next"]
    assert datetime.fromisoformat(waiting["at"]) > datetime.now(UTC) + timedelta(days=300), "status shows what is odd"
    assert waiting["command"] == "kgorch resume test"
    third = kgorch.background("resume")
    assert kgorch.wait_for_step(step + 1)["session"]["number"] == 3, "who asks need not wait for a wrong date"
    third.send_signal(signal.SIGTERM)
    assert third.wait(timeout=90) == 10
    assert all(entry["lasted_s"] >= 0 for entry in kgorch.history())


def _years_heard(kgorch: Kgorch) -> int:
    """By how many years the supervisor's wall clock was off when it last wrote a rank's word down."""
    heard = datetime.fromisoformat(kgorch.status()["session"]["heartbeat_at"])
    return round((heard - datetime.now(UTC)).total_seconds() / YEAR_S)


@pytest.mark.soak
def test_the_end_that_a_person_gives_holds_for_its_session_also_under_another_supervisor_and_for_no_later_one(kgorch):
    plan = kgorch.plan(args={"epochs": 100_000, "sleep": 0.05})
    until = datetime.now(UTC) + timedelta(seconds=45)
    first = kgorch.background("start", str(plan), "--until", until.isoformat())
    kgorch.wait_for_step(3)
    first.kill()
    first.wait()
    kgorch("start", str(plan), code=10)
    over = kgorch.status()
    assert datetime.fromisoformat(over["session"]["ended_at"]) < until
    assert (over["phase"], over["why"]) == ("suspended", Reason.UNTIL)
    assert over["checkpoint"]["step"] == over["step"] > 0
    assert len(kgorch.history()) == 1, "taken over, not begun anew"

    second = kgorch.background("resume")
    assert kgorch.wait_for_step(over["step"] + 1)["session"]["wall_at"] is None
    second.send_signal(signal.SIGTERM)
    assert second.wait(timeout=90) == 10


@pytest.mark.parametrize(
    ("told", "said"),
    [("25:99", "not a time of day"), ("tea", "not a date and time"), ("2020-01-01T00:00Z", "has passed")],
)
def test_an_end_that_is_none_or_has_passed_is_a_mistake(kgorch, told, said):
    plan = kgorch.plan()
    for verb in (["start", str(plan)], ["start", "--detach", str(plan)], ["resume"]):
        assert said in kgorch(*verb, "--until", told, code=2).stderr


def test_an_end_before_a_save_would_be_done_is_refused_and_a_detached_start_says_so_too(kgorch):
    plan = kgorch.plan()
    for detach in ([], ["--detach"]):
        until = (datetime.now(UTC) + timedelta(seconds=2)).isoformat()
        done = kgorch("start", str(plan), "--until", until, *detach, code=2)
        assert "--until" in done.stderr


def test_what_the_configuration_says_holds_and_a_mistake_in_it_is_named_by_line(kgorch):
    plan = kgorch.plan()
    told = kgorch.home / "kgorch" / "config.toml"
    told.parent.mkdir(parents=True)
    told.write_text('[platform]\nwall = "1s"\n')
    assert "session.wall = 1 s is over before a save would be" in kgorch("start", str(plan), code=2).stderr
    told.write_text('[platform]\nwal = "1s"\n')
    done = kgorch("start", str(plan), code=2)
    assert f"{told}:2: platform.wal: unknown key (did you mean 'wall'?)" in done.stderr
    assert wait_until(lambda: kgorch("status", code=None).returncode == 0), "what reads no plan needs no configuration"
