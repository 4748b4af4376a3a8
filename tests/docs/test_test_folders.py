"""The tests lie where the code lies: folders named after the packages, few files in each, paths in documents that exist."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
TESTS = ROOT / "tests"
OTHERS = {"db", "workloads", "docs", "benchmarks", "gpu", "storm", "sessions", "places"}
"""Folders of tests that are no package below the top level; `sessions`: whole sessions through the command line; `places`: where
remote sessions run, with a stand-in for Kaggle's server."""


def test_each_folder_of_tests_is_named_after_what_it_tests():
    folders = {path.relative_to(TESTS).parts[0] for path in TESTS.glob("*/**/test_*.py")}
    packages = {path.parent.name for path in ROOT.glob("*/*/__init__.py") if TESTS not in path.parents}
    assert folders <= packages | OTHERS


def test_no_folder_of_tests_is_crowded():
    counts = {folder: len(list(folder.glob("test_*.py"))) for folder in TESTS.rglob("*") if folder.is_dir()}
    assert max(counts.values()) <= 16


def test_tests_that_a_document_names_exist():
    pages = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), ROOT / "Makefile"]
    named = {path for page in pages for path in re.findall(r"\btests/[\w/]+\.py\b", page.read_text())}
    assert len(named) > 40 and not [path for path in named if not (ROOT / path).exists()]
