"""A TOML file that a person wrote: read within bounds, and its problems told by file, line and key in the words of TOML.

pydantic says what is wrong in its own terms ("Input should be a valid list", "union_tag_invalid"), which mean nothing to
somebody who wrote a text file, and tomllib keeps no positions. So the places of keys are found here by a second, small reading.
"""

from __future__ import annotations

import errno
import json
import os
import re
import stat
import tomllib
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import date, datetime, time
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import PydanticCustomError

from orchestrator.errors import KgorchError, nearest

LARGEST = 1 << 20
"""Bytes of a plan or a configuration. A plan of a hundred stages takes 30 kB; what is larger is another file."""

SHOWN = 8
"""Problems of one file that are told at once."""

Key = str | int
Place = tuple[Key, ...]
Read = TypeVar("Read", bound=BaseModel)


def read(path: Path, what: str, refusal: type[KgorchError], *, next_step: str) -> str:
    """The text of a file that a person named.

    It is opened so that a FIFO or a device does not block, and at most `LARGEST` bytes are read.

    Args:
        what: what it should be: "plan", "configuration".
        next_step: what to type where the file cannot be mended by itself.
    Raises: `refusal`; FileNotFoundError where nothing has that name.
    """
    if path.suffix == ".py" and what == "plan":
        raise refusal(
            f"{path} is a Python script, not a plan",
            'a plan is a TOML file that names the script: entry = "train.py"',
            next_step=next_step,
        )
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
    except FileNotFoundError:
        raise
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else str(error)
        code = error.errno if isinstance(error, OSError) else None
        hint = {errno.EACCES: "let your account read it: chmod u+r", errno.ENXIO: f"give the {what}'s file itself"}
        raise refusal(f"the {what} {path} cannot be read", str(why), next_step=hint.get(code or 0, next_step)) from None
    try:
        kind = os.fstat(descriptor)
        if not stat.S_ISREG(kind.st_mode):
            raise refusal(f"the {what} {path} is {_kind(kind.st_mode)}, not a file", next_step=_inside(path, next_step))
        content = b""
        if kind.st_size <= LARGEST:
            while len(content) <= LARGEST and (block := os.read(descriptor, LARGEST + 1 - len(content))):
                content += block
        if kind.st_size > LARGEST or len(content) > LARGEST:
            raise refusal(
                f"{path} is too large for a {what}",
                f"expected at most {LARGEST >> 20} MiB of text, found {max(kind.st_size, len(content))} bytes",
                next_step=next_step,
            )
    except OSError as error:
        raise refusal(f"the {what} {path} cannot be read", str(error.strerror), next_step=next_step) from None
    finally:
        os.close(descriptor)
    return _decoded(content, path, refusal)


def _decoded(content: bytes, path: Path, refusal: type[KgorchError]) -> str:
    """UTF-8, with or without the mark that Windows editors put before it."""
    if content[:2] in (b"\xff\xfe", b"\xfe\xff"):
        raise refusal(f"{path} is UTF-16, expected UTF-8", next_step="save it as UTF-8 in your editor")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise refusal(
            f"{path}:{line}: byte 0x{content[error.start]:02x} is not UTF-8, which TOML files are",
            next_step="save it as UTF-8 in your editor (it looks like Latin-1 or Windows-1252)",
        ) from None


def _kind(mode: int) -> str:
    kinds = (
        (stat.S_ISDIR, "a folder"),
        (stat.S_ISFIFO, "a pipe (FIFO)"),
        (stat.S_ISCHR, "a device"),
        (stat.S_ISBLK, "a device"),
        (stat.S_ISSOCK, "a socket"),
    )
    return next((name for is_kind, name in kinds if is_kind(mode)), "something else")


def _inside(path: Path, otherwise: str) -> str:
    """Of a folder that was named instead of its plan."""
    inside = path / "plan.toml"
    return f"name the file in it: {inside}" if inside.is_file() else otherwise


def parsed(text: str, where: str, refusal: type[KgorchError]) -> dict[str, Any]:
    """Raises: `refusal`."""
    try:
        return tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        said = str(error) or "nested too deep"
        lines = text.splitlines()
        at = re.search(r" \(at (?:line (\d+), column (\d+)|end of document)\)$", said)
        facts = [said]
        if at:
            line = int(at[1] or max(len(lines), 1))
            where_in_it = f", column {at[2]}" if at[2] else ", at the end"
            facts = [f"{where}:{line}: {said[: at.start()]}{where_in_it}"]
            facts += [f"  {_plain(lines[line - 1].strip())[:100]}"] if line <= len(lines) else []
        raise refusal(
            f"{where} is not TOML",
            *facts,
            next_step="correct that line; text stands in quotes, a table's name in brackets (https://toml.io)",
        ) from None


