"""The names of a program and what they stand for, for `kgorch adopt`, as far as its source shows it.

Texts are followed through names, attributes, f-strings, os.path.join, pathlib and the parameters of the program's own functions and
methods, which are what a call gives, or else their defaults. What differs from save to save becomes `*`.
"""

from __future__ import annotations

import ast
import fnmatch
import functools
import itertools
import operator
import re
import string
from collections.abc import Callable, Iterator, Sequence, Set
from typing import Any, NamedTuple

MAX_DEPTH, MOST_LOOKS = 24, 1000
"""Limits of one search: names that are followed one through another, and expressions."""

MOST_LENGTH = 4096
"""Characters of a place. A longer one is none, and several of them together would fill the memory."""

MOST_CALLS = 8
"""Calls of a function, or assignments of a name, that are followed."""

DIFFERS = re.compile(r"[^/*]\*|\*[^/*]")
"""Of a path that differs from save to save, and is not merely unknown in one of its parts."""

UNKNOWN = object()
"""The value of an expression that hangs on more than the program's flags."""

_COMPARISONS: dict[type[ast.cmpop], Callable[[Any, Any], bool]] = {
    ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.Is: operator.is_, ast.IsNot: operator.is_not,
    ast.Lt: operator.lt, ast.LtE: operator.le, ast.Gt: operator.gt, ast.GtE: operator.ge,
}  # fmt: skip
_SAME_TEXT = ("str", "abspath", "expanduser", "fspath", "realpath", "open")
_JOINS = ("join", "Path", "PurePath")
_PERCENT = re.compile(r"%(?:\((\w+)\))?[-+ #0]*\d*(?:\.\d+)?[a-zA-Z]")
_TYPES = {"int": int, "str": str, "float": float, "bool": bool}


class _Assigned(NamedTuple):
    """Args: at: line and column. own: where the value has the very name that it is assigned to."""

    at: tuple[int, int]
    value: ast.expr
    own: list[ast.Name]


