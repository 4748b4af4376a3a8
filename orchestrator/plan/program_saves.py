"""Where a training program saves, renames and points to its checkpoints, for `kgorch adopt`, as far as its source shows it."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass

from kgorch.plan.program_names import DIFFERS, UNKNOWN, ProgramNames, called_name

_SAVES = {"save": 1, "save_file": 1, "save_checkpoint": 0, "save_pretrained": 0, "savez": 0, "save_state": 0}
"""Function → position of the path among its arguments; `save` is torch's."""

_KERAS = "ModelCheckpoint"
"""Its callback, which saves again and again."""

_SAVES_IN_NAME = re.compile(f"save|^dump$|seriali[sz]e|^{_KERAS}$")
_PLACES = ("f", "output_dir", "filename", "filepath", "path", "checkpoint_id", "save_directory")
"""Names of the argument that is the path."""

_LOADS_IN_NAME = re.compile(r"(^|_)(load|restore|restart|resume)")
_WRITES = ("w", "wt", "w+")
"""Modes in which a file is written as text."""

_FILE_OF_WEIGHTS = re.compile(r"\.(pt|pth|ckpt|tar|bin|safetensors|npz|pkl|joblib|h5|hdf5|keras|eqx|msgpack)$")
_RENAMES = ("rename", "replace", "move")
_POINTER = re.compile(r"(^|/)[^/.]*latest[^/.]*(\.txt)?$", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class SaveCall:
    """A call that saves.

    Attributes:
        path: as the plan takes it; empty for one that is not known, or lies outside of the plan's folder.
        is_outside: it is known, and lies there.
        is_off: the flags keep it from being reached.
        is_repeated: it stands in a loop: weights that are saved once, at the end, are no checkpoint to continue from.
    """

    path: str
    is_outside: bool
    is_off: bool
    is_repeated: bool


def saves(tree: ast.Module, names: ProgramNames) -> Iterator[SaveCall]:
    """The calls that save. A function of the program itself is none: what saves in it is, unless it hands on `*args`."""
    often, tests = repeated(tree), dict(_tests(tree))
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Call)
            and _SAVES_IN_NAME.search(called_name(node))
            and all(function.args.vararg for function in names.functions_called(node))
        ):
            text = next((text for text in _places(node, names) if text), None)
            if text is None:
                continue
            is_off = any(not value for test in tests.get(node, ()) if (value := names.known(test)) is not UNKNOWN)
            path = clean_path(text)
            is_repeated = node in often or called_name(node) == _KERAS
            yield SaveCall(path, not path and text.startswith(("/", "..")), is_off, is_repeated)


def loads(tree: ast.Module, names: ProgramNames) -> set[str]:
    """The places of one name that it loads before it trains, as far as they are known.

    Neither in a loop nor behind one that saves. What it hands to a function of its own counts, too.
    """
    often, found, saving = repeated(tree), set[str](), _functions_that_save(tree)
    for scope in (tree, *(node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))):
        loops = [
            node for node in _own_nodes(scope) if isinstance(node, ast.For | ast.While) and _saves_in(node, saving)
        ]
        trains_from = min((loop.lineno for loop in loops), default=None)
        for call in _own_nodes(scope):
            if not isinstance(call, ast.Call) or call in often or not _LOADS_IN_NAME.search(called_name(call)):
                continue
            if trains_from is None or call.lineno < trains_from:
                words = (names.text(word) for word in (*call.args, *(item.value for item in call.keywords)))
                found |= {place for word in words if (place := clean_path(word)) and not DIFFERS.search(place)}
    return found


def _own_nodes(scope: ast.AST) -> Iterator[ast.AST]:
    """What stands in a module or function, and in none within it."""
    waiting = [*ast.iter_child_nodes(scope)]
    while waiting:
        node = waiting.pop()
        yield node
        if not isinstance(node, ast.FunctionDef):
            waiting += ast.iter_child_nodes(node)