def _plain(text: str) -> str:
    return "".join(letter if letter.isprintable() else "?" for letter in text)


def misplaced(text: str, at: Place = ()) -> PydanticCustomError:
    """A problem that a validator of a whole table found, at a key below it."""
    return PydanticCustomError("misplaced", "{text}", {"text": text, "at": at})


def validated(
    model: type[Read],
    document: dict[str, Any],
    text: str,
    where: str,
    refusal: type[KgorchError],
    *,
    what: str,
    next_step: str,
    overrides: Mapping[Place, str] = {},
) -> Read:
    """The document as a `model`.

    Args:
        text: what it was read from, for the numbers of lines.
        overrides: which of its values do not come from the file, as they were typed.
        next_step: what to type; `{key}` in it becomes the first key that is wrong, as the plan has it.
    Raises: `refusal` with a line for each problem.
    """
    try:
        return model.model_validate(document)
    except ValidationError as error:
        found = list(problems(error, document, model))
        try:
            lines = lines_of(text)
        except RecursionError:
            lines = {}
        facts = [problem.said(where, lines, overrides) for problem in found[:SHOWN]]
        if len(found) > SHOWN:
            facts.append(f"and {len(found) - SHOWN} more")
        key = next((problem.known for problem in found if problem.known), "")
        raise refusal(f"{where} is not {what}", *facts, next_step=next_step.format(key=key).rstrip()) from None
    except RecursionError:
        raise refusal(f"{where} is nested too deep", next_step="write it with fewer tables in tables") from None


class Problem:
    """One mistake: where it is, what was expected there, what stands there."""

    def __init__(self, place: Place, shown: str, text: str, known: str) -> None:
        self.place, self.shown, self.text = place, shown, text
        self.known = known
        """The nearest key that the plan knows, dotted and without the names of stages; empty for none."""

    def said(self, where: str, lines: Mapping[Place, int], overrides: Mapping[Place, str]) -> str:
        """`plan.toml:7: session.wal: unknown key …`, or `--set session.wal=3s: …`."""
        for place, typed in overrides.items():
            if self.place[: len(place)] == place or (self.place and place[: len(self.place)] == self.place):
                given = typed.partition("=")[0] + "=…" if _is_secret(self.place) else typed
                return f"--set {_plain(given):.200}: {self.shown}: {self.text}"
        at = next((lines[self.place[:end]] for end in range(len(self.place), 0, -1) if self.place[:end] in lines), None)
        return f"{where}:{at}: {self.shown}: {self.text}" if at else f"{where}: {self.shown}: {self.text}"


def problems(error: ValidationError, document: Mapping[str, Any], root: type[BaseModel]) -> Iterator[Problem]:
    """The mistakes in the order of the file's model; the branches of one alternative are one mistake."""
    at_place: dict[Place, list[Any]] = {}
    for item in error.errors(include_url=False):
        place = _place(item["loc"], document, root) + tuple(item.get("ctx", {}).get("at", ()))
        at_place.setdefault(place, []).append(item)
    inherited = {place for place in at_place if _is_inherited(place, document)}
    for place, items in at_place.items():
        if place in inherited and len(inherited) < len(at_place):
            continue  # told already of the stage that it was taken over from
        shown = dotted(place, document)
        known = ".".join(key for key in place if isinstance(key, str))
        if any(item["type"] == "extra_forbidden" for item in items):
            text, known = _unknown(place, document, root)
        else:
            text = _expected(place, items, document, root)
        yield Problem(place, shown, text, known)


def _place(loc: Sequence[Key], document: Any, root: type[BaseModel]) -> Place:
    """Where a problem is: pydantic's path without its names of the branches of alternatives."""
    place: list[Key] = []
    at: Any = document
    model: type[BaseModel] | None = root
    for number, part in enumerate(loc):
        is_last = number == len(loc) - 1
        if part in at if isinstance(at, Mapping) else isinstance(at, list) and part in range(len(at)):
            at = at[part]
        elif model is not None and part in model.model_fields and (isinstance(at, Mapping) or is_last):
            at = None
        else:
            continue
        place.append(part)
        if isinstance(part, str):
            model = _model_below(model, part)
    return tuple(place)