class ProgramNames:
    """Values of the program's names, as far as they are texts.

    Args:
        modules: names of the program's own modules, whose functions and classes are in the tree.

    Attributes:
        options: of argparse and click: the name of its value → the call that adds it.
        nodes: name → the first value that it gets, wherever that is.
        given: the values of flags on the command line.
    """

    def __init__(self, tree: ast.Module, words: Sequence[str], modules: Set[str] = frozenset()) -> None:
        self._modules = modules
        self.options: dict[str, ast.Call] = {}
        self.nodes: dict[str, ast.expr] = {}
        self._words, self._left, self._takes_rest = words, 0, False
        self._spellings: dict[str, str] = {}  # of options, as they are typed → the name of the value
        self._loops: set[tuple[ast.FunctionDef | None, str]] = set()  # what loops assign, by function and name
        self._attributes: dict[str, ast.expr] = {}
        self._returns: dict[ast.FunctionDef, list[ast.expr]] = {}
        self._inside = dict(_enclosing(tree, None))
        self._values: dict[tuple[ast.FunctionDef | None, str], list[_Assigned]] = {}  # by function and name
        self._parameters: dict[tuple[ast.FunctionDef | None, str], list[ast.expr]] = {}
        self._classes = {node.name: node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}
        methods = {item for node in self._classes.values() for item in node.body}
        functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
        self._functions = {node.name: node for node in functions if node not in methods}
        calls = []
        for node in ast.walk(tree):
            if isinstance(node, ast.Assign):
                for target in node.targets:
                    self._bind(target, node.value)
            elif isinstance(node, ast.NamedExpr) or (isinstance(node, ast.AnnAssign) and node.value is not None):
                self._bind(node.target, node.value)  # type: ignore[arg-type]
            elif isinstance(node, ast.For | ast.comprehension):
                match node.iter:
                    case ast.List(elts=[first, *_]) | ast.Tuple(elts=[first, *_]):  # of places
                        self._bind(node.target, first)
                    case _:
                        self._bind_loop(node.target)
            elif isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name):
                self._bind_added(node.target, node)
            elif isinstance(node, ast.withitem):
                match node:
                    case ast.withitem(context_expr=ast.Call(args=[path, *_]) as call, optional_vars=ast.Name() as file):
                        if called_name(call) == "open":
                            self._bind(file, path)
            elif isinstance(node, ast.Call):
                self._take_option(node)
                calls.append(node)
            elif isinstance(node, ast.Dict):  # of settings
                for key, value in zip(node.keys, node.values, strict=True):
                    if isinstance(key, ast.Constant) and isinstance(key.value, str):
                        self.nodes.setdefault(key.value, value)
        self.given = _given(words, self._spellings)
        for call in calls:
            for function in self.functions_called(call):
                for name, value in _arguments(function, call):
                    self._parameters.setdefault((function, name), []).append(value)
        for function in functions:
            for name, default in _defaults(function):
                self._parameters.setdefault((function, name), [default])

    def _bind(self, target: ast.expr, value: ast.expr) -> None:
        if isinstance(target, ast.Name):
            self.nodes.setdefault(target.id, value)
            own = _names_in(value).get(target.id, [])
            self._values.setdefault((self._inside.get(target), target.id), []).append(
                _Assigned((target.lineno, target.col_offset), value, own)
            )
        elif isinstance(target, ast.Attribute):
            self._attributes.setdefault(target.attr, value)
        elif isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
            for one, other in zip(target.elts, value.elts, strict=False):
                self._bind(one, other)

    def _bind_loop(self, target: ast.expr) -> None:
        for node in ast.walk(target):
            if isinstance(node, ast.Name):
                self._bind(node, ast.Constant(0))  # differs each time
                self._loops.add((self._inside.get(node), node.id))

    def _bind_added(self, target: ast.Name, node: ast.AugAssign) -> None:
        """As `name = name + value`."""
        before = ast.copy_location(ast.Name(target.id, ast.Load()), target)
        if (function := self._inside.get(target)) is not None:
            self._inside[before] = function
        self._bind(target, ast.BinOp(before, node.op, node.value))

    def _take_option(self, call: ast.Call) -> None:
        if called_name(call) not in ("add_argument", "option"):
            return
        spelled = spellings(call)
        dest = next((item.value for item in call.keywords if item.arg == "dest"), None)
        nargs = next((item.value for item in call.keywords if item.arg == "nargs"), None)
        if not spelled and (nargs is not None and ast.unparse(nargs).endswith(("REMAINDER", "'...'"))):
            self._takes_rest = True
        if spelled:
            name = _key(str(dest.value)) if isinstance(dest, ast.Constant) else _key(spelled[0])
            self.options.setdefault(name, call)
            self._spellings |= {word: name for word in spelled if word not in self._spellings}

    def rest(self) -> list[str]:
        """The last words of the command line, that an argument takes whatever they are (`nargs=argparse.REMAINDER`): no flag may
        stand behind them. Empty where the program has no such argument."""
        if not self._takes_rest:
            return []
        at = 0
        while at < len(self._words) and self._words[at].startswith("-"):
            option = self.options.get(self._spellings.get(self._words[at].partition("=")[0], ""))
            has_value = "=" not in self._words[at] and not (option and is_switch(option))
            at += 1 + has_value
        return list(self._words[at:])

    def functions_called(self, call: ast.Call) -> Iterator[ast.FunctionDef]:
        """The program's function that a call calls; of a class its __init__."""
        name, owners = "__init__", list[ast.ClassDef]()
        match call.func:
            case ast.Name(id=function) if function in self._functions:
                yield self._functions[function]
            case ast.Name(id=function) if function in self._classes:
                owners = [self._classes[function]]
            case ast.Attribute(value=ast.Name(id=owner) | ast.Attribute(attr=owner), attr=function) if (
                owner in self._modules
            ):
                if function in self._functions:
                    yield self._functions[function]
                owners = [self._classes[function]] if function in self._classes else []
            case ast.Attribute(value=ast.Name(id="self"), attr=name):
                owners = list(self._classes.values())
            case ast.Attribute(value=owner, attr=name):
                made = self.nodes.get(owner.id) if isinstance(owner, ast.Name) else owner
                if isinstance(made, ast.Call) and (made_by := called_name(made)) in self._classes:
                    owners = [self._classes[made_by]]
        for item in (item for owner in owners for item in owner.body):
            if isinstance(item, ast.FunctionDef) and item.name == name:
                yield item

    def text(self, node: ast.expr | None, depth: int = MAX_DEPTH) -> str:
        """The text of an expression; `*` for what is not known, or differs."""
        self._left = MOST_LOOKS if depth == MAX_DEPTH else self._left - 1
        if node is None or depth == 0 or self._left < 0:
            return "*"
        text = self._text(node, depth)
        return text if len(text) <= MOST_LENGTH else "*"

    def _text(self, node: ast.expr, depth: int) -> str:
        match node:
            case ast.Constant(value=str(value)):
                return value if value.isprintable() else "*"
            case ast.JoinedStr(values=values):
                return "".join(
                    self.text(part.value if isinstance(part, ast.FormattedValue) else part, depth - 1)
                    for part in values
                )
            case ast.Name(id=name) | ast.Attribute(attr=name):
                return self._named(name, depth, node)
            case ast.Subscript(value=ast.Attribute(attr="argv"), slice=ast.Constant(value=int(number))):
                return self._words[number - 1] if 0 < number <= len(self._words) else "*"
            case ast.Subscript(slice=ast.Constant(value=str(name))):
                return self._named(name, depth, node)
            case ast.BinOp(left=left, op=ast.Add(), right=right):
                return self.text(left, depth - 1) + self.text(right, depth - 1)
            case ast.BinOp(left=left, op=ast.Div(), right=right):
                return f"{self.text(left, depth - 1)}/{self.text(right, depth - 1)}"
            case ast.BinOp(left=left, op=ast.Mod(), right=right):
                return self._filled_in(_PERCENT.sub(_as_field, self.text(left, depth - 1)), right, depth)
            case ast.BoolOp(op=ast.Or(), values=values):
                return self._first_known(values, depth)
            case ast.IfExp(test=test, body=body, orelse=orelse):
                is_so = self.known(test)
                return self._first_known([body, orelse] if is_so is UNKNOWN else [body if is_so else orelse], depth)
            case ast.Call(func=ast.Attribute(value=owner, attr="format")):
                return self._filled_in(self.text(owner, depth - 1), node, depth)
            case ast.Call(func=ast.Attribute(value=owner, attr="joinpath"), args=arguments):
                return "/".join(self.text(argument, depth - 1) for argument in (owner, *arguments))
            case ast.Call(func=ast.Attribute(value=owner, attr="with_suffix"), args=[suffix]):
                return re.sub(r"\.[^./]*$", "", self.text(owner, depth - 1)) + self.text(suffix, depth - 1)
            case ast.Call(func=ast.Attribute(value=owner, attr="with_name"), args=[name]):
                return re.sub(r"[^/]*$", "", self.text(owner, depth - 1)) + self.text(name, depth - 1)
            case ast.Call(
                func=ast.Attribute(value=between, attr="join"), args=[ast.List(elts=parts) | ast.Tuple(elts=parts)]
            ):
                separator = between.value if isinstance(between, ast.Constant) else "/"  # of os.sep
                return str(separator).join(self.text(part, depth - 1) for part in parts)
            case ast.Call(args=[_, *_] as arguments) if called_name(node) in _JOINS:
                return "/".join(self.text(argument, depth - 1) for argument in arguments)
            case ast.Call(args=[argument, *_]) if called_name(node) in _SAME_TEXT:
                return self.text(argument, depth - 1)
            case ast.Call():
                functions = itertools.islice(self.functions_called(node), MOST_CALLS)
                returned = itertools.chain.from_iterable(map(self._returned, functions))
                return self._first_known([*itertools.islice(returned, MOST_CALLS)], depth)
        return "*"

    def _returned(self, function: ast.FunctionDef) -> list[ast.expr]:
        """What a function returns."""
        if function not in self._returns:
            self._returns[function] = [
                item.value for item in ast.walk(function) if isinstance(item, ast.Return) and item.value is not None
            ]
        return self._returns[function]

    def _first_known(self, values: Sequence[ast.expr], depth: int) -> str:
        """Of several texts, one that differs from save to save, or else the first that is known."""
        texts = [self.text(value, depth - 1) for value in values]
        return next(
            iter(sorted((text for text in texts if text != "*"), key=lambda text: not DIFFERS.search(text))), "*"
        )

    def _filled_in(self, text: str, values: ast.expr, depth: int) -> str:
        """A text with fields in braces, which become what a call of `format` or `%` gives; `*` for what is not there."""
        by_position, by_name, number = list[ast.expr](), dict[str | None, ast.expr](), itertools.count()
        match values:
            case ast.Call():
                by_position, by_name = values.args, {item.arg: item.value for item in values.keywords}
            case ast.Dict():
                by_name = {
                    getattr(key, "value", None): value for key, value in zip(values.keys, values.values, strict=True)
                }
            case _:
                by_position = values.elts if isinstance(values, ast.Tuple) else [values]
        filled = ""
        try:
            for literal, field, *_ in string.Formatter().parse(text):
                filled += literal
                if field is not None:
                    place = field if field else str(next(number))
                    given = by_position[int(place) :][:1] if place.isdecimal() else [by_name.get(place)]
                    filled += self.text(given[0] if given else None, depth - 1)
        except ValueError:  # it is no such text
            return "*"
        return filled

    def known(self, node: ast.expr, depth: int = MAX_DEPTH) -> Any:
        """The value of an expression of flags and constants; UNKNOWN for any other one."""
        if depth == 0:
            return UNKNOWN
        match node:
            case ast.Constant(value=value):
                return value
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                return UNKNOWN if (value := self.known(operand, depth - 1)) is UNKNOWN else not value
            case ast.BoolOp(op=op, values=values):
                found, decides = [self.known(value, depth - 1) for value in values], isinstance(op, ast.Or)
                if any(value is not UNKNOWN and bool(value) is decides for value in found):
                    return decides
                return UNKNOWN if any(value is UNKNOWN for value in found) else not decides
            case ast.Compare(left=left, ops=[op], comparators=[right]):
                one, other = self.known(left, depth - 1), self.known(right, depth - 1)
                try:
                    return UNKNOWN if one is UNKNOWN or other is UNKNOWN else _COMPARISONS[type(op)](one, other)
                except (TypeError, KeyError):
                    return UNKNOWN
            case ast.Call(func=ast.Name(id="isinstance"), args=[thing, ast.Name(id=name)]) if name in _TYPES:
                value = self.known(thing, depth - 1)
                return UNKNOWN if value is UNKNOWN else isinstance(value, _TYPES[name])
            case ast.Name(id=name) if assigned := self._values.get((self._inside.get(node), name)):
                first = assigned[0].value
                if isinstance(first, ast.Name | ast.Attribute) and all(_is_same(item, first) for item in assigned[1:]):
                    return self.known(first, depth - 1)
            case ast.Name(id=name) | ast.Attribute(attr=name) if name in self.options:
                other = self._attributes.get(name) if isinstance(node, ast.Attribute) else None
                return self._value_of_option(name) if other is None or _name_of(other) == name else UNKNOWN
        return UNKNOWN

    def _value_of_option(self, name: str) -> Any:
        if re.search(r"(^|_)rank$", name):
            return UNKNOWN  # a launcher sets it
        keywords = {item.arg: item.value for item in self.options[name].keywords}
        typed = [word.partition("=")[0] for word in self._words]
        is_there = any(self._spellings.get(word) == name for word in typed)
        action, absent = ast.unparse(keywords.get("action", ast.Constant(None))), None
        if is_switch(self.options[name]):
            if not re.search("store_true|store_false|BooleanOptionalAction|None", action):
                return UNKNOWN
            if f"--no-{name.replace('_', '-')}" in typed or f"--no_{name}" in typed:
                return False
            absent = "store_false" in action
            if is_there:
                return not absent
        try:
            if name in self.given:
                return _literal(self.given[name])
            return UNKNOWN if is_there or "required" in keywords else ast.literal_eval(keywords["default"])
        except KeyError:
            return absent
        except ValueError:
            return UNKNOWN

    def _named(self, name: str, depth: int, node: ast.expr) -> str:
        scope = self._inside.get(node), name
        is_assigned = isinstance(node, ast.Name) and scope in self._values
        # a program without options sets its variables by the flags
        if name in self.given and not (is_assigned and (name in self.options or scope in self._loops)):
            return self.given[name]
        if name in self.options and not is_assigned:
            default = next((item.value for item in self.options[name].keywords if item.arg == "default"), None)
            return self.text(default, depth - 1)
        if isinstance(node, ast.Attribute):
            return self.text(self._attributes.get(name) or self.nodes.get(name), depth - 1)
        function = self._inside.get(node) if isinstance(node, ast.Name) else None
        while isinstance(node, ast.Name):
            scope = function, name
            given = [self.text(value, depth - 1) for value in self._parameters.get(scope, ())[:MOST_CALLS]]
            # one of many checkpoints goes before the last one, and any before the best one
            given.sort(key=lambda text: (not DIFFERS.search(text), "best" in text.lower()))
            assigned = (self.text(value, depth - 1) for value in _newest_first(self._values.get(scope, ()), node))
            if texts := [*itertools.islice(assigned, MOST_CALLS), *given]:
                return _first_of([text for text in texts if text != "*"])
            if function is None:
                break
            function = self._inside.get(function)
        return self.text(self.nodes.get(name), depth - 1)


