"""What benchmarks/goodput.py computes from sessions, told in made-up ones."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def benchmarks(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))


def cut(resumed, done, went_on, **more):
    """60 s: 5 s of start-up, steps of 10 ms like the yardstick's, nothing unused."""
    import goodput

    given = {
        "wall_s": 60.0, "startup_s": 5.0, "step_s": 0.01, "unused_s": 0.0, "slow_s": 0.0, "ended": "killed", "began_at": 0.0,
        "yardstick_s": (0.01, 0.01),
    }  # fmt: skip
    return goodput.Cut(resumed=resumed, done=done, went_on=went_on, **(given | more))


def test_a_step_survives_when_the_next_session_goes_on_behind_it():
    import goodput

    whole = cut(1000, 6500, 6500)
    assert goodput.share(whole) == pytest.approx(100 * 55 / 60)
    lost = cut(1000, 6500, 6000)
    assert goodput.share(lost) == pytest.approx(100 * 50 / 60)
    assert goodput.parts(lost)["lost"] == pytest.approx(5.0)


@pytest.mark.parametrize("seed", range(20))
def test_the_parts_of_a_session_add_up_to_its_seconds(seed):
    import goodput

    drawn = random.Random(seed)
    startup_s, step_s, slow_s = drawn.uniform(0, 9), drawn.uniform(0.005, 0.02), drawn.uniform(-1, 5)
    steps, resumed = drawn.randrange(20, 1500), drawn.randrange(500)
    unused_s = 60.0 - startup_s - steps * step_s - slow_s
    found = goodput.parts(
        cut(
            resumed, resumed + steps, drawn.choice([None, 0, resumed, resumed + steps // 2, resumed + steps]), startup_s=startup_s,
            step_s=step_s, slow_s=slow_s, unused_s=unused_s, yardstick_s=(drawn.uniform(0.005, 0.02), drawn.uniform(0.005, 0.02)),
        )
    )  # fmt: skip
    assert sum(found.values()) == pytest.approx(60.0)


def test_a_tool_whose_steps_take_twice_as_long_has_half_of_the_share():
    import goodput

    slower = cut(0, 2750, 2750, step_s=0.02)
    assert goodput.share(slower) == pytest.approx(100 * 27.5 / 60)
    assert goodput.parts(slower)["slower steps"] == pytest.approx(27.5)


def test_no_share_is_above_what_start_up_and_the_unused_end_leave_at_the_yardsticks_speed():
    import goodput

    found = cut(0, 5000, 5000, unused_s=5.0)
    assert goodput.share(found) <= 100 * (60 - 5 - 5) / 60 + 1e-9


def test_what_an_earlier_session_had_can_be_lost_too_and_counts_against_this_one():
    import goodput

    assert goodput.share(cut(1000, 6500, 500)) == pytest.approx(-100 * 5 / 60)


def test_a_session_that_makes_no_step_has_nothing_and_breaks_nothing():
    import goodput

    none = cut(None, 0, None, startup_s=None, step_s=None, unused_s=60.0)
    assert goodput.share(none) == 0.0 and goodput.parts(none)["start-up"] == 60.0
    found = goodput.row("a", "1MB", [none, none], [cut(0, 5500, 5500)] * 2)
    assert found["value"] == 0.0 and found["note"] == "2 of 2 did not go on"


def test_a_peer_is_held_against_kgorch_chain_by_chain_with_an_interval_by_student():
    import goodput

    ours = [cut(0, 5500, 5500), cut(0, 4500, 4500), cut(0, 5000, 5000)]
    peer = [cut(0, 5500, each) for each in (4900, 3900, 4400)]  # 600 steps less in each: 10 points
    found = goodput.row("peer", "1MB", peer, ours)
    assert found["figures"]["behind kgorch, points"] == "10.0 (10.0 to 10.0)"
    # mean 73.3, standard deviation 8.33 of three: 4.303 × 8.33 / √3
    assert found["spread"] == pytest.approx((73.333 - 20.70, 73.333 + 20.70), abs=0.02)
    assert goodput.row("kgorch", "1MB", ours, ours)["figures"]["behind kgorch, points"] is None


def test_yardsticks_that_differ_and_sessions_that_ended_by_themselves_are_counted():
    import goodput

    cuts = [cut(0, 5500, 5500, yardstick_s=(0.010, 0.0106)), cut(0, 5500, 5500, ended="by itself with 0 after 59.0 s")]
    figures = goodput.row("a", "1MB", cuts, [])["figures"]
    assert figures["uneven"] == 1 and figures["gone by itself"] == "1 of 2"


def test_a_steps_time_is_that_of_ten_in_a_row_and_a_save_between_is_none_of_it():
    import goodput

    at, times = 0.0, []
    for number in range(200):
        at += 0.01 + (1.0 if number % 50 == 0 else 0.0)
        times.append(at)
    assert goodput._step_s(times) == pytest.approx(0.01)


@pytest.mark.parametrize(("save_s", "expected"), [(0.15, 420), (0.005, 80), (0.0, 30), (1e-9, 30)])
def test_saves_are_as_rare_as_young_has_them(save_s, expected):
    import goodput

    assert goodput.young(save_s, 60.0, 0.01) == expected


def test_processor_time_of_what_was_killed_is_counted(tmp_path):
    """A grandchild that computes for half a second, tells so, and is killed."""
    busy = (
        "import os, time; end = time.process_time() + 0.5\nwhile time.process_time() < end: pass\n"
        "open(os.environ['BOUNDED_MARKS'] + '.0', 'w').write('begin 0 0.0 1\\n'); time.sleep(100)"
    )
    program = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {busy!r}])"
    (tmp_path / "own").mkdir()
    # in a process of its own: what runs below it is killed
    script = (
        f"import sys; sys.path.insert(0, {str(ROOT / 'benchmarks')!r})\nimport goodput; from pathlib import Path\n"
        f"peer = goodput.Peer('torch', '', lambda job: [sys.executable, '-c', {program!r}])\n"
        f"job = goodput.Job(Path({str(tmp_path / 'own')!r}), '1MB', 0)\n"
        "print(goodput.session(peer, job, 100.0, 'session', begins=True).cpu_s)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert 0.5 <= float(done.stdout) < 4.0


def test_groups_of_an_earlier_run_stay_in_the_file_with_their_commit(tmp_path, monkeypatch):
    import goodput

    monkeypatch.setattr(
        goodput, "chain", lambda cuts, *_: [made.append(cut(0, 5000, 5000)) for made in cuts.values()] and []
    )
    monkeypatch.setattr(goodput, "calibrated", lambda names, *_: dict.fromkeys(names, 50))
    kept = tmp_path / "goodput.json"
    for commit, exposure in (("one", goodput.WALL), ("two", goodput.DEATH)):
        monkeypatch.setattr(goodput.page, "commit", lambda commit=commit: commit)
        found = goodput.measured({exposure: [goodput.OURS]}, ["1MB"], 1, 60.0, 0, kept)
        kept.write_text(json.dumps(found))
    told, died = found["rows"]
    assert (told["group"], told["figures"]["commit"]) == (f"1MB of state, {goodput.WALL}", "one")
    assert (
        died["group"] == f"1MB of state, {goodput.DEATH}"
        and "commit" not in died["figures"]
        and found["commit"] == "two"
    )