def _is_inherited(place: Place, document: Mapping[str, Any]) -> bool:
    """Whether it is a value that a quick test takes over from another stage."""
    if len(place) < 3 or place[0] != "stage" or not isinstance(place[1], int):
        return False
    stage = document["stage"][place[1]]
    if not isinstance(stage, Mapping) or "quick_test_of" not in stage:
        return False
    given = stage.get("args")
    if place[2] == "args" and len(place) > 3 and isinstance(given, Mapping):
        return place[3] not in given  # arguments are taken over one by one
    return place[2] not in stage


def dotted(place: Place, document: Mapping[str, Any]) -> str:
    """`stage.train.args.lr`, as --set takes it; a stage without a usable name by its number: `stage 2: name`."""
    if not place:
        return "the whole file"
    stages = document.get("stage")
    if place[0] != "stage" or len(place) < 2 or not isinstance(place[1], int) or not isinstance(stages, list):
        return ".".join(str(part) for part in place)
    number, rest = place[1], ".".join(str(part) for part in place[2:])
    names = [stage.get("name") if isinstance(stage, Mapping) else None for stage in stages]
    name = names[number] if number < len(names) else None
    if isinstance(name, str) and re.fullmatch(r"[\w.-]{1,64}", name) and names.count(name) == 1:
        return f"stage.{name}" + (f".{rest}" if rest else "")
    return f"stage {number + 1}" + (f": {rest}" if rest else "")


# What was expected


def _is_secret(place: Place) -> bool:
    """Whether what stands there may be a password or a token, which no error shows."""
    return "mirror_options" in place or (place[:1] == ("notify",) and place[1:2] != ("on",))


def _expected(place: Place, items: Sequence[Any], document: Mapping[str, Any], root: type[BaseModel]) -> str:
    if any(item["type"] == "missing" for item in items):
        return "missing; it must be given"
    if shape := _misshapen(place, items):
        return shape
    phrases = list(dict.fromkeys(_phrase(item) for item in items))
    wanted = [phrase.removeprefix("expected ") for phrase in phrases if phrase.startswith("expected ")]
    said = [phrase for phrase in phrases if not phrase.startswith("expected ")]
    if wanted:
        said.insert(0, "expected " + _either(wanted))
    text = "; ".join(said)
    value = _at(document, place)
    is_told = any(item["type"] in ("misplaced", "recursion_loop") for item in items)
    if _is_secret(place) or is_told or value is _NOTHING:
        return text
    text += f"; found {shown(value)}"
    fitting = _as_name(value) if isinstance(value, str) and "letters, digits" in text else ""
    if fitting and fitting != value:
        text += f" (for example {shown(fitting)})"
    return text


def _misshapen(place: Place, items: Sequence[Any]) -> str | None:
    """Single for double brackets and the other way round, the mistake that TOML makes easy."""
    kinds, value = {item["type"] for item in items}, items[0]["input"]
    name = ".".join(str(part) for part in place)
    if place == ("stage",) and "list_type" in kinds:
        if isinstance(value, dict) and value and all(isinstance(inner, dict) for inner in value.values()):
            first = next(iter(value))
            return (
                f'every stage is a table in double brackets: write [[stage]] and name = "{first}" for [stage.{first}]'
            )
        return "every stage is a table in double brackets: write [[stage]] for [stage]"
    if place == ("stage",) and "too_short" in kinds:
        return "expected at least one [[stage]]"
    is_list = isinstance(value, list) and bool(value) and all(isinstance(inner, dict) for inner in value)
    if kinds & {"model_type", "dict_type"} and is_list and len(place) == 1:
        return f"there is one table of that name: write [{name}] for [[{name}]]"
    return None


def _either(wanted: Sequence[str]) -> str:
    return wanted[0] if len(wanted) == 1 else f"{', '.join(wanted[:-1])} or {wanted[-1]}"


