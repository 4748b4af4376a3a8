"""No regular expression takes time with the square of a text's length: a text may come from anywhere, and `re` holds the GIL."""

from __future__ import annotations

import ast
import functools
import re
import time
from collections import defaultdict
from pathlib import Path

import pytest

import kgorch

ROOT = Path(kgorch.__file__).parent
LENGTH = 8_000
"""Letters of an attack. What is linear takes less than 5 ms of CPU, what is quadratic at least 100."""

MOST_S = 0.05
UNITS = [
    '"', '\\"', "\\", "a", "0", " ", "\t", "\n", ".", "-", "/", "=", "_", ":", "%", "{", "(", "[", "<", "A", "\x1b", "\x1b[",
    "//", "a:", "a=", "a.", "a/", "a ", "0.", '"a" ', "://", "é", "@", "*", "# ", "a@", ",", ";", "0,000", "\\a", "'", "\r",
]  # fmt: skip
METHODS = ("search", "match", "fullmatch", "sub", "split", "findall", "finditer", "subn")


def literal(node):
    try:
        return ast.literal_eval(node)
    except ValueError:
        return None


@functools.cache
def expressions():
    """(text, flags) of each expression that is a literal → {method: place in the source}."""
    found, trees = defaultdict(dict), {path: ast.parse(path.read_text()) for path in ROOT.rglob("*.py")}
    calls = [(path, node) for path, tree in trees.items() for node in ast.walk(tree) if isinstance(node, ast.Call)]
    methods = defaultdict(set)
    for _, node in calls:
        match node.func:
            case ast.Attribute(value=ast.Name(id=name) | ast.Attribute(attr=name), attr=method) if method in METHODS:
                methods[name].add(method)
    for path, tree in trees.items():
        names = {}
        for node in ast.walk(tree):
            if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
                target = node.targets[0] if isinstance(node, ast.Assign) else node.target
                pairs = (
                    zip(target.elts, node.value.elts, strict=True)
                    if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple)
                    else [(target, node.value)]
                )
                names |= {value: one.id for one, value in pairs if isinstance(one, ast.Name)}
        for node in ast.walk(tree):
            match node:
                case ast.Call(func=ast.Attribute(value=ast.Name(id="re"), attr=method), args=[text, *more]):
                    text = literal(text)
                    if method not in (*METHODS, "compile") or not isinstance(text, str | bytes):
                        continue
                    flags = [*more, *(word.value for word in node.keywords)]
                    flags = sum(getattr(re, getattr(word, "attr", ""), 0) for word in flags)
                    used = {method} if method != "compile" else methods.get(names.get(node, ""), {"search"})
                    found[text, flags] |= {one: f"{path.relative_to(ROOT)}:{node.lineno}" for one in used}
    return found


def attacks(pattern):
    words = re.findall(r"\w+", pattern if isinstance(pattern, str) else pattern.decode("latin1"))
    for unit in dict.fromkeys([*UNITS, *words]):
        for before, after in (("", "!"), ('"', ""), ("a", "\x00")):
            yield before + unit * (LENGTH // len(unit)) + after


def seconds(method, pattern, text):
    began = time.thread_time()
    if method in ("sub", "subn"):
        getattr(pattern, method)(text[:0], text)
    elif method == "finditer":
        list(pattern.finditer(text))
    else:
        getattr(pattern, method)(text)
    return time.thread_time() - began


@pytest.mark.parametrize(
    ("text", "flags"), [pytest.param(*key, id=repr(key[0])[:60]) for key in sorted(expressions(), key=repr)]
)
def test_a_regular_expression_takes_time_in_proportion_to_the_text(text, flags):
    pattern = re.compile(text, flags)
    for method, place in expressions()[text, flags].items():
        for attack in attacks(text):
            given = attack.encode() if isinstance(text, bytes) else attack
            taken = seconds(method, pattern, given)
            if taken > MOST_S:  # a busy machine, perhaps
                taken = min(seconds(method, pattern, given) for _ in range(3))
            assert taken < MOST_S, f"{place}: {method} of {text!r} took {taken:.2f} s for {attack[:20]!r}…"


def test_the_test_finds_a_quadratic_expression():
    assert seconds("search", re.compile(r'"(?:[^"\\]|\\.)*"'), '\\"' * LENGTH) > MOST_S