@functools.lru_cache(maxsize=1)  # of `a = b = … = value` it is asked for each target
def _names_in(value: ast.expr) -> dict[str, list[ast.Name]]:
    found: dict[str, list[ast.Name]] = {}
    for node in ast.walk(value):
        if isinstance(node, ast.Name):
            found.setdefault(node.id, []).append(node)
    return found


def _newest_first(assigned: Sequence[_Assigned], node: ast.Name) -> Iterator[ast.expr]:
    """What a name may stand for: what was assigned before it, the nearest first, then what is assigned behind it.

    In what is assigned to its own name (`path = join(folder, path)`) it is what it was before.
    """
    others = sorted((item for item in assigned if node not in item.own), key=operator.attrgetter("at"))
    here = node.lineno, node.col_offset
    yield from (item.value for item in reversed(others) if item.at < here)
    if len(others) == len(assigned):  # else it is what it was before, and no assignment behind it
        yield from (item.value for item in others if item.at >= here)


def spellings(option: ast.Call) -> list[str]:
    """An option as it may be typed, the long ways first; of click's `--resume/--no-resume` the first."""
    words = [str(item.value).partition("/")[0] for item in option.args if isinstance(item, ast.Constant)]
    return sorted((word for word in words if word.startswith("-")), key=lambda word: not word.startswith("--"))


