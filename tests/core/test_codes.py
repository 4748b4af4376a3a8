"""Codes are compared, sentences are not."""

from __future__ import annotations

import ast
import itertools
from pathlib import Path

import pytest

from kgorch.core import codes
from kgorch.core.codes import NOTED_BY_RANKS, REASON_TEXT, EventKind, Reason
from kgorch.core.session import events

ROOT = Path(__file__).parents[2]
FILES = sorted(
    path
    for folder in ("orchestrator", "db", "workloads")
    for path in (ROOT / folder).rglob("*.py")
    if "versions" not in path.parts
)
TEXTS = {"why", "cause", "message", "last_error", "note"}
"""Names of what people read."""

OF_OTHERS = {
    "orchestrator/worker/entry.py",
    "orchestrator/worker/memory/oom.py",
    "orchestrator/worker/ranks/peer_errors.py",
    "orchestrator/worker/ranks/process_group.py",
    "orchestrator/plan/diagnostics.py",
    "db/engine.py",
    "db/postgres.py",
    "orchestrator/platforms/gcp.py",
    "orchestrator/slurm/commands.py",
    "orchestrator/report/failure.py",
}
"""Where what PyTorch, pydantic, SQLite, libpq, a firmware or a traceback says is told apart, once: they have no codes for it."""

CODES = {"state", "phase", "outcome", "kind", "reason", "wall_kind", "code"}
"""Names of what holds a code."""


def compared(path: Path):
    """Both sides of each comparison and each startswith or endswith: an expression and a literal text."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
            for one, other in itertools.pairwise(sides):
                yield from ((one, text, node.lineno) for text in literals(other))
                yield from ((other, text, node.lineno) for text in literals(one))
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", "") in ("startswith", "endswith", "find"):
            yield from ((node.func.value, text, node.lineno) for word in node.args for text in literals(word))


def literals(node: ast.AST):
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.value
    elif isinstance(node, ast.Tuple | ast.List | ast.Set):
        for item in node.elts:
            yield from literals(item)


def name_of(node: ast.AST) -> str:
    if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
        return str(node.slice.value)
    return getattr(node, "attr", getattr(node, "id", ""))


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_sentence_is_compared(path):
    if str(path.relative_to(ROOT)) in OF_OTHERS:
        return
    for of, text, line in compared(path):
        where = f"{path}:{line}: compares {ast.unparse(of)} with {text!r}"
        assert name_of(of) not in TEXTS or not text.strip(), where
        assert len(text.split()) < 3, f"{where}, a sentence"


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_code_is_compared_with_a_member_of_its_enum(path):
    """A literal would not be found when a value changes; where other programs' words have such names, they are told apart here."""
    values = {
        member.value
        for kind in vars(codes).values()
        if isinstance(kind, type)
        for member in getattr(kind, "__members__", {}).values()
    }
    for of, text, line in compared(path):
        if name_of(of) in CODES and text:
            assert text not in values, (
                f"{path}:{line}: {ast.unparse(of)} is compared with {text!r}: take the member of core/codes.py"
            )


def test_each_event_of_the_lifecycle_has_a_kind_of_its_own():
    classes = [item for item in vars(events).values() if isinstance(item, type) and issubclass(item, events.Event)]
    kinds = [event.kind for event in classes if event is not events.Event]
    assert len(kinds) == len(set(kinds)) > 20 and not NOTED_BY_RANKS & set(kinds)


def test_each_reason_has_a_text():
    assert set(REASON_TEXT) == set(Reason) and len(set(REASON_TEXT.values())) == len(Reason)


def test_values_are_words_that_a_shell_and_a_database_take():
    for kind in (codes.Phase, codes.Reason, codes.Outcome, EventKind, codes.NoticeKind, codes.RankError):
        assert all(
            not member or (member.value.replace("_", "").isalpha() and member.value.islower()) for member in kind
        ), kind
