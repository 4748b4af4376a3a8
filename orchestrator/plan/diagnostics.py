"""Validation of a TOML document, and its problems in the terms of TOML: file, line, key, what was expected, what was found.

pydantic reports in its own terms ("Input should be a valid list", "union_tag_invalid"), which mean nothing to somebody who
wrote a text file. Its errors are therefore taken for their type and position alone, and worded anew here.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import PydanticCustomError

from kgorch.core.text import in_one_line
from kgorch.errors import nearest
from kgorch.plan.keys import explain_unknown, table_below
from kgorch.plan.quantities import INVALID_NAME
from kgorch.plan.toml_document import DocumentKind, Key, KeyPath, TomlDocument
from kgorch.plan.toml_lines import lines_of
from kgorch.plan.toml_values import format_value

MAX_PROBLEMS = 8
"""Problems of one file that are reported at once: one mistake, as a wrong bracket, can cause many."""

MAX_MESSAGE = 400
"""Characters of a validator's message that are shown."""

PROBLEM_AT = "problem_at"
"""pydantic's type of the errors that `problem_at` makes."""

Model = TypeVar("Model", bound=BaseModel)


def validate(model: type[Model], document: TomlDocument, kind: DocumentKind) -> Model:
    """Turn a document into a model.

    Raises: `kind.error` with one line for each problem, at most `MAX_PROBLEMS`.
    """
    article = "an" if kind.noun[0] in "aeiou" else "a"
    try:
        return model.model_validate(document.values)
    except ValidationError as error:
        problems = list(problems_of(error, document.values, model))
        try:
            lines = lines_of(document.text)
        except RecursionError:  # nested nearly as deeply as tomllib allows: no line numbers then
            lines = {}
        facts = [problem.describe(document, lines) for problem in problems[:MAX_PROBLEMS]]
        if len(problems) > MAX_PROBLEMS:
            facts.append(f"and {len(problems) - MAX_PROBLEMS} more")
        key = next((problem.known_key for problem in problems if problem.known_key), "")
        raise kind.error(
            f"{document.name} is not {article} {kind.noun}",
            *facts,
            next_step=kind.if_invalid.format(key=key).rstrip(),
        ) from None
    except RecursionError:
        raise kind.error(
            f"{document.name} is nested too deeply", next_step="write it with fewer levels of nested tables"
        ) from None


def problem_at(text: str, path: KeyPath = ()) -> PydanticCustomError:
    """A problem that the validator of a table found at one of its keys; to be raised there.

    Args:
        text: the whole message; no "found …" is added.
        path: of the key, from that table on.
    """
    return PydanticCustomError(PROBLEM_AT, "{text}", {"text": text, "path": path})


@dataclass(frozen=True, slots=True)
class Problem:
    """One mistake in a document.

    Attributes:
        path (KeyPath): where it is.
        label (str): the same as a user writes it, `stage.train.ranks`.
        text (str): what was expected there, and what was found.
        known_key (str): nearest key that the model has, dotted and without the names of stages; empty for none.
    """

    path: KeyPath
    label: str
    text: str
    known_key: str

    def describe(self, document: TomlDocument, lines: Mapping[KeyPath, int]) -> str:
        """`plan.toml:7: session.wal: unknown key …`, or `--set session.wal=3s: …` for a value that was given so."""
        for path, argument in document.overrides.items():
            if self.path[: len(path)] == path or (self.path and path[: len(self.path)] == self.path):
                shown = argument.partition("=")[0] + "=…" if _may_be_secret(self.path) else argument
                return f"--set {in_one_line(shown):.200}: {self.label}: {self.text}"
        prefixes = (self.path[:end] for end in range(len(self.path), 0, -1))
        line = next((lines[path] for path in prefixes if path in lines), None)
        place = f"{document.name}:{line}" if line else document.name
        return f"{place}: {self.label}: {self.text}"


