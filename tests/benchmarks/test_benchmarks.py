"""The benchmarks still run, in small, and their pages can be drawn. No figure is judged: machines differ."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def results():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "benchmarks"))
        import checkpoints

        found = checkpoints.run(
            checkpoints.Case(groups=1, width=16, ways=checkpoints.TORCHS, rounds=2, steps=10, work=0)
        )
        yield {"machine": checkpoints.machine(), "commit": checkpoints.commit(), "main": found, "cases": []}


@pytest.mark.soak
def test_every_way_is_measured_and_what_was_promised_is_computed_from_it(results):
    import checkpoints

    found = results["main"]
    assert list(found["peers"]) == checkpoints.TORCHS and not found["missing"]
    for way in checkpoints.TORCHS:
        assert min(found["blocking_s"][way]) > 0 and len(found["end_to_end_s"][way]) == 4
        assert all(
            all_ >= part for part, all_ in zip(found["blocking_s"][way], found["end_to_end_s"][way], strict=True)
        )
    assert found["images_bytes"] > 0 and found["state_bytes"] > 0
    text = checkpoints.table(results)
    assert all(name in text for name, *_ in checkpoints.targets(found)) and "dcp.async_save" in text


@pytest.mark.soak
def test_a_missed_target_is_said(results):
    import checkpoints

    found = {**results["main"], "read_s": [1.0], "load_s": [10.0]}
    assert "verify and load: speed / reading        0.10   target ≥ 0.8   MISSED" in checkpoints.table(
        {**results, "main": found}
    )


@pytest.mark.soak
def test_the_pages_table_is_drawn_between_its_marks_and_the_prose_stays(results):
    import checkpoints_page

    page = (ROOT / "docs" / "checkpoints.md").read_text()
    table = checkpoints_page.measured(results)
    marks = checkpoints_page.BEGIN, checkpoints_page.END
    drawn = checkpoints_page.drawn_into(page, table, *marks)
    assert f"| dcp.save {results['main']['peers']['dcp.save']['version']} |" in drawn
    assert checkpoints_page.drawn_into(drawn, table, *marks) == drawn
    assert drawn.partition(checkpoints_page.END)[2] == page.partition(checkpoints_page.END)[2]


@pytest.mark.soak
def test_the_ladders_benchmark_runs_and_its_page_is_drawn(tmp_path, monkeypatch):
    for folder in ("benchmarks", "."):
        monkeypatch.syspath_prepend(str(ROOT / folder))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT / "benchmarks"), str(ROOT)]))
    import ladder

    results = {
        "machine": ladder.machine(), "load": {"bookkeeping": 0.0, "recovery": 0.0},
        "bookkeeping": ladder.bookkeeping(tmp_path / "b", rounds=1, steps=3),
        "recovery": ladder.recovery(tmp_path / "r", cycles=1, batches=[8]),
    }  # fmt: skip
    for figures in results["bookkeeping"].values():
        assert len(figures["stretch_s"]["plain"]) == 1 and 0 < figures["warm_s"] < 1
    for figures in results["recovery"].values():
        assert [len(values) for values in figures["lost_steps"].values()] == [1] * len(ladder.CASES)
    page = (ROOT / "docs" / "memory.md").read_text()
    drawn = ladder.drawn_into(page, ladder.page(results), ladder.BEGIN, ladder.END)
    assert "| 4 transformer layers, 8 samples |" in drawn
    assert drawn.partition(ladder.END)[2] == page.partition(ladder.END)[2]


def measured(what, tmp_path, *words, timeout_s=280):
    """The rows of a benchmark, run in small."""
    script = [sys.executable, f"benchmarks/{what}.py", *words, "--json", str(tmp_path / "figures")]
    done = subprocess.run(script, cwd=ROOT, capture_output=True, text=True, timeout=timeout_s)
    assert done.returncode == 0, done.stderr
    return json.loads((tmp_path / "figures").read_text())


@pytest.mark.soak
def test_what_grows_is_measured(tmp_path):
    parts = [word for part in ("sizes", "samples", "ranks") for word in ("--only", part)]
    found = measured("scale", tmp_path, *parts, "--count", "20", "--samples", "20000", "--ranks", "2", "--rounds", "1")
    names = {row["name"] for row in found["rows"]}
    assert {
        "kgorch status mine",
        "kgorch daemon, ready",
        "kgorch: the newest sample (call)",
        "kgorch, ranks: 2",
    } <= names
    assert all(row["value"] > 0 for row in found["rows"])


@pytest.mark.soak
def test_starts_and_the_sessions_of_a_daemon_are_measured(tmp_path):
    found = measured("starts", tmp_path, "--quick")
    seconds = {(row["group"], row["name"]): row["value"] for row in found["rows"]}
    assert len(seconds) == 8 and all(0 < value < 60 for value in seconds.values()), seconds


@pytest.mark.slow
def test_a_supervisor_lives_through_hours_in_a_minute():
    program = "import json, scale_ranks; scale_ranks.HOUR_S = 120; print(json.dumps(scale_ranks.hours(2)))"
    paths = os.pathsep.join([str(ROOT / "benchmarks"), str(ROOT)])
    # in a process of its own, which kills all of its children
    done = subprocess.run(
        [sys.executable, "-c", program], env={**os.environ, "PYTHONPATH": paths}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert len(found["mb"]) == 3 and found["saves"] >= 2


def test_a_session_is_not_started_where_its_end_would_kill_other_children(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    from bounded import living

    with (
        subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE) as other,
        pytest.raises(RuntimeError, match=str(other.pid)),
        living.started(["true"], tmp_path, tmp_path / "session"),
    ):
        pass
    assert other.returncode == 0


@pytest.mark.soak
def test_each_features_cost_is_measured_in_turns(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import overhead

    found = overhead.trained(tmp_path, 1, 0.05, sizes_ms=(2.0,))
    rows = list(overhead.of_steps(found["blocks"]))
    assert rows[0]["name"] == "kgorch" and rows[0]["figures"]["pairs"] == 2
    assert len(rows) == 8 and all(row["value"] > 0 for row in rows)
    assert all(0 <= block["own_threads_core"] < 1 for block in found["blocks"])
    assert any(block["own_threads_core"] for block in found["blocks"])


@pytest.mark.soak
def test_a_session_on_a_slow_disk_is_killed_at_its_wall_with_its_last_save_in_place(tmp_path):
    found = measured("walls", tmp_path, "--sessions", "1", "--at-once", "1", "--wall", "40")
    (session,) = found["sessions"]
    assert not found["misses"] and (session["last"] is None or session["saved"] == session["noted"] == session["last"])


@pytest.mark.soak
def test_a_training_is_cut_at_walls_and_goes_on_where_its_peer_had_saved(tmp_path):
    script = [sys.executable, "benchmarks/goodput.py", "--quick", "--exposure", "wall", "--exposure", "death"]
    done = subprocess.run(
        [*script, "--json", str(tmp_path / "figures.json")], cwd=ROOT, capture_output=True, text=True, timeout=580
    )
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "figures.json").read_text())
    assert {row["name"] for row in found["rows"]} == {"kgorch", "torch.save by the clock", "torch.save every N"}
    for row in found["rows"]:
        (cut,) = row["sessions"]
        assert 0 < cut["resumed"] < cut["done"] and cut["went_on"] <= cut["done"], row
        assert 0 < row["value"] < 100 and 0 < cut["cpu_s"] < 2 * cut["wall_s"], row


def test_the_plain_session_has_all_that_the_workloads_call(monkeypatch):
    """A script that calls more of a session than the benchmark's plain one has would end it after minutes."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import workloads_training

    has = {*vars(workloads_training.PlainSession), "rank", "world_size", "device", "output", "microbatch"}
    for script in sorted((ROOT / "workloads").glob("*/train.py")):
        called = set(re.findall(r"\bsession\.([a-z_]+)", script.read_text()))
        assert called and called <= has, script


def test_a_slow_workload_is_measured_in_fewer_and_shorter_turns(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import workloads

    assert workloads.turns(batches=8, epoch_s=0.4) == (8, 6)
    assert workloads.turns(batches=31, epoch_s=12.0) == (1, 4)  # two epochs of 31 steps would be 24 seconds
    assert workloads.turns(batches=500, epoch_s=300.0) == (1, 2)
