"""The benchmark of checkpoints still runs, in small, and its page can be drawn. No figure is judged: machines differ."""

from __future__ import annotations

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
    drawn = checkpoints_page.drawn_into(page, results)
    assert f"| dcp.save {results['main']['peers']['dcp.save']['version']} |" in drawn
    assert checkpoints_page.drawn_into(drawn, results) == drawn
    assert drawn.partition(checkpoints_page.END)[2] == page.partition(checkpoints_page.END)[2]
