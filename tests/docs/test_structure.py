"""docs/structure.py on a small tree: each figure is counted as its head says."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "structure.py"
TREE = {
    "app/start.py": '''"""Starts."""

from app import engine
from app.values import Order

# why
def command(plan):
    """Run a plan."""
    text = open(plan).read()  # it is small
    engine.run(1, text)
    order = Order(text)
    engine.queue(order=order)
    engine.unrelated(plan)
''',
    "app/engine.py": """from app.values import store


class Engine:
    def _keep(self, text):
        return store(text)

    def begin(self, found, b, c, d, e, f):
        return self._keep(found)


def run(number, text):
    told = Engine()
    return told.begin(text)


def queue(*, order):
    return store(order)


def unrelated(text):
    return text
""",
    "app/values.py": '''class Order:
    def __init__(self, text):
        """Text of an order."""
        self.text = text


class _Engine:
    pass


def store(what):
    return what
''',
    "app/sub/taking.py": "",
}


@pytest.fixture(scope="module")
def structure():
    spec = importlib.util.spec_from_file_location("structure", PAGE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_sizes_comments_and_docstrings_of_a_tree(structure):
    figures = structure.measure(TREE)
    assert figures["files"] == 4 and figures["largest folders"] == {"app": 3, "app/sub": 1}
    assert figures["largest class"] == {"size": 6, "where": "app/engine.py:4 Engine"}
    assert figures["longest function"] == {"size": 7, "where": "app/start.py:7 command"}
    assert figures["most parameters"] == {"size": 6, "where": "app/engine.py:8 begin"}
    assert figures["functions with more than 5 parameters"] == 1
    lines = sum(bool(line.strip()) for text in TREE.values() for line in text.splitlines())
    assert figures["comment lines per 100 lines"] == round(100 * 2 / lines, 1)
    public = ["command", "Engine", "begin", "run", "queue", "unrelated", "Order", "store"]
    assert figures["public definitions with a docstring, %"] == 100 / len(public)


def test_participles_and_doubled_class_names_are_listed(structure):
    figures = structure.measure(TREE)
    assert figures["modules named by a participle"] == ["app/sub/taking.py"]
    assert figures["most used of these"] == {"found": 2, "told": 2} and figures["uses of participles as names"] == 4
    assert figures["class names used more than once"] == ["Engine"]


def test_a_value_is_followed_through_calls_and_constructors(structure):
    trees = {path: structure.ast.parse(text) for path, text in TREE.items()}
    way = structure.passed_through(trees, "app/start.py", "command", "text")
    assert way == [
        ("app/engine.py", "queue"),  # by the value that was constructed with it
        ("app/engine.py", "run"),
        ("app/start.py", "command"),
        ("app/values.py", "Order.__init__"),
        ("app/values.py", "store"),
    ], "a call through an object is not followed, and other arguments are none of it"
    assert structure.passed_through(trees, "app/engine.py", "Engine.begin", "found") == [
        ("app/engine.py", "Engine._keep"),
        ("app/engine.py", "Engine.begin"),
        ("app/values.py", "store"),
    ]
    assert structure.passed_through(trees, "app/gone.py", "command", "text") == []


def test_two_trees_stand_side_by_side(structure):
    lines = structure.table({"v1": structure.measure({}), "now": structure.measure(TREE)}).splitlines()
    assert lines[0].split() == ["v1", "now"] and lines[1].split() == ["files", "0", "4"]
    assert ["1", "app/sub"] in [line.split() for line in lines]


def test_this_tree_can_be_measured():
    done = subprocess.run([sys.executable, PAGE, "--json"], capture_output=True, text=True, check=True)
    assert '"orchestrator/cli/commands/training/start.py"' in done.stdout
