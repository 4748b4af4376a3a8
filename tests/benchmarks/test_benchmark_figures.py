"""What the benchmarks compute from what they saw, told in made-up sessions; and the page that is drawn from their figures."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def benchmarks(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))


def figures(*rows, **more):
    machine = {"cores": 2, "load": 0.5, "python": "3.11.7", "torch": "2.13.0"}
    return {
        "what": "made-up", "title": "Made up", "machine": machine, "versions": {"kgorch": "0.1"}, "commit": "abc",
        "rows": list(rows), **more,
    }  # fmt: skip


def row(name, value, better="higher", group="all", **more):
    return {"name": name, "group": group, "value": value, "unit": "%", "better": better, **more}


def test_marks_tell_the_lives_of_a_rank_and_a_torn_line_is_left_out(tmp_path):
    from bounded import living

    (tmp_path / "marks.0").write_text("begin 0 1.5 10\n1 1.6 0.5\n2 1.7 nan\nbegin 1 5.0 11\n2 5.1\n3 5.")
    first, second = living.lives(tmp_path / "marks.0")
    assert (first.resumed, first.pid, [step.number for step in first.steps]) == (0, 10, [1, 2])
    assert second.resumed == 1 and [tuple(step) for step in second.steps] == [(2, 5.1, 0.0)]
    assert living.lives(tmp_path / "missing") == []


def trial(seconds=None, lost=None, outcome="", **more):
    import recovery

    return recovery.Trial(seconds, lost, outcome, **more)


def test_recovery_is_a_median_and_where_none_came_what_came_instead():
    import recovery

    came = [trial(4.0, 10), trial(6.0, 30), trial(5.0, 20)]
    found = recovery.row("SIGKILL of a rank", "kgorch", came)
    assert (found["value"], found["spread"], found["note"]) == (5.0, (4.0, 6.0), None)
    assert found["figures"] == {"steps lost": 20}
    ended = recovery.row("a loss", "peer", [trial(outcome="the run ends (exit code 1)")] * 3)
    assert ended["value"] is None and ended["note"] == "the run ends (exit code 1)"


@pytest.mark.parametrize(("still", "value"), [(1, 4.0), (2, 4.0), (3, None)])
def test_recovery_has_a_figure_when_at_least_half_of_the_trials_came_back(still, value):
    import recovery

    found = recovery.row("a kill", "peer", [trial(3.0, 1), trial(5.0, 3), *[trial(outcome="stands still")] * still])
    assert found["value"] == value
    assert found["note"] == f"came back 2 of {2 + still}; stands still: {still} of {2 + still}"
    assert found["figures"]["steps lost"] == (2 if value else None)


def test_seconds_that_belong_to_an_outcome_are_told_once_as_their_median():
    import recovery

    found = recovery.row(
        "a kill", "kgorch", [trial(0.01, 0, "found again after", besides_s=at) for at in (1.0, 4.0, 2.0)]
    )
    assert found["note"] == "found again after 2.0 s"


def test_each_round_of_recovery_has_an_order_of_its_own_and_the_seed_gives_it_again(monkeypatch):
    import recovery

    orders = []
    monkeypatch.setattr(
        recovery, "tried", lambda way, fault, at, folder: orders.append((at, fault.kind)) or trial(1.0, 0)
    )
    monkeypatch.setattr(recovery, "version", lambda peer: "1")
    monkeypatch.setattr(recovery.page, "results", lambda what, rows, **more: {**more, "rows": rows})
    found = recovery.measured(list(recovery.FAULTS), ["kgorch"], 3, seed=7)
    assert found["seed"] == 7 and [len(row["trials"]) for row in found["rows"]] == [3] * len(recovery.FAULTS)
    first, orders[:] = list(orders), []
    recovery.measured(list(recovery.FAULTS), ["kgorch"], 3, seed=7)
    assert orders == first and len({tuple(kind for at, kind in first if at == when) for when, _ in first}) > 1


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
        times = {"step_s": step_s, "median_s": step_s, "cpu_s": step_s, "main_thread_s": 0.75 * step_s}
        return {"size": 2.0, "way": way, **times}

    blocks = [
        block(*told)
        for told in (("kgorch", 2.2), ("alone", 2.0), ("kgorch", 2.2), ("health checks", 2.0), ("kgorch", 1.8))
    ]
    whole, health = overhead.of_steps(blocks)
    assert (whole["name"], whole["value"]) == ("kgorch", pytest.approx(1.1))
    assert (health["name"], health["value"]) == ("health checks", pytest.approx(1.0))
    spent = whole["figures"]
    assert (spent["main thread, µs"], spent["other threads, µs"]) == (pytest.approx(0.15e6), pytest.approx(0.05e6))


def test_each_goal_is_found_in_the_kept_figures_and_its_table_and_picture_are_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    import goals

    parts = {path.stem: json.loads(path.read_text()) for path in goals.RESULTS.glob("*.json")}
    lines = goals.table(parts).splitlines()[2:]
    assert len(lines) == len(goals.GOALS)
    for goal, line in zip(goals.GOALS, lines, strict=True):
        reached, why = [cell.strip() for cell in line.split("|")[4:6]]
        assert (reached in ("yes", "**no**")) == (goal.part in parts)
        assert bool(why) == (reached == "**no**"), f"{goal.work}: a goal that is missed has a reason"
    goals.draw(parts, tmp_path / "curves.png")
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_a_goal_of_a_part_that_was_not_measured_says_so():
    import goals

    assert all("not measured" in line for line in goals.table({}).splitlines()[2:])


def test_the_page_has_the_goals_of_the_kept_figures():
    import goals
    import page

    parts = {path.stem: json.loads(path.read_text()) for path in goals.RESULTS.glob("*.json")}
    begin, end = page.marks("goals")
    drawn = (ROOT / "docs" / "benchmarks.md").read_text().partition(begin)[2].partition(end)[0]
    assert goals.table(parts) in drawn and goals.PICTURE in drawn
