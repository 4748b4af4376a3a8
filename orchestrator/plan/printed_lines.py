"""Regular expressions for the step and the loss in what a training program prints, for `kgorch adopt`."""

from __future__ import annotations

import ast
import itertools
import operator
import re
from collections.abc import Container, Sequence, Set
from typing import NamedTuple

from kgorch.plan.program_names import called_name

_SAYS = ("print", "echo", "write", "log", "debug", "info", "warning", "set_description", "set_postfix_str")
_PERCENT, _BRACES = re.compile(r"%[-+ #0-9.]*[a-zA-Z]"), re.compile(r"\{[^{}]*\}")
_STEP = re.compile(r"((?:global[_ ]?)?(?:step|iter(?:ation)?)|epoch)(\W{1,4})$", re.IGNORECASE)
_KINDS = ("step", "iter", "epoch")
"""What a program may count, the best first: epochs where it prints nothing finer."""

_LOSS = re.compile(r"((?<![\w/.-])[\w/.-]*loss(?:[ _]train(?:ing)?)?)(\W{1,4})$", re.IGNORECASE)
_VALIDATION = re.compile(r"(?<![a-z])(val|valid(ation)?|test|eval(uation)?)(?![a-z])", re.IGNORECASE)

# what is written into the plan, for any format of a number: padded, negative, with an exponent, no number at all
NUMBER = r"([-+]?(?:\d+\.?\d*(?:[eE][-+]?\d+)?|nan|inf))"
_COUNT, _GROUPED_COUNT = r"\s*(\d+)", r"\s*(\d+(?:,\d{3})*)"


class _Field(NamedTuple):
    """A value that is put into a text. Args: is_grouped: thousands are separated by commas."""

    expression: ast.expr | None
    is_grouped: bool

    @property
    def digits(self) -> str:
        return _GROUPED_COUNT if self.is_grouped else _COUNT


def step_and_loss(tree: ast.Module, repeated: Container[ast.AST] = ()) -> tuple[str, str]:
    """Regular expressions for the step and the loss, from the texts that the program puts together.

    A text with both goes first, then what is printed, then what does not speak of a validation. Of a program that prints no step,
    or counts its steps within each epoch, the epochs are its steps.

    Args:
        repeated: what stands in a loop.
    """
    said = {
        part
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and called_name(node) in _SAYS
        for part in ast.walk(node)
    }
    steps, losses = list[tuple[tuple[int, ...], str]](), list[tuple[tuple[int, ...], str]]()
    counters = _counters(tree, repeated)
    for node in ast.walk(tree):
        parts = _parts(node)
        if _is_name_of_file(parts):
            continue
        before, step, loss = "", list[tuple[int, int, str]](), list[tuple[bool, str]]()
        for number, text in enumerate(parts[:-1]):
            if not isinstance(text, str) or isinstance(value := parts[number + 1], str):
                continue
            before += text
            if match := _STEP.search(text):
                total = parts[number + 2 : number + 3] == ["/"] and parts[number + 3 : number + 4]
                counts = [_COUNT if isinstance(one, str) else one.digits for one in (value, *(total or ()))]
                kind = next(place for place, name in enumerate(_KINDS) if name in match[1].lower())
                grain = 1 if _KINDS[kind] == "epoch" else 2 * _is_within_epoch(value.expression, counters)
                step.append((grain, kind, _fixed(match[0]) + r"\s*/".join(counts)))
            if match := _LOSS.search(text):
                is_other = bool(_VALIDATION.search(before))
                loss.append((is_other, r"\b" + _fixed(match[0]) + r"\s*" + NUMBER))
        rank = not (step and loss), node not in said
        steps += [((grain, *rank, kind), found) for grain, kind, found in step]
        losses += [((is_other, *rank), found) for is_other, found in loss]
    chosen = (min(found, key=operator.itemgetter(0), default=((), "")) for found in (steps, losses))
    return next(chosen)[1], next(chosen)[1]


def _counters(tree: ast.Module, repeated: Container[ast.AST]) -> set[str]:
    """What the inner ones of nested loops count, and nothing else sets."""
    found, others = set[str](), set[str]()
    for node in ast.walk(tree):
        match node:
            case ast.For(
                target=ast.Name(id=name) | ast.Tuple(elts=[ast.Name(id=name), *_]),
                iter=ast.Call(args=[_, _, *_]) | ast.Call(keywords=[_]),
            ):  # from a number on
                others.add(name)
            case ast.For(target=ast.Name(id=name) | ast.Tuple(elts=[ast.Name(id=name), *_])):
                (found if node in repeated else others).add(name)
            case ast.Assign(targets=[ast.Name(id=name)]) | ast.AugAssign(target=ast.Name(id=name)):
                others.add(name)
    return found - others


def _is_within_epoch(value: ast.expr | None, counters: Set[str]) -> bool:
    """Whether a number is counted by an inner loop alone: `i + 1`, `i * len(batch)`, and not `epoch * len(loader) + i`."""
    waiting, names = [value], set[str]()
    while waiting:
        match waiting.pop():
            case ast.Name(id=name):
                names.add(name)
            case ast.BinOp(left=left, right=right):
                waiting += [left, right]
    return bool(names) and names <= counters


def _fixed(text: str) -> str:
    return re.escape(text).replace(r"\ ", " ")


def _parts(node: ast.AST) -> list[str | _Field]:
    """The fixed parts of a text that is put together, and the values between them; [] for any other expression."""
    match node:
        case ast.JoinedStr(values=values):
            return [
                _Field(part.value, "," in ast.unparse(part.format_spec or ast.Constant("")))
                if isinstance(part, ast.FormattedValue)
                else str(getattr(part, "value", ""))
                for part in values
            ]
        case ast.BinOp(left=ast.Constant(value=str(text)), op=ast.Mod(), right=right):
            return _split(_PERCENT, text, right.elts if isinstance(right, ast.Tuple) else [right])
        case ast.Call(func=ast.Attribute(value=ast.Constant(value=str(text)), attr="format"), args=values):
            return _split(_BRACES, text, values)
        case ast.Call(args=[ast.Constant(value=str(text)), _, *_] as words) if (
            called_name(node) in _SAYS and "%" in text
        ):
            return _split(_PERCENT, text, words[1:])
        case ast.Call(args=[_, _, *_] as words) if called_name(node) == "print":
            return [f"{word.value!s} " if isinstance(word, ast.Constant) else _Field(word, False) for word in words]
    return []


def _split(fields: re.Pattern[str], text: str, values: Sequence[ast.expr]) -> list[str | _Field]:
    first, *pieces = fields.split(text)
    filled = (
        _Field(value, ":" in field and "," in field)
        for field, value in itertools.zip_longest(fields.findall(text), values[: len(pieces)])
    )
    return [first, *itertools.chain.from_iterable(zip(filled, pieces, strict=True))]


def _is_name_of_file(parts: Sequence[str | _Field]) -> bool:
    """As f"out/step-{step}.pt": nobody prints it alone."""
    texts = [text for text in parts if isinstance(text, str)]
    return not any(re.search(r"\s", text) for text in texts) and bool(texts and re.search(r"\.[a-z]\w*$", texts[-1]))
