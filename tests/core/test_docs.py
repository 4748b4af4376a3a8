"""Pages that are drawn from the code are current, and what the README tells to type exists."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

from orchestrator.cli import VERBS
from orchestrator.plan import parse

ROOT = Path(__file__).parents[2]


def test_the_lifecycle_in_architecture_is_the_tables():
    drawn_into = runpy.run_path(str(ROOT / "docs" / "lifecycle.py"))["drawn_into"]
    text = (ROOT / "ARCHITECTURE.md").read_text()
    assert drawn_into(text) == text, "make docs"


def test_the_readmes_plan_is_a_plan_and_its_verbs_exist():
    text = (ROOT / "README.md").read_text()
    for block in re.findall(r"```toml\n(.*?)```", text, re.S):
        assert parse(block, "README.md").stage
    typed = [
        line for block in re.findall(r"\n```\n(.*?)\n```\n", text, re.S) for line in block.splitlines()
    ] + re.findall(r"`(kgorch .*?)`", text)
    verbs = {match[1] for line in typed if (match := re.match(r"kgorch ([a-z]+)", line))}
    assert len(verbs) >= 4
    assert verbs <= set(VERBS), verbs - set(VERBS)


def test_make_targets_that_are_named_exist():
    makefile = (ROOT / "Makefile").read_text()
    for page in ROOT.glob("*.md"):
        for target in re.findall(r"`make ([a-z-]+)", page.read_text()):
            assert f"\n{target}:" in makefile, f"{page.name}: make {target}"


def test_the_plans_of_the_workloads_are_plans_of_programs_that_exist():
    plans = sorted(ROOT.glob("workloads/*/*.toml"))
    assert {path.name for path in plans} == {"plan.toml", "demo.toml"}
    for path in plans:
        for stage in parse(path.read_text(), str(path)).stage:
            module, _, function = stage.entry.partition(":")
            assert f"def {function}(" in (ROOT / f"{module.replace('.', '/')}.py").read_text(), stage.entry
