"""The lifecycle in ARCHITECTURE.md is current; the workloads, their plans and their pages fit together."""

from __future__ import annotations

import ast
import re
import runpy
from pathlib import Path

import pytest

from kgorch.plan import parse

ROOT = Path(__file__).parents[2]
PAGES = sorted({ROOT / "README.md", *ROOT.glob("docs/**/*.md"), *ROOT.glob("workloads/**/*.md"), *ROOT.glob("*.md")})


def test_the_lifecycle_in_architecture_is_the_tables():
    drawn_into = runpy.run_path(str(ROOT / "docs" / "lifecycle.py"))["drawn_into"]
    text = (ROOT / "ARCHITECTURE.md").read_text()
    assert drawn_into(text) == text, "make docs"


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_every_row_of_a_table_has_the_cells_of_its_head(path):
    """Else the table ends there, and a page shows the rest as text."""
    rule, cells = re.compile(r"\|?(\s*:?-+:?\s*\|)+(\s*:?-+:?\s*)?"), re.compile(r"(?<!\\)\|")
    text = re.sub(
        r"^```.*?^```", lambda code: "\n" * code[0].count("\n"), path.read_text(), flags=re.MULTILINE | re.DOTALL
    )
    expected = 0
    for number, line in enumerate(text.splitlines(), start=1):
        expected = (
            len(cells.findall(line)) if rule.fullmatch(line) else expected if line.strip() and line[:4] != "<!--" else 0
        )
        assert not expected or len(cells.findall(line)) == expected, f"{path.name}:{number}: {line}"


def test_make_targets_that_are_named_exist():
    makefile = (ROOT / "Makefile").read_text()
    for page in ROOT.glob("*.md"):
        for target in re.findall(r"`make ([a-z-]+)", page.read_text()):
            assert re.search(rf"^([a-z-]+ )*{target}[ :]", makefile, re.MULTILINE), f"{page.name}: make {target}"


def test_the_plans_of_the_workloads_are_plans_of_programs_that_exist():
    plans = sorted(ROOT.glob("workloads/*/*.toml"))
    assert {path.name for path in plans if not re.fullmatch(r"plan(_\w+)?\.toml", path.name)} == {"demo.toml"}
    for path in plans:
        for stage in parse(path.read_text(), str(path)).stage:
            module, _, function = stage.entry.partition(":")
            assert f"def {function}(" in (ROOT / f"{module.replace('.', '/')}.py").read_text(), stage.entry


WORKLOADS = sorted(path.parent.name for path in ROOT.glob("workloads/*/plan.toml"))


@pytest.mark.parametrize("name", WORKLOADS)
def test_each_workload_has_a_page_with_a_small_picture_that_names_every_argument_of_its_plan(name):
    text = (ROOT / "docs" / f"{name}.md").read_text()
    assert f"]({name}.png)" in text
    assert (ROOT / "docs" / f"{name}.png").stat().st_size < 150_000
    told = re.findall(r"`([^`\n]+)`", text)
    plan = parse((ROOT / "workloads" / name / "plan.toml").read_text(), name)
    asked = {argument for stage in plan.stage for argument in stage.args}
    assert {argument for argument in asked if not any(re.search(rf"\b{argument}\b", code) for code in told)} == set()


@pytest.mark.parametrize("name", WORKLOADS)
def test_each_workload_is_in_the_index_and_leads_to_its_page(name):
    index = (ROOT / "docs" / "workloads.md").read_text()
    assert f"| `{name}` |" in index and f"]({name}.md)" in index
    assert f"(../../docs/{name}.md)" in (ROOT / "workloads" / name / "README.md").read_text()


@pytest.mark.parametrize(
    "path", sorted(ROOT.glob("workloads/*/*.toml")), ids=lambda path: f"{path.parent.name}-{path.stem}"
)
def test_what_the_plans_of_the_workloads_set_are_arguments_of_their_stages(path):
    for stage in parse(path.read_text(), str(path)).stage:
        module, _, function = stage.entry.partition(":")
        tree = ast.parse((ROOT / f"{module.replace('.', '/')}.py").read_text())
        [main] = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == function]
        assert set(stage.args) <= {argument.arg for argument in main.args.args}, stage.name
