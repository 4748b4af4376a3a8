"""The names of a program and what they stand for, for `kgorch adopt`, as far as its source shows it.

Texts are followed through names, attributes, f-strings, os.path.join, pathlib and the parameters of the program's own functions and
methods, which are what a call gives, or else their defaults. What differs from save to save becomes `*`.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence

MAX_DEPTH = 12
"""Names that are followed one through another."""


class ProgramNames:
    """Values of the program's names, as far as they are texts.

    Attributes:
        options: of argparse and click: name → the call that adds it.
        nodes: name → the first value that it gets, wherever that is.
        given: the values of flags on the command line.
    """

    def __init__(self, tree: ast.Module, words: Sequence[str]) -> None:
        self.options: dict[str, ast.Call] = {}
        self.nodes: dict[str, ast.expr] = {}
        self.given, self._words = _given(words), words
        self._attributes: dict[str, ast.expr] = {}
        self._inside = dict(_enclosing(tree, None))
        self._values: dict[tuple[ast.FunctionDef | None, str], ast.expr] = {}  # by function and name
        self._parameters: dict[tuple[ast.FunctionDef | None, str], ast.expr] = {}
        self._own: set[ast.AST] = set()  # names that stand in what is assigned to them
        self._classes = {node.name: node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}
        methods = {item for node in self._classes.values() for item in node.body}
        functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
        self._functions = {node.name: node for node in functions if node not in methods}
        calls = []
        for node in ast.walk(tree):
            if isinstance(node, ast.Assign):
                for target in node.targets:
                    self._bind(target, node.value)
            elif isinstance(node, ast.Call):
                self._take_option(node)
                calls.append(node)
            elif isinstance(node, ast.Dict):  # of settings
                for key, value in zip(node.keys, node.values, strict=True):
                    if isinstance(key, ast.Constant) and isinstance(key.value, str):
                        self.nodes.setdefault(key.value, value)
        for call in calls:
            for function in self.functions_called(call):
                for name, value in _arguments(function, call):
                    self._parameters.setdefault((function, name), value)
        for function in functions:
            for name, default in _defaults(function):
                self._parameters.setdefault((function, name), default)

    def _bind(self, target: ast.expr, value: ast.expr) -> None:
        if isinstance(target, ast.Name):
            self.nodes.setdefault(target.id, value)
            self._values.setdefault((self._inside.get(target), target.id), value)
            self._own |= {node for node in ast.walk(value) if isinstance(node, ast.Name) and node.id == target.id}
        elif isinstance(target, ast.Attribute):
            self._attributes.setdefault(target.attr, value)
        elif isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
            for one, other in zip(target.elts, value.elts, strict=False):
                self._bind(one, other)

    def _take_option(self, call: ast.Call) -> None:
        if called_name(call) in ("add_argument", "option"):
            for option in call.args:
                if isinstance(option, ast.Constant) and isinstance(option.value, str) and option.value.startswith("--"):
                    self.options.setdefault(option.value[2:].replace("-", "_"), call)

    def functions_called(self, call: ast.Call) -> Iterator[ast.FunctionDef]:
        """The program's function that a call calls; of a class its __init__."""
        name, owners = "__init__", list[ast.ClassDef]()
        match call.func:
            case ast.Name(id=function) if function in self._functions:
                yield self._functions[function]
            case ast.Name(id=function) if function in self._classes:
                owners = [self._classes[function]]
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
        if node is None or depth == 0:
            return "*"
        match node:
            case ast.Constant(value=str(value)):
                return value
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
            case ast.Call(args=[_, *_] as arguments) if called_name(node) == "join":
                return "/".join(self.text(argument, depth - 1) for argument in arguments)
            case ast.Call(args=[argument, *_]) if called_name(node) in ("Path", "str", "abspath", "expanduser"):
                return self.text(argument, depth - 1)
        return "*"

    def _named(self, name: str, depth: int, node: ast.expr) -> str:
        if name in self.given:
            return self.given[name]
        if name in self.options:
            default = next((item.value for item in self.options[name].keywords if item.arg == "default"), None)
            return self.text(default, depth - 1)
        if isinstance(node, ast.Attribute):
            return self.text(self._attributes.get(name) or self.nodes.get(name), depth - 1)
        function = self._inside.get(node) if isinstance(node, ast.Name) else None
        while function is not None:
            scope, function = (function, name), self._inside.get(function)
            # in what is assigned to its own name (`path = join(folder, path)`) a name is the parameter as it was
            values = [self._values.get(scope) if node not in self._own else None, self._parameters.get(scope)]
            if texts := [self.text(value, depth - 1) for value in values if value is not None]:
                return next((text for text in texts if text != "*"), "*")
        return self.text(self.nodes.get(name), depth - 1)


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


def _given(words: Sequence[str]) -> dict[str, str]:
    """The values of flags, in any style."""
    given: dict[str, str] = {}
    for number, word in enumerate(words):
        name, equals, value = word.lstrip("-+").partition("=")
        key = name.replace("-", "_")
        if equals:
            given[key] = value
        elif word.startswith("--") and number + 1 < len(words) and not words[number + 1].startswith("-"):
            given[key] = words[number + 1]
    return given