def problems_of(error: ValidationError, values: Mapping[str, Any], model: type[BaseModel]) -> Iterator[Problem]:
    """The problems in the order of the model's fields.

    pydantic reports each branch of a union ("auto" or a number) by itself; those at one path are one problem here.
    """
    by_path: dict[KeyPath, list[Any]] = {}
    for item in error.errors(include_url=False):
        below = item["ctx"]["path"] if item["type"] == PROBLEM_AT else ()
        path = _path_of(item["loc"], values, model) + tuple(below)
        by_path.setdefault(path, []).append(item)
    inherited = {path for path in by_path if _is_inherited(path, values)}
    for path, items in by_path.items():
        if path in inherited and len(inherited) < len(by_path):
            continue  # reported once, at the stage that gives the value
        known_key = ".".join(key for key in path if isinstance(key, str))
        if any(item["type"] == "extra_forbidden" for item in items):
            text, known_key = explain_unknown(path, values, model)
        else:
            text = _expectation(path, items, values)
        yield Problem(path, label_of(path, values), text, known_key)


def _path_of(location: Sequence[Key], values: Any, model: type[BaseModel]) -> KeyPath:
    """pydantic's location of an error without the parts that name branches of unions: they are no keys of the document."""
    path: list[Key] = []
    at: Any = values
    table: type[BaseModel] | None = model
    for number, part in enumerate(location):
        is_last = number == len(location) - 1
        if part in at if isinstance(at, Mapping) else isinstance(at, list) and part in range(len(at)):
            at = at[part]
        elif table is not None and part in table.model_fields and (isinstance(at, Mapping) or is_last):
            at = None  # a missing key
        else:
            continue
        path.append(part)
        if isinstance(part, str):
            table = table_below(table, part)
    return tuple(path)


def _is_inherited(path: KeyPath, values: Mapping[str, Any]) -> bool:
    """Whether the value at `path` is one that a quick test inherits from the stage that it tests."""
    if len(path) < 3 or path[0] != "stage" or not isinstance(path[1], int):
        return False
    stage = values["stage"][path[1]]
    if not isinstance(stage, Mapping) or "quick_test_of" not in stage:
        return False
    args = stage.get("args")
    if path[2] == "args" and len(path) > 3 and isinstance(args, Mapping):
        return path[3] not in args  # arguments are inherited one by one
    return path[2] not in stage


def label_of(path: KeyPath, values: Mapping[str, Any]) -> str:
    """The path as --set takes it, `stage.train.args.lr`; a stage without a usable name by its number: `stage 2: name`."""
    if not path:
        return "the whole file"
    stages = values.get("stage")
    if path[0] != "stage" or len(path) < 2 or not isinstance(path[1], int) or not isinstance(stages, list):
        return ".".join(str(part) for part in path)
    number, rest = path[1], ".".join(str(part) for part in path[2:])
    names = [stage.get("name") if isinstance(stage, Mapping) else None for stage in stages]
    name = names[number] if number < len(names) else None
    if isinstance(name, str) and re.fullmatch(r"[\w.-]{1,64}", name) and names.count(name) == 1:
        return f"stage.{name}" + (f".{rest}" if rest else "")
    return f"stage {number + 1}" + (f": {rest}" if rest else "")


def _may_be_secret(path: KeyPath) -> bool:
    """Whether the value may be a password or a token, which no error shows: notification targets, mirror options, an address."""
    if path[:2] == ("track", "uri") or path == ("fleet", "database"):
        return True
    return "mirror_options" in path or (path[:1] == ("notify",) and path[1:2] != ("on",))


def _expectation(path: KeyPath, items: Sequence[Any], values: Mapping[str, Any]) -> str:
    """What was expected at `path` by all branches together, and what was found."""
    if any(item["type"] == "missing" for item in items):
        return "required key is missing"
    if text := _bracket_mistake(path, items):
        return text
    phrases = list(dict.fromkeys(_phrase(item) for item in items))
    expected = [phrase.removeprefix("expected ") for phrase in phrases if phrase.startswith("expected ")]
    parts = [phrase for phrase in phrases if not phrase.startswith("expected ")]
    if expected:
        parts.insert(0, "expected " + _alternatives(expected))
    text = "; ".join(parts)
    value = _value_at(values, path)
    is_complete = any(item["type"] in (PROBLEM_AT, "recursion_loop") for item in items)
    if _may_be_secret(path) or is_complete or value is _ABSENT:
        return text
    text += f"; found {format_value(value)}"
    if isinstance(value, str) and any(item["type"] == INVALID_NAME for item in items):
        similar = _similar_name(value)
        text += f" (for example {format_value(similar)})" if similar not in ("", value) else ""
    return text


