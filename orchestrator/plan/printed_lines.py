"""Regular expressions for the step and the loss in what a training program prints, for `kgorch adopt`."""

from __future__ import annotations

import ast
import itertools
import operator
import re
from collections.abc import Sequence

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


def step_and_loss(tree: ast.Module) -> tuple[str, str]:
    """Regular expressions for the step and the loss, from the texts that the program puts together.

    A text with both goes first, then what is printed, then what does not speak of a validation. Of a program that prints no step
    the epochs are its steps.
    """
    said = {
        part
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and called_name(node) in _SAYS
        for part in ast.walk(node)
    }
    steps, losses = list[tuple[tuple[int, ...], str]](), list[tuple[tuple[int, ...], str]]()
    for node in ast.walk(tree):
        parts = _parts(node)
        if _is_name_of_file(parts):
            continue
        before, step, loss = "", list[tuple[int, str]](), list[tuple[bool, str]]()
        for number, text in enumerate(parts[:-1]):
            if not isinstance(text, str) or isinstance(value := parts[number + 1], str):
                continue
            before += text
            if match := _STEP.search(text):
                total = parts[number + 2 : number + 3] == ["/"] and parts[number + 3 : number + 4]
                counts = [_GROUPED_COUNT if one else _COUNT for one in (value, *(total or ()))]
                kind = next(place for place, name in enumerate(_KINDS) if name in match[1].lower())
                step.append((kind, _fixed(match[0]) + r"\s*/".join(counts)))
            if match := _LOSS.search(text):
                is_other = bool(_VALIDATION.search(before))
                loss.append((is_other, r"\b" + _fixed(match[0]) + r"\s*" + NUMBER))
        rank = not (step and loss), node not in said
        steps += [((_KINDS[kind] == "epoch", *rank, kind), found) for kind, found in step]
        losses += [((is_other, *rank), found) for is_other, found in loss]
    chosen = (min(found, key=operator.itemgetter(0), default=((), "")) for found in (steps, losses))
    return next(chosen)[1], next(chosen)[1]


def _fixed(text: str) -> str:
    return re.escape(text).replace(r"\ ", " ")


def _parts(node: ast.AST) -> list[str | bool]:
    """The fixed parts of a text that is put together, and between them for each value whether thousands are separated by commas;
    [] for any other expression."""
    match node:
        case ast.JoinedStr(values=values):
            return [
                str(part.value)
                if isinstance(part, ast.Constant)
                else isinstance(part, ast.FormattedValue) and "," in ast.unparse(part.format_spec or ast.Constant(""))
                for part in values
            ]
        case ast.BinOp(left=ast.Constant(value=str(text)), op=ast.Mod()):
            return _split(_PERCENT, text)
        case ast.Call(func=ast.Attribute(value=ast.Constant(value=str(text)), attr="format")):
            return _split(_BRACES, text)
        case ast.Call(args=[ast.Constant(value=str(text)), _, *_]) if called_name(node) in _SAYS and "%" in text:
            return _split(_PERCENT, text)
        case ast.Call(args=[_, _, *_] as words) if called_name(node) == "print":
            return [f"{word.value!s} " if isinstance(word, ast.Constant) else False for word in words]
    return []


def _split(values: re.Pattern[str], text: str) -> list[str | bool]:
    first, *pieces = values.split(text)
    kinds = [":" in value and "," in value for value in values.findall(text)]
    return [first, *itertools.chain.from_iterable(zip(kinds, pieces, strict=True))]


def _is_name_of_file(parts: Sequence[str | bool]) -> bool:
    """As f"out/step-{step}.pt": nobody prints it alone."""
    texts = [text for text in parts if isinstance(text, str)]
    return not any(re.search(r"\s", text) for text in texts) and bool(texts and re.search(r"\.[a-z]\w*$", texts[-1]))