def _phrase(item: Mapping[str, Any]) -> str:
    """What one branch of pydantic's expected, or what a validator of ours said."""
    kind, context = item["type"], item.get("ctx", {})
    if kind == "misplaced":
        return str(context["text"])
    if kind in ("value_error", "assertion_error"):
        said = str(context.get("error", item["msg"]))
        return said if len(said) <= 400 else said[:399] + "…"
    if kind in _BOUNDS:
        word, key = _BOUNDS[kind]
        return f"expected a number {word} {_number(context[key])}"
    if kind == "literal_error":
        choices = re.findall(r"'([^']*)'", str(context["expected"]))
        near = nearest(item["input"], choices, cutoff=0.7) if isinstance(item["input"], str) else ""
        return "expected " + _either([json.dumps(choice) for choice in choices]) + near
    if kind in ("too_short", "too_long", "string_too_short", "string_too_long"):
        of = "characters" if kind.startswith("string") else "entries"
        count = context["min_length" if "short" in kind else "max_length"]
        if kind == "string_too_short" and count == 1:
            return "expected text that is not empty"
        return f"expected {'at least' if 'short' in kind else 'at most'} {count} {of}"
    return "expected " + _KINDS.get(kind, "another value")


_BOUNDS = {
    "greater_than": ("above", "gt"),
    "greater_than_equal": ("of at least", "ge"),
    "less_than": ("below", "lt"),
    "less_than_equal": ("of at most", "le"),
}

_KINDS = {
    "string_type": "text in quotes",
    "string_sub_type": "text in quotes",
    "string_unicode": "text in UTF-8",
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
    "recursion_loop": "fewer tables in tables",
}