def _functions_that_save(tree: ast.Module) -> set[str]:
    """Names of the program's functions that save, or call one that does."""
    calls = {node.name: set(_calls_in(node)) for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    found, waiting = set[str](), [name for name, called in calls.items() if any(map(_SAVES_IN_NAME.search, called))]
    callers: dict[str, list[str]] = {}
    for name, called in calls.items():
        for other in called & calls.keys():
            callers.setdefault(other, []).append(name)
    while waiting:
        if (name := waiting.pop()) not in found:
            found.add(name)
            waiting += callers.get(name, ())
    return found


def _calls_in(node: ast.AST) -> Iterator[str]:
    return (called_name(item) for item in ast.walk(node) if isinstance(item, ast.Call))


def _saves_in(loop: ast.AST, saving: set[str]) -> bool:
    """Whether a loop saves, itself or in functions of the program that it calls."""
    return any(name in saving or _SAVES_IN_NAME.search(name) for name in _calls_in(loop))


def _places(call: ast.Call, names: ProgramNames) -> Iterator[str]:
    """Where a call may save to: what it is given in the place that is known of its name, else what is named as weights are."""
    position, keywords = _SAVES.get(called_name(call)), {item.arg: item.value for item in call.keywords}
    if position is None:
        named = (re.sub(r"\{[^{}]*\}", "*", names.text(value)) for value in (*call.args, *keywords.values()))
        yield from (text for text in named if _FILE_OF_WEIGHTS.search(text))
    elif called_name(call) == "save_checkpoint" and (tag := keywords.get("tag") or next(iter(call.args[1:2]), None)):
        folder, name = names.text(next(iter(call.args), keywords.get("save_dir"))), names.text(tag)
        yield f"{folder}/{name}" if DIFFERS.search(name) and not _FILE_OF_WEIGHTS.search(folder) else folder
    elif len(call.args) > position:
        usual, first = names.text(call.args[position]), names.text(call.args[0])  # of Fabric's `save` it is the first
        yield usual if usual.strip("*") or not _FILE_OF_WEIGHTS.search(first) else first
    elif value := next((keywords[name] for name in _PLACES if name in keywords), None):
        yield names.text(value)
    elif call.args and _FILE_OF_WEIGHTS.search(first := names.text(call.args[0])):  # of a model's own `save`
        yield first


def _tests(tree: ast.AST) -> Iterator[tuple[ast.Call, list[ast.expr]]]:
    """Each call, and the tests that must hold for it to be reached, as far as `if` statements around it show."""
    waiting: list[tuple[ast.AST, list[ast.expr]]] = [(tree, [])]
    while waiting:
        node, tests = waiting.pop()
        if isinstance(node, ast.Call):
            yield node, tests
        if isinstance(node, ast.If):
            waiting += [(child, [*tests, node.test]) for child in node.body]
            waiting += [(child, [*tests, ast.UnaryOp(ast.Not(), node.test)]) for child in node.orelse]
            waiting.append((node.test, tests))
        else:
            waiting += [(child, tests) for child in ast.iter_child_nodes(node)]


def repeated(tree: ast.Module) -> set[ast.AST]:
    """What stands in the body of a loop, or in a function of the program that is called there."""
    functions = {node.name: node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    found: set[ast.AST] = set()
    loops = (node for node in ast.walk(tree) if isinstance(node, ast.For | ast.While))
    waiting: list[ast.AST] = [part for loop in loops for part in loop.body]
    while waiting:
        for node in ast.walk(waiting.pop()):
            if node not in found and isinstance(node, ast.Call):
                waiting += filter(None, [functions.pop(called_name(node), None)])  # each once
            found.add(node)
    return found


def renames(tree: ast.Module, names: ProgramNames) -> Iterator[tuple[str, str]]:
    """(old, new) of os.replace, shutil.move and the like, and of pathlib's methods. `replace` of a text has two arguments."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or called_name(node) not in _RENAMES:
            continue
        owner = node.func.value if isinstance(node.func, ast.Attribute) else None
        is_function = owner is None or (isinstance(owner, ast.Name) and owner.id in ("os", "shutil"))
        if is_function and len(node.args) == 2:
            yield clean_path(names.text(node.args[0])), clean_path(names.text(node.args[1]))
        elif owner is not None and len(node.args) == 1:
            old, new = clean_path(names.text(owner)), clean_path(names.text(node.args[0]))
            if old and new:
                yield old, new


def pointers(tree: ast.Module, names: ProgramNames) -> Iterator[tuple[str, str]]:
    """Files without a format that the program writes, and links that it makes, whose name has "latest" in it."""
    for node in ast.walk(tree):
        place, kind = None, "file"
        match node:
            case ast.Call(args=[path, ast.Constant(value=str(mode)), *_]) if (
                called_name(node) == "open" and mode in _WRITES
            ):
                place = path
            case ast.Call(func=ast.Attribute(value=owner, attr="write_text")):
                place = owner
            case ast.Call(func=ast.Attribute(value=ast.Name(id="os"), attr="symlink"), args=[_, path, *_]):
                place, kind = path, "link"
            case ast.Call(func=ast.Attribute(value=owner, attr="symlink_to")):
                place, kind = owner, "link"
        path_text = clean_path(names.text(place)) if place is not None else ""
        if _POINTER.search(path_text) and "*" not in path_text:
            yield kind, path_text


def clean_path(path: str) -> str:
    """A place as the plan takes it; empty for one outside of the plan's folder."""
    path = re.sub(r"/+", "/", re.sub(r"\*+", "*", path)).removeprefix("./")
    path = path if path == "/" else path.removesuffix("/")
    return "" if path.startswith(("/", "../")) or "/../" in path or path in ("", "*", ".") else path
