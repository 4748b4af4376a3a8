"""What the benchmarks compute from what they saw, told in made-up sessions; and the page that is drawn from their figures."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def benchmarks(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))


def cut(resumed, done, *, startup_s=5.0, step_s=0.01, unused_s=0.0):
    import goodput

    return goodput.Cut(resumed, done, startup_s, step_s, unused_s, 0.0, "killed at the wall", 0.0)


def figures(*rows, **more):
    machine = {"cores": 2, "load": 0.5, "python": "3.11.7", "torch": "2.13.0"}
    return {
        "what": "made-up", "title": "Made up", "machine": machine, "versions": {"kgorch": "0.1"}, "commit": "abc",
        "rows": list(rows), **more,
    }  # fmt: skip


def row(name, value, better="higher", group="all", **more):
    return {"name": name, "group": group, "value": value, "unit": "%", "better": better, **more}


def test_a_step_survives_when_the_next_session_goes_on_behind_it():
    import goodput

    # 60 s less 5 s of start-up are 5500 steps each; the second session begins 500 before the end of the first
    found = goodput.row("a", "1MB", [cut(0, 5500), cut(5000, 10500), cut(10500, 10500, step_s=None)], wall_s=60.0)
    assert found["value"] == pytest.approx(100 * 10500 / 11000)
    assert found["spread"] == pytest.approx((100 * 5000 / 5500, 100.0))
    assert found["figures"]["steps lost a session"] == 250
    assert found["figures"]["of the wall, %"] == pytest.approx(100 * 105 / 120)


def test_a_session_that_makes_no_step_could_have_made_as_many_as_the_others():
    import goodput

    none = cut(None, 0, startup_s=None, step_s=None, unused_s=60.0)
    found = goodput.row("a", "1MB", [cut(0, 5500), none, cut(5500, 5500, step_s=None)], wall_s=60.0)
    assert found["value"] == pytest.approx(50.0) and found["spread"] == pytest.approx((0.0, 100.0))


def test_a_session_is_held_against_its_own_speed_whatever_the_machine_did_in_the_others():
    import goodput

    slower = cut(5500, 8250, step_s=0.02)
    found = goodput.row("a", "1MB", [cut(0, 5500), slower, cut(8250, 8250, step_s=None)], wall_s=60.0)
    assert found["value"] == pytest.approx(100.0) and found["spread"] == pytest.approx((100.0, 100.0))
    assert found["figures"]["of the wall, %"] == pytest.approx(100 * 55 / 60)


def test_a_peer_that_never_trains_has_nothing_and_breaks_nothing():
    import goodput

    none = cut(None, 0, startup_s=None, step_s=None)
    assert goodput.row("a", "1MB", [none, none], wall_s=60.0)["value"] == 0.0


def test_a_steps_time_is_that_of_ten_in_a_row_and_a_save_between_is_none_of_it():
    import goodput

    at, times = 0.0, []
    for number in range(200):
        at += 0.01 + (1.0 if number % 50 == 0 else 0.0)
        times.append(at)
    assert goodput._step_s(times) == pytest.approx(0.01)


def test_marks_tell_the_lives_of_a_rank_and_a_torn_line_is_left_out(tmp_path):
    from bounded import living

    (tmp_path / "marks.0").write_text("begin 0 1.5 10\n1 1.6 0.5\n2 1.7 nan\nbegin 1 5.0 11\n2 5.1\n3 5.")
    first, second = living.lives(tmp_path / "marks.0")
    assert (first.resumed, first.pid, [step.number for step in first.steps]) == (0, 10, [1, 2])
    assert second.resumed == 1 and [tuple(step) for step in second.steps] == [(2, 5.1, 0.0)]
    assert living.lives(tmp_path / "missing") == []


def test_recovery_is_a_median_and_where_none_came_what_came_instead():
    import recovery

    came = [recovery.Trial(4.0, 10), recovery.Trial(6.0, 30), recovery.Trial(5.0, 20)]
    found = recovery.row("SIGKILL of a rank", "kgorch", came)
    assert (found["value"], found["spread"], found["figures"]) == (5.0, (4.0, 6.0), {"steps lost": 20})
    ended = recovery.row("a loss", "peer", [recovery.Trial(None, None, "the run ends (exit code 1)")] * 3)
    assert ended["value"] is None and ended["note"] == "the run ends (exit code 1)"


def test_only_what_is_ours_and_a_quarter_worse_counts_as_fallen():
    import page

    old = figures(row("kgorch", 90.0), row("peer", 90.0), row("kgorch", 2.0, "lower", "b"), row("kgorch x", 1.0))
    new = figures(row("kgorch", 80.0), row("peer", 10.0), row("kgorch", 3.0, "lower", "b"), row("kgorch x", None))
    lines, fell = page.compare(old, new)
    assert fell == ["b kgorch"]
    assert [line.split("×")[1].split()[0] for line in lines if "×" in line] == ["0.89", "0.11", "0.67"]
    assert any("kgorch x" in line and "→" in line for line in lines)


def test_the_table_has_the_best_first_and_tells_why_a_figure_is_missing():
    import page

    drawn = page.table(
        figures(row("peer", 1.0), row("other", None, note="the run ends"), row("kgorch", 2.5, figures={"lost": 3}))
    )
    names = [line.split("|")[1].strip() for line in drawn.splitlines() if line.startswith("|")][2:]
    assert names == ["**kgorch**", "peer", "other"]
    assert "the run ends" in drawn and "| lost" in drawn


def test_a_page_is_drawn_again_between_its_marks_and_its_prose_stays(tmp_path):
    pytest.importorskip("matplotlib")
    import page

    found = figures(row("kgorch", 97.0), row("peer", 29.0), row("peer", None, group="other", note="the run ends"))
    (tmp_path / "benchmarks.md").write_text("# Benchmarks\nProse.\n")
    page.into_docs(found, tmp_path)
    begin, end = page.marks("made-up")
    text = (tmp_path / "benchmarks.md").read_text()
    (tmp_path / "benchmarks.md").write_text(text.replace("Prose", "Other prose") + "After.\n")
    page.into_docs(found, tmp_path)
    text = (tmp_path / "benchmarks.md").read_text()
    assert text.startswith("# Benchmarks\nOther prose.") and text.endswith("After.\n") and text.count(begin) == 1
    assert "97" in text.partition(begin)[2].partition(end)[0]
    assert (tmp_path / "benchmark-made-up.png").read_bytes().startswith(b"\x89PNG")


def test_figures_that_were_kept_are_drawn_without_measuring(tmp_path):
    import subprocess
    import sys

    file = tmp_path / "kept.json"
    file.write_text(json.dumps(figures(row("kgorch", 97.0), ends={})))
    script = [sys.executable, str(ROOT / "benchmarks" / "goodput.py"), "--from", str(file)]
    done = subprocess.run(script, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and "**kgorch**" in done.stdout, done.stderr


def end(last, saved, noted, *, phase="suspended", disk=50.0):
    import walls

    return walls.End(0, 0, phase, "the wall", last, saved, noted, 3.0, 2.0, None, 4.0, 0.5, 1.0, [(0.0, disk)])


def test_a_last_save_is_in_place_when_kgorch_knew_of_it_and_the_disk_holds_it():
    import walls

    ends = [
        end(100, 100, 100),
        end(100, 100, 90),
        end(100, 90, 90),
        end(100, 100, 100, phase="stopping"),
        end(None, 0, 0),
    ]
    found = walls.figures(ends, 30.0, 1)
    assert found["rows"][0]["value"] == 25.0 and found["rows"][0]["figures"]["steps lost by the others"] == 10
    assert len(found["misses"]) == 3 and found["without_a_step"] == 1


def test_a_feature_is_weighed_against_the_blocks_around_its_own():
    import overhead

    def block(way, step_s):
        return {"size": 2.0, "way": way, "step_s": step_s, "median_s": step_s, "cpu_s": step_s}

    blocks = [
        block(*told)
        for told in (("kgorch", 2.2), ("alone", 2.0), ("kgorch", 2.2), ("health checks", 2.0), ("kgorch", 1.8))
    ]
    whole, health = overhead.of_steps(blocks)
    assert (whole["name"], whole["value"]) == ("kgorch", pytest.approx(1.1))
    assert (health["name"], health["value"]) == ("health checks", pytest.approx(1.0))