def _number(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _as_name(text: str) -> str:
    """The nearest text that may be a name; empty for none."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", text.strip()).strip("-._")[:64]


class _Nothing:
    pass


_NOTHING = _Nothing()


def _at(document: Any, place: Place) -> Any:
    for part in place:
        try:
            document = document[part]
        except (KeyError, IndexError, TypeError):
            return _NOTHING if isinstance(document, Mapping | list) else document  # a short form of a table
    return document


def shown(value: Any) -> str:
    """A value as TOML has it, cut to a line."""
    text = _toml(value, 0)
    return text if len(text) <= 60 else text[:57] + "…"


def _toml(value: Any, depth: int) -> str:
    if depth > 4:
        return "…"
    match value:
        case bool():
            return "true" if value else "false"
        case str():
            return json.dumps(value[:80], ensure_ascii=False) if _plain(value) == value else ascii(value[:80])
        case date() | datetime() | time():
            return value.isoformat()
        case list():
            return "[" + ", ".join(_toml(item, depth + 1) for item in value[:10]) + "]"
        case dict():
            inner = ", ".join(f"{_plain(str(key))} = {_toml(item, depth + 1)}" for key, item in [*value.items()][:10])
            return f"{{ {inner} }}" if inner else "{}"
        case int() if abs(value) >= 10**60:
            return "a number of more than 60 digits"
    return str(value)


# Unknown keys


def _unknown(place: Place, document: Mapping[str, Any], root: type[BaseModel]) -> tuple[str, str]:
    """What to say of a key that nothing has, and the key that was meant."""
    key, above = str(place[-1]), place[:-1]
    model = _model_at(root, above)
    known = list(model.model_fields) if model else []
    prefix = "".join(f"{part}." for part in above if isinstance(part, str))
    listed = f"; known here: {', '.join(known)}"
    if near := _near(key, known):
        return f"unknown key (did you mean '{near}'?){listed}", prefix + near
    if elsewhere := next((path for path in keys(root) if path.split(".")[-1] == key), None):
        place_of_it = ", which stands above the first [table]" if "." not in elsewhere else ""
        return f"unknown key (did you mean '{elsewhere}'{place_of_it}?){listed}", elsewhere
    stages = document.get("stage")
    for stage in stages if isinstance(stages, list) else ():
        args = stage.get("args") if isinstance(stage, Mapping) else None
        if isinstance(args, Mapping) and key in args:
            return f"unknown key (did you mean 'stage.{stage.get('name')}.args.{key}'?){listed}", "stage.args"
    if place[:1] == ("stage",) and len(place) == 3:
        return (
            f"unknown key{listed}; an argument of the training goes into args = {{ {_plain(key)} = … }}",
            "stage.args",
        )
    return f"unknown key{listed}", prefix.removesuffix(".")


def _near(key: str, known: Iterable[str]) -> str:
    """Of the known keys the nearest; empty for none."""
    found = re.search(r"'(.*)'", nearest(key, known))
    return found[1] if found else ""


def keys(root: type[BaseModel], above: str = "") -> Iterator[str]:
    """Every key of a model, dotted, tables before what is in them."""
    for name, field in root.model_fields.items():
        yield above + name
        if inner := _model_in(field):
            yield from keys(inner, f"{above}{name}.")


def _model_at(root: type[BaseModel], place: Place) -> type[BaseModel] | None:
    model: type[BaseModel] | None = root
    for part in place:
        if isinstance(part, str):
            model = _model_below(model, part)
    return model


def _model_below(model: type[BaseModel] | None, key: str) -> type[BaseModel] | None:
    field = model.model_fields.get(key) if model else None
    return _model_in(field) if field else None


def _model_in(field: FieldInfo) -> type[BaseModel] | None:
    """The table that a key holds, alone, in a list, or as one of several forms."""
    left: list[Any] = [field.annotation]
    while left:
        kind = left.pop()
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            return kind
        left += typing.get_args(kind)
    return None


# Where keys stand


_TOKENS = re.compile(
    r'"""(?:\\.|[^\\])*?"{3,5}' r"|'''.*?'{3,5}" r'|"(?:\\.|[^"\\\n])*"' r"|'[^'\n]*'" r"|\#[^\n]*|[\[\]{},=.\n]"
    r"""|[^\s\[\]{},=."'\#]+""",
    re.S,
)  # fmt: skip


def lines_of(text: str) -> dict[Place, int]:
    """The line of every key, table and entry of a list. `text` is TOML."""
    return _Scanner(text).places


class _Scanner:
    """Reads TOML that tomllib has taken, for the places of its keys alone."""

    def __init__(self, text: str) -> None:
        self.places: dict[Place, int] = {}
        self._tables: dict[Place, int] = {}
        self._tokens: list[tuple[str, int]] = []
        line, at = 1, 0
        for match in _TOKENS.finditer(text):
            line += text.count("\n", at, match.start())
            at = match.start()
            if not match[0].startswith("#"):
                self._tokens.append((match[0], line))
        self._next = 0
        header: Place = ()
        while (token := self._peek()) is not None:
            if token == "\n":
                self._take()
            elif token == "[":
                header = self._header()
            else:
                self._pair(header)

    def _peek(self) -> str | None:
        return self._tokens[self._next][0] if self._next < len(self._tokens) else None

    def _take(self) -> tuple[str, int]:
        self._next += 1
        return self._tokens[self._next - 1] if self._next <= len(self._tokens) else ("", 0)

    def _keys(self, end: str) -> tuple[list[str], int]:
        """A dotted key up to `end`, and its line."""
        found, line = list[str](), 0
        while self._peek() not in (None, end):
            token, at = self._take()
            line = line or at
            if token != ".":
                found.append(_unquoted(token))
        self._take()
        return found, line

    def _header(self) -> Place:
        self._take()
        is_list = self._peek() == "["
        if is_list:
            self._take()
        names, line = self._keys("]")
        if is_list:
            self._take()
        place: Place = ()
        for number, name in enumerate(names):
            place += (name,)
            if is_list and number == len(names) - 1:
                self._tables[place] = self._tables.get(place, -1) + 1
            if place in self._tables:
                self.places.setdefault(place, line)
                place += (self._tables[place],)
            self.places.setdefault(place, line)
        return place

    def _pair(self, table: Place) -> None:
        names, line = self._keys("=")
        place = table
        for name in names:
            place += (name,)
            self.places.setdefault(place, line)
        self._value(place)

    def _value(self, place: Place) -> None:
        token = self._peek()
        if token == "[":
            self._take()
            number = 0
            while (token := self._peek()) not in (None, "]"):
                if token in ("\n", ","):
                    number += token == ","
                    self._take()
                else:
                    self.places.setdefault((*place, number), self._tokens[self._next][1])
                    self._value((*place, number))
            self._take()
        elif token == "{":
            self._take()
            while (token := self._peek()) not in (None, "}"):
                if token in ("\n", ","):
                    self._take()
                else:
                    self._pair(place)
            self._take()
        else:
            while self._peek() not in (None, "\n", ",", "]", "}"):
                self._take()


def _unquoted(token: str) -> str:
    if token[:1] not in ('"', "'"):
        return token
    try:
        return next(iter(tomllib.loads(f"{token} = 0")))
    except tomllib.TOMLDecodeError:
        return token[1:-1]
