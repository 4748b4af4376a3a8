"""The benchmarks still run, in small, and their pages can be drawn. No figure is judged: machines differ."""

from __future__ import annotations

import json
import os
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
        yield {"machine": checkpoints.machine(), "main": found, "cases": []}


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


def test_a_missed_target_is_said(results):
    import checkpoints

    found = {**results["main"], "read_s": [1.0], "load_s": [10.0]}
    assert "verify and load: speed / reading        0.10   target ≥ 0.8   MISSED" in checkpoints.table(
        {**results, "main": found}
    )


def test_the_pages_table_is_drawn_between_its_marks_and_the_prose_stays(results):
    import checkpoints_page

    page = (ROOT / "docs" / "checkpoints.md").read_text()
    table = checkpoints_page.measured(results)
    marks = checkpoints_page.BEGIN, checkpoints_page.END
    drawn = checkpoints_page.drawn_into(page, table, *marks)
    assert f"| dcp.save {results['main']['peers']['dcp.save']['version']} |" in drawn
    assert checkpoints_page.drawn_into(drawn, table, *marks) == drawn
    assert drawn.partition(checkpoints_page.END)[2] == page.partition(checkpoints_page.END)[2]


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


@pytest.mark.slow
def test_the_benchmark_of_many_runs_and_sessions_runs():
    script = [sys.executable, "benchmarks/scale.py", "--count", "20", "--rounds", "1"]
    done = subprocess.run(script, cwd=ROOT, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr
    assert {"status", "history", "quota"} <= {line.split()[0] for line in done.stdout.splitlines()[1:] if line}


@pytest.mark.slow
def test_a_training_is_cut_at_walls_and_goes_on_where_its_peer_had_saved(tmp_path):
    script = [sys.executable, "benchmarks/goodput.py", "--quick", "--only", "every N", "--only", "kgorch"]
    done = subprocess.run(
        [*script, "--json", str(tmp_path / "figures")], cwd=ROOT, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stderr
    for row in json.loads((tmp_path / "figures").read_text())["rows"]:
        *cuts, last = row["sessions"]
        went_on = [cut["resumed"] for cut in cuts[1:]] + [last["resumed"]]
        assert all(after is None or after <= cut["done"] for cut, after in zip(cuts, went_on, strict=True)), row