def _bracket_mistake(path: KeyPath, items: Sequence[Any]) -> str | None:
    """Single brackets for double ones and the other way round: the mistake that TOML makes easy. None for another one."""
    kinds, value = {item["type"] for item in items}, items[0]["input"]
    name = ".".join(str(part) for part in path)
    if path == ("stage",) and "list_type" in kinds:
        if isinstance(value, dict) and value and all(isinstance(inner, dict) for inner in value.values()):
            first = next(iter(value))
            return (
                "every stage is a table in double brackets: "
                f'write [[stage]] and name = "{first}" instead of [stage.{first}]'
            )
        return "every stage is a table in double brackets: write [[stage]] instead of [stage]"
    if path == ("stage",) and "too_short" in kinds:
        return "expected at least one [[stage]]"
    is_array_of_tables = isinstance(value, list) and bool(value) and all(isinstance(inner, dict) for inner in value)
    if kinds & {"model_type", "dict_type"} and is_array_of_tables and len(path) == 1:
        return f"expected a single table: write [{name}] instead of [[{name}]]"
    return None


def _alternatives(texts: Sequence[str]) -> str:
    return texts[0] if len(texts) == 1 else f"{', '.join(texts[:-1])} or {texts[-1]}"


def _phrase(item: Mapping[str, Any]) -> str:
    """What one branch of pydantic's expected, or the message of one of our own validators."""
    kind, context = item["type"], item.get("ctx", {})
    if kind in (PROBLEM_AT, INVALID_NAME):
        return str(context["text"])
    if kind in ("value_error", "assertion_error"):
        message = str(context.get("error", item["msg"]))
        return message if len(message) <= MAX_MESSAGE else message[: MAX_MESSAGE - 1] + "…"
    if kind in _BOUNDS:
        word, key = _BOUNDS[kind]
        bound = context[key]
        return f"expected a number {word} {f'{bound:g}' if isinstance(bound, float) else bound}"
    if kind == "literal_error":
        # the context holds the choices as one text, "'a', 'b' or 'c'"
        choices = re.findall(r"'([^']*)'", str(context["expected"]))
        similar = nearest(item["input"], choices, cutoff=0.7) if isinstance(item["input"], str) else ""
        return "expected " + _alternatives([json.dumps(choice) for choice in choices]) + similar
    if kind in ("too_short", "too_long", "string_too_short", "string_too_long"):
        unit = "characters" if kind.startswith("string") else "entries"
        count = context["min_length" if "short" in kind else "max_length"]
        if kind == "string_too_short" and count == 1:
            return "expected a string that is not empty"
        return f"expected {'at least' if 'short' in kind else 'at most'} {count} {unit}"
    return "expected " + _EXPECTED.get(kind, "another value")


# pydantic's error type → how the bound is worded, and its key in the error's context
_BOUNDS = {
    "greater_than": ("above", "gt"),
    "greater_than_equal": ("of at least", "ge"),
    "less_than": ("below", "lt"),
    "less_than_equal": ("of at most", "le"),
}

# pydantic's error type → what was expected. Of its some hundred types these are what the models' field types can raise
_EXPECTED = {
    "string_type": "a string in quotes",
    "string_sub_type": "a string in quotes",
    "string_unicode": "a string in UTF-8",
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "int_parsing": "a whole number",
    "int_parsing_size": "a smaller whole number",
    "float_type": "a number",
    "float_parsing": "a number",
    "finite_number": "a number that is not nan or inf",
    "bool_type": "true or false",
    "bool_parsing": "true or false",
    "list_type": "a list in square brackets",
    "dict_type": "a table",
    "mapping_type": "a table",
    "model_type": "a table",
    "recursion_loop": "fewer levels of nested tables",
}


def _similar_name(text: str) -> str:
    """The text with what no name may have replaced; empty where nothing of it can stay."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", text.strip()).strip("-._")[:64]


class _Absent:
    pass


_ABSENT = _Absent()


def _value_at(values: Any, path: KeyPath) -> Any:
    """The value at `path`; `_ABSENT` where the document has none."""
    for part in path:
        try:
            values = values[part]
        except (KeyError, IndexError, TypeError):
            # a short form of a table, `weights = "n.pt"`, is the value of each key in it
            return _ABSENT if isinstance(values, Mapping | list) else values
    return values
