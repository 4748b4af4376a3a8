"""Every figure in the README and the pages on benchmarks is what the kept JSON says.

benchmarks/claims.toml ties phrases to expressions on benchmarks/results/*.json. A number that is neither tied nor listed
there with a reason is an error, so a new figure needs a source, and a new run needs its prose read again.
"""

from __future__ import annotations

import json
import runpy
import shutil
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CHECK = runpy.run_path(str(ROOT / "benchmarks" / "claims.py"))
CLAIMS, RESULTS, NOT_KEPT, NUMBER = (CHECK[name] for name in ("CLAIMS", "RESULTS", "NOT_KEPT", "NUMBER"))
problems, rewrite = CHECK["problems"], CHECK["rewrite"]
RULES = tomllib.loads((ROOT / CLAIMS).read_text())


@pytest.fixture
def copy(tmp_path):
    shutil.copytree(ROOT / RESULTS, tmp_path / RESULTS)
    for page in [CLAIMS, *map(Path, tomllib.loads((ROOT / CLAIMS).read_text()))]:
        (tmp_path / page).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / page, tmp_path / page)
    return tmp_path


def test_every_figure_in_the_prose_is_what_the_kept_json_says():
    assert problems(ROOT) == []


def test_the_tables_are_those_of_the_kept_json(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    page = runpy.run_path(str(ROOT / "benchmarks" / "page.py"))
    text = (ROOT / "docs" / "benchmarks.md").read_text()
    kept = {path.stem: json.loads(path.read_text()) for path in sorted((ROOT / RESULTS).glob("*.json"))}
    for part, found in kept.items():
        if part not in ("checkpoints", "ladder", "workloads"):  # have pages and tables of their own
            begin, end = page["marks"](part)
            assert f"{begin}\n{page['table'](found)}\n\n![" in text and end in text, part


def other(phrase):
    """The phrase with another first number."""
    return NUMBER.sub(lambda number: number[0][:-1] + str((int(number[0][-1]) + 5) % 10), phrase, count=1)


@pytest.mark.parametrize("page", RULES)
def test_a_number_that_is_changed_in_the_prose_is_found(copy, page):
    text = (copy / page).read_text()
    phrase = next(
        phrase for key in ("measured", "drawn") for phrase in RULES[page].get(key, ()) if text.count(phrase) == 1
    )
    (copy / page).write_text(text.replace(phrase, other(phrase)))
    assert any(problem.startswith(f"{page}: ") for problem in problems(copy))


def test_the_numbers_of_another_run_come_into_the_prose_and_the_sentences_are_told(copy):
    before = {page: (copy / page).read_text() for page in [*RULES, str(CLAIMS)]}
    assert rewrite(copy) == [] and before == {page: (copy / page).read_text() for page in before}
    path = copy / RESULTS / "trainers.json"
    found = json.loads(path.read_text())
    for row in found["rows"]:
        row["value"] *= 1.5
        row["figures"] = {
            name: 2 * value if isinstance(value, float) else value for name, value in row["figures"].items()
        }
    path.write_text(json.dumps(found))
    assert problems(copy)
    changed = rewrite(copy)
    of_trainers = [
        phrase for phrase, said in RULES["docs/benchmarks.md"]["measured"].items() if "'trainers'" in str(said)
    ]
    assert len(changed) == len(of_trainers) and all(one.startswith("docs/benchmarks.md: ") for one in changed)
    assert problems(copy) == [] and (copy / "README.md").read_text() == before["README.md"]
    again = json.loads((ROOT / RESULTS / "trainers.json").read_text())
    path.write_text(json.dumps(again))
    rewrite(copy)
    assert before == {page: (copy / page).read_text() for page in before}, "as exact as they were"


@pytest.mark.parametrize("sentence", ["It is 12% faster.", "It takes half the time.", "Over 40 runs."])
def test_a_figure_without_a_source_is_found(copy, sentence):
    page = copy / "docs" / "benchmarks.md"
    page.write_text(f"{page.read_text()}\n{sentence}\n")
    assert len(problems(copy)) == 1


@pytest.mark.parametrize(
    ("part", "row", "column", "factor"),
    [("goodput", 0, "value", 0.98), ("overhead", 0, "value", 1.02), ("recovery", 0, "value", 1.1), ("scale", 29, "value", 1.1)],
)  # fmt: skip
def test_a_number_that_is_changed_in_the_json_is_found(copy, part, row, column, factor):
    path = copy / RESULTS / f"{part}.json"
    found = json.loads(path.read_text())
    found["rows"][row][column] *= factor
    path.write_text(json.dumps(found))
    assert problems(copy)


def test_a_session_that_misses_its_save_is_found_in_the_prose(copy):
    path = copy / RESULTS / "walls.json"
    found = json.loads(path.read_text())
    found["sessions"][3]["saved"] -= 1
    path.write_text(json.dumps(found))
    assert any(str(len(found["sessions"])) in problem for problem in problems(copy))


def test_a_page_says_that_its_json_was_not_kept_until_it_is(copy):
    (copy / RESULTS / "ladder.json").write_text('{"rows": []}')
    assert any(NOT_KEPT in problem for problem in problems(copy))