def is_switch(option: ast.Call) -> bool:
    """Whether an option takes no value."""
    is_click = any(isinstance(item, ast.Constant) and "/" in str(item.value) for item in option.args)
    return is_click or any(item.arg in ("action", "is_flag") for item in option.keywords)


def _first_of(texts: Sequence[str]) -> str:
    """The first. Of one that becomes another where it is taken (`exp`, then `exp2`) that part is any: it differs by the run, and
    not from save to save."""
    first = next(iter(texts), "*")
    others = (text for text in texts if text != first and DIFFERS.search(text) and fnmatch.fnmatchcase(first, text))
    if (other := next(others, "")) and not DIFFERS.search(first):
        return "/".join("*" if DIFFERS.search(part) else part for part in other.split("/"))
    return first


def _is_same(assigned: _Assigned, first: ast.expr) -> bool:
    """Whether a name gets what it had, as a number: `steps = int(steps)`."""
    match assigned.value:
        case ast.Call(func=ast.Name(id="int" | "float" | "str"), args=[one]):
            return _name_of(one) == _name_of(first)
    return False


def _as_field(percent: re.Match[str]) -> str:
    return "{" + (percent[1] or "") + "}"


def _name_of(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def _key(word: str) -> str:
    return word.lstrip("-+").replace("-", "_")


def _literal(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def called_name(call: ast.Call) -> str:
    """The name of what is called, without its owner; empty for what has none."""
    function = call.func
    return (
        function.attr if isinstance(function, ast.Attribute) else function.id if isinstance(function, ast.Name) else ""
    )


def _enclosing(node: ast.AST, function: ast.FunctionDef | None) -> Iterator[tuple[ast.AST, ast.FunctionDef]]:
    """(node, innermost function that it stands in), of names and functions."""
    waiting = [(node, function)]
    while waiting:
        node, function = waiting.pop()
        for child in ast.iter_child_nodes(node):
            if function is not None and isinstance(child, ast.Name | ast.FunctionDef):
                yield child, function
            waiting.append((child, child if isinstance(child, ast.FunctionDef) else function))


def _parameters(function: ast.FunctionDef) -> list[str]:
    """Those that are given by position."""
    names = [parameter.arg for parameter in (*function.args.posonlyargs, *function.args.args)]
    return names[1:] if names[:1] in (["self"], ["cls"]) else names


def _arguments(function: ast.FunctionDef, call: ast.Call) -> Iterator[tuple[str, ast.expr]]:
    """(parameter, value) of a call."""
    for name, value in zip(_parameters(function), call.args, strict=False):
        if isinstance(value, ast.Starred):
            break
        yield name, value
    yield from ((item.arg, item.value) for item in call.keywords if item.arg)


def _defaults(function: ast.FunctionDef) -> Iterator[tuple[str, ast.expr]]:
    """(parameter, default), where that may be a text."""
    by_position, by_name = _parameters(function)[::-1], [parameter.arg for parameter in function.args.kwonlyargs]
    pairs = [
        *zip(by_position, function.args.defaults[::-1], strict=False),
        *zip(by_name, function.args.kw_defaults, strict=True),
    ]
    for name, default in pairs:
        if default is not None and not (isinstance(default, ast.Constant) and default.value is None):
            yield name, default


def _given(words: Sequence[str], spelled: dict[str, str]) -> dict[str, str]:
    """The values of flags, in any style. Args: spelled: the program's options → the names of their values."""
    given: dict[str, str] = {}
    for number, word in enumerate(words):
        name, equals, value = word.partition("=")
        key = spelled.get(name) or _key(name)
        if equals:
            given[key] = value
        elif (
            (word.startswith("--") or word in spelled)
            and number + 1 < len(words)
            and not words[number + 1].startswith("-")
        ):
            given[key] = words[number + 1]
    return given
